"""Trimming, one story at a time: what leaves, for whom, and that it stays so after a crash."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.backlog.dead_letter_rows import DeadLetterRows
from daemon.core.decisions import departures
from daemon.core.decisions.departures import LedgerRanges
from storage_backends.formats.slot_format import DeadLetterReason, GoneRecord, WaiveRecord
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of
from tests.daemon.core.decisions.test_topic import NOW_MS, P, Q, R, all_of, handed, opened, with_subscriptions

U64_MAX = (1 << 64) - 1


def upto(*ledgers: Position, all_lower: bool = False) -> LedgerRanges:
    columns = np.array(ledgers, np.uint64).reshape(-1, 2).T.copy()
    return LedgerRanges(columns[0], columns[1], all_lower_ledgers=all_lower)


def left_in(topic: JournaledTopic) -> set[Position]:
    found: set[Position] = set()
    for bucket in topic.core.index.buckets:
        columns = topic.core.index.pages.positions(np.array(list(bucket.present), np.uint64))
        found |= set(zip(*(column.tolist() for column in columns), strict=True))
    return found


def test_a_trim_drops_a_ledger_up_to_an_entry_and_lower_ledgers_only_on_request() -> None:
    topic = with_subscriptions(1)
    every = [(6, 9), (7, 1), (7, 2), (7, 1 << 32), (7, 3 << 32), (8, 0)]
    topic.add(every[::2], NOW_MS + 5)
    topic.seal()
    topic.add(every[1::2], NOW_MS + 5)
    assert topic.trim_at_once(upto((7, 1), (9, 5))) == 1
    assert left_in(topic) == {*every} - {(7, 1)}
    assert topic.trim_at_once(upto((7, 1 << 32))) == 2
    assert left_in(topic) == {(6, 9), (7, 3 << 32), (8, 0)}
    assert topic.trim_at_once(upto((7, 5), all_lower=True)) == 1
    topic.crash_and_recover()
    assert left_in(topic) == {(7, 3 << 32), (8, 0)}
    assert topic.trim_at_once() == 2
    assert topic.trim_at_once() == 0


def test_what_is_trimmed_leaves_every_hand_and_every_count_and_may_be_added_again() -> None:
    topic = with_subscriptions(2)
    one, two = opened(topic, 1), opened(topic, 2)
    topic.add([P, Q, R], [NOW_MS, NOW_MS, NOW_MS + 9])
    topic.pass_all()
    topic.catch_up(one)
    assert len(one.hand_out(1, 1)) == 1
    topic.catch_up(two)
    assert topic.trim_at_once(upto((7, 2))) == 2
    assert (one.backlog, one.ready_rows, len(one.in_flight)) == (0, 0, 0)
    assert (two.backlog, two.ready_rows) == (0, 0)
    assert topic.acknowledge(one, [(P, NOW_MS)]) == 1
    assert topic.add([P], NOW_MS + 1).accepted == 1
    topic.now_ms += 1
    assert handed(topic, one) == handed(topic, two) == [(NOW_MS + 1, *P)]


def test_what_is_trimmed_for_one_subscription_is_still_owed_to_the_others() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    topic.pass_all()
    (departure,) = topic.trim(upto((7, 9)), 1)
    assert [type(record) for records in departure.slots() for record in records] == [WaiveRecord]
    assert topic.trim_at_once(upto((7, 9)), 1) == 2
    topic.create_subscription()
    for again in range(2):
        topic.now_ms = NOW_MS + 9
        one, two, three = (opened(topic, number) for number in (1, 2, 3))
        assert handed(topic, one) == [], f"after {again} crashes"
        assert (one.backlog, two.backlog, three.backlog) == (0, 2, 1)
        assert handed(topic, two) == [(NOW_MS, *P), (NOW_MS + 9, *Q)]
        assert handed(topic, three) == [(NOW_MS + 9, *Q)]
        topic.crash_and_recover()


def test_what_is_trimmed_for_each_subscription_is_gone_with_the_last_of_them() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    assert topic.trim_at_once(upto((7, 1)), 1) == 1
    (departure,) = topic.trim(None, 2)
    ((waive, gone),) = departure.slots()
    assert isinstance(waive, WaiveRecord)
    assert isinstance(gone, GoneRecord)
    topic.commit_together((waive, gone))
    assert left_in(topic) == {Q}
    topic.now_ms += 9
    assert handed(topic, opened(topic, 1)) == [(NOW_MS + 9, *Q)]
    assert topic.core.subscriptions[2].backlog == 0


def test_a_trim_for_the_only_subscription_makes_gone_what_is_still_pending() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 9)
    assert topic.trim_at_once(None, 1) == 1
    assert left_in(topic) == set()


def test_a_waived_row_is_gone_when_the_others_have_acknowledged_it_or_are_deleted() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], [NOW_MS, NOW_MS + 9])
    topic.trim_at_once(None, 1)
    two = opened(topic, 2)
    topic.acknowledge(two, all_of(handed(topic, two)))
    assert left_in(topic) == {Q}
    topic.delete_subscription(2, topic.gone_with(2))
    assert left_in(topic) == set()
    topic.crash_and_recover()
    assert left_in(topic) == set()


def test_a_trim_while_a_bucket_is_being_sealed_is_in_the_sealed_bucket() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q, R], NOW_MS + 9)
    topic.begin_seal()
    topic.trim_at_once(upto((7, 1)))
    topic.trim_at_once(upto((8, U64_MAX)), 1)
    topic.finish_seal(topic.write_seal())
    for _ in range(2):
        assert left_in(topic) == {Q, R}
        topic.now_ms = NOW_MS + 9
        assert handed(topic, opened(topic, 1)) == [(NOW_MS + 9, *Q)]
        assert len(handed(topic, opened(topic, 2))) == 2
        topic.take_checkpoint()
        topic.crash_and_recover()


def test_adds_after_a_trim_are_not_affected_by_it() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 9)
    (departure,) = topic.trim(upto((7, 9)), None)
    for records in departure.slots():
        topic.commit_together(records)
    topic.stage_add(batch_of([P, Q], deliver_at_ms=[NOW_MS + 10] * 2))
    topic.commit()
    assert left_in(topic) == {P, Q}


def test_a_backlog_that_is_being_read_again_is_trimmed_too() -> None:
    topic = with_subscriptions(1)
    rows = [(7, entry) for entry in range(20)]
    topic.add(rows, [NOW_MS - 20 + entry for _, entry in rows])
    topic.seal(near_ms=0)
    topic.pass_all()
    state = opened(topic, 1)
    topic.catch_up(state, limit=2)
    first = len(state.hand_out(1, 100))
    assert 0 < first < 10
    topic.trim_at_once(upto((7, 9)))
    assert state.backlog == 10
    assert [row[1:] for row in handed(topic, state)] == rows[10:]


@pytest.mark.parametrize(("rows_max", "bytes_max", "slots_min"), [(3, 1 << 20, 4), (1 << 20, 700, 3)])
def test_the_slots_of_a_large_trim_are_bounded_and_each_leaves_a_state_that_holds(
    rows_max: int, bytes_max: int, slots_min: int
) -> None:
    slots_of_a_large_trim_hold(rows_max=rows_max, bytes_max=bytes_max, slots_min=slots_min)


def slots_of_a_large_trim_hold(*, rows_max: int, bytes_max: int, slots_min: int) -> None:
    topic = with_subscriptions(2)
    rows = [(ledger, 1) for ledger in range(10)]
    topic.add(rows, NOW_MS + 5)
    topic.trim_at_once(upto(*rows[::2]), 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departures, "SLOT_ROWS_MAX", rows_max)
        patch.setattr(departures, "SLOT_BYTES_MAX", bytes_max)
        (departure,) = topic.trim(None, 2)
        slots = list(departure.slots())
    assert len(slots) >= slots_min
    gone = set()
    for records in slots:
        assert 1 <= sum(record.row_count for record in records) <= rows_max
        topic.commit_together(records)
        gone |= {
            bitmap.ledger_id for record in records if isinstance(record, GoneRecord) for bitmap in record.positions
        }
        assert left_in(topic) == {at for at in rows if at[0] not in gone}
    assert gone == {0, 2, 4, 6, 8}


# ---- portions


class Portions(NamedTuple):
    """What one trim drops at a time, at most."""

    rows: int
    bucket_pages: int
    looks: int


def in_portions(patch: pytest.MonkeyPatch, most: Portions) -> None:
    patch.setattr(departures, "PORTION_ROWS", most.rows)
    patch.setattr(departures, "DEAD_LETTER_PORTION_ROWS", most.rows)
    patch.setattr(departures, "_BUCKET_PAGES_MAX", most.bucket_pages)
    patch.setattr(departures, "LOOKS_A_TURN", most.looks)
    patch.setattr(departures, "LOOKS_A_PORTION", 4 * most.looks)


portions = st.builds(Portions, st.integers(1, 7), st.sampled_from([1, 4, 40_000]), st.sampled_from([1, 3, 1_000]))
entries = st.one_of(st.integers(0, 9), st.sampled_from([(1 << 32) + 1, 3 << 32]))
everywhere = st.sets(st.tuples(st.sampled_from([6, 7, 8]), entries), min_size=1, max_size=20)


@given(
    buckets=st.lists(everywhere, min_size=1, max_size=4),
    asked=st.one_of(st.none(), st.tuples(st.sampled_from([7, 8]), entries, st.booleans())),
    most=portions,
    after=st.data(),
)
def test_a_trim_drops_in_portions_what_was_there_and_nothing_that_is_added_between_them(
    buckets: list[set[Position]], asked: tuple[int, int, bool] | None, most: Portions, after: st.DataObject
) -> None:
    topic = with_subscriptions(1)
    for rows in buckets:
        topic.add(sorted(rows), NOW_MS + 5)
        topic.seal()
    topic.add(sorted(buckets[0]), NOW_MS + 5)
    before = left_in(topic)
    ranges = None if asked is None else upto(asked[:2], all_lower=asked[2])

    def is_asked(at: Position) -> bool:
        if asked is None:
            return True
        return (at[0] == asked[0] and at[1] <= asked[1]) or (asked[2] and at[0] < asked[0])

    dropped, added = 0, set[Position]()
    with pytest.MonkeyPatch.context() as patch:
        in_portions(patch, most)
        for departure in topic.trim(ranges, None):
            assert departure.rows <= most.rows
            dropped += departure.rows
            for records in departure.slots():
                topic.commit_together(records)
            again = after.draw(st.sets(st.tuples(st.sampled_from([6, 7, 8]), entries), max_size=2))
            fresh = again - left_in(topic)
            topic.add(sorted(fresh), NOW_MS + 5) if fresh else None
            added |= fresh
    assert dropped == len({at for at in before if is_asked(at)})
    assert left_in(topic) == {at for at in before if not is_asked(at)} | added
    topic.crash_and_recover()
    assert left_in(topic) == {at for at in before if not is_asked(at)} | added


def test_an_index_that_is_no_more_has_no_further_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    in_portions(monkeypatch, Portions(1, 40_000, 1_000))
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS + 5, subscription_id=2)
    trim = topic.trim(None, None)
    (records,) = next(trim).slots()
    topic.commit_together(records)
    topic.delete_subscription(2, topic.gone_with(2))
    assert list(trim) == []


# ---- dead letters


def dead_lettered(topic: JournaledTopic, ranges: LedgerRanges | None, number: int) -> list[DeadLetterRows]:
    """Trims with dead letters; those of the subscription before a crash, and after it."""
    state = topic.core.subscriptions[number]
    topic.commit()
    for departure in topic.core.trim(ranges, number, dead_letter=True):
        if departure is not None:
            for records in topic.core.dead_lettering.stage_trimmed(state, departure, now_ms=topic.now_ms):
                topic.commit_together(records)
    before = state.dead_letters.freeze().rows()
    topic.crash_and_recover()
    return [before, topic.core.subscriptions[number].dead_letters.freeze().rows()]


def test_what_a_subscription_is_owed_becomes_dead_letters_and_nothing_else() -> None:
    topic = with_subscriptions(2)
    one, two = opened(topic, 1), opened(topic, 2)
    topic.add([P, Q, R], [NOW_MS, NOW_MS, NOW_MS + 9])
    topic.add([(7, 5), (7, 6)], NOW_MS + 9, subscription_id=1)
    topic.add([(7, 7)], NOW_MS + 9, subscription_id=2)
    topic.pass_all()
    topic.catch_up(two)
    topic.catch_up(one)
    assert len(one.hand_out(1, 10)) == 2
    topic.acknowledge(one, [(P, NOW_MS)])
    for rows in dead_lettered(topic, upto((7, 9)), 1):
        assert list(zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), strict=True)) == [Q, (7, 5), (7, 6)]
        assert rows.reason.tolist() == [DeadLetterReason.TRIMMED] * 3
        assert not rows.deliver_at_ms.any()
        assert rows.dead_at_ms.tolist() == [NOW_MS] * 3
    one, two = opened(topic, 1), opened(topic, 2)
    topic.now_ms += 9
    assert [row[1:] for row in handed(topic, one)] == [R]
    assert [row[1:] for row in handed(topic, two)] == [P, Q, (7, 7), R]
    assert (one.backlog, two.backlog) == (1, 4)


def test_with_the_last_subscription_a_dead_letter_is_gone_from_the_index_and_may_be_replayed() -> None:
    topic = with_subscriptions(1)
    topic.add([P, Q], NOW_MS)
    topic.pass_all()
    for rows in dead_lettered(topic, upto(P), 1):
        assert rows.entry_id.tolist() == [P[1]]
    assert left_in(topic) == {Q}
    one = topic.core.subscriptions[1]
    letters = one.dead_letters.freeze().rows()
    records, there = topic.core.dead_lettering.stage_replay(one, letters, NOW_MS + 1)
    assert there == 0
    topic.commit_together(records)
    topic.now_ms += 1
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *Q), (NOW_MS + 1, *P)]


def test_a_waived_dead_letter_counts_once_when_the_others_are_deleted_before_a_replay_of_the_journal() -> None:
    topic = with_subscriptions(2)
    topic.add([P, Q], NOW_MS)
    topic.pass_all()
    dead_lettered(topic, upto(P), 1)
    topic.delete_subscription(2, topic.gone_with(2))
    topic.crash_and_recover()
    topic.pass_all()
    one = opened(topic, 1)
    assert (one.backlog, len(one.dead_letters)) == (1, 1)
    assert handed(topic, one) == [(NOW_MS, *Q)]


def owed_to_nobody(act: Callable[[JournaledTopic], None] = lambda topic: None) -> JournaledTopic:
    """P waits when the second subscription is created after its time, and then only the first one is owed it."""
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS + 5)
    topic.now_ms = NOW_MS + 20
    second = topic.create_subscription()
    assert second.stored.since_ms >= NOW_MS + 20
    # The clock steps back.
    topic.now_ms = NOW_MS
    act(topic)
    topic.delete_subscription(1, topic.gone_with(1))
    assert left_in(topic) == {P}
    topic.now_ms = NOW_MS + 50
    return topic


def test_a_row_that_nobody_is_owed_when_it_comes_due_is_gone() -> None:
    topic = owed_to_nobody()
    topic.pass_all()
    topic.commit()
    assert left_in(topic) == set()
    topic.add([P], NOW_MS + 60)
    topic.crash_and_recover()
    topic.now_ms += 60
    assert handed(topic, opened(topic, 2)) == [(NOW_MS + 60, *P)]


def test_a_row_that_one_subscription_is_not_owed_stays_for_the_other() -> None:
    topic = with_subscriptions(1)
    topic.add([P], NOW_MS)
    topic.pass_all()
    topic.create_subscription()
    topic.crash_and_recover()
    topic.pass_all()
    topic.commit()
    assert handed(topic, opened(topic, 1)) == [(NOW_MS, *P)]
    assert handed(topic, opened(topic, 2)) == []


def test_what_nobody_is_owed_is_found_again_after_a_crash() -> None:
    topic = owed_to_nobody()
    topic.pass_all()
    topic.crash_and_recover()
    assert left_in(topic) == {P}
    topic.pass_all()
    topic.commit()
    assert left_in(topic) == set()


def test_without_any_subscription_everything_is_kept_for_the_first_one() -> None:
    topic = with_subscriptions(0)
    topic.add([P], NOW_MS)
    topic.pass_all()
    assert topic.core.take_not_owed() == []
    topic.commit()
    assert left_in(topic) == {P}


def test_a_row_of_time_0_is_stored_at_1_and_owed_to_everybody() -> None:
    topic = with_subscriptions(0)
    outcome = topic.add([P, Q], [0, 1])
    assert (outcome.raised_index.tolist(), outcome.raised_deliver_at_ms.tolist()) == ([0], [1])
    topic.create_subscription()
    assert handed(topic, opened(topic, 1)) == [(1, *P), (1, *Q)]
