"""The failure table of the storage protocol, one case per row.

Owns: a case for every row that a daemon can meet, and where the rows are tried that a batch job alone can meet.
Does not own: every place at which a crash may come (`tests/daemon/shard/test_crash_points.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from daemon.errors import NotFound, OutcomeUnknown, TarryError, Unavailable
from storage_backends import commit, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import Head, LogSlotHeader, LogSlotKind, ShardSlot, encode_log_slot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, AddRecord, Record, SlotHeader, encode_slot
from storage_backends.local_directory import LocalDirectory
from storage_backends.memory_store import MemoryStore
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import StoreRefused
from storage_backends.probe import probe
from tests._support.engine_fixture import Daemon, EngineFixture, Held, Receiver
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests._support.virtual_loop import InlineExecutor
from tests.batch.compaction import test_job, test_job_sigkill
from tests.daemon._support.calling import cancel, reschedule
from tests.daemon.owner.test_collection import collect, pass_hours
from tests.daemon.topic.test_merging import merge

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")
BUCKETS = "/buckets/"
SHARD_MANIFEST = names.shard_manifest_prefix(0)

# Every row of the table: the test of this module that is its case, or tests of batch jobs.
TABLE: dict[str, str | tuple[Callable[..., None], ...]] = {
    "crash before the slot's PUT lands": "test_crash_before_the_slot_lands",
    "crash after it lands, before the answer": "test_crash_after_the_slot_landed",
    "a duplicate that depends on a slot that never lands": "test_duplicate_of_a_slot_that_never_lands",
    "answer lost, owner alive": "test_answer_lost_and_the_owner_lives",
    "owner paused an hour, then sends its slot": "test_owner_paused_an_hour",
    "crash between bucket PUT and manifest": "test_crash_between_bucket_and_manifest",
    "crash between seal and checkpoint": "test_crash_between_seal_and_checkpoint",
    "manifest landed, answer lost, others committed after": "test_manifest_landed_and_its_answer_was_lost",
    "seal by a zombie after the claim": "test_seal_by_a_zombie",
    "crash after OPEN, before a claim; after a claim, before a section": "test_crash_around_the_claim",
    "owner's slot and the fence race for a number": "test_a_slot_and_the_fence_race",
    "the PUT of a slot timed out, and lands an hour later": "test_a_slot_that_lands_an_hour_later",
    "a slot landed unknown to its owner, was fenced and collected, and is created again": (
        "test_a_slot_that_landed_unknown_and_was_collected"
    ),
    "fencer dies after the fence": "test_fencer_dies_after_the_fence",
    "claimant dies after some of its claims": "test_claimant_dies_between_its_claims",
    "fencer slept between list and create, the log lived on": "test_fencer_sleeps_and_the_log_lives_on",
    "owner paused after planning a truncation, then fenced": "test_owner_pauses_before_it_deletes",
    "two candidates": "test_two_candidates",
    "claim lands when the claimant's own log has an end": "test_a_claim_that_lands_when_its_log_has_an_end",
    "checkpoint of the fenced owner lands before the claim": (
        "test_a_checkpoint_of_the_fenced_owner_lands_before_the_claim"
    ),
    "one slot uncertain for minutes": "test_store_out_of_reach",
    "newest slot damaged before the fence": "test_the_newest_slot_is_damaged",
    "cancel, ack or reschedule between a merge's plan and its commit": "test_what_left_between_plan_and_commit",
    "Spark output written, commit never sent": (
        test_job_sigkill.test_a_driver_that_is_killed_leaves_orphans_alone_and_a_later_job_does_the_rest,
        test_job.test_a_lost_answer_to_the_put_of_a_bucket_leaves_an_orphan_and_is_done_again,
    ),
    "Spark commit landed, job restarted": (
        test_job.test_a_lost_answer_to_the_commit_is_found_by_its_commit_id,
        test_job.test_two_jobs_at_once_merge_everything_once,
    ),
    "merge slower than the floor": "test_merge_slower_than_the_floor",
    "two merges of one run": "test_two_merges_of_one_run",
    "crash after hand-out, before ack": "test_crash_after_hand_out",
    "topic deleted, then a stale tail of the log": "test_topic_deleted_then_a_stale_tail",
    "topic deleted, then a stale merge": "test_topic_deleted_then_a_stale_merge",
    "tombstone deleted, crash before it is dropped": "test_tombstone_deleted_and_not_dropped",
    "reader holds an old manifest past the grace": "test_reader_holds_an_old_manifest",
    "store loses or corrupts an object": "test_store_loses_or_corrupts_a_bucket",
    "store ignores conditions": "test_store_ignores_conditions",
    "daemon reaches clients but not the store": "test_store_out_of_reach",
    "disk full, out of memory, SIGKILL": "test_sigkill",
}


def test_every_row_of_the_table_has_its_case() -> None:
    """Those elsewhere are named as what they are: without one of them this module is not imported."""
    module = sys.modules[__name__]
    own = [case for case in TABLE.values() if isinstance(case, str)]
    assert [case for case in own if not callable(getattr(module, case, None))] == []
    assert len(TABLE) == 36


async def everything(daemon: Daemon, rows: int) -> set[tuple[int, int]]:
    """What a new receiver is handed out: so many rows and no more, none early, none twice."""
    receiver = await daemon.receiver("t")
    await receiver.received(rows)
    await asyncio.sleep(60)
    assert len(receiver.rows) == len(receiver.positions) == rows
    assert not receiver.early
    return receiver.positions


async def test_crash_before_the_slot_lands(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    held = one.pause("put_if_absent", JOURNAL, then=Fault.FAIL_BEFORE)
    add = one.add("t", 1, range(10))
    await held.reached()
    one.kill()
    two = await machines.served_by()
    assert add.cancelled(), "it was not answered"
    assert (await two.add("t", 1, range(10))).accepted == 10
    await everything(two, 11)


async def test_crash_after_the_slot_landed(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    held = one.pause("head", JOURNAL)
    add = one.add("t", 1, range(10))
    await held.reached()
    one.kill()
    two = await machines.served_by()
    assert add.cancelled()
    assert (await two.add("t", 1, range(10))).duplicates == 10
    await everything(two, 11)


async def test_duplicate_of_a_slot_that_never_lands(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    held = one.pause("put_if_absent", JOURNAL, then=Fault.FAIL_BEFORE)
    add = one.add("t", 1, range(10))
    await held.reached()
    duplicate = one.add("t", 1, range(10))
    await asyncio.sleep(10)
    assert not duplicate.done()
    one.freeze()
    two = await machines.served_by("two")
    one.thaw()
    held.release()
    answers = await asyncio.gather(add, duplicate, return_exceptions=True)
    assert all(isinstance(answer, TarryError) for answer in answers)
    assert two.topic("t").core.index.pending_rows <= 1


async def test_answer_lost_and_the_owner_lives(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    assert (await one.add("t", 1, range(10))).accepted == 10
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL, times=100)
    one.script.plan("head", Fault.FAIL_BEFORE, key_part=JOURNAL, times=20)
    with pytest.raises(OutcomeUnknown):
        await one.add("t", 2, range(10))
    await one.serving()
    assert (await one.add("t", 2, range(10))).duplicates == 10
    await everything(one, 21)


async def test_owner_paused_an_hour(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    held = one.pause("put_if_absent", JOURNAL)
    add = one.add("t", 1, range(10))
    await held.reached()
    one.freeze()
    two = await machines.served_by("two")
    await asyncio.sleep(3600)
    held.release()
    with pytest.raises(TarryError):
        await add
    one.thaw()
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    assert (await two.add("t", 1, range(10))).accepted == 10
    await everything(two, 11)


async def test_crash_between_bucket_and_manifest(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 0, [0])
    held = one.pause("put_if_absent", "/topics/", then=Fault.FAIL_BEFORE)
    await one.add("t", 1, range(20))
    await held.reached()
    one.kill()
    (orphan,) = machines.keys(BUCKETS)
    two = await machines.served_by("one", *SMALL)
    await everything(two, 21)
    live = two.topic("t").core.index.sealed
    assert live, "it was sealed again"
    assert orphan not in live
    assert orphan in machines.keys(BUCKETS), "collection, and nothing else, deletes an orphan"


async def test_crash_between_seal_and_checkpoint(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    for ledger_id in range(7):
        await one.add("t", ledger_id, range(2))
    await receiver.received(14)
    assert machines.keys("/checkpoint/")
    await receiver.acknowledge(receiver.rows[:4])
    await one.add("t", 50, range(20))
    await one.until(lambda: bool(one.topic("t").core.index.sealed))
    one.kill()
    await everything(await machines.served_by("one", *SMALL), 14 - 4 + 20)


async def test_manifest_landed_and_its_answer_was_lost(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="/topics/")
    held = one.pause("head", "/topics/")
    await one.add("t", 1, range(20))
    await held.reached()
    log = topic_manifest.topic_log(
        machines.store,
        0,
        names.topic_id("t"),
        monotonic=machines.elapsed_s,
        sleep=lambda seconds: None,
        jitter=lambda: 0.5,
        new_id=lambda: "another-commit",
    )
    tip = log.read_tip()
    assert tip is not None
    commit.commit(
        log,
        topic_manifest.SetSubscriptions(subscriptions=(), last_subscription_id=0, epoch=1, delete_after_ms=0),
        writer="another",
        created_ms=0,
        warm=tip,
        deadline_s=1.0,
    )
    held.release()
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 1)
    assert len(machines.keys(BUCKETS)) == 1
    await everything(one, 21)


async def test_seal_by_a_zombie(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 0, [0])
    held = one.pause("put", BUCKETS)
    await one.add("t", 1, range(20))
    await held.reached()
    one.freeze()
    two = await machines.served_by("two", *SMALL)
    manifests = machines.keys(f"{names.topic_id('t')}/manifest/")
    held.release()
    one.thaw()
    await one.until(lambda: not one.engine.health.serving)
    await asyncio.sleep(5)
    zombies = set(machines.keys(f"{names.topic_id('t')}/manifest/")) - set(manifests)
    assert all(machines.store.get(key).find(b"one") < 0 for key in zombies)
    await everything(two, 21)


async def suspected(machines: EngineFixture, one: Daemon, operation: str, key_part: str) -> tuple[Daemon, Held]:
    """Another daemon that takes over from one whose store is out of reach, held at such a call of its own."""
    one.freeze()
    two = machines.daemon("two", *SMALL)
    held = two.pause(operation, key_part)
    await two.start()
    await held.reached()
    return two, held


async def test_crash_around_the_claim(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.kill()
    two = machines.daemon()
    held = two.pause("put_if_absent", SHARD_MANIFEST, then=Fault.FAIL_BEFORE)
    await two.start()
    await held.reached()
    two.kill()
    three = await machines.daemon().start()
    await three.until(lambda: machines.shard_tip().epoch == 2)
    three.kill()
    empty = machines.shard_tip().ranges[-1].log_id
    assert machines.keys(names.log_prefix(empty)) == [names.log_slot_key(empty, 1)], "no section"
    four = await machines.served_by()
    assert four.shards[0].epoch == 3
    assert empty not in {each.log_id for each in machines.shard_tip().ranges}
    await everything(four, 10)


async def test_a_slot_and_the_fence_race(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    slot = one.pause("put_if_absent", JOURNAL)
    add = one.add("t", 1, range(10))
    await slot.reached()
    two, fence = await suspected(machines, one, "put_if_absent", JOURNAL)
    slot.release()
    one.thaw()
    with pytest.raises(OutcomeUnknown):
        await add
    await one.until(lambda: one.engine.health.serving)
    fence.release()
    await two.serving()
    await one.until(lambda: not one.engine.health.serving)
    assert (await two.add("t", 1, range(10))).duplicates == 10
    await everything(two, 11)


async def test_a_slot_that_lands_an_hour_later(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.DELIVER_LATE, key_part=JOURNAL)
    held = one.pause("head", JOURNAL)
    lost = one.add("t", 1, range(10))
    await held.reached()
    one.kill()
    two = await machines.served_by("two")
    await asyncio.sleep(3600)
    assert one.store.deliver_late() == 0, "the fence stands in its place"
    assert lost.cancelled()
    await everything(two, 1)


async def test_a_slot_that_landed_unknown_and_was_collected(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 0, [0])
    one.script.plan("put_if_absent", Fault.FAIL_AFTER, key_part=JOURNAL)
    held = one.pause("head", JOURNAL)
    add = one.add("t", 1, range(10))
    await held.reached()
    landed = machines.keys(JOURNAL)[-1]
    one.freeze()
    two = await machines.served_by("two", *SMALL)
    ledgers = itertools.count(10)
    while landed in machines.keys(JOURNAL):
        await two.add("t", next(ledgers), [0])
        await two.call(collect(two))
    held.release()
    one.thaw()
    with pytest.raises(TarryError):
        await add
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    assert landed in machines.keys(JOURNAL), "it was created again, and is behind no answer"
    await everything(two, 11 + next(ledgers) - 10)


async def test_fencer_dies_after_the_fence(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10))
    two, _ = await suspected(machines, one, "put_if_absent", names.numbered_key("/", 1))
    two.kill()
    one.thaw()
    await one.until(lambda: one.shards == {} or one.shards[0].epoch == 2)
    await one.serving()
    assert one.shards[0].epoch == 2, "it finds the fence, and comes back with another log"
    await everything(one, 10)


async def test_claimant_dies_between_its_claims(machines: EngineFixture) -> None:
    shards = "daemon.shards=4"
    one = await machines.served_by("one", shards)
    for number in range(8):
        await one.add(f"t{number}", 1, range(5))
    one.kill()
    two = machines.daemon("two", shards)
    held = [two.pause("put_if_absent", names.shard_manifest_prefix(shard), then=Fault.FAIL_BEFORE) for shard in (1, 3)]
    await two.start()
    for each in held:
        await each.reached()
    await two.until(lambda: machines.shard_tip(2).epoch == 2)
    two.kill()
    three = await machines.served_by("one", shards)
    assert [three.shards[shard].epoch for shard in range(4)] == [3, 2, 3, 2]
    assert [(await three.add(f"t{number}", 1, range(5))).duplicates for number in range(8)] == [5] * 8


async def test_fencer_sleeps_and_the_log_lives_on(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 0, [0])
    _, fence = await suspected(machines, one, "put_if_absent", JOURNAL)
    emptied = names.number_of(machines.keys(JOURNAL)[-1]) + 1
    log_id = machines.shard_tip().ranges[-1].log_id
    one.thaw()
    ledgers = itertools.count(1)
    while (lowest := machines.shard_tip().lowest_after(log_id)) is None or lowest < emptied:
        await one.add("t", next(ledgers), [0])
    slots = machines.keys(names.log_prefix(log_id))
    await one.until(lambda: names.log_slot_key(log_id, emptied) not in machines.keys(JOURNAL))
    fence.release()
    await asyncio.sleep(30)
    assert names.log_slot_key(log_id, emptied) in machines.keys(JOURNAL), f"a fence that stops nobody, among {slots}"
    assert one.engine.health.serving
    assert one.shards[0].epoch == 1
    await everything(one, next(ledgers))


async def test_owner_pauses_before_it_deletes(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    delete = one.pause("delete", JOURNAL)
    ledgers = itertools.count()
    while not delete.pause.reached.is_set():
        await one.add("t", next(ledgers), [0])
    one.freeze()
    two = await machines.served_by("two")
    delete.release()
    one.thaw()
    await one.until(lambda: "waiting for daemon two" in one.engine.health.reason)
    two.kill()
    one.kill()
    await everything(await machines.served_by("three"), next(ledgers))


async def test_two_candidates(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.kill()
    lower = machines.daemon("lower")
    held = lower.pause("put_if_absent", JOURNAL)
    await lower.start()
    await held.reached()
    lower.freeze()
    higher = await machines.served_by("higher")
    held.release()
    lower.thaw()
    await asyncio.sleep(10)
    assert not lower.engine.health.serving
    assert higher.engine.health.serving
    assert higher.shards[0].epoch == 2, "who has lost does not fence who has won"
    await everything(higher, 10)


async def test_a_claim_that_lands_when_its_log_has_an_end(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.kill()
    two = machines.daemon()
    two.script.plan("put_if_absent", Fault.DELIVER_LATE, key_part=SHARD_MANIFEST)
    two.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=SHARD_MANIFEST, times=1_000)
    await two.start()
    await two.until(lambda: "cannot be reached" in two.engine.health.reason)
    two.kill()
    assert two.store.deliver_late() == 1
    closed = machines.shard_tip().ranges[-1].log_id
    assert len(machines.keys(names.log_prefix(closed))) == 2, "OPEN and CLOSE"
    three = await machines.served_by()
    assert three.shards[0].epoch == 3
    assert closed not in {each.log_id for each in machines.shard_tip().ranges}
    await everything(three, 10)


async def test_a_checkpoint_of_the_fenced_owner_lands_before_the_claim(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    checkpoint = one.pause("put_if_absent", SHARD_MANIFEST)
    ledgers = itertools.count()
    while not checkpoint.pause.reached.is_set():
        await one.add("t", next(ledgers), [0])
    two, claim = await suspected(machines, one, "put_if_absent", SHARD_MANIFEST)
    checkpoint.release()
    await two.until(lambda: machines.shard_tip().checkpoint is not None)
    claim.release()
    await two.serving()
    assert machines.shard_tip().epoch == 2
    await everything(two, next(ledgers))


async def test_the_newest_slot_is_damaged(machines: EngineFixture, caplog: pytest.LogCaptureFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10))
    one.kill()
    newest = machines.keys(JOURNAL)[-1]
    body, metadata = machines.store.get_with_metadata(newest)
    machines.store.put(newest, b"?" + body[1:-1] + b"?", metadata=metadata)
    two = await machines.daemon().start()
    await two.until(lambda: newest in two.engine.health.reason)
    assert not two.shards
    machines.store.put(newest, body, metadata=metadata)
    await two.serving()
    await everything(two, 10)


async def with_three_buckets(machines: EngineFixture) -> tuple[Daemon, Receiver]:
    """Of 20 rows each, due in 10, 60 and 110 s."""
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    for ledger_id in range(3):
        await one.add("t", ledger_id, range(20), delay_ms=10_000 + 100_000 * ledger_id)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 3)
    return one, receiver


@pytest.mark.parametrize("learned", [True, False])
async def test_what_left_between_plan_and_commit(machines: EngineFixture, learned: bool) -> None:
    one, receiver = await with_three_buckets(machines)
    merger = MergingProcess(machines.store)
    written = merger.write(merger.live())
    rows = await receiver.received(20)
    assert await receiver.acknowledge(rows[:15]) == 0
    assert (await cancel(one, 1, range(5))).cancelled == 5
    assert (await reschedule(one, 2, range(5), 300_000)).rescheduled == 5
    merged = merger.commit(written)
    assert merged is not None
    assert merged.rows == 60
    # And what leaves before the owner knows.
    assert (await cancel(one, 1, range(5, 8))).cancelled == 3
    if learned:
        await one.until(lambda: merged.object.name in one.topic("t").core.index.sealed)
        assert (await cancel(one, 1, range(8, 10))).cancelled == 2
    left = 60 - 15 - 5 - 3 - 2 * learned
    one.kill()
    two = await machines.served_by("two", *SMALL)
    assert (await two.add("t", 2, range(20))).duplicates == 20
    later = await two.receiver("t")
    await later.received(left - 5)
    moved = {(2, entry) for entry in range(5)}
    assert not later.positions & moved, "a row that was rescheduled comes at its new time alone"
    await later.received(left)
    await asyncio.sleep(60)
    assert len(later.rows) == left
    assert not later.early


async def test_merge_slower_than_the_floor(machines: EngineFixture) -> None:
    one, _ = await with_three_buckets(machines)
    merger = MergingProcess(machines.store)
    written = merger.write(merger.live())
    await one.add("t", 3, range(20))
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 4)
    merger.set_floor()
    with pytest.raises(commit.Refused, match="floor"):
        merger.commit(written)
    assert len(merger.tip().live) == 4
    one.kill()
    await everything(await machines.served_by("two", *SMALL), 80)


@pytest.mark.parametrize("first", ["the owner", "another"])
async def test_two_merges_of_one_run(machines: EngineFixture, first: str) -> None:
    one, receiver = await with_three_buckets(machines)
    merger = MergingProcess(machines.store)
    if first == "the owner":
        written = merger.write(merger.live())
        assert (await merge(one, 1)).merges == 1
        with pytest.raises(commit.Refused, match="not live"):
            merger.commit(written)
    else:
        held = one.pause("put", BUCKETS)
        asked = merge(one, 1)
        await held.reached()
        merger.merge_all()
        held.release()
        assert (await asked).merges == 0
    (live,) = merger.tip().live
    await one.until(lambda: one.topic("t").core.index.sealed.keys() == {live.object.name})
    await receiver.received(60)
    assert len(receiver.positions) == len(receiver.rows) == 60


async def test_topic_deleted_then_a_stale_merge(machines: EngineFixture) -> None:
    one, _ = await with_three_buckets(machines)
    merger = MergingProcess(machines.store)
    written = merger.write(merger.live())
    await one.call(one.engine.requests.delete_topic("t"))
    with pytest.raises(commit.Refused, match="deleted"):
        merger.commit(written)
    await one.add("t", 1, range(5))
    with pytest.raises(commit.Refused, match="incarnation"):
        merger.commit(written)
    one.kill()
    assert await everything(await machines.served_by("two"), 5) == {(1, entry) for entry in range(5)}


async def test_crash_after_hand_out(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10))
    rows = await receiver.received(10)
    assert await receiver.acknowledge(rows[:3]) == 0
    one.kill()
    assert await everything(await machines.served_by(), 7) == {row[:2] for row in rows[3:]}


@pytest.mark.parametrize("born_again", [True, False])
async def test_topic_deleted_then_a_stale_tail(machines: EngineFixture, born_again: bool) -> None:
    one = await machines.served_by("one")
    await one.call(one.engine.requests.create_subscription("t", "s"))
    await one.add("t", 1, range(10))
    stale = one.topic("t").core
    assert (await one.call(one.engine.requests.delete_topic("t"))).rows == 10
    if born_again:
        await one.add("t", 2, range(5))
    await one.add("other", 1, range(5))
    slot = one.shards[0].applied_slot + 1
    one.kill()
    entries = np.arange(10, dtype=np.uint64)
    rows = Rows(entries + np.uint64(machines.now_ms()), np.full(10, 3, np.uint64), entries)
    records: list[Record] = [
        AddRecord(stale.topic_id, stale.incarnation, 0, rows),
        AcknowledgeRecord(stale.topic_id, stale.incarnation, 1, rows),
    ]
    section = encode_slot(SlotHeader(0, 1, ShardSlot(slot), len(records)), records)
    newest = machines.keys(JOURNAL)[-1]
    log_id, number = newest.split("/")[1], names.number_of(newest) + 1
    header = LogSlotHeader(log_id=log_id, number=number, kind=LogSlotKind.DATA, heads={0: Head(1, slot)})
    ObjectLogs(machines.store, InlineExecutor()).log(log_id).create(number, encode_log_slot(header, {0: section}))
    two = await machines.served_by("one")
    if not born_again:
        assert [topic.topic for topic in (await two.call(two.engine.requests.list_topics(10, ""))).topics] == ["other"]
        await two.add("t", 2, range(5))
    assert await everything(two, 5) == {(2, entry) for entry in range(5)}


async def test_topic_deleted_then_a_tail_of_the_log(machines: EngineFixture) -> None:
    one = await machines.served_by()
    receiver = await one.receiver("t")
    await one.add("t", 1, range(10), delay_ms=5_000)
    await one.add("t", 2, range(10), delay_ms=60_000)
    await receiver.received(10)
    assert await receiver.acknowledge(receiver.rows[:5]) == 0
    await one.call(one.engine.requests.delete_topic("t"))
    one.kill()
    two = await machines.served_by()
    with pytest.raises(NotFound):
        await two.call(two.engine.requests.topic_stats("t"))
    assert (await two.add("t", 1, range(3), delay_ms=5_000)).accepted == 3
    two.kill()
    assert len(machines.keys(JOURNAL)) >= 6, "the slots of both incarnations are there to be replayed"
    assert await everything(await machines.served_by(), 3) == {(1, entry) for entry in range(3)}


@pytest.mark.parametrize("what", ["lost", "corrupted"])
async def test_store_loses_or_corrupts_a_bucket(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, range(20), delay_ms=60_000)
    await one.until(lambda: len(one.topic("t").core.index.sealed) == 2)
    one.kill()
    damaged = machines.keys(BUCKETS)[0]
    body = bytearray(machines.store.get(damaged))
    if what == "lost":
        machines.store.delete(damaged)
    else:
        body[len(body) // 2] ^= 1
        machines.store.put(damaged, bytes(body))
    two = await machines.served_by("one", *SMALL)
    receiver = await two.receiver("t")
    await receiver.received(20)
    assert {ledger_id for ledger_id, _ in receiver.positions} == {2}
    await two.until(lambda: bool(two.topic("t").core.rebuild_needed()))
    (needed,) = two.topic("t").core.rebuild_needed()
    assert (needed.first_ledger_id, needed.last_ledger_id, needed.rows) == (1, 1, 20)
    assert any(damaged in each.getMessage() for each in caplog.records if each.levelname == "ERROR")
    assert (await two.add("t", 1, range(20))).accepted == 20
    two.kill()
    three = await machines.served_by("one", *SMALL)
    assert (await three.add("t", 1, range(20))).duplicates == 20
    assert not three.topic("t").core.rebuild_needed()
    await everything(three, 40)
    assert what == "lost" or damaged in machines.keys(BUCKETS), "what is damaged is never deleted"


class WithoutConditions(MemoryStore):
    """A store that takes no notice of If-None-Match."""

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self.put(key, body, metadata=metadata)


def test_store_ignores_conditions() -> None:
    probe(MemoryStore(), "probe/1", races=5)
    with pytest.raises(StoreRefused, match="ignores the condition"):
        probe(WithoutConditions(), "probe/1", races=5)


async def test_store_out_of_reach(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 0, [0])
    one.store.go_down()
    add = one.add("t", 1, range(10))
    await one.until(lambda: not one.engine.health.serving)
    with pytest.raises(Unavailable):
        await one.add("t", 2, range(10))
    with pytest.raises(OutcomeUnknown):
        await add
    one.store.come_back()
    await one.serving()
    await everything(one, 11)


async def test_sigkill(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    adds = [one.add("t", ledger_id, range(8)) for ledger_id in range(10)]
    await adds[0]
    adds += [one.add("t", ledger_id, range(8)) for ledger_id in range(10, 20)]
    one.kill()
    two = await machines.served_by("one", *SMALL)
    for ledger_id in range(20):
        outcome = await two.add("t", ledger_id, range(8))
        assert outcome.accepted + outcome.duplicates == 8
    await everything(two, 160)


async def test_sigkill_on_a_local_directory(tmp_path: Path) -> None:
    with contextlib.closing(LocalDirectory(tmp_path / "root")) as store:
        fixture = EngineFixture(store)
        await test_sigkill(fixture)
        await fixture.close()


async def test_tombstone_deleted_and_not_dropped(machines: EngineFixture) -> None:
    one, receiver = await with_three_buckets(machines)
    await receiver.acknowledge((await receiver.received(40))[:40])
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 1)
    assert len(machines.topic_tip().tombstones) == 2
    pass_hours(machines, 2)
    held = one.pause("put_if_absent", f"{names.topic_id('t')}/manifest")
    collecting = one.call(collect(one))
    await held.reached()
    one.kill()
    await asyncio.wait([collecting])
    assert (len(machines.keys(BUCKETS)), len(machines.topic_tip().tombstones)) == (1, 2)
    two = await machines.served_by("one", *SMALL)
    assert (await collect(two)).summary.tombstones.objects == 2
    assert not machines.topic_tip().tombstones
    await everything(two, 20)


async def test_reader_holds_an_old_manifest(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    for ledger_id in range(3):
        await one.add("t", ledger_id, range(20), delay_ms=35_000 + 2_000 * ledger_id)
    await one.until(lambda: len(one.topic("t").core.indexes.sealed) == 3)
    sources = machines.keys(BUCKETS)
    MergingProcess(machines.store).merge_all()
    assert (await collect(one)).summary.tombstones.objects == 3
    assert not set(sources) & set(machines.keys(BUCKETS))
    # Its segments are loaded now, from buckets that it still serves.
    rows = await receiver.received(60)
    assert len(receiver.positions) == len(rows) == 60
    assert not any(live.quarantined for live in machines.topic_tip().live)
    assert machines.loop.time() < 1_000 + 60, "before it would have looked by itself"
    assert not one.topic("t").core.rebuild_needed()
