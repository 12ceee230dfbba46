"""The ids that staged decisions name, until these are applied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.decisions.staged_ids import StagedIds
from daemon.core.index import column_runs
from tests.daemon.core._support.id_map_topic import IDS, hashes_of, listed, u64

some_ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), some_ids),
        st.tuples(st.just("leave"), some_ids),
        st.tuples(st.just("apply"), st.integers(1, 3)),
    ),
    max_size=30,
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows meet every case."""
    monkeypatch.setattr(column_runs, "SMALL_ROWS", 2)
    monkeypatch.setattr(column_runs, "STEP_ROWS", 3)
    monkeypatch.setattr(column_runs, "_LIKE_RUNS", 3)


@given(STEPS)
def test_an_id_is_named_and_its_rows_are_found_until_the_decision_is_applied(
    steps: Sequence[tuple[str, object]],
) -> None:
    staged = StagedIds()
    # Decision -> its ids, and its rows or None
    waiting: dict[int, tuple[list[int], list[tuple[int, int, int]]]] = {}
    keys = iter(range(1_000))
    for step in steps:
        match step:
            case ("stage", list(ids)):
                rows = [(each, next(keys), each + 7) for each in ids]
                number = staged.stage(hashes_of(ids), u64([row[1] for row in rows]), u64([row[2] for row in rows]))
                waiting[number] = ids, rows
            case ("leave", list(ids)):
                waiting[staged.stage_leaving(hashes_of(ids))] = ids, []
            case ("apply", int(count)) if waiting:
                for number in [*waiting][:count]:
                    del waiting[number]
                staged.applied(number)
        named = {each for ids, _ in waiting.values() for each in ids}
        assert staged.are_named(hashes_of(IDS)).tolist() == [each in named for each in IDS]
        expected = sorted(row for _, rows in waiting.values() for row in rows)
        found = staged.find(hashes_of(IDS))
        assert sorted(listed(found)) == expected
        assert found.asked.tolist() == sorted(found.asked.tolist())
        odd = staged.find(hashes_of(IDS), lambda asked: asked % np.uint64(2) == 0)
        assert sorted(listed(odd)) == [row for row in expected if row[1] % 2]
