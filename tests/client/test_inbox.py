"""What came and was not taken yet: which batches are joined, against a list of events."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tarry
from tarry import columns, receiving

CONSUMERS = [tarry.Consumer(name) for name in "abc"]
NO_ROWS = np.zeros(0, np.uint64)
NOTHING = columns.Positions(NO_ROWS, NO_ROWS, NO_ROWS)

Row: TypeAlias = tuple[int, int]
"""Number of the batch, place in it."""


def batch(number: int, rows: int, consumer: int, epoch: int) -> tarry.ConsumerBatch:
    return tarry.ConsumerBatch(
        epoch=epoch,
        ledger_id=np.full(rows, number, np.uint64),
        entry_id=np.arange(rows, dtype=np.uint64),
        deliver_at_ms=np.zeros(rows, np.uint64),
        key_hash=None,
        received_at_ms=1_000 + number,
        number=number,
        redelivery_count=np.zeros(rows, np.uint32),
        consumer=CONSUMERS[consumer],
        consumer_id=consumer,
    )


def rows_of(event: tarry.ConsumerBatch) -> list[Row]:
    return list(zip(event.ledger_id.tolist(), event.entry_id.tolist(), strict=True))


def receiver_of(event: tarry.ConsumerBatch) -> int:
    return event.consumer_id


EVENTS = st.lists(
    st.one_of(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), st.sampled_from(["taken back", "plan"])),
    max_size=30,
)


def events_of(drawn: list[Any]) -> list[Any]:
    """Batches of (rows, consumer, whether another epoch begins), and other things between them."""
    epoch = 1
    events: list[Any] = []
    for number, each in enumerate(drawn):
        if each == "taken back":
            events.append(tarry.TakenBack(CONSUMERS[0], 0, NOTHING, epoch))
        elif each == "plan":
            events.append(tarry.PlanAgain(epoch))
        else:
            rows, consumer, begins_epoch = each
            epoch += begins_epoch
            events.append(batch(number, rows, consumer, epoch))
    return events


@given(drawn=EVENTS, max_rows=st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_each_receiver_has_its_rows_in_order_and_nothing_passes_what_is_no_batch(
    drawn: list[Any], max_rows: list[int]
) -> None:
    events = events_of(drawn)
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    for event in events:
        waiting.append(event)
    taken: list[Any] = []
    while waiting:
        most = max_rows[len(taken) % len(max_rows)]
        taken.append(waiting.take(most, receiver_of))
        assert not isinstance(taken[-1], tarry.ConsumerBatch) or 0 < len(taken[-1]) <= most
    assert waiting.is_enough(1)
    for consumer in range(3):
        assert story_of(taken, consumer) == story_of(events, consumer)


def story_of(events: list[Any], consumer: int) -> list[Any]:
    """What one consumer sees: its rows, each with its epoch, and what is no batch."""
    story: list[Any] = []
    for event in events:
        if not isinstance(event, tarry.ConsumerBatch):
            story.append(event)
        elif event.consumer_id == consumer:
            assert event.consumer is CONSUMERS[consumer]
            story += [(event.epoch, *row) for row in rows_of(event)]
    return story


def test_batches_of_one_receiver_are_joined_past_those_of_others() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    for number, consumer in enumerate([0, 1, 0, 1]):
        waiting.append(batch(number, 1, consumer, epoch=1))
    first, second = waiting.take(10, receiver_of), waiting.take(10, receiver_of)
    assert (rows_of(first), rows_of(second)) == ([(0, 0), (2, 0)], [(1, 0), (3, 0)])


def test_what_a_batch_has_above_the_limit_comes_next() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    waiting.append(batch(0, 2, 0, epoch=1))
    waiting.append(batch(1, 3, 1, epoch=1))
    waiting.append(batch(2, 3, 0, epoch=1))
    taken = [waiting.take(3, receiver_of) for _ in range(3)]
    assert [rows_of(each) for each in taken] == [
        [(0, 0), (0, 1), (2, 0)],
        [(1, 0), (1, 1), (1, 2)],
        [(2, 1), (2, 2)],
    ]


def test_it_is_enough_when_nothing_more_would_go_with_it() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    waiting.append(batch(0, 2, 0, epoch=1))
    assert not waiting.is_enough(3)
    assert waiting.is_enough(2)
    waiting.append(batch(1, 1, 0, epoch=2))
    assert waiting.is_enough(100), "another epoch has begun"
    waiting.take(100, receiver_of)
    assert not waiting.is_enough(100)
    waiting.append(tarry.PlanAgain(2))
    assert waiting.is_enough(100), "what is no batch is not kept waiting"


def test_the_first_waits_from_its_coming_on() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    assert waiting.waited_ms(5_000) == 0
    waiting.append(batch(0, 2, 0, epoch=1))
    assert waiting.waited_ms(1_030) == 30
    assert waiting.waited_ms(900) == 0, "the clock stepped back"


def test_what_leaves_is_not_counted_any_more() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    for number in range(3):
        waiting.append(batch(number, 2, 0, epoch=1))
    waiting.append(tarry.PlanAgain(1))
    waiting.keep(lambda event: event.take([0]) if isinstance(event, tarry.ConsumerBatch) else None)
    assert not waiting.is_enough(4)
    assert rows_of(waiting.take(10, receiver_of)) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(
    ("max_rows", "linger_ms", "message"),
    [(0, 0, "max_rows is 0; it must be at least 1"), (1, -1, "linger_ms is -1"), (1, 2**32, "linger_ms is 4294967296")],
)
def test_what_cannot_be_meant_is_refused(max_rows: int, linger_ms: int, message: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match=message):
        receiving.check(max_rows, linger_ms)


def test_a_joined_batch_of_one_is_the_one() -> None:
    waiting: receiving.Inbox[Any] = receiving.Inbox()
    one = batch(0, 2, 0, epoch=1)
    waiting.append(one)
    assert waiting.take(2, receiver_of) is one
    assert dataclasses.replace(one).origin is None
