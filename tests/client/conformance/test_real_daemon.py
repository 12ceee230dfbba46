"""Both clients and a real daemon: every call in the life of a topic, every failure that it answers, and its death."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tarry
import tarry.aio
from examples import processes
from tests._support.processes import Daemons
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 600.0
FAR_MS = 3_600_000
SETTINGS: dict[str, object] = {"daemon.shards": 4, "journal.checkpoint_slots": 40, "delivery.lookahead_ms": 2_000}


@pytest.fixture(scope="module")
def daemon_settings() -> dict[str, object]:
    return SETTINGS


@pytest.fixture
def client(shared_daemon: processes.DaemonProcess, connect: Connect) -> tarry.aio.Client:
    return connect(shared_daemon.address, timeout_s=PATIENCE_S)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def restart(daemon: processes.DaemonProcess) -> None:
    """SIGKILL, and again on its root and its ports."""
    await in_thread(daemon.kill)
    await in_thread(daemon.start_serving)


async def nothing_is_left(client: tarry.aio.Client, topic: str) -> None:
    stats = await client.stats(topic)
    assert stats.pending == 0
    assert [each.backlog for each in stats.subscriptions] == [0] * len(stats.subscriptions)


async def test_rows_are_added_looked_at_trimmed_and_cleared(client: tarry.aio.Client, topic: str) -> None:
    assert (await client.add(topic, 7, range(1, 9), delay_ms=FAR_MS)).accepted == 8
    assert (await client.add(topic, 7, range(8, 12), delay_ms=FAR_MS)).duplicates == 1
    found = await client.contains(topic, 7, 0, last_entry_id=100)
    assert (list(found.pending), list(found.due)) == ([(7, 1, 11)], [])
    assert list((await client.contains(topic, [7, 7, 8], [0, 5, 5])).pending) == [(7, 5, 5)]
    assert list((await client.contains(topic + " that does not exist", 7, 0)).pending) == []
    assert await client.trim(topic, 7, 4) == 4
    assert list((await client.contains(topic, 7, 0, last_entry_id=100)).pending) == [(7, 5, 11)]
    await client.add(topic, 9, range(3), delay_ms=FAR_MS)
    assert list(await client.retention(topic)) == [(7, 5), (9, 0)]
    assert list(await client.retention(topic, [9, 8])) == [(9, 0)]
    assert await client.trim(topic, 9, 0, all_lower_ledgers=True) == 8
    assert (await client.retention(topic)).lowest_position == (9, 1)
    assert await client.clear(topic) == 2
    assert (await client.retention(topic)).lowest_position is None
    assert (await client.stats(topic)).pending == 0


async def test_what_is_trimmed_to_dead_letters_is_listed_and_may_be_replayed(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "s")
    await client.create_subscription(topic, "other")
    await client.add(topic, 7, range(5), delay_ms=FAR_MS)
    trimmed = await client.trim(topic, 7, 2, dead_letter=True, subscription="s")
    assert (trimmed, trimmed.dead_lettered, trimmed.may_have_landed) == (3, 3, False)
    pages = [page async for page in client.dead_letters(topic, "s")]
    assert [(page.entry_id.tolist(), page.deliver_at_ms.tolist()) for page in pages] == [([0, 1, 2], [0, 0, 0])]
    assert pages[0].reason.tolist() == [tarry.DeadLetterReason.TRIMMED] * 3
    assert (await client.retention(topic)).lowest_position == (7, 0), "another subscription is owed it"
    with pytest.raises(tarry.InvalidArgument, match="dead_letter is set, and subscription is empty"):
        await client.trim(topic, 7, 2, dead_letter=True)


async def test_due_rows_are_leased_acknowledged_and_given_back(client: tarry.aio.Client, topic: str) -> None:
    created = await client.create_subscription(topic, "sub", tarry.SubscriptionPolicy(lease_ms=600_000))
    assert created.created
    assert not (await client.create_subscription(topic, "sub", tarry.SubscriptionPolicy(lease_ms=600_000))).created
    assert len(await client.get(topic, "sub")) == 0
    due_ms = now_ms() + 300
    await client.add(topic, 7, range(10), deliver_at_ms=due_ms, key_hash=tarry.key_hash("key"))
    leased = await client.get(topic, "sub", max_rows=6, wait_ms=60_000)
    while len(leased) < 6:
        more = await client.get(topic, "sub", max_rows=6, wait_ms=60_000)
        assert await client.extend_lease(topic, "sub", more, 0) == 0
        assert await client.extend_lease(topic, "sub", leased, 0) == 0
        leased = await client.get(topic, "sub", max_rows=6, wait_ms=60_000)
    assert leased.lease_ms == 600_000
    assert set(leased.deliver_at_ms.tolist()) == {due_ms}
    assert leased.key_hash is not None
    assert set(leased.key_hash.tolist()) == set(tarry.key_hash("key").tolist())
    assert leased.received_at_ms >= due_ms
    assert await client.ack(topic, "sub", leased.take(slice(0, 4))) == 0
    assert await client.ack(topic, "sub", leased.take(slice(0, 4))) == 4
    (stats,) = (await client.stats(topic)).subscriptions
    assert (stats.backlog, stats.leased, stats.policy.lease_ms) == (6, 2, 600_000)
    assert await client.extend_lease(topic, "sub", leased.take(slice(4, 6)), 0) == 0
    rest = await client.get(topic, "sub", lease_ms=5_000, wait_ms=1_000)
    assert sorted(rest.entry_id.tolist()) == sorted(set(range(10)) - set(leased.entry_id[:4].tolist()))
    assert list((await client.contains(topic, 7, 0, last_entry_id=99, subscription="sub")).due.ledger_id) != []
    assert await client.ack(topic, "sub", rest.positions) == 0
    await nothing_is_left(client, topic)


async def test_a_lease_that_is_over_is_handed_out_again(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub")
    await client.add(topic, 7, 1, deliver_at_ms=now_ms())
    first = await client.get(topic, "sub", lease_ms=50, wait_ms=60_000)
    again = await client.get(topic, "sub", wait_ms=60_000)
    assert (first.entry_id.tolist(), again.entry_id.tolist()) == ([1], [1])
    assert await client.ack(topic, "sub", first) == 0


async def test_topics_buckets_subscriptions_and_policies_are_shown(client: tarry.aio.Client, topic: str) -> None:
    effective = await client.set_policy(topic, tarry.TopicPolicy(bucket_rows_max=10_000))
    assert effective.bucket_rows_max == 10_000
    assert effective.bucket_form is tarry.BucketForm.COLUMNAR
    shown = await client.policy(topic)
    assert (shown.policy, shown.effective) == (tarry.TopicPolicy(bucket_rows_max=10_000), effective)
    await client.add(topic, 7, range(1_000), delay_ms=FAR_MS)
    sealed = await client.seal(topic)
    assert sealed.rows == 1_000
    (bucket,) = [bucket async for bucket in client.buckets(topic)]
    assert (bucket.bucket, bucket.pending, bucket.quarantined) == (sealed.bucket, 1_000, False)
    assert (await client.buckets_page(topic)).mutable_rows == 0
    assert await client.seal(topic) == tarry.Sealed(0, "")
    for name in ("a", "b"):
        await client.create_subscription(topic, name)
    assert await client.update_subscription(topic, "b", tarry.SubscriptionPolicy(in_flight_rows_max=5)) == (
        tarry.SubscriptionPolicy(in_flight_rows_max=5)
    )
    listed = [each async for each in client.subscriptions(topic)]
    assert [(each.subscription, each.policy.in_flight_rows_max) for each in listed] == [("a", None), ("b", 5)]
    assert (await client.subscriptions_page(topic, page_size=1)).next_page_token != ""
    assert topic in [each.topic async for each in client.topics()]
    location = await client.lookup(topic)
    assert location.served_here
    assert location.shard == (await client.stats(topic)).shard
    await client.delete_subscription(topic, "a")
    deleted = await client.delete_topic(topic)
    assert deleted.rows == 1_000
    with pytest.raises(tarry.NotFound):
        await client.stats(topic)
    assert (await client.add(topic, 7, 1, delay_ms=FAR_MS)).accepted == 1
    assert deleted.incarnation is not None
    assert (await client.stats(topic)).incarnation > deleted.incarnation


async def test_every_refusal_is_its_own_failure(client: tarry.aio.Client, topic: str) -> None:
    with pytest.raises(tarry.NotFound):
        await client.stats(topic)
    missing: tuple[Awaitable[Any], ...] = (
        client.get(topic, "sub"),
        client.trim(topic, 1, 1),
        client.clear(topic),
        client.delete_topic(topic),
        client.policy(topic),
        client.seal(topic),
        client.delete_subscription(topic, "sub"),
        client.update_subscription(topic, "sub", tarry.SubscriptionPolicy()),
    )
    for call in missing:
        with pytest.raises(tarry.NotFound):
            await call
    with pytest.raises(tarry.NotFound):
        await client.subscribe(topic, "sub")
    await client.create_subscription(topic, "sub", tarry.SubscriptionPolicy(lease_ms=1_000))
    with pytest.raises(tarry.AlreadyExists):
        await client.create_subscription(topic, "sub", tarry.SubscriptionPolicy(lease_ms=2_000))
    with pytest.raises(tarry.OutOfRange):
        await client.add(topic, 1, 1, delay_ms=100 * 365 * 86_400_000)
    wrong: tuple[Awaitable[Any], ...] = (
        client.add("t" * 2_000, 1, 1, delay_ms=1),
        client.trim(topic, [1, 2], 1, all_lower_ledgers=True),
        client.contains(topic, 1, 5, last_entry_id=4),
        client.get(topic, "sub", max_rows=0),
        client.get(topic, "sub", wait_ms=3_600_000),
        client.set_policy(topic, tarry.TopicPolicy(bucket_rows_max=0)),
        client.update_subscription(topic, "sub", tarry.SubscriptionPolicy(in_flight_rows_max=0)),
    )
    for call in wrong:
        with pytest.raises(tarry.InvalidArgument):
            await call
    async with client.add_stream(topic) as stream:
        with pytest.raises(tarry.OutOfRange):
            await (await stream.add(1, 1, delay_ms=100 * 365 * 86_400_000))
        assert (await (await stream.add(1, range(5), delay_ms=FAR_MS))).accepted == 5
        with pytest.raises(tarry.OutOfRange):
            await stream.flush()


async def test_a_client_waits_for_its_rate_as_long_as_the_daemon_says(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    hasty = connect(shared_daemon.address, timeout_s=PATIENCE_S, client_id="hasty")
    other = connect(shared_daemon.address, timeout_s=PATIENCE_S, client_id="other")
    effective = await hasty.set_policy(topic, tarry.TopicPolicy(client_rows_per_second_max=1_000))
    assert effective.client_rows_per_second_max == 1_000
    began_s = time.monotonic()
    async with hasty.add_stream(topic, in_flight=1) as stream:
        for first in range(0, 1_500, 500):
            assert (await (await stream.add(1, range(first, first + 500), delay_ms=FAR_MS))).accepted == 500
    assert (await hasty.add(topic, 1, range(1_500, 2_000), delay_ms=FAR_MS)).accepted == 500
    # The first request takes from what was saved up, and each one may run into debt.
    assert time.monotonic() - began_s >= 0.5
    assert (await other.add(topic, 2, range(1_000), delay_ms=FAR_MS)).accepted == 1_000
    assert (await hasty.stats(topic)).pending == 3_000


async def test_a_request_beyond_a_quota_is_refused_whole_and_once(client: tarry.aio.Client, topic: str) -> None:
    await client.set_policy(topic, tarry.TopicPolicy(pending_rows_max=10, due_rows_per_second_max=8))
    with pytest.raises(tarry.ResourceExhausted, match="pending_rows_max is 10") as raised:
        await client.add(topic, 1, range(11), deliver_at_ms=[now_ms() + FAR_MS + 1_000 * row for row in range(11)])
    assert (raised.value.attempts, raised.value.retry_after_ms) == (1, None)
    with pytest.raises(tarry.ResourceExhausted, match="due_rows_per_second_max is 8"):
        await client.add(topic, 1, range(9), delay_ms=FAR_MS)
    assert (await client.stats(topic)).pending == 0
    assert (await client.add(topic, 1, range(8), delay_ms=FAR_MS)).accepted == 8


async def test_a_subscription_that_exists_is_opened_and_its_policy_stays(client: tarry.aio.Client, topic: str) -> None:
    policy = tarry.SubscriptionPolicy(lease_ms=60_000)
    await client.create_subscription(topic, "sub", policy)
    async with client.subscribe(topic, "sub", create=True):
        pass
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")], create=True):
        pass
    assert [each.policy async for each in client.subscriptions(topic)] == [policy]


async def test_what_is_due_comes_once_and_is_gone_when_acknowledged(client: tarry.aio.Client, topic: str) -> None:
    rows = 20_000
    seen: list[int] = []
    async with client.subscribe(topic, "sub", create=True, permits=3_000) as subscription:
        async with client.add_stream(topic, in_flight=4) as stream:
            for first in range(0, rows, 1_000):
                _ = await stream.add(7, np.arange(first, first + 1_000), delay_ms=50)
        while len(seen) < rows:
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
            assert (batch.lateness_ms >= 0).all()
            seen += batch.entry_id.tolist()
            _ = subscription.ack(batch)
        await subscription.flush(PATIENCE_S)
        assert subscription.rebuild_needed == ()
    assert sorted(seen) == list(range(rows))
    await nothing_is_left(client, topic)


async def test_a_subscription_that_is_deleted_ends_its_stream(client: tarry.aio.Client, topic: str) -> None:
    subscription = await client.subscribe(topic, "sub", create=True)
    await client.delete_subscription(topic, "sub")
    with pytest.raises(tarry.NotFound):
        await subscription.receive(PATIENCE_S)
    await subscription.close()


async def test_a_topic_that_is_deleted_ends_its_streams(client: tarry.aio.Client, topic: str) -> None:
    subscription = await client.subscribe(topic, "sub", create=True)
    await client.add(topic, 7, range(10), delay_ms=FAR_MS)
    assert (await client.delete_topic(topic)).rows == 10
    with pytest.raises(tarry.NotFound):
        await subscription.receive(PATIENCE_S)
    await subscription.close()


# The daemon dies.


async def test_nothing_is_lost_when_the_daemon_is_killed_while_rows_go_in_and_out(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    """Two kills: 30 batches are answered, every row of them comes, what is acknowledged is gone for good."""
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    batches, rows = 30, 100
    seen: set[int] = set()
    kills = 0

    async def add() -> None:
        nonlocal kills
        async with client.add_stream(topic, in_flight=8) as stream:
            answers = []
            for number in range(batches):
                entries = np.arange(number * rows, (number + 1) * rows)
                answers.append(await stream.add(number, entries, delay_ms=20))
                if number in (10, 20):
                    await answers[number - 9]
                    await restart(mortal_daemon)
                    kills += 1
            for answer in answers:
                result = await answer
                assert result.accepted + result.duplicates == rows

    async with client.subscribe(topic, "sub", create=True, permits=500) as subscription:
        adding = asyncio.create_task(add())
        confirmed = []
        while len(seen) < batches * rows:
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
            seen.update(batch.entry_id.tolist())
            confirmed.append(subscription.ack(batch))
        await adding
        await subscription.flush(PATIENCE_S)
        for each in confirmed:
            await each
        assert 2 <= subscription.streams_opened <= 1 + kills
    assert seen == set(range(batches * rows))
    await nothing_is_left(client, topic)


async def test_calls_go_on_when_the_daemon_comes_back(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    await client.create_subscription(topic, "sub")
    await client.add(topic, 7, range(100), deliver_at_ms=now_ms())
    leased = await client.get(topic, "sub", wait_ms=60_000)
    assert len(leased) > 0
    await in_thread(mortal_daemon.kill)
    adding = asyncio.ensure_future(client.add(topic, 8, range(5), delay_ms=FAR_MS))
    counting = asyncio.ensure_future(client.stats(topic))
    looking = asyncio.ensure_future(client.contains(topic, 7, 0, last_entry_id=99))
    setting = asyncio.ensure_future(client.set_policy(topic, tarry.TopicPolicy(delay_max_ms=2 * FAR_MS)))
    # A lease is not durable; its positions are still owed, with the same time.
    acknowledging = asyncio.ensure_future(client.ack(topic, "sub", leased))
    await in_thread(mortal_daemon.start_serving)
    added, stats, found = await adding, await counting, await looking
    effective, ignored = await setting, await acknowledging
    assert added.accepted + added.duplicates == 5
    assert stats.topic == topic
    assert found.pending.rows + found.due.rows in (100, 100 - len(leased))
    assert effective.delay_max_ms == 2 * FAR_MS
    assert ignored == 0
    seen = set(leased.entry_id.tolist())
    while len(seen) < 100:
        batch = await client.get(topic, "sub", wait_ms=60_000)
        assert not seen & set(batch.entry_id.tolist()), "what was acknowledged does not come again"
        seen |= set(batch.entry_id.tolist())
        assert await client.ack(topic, "sub", batch) == 0
    assert (await client.stats(topic)).subscriptions[0].backlog == 0


async def test_what_is_held_is_not_sent_again_by_the_next_daemon(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    async with client.subscribe(topic, "sub", create=True) as subscription:
        await client.add(topic, 7, range(50), deliver_at_ms=now_ms())
        held: list[tarry.Batch] = []
        while sum(map(len, held)) < 50:
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
            held.append(batch)
        await restart(mortal_daemon)
        await client.add(topic, 8, 1, deliver_at_ms=now_ms())
        after = await subscription.receive(PATIENCE_S)
        assert after is not None
        assert after.ledger_id.tolist() == [8]
        assert subscription.streams_opened == 2
        for batch in (*held, after):
            assert await subscription.ack(batch) == 0
    await nothing_is_left(client, topic)


async def test_a_daemon_that_is_stopped_in_order_is_found_again(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    async with client.subscribe(topic, "sub", create=True) as subscription:
        await client.add(topic, 7, range(10), deliver_at_ms=now_ms())
        first = await subscription.receive(PATIENCE_S)
        assert first is not None
        confirmed = subscription.ack(first)
        assert await in_thread(mortal_daemon.terminate) == 0
        await in_thread(mortal_daemon.start_serving)
        await confirmed
        seen = set(first.entry_id.tolist())
        while len(seen) < 10:
            batch = await subscription.receive(PATIENCE_S)
            assert batch is not None
            seen |= set(batch.entry_id.tolist())
            _ = subscription.ack(batch)
    await nothing_is_left(client, topic)


async def test_when_the_owner_is_gone_the_daemon_that_takes_over_is_found(
    tmp_path: Path, connect: Connect, topic: str
) -> None:
    """The target names two daemons: the owner, which dies for good, and the one that stands by."""
    daemons = Daemons(tmp_path)
    settings = SETTINGS | processes.local_store(tmp_path / "root")
    owner, standby = daemons.make("owner", settings), daemons.make("standby", settings)
    try:
        await in_thread(owner.start_serving)
        await in_thread(standby.start)
        client = connect(f"ipv4:{owner.address},{standby.address}", timeout_s=PATIENCE_S)
        beside = connect(standby.address, timeout_s=PATIENCE_S)
        async with client.subscribe(topic, "sub", create=True) as subscription, client.add_stream(topic) as stream:
            assert (await (await stream.add(7, range(10), delay_ms=0))).accepted == 10
            first = await subscription.receive(PATIENCE_S)
            assert first is not None
            assert (await beside.lookup(topic)).owner_address == owner.address
            assert (await beside.add(topic, 9, 1, delay_ms=FAR_MS)).accepted == 1, "the owner that it names is asked"
            epoch = subscription.epoch
            confirmed = subscription.ack(first)
            await in_thread(owner.kill)
            assert (await (await stream.add(8, range(10), delay_ms=0))).accepted == 10
            await confirmed
            seen = set(zip(first.ledger_id.tolist(), first.entry_id.tolist(), strict=True))
            while len(seen) < 20:
                batch = await subscription.receive(PATIENCE_S)
                assert batch is not None
                seen |= set(zip(batch.ledger_id.tolist(), batch.entry_id.tolist(), strict=True))
                _ = subscription.ack(batch)
            assert subscription.epoch > epoch
        assert (await beside.lookup(topic)).served_here
        assert (await beside.stats(topic)).pending == 1
    finally:
        daemons.end()


async def test_invalid_rows_come_back_and_the_others_are_there(client: tarry.aio.Client, topic: str) -> None:
    long, seconds, level = tarry.RefusedReason
    due_ms = time.time_ns() // 1_000_000 + FAR_MS
    times = [due_ms, due_ms // 1000, 2**64 - 1, due_ms]
    answer = await client.add(topic, 7, range(4), deliver_at_ms=times, on_invalid=tarry.OnInvalid.RETURN)
    assert (answer.accepted, [*answer.refused.items()]) == (2, [(1, seconds), (2, long)])
    async with client.add_stream(topic) as stream:
        levels = await (await stream.add(8, range(3), delay_level=[1, -1, 1], on_invalid=tarry.OnInvalid.RETURN))
        with pytest.raises(tarry.OutOfRange):
            await (await stream.add(9, range(2), deliver_at_ms=[due_ms, 2**64 - 1]))
        stream_failure = stream.flush()
        with pytest.raises(tarry.OutOfRange):
            await stream_failure
    assert (levels.accepted, [*levels.refused.items()]) == (2, [(1, level)])
    assert [*(await client.contains(topic, [7, 8, 9], 0, last_entry_id=9)).pending] == [
        (7, 0, 0), (7, 3, 3), (8, 0, 0), (8, 2, 2),
    ]  # fmt: skip
