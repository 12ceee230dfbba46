"""Garbage goes, by itself and on request, and nothing else does."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from daemon import call_values
from daemon.errors import NotOwner, Unavailable
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.formats.manifest import (
    DeadObject,
    TopicPolicy,
    decode_shard_manifest,
    decode_topic_manifest,
    encode_dead_object,
)
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests.daemon._support.calling import delete_topic

BUCKETS = "/buckets/"
CHECKPOINTS = "/checkpoint/"
HOUR_S = 3600
IDLE_S = 61.0
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")
# Passes are made on request.
ON_REQUEST = (*SMALL, "collection.interval_s=86400", "collection.orphan_interval_s=86400")
KEPT = 3
FAR_MS = 10_000_000_000


async def collect(
    daemon: Daemon, *, dry_run: bool = False, force: bool = False, retry_dead: bool = False
) -> call_values.GarbageProgress:
    """How it ended."""

    async def last() -> call_values.GarbageProgress:
        passes = daemon.engine.requests.collect(dry_run=dry_run, force=force, retry_dead=retry_dead)
        progress = [each async for each in passes]
        assert [each.done for each in progress] == [False] * (len(progress) - 1) + [True]
        return progress[-1]

    return await daemon.call(last())


def pass_hours(machines: EngineFixture, hours: float) -> None:
    """By every wall clock."""
    machines.step_ms += int(hours * HOUR_S * 1000)


async def use(daemon: Daemon, topic: str = "t", *, rows: int = 100) -> None:
    """Rows are added, sealed, handed out and acknowledged; every bucket is dropped."""
    receiver = await daemon.receiver(topic)
    for start in range(0, rows, 20):
        await daemon.add(topic, start // 20, range(20), delay_ms=5_000)
    await receiver.received(rows)
    await receiver.acknowledge(receiver.rows)
    await daemon.until(lambda: not daemon.topic(topic).core.indexes.sealed)


# What is left


async def test_when_everything_is_delivered_and_collected_exactly_this_is_left(machines: EngineFixture) -> None:
    settings = (*ON_REQUEST, f"collection.manifests_kept={KEPT}", "daemon.shards=2")
    topics = [f"t{number}" for number in range(4)]
    one = await machines.served_by("one", *settings)
    for topic in topics:
        await use(one, topic)
    await one.add("deleted", 1, range(40), delay_ms=FAR_MS)
    await one.until(lambda: bool(one.topic("deleted").core.indexes.sealed))
    one.kill()
    one = await machines.served_by("one", *settings)
    for topic in topics:
        await use(one, topic)
    await delete_topic(one, "deleted")
    # An object of a seal that was never committed.
    machines.store.put(names.bucket_key(names.shard_of("t0", 2), names.topic_id("t0"), 2, "LEFT"), b"rows")
    for _ in range(4):
        await asyncio.sleep(IDLE_S)
        await collect(one)
        pass_hours(machines, 25)
    await one.stop()
    # The next owner's manifests count as well; it uses nothing.
    two = await machines.served_by("two", *settings)
    await asyncio.sleep(IDLE_S)
    pass_hours(machines, 25)
    for _ in range(2):
        await collect(two)
    two.kill()

    expected = ["FORMAT", "daemons/one", "daemons/two"]
    ends = [machines.slots(kind) for kind in (LogSlotKind.FENCE, LogSlotKind.CLOSE, LogSlotKind.OPEN)]
    assert [len(each) for each in ends] == [1, 1, 1], (
        "the highest of each log: one was killed, one has ended, one lives"
    )
    expected += itertools.chain.from_iterable(ends)
    for shard in range(2):
        prefix = names.shard_manifest_prefix(shard)
        tip = decode_shard_manifest(machines.store.get(machines.keys(prefix)[-1]))
        assert tip.tombstones == ()
        assert tip.checkpoint is not None
        assert tip.previous_checkpoint is not None
        expected += [names.shard_manifest_key(shard, tip.head.number - back) for back in range(KEPT)]
        expected += [tip.checkpoint.object.name, tip.previous_checkpoint.object.name]
    for topic in (*topics, "deleted"):
        shard, topic_id = names.shard_of(topic, 2), names.topic_id(topic)
        newest = decode_topic_manifest(machines.store.get(machines.keys(topic_id)[-1]))
        assert (newest.live, newest.tombstones, newest.progress_object) == ((), (), None)
        kept = 1 if topic == "deleted" else KEPT
        expected += [names.topic_manifest_key(shard, topic_id, newest.head.number - back) for back in range(kept)]
    assert machines.keys("") == sorted(expected)


async def test_a_daemon_collects_by_itself(machines: EngineFixture) -> None:
    settings = (*SMALL, "collection.interval_s=60", "collection.orphan_interval_s=60", "daemon.shards=2")
    one = await machines.served_by("one", *settings, f"collection.manifests_kept={KEPT}")
    await use(one)
    await one.add("deleted", 1, range(40), delay_ms=FAR_MS)
    await one.until(lambda: bool(one.topic("deleted").core.indexes.sealed))
    await delete_topic(one, "deleted")
    for _ in range(6):
        await asyncio.sleep(150)
        pass_hours(machines, 25)
    # A shard that was never written to says once an hour that it needs nothing of the log.
    await asyncio.sleep(HOUR_S)
    assert not machines.keys(BUCKETS)
    assert not machines.keys("/progress/")
    assert len(machines.slots()) == 1, "the highest of the log stays"
    assert len(machines.keys(names.topic_manifest_prefix(names.shard_of("t", 2), names.topic_id("t")))) == KEPT
    at_rest = machines.keys("shards/")
    pass_hours(machines, 25)
    await asyncio.sleep(600)
    assert machines.keys("shards/") == at_rest, "what is at rest stays so"


# The log


async def test_a_shard_that_has_fallen_silent_keeps_only_the_highest_slot_of_its_log(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await one.add("t", 1, range(5), delay_ms=FAR_MS)
    slots = len(machines.slots())
    assert slots > 1
    await asyncio.sleep(IDLE_S)
    await collect(one)
    assert len(machines.keys(CHECKPOINTS)) == 1, "one a pass"
    await collect(one)
    await one.add("other", 1, range(5), delay_ms=FAR_MS)
    would_go = (await collect(one, dry_run=True)).summary.journal_slots
    assert (await collect(one)).summary.journal_slots == would_go
    assert would_go.objects == 1
    assert would_go.size_bytes > 20
    assert machines.slots()[:-1] == []
    number = machines.shard_tip().head.number
    await collect(one)
    assert machines.shard_tip().head.number == number, "and then no checkpoint more"
    one.kill()
    two = await machines.served_by("one", *ON_REQUEST)
    assert two.topic("t").core.indexes.pending_rows == 5


async def test_a_shard_that_writes_takes_no_checkpoint_for_the_collection(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await asyncio.sleep(IDLE_S)
    await one.add("t", 1, range(5), delay_ms=FAR_MS)
    await collect(one)
    assert not machines.keys(CHECKPOINTS)


async def test_a_shard_that_was_never_written_to_takes_no_checkpoint(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await asyncio.sleep(IDLE_S)
    await collect(one)
    assert not machines.keys(CHECKPOINTS)


async def test_slots_that_a_former_owner_left_covered_go(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST, "journal.checkpoint_slots=5")
    for number in range(20):
        await one.add("t", number, range(3), delay_ms=FAR_MS)
    one.kill()
    two = await machines.served_by("one", *ON_REQUEST)
    await asyncio.sleep(IDLE_S)
    for _ in range(2):
        await collect(two)
    assert not machines.slots(LogSlotKind.DATA)
    assert len(machines.slots()) == 2, "a FENCE, and the OPEN of the log that lives"


async def test_an_orderly_end_leaves_nothing_to_read_and_a_log_that_its_successor_collects(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    for number in range(20):
        await one.add("t", number, range(3), delay_ms=100_000)
    await one.stop()
    assert machines.sections_to_read() == 0
    assert len(machines.keys(CHECKPOINTS)) == 1
    assert machines.slots()[-1] == machines.slots(LogSlotKind.CLOSE)[-1]
    two = await machines.served_by("one", *ON_REQUEST)
    await asyncio.sleep(IDLE_S)
    for _ in range(2):
        await collect(two)
    assert len(machines.keys(CHECKPOINTS)) == 2
    assert not machines.slots(LogSlotKind.DATA)
    assert len(machines.slots()) == 2, "a CLOSE, and the OPEN of the log that lives"


async def test_after_an_orderly_end_a_damaged_checkpoint_can_be_done_without(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(30), delay_ms=1_000)
    await receiver.received(30)
    await receiver.acknowledge(receiver.rows[:10])
    await one.stop()
    newest = machines.shard_tip().checkpoint
    assert newest is not None
    machines.store.put(newest.object.name, b"nothing")
    two = await machines.served_by("one", *ON_REQUEST)
    again = await two.receiver("t")
    await again.received(20)
    await asyncio.sleep(10)
    assert len(again.rows) == 20


# Tombstones, orphans, guard


async def test_what_is_left_of_a_deleted_topic_goes_also_after_a_restart(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await one.add("t", 1, range(40), delay_ms=FAR_MS)
    await one.until(lambda: bool(one.topic("t").core.indexes.sealed))
    await delete_topic(one)
    assert (await collect(one)).summary.waiting.objects == len(machines.keys(BUCKETS)) == 1
    one.kill()
    two = await machines.served_by("one", *ON_REQUEST)
    pass_hours(machines, 2)
    assert (await collect(two)).summary.tombstones.objects == 1
    assert not machines.keys(BUCKETS)


async def test_a_dry_run_says_what_would_be_deleted_and_changes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one)
    machines.store.put(names.bucket_key(0, names.topic_id("t"), 1, "LEFT"), b"rows")
    pass_hours(machines, 25)
    await asyncio.sleep(IDLE_S)
    before = {key: machines.store.get(key) for key in machines.keys("shards/")}
    summary = (await collect(one, dry_run=True)).summary
    assert (summary.orphans.objects, summary.orphans.size_bytes) == (1, 4)
    assert summary.tombstones.objects == 5
    assert {key: machines.store.get(key) for key in machines.keys("shards/")} == before
    done = (await collect(one)).summary
    assert (done.orphans, done.tombstones) == (summary.orphans, summary.tombstones)


async def test_suspiciously_many_orphans_stay_until_somebody_insists(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST, "collection.guard_bytes=1000")
    await use(one)
    for number in range(10):
        machines.store.put(names.bucket_key(0, names.topic_id("t"), 1, f"LEFT{number}"), bytes(10_000))
    pass_hours(machines, 25)
    refused = (await collect(one)).summary
    assert (refused.refused.objects, refused.refused.size_bytes, refused.orphans.objects) == (10, 100_000, 0)
    assert len(machines.keys("LEFT")) == 10
    assert sample(one, "tarry_orphans_refused_bytes", shard="0") == 100_000
    assert (await collect(one, force=True)).summary.orphans.objects == 10
    assert not machines.keys("LEFT")
    await collect(one)
    assert sample(one, "tarry_orphans_refused_bytes", shard="0") == 0


async def test_few_orphans_are_not_suspicious_however_large_a_part_they_are(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one)
    machines.store.put(names.bucket_key(0, names.topic_id("t"), 1, "LEFT"), bytes(1 << 20))
    pass_hours(machines, 25)
    assert (await collect(one)).summary.orphans.objects == 1


async def test_an_owner_seals_on_though_the_floor_was_moved_behind_its_last_manifest(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await one.add("t", 1, range(20), delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 1)
    epoch = machines.shard_tip().epoch
    known = machines.topic_tip().head.number
    for number in range(3):
        base = machines.topic_tip().head.number
        machines.store.put(names.bucket_key(0, names.topic_id("t"), base, f"LEFT{number}"), b"rows")
        pass_hours(machines, 25)
        await collect(one)
    assert machines.topic_tip().head.orphan_floor > known
    await one.add("t", 2, range(20), delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 2)
    assert machines.shard_tip().epoch == epoch
    assert one.engine.health.serving


async def test_a_seal_that_takes_longer_than_the_floor_is_begun_anew_and_loses_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(20), delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 1)
    held = one.pause("put", BUCKETS)
    await one.add("t", 2, range(10), delay_ms=1_000)
    await one.add("t", 2, range(10, 20), delay_ms=FAR_MS)
    await held.reached()
    await receiver.received(10)
    await receiver.acknowledge(receiver.rows[:5])
    await one.call(one.engine.requests.set_topic_policy("t", TopicPolicy(delay_max_ms=2 * FAR_MS)))
    machines.store.put(names.bucket_key(0, names.topic_id("t"), 1, "LEFT"), b"rows")
    pass_hours(machines, 25)
    assert (await collect(one)).summary.orphans.objects == 1
    held.release()
    # The shard is taken over anew: the rows are in the log still.
    await one.until(lambda: machines.shard_tip().epoch == 2 and one.engine.health.serving and one.engine.loaded)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 2)
    assert one.topic("t").core.indexes.pending_rows == 30
    again = await one.receiver("t")
    await again.received(5)
    await asyncio.sleep(30)
    assert again.positions == receiver.positions - {row[:2] for row in receiver.rows[:5]}


async def test_checkpoints_that_were_replaced_go_after_their_grace(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST, "journal.checkpoint_slots=2")
    for number in range(12):
        await one.add("t", number, range(3), delay_ms=FAR_MS)
        await asyncio.sleep(0.5)
    assert len(machines.keys(CHECKPOINTS)) > 3
    pass_hours(machines, 2)
    await collect(one)
    tip = machines.shard_tip()
    assert tip.checkpoint is not None
    assert tip.previous_checkpoint is not None
    assert machines.keys(CHECKPOINTS) == sorted([tip.checkpoint.object.name, tip.previous_checkpoint.object.name])


async def test_a_checkpoint_that_was_never_committed_goes(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    machines.store.put(names.checkpoint_key(0, 1, "LEFT"), b"state")
    pass_hours(machines, 25)
    await collect(one)
    pass_hours(machines, 25)
    assert (await collect(one)).summary.orphans.objects == 1
    assert not machines.keys("LEFT")


async def test_a_damaged_topic_is_left_alone_and_the_others_are_collected(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    for topic in ("t", "damaged"):
        await use(one, topic)
    one.kill()
    damaged = machines.keys(names.topic_manifest_prefix(0, names.topic_id("damaged")))[-1]
    machines.store.put(damaged, b"nothing")
    two = await machines.served_by("one", *ON_REQUEST)
    pass_hours(machines, 25)
    await collect(two)
    assert not machines.keys(names.buckets_prefix(0, names.topic_id("t")))
    assert machines.keys(names.buckets_prefix(0, names.topic_id("damaged")))


# Failures


async def test_what_cannot_be_deleted_is_given_up_and_tried_again_on_request(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST, "collection.attempts_max=1")
    await use(one, rows=20)
    (name,) = machines.keys(BUCKETS)
    pass_hours(machines, 2)
    one.script.plan("delete", Fault.REFUSE, key_part=BUCKETS)
    assert (await collect(one)).summary.given_up.objects == 1
    assert machines.keys("dead_objects/") == [names.dead_object_key(name)]
    assert sample(one, "tarry_collection_given_up_objects_total") == 1
    pass_hours(machines, 60)
    assert (await collect(one)).summary.tombstones.objects == 0
    assert name in machines.keys(BUCKETS)
    done = await collect(one, retry_dead=True)
    assert done.summary.tombstones.objects == 1
    assert not machines.keys(BUCKETS)
    assert not machines.keys("dead_objects/")


async def test_a_record_of_what_no_collector_gives_up_deletes_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await one.add("t", 1, range(20), delay_ms=FAR_MS)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 1)
    manifest_key = machines.keys(names.topic_manifest_prefix(0, names.topic_id("t")))[-1]
    (live,) = machines.keys(BUCKETS)
    for name in (manifest_key, live, "shards/00/note"):
        record = DeadObject(object=name, size_bytes=1, attempts=10, error="denied", given_up_ms=1)
        machines.store.put(names.dead_object_key(name), encode_dead_object(record))
    machines.store.put("shards/00/notes/note", b"nothing of this layout")
    before = machines.keys("shards/"), machines.keys("dead_objects/")
    assert (await collect(one, retry_dead=True)).summary.failed.objects == 3
    assert (machines.keys("shards/"), machines.keys("dead_objects/")) == before


async def test_what_was_given_up_is_not_tried_again_by_a_daemon_that_does_not_serve_every_shard(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *ON_REQUEST, "daemon.shards=2")
    await one.stop()
    tip = machines.keys(names.shard_manifest_prefix(1))[-1]
    machines.store.put(tip, b"nothing")
    two = await machines.daemon("one", *ON_REQUEST, "daemon.shards=2").start()
    await two.until(lambda: two.engine.health.serving)
    with pytest.raises(NotOwner, match="1 of them"):
        await collect(two, retry_dead=True)
    assert (await collect(two)).shards == 1


async def test_after_failures_a_shard_is_collected_less_and_less_often_until_it_works(machines: EngineFixture) -> None:
    settings = (*SMALL, "collection.interval_s=100", "collection.orphan_interval_s=100")
    one = await machines.served_by("one", *settings)
    one.script.plan("list", Fault.FAIL_BEFORE, key_part="shards/00/", times=4)
    tried_s: list[float] = []
    seen = 0
    for _ in range(4000):
        await asyncio.sleep(1)
        listed = sum(call.operation == "list" and call.key == "shards/00/" for call in one.store.calls)
        if listed > seen:
            seen = listed
            tried_s.append(machines.loop.time())
        if len(tried_s) == 6:
            break
    waits_s = [after - before for before, after in itertools.pairwise(tried_s)]
    for wait_s, planned_s in zip(waits_s, (200, 400, 800, 1600, 100), strict=True):
        assert 0.85 * planned_s <= wait_s <= 1.15 * planned_s + 10
    await asyncio.sleep(5)
    assert sample(one, "tarry_collection_age_seconds") < 10
    assert one.engine.health.serving


async def test_a_request_that_the_store_does_not_answer_is_told_so(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    one.script.plan("list", Fault.FAIL_BEFORE, key_part="shards/00/")
    with pytest.raises(Unavailable, match="the store"):
        await collect(one)
    assert (await collect(one)).done


async def test_passes_come_one_after_the_other(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one, rows=20)
    pass_hours(machines, 2)
    held = one.pause("delete", BUCKETS)
    first = one.call(collect_in(one))
    await held.reached()
    second = one.call(collect_in(one))
    await asyncio.sleep(10)
    assert not second.done()
    held.release()
    assert (await first).summary.tombstones.objects == 1
    assert (await second).summary.tombstones.objects == 0


async def collect_in(daemon: Daemon) -> call_values.GarbageProgress:
    return await collect(daemon)


async def test_a_pass_ends_when_the_daemon_stops(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one, rows=20)
    pass_hours(machines, 2)
    held = one.pause("delete", BUCKETS)
    collecting = one.call(collect_in(one))
    await held.reached()
    stopping = asyncio.ensure_future(one.stop())
    await asyncio.sleep(1)
    held.release()
    await stopping
    with pytest.raises(Unavailable):
        await collecting


async def test_a_collector_whose_shard_was_lost_stops_and_has_harmed_nobody(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one, rows=20)
    await one.add("t", 9, range(30), delay_ms=FAR_MS)
    await one.until(lambda: bool(one.topic("t").core.indexes.sealed))
    machines.store.put(names.bucket_key(0, names.topic_id("t"), 1, "LEFT"), b"rows")
    pass_hours(machines, 25)
    held = one.pause("delete", "LEFT")
    collecting = one.call(collect_in(one))
    await held.reached()
    one.freeze()
    two = await machines.served_by("two", *ON_REQUEST)
    await two.add("t", 10, range(30), delay_ms=FAR_MS)
    await two.until(lambda: len(two.topic("t").core.indexes.sealed) == 2)
    one.thaw()
    held.release()
    await asyncio.wait([collecting])
    await asyncio.sleep(30)
    assert two.engine.health.serving
    there = machines.keys(BUCKETS)
    assert {each.object.name for each in machines.topic_tip().live} <= set(there)
    two.kill()
    three = await machines.served_by("two", *ON_REQUEST)
    assert three.topic("t").core.indexes.pending_rows == 60


# Numbers


def sample(daemon: Daemon, name: str, **labels: str) -> float:
    value = daemon.metrics.registry.get_sample_value(name, labels)
    assert value is not None
    return value


async def test_what_was_collected_and_what_waits_is_counted(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *ON_REQUEST)
    await use(one)
    await collect(one)
    assert sample(one, "tarry_tombstones") == 5
    assert sample(one, "tarry_tombstone_bytes") > 0
    pass_hours(machines, 2)
    await asyncio.sleep(IDLE_S)
    await collect(one)
    await collect(one)
    assert sample(one, "tarry_tombstones") == 0
    assert sample(one, "tarry_collected_objects_total", kind="tombstone") == 5
    assert sample(one, "tarry_collected_bytes_total", kind="tombstone") > 0
    assert sample(one, "tarry_collected_objects_total", kind="journal_slot") > 0
