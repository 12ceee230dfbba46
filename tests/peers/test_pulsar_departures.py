"""Trims and clears beside seals, loads and drops, as `BucketDelayedDeliveryTrackerTest` has them, on the daemon itself.

A trim or a clear waits for none of these: what is decided is one slot of the journal, and a bucket leaves the manifest
when all of its rows have left. So each test lets the other work end after the clear, well or badly.
"""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import TarryError
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.daemon._support.calling import clear, create, get, rows_of, stats, trim, up_to
from tests.peers.tracking import (
    BUCKETS,
    MANIFESTS,
    NOTHING,
    add,
    add_one_by_one,
    contained,
    counts,
    live_objects,
    manifest_of,
    sealed_at,
    sealed_buckets,
    until_sealed,
)

SETTINGS = sealed_at(5, rows_of_segment=2)
THEN = [Fault.NONE, Fault.FAIL_BEFORE, Fault.FAIL_AFTER]


async def three_buckets(
    machines: EngineFixture, *, delay_ms: int = 60_000
) -> tuple[Daemon, list[tuple[int, int, int]]]:
    """Ledgers 1 to 5, 6 to 10 and 11 to 15 in a bucket each, ledger 16 in the mutable one; a row a ledger."""
    one = await machines.served_by("one", *SETTINGS)
    await create(one)
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + delay_ms + n * 1_000) for n in range(1, 17)]
    await add_one_by_one(one, rows)
    await until_sealed(one, 3)
    return one, rows


async def nothing_comes(machines: EngineFixture, one: Daemon) -> None:
    """Neither from this daemon nor from the one after it."""
    assert counts(await stats(one)) == NOTHING
    assert rows_of(await get(one)) == []
    one.kill()
    two = await machines.served_by("one", *SETTINGS)
    receiver = await two.receiver("t")
    await asyncio.sleep(100)
    assert not receiver.rows
    assert counts(await stats(two)) == NOTHING
    assert not live_objects(machines)


async def test_buckets_all_of_whose_rows_were_trimmed_leave_the_manifest(machines: EngineFixture) -> None:
    one, rows = await three_buckets(machines)
    buckets = live_objects(machines)
    assert await trim(one, up_to(10, 10, all_lower_ledgers=True)) == 10
    await until_sealed(one, 1)
    tip = manifest_of(machines)
    assert sorted(each.object.name for each in tip.tombstones) == sorted(set(buckets) - set(live_objects(machines)))
    assert len(tip.tombstones) == 2
    assert await contained(one, rows) == {row[:2] for row in rows[10:]}


async def test_a_bucket_that_a_trim_cuts_through_stays_with_the_rows_that_are_left(machines: EngineFixture) -> None:
    one, rows = await three_buckets(machines)
    assert await trim(one, up_to(8, 8, all_lower_ledgers=True)) == 8
    await until_sealed(one, 2)
    assert [each.pending for each in await sealed_buckets(one)] == [2, 5]
    one.kill()
    two = await machines.served_by("one", *SETTINGS)
    assert await contained(two, rows) == {row[:2] for row in rows[8:]}
    receiver = await two.receiver("t")
    assert await receiver.received(8) == rows[8:]


async def test_a_trim_of_ledgers_that_have_no_rows_leaves_every_bucket(machines: EngineFixture) -> None:
    one, rows = await three_buckets(machines)
    manifests = machines.keys(MANIFESTS)
    assert await trim(one, up_to(5, 0, all_lower_ledgers=True)) == 0
    assert await trim(one, up_to(5, 100)) == 0
    await asyncio.sleep(5)
    assert machines.keys(MANIFESTS) == manifests
    assert await contained(one, rows) == {row[:2] for row in rows}


async def test_when_everything_was_trimmed_a_pull_is_empty_and_nothing_is_due_next(machines: EngineFixture) -> None:
    one, _ = await three_buckets(machines, delay_ms=20_000)
    held = one.pause("put_if_absent", MANIFESTS)
    assert await trim(one, up_to(0, 99, all_lower_ledgers=True)) == 16
    await held.reached()
    found = await stats(one)
    assert (found.pending, found.next_due_ms, found.buckets) == (0, 0, 3), "the buckets are there still"
    assert rows_of(await get(one, wait_ms=60_000)) == []
    held.release()
    await until_sealed(one, 0)
    await nothing_comes(machines, one)


@pytest.mark.parametrize("then", THEN)
@pytest.mark.parametrize("what", ["trim", "clear"])
async def test_what_leaves_while_its_bucket_is_being_written_is_gone_from_it(
    machines: EngineFixture, what: str, then: Fault
) -> None:
    """Counts are those of what is left when the bucket is committed, not of what was cut."""
    one = await machines.served_by("one", *SETTINGS)
    await create(one)
    base_ms = machines.now_ms()
    held = one.pause("put", BUCKETS, then=then)
    await add_one_by_one(one, [(n, n, base_ms + 60_000) for n in range(1, 7)])
    await held.reached()
    assert await (clear(one) if what == "clear" else trim(one, up_to(0, 7, all_lower_ledgers=True))) == 6
    assert (await stats(one)).pending == 0
    held.release()
    index = one.topic("t").core.index
    await one.until(lambda: not index.sealing and not index.sealed)
    await nothing_comes(machines, one)


