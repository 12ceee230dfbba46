"""Decisions by schedule id: a request is what its rows are one after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from daemon.core.decisions.id_decisions import (
    DecidedRows,
    RowsWithIds,
    decide_keep,
    decide_replace,
    decide_withdrawal,
    distinct_ids,
)
from daemon.core.index.column_runs import Mask
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import FoundRows
from daemon.errors import InvariantViolated
from tests.daemon.core._support.id_map_topic import u64

# Id, key, whether the row is neither returned nor refused
Row = tuple[int, int, bool]
# Key -> (id, whether the row waits)
There = dict[int, tuple[int, bool]]
IDS = range(3)

rows_of_requests = st.lists(st.tuples(st.sampled_from(IDS), st.integers(0, 5), st.booleans()), min_size=1, max_size=6)
rows_there = st.dictionaries(st.integers(0, 5), st.tuples(st.sampled_from(IDS), st.booleans()), max_size=4)


def asked(request: Sequence[Row], there: There) -> RowsWithIds:
    ids, keys, live = zip(*request, strict=True)
    return RowsWithIds(
        np.array(ids, np.intp), len(IDS), u64(keys), np.array(live), np.array([key in there for key in keys])
    )


def found_in(there: There, *, complete: int = len(IDS)) -> FoundRows:
    listed = sorted((each, key, waits) for key, (each, waits) in there.items())
    ids, keys, waits = zip(*listed, strict=True) if listed else ((), (), ())
    return FoundRows(np.array(ids, np.intp), u64(keys), u64(keys), np.array(waits, np.bool_), complete)


def one_by_one(request: Sequence[Row], there: There, *, replaces: bool) -> There:
    """What is there behind a request, by the rules of a single row."""
    now = dict(there)
    for each, key, live in request:
        if not live or key in now:
            continue
        if replaces:
            now = {other: row for other, row in now.items() if row[0] != each or not row[1]}
        elif any(row[0] == each for row in now.values()):
            continue
        now[key] = (each, True)
    return now


def outcome(request: Sequence[Row], there: There, decided: DecidedRows) -> There:
    keys = found_in(there).keys[decided.leaving].tolist()
    stays = {key: row for key, row in there.items() if key not in keys}
    stored = {request[row][1]: (request[row][0], True) for row in decided.stored.tolist()}
    assert not stored.keys() & stays.keys()
    return stays | stored


def every_row_is_answered_once(request: Sequence[Row], decided: DecidedRows) -> None:
    parts = (decided.stored, decided.duplicates, decided.kept, decided.replaced)
    assert all((np.diff(part) > 0).all() for part in parts)
    answered = sorted(np.concatenate(parts).tolist())
    assert answered == [row for row, (_, _, live) in enumerate(request) if live]


@given(rows_of_requests, rows_there)
@example([(0, 1, True), (0, 2, True)], {})
@example([(0, 1, True), (1, 1, True), (1, 2, True)], {})
def test_keep_stores_what_its_rows_store_one_by_one_and_names_the_row_that_it_keeps(
    request: list[Row], there: There
) -> None:
    decided = decide_keep(asked(request, there), found_in(there))
    every_row_is_answered_once(request, decided)
    assert not decided.leaving.any()
    assert not len(decided.replaced)
    now = outcome(request, there, decided)
    assert now == one_by_one(request, there, replaces=False)
    found = found_in(there)
    for row, by in zip(decided.kept.tolist(), decided.kept_by.tolist(), strict=True):
        key = int(found.keys[by]) if by < found.rows else request[by - found.rows][1]
        assert now[key][0] == request[row][0]


@given(rows_of_requests, rows_there)
@example([(0, 1, True), (0, 2, True)], {3: (0, True), 4: (0, False)})
@example([(0, 1, True), (1, 3, True)], {3: (0, True)})
@example([(0, 1, True), (0, 3, True)], {3: (0, True)})
def test_replace_stores_what_its_rows_store_one_by_one(request: list[Row], there: There) -> None:
    decided = decide_replace(asked(request, there), found_in(there))
    every_row_is_answered_once(request, decided)
    assert not len(decided.kept)
    assert outcome(request, there, decided) == one_by_one(request, there, replaces=True)


def test_a_replace_that_did_not_find_all_rows_is_not_decided() -> None:
    with pytest.raises(InvariantViolated, match="3 ids is decided by the rows of 2"):
        decide_replace(asked([(0, 1, True)], {}), found_in({}, complete=2))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=8))
def test_equal_ids_have_one_place_and_others_another(halves: list[tuple[int, int]]) -> None:
    columns = [u64([pair[half] for pair in halves]) for half in (0, 1)]
    distinct, places = distinct_ids(IdHashes(*columns))
    assert sorted(set(halves)) == list(zip(distinct.high.tolist(), distinct.low.tolist(), strict=True))
    assert [sorted(set(halves))[place] for place in places.tolist()] == halves


def test_an_id_is_listed_by_its_furthest_row_and_only_waiting_rows_leave() -> None:
    #         waits, waits  due    held, due    waits, cut
    ids = np.array([0, 0, 2, 3, 3, 4], np.intp)
    waits: Mask = np.array([True, True, False, False, False, True])
    held: Mask = np.array([False, False, False, True, False, False])
    keys = u64(range(6))
    decided = decide_withdrawal(FoundRows(ids, keys, keys, waits, 5), 5, due=~waits, held=held)
    assert decided.leaving.tolist() == [0, 1, 5]
    assert [each.tolist() for each in decided[1:4]] == [[1], [2], [3]]
    assert decided.complete == 5
    part = decide_withdrawal(FoundRows(ids[:4], keys[:4], keys[:4], waits[:4], 3), 5, due=~waits[:4], held=held[:4])
    assert [each.tolist() for each in part[1:4]] == [[1], [2], []]
    assert (part.leaving.tolist(), part.complete) == ([0, 1], 3)
