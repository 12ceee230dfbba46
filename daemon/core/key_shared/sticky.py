"""STICKY: every consumer has the hash slots that it says (as Pulsar's HashRangeExclusive).

Owns: that no slot has two consumers. Does not own: the column of owners and the counts (`slot_owners`).

Slots that nobody has said are nobody's: positions there wait for a consumer.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from daemon.core.key_shared import hash_slots, slot_owners
from daemon.core.key_shared.hash_slots import HashRange
from daemon.core.key_shared.slot_owners import Joiner
from daemon.errors import InvalidArgument


class Sticky(slot_owners.SlotOwners):
    """Nothing moves: a consumer's slots are its own until it leaves, and nobody's then."""

    def __init__(self) -> None:
        super().__init__()
        self._members: dict[int, Joiner] = {}

    def join(self, joiners: Sequence[Joiner]) -> None:
        """All or none. InvalidArgument: ranges that are none or missing, or a slot that another consumer has, be it one
        that joins with it.
        """
        self.check_new(joiners)
        members = self._members | {joiner.ordinal: joiner for joiner in joiners}
        owners = self.owners.copy()
        for joiner in joiners:
            field = f'hash_ranges of consumer "{joiner.name}"'
            if not joiner.hash_ranges:
                raise InvalidArgument(f"{field} is empty; with STICKY it must have at least one range")
            hash_slots.check_ranges(field, joiner.hash_ranges)
            for each in joiner.hash_ranges:
                had = owners[each.first : each.last + 1]
                if had.any():
                    other = members[int(had[had != slot_owners.NOBODY][0])]
                    raise InvalidArgument(
                        f'{field}: {each} overlaps {_overlapping(other, each)} of consumer "{other.name}"; a slot has '
                        "one consumer"
                    )
                had[:] = joiner.ordinal
        self.admit(joiners)
        self._members = members
        slots = np.flatnonzero(owners != self.owners)
        self.give(slots, owners[slots])

    def leave(self, ordinals: Collection[int]) -> None:
        """All or none."""
        self.check_joined(ordinals)
        slots = np.flatnonzero(np.isin(self.owners, list(ordinals)))
        self.give(slots, np.full(len(slots), slot_owners.NOBODY, np.uint16))
        self.dismiss(ordinals)
        for ordinal in ordinals:
            del self._members[ordinal]


def _overlapping(other: Joiner, wanted: HashRange) -> HashRange:
    return next(each for each in other.hash_ranges if each.first <= wanted.last and each.last >= wanted.first)
