"""Buckets are merged beside whatever else happens to a topic, in whatever order: the rules of the semantics hold, and a
merge that is wrong is found out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from pyroaring import BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.index import merging
from daemon.core.index.bucket import GoneSet, SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.runs import SortedRun
from storage_backends.formats import merge
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import Progress
from storage_backends.formats.merge import Bits
from tests.daemon.core._support.merging_machine import MergingMachine
from tests.daemon.core.decisions.test_planted_bugs import found_by_the_state_machine, search
from tests.daemon.core.decisions.test_topic_states import run
from tests.daemon.core.index import test_merging
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.timeout(0)
@pytest.mark.parametrize("budget_rows", [1, 6, 1_000_000])
def test_nothing_is_early_lost_or_handed_out_twice_while_buckets_are_merged(budget_rows: int) -> None:
    class Machine(MergingMachine):
        budgets_rows = (budget_rows,)

    run(Machine)


# ---- planted bugs


def late_rows_are_left_behind_the_head(patch: pytest.MonkeyPatch) -> None:
    place = merging._place

    def without_late(bucket: SealedBucket, loaded: Mapping[int, KeyedRows], boundary_ms: int) -> None:
        place(bucket, loaded, boundary_ms)
        bucket.late = SortedRun(KeyedRows.empty())

    patch.setattr(merging, "_place", without_late)


def the_head_is_where_it_was_passed_to_last(patch: pytest.MonkeyPatch) -> None:
    """And not where anything was ever passed: what was passed behind it is not read again."""
    place = merging._place

    def too_early(bucket: SealedBucket, loaded: Mapping[int, KeyedRows], boundary_ms: int) -> None:
        place(bucket, loaded, boundary_ms)
        bucket.late = SortedRun(KeyedRows.empty())
        bucket.head.move_to_row(0)

    patch.setattr(merging, "_place", too_early)


def what_has_left_since_the_plan_is_there_again(patch: pytest.MonkeyPatch) -> None:
    inherited = merging.inherited

    def resurrected(merged: merging.MergedBucket, sources: Sequence[SealedBucket], *rest: Any, **named: Any) -> Any:
        bucket = inherited(merged, sources, *rest, **named)
        bucket.present = merged.positions.copy()
        bucket.present_rows = len(bucket.present)
        bucket.gone = GoneSet()
        return bucket

    patch.setattr(merging, "inherited", resurrected)


def what_is_gone_of_a_merged_bucket_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    inherited = merging.inherited

    def forgetful(*args: Any, **named: Any) -> SealedBucket:
        bucket = inherited(*args, **named)
        bucket.gone = GoneSet()
        return bucket

    patch.setattr(merging, "inherited", forgetful)


def acknowledgements_do_not_go_on(patch: pytest.MonkeyPatch) -> None:
    inherited = merging.inherited

    def forgetful(*args: Any, **named: Any) -> SealedBucket:
        bucket = inherited(*args, **named)
        bucket.acknowledged = {}
        return bucket

    patch.setattr(merging, "inherited", forgetful)


def what_was_passed_waits_again(patch: pytest.MonkeyPatch) -> None:
    inherited = merging.inherited

    def forgetful(*args: Any, **named: Any) -> SealedBucket:
        bucket = inherited(*args, **named)
        bucket.passed, bucket.passed_rows = BitMap64(), 0
        bucket.head.move_to_row(0)
        return bucket

    patch.setattr(merging, "inherited", forgetful)


def readers_go_on_at_the_head(patch: pytest.MonkeyPatch) -> None:
    def at_head(self: BacklogReader, sources: Sequence[SealedBucket], bucket: SealedBucket) -> None:
        for source in sources:
            self._cursors.pop(source.name, None)
        self._start(bucket, at_head=True)

    patch.setattr(BacklogReader, "merged", at_head)


def what_names_a_source_is_passed_over(patch: pytest.MonkeyPatch) -> None:
    bits_of = merge.bits_of
    patch.setattr(merge, "bits_of", lambda bucket, kept, progress: bits_of(bucket, (), progress))


def what_names_a_source_counts_for_rows_that_were_not_copied(patch: pytest.MonkeyPatch) -> None:
    """A position that left one source and came back in another."""
    bits_of = merge.bits_of

    def of_any(bucket: str, kept: Sequence[KeptRows], progress: Progress) -> Bits:
        sources = {each.source for each in kept}
        renamed = [
            dataclasses.replace(part, bucket=bucket) if part.bucket in sources else part for part in progress.buckets
        ]
        return bits_of(bucket, (), Progress(buckets=tuple(renamed)))

    patch.setattr(merge, "bits_of", of_any)


def names_that_are_two_merges_old_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    kept_of = merge._kept

    def of_sources_alone(parts: Sequence[Any]) -> tuple[KeptRows, ...]:
        names = {part.source.name for part in parts}
        return tuple(each for each in kept_of(parts) if each.source in names)

    patch.setattr(merge, "_kept", of_sources_alone)


def sources_stay_beside_the_merged_bucket(patch: pytest.MonkeyPatch) -> None:
    def adopt(self: Index, merged: merging.MergedBucket, loaded: Mapping[int, KeyedRows], *, boundary_ms: int) -> Any:
        bucket = merging.inherited(merged, self.sources_of(merged), self.pages, loaded, boundary_ms=boundary_ms)
        self.add_sealed(bucket)
        return bucket

    patch.setattr(Index, "adopt", adopt)


BY_ANY_ORDER = (
    late_rows_are_left_behind_the_head,
    what_has_left_since_the_plan_is_there_again,
    what_is_gone_of_a_merged_bucket_is_not_kept,
    acknowledgements_do_not_go_on,
    what_was_passed_waits_again,
    what_names_a_source_is_passed_over,
    sources_stay_beside_the_merged_bucket,
)


# What takes a rare order of events.
BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        the_head_is_where_it_was_passed_to_last,
        test_merging.test_a_backlog_that_was_passed_before_its_buckets_were_merged_is_read_by_who_comes_later,
    ),
    (
        readers_go_on_at_the_head,
        test_merging.test_a_backlog_that_is_read_in_part_when_its_buckets_are_merged_is_read_to_its_end,
    ),
    (
        what_names_a_source_counts_for_rows_that_were_not_copied,
        test_merging.test_a_position_that_came_back_is_not_what_left_the_bucket_it_was_merged_with,
    ),
    (
        names_that_are_two_merges_old_are_forgotten,
        test_merging.test_what_is_stored_under_a_name_that_is_two_merges_old_counts_after_a_crash,
    ),
)


@pytest.mark.rotating
@pytest.mark.timeout(0)
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine(MergingMachine)


@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        story()


@pytest.mark.rotating
def test_a_search_finds_nothing_where_no_bug_is_planted() -> None:
    search(MergingMachine, seed=0)


registry.register("state machine of a topic", BY_ANY_ORDER)
registry.register("stories of a topic", (plant for plant, _ in BY_A_STORY))
