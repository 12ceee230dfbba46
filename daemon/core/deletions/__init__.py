"""Deletions of ledgers and offloaded objects of other systems, in two phases (PIP-186).

First the intent is recorded, durably: only what was recorded may leave its owner's metadata. Then an attempt verifies
and deletes, and is repeated when it fails. Every step is a decision in a slot; what it comes to follows from the state
and the decision alone, so that the order of the slots is the only order: replaying them gives the same deletions.

    state      decision                                    becomes
    (none)     RecordDeletes, unless an equal one is       WAITING, due at once
               pending, DEAD or HELD
    WAITING    BeginDeletes, its ledger is in use          HELD, without an attempt
               BeginDeletes                                BEGUN
    BEGUN      BeginDeletes: nobody is at it any more      BEGUN, another attempt; something may have been deleted
               AnswerDeletes: DELETED, ALREADY_GONE,       ended
               IN_USE, METADATA_MISMATCH, MALFORMED
               AnswerDeletes: FAILED                       WAITING until the time that it names, one more failure
               AnswerDeletes: GIVEN_UP                     DEAD: a dead letter
    DEAD       RetryDeletes                                WAITING, due at once, no failures, as if recorded then
               PurgeDeletes                                (none)
    HELD       ChangeInUse: its ledger is in use no more   WAITING, due at once
    ended                                                  kept for operators while it is among the last 1,000

A decision on a deletion that is in another state, or is not there, does nothing. HELD is shown as ended, IN_USE: an
owner records a ledger, drops it from its metadata, and only then says that it is in use no longer; an attempt in
between must not be the last one.

What is in use is ordered with the attempts by the same slots. From its slot on a ledger in use has no attempt; where
one has begun, or something may have been deleted, it is too late: the ledger is not recorded as in use, and its owner
is told. Something may have been deleted when an attempt that failed says so, and when one was never answered: who made
it may only have been stopped, and go on. So no ledger is in use and has an attempt at once, at whatever moment the
daemon ends.

    ledger_deletions    the whole
    life                the transitions of one deletion
    kept                deletions in memory; recorded_ledgers, waiting, counting, listing: finding them
    in_use              ledgers in use; sorted_keys: their form; by_ledger: deletions of ledgers that an owner names
    checking            what may be recorded; retrying: the answer of a failed attempt
    object_names        what offloaded objects are called; metadata: what theirs must say
    orphans             what a sweep makes of an object

Nothing here does I/O, and nothing on the event loop takes longer the more deletions there are.
"""
