"""The whole daemon under simulation: several of them on one store, in one process, in virtual time, by a seed.

    make simulate SEEDS=1000                       that many seeds from 0 on, on both cores
    python -m tests.simulation --seeds 50 --first 7000 --jobs 1
    python -m tests.simulation --seed 1234          one seed, with its whole story

A seed decides everything: the settings, how long every step takes and so the order of all steps, what clients ask, what
goes wrong and when. The same seed is the same run, to the last byte; `test_simulation.py` runs some seeds twice, and
some in processes whose hashes differ. A run that breaks a rule prints its seed, the rule and the end of its story.

    scheduler.py   the order of everybody's steps         oracle.py     what is true, by what has landed
    faults.py      what goes wrong                        promises.py   answers and hand-outs against the truth
    cluster.py     daemons that end and come back         objects.py    merges and deletions against the truth
    workload.py    the clients                            quiet.py      a daemon's memory against the truth
    mergers.py     who merges beside the daemons          run.py        the course of one run
    columns.py     rows in calls and in the truth         positions.py  positions of every index in the truth
    leasing.py     the clients that lease                 nacking.py    those that negatively acknowledge
    history.py     the record of a run                    log_truth.py  logs, claims and deletions of slots
    refusals.py    what refused requests have changed

    test_failure_table.py   one case for each row of that table

    redelivery_truth.py, redelivery_promises.py, quiet_redelivery.py   the same three of redeliveries and dead letters
    owning.py, offloaded.py, deletion_truth.py, quiet_deletions.py     owners of ledgers, the ledgers, what is recorded

What is checked: nothing is early by the clock of the daemon that hands out; what was answered OK has landed, and is
there after every crash until somebody asked to remove it; what was answered Done is never handed out again, nor what
was answered to be cancelled; nothing is seen of what a refused request has staged or committed; a row that is
rescheduled has one time; no position has two rows; nothing is removed but
by who asked; a merge keeps every row, whoever makes it, and nothing is deleted that may be needed; epochs only grow,
the slots of a shard have no gap, no log goes on behind its end, and each claim begins where the sections before it end;
what was negatively acknowledged comes back, not before its time and with its count, counted
once for each time that somebody asked; a dead letter leaves by a replay or a purge that somebody asked for; counts are
right when nothing is under way; no ledger is deleted without a durable begin, nor one that is in use or is not what its
record says, and what was recorded is gone in the end; when nothing fails any more somebody serves, and everything
comes. `tests/planted` shows that each of these finds the bugs it is there for.
"""
