"""Both clients and a real daemon: rows that are withdrawn, looked at and merged, and garbage that is collected."""

from __future__ import annotations

import time

import numpy as np
import pytest

import tarry
import tarry.aio
from examples import processes
from tests._support.patience import awaited_within_some_time
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 600.0
FAR_MS = 3_600_000


@pytest.fixture(scope="module")
def daemon_settings() -> dict[str, object]:
    """What leaves a manifest is garbage at once."""
    return {"daemon.shards": 4, "collection.grace_s": 0}


@pytest.fixture
def client(shared_daemon: processes.DaemonProcess, connect: Connect) -> tarry.aio.Client:
    return connect(shared_daemon.address, timeout_s=PATIENCE_S)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def test_pending_rows_are_withdrawn_and_what_is_further_is_told(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "sub")
    await client.add(topic, 7, range(10), delay_ms=FAR_MS)
    cancelled = await client.cancel(topic, 7, [1, 2, 99])
    assert (cancelled.cancelled, cancelled.not_found_index.tolist(), cancelled.may_have_landed) == (2, [2], False)
    moved = await client.reschedule(topic, 7, [3, 4, 1], deliver_at_ms=[now_ms(), now_ms() + 2 * FAR_MS, 1])
    assert (moved.rescheduled, moved.not_found_index.tolist()) == (2, [2])
    leased = await client.get(topic, "sub", lease_ms=60_000, wait_ms=20_000)
    assert leased.entry_id.tolist() == [3]
    assert (await client.cancel(topic, 7, [3, 4])).in_flight_index.tolist() == [0]
    await client.extend_lease(topic, "sub", leased, 0)
    assert (await client.reschedule(topic, 7, 3, delay_ms=FAR_MS)).already_due_index.tolist() == [0]
    assert (await client.stats(topic)).pending == 6
    with pytest.raises(tarry.InvalidArgument):
        await client.cancel(topic, 7, [5, 5])
    for call in (client.cancel(topic, 7, 5, subscription="no"), client.cancel(topic + " not", 7, 5)):
        with pytest.raises(tarry.NotFound):
            await call


async def test_rows_are_for_one_subscription_alone_and_are_looked_at(client: tarry.aio.Client, topic: str) -> None:
    await client.create_subscription(topic, "a")
    await client.create_subscription(topic, "b")
    at_ms = now_ms() + FAR_MS
    await client.add(topic, 7, range(4), deliver_at_ms=at_ms + 1_000 * np.arange(4), key_hash=5)
    assert (await client.add(topic, 8, 0, deliver_at_ms=at_ms + 500, subscription="a")).accepted == 1
    async with client.add_stream(topic, subscription="a") as stream:
        assert (await (await stream.add(8, 1, deliver_at_ms=now_ms()))).late_on_arrival == 1

    pages = [page async for page in client.scheduled(topic, until_ms=at_ms + 2_000)]
    (page,) = pages
    assert list(zip(page.ledger_id.tolist(), page.entry_id.tolist(), strict=True)) == [(7, 0), (8, 0), (7, 1)]
    assert [page.subscriptions[index] for index in page.subscription_index] == ["", "a", ""]
    assert page.key_hash.tolist() == [5, 0, 5]
    first = await client.scheduled_page(topic, page_size=2, subscription="b", ledgers=(7, 7))
    assert (first.entry_id.tolist(), first.next_page_token != "") == ([0, 1], True)
    with pytest.raises(tarry.InvalidArgument):
        await client.scheduled_page(topic, first.next_page_token)

    bars = await client.histogram(topic, from_ms=at_ms, until_ms=at_ms + 3_000, width_ms=1_000)
    assert (bars.rows.tolist(), bars.rows_before, bars.rows_after) == ([2, 1, 1], 0, 1)
    assert (await client.histogram(topic, subscription="b", from_ms=at_ms, width_ms=10_000)).rows.tolist() == [4]
    (due,) = [page async for page in client.backlog(topic, "a")]
    assert (due.ledger_id.tolist(), due.state.tolist()) == ([8], [tarry.BacklogState.READY])
    assert [page async for page in client.backlog(topic, "b")] == []
    assert (await client.stats(topic)).last_due_ms == at_ms + 3_000
    assert [each.own_pending async for each in client.subscriptions(topic)] == [1, 0]


async def test_buckets_are_merged_and_what_they_leave_is_collected(client: tarry.aio.Client, topic: str) -> None:
    await client.set_policy(topic, tarry.TopicPolicy(max_num_buckets=-1))
    for ledger in range(4):
        await client.add(topic, ledger, range(100), delay_ms=FAR_MS)
        await client.seal(topic)
    merged = await client.merge(topic, 1)
    assert merged.buckets == 1
    assert merged.merged_buckets >= 4
    (bucket,) = [bucket async for bucket in client.buckets(topic)]
    assert (bucket.pending, bucket.level > 0, bucket.subscription) == (400, True, "")
    assert await client.merge(topic, 1) == tarry.Merged(0, 0, 1)

    counted = [step async for step in client.collect_garbage(dry_run=True)]
    assert counted[-1].tombstones.objects >= 4
    deleted = [step async for step in client.collect_garbage(retry_dead_objects=True)]
    assert deleted[-1].tombstones.objects >= 4
    assert [step.done for step in deleted] == [False] * (len(deleted) - 1) + [True]
    assert (deleted[-1].shards_done, deleted[-1].failed.objects) == (deleted[-1].shards, 0)
    again = [step async for step in client.collect_garbage(dry_run=True)]
    assert again[-1].tombstones.objects == 0
    assert (await client.histogram(topic)).rows.sum() == 400


async def test_a_client_that_adds_too_much_waits_as_long_as_it_is_told(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=PATIENCE_S, client_id=topic.replace(" ", "-"))
    await client.set_policy(topic, tarry.TopicPolicy(client_rows_per_second_max=100))
    begun_s = time.monotonic()
    for ledger in range(3):
        assert (await client.add(topic, ledger, range(100), delay_ms=FAR_MS)).accepted == 100
    # A second's worth goes at once, the next as soon as there is anything left, the third pays for that.
    assert time.monotonic() - begun_s > 0.5
    await client.set_policy(topic, tarry.TopicPolicy(pending_rows_max=300))

    async def story(seconds: float) -> None:
        with pytest.raises((tarry.ResourceExhausted, tarry.DeadlineExceeded), match="pending_rows_max"):
            await client.add(topic, 9, range(100), delay_ms=FAR_MS, timeout_s=seconds)

    await awaited_within_some_time(story)
