"""The oracle of these tests finds each breach, and what it must let pass."""

from __future__ import annotations

import pytest

from tests._support.delivery_history import DeliveryHistory

ROW = (1, 0)
DUE_MS = 100


@pytest.fixture
def history() -> DeliveryHistory:
    """One row, due at 100, answered."""
    made = DeliveryHistory()
    made.sending([ROW], [DUE_MS], exact=True)
    made.answered([ROW])
    return made


def receive(history: DeliveryHistory, *, stream: int = 1, epoch: int = 1, due: int = DUE_MS, at_ms: int = 200) -> None:
    history.received("topic", stream, epoch, [(*ROW, due)], at_ms=at_ms)


def test_an_answered_row_that_has_not_come_is_lost(history: DeliveryHistory) -> None:
    assert history.missing == 1
    assert history.breaches() == ["(1, 0) was answered OK and never came"]


def test_a_row_without_an_answer_may_come_or_not(history: DeliveryHistory) -> None:
    receive(history)
    history.sending([(1, 1), (1, 2)], [DUE_MS, DUE_MS], exact=True)
    history.received("topic", 1, 1, [(1, 1, DUE_MS)], at_ms=200)
    assert history.breaches() == []


def test_a_row_that_came_before_its_answer_is_not_missing() -> None:
    history = DeliveryHistory()
    history.sending([ROW], [DUE_MS], exact=True)
    receive(history)
    history.answered([ROW])
    assert history.missing == 0
    assert history.breaches() == []


def test_a_row_is_early_by_the_time_it_was_added_with(history: DeliveryHistory) -> None:
    receive(history, at_ms=99)
    assert len(history.breaches()) == 1


def test_another_due_time_is_a_breach_unless_the_daemon_counted_a_delay_from_later_on(history: DeliveryHistory) -> None:
    receive(history, due=101)
    assert len(history.breaches()) == 1
    history.sending([(2, 0)], [DUE_MS], exact=False)
    history.received("topic", 1, 1, [(2, 0, 101)], at_ms=200)
    assert len(history.breaches()) == 1


def test_a_row_that_nobody_sent_is_a_breach(history: DeliveryHistory) -> None:
    receive(history)
    history.received("topic", 1, 1, [(7, 7, DUE_MS)], at_ms=200)
    assert len(history.breaches()) == 1


def test_a_row_may_come_again_on_another_stream_but_not_on_the_same(history: DeliveryHistory) -> None:
    receive(history, stream=1)
    receive(history, stream=2)
    assert history.breaches() == []
    receive(history, stream=2)
    assert len(history.breaches()) == 1


def test_a_row_that_was_sent_again_may_come_on_the_stream_on_which_it_was_acknowledged(
    history: DeliveryHistory,
) -> None:
    receive(history)
    history.acknowledging([ROW])
    history.sending([ROW], [DUE_MS], exact=True)
    receive(history)
    assert history.breaches() == []
    history.acknowledging([ROW])
    receive(history)
    assert history.breaches() == ["(1, 0) came twice on one stream"], "it was sent twice, and not three times"


def test_a_row_that_was_sent_again_may_not_come_on_the_same_stream_while_nobody_acknowledges_it(
    history: DeliveryHistory,
) -> None:
    history.sending([ROW], [DUE_MS], exact=True)
    receive(history)
    receive(history)
    assert len(history.breaches()) == 1


def test_a_row_that_was_acknowledged_durably_comes_again_only_if_it_was_sent_again(history: DeliveryHistory) -> None:
    receive(history, stream=1)
    history.durable("topic", 1, [ROW])
    history.sending([ROW], [DUE_MS], exact=True)
    receive(history, stream=2)
    assert history.breaches() == []
    history.durable("topic", 1, [ROW])
    receive(history, stream=3)
    assert len(history.breaches()) == 1


def test_what_comes_under_an_epoch_that_is_over_is_dropped_and_counted(history: DeliveryHistory) -> None:
    receive(history, epoch=2)
    receive(history, epoch=1)
    history.durable("topic", 1, [ROW])
    receive(history, epoch=3, stream=2)
    assert history.stale == 1
    assert history.breaches() == []
