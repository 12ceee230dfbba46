"""The oracle of keys: what breaks a rule is told, and what a takeover allows is not."""

from __future__ import annotations

import pytest

from tests.wire._support.key_history import Consumer, KeyHistory, Row
from tests.wire._support.traffic import now_ms

ONE: Consumer = ("dispatcher", 1)
OTHER: Consumer = ("another", 1)
KEY = 7


@pytest.fixture
def rows() -> list[Row]:
    due_ms = now_ms() - 1_000
    return [Row((1, number), due_ms, KEY, number, is_to_be_nacked=False, in_time=True) for number in range(3)]


@pytest.fixture
def history(rows: list[Row]) -> KeyHistory:
    return KeyHistory(rows)


def receives(history: KeyHistory, consumer: Consumer, row: Row, *, epoch: int = 1, count: int = 0) -> None:
    assert history.came(epoch, consumer, row.position, row.deliver_at_ms, count) is row
    history.holds(epoch, consumer, row)


def test_rows_in_order_at_one_consumer_and_then_at_another_break_nothing(history: KeyHistory, rows: list[Row]) -> None:
    for row in rows[:2]:
        receives(history, ONE, row)
    for row in rows[:2]:
        history.acknowledging(ONE, row)
        row.acknowledgement_answered = True
    receives(history, OTHER, rows[2])
    history.acknowledging(OTHER, rows[2])
    assert history.breaches == []
    assert history.all_acknowledged


def test_two_consumers_hold_one_key(history: KeyHistory, rows: list[Row]) -> None:
    receives(history, ONE, rows[0])
    receives(history, OTHER, rows[1])
    assert len(history.breaches) == 1


def test_what_was_held_under_an_epoch_before_is_held_no_more(history: KeyHistory, rows: list[Row]) -> None:
    receives(history, ONE, rows[0])
    receives(history, OTHER, rows[0], epoch=2)
    assert history.came(1, ONE, rows[1].position, rows[1].deliver_at_ms, 0) is None
    assert history.breaches == []
    assert history.came_again == 1


def test_a_later_row_comes_first_unless_the_earlier_one_was_late(history: KeyHistory, rows: list[Row]) -> None:
    receives(history, ONE, rows[1])
    rows[0].in_time = False
    receives(history, ONE, rows[0])
    assert history.breaches == []
    receives(history, ONE, rows[2])
    rows[1].came = False
    receives(history, ONE, rows[1])
    assert len(history.breaches) == 1


def test_a_later_row_is_acknowledged_first(history: KeyHistory, rows: list[Row]) -> None:
    for row in rows:
        receives(history, ONE, row)
    history.acknowledging(ONE, rows[1])
    history.acknowledging(ONE, rows[0])
    assert len(history.breaches) == 1


def test_a_row_comes_after_its_acknowledgement_was_answered(history: KeyHistory, rows: list[Row]) -> None:
    receives(history, ONE, rows[0])
    history.acknowledging(ONE, rows[0])
    rows[0].acknowledgement_answered = True
    receives(history, ONE, rows[0])
    assert len(history.breaches) == 1


def test_a_row_that_was_added_once_more_may_come_once_more_after_its_acknowledgement(
    history: KeyHistory, rows: list[Row]
) -> None:
    rows[0].added_again = 1
    for _ in range(2):
        receives(history, ONE, rows[0])
        history.acknowledging(ONE, rows[0])
        rows[0].acknowledgement_answered = True
    assert history.breaches == []
    receives(history, ONE, rows[0])
    assert len(history.breaches) == 1


def test_a_nacked_row_comes_before_its_delay_is_over_or_without_a_count(history: KeyHistory, rows: list[Row]) -> None:
    receives(history, ONE, rows[0])
    history.nacking(ONE, rows[0], delay_ms=0)
    rows[0].nack_answered = True
    receives(history, ONE, rows[0], count=1)
    assert history.breaches == []
    receives(history, ONE, rows[0])
    assert len(history.breaches) == 1
    receives(history, ONE, rows[1])
    history.nacking(ONE, rows[1], delay_ms=1_000)
    receives(history, ONE, rows[1], count=1)
    assert len(history.breaches) == 2


def is_nacked_and_planned_again(history: KeyHistory, row: Row) -> None:
    row.deliver_at_ms = 0
    receives(history, ONE, row)
    history.nacking(ONE, row, delay_ms=0)
    row.nack_answered = True
    receives(history, ONE, row, count=1)
    row.is_asked_for = True


def test_what_was_acknowledged_while_a_plan_of_it_was_on_its_way_is_planned_anew(
    history: KeyHistory, rows: list[Row]
) -> None:
    is_nacked_and_planned_again(history, rows[0])
    history.acknowledging(ONE, rows[0])
    rows[0].acknowledgement_answered = True
    receives(history, ONE, rows[0])
    history.lets_go(ONE, rows[0])
    receives(history, OTHER, rows[0])
    assert history.breaches == []


def test_what_is_not_acknowledged_comes_by_its_row_though_it_is_planned_again(
    history: KeyHistory, rows: list[Row]
) -> None:
    is_nacked_and_planned_again(history, rows[0])
    receives(history, ONE, rows[0])
    assert len(history.breaches) == 1


def test_a_row_comes_early_or_with_another_time(history: KeyHistory, rows: list[Row]) -> None:
    assert history.came(1, ONE, rows[0].position, rows[0].deliver_at_ms + 1, 0) is None
    rows[0].deliver_at_ms = now_ms() + 10_000
    receives(history, ONE, rows[0])
    assert len(history.breaches) == 2
