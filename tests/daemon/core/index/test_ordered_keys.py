"""The last row of each key, however the column has grown."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.index.position_keys import KeyIndex


@given(
    batches=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=30), max_size=12),
    asked=st.lists(st.sets(st.integers(0, 14)), max_size=12),
)
def test_the_last_row_of_each_key_is_found_however_the_column_has_grown(
    batches: list[list[int]], asked: list[set[int]]
) -> None:
    order = KeyIndex()
    column: list[int] = []
    for number, batch in enumerate(batches):
        column += batch
        if number < len(asked):
            keys = np.array(sorted(asked[number]), np.uint64)
            found = order.last_of(np.array(column, np.uint64), keys)
            expected = {key: place for place, key in enumerate(column) if key in asked[number]}
            assert {column[place]: place for place in found.tolist()} == expected
            assert len(found) == len(expected)
            lengths = [len(run.keys) for run in order._runs]
            assert sum(lengths) == len(column)
            assert all(longer > 2 * shorter for longer, shorter in itertools.pairwise(lengths))
