"""The tests of redelivery can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.backlog.dead_letter_rows import DeadLetterRows, DeadLetters
from daemon.core.backlog.in_flight import InFlight
from daemon.core.backlog.nack_tracker import NackTracker
from daemon.core.decisions import nack_decisions, topic_state
from daemon.core.decisions import topic_state as topic_module
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.claims import ClaimedRows, HeldPositions, Ignored, IgnoredReason, rows_claimed
from daemon.core.decisions.dead_letter_decisions import DeadLetterDecisions
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.nack_decisions import NackBatch, NackDecisions, RedeliveryTerms
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import SubscriptionCut, TopicState
from daemon.core.index import entitlement
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows, Mask, PagePlaces, bitmap_of
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.slot_format import DeadLetterRecord, NackRecord, Record, ReplayRecord
from tests.daemon.core._support import journaled_topic
from tests.daemon.core._support.redelivery_machine import RedeliveryMachine
from tests.daemon.core.decisions import test_dead_letter_decisions, test_nack_decisions, test_redelivery
from tests.daemon.core.decisions import test_every_order as every_order
from tests.daemon.core.decisions.test_planted_bugs import Plant, found_by_the_state_machine, search

# ---- when


def times_are_rounded_down(patch: pytest.MonkeyPatch) -> None:
    """As in PIP-393."""
    patch.setattr(nack_decisions, "rounded_up", lambda times_ms, bits: times_ms >> np.uint64(bits) << np.uint64(bits))


def what_waits_comes_back_a_tick_early(patch: pytest.MonkeyPatch) -> None:
    take_due = NackTracker.take_due
    patch.setattr(NackTracker, "take_due", lambda self, now_ms, limit: take_due(self, now_ms + 5, limit))


def a_new_time_does_not_replace_the_old_one(patch: pytest.MonkeyPatch) -> None:
    add = NackTracker.add

    def added(self: NackTracker, rows: KeyedRows, redeliver_at_ms: U64) -> None:
        fresh = np.array([key not in self.keys for key in rows.keys.tolist()], np.bool_)
        add(self, rows.take(fresh), redeliver_at_ms[fresh])

    patch.setattr(NackTracker, "add", added)


def a_redelivery_may_be_before_the_row_is_due(patch: pytest.MonkeyPatch) -> None:
    nack = NackDecisions._nack

    def at_any_time(self: NackDecisions, state: SubscriptionState, index: Index, rows: Rows, *rest: Any, **named: Any):  # type: ignore[no-untyped-def]
        early = dataclasses.replace(rows, deliver_at_ms=np.zeros_like(rows.deliver_at_ms))
        return dataclasses.replace(nack(self, state, index, early, *rest, **named), rows=rows)

    patch.setattr(NackDecisions, "_nack", at_any_time)


def what_is_in_flight_since_just_now_times_out(patch: pytest.MonkeyPatch) -> None:
    take_since = InFlight.take_since
    patch.setattr(
        InFlight,
        "take_since",
        lambda self, before_ms, limit, *, staying: take_since(self, before_ms + 1, limit, staying=staying),
    )


def what_is_extended_is_there_since_it_was_handed_out(patch: pytest.MonkeyPatch) -> None:
    extend = NackDecisions.extend

    def extended(
        self: NackDecisions,
        state: SubscriptionState,
        positions: HeldPositions,
        dispatchers: Collection[int],
        *,
        elapsed_ms: int,
    ) -> HeldPositions:
        return extend(self, state, positions, dispatchers, elapsed_ms=0)

    patch.setattr(NackDecisions, "extend", extended)


def a_dead_letter_is_replayed_at_once(patch: pytest.MonkeyPatch) -> None:
    stage = DeadLetterDecisions.stage_replay
    patch.setattr(
        DeadLetterDecisions, "stage_replay", lambda self, state, rows, deliver_at_ms: stage(self, state, rows, 1)
    )


# ---- in whose hand


def what_waits_is_derived_by_readers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "set_aside_among", lambda self, keys: self.nacking & keys)


def what_waits_is_fed_by_the_head_after_a_recovery(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "feed", lambda self, rows: self.append_ready(self.counted(rows)))


def an_idle_subscription_loses_what_comes_due(patch: pytest.MonkeyPatch) -> None:
    among = SubscriptionState.set_aside_among

    def with_counted(self: SubscriptionState, keys: BitMap64) -> BitMap64:
        return among(self, keys) | self.counts.among(keys)

    patch.setattr(SubscriptionState, "set_aside_among", with_counted)


def what_comes_due_while_there_is_no_room_is_dropped(patch: pytest.MonkeyPatch) -> None:
    redeliver = SubscriptionState.redeliver

    def redelivered(self: SubscriptionState, now_ms: int, limit: int) -> U64:
        return self.nacks.take_due(now_ms, limit)[1] if self.is_full else redeliver(self, now_ms, limit)

    patch.setattr(SubscriptionState, "redeliver", redelivered)


def what_is_staged_comes_back(patch: pytest.MonkeyPatch) -> None:
    """Its old time comes while the new one is not durable."""

    def redelivered(self: SubscriptionState, now_ms: int, limit: int) -> U64:
        nacking, self.nacking = self.nacking, BitMap64()
        times_ms = redeliver(self, now_ms, limit)
        self.nacking = nacking
        return times_ms

    redeliver = SubscriptionState.redeliver
    patch.setattr(SubscriptionState, "redeliver", redelivered)


def what_is_ready_stays_so_when_it_is_nacked(patch: pytest.MonkeyPatch) -> None:
    found = NackDecisions.stage_found

    def left_in_hand(self: NackDecisions, state: SubscriptionState, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(SubscriptionState, "withdraw", lambda self, keys: None)
            return found(self, state, *rest)

    patch.setattr(NackDecisions, "stage_found", left_in_hand)


def what_comes_back_is_handed_out_in_no_order(patch: pytest.MonkeyPatch) -> None:
    take_due = NackTracker.take_due

    def reversed_(self: NackTracker, now_ms: int, limit: int) -> tuple[KeyedRows, U64]:
        rows, times_ms = take_due(self, now_ms, limit)
        return rows.take(slice(None, None, -1)), times_ms[::-1]

    patch.setattr(NackTracker, "take_due", reversed_)


def what_comes_back_is_handed_out_after_what_is_ready(patch: pytest.MonkeyPatch) -> None:
    redeliver = SubscriptionState.redeliver

    def behind(self: SubscriptionState, now_ms: int, limit: int) -> U64:
        times_ms = redeliver(self, now_ms, limit)
        self._ready += self._redelivered
        self._redelivered.clear()
        self._redelivered_ms.clear()
        return times_ms

    patch.setattr(SubscriptionState, "redeliver", behind)


# ---- quarantine and drops


def messages_do_not_leave_with_their_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AckDecisions, "end_parts", lambda self, state, ledger_id, entry_id, counts=None: iter(()))


def a_trim_leaves_messages_of_batches(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerRanges, "of_batch_parts", lambda self: self)


# ---- messages of batches


def a_message_takes_its_entry_along(patch: pytest.MonkeyPatch) -> None:
    decide = NackDecisions._decide_new_parts

    def both(
        self: NackDecisions, state: SubscriptionState, left: NackBatch, entries: KeyedRows, terms: RedeliveryTerms
    ) -> tuple[list[Record], NackBatch]:
        state.withdraw(bitmap_of(entries.keys))
        return decide(self, state, left, entries, terms)

    patch.setattr(NackDecisions, "_decide_new_parts", both)


def messages_of_an_entry_are_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nack_decisions, "part_entry_id", lambda entry_id, batch_index: entry_id << np.uint64(16))


def a_message_that_is_nacked_waits_for_the_head(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "add_due", lambda self, rows, slot, *, elapsed_ms: self.add(rows, slot, elapsed_ms=elapsed_ms))


def a_position_that_is_owed_is_added_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nack_decisions, "are_owed", lambda indexes, state, entries: np.zeros(len(entries), np.bool_))


# ---- counts


def one_that_waits_counts_again(patch: pytest.MonkeyPatch) -> None:
    found = NackDecisions.stage_found

    def counted(self: NackDecisions, state: SubscriptionState, *rest: Any) -> Any:
        nacks, state.nacks = state.nacks, NackTracker(PagePlaces())
        result = found(self, state, *rest)
        state.nacks = nacks
        return result

    patch.setattr(NackDecisions, "stage_found", counted)


def a_closed_stream_counts(patch: pytest.MonkeyPatch) -> None:
    return_held = SubscriptionState.return_held

    def counted(self: SubscriptionState, dispatcher: int) -> int:
        keys = self.in_flight.keys()
        rows = return_held(self, dispatcher)
        left = np.array(list(keys - self.in_flight.keys()), np.uint64)
        counts = self.counts.of(left)
        self.counts.set(left, (np.zeros(len(left), np.uint32) if counts is None else counts) + np.uint32(1))
        return rows

    patch.setattr(SubscriptionState, "return_held", counted)


def _cut(patch: pytest.MonkeyPatch, change: Callable[[SubscriptionCut, SubscriptionState], SubscriptionCut]) -> None:
    cut_of = topic_state.cut_of

    def changed(state: SubscriptionState) -> SubscriptionCut | None:
        cut = cut_of(state)
        return None if cut is None else change(cut, state)

    patch.setattr(topic_module, "cut_of", changed)


def counts_are_lost_with_a_seal(patch: pytest.MonkeyPatch) -> None:
    _cut(patch, lambda cut, state: dataclasses.replace(cut, planes=()))


def only_the_lowest_bit_of_a_count_is_kept(patch: pytest.MonkeyPatch) -> None:
    _cut(patch, lambda cut, state: dataclasses.replace(cut, planes=cut.planes[:1]))


def what_waits_is_lost_with_a_seal(patch: pytest.MonkeyPatch) -> None:
    _cut(patch, lambda cut, state: dataclasses.replace(cut, nacked=NackTracker(PagePlaces()).freeze()))


# ---- dead letters


def dead_letters_are_lost_with_a_seal(patch: pytest.MonkeyPatch) -> None:
    _cut(patch, lambda cut, state: dataclasses.replace(cut, dead_letters=DeadLetters().freeze()))


def ids_begin_anew_after_a_crash(patch: pytest.MonkeyPatch) -> None:
    """Where the last one was purged."""
    _cut(patch, lambda cut, state: dataclasses.replace(cut, last_dead_letter_id=_last(cut.dead_letters.rows())))


def _last(rows: DeadLetterRows) -> int:
    return int(rows.dead_letter_id[-1]) if len(rows) else 0


def a_replay_keeps_the_count(patch: pytest.MonkeyPatch) -> None:
    replayed = DeadLetterDecisions.replayed

    def kept(self: DeadLetterDecisions, record: ReplayRecord, slot: int, *, elapsed_ms: int) -> None:
        replayed(self, record, slot, elapsed_ms=elapsed_ms)
        keys = self._indexes.of(record.index_id).pages.keyed(record.rows).keys
        self._subscriptions[record.subscription_id].counts.set(keys, np.ones(len(keys), np.uint32))

    patch.setattr(DeadLetterDecisions, "replayed", kept)


def a_dead_letter_is_replayed_over_a_row(patch: pytest.MonkeyPatch) -> None:
    stage = DeadLetterDecisions._replay

    def over(self: DeadLetterDecisions, *rest: Any) -> ReplayRecord | None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Index, "fresh_among", lambda self, keys, asked: None)
            return stage(self, *rest)

    patch.setattr(DeadLetterDecisions, "_replay", over)


def dead_letters_of_a_deleted_subscription_are_not_replayed(patch: pytest.MonkeyPatch) -> None:
    apply = TopicState.apply

    def applied(self: TopicState, record: Record, slot: int, *, elapsed_ms: int) -> None:
        if not isinstance(record, DeadLetterRecord) or record.subscription_id in self.subscriptions:
            apply(self, record, slot, elapsed_ms=elapsed_ms)

    patch.setattr(TopicState, "apply", applied)


def a_nack_is_applied_to_what_has_left(patch: pytest.MonkeyPatch) -> None:
    nacked = NackDecisions.nacked

    def anyway(self: NackDecisions, record: NackRecord, slot: int, *, elapsed_ms: int) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(entitlement, "owed_among", lambda index, keys, number: keys)
            nacked(self, record, slot, elapsed_ms=elapsed_ms)

    patch.setattr(NackDecisions, "nacked", anyway)


def what_is_ignored_is_said_not_to_be_there(patch: pytest.MonkeyPatch) -> None:
    def not_there(indexes: Sequence[Index], state: SubscriptionState, left: HeldPositions, *_: Any, **__: Any) -> Any:
        return Ignored.all_of(left, IgnoredReason.NOT_THERE)

    patch.setattr(nack_decisions, "why_ignored", not_there)


BY_ANY_ORDER: tuple[Plant, ...] = (
    what_is_ignored_is_said_not_to_be_there,
    times_are_rounded_down,
    what_waits_comes_back_a_tick_early,
    a_dead_letter_is_replayed_at_once,
    what_waits_is_derived_by_readers,
    an_idle_subscription_loses_what_comes_due,
    what_comes_back_is_handed_out_in_no_order,
    messages_do_not_leave_with_their_entry,
    a_message_takes_its_entry_along,
    messages_of_an_entry_are_one,
    a_message_that_is_nacked_waits_for_the_head,
    a_closed_stream_counts,
    counts_are_lost_with_a_seal,
    dead_letters_are_lost_with_a_seal,
    a_replay_keeps_the_count,
)


# What takes a rare order of events.
def a_late_nack_does_not_wait_for_the_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    is_staged = NackDecisions.is_staged
    patch.setattr(NackDecisions, "is_staged", lambda self, state, positions, **_: is_staged(self, state, positions))


def only_what_is_in_flight_is_nacked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackDecisions, "_decide_found", lambda self, state, index, left, found, terms: ([], left))


def another_hand_out_is_held(patch: pytest.MonkeyPatch) -> None:
    def without_counts(
        indexes: Sequence[Index], state: SubscriptionState, claims: HeldPositions, found: KeyedRows
    ) -> ClaimedRows:
        return rows_claimed(indexes, state, dataclasses.replace(claims, redelivery_count=None), found)

    patch.setattr(journaled_topic, "rows_claimed", without_counts)


def what_is_being_added_again_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    is_staged = NackDecisions.is_staged

    def without_adds(
        self: NackDecisions, state: SubscriptionState, *positions: Any, is_forwarded: bool = False
    ) -> bool:
        added = [(index, index.staged.keys) for index in self._indexes.of_entries(state.subscription_id)]
        for index, _ in added:
            index.staged.keys = BitMap64()
        found = is_staged(self, state, *positions, is_forwarded=is_forwarded)
        for index, keys in added:
            index.staged.keys = keys
        return found

    patch.setattr(NackDecisions, "is_staged", without_adds)


def a_part_counts_on_from_one_row_of_its_entry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackDecisions, "_above", lambda self, state, parts: np.ones(len(parts), np.uint32))


def a_late_row_has_no_time(patch: pytest.MonkeyPatch) -> None:
    decide = NackDecisions._decide_unowed

    def without_times(
        self: NackDecisions, state: SubscriptionState, strange: NackBatch, terms: RedeliveryTerms
    ) -> Iterator[Record]:
        times_ms = np.zeros(len(strange), np.uint64)
        positions = dataclasses.replace(strange.positions, deliver_at_ms=times_ms)
        return decide(self, state, dataclasses.replace(strange, positions=positions), terms)

    patch.setattr(NackDecisions, "_decide_unowed", without_times)


def a_late_row_begins_anew(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackBatch, "first_counts", property(lambda self: np.ones(len(self), np.uint32)))


def an_old_nack_hits_a_newer_hand_out(patch: pytest.MonkeyPatch) -> None:
    take = nack_decisions._take_in_flight

    def any_hand_out(state: SubscriptionState, index: Index, nack: NackBatch) -> tuple[KeyedRows, Mask]:
        positions = dataclasses.replace(nack.positions, redelivery_count=None)
        return take(state, index, dataclasses.replace(nack, positions=positions))

    patch.setattr(nack_decisions, "_take_in_flight", any_hand_out)


BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        what_is_in_flight_since_just_now_times_out,
        test_redelivery.test_what_is_in_flight_too_long_is_nacked_and_counts,
    ),
    (
        what_is_extended_is_there_since_it_was_handed_out,
        test_redelivery.test_what_is_extended_is_there_since_then,
    ),
    (
        a_nack_is_applied_to_what_has_left,
        test_nack_decisions.test_a_nack_of_what_an_earlier_record_of_its_slot_ended_does_nothing,
    ),
    (
        a_trim_leaves_messages_of_batches,
        lambda: test_redelivery.test_a_trim_takes_the_messages_of_the_entries(test_redelivery.nothing),
    ),
    (
        what_waits_is_fed_by_the_head_after_a_recovery,
        test_redelivery.test_the_head_leaves_out_what_waits_when_it_passes_it_after_a_recovery,
    ),
    (
        what_is_staged_comes_back,
        test_redelivery.test_what_waits_does_not_come_back_at_its_old_time_while_a_new_one_is_staged,
    ),
    (
        what_waits_is_lost_with_a_seal,
        lambda: test_redelivery.test_a_nacked_position_comes_back_at_its_time_with_its_count(
            test_redelivery.a_seal_and_a_crash
        ),
    ),
    (
        only_the_lowest_bit_of_a_count_is_kept,
        lambda: test_redelivery.test_a_nacked_position_comes_back_at_its_time_with_its_count(
            test_redelivery.a_seal_whose_progress_is_an_object_and_a_crash
        ),
    ),
    (
        one_that_waits_counts_again,
        lambda: test_redelivery.test_one_that_waits_gets_the_new_time_and_does_not_count_again(10),
    ),
    (
        a_new_time_does_not_replace_the_old_one,
        lambda: test_redelivery.test_one_that_waits_gets_the_new_time_and_does_not_count_again(900),
    ),
    (
        what_comes_due_while_there_is_no_room_is_dropped,
        test_redelivery.test_what_comes_due_while_there_is_no_room_waits_for_it,
    ),
    (what_is_ready_stays_so_when_it_is_nacked, test_redelivery.test_one_that_is_ready_counts),
    (
        what_comes_back_is_handed_out_after_what_is_ready,
        test_redelivery.test_what_comes_back_is_handed_out_in_the_order_of_its_times_and_before_what_is_ready,
    ),
    (
        a_position_that_is_owed_is_added_again,
        test_redelivery.test_a_position_that_is_owed_as_a_row_is_not_one_that_never_was_added,
    ),
    (
        a_late_nack_does_not_wait_for_the_acknowledgement,
        every_order.test_h_a_n_while_the_acknowledgement_is_staged_the_nack_waits,
    ),
    (
        what_is_being_added_again_is_not_waited_for,
        every_order.test_while_it_is_being_added_again_with_its_time_a_late_nack_waits,
    ),
    (only_what_is_in_flight_is_nacked, every_order.test_h_s_n_what_is_ready_again_is_nacked),
    (another_hand_out_is_held, every_order.test_after_k_a_position_is_held_only_by_the_name_that_its_row_has),
    (
        a_part_counts_on_from_one_row_of_its_entry,
        every_order.test_entry_with_two_rows_n_of_a_part_of_one_a_of_the_other_the_part_stays,
    ),
    (
        a_late_row_has_no_time,
        every_order.test_h_a_n_the_subscription_gets_a_row_of_its_own_with_the_time_and_the_next_count,
    ),
    (a_late_row_begins_anew, every_order.test_a_row_that_a_late_nack_makes_is_never_due_in_the_future),
    (
        an_old_nack_hits_a_newer_hand_out,
        every_order.test_h_x_h_n_a_newer_hand_out_is_out_and_the_old_one_ends_nothing_any_more,
    ),
    (
        a_dead_letter_is_replayed_over_a_row,
        test_dead_letter_decisions.test_a_dead_letter_whose_position_has_a_row_stays,
    ),
    (
        a_redelivery_may_be_before_the_row_is_due,
        test_redelivery.test_a_redelivery_is_not_before_the_row_is_due,
    ),
    (
        ids_begin_anew_after_a_crash,
        lambda: test_dead_letter_decisions.test_ids_of_dead_letters_are_never_given_again(
            test_redelivery.a_checkpoint_and_a_crash
        ),
    ),
    (
        dead_letters_of_a_deleted_subscription_are_not_replayed,
        test_dead_letter_decisions.test_a_dead_letter_of_a_subscription_that_was_deleted_since_left_the_index,
    ),
)


@pytest.mark.rotating
@pytest.mark.timeout(0)
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine(RedeliveryMachine)


@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        story()


@pytest.mark.rotating
def test_a_search_finds_nothing_where_no_bug_is_planted() -> None:
    search(RedeliveryMachine, seed=0)
