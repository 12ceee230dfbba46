"""Planted bugs: each breaks one rule of the real code, and is found.

    python -m tests.planted           every planted bug: name, what it breaks, found by, after how many runs, which seed

`rules` breaks R1 to R9 of the storage protocol, `state` the invariants I1 to I5 of its models and every kind of durable
state, `buckets` what becomes of buckets, and of rows before they are due, `redeliveries` what comes back or is given
up; the simulation finds them, as it comes or directed at what is rare. Each bug names the seed of a run that meets it.
When what happens in that run has changed, others are tried; the seed that found it is then the one to name.

Other suites plant bugs of their own where they find them sooner; `table` lists those too. What a rule needs that does
not exist yet waits for its capability.
"""
