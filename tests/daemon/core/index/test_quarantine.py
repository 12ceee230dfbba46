"""Damaged buckets, one story at a time: what is missing, what heals it, and that it stays so after a crash."""

from __future__ import annotations

import dataclasses

import pytest

from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.segments import SegmentRange
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, batch_of
from tests.daemon.core.decisions.test_topic import NOW_MS, P, R, all_of, handed, opened, with_subscriptions
from tests.daemon.core.decisions.test_trimming import dead_lettered, left_in, upto

U64_MAX = (1 << 64) - 1
ROWS = [(7, entry) for entry in range(10)]


def sealed(subscriptions: int = 1, rows: list[Position] = ROWS) -> tuple[JournaledTopic, str]:
    """A topic with one sealed bucket, half of whose rows are due."""
    topic = with_subscriptions(subscriptions)
    topic.add(rows, [NOW_MS - 5 + number for number in range(len(rows))])
    topic.seal()
    topic.pass_all()
    (name,) = topic.core.index.sealed
    return topic, name


def missing(topic: JournaledTopic) -> int:
    return sum(needed.rows for needed in topic.core.rebuild_needed())


def test_the_rows_of_a_damaged_bucket_leave_and_are_reported_and_the_others_are_served() -> None:
    topic, name = sealed()
    topic.add([R], NOW_MS)
    state = opened(topic, 1)
    assert len(handed(topic, state)) == 7
    topic.quarantine(name, "a CRC32C that is not its own")
    assert (state.backlog, len(state.in_flight), topic.core.index.pending_rows) == (1, 1, 0)
    expected = RebuildNeeded(7, 7, 10, name, "a CRC32C that is not its own", positions_known=True)
    assert topic.core.rebuild_needed() == (expected,)
    assert topic.acknowledge(state, [((7, 0), NOW_MS - 5), (R, NOW_MS)]) == 1
    topic.crash_and_recover()
    assert topic.core.rebuild_needed() == (expected,)
    assert handed(topic, opened(topic, 1)) == []


def test_a_bucket_that_is_found_damaged_holds_up_nobody_before_its_manifest_says_so() -> None:
    topic, name = sealed()
    indexes = topic.core.indexes
    assert [bucket.name for bucket in indexes.readable] == [name]
    indexes.cache.discard_bucket(name)
    topic.core.index.leave_out(name)
    assert not indexes.readable
    assert indexes.wanted_segments(NOW_MS + 100) == []
    assert not indexes.has_unread(1, NOW_MS + 100)
    assert indexes.pending_rows == 4, "its rows stay where they are"
    topic.quarantine(name)
    assert not indexes.readable


def test_a_bucket_that_was_merged_away_holds_up_keys_until_what_took_its_place_is_served() -> None:
    topic = with_subscriptions(1)
    topic.add(ROWS, [NOW_MS + 10 + number for number in range(len(ROWS))])
    topic.seal()
    indexes = topic.core.indexes
    (name,) = topic.core.index.sealed
    indexes.cache.discard_bucket(name)
    topic.core.index.leave_to_merged(name)
    assert not indexes.readable
    assert indexes.wanted_segments(NOW_MS + 100) == []
    topic.now_ms = NOW_MS + 100
    assert topic.pass_due(1_000) == 0
    assert indexes.has_unread(1, topic.now_ms)
    assert indexes.first_unpassed(1) == (NOW_MS + 10, 0, 0)
    topic.core.drop(name)
    assert not indexes.has_unread(1, topic.now_ms)
    assert indexes.first_unpassed(1) is None


def test_rows_in_memory_of_a_bucket_that_was_merged_away_are_as_unread_as_others() -> None:
    topic = with_subscriptions(1)
    topic.add(ROWS, [NOW_MS + 10 + number for number in range(len(ROWS))])
    topic.seal()
    indexes = topic.core.indexes
    (bucket,) = topic.core.index.sealed.values()
    topic.now_ms = NOW_MS + 12
    topic.pass_all()
    assert bucket.passed_rows == 3
    assert bucket.settle(indexes.cache) is not None
    topic.core.index.leave_to_merged(bucket.name)
    assert indexes.next_due_ms() == NOW_MS + 13
    assert indexes.next_due_to_read_ms() is None
    assert not indexes.has_unread(1, NOW_MS + 12)
    assert indexes.unread_segments(NOW_MS + 12) == []
    assert indexes.has_unread(1, NOW_MS + 13)
    assert indexes.unread_segments(NOW_MS + 13) == [SegmentRange(bucket.name, 0, 0)]
    topic.core.drop(bucket.name)
    assert indexes.next_due_ms() is None
    assert indexes.unread_segments(NOW_MS + 100) == []


