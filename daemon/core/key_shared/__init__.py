"""Orders rows by key: positions of one key go to one consumer at a time, in order (Key_Shared, PIP-282, PIP-379).

The unit of order is the hash slot, the low 16 bits of a key's hash. Tables have 65,536 entries, one for each hash slot,
and a portion of rows is decided as columns against them. The states of a row:

    READY ---> goes: IN_FLIGHT at the consumer that has its hash slot
      |         ^
      |         | the hash slot is free, or there are permits
      '--> waits in memory: first redelivered rows, by position (back), then new rows, as they arrived (fresh)
      |
      '--> is evicted if too many wait, and found again by a reader of the backlog

A row overtakes no other row of its hash slot. So rows of a hash slot go in the order of arrival, except that
redelivered rows go first. Rules, each with its module:

    hash_selectors      which consumer has each hash slot: AUTO_SPLIT, CONSISTENT_HASHING, STICKY
    draining_hashes     a moved hash slot follows when no other consumer holds rows of it, and that is durable
    last_sent_position  or: a new consumer receives nothing after what was sent before, until that is acknowledged
    nack_blocks         a hash slot waits for its NACKED row, and rows held after that one are taken back
    key_planning        all of them together, for columns of rows
    key_share           the whole, and plans for messages that are not delayed and have no row
"""
