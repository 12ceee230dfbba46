"""Rows for which there is no room are let go, and come again in their order."""

from __future__ import annotations

import numpy as np
import pytest

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.index.position_keys import KeyedRows
from daemon.core.key_shared.waiting_rows import EvictedSlots
from storage_backends.formats.manifest import KeySharedPolicy
from tests.daemon.core._support.journaled_topic import Position
from tests.daemon.core.key_shared._support.keyed import Keyed, entries, u16
from tests.daemon.core.key_shared.test_key_shared import BLOCK_KEY, SKIP, SharedTopic


def able(*slots: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(1 << 16, np.bool_)
    mask[list(slots)] = True
    return mask


def reader() -> BacklogReader:
    return BacklogReader((), (), at_head=False)


def test_a_slot_is_let_go_until_a_reader_that_seeks_it_is_at_the_end() -> None:
    keyed, let_go = Keyed(), EvictedSlots()
    let_go.add(keyed.of_slots(0, 5, 6))
    assert let_go.are_let_go(u16(5, 6, 7)).tolist() == [True, True, False]
    assert let_go.first_ms == 1_000
    let_go.seek(able(5, 7), reader())
    found = let_go.found(keyed.of_slots(0, 5, 6, 7, 5), KeyedRows.empty())
    assert entries(found) == [0, 3]
    let_go.end()
    assert let_go.are_let_go(u16(5, 6)).tolist() == [False, True]
    let_go.seek(able(6), reader())
    let_go.end()
    assert not let_go.slots.any()
    assert let_go.first_ms is None


def test_a_slot_of_which_the_reader_passed_a_ready_row_over_is_sought_again() -> None:
    keyed, let_go = Keyed(), EvictedSlots()
    let_go.add(keyed.of_slots(0, 5, 6))
    let_go.seek(able(5, 6), reader())
    let_go.found(KeyedRows.empty(), keyed.of_slots(9, 6))
    let_go.end()
    assert let_go.are_let_go(u16(5, 6)).tolist() == [False, True]


def test_a_slot_that_is_evicted_while_it_is_sought_stays_let_go() -> None:
    keyed, let_go = Keyed(), EvictedSlots()
    let_go.add(keyed.of_slots(0, 5))
    let_go.seek(able(5), reader())
    let_go.evict(keyed.of_slots(0, 5))
    assert not len(let_go.found(keyed.of_slots(1, 5), KeyedRows.empty()))
    let_go.end()
    assert let_go.are_let_go(u16(5)).all()


# ---- with few rows in memory


def handed_out_by_and_by(topic: SharedTopic, numbers: list[int], permits: int) -> list[Position]:
    """Everything that goes while each consumer gets so many permits in every turn, and acknowledges."""
    handed_out: list[Position] = []
    for _ in range(200):
        for number in numbers:
            topic.shared.grant(number, permits)
        sent = topic.hand_out_now(3)
        handed_out += [each.at for each in sent]
        topic.ack(sent)
        if not topic.state.backlog and not len(topic.shared.planned):
            break
    return handed_out


def nobody_has_permits() -> tuple[SharedTopic, int, list[Position]]:
    """(topic, a key of its first consumer, rows of that key, of which some were let go). What comes now stays READY."""
    topic = SharedTopic(ready_rows_max=4)
    one, two = topic.numbers
    (key,), (other,) = topic.keys_of(one), topic.keys_of(two)
    topic.shared.grant(two, 1)
    rows = []
    for _ in range(4):
        rows += topic.due([key] * 3)
        topic.hand_out_now()
    assert topic.shared.let_go is not None
    topic.due([other])
    topic.ack(topic.hand_out_now())
    return topic, key, rows


def test_a_look_that_finds_nothing_since_an_earlier_row_is_not_passed_is_no_reason_for_another_one() -> None:
    topic, _, _ = nobody_has_permits()
    topic.shared.hand_out(100, elapsed_ms=0)
    assert topic.shared.let_go is not None
    assert not topic.shared.something_changed()
    topic.shared.found_let_go(KeyedRows.empty(), KeyedRows.empty(), are_all=False)
    assert not topic.shared.something_changed()
    topic.shared.found_let_go(KeyedRows.empty(), KeyedRows.empty(), are_all=True)
    assert topic.shared.something_changed()


@pytest.mark.parametrize("permits", [1, 2, 3, 7])
def test_rows_that_are_ready_while_what_was_let_go_is_sought_come_too_and_in_order(permits: int) -> None:
    topic, key, rows = nobody_has_permits()
    rows += topic.due([key] * 2)
    assert topic.state.ready_rows
    assert handed_out_by_and_by(topic, topic.numbers[:1], permits) == rows
    assert topic.shared.let_go is None


@pytest.mark.parametrize("permits", [1, 3, 100])
def test_what_comes_behind_ready_rows_does_not_pass_them_when_it_is_found_first(permits: int) -> None:
    topic, key, rows = nobody_has_permits()
    # READY is full, and what comes then must be read.
    for _ in range(3):
        rows += topic.due([key] * 3)
    assert topic.state.reader is not None
    assert topic.state.ready_rows
    assert handed_out_by_and_by(topic, topic.numbers[:1], permits) == rows


def test_who_has_permits_gets_everything_though_another_has_none_and_memory_is_full() -> None:
    topic = SharedTopic(ready_rows_max=4)
    one, two = topic.numbers
    stuck, others = topic.keys_of(one), topic.keys_of(two, 5)
    topic.shared.grant(two, 1)
    for _ in range(5):
        topic.due(stuck * 4)
        topic.hand_out_now()
    expected = []
    topic.shared.grant(two, 2)
    for _ in range(6):
        # Two has no permits in between.
        expected += topic.due(others)
        topic.ack(topic.hand_out_now())
    handed_out = handed_out_by_and_by(topic, [two], 4)
    assert len(handed_out) >= len(expected) - 5
    assert topic.state.backlog == 20
    assert len(handed_out_by_and_by(topic, [one], 4)) == 20
    assert not topic.state.backlog


@pytest.mark.parametrize("policy", [SKIP, BLOCK_KEY], ids=["skip", "block key"])
def test_what_was_let_go_survives_seals_and_comes_in_order(policy: KeySharedPolicy) -> None:
    topic = SharedTopic(policy=policy, ready_rows_max=4)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(two, 1)
    rows = []
    for _ in range(5):
        rows += topic.due([key] * 3)
        topic.hand_out_now()
        topic.seal()
    assert handed_out_by_and_by(topic, [one], 2) == rows


def test_planned_positions_are_not_let_go_and_come_behind_the_rows_that_came_before_them() -> None:
    topic = SharedTopic(ready_rows_max=4)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(two, 1)
    rows, planned, before = [], [], {}
    for number in range(6):
        rows += topic.due([key] * 3)
        topic.hand_out_now()
        planned.append((9, number))
        before[planned[-1]] = rows[-1]
        assert topic.plan(topic.stream, [(planned[-1], key)]) == [0]
    handed_out = handed_out_by_and_by(topic, [one], 2)
    assert [at for at in handed_out if at[0] == 1] == rows
    assert [at for at in handed_out if at[0] == 9] == planned
    assert all(handed_out.index(row) < handed_out.index(at) for at, row in before.items())


def test_what_was_let_go_can_be_trimmed_and_acknowledged() -> None:
    topic = SharedTopic(ready_rows_max=4)
    one, two = topic.numbers
    (key,) = topic.keys_of(one)
    topic.shared.grant(two, 1)
    rows = []
    for _ in range(5):
        rows += topic.due([key] * 3)
        topic.hand_out_now()
    assert not topic.acknowledge(topic.state, [(rows[-1], topic.now_ms)])
    topic.trim_at_once(LedgerRanges(np.array([1], np.uint64), np.array([rows[10][1]], np.uint64)))
    assert handed_out_by_and_by(topic, [one], 2) == rows[11:-1]
    assert not topic.state.backlog


def test_nothing_is_sought_while_there_is_no_room_in_flight() -> None:
    topic = SharedTopic(ready_rows_max=4, in_flight_rows_max=3)
    one, two = topic.numbers
    (key,), (other,) = topic.keys_of(one), topic.keys_of(two)
    topic.shared.grant(two, 100)
    for _ in range(4):
        topic.due([key] * 3)
        topic.hand_out_now()
    topic.due([other] * 4)
    held = topic.hand_out_now()
    assert len(held) == 3
    topic.shared.grant(one, 100)
    assert topic.shared.let_go is not None
    assert not topic.shared.reads_on
    topic.ack(held)
    assert topic.shared.reads_on
