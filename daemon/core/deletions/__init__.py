"""Deletes ledgers and offloaded objects of other systems in two phases (PIP-186): pure state machines.

First the intent is recorded durably: only what was recorded may leave its owner's metadata. Then an attempt verifies
and deletes, and is repeated if it fails. Every step is a decision in a slot. Its result follows from the state and the
decision alone, so the order of the slots is the only order: replaying them gives the same deletions.

    state      decision                                    becomes
    (none)     RecordDeletes, unless an equal one is       WAITING, due at once
               pending, DEAD or HELD
    WAITING    BeginDeletes, its ledger is in use          HELD, without an attempt
               BeginDeletes                                BEGUN
    BEGUN      BeginDeletes: no worker is at it            BEGUN, another attempt; something may have been deleted
               AnswerDeletes: DELETED, ALREADY_GONE,       ended
               IN_USE, METADATA_MISMATCH, MALFORMED
               AnswerDeletes: FAILED                       WAITING until the time that it names, one more failure
               AnswerDeletes: GIVEN_UP                     DEAD: a dead letter
    DEAD       RetryDeletes                                WAITING, due at once, no failures, as if recorded then
               PurgeDeletes                                (none)
    HELD       ChangeInUse: its ledger no longer in use    WAITING, due at once
    ended                                                  kept for operators while it is among the last 1,000

A decision on a deletion that is in another state, or does not exist, does nothing. HELD is shown as ended, IN_USE. An
owner records a ledger, drops it from its metadata, and only then reports that it is no longer in use; an attempt in
between must not be the last one.

Changes of what is in use and attempts are ordered by the same slots. From its slot on a ledger in use has no attempt.
If one has begun, or something may have been deleted, the change is too late: the ledger is not recorded as in use, and
its owner is informed. Something may have been deleted if a failed attempt reports so, and if an attempt was never
answered: its worker may only have been stopped, and go on. So no ledger is ever in use and has an attempt at the same
time, whenever the daemon ends.

    ledger_deletions    the deletions of a shard: states, due order, counts, pages, retries
    kept_deletions      records in memory, found by id and by ledger
    ledgers_in_use      ledgers in use; sorted_keys: their form
    deletion_checks     what may be recorded
    ledger_metadata     names of offloaded objects, and the metadata that they must have
    orphans             what a sweep finds of an object

Nothing here does I/O, and nothing on the event loop slows down as deletions grow in number.
"""
