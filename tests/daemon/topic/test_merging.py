"""Buckets are merged while rows come, come due and leave; nobody waits for it, and nothing is lost or comes twice."""

from __future__ import annotations

import asyncio

import pytest

from daemon.call_values import Merged
from daemon.errors import NotFound, OutcomeUnknown
from storage_backends.formats.index_ids import batch_parts_of
from storage_backends.formats.segment import SegmentLimits
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests.daemon._support.calling import clear
from tests.daemon._support.nacking import NACKED, with_rows
from tests.daemon.topic.test_damage import alter, alter_part

BUCKETS = "/buckets/"
MANIFESTS = "/manifest/"
SMALL = ("bucket.min_index_count_per_bucket=10", "bucket.rows_max=10")
FAR_MS = 3_000_000
ONE_SEGMENT = SegmentLimits()


def limit(buckets_max: int) -> str:
    return f"bucket.max_num_buckets={buckets_max}"


def buckets(daemon: Daemon, topic: str = "t") -> int:
    return len(daemon.topic(topic).core.indexes.sealed)


async def fill(daemon: Daemon, count: int, *, delay_ms: int = FAR_MS, first: int = 0, rows: int = 10) -> None:
    """So many buckets, one of each ledger, the n-th due a second after the one before."""
    for ledger in range(first, first + count):
        await daemon.add("t", ledger, range(rows), delay_ms=delay_ms + 1000 * (ledger - first))
        await daemon.until(lambda: not daemon.topic("t").core.indexes.sealing)


def merge(daemon: Daemon, buckets_max: int = 0, topic: str = "t") -> asyncio.Task[Merged]:
    return daemon.call(daemon.engine.requests.merge(topic, buckets_max))


# ---- when


async def test_above_the_limit_neighbours_are_merged_by_themselves(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(4))
    await fill(one, 12)
    await one.until(lambda: buckets(one) <= 4)
    tip = machines.topic_tip()
    assert len(tip.live) == 4
    assert sum(live.rows for live in tip.live) == 120
    assert max(live.level for live in tip.live) >= 1
    assert one.metrics.registry.get_sample_value("tarry_merges_total", {"outcome": "merged"})


@pytest.mark.parametrize("buckets_max", [1, 2, 3])
async def test_small_limits_are_kept_and_every_row_is_handed_out_once(
    machines: EngineFixture, buckets_max: int
) -> None:
    one = await machines.served_by("one", *SMALL, limit(buckets_max))
    await fill(one, 8, delay_ms=20_000)
    await one.until(lambda: buckets(one) <= buckets_max)
    receiver = await one.receiver("t")
    await receiver.received(80)
    await asyncio.sleep(30)
    assert len(receiver.rows) == 80
    assert not receiver.early


async def test_a_limit_of_minus_one_merges_nothing_until_it_is_asked_for(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 7)
    await asyncio.sleep(120)
    assert buckets(one) == 7
    asked = await merge(one)
    assert (asked.merges, asked.buckets) == (0, 7)
    asked = await merge(one, 3)
    assert (asked.merges, asked.merged_buckets, asked.buckets) == (1, 5, 3)
    assert len(machines.topic_tip().live) == 3


@pytest.mark.parametrize("count", [150, pytest.param(500, marks=pytest.mark.long)])
async def test_buckets_of_one_row_a_year_away_end_at_the_limit(machines: EngineFixture, count: int) -> None:
    one = await machines.served_by("one", "bucket.min_index_count_per_bucket=1", "bucket.rows_max=1", limit(20))
    await fill(one, count, delay_ms=365 * 86_400_000, rows=1)
    await one.until(lambda: buckets(one) <= 20)
    tip = machines.topic_tip()
    assert len(tip.live) == 20
    assert sum(live.rows for live in tip.live) == count


