"""Which consumer has each hash slot, kept in step with how many slots each has.

Owns: the column of owners, who is there, and the counts: every change of all three is here.
Does not own: who should have which slot (`auto_split`, `consistent_hashing`, `sticky`), and what a consumer holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, HashRange, Slots, ranges_where
from daemon.errors import InvalidArgument, InvariantViolated

NOBODY = 0
ORDINAL_MAX = (1 << 16) - 1


@dataclasses.dataclass(frozen=True, slots=True)
class Joiner:
    """A consumer that joins: an instance, known by its ordinal, 1 to 65,535, as long as it is there.

    `hash_ranges`: the slots that it says it has; STICKY only.
    """

    ordinal: int
    name: str
    hash_ranges: tuple[HashRange, ...] = ()


class SlotOwners:
    """`owners`: u16[65536], the ordinal of each slot's consumer, 0 where there is none. It is changed in place: whoever
    needs it as it is now, after a change, copies it.
    """

    def __init__(self) -> None:
        self.owners: U16 = np.zeros(HASH_SLOTS, np.uint16)
        self._slots: dict[int, int] = {}

    def slots_of_consumer(self, ordinal: int) -> int:
        """How many slots a consumer has."""
        slots = self._slots.get(ordinal)
        if slots is None:
            raise InvariantViolated(f"consumer {ordinal} has not joined")
        return slots

    def ranges_of(self, ordinal: int) -> list[HashRange]:
        """The slots that a consumer has, ascending; no two ranges touch."""
        return ranges_where(self.owners, ordinal) if self.slots_of_consumer(ordinal) else []

    def check_new(self, joiners: Sequence[Joiner]) -> None:
        """InvariantViolated when one of them is there, or comes twice, or has an ordinal that there is not."""
        ordinals = {joiner.ordinal for joiner in joiners}
        if len(ordinals) < len(joiners) or ordinals & self._slots.keys():
            raise InvariantViolated(f"a consumer of {sorted(ordinals)} joins twice")
        if ordinals and not 0 < min(ordinals) <= max(ordinals) <= ORDINAL_MAX:
            raise InvariantViolated(f"ordinals {min(ordinals)} to {max(ordinals)} are not within 1 to {ORDINAL_MAX}")

    def admit(self, joiners: Sequence[Joiner]) -> None:
        """New consumers are there, without slots."""
        self.check_new(joiners)
        self._slots.update((joiner.ordinal, 0) for joiner in joiners)

    def check_joined(self, ordinals: Collection[int]) -> None:
        """InvariantViolated when one of them is not there, or is named twice."""
        if len(set(ordinals)) < len(ordinals) or not self._slots.keys() >= set(ordinals):
            raise InvariantViolated(f"of consumers {sorted(ordinals)} one has not joined, or leaves twice")

    def dismiss(self, ordinals: Collection[int]) -> None:
        """Consumers are there no longer; they have no slots any more."""
        for ordinal in ordinals:
            if left := self._slots.pop(ordinal):
                raise InvariantViolated(f"consumer {ordinal} leaves with {left} hash slots")

    def give(self, slots: Slots, owners: U16) -> None:
        """Each slot, named once, to a consumer that is there, whoever had it; or, 0, to nobody."""
        before = self.owners[slots]
        self.owners[slots] = owners
        for sign, changed in ((-1, before), (1, owners)):
            ordinals, counts = np.unique_counts(changed)
            for ordinal, count in zip(ordinals.tolist(), counts.tolist(), strict=True):
                if ordinal != NOBODY:
                    self._slots[ordinal] += sign * count


def refuse_ranges(joiners: Sequence[Joiner], selector: str) -> None:
    """InvalidArgument when one of them says which slots it has."""
    for joiner in joiners:
        if joiner.hash_ranges:
            raise InvalidArgument(
                f'hash_ranges of consumer "{joiner.name}" has {len(joiner.hash_ranges)} ranges; with {selector} it '
                "must be empty"
            )
