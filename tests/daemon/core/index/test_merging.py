"""Which buckets are merged, and what a merged bucket inherits from its sources."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.index.merging import SOON_WEIGHT, STORED_ROWS_FACTOR, MergeCandidate, chosen_run
from tests.daemon.core._support import merges
from tests.daemon.core._support.journaled_topic import JournaledTopic, listed
from tests.daemon.core.decisions.test_topic import NOW_MS, handed, opened, with_subscriptions

NO_LIMIT = 1 << 60


def candidates(rows: Sequence[int], *, left_out: Sequence[int] = (), soon: Sequence[int] = ()) -> list[MergeCandidate]:
    """One bucket a ledger; `left_out`, `soon`: the places of those that are."""
    return [
        MergeCandidate(
            name=f"bucket-{place}",
            first_ledger_id=place,
            last_ledger_id=place,
            live_rows=live_rows,
            stored_rows=live_rows,
            left_out=place in left_out,
            soon=place in soon,
        )
        for place, live_rows in enumerate(rows)
    ]


def chosen(
    found: Sequence[MergeCandidate], *, buckets_max: int, merge_buckets_max: int = 10, rows_max: int = NO_LIMIT
) -> list[int]:
    """The ledgers of the run."""
    run = chosen_run(found, buckets_max=buckets_max, merge_buckets_max=merge_buckets_max, rows_max=rows_max)
    return [candidate.first_ledger_id for candidate in run]


def test_of_buckets_with_5_3_2_4_3_rows_the_second_and_third_are_merged() -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=4) == [1, 2]


@pytest.mark.parametrize("buckets_max", [5, 6, 50])
def test_nothing_is_merged_while_there_are_not_more_buckets_than_allowed(buckets_max: int) -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=buckets_max) == []
    assert chosen([], buckets_max=1) == []


@pytest.mark.parametrize(("buckets_max", "run"), [(1, [0, 1, 2, 3, 4]), (2, [1, 2, 3, 4]), (3, [1, 2, 3])])
def test_one_merge_takes_the_index_to_a_small_limit(buckets_max: int, run: list[int]) -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=buckets_max) == run


def test_one_merge_reads_no_more_buckets_than_it_may() -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=1, merge_buckets_max=3) == [1, 2, 3]
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=1, merge_buckets_max=2) == [1, 2]


def test_of_runs_with_as_many_rows_the_first_is_merged() -> None:
    assert chosen(candidates([4, 1, 1, 1, 4]), buckets_max=4) == [1, 2]


def test_neighbours_are_those_in_the_order_of_first_and_last_ledger_and_name() -> None:
    wide = MergeCandidate("b", 0, 9, 1, 1)
    narrow = MergeCandidate("c", 0, 3, 8, 8)
    same = MergeCandidate("a", 0, 9, 1, 1)
    late = MergeCandidate("d", 5, 6, 8, 8)
    run = chosen_run([late, wide, narrow, same], buckets_max=3, merge_buckets_max=10, rows_max=NO_LIMIT)
    assert [candidate.name for candidate in run] == ["a", "b"]


@pytest.mark.parametrize(("rows_max", "run"), [(17, [0, 1, 2, 3, 4]), (16, [1, 2, 3, 4]), (9, [1, 2, 3]), (5, [1, 2])])
def test_a_shorter_run_is_merged_where_a_longer_one_has_too_many_rows(rows_max: int, run: list[int]) -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=1, rows_max=rows_max) == run


def test_nothing_is_merged_where_no_two_neighbours_have_few_enough_rows() -> None:
    assert chosen(candidates([5, 3, 2, 4, 3]), buckets_max=1, rows_max=4) == []


def test_a_run_is_not_read_whose_objects_are_large_though_few_of_their_rows_are_left() -> None:
    large = MergeCandidate("large", 0, 0, 1, STORED_ROWS_FACTOR * 10)
    others = [MergeCandidate("b", 1, 1, 4, 4), MergeCandidate("c", 2, 2, 4, 4)]
    run = chosen_run([large, *others], buckets_max=2, merge_buckets_max=10, rows_max=10)
    assert [candidate.name for candidate in run] == ["b", "c"]


def test_what_cannot_be_merged_now_is_in_no_run_and_no_run_reaches_over_it() -> None:
    assert chosen(candidates([5, 3, 2, 4, 3], left_out=[2]), buckets_max=4) == [3, 4]
    assert chosen(candidates([5, 3, 2, 4, 3], left_out=[1, 3]), buckets_max=1) == []


def test_rows_that_are_about_to_be_handed_out_are_not_copied_where_there_is_a_choice() -> None:
    rows = [10, 3, 3, 6, 6]
    assert chosen(candidates(rows, soon=[1]), buckets_max=4) == [2, 3]
    assert chosen(candidates(rows, soon=[0, 1, 2, 3, 4]), buckets_max=4) == [1, 2]


def test_rows_that_are_about_to_be_handed_out_are_copied_rather_than_many_more() -> None:
    far = [SOON_WEIGHT * 6] * 2
    assert chosen(candidates([3, 3, *far], soon=[1]), buckets_max=3) == [0, 1]


@pytest.mark.parametrize("buckets_max", [1, 2, 3, 50])
@pytest.mark.parametrize("merge_buckets_max", [2, 10])
def test_500_buckets_of_one_row_each_end_at_the_limit(buckets_max: int, merge_buckets_max: int) -> None:
    found = candidates([1] * 500)
    copied_rows = 0
    while len(found) > buckets_max:
        run = chosen_run(found, buckets_max=buckets_max, merge_buckets_max=merge_buckets_max, rows_max=NO_LIMIT)
        assert 2 <= len(run) <= merge_buckets_max
        rows = sum(candidate.live_rows for candidate in run)
        copied_rows += rows
        place = found.index(run[0])
        assert found[place : place + len(run)] == run, "neighbours"
        merged = MergeCandidate(f"merged-{len(found)}", run[0].first_ledger_id, run[-1].last_ledger_id, rows, rows)
        found[place : place + len(run)] = [merged]
    assert len(found) == buckets_max
    assert sum(candidate.live_rows for candidate in found) == 500
    # Each row is copied a few times, not as often as there are merges.
    assert copied_rows <= 500 * 10


# ---- what is inherited


def present(topic: JournaledTopic) -> set[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for bucket in topic.core.index.buckets:
        ledger_id, entry_id = topic.core.index.pages.positions(np.array(list(bucket.present), np.uint64))
        found.update(zip(ledger_id.tolist(), entry_id.tolist(), strict=True))
    return found


def sealed(topic: JournaledTopic, ledger: int, entries: int, deliver_at_ms: int) -> None:
    assert topic.add([(ledger, entry) for entry in range(entries)], deliver_at_ms).accepted
    topic.seal()


def test_a_position_that_came_back_is_not_what_left_the_bucket_it_was_merged_with() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    sealed(topic, 1, 2, NOW_MS + 10)
    topic.now_ms = NOW_MS + 20
    handed(topic, state)
    topic.acknowledge(state, [((1, 0), NOW_MS + 10)])
    # A seal stores that it is gone, and another one its new row.
    sealed(topic, 2, 1, NOW_MS + 9_000)
    assert topic.add([(1, 0)], NOW_MS + 9_000).accepted == 1
    topic.seal()
    assert merges.commit(topic, merges.plan(topic, merges.runs(topic, 3)[0])) is None
    topic.crash_and_recover()
    assert present(topic) == {(1, 0), (1, 1), (2, 0)}


def test_what_is_stored_under_a_name_that_is_two_merges_old_counts_after_a_crash() -> None:
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    for ledger in range(3):
        sealed(topic, ledger, 3, NOW_MS + 10)
    topic.now_ms = NOW_MS + 20
    handed(topic, state)
    first = merges.plan(topic, merges.runs(topic, 2)[0])
    topic.acknowledge(state, [((0, 1), NOW_MS + 10)])
    topic.take_checkpoint()
    assert merges.commit(topic, first) is None
    assert merges.commit(topic, merges.plan(topic, merges.runs(topic, 2)[0])) is None
    assert len(topic.tip.live) == 1
    topic.crash_and_recover()
    assert (0, 1) not in present(topic)
    assert len(present(topic)) == 8


def test_a_backlog_that_is_read_in_part_when_its_buckets_are_merged_is_read_to_its_end() -> None:
    topic = JournaledTopic(now_ms=NOW_MS, ready_rows_max=3)
    topic.create_subscription()
    for ledger in range(3):
        sealed(topic, ledger, 4, NOW_MS + 10 + ledger)
    topic.now_ms = NOW_MS + 50
    topic.pass_all()
    state = opened(topic, 1)
    topic.catch_up(state, 2)
    first = listed(state.hand_out(1, 3))
    assert 0 < len(first) < 12
    assert merges.commit(topic, merges.plan(topic, merges.runs(topic, 3)[0])) is None
    assert merges.adopt(topic) == 1
    rest = handed(topic, state)
    assert sorted([*first, *rest]) == [
        (NOW_MS + 10 + ledger, ledger, entry) for ledger in range(3) for entry in range(4)
    ]


def test_a_backlog_that_was_passed_before_its_buckets_were_merged_is_read_by_who_comes_later() -> None:
    topic = with_subscriptions(1)
    for ledger in range(3):
        sealed(topic, ledger, 4, NOW_MS + 10 + ledger)
    topic.now_ms = NOW_MS + 50
    topic.pass_all()
    assert merges.commit(topic, merges.plan(topic, merges.runs(topic, 3)[0])) is None
    assert merges.adopt(topic) == 1
    rows = handed(topic, opened(topic, 1))
    assert sorted(rows) == [(NOW_MS + 10 + ledger, ledger, entry) for ledger in range(3) for entry in range(4)]


def test_keys_of_pages_that_were_forgotten_in_between_are_gone_from_the_merged_bucket() -> None:
    """A ledger all of whose rows are gone has another ordinal after each time it comes back."""
    topic = with_subscriptions(1)
    state = opened(topic, 1)
    topic.add([(1, 0), (1, 1), (2, 0), (2, 1)], NOW_MS + 10)
    topic.seal()
    sealed(topic, 3, 2, NOW_MS + 9_000)
    planned = merges.plan(topic, merges.runs(topic, 2)[0])
    topic.now_ms = NOW_MS + 20
    handed(topic, state)
    topic.acknowledge(state, [((1, 0), NOW_MS + 10), ((1, 1), NOW_MS + 10)])
    topic.take_checkpoint()
    topic.crash_and_recover()
    assert merges.commit(topic, planned) is None
    assert merges.adopt(topic) == 1
    assert present(topic) == {(2, 0), (2, 1), (3, 0), (3, 1)}
    topic.seal()
    topic.take_checkpoint()
    topic.crash_and_recover()
    assert present(topic) == {(2, 0), (2, 1), (3, 0), (3, 1)}