async def test_a_merge_waits_while_a_seal_waits(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(2))
    await fill(one, 2)
    held = one.pause("put", BUCKETS)
    await one.add("t", 2, range(10), delay_ms=FAR_MS)
    await held.reached()
    asked = merge(one, 1)
    await asyncio.sleep(20)
    assert not asked.done()
    assert len(machines.topic_tip().live) == 2
    held.release()
    assert (await asked).buckets == 1


async def test_who_waits_too_long_for_a_merge_is_told_so_and_it_goes_on(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 5)
    held = one.pause("put", BUCKETS)
    asked = merge(one, 2)
    await held.reached()
    with pytest.raises(OutcomeUnknown, match="a retry is safe"):
        await asked
    held.release()
    await one.until(lambda: buckets(one) == 2)


async def test_a_merge_of_a_topic_that_is_not_there_is_refused(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    with pytest.raises(NotFound):
        await merge(one, 1, topic="absent")


# ---- what goes on meanwhile


async def test_rows_are_handed_out_in_time_while_their_buckets_are_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 6, delay_ms=30_000)
    held = one.pause("put", BUCKETS)
    asked = merge(one, 1)
    await held.reached()
    await receiver.received(20, timeout_s=60)
    held.release()
    assert (await asked).buckets == 1
    await receiver.received(60, timeout_s=60)
    await asyncio.sleep(10)
    assert len(receiver.rows) == 60
    assert not receiver.early
    lateness = one.metrics.registry.get_sample_value("tarry_lateness_seconds_bucket", {"le": "0.05"})
    assert lateness == 60, "a merge makes nothing late"


async def test_what_was_acknowledged_between_plan_and_commit_does_not_come_again_after_a_crash(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 4, delay_ms=10_000)
    held = one.pause("put", BUCKETS)
    asked = merge(one, 1)
    await held.reached()
    rows = await receiver.received(25, timeout_s=60)
    acknowledged = [*rows[:8], *rows[10:19]]
    await receiver.acknowledge(acknowledged)
    held.release()
    await asked
    assert machines.topic_tip().live[0].rows == 40, "a merge drops what was gone when it was planned, and nothing else"
    one.kill()
    two = await machines.served_by("two")
    again = await two.receiver("t")
    await again.received(23, timeout_s=120)
    await asyncio.sleep(60)
    assert again.positions.isdisjoint({row[:2] for row in acknowledged})
    assert len(again.rows) == 23


async def test_what_is_gone_when_a_merge_is_planned_is_not_copied(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 2, delay_ms=1_000)
    await fill(one, 2, first=2)
    rows = await receiver.received(20, timeout_s=60)
    await receiver.acknowledge(rows[:13])
    # A seal stores what is gone.
    await fill(one, 1, first=4)
    assert (await merge(one, 1)).buckets == 1
    (live,) = machines.topic_tip().live
    assert live.rows == 50 - 13


async def test_a_merge_of_which_every_row_is_gone_leaves_no_bucket(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 4)
    held = one.pause("put", BUCKETS)
    asked = merge(one, 2)
    await held.reached()
    await clear(one)
    held.release()
    await asked
    await one.until(lambda: not buckets(one))
    assert not machines.topic_tip().live


async def test_each_index_of_a_topic_is_merged_by_itself(machines: EngineFixture) -> None:
    one = await machines.served_by("one", limit(-1))
    shared = await one.receiver("t", "a")
    own = await one.receiver("t", "b")
    for ledger in range(4):
        await one.add("t", ledger, range(5), delay_ms=20_000)
        await one.add("t", ledger, range(5, 10), delay_ms=20_000, subscription="b")
        await one.call(one.engine.requests.seal("t"))
    assert buckets(one) == 8
    asked = await merge(one, 1)
    assert (asked.merges, asked.merged_buckets, asked.buckets) == (2, 8, 2)
    assert sorted(live.subscription_id for live in machines.topic_tip().live) == [0, 2]
    await own.received(40)
    await shared.received(20)
    await asyncio.sleep(10)
    assert (len(shared.rows), len(own.rows)) == (20, 40)
    await own.acknowledge(own.rows[:7])
    one.kill()
    two = await machines.served_by("two")
    again = await two.receiver("t", "b")
    await again.received(33)
    await asyncio.sleep(10)
    assert len(again.rows) == 33


