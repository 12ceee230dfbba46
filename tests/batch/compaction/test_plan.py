"""The plan: which buckets are merged."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch.compaction import plan
from batch.compaction.plan import Parameters, Run
from storage_backends import commit, topic_manifest
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    BucketProgress,
    LiveBucket,
    ObjectReference,
    Progress,
    TopicManifest,
)
from storage_backends.formats.position_bitmap import NO_POSITIONS, position_bitmaps
from storage_backends.topic_manifest import MergeSource

HOUR_MS = 3_600_000
NOW_MS = 100 * HOUR_MS
LATER_MS = (NOW_MS + HOUR_MS, NOW_MS + 24 * HOUR_MS)
PARAMETERS = Parameters(now_ms=NOW_MS, rows_max=2_000_000)


def bucket(
    place: int,
    rows: int = 5000,
    *,
    index: int = 0,
    due_ms: tuple[int, int] = LATER_MS,
    row_bytes: int = 5,
    quarantined: bool = False,
) -> LiveBucket:
    return LiveBucket(
        object=ObjectReference(name=f"b{place:06}", base=1, size_bytes=rows * row_bytes + 100, sha256=b""),
        rows=rows,
        first_ledger_id=place * 10,
        last_ledger_id=place * 10 + 9,
        min_deliver_at_ms=due_ms[0],
        max_deliver_at_ms=due_ms[1],
        hash_low=rows,
        hash_high=place,
        subscription_id=index,
        quarantined=quarantined,
    )


def manifest(live: Sequence[LiveBucket]) -> TopicManifest:
    return TopicManifest(
        head=commit.NO_HEAD,
        topic="t",
        topic_id="t",
        incarnation=1,
        owner_epoch=1,
        applied=ShardSlot(0),
        live=tuple(live),
    )


def places(run: Run) -> list[int]:
    return [int(live.object.name[1:]) for live in run.sources]


def planned(live: Sequence[LiveBucket], parameters: Parameters = PARAMETERS, **others: object) -> list[list[int]]:
    return sorted(places(run) for run in plan.plan(manifest(live), parameters, **others))  # type: ignore[arg-type]


def test_two_thousand_small_buckets_become_at_most_forty_in_one_pass() -> None:
    tip = manifest([bucket(place) for place in range(2000)])
    runs = plan.plan(tip, PARAMETERS)
    assert 2000 - sum(run.removed for run in runs) <= 40
    lengths = [len(run.sources) for run in runs]
    assert max(lengths) - min(lengths) <= 1, "the runs are alike in size: tasks end together"


def test_a_large_bucket_is_not_copied_for_the_sake_of_small_ones() -> None:
    assert planned([bucket(0, 100_000), bucket(1, 10), bucket(2, 10)]) == [[1, 2]]


def test_two_neighbours_that_are_nearly_alike_are_merged() -> None:
    assert planned([bucket(0, 10), bucket(1, 9)]) == [[0, 1]]


def test_buckets_of_two_indexes_are_never_in_one_run() -> None:
    live = [bucket(place, index=place % 2) for place in range(6)]
    assert planned(live) == [[0, 2, 4], [1, 3, 5]]


def test_what_is_quarantined_is_in_no_run_and_does_not_part_its_neighbours() -> None:
    assert planned([bucket(0), bucket(1, quarantined=True), bucket(2)]) == [[0, 2]]


def test_what_is_left_out_parts_its_neighbours() -> None:
    live = [bucket(place) for place in range(5)]
    assert planned(live, left_out=frozenset({"b000002"})) == [[0, 1], [3, 4]]


def test_what_is_about_to_be_handed_out_is_left_alone() -> None:
    soon = (NOW_MS + 1000, NOW_MS + 10_000)
    assert planned([bucket(0, due_ms=soon), bucket(1, due_ms=soon), bucket(2), bucket(3)]) == [[2, 3]]


def test_a_bucket_of_long_delays_that_has_begun_is_merged() -> None:
    begun = (NOW_MS - HOUR_MS, NOW_MS + 24 * HOUR_MS)
    assert planned([bucket(0, due_ms=begun), bucket(1, due_ms=begun)]) == [[0, 1]]


def test_what_nobody_fetched_for_long_is_merged() -> None:
    over = (NOW_MS - 3 * HOUR_MS, NOW_MS - 2 * HOUR_MS)
    assert planned([bucket(0, due_ms=over), bucket(1, due_ms=over)]) == [[0, 1]]


def test_rows_that_are_gone_do_not_make_a_bucket_large() -> None:
    live = [bucket(0, 100_000), bucket(1, 100), bucket(2, 100)]
    assert planned(live, gone={"b000000": 99_900}) == [[0, 1, 2]]


def test_buckets_of_which_everything_is_gone_are_merged_away() -> None:
    assert planned([bucket(0, 10), bucket(1, 10)], gone={"b000000": 10, "b000001": 10}) == [[0, 1]]


def test_the_rows_that_progress_names_are_counted_by_bucket() -> None:
    positions = position_bitmaps(np.array([1, 1, 2], np.uint64), np.array([1, 2, 3], np.uint64))
    progress = Progress(buckets=(BucketProgress(bucket="a", gone=positions), BucketProgress(bucket="b")))
    assert plan.gone_rows(progress) == {"a": 3}


def test_runs_that_remove_more_buckets_for_a_byte_come_first() -> None:
    live = [bucket(place, 1000, index=1) for place in range(4)] + [bucket(place, 10, index=2) for place in range(4, 8)]
    runs = plan.plan(manifest(live), PARAMETERS)
    assert [places(run)[0] for run in runs] == [4, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"sources_min": 1}, {"sources_max": 1}, {"rows_max": 0}, {"target_bytes": 0}, {"soon_ms": -1}],
)
def test_parameters_that_no_run_can_meet_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\d"):
        dataclasses.replace(PARAMETERS, **wrong)


buckets_of_a_topic = st.lists(
    st.tuples(
        st.integers(1, 2000), st.sampled_from([0, 0, 0, 7]), st.sampled_from(["later", "later", "soon", "quarantined"])
    ),
    max_size=60,
).map(
    lambda drawn: [
        bucket(
            place,
            rows,
            index=index,
            quarantined=kind == "quarantined",
            due_ms=(NOW_MS, NOW_MS + 10) if kind == "soon" else LATER_MS,
        )
        for place, (rows, index, kind) in enumerate(drawn)
    ]
)
parameters_drawn = st.builds(
    Parameters,
    now_ms=st.just(NOW_MS),
    rows_max=st.integers(1, 10_000),
    target_bytes=st.integers(1, 50_000),
    sources_max=st.integers(4, 20),
    sources_min=st.integers(2, 4),
)


@given(live=buckets_of_a_topic, parameters=parameters_drawn, seed=st.integers())
def test_every_run_is_one_that_may_be_committed_and_keeps_the_limits(
    live: list[LiveBucket], parameters: Parameters, seed: int
) -> None:
    tip = manifest(live)
    runs = plan.plan(tip, parameters)
    shuffled = manifest(random.Random(seed).sample(live, len(live)))
    assert plan.plan(shuffled, parameters) == runs, "the order of the manifest says nothing"
    named = [name for run in runs for name in run.names]
    assert len(named) == len(set(named)), "no bucket is in two runs"
    for run in runs:
        assert parameters.sources_min <= len(run.sources) <= parameters.sources_max
        assert run.rows <= parameters.rows_max
        assert run.size_bytes <= parameters.target_bytes
        assert 3 * max(source.rows for source in run.sources) <= 2 * run.rows
        assert not any(plan.leaves_soon(source, parameters) for source in run.sources)
        assert merge_of(run.sources).precondition(tip) is None


def merge_of(sources: Sequence[LiveBucket]) -> topic_manifest.Merge:
    """A merge that copies every row."""
    mask = (1 << 64) - 1
    made = dataclasses.replace(
        sources[0],
        object=ObjectReference(name=f"{sources[0].object.name}+", base=1, size_bytes=1, sha256=b""),
        rows=sum(source.rows for source in sources),
        hash_low=sum(source.hash_low for source in sources) & mask,
        hash_high=sum(source.hash_high for source in sources) & mask,
        last_ledger_id=max(source.last_ledger_id for source in sources),
    )
    return topic_manifest.Merge(
        sources=tuple(MergeSource(name=each.object.name, kept=(), dropped=NO_POSITIONS) for each in sources),
        bucket=made,
        dropped_hash=(0, 0),
        incarnation=1,
        progress_of=lambda tip: Progress(),
        delete_after_ms=0,
    )


def after(live: Sequence[LiveBucket], runs: Sequence[Run]) -> list[LiveBucket]:
    """The buckets after these runs were merged."""
    merged = {name: run for run in runs for name in run.names}
    return [
        *(each for each in live if each.object.name not in merged),
        *(
            dataclasses.replace(
                run.sources[0],
                object=dataclasses.replace(run.sources[0].object, size_bytes=run.size_bytes),
                rows=run.rows,
                last_ledger_id=max(source.last_ledger_id for source in run.sources),
            )
            for run in runs
        ),
    ]


@settings(deadline=None)
@given(live=buckets_of_a_topic, parameters=parameters_drawn)
def test_planning_again_and_again_ends_and_copies_no_row_more_often_than_its_bucket_can_grow(
    live: list[LiveBucket], parameters: Parameters
) -> None:
    copies = {each.object.name: 0 for each in live}
    within = {each.object.name: [each] for each in live}
    buckets = list(live)
    for _ in range(len(live) + 1):
        runs = plan.plan(manifest(buckets), parameters)
        if not runs:
            break
        for run in runs:
            inner = list(itertools.chain.from_iterable(within[name] for name in sorted(run.names)))
            within[run.sources[0].object.name] = inner
            for each in inner:
                copies[each.object.name] += 1
        buckets = after(buckets, runs)
    assert plan.plan(manifest(buckets), parameters) == []
    for each in live:
        assert each.rows * 1.5 ** copies[each.object.name] <= max(parameters.rows_max, each.rows)


@settings(deadline=None, max_examples=20)
@given(sealed=st.lists(st.integers(1, 20), min_size=10, max_size=60))
def test_buckets_that_come_one_after_the_other_never_become_many(sealed: list[int]) -> None:
    parameters = dataclasses.replace(PARAMETERS, rows_max=100)
    buckets: list[LiveBucket] = []
    for place, rows in enumerate(sealed):
        buckets.append(bucket(place, rows))
        buckets = after(buckets, plan.plan(manifest(buckets), parameters))
    # Beside those that are half full at least: a row of ever smaller ones at the end.
    assert len(buckets) <= 2 * sum(sealed) / 50 + 2 + 2 * 7


def test_a_topic_of_nothing_has_no_runs() -> None:
    assert plan.plan(manifest([]), PARAMETERS) == []
    assert plan.plan(manifest([bucket(0)]), PARAMETERS) == []
