"""The last sent position: the worked examples of PIP-282 with its own numbers, the rules one by one, and any order of
events against plain lists.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from daemon.core.key_shared.last_sent_position import LastSentPosition, Position
from tests._support import state_machines
from tests.daemon.core.key_shared._support import last_sent_machine
from tests.daemon.core.key_shared._support.last_sent_machine import LastSentMachine, columns, u16

C1, C2, C3 = 1, 2, 3


def entries(ledger: int, *named: int) -> list[Position]:
    return [(ledger, entry) for entry in named]


def offered(*positions: Position, mark_deleted: Position | None = None) -> LastSentPosition:
    last_sent = LastSentPosition()
    if mark_deleted is not None:
        last_sent.mark_delete(*mark_deleted)
    last_sent.offer(*columns(positions))
    return last_sent


def send(last_sent: LastSentPosition, *positions: Position) -> None:
    last_sent.sent(*columns(positions))


def acknowledge(last_sent: LastSentPosition, *positions: Position) -> None:
    last_sent.acknowledged(*columns(positions))


def may(last_sent: LastSentPosition, consumer: int, *positions: Position) -> list[bool]:
    received = last_sent.may_receive(*columns(positions), u16(*[consumer] * len(positions)))
    return [bool(each) for each in received]


def mark_delete(last_sent: LastSentPosition, position: Position) -> list[Position]:
    ledger_id, entry_id = last_sent.mark_delete(*position)
    return list(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))


# ---- the examples of PIP-282


def test_the_last_sent_position_of_the_pip_goes_on_as_gaps_are_filled() -> None:
    last_sent = offered(mark_deleted=(3, 0))
    assert (last_sent.last_sent, last_sent.individually_sent()) == ((3, 0), [])
    last_sent.offer(*columns(entries(3, *range(1, 11))))
    send(last_sent, *entries(3, 1, 2, 3, 5, 8, 9, 10))
    assert last_sent.last_sent == (3, 3)
    assert last_sent.individually_sent() == [((3, 4), (3, 5)), ((3, 7), (3, 10))]
    send(last_sent, (3, 7))
    assert last_sent.last_sent == (3, 3)
    assert last_sent.individually_sent() == [((3, 4), (3, 5)), ((3, 6), (3, 10))]
    send(last_sent, (3, 6))
    assert last_sent.last_sent == (3, 3)
    assert last_sent.individually_sent() == [((3, 4), (3, 10))]
    send(last_sent, (3, 4))
    assert last_sent.last_sent == (3, 10)
    assert last_sent.individually_sent() == []


def test_issue_1_of_the_pip_a_consumer_joins_while_what_was_read_is_not_dispatched() -> None:
    """Key a: 1:6 to 1:8, first of c1 and then of c3; key b: 1:9 to 1:11 of c2."""
    last_sent = offered(*entries(1, *range(6, 12)), mark_deleted=(1, 5))
    for consumer in (C1, C2):
        last_sent.joined(consumer)
    send(last_sent, (1, 6), *entries(1, 9, 10, 11))
    assert last_sent.last_sent == (1, 6)
    assert last_sent.individually_sent() == [((1, 8), (1, 11))]
    last_sent.joined(C3)
    assert last_sent.after_mark_delete() == [(C3, (1, 6))]
    assert may(last_sent, C3, (1, 7), (1, 8)) == [False, False]
    assert may(last_sent, C2, (1, 7), (1, 8)) == [True, True]
    last_sent.left(C1)
    assert may(last_sent, C3, (1, 6), (1, 7), (1, 8)) == [True, False, False]
    send(last_sent, (1, 6))
    acknowledge(last_sent, (1, 6))
    assert last_sent.take_released() == [C3]
    assert may(last_sent, C3, (1, 7), (1, 8)) == [True, True]


def test_issue_2_of_the_pip_a_consumer_joins_while_a_position_waits_that_nobody_refused() -> None:
    """Key a: 2:1, sent to c1, and 2:2, for which c1 has no permit; then c3 has the key."""
    last_sent = offered((2, 1), mark_deleted=(2, 0))
    for consumer in (C1, C2):
        last_sent.joined(consumer)
    send(last_sent, (2, 1))
    last_sent.offer(*columns([(2, 2)]))
    assert last_sent.last_sent == (2, 1)
    last_sent.joined(C3)
    assert last_sent.after_mark_delete() == [(C3, (2, 1))]
    assert may(last_sent, C3, (2, 2)) == [False]
    last_sent.left(C1)
    assert may(last_sent, C3, (2, 1), (2, 2)) == [True, False]
    send(last_sent, (2, 1))
    acknowledge(last_sent, (2, 1))
    assert last_sent.mark_deleted == (2, 1)
    assert not last_sent.has_recent
    assert may(last_sent, C3, (2, 2)) == [True]


# ---- the last sent position


def test_nothing_was_sent_before_anything_was() -> None:
    last_sent = offered((1, 0))
    assert last_sent.last_sent is None
    assert last_sent.mark_deleted is None
    assert last_sent.individually_sent() == []


def test_contiguous_is_what_was_offered_one_after_the_other_whatever_ledgers_and_entries_are() -> None:
    last_sent = offered((9, 5), (9, 70_000), (3, 0), (3, 1 << 40), (7, 1))
    send(last_sent, (9, 70_000), (3, 1 << 40))
    assert last_sent.individually_sent() == [((9, 5), (9, 70_000)), ((3, 0), (3, 1 << 40))]
    send(last_sent, (9, 5))
    assert last_sent.last_sent == (9, 70_000)
    send(last_sent, (3, 0))
    assert last_sent.last_sent == (3, 1 << 40)
    send(last_sent, (7, 1))
    assert last_sent.last_sent == (7, 1)


def test_what_was_never_offered_moves_nothing() -> None:
    last_sent = offered(*entries(1, 5, 6))
    send(last_sent, (1, 5), *entries(1, 1, 2, 7), (8, 8))
    acknowledge(last_sent, *entries(1, 1, 2, 7), (8, 8))
    assert last_sent.last_sent == (1, 5)
    assert last_sent.mark_deleted is None


def test_what_is_offered_again_keeps_its_place() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, *entries(1, 1, 3))
    last_sent.offer(*columns(entries(1, 3, 2, 1, 4)))
    assert last_sent.last_sent == (1, 1)
    assert last_sent.individually_sent() == [((1, 2), (1, 3))]
    send(last_sent, (1, 2))
    assert last_sent.last_sent == (1, 3)


def test_what_is_acknowledged_and_offered_again_must_be_acknowledged_again() -> None:
    last_sent = offered(*entries(1, 1, 2))
    acknowledge(last_sent, (1, 2))
    last_sent.offer(*columns([(1, 2)]))
    acknowledge(last_sent, (1, 1))
    assert last_sent.mark_deleted == (1, 1)
    assert last_sent.last_sent == (1, 2)
    acknowledge(last_sent, (1, 2))
    assert last_sent.mark_deleted == (1, 2)


def test_what_is_acknowledged_before_it_was_sent_will_not_be() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    acknowledge(last_sent, (1, 2))
    send(last_sent, (1, 1))
    assert last_sent.last_sent == (1, 2)


def test_the_last_ranges_are_shown_where_there_are_more() -> None:
    last_sent = offered(*entries(1, *range(20)))
    send(last_sent, *entries(1, *range(1, 20, 2)))
    assert len(last_sent.individually_sent()) == 10
    assert last_sent.individually_sent(limit=2) == [((1, 16), (1, 17)), ((1, 18), (1, 19))]


# ---- mark-delete


def test_a_mark_delete_acknowledges_everything_up_to_it_and_tells_what_was_not() -> None:
    last_sent = offered(*entries(9, 1, 2), *entries(3, 1, 2, 3))
    send(last_sent, *entries(9, 1, 2))
    acknowledge(last_sent, (9, 2), (3, 2))
    assert mark_delete(last_sent, (3, 1)) == [(9, 1), (3, 1)]
    assert last_sent.mark_deleted == (3, 2)
    assert last_sent.last_sent == (3, 2)
    assert mark_delete(last_sent, (3, 1)) == []


def test_a_mark_delete_of_what_was_never_offered_counts_for_the_one_before_it_of_its_ledger() -> None:
    last_sent = offered(*entries(9, 1, 2), *entries(3, 1, 3, 7))
    assert mark_delete(last_sent, (3, 5)) == [*entries(9, 1, 2), *entries(3, 1, 3)]
    assert mark_delete(last_sent, (3, 5)) == []
    assert mark_delete(last_sent, (4, 5)) == []
    assert last_sent.mark_deleted == (3, 3)


def test_a_mark_delete_leaves_higher_entries_of_its_ledger() -> None:
    """A stream closed that had sent 1:7 alone; another one offers the log again."""
    last_sent = offered(*entries(1, 5, 6, 7))
    send(last_sent, (1, 7))
    last_sent.forget(*columns(entries(1, 5, 6)))
    last_sent.offer(*columns(entries(1, 5, 6, 7)))
    assert mark_delete(last_sent, (1, 6)) == entries(1, 5, 6)
    assert mark_delete(last_sent, (1, 7)) == [(1, 7)]


def test_what_is_mark_deleted_is_offered_anew_when_the_log_is_read_again() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    acknowledge(last_sent, *entries(1, 1, 2))
    last_sent.offer(*columns(entries(1, 1, 2)))
    assert last_sent.last_sent == (1, 2)
    send(last_sent, (1, 3), (1, 1))
    assert last_sent.last_sent == (1, 1)
    acknowledge(last_sent, (1, 3))
    assert last_sent.mark_deleted == (1, 3)


# ---- what is planned no longer


def test_what_is_forgotten_is_no_gap() -> None:
    last_sent = offered(*entries(1, 1, 2, 3, 4, 5))
    send(last_sent, *entries(1, 1, 4))
    last_sent.forget(*columns(entries(1, 2, 3, 5)))
    assert last_sent.last_sent == (1, 4)
    assert last_sent.individually_sent() == []
    acknowledge(last_sent, *entries(1, 1, 4))
    assert last_sent.mark_deleted == (1, 4)


def test_what_was_sent_is_not_forgotten() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, *entries(1, 1, 3))
    last_sent.forget(*columns(entries(1, 1, 3)))
    assert last_sent.last_sent == (1, 1)
    assert last_sent.individually_sent() == [((1, 2), (1, 3))]


def test_what_is_offered_after_it_was_forgotten_is_behind_who_joined_meanwhile() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, *entries(1, 1, 3))
    last_sent.forget(*columns([(1, 2)]))
    last_sent.joined(C3)
    assert last_sent.after_mark_delete() == [(C3, (1, 3))]
    last_sent.offer(*columns(entries(1, 1, 2, 3)))
    assert may(last_sent, C3, *entries(1, 1, 2, 3)) == [True, False, True]
    acknowledge(last_sent, *entries(1, 1, 3))
    assert may(last_sent, C3, (1, 2)) == [True]


# ---- consumers


def test_who_joins_behind_nothing_is_not_recent() -> None:
    last_sent = offered(*entries(1, 1, 2))
    last_sent.joined(C1)
    assert last_sent.joined_position(C1) is None
    assert may(last_sent, C1, *entries(1, 1, 2)) == [True, True]
    acknowledge(last_sent, (1, 1))
    last_sent.joined(C2)
    assert last_sent.joined_position(C2) == (1, 1)
    assert not last_sent.has_recent
    assert last_sent.take_released() == []


def test_who_joined_is_recent_until_everything_up_to_its_position_is_acknowledged() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, *entries(1, 1, 2))
    last_sent.joined(C1)
    send(last_sent, (1, 3))
    acknowledge(last_sent, *entries(1, 2, 3))
    assert last_sent.has_recent
    assert may(last_sent, C1, *entries(1, 1, 2, 4)) == [True, True, False]
    acknowledge(last_sent, (1, 1))
    assert not last_sent.has_recent
    assert last_sent.after_mark_delete() == []
    assert may(last_sent, C1, *entries(1, 3, 4)) == [True, True]


def test_a_mark_delete_releases_who_joined_up_to_it_in_the_order_of_positions() -> None:
    last_sent = offered(*entries(9, 1, 2), *entries(3, 1, 2))
    send(last_sent, (9, 1))
    last_sent.joined(C3)
    send(last_sent, *entries(9, 1, 2))
    last_sent.joined(C1)
    send(last_sent, *entries(3, 1, 2))
    last_sent.joined(C2)
    assert last_sent.after_mark_delete() == [(C3, (9, 1)), (C1, (9, 2)), (C2, (3, 2))]
    mark_delete(last_sent, (9, 2))
    assert last_sent.after_mark_delete() == [(C2, (3, 2))]
    assert last_sent.take_released() == [C3, C1]
    assert last_sent.take_released() == []
    assert [last_sent.joined_position(each) for each in (C1, C2, C3)] == [(9, 2), (3, 2), (9, 1)]


def test_one_that_left_is_not_released_and_its_number_begins_anew() -> None:
    last_sent = offered(*entries(1, 1, 2))
    send(last_sent, (1, 1))
    for consumer in (C1, C2):
        last_sent.joined(consumer)
    last_sent.left(C1)
    assert may(last_sent, C1, (1, 2)) == [True]
    assert last_sent.joined_position(C1) is None
    acknowledge(last_sent, (1, 1))
    last_sent.left(C2)
    assert last_sent.take_released() == []


def test_what_was_sent_behind_the_last_sent_position_is_behind_who_joins() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, *entries(1, 1, 3))
    last_sent.joined(C1)
    assert may(last_sent, C1, *entries(1, 1, 2, 3)) == [True, False, False]


def test_delayed_positions_are_compared_with_the_position_at_which_a_consumer_joined() -> None:
    last_sent = offered(*entries(3, 4, 5, 8))
    send(last_sent, *entries(3, 4, 5))
    last_sent.joined(C1)
    named = [(2, 99), (3, 0), (3, 4), (3, 6), (4, 0)]
    assert may(last_sent, C1, *named) == [True, True, True, False, False]
    assert may(last_sent, C2, *named) == [True] * 5
    assert may(last_sent, 65_535, *named) == [True] * 5


def test_delayed_positions_are_compared_with_the_highest_where_ledgers_come_down() -> None:
    """Or a delayed 5:0 that waits for c1 would wait for ever: c1 must acknowledge 9:1, which is handed out after it."""
    last_sent = offered((9, 1), (3, 1))
    send(last_sent, (9, 1), (3, 1))
    last_sent.joined(C1)
    assert last_sent.joined_position(C1) == (3, 1)
    assert may(last_sent, C1, (5, 0), (9, 1), (9, 2)) == [True, True, False]


def test_each_row_is_asked_for_its_own_consumer() -> None:
    last_sent = offered(*entries(1, 1, 2, 3))
    send(last_sent, (1, 1))
    last_sent.joined(C1)
    send(last_sent, (1, 2))
    last_sent.joined(C2)
    asked = columns([(1, 2), (1, 2), (1, 2), (1, 3), (1, 3)])
    assert last_sent.may_receive(*asked, u16(C1, C2, C3, C2, C3)).tolist() == [False, True, True, False, True]


# ---- cost


def test_memory_is_what_lies_above_the_mark_delete_position() -> None:
    """200,000 positions of 2,000 ledgers pass, 100 at a time."""
    last_sent = LastSentPosition()
    entry_id = np.arange(100, dtype=np.uint64)

    def pass_ledgers(first: int, last: int) -> None:
        for ledger in range(first, last):
            batch = np.full(100, ledger, np.uint64), entry_id
            last_sent.offer(*batch)
            last_sent.sent(*batch)
            last_sent.acknowledged(*batch)

    pass_ledgers(0, 50)
    tracemalloc.start()
    try:
        pass_ledgers(50, 2_050)
        grown_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert last_sent.mark_deleted == (2_049, 99)
    assert grown_bytes < 300_000


@pytest.mark.timeout(0)
def test_it_is_as_lists_say_whatever_happens() -> None:
    with last_sent_machine.small():
        state_machines.run(LastSentMachine, runs=150, steps=40)
