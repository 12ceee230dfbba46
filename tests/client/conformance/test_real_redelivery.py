"""Both clients and a real daemon: what is handed back comes later with its count, is given up, is delivered again."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import tarry
import tarry.aio
from examples import processes
from tests._support.outcomes import nack_result
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 600.0
FAR_MS = 3_600_000
WHOLE = tarry.NO_BATCH_INDEX
EXACT = tarry.SubscriptionPolicy(nack_precision_bits=0)


@pytest.fixture
def client(shared_daemon: processes.DaemonProcess, connect: Connect) -> tarry.aio.Client:
    return connect(shared_daemon.address, timeout_s=PATIENCE_S)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def received(subscription: tarry.aio.Subscription, rows: int) -> list[tuple[int, int, int | None]]:
    """Entry, count and batch index of so many rows, which are acknowledged."""
    seen: list[tuple[int, int, int | None]] = []
    while len(seen) < rows:
        batch = await subscription.receive(PATIENCE_S)
        assert batch is not None, f"{seen} came in time, not {rows} rows"
        indexes = [None] * len(batch) if batch.batch_index is None else batch.batch_index.tolist()
        indexes = [None if index == WHOLE else index for index in indexes]
        seen += zip(batch.entry_id.tolist(), batch.redelivery_count.tolist(), indexes, strict=True)
        await subscription.ack(batch)
    return seen


async def nothing_is_left(client: tarry.aio.Client, topic: str) -> None:
    (stats,) = (await client.stats(topic)).subscriptions
    assert (stats.backlog, stats.nacked, stats.next_redelivery_ms) == (0, 0, None)


async def test_what_is_nacked_on_a_stream_comes_at_its_time_with_its_count(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    await client.add(topic, 7, range(4), deliver_at_ms=now_ms())
    async with client.subscribe(topic, "sub", permits=4) as subscription:
        batch = await subscription.receive(PATIENCE_S)
        assert batch is not None
        while len(batch) < 4:
            subscription.release(batch)
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
        nacked_ms = now_ms()
        assert await subscription.nack(batch.take([0, 1]), delay_ms=[2 * FAR_MS, FAR_MS]) == nack_result(0, 0)
        assert await subscription.ack(batch.take([2, 3])) == 0
        backlog = await client.backlog_page(topic, "sub")
        assert backlog.state.tolist() == [tarry.BacklogState.NACKED] * 2
        assert backlog.redelivery_count.tolist() == [1, 1]
        assert (backlog.redeliver_at_ms >= [nacked_ms + 2 * FAR_MS, nacked_ms + FAR_MS]).all()
        (stats,) = (await client.stats(topic)).subscriptions
        assert (stats.backlog, stats.nacked, stats.next_redelivery_ms) == (2, 2, int(backlog.redeliver_at_ms.min()))
        nacked_ms = now_ms()
        assert await client.nack(topic, "sub", batch.take([0, 1]), delay_ms=[400, 200]) == nack_result(0, 0)
        assert sorted(await received(subscription, 2)) == [(0, 1, None), (1, 1, None)]
        assert now_ms() >= nacked_ms + 400
    await nothing_is_left(client, topic)


async def test_a_policy_says_when_and_how_often_until_it_is_a_dead_letter(client: tarry.aio.Client, topic: str) -> None:
    policy = tarry.SubscriptionPolicy(
        redelivery=tarry.DelayList((100, 200)), max_redeliver_count=2, nack_precision_bits=0
    )
    await client.create_subscription(topic, "sub", policy)
    (stats,) = (await client.stats(topic)).subscriptions
    assert stats.policy == policy
    await client.add(topic, 7, 1, deliver_at_ms=now_ms(), key_hash=5)
    answers = []
    for count in range(3):
        leased = await client.get(topic, "sub", wait_ms=60_000)
        assert leased.redelivery_count.tolist() == [count]
        answers.append(await client.nack(topic, "sub", leased))
    assert answers == [nack_result(0, 0), nack_result(0, 0), nack_result(0, 1)]
    (page,) = [each async for each in client.dead_letters(topic, "sub")]
    assert (page.dead_letter_id.tolist(), page.entry_id.tolist(), page.redelivery_count.tolist()) == ([1], [1], [3])
    assert (page.reason.tolist(), page.key_hash.tolist()) == ([tarry.DeadLetterReason.TOO_OFTEN], [5])
    assert (await client.subscriptions_page(topic)).items[0].dead_letters == 1
    assert (await client.delete_subscription(topic, "sub")).dead_letters == 1


async def test_a_nack_that_is_sent_again_gives_the_delay_anew_and_counts_once(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    await client.add(topic, 7, 1, deliver_at_ms=now_ms())
    leased = await client.get(topic, "sub", wait_ms=60_000)
    await client.nack(topic, "sub", leased, delay_ms=FAR_MS)
    # As after a lost answer; and a shorter one wakes the daemon sooner.
    assert await client.nack(topic, "sub", leased, delay_ms=100) == nack_result(0, 0)
    again = await client.get(topic, "sub", wait_ms=60_000)
    assert again.redelivery_count.tolist() == [1]
    await client.nack(topic, "sub", again, delay_ms=FAR_MS)
    ignored = await client.ack(topic, "sub", again)
    assert (ignored, [*ignored.items()]) == (1, [(0, tarry.IgnoredReason.OTHER_DELIVERY)])
    assert await client.ack(topic, "sub", again.positions[:3]) == 0, "any hand-out of it"
    nacked = await client.nack(topic, "sub", again)
    assert nacked == nack_result(ignored=1, dead_lettered=0)
    assert [*nacked.ignored.items()] == [(0, tarry.IgnoredReason.NOT_THERE)]
    await nothing_is_left(client, topic)


async def test_what_was_acknowledged_when_it_was_passed_on_comes_again_by_a_late_nack(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    await client.add(topic, 7, [1, 2, 3], deliver_at_ms=now_ms())
    leased = await client.get(topic, "sub", wait_ms=60_000)
    named = [leased.delivery_id(row) for row in range(len(leased))]
    assert await client.ack(topic, "sub", leased) == 0
    failed = tarry.DeliveryId.parse(named[1])
    late = await client.nack(topic, "sub", failed.positions, delay_ms=0)
    assert [*late.ignored.items()] == [(0, tarry.IgnoredReason.NOT_THERE)]
    assert await client.nack(topic, "sub", failed.positions, delay_ms=0, forwarded=True) == nack_result(0, 0)
    again = await client.get(topic, "sub", wait_ms=60_000)
    assert [again.delivery_id(row) for row in range(len(again))] == [named[1][:-1] + "1"]
    assert await client.ack(topic, "sub", failed.positions) == 1, "a late acknowledgement of the first hand-out"
    assert await client.ack(topic, "sub", again) == 0
    assert await client.reject(topic, "sub", failed.positions, "too late", forwarded=True) == nack_result(0, 1)
    await nothing_is_left(client, topic)


async def test_a_forwarder_acknowledges_and_hands_back_on_its_own_stream(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    await client.add(topic, 7, [1, 2], deliver_at_ms=now_ms(), key_hash=[11, 12])
    async with client.subscribe(topic, "sub") as subscription:
        batch = await subscription.receive(PATIENCE_S)
        assert batch is not None
        assert await subscription.ack(batch) == 0
        assert [*(await subscription.nack(batch)).ignored.items()] == [
            (0, tarry.IgnoredReason.NOT_THERE),
            (1, tarry.IgnoredReason.NOT_THERE),
        ]
        assert await subscription.nack(batch.take([1]), delay_ms=0, forwarded=True) == nack_result(0, 0)
        again = await subscription.receive(PATIENCE_S)
        assert again is not None
        assert again.key_hash is not None
        assert (again.entry_id.tolist(), again.redelivery_count.tolist(), again.key_hash.tolist()) == ([2], [1], [12])
        acknowledging, failing = subscription.ack(again), subscription.reject(again, "full", forwarded=True)
        assert (await acknowledging, await failing) == (0, nack_result(0, 1)), "it waits for the acknowledgement"
    await nothing_is_left(client, topic)


async def test_messages_that_never_were_in_tarry_come_back_with_their_key(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    nacked_ms = now_ms()
    assert await client.nack(topic, "sub", (9, [4, 5], 0), delay_ms=100, key_hash=[6, 7]) == nack_result(0, 0)
    leased = await client.get(topic, "sub", wait_ms=60_000)
    assert now_ms() >= nacked_ms + 100
    assert leased.key_hash is not None
    assert (leased.entry_id.tolist(), leased.deliver_at_ms.tolist()) == ([4, 5], [0, 0])
    assert (leased.key_hash.tolist(), leased.redelivery_count.tolist()) == ([6, 7], [1, 1])
    assert await client.ack(topic, "sub", leased) == 0
    await nothing_is_left(client, topic)


async def test_messages_of_a_batch_come_back_by_themselves_beside_their_entry(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    await client.add(topic, 7, 1, deliver_at_ms=now_ms())
    async with client.subscribe(topic, "sub") as subscription:
        entry = await subscription.receive(PATIENCE_S)
        assert entry is not None
        due_ms = int(entry.deliver_at_ms[0])
        await subscription.nack((7, [1, 1], due_ms), batch_index=[3, 4], delay_ms=100)
        assert subscription.held == 1
        assert sorted(await received(subscription, 2)) == [(1, 1, 3), (1, 1, 4)]
        await subscription.nack(entry, batch_index=5, delay_ms=FAR_MS)
        # Any hand-out of the entry as a whole: what is left of its messages ends with it.
        assert await subscription.ack(entry.positions[:3]) == 0
    await nothing_is_left(client, topic)


async def test_what_is_rejected_is_listed_filtered_replayed_and_purged(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub", EXACT)
    begun_ms = now_ms()
    for ledger, reason in ((7, "no such gate"), (8, "unreadable")):
        assert await client.reject(topic, "sub", (ledger, range(3), 0), reason) == nack_result(0, 3)
    first = await client.dead_letters_page(topic, "sub", page_size=4)
    assert (first.dead_letter_id.tolist(), first.texts[first.text_index[3]]) == ([1, 2, 3, 4], "unreadable")
    rest = await client.dead_letters_page(topic, "sub", page_token=first.next_page_token, page_size=4)
    assert (rest.dead_letter_id.tolist(), rest.next_page_token) == ([5, 6], "")
    of_8 = tarry.DeadLetterFilter(ledgers=(8, 8), reason=tarry.DeadLetterReason.REJECTED, from_ms=begun_ms)
    (page,) = [each async for each in client.dead_letters(topic, "sub", of_8)]
    assert page.dead_letter_id.tolist() == [4, 5, 6]
    assert [each async for each in client.dead_letters(topic, "sub", tarry.DeadLetterFilter(until_ms=begun_ms))] == []

    asked_ms = now_ms()
    which = tarry.DeadLetterFilter(ids=[2, 1, 99])
    assert await client.replay_dead_letters(topic, "sub", which, delay_ms=200) == tarry.Replayed(2, 0)
    assert await client.replay_dead_letters(topic, "sub", which) == tarry.Replayed(0, 0)
    leased = await client.get(topic, "sub", wait_ms=60_000)
    assert now_ms() >= asked_ms + 200
    assert (leased.ledger_id.tolist(), leased.entry_id.tolist()) == ([7, 7], [0, 1])
    assert leased.redelivery_count.tolist() == [0, 0]
    assert await client.purge_dead_letters(topic, "sub", of_8) == 3
    assert await client.purge_dead_letters(topic, "sub") == 1
    assert (await client.subscriptions_page(topic)).items[0].dead_letters == 0


async def test_a_dead_letter_stays_while_its_position_has_a_row(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub")
    await client.reject(topic, "sub", (7, [1, 2], 0))
    await client.add(topic, 7, 1, delay_ms=FAR_MS, subscription="sub")
    assert await client.replay_dead_letters(topic, "sub") == tarry.Replayed(replayed=1, skipped=1)
    page = await client.dead_letters_page(topic, "sub")
    assert page.entry_id.tolist() == [1]


async def test_what_stays_in_flight_too_long_is_nacked_unless_it_is_extended(
    client: tarry.aio.Client, topic: str
) -> None:
    policy = tarry.SubscriptionPolicy(ack_timeout_ms=4_000, redelivery=tarry.ConstantDelay(10), nack_precision_bits=0)
    await client.create_subscription(topic, "sub", policy)
    await client.add(topic, 7, [1, 2], deliver_at_ms=now_ms())
    async with client.subscribe(topic, "sub") as subscription:
        batch = await subscription.receive(PATIENCE_S)
        assert batch is not None
        while len(batch) < 2:
            more = await subscription.receive(PATIENCE_S)
            assert more is not None
            await subscription.nack(batch, delay_ms=0)
            subscription.release(more)
            batch = more
        came_ms = batch.received_at_ms
        held, extended = batch.take([0]), batch.take([1])
        entry = int(held.entry_id[0])
        again: tarry.Batch | None = None
        while again is None:
            assert await subscription.extend(extended) == 0
            again = await subscription.receive(0.5)
        assert (again.entry_id.tolist(), again.redelivery_count.tolist()) == ([entry], [1])
        assert now_ms() >= came_ms + 3_900
        await subscription.ack(again)
        await subscription.ack(extended)
    await nothing_is_left(client, topic)


async def test_rows_are_added_by_delay_level_and_counted_by_it(client: tarry.aio.Client, topic: str) -> None:
    answer = await client.set_delay_levels(topic, tarry.DelayLevels("1s 2h 1h"))
    assert answer.levels == tarry.DelayLevels("1s 2h 1h")
    assert len(answer.warnings) == 1
    before_ms = now_ms()
    await client.add(topic, 7, range(5), delay_level=[1, 2, 2, 3, 99])
    async with client.add_stream(topic) as stream:
        _ = await stream.add(8, range(2), delay_level=3)
    in_force = await client.delay_levels(topic)
    assert (in_force.delay_ms, in_force.of_topic) == ((1_000, 7_200_000, 3_600_000), True)
    assert in_force.pending[1:] == (2, 4)
    (page,) = [each async for each in client.scheduled(topic, ledgers=(8, 8))]
    assert (page.deliver_at_ms >= before_ms + FAR_MS).all()
    await client.set_delay_levels(topic, tarry.DelayLevels("5s", clamp=False))
    assert (await client.delay_levels(topic)).pending[1:] == (2, 4)
    wrong: list[tuple[Callable[[], Awaitable[Any]], str]] = [
        (lambda: client.add(topic, 9, 1, delay_level=2), "the highest level of the table is 1"),
        (lambda: client.add(topic, 9, 1, delay_level=-1), "a level is 0, which is no delay, to 1"),
        (lambda: client.set_delay_levels(topic, tarry.DelayLevels("1s 5x")), "character 4"),
    ]
    for call, says in wrong:
        with pytest.raises(tarry.InvalidArgument, match=says):
            await call()
    assert (await client.set_delay_levels(topic, None)).levels == (await client.delay_levels()).levels
    with pytest.raises(tarry.NotFound):
        await client.delay_levels(topic + " that does not exist")


async def test_bad_redelivery_requests_are_refused_by_name(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub")
    one = (7, 1, 0)
    policy = tarry.SubscriptionPolicy
    wrong: list[tuple[Callable[[], Awaitable[Any]], type[tarry.TarryError], str]] = [
        (lambda: client.nack(topic, "sub", (7, [1, 1], 0)), tarry.InvalidArgument, "names a position once"),
        (lambda: client.nack(topic, "sub", one, delay_ms=2**60), tarry.OutOfRange, "delay_ms"),
        (lambda: client.nack(topic, "sub", one, delay_level=-1), tarry.InvalidArgument, "delay_level"),
        (lambda: client.nack(topic, "sub", one, batch_index=65_536), tarry.InvalidArgument, "batch_index"),
        (lambda: client.nack(topic, "sub", (7, 2**48, 0), batch_index=1), tarry.InvalidArgument, "entry_id"),
        (lambda: client.reject(topic, "sub", one, "x" * 1_025), tarry.InvalidArgument, "reason"),
        (lambda: client.nack(topic, "other", one), tarry.NotFound, "other"),
        (lambda: client.purge_dead_letters(topic, "other"), tarry.NotFound, "other"),
        (
            lambda: client.dead_letters_page(topic, "sub", tarry.DeadLetterFilter(from_ms=5, until_ms=4)),
            tarry.InvalidArgument,
            "until_ms|from_ms",
        ),
        (lambda: client.dead_letters_page(topic, "sub", page_token="x"), tarry.InvalidArgument, "page_token"),
    ]
    for call, kind, says in wrong:
        with pytest.raises(kind, match=says):
            await call()
    for bad, says in (
        (policy(ack_timeout_ms=5), "ack_timeout_ms is 5"),
        (policy(nack_precision_bits=21), "nack_precision_bits is 21"),
        (policy(redelivery=tarry.DelayList(())), "redelivery"),
        (policy(redelivery=tarry.ExponentialDelay(1_000, jitter=2)), "jitter"),
    ):
        with pytest.raises(tarry.InvalidArgument, match=says):
            await client.update_subscription(topic, "sub", bad)
    assert (await client.backlog_page(topic, "sub")).entry_id.tolist() == []


async def test_after_a_kill_what_is_nacked_comes_at_its_time_with_its_count_and_nacks_land_once(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    await client.create_subscription(topic, "sub", EXACT)
    await client.reject(topic, "sub", (3, 1, 0), "no such gate")
    async with client.subscribe(topic, "sub") as subscription:
        await client.add(topic, 7, range(6), deliver_at_ms=now_ms())
        batches: list[tarry.Batch] = []
        while sum(map(len, batches)) < 6:
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
            batches.append(batch)
        for batch in batches:
            await subscription.nack(batch, delay_ms=FAR_MS)
        nacked_ms = now_ms()
        await in_thread(mortal_daemon.kill)
        # Nobody answers: it is sent when there is a stream again, and gives the delay anew.
        unanswered = [subscription.nack(batch, delay_ms=5_000) for batch in batches]
        await in_thread(mortal_daemon.start_serving)
        for answer in unanswered:
            assert await answer == nack_result(0, 0)
        (stats,) = (await client.stats(topic)).subscriptions
        # On a busy machine they may be on their way again.
        assert stats.nacked == 6 or now_ms() >= nacked_ms + 5_000
        assert sorted(await received(subscription, 6)) == [(entry, 1, None) for entry in range(6)]
        assert now_ms() >= nacked_ms + 5_000
    page = await client.dead_letters_page(topic, "sub")
    assert (page.ledger_id.tolist(), page.texts[page.text_index[0]]) == ([3], "no such gate")
    await nothing_is_left(client, topic)
