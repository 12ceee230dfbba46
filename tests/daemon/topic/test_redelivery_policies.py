"""Which delay counts, when a position is a dead letter, and what a negative acknowledgement may ask for."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import DelayTooLong, InvalidArgument, QuotaExceeded
from daemon.topic.served_topic import SEALING_MAX
from storage_backends.formats.index_ids import BATCHED_ENTRY_ID_MAX
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy, SubscriptionPolicy, TopicPolicy
from tests._support.engine_fixture import EngineFixture
from tests._support.outcomes import Counts
from tests.daemon._support.calling import stats
from tests.daemon._support.nacking import (
    DEAD,
    MINUTE_MS,
    NACKED,
    Claim,
    assert_back_after,
    constant,
    counts,
    dispatcher,
    entries,
    nack,
    update,
    with_rows,
)

# ---- delays


async def test_the_delay_follows_from_the_policy_by_how_often_it_was(machines: EngineFixture) -> None:
    redelivery = RedeliveryPolicy(kind=RedeliveryKind.LIST, delays_ms=(1_000, 5_000, 2_000))
    policy = SubscriptionPolicy(redelivery=redelivery, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 1, policy=policy)
    for delay_ms in (1_000, 5_000, 2_000, 2_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(1)
        assert_back_after(rows, nacked_ms, delay_ms, late_ms=50)


async def test_without_a_policy_the_daemon_s_delay_counts(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 1, "redelivery.delay_ms=7000")
    nacked_ms = machines.now_ms()
    await listener.nack(rows)
    assert_back_after(await listener.next(1), nacked_ms, 7_000, late_ms=50)


async def test_a_delay_or_a_level_of_the_request_wins_over_the_policy(machines: EngineFixture) -> None:
    _, listener, rows = await with_rows(machines, 3, policy=constant(MINUTE_MS))
    for given_ms, level, delay_ms in ((2_000, None, 2_000), (None, 2, 5_000), (None, 0, 0)):
        nacked_ms = machines.now_ms()
        await listener.nack(rows[:1], given_ms, level=level)
        assert_back_after(await listener.next(1), nacked_ms, delay_ms, late_ms=50)
    with pytest.raises(InvalidArgument, match=r"delay_level\[0\] is -1"):
        await listener.nack(rows, level=-1)


async def test_the_ladder_climbs_the_delay_levels_from_the_third(machines: EngineFixture) -> None:
    ladder = RedeliveryPolicy(kind=RedeliveryKind.LADDER)
    policy = SubscriptionPolicy(redelivery=ladder, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 1, "redelivery.delay_levels=1s 2s 3s 7s 4s", policy=policy)
    for delay_ms in (3_000, 7_000, 4_000, 4_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(1)
        assert_back_after(rows, nacked_ms, delay_ms, late_ms=50)


async def test_an_exponential_policy_grows_to_its_most_and_jitter_only_shortens(machines: EngineFixture) -> None:
    redelivery = RedeliveryPolicy(
        kind=RedeliveryKind.EXPONENTIAL, initial_ms=1_000, multiplier=3.0, max_ms=10_000, jitter=0.5
    )
    policy = SubscriptionPolicy(redelivery=redelivery, nack_precision_bits=0)
    _, listener, rows = await with_rows(machines, 20, policy=policy)
    for most_ms in (1_000, 3_000, 9_000, 10_000, 10_000):
        nacked_ms = machines.now_ms()
        await listener.nack(rows)
        rows = await listener.next(20)
        waited_ms = [row.at_ms - nacked_ms for row in rows]
        assert len(set(waited_ms)) > 10, "each is drawn by itself"
        assert most_ms / 2 <= min(waited_ms)
        assert max(waited_ms) <= most_ms + 50


async def test_another_policy_of_the_subscription_is_in_force_at_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 3, policy=constant(MINUTE_MS))
    await listener.nack(rows[:1])
    await update(one, constant(1_000, max_redeliver_count=1))
    nacked_ms = machines.now_ms()
    await listener.nack(rows[1:])
    back = await listener.next(2)
    assert_back_after(back, nacked_ms, 1_000, late_ms=50)
    assert await listener.nack(back) == Counts(0, 2)
    assert entries(await listener.next(1)) == [0], "what was nacked before keeps its time"


# ---- dead letters


@pytest.mark.parametrize("most", [0, 1, 3])
async def test_a_position_that_was_nacked_too_often_is_a_dead_letter(machines: EngineFixture, most: int) -> None:
    one, listener, rows = await with_rows(machines, 2, policy=constant(100, max_redeliver_count=most))
    for number in range(most):
        assert await listener.nack(rows[:1]) == NACKED
        back = await listener.next(1)
        assert counts(back) == [number + 1]
    assert await listener.nack(rows[:1]) == DEAD
    assert await listener.nack(rows[:1]) == Counts(1, 0), "it has left the backlog"
    await asyncio.sleep(5)
    one.kill()
    two = await machines.served_by("one")
    again = await dispatcher(two, policy=None)
    assert entries(await again.next(1)) == [1]
    await asyncio.sleep(5)
    assert again.nothing_more()
    assert (await stats(two)).subscriptions[0].backlog == 1


async def test_a_rejected_position_is_a_dead_letter_at_once(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 4)
    await listener.nack(rows[2:], 5_000)
    assert await listener.nack(rows[:3], reject=True, text="not ours") == Counts(0, 3)
    assert entries(await listener.next(1)) == [3]
    await asyncio.sleep(10)
    assert listener.nothing_more()
    registry = one.metrics.registry
    assert registry.get_sample_value("tarry_nack_rows_total", {"topic": "t", "result": "dead_lettered"}) == 3
    assert registry.get_sample_value("tarry_dead_lettered_rows_total", {"topic": "t", "reason": "rejected"}) == 3


# ---- limits


@pytest.mark.parametrize(
    ("rows", "fields", "error", "named"),
    [
        ([(1, 1, 5)], {"delay_ms": 400_000_000_000}, DelayTooLong, r"delay_ms\[0\] is 400000000000"),
        ([(1, 1, 5), (1, 1, 6)], {}, InvalidArgument, r"position \(1, 1\)"),
        ([(1, 1, 5, 3), (1, 1, 6, 3)], {}, InvalidArgument, r"position \(1, 1, 3\)"),
        ([(1, 1, 5, 70_000)], {}, InvalidArgument, r"batch_index\[0\] is 70000"),
        ([(1, BATCHED_ENTRY_ID_MAX + 1, 5, 0)], {}, InvalidArgument, r"entry_id\[0\] is 281474976710656"),
        ([(1, 1, 5)], {"reject": True, "text": "é" * 513}, InvalidArgument, "reason has 1026 bytes"),
        ([(1, 1, 5)], {"level": -3}, InvalidArgument, r"delay_level\[0\] is -3"),
        ([], {}, InvalidArgument, "entry_id has 0 rows"),
        ([(1, entry, 5) for entry in range(1_001)], {}, InvalidArgument, "entry_id has 1001 rows"),
    ],
)
async def test_a_bad_request_is_refused_by_name_and_changes_nothing(
    machines: EngineFixture, rows: list[Claim], fields: dict[str, object], error: type[Exception], named: str
) -> None:
    one, listener, _ = await with_rows(machines, 2, "limits.rows_per_request_max=1000")
    with pytest.raises(error, match=named):
        await nack(one, rows, **fields)  # type: ignore[arg-type]
    with pytest.raises(error, match=named):
        await listener.nack(rows, **fields)  # type: ignore[arg-type]
    assert (await stats(one)).subscriptions[0].in_flight == 2


async def test_the_limit_on_delays_is_that_of_the_topic(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 1)
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=5_000)))
    with pytest.raises(DelayTooLong, match="5000"):
        await listener.nack(rows, 5_001)
    with pytest.raises(DelayTooLong, match=r"delay_level\[0\] is 10000"):
        await listener.nack(rows, level=3)
    with pytest.raises(InvalidArgument, match=r"redelivery\.constant\.delay_ms is 5001"):
        await update(one, constant(5_001))
    nacked_ms = machines.now_ms()
    await listener.nack(rows)
    assert_back_after(await listener.next(1), nacked_ms, 5_000, late_ms=50)


async def test_no_new_rows_come_by_nacks_while_too_many_buckets_wait_for_their_seal(machines: EngineFixture) -> None:
    settings = ("bucket.min_index_count_per_bucket=10", "bucket.rows_max=10")
    one, listener, rows = await with_rows(machines, 5, *settings)
    held = one.pause("put", "/buckets/")
    for ledger_id in range(2, 2 + SEALING_MAX):
        await one.add("t", ledger_id, range(10), delay_ms=MINUTE_MS)
    await held.reached()
    with pytest.raises(QuotaExceeded, match="wait to be sealed"):
        await nack(one, [(77, 1, 0)], 1_000)
    assert await listener.nack(rows, 1_000) == NACKED, "what has a row needs no other one"
    assert counts(await listener.next(5)) == [1] * 5
    held.release()
    await one.until(lambda: not one.topic("t").core.indexes.sealing)
    assert await nack(one, [(77, 1, 0)], 1_000) == NACKED
