"""A job keeps its rules whatever happens between its steps; and each rule, broken on purpose, is found to be broken."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from batch.compaction import merge_task as worker
from batch.compaction import plan
from batch.compaction.job import MergeCommits
from storage_backends import bucket_merging, commit, topic_manifest
from storage_backends.bucket_merging import WrittenMerge
from storage_backends.formats import merge
from storage_backends.formats.manifest import BucketProgress, LiveBucket, TopicManifest
from storage_backends.formats.position_bitmap import position_bitmaps, union_of
from tests.batch.compaction._support import interleaved

SEEDS, SEEDS_LONG = 40, 3_000
# A planted bug is found in one of so many runs.
SEARCHED = 100

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(
    "seeds",
    [range(SEEDS), pytest.param(range(SEEDS, SEEDS_LONG), marks=[pytest.mark.long, pytest.mark.timeout(3_600)])],
    ids=["some", "many"],
)
def test_a_job_keeps_every_rule_whatever_happens_between_its_steps(seeds: Sequence[int]) -> None:
    breaches = {seed: breach for seed in seeds if (breach := interleaved.breach_of(seed)) is not None}
    assert not breaches


# ---- each rule broken


def what_was_copied_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    """What goes from a source after the plan is not gone from the merged bucket."""
    patch.setattr(merge, "_kept", lambda parts: ())


def a_merge_is_committed_whatever_the_floor_is(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest, "not_bringable", lambda tip, reference: None)


def an_object_is_said_to_be_younger_than_it_is(patch: pytest.MonkeyPatch) -> None:
    """It was begun at the manifest that is the newest when it is committed."""
    of_commits = MergeCommits.commit

    def committed(self: MergeCommits, written: WrittenMerge, *, now_ms: int, grace_ms: int) -> None:
        bucket = written.operation.bucket
        if bucket is not None:
            self.look()
            reference = dataclasses.replace(bucket.object, base=self.manifest.head.number)
            operation = dataclasses.replace(written.operation, bucket=dataclasses.replace(bucket, object=reference))
            written = dataclasses.replace(written, operation=operation)
        of_commits(self, written, now_ms=now_ms, grace_ms=grace_ms)

    patch.setattr(MergeCommits, "commit", committed)


def a_merge_is_committed_although_its_sources_are_gone(patch: pytest.MonkeyPatch) -> None:
    _accept(patch, lambda operation, tip: True)


def a_merge_is_committed_to_a_topic_that_was_born_again(patch: pytest.MonkeyPatch) -> None:
    _accept(patch, lambda operation, tip: tip.incarnation != operation.incarnation)


def _accept(patch: pytest.MonkeyPatch, accepted: Callable[[topic_manifest.Merge, TopicManifest], bool]) -> None:
    """Merges that are accepted by that alone bring their bucket in."""
    apply, precondition = topic_manifest.Merge.apply, topic_manifest.Merge.precondition

    def wanted(self: topic_manifest.Merge, tip: TopicManifest | None) -> str | None:
        if tip is not None and not tip.deleted and accepted(self, tip):
            return None
        return precondition(self, tip)

    def applied(self: topic_manifest.Merge, tip: TopicManifest | None) -> TopicManifest:
        existing = topic_manifest.existing(tip)
        if self._merging(existing):
            return apply(self, tip)
        made = () if self.bucket is None else (dataclasses.replace(self.bucket, level=1),)
        return dataclasses.replace(existing, live=(*existing.live, *made))

    patch.setattr(topic_manifest.Merge, "precondition", wanted)
    patch.setattr(topic_manifest.Merge, "apply", applied)


def _of_workers(patch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    """The steps of a merge as a worker does them; those of other processes stay."""
    patch.setattr(worker, "bucket_merging", types.SimpleNamespace(**(vars(bucket_merging) | functions)))


def rows_are_dropped_that_no_manifest_says_are_gone(patch: pytest.MonkeyPatch) -> None:
    """A worker with a clock of its own drops what it takes for over."""
    merged = bucket_merging.merged

    def over(task_plan: Any, sources: Any, progress: Any, **others: Any) -> merge.Merged:
        first = sources[0]
        gone = position_bitmaps(first.rows.ledger_id[:1], first.rows.entry_id[:1])
        parts = [part for part in progress.buckets if part.bucket != first.name]
        own = next((part.gone for part in progress.buckets if part.bucket == first.name), ())
        part = BucketProgress(bucket=first.name, gone=union_of((own, gone)))
        return merged(task_plan, sources, dataclasses.replace(progress, buckets=(*parts, part)), **others)

    _of_workers(patch, merged=over)
    patch.setattr(topic_manifest.Merge, "_not_gone", lambda self, tip: None)


def a_row_is_lost_and_nobody_counts(patch: pytest.MonkeyPatch) -> None:
    read_source = bucket_merging.read_source

    def one_less(store: Any, live: LiveBucket) -> merge.Source:
        source = read_source(store, live)
        return dataclasses.replace(source, rows=source.rows.take(slice(0, max(1, len(source.rows) - 1))))

    _of_workers(patch, read_source=one_less)
    patch.setattr(topic_manifest.Merge, "_not_conserved", lambda self, sources: None)


def a_refused_job_deletes_what_it_wrote(patch: pytest.MonkeyPatch) -> None:
    of_commits = MergeCommits.commit

    def committed(self: MergeCommits, written: WrittenMerge, *, now_ms: int, grace_ms: int) -> None:
        try:
            of_commits(self, written, now_ms=now_ms, grace_ms=grace_ms)
        except commit.Refused:
            if written.operation.bucket is not None:
                self._store.delete(written.operation.bucket.object.name)
            raise

    patch.setattr(MergeCommits, "commit", committed)


def each_attempt_writes_under_the_same_name(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(worker, "ulid", types.SimpleNamespace(ULID=lambda: "attempt"))


def quarantined_buckets_are_planned(patch: pytest.MonkeyPatch) -> None:
    def all_of_them(live: Sequence[LiveBucket]) -> list[LiveBucket]:
        return topic_manifest.adjacent_order(dataclasses.replace(each, quarantined=False) for each in live)

    patch.setattr(plan, "adjacent_order", all_of_them)


BUGS: Sequence[Plant] = (
    what_was_copied_is_not_recorded,
    a_merge_is_committed_whatever_the_floor_is,
    an_object_is_said_to_be_younger_than_it_is,
    a_merge_is_committed_although_its_sources_are_gone,
    a_merge_is_committed_to_a_topic_that_was_born_again,
    rows_are_dropped_that_no_manifest_says_are_gone,
    a_row_is_lost_and_nobody_counts,
    a_refused_job_deletes_what_it_wrote,
    each_attempt_writes_under_the_same_name,
    quarantined_buckets_are_planned,
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant) -> None:
    assert any(interleaved.breach_of(seed, plant) is not None for seed in range(SEARCHED)), plant.__doc__
