"""Key_Shared order: positions of one key to one consumer at a time, in order (PIP-282, PIP-379).

Owns: which of the consumers of a subscription receives which row, and what a row waits for.
Does not own: which rows are due, READY, IN_FLIGHT and NACKED (`daemon.core`), and streams (the engine).

The unit of order is the hash slot, the low 16 bits of a key's hash. What is known of slots is in tables of 65,536, and
a portion of rows is decided as columns against them. Where a row is:

    READY ---> goes: IN_FLIGHT at the consumer that has its slot
       |         ^
       |         | its slot is free, or there are permits
       '--> waits, in memory: what was delivered before first, by position (back), then what never was, as it came
       |    (fresh)
       '--> is let go, when too many wait: found again by a reader of the backlog

A row passes no other one of its slot, so the order of a slot is the order in which its rows came, but that what was
delivered before comes first. Rules, each with its module:

    selectors               which consumer has each slot: auto_split, consistent_hashing, sticky
    draining_hashes         a slot that moved follows when nobody else holds rows of it; hash_holds: and that is durable
    last_sent_position      or: who joined receives nothing behind what was sent before, until that is acknowledged
    nack_blocks, nack_order a slot waits for its NACKED row, and what is held behind that is taken back
    key_planning            all of them together, for columns of rows
    key_share               the whole, and plans for messages that are not delayed and have no row
"""
