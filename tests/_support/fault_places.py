"""Where tests put their faults: by what they know the slots of logs among all keys, and among crash points.

Owns: these names. Does not own: the keys (`storage_backends.formats.names`), and the faults.

A name that no key has any more is a fault that never comes, and a test of nothing: who puts a fault at a place asserts
that a call has met it (`fault_store.Script.places_unmet`, `tests.simulation.fired`).
"""

from __future__ import annotations

from typing import Final

JOURNAL: Final = "logs/"
"""How the key of each slot of a log begins, OPEN, FENCE and CLOSE included, and no other key."""

JOURNAL_POINTS: Final = "log."
"""How the crash points around the PUT of a slot begin."""


def is_slot(key: str) -> bool:
    """Whether it is the key of a slot."""
    return key.startswith(JOURNAL)
