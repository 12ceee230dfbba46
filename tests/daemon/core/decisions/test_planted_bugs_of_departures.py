"""The tests of trims, leases, damage and what is contained can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.decisions import departures, feeding
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.dead_letter_decisions import DeadLetterDecisions
from daemon.core.decisions.departures import Departure, LedgerRanges
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import bucket as quarantine
from daemon.core.index import containment, entitlement, index, retention
from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows, Mask, PageTable
from storage_backends.formats.row_columns import U64
from storage_backends.formats.slot_format import GoneRecord, Record, WaiveRecord
from tests.daemon.core.decisions import test_leases, test_trimming
from tests.daemon.core.decisions.test_planted_bugs import Plant, found_by_the_state_machine
from tests.daemon.core.index import test_containment, test_quarantine, test_retention
from tests.planted import registry

# ---- quarantine and drops


def what_is_trimmed_stays_in_hand(patch: pytest.MonkeyPatch) -> None:
    def drop(self: SubscriptionState, keys: BitMap64, *, backlog_rows: int) -> None:
        self.backlog -= backlog_rows

    patch.setattr(SubscriptionState, "drop", drop)


def a_trim_always_takes_lower_ledgers(patch: pytest.MonkeyPatch) -> None:
    portions = departures.portions

    def of_lower_ones_too(
        index: Index, ranges: LedgerRanges | None, rows_max: int
    ) -> Iterator[departures.Parts | None]:
        if ranges is not None:
            ranges = LedgerRanges(ranges.ledger_id, ranges.last_entry_id, True)
        return portions(index, ranges, rows_max)

    patch.setattr(departures, "portions", of_lower_ones_too)


def a_trim_takes_a_ledger_by_its_low_entry_bits(patch: pytest.MonkeyPatch) -> None:
    key_ranges = PageTable.key_ranges
    patch.setattr(
        PageTable,
        "key_ranges",
        lambda self, ledger_id, first, last: key_ranges(self, ledger_id, first, last & 0xFFFF_FFFF),
    )


def a_trim_for_one_subscription_is_one_for_all(patch: pytest.MonkeyPatch) -> None:
    split = departures.split

    def all_gone(
        parts: Collection[tuple[Bucket, BitMap64]], subscription_id: int, others: Collection[int]
    ) -> tuple[BitMap64, BitMap64]:
        return split(parts, subscription_id, ())

    patch.setattr(departures, "split", all_gone)


def what_nobody_else_is_owed_is_waived_only(patch: pytest.MonkeyPatch) -> None:
    def all_waived(
        parts: Collection[tuple[Bucket, BitMap64]], subscription_id: int, others: Collection[int]
    ) -> tuple[BitMap64, BitMap64]:
        owed = [keys - bucket.acknowledged.get(subscription_id, BitMap64()) for bucket, keys in parts]
        return BitMap64(), BitMap64.union(BitMap64(), *owed)

    patch.setattr(departures, "split", all_waived)


def only_what_is_due_is_waived(patch: pytest.MonkeyPatch) -> None:
    waive = entitlement.waive

    def waive_due(index: Index, keys: BitMap64, subscription_id: int) -> BitMap64:
        due = [bucket.passed & keys for bucket in index.buckets]
        return waive(index, BitMap64.union(BitMap64(), *due), subscription_id)

    patch.setattr(entitlement, "waive", waive_due)


def a_waive_is_forgotten_when_the_topic_is_sealed_or_replayed(patch: pytest.MonkeyPatch) -> None:
    apply = TopicState.apply

    def applied(self: TopicState, record: Record, slot: int, *, elapsed_ms: int) -> None:
        if not isinstance(record, WaiveRecord) or self.indexes.passed_until_ms:
            apply(self, record, slot, elapsed_ms=elapsed_ms)

    patch.setattr(TopicState, "apply", applied)


def what_was_waived_counts_when_it_comes_due(patch: pytest.MonkeyPatch) -> None:
    unacknowledged = Bucket.unacknowledged
    owed_of = feeding.owed_of

    def everything(self: Bucket, rows: KeyedRows, subscription_id: int, in_hand: BitMap64 | None = None) -> KeyedRows:
        return rows

    def owed(*arguments):  # type: ignore[no-untyped-def]
        patch.setattr(Bucket, "unacknowledged", everything)
        try:
            return owed_of(*arguments)
        finally:
            patch.setattr(Bucket, "unacknowledged", unacknowledged)

    patch.setattr(feeding, "owed_of", owed)


def gone_rows_of_the_first_slot_only(patch: pytest.MonkeyPatch) -> None:
    slots = Departure.slots
    patch.setattr(Departure, "slots", lambda self: iter(list(slots(self))[:1]))


def a_row_is_gone_when_one_subscription_is_not_owed_it(patch: pytest.MonkeyPatch) -> None:
    feed = feeding.feed

    def fed(passed, states, coming, reader):  # type: ignore[no-untyped-def]
        feed(passed, states, coming, reader)
        unowed = BitMap64()
        for state in states:
            for each, owed in zip(passed, feeding.owed_of(state, passed)[0], strict=True):
                unowed |= BitMap64(each.rows.keys.tolist()) - BitMap64(owed.keys.tolist())
        return unowed

    patch.setattr(feeding, "feed", fed)


# ---- leases


def what_a_lease_held_is_lost_when_it_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "return_held", lambda self, number: len(self.in_flight.take_dispatcher(number)))


def what_a_stream_holds_is_extended_too(patch: pytest.MonkeyPatch) -> None:
    move = InFlight.move

    def move_any(
        self: InFlight, keys: U64, times: U64, holders: Collection[int], number: int, *, elapsed_ms: int
    ) -> Mask:
        return move(self, keys, times, [*self._held], number, elapsed_ms=elapsed_ms)

    patch.setattr(InFlight, "move", move_any)


def a_lease_is_extended_whatever_the_time(patch: pytest.MonkeyPatch) -> None:
    move = InFlight.move

    def move_any(
        self: InFlight, keys: U64, times: U64, holders: Collection[int], number: int, *, elapsed_ms: int
    ) -> Mask:
        either = (times, times + np.uint64((1 << 64) - 1))
        return np.logical_or(*[move(self, keys, each, holders, number, elapsed_ms=elapsed_ms) for each in either])

    patch.setattr(InFlight, "move", move_any)


def what_is_in_flight_is_not_counted_for_the_limit(patch: pytest.MonkeyPatch) -> None:
    def available_rows(self: SubscriptionState) -> int:
        rows_max = self.stored.policy.in_flight_rows_max
        return self.ready_rows if rows_max is None else min(self.ready_rows, rows_max)

    patch.setattr(SubscriptionState, "available_rows", property(available_rows))


# ---- damage


def what_is_missing_is_still_a_duplicate(patch: pytest.MonkeyPatch) -> None:
    find = Index.present_among

    def present(self: Index, asked: BitMap64) -> BitMap64:
        return BitMap64.union(find(self, asked), *[bucket.present & asked for bucket in self.quarantined.values()])

    patch.setattr(Index, "present_among", present)


def what_was_merged_away_holds_up_no_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "leave_to_merged", Index.leave_out)


def what_leaves_is_still_missing(patch: pytest.MonkeyPatch) -> None:
    """Of a damaged bucket only what is added again is missing no longer."""
    apply = TopicState.apply

    def applied(self: TopicState, record: Record, slot: int, *, elapsed_ms: int) -> None:
        quarantined = self.index.quarantined
        if isinstance(record, GoneRecord):
            self.index.quarantined = {}
        apply(self, record, slot, elapsed_ms=elapsed_ms)
        self.index.quarantined = quarantined

    patch.setattr(TopicState, "apply", applied)


def acknowledgements_before_the_damage_are_not_replayed(patch: pytest.MonkeyPatch) -> None:
    acknowledged = AckDecisions.acknowledged

    def applied(self, records, slot):  # type: ignore[no-untyped-def]
        records = list(records)
        quarantined = {record.index_id: self._indexes[record.index_id].quarantined for record in records}
        for index_id in quarantined:
            self._indexes[index_id].quarantined = {}
        acknowledged(self, records, slot)
        for index_id, buckets in quarantined.items():
            self._indexes[index_id].quarantined = buckets

    patch.setattr(AckDecisions, "acknowledged", applied)


def the_rows_of_a_damaged_bucket_stay_counted(patch: pytest.MonkeyPatch) -> None:
    def leave(self, live):  # type: ignore[no-untyped-def]
        bucket = self.index.quarantine(live)
        for state in self.subscriptions.values():
            state.withdraw(bucket.present)

    patch.setattr(TopicState, "quarantine", leave)


def a_reader_keeps_its_place_in_a_damaged_bucket(patch: pytest.MonkeyPatch) -> None:
    """And hands out what it finds there."""
    leave = TopicState.quarantine

    def quarantined(self, live):  # type: ignore[no-untyped-def]
        held = [(state, list(state._ready)) for state in self.subscriptions.values()]
        leave(self, live)
        for state, ready in held:
            state._ready.extend(ready)
            state.ready_rows += sum(map(len, ready))

    patch.setattr(TopicState, "quarantine", quarantined)


def the_progress_of_damaged_buckets_is_not_stored(patch: pytest.MonkeyPatch) -> None:
    cut = Index.cut

    def without(self: Index):  # type: ignore[no-untyped-def]
        quarantined, self.quarantined = self.quarantined, {}
        taken = cut(self)
        self.quarantined = quarantined
        return taken

    patch.setattr(Index, "cut", without)


def an_add_may_overtake_an_acknowledgement_of_a_damaged_bucket(patch: pytest.MonkeyPatch) -> None:
    leave = TopicState.quarantine

    def quarantined(self, live):  # type: ignore[no-untyped-def]
        leave(self, live)
        self.index.acknowledging_lost = BitMap64()

    patch.setattr(TopicState, "quarantine", quarantined)


def adds_before_the_damage_count_as_added_again(patch: pytest.MonkeyPatch) -> None:
    added_again = quarantine.added_again
    patch.setattr(index, "added_again", lambda damaged, added, slot: added_again(damaged, added, 1 << 60))


def what_left_before_the_restart_is_not_asked_of_pages_that_nobody_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(index, "learns_positions", lambda damaged: False)


def a_trim_of_a_part_takes_all_that_nobody_knows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerRanges, "cover", lambda self, first, last: True)


# ---- what is contained


def acknowledged_rows_are_contained(patch: pytest.MonkeyPatch) -> None:
    sets = containment._sets
    patch.setattr(containment, "_sets", lambda index, asked, number: sets(index, asked, None))


def a_range_of_several_pages_is_looked_for_in_the_first(patch: pytest.MonkeyPatch) -> None:
    key_ranges = PageTable.key_ranges
    patch.setattr(PageTable, "key_ranges", lambda self, *entries: key_ranges(self, *entries)[:1])


def a_cut_answer_goes_on_behind_the_next_range(patch: pytest.MonkeyPatch) -> None:
    first_ones = containment._first_ones

    def skipping(pending, due, ranges_max):  # type: ignore[no-untyped-def]
        pending, due, cut = first_ones(pending, due, ranges_max)
        return pending, due, None if cut is None else (cut[0], cut[1] + 1)

    patch.setattr(containment, "_first_ones", skipping)


# ---- portions, dead letters, and what a log is needed for


def what_is_added_between_portions_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def nothing(self: Index) -> Iterator[BitMap64]:
        yield BitMap64()

    patch.setattr(Index, "noting_added", nothing)


def a_trim_lists_what_is_not_owed(patch: pytest.MonkeyPatch) -> None:
    stage_trimmed = DeadLetterDecisions.stage_trimmed

    def everything(self: DeadLetterDecisions, state, departure, *, now_ms):  # type: ignore[no-untyped-def]
        for *records, listed in stage_trimmed(self, state, departure, now_ms=now_ms):
            keys = departure.gone | departure.waived | self._indexes.shared.mutable.present
            whole = dataclasses.replace(departure, waived=keys - departure.gone)
            ((*_, listed),) = stage_trimmed(self, state, whole, now_ms=now_ms)
            yield (*records, listed)

    patch.setattr(DeadLetterDecisions, "stage_trimmed", everything)


def what_nobody_knows_becomes_dead_letters(patch: pytest.MonkeyPatch) -> None:
    trim = TopicState.trim

    def with_stand_ins(self, ranges, subscription_id, *, dead_letter=False):  # type: ignore[no-untyped-def]
        return trim(self, ranges, subscription_id)

    patch.setattr(TopicState, "trim", with_stand_ins)


def own_indexes_need_nothing_of_the_log(patch: pytest.MonkeyPatch) -> None:
    first_from = retention._first_from
    patch.setattr(retention, "_first_from", lambda bucket, key: 1 << 64 if bucket.index_id else first_from(bucket, key))


def a_look_at_the_log_goes_by_buckets(patch: pytest.MonkeyPatch) -> None:
    """Which there were when it began."""

    def those_before(indexes, pages, ledgers_max):  # type: ignore[no-untyped-def]
        buckets = {page: indexes.shared.that_may_have_page(page) for page in pages}
        nothing = Bucket("", BitMap64(), None, 0)
        sealed = {page: [nothing, *[bucket for bucket in buckets[page] if bucket.name]] for page in pages}
        patch.setattr(Index, "that_may_have_page", lambda self, page: sealed[page])
        yield
        return (yield from retained(indexes, pages, ledgers_max))

    retained = retention.retained
    patch.setattr(retention, "retained", those_before)


BY_ANY_ORDER: tuple[Plant, ...] = (
    what_is_trimmed_stays_in_hand,
    a_trim_always_takes_lower_ledgers,
    what_a_lease_held_is_lost_when_it_ends,
    the_rows_of_a_damaged_bucket_stay_counted,
)
BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        a_trim_takes_a_ledger_by_its_low_entry_bits,
        test_trimming.test_a_trim_drops_a_ledger_up_to_an_entry_and_lower_ledgers_only_on_request,
    ),
    (
        a_trim_for_one_subscription_is_one_for_all,
        test_trimming.test_what_is_trimmed_for_one_subscription_is_still_owed_to_the_others,
    ),
    (
        what_nobody_else_is_owed_is_waived_only,
        test_trimming.test_a_trim_for_the_only_subscription_makes_gone_what_is_still_pending,
    ),
    (only_what_is_due_is_waived, test_trimming.test_what_is_trimmed_for_one_subscription_is_still_owed_to_the_others),
    (
        a_waive_is_forgotten_when_the_topic_is_sealed_or_replayed,
        test_trimming.test_what_is_trimmed_for_one_subscription_is_still_owed_to_the_others,
    ),
    (
        what_was_waived_counts_when_it_comes_due,
        test_trimming.test_what_is_trimmed_for_one_subscription_is_still_owed_to_the_others,
    ),
    (
        gone_rows_of_the_first_slot_only,
        lambda: test_trimming.slots_of_a_large_trim_hold(rows_max=3, bytes_max=1 << 20, slots_min=4),
    ),
    (
        a_row_is_gone_when_one_subscription_is_not_owed_it,
        test_trimming.test_a_row_that_one_subscription_is_not_owed_stays_for_the_other,
    ),
    (what_a_stream_holds_is_extended_too, test_leases.test_only_what_a_lease_holds_with_that_time_is_extended),
    (a_lease_is_extended_whatever_the_time, test_leases.test_only_what_a_lease_holds_with_that_time_is_extended),
    (
        what_is_in_flight_is_not_counted_for_the_limit,
        test_leases.test_all_together_hold_no_more_than_the_subscription_allows,
    ),
    (
        what_was_merged_away_holds_up_no_key,
        test_quarantine.test_a_bucket_that_was_merged_away_holds_up_keys_until_what_took_its_place_is_served,
    ),
    (what_is_missing_is_still_a_duplicate, test_quarantine.test_adding_the_range_again_heals_it_without_doubling),
    (
        the_progress_of_damaged_buckets_is_not_stored,
        test_quarantine.test_adding_the_range_again_heals_it_without_doubling,
    ),
    (what_leaves_is_still_missing, test_quarantine.test_a_trim_and_a_clear_take_what_is_missing),
    (
        acknowledgements_before_the_damage_are_not_replayed,
        test_quarantine.test_what_was_acknowledged_before_the_damage_is_not_missing_though_only_the_journal_says_so,
    ),
    (
        a_reader_keeps_its_place_in_a_damaged_bucket,
        test_quarantine.test_a_backlog_that_is_being_read_again_goes_on_without_a_damaged_bucket,
    ),
    (
        a_range_of_several_pages_is_looked_for_in_the_first,
        test_containment.test_ranges_go_on_in_the_next_page_of_a_ledger_and_ranges_that_overlap_are_answered_each,
    ),
    (acknowledged_rows_are_contained, test_containment.test_what_a_subscription_acknowledged_is_not_contained_for_it),
    (a_cut_answer_goes_on_behind_the_next_range, test_containment.test_an_answer_that_is_cut_goes_on_where_it_was_cut),
    (
        an_add_may_overtake_an_acknowledgement_of_a_damaged_bucket,
        test_quarantine.test_an_acknowledgement_that_is_staged_when_the_bucket_is_found_damaged_counts,
    ),
    (
        adds_before_the_damage_count_as_added_again,
        test_quarantine.test_rows_whose_positions_nobody_knows_are_counted_exactly_after_the_tail_is_replayed,
    ),
    (
        what_left_before_the_restart_is_not_asked_of_pages_that_nobody_holds,
        test_quarantine.test_what_left_in_a_page_of_which_nothing_is_stored_counts_for_rows_that_nobody_knows,
    ),
    (
        what_is_added_between_portions_is_trimmed,
        test_trimming.test_a_trim_drops_in_portions_what_was_there_and_nothing_that_is_added_between_them,
    ),
    (
        a_trim_lists_what_is_not_owed,
        test_trimming.test_what_a_subscription_is_owed_becomes_dead_letters_and_nothing_else,
    ),
    (
        what_nobody_knows_becomes_dead_letters,
        test_quarantine.test_what_nobody_knows_of_a_damaged_bucket_becomes_no_dead_letter,
    ),
    (
        own_indexes_need_nothing_of_the_log,
        test_retention.test_due_rows_own_ones_and_messages_of_batches_are_needed_and_dead_letters_are_not,
    ),
    (
        a_look_at_the_log_goes_by_buckets,
        lambda: test_retention.rows_that_move_are_found("seal"),
    ),
    (
        a_trim_of_a_part_takes_all_that_nobody_knows,
        lambda: test_quarantine.test_a_trim_of_all_its_ledgers_takes_what_nobody_knows(
            test_trimming.upto((7, 5), all_lower=True), False
        ),
    ),
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine()


@pytest.mark.rotating
@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        story()


registry.register("state machine of a topic", BY_ANY_ORDER)
registry.register("stories of a topic", (plant for plant, _ in BY_A_STORY))
