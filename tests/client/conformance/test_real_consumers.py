"""A real daemon: what is seen of consumers, and of what the keys of a subscription wait for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import click.testing
import pytest
import pytest_asyncio

import tarry
import tarry.aio
from examples import processes
from tarry.cli import commands
from tests._support.patience import awaited_within_some_time
from tests.client.conformance._support.keyed_batches import PATIENCE_S, batches
from tests.client.conformance._support.threaded import in_thread

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

SLOTS = 65_536
# Eight slots, evenly spread.
HASHES = list(range(0, SLOTS, SLOTS // 8))
AUTO_SPLIT = tarry.KeySharedPolicy(selector=tarry.HashSelector.AUTO_SPLIT)


@pytest_asyncio.fixture(loop_scope="session")
async def client(shared_daemon: processes.DaemonProcess) -> AsyncIterator[tarry.aio.Client]:
    async with tarry.aio.Client(shared_daemon.address, timeout_s=PATIENCE_S) as client:
        yield client


async def create(client: tarry.aio.Client, topic: str, policy: tarry.KeySharedPolicy) -> None:
    await client.create_subscription(topic, "sub", tarry.SubscriptionPolicy(key_shared=policy))


async def seen(client: tarry.aio.Client, topic: str) -> dict[str, tarry.ConsumerStats]:
    return {each.name: each async for each in client.consumers(topic, "sub")}


async def keys(client: tarry.aio.Client, topic: str) -> tarry.KeySharedStats:
    stats = await client.key_shared_stats(topic, "sub")
    assert stats is not None
    return stats


def has(consumer: tarry.ConsumerStats, slot: int) -> bool:
    return any(held.first <= slot <= held.last for held in consumer.hash_ranges)


async def test_hashes_that_moved_drain_at_the_consumer_that_had_them(client: tarry.aio.Client, topic: str) -> None:
    await create(client, topic, AUTO_SPLIT)
    first = tarry.Consumer("a", permits=100, address="10.0.0.7:4711")
    async with client.subscribe_key_shared(topic, "sub", consumers=[first]) as subscription:
        assert tarry.HELD not in await subscription.plan(1, range(8), HASHES)
        planned = await batches(subscription, 8)
        a = (await seen(client, topic))["a"]
        assert (a.address, a.unacked, a.permits, a.slots) == ("10.0.0.7:4711", 8, 92, SLOTS)
        assert a.hash_ranges == (tarry.HashRange(0, SLOTS - 1),)
        assert (a.draining_hashes_count, a.draining_hashes) == (0, ())

        second = tarry.Consumer("b", permits=100)
        await subscription.add_consumer(second)
        both = await seen(client, topic)
        assert list(both) == ["a", "b"]
        a, b = both.values()
        assert a.slots == b.slots == SLOTS // 2
        assert a.instance_id != b.instance_id
        assert a.stream == b.stream
        moved = [slot for slot in HASHES if has(b, slot)]
        assert {each.hash for each in a.draining_hashes} == set(moved)
        assert (a.draining_hashes_count, a.draining_hashes_unacked, b.draining_hashes_count) == (4, 4, 0)

        assert await subscription.plan(1, [8], moved[:1]) == [tarry.HELD]
        stats = await keys(client, topic)
        assert (stats.consumers, stats.waiting, stats.draining_hashes, stats.draining_hashes_unacked) == (2, 1, 4, 4)
        a = (await seen(client, topic))["a"]
        attempts = {each.hash: (each.unacked, each.blocked_attempts > 0) for each in a.draining_hashes}
        assert attempts[moved[0]] == (1, True)

        for batch in planned:
            await subscription.ack(batch)
        (kept_back,) = await batches(subscription, 1)
        assert (kept_back.consumer, kept_back.entry_id.tolist()) == (second, [8])
        stats = await keys(client, topic)
        assert (stats.draining_hashes, stats.draining_hashes_cleared, stats.waiting) == (0, 1, 0)
        (counts,) = [each async for each in client.subscriptions(topic)]
        assert (counts.consumers, counts.waiting, counts.dispatchers) == (2, 0, 1)
        await subscription.ack(kept_back)

        await subscription.remove_consumer(first)
        assert list(await seen(client, topic)) == ["b"]
        assert (await seen(client, topic))["b"].slots == SLOTS


async def test_who_joins_behind_the_last_sent_position_is_seen_until_that_is_acknowledged(
    client: tarry.aio.Client, topic: str
) -> None:
    await create(client, topic, tarry.KeySharedPolicy(order=tarry.KeyOrder.LAST_SENT_POSITION))
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a", permits=4)]) as subscription:
        assert (await subscription.plan(3, range(6), 7)).tolist() == [1] * 4 + [tarry.HELD] * 2
        planned = await batches(subscription, 4)
        await subscription.add_consumer(tarry.Consumer("b"))
        stats = await keys(client, topic)
        assert (stats.last_sent_position, stats.individually_sent_positions) == (tarry.Position(3, 3), ())
        (behind,) = stats.consumers_after_mark_delete_position
        b = (await seen(client, topic))["b"]
        assert (behind.name, behind.instance_id) == ("b", b.instance_id)
        assert behind.last_sent_position_when_joining == b.last_sent_position_when_joining == tarry.Position(3, 3)
        for batch in planned:
            await subscription.ack(batch)
        assert (await keys(client, topic)).consumers_after_mark_delete_position == ()


async def test_the_policy_in_force_is_that_of_the_first_stream(client: tarry.aio.Client, topic: str) -> None:
    await create(client, topic, AUTO_SPLIT)
    updated = tarry.KeySharedPolicy(nack_order=tarry.NackOrder.BLOCK_KEY)
    for number, selector in enumerate((tarry.HashSelector.AUTO_SPLIT, tarry.HashSelector.CONSISTENT_HASHING)):
        async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")]):
            await client.update_subscription(topic, "sub", tarry.SubscriptionPolicy(key_shared=updated))
            policy = (await keys(client, topic)).policy
            assert policy.selector == selector
            assert policy.nack_block_max_ms == (600_000 if number else None)
    page = await client.consumers_page(topic, "sub")
    assert (page.items, page.key_shared) == ((), None)


async def test_consumers_come_in_pages(client: tarry.aio.Client, topic: str) -> None:
    await create(client, topic, tarry.KeySharedPolicy())
    names = [f"c{number}" for number in range(5)]
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer(name) for name in names]):
        first = await client.consumers_page(topic, "sub", page_size=2)
        second = await client.consumers_page(topic, "sub", first.next_page_token, page_size=2)
        last = await client.consumers_page(topic, "sub", second.next_page_token, page_size=2)
        assert [each.name for page in (first, second, last) for each in page.items] == names
        assert last.next_page_token == ""
        assert sum(each.slots for page in (first, second, last) for each in page.items) == SLOTS


async def test_what_excludes_key_order_is_refused_while_it_is_there(client: tarry.aio.Client, topic: str) -> None:
    await create(client, topic, AUTO_SPLIT)
    async with client.subscribe_key_shared(topic, "sub", consumers=[tarry.Consumer("a")]):

        async def story(seconds: float) -> None:
            with pytest.raises(tarry.DeadlineExceeded) as leasing:
                await client.get(topic, "sub", timeout_s=seconds)
            assert isinstance(leasing.value.last, tarry.Aborted)
            with pytest.raises(tarry.DeadlineExceeded, match="KEY_SHARED"):
                await client.subscribe(topic, "sub", timeout_s=seconds)

        await awaited_within_some_time(story)
    assert len(await client.get(topic, "sub")) == 0


async def test_a_subscription_that_is_not_there_is_not_found(client: tarry.aio.Client, topic: str) -> None:
    await create(client, topic, AUTO_SPLIT)
    for subscription, named in (("other", topic), ("sub", "nowhere")):
        with pytest.raises(tarry.NotFound):
            await client.key_shared_stats(named, subscription)


async def test_the_command_shows_what_the_client_sees(
    client: tarry.aio.Client, shared_daemon: processes.DaemonProcess, topic: str
) -> None:
    await create(client, topic, tarry.KeySharedPolicy(selector=tarry.HashSelector.STICKY))
    half = tarry.Consumer("a", hash_ranges=(tarry.HashRange(0, 9), tarry.HashRange(20, 29)))
    runner = click.testing.CliRunner(env={"TARRY_ADDRESS": shared_daemon.address})
    async with client.subscribe_key_shared(topic, "sub", consumers=[half]):
        shown = await in_thread(runner.invoke, commands.tarry, ["consumers", topic, "sub"])
        assert shown.exit_code == 0
        assert {"policy\tsticky, draining-hashes, skip", f"slots without consumer\t{SLOTS - 20}"} <= set(
            shown.stdout.splitlines()
        )
        assert "\t20\t0-9, 20-29\t" in shown.stdout
        assert "65,516 hash slots of 65,536 without a consumer" in shown.stderr
        parsed = await in_thread(runner.invoke, commands.tarry, ["consumers", topic, "sub", "--json"])
        assert [each["name"] for each in json.loads(parsed.stdout)["consumers"]] == ["a"]
