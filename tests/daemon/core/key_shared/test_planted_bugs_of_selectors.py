"""The tests of selectors can fail: each of these bugs, planted, is found."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import pytest

from daemon.core.key_shared import hash_selectors
from daemon.core.key_shared.hash_selectors import AutoSplit, ConsistentHashing, HashSelector, Joiner, Places, Sticky
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, HashRange, Slots
from daemon.errors import InvariantViolated
from storage_backends.formats.manifest import HashSelector as Kind
from tests.daemon.core.key_shared.test_selectors import Plant, few_slots, follow_any

# ---- counts and ranges


def who_loses_slots_still_counts_them(patch: pytest.MonkeyPatch) -> None:
    def give(self: HashSelector, slots: Slots, owners: U16) -> None:
        self.owners[slots] = owners
        for ordinal in np.unique(owners).tolist():
            self._slots[ordinal] = int((self.owners == ordinal).sum())

    patch.setattr(HashSelector, "give", give)


def ranges_reach_over_the_slots_of_others(patch: pytest.MonkeyPatch) -> None:
    def ranges_where(owners: U16, ordinal: int) -> list[HashRange]:
        slots = np.flatnonzero(owners == ordinal)
        return [HashRange(int(slots[0]), int(slots[-1]))]

    patch.setattr(hash_selectors, "ranges_where", ranges_where)


# ---- AUTO_SPLIT


def the_odd_slot_goes_to_who_joins(patch: pytest.MonkeyPatch) -> None:
    def split(self: AutoSplit, ordinal: int) -> None:
        sizes = self._sizes()
        largest = int(sizes.argmax()) if len(sizes) else -1
        first = int(self._firsts[largest] + sizes[largest] // 2) if len(sizes) else 0
        self._firsts = np.insert(self._firsts, largest + 1, first)
        self._ordinals = np.insert(self._ordinals, largest + 1, ordinal)

    patch.setattr(AutoSplit, "_split", split)


def a_range_goes_to_the_consumer_above(patch: pytest.MonkeyPatch) -> None:
    def leave(self: AutoSplit, ordinals: Collection[int]) -> None:
        stays = np.isin(self._ordinals, list(ordinals), invert=True)
        ends = np.append(self._firsts[1:], HASH_SLOTS)[stays]
        self.give(np.arange(HASH_SLOTS), np.zeros(HASH_SLOTS, np.uint16))
        self._ordinals = self._ordinals[stays]
        self._firsts = np.concatenate(([0], ends[:-1]))[: len(ends)]
        self._give_ranges(np.ones(len(ends), np.bool_), self._ordinals)
        self.dismiss(ordinals)

    patch.setattr(AutoSplit, "leave", leave)


# ---- CONSISTENT_HASHING


def the_ring_is_open(patch: pytest.MonkeyPatch) -> None:
    slots_before = ConsistentHashing._slots_before

    def without_the_first(self: ConsistentHashing, places: Places) -> tuple[Slots, Slots]:
        slots, lengths = slots_before(self, places)
        if places[0] == 0:
            beyond = HASH_SLOTS - 1 - int(self._points[-1] >> np.uint32(16))
            slots, lengths = slots[beyond:], lengths - beyond * (places == 0)
        return slots, lengths

    patch.setattr(ConsistentHashing, "_slots_before", without_the_first)


def a_number_is_never_used_again(patch: pytest.MonkeyPatch) -> None:
    leave = ConsistentHashing.leave

    def forget_nothing(self: ConsistentHashing, ordinals: Collection[int]) -> None:
        leave(self, ordinals)
        for instances in self._instances.values():
            instances.free.clear()

    patch.setattr(ConsistentHashing, "leave", forget_nothing)


# ---- STICKY


def who_joins_before_a_refused_one_is_there(patch: pytest.MonkeyPatch) -> None:
    join = Sticky.join

    def one_by_one(self: Sticky, joiners: Sequence[Joiner]) -> None:
        for joiner in joiners:
            join(self, [joiner])

    patch.setattr(Sticky, "join", one_by_one)


def who_comes_later_has_the_slots(patch: pytest.MonkeyPatch) -> None:
    def join(self: Sticky, joiners: Sequence[Joiner]) -> None:
        self.admit(joiners)
        for joiner in joiners:
            self._members[joiner.ordinal] = joiner
            for each in joiner.hash_ranges:
                slots = np.arange(each.first, each.last + 1)
                self.give(slots, np.full(len(slots), joiner.ordinal, np.uint16))

    patch.setattr(Sticky, "join", join)


# The bug, who finds it, and what makes it common.
PLANTED: tuple[tuple[Plant, Kind, Plant | None], ...] = (
    *((who_loses_slots_still_counts_them, kind, None) for kind in Kind),
    (ranges_reach_over_the_slots_of_others, Kind.CONSISTENT_HASHING, None),
    (the_odd_slot_goes_to_who_joins, Kind.AUTO_SPLIT, few_slots),
    (a_range_goes_to_the_consumer_above, Kind.AUTO_SPLIT, None),
    (the_ring_is_open, Kind.CONSISTENT_HASHING, None),
    (a_number_is_never_used_again, Kind.CONSISTENT_HASHING, None),
    (who_joins_before_a_refused_one_is_there, Kind.STICKY, None),
    (who_comes_later_has_the_slots, Kind.STICKY, None),
)


@pytest.mark.rotating
@pytest.mark.parametrize(
    ("plant", "kind", "setting"), PLANTED, ids=[f"{plant.__name__}-{kind.name}" for plant, kind, _ in PLANTED]
)
def test_a_planted_bug_is_found(
    plant: Plant, kind: Kind, setting: Plant | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    # What is refused, or is not, has a failure of its own.
    with pytest.raises((AssertionError, InvariantViolated, pytest.fail.Exception)):
        follow_any(kind, setting, is_planted=True)
