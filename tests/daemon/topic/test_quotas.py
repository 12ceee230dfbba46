"""Quotas of topics, clients and the daemon: what is refused, that it changes nothing, and when it passes again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.decisions.withdrawal_decisions import RescheduleBatch, RescheduleOutcome
from daemon.core.quotas import Caller
from daemon.errors import NotFound, QuotaExceeded
from storage_backends.formats.manifest import TopicPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import clear, create, stats

SMALL = ("bucket.min_index_count_per_bucket=10", "bucket.rows_max=10")


def add(
    daemon: Daemon,
    entries: Sequence[int],
    *,
    topic: str = "t",
    ledger_id: int = 1,
    delay_ms: int = 60_000,
    at_ms: int | None = None,
    subscription: str | None = None,
    returned: bool = False,
    client: str | None = None,
    size_bytes: int = 100,
) -> asyncio.Task[AddOutcome]:
    """Adds entries of a ledger, by absolute times of the daemon's clock."""
    count = len(entries)
    batch = AddBatch(
        ledger_id=np.full(count, ledger_id, np.uint64),
        entry_id=np.array(entries, np.uint64),
        deliver_at_ms=np.full(count, daemon.now_ms() + delay_ms if at_ms is None else at_ms, np.uint64),
        delay_ms=None,
        key_hash=None,
        return_already_due=returned,
    )
    caller = None if client is None else Caller(client, size_bytes)
    return daemon.call(daemon.engine.requests.add(topic, batch, subscription, caller))


def set_policy(daemon: Daemon, policy: TopicPolicy, topic: str = "t") -> asyncio.Task[TopicPolicy]:
    return daemon.call(daemon.engine.requests.set_topic_policy(topic, policy))


async def refused(adding: asyncio.Task[AddOutcome], named: str) -> int | None:
    """The hint of a refusal that names `named`."""
    with pytest.raises(QuotaExceeded, match=named) as caught:
        await adding
    return caught.value.retry_after_ms


# ---- pending rows


