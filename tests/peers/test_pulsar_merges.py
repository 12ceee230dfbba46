"""Merges, as `BucketDelayedDeliveryTrackerTest` has them, on the daemon itself.

Its numbers are kept: rows, sizes of buckets and segments, limits.
"""

from __future__ import annotations

import asyncio

import pytest

from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests.daemon._support.calling import clear, create, get, rows_of, stats
from tests.daemon.topic.test_merging import merge
from tests.peers.tracking import (
    BUCKETS,
    MANIFESTS,
    NOTHING,
    Row,
    add,
    add_one_by_one,
    contained,
    counts,
    live_objects,
    sealed_at,
    sealed_buckets,
    until_sealed,
)


def at_most(buckets: int) -> str:
    return f"bucket.max_num_buckets={buckets}"


async def until_merged(daemon: Daemon, buckets: int) -> None:
    index = daemon.topic("t").core.index
    await daemon.until(lambda: len(index.sealed) <= buckets and not index.sealing)


async def ended(daemon: Daemon, end: str) -> None:
    if end == "crash":
        daemon.kill()
    else:
        await daemon.stop()


@pytest.mark.parametrize("end", ["crash", "orderly"])
async def test_every_segment_of_merged_buckets_is_there_after_a_restart(machines: EngineFixture, end: str) -> None:
    """56 rows in buckets of 5; the mutable one is kept, too, where Pulsar's 56th is read again."""
    settings = (*sealed_at(5, rows_of_segment=2), at_most(2))
    one = await machines.served_by("one", *settings)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 500_000 + n * 1_000) for n in range(1, 57)]
    await add_one_by_one(one, rows)
    await until_merged(one, 2)
    assert max(bucket.level for bucket in await sealed_buckets(one)) >= 1
    await ended(one, end)
    two = await machines.served_by("one", *settings)
    assert await contained(two, rows) == {row[:2] for row in rows}
    receiver = await two.receiver("t")
    assert await receiver.received(56, timeout_s=2_000) == rows
    assert not receiver.early


@pytest.mark.parametrize("end", ["crash", "orderly"])
async def test_110_rows_in_at_most_10_buckets_are_110_after_a_restart_and_after_they_are_added_again(
    machines: EngineFixture, end: str
) -> None:
    settings = (*sealed_at(5, rows_of_segment=3), at_most(10))
    one = await machines.served_by("one", *settings)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 900_000 + n * 1_000) for n in range(1, 111)]
    await add_one_by_one(one, rows)
    await until_merged(one, 10)
    await ended(one, end)
    two = await machines.served_by("one", *settings)
    assert (await stats(two)).pending == 110
    again = await add(two, rows)
    assert (again.accepted, again.duplicates) == (0, 110)
    assert len(live_objects(machines)) <= 11, "the orderly end seals what is left"
    receiver = await two.receiver("t")
    assert await receiver.received(110, timeout_s=2_000) == rows
    await asyncio.sleep(60)
    assert len(receiver.rows) == 110


@pytest.mark.parametrize("buckets", [1, 2, 3])
async def test_limits_of_one_two_and_three_buckets_are_kept_and_each_row_comes_once(
    machines: EngineFixture, buckets: int
) -> None:
    one = await machines.served_by("one", *sealed_at(5, rows_of_segment=2), at_most(buckets))
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 60_000 + n * 1_000) for n in range(1, 42)]
    await add_one_by_one(one, rows)
    await until_merged(one, buckets)
    assert len(live_objects(machines)) <= buckets
    receiver = await one.receiver("t")
    assert await receiver.received(41, timeout_s=2_000) == rows
    await asyncio.sleep(60)
    assert len(receiver.rows) == 41


async def test_buckets_all_of_whose_segments_are_in_memory_are_merged_like_others(machines: EngineFixture) -> None:
    """Pulsar merges no bucket without a segment that is still to be loaded."""
    one = await machines.served_by("one", *sealed_at(5), at_most(-1), "delivery.lookahead_ms=3600000")
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 60_000 + n * 1_000) for n in range(1, 12)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 2)
    assert all(bucket.segments_loaded == bucket.segments for bucket in await sealed_buckets(one))
    assert (await merge(one, 1)).merges == 1
    receiver = await one.receiver("t")
    assert await receiver.received(11, timeout_s=200) == rows


async def test_within_the_limit_nothing_is_merged_or_read(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *sealed_at(5), at_most(4))
    base_ms = machines.now_ms()
    await add_one_by_one(one, [(n, n, base_ms + 5_000_000 + n) for n in range(1, 22)])
    await until_sealed(one, 4)
    before = live_objects(machines)
    asked = await merge(one)
    await asyncio.sleep(30)
    assert (asked.merges, asked.buckets) == (0, 4)
    assert live_objects(machines) == before
    assert not [call for call in one.store.calls if call.operation == "get_range" and BUCKETS in call.key]


# ---- a clear beside a merge


async def with_four_buckets(machines: EngineFixture) -> tuple[Daemon, list[Row]]:
    one = await machines.served_by("one", *sealed_at(5, rows_of_segment=2), at_most(-1))
    await create(one)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 60_000 + n * 1_000) for n in range(1, 22)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 4)
    return one, rows


async def nothing_is_left(machines: EngineFixture, one: Daemon, rows: list[Row]) -> None:
    index = one.topic("t").core.index
    await one.until(lambda: not index.sealed and not index.sealing)
    assert counts(await stats(one)) == NOTHING
    assert await contained(one, rows) == set()
    await asyncio.sleep(200)
    assert rows_of(await get(one)) == []
    one.kill()
    two = await machines.served_by("two")
    await asyncio.sleep(5)
    assert rows_of(await get(two)) == []
    assert (await add(two, rows)).accepted == len(rows)


@pytest.mark.parametrize(
    ("operation", "part"),
    [("get_range", BUCKETS), ("put", BUCKETS), ("put_if_absent", MANIFESTS)],
    ids=["a source is read", "the merged bucket is written", "the sources leave"],
)
async def test_a_clear_while_buckets_are_merged_leaves_nothing(
    machines: EngineFixture, operation: str, part: str
) -> None:
    one, rows = await with_four_buckets(machines)
    held = one.pause(operation, part)
    asked = merge(one, 1)
    await held.reached()
    assert await clear(one) == 21
    held.release()
    await asked
    await nothing_is_left(machines, one, rows)


async def test_a_clear_beside_a_merge_whose_sources_cannot_leave_leaves_nothing(machines: EngineFixture) -> None:
    one, rows = await with_four_buckets(machines)
    one.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=MANIFESTS, times=3)
    asked = merge(one, 1)
    await one.until(lambda: one.script.unmet() < 3)
    assert await clear(one) == 21
    await asked
    await nothing_is_left(machines, one, rows)