async def test_the_own_index_of_a_subscription_leaves_while_it_is_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", limit(-1))
    await one.receiver("t", "a")
    await one.receiver("t", "b")
    for ledger in range(4):
        await one.add("t", ledger, range(5), delay_ms=FAR_MS, subscription="b")
        await one.call(one.engine.requests.seal("t"))
    held = one.pause("put", BUCKETS)
    asked = merge(one, 1)
    await held.reached()
    await one.call(one.engine.requests.delete_subscription("t", "b"))
    held.release()
    assert (await asked).buckets == 0
    assert not machines.topic_tip().live
    assert (await one.add("t", 1, range(3), delay_ms=1_000)).accepted == 3


# ---- what goes wrong


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
async def test_a_merge_is_tried_again_when_the_store_fails(machines: EngineFixture, fault: Fault) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 5)
    for operation, part in (("get_range", BUCKETS), ("put", BUCKETS), ("put_if_absent", MANIFESTS)):
        one.script.plan(operation, fault, key_part=part)
    assert (await merge(one, 2)).buckets == 2
    assert len(machines.topic_tip().live) == 2
    assert not one.script.unmet()


async def test_a_damaged_source_is_quarantined_and_the_others_are_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 5)
    damaged = machines.topic_tip().live[1].object.name
    alter(machines, damaged)
    asked = await merge(one, 1)
    await one.until(lambda: damaged in one.topic("t").core.index.quarantined)
    asked = await merge(one, 1)
    assert asked.buckets == 1
    live = {live.object.name: live for live in machines.topic_tip().live}
    assert len(live) == 2
    assert live[damaged].quarantined
    (needed,) = one.topic("t").core.rebuild_needed()
    assert (needed.first_ledger_id, needed.rows) == (1, 10)


async def test_a_topic_is_deleted_while_its_buckets_are_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 4)
    held = one.pause("put", BUCKETS)
    asked = merge(one, 1)
    await held.reached()
    deleted = await one.call(one.engine.requests.delete_topic("t"))
    assert deleted.rows == 40
    held.release()
    with pytest.raises(OutcomeUnknown, match="no longer served by this daemon"):
        await asked
    tip = machines.topic_tip()
    assert tip.deleted
    assert not tip.live


async def test_the_orderly_end_does_not_wait_for_a_merge(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 4)
    held = one.pause("get_range", BUCKETS)
    asked = merge(one, 1)
    await held.reached()
    await one.stop()
    with pytest.raises(OutcomeUnknown, match="no longer served by this daemon"):
        await asked
    held.release()
    two = await machines.served_by("two", *SMALL, limit(1))
    await two.until(lambda: buckets(two) == 1)


# ---- other processes merge


async def until_learned(daemon: Daemon, machines: EngineFixture) -> None:
    """The owner serves what the manifest names."""
    live = {live.object.name for live in machines.topic_tip().live}
    await daemon.until(lambda: daemon.topic("t").core.indexes.sealed.keys() == live)


async def test_an_owner_learns_within_a_minute_what_another_process_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 6, delay_ms=90_000)
    MergingProcess(machines.store).merge_run(6)
    assert buckets(one) == 6
    await asyncio.sleep(70)
    assert buckets(one) == 1
    await receiver.received(60)
    await asyncio.sleep(10)
    assert len(receiver.rows) == 60
    assert not receiver.early


async def test_an_owner_learns_two_merges_one_on_the_other_at_once(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 6, delay_ms=90_000)
    other = MergingProcess(machines.store)
    other.merge_run(3)
    other.merge_run(2)
    other.merge_run(2, place=1)
    assert len(machines.topic_tip().live) == 2
    await until_learned(one, machines)
    await receiver.received(60)
    assert len(receiver.rows) == 60


