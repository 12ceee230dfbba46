"""Delay levels of topics: set, in force, kept; what the users of RocketMQ's levels meet, case by case."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest

from daemon.call_values import TopicLevels
from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.decisions.withdrawal_decisions import CancelOutcome
from daemon.core.index.delay_levels import DelayLevels
from daemon.errors import DelayTooLong, InvalidArgument, NotFound, QuotaExceeded
from storage_backends.formats.manifest import TopicDelayLevels, TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import cancel, clear, delete_topic, get, reschedule, rows_of, stats

SECOND, MINUTE, HOUR, DAY = 1_000, 60_000, 3_600_000, 86_400_000
DEFAULT = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"


def add(
    daemon: Daemon, level: int | Sequence[int], entries: Sequence[int] = (0,), *, subscription: str | None = None
) -> asyncio.Task[AddOutcome]:
    rows = len(entries)
    batch = AddBatch(
        ledger_id=np.full(rows, 7, np.uint64),
        entry_id=np.array(entries, np.uint64),
        deliver_at_ms=None,
        delay_ms=None,
        key_hash=None,
        return_already_due=False,
        delay_level=np.broadcast_to(np.array(level, np.int32), rows).copy(),
    )
    return daemon.call(daemon.engine.requests.add("t", batch, subscription))


def set_levels(daemon: Daemon, table: str | None, *, clamp: bool = True, topic: str = "t") -> asyncio.Task[DelayLevels]:
    given = None if table is None else TopicDelayLevels(table=table, clamp=clamp)
    return daemon.call(daemon.engine.requests.set_delay_levels(topic, given))


def levels(daemon: Daemon, topic: str = "t") -> asyncio.Task[TopicLevels]:
    return daemon.call(daemon.engine.requests.delay_levels(topic))


async def pending(daemon: Daemon) -> dict[int, int]:
    """The number of pending rows by level, without levels that have none."""
    return {level: rows for level, rows in enumerate((await levels(daemon)).pending, 1) if rows}


async def times(machines: EngineFixture, daemon: Daemon, count: int) -> dict[int, int]:
    """When rows came, by entry."""
    receiver = await daemon.receiver("t")
    rows = await receiver.received(count)
    assert not receiver.early
    return {entry: deliver_at_ms for _, entry, deliver_at_ms in rows}


# ---- tables


async def test_a_topic_without_a_table_has_the_daemons(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "redelivery.delay_levels=2s 3s", "redelivery.clamp_delay_level=false")
    await one.add("t", 7, [99])

    for found in (await levels(one, ""), await levels(one)):
        assert (found.levels.table, found.levels.delays_ms) == ("2s 3s", (2_000, 3_000))
        assert (found.levels.clamp, found.of_topic) == (False, False)
    assert (await levels(one, "")).pending == ()
    with pytest.raises(NotFound):
        await levels(one, "another")


async def test_a_table_counts_from_its_answer_on_and_bears_the_topic(machines: EngineFixture) -> None:
    one = await machines.served_by()
    assert (await set_levels(one, "3s\t4s", clamp=False)).delays_ms == (3_000, 4_000)

    found = await levels(one)
    assert (found.levels.table, found.levels.clamp, found.of_topic) == ("3s\t4s", False, True)
    began_ms = machines.now_ms()
    await add(one, 2)
    assert (await times(machines, one, 1))[0] - began_ms == 4_000
    assert (await set_levels(one, None)).table == DEFAULT
    assert not (await levels(one)).of_topic


async def test_a_table_and_the_levels_of_rows_survive_a_crash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_levels(one, "10s 1h", clamp=False)
    await add(one, [1, 2, 2, 1], range(4))
    one.kill()
    two = await machines.served_by("one")

    found = await levels(two)
    assert (found.levels.table, found.levels.clamp, found.of_topic) == ("10s 1h", False, True)
    assert await pending(two) == {1: 2, 2: 2}
    with pytest.raises(InvalidArgument, match="the highest level of the table is 2"):
        await add(two, 3, [9])
    await (await two.receiver("t")).received(2)
    assert await pending(two) == {2: 2}


async def test_a_table_and_the_levels_of_rows_survive_a_takeover_after_seals(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_levels(one, "10s 5m")
    await add(one, [1, 2, 2, 1, 2], range(5))
    await one.call(one.engine.requests.seal("t"))
    await add(one, [2, 1], [10, 11])
    await cancel(one, 7, [4])
    await one.call(one.engine.requests.seal("t"))
    await add(one, 1, [20])
    await one.stop()
    two = await machines.served_by("two")

    assert (await levels(two)).levels.table == "10s 5m"
    assert await pending(two) == {1: 4, 2: 3}
    receiver = await two.receiver("t")
    await receiver.received(4)
    assert await pending(two) == {2: 3}
    await receiver.acknowledge(receiver.rows)
    await receiver.received(7)
    assert await pending(two) == {}


async def test_the_levels_of_rows_survive_crashes_between_checkpoints_seals_and_merges(machines: EngineFixture) -> None:
    settings = ("journal.checkpoint_slots=3", "bucket.min_index_count_per_bucket=15", "bucket.rows_max=15")
    expected: dict[int, int] = {}
    daemon = await machines.served_by("one", *settings)
    for turn in range(6):
        for number in range(7):
            first = 1000 * turn + 10 * number
            await add(daemon, [11, 12, 13, 18, 0], range(first, first + 5))
        await cancel(daemon, 7, [1000 * turn + 2, 1000 * turn + 12])
        for level, rows in {11: 7, 12: 7, 13: 5, 18: 7}.items():
            expected[level] = expected.get(level, 0) + rows
        if turn == 3:
            assert (await daemon.call(daemon.engine.requests.merge("t", 1))).merges
        assert await pending(daemon) == expected
        daemon.kill()
        daemon = await machines.served_by("one", *settings)
        assert await pending(daemon) == expected


async def test_a_new_policy_keeps_the_table_and_a_new_table_the_policy(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await set_levels(one, "10s 1h")
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=HOUR)))
    assert (await levels(one)).levels.table == "10s 1h"
    await set_levels(one, "10s 20s")
    policies = await one.call(one.engine.requests.topic_policy("t"))
    assert policies.stored == TopicPolicy(delay_max_ms=HOUR)


async def test_a_table_beyond_the_topics_limit_is_refused_and_bears_no_topic(machines: EngineFixture) -> None:
    one = await machines.served_by("one", f"limits.delay_max_ms={2 * HOUR}")
    with pytest.raises(InvalidArgument, match="'3h' at character 4: the largest delay is 7200000 ms"):
        await set_levels(one, "1s 3h")
    with pytest.raises(NotFound):
        await levels(one)
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=3 * HOUR)))
    await set_levels(one, "1s 3h")


async def test_a_limit_that_is_set_after_the_table_refuses_rows_and_not_the_table(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_levels(one, "1s 3h")
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=HOUR)))
    with pytest.raises(DelayTooLong, match="delay_level"):
        await add(one, 2)
    one.kill()
    two = await machines.served_by("one")
    assert (await levels(two)).levels.table == "1s 3h"
    await add(two, 1)


async def test_a_topic_that_is_born_again_has_no_table(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await set_levels(one, "10s 1h")
    await add(one, 2)
    await delete_topic(one)
    await add(one, 2)
    found = await levels(one)
    assert (found.levels.table, found.of_topic) == (DEFAULT, False)
    assert await pending(one) == {2: 1}


# ---- what is pending


async def test_a_level_counts_rows_until_they_are_due_or_gone_and_a_rescheduled_row_has_none(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by()
    await set_levels(one, "10s 20s 30s")
    await add(one, [1, 1, 2, 2, 3, 3], range(6))
    assert await pending(one) == {1: 2, 2: 2, 3: 2}
    await cancel(one, 7, [0])
    await reschedule(one, 7, [2], 40_000)
    assert await pending(one) == {1: 1, 2: 1, 3: 2}
    await (await one.receiver("t")).received(2)
    assert await pending(one) == {3: 2}
    await set_levels(one, "10s")
    assert (await levels(one)).pending == (0, 0, 2), "as long as the table under which they came"
    await clear(one)
    assert (await levels(one)).pending == (0,)


async def test_the_lateness_of_a_level_is_that_of_the_first_hand_out(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await add(one, [1, 2], [1, 2])
    await add(one, 1, [3], subscription=None)
    await one.add("t", 7, [4], delay_ms=1_000)
    receiver = await one.receiver("t")
    await receiver.received(4)
    await one.call(one.engine.requests.create_subscription("t", "another"))

    def observed(level: int) -> float | None:
        labels = {"topic": "t", "level": str(level)}
        return one.metrics.registry.get_sample_value("tarry_level_lateness_seconds_count", labels)

    assert (observed(1), observed(2), observed(3)) == (2, 1, None)
    receiver.stream.close()
    again = await one.receiver("t")
    await again.received(4)
    assert (observed(1), observed(2)) == (2, 1), "the same rows again"


async def test_rows_of_a_level_need_no_sort(machines: EngineFixture) -> None:
    one = await machines.served_by()
    for first in range(0, 200, 10):
        for level in (3, 1, 2):
            await add(one, level, range(1000 * level + first, 1000 * level + first + 10))
    sample = one.metrics.registry.get_sample_value
    assert sample("tarry_add_in_due_order_rows_total", {"topic": "t"}) == 600
    assert sample("tarry_add_sorted_rows_total", {"topic": "t"}) is None
    assert len(await times(machines, one, 600)) == 600


# ---- the cases of those who know levels from RocketMQ, with what it does


Story = Callable[[EngineFixture, Daemon], Awaitable[None]]


def due_after(level: int, delay_ms: int, table: str | None = None) -> Story:
    async def story(machines: EngineFixture, one: Daemon) -> None:
        if table is not None:
            await set_levels(one, table)
        began_ms = one.now_ms()
        await add(one, level)
        receiver = await one.receiver("t")
        # Nobody waits for a day.
        one.step_clock(max(0, delay_ms - 10_000))
        ((_, _, due_ms),) = await receiver.received(1)
        assert due_ms - began_ms == delay_ms
        assert one.now_ms() >= due_ms

    return story


def refused(level: int, says: str, *, clamp: bool) -> Story:
    async def story(machines: EngineFixture, one: Daemon) -> None:
        await set_levels(one, DEFAULT, clamp=clamp)
        with pytest.raises(InvalidArgument, match=says):
            await add(one, [1, level], [1, 2])
        assert (await stats(one)).pending == 0

    return story


def table_refused(table: str, says: str) -> Story:
    async def story(machines: EngineFixture, one: Daemon) -> None:
        await set_levels(one, "1s 7s")
        with pytest.raises(InvalidArgument, match=says):
            await set_levels(one, table)
        assert (await levels(one)).levels.table == "1s 7s", "the old table stays in force"
        await due_after(2, 7_000)(machines, one)

    return story


async def a_descending_table(machines: EngineFixture, one: Daemon) -> None:
    await set_levels(one, "5s 1s")
    began_ms = machines.now_ms()
    await add(one, [1, 2], [1, 2])
    due = await times(machines, one, 2)
    assert {entry: due_ms - began_ms for entry, due_ms in due.items()} == {1: 5_000, 2: 1_000}


async def a_level_is_shortened(machines: EngineFixture, one: Daemon) -> None:
    await set_levels(one, DEFAULT)
    began_ms = machines.now_ms()
    await add(one, 5, [1])
    await set_levels(one, DEFAULT.replace("1m", "10s", 1))
    await add(one, 5, [2])
    assert await pending(one) == {5: 2}
    due = await times(machines, one, 2)
    assert (due[1] - began_ms, due[2] - began_ms) == (MINUTE, 10_000)


async def the_last_level_is_taken_away(machines: EngineFixture, one: Daemon) -> None:
    await set_levels(one, "1s 2s 1m")
    began_ms = machines.now_ms()
    await add(one, 3, [1])
    await set_levels(one, "1s 2s")
    assert await pending(one) == {3: 1}
    assert (await times(machines, one, 1))[1] - began_ms == MINUTE


async def a_time_that_is_past(machines: EngineFixture, one: Daemon) -> None:
    outcome = await one.add("t", 7, [1], delay_ms=-5_000)
    assert outcome.late_on_arrival == 1
    await one.call(one.engine.requests.create_subscription("t", "s"))
    assert len(rows_of(await get(one, wait_ms=1_000))) == 1


async def a_time_on_the_tick(machines: EngineFixture, one: Daemon) -> None:
    due_ms = machines.now_ms() // 1_000 * 1_000 + 2_000
    await one.add("t", 7, [1], delay_ms=due_ms - machines.now_ms())
    receiver = await one.receiver("t")
    await receiver.received(1)
    assert machines.now_ms() >= due_ms
    assert not receiver.early


async def a_delay_above_the_limit(machines: EngineFixture, one: Daemon) -> None:
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=MINUTE)))
    with pytest.raises(DelayTooLong):
        await one.add("t", 7, [1], delay_ms=MINUTE + 1)
    with pytest.raises(DelayTooLong):
        await add(one, 6)


async def too_many_in_one_second(machines: EngineFixture, one: Daemon) -> None:
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(due_rows_per_second_max=10)))
    await add(one, 9, range(10))
    with pytest.raises(QuotaExceeded) as error:
        await add(one, 9, range(10, 20))
    assert not isinstance(error.value, DelayTooLong)


async def cancelled_twice(machines: EngineFixture, one: Daemon) -> None:
    await add(one, 9, [1])
    assert (await cancel(one, 7, [1])).cancelled == 1
    again = await cancel(one, 7, [1])
    assert (again.cancelled, again.not_found.tolist()) == (0, [0])


async def cancelled_when_it_was_due(machines: EngineFixture, one: Daemon) -> None:
    await add(one, 1, [1])
    await (await one.receiver("t")).received(1)
    outcome: CancelOutcome = await cancel(one, 7, [1])
    assert (outcome.cancelled, outcome.in_flight.tolist()) == (0, [0])


CASES: dict[str, Story] = {
    "level 5 is one minute": due_after(5, MINUTE),
    "level 18 is two hours": due_after(18, 2 * HOUR),
    "level 19 is the highest": due_after(19, 2 * HOUR),
    "level 999 is the highest": due_after(999, 2 * HOUR),
    "level 19 without clamping": refused(
        19, r"delay_level\[1\] is 19; the highest level of the table is 18", clamp=False
    ),
    "level 0 is no delay": due_after(0, 0),
    "level -1 (RocketMQ: no delay)": refused(-1, r"delay_level\[1\] is -1", clamp=True),
    "two spaces (RocketMQ: half a table)": due_after(2, 5_000, "1s  5s"),
    "an unknown unit (RocketMQ: half a table)": table_refused("1s 5x", "'5x' at character 4"),
    "a table that falls": a_descending_table,
    "a unit in capitals": table_refused("1S", "'1S' at character 1"),
    "a fraction": table_refused("1.5s", "'1.5s' at character 1"),
    "weeks": table_refused("2s 1w", "'1w' at character 4"),
    "zero (RocketMQ: accepted)": table_refused("0s", "'0s' at character 1"),
    "a negative delay (RocketMQ: accepted)": table_refused("-1s", "'-1s' at character 1"),
    "a lone unit": table_refused("s", "'s' at character 1"),
    "a level is shortened while rows are pending (RocketMQ: they fire at once)": a_level_is_shortened,
    "the last level is taken away while rows are pending (RocketMQ: stuck)": the_last_level_is_taken_away,
    "a time that is past": a_time_that_is_past,
    "a time on the tick (RocketMQ: a tick early)": a_time_on_the_tick,
    "a delay above the limit": a_delay_above_the_limit,
    "many in one second": too_many_in_one_second,
    "cancelled twice (RocketMQ: success)": cancelled_twice,
    "cancelled when it was due": cancelled_when_it_was_due,
    "an order that is not paid within 30 minutes": due_after(16, 30 * MINUTE),
    "a red envelope that is returned after 24 hours": due_after(19, DAY, f"{DEFAULT} 1d"),
}


@pytest.mark.parametrize("case", CASES)
async def test_whoever_knows_delay_levels_from_rocketmq_finds(machines: EngineFixture, case: str) -> None:
    await CASES[case](machines, await machines.served_by())