def test_adding_the_range_again_heals_it_without_doubling() -> None:
    topic, name = sealed(2)
    one = opened(topic, 1)
    topic.acknowledge(one, all_of(handed(topic, one)))
    topic.quarantine(name)
    outcome = topic.add(ROWS, NOW_MS + 9)
    assert (outcome.accepted, outcome.duplicates) == (10, 0)
    assert topic.core.rebuild_needed() == ()
    assert topic.add(ROWS, NOW_MS + 9).duplicates == 10
    for with_checkpoint in (False, True):
        if with_checkpoint:
            topic.take_checkpoint()
        topic.crash_and_recover()
        topic.now_ms = NOW_MS + 9
        assert topic.core.rebuild_needed() == ()
        assert sorted(handed(topic, opened(topic, 2))) == [(NOW_MS + 9, *at) for at in ROWS]
    topic.seal()
    topic.crash_and_recover()
    assert topic.core.rebuild_needed() == ()
    assert left_in(topic) == {*ROWS}


def test_what_was_acknowledged_before_the_damage_is_not_missing_though_only_the_journal_says_so() -> None:
    topic, name = sealed(2)
    one, two = opened(topic, 1), opened(topic, 2)
    for state in (one, two):
        rows = handed(topic, state)
        topic.acknowledge(state, all_of(rows)[: 3 if state is one else 2])
    topic.quarantine(name)
    assert missing(topic) == 8
    topic.crash_and_recover()
    assert missing(topic) == 8
    topic.delete_subscription(2, topic.gone_with(2))
    assert missing(topic) == 7


def test_an_acknowledgement_that_is_staged_when_the_bucket_is_found_damaged_counts() -> None:
    topic, name = sealed()
    state = opened(topic, 1)
    handed(topic, state)
    topic.stage_add(batch_of([R], deliver_at_ms=[NOW_MS + 1]))
    topic.stage_acknowledge(state, [((7, 0), NOW_MS - 5)])
    topic.quarantine(name)
    # In one slot with the acknowledgement, which comes after the adds.
    outcome = topic.stage_add(batch_of([(7, 0), (7, 1)], deliver_at_ms=[NOW_MS + 9] * 2))
    assert (outcome.accepted, outcome.duplicates) == (1, 1)
    topic.commit()
    assert (state.backlog, missing(topic)) == (0, 8)
    assert topic.add([(7, 0)], NOW_MS + 9).accepted == 1
    topic.now_ms += 9
    assert sorted(handed(topic, state)) == [(NOW_MS + 1, *R), (NOW_MS + 9, 7, 0), (NOW_MS + 9, 7, 1)]
    assert (state.backlog, missing(topic)) == (3, 8)


def test_a_trim_and_a_clear_take_what_is_missing() -> None:
    topic, name = sealed(2)
    topic.quarantine(name)
    assert topic.trim_at_once(upto((7, 3))) == 4
    assert missing(topic) == 6
    assert topic.trim_at_once(upto((7, 5)), 1) == 2
    assert missing(topic) == 6
    assert topic.trim_at_once(upto((7, 5)), 2) == 2
    assert missing(topic) == 4
    topic.crash_and_recover()
    assert missing(topic) == 4
    assert topic.trim_at_once() == 4
    assert topic.core.rebuild_needed() == ()


def test_a_backlog_that_is_being_read_again_goes_on_without_a_damaged_bucket() -> None:
    topic, name = sealed()
    topic.add([P, R], NOW_MS)
    topic.seal()
    topic.pass_all()
    state = opened(topic, 1)
    topic.catch_up(state, limit=6)
    state.hand_out(1, 1)
    assert state.ready_rows
    topic.quarantine(name)
    assert state.ready_rows == 0
    assert [row[1:] for row in handed(topic, state)] == [R]
    assert state.backlog == 1


# ---- nobody knows which positions are missing


def headless(subscriptions: int = 1) -> tuple[JournaledTopic, str]:
    """A topic whose bucket is damaged at its head, after a restart: two of ten rows are gone, as its progress says."""
    topic, name = sealed(subscriptions)
    state = opened(topic, 1)
    topic.acknowledge(state, all_of(handed(topic, state))[:2])
    topic.take_checkpoint()
    # A row of the same ledger that was never in the bucket.
    topic.add([(7, 100)], NOW_MS + 9)
    topic.acknowledge(state, [((7, 2), NOW_MS - 3)])
    topic.quarantine(name)
    topic.store.put(name, b"no bucket")
    topic.crash_and_recover()
    return topic, name


