"""Rows that wait for their hash or for permits, and their order."""

from __future__ import annotations

import numpy as np

from daemon.core.backlog.in_flight import Places
from daemon.core.index.position_keys import KeyedRows, Mask, PositionOrder, bitmap_of
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16
from daemon.core.key_shared.waiting_rows import WaitingRows
from tests.daemon.core.key_shared._support.keyed import Keyed, entries


class Waiting(WaitingRows):
    def __init__(self) -> None:
        self.keyed = Keyed()
        super().__init__(PositionOrder(self.keyed.places))

    def given(self, *slots: int) -> list[int]:
        """The entries of these slots leave, to the consumer 7."""

        def choose(_rows: KeyedRows, _places: Places, here: U16) -> U16:
            return np.where(np.isin(here, slots), 7, 0).astype(np.uint16)

        rows, consumers = self.take(choose)
        assert set(consumers.tolist()) <= {7}
        return entries(rows)

    def check(self, *slots: int) -> None:
        """As many wait of each slot as it is named."""
        assert len(self) == len(slots)
        assert self.by_slot.sum() == len(slots)
        for slot in set(slots):
            assert self.by_slot[slot] == slots.count(slot)


def mask_of(*slots: int) -> Mask:
    mask = np.zeros(HASH_SLOTS, np.bool_)
    mask[list(slots)] = True
    return mask


def test_what_was_delivered_before_goes_first_by_position_and_the_rest_as_it_came() -> None:
    waiting = Waiting()
    waiting.add_fresh(waiting.keyed.of_slots(50, 1, 2))
    waiting.add_fresh(waiting.keyed.of_slots(40, 1))
    waiting.add_back(waiting.keyed.of_slots(30, 1))
    waiting.add_back(waiting.keyed.of_slots(20, 2, 1))
    waiting.check(1, 1, 1, 1, 2, 2)
    assert waiting.back_rows == 3
    assert waiting.given(1, 2) == [20, 21, 30, 50, 51, 40]
    waiting.check()


def test_rows_that_come_back_go_by_position_in_each_slot_however_they_come() -> None:
    waiting = Waiting()
    random = np.random.default_rng(1)
    entries_left = random.permutation(900)
    slot_of = random.integers(0, 40, 900)
    while len(entries_left):
        size = int(random.choice([1, 2, 5, 60]))
        now, entries_left = entries_left[:size].tolist(), entries_left[size:]
        waiting.add_back(waiting.keyed.rows([((1, entry), int(slot_of[entry])) for entry in now]))
        if random.random() < 0.2:
            waiting.remove(bitmap_of(waiting.keyed.rows([((1, now[0]), 0)]).keys))
            slot_of[now[0]] = -1
    assert waiting.back_rows == np.count_nonzero(slot_of >= 0)
    given = waiting.given(*range(40))
    for slot in range(40):
        assert [entry for entry in given if slot_of[entry] == slot] == np.flatnonzero(slot_of == slot).tolist()
    waiting.check()


def test_fresh_rows_keep_their_order_however_their_parts_are_joined() -> None:
    waiting = Waiting()
    came: list[int] = []
    for size in (1, 1, 2, 9, 1, 3, 1):
        first = 1_000 - 10 * len(came)
        waiting.add_fresh(waiting.keyed.of_slots(first, *[5] * size))
        came += range(first, first + size)
    assert waiting.given(5) == came


def test_what_is_not_chosen_stays_in_its_order() -> None:
    waiting = Waiting()
    waiting.add_fresh(waiting.keyed.of_slots(0, 1, 2, 1, 3, 2, 1, 3))
    assert waiting.given(2) == [1, 4]
    assert waiting.given(1) == [0, 2, 5]
    waiting.check(3, 3)
    waiting.add_fresh(waiting.keyed.of_slots(7, 3))
    assert waiting.given(3) == [3, 6, 7]


