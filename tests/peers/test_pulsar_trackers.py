"""Buckets, recovery and failures of the store, as `BucketDelayedDeliveryTrackerTest` has them, on the daemon itself.

Its numbers are kept: rows, sizes of buckets and segments, how many failures.
"""

from __future__ import annotations

import asyncio

import pytest

from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests.daemon._support.calling import acknowledge, create, get, rows_of, stats
from tests.peers.tracking import (
    BUCKETS,
    MANIFESTS,
    add,
    add_one_by_one,
    contained,
    live_objects,
    sealed_at,
    sealed_buckets,
    until_sealed,
)


async def ended(daemon: Daemon, end: str) -> None:
    if end == "crash":
        daemon.kill()
    else:
        await daemon.stop()


# ---- membership


async def test_a_position_is_contained_and_a_duplicate_from_its_add_until_it_is_acknowledged(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *sealed_at(3))
    await create(one)
    base_ms = machines.now_ms()
    rows = [(ledger, ledger, base_ms + 10_000 * ledger) for ledger in range(1, 5)]
    everything = {row[:2] for row in rows}
    await add_one_by_one(one, rows)
    assert await contained(one, rows) == everything, "three rows are being sealed, the fourth is in the mutable bucket"
    await until_sealed(one, 1)
    assert await contained(one, [*rows, (1, 2, 0), (5, 5, 0)]) == everything
    assert (await add(one, rows)).duplicates == 4
    await asyncio.sleep(15)
    leased = rows_of(await get(one))
    assert leased == rows[:1]
    assert await contained(one, rows) == everything, "handing out is not enough"
    assert (await add(one, rows)).duplicates == 4
    assert await acknowledge(one, leased) == 0
    assert await contained(one, rows) == everything - {(1, 1)}
    assert (await add(one, [(1, 1, base_ms + 90_000)])).accepted == 1


@pytest.mark.parametrize("end", [None, "crash", "orderly"])
async def test_a_row_that_is_added_again_after_its_time_is_a_duplicate_and_is_handed_out_once(
    machines: EngineFixture, end: str | None
) -> None:
    """Whoever adds is told that the index has it, and so does not send it."""
    one = await machines.served_by("one", *sealed_at(5))
    await create(one)
    base_ms = machines.now_ms()
    rows = [(ledger, 1, base_ms + 5_000) for ledger in range(10)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 1)
    if end is not None:
        await ended(one, end)
        one = await machines.served_by("one", *sealed_at(5))
    await asyncio.sleep(max(0, base_ms + 6_000 - machines.now_ms()) / 1000)
    again = await add(one, rows, return_already_due=True)
    assert (again.accepted, again.duplicates, again.returned_index.tolist()) == (0, 10, [])
    leased = rows_of(await get(one))
    assert leased == rows
    assert await acknowledge(one, leased) == 0
    assert (await stats(one)).pending == 0
    await asyncio.sleep(60)
    assert rows_of(await get(one)) == []
    late = await add(one, rows, return_already_due=True)
    assert late.returned_index.tolist() == list(range(10)), "what is gone is the caller's to send"


# ---- buckets and recovery


async def test_101_rows_sealed_at_20_and_cut_at_5_make_5_buckets_of_4_segments(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *sealed_at(20, rows_of_segment=5))
    base_ms = machines.now_ms()
    await add_one_by_one(one, [(n, n, base_ms + 100_000 + n * 10_000) for n in range(1, 102)])
    await until_sealed(one, 5)
    buckets = await sealed_buckets(one)
    assert [(each.rows, each.segments) for each in buckets] == [(20, 4)] * 5
    assert [(each.first_ledger_id, each.last_ledger_id) for each in buckets] == [
        (first, first + 19) for first in range(1, 101, 20)
    ]
    assert (await stats(one)).mutable_rows == 1


@pytest.mark.parametrize("end", ["crash", "orderly"])
@pytest.mark.parametrize("passed", [0, 30, 99])
async def test_what_is_left_after_a_restart_comes_in_order_and_each_row_once(
    machines: EngineFixture, end: str, passed: int
) -> None:
    """100 rows, one each second: after 30 s, 30 are acknowledged; 31 to 100 are left, also of the mutable bucket."""
    settings = sealed_at(20, rows_of_segment=5)
    one = await machines.served_by("one", *settings)
    await create(one)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + n * 1_000) for n in range(1, 101)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 4)
    await asyncio.sleep(max(0, base_ms + passed * 1_000 - machines.now_ms()) / 1000)
    leased = rows_of(await get(one))
    assert leased == rows[:passed]
    if leased:
        await acknowledge(one, leased)
    await ended(one, end)
    two = await machines.served_by("one", *settings)
    assert await contained(two, rows) == {row[:2] for row in rows[passed:]}
    assert (await stats(two)).pending == 100 - passed
    receiver = await two.receiver("t")
    assert await receiver.received(100 - passed, timeout_s=2_000) == rows[passed:]
    await asyncio.sleep(60)
    assert len(receiver.rows) == 100 - passed
    assert not receiver.early


