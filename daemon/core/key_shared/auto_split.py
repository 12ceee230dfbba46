"""AUTO_SPLIT: every consumer has one range of hash slots, and all slots are in one (as Pulsar's HashRangeAutoSplit).

Owns: which range is split when a consumer joins, and who has a range when its consumer leaves.
Does not own: the column of owners and the counts (`slot_owners`).

Who joins has the upper half of the largest range, the lowest of several; of an odd number of slots the lower half keeps
one more. Who leaves gives its range to the nearest consumer below, or, where there is none, to the lowest one: joining
and leaving again changes nothing. Everybody always has a slot: there are fewer ordinals than slots, so that the largest
range has two while there is one to give away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from daemon.core.key_shared import slot_owners
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, Slots, slots_in
from daemon.core.key_shared.slot_owners import Joiner


class AutoSplit(slot_owners.SlotOwners):
    """Few consumers are touched by a change, one or two, and none has more than twice what another one has, until some
    leave. The cost of a change is that of a pass over the consumers.
    """

    def __init__(self) -> None:
        super().__init__()
        # Of each range, ascending, the first slot and the consumer.
        self._firsts = np.empty(0, np.intp)
        self._ordinals = np.empty(0, np.uint16)

    def join(self, joiners: Sequence[Joiner]) -> None:
        """All or none, one after the other. InvalidArgument when one says which slots it has."""
        slot_owners.refuse_ranges(joiners, "AUTO_SPLIT")
        self.admit(joiners)
        for joiner in joiners:
            self._split(joiner.ordinal)
        new = np.isin(self._ordinals, [joiner.ordinal for joiner in joiners])
        self._give_ranges(new, self._ordinals[new])

    def leave(self, ordinals: Collection[int]) -> None:
        """All or none; their order does not matter."""
        self.check_joined(ordinals)
        stays = np.isin(self._ordinals, list(ordinals), invert=True)
        staying = self._ordinals[stays]
        heirs = np.full(len(stays), slot_owners.NOBODY, np.uint16)
        if len(staying):
            heirs = staying[np.maximum(np.cumsum(stays) - 1, 0)]
        self._give_ranges(~stays, heirs[~stays])
        self._firsts, self._ordinals = self._firsts[stays], staying
        self._firsts[:1] = 0
        self.dismiss(ordinals)

    def _split(self, ordinal: int) -> None:
        place, first = 0, 0
        if len(self._firsts):
            sizes = self._sizes()
            largest = int(sizes.argmax())
            size = int(sizes[largest])
            place, first = largest + 1, int(self._firsts[largest]) + size - size // 2
        self._firsts = np.insert(self._firsts, place, first)
        self._ordinals = np.insert(self._ordinals, place, ordinal)

    def _sizes(self) -> Slots:
        return np.diff(self._firsts, append=HASH_SLOTS)

    def _give_ranges(self, which: npt.NDArray[np.bool_], owners: U16) -> None:
        sizes = self._sizes()[which]
        self.give(slots_in(self._firsts[which], sizes), np.repeat(owners, sizes))
