"""Which rows may go, and to whom."""

from __future__ import annotations

import dataclasses

import numpy as np

from daemon.core.index.position_keys import KeyedRows, PositionOrder
from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_selectors import Joiner, selector_of
from daemon.core.key_shared.hash_slots import HASH_SLOTS
from daemon.core.key_shared.key_planning import Planning, before_refused, share_out
from daemon.core.key_shared.last_sent_position import LastSentPosition
from daemon.core.key_shared.nack_blocks import NackBlocks
from storage_backends.formats.manifest import HashSelector
from tests.daemon.core.key_shared._support.keyed import Keyed, u16

# The slots of consumer 1 and those of consumer 2, as AUTO_SPLIT divides.
LOW, HIGH = 5, HASH_SLOTS - 5


def flags(*values: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array(values, np.bool_)


class Planner:
    def __init__(self) -> None:
        self.keyed = Keyed()
        selector = selector_of(HashSelector.AUTO_SPLIT, 1)
        selector.join([Joiner(1, "one"), Joiner(2, "two")])
        assert selector.owners[LOW] != selector.owners[HIGH]
        self.low, self.high = int(selector.owners[LOW]), int(selector.owners[HIGH])
        self.planning = Planning(selector, None, None, None, PositionOrder(self.keyed.places))
        self.permits = np.array([0, 100, 100], np.int64)
        self.refused: np.ndarray[tuple[int], np.dtype[np.bool_]] | None = None

    def choose(self, rows: KeyedRows, *, room: int = 1_000) -> list[int]:
        slots = rows.key_hash().astype(np.uint16)
        places = np.arange(len(rows))
        chosen: list[int] = self.planning.choose(rows, places, slots, self.permits, room, self.refused).tolist()
        return chosen


def test_each_consumer_receives_the_first_rows_up_to_its_permits_and_all_together_up_to_the_limit() -> None:
    consumers = u16(1, 2, 1, 1, 2, 1)
    everybody = np.ones(6, np.bool_)
    permits = np.array([0, 2, 9], np.int64)
    assert share_out(consumers, everybody, permits, 100).tolist() == [1, 2, 1, 0, 2, 0]
    assert share_out(consumers, everybody, permits, 3).tolist() == [1, 2, 1, 0, 0, 0]
    assert share_out(consumers, flags(0, 1, 1, 0, 0, 1), permits, 100).tolist() == [0, 2, 1, 0, 0, 1]
    assert share_out(consumers, everybody, np.array([0, 0, 1], np.int64), 100).tolist() == [0, 2, 0, 0, 0, 0]


def test_rows_behind_a_refused_one_of_their_slot_and_it_itself_are_left_out() -> None:
    slots = u16(7, 8, 7, 9, 8, 7)
    assert before_refused(slots, flags(0, 0, 1, 0, 0, 0)).tolist() == [True, True, False, True, True, False]
    assert before_refused(slots, flags(0, 1, 0, 0, 0, 1)).tolist() == [True, False, True, True, False, False]
    assert before_refused(slots, flags(0, 0, 0, 0, 0, 0)).all()


def test_the_owner_of_the_slot_receives_and_nobody_where_it_has_no_permits_or_there_is_none() -> None:
    planner = Planner()
    rows = planner.keyed.of_slots(0, LOW, HIGH, LOW)
    assert planner.choose(rows) == [planner.low, planner.high, planner.low]
    assert planner.choose(rows, room=2) == [planner.low, planner.high, 0]
    assert planner.choose(rows, room=0) == [0, 0, 0]
    planner.permits[planner.low] = 0
    assert planner.choose(rows) == [0, planner.high, 0]
    planner.planning.selector.leave([1, 2])
    assert planner.choose(rows) == [0, 0, 0]


def test_a_hash_that_another_consumer_holds_waits_and_the_attempt_is_counted() -> None:
    planner = Planner()
    draining = DrainingHashes()
    draining.received(u16(LOW, HIGH), u16(planner.high, planner.high))
    planner.planning = dataclasses.replace(planner.planning, draining=draining)
    assert planner.choose(planner.keyed.of_slots(0, LOW, HIGH, LOW)) == [0, planner.high, 0]
    assert draining.attempts(u16(LOW, HIGH)).tolist() == [2, 0]
    draining.settled(u16(LOW), planner.high)
    assert draining.has_unblocked
    assert planner.choose(planner.keyed.of_slots(0, LOW)) == [planner.low]


def test_a_hash_that_waits_for_a_nacked_row_is_no_attempt_at_what_drains() -> None:
    planner = Planner()
    draining, blocks = DrainingHashes(), NackBlocks(1_000)
    draining.received(u16(LOW), u16(planner.high))
    nacked = planner.keyed.of_slots(50, LOW)
    blocks.nacked(nacked.keys, u16(LOW), elapsed_ms=0)
    planner.planning = dataclasses.replace(planner.planning, draining=draining, blocks=blocks)
    assert planner.choose(planner.keyed.of_slots(0, LOW, HIGH)) == [0, planner.high]
    assert not draining.attempts_total


def behind_joined(planner: Planner) -> None:
    """Consumer `low` joined when (1:10) was the last sent position, which is not acknowledged."""
    last_sent = LastSentPosition()
    ten = np.array([1], np.uint64), np.array([10], np.uint64)
    last_sent.offer(*ten)
    last_sent.sent(*ten)
    last_sent.joined(planner.low)
    planner.planning = dataclasses.replace(planner.planning, joined_behind=last_sent)


def test_who_joined_recently_receives_what_is_before_its_joined_position_unless_another_of_the_slot_must_wait() -> None:
    planner = Planner()
    behind_joined(planner)
    rows = planner.keyed.rows([((1, 9), LOW), ((1, 11), LOW), ((1, 8), LOW), ((1, 12), HIGH), ((1, 7), LOW + 1)])
    assert planner.choose(rows) == [planner.low, 0, 0, planner.high, planner.low]


def test_a_slot_that_was_refused_in_an_earlier_part_is_refused_in_the_next_one() -> None:
    planner = Planner()
    behind_joined(planner)
    planner.refused = np.zeros(HASH_SLOTS, np.bool_)
    assert planner.choose(planner.keyed.rows([((1, 11), LOW)])) == [0]
    assert np.flatnonzero(planner.refused).tolist() == [LOW]
    assert planner.choose(planner.keyed.rows([((1, 9), LOW), ((1, 8), LOW + 1)])) == [0, planner.low]