async def test_buckets_whose_ledgers_overlap_are_all_kept_and_each_row_comes_once(machines: EngineFixture) -> None:
    """Ranges of ledgers enclose each other and cross; buckets are known by the manifest, never by their ranges."""
    settings = sealed_at(10)
    one = await machines.served_by("one", *settings)
    due_ms = machines.now_ms() + 60_000
    expected = set()
    for number, (first, last) in enumerate([(10, 30), (15, 20), (5, 16), (1, 40), (30, 31)]):
        rows = [(ledger, number * 100 + entry, due_ms) for ledger in (first, last) for entry in range(6)]
        assert (await add(one, rows)).accepted == 12
        expected |= {row[:2] for row in rows}
        sealed = await one.call(one.engine.requests.seal("t"))
        assert sealed.rows == 12
    kept = live_objects(machines)
    assert len(kept) == 5
    one.kill()
    two = await machines.served_by("one", *settings)
    assert live_objects(machines) == kept
    receiver = await two.receiver("t")
    await receiver.received(60)
    await asyncio.sleep(60)
    assert len(receiver.rows) == 60
    assert receiver.positions == expected


# ---- a store that fails


async def test_one_failure_each_of_bucket_manifest_metadata_segment_and_drop_is_retried_away(
    machines: EngineFixture,
) -> None:
    settings = sealed_at(5, rows_of_segment=2)
    one = await machines.served_by("one", *settings)
    await create(one)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 100_000 + n * 100) for n in range(1, 7)]
    one.script.plan("put", Fault.FAIL_BEFORE, key_part=BUCKETS)
    one.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=MANIFESTS)
    await add_one_by_one(one, rows)
    await until_sealed(one, 1)
    assert not one.script.unmet()
    one.kill()

    two = await machines.daemon("one", *settings).start()
    two.script.plan("get_range", Fault.FAIL_BEFORE, key_part=BUCKETS)
    await two.serving()
    assert not two.script.unmet(), "the metadata was read again"
    two.script.plan("get_range", Fault.FAIL_BEFORE, key_part=BUCKETS)
    two.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=MANIFESTS)
    receiver = await two.receiver("t")
    assert await receiver.received(6) == rows
    assert not receiver.early
    assert await receiver.acknowledge(receiver.rows) == 0
    await until_sealed(two, 0)
    assert not two.script.unmet()
    assert not live_objects(machines)


async def test_while_a_segment_cannot_be_read_nothing_of_it_comes_and_later_everything(
    machines: EngineFixture,
) -> None:
    """Four failures, one more than Pulsar retries; other buckets go on meanwhile."""
    settings = sealed_at(5, rows_of_segment=2)
    one = await machines.served_by("one", *settings)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 10_000 + n * 100) for n in range(1, 7)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 1)
    receiver = await one.receiver("t")
    held = one.pause("get_range", BUCKETS, then=Fault.FAIL_BEFORE)
    one.script.plan("get_range", Fault.FAIL_BEFORE, key_part=BUCKETS, times=3)
    await held.reached()
    await asyncio.sleep(20)
    assert receiver.rows == rows[5:], "the row that is not in the bucket does not wait for it"
    held.release()
    await receiver.received(6)
    await asyncio.sleep(60)
    assert not one.script.unmet()
    assert sorted(receiver.rows) == rows


async def test_rows_whose_bucket_cannot_be_written_are_served_from_memory_and_outlive_a_crash(
    machines: EngineFixture,
) -> None:
    settings = sealed_at(5)
    one = await machines.served_by("one", *settings)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 10_000 + n * 100) for n in range(1, 7)]
    one.script.plan("put", Fault.FAIL_BEFORE, key_part=BUCKETS, times=1_000)
    await add_one_by_one(one, rows)
    await asyncio.sleep(5)
    assert one.script.unmet() <= 996, "more failures than Pulsar bears"
    assert await sealed_buckets(one) == ()
    receiver = await one.receiver("t")
    assert await receiver.received(6) == rows
    assert await receiver.acknowledge(receiver.rows[:2]) == 0
    assert not live_objects(machines)
    one.kill()
    two = await machines.served_by("one", *settings)
    again = await two.receiver("t")
    assert await again.received(4) == rows[2:]
    sealed = await two.call(two.engine.requests.seal("t"))
    assert (sealed.rows, live_objects(machines)) == (4, [sealed.bucket])