async def test_an_owner_learns_by_its_own_commit_what_another_process_merged(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    await fill(one, 4)
    MergingProcess(machines.store).merge_run(4)
    await fill(one, 1, first=4)
    await one.until(lambda: buckets(one) == 2, timeout_s=5)


async def test_what_left_a_source_after_it_was_merged_elsewhere_does_not_come_again(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 3, delay_ms=10_000)
    other = MergingProcess(machines.store)
    written = other.write(other.live())
    rows = await receiver.received(20, timeout_s=60)
    other.commit(written)
    # Every row of the first source is gone: the owner drops it, and finds that it was merged.
    await receiver.acknowledge(rows[:15])
    await until_learned(one, machines)
    await fill(one, 1, first=3)
    one.kill()
    two = await machines.served_by("two")
    again = await two.receiver("t")
    await again.received(15, timeout_s=120)
    await asyncio.sleep(30)
    assert again.positions.isdisjoint({row[:2] for row in rows[:15]})


async def test_a_source_that_is_collected_before_the_owner_learns_of_its_merge_is_read_from_the_merged_bucket(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 3, delay_ms=45_000)
    sources = [live.object.name for live in machines.topic_tip().live]
    MergingProcess(machines.store).merge_run(3)
    for name in sources:
        machines.store.delete(name)
    one.topic("t").core.indexes.cache.discard_bucket(sources[0])
    await receiver.received(30, timeout_s=120)
    assert not one.topic("t").core.rebuild_needed()
    await until_learned(one, machines)
    assert len(receiver.rows) == 30
    assert not receiver.early


async def test_a_source_that_is_damaged_is_healed_by_the_bucket_that_it_was_merged_into(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 3, delay_ms=45_000)
    sources = [live.object.name for live in machines.topic_tip().live]
    MergingProcess(machines.store).merge_run(3)
    alter(machines, sources[1])
    await merge(one, 1)
    await until_learned(one, machines)
    await receiver.received(30, timeout_s=120)
    assert not one.topic("t").core.rebuild_needed()


@pytest.mark.parametrize("part", ["footer", "metadata", "segment"])
async def test_a_merged_bucket_that_is_damaged_before_the_owner_learns_of_it_is_quarantined(
    machines: EngineFixture, part: str
) -> None:
    one = await machines.served_by("one", *SMALL, limit(-1))
    receiver = await one.receiver("t")
    await fill(one, 1, delay_ms=10_000)
    await fill(one, 2, first=1, delay_ms=200_000)
    await fill(one, 1, first=3, delay_ms=100_000)
    rows = await receiver.received(10)
    await receiver.acknowledge(rows[:5])
    merged = MergingProcess(machines.store, limits=ONE_SEGMENT).merge_run(3)
    alter_part(machines, merged, part)
    await one.until(lambda: merged.object.name in one.topic("t").core.index.quarantined)
    (needed,) = one.topic("t").core.rebuild_needed()
    assert (needed.first_ledger_id, needed.last_ledger_id, needed.rows) == (0, 2, 25)
    await receiver.received(20)
    assert (await one.add("t", 1, range(10))).accepted == 10
    await receiver.received(30)
    assert one.topic("t").core.rebuild_needed()[0].rows == 15


async def test_batch_parts_are_lost_with_the_damaged_bucket_that_they_were_merged_into(
    machines: EngineFixture,
) -> None:
    one, listener, rows = await with_rows(machines, 2, limit(-1))
    for row in rows:
        assert await listener.nack([(*row[:3], part) for part in range(5)], FAR_MS) == NACKED
        await one.call(one.engine.requests.seal("t"))
    number = batch_parts_of(1)
    merged = MergingProcess(machines.store).merge_all(number)
    alter_part(machines, merged, "footer")
    core = one.topic("t").core
    await one.until(lambda: merged.object.name in core.indexes[number].quarantined)
    assert not core.indexes[number].sealed
    assert sum(needed.rows for needed in core.rebuild_needed()) == 10
    assert not len(core.subscriptions[1].nacks)
