"""Selectors: which consumer has each hash slot.

Owns: what all selectors have in common for their callers, and which one a policy asks for.
Does not own: how each divides the slots (`auto_split`, `consistent_hashing`, `sticky`), and when the positions of a
slot that moved may follow it (`draining_hashes`, `last_sent_position`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from daemon.core.key_shared.auto_split import AutoSplit
from daemon.core.key_shared.consistent_hashing import ConsistentHashing
from daemon.core.key_shared.hash_slots import U16, HashRange
from daemon.core.key_shared.slot_owners import Joiner
from daemon.core.key_shared.sticky import Sticky
from storage_backends.formats.manifest import HashSelector as HashSelectorKind

__all__ = ["HashSelector", "Joiner", "selector_of"]


class HashSelector(Protocol):
    """`owners`: u16[65536], the ordinal of the consumer that has each slot, 0 = none. It is changed in place.

    A refused change, or one that is a bug, changes nothing.
    """

    owners: U16

    def slots_of_consumer(self, ordinal: int) -> int:
        """How many slots a consumer has, which may be none; O(1). InvariantViolated when it has not joined."""

    def ranges_of(self, ordinal: int) -> list[HashRange]:
        """The slots of a consumer, ascending; no two ranges touch. InvariantViolated when it has not joined."""

    def join(self, joiners: Sequence[Joiner]) -> None:
        """All or none. InvalidArgument: ranges where the selector takes none, none where it needs some, and those that
        overlap. InvariantViolated: an ordinal that has joined.
        """

    def leave(self, ordinals: Collection[int]) -> None:
        """All or none. InvariantViolated: an ordinal that has not joined."""


def selector_of(kind: HashSelectorKind, points_per_consumer: int) -> HashSelector:
    """A new one, without consumers. `points_per_consumer`: of CONSISTENT_HASHING."""
    match kind:
        case HashSelectorKind.AUTO_SPLIT:
            return AutoSplit()
        case HashSelectorKind.CONSISTENT_HASHING:
            return ConsistentHashing(points_per_consumer)
        case HashSelectorKind.STICKY:
            return Sticky()
