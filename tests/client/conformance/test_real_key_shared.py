"""Both clients and a real daemon: keys in order at several consumers, through delays, nacks, leaves and a kill."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import tarry
import tarry.aio
from examples import processes
from tests._support.outcomes import nack_result
from tests._support.patience import awaited_within_some_time
from tests.client.conformance._support.keyed_batches import PATIENCE_S, batches
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

FAR_MS = 3_600_000
KEY = tarry.key_hash("N14228")
BLOCKING = tarry.SubscriptionPolicy(
    nack_precision_bits=0, key_shared=tarry.KeySharedPolicy(nack_order=tarry.NackOrder.BLOCK_KEY)
)
LAST_SENT = tarry.SubscriptionPolicy(key_shared=tarry.KeySharedPolicy(order=tarry.KeyOrder.LAST_SENT_POSITION))


@pytest.fixture
def client(shared_daemon: processes.DaemonProcess, connect: Connect) -> tarry.aio.Client:
    return connect(shared_daemon.address, timeout_s=PATIENCE_S)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def entries(received: list[tarry.ConsumerBatch]) -> list[int]:
    return [entry for batch in received for entry in batch.entry_id.tolist()]


async def test_equal_delays_keep_the_order_of_publication_at_one_consumer_for_each_key(
    client: tarry.aio.Client, topic: str
) -> None:
    consumers = [tarry.Consumer(name) for name in "abcd"]
    async with client.subscribe_key_shared(topic, "sub", consumers=consumers, create=True) as subscription:
        hashes = tarry.key_hash([f"key-{entry % 50}" for entry in range(1_000)])
        await client.add(topic, 7, range(1_000), delay_ms=100, key_hash=hashes)
        received = await batches(subscription, 1_000)
        by_key: dict[int, list[tuple[int, tarry.Consumer]]] = {}
        for batch in received:
            for entry in batch.entry_id.tolist():
                by_key.setdefault(entry % 50, []).append((entry, batch.consumer))
            _ = subscription.ack(batch)
        assert len({batch.consumer for batch in received}) == 4
        for key, came in by_key.items():
            assert [entry for entry, _ in came] == list(range(key, 1_000, 50))
            assert len({consumer for _, consumer in came}) == 1


async def test_a_delayed_message_takes_its_place_when_it_is_due(client: tarry.aio.Client, topic: str) -> None:
    """m1 now, m2 later, m3 now: m1, m3, m2."""
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")], create=True) as subscription:
        await client.add(topic, 7, 2, delay_ms=FAR_MS, key_hash=KEY)
        assert (await subscription.plan(7, [1, 3], KEY)).tolist() == [1, 1]
        received = await batches(subscription, 2)
        assert (await client.reschedule(topic, 7, 2, delay_ms=100)).rescheduled == 1
        received += await batches(subscription, 1)
        assert entries(received) == [1, 3, 2]
        assert received[-1].lateness_ms[-1] >= 0
        for batch in received:
            assert await subscription.ack(batch) == 0


async def test_what_was_passed_on_and_failed_comes_again_with_its_key(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub", BLOCKING)
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")]) as subscription:
        await client.add(topic, 7, range(2), deliver_at_ms=now_ms(), key_hash=KEY)
        received = await batches(subscription, 2)
        # While a row is READY every plan is HELD.
        assert (await subscription.plan(7, 5, KEY)).tolist() == [1]
        received += await batches(subscription, 1)
        for batch in received:
            assert await subscription.ack(batch) == 0
        for batch in received:
            assert await subscription.nack(batch, delay_ms=100, forwarded=True) == nack_result(0, 0)
        again = await batches(subscription, 3)
        assert sorted(entries(again)) == [0, 1, 5]
        for batch in again:
            assert batch.key_hash is not None
            assert (set(batch.redelivery_count.tolist()), set(batch.key_hash.tolist())) == ({1}, {int(KEY[0])})
            assert await subscription.ack(batch) == 0


async def test_later_messages_of_a_key_wait_for_the_nacked_one(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub", BLOCKING)
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")]) as subscription:
        await client.add(topic, 7, range(4), deliver_at_ms=now_ms(), key_hash=KEY)
        received = await batches(subscription, 4)
        assert entries(received) == [0, 1, 2, 3]
        second = 7, 1, received[0].deliver_at_ms[0]
        nacked = subscription.nack(second, delay_ms=FAR_MS)
        taken: list[int] = []
        while len(taken) < 2:
            event = await subscription.receive(PATIENCE_S)
            assert isinstance(event, tarry.TakenBack)
            taken += event.positions.entry_id.tolist()
        assert taken == [2, 3]
        assert await nacked == nack_result(0, 0)
        assert subscription.held == 1
        assert await subscription.ack((7, [2, 3], received[0].deliver_at_ms[0])) == 2
        assert await subscription.ack((7, 0, received[0].deliver_at_ms[0])) == 0
        assert await subscription.nack(second, delay_ms=100) == nack_result(0, 0)
        again = await batches(subscription, 1)
        assert again[0].redelivery_count[0] == 1
        again += await batches(subscription, 3 - len(again[0]))
        assert entries(again) == [1, 2, 3]
        for batch in again:
            assert await subscription.ack(batch) == 0
    (stats,) = (await client.stats(topic)).subscriptions
    assert stats.backlog == 0


async def test_what_a_consumer_held_goes_to_another_when_it_leaves(client: tarry.aio.Client, topic: str) -> None:
    a, b = tarry.Consumer("a"), tarry.Consumer("b")
    async with client.subscribe_key_shared(topic, "sub", consumers=[a], create=True) as subscription:
        await client.add(topic, 7, range(10), deliver_at_ms=now_ms(), key_hash=KEY)
        assert entries(await batches(subscription, 10)) == list(range(10))
        await subscription.add_consumer(b)
        await subscription.remove_consumer(a)
        received = await batches(subscription, 10)
        assert entries(received) == list(range(10))
        assert {batch.consumer for batch in received} == {b}
        assert subscription.held == 10
        for batch in received:
            assert await subscription.ack(batch) == 0


async def test_a_held_message_comes_when_its_consumer_has_permits(client: tarry.aio.Client, topic: str) -> None:
    a = tarry.Consumer("a", permits=1)
    async with client.subscribe_key_shared(topic, "sub", consumers=[a], create=True) as subscription:
        planned = await subscription.plan(7, range(3), tarry.key_hash(["x", "x", "y"]))
        assert planned.tolist() == [1, tarry.HELD, tarry.HELD]
        for entry in range(3):
            (batch,) = await batches(subscription, 1)
            assert batch.entry_id.tolist() == [entry]
            assert await subscription.ack(batch) == 0


async def test_who_joins_waits_for_the_mark_delete_position_where_the_policy_says_so(
    client: tarry.aio.Client, topic: str
) -> None:
    await client.create_subscription(topic, "sub", LAST_SENT)
    hashes = tarry.key_hash([f"key-{entry}" for entry in range(100)])
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")]) as subscription:
        assert (await subscription.plan(7, range(100), hashes)).tolist() == [1] * 100
        assert entries(await batches(subscription, 100)) == list(range(100))
        await subscription.add_consumer(tarry.Consumer("b"))
        second = await subscription.plan(7, range(100, 200), hashes)
        held = second == tarry.HELD
        assert 0 < held.sum() < 100
        assert set(second[~held].tolist()) == {1}
        received = await batches(subscription, int((~held).sum()))
        await subscription.mark_delete(7, 99)
        late = await batches(subscription, int(held.sum()))
        assert {batch.consumer.name for batch in late} == {"b"}
        assert entries(late) == (100 + np.flatnonzero(held)).tolist()
        for batch in (*received, *late):
            assert await subscription.ack(batch) == 0


async def test_while_it_is_open_there_are_no_streams_of_another_type(client: tarry.aio.Client, topic: str) -> None:
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")], create=True):

        async def story(seconds: float) -> None:
            with pytest.raises(tarry.DeadlineExceeded) as refused:
                await client.subscribe(topic, "sub", timeout_s=seconds)
            assert isinstance(refused.value.last, tarry.Aborted)

        await awaited_within_some_time(story)
    async with client.subscribe(topic, "sub"):
        pass


async def test_after_a_kill_consumers_keep_what_they_hold_and_the_rest_is_planned_again(
    mortal_daemon: processes.DaemonProcess, connect: Connect
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    consumers = [tarry.Consumer("a", permits=40), tarry.Consumer("b", permits=40)]
    hashes = tarry.key_hash([f"key-{entry % 20}" for entry in range(200)])
    seen: list[int] = []
    async with client.subscribe_key_shared("t", "sub", consumers=consumers, create=True) as subscription:
        await client.add("t", 9, range(20), deliver_at_ms=now_ms(), key_hash=hashes[:20])
        due = await batches(subscription, 20)
        first = await subscription.plan(7, range(200), hashes)
        held = np.flatnonzero(first)
        assert 0 < len(held) < 200
        waiting = due + await batches(subscription, len(held))
        await in_thread(mortal_daemon.kill)
        await in_thread(mortal_daemon.start_serving)
        event: Any = await subscription.receive(PATIENCE_S)
        assert isinstance(event, tarry.PlanAgain), "nothing is taken back: all of it was declared"
        again = await subscription.plan(7, range(200), hashes, anew=True)
        assert again[held].tolist() == first[held].tolist(), "what consumers hold stays with them"
        last: dict[int, int] = {}
        while waiting or len(seen) < 200:
            if not waiting:
                waiting += await batches(subscription, 1)
            batch = waiting.pop(0)
            assert await subscription.ack(batch) == 0
            if batch.ledger_id[0] == 7:
                seen += batch.entry_id.tolist()
                for entry in batch.entry_id.tolist():
                    assert last.get(entry % 20, -1) < entry, "the messages of a key come in their order"
                    last[entry % 20] = entry
    assert sorted(seen) == list(range(200))
