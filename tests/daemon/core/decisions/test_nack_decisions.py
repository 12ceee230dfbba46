"""What becomes of positions that are negatively acknowledged, one rule a test."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.decisions import feeding
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.decisions.claims import HeldPositions, Ignored
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.nack_decisions import NackBatch, RedeliveryTerms
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import SegmentCache
from daemon.core.limits import RequestLimits
from storage_backends.formats.index_ids import NO_BATCH_INDEX, batch_parts_of, of_part
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import Subscription
from storage_backends.formats.row_columns import U32, U64
from storage_backends.formats.slot_format import NackRecord, Record, SlotBuilder

NOW_MS = 1_000_000
S = 1
LISTENER = 7
LIMITS = RequestLimits(
    rows_max=1000, topic_max_bytes=100, subscription_max_bytes=100, subscriptions_max=10, delay_max_ms=1 << 40
)
Row = tuple[int, int, int | None, int, int]


def u64(values: Sequence[int]) -> U64:
    return np.array(values, np.uint64)


class One:
    """A topic with one subscription that one dispatcher listens to; slots are applied as they are staged."""

    def __init__(self, *, max_count: int | None = None, bits: int = 0, listens: bool = True) -> None:
        self.topic = TopicState(
            "t",
            "id",
            1,
            [Subscription(subscription_id=S, name="s", since_ms=0, created_slot=ShardSlot(0))],
            now_ms=NOW_MS,
            cache=SegmentCache(1 << 20),
            ready_rows_max=100,
        )
        self.state: SubscriptionState = self.topic.subscriptions[S]
        self.max_count, self.bits = max_count, bits
        self.slots = itertools.count(1)
        if listens:
            self.topic.open(self.state, LISTENER)
            self.topic.catch_up(self.state, 100)

    def apply(self, records: Sequence[Record]) -> None:
        builder = SlotBuilder()
        for record in records:
            builder.append(record)
        slot = next(self.slots)
        for record in builder.freeze():
            self.topic.apply(record, slot, elapsed_ms=0)

    def add(self, entries: Sequence[int], at_ms: int = NOW_MS) -> None:
        batch = AddBatch(u64([7] * len(entries)), u64(entries), u64([at_ms] * len(entries)), None, None, False)
        records, _ = self.topic.stage_add(batch, now_ms=NOW_MS, request_limits=LIMITS)
        self.apply(records)

    def terms(self, now_ms: int = NOW_MS) -> RedeliveryTerms:
        def delays(counts: U32) -> U64:
            return counts.astype(np.uint64) * np.uint64(100)

        return RedeliveryTerms(now_ms, delays, self.max_count, self.bits)

    def claims(self, rows: Sequence[tuple[int, int | None, int]]) -> HeldPositions:
        entries, parts, times = zip(*rows, strict=True)
        batch = np.array([NO_BATCH_INDEX if part is None else part for part in parts], np.uint32)
        whole = all(part is None for part in parts)
        return HeldPositions(u64([7] * len(rows)), u64(entries), u64(times), None if whole else batch)

    def staged(
        self,
        rows: Sequence[tuple[int, int | None, int]],
        *,
        delay_ms: int | None = None,
        now_ms: int = NOW_MS,
        reject: bool = False,
        text: str = "",
    ) -> tuple[list[Record], int]:
        delays = None if delay_ms is None else np.full(len(rows), delay_ms, np.uint64)
        nack = NackBatch(self.claims(rows), delays, None, reject, text)
        terms = self.terms(now_ms)
        records, left = self.topic.redelivery.stage(self.state, nack, terms)
        ignored = Ignored.nothing()
        more: tuple[Record, ...] = ()
        if len(left):
            sought = self.topic.redelivery.positions_to_find(self.state, left)
            found, missing = self.topic.find_in_backlog(self.state, sought, {}, any_time=True)
            assert not missing
            more, ignored = self.topic.redelivery.stage_found(self.state, left, found, terms)
        return [*records, *more], len(ignored)

    def nack(
        self,
        *rows: tuple[int, int | None, int],
        now_ms: int = NOW_MS,
        delay_ms: int | None = None,
        reject: bool = False,
        text: str = "",
    ) -> int:
        records, ignored = self.staged(rows, delay_ms=delay_ms, now_ms=now_ms, reject=reject, text=text)
        self.apply(records)
        return ignored

    def ack(self, *rows: tuple[int, int | None, int]) -> int:
        claims = self.claims(rows)
        records, rest = self.topic.acknowledging.stage(self.state, claims)
        found, missing = self.topic.find_in_backlog(self.state, rest, {})
        assert not missing
        more, rest = self.topic.acknowledging.stage_found(self.state, rest, found)
        self.apply([*records, *more])
        return len(rest)

    def due(self, now_ms: int = NOW_MS) -> None:
        while self.topic.pass_due(now_ms, 100):
            pass

    def handed_out(self, now_ms: int = NOW_MS, limit: int = 100) -> list[tuple[int, int | None, int, int]]:
        """(entry, batch index, deliver_at, count)."""
        self.due(now_ms)
        return self.listed(self.state.hand_out(LISTENER, limit))

    def listed(self, rows: KeyedRows) -> list[tuple[int, int | None, int, int]]:
        parts = self.topic.indexes.places.owners(rows.keys) == np.uint64(batch_parts_of(S))
        found: list[tuple[int, int | None, int, int]] = []
        columns = (
            rows.rows.entry_id.tolist(),
            rows.rows.deliver_at_ms.tolist(),
            rows.counts().tolist(),
            parts.tolist(),
        )
        for entry, at_ms, count, part in zip(*columns, strict=True):
            if part:
                entries, indexes = of_part(u64([entry]))
                found.append((int(entries[0]), int(indexes[0]), at_ms, count))
            else:
                found.append((entry, None, at_ms, count))
        return found


def test_a_nacked_position_comes_back_at_its_time_with_its_count() -> None:
    one = One()
    one.add([1, 2])
    assert one.handed_out() == [(1, None, NOW_MS, 0), (2, None, NOW_MS, 0)]
    assert one.nack((1, None, NOW_MS), delay_ms=50) == 0
    assert (len(one.state.nacks), one.state.backlog, len(one.state.in_flight)) == (1, 2, 1)
    assert one.topic.next_redelivery_ms() == NOW_MS + 50
    assert one.handed_out(NOW_MS + 49) == []
    assert one.handed_out(NOW_MS + 50) == [(1, None, NOW_MS, 1)]
    assert one.nack((1, None, NOW_MS), now_ms=NOW_MS + 60) == 0
    assert one.handed_out(NOW_MS + 259) == []
    assert one.handed_out(NOW_MS + 260) == [(1, None, NOW_MS, 2)]
    assert one.ack((1, None, NOW_MS), (2, None, NOW_MS)) == 0
    assert (one.state.backlog, one.topic.index.mutable.present_rows, one.state.counts.planes()) == (0, 0, ())


def test_the_time_is_rounded_up_to_the_precision() -> None:
    one = One(bits=8)
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=1)
    rounded = -(-(NOW_MS + 1) // 256) * 256
    assert one.topic.next_redelivery_ms() == rounded
    assert one.handed_out(rounded - 1) == []
    assert len(one.handed_out(rounded)) == 1


def test_a_nack_of_what_is_nacked_moves_it_and_does_not_count_again() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=1000)
    assert one.nack((1, None, NOW_MS), delay_ms=10) == 0
    assert one.handed_out(NOW_MS + 10) == [(1, None, NOW_MS, 1)]
    assert one.handed_out(NOW_MS + 5000) == []


def test_an_acknowledgement_ends_what_is_nacked() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=10)
    assert one.ack((1, None, NOW_MS)) == 0
    assert one.handed_out(NOW_MS + 1000) == []
    assert (one.state.backlog, len(one.state.nacks)) == (0, 0)


def test_a_nack_with_another_time_or_of_a_row_that_waits_is_ignored() -> None:
    one = One()
    one.add([1])
    one.add([2], NOW_MS + 500)
    one.handed_out()
    assert one.nack((1, None, NOW_MS - 1), (2, None, NOW_MS + 500)) == 2
    assert one.nack((2, None, 0)) == 1
    assert len(one.state.nacks) == 0


def test_a_message_that_was_never_added_enters_the_backlog_nacked() -> None:
    one = One()
    assert one.nack((5, None, 0), delay_ms=20) == 0
    assert (one.state.backlog, len(one.state.nacks), one.topic.indexes.pending_rows) == (1, 1, 0)
    assert one.handed_out(NOW_MS + 19) == []
    assert one.handed_out(NOW_MS + 20) == [(5, None, 0, 1)]
    one.nack((5, None, 0), now_ms=NOW_MS + 20, delay_ms=5)
    assert one.handed_out(NOW_MS + 25) == [(5, None, 0, 2)]
    assert one.ack((5, None, 0)) == 0
    assert (one.state.backlog, one.topic.indexes.present_rows) == (0, 0)


def test_what_is_staged_is_in_no_hand_and_seen_as_staged() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    records, _ = one.staged([(1, None, NOW_MS), (9, None, 0)], delay_ms=5)
    assert one.topic.redelivery.is_staged(one.state, one.claims([(1, None, NOW_MS)]))
    assert one.topic.redelivery.is_staged(one.state, one.claims([(9, None, 0)]))
    assert not one.topic.redelivery.is_staged(one.state, one.claims([(3, None, 0)]))
    assert one.handed_out(NOW_MS + 100) == []
    one.apply(records)
    assert [row[0] for row in one.handed_out(NOW_MS + 100)] == [1, 9]


def test_a_message_waits_for_what_is_staged_of_its_entry_whose_count_it_continues() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    records, _ = one.staged([(1, None, NOW_MS)], delay_ms=5)
    assert one.topic.redelivery.is_staged(one.state, one.claims([(1, 3, NOW_MS)]))
    one.apply(records)
    assert not one.topic.redelivery.is_staged(one.state, one.claims([(1, 3, NOW_MS)]))
    one.nack((1, 3, NOW_MS), delay_ms=2)
    assert one.handed_out(NOW_MS + 2) == [(1, 3, NOW_MS, 2)]


def test_messages_of_a_batch_come_back_each_at_its_time_beside_their_entry() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, 3, NOW_MS), delay_ms=10)
    one.nack((1, 5, NOW_MS), delay_ms=20)
    assert (len(one.state.in_flight), len(one.state.nacks)) == (1, 2)
    assert one.handed_out(NOW_MS + 15) == [(1, 3, NOW_MS, 1)]
    assert one.handed_out(NOW_MS + 25) == [(1, 5, NOW_MS, 1)]
    assert one.ack((1, 3, NOW_MS)) == 0
    assert one.ack((1, 4, NOW_MS)) == 1
    one.nack((1, 5, NOW_MS), delay_ms=1)
    assert one.ack((1, None, NOW_MS)) == 0
    assert (one.state.backlog, one.topic.indexes.present_rows, len(one.state.nacks)) == (0, 0, 0)


def test_messages_of_an_entry_that_was_never_added_leave_with_it() -> None:
    one = One()
    one.nack((8, 1, 0), (8, 2, 0), delay_ms=10)
    assert one.ack((8, None, 0)) == 0
    assert (one.state.backlog, one.topic.indexes.present_rows) == (0, 0)


def test_a_message_that_leaves_with_its_entry_is_not_taken_for_a_new_one() -> None:
    one = One()
    one.nack((8, 1, 0), delay_ms=10)
    ended, rest = one.topic.acknowledging.stage(one.state, one.claims([(8, None, 0)]))
    nacked, ignored = one.staged([(8, 1, 0)], delay_ms=10)
    assert (len(rest), len(nacked), ignored) == (0, 0, 1)
    one.apply([*ended, *nacked])
    assert (one.state.backlog, one.topic.indexes.present_rows) == (0, 0)


@pytest.mark.parametrize("entry_id", [0, 1, 65_535, 65_536, (1 << 48) - 1])
def test_parts_of_any_entry_are_found_again(entry_id: int) -> None:
    one = One()
    one.nack((entry_id, 65_535, 0), (entry_id, 0, 0), delay_ms=10)
    assert one.handed_out(NOW_MS + 10) == [(entry_id, 0, 0, 1), (entry_id, 65_535, 0, 1)]
    assert one.ack((entry_id, None, 0)) == 0
    assert one.topic.indexes.present_rows == 0


def test_more_nacks_than_allowed_make_a_dead_letter() -> None:
    one = One(max_count=1)
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=1)
    assert one.handed_out(NOW_MS + 1) == [(1, None, NOW_MS, 1)]
    one.nack((1, None, NOW_MS), now_ms=NOW_MS + 2)
    assert (one.state.backlog, len(one.state.dead_letters), one.topic.indexes.present_rows) == (0, 1, 0)
    rows = one.state.dead_letters.freeze().rows()
    assert (rows.redelivery_count.tolist(), rows.dead_at_ms.tolist()) == ([2], [NOW_MS + 2])


def test_a_rejected_entry_takes_its_messages_along_and_is_replayed_with_the_count_at_zero() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, 2, NOW_MS), delay_ms=1)
    one.nack((1, None, NOW_MS), (44, None, 0), reject=True, text="bad")
    assert (one.state.backlog, len(one.state.dead_letters), one.topic.indexes.present_rows) == (0, 2, 0)
    rows = one.state.dead_letters.freeze().rows()
    assert ([rows.texts[number] for number in rows.text_index.tolist()], rows.entry_id.tolist()) == (
        ["bad"] * 2,
        [1, 44],
    )
    records, skipped = one.topic.dead_lettering.stage_replay(one.state, rows, NOW_MS + 30)
    assert one.topic.dead_lettering.stage_replay(one.state, rows, NOW_MS + 30) == ((), 0)
    one.apply(records)
    assert (skipped, len(one.state.dead_letters), one.topic.indexes.pending_rows) == (0, 0, 2)
    assert one.handed_out(NOW_MS + 30) == [(1, None, NOW_MS + 30, 0), (44, None, NOW_MS + 30, 0)]


def test_an_entry_waits_for_a_replay_of_its_message_before_it_leaves() -> None:
    one = One()
    one.add([1, 2])
    one.handed_out()
    one.nack((1, 5, NOW_MS), reject=True, text="bad")
    rows = one.state.dead_letters.freeze().rows()
    records, _ = one.topic.dead_lettering.stage_replay(one.state, rows, NOW_MS + 30)
    entry, other = one.claims([(1, None, NOW_MS)]), one.claims([(2, None, NOW_MS)])
    assert one.topic.redelivery.is_staged(one.state, entry)
    assert not one.topic.redelivery.is_staged(one.state, other)
    one.apply(records)
    assert not one.topic.redelivery.is_staged(one.state, entry)


def test_what_is_in_flight_too_long_is_nacked_by_policy() -> None:
    one = One()
    one.add([1, 2])
    one.due()
    one.state.hand_out(LISTENER, 1, elapsed_ms=100)
    one.state.hand_out(LISTENER, 1, elapsed_ms=200)
    assert one.state.in_flight.oldest_since_ms() == 100
    one.apply(one.topic.redelivery.stage_overdue(one.state, 150, one.terms(), limit=10))
    assert (len(one.state.in_flight), len(one.state.nacks)) == (1, 1)
    extended = one.claims([(2, None, NOW_MS), (1, None, NOW_MS)])
    assert one.topic.redelivery.extend(one.state, extended, (LISTENER,), elapsed_ms=900).places().tolist() == [1]
    assert one.topic.redelivery.stage_overdue(one.state, 899, one.terms(), limit=10) == ()
    assert one.handed_out(NOW_MS + 100) == [(1, None, NOW_MS, 1)]


def test_an_entry_that_times_out_leaves_no_message_behind_that_is_about_to_get_a_row() -> None:
    one = One(max_count=0)
    one.add([1, 2])
    one.handed_out()
    one.max_count = None
    staged, _ = one.staged([(1, 5, NOW_MS)], delay_ms=1)
    one.max_count = 0
    overdue = one.topic.redelivery.stage_overdue(one.state, 900, one.terms(), limit=10)
    one.apply([*staged, *overdue])
    assert (len(one.state.in_flight), len(one.state.nacks), len(one.state.dead_letters)) == (1, 1, 1)
    one.apply(one.topic.redelivery.stage_overdue(one.state, 900, one.terms(), limit=10))
    assert (one.state.backlog, len(one.state.nacks), len(one.state.dead_letters)) == (0, 0, 2)


def test_a_replayed_message_that_comes_due_while_its_entry_leaves_is_not_handed_out() -> None:
    one = One()
    one.add([1, 2])
    one.handed_out()
    one.nack((1, 5, NOW_MS), reject=True, text="bad")
    rows = one.state.dead_letters.freeze().rows()
    replayed, _ = one.topic.dead_lettering.stage_replay(one.state, rows, NOW_MS + 30)
    one.apply(replayed)
    ended, _ = one.topic.acknowledging.stage(one.state, one.claims([(1, None, NOW_MS)]))
    assert one.handed_out(NOW_MS + 30) == []
    one.apply(ended)
    assert (one.handed_out(NOW_MS + 30), one.state.backlog, one.topic.indexes.present_rows) == ([], 1, 1)


def test_a_nack_of_what_an_earlier_record_of_its_slot_ended_does_nothing() -> None:
    one, twin = One(), One()
    for each in (one, twin):
        each.add([1])
        each.handed_out()
    nacked, _ = one.staged([(1, None, NOW_MS)], delay_ms=5)
    ended, _ = twin.topic.acknowledging.stage(twin.state, twin.claims([(1, None, NOW_MS)]))
    one.apply([*ended, *nacked])
    assert (one.handed_out(NOW_MS + 5), len(one.state.nacks), one.state.backlog) == ([], 0, 0)


def in_flight_with_a_message_of_a_lower_count() -> One:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, 5, NOW_MS), delay_ms=1)
    one.nack((1, None, NOW_MS), delay_ms=1)
    one.handed_out(NOW_MS + 1)
    one.nack((1, None, NOW_MS), delay_ms=1)
    assert one.handed_out(NOW_MS + 1) == [(1, None, NOW_MS, 2)]
    one.max_count = 2
    return one


def test_a_message_that_times_out_together_with_its_entry_dies_with_it() -> None:
    one = in_flight_with_a_message_of_a_lower_count()
    records = one.topic.redelivery.stage_overdue(one.state, 900, one.terms(), limit=10)
    assert not [record for record in records if isinstance(record, NackRecord)]
    one.apply(records)
    assert (one.state.backlog, len(one.state.nacks), len(one.state.dead_letters)) == (0, 0, 1)


def test_a_message_that_is_rejected_together_with_its_entry_dies_with_it() -> None:
    one = in_flight_with_a_message_of_a_lower_count()
    one.topic.open(one.state, 8)
    one.state.close(LISTENER)
    one.nack((1, None, NOW_MS), (1, 5, NOW_MS), reject=True)
    assert (one.state.backlog, len(one.state.nacks), len(one.state.dead_letters)) == (0, 0, 1)


def test_a_closed_stream_makes_ready_and_keeps_the_count() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=1)
    assert one.handed_out(NOW_MS + 1) == [(1, None, NOW_MS, 1)]
    one.topic.open(one.state, 8)
    one.state.close(LISTENER)
    assert one.listed(one.state.hand_out(8, 10)) == [(1, None, NOW_MS, 1)]


def test_where_nobody_listens_what_is_due_again_is_found_with_its_count_by_who_comes() -> None:
    one = One()
    one.add([1])
    one.handed_out()
    one.nack((1, None, NOW_MS), (6, None, 0), (6, 2, 0), delay_ms=1)
    one.state.close(LISTENER)
    one.due(NOW_MS + 1)
    assert len(one.state.nacks) == 0
    one.topic.open(one.state, LISTENER)
    assert one.topic.catch_up(one.state, 100) == []
    found = one.listed(one.state.hand_out(LISTENER, 100))
    assert sorted(found, key=str) == sorted([(1, None, NOW_MS, 1), (6, None, 0, 1), (6, 2, 0, 1)], key=str)


def test_who_comes_is_given_what_lies_behind_many_that_wait_in_turns_of_bounded_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeding, "LOOKED_AT_MAX", 10)
    one = One()
    one.add(range(80))
    one.nack(*[row[:3] for row in one.handed_out(limit=70)], delay_ms=1_000)
    one.state.close(LISTENER)
    one.topic.open(one.state, LISTENER)
    turns = 0
    while not one.state.ready_rows:
        assert one.topic.catch_up(one.state, 5) == []
        assert one.state.reader is not None, "there is more to derive"
        turns += 1
    assert turns == 70 // 10 + 1
    assert [row[0] for row in one.handed_out()] == list(range(70, 75))


def test_a_full_ready_leaves_redeliveries_where_they_are_until_there_is_room() -> None:
    one = One()
    one.add(range(150))
    first = one.handed_out(limit=100)
    one.nack(*[row[:3] for row in first[:10]], delay_ms=1)
    one.add(range(200, 350))
    one.due()
    while one.state.reader is not None and not one.state.is_full:
        one.topic.catch_up(one.state, 100)
    one.due(NOW_MS + 1)
    assert (len(one.state.nacks), one.topic.next_redelivery_ms()) == (10, None)
    one.state.hand_out(LISTENER, 80)
    assert one.topic.next_redelivery_ms() == NOW_MS + 1
    assert [row[0] for row in one.handed_out(NOW_MS + 1)[:10]] == list(range(10))


def test_a_trim_takes_messages_of_batches_and_nacked_positions() -> None:
    one = One()
    one.add([1, 2])
    one.handed_out()
    one.nack((1, None, NOW_MS), (2, 3, NOW_MS), (5, None, 0), (9, 1, 0), delay_ms=10)
    for departure in one.topic.trim(LedgerRanges(u64([7]), u64([5])), None):
        assert departure is not None
        one.apply(departure.records())
    assert (one.state.backlog, len(one.state.nacks)) == (1, 1)
    assert one.handed_out(NOW_MS + 10) == [(9, 1, 0, 1)]


def test_held_positions_that_are_nacked_stay_so() -> None:
    one = One()
    one.add([1, 2])
    one.handed_out()
    one.nack((1, None, NOW_MS), delay_ms=10)
    one.topic.open(one.state, 8)
    found, _ = one.topic.find_in_backlog(one.state, one.claims([(1, None, NOW_MS), (2, None, NOW_MS)]), {})
    assert one.topic.hold(one.state, 8, found).tolist() == (found.rows.entry_id == 2).tolist()
    assert one.handed_out(NOW_MS + 10) == [(1, None, NOW_MS, 1)]