@pytest.mark.parametrize("end", ["crash", "orderly"])
async def test_what_left_in_part_while_its_bucket_was_being_written_stays_away_after_a_restart(
    machines: EngineFixture, end: str
) -> None:
    one = await machines.served_by("one", *SETTINGS, "journal.checkpoint_slots=1")
    base_ms = machines.now_ms()
    rows = [(n, n, base_ms + 60_000 + n) for n in range(1, 7)]
    held = one.pause("put", BUCKETS)
    await add_one_by_one(one, rows)
    await held.reached()
    assert await trim(one, up_to(3, 3, all_lower_ledgers=True)) == 3
    held.release()
    await until_sealed(one, 1)
    assert [(each.rows, each.pending) for each in await sealed_buckets(one)] == [(5, 2)]
    await add(one, [(9, 9, base_ms + 70_000)])
    await asyncio.sleep(5)
    if end == "crash":
        one.kill()
    else:
        await one.stop()
    two = await machines.served_by("one", *SETTINGS)
    assert await contained(two, rows) == {row[:2] for row in rows[3:]}
    assert (await stats(two)).pending == 4


@pytest.mark.parametrize("then", THEN)
async def test_a_bucket_whose_drop_fails_is_counted_until_the_drop_is_committed(
    machines: EngineFixture, then: Fault
) -> None:
    one, rows = await three_buckets(machines)
    held = one.pause("put_if_absent", MANIFESTS, then=then)
    assert await trim(one, up_to(5, 5, all_lower_ledgers=True)) == 5
    await held.reached()
    assert len(await sealed_buckets(one)) == 3
    assert (await stats(one)).pending == 11, "rows leave with the trim, whatever becomes of their bucket"
    held.release()
    await until_sealed(one, 2)
    assert len(live_objects(machines)) == 2
    assert await contained(one, rows) == {row[:2] for row in rows[5:]}


@pytest.mark.parametrize("then", THEN)
async def test_a_clear_beside_a_trim_that_is_in_trouble_leaves_nothing(machines: EngineFixture, then: Fault) -> None:
    one, _ = await three_buckets(machines)
    held = one.pause("put_if_absent", JOURNAL, then=then)
    trimming = trim(one, up_to(10, 10, all_lower_ledgers=True))
    await held.reached()
    clearing = clear(one)
    held.release()
    trimmed, cleared = await asyncio.gather(trimming, clearing)
    assert (trimmed, cleared) == (10, 6)
    await until_sealed(one, 0)
    await nothing_comes(machines, one)


@pytest.mark.parametrize("then", THEN)
async def test_a_clear_while_a_segment_is_being_read_leaves_nothing(machines: EngineFixture, then: Fault) -> None:
    one, _ = await three_buckets(machines, delay_ms=10_000)
    held = one.pause("get_range", BUCKETS, then=then)
    await held.reached()
    assert await clear(one) == 16
    await until_sealed(one, 0)
    held.release()
    await asyncio.sleep(5)
    assert one.topic("t").core.index.cache.rows == 0, "nobody would ever let go of it"
    await nothing_comes(machines, one)


@pytest.mark.parametrize("then", THEN)
async def test_a_clear_while_a_bucket_leaves_that_has_been_handed_out_leaves_nothing(
    machines: EngineFixture, then: Fault
) -> None:
    one, rows = await three_buckets(machines, delay_ms=1_000)
    receiver = await one.receiver("t")
    held = one.pause("put_if_absent", MANIFESTS, then=then)
    await receiver.received(5)
    assert await receiver.acknowledge(rows[:5]) == 0
    await held.reached()
    assert await clear(one) == 11
    assert len(await sealed_buckets(one)) == 3
    held.release()
    await until_sealed(one, 0)
    receiver.stream.close()
    await nothing_comes(machines, one)


async def test_after_a_clear_the_same_rows_may_be_added_again(machines: EngineFixture) -> None:
    one, rows = await three_buckets(machines)
    assert await clear(one) == 16
    await until_sealed(one, 0)
    assert counts(await stats(one)) == NOTHING
    assert (await add(one, rows)).accepted == 16
    receiver = await one.receiver("t")
    assert await receiver.received(16) == rows


async def test_a_clear_that_the_store_does_not_take_is_undone_and_may_be_repeated(machines: EngineFixture) -> None:
    one, rows = await three_buckets(machines)
    one.store.go_down()
    with pytest.raises(TarryError):
        await clear(one)
    one.kill()
    two = await machines.served_by("one", *SETTINGS)
    assert await contained(two, rows) == {row[:2] for row in rows}
    assert await clear(two) == 16
    await until_sealed(two, 0)
    await nothing_comes(machines, two)