async def test_no_more_rows_are_pending_than_the_policy_says(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    await add(one, range(7))
    assert await refused(add(one, range(7, 11)), "topic t: pending_rows_max is 10; 7 rows are pending") == 1000
    assert (await stats(one)).pending == 7
    refusals = {"topic": "t", "quota": "pending"}
    assert one.metrics.registry.get_sample_value("tarry_quota_refused_requests_total", refusals) == 1
    assert (await add(one, range(7, 10))).accepted == 3
    assert (await add(one, range(10))).duplicates == 10, "what is there already needs no room"
    await add(one, range(100), topic="u")


async def test_a_refused_request_leaves_no_trace(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    await add(one, range(10))
    before = len(machines.keys("journal"))
    for _ in range(5):
        await refused(add(one, range(5), ledger_id=7), "pending_rows_max")
    await asyncio.sleep(3)
    assert len(machines.keys("journal")) == before
    pages = one.topic("t").core.index.pages
    known, unknown, refused_before = (
        pages.find(np.array([ledger_id], np.uint64), np.ones(1, np.uint64)).item() for ledger_id in (1, 99, 7)
    )
    assert refused_before == unknown != known
    await clear(one)
    assert (await add(one, range(5), ledger_id=7)).accepted == 5


async def test_requests_on_their_way_together_do_not_pass_the_limit_together(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    adding = [add(one, range(first, first + 4)) for first in range(0, 40, 4)]
    outcomes = await asyncio.gather(*adding, return_exceptions=True)
    assert sum(isinstance(each, AddOutcome) for each in outcomes) == 2
    assert (await stats(one)).pending == 8


async def test_rows_that_come_due_or_leave_make_room(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one)
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    await add(one, range(10), delay_ms=5_000)
    await refused(add(one, [10]), "pending_rows_max")
    await asyncio.sleep(5.1)
    assert (await add(one, range(10, 20))).accepted == 10
    await refused(add(one, [20]), "pending_rows_max")
    await clear(one)
    assert (await add(one, range(20, 30))).accepted == 10


async def test_what_is_due_already_is_not_pending(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    await add(one, range(10))
    assert (await add(one, range(10, 15), delay_ms=-5)).accepted == 5
    await receiver.received(5)
    assert len((await add(one, range(20, 25), delay_ms=-5, returned=True)).returned_index) == 5


async def test_rows_of_every_index_count(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await create(one, "a")
    await create(one, "b")
    await set_policy(one, TopicPolicy(pending_rows_max=10, shared_index=False))
    await add(one, range(4))
    assert (await stats(one)).pending == 8
    await refused(add(one, [4, 5]), "8 rows are pending, and the request has 4 new ones")
    assert (await add(one, [4, 5], subscription="a")).accepted == 2


async def test_a_request_that_never_fits_is_told_that_waiting_does_not_help(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(pending_rows_max=10))
    assert await refused(add(one, range(11)), "pending_rows_max is 10; 0 rows are pending.*11") is None


async def test_all_topics_together_have_no_more_pending_rows_than_the_daemon_may(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.pending_rows_max=10")
    await add(one, range(6), topic="t", delay_ms=5_000)
    await add(one, range(3), topic="u")
    assert await refused(add(one, range(3, 6), topic="u"), r"limits.pending_rows_max is 10; 9 rows are pending") == 1000
    await refused(add(one, range(3), topic="new"), "limits.pending_rows_max")
    with pytest.raises(NotFound):
        await stats(one, "new")
    await asyncio.sleep(3)
    await refused(add(one, range(3, 6), topic="u"), "limits.pending_rows_max is 10; 9 rows")
    await asyncio.sleep(3.5)
    assert (await add(one, range(3, 6), topic="u")).accepted == 3, "what came due is noticed within a second"


async def test_what_is_accepted_counts_at_once_for_the_daemon(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.pending_rows_max=10")
    outcomes = await asyncio.gather(
        *(add(one, range(4), topic=f"t{number}") for number in range(8)), return_exceptions=True
    )
    assert sum(isinstance(each, AddOutcome) for each in outcomes) == 2


async def test_the_daemon_s_limits_hold_for_topics_without_their_own(machines: EngineFixture) -> None:
    one = await machines.served_by(
        "one", "limits.pending_rows_per_topic_max=10", "limits.due_rows_per_second_max=5",
        "limits.client_rows_per_second_max=3",
    )  # fmt: skip
    await set_policy(one, TopicPolicy())
    await refused(add(one, range(11)), "pending_rows_max is 10")
    await refused(add(one, range(6)), "due_rows_per_second_max is 5")
    await add(one, range(4), client="c")
    await refused(add(one, [9], client="c"), "client_rows_per_second_max is 3")
    await set_policy(
        one, TopicPolicy(pending_rows_max=0, due_rows_per_second_max=0, client_rows_per_second_max=0), topic="free"
    )
    for first in (0, 50):
        await add(one, range(first, first + 50), topic="free", client="c")


# ---- the burst guard


@pytest.mark.parametrize("settings", [(), SMALL], ids=["mutable", "sealed"])
async def test_no_more_rows_come_due_within_a_second_than_the_policy_says(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    at_ms = one.now_ms() // 1000 * 1000 + 100_000
    await set_policy(one, TopicPolicy(due_rows_per_second_max=30))
    await add(one, range(20), at_ms=at_ms)
    if settings:
        await one.until(lambda: len(one.topic("t").core.index.sealed) >= 1)
    assert (
        await refused(add(one, range(20, 31), at_ms=at_ms + 999), "due_rows_per_second_max is 30; .* 20 rows") == 1000
    )
    assert (await add(one, range(20, 50), at_ms=at_ms + 1000)).accepted == 30
    assert (await add(one, range(50, 60), at_ms=at_ms + 999)).accepted == 10
    await refused(add(one, [60], at_ms=at_ms), "due_rows_per_second_max is 30; .* 30 rows are due")
    assert (await stats(one)).pending == 60


@pytest.mark.parametrize("settings", [(), SMALL], ids=["mutable", "sealed"])
async def test_what_was_there_counts_when_the_guard_is_set_and_after_a_restart(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    at_ms = one.now_ms() // 1000 * 1000 + 100_000
    await add(one, range(20), at_ms=at_ms)
    if settings:
        await one.until(lambda: len(one.topic("t").core.index.sealed) >= 1)
    await set_policy(one, TopicPolicy(due_rows_per_second_max=20))
    await refused(add(one, [20], at_ms=at_ms), "20 rows are due")
    one.kill()
    two = await machines.served_by("one", *settings)
    await refused(add(two, [20], at_ms=at_ms), "20 rows are due")
    assert (await add(two, [20], at_ms=at_ms + 1000)).accepted == 1


async def test_what_has_left_makes_room_within_a_second_of_a_refusal(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(due_rows_per_second_max=20))
    due_ms = one.now_ms() + 100_000
    await add(one, range(20), at_ms=due_ms)
    await clear(one)
    retry_after_ms = await refused(add(one, range(20), at_ms=due_ms), "due_rows_per_second_max")
    assert retry_after_ms is not None
    await asyncio.sleep(retry_after_ms / 1000)
    assert (await add(one, range(20), at_ms=due_ms)).accepted == 20


async def test_a_flood_of_what_is_due_already_is_a_burst_of_this_second(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(due_rows_per_second_max=20))
    await asyncio.sleep(1 - one.now_ms() % 1000 / 1000)
    await add(one, range(20), delay_ms=-1_000_000)
    await refused(add(one, [20], delay_ms=-5_000), "20 rows are due")
    await asyncio.sleep(1)
    assert (await add(one, range(20, 40), delay_ms=-5_000)).accepted == 20


async def test_rows_added_while_the_guard_counts_are_counted_too(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    due_ms = one.now_ms() + 100_000
    await add(one, range(10), at_ms=due_ms)
    setting = set_policy(one, TopicPolicy(due_rows_per_second_max=30))
    adding = [add(one, [entry], at_ms=due_ms) for entry in range(10, 50)]
    await setting
    outcomes = await asyncio.gather(*adding, return_exceptions=True)
    accepted = sum(isinstance(each, AddOutcome) for each in outcomes)
    rest = [add(one, [entry], at_ms=due_ms) for entry in range(100, 150)]
    accepted += sum(isinstance(each, AddOutcome) for each in await asyncio.gather(*rest, return_exceptions=True))
    # Those that were decided before the policy was set were not limited.
    before = sum(isinstance(each, AddOutcome) for each in outcomes)
    assert 10 + accepted == max(10 + before, 30)


async def test_a_reschedule_goes_through_the_guard_and_a_refused_one_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    at_ms = one.now_ms() // 1000 * 1000 + 100_000
    await set_policy(one, TopicPolicy(due_rows_per_second_max=10))
    await add(one, range(8), at_ms=at_ms)
    await add(one, range(8, 12), at_ms=at_ms + 5_000)

    def moved(entries: Sequence[int], to_ms: int) -> asyncio.Task[RescheduleOutcome]:
        column = np.array(entries, np.uint64)
        times = np.full(len(entries), to_ms, np.uint64)
        batch = RescheduleBatch(np.ones(len(entries), np.uint64), column, times, None, None)
        return one.call(one.engine.requests.reschedule("t", None, batch))

    with pytest.raises(QuotaExceeded, match=r"due_rows_per_second_max is 10; .* 8 rows are due, .* 3 new"):
        await moved([8, 9, 10], at_ms + 500)
    assert (await moved([8, 9], at_ms + 500)).rescheduled == 2
    await refused(add(one, [20], at_ms=at_ms), "10 rows are due")
    receiver = await one.receiver("t")
    rows = await receiver.received(12)
    assert sorted((entry, due_ms - at_ms) for _, entry, due_ms in rows)[8:] == [
        (8, 500), (9, 500), (10, 5_000), (11, 5_000),
    ]  # fmt: skip


# ---- clients


async def test_each_client_adds_no_more_rows_in_a_second_than_the_policy_says(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(client_rows_per_second_max=100))
    await add(one, range(250), client="a")
    retry_after_ms = await refused(add(one, [300], client="a"), "client_rows_per_second_max is 100; client 'a' is 150")
    assert (await add(one, [300], client="b")).accepted == 1
    assert (await add(one, [301], client=None)).accepted == 1
    assert retry_after_ms is not None
    await asyncio.sleep(retry_after_ms / 1000 - 0.05)
    await refused(add(one, [302], client="a"), "client_rows_per_second_max")
    await asyncio.sleep(0.05)
    assert (await add(one, [302], client="a")).accepted == 1


async def test_each_client_adds_no_more_bytes_in_a_second_than_the_policy_says(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(client_bytes_per_second_max=1_000))
    await add(one, [1], client="a", size_bytes=3_000)
    assert await refused(add(one, [2], client="a"), "client_bytes_per_second_max is 1000; client 'a' is") in range(
        1950, 2002
    )


async def test_a_rate_holds_on_average_for_a_client_that_obeys_the_hint(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(client_rows_per_second_max=100))
    started_s, accepted = machines.loop.time(), 0
    while machines.loop.time() - started_s < 60:
        try:
            accepted += (await add(one, range(accepted, accepted + 7), client="a", delay_ms=600_000)).accepted
        except QuotaExceeded as error:
            await asyncio.sleep((error.retry_after_ms or 0) / 1000)
    assert 60 * 100 * 0.95 <= accepted <= 60 * 100 + 100 + 7


async def test_a_step_of_the_wall_clock_gives_no_client_more(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(client_rows_per_second_max=10))
    await add(one, range(100), client="a")
    one.step_clock(3_600_000)
    await refused(add(one, [200], client="a"), "client_rows_per_second_max")


async def test_what_another_quota_refuses_costs_a_client_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(client_rows_per_second_max=10, pending_rows_max=5))
    for _ in range(5):
        await refused(add(one, range(6), client="a"), "pending_rows_max")
    assert (await add(one, range(5), client="a")).accepted == 5


# ---- ticks


async def test_each_topic_hands_out_at_multiples_of_its_own_tick(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "delivery.tick_ms=5")
    await set_policy(one, TopicPolicy(tick_ms=400), topic="slow")
    slow, fast = await one.receiver("slow"), await one.receiver("fast")
    came: dict[str, list[int]] = {"slow": [], "fast": []}
    from_ms = one.now_ms() // 2000 * 2000 + 4000
    for topic in came:
        for entry in range(20):
            await add(one, [entry], topic=topic, at_ms=from_ms + 50 * entry)
    while len(fast.rows) < 20 or len(slow.rows) < 20:
        before = {"slow": len(slow.rows), "fast": len(fast.rows)}
        await asyncio.sleep(0.001)
        for topic, receiver in (("slow", slow), ("fast", fast)):
            came[topic] += [one.now_ms() - from_ms] * (len(receiver.rows) - before[topic])
    assert all(at_ms - 50 * entry <= 8 for entry, at_ms in enumerate(came["fast"]))
    assert all((from_ms + at_ms) % 400 <= 5 for at_ms in came["slow"]), "only at its ticks"
    assert len({at_ms // 10 for at_ms in came["slow"]}) <= 4
    assert all(at_ms >= 50 * entry for entry, at_ms in enumerate(came["slow"])), "never early"


async def test_a_shorter_tick_counts_at_once(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await set_policy(one, TopicPolicy(tick_ms=500))
    receiver = await one.receiver("t")
    from_ms = one.now_ms() // 500 * 500 + 2_000
    await add(one, [1], at_ms=from_ms + 100)
    await set_policy(one, TopicPolicy(tick_ms=10))
    await receiver.received(1)
    assert one.now_ms() <= from_ms + 160