def test_rows_whose_positions_nobody_knows_are_counted_exactly_after_the_tail_is_replayed() -> None:
    topic, name = headless()
    (needed,) = topic.core.rebuild_needed()
    assert dataclasses.replace(needed, damage="") == RebuildNeeded(7, 7, 7, name, "", positions_known=False)


def test_what_left_in_a_page_of_which_nothing_is_stored_counts_for_rows_that_nobody_knows() -> None:
    rows = [(7, 0), (8, 0), (9, 0)]
    topic, name = sealed(rows=rows)
    state = opened(topic, 1)
    topic.acknowledge(state, all_of(handed(topic, state))[:1])
    topic.trim_at_once(upto((8, 0)))
    topic.quarantine(name)
    topic.store.put(name, b"no bucket")
    topic.crash_and_recover()
    assert missing(topic) == 1
    assert topic.core.index.quarantined[name].missing_rows == 1


def test_any_position_of_its_ledgers_that_is_added_counts_as_one_of_those_that_nobody_knows() -> None:
    topic, _ = headless()
    topic.add([(6, 1), (8, 1), (7, 50)], NOW_MS + 9)
    assert missing(topic) == 6
    topic.crash_and_recover()
    assert missing(topic) == 6
    assert topic.add([(7, 50), (7, 100)], NOW_MS + 9).duplicates == 2
    topic.take_checkpoint()
    topic.crash_and_recover()
    assert missing(topic) == 6
    topic.add(ROWS[3:], NOW_MS + 9)
    assert topic.core.rebuild_needed() == ()
    assert len(left_in(topic)) == 11


def test_what_was_acknowledged_of_a_bucket_that_nobody_can_read_says_nothing_of_a_row_that_was_added_since() -> None:
    topic, _ = headless(2)
    # Others of its ledger count for all that is missing.
    topic.add([(7, 50 + number) for number in range(10)], NOW_MS + 9)
    assert missing(topic) == 0
    topic.add(ROWS[:2], NOW_MS + 9)
    topic.crash_and_recover()
    topic.delete_subscription(2, topic.gone_with(2))
    assert {*ROWS[:2]} <= left_in(topic)


def test_what_only_the_log_says_of_a_bucket_that_nobody_can_read_is_forgotten_when_it_is_added_again() -> None:
    topic, name = sealed(2)
    one = opened(topic, 1)
    topic.acknowledge(one, all_of(handed(topic, one)))
    topic.quarantine(name)
    topic.store.put(name, b"no bucket")
    topic.crash_and_recover()
    topic.add(ROWS, NOW_MS + 9)
    topic.take_checkpoint()
    topic.crash_and_recover()
    topic.delete_subscription(2, topic.gone_with(2))
    assert left_in(topic) == {*ROWS}


@pytest.mark.parametrize(
    ("ranges", "healed"),
    [
        (None, True),
        (upto((8, 0), all_lower=True), True),
        (upto((7, U64_MAX)), True),
        (upto((7, U64_MAX - 1)), False),
        (upto((7, 5), all_lower=True), False),
    ],
    ids=["clear", "lower ledgers", "its ledger", "almost its ledger", "part of its ledger"],
)
def test_a_trim_of_all_its_ledgers_takes_what_nobody_knows(ranges: object, healed: bool) -> None:
    topic, _ = headless()
    rows = topic.trim_at_once(ranges)  # type: ignore[arg-type]
    assert missing(topic) == (0 if healed else 7)
    assert rows == len({(7, 100)} - left_in(topic)) + (7 if healed else 0)
    topic.crash_and_recover()
    assert missing(topic) == (0 if healed else 7)
    assert len(topic.core.index.pages) == len({at[0] for at in left_in(topic)} | {7})


def test_a_trim_for_one_of_two_subscriptions_does_not_take_what_nobody_knows() -> None:
    topic, _ = headless(2)
    before = missing(topic)
    topic.trim_at_once(None, 1)
    assert missing(topic) == before


def test_what_nobody_knows_of_a_damaged_bucket_becomes_no_dead_letter() -> None:
    topic, _ = headless()
    for rows in dead_lettered(topic, None, 1):
        assert rows.entry_id.tolist() == [100]
    assert missing(topic) == 7
