"""The driver of a compaction, against owners, other mergers, collection and a store that fails."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from batch.compaction import job, merge_task, plan, waves
from batch.compaction.job import Options
from batch.compaction.merge_task import FailedRun, MergeTask, WrittenRun, merge_run
from batch.compaction.plan import Run
from batch.compaction.tally import Outcome, RunResult, Status, Summary
from batch.engine.job_settings import Settings
from storage_backends import bucket_reading, crash_points, merge_hints
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import Progress, TopicManifest
from storage_backends.merge_hints import MergeHint
from storage_backends.object_store import NotFound, ObjectStore
from storage_backends.topic_manifest import DeleteTopic
from tests._support.fault_store import Fault
from tests._support.merging_process import MergingProcess
from tests.batch.compaction._support.jobs_in_process import World
from tests.batch.engine._support import roots
from tests.batch.engine._support.roots import StoredTopic


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """With waves so small that a few runs make several."""
    monkeypatch.setattr(job, "WAVE_FACTOR", 4)
    return World(monkeypatch)


@contextmanager
def at(point: str, do: Callable[[], object], *, times: int = 1) -> Iterator[None]:
    """At the first `times` times that the job comes there."""
    left = times

    def hook(name: str) -> None:
        nonlocal left
        if name == point and left:
            left -= 1
            do()

    with crash_points.intercepted(hook):
        yield
    assert left == 0, f"the job never came to {point}"


def other_merger(world: World, topic: StoredTopic) -> MergingProcess:
    return MergingProcess(world.memory, topic.name, shard=topic.shard, now_ms=lambda: roots.NOW_MS)


def only(summary: Summary, outcome: Outcome) -> RunResult:
    (found,) = [result for result in summary.run_results if result.outcome is outcome]
    return found


def four_runs() -> Options:
    """Of sixteen buckets."""
    return Options(sources_max=4)


def test_small_buckets_become_one_and_no_row_is_lost_or_doubled(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 11))
    before = topic.waiting()
    summary = world.compact()
    assert topic.waiting() == before
    assert (summary.buckets_before, summary.buckets_after, len(topic.tip().live)) == (10, 1, 1)
    assert (summary.status, summary.exit_status) == (Status.DONE, 0)
    assert (summary.rows_read, summary.rows_kept, summary.rows_dropped) == (200, 200, 0)
    assert only(summary, Outcome.COMMITTED).bucket == topic.tip().live[0].object.name


def test_what_is_gone_is_dropped_and_the_sources_are_left_to_collection_after_the_grace(world: World) -> None:
    topic = world.topic()
    first, second = topic.add([1, 2])
    topic.seal(gone={first.object.name: {1: range(5)}, second.object.name: {2: [7]}})
    before = topic.waiting()
    summary = world.compact()
    assert topic.waiting() == before
    assert topic.tip().live[0].rows == len(before) == summary.rows_kept == 34
    buried = {each.object.name: each.delete_after_ms for each in topic.tip().tombstones}
    assert buried == dict.fromkeys((first.object.name, second.object.name), roots.NOW_MS + 60_000)
    assert not [call for call in world.store.calls if call.operation == "delete"], "a job deletes nothing"


def test_a_clock_that_is_behind_the_stores_does_not_make_the_grace_shorter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic()
    topic.add([1, 2])
    monkeypatch.setattr(world.memory, "clock_skew_s", lambda: 120.0)
    world.compact()
    assert {each.delete_after_ms for each in topic.tip().tombstones} == {roots.NOW_MS + 180_000}


@pytest.mark.parametrize("inline", [True, False])
def test_what_goes_between_plan_and_commit_is_gone_from_the_merged_bucket(world: World, *, inline: bool) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 5))
    topic.seal(gone={sources[0].object.name: {1: [0, 1]}}, inline=inline)
    before = topic.waiting()
    gone = {sources[1].object.name: {2: [3]}, sources[0].object.name: {1: [19]}}
    with at("compaction.before_commit", lambda: topic.seal(gone=gone, inline=inline)):
        summary = world.compact()
    left = [row for row in before if row[1:3] not in {(2, 3), (1, 19)}]
    assert topic.waiting() == left
    assert summary.runs.committed == 1


def test_a_takeover_with_a_seal_between_plan_and_commit_does_not_harm_a_merge(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))

    def take_over() -> None:
        topic.take_over()
        topic.add([9])

    with at("compaction.before_commit", take_over):
        summary = world.compact()
    assert (summary.exit_status, summary.runs.committed) == (0, 1)
    assert {row[1] for row in topic.waiting()} == {1, 2, 3, 4, 9}
    assert len(topic.tip().live) == 2


def test_a_bucket_sealed_between_the_sources_has_the_topic_planned_again(world: World) -> None:
    topic = world.topic()
    topic.add([1, 2, 4, 5])
    with at("compaction.after_plan", lambda: topic.add([3])):
        summary = world.compact()
    assert "lie between" in only(summary, Outcome.REPLANNED).reason
    assert (summary.exit_status, summary.conflicts_retried, len(topic.tip().live)) == (0, 1, 1)
    assert len(topic.waiting()) == 100


def test_what_is_known_to_be_refused_is_not_done_first(world: World) -> None:
    topic = world.topic()
    topic.add(range(2, 98, 2))
    with at("compaction.before_commit", lambda: topic.add(range(3, 99, 2))):
        summary = world.compact(four_runs())
    refused = [result for result in summary.run_results if result.outcome is Outcome.REPLANNED]
    assert len(refused) == 8, "two waves of three were under way"
    assert (summary.exit_status, len(topic.waiting())) == (0, 96 * 20)


def test_waiting_runs_whose_sources_have_left_by_the_newest_manifest_known_are_not_done(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 49))
    last = plan.by_benefit(Run.of(sources[first : first + 4]) for first in range(0, 48, 4))[-1]
    with at("compaction.before_commit", lambda: other_merger(world, topic).merge(last.sources[:2])):
        summary = world.compact(four_runs())
    (result,) = [each for each in summary.run_results if each.outcome is Outcome.REPLANNED]
    assert "or lie between" in result.reason
    assert (result.worker, summary.exit_status) == (None, 0)


def test_a_job_slower_than_the_orphan_floor_is_refused_and_begins_again(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()
    with at("compaction.before_commit", other_merger(world, topic).set_floor):
        summary = world.compact()
    assert "below the orphan floor" in only(summary, Outcome.REPLANNED).reason
    assert summary.runs.committed == 1
    assert topic.waiting() == before


def test_an_object_that_was_collected_before_its_commit_is_a_conflict(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))

    def collect() -> None:
        other_merger(world, topic).set_floor()
        for key in {call.key for call in world.store.calls if call.operation == "put"}:
            world.memory.delete(key)

    with at("compaction.after_wave", collect):
        summary = world.compact(Options(attempts_max=1))
    assert (summary.runs.refused, summary.exit_status) == (1, 75)


def test_sources_that_another_merger_took_are_planned_again_with_what_is_there(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 7))
    before = topic.waiting()
    with at("compaction.before_commit", lambda: other_merger(world, topic).merge_run(3)):
        summary = world.compact()
    assert "are not live" in only(summary, Outcome.REPLANNED).reason
    assert summary.exit_status == 0
    assert topic.waiting() == before
    assert len(topic.tip().live) == 1


def test_sources_that_were_merged_and_collected_before_they_were_read_are_planned_again(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 7))
    other = other_merger(world, topic)

    def merge_and_collect() -> None:
        other.merge_run(3)
        other.collect(sources[:3])

    with at("compaction.after_plan", merge_and_collect):
        summary = world.compact()
    assert (summary.exit_status, summary.conflicts_retried, summary.runs.committed) == (0, 1, 1)
    assert len(topic.waiting()) == 120


def test_two_jobs_at_once_merge_everything_once(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 17))
    before = topic.waiting()
    inner: list[Summary] = []
    with at("compaction.before_commit", lambda: inner.append(world.compact(four_runs()))):
        outer = world.compact(four_runs())
    assert topic.waiting() == before
    assert inner[0].runs.committed == 4
    assert (outer.runs.committed, outer.exit_status) == (1, 0), "what the other left can be merged once more"
    assert outer.conflicts_retried == 4


def test_a_topic_that_is_deleted_meanwhile_is_done(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    deletion = DeleteTopic(slot=ShardSlot(topic.slot), epoch=topic.epoch, delete_after_ms=roots.NOW_MS)
    with at("compaction.before_commit", lambda: topic.commit(deletion)):
        summary = world.compact()
    assert only(summary, Outcome.REPLANNED).reason == "the topic was deleted"
    assert (summary.exit_status, summary.buckets_after) == (0, 0)


def collected(topic: StoredTopic) -> None:
    """It is deleted, and nothing of it is left."""
    for entry in list(topic.store.list(names.topic_prefix(topic.shard, topic.topic_id))):
        topic.store.delete(entry.key)


@pytest.mark.parametrize("point", ["compaction.after_plan", "compaction.before_commit", "compaction.after_wave"])
@pytest.mark.parametrize(("attempts", "status"), [(3, 0), (1, 75)])
def test_a_topic_that_is_deleted_and_collected_meanwhile_is_a_conflict_and_no_error(
    world: World, point: str, attempts: int, status: int
) -> None:
    topic, other = world.topic("deleted"), world.topic("other")
    topic.add(range(1, 5))
    other.add(range(1, 5))
    with at(point, lambda: collected(topic)):
        summary = world.compact(Options(attempts_max=attempts))
    assert (summary.runs.committed, summary.exit_status) == (1, status)
    assert not [result for result in summary.topic_results if result.error]


def test_a_store_that_fails_for_a_topic_that_is_deleted_is_a_conflict_and_no_error(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    deletion = DeleteTopic(slot=ShardSlot(topic.slot), epoch=topic.epoch, delete_after_ms=roots.NOW_MS)

    def deleted() -> None:
        topic.commit(deletion)
        world.script.plan("head", Fault.FAIL_BEFORE, times=1)

    with at("compaction.after_wave", deleted):
        summary = world.compact(Options(attempts_max=1))
    assert (summary.status, summary.exit_status) == (Status.CONFLICTS, 75)
    assert only(summary, Outcome.REFUSED).reason == "the topic was deleted"


def test_runs_that_are_refused_at_the_last_attempt_end_in_75(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()
    with at("compaction.before_commit", other_merger(world, topic).set_floor, times=2):
        summary = world.compact(Options(attempts_max=2))
    assert (summary.status, summary.exit_status) == (Status.CONFLICTS, 75)
    assert (summary.runs.refused, summary.runs.replanned) == (1, 1)
    assert [refusal.final for refusal in summary.refusals] == [False, True]
    assert topic.waiting() == before


# ---- a store that fails


def test_a_lost_answer_to_the_put_of_a_bucket_leaves_an_orphan_and_is_done_again(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()
    world.script.plan("put", Fault.FAIL_AFTER, key_part="/buckets/")
    summary = world.compact()
    assert (summary.exit_status, summary.runs.committed, summary.conflicts_retried) == (0, 1, 1)
    assert topic.waiting() == before
    written = [call.key for call in world.store.calls if call.operation == "put" and "/buckets/" in call.key]
    assert len(written) == len(set(written)) == 2, "each attempt has an object of its own"


def test_a_lost_answer_to_the_commit_is_found_by_its_commit_id(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    world.script.plan("put_if_absent", Fault.FAIL_AFTER)
    summary = world.compact()
    assert (summary.exit_status, summary.runs.committed, len(topic.tip().live)) == (0, 1, 1)


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.FAIL_BEFORE])
def test_a_commit_whose_outcome_stays_unknown_ends_in_75_and_keeps_its_object(world: World, fault: Fault) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()
    world.script.plan("put_if_absent", fault)
    with at("compaction.before_commit", lambda: world.script.plan("head", Fault.FAIL_BEFORE, times=1000)):
        summary = world.compact()
    result = only(summary, Outcome.UNKNOWN)
    assert (summary.status, summary.exit_status) == (Status.CONFLICTS, 75)
    assert result.bucket is not None
    assert world.memory.head(result.bucket).size_bytes == result.bytes_written
    assert topic.waiting() == before


def test_a_store_that_stays_away_is_an_error_and_the_other_topics_are_merged(world: World) -> None:
    away, there = world.topic("away"), world.topic("there")
    sources = away.add(range(1, 5))
    there.add(range(1, 5))
    world.script.plan("get_range", Fault.FAIL_BEFORE, key_part=sources[0].object.name, times=100)
    summary = world.compact()
    assert (summary.status, summary.exit_status) == (Status.ERROR, 1)
    assert (len(away.tip().live), len(there.tip().live)) == (4, 1)
    assert (summary.runs.failed, summary.runs.replanned) == (1, 2)


def test_workers_that_have_no_such_store_are_an_error_and_no_conflict(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(settings: Settings) -> ObjectStore:
        raise NotFound(settings.store.path, "the directory does not exist")

    world.topic().add(range(1, 5))
    monkeypatch.setattr(merge_task, "store_of", nowhere)
    summary = world.compact()
    assert (summary.status, summary.exit_status, summary.runs.failed) == (Status.ERROR, 1, 1)
    assert "the directory does not exist" in only(summary, Outcome.FAILED).reason


def test_a_damaged_source_is_named_and_its_run_left_while_others_go_on(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 17))
    damaged = sources[5].object.name
    body = world.memory.get(damaged)
    world.memory.put(damaged, body[:40] + bytes([body[40] ^ 1]) + body[41:])
    summary = world.compact(four_runs())
    assert (summary.status, summary.exit_status, summary.runs.committed) == (Status.ERROR, 1, 3)
    assert damaged in only(summary, Outcome.FAILED).reason
    assert {live.object.name for live in sources[4:8]} < {live.object.name for live in topic.tip().live}


def test_a_source_that_is_missing_though_the_newest_manifest_names_it_is_an_error(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 5))
    world.memory.delete(sources[2].object.name)
    summary = world.compact()
    assert summary.exit_status == 1
    assert "the newest manifest names it" in only(summary, Outcome.FAILED).reason


def test_a_topic_whose_manifest_is_damaged_is_named_and_the_others_are_merged(world: World) -> None:
    damaged, whole = world.topic("damaged"), world.topic("whole")
    damaged.add(range(1, 5))
    whole.add(range(1, 5))
    number = damaged.tip().head.number
    world.memory.put(names.topic_manifest_key(damaged.shard, damaged.topic_id, number), b"nothing of the kind")
    summary = world.compact()
    assert (summary.exit_status, summary.runs.committed) == (1, 1)
    (unread,) = [result for result in summary.topic_results if result.error]
    assert unread.topic == damaged.topic_id


def test_a_worker_that_says_what_is_not_so_commits_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()

    def lying(task: MergeTask) -> WrittenRun | FailedRun:
        """It wrote three of four sources, and says that these were all."""
        fewer = dataclasses.replace(task, tip=dataclasses.replace(task.tip, live=task.tip.live[:3]))
        honest, less = merge_run(task), merge_run(fewer)
        assert isinstance(honest, WrittenRun)
        assert isinstance(less, WrittenRun)
        operation = dataclasses.replace(less.written.operation, sources=honest.written.operation.sources)
        return dataclasses.replace(honest, written=dataclasses.replace(less.written, operation=operation))

    monkeypatch.setattr(waves, "merge_run", lying)
    summary = world.compact()
    assert summary.exit_status == 75
    assert "rows" in only(summary, Outcome.REFUSED).reason
    assert topic.waiting() == before


def test_an_object_that_is_not_as_it_was_written_is_never_named(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 5))
    before = topic.waiting()

    def truncate() -> None:
        (written,) = [call.key for call in world.store.calls if call.operation == "put"]
        world.memory.put(written, world.memory.get(written)[:-1])

    with at("compaction.after_wave", truncate):
        summary = world.compact()
    assert summary.exit_status == 1
    assert "bytes" in only(summary, Outcome.FAILED).reason
    assert topic.waiting() == before


def test_tasks_that_the_engine_loses_are_failed_and_later_waves_go_on(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 33))
    world.engine.lose = {3}
    summary = world.compact(four_runs())
    assert (summary.waves, summary.runs.failed, summary.runs.committed) == (2, 2, 6)
    assert (summary.exit_status, len(topic.waiting())) == (1, 32 * 20)


def test_progress_objects_are_read_once_for_the_commits_of_a_topic_and_one_is_kept(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        topic = world.topic(name)
        sources = topic.add(range(1, 17))
        topic.seal(gone={live.object.name: {ledger: [0]} for ledger, live in enumerate(sources, 1)}, inline=False)
    monkeypatch.setattr(world.engine, "parallelism", 3)
    reads = 0
    read = bucket_reading.progress_of

    def watched(store: ObjectStore, tip: TopicManifest) -> Progress:
        nonlocal reads
        reads += 1
        return read(store, tip)

    monkeypatch.setattr(merge_task, "progress_by", lambda settings, tip: read(world.memory, tip))
    monkeypatch.setattr(bucket_reading, "progress_of", watched)
    alive: list[int] = []

    def count() -> None:
        gc.collect()
        alive.append(sum(isinstance(each, Progress) and len(each.buckets) == 16 for each in gc.get_objects()))

    with at("compaction.after_commit", count, times=12):
        summary = world.compact(four_runs())
    assert (summary.waves, summary.runs.committed) == (1, 12)
    assert (reads, max(alive)) == (3, 1)


# ---- limits and ends


def test_no_wave_begins_after_the_deadline_and_what_is_left_is_said(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 33))

    with at("compaction.after_wave", lambda: world.time.sleep(10)):
        summary = world.compact(Options(sources_max=4, deadline_s=10.0))
    assert (summary.status, summary.exit_status, summary.waves) == (Status.DONE, 0, 1)
    assert (summary.runs.committed, summary.runs.left) == (4, 4)
    assert len(topic.tip().live) == 4 + 16


def test_a_limit_on_bytes_is_kept_and_what_is_left_is_said(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 17))
    limit = sum(live.object.size_bytes for live in sources) // 2 + 10
    summary = world.compact(Options(sources_max=4, bytes_max=limit))
    assert (summary.runs.committed, summary.runs.left, summary.exit_status) == (2, 2, 0)
    assert summary.bytes_read <= limit


def test_a_signal_ends_the_job_after_the_commit_under_way(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 17))
    before = topic.waiting()
    with at("compaction.before_commit", lambda: world.stop.request(signal.SIGTERM)):
        summary = world.compact(four_runs())
    assert (summary.status, summary.exit_status) == (Status.STOPPED, 143)
    assert (summary.runs.committed, summary.runs.left) == (1, 3)
    assert topic.waiting() == before


def test_a_signal_ends_the_tasks_of_a_wave(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 17))
    with at("compaction.after_put", lambda: world.stop.request(signal.SIGINT)):
        summary = world.compact(four_runs())
    assert (summary.exit_status, summary.runs.committed, summary.runs.left) == (130, 0, 4)
    assert len(world.engine.tasks) == 1


def test_a_dry_run_writes_nothing(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 17))
    summary = world.compact(four_runs(), dry_run=True)
    assert (summary.status, summary.exit_status, summary.runs.left) == (Status.PLANNED, 0, 4)
    assert not [call for call in world.store.calls if call.operation in ("put", "put_if_absent", "delete")]
    assert summary.buckets_after == summary.buckets_before == len(topic.tip().live)


def test_only_the_topics_that_were_named_are_merged_and_a_name_without_topic_is_an_error(world: World) -> None:
    asked, other = world.topic("asked"), world.topic("other")
    asked.add(range(1, 5))
    other.add(range(1, 5))
    summary = world.compact(Options(topics=["asked", "nowhere"]))
    assert (len(asked.tip().live), len(other.tip().live)) == (1, 4)
    assert [(each.topic, each.error) for each in summary.topic_results if each.error] == [("nowhere", "no such topic")]
    assert summary.exit_status == 1


def test_indexes_are_merged_apart_and_quarantined_buckets_left_alone(world: World) -> None:
    topic = world.topic()
    topic.add([1, 2])
    quarantined = topic.add([3])[0].object.name
    topic.add([4])
    topic.quarantine(quarantined)
    before = topic.waiting()
    summary = world.compact()
    assert topic.waiting() == before
    assert summary.exit_status == 0
    assert {live.object.name for live in topic.tip().live} > {quarantined}
    assert len(topic.tip().live) == 2


def test_a_bucket_every_row_of_which_is_gone_leaves_nothing_behind(world: World) -> None:
    topic = world.topic()
    sources = topic.add([1, 2])
    topic.seal(gone={live.object.name: {ledger: range(20)} for ledger, live in zip([1, 2], sources, strict=True)})
    summary = world.compact()
    assert topic.tip().live == ()
    assert only(summary, Outcome.COMMITTED).bucket is None


def test_a_second_job_maps_what_was_gone_under_names_two_merges_old(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 9))
    topic.seal(gone={sources[0].object.name: {1: [0]}})
    world.compact(four_runs())
    # A seal whose progress still says the former names.
    topic.seal(gone={sources[1].object.name: {2: [5]}})
    before = topic.waiting()
    summary = world.compact()
    assert topic.waiting() == before
    assert (len(before), summary.runs.committed, topic.tip().live[0].level) == (158, 1, 2)
    assert topic.tip().live[0].rows == 158


def test_how_far_a_job_is_never_goes_back(world: World) -> None:
    world.topic().add(range(1, 33))
    world.compact(four_runs())
    done = [advance.done.sources for advance in world.advances]
    assert done == sorted(done)
    assert world.advances[-1].done.sources == world.advances[-1].total.sources == 32


def test_a_task_has_of_the_manifest_only_what_names_its_sources(world: World) -> None:
    topic = world.topic()
    sources = topic.add(range(1, 17))
    topic.seal(gone={live.object.name: {ledger: [0]} for ledger, live in enumerate(sources, 1)})
    world.compact(four_runs())
    for task in world.engine.tasks:
        assert len(task.tip.live) == len(task.tip.progress.buckets) == 4
        assert {part.bucket for part in task.tip.progress.buckets} == {live.object.name for live in task.tip.live}


# ---- hints for the owners


def hints(world: World) -> list[MergeHint]:
    return sorted(merge_hints.listed(world.memory)[0])


def test_hints_of_what_was_merged_are_left_after_the_commits_of_each_wave(world: World) -> None:
    topics = [world.topic(name) for name in ("flights", "trains", "boats")]
    for topic in topics[:2]:
        topic.add(range(1, 17))
    topics[2].add([1])
    summary = world.compact(four_runs())
    assert hints(world) == sorted(MergeHint(topic.shard, names.topic_id(topic.name)) for topic in topics[:2])
    writes = [
        call.key for call in world.store.calls if call.operation.startswith("put") and "/buckets/" not in call.key
    ]
    values = [place for place, key in enumerate(writes) if key == names.MERGE_HINTS_CHANGED_KEY]
    assert len(values) == summary.waves == 2
    assert values[-1] == len(writes) - 1, "no commit comes after the last value"
    for begun, ended in itertools.pairwise((-1, *values)):
        kinds = ["hint" if key.startswith("hints/") else "commit" for key in writes[begun + 1 : ended]]
        assert kinds == sorted(kinds), "first the commits, then the hints"


def test_a_dry_run_and_a_job_that_merged_nothing_leave_no_hints(world: World) -> None:
    topic = world.topic()
    topic.add(range(1, 11))
    world.compact(dry_run=True)
    topic.seal(gone={})
    assert (hints(world), merge_hints.value(world.memory)) == ([], None)


def test_a_hint_that_cannot_be_left_is_a_warning_and_no_failure(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.topic().add(range(1, 11))
    world.script.plan("put", Fault.FAIL_BEFORE, key_part="hints/")
    with caplog.at_level(logging.WARNING):
        summary = world.compact()
    assert (summary.status, summary.exit_status, summary.runs.committed) == (Status.DONE, 0, 1)
    assert "cannot write merge hints" in caplog.text


def test_a_job_that_is_asked_to_end_leaves_hints_of_what_it_committed(world: World) -> None:
    world.topic().add(range(1, 17))
    with at("compaction.after_commit", lambda: world.stop.request(signal.SIGTERM)):
        summary = world.compact(four_runs())
    assert summary.runs.committed == 1
    assert len(hints(world)) == 1
