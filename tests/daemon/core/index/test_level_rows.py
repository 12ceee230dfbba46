"""Which rows have a delay level: against three plain dictionaries, and in an index."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core import limits
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import delay_levels
from daemon.core.index.delay_levels import DelayLevels, LevelRows, parse
from daemon.core.index.indexes import Indexes
from daemon.core.index.segments import SegmentCache
from daemon.errors import DelayTooLong, InvalidArgument
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AddRecord

NOW_MS = 1_000_000
HOUR_MS = 3_600_000
TABLE = parse("1s 5s 1m", clamp=True, delay_max_ms=HOUR_MS)
LIMITS = limits.RequestLimits(1000, 1000, 255, 10, HOUR_MS)

KEYS = st.sets(st.integers(0, 30), max_size=12)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "pass", "hand out", "remove", "freeze"]), KEYS), max_size=40)


@given(STEPS, st.lists(st.integers(1, 3), min_size=40, max_size=40))
def test_rows_of_a_level_are_pending_then_due_then_handed_out_until_they_are_gone(
    steps: list[tuple[str, set[int]]], levels: list[int]
) -> None:
    rows = LevelRows(lambda asked: asked)
    state: dict[int, tuple[int, str]] = {}
    frozen: list[tuple[tuple[tuple[int, BitMap64], ...], dict[int, set[int]]]] = []
    for (what, keys), level in zip(steps, levels, strict=False):
        if what == "add":
            fresh = keys - state.keys()
            if fresh:
                rows.add(level, BitMap64(fresh))
            state |= dict.fromkeys(fresh, (level, "pending"))
        elif what == "pass":
            rows.passed(BitMap64(keys))
            state |= {key: (of, "due") for key, (of, where) in state.items() if key in keys and where == "pending"}
        elif what == "hand out":
            column = np.array(sorted(keys), np.uint64)
            found = {of: set(column[mask].tolist()) for of, mask in rows.handed_out(column)}
            first = {key: of for key, (of, where) in state.items() if key in keys and where == "due"}
            assert found == {of: {key for key in first if first[key] == of} for of in first.values()}
            state |= {key: (of, "handed out") for key, of in first.items()}
        elif what == "remove":
            rows.remove(BitMap64(keys))
            state = {key: each for key, each in state.items() if key not in keys}
        else:
            frozen.append((rows.freeze(), by_level(state)))
        pending = [of for of, where in state.values() if where == "pending"]
        assert dict(rows.pending_rows) == {of: pending.count(of) for of in pending}
        assert bool(rows) == bool(state)
    for sets, expected in frozen:
        assert joined(sets) == expected, "what was frozen does not change"


def by_level(state: dict[int, tuple[int, str]]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for key, (level, _) in state.items():
        found.setdefault(level, set()).add(key)
    return found


def joined(sets: tuple[tuple[int, BitMap64], ...]) -> dict[int, set[int]]:
    found: dict[int, set[int]] = {}
    for level, keys in sets:
        assert not found.get(level, set()) & set(keys)
        found.setdefault(level, set()).update(keys)
    return found


def test_what_is_restored_is_pending_and_without_a_row_nothing() -> None:
    rows = LevelRows(lambda asked: asked & BitMap64([1, 2]))
    rows.restore(4, BitMap64([2, 3]))
    rows.restore(5, BitMap64([3]))

    assert delay_levels.pending_rows([rows, rows]) == {4: 2}


# ---- in an index


def indexes() -> Indexes:
    return Indexes(SegmentCache(1 << 20), now_ms=NOW_MS)


def rows_of(deliver_at_ms: int, *entries: int) -> Rows:
    entry_id = np.array(entries, np.uint64)
    return Rows(np.full(len(entries), deliver_at_ms, np.uint64), np.full(len(entries), 7, np.uint64), entry_id)


def test_an_index_counts_what_of_a_level_is_pending_until_it_is_due_or_gone() -> None:
    topic = indexes()
    index = topic.shared
    index.add(rows_of(NOW_MS + 5, 1, 2, 3), 1, elapsed_ms=0, level=2)
    index.add(rows_of(NOW_MS + 900, 4, 5), 1, elapsed_ms=0, level=2)
    index.add(rows_of(NOW_MS + 900, 6), 1, elapsed_ms=0)
    assert dict(index.levels.pending_rows) == {2: 5}

    topic.pass_due(NOW_MS + 5, 100)
    assert dict(index.levels.pending_rows) == {2: 2}

    ledger, entries = np.array([7, 7], np.uint64), np.array([1, 4], np.uint64)
    index.remove(BitMap64(index.pages.find(ledger, entries).tolist()))
    assert dict(index.levels.pending_rows) == {2: 1}
    kept = {key & 0xFFFF for _, keys in index.levels.freeze() for key in keys}
    assert kept == {2, 3, 5}


def test_rows_without_a_level_leave_nothing_behind() -> None:
    topic = indexes()
    topic.shared.add(rows_of(NOW_MS + 5, 1, 2, 3), 1, elapsed_ms=0)
    topic.pass_due(NOW_MS + 5, 100)

    assert not topic.shared.levels
    assert topic.shared.levels.freeze() == ()


# ---- requests


def topic() -> TopicState:
    return TopicState("t", "id", 1, [], now_ms=NOW_MS, cache=SegmentCache(1 << 20), ready_rows_max=100)


def batch(*levels: int, return_already_due: bool = False) -> AddBatch:
    rows = len(levels)
    return AddBatch(
        ledger_id=np.full(rows, 7, np.uint64),
        entry_id=np.arange(rows, dtype=np.uint64),
        deliver_at_ms=None,
        delay_ms=None,
        key_hash=None,
        return_already_due=return_already_due,
        delay_level=np.array(levels, np.int32),
    )


def by_record(records: tuple[AddRecord, ...]) -> list[tuple[int, list[int], list[int]]]:
    return [
        (record.delay_level, record.rows.entry_id.tolist(), (record.rows.deliver_at_ms - np.uint64(NOW_MS)).tolist())
        for record in records
    ]


def staged(given: AddBatch, levels: DelayLevels = TABLE) -> list[tuple[int, list[int], list[int]]]:
    records, outcome = topic().stage_add(given, now_ms=NOW_MS, request_limits=LIMITS, levels=levels)
    assert outcome.accepted == sum(len(record.rows) for record in records)
    assert all(record.subscription_id == 0 for record in records)
    return by_record(records)


def test_a_request_of_one_level_is_one_record() -> None:
    assert staged(batch(2, 2, 2)) == [(2, [0, 1, 2], [5_000] * 3)]


def test_each_level_of_a_request_is_a_record_of_its_own() -> None:
    assert staged(batch(3, 1, 3, 9, 2)) == [
        (1, [1], [1_000]),
        (2, [4], [5_000]),
        (3, [0, 2, 3], [60_000, 60_000, 60_000]),
    ]


def test_level_0_is_due_at_once_and_no_level() -> None:
    records, outcome = topic().stage_add(batch(0, 1), now_ms=NOW_MS, request_limits=LIMITS, levels=TABLE)

    assert by_record(records) == [(0, [0], [0]), (1, [1], [1_000])]
    assert outcome.late_on_arrival == 1


def test_level_0_is_returned_where_the_request_wants_back_what_is_due() -> None:
    given = batch(1, 0, return_already_due=True)
    records, outcome = topic().stage_add(given, now_ms=NOW_MS, request_limits=LIMITS, levels=TABLE)

    assert by_record(records) == [(1, [0], [1_000])]
    assert outcome.returned_index.tolist() == [1]


def test_rows_that_are_there_keep_time_and_level() -> None:
    core = topic()
    records, _ = core.stage_add(batch(2, 2), now_ms=NOW_MS, request_limits=LIMITS, levels=TABLE)
    for record in records:
        core.apply(record, 1, elapsed_ms=0)
    records, outcome = core.stage_add(batch(3, 3, 3), now_ms=NOW_MS, request_limits=LIMITS, levels=TABLE)

    assert (outcome.accepted, outcome.duplicates) == (1, 2)
    assert by_record(records) == [(3, [2], [60_000])]
    assert dict(core.index.levels.pending_rows) == {2: 2}


def test_the_limit_on_delays_holds_for_levels() -> None:
    small = limits.RequestLimits(1000, 1000, 255, 10, 5_000)
    core = topic()
    core.stage_add(batch(2), now_ms=NOW_MS, request_limits=small, levels=TABLE)
    with pytest.raises(DelayTooLong, match=r"delay_level\[1\] is 60000; the largest delay is 5000 ms"):
        core.stage_add(batch(1, 3), now_ms=NOW_MS, request_limits=small, levels=TABLE)


@pytest.mark.parametrize(
    ("levels", "table", "says"),
    [
        ((1, -1), TABLE, r"delay_level\[1\] is -1"),
        ((1, 4), parse("1s 5s 1m", clamp=False, delay_max_ms=HOUR_MS), r"delay_level\[1\] is 4; the highest .* is 3"),
    ],
)
def test_a_level_that_there_is_not_is_refused_and_nothing_is_staged(
    levels: tuple[int, ...], table: DelayLevels, says: str
) -> None:
    core = topic()
    with pytest.raises(InvalidArgument, match=says):
        core.stage_add(batch(*levels), now_ms=NOW_MS, request_limits=LIMITS, levels=table)
    assert not core.index.staged.keys
    assert len(core.index.pages) == 0
