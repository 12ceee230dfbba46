"""What of ranges is in the index: as ranges, in the order of the request, in bounded answers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import containment
from daemon.core.index.containment import Contained, EntryRanges
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position

NOW_MS = 1_000_000
U64_MAX = (1 << 64) - 1
Range = tuple[int, int, int]
EDGES = (0, 1, 2, 5, 65_535, 65_536, (1 << 32) - 2, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, U64_MAX - 1, U64_MAX)
entries = st.sampled_from(EDGES)
positions = st.sets(st.tuples(st.sampled_from((0, 7, U64_MAX)), entries), max_size=14)
ranges = st.tuples(st.sampled_from((0, 7, 8, U64_MAX)), entries, entries).map(lambda at: (at[0], *sorted(at[1:])))


def request_of(asked: Sequence[Range]) -> EntryRanges:
    columns = np.array(asked, np.uint64).reshape(-1, 3).T.copy()
    return EntryRanges(columns[0], columns[1], columns[2])


def listed(found: EntryRanges) -> list[Range]:
    columns = (found.ledger_id, found.first_entry_id, found.last_entry_id)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def expected_of(rows: set[Position], asked: Sequence[Range]) -> list[Range]:
    found: list[Range] = []
    for ledger, first, last in asked:
        own: list[Range] = []
        for entry in sorted(entry for at, entry in rows if at == ledger and first <= entry <= last):
            if own and own[-1][2] + 1 == entry:
                own[-1] = (ledger, own[-1][1], entry)
            else:
                own.append((ledger, entry, entry))
        found += own
    return found


def asked_until_done(
    topic: JournaledTopic, asked: Sequence[Range], state: SubscriptionState | None, *, ranges_max: int
) -> tuple[list[Range], list[Range], int]:
    """(pending, due, calls), as a caller puts the answers together."""
    pending: list[Range] = []
    due: list[Range] = []
    rest = list(asked)
    for calls in range(1, 1_000):
        answer: Contained = topic.core.contains(request_of(rest), state, ranges_max=ranges_max)
        assert len(answer.pending) + len(answer.due) <= ranges_max
        pending += listed(answer.pending)
        due += listed(answer.due)
        if answer.continuation is None:
            return pending, due, calls
        number, entry = answer.continuation
        assert rest[number][1] <= entry <= rest[number][2]
        assert (number, entry) != (0, rest[0][1]), "an answer without progress"
        rest = [(rest[number][0], entry, rest[number][2]), *rest[number + 1 :]]
    raise AssertionError("a request is never answered in full")


def check(found: Sequence[Range], rows: set[Position], asked: Sequence[Range], *, calls: int) -> None:
    """What was found is what of the rows is asked for; in one answer, in as few ranges as there can be."""
    expected = expected_of(rows, asked)
    assert _each(found) == _each(expected)
    if calls == 1:
        assert found == expected


def _each(found: Sequence[Range]) -> list[Position]:
    return [(ledger, entry) for ledger, first, last in found for entry in range(first, last + 1)]


@pytest.mark.parametrize("scan_rows_max", [1 << 20, 256])
@given(
    buckets=st.lists(st.tuples(positions, st.sampled_from((0, 0, 1, 2))), min_size=1, max_size=4),
    due=positions,
    acknowledged=positions,
    asked=st.lists(ranges, min_size=1, max_size=6),
    ranges_max=st.integers(1, 12),
)
def test_the_answer_is_what_each_position_would_have_been_answered(
    scan_rows_max: int,
    buckets: list[tuple[set[Position], int]],
    due: set[Position],
    acknowledged: set[Position],
    asked: list[Range],
    ranges_max: int,
) -> None:
    """The rows of a bucket are for one subscription, or 0: for all; some are due, in every second bucket."""
    topic = JournaledTopic(now_ms=NOW_MS)
    one, _ = topic.create_subscription(), topic.create_subscription()
    topic.now_ms += 1
    # By index, the positions that are due and that wait.
    held: dict[int, tuple[set[Position], set[Position]]] = {index: (set(), set()) for index in (0, 1, 2)}
    for number, (bucket, index) in enumerate(buckets):
        passed, waiting = held[index]
        if fresh := sorted(bucket - passed - waiting):
            is_due = [at in due and not number % 2 for at in fresh]
            topic.add(fresh, [topic.now_ms if each else topic.now_ms + 10 for each in is_due], index)
            for at, each in zip(fresh, is_due, strict=True):
                (passed if each else waiting).add(at)
            if number % 3:
                topic.seal()
    topic.pass_all()
    topic.acknowledge(one, [(at, topic.now_ms) for at in sorted(acknowledged)])
    # Of the shared index first; that one stays for the other subscription.
    in_shared = acknowledged & held[0][0]
    held[1][0].difference_update(acknowledged - in_shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containment, "SCAN_ROWS_MAX", scan_rows_max)
        for state, indexes, gone in ((None, (0, 1, 2), set()), (one, (0, 1), in_shared)):
            expected_due = set().union(*(held[index][0] - (set() if index else gone) for index in indexes))
            expected_waiting = set().union(*(held[index][1] for index in indexes)) - expected_due
            found_pending, found_due, calls = asked_until_done(topic, asked, state, ranges_max=ranges_max)
            check(found_pending, expected_waiting, asked, calls=calls)
            check(found_due, expected_due, asked, calls=calls)


def test_of_entries_0_to_9_with_1_to_8_delayed_a_cursor_reads_0_and_9() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    topic.create_subscription()
    topic.add([(7, entry) for entry in range(1, 9)], NOW_MS + 5)
    answer = topic.core.contains(request_of([(7, 0, 9)]), None, ranges_max=10)
    assert (listed(answer.pending), listed(answer.due), answer.continuation) == ([(7, 1, 8)], [], None)
    single = topic.core.contains(request_of([(7, entry, entry) for entry in range(10)]), None, ranges_max=10)
    assert listed(single.pending) == [(7, entry, entry) for entry in range(1, 9)]


def test_what_a_subscription_acknowledged_is_not_contained_for_it() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    one, two = topic.create_subscription(), topic.create_subscription()
    topic.now_ms += 1
    topic.add([(7, entry) for entry in range(4)], topic.now_ms)
    topic.pass_all()
    topic.acknowledge(one, [((7, 1), topic.now_ms)])
    asked = request_of([(7, 0, 9)])
    assert listed(topic.core.contains(asked, one, ranges_max=10).due) == [(7, 0, 0), (7, 2, 3)]
    for state in (two, None):
        assert listed(topic.core.contains(asked, state, ranges_max=10).due) == [(7, 0, 3)]


def test_ranges_go_on_in_the_next_page_of_a_ledger_and_ranges_that_overlap_are_answered_each() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    page = 1 << 32
    topic.add([(3, 0), (7, page - 1), (7, page), (8, 0), (7, page + 1)], NOW_MS + 5)
    asked = [(7, 0, U64_MAX), (7, page, page), (6, 0, U64_MAX), (7, page - 1, page)]
    answer = topic.core.contains(request_of(asked), None, ranges_max=10)
    assert listed(answer.pending) == [(7, page - 1, page + 1), (7, page, page), (7, page - 1, page)]


def test_an_answer_that_is_cut_goes_on_where_it_was_cut() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    topic.add([(7, entry) for entry in range(0, 20, 2)], [NOW_MS + 5 * (entry % 3) for entry in range(10)])
    topic.pass_all()
    for ranges_max in (1, 2, 3):
        pending, due, calls = asked_until_done(topic, [(7, 0, 30)], None, ranges_max=ranges_max)
        assert [entry for _, entry, _ in sorted(pending + due)] == [*range(0, 20, 2)]
        assert (len(due), calls) == (4, -(-10 // ranges_max))


def test_a_range_of_millions_of_rows_is_answered_at_once_and_scattered_rows_in_bounded_steps() -> None:
    topic = JournaledTopic(now_ms=NOW_MS)
    rows = 5_000_000
    keys = topic.core.index.pages.intern(*np.array([[7], [0]], np.uint64))
    topic.core.index.mutable.present.add_range(int(keys[0]), int(keys[0]) + rows)
    whole = topic.core.contains(request_of([(7, 0, rows - 1)]), None, ranges_max=10)
    # More rows than one call looks at: two answers, which are neighbours.
    assert listed(whole.pending) == [(7, 0, whole.continuation[1] - 1)] if whole.continuation else False
    assert asked_until_done(topic, [(7, 0, U64_MAX)], None, ranges_max=10)[2] <= 3
    scattered = BitMap64(range(int(keys[0]), int(keys[0]) + (1 << 32), 1 << 17))
    topic.core.index.mutable.present = scattered
    pending, _, calls = asked_until_done(topic, [(7, 0, U64_MAX)], None, ranges_max=100_000)
    assert (len(pending), calls) == (len(scattered), 1)
