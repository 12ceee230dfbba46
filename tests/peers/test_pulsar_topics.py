"""Dispatchers, subscriptions and topics that come and go, as `BucketDelayedDeliveryTest` has them."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import NotFound
from tests._support.engine_fixture import EngineFixture
from tests.daemon._support.calling import create, delete_topic, get, rows_of, stats
from tests.peers.tracking import (
    BUCKETS,
    NOTHING,
    add,
    add_one_by_one,
    counts,
    live_objects,
    manifest_of,
    sealed_at,
    sealed_buckets,
    until_sealed,
)


async def test_when_all_dispatchers_have_gone_1000_rows_and_their_buckets_stay(machines: EngineFixture) -> None:
    settings = sealed_at(200)
    one = await machines.served_by("one", *settings)
    receivers = [await one.receiver("t"), await one.receiver("t")]
    due_ms = machines.now_ms() + 60_000
    rows = [(ledger, entry, due_ms + ledger) for ledger in range(10) for entry in range(100)]
    for ledger in range(10):
        assert (await add(one, rows[100 * ledger : 100 * (ledger + 1)])).accepted == 100
    await until_sealed(one, 4)
    before = live_objects(machines), counts(await stats(one))
    for receiver in receivers:
        receiver.stream.close()
    await asyncio.sleep(20)
    assert (live_objects(machines), counts(await stats(one))) == before
    assert (await stats(one)).pending == 1_000
    again = await one.receiver("t")
    assert (live_objects(machines), counts(await stats(one))) == before
    assert await again.received(1_000) == rows
    assert not any(receiver.rows for receiver in receivers)
    assert not again.early


async def test_deleting_the_last_subscription_after_a_restart_buries_each_bucket_that_was_due_and_no_other(
    machines: EngineFixture,
) -> None:
    """The index is shared: what is pending waits for the next subscription."""
    settings = sealed_at(10)
    one = await machines.served_by("one", *settings)
    await create(one)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + (5_000 if n <= 20 else 600_000)) for n in range(1, 32)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 3)
    buckets = live_objects(machines)
    await asyncio.sleep(10)
    one.kill()
    two = await machines.served_by("one", *settings)
    await two.call(two.engine.requests.delete_subscription("t", "s"))
    await until_sealed(two, 1)
    tip = manifest_of(machines)
    left = live_objects(machines)
    assert sorted(each.object.name for each in tip.tombstones) == sorted(set(buckets) - set(left))
    assert len(left) == 1
    assert (await stats(two)).pending == 11
    receiver = await two.receiver("t", "next")
    assert await receiver.received(11, timeout_s=1_000) == rows[20:]


async def test_deleting_a_topic_after_a_restart_buries_every_bucket(machines: EngineFixture) -> None:
    settings = sealed_at(10)
    one = await machines.served_by("one", *settings)
    await create(one)
    due_ms = machines.now_ms() + 60_000
    await add_one_by_one(one, [(n, n, due_ms) for n in range(1, 42)])
    await until_sealed(one, 4)
    buckets = live_objects(machines)
    one.kill()
    two = await machines.served_by("one", *settings)
    deleted = await delete_topic(two)
    assert deleted.rows == 41
    tip = manifest_of(machines)
    assert (tip.live, tip.progress, tip.progress_object, tip.subscriptions) == ((), None, None, ())
    assert {each.object.name for each in tip.tombstones} >= set(buckets)
    assert machines.keys(BUCKETS) == buckets, "nothing is in the store that no tombstone names"


@pytest.mark.parametrize("subscriptions", [0, 4])
async def test_a_topic_without_a_bucket_and_subscriptions_without_properties_are_deleted_too(
    machines: EngineFixture, subscriptions: int
) -> None:
    one = await machines.served_by()
    await add(one, [(1, 1, machines.now_ms())])
    for number in range(subscriptions):
        await create(one, f"subscription-{number}")
    assert (await delete_topic(one)).rows == 1
    with pytest.raises(NotFound):
        await stats(one)
    one.kill()
    two = await machines.served_by()
    with pytest.raises(NotFound):
        await stats(two)
    assert not manifest_of(machines).tombstones


async def test_series_of_topics_sum_to_what_is_stored_and_101_rows_make_3_buckets_a_topic(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *sealed_at(50))
    topics = ("north", "south")
    due_ms = machines.now_ms() + 600_000
    for topic in topics:
        await create(one, "a", topic=topic)
        await create(one, "b", topic=topic)
        await add_one_by_one(one, [(n, n, due_ms) for n in range(101)], topic=topic)
        await until_sealed(one, 2, topic=topic)
    numbers = {each.topic: each for each in await one.call(one.engine.requests._topic_numbers())}
    assert {topic: (each.buckets, each.pending, each.mutable_rows) for topic, each in numbers.items()} == dict.fromkeys(
        topics, (3, 101, 1)
    )
    for topic in topics:
        buckets = await sealed_buckets(one, topic=topic)
        assert numbers[topic].bucket_bytes == sum(each.size_bytes for each in buckets)
        assert numbers[topic].bucket_bytes == sum(len(machines.store.get(each.bucket)) for each in buckets)
        assert numbers[topic].buckets == len(buckets) + 1, "one index serves both subscriptions"
    everything = sum(len(machines.store.get(key)) for key in machines.keys(BUCKETS))
    assert sum(each.bucket_bytes for each in numbers.values()) == everything
    assert sum(each.backlog for each in numbers.values()) == 0


async def test_after_the_last_row_nothing_is_counted(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *sealed_at(10))
    receiver = await one.receiver("t")
    due_ms = machines.now_ms() + 5_000
    await add_one_by_one(one, [(n, n, due_ms) for n in range(1, 32)])
    await until_sealed(one, 3)
    await receiver.received(31)
    await receiver.acknowledge(receiver.rows)
    await until_sealed(one, 0)
    found = await stats(one)
    assert counts(found) == NOTHING
    assert [(each.backlog, each.in_flight) for each in found.subscriptions] == [(0, 0)]
    assert rows_of(await get(one)) == []
