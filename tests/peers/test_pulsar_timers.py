"""Due rows and the timer, as `AbstractDeliveryTrackerTest` has them, on the daemon itself."""

from __future__ import annotations

import asyncio

import pytest

from daemon.topic.served_topic import ServedTopic
from tests._support.engine_fixture import Daemon, EngineFixture, no_positions
from tests.daemon._support.calling import acknowledge, clear, create, get, rows_of, stats
from tests.peers.tracking import NOTHING, add, counts

TICK_MS = 200


async def test_rows_added_in_any_order_are_due_in_order_at_their_times_until_none_is_left(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await create(one)
    base_ms = machines.now_ms()
    rows = [(5, 5, base_ms + 5_000), *((n, n, base_ms + n * 1_000) for n in (1, 3, 2, 4))]
    assert (await add(one, rows)).accepted == 5
    assert rows_of(await get(one)) == []
    assert (await stats(one)).pending == 5
    for due in ((1, 2), (3,), (), (4, 5)):
        until_ms = base_ms + 1_000 * max(due, default=3)
        await asyncio.sleep(max(0, until_ms - machines.now_ms()) / 1000)
        leased = rows_of(await get(one))
        assert leased == [(n, n, base_ms + n * 1_000) for n in due]
        if leased:
            assert await acknowledge(one, leased) == 0
    late = await add(one, [(6, 6, machines.now_ms())], return_already_due=True)
    assert (late.accepted, late.returned_index.tolist()) == (0, [0])
    assert counts(await stats(one)) == NOTHING


class Wakes:
    """When the timer woke a topic."""

    def __init__(self, machines: EngineFixture, topic: ServedTopic, monkeypatch: pytest.MonkeyPatch) -> None:
        self.at_ms: list[int] = []
        wake = topic.wake

        def noted(now_ms: int) -> int | None:
            self.at_ms.append(machines.now_ms())
            return wake(now_ms)

        monkeypatch.setattr(topic, "wake", noted)


async def test_a_topic_has_one_wake_up_that_only_an_earlier_row_moves_and_each_comes_once(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", "delivery.tick_ms=1")
    receiver = await one.receiver("t")
    topic = one.topic("t")
    base_ms = machines.now_ms()
    wakes = Wakes(machines, topic, monkeypatch)
    for entry, (delay_ms, wake_ms) in enumerate(((60_000, 60_000), (30_000, 30_000), (90_000, 30_000))):
        await add(one, [(1, entry, base_ms + delay_ms)])
        assert topic.wake_at_ms == base_ms + wake_ms
    await asyncio.sleep(100)
    assert wakes.at_ms == [base_ms + 30_000, base_ms + 60_000, base_ms + 90_000]
    assert [row[1] for row in receiver.rows] == [1, 0, 2]
    assert topic.wake_at_ms is None


async def test_a_wake_up_whose_rows_have_left_does_nothing(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await add(one, [(1, 1, machines.now_ms() + 30_000)])
    assert await clear(one) == 1
    wakes = Wakes(machines, one.topic("t"), monkeypatch)
    await asyncio.sleep(60)
    assert len(wakes.at_ms) <= 1
    assert not receiver.rows
    await add(one, [(1, 2, machines.now_ms() + 1_000)])
    await receiver.received(1)


async def messages_of_ticks(machines: EngineFixture, one: Daemon, offsets_ms: list[int]) -> list[tuple[int, list[int]]]:
    """(when, offsets) of each message, for rows that are due so long after a tick's beginning; all counted from it."""
    await create(one)
    stream = await one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    stream.grant(1_000)
    tick_ms = -(-(machines.now_ms() + 1) // TICK_MS) * TICK_MS
    await add(one, [(1, entry, tick_ms + offset_ms) for entry, offset_ms in enumerate(offsets_ms)])
    messages: list[tuple[int, list[int]]] = []
    received = 0
    while received < len(offsets_ms):
        async with asyncio.timeout(60):
            rows = (await one.call(stream.next_messages())).rows
        messages.append((machines.now_ms() - tick_ms, (rows.deliver_at_ms - tick_ms).tolist()))
        received += len(rows)
    return messages


async def test_rows_that_are_due_within_a_tick_are_handed_out_together_at_its_end_and_never_early(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", f"delivery.tick_ms={TICK_MS}")
    messages = await messages_of_ticks(machines, one, [1, 100, 199, 200, 201, 1_000, 1_001])
    assert messages == [
        (200, [1, 100, 199, 200]),
        (400, [201]),
        (1_000, [1_000]),
        (1_200, [1_001]),
    ]


@pytest.mark.parametrize("offset_ms", [99, 100, 101, 1_000, 2_500])
async def test_a_row_that_is_due_within_a_tick_from_now_is_stored_and_handed_out_at_its_time(
    machines: EngineFixture, offset_ms: int
) -> None:
    one = await machines.served_by("one", "delivery.tick_ms=100")
    await create(one)
    stream = await one.call(one.engine.requests.open_dispatch("t", "s", no_positions()))
    stream.grant(10)
    deliver_at_ms = machines.now_ms() + offset_ms
    outcome = await add(one, [(1, 1, deliver_at_ms)], return_already_due=True)
    assert (outcome.accepted, outcome.late_on_arrival) == (1, 0)
    rows = (await one.call(stream.next_messages())).rows
    assert rows.deliver_at_ms.tolist() == [deliver_at_ms]
    assert deliver_at_ms <= machines.now_ms() <= deliver_at_ms + 100


async def test_a_row_that_is_due_now_is_refused_on_request_and_one_that_is_due_in_a_millisecond_is_stored(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await create(one)
    now_ms = machines.now_ms()
    rows = [(1, entry, now_ms + offset_ms) for entry, offset_ms in enumerate((-1, 0, 1))]
    outcome = await add(one, rows, return_already_due=True)
    assert (outcome.returned_index.tolist(), outcome.accepted) == ([0, 1], 1)
