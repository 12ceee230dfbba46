"""The tests of rows for one subscription can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from daemon.core.decisions import add_decisions, feeding
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.departures import Departure, LedgerRanges
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import containment
from daemon.core.index.containment import contained_in
from daemon.core.index.index import BucketCounts, IndexCut
from daemon.core.index.indexes import Indexes
from daemon.core.index.mutable_bucket import MutableBucket, SealLimits
from daemon.core.index.position_keys import PagePlaces, PageTable
from daemon.topic import bucket_lifecycle
from storage_backends.formats.checkpoint_format import TopicPart
from storage_backends.formats.index_ids import SHARED
from tests.daemon.core.decisions.test_planted_bugs import Plant, found_by_the_state_machine
from tests.daemon.core.index import test_indexes, test_own_indexes
from tests.planted import registry

# ---- whose a row is


def rows_of_one_subscription_are_handed_to_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "serving", lambda self, number: [*self.values()])


def own_rows_are_owed_by_their_time_too(patch: pytest.MonkeyPatch) -> None:
    """As those of the shared index are."""
    feed = feeding.feed

    def fed(passed, states, coming, reader):  # type: ignore[no-untyped-def]
        since_ms = {state.subscription_id: state.stored.since_ms for state in states}
        kept = []
        for each in passed:
            if each.bucket.index_id:
                later = each.rows.rows.deliver_at_ms > np.uint64(since_ms[each.bucket.index_id])
                each = dataclasses.replace(each, rows=each.rows.take(later))
            kept.append(each)
        return feed(kept, states, coming, reader)

    patch.setattr(feeding, "feed", fed)


def own_rows_are_raised_above_the_creation_of_subscriptions(patch: pytest.MonkeyPatch) -> None:
    stage = add_decisions.stage

    def raised(batch, indexes, *, now_ms, floor_ms, **rest):  # type: ignore[no-untyped-def]
        return stage(batch, indexes, now_ms=now_ms, floor_ms=now_ms if floor_ms is None else floor_ms, **rest)

    patch.setattr(add_decisions, "stage", raised)


def an_acknowledgement_names_the_shared_index_always(patch: pytest.MonkeyPatch) -> None:
    leave = AckDecisions._leave

    def of_the_shared_one(self, *rest):  # type: ignore[no-untyped-def]
        records = rest[-1]
        before = len(records)
        leave(self, *rest)
        records[before:] = [dataclasses.replace(record, index_id=0) for record in records[before:]]

    patch.setattr(AckDecisions, "_leave", of_the_shared_one)


def a_claim_is_for_the_own_index_first(patch: pytest.MonkeyPatch) -> None:
    serving = Indexes.serving
    patch.setattr(Indexes, "serving", lambda self, number: serving(self, number)[::-1])


def keys_of_two_indexes_collide(patch: pytest.MonkeyPatch) -> None:
    make = PageTable.__init__

    def alone(self: PageTable, places: PagePlaces | None = None, *, owner: int = 0) -> None:
        make(self, PagePlaces(), owner=owner)

    patch.setattr(PageTable, "__init__", alone)


# ---- without a shared index


def a_row_is_a_duplicate_when_one_subscription_has_it(patch: pytest.MonkeyPatch) -> None:
    def intersection(parts):  # type: ignore[no-untyped-def]
        named = [set(part.tolist()) for part in parts if part is not None]
        return np.array(sorted(set.intersection(*named)), np.intp) if named else None

    patch.setattr(add_decisions, "_union", intersection)


def the_first_subscription_alone_gets_what_is_for_all(patch: pytest.MonkeyPatch) -> None:
    stage = add_decisions.stage

    def first(batch, indexes, **rest):  # type: ignore[no-untyped-def]
        accepted, outcome = stage(batch, indexes, **rest)
        return [accepted[0], *[() for _ in accepted[1:]]], outcome

    patch.setattr(add_decisions, "stage", first)


# ---- delivering


def own_rows_never_come_due(patch: pytest.MonkeyPatch) -> None:
    runs_at = Indexes._runs_at

    def of_the_shared_one(self, now_ms):  # type: ignore[no-untyped-def]
        sources, runs = runs_at(self, now_ms)
        shared = [number for number, (bucket, *_) in enumerate(sources) if not bucket.index_id]
        return [sources[number] for number in shared], [runs[number] for number in shared]

    patch.setattr(Indexes, "_runs_at", of_the_shared_one)


def a_backlog_is_read_again_in_the_shared_index_only(patch: pytest.MonkeyPatch) -> None:
    catch_up = feeding.catch_up
    patch.setattr(feeding, "catch_up", lambda indexes, *rest: catch_up(indexes[:1], *rest))


# ---- sealed and stored


def a_seal_leaves_own_indexes_out(patch: pytest.MonkeyPatch) -> None:
    def begin_seal(self, names, *, now_ms):  # type: ignore[no-untyped-def]
        if self.shared.mutable.first_row_at_ms is None:
            return []
        return [(SHARED, self.shared.begin_seal(names(SHARED), now_ms=now_ms))]

    def has_mutable_rows(self: Indexes) -> bool:
        return self.shared.mutable.first_row_at_ms is not None

    patch.setattr(Indexes, "begin_seal", begin_seal)
    patch.setattr(Indexes, "has_mutable_rows", property(has_mutable_rows))


def what_is_gone_from_own_buckets_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    cut = Indexes.cut

    def without(self: Indexes) -> tuple[tuple[int, IndexCut], ...]:
        return tuple((number, IndexCut(each.mutable, () if number else each.bits)) for number, each in cut(self))

    patch.setattr(Indexes, "cut", without)


def a_checkpoint_holds_the_shared_index_only(patch: pytest.MonkeyPatch) -> None:
    part_of = bucket_lifecycle.checkpoint_part

    def without(taken: bucket_lifecycle.TopicCut) -> TopicPart:
        return dataclasses.replace(part_of(taken), own_rows=())

    patch.setattr(bucket_lifecycle, "checkpoint_part", without)


def rows_of_the_shared_index_alone_make_a_seal(patch: pytest.MonkeyPatch) -> None:
    rows_came = BucketCounts.rows_came

    def alone(counts: BucketCounts, bucket: MutableBucket, rows: int) -> None:
        if not bucket.index_id:
            rows_came(counts, bucket, rows)

    patch.setattr(BucketCounts, "rows_came", alone)


# ---- trimmed, contained, damaged


def a_trim_leaves_own_indexes_alone(patch: pytest.MonkeyPatch) -> None:
    trim = TopicState.trim
    patch.setattr(
        TopicState, "trim", lambda self, *rest: (each for each in trim(self, *rest) if each and not each.index_id)
    )


def a_trim_for_one_subscription_takes_the_own_rows_of_all(patch: pytest.MonkeyPatch) -> None:
    trim = TopicState.trim

    def trimmed(self: TopicState, ranges: LedgerRanges | None, number: int | None) -> Iterator[Departure]:
        yield from (each for each in trim(self, ranges, number) if each and not each.index_id)
        yield from (each for each in trim(self, ranges, None) if each and each.index_id)

    patch.setattr(TopicState, "trim", trimmed)


def what_is_contained_is_what_the_shared_index_has(patch: pytest.MonkeyPatch) -> None:
    def contains(self, request, state, *, ranges_max):  # type: ignore[no-untyped-def]
        number = None if state is None else state.subscription_id
        return contained_in([self.index], request, number, ranges_max=ranges_max)

    patch.setattr(TopicState, "contains", contains)


def what_waits_in_one_index_waits_though_it_is_due_in_another(patch: pytest.MonkeyPatch) -> None:
    union = containment._union
    patch.setattr(containment, "_union", lambda pending, due: union([*pending, *due], []))


def an_answer_over_indexes_goes_as_far_as_the_longest(patch: pytest.MonkeyPatch) -> None:
    together = containment._together

    def longest(answers, request, ranges_max):  # type: ignore[no-untyped-def]
        furthest = max((end for _, _, end in answers if end is not None), default=None)
        return together([(*parts, furthest) for *parts, _ in answers], request, ranges_max)

    patch.setattr(containment, "_together", longest)


def what_leaves_an_own_index_leaves_the_backlog_of_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicState, "_served_by", lambda self, index: [*self.subscriptions.values()])


# ---- subscriptions that go


def an_own_index_outlives_its_subscription(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "remove", lambda self, number: None)


def what_was_decided_for_an_own_index_brings_it_back(patch: pytest.MonkeyPatch) -> None:
    """When the journal is replayed after its subscription was deleted."""
    patch.setattr(TopicState, "_has_index", lambda self, number: True)
    patch.setattr(TopicState, "_served_by", lambda self, index: [])


def segments_of_an_own_index_stay_in_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "remove", lambda self, number: self._by_id.pop(number, None))


BY_ANY_ORDER: tuple[Plant, ...] = (
    rows_of_one_subscription_are_handed_to_all,
    own_rows_are_owed_by_their_time_too,
    an_acknowledgement_names_the_shared_index_always,
    keys_of_two_indexes_collide,
    a_row_is_a_duplicate_when_one_subscription_has_it,
    own_rows_never_come_due,
    a_backlog_is_read_again_in_the_shared_index_only,
    what_leaves_an_own_index_leaves_the_backlog_of_all,
    what_is_contained_is_what_the_shared_index_has,
    what_waits_in_one_index_waits_though_it_is_due_in_another,
    an_answer_over_indexes_goes_as_far_as_the_longest,
    an_own_index_outlives_its_subscription,
    what_was_decided_for_an_own_index_brings_it_back,
)
BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        own_rows_are_raised_above_the_creation_of_subscriptions,
        test_own_indexes.test_a_row_for_one_subscription_is_owed_to_it_alone_whatever_its_time_and_gone_when_it_acknowledged_it,
    ),
    (
        own_rows_are_owed_by_their_time_too,
        test_own_indexes.test_a_row_for_one_subscription_is_owed_to_it_alone_whatever_its_time_and_gone_when_it_acknowledged_it,
    ),
    (
        the_first_subscription_alone_gets_what_is_for_all,
        test_own_indexes.test_without_a_shared_index_a_row_is_copied_to_each_subscription_and_gone_from_each_by_itself,
    ),
    (
        a_seal_leaves_own_indexes_out,
        test_own_indexes.test_a_seal_cuts_all_indexes_at_one_slot_with_one_manifest_and_names_whose_buckets_they_are,
    ),
    (
        a_checkpoint_holds_the_shared_index_only,
        lambda: test_own_indexes.test_the_rows_of_every_index_are_there_after_a_crash_wherever_they_are_stored(False),
    ),
    (
        what_is_gone_from_own_buckets_is_not_stored,
        lambda: test_own_indexes.test_what_is_acknowledged_in_an_own_index_stays_gone_after_a_crash(True),
    ),
    (
        rows_of_the_shared_index_alone_make_a_seal,
        lambda: test_indexes.test_the_indexes_are_sealed_by_rows_bytes_or_age_together_whatever_the_ledger(
            SealLimits(rows_min=1, rows_max=3, size_max_bytes=10**6, age_max_ms=10**6), 5, True
        ),
    ),
    (
        a_trim_leaves_own_indexes_alone,
        test_own_indexes.test_a_trim_takes_rows_of_every_index_and_one_for_a_subscription_those_that_it_is_owed,
    ),
    (
        a_trim_for_one_subscription_takes_the_own_rows_of_all,
        test_own_indexes.test_a_trim_for_a_subscription_takes_what_is_due_in_its_own_index_out_of_its_hands,
    ),
    (
        a_claim_is_for_the_own_index_first,
        test_own_indexes.test_of_two_rows_of_one_position_and_time_each_acknowledgement_is_for_one_the_shared_one_first,
    ),
    (
        segments_of_an_own_index_stay_in_memory,
        lambda: test_own_indexes.test_with_a_subscription_goes_its_own_index_and_nothing_else(False),
    ),
    (
        what_was_decided_for_an_own_index_brings_it_back,
        test_own_indexes.test_what_is_decided_for_the_own_index_of_a_subscription_that_is_no_more_does_nothing,
    ),
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine()


@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        story()


registry.register("state machine of a topic", BY_ANY_ORDER)
registry.register("stories of a topic", (plant for plant, _ in BY_A_STORY))
