"""Negative acknowledgements of what has no row: positions of the log, and single messages of batches."""

from __future__ import annotations

import asyncio

import pytest

from storage_backends.formats.index_ids import BATCHED_ENTRY_ID_MAX
from tests._support.engine_fixture import EngineFixture
from tests._support.outcomes import Counts
from tests.daemon._support.calling import stats
from tests.daemon._support.nacking import (
    DEAD,
    MINUTE_MS,
    NACKED,
    SMALL,
    Claim,
    assert_back_after,
    constant,
    counts,
    dispatcher,
    entries,
    nack,
    with_rows,
)

# ---- positions that Tarry has not delivered


@pytest.mark.parametrize("settings", [(), SMALL])
async def test_any_position_of_the_log_may_be_nacked_and_is_kept_as_any_other(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    listener = await dispatcher(one, policy=constant(1_000, max_redeliver_count=2))
    log = [(7, entry, 0) for entry in range(50)]
    nacked_ms = machines.now_ms()
    assert await nack(one, log, 3_000, key_hash=range(100, 150)) == NACKED
    back = await listener.next(50)
    assert_back_after(back, nacked_ms, 3_000, late_ms=100)
    assert [row[:3] for row in back] == log
    assert (counts(back), [row.key_hash for row in back]) == ([1] * 50, [*range(100, 150)])
    assert await listener.acknowledge(back[:10]) == 0
    assert await listener.nack(back[10:]) == NACKED
    await asyncio.sleep(0.1)
    one.kill()
    two = await machines.served_by("one", *settings)
    again = await dispatcher(two, policy=None)
    rows = await again.next(40)
    assert (sorted(entries(rows)), counts(rows)) == ([*range(10, 50)], [2] * 40)
    assert await again.nack(rows[:1]) == DEAD
    assert await again.acknowledge(rows[1:]) == 0
    assert (await stats(two)).subscriptions[0].backlog == 0


async def test_what_no_row_is_found_for_is_not_decided_while_the_topic_is_being_changed(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    await dispatcher(one, policy=constant(1_000))
    topic = one.topic("t")
    settle_due = topic.settle_due

    async def changing() -> None:
        await settle_due()
        topic.gate._open.clear()

    monkeypatch.setattr(topic, "settle_due", changing)
    asked = nack(one, [(7, 1, 0)], 3_000)
    slot = one.shards[0].applied_slot
    await asyncio.sleep(5)
    assert (asked.done(), one.shards[0].applied_slot) == (False, slot)
    topic.gate._open.set()
    assert await asked == NACKED


async def test_a_position_that_the_subscription_is_owed_with_a_time_is_no_position_of_the_log(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 2)
    await one.add("t", 1, [77], delay_ms=MINUTE_MS)
    assert await nack(one, [(1, 77, 0), (1, 78, 0)], 1_000) == Counts(1, 0)
    back = await listener.next(1)
    assert [row[:3] for row in back] == [(1, 78, 0)]
    assert await listener.acknowledge([*rows, *back]) == 0
    assert entries(await listener.next(1)) == [77]


# ---- messages of batches


async def test_messages_of_one_batch_come_back_each_by_itself_beside_the_entry(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 3)
    (ledger, entry, due_ms), others = rows[1][:3], rows[2:]
    parts: list[Claim] = [(ledger, entry, due_ms, number) for number in (0, 5, 65_535)]
    nacked_ms = machines.now_ms()
    assert await listener.nack(parts, [3_000, 1_000, 2_000]) == NACKED
    assert (await stats(one)).subscriptions[0].in_flight == 3, "the entry is where it was"
    back = await listener.next(3)
    assert [(row[:3], row.part, row.redeliveries) for row in back] == [
        ((ledger, entry, due_ms), part, 1) for part in (5, 65_535, 0)
    ]
    for row, delay_ms in zip(back, (1_000, 2_000, 3_000), strict=True):
        assert_back_after([row], nacked_ms, delay_ms, late_ms=50)
    assert await listener.nack(back[:2], 1_000) == NACKED
    assert counts(await listener.next(2)) == [2, 2]
    assert await listener.acknowledge(back[:1]) == 0, "that message alone"
    assert await listener.acknowledge([*back[:1], (ledger, entry, due_ms, 9)]) == 2, "of another nothing is known"
    assert await listener.nack(back[1:], 5_000) == NACKED
    assert await listener.acknowledge(rows[1:2]) == 0, "the entry as a whole ends them all"
    await asyncio.sleep(10)
    assert listener.nothing_more()
    assert await listener.acknowledge([rows[0], *others]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_messages_of_batches_survive_a_crash_with_their_counts(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 5, *SMALL)
    await listener.nack(rows[:1], 100)
    (first,) = await listener.next(1)
    parts: list[Claim] = [(*row[:3], number) for row in (first, rows[1]) for number in range(3)]
    await listener.nack(parts, 5_000)
    await listener.acknowledge([(*rows[1][:3], 2)])
    await asyncio.sleep(1)
    one.kill()
    two = await machines.served_by("one", *SMALL)
    second = await dispatcher(two, policy=None)
    assert sorted(row[:4] for row in await second.next(5)) == [(*row[:3], None) for row in rows]
    back = await second.next(5)
    assert [(row.entry, row.part, row.redeliveries) for row in back] == [
        (0, 0, 2),
        (0, 1, 2),
        (0, 2, 2),
        (1, 0, 1),
        (1, 1, 1),
    ]


async def test_messages_of_a_batch_of_the_log_may_be_nacked(machines: EngineFixture) -> None:
    one = await machines.served_by()
    listener = await dispatcher(one)
    assert await nack(one, [(3, BATCHED_ENTRY_ID_MAX, 0, 1), (3, 4, 0, 0)], [2_000, 1_000]) == NACKED
    back = await listener.next(2)
    assert [row[:5] for row in back] == [(3, 4, 0, 0, 1), (3, BATCHED_ENTRY_ID_MAX, 0, 1, 1)]
    assert await listener.acknowledge([(3, 4, 0)]) in (0, 1)
    assert await listener.acknowledge(back[1:]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_a_stream_may_hold_messages_of_batches_when_it_opens(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 2)
    parts: list[Claim] = [(*rows[0][:3], number) for number in range(3)]
    await listener.nack(parts, 100)
    back = await listener.next(3)
    listener.stream.close()
    await listener.task
    second = await dispatcher(one, policy=None, held=[*back[:2], rows[1], (*rows[0][:3], 7)])
    assert second.stream.held == 3
    assert [row[:4] for row in await second.next(2)] == [(*rows[0][:3], None), (*rows[0][:3], 2)]
    await asyncio.sleep(5)
    assert second.nothing_more()
    assert await second.acknowledge(back[:2]) == 0
