"""What no add has brought is bounded for each subscription: nothing is dropped at the limit, and stored rows stay."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from daemon.errors import QuotaExceeded
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy, SubscriptionPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import Counts
from tests.daemon._support import dead_letter_calls as letters
from tests.daemon._support.calling import acknowledge, create, dead_letter, get, rows_of, stats, up_to
from tests.daemon._support.key_dispatching import by_key, consumer, open_by_key
from tests.daemon._support.nacking import (
    DEAD,
    EXACT,
    NACKED,
    Claim,
    constant,
    counts,
    dispatcher,
    entries,
    nack,
    update,
    with_rows,
)

FIVE_NACKED = "limits.nacked_rows_per_subscription_max=5"
TWO_DEAD = "limits.dead_letters_per_subscription_max=2"
OFTEN = "journal.checkpoint_slots=3"


def strange(*entry_ids: int) -> list[Claim]:
    """Positions of the log that nobody has added."""
    return [(9, entry_id, 0) for entry_id in entry_ids]


async def nacked_rows(daemon: Daemon, subscription: str = "s") -> int:
    found = (await stats(daemon)).subscriptions
    return next(each.nacked for each in found if each.subscription == subscription)


def series(daemon: Daemon, name: str, **labels: str) -> float:
    return daemon.metrics.registry.get_sample_value(name, {"topic": "t", **labels}) or 0


# ---- positions without a row


async def test_positions_without_a_row_are_refused_at_the_limit_and_others_are_not(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 20, FIVE_NACKED)
    assert await nack(one, strange(1, 2, 3), 60_000) == NACKED
    with pytest.raises(
        QuotaExceeded, match=r"nacked_rows_per_subscription_max is 5; 3 rows .*has 3 positions.*Acknowledge"
    ) as refused:
        await nack(one, strange(4, 5, 6), 60_000)
    assert refused.value.retry_after_ms is not None
    with pytest.raises(QuotaExceeded) as refused:
        await nack(one, strange(*range(10, 16)), 60_000)
    assert refused.value.retry_after_ms is None, "waiting does not help"
    assert await nacked_rows(one) == 3
    assert series(one, "tarry_quota_refused_requests_total", quota="nacked") == 2
    assert await nack(one, strange(4, 5), 60_000) == NACKED
    assert await nack(one, strange(1, 2, 3, 4, 5), 70_000) == NACKED, "they have rows by now"
    assert await listener.nack(rows, 60_000) == NACKED, "rows that were added are not counted"
    part: list[Claim] = [(1, 3, rows[3].deliver_at_ms, 0)]
    with pytest.raises(QuotaExceeded):
        await nack(one, part, 60_000)
    assert await nacked_rows(one) == 25


async def test_an_acknowledgement_makes_room_and_so_does_a_dead_letter(machines: EngineFixture) -> None:
    one = await machines.served_by("one", FIVE_NACKED)
    listener = await dispatcher(one)
    for first in range(0, 50, 10):
        assert await nack(one, strange(*range(first, first + 5)), 0) == NACKED
        back = await listener.next(5)
        with pytest.raises(QuotaExceeded):
            await nack(one, strange(first + 6), 0)
        assert await listener.acknowledge(back[:3]) == 0
        assert await listener.nack(back[3:], reject=True) == Counts(0, 2)
    assert await nack(one, strange(*range(100, 105)), 0) == NACKED


async def test_requests_at_the_same_time_do_not_share_the_room(machines: EngineFixture) -> None:
    one = await machines.served_by("one", FIVE_NACKED)
    await create(one, policy=EXACT)
    asked = [nack(one, strange(2 * number, 2 * number + 1), 60_000) for number in range(8)]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, QuotaExceeded)] == [NACKED] * 2
    assert await nacked_rows(one) == 4


@pytest.mark.parametrize("kept_by", ["log", "checkpoint", "seal"])
async def test_what_is_stored_beyond_the_limit_is_served_and_counts(machines: EngineFixture, kept_by: str) -> None:
    one = await machines.served_by("one", *([OFTEN] if kept_by == "checkpoint" else []))
    await create(one, policy=EXACT)
    assert await nack(one, strange(*range(8)), 5_000) == NACKED
    if kept_by == "seal":
        await one.call(one.engine.requests.seal("t"))
    if kept_by == "checkpoint":
        for ledger_id in range(20, 30):
            await one.add("t", ledger_id, [1], delay_ms=9_000_000)
            await asyncio.sleep(0.2)
    one.kill()
    two = await machines.served_by("one", FIVE_NACKED)
    with pytest.raises(QuotaExceeded, match="8 rows"):
        await nack(two, strange(8), 0)
    listener = await dispatcher(two, policy=None)
    back = await listener.next(8)
    assert (entries(back), counts(back)) == (list(range(8)), [1] * 8)
    assert await listener.nack(back[:1], 0) == NACKED
    assert await listener.acknowledge(back[1:]) == 0
    assert await nack(two, strange(*range(20, 24)), 60_000) == NACKED
    with pytest.raises(QuotaExceeded):
        await nack(two, strange(24), 0)


async def test_planned_positions_stay_in_flight_after_their_time_while_there_is_no_room(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", FIVE_NACKED)
    planning = await open_by_key(one, [consumer(1)], policy=dataclasses.replace(by_key(), ack_timeout_ms=1_000))
    assert await nack(one, strange(*range(4)), 3_600_000) == NACKED
    assert await planning.plan(7, [1, 2]) == [1, 1]
    await asyncio.sleep(10)
    assert await nacked_rows(one) == 4
    await acknowledge(one, [(9, 0, 0)])
    await asyncio.sleep(3)
    assert await nacked_rows(one) == 5


# ---- dead letters


async def test_a_rejection_is_refused_at_the_limit_and_leaves_its_rows_in_flight(machines: EngineFixture) -> None:
    one, listener, rows = await with_rows(machines, 10, TWO_DEAD)
    with pytest.raises(QuotaExceeded, match=r"dead_letters_per_subscription_max is 2; there are 0 .* make 3 more"):
        await listener.nack(rows[:3], reject=True)
    assert await listener.nack(rows[:2], reject=True) == Counts(0, 2)
    with pytest.raises(QuotaExceeded, match="Replay or purge") as refused:
        await listener.nack(rows[2:3], reject=True)
    assert refused.value.retry_after_ms is None, "only an operator makes room"
    with pytest.raises(QuotaExceeded):
        await nack(one, strange(1), reject=True)
    assert await listener.nack(rows[:2], reject=True) == Counts(2, 0), "a repeated one is ignored"
    assert series(one, "tarry_quota_refused_requests_total", quota="dead_letters") == 3
    (numbers,) = await one.call(one.engine.requests._topic_numbers())
    assert (numbers.dead_letters, numbers.dead_letters_full) == (2, 1)
    await letters.purge(one, letters.with_ids(1))
    assert await listener.nack(rows[2:3], reject=True) == DEAD
    assert await listener.acknowledge(rows[3:]) == 0


async def test_rejections_at_the_same_time_do_not_share_the_room(machines: EngineFixture) -> None:
    one, _, rows = await with_rows(machines, 8, TWO_DEAD)
    asked = [nack(one, [row], reject=True) for row in (*rows, *strange(1, 2, 3))]
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, QuotaExceeded)] == [DEAD] * 2
    assert len((await letters.listed(one)).rows) == 2


LONGEST = {
    "constant": (RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=7_000), 7_000),
    "list": (RedeliveryPolicy(kind=RedeliveryKind.LIST, delays_ms=(10, 9_000, 20)), 9_000),
    "linear": (RedeliveryPolicy(kind=RedeliveryKind.LINEAR, initial_ms=10, step_ms=1, max_ms=8_000), 8_000),
    "linear without end": (RedeliveryPolicy(kind=RedeliveryKind.LINEAR, initial_ms=10, step_ms=1_000), 1_010),
    "exponential": (RedeliveryPolicy(kind=RedeliveryKind.EXPONENTIAL, initial_ms=10, max_ms=6_000), 6_000),
    "ladder": (RedeliveryPolicy(kind=RedeliveryKind.LADDER), 30_000),
}


@pytest.mark.parametrize("kind", LONGEST)
async def test_what_fails_too_often_while_dead_letters_are_full_comes_back_at_the_longest_delay(
    machines: EngineFixture, kind: str
) -> None:
    redelivery, longest_ms = LONGEST[kind]
    policy = SubscriptionPolicy(redelivery=redelivery, max_redeliver_count=2, nack_precision_bits=0)
    one, listener, rows = await with_rows(machines, 5, TWO_DEAD, "redelivery.delay_levels=1s 30s 4s", policy=policy)
    for _ in range(2):
        assert await listener.nack(rows, 0) == NACKED
        rows = await listener.next(5)
    nacked_ms = machines.now_ms()
    assert await listener.nack(rows, 0) == Counts(0, 2)
    assert len((await letters.listed(one)).rows) == 2
    assert series(one, "tarry_dead_letters_full_rows_total") == 3
    assert await nacked_rows(one) == 3
    rows = await listener.next(3, timeout_s=2 * longest_ms / 1000 + 10)
    assert counts(rows) == [3] * 3
    assert all(nacked_ms + longest_ms <= row.at_ms <= nacked_ms + longest_ms + 100 for row in rows)
    assert await letters.purge(one) == 2
    assert await listener.nack(rows, 0) == Counts(0, 2)
    assert await listener.acknowledge(await listener.next(1, timeout_s=2 * longest_ms / 1000 + 10)) == 0


async def test_what_times_out_too_often_while_dead_letters_are_full_stays(machines: EngineFixture) -> None:
    policy = constant(1_000, ack_timeout_ms=2_000, max_redeliver_count=0)
    one, listener, _ = await with_rows(machines, 5, TWO_DEAD, policy=policy)
    rows = await listener.next(3)
    assert counts(rows) == [1] * 3
    assert series(one, "tarry_dead_letters_full_rows_total") == 3
    assert series(one, "tarry_dead_lettered_rows_total", reason="too_often") == 2
    assert counts(await listener.next(3)) == [2] * 3


async def test_a_strange_position_that_failed_too_often_gets_a_row_while_dead_letters_are_full(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", TWO_DEAD)
    listener = await dispatcher(one, policy=constant(500, max_redeliver_count=0))
    assert await nack(one, strange(1, 2, 3)) == Counts(0, 2)
    assert entries(await listener.next(1)) == [3]


async def test_more_dead_letters_than_the_limit_are_stored_and_served(machines: EngineFixture) -> None:
    one = await machines.served_by("one", OFTEN)
    await create(one)
    await letters.buried(one, 6)
    one.kill()
    two = await machines.served_by("one", TWO_DEAD)
    assert len((await letters.listed(two)).rows) == 6
    await two.add("t", 2, range(3), delay_ms=1)
    await asyncio.sleep(1)
    rows = rows_of(await get(two, 3))
    with pytest.raises(QuotaExceeded, match="there are 6 dead letters"):
        await letters.nack(two, rows, reject=True)
    assert (await letters.replay(two)).replayed == 6
    assert (await letters.nack(two, rows[:2], reject=True)).dead_lettered == 2


async def test_a_trim_leaves_no_more_dead_letters_than_there_may_be(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.dead_letters_per_subscription_max=10")
    await create(one)
    await one.add("t", 1, range(8), delay_ms=1)
    await one.add("t", 2, range(8), delay_ms=1)
    await asyncio.sleep(1)
    assert (await dead_letter(one, up_to(7, 1))).dead_lettered == 8
    with pytest.raises(QuotaExceeded, match=r"there are 8 dead letters.* make 8 more"):
        await dead_letter(one, up_to(7, 2))
    assert (await stats(one)).subscriptions[0].backlog == 8
    assert await letters.purge(one) == 8
    assert (await dead_letter(one, up_to(7, 2))).dead_lettered == 8


async def test_a_trim_of_many_rows_answers_with_what_there_was_room_for(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.core.decisions.departures.DEAD_LETTER_PORTION_ROWS", 4)
    one = await machines.served_by("one", "limits.dead_letters_per_subscription_max=10")
    await create(one)
    await one.add("t", 1, range(20), delay_ms=1)
    await asyncio.sleep(1)
    trimmed = await dead_letter(one, up_to(19, 1))
    assert (trimmed.dead_lettered, trimmed.more) == (8, True)
    with pytest.raises(QuotaExceeded):
        await dead_letter(one, up_to(19, 1))
    await update(one, EXACT)
    assert (await stats(one)).subscriptions[0].backlog == 12