def test_the_last_rows_wait_until_what_they_come_behind_is_there() -> None:
    waiting = Waiting()
    waiting.add_last(waiting.keyed.of_slots(10, 1, 2))
    waiting.add_fresh(waiting.keyed.of_slots(0, 1))
    assert waiting.given(1, 2) == [0]
    waiting.check(1, 2)
    waiting.end_last(mask_of(2))
    assert waiting.given(1, 2) == [10]
    waiting.end_last(mask_of())
    assert waiting.given(1, 2) == [11]
    waiting.check()


def test_rows_of_every_class_are_removed_by_key_and_counted_out() -> None:
    waiting = Waiting()
    parts = [waiting.keyed.of_slots(first, 1, 2) for first in (0, 10, 20)]
    waiting.add_back(parts[0])
    waiting.add_fresh(parts[1])
    waiting.add_last(parts[2])
    named = bitmap_of(np.array([part.keys[1] for part in parts]))
    named.add(12345)
    assert sorted(entries(waiting.remove(named))) == [1, 11, 21]
    waiting.check(1, 1, 1)
    assert not len(waiting.remove(named))


def test_a_row_that_is_put_in_twice_counts_once() -> None:
    waiting = Waiting()
    rows = waiting.keyed.of_slots(0, 4, 4)
    waiting.add_fresh(rows)
    assert waiting.by_slot[4] == len(waiting) == 2


def test_rows_that_never_were_delivered_are_evicted_by_slot() -> None:
    waiting = Waiting()
    waiting.add_back(waiting.keyed.of_slots(0, 1))
    waiting.add_fresh(waiting.keyed.of_slots(10, 1, 2, 1))
    evicted = waiting.evict(mask_of(1), bitmap_of(np.empty(0, np.uint64)))
    assert entries(evicted) == [10, 12]
    waiting.check(1, 2)
    assert waiting.never_delivered_rows == 1
    assert waiting.given(1, 2) == [0, 11]


def test_what_must_stay_is_not_evicted_and_comes_behind_what_was() -> None:
    waiting = Waiting()
    rows = waiting.keyed.of_slots(10, 1, 1, 1, 2)
    waiting.add_fresh(rows.take(slice(0, 2)))
    waiting.add_fresh(rows.take(slice(2, 4)))
    # 10 and 12 stay: nothing that leaves is before 10.
    evicted = waiting.evict(mask_of(1), bitmap_of(rows.keys[[0, 2]]))
    assert entries(evicted) == [11]
    waiting.check(1, 1, 2)
    assert waiting.given(1) == [10]
    waiting.add_fresh(evicted)
    waiting.end_last(mask_of())
    assert waiting.given(1) == [11, 12]


def test_the_keys_for_which_something_holds_are_found_among_all_that_waits() -> None:
    waiting = Waiting()
    rows = waiting.keyed.of_slots(0, 1, 2, 1)
    waiting.add_back(rows.take(slice(0, 1)))
    waiting.add_fresh(rows.take(slice(1, 3)))
    found = waiting.where(bitmap_of(rows.keys[1:]), lambda _, slots: slots == 1)
    assert found == bitmap_of(rows.keys[2:])


def test_the_earliest_time_is_that_of_what_still_waits() -> None:
    waiting = Waiting()
    assert waiting.first_ms(0) is None
    waiting.add_fresh(waiting.keyed.rows([((1, 0), 1)], deliver_at_ms=500))
    waiting.add_fresh(waiting.keyed.rows([((1, 1), 2)], deliver_at_ms=700))
    assert waiting.first_ms(0) == 500
    waiting.given(1)
    assert waiting.first_ms(0) == 700


def test_how_many_wait_of_some_slots_that_were_delivered_before() -> None:
    waiting = Waiting()
    waiting.add_back(waiting.keyed.of_slots(0, 1, 2, 1))
    waiting.add_fresh(waiting.keyed.of_slots(10, 1))
    assert waiting.back_rows_of(mask_of(1)) == 2
    assert waiting.back_rows_of(mask_of(3)) == 0
