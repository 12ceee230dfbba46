"""What steps and look-ups of an id map cost, in rows and bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
from pyroaring import BitMap64

from daemon.core.index import column_runs, id_map
from daemon.core.index.column_runs import Mask
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import ENTRY_BYTES, IdMap
from storage_backends.formats.row_columns import U64
from tests.daemon.core._support.id_map_topic import Topic, always, hashes_of, listed

# A step takes some rows more of each of many runs.
STEP_ROWS_MAX = 3 * column_runs.STEP_ROWS // 2


class Ids:
    """Rows with hashes at random, all of which are there unless they are taken out."""

    def __init__(self, rows: int) -> None:
        random = np.random.default_rng(1)
        self.hashes = IdHashes(*random.integers(0, 1 << 64, (2, rows), np.uint64))
        self.keys = np.arange(rows, dtype=np.uint64)
        self.gone = BitMap64()
        self.looked_up = 0
        self.map = IdMap(self.has_ids)
        self.map.loaded()

    def has_ids(self, keys: U64) -> Mask:
        self.looked_up += len(keys)
        return np.array([key not in self.gone for key in keys.tolist()], np.bool_)

    def add(self, first: int, end: int) -> None:
        part = slice(first, end)
        self.map.add(self.hashes.take(part), self.keys[part], self.keys[part])

    def steps_until_done(self) -> int:
        """Take steps; return the most rows that one of them looked at."""
        most = 0
        goes_on = True
        while goes_on:
            before = self.looked_up
            goes_on = self.map.step(always)
            most = max(most, self.looked_up - before)
        return most


def test_a_step_is_of_bounded_rows_and_memory_is_at_most_twice_the_entries() -> None:
    rows = 100_000
    ids = Ids(rows)
    # The index is asked about what is merged only if some row has left.
    ids.map.left(BitMap64([rows]))
    extra = ids.map.nbytes
    tracemalloc.start()
    try:
        most = 0
        for first in range(0, rows, 1_000):
            ids.add(first, first + 1_000)
            assert ids.map.nbytes <= 2 * ENTRY_BYTES * len(ids.map) + extra
            most = max(most, ids.steps_until_done())
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0 < most <= STEP_ROWS_MAX
    assert ids.map.nbytes == ENTRY_BYTES * rows + extra
    assert held <= 1.05 * ENTRY_BYTES * rows
    assert peak <= 2 * ENTRY_BYTES * rows + 40 * column_runs.STEP_ROWS * ENTRY_BYTES
    # Few runs are searched: some of each size.
    assert ids.map.runs <= 16
    places = np.arange(0, rows, 7)
    found = ids.map.find(ids.hashes.take(places), rows_max=rows)
    assert np.array_equal(found.keys, ids.keys[places])


def test_rows_read_in_many_pieces_are_merged_in_bounded_steps() -> None:
    rows = 200_000
    ids = Ids(rows)
    ids.map.left(BitMap64([rows]))
    for first in range(0, rows, 2_000):
        part = slice(first, first + 2_000)
        ids.map.read(IdMap.run_of(ids.hashes.take(part), ids.keys[part], ids.keys[part]))
    assert ids.map.runs == 100
    assert 0 < ids.steps_until_done() <= STEP_ROWS_MAX
    assert ids.map.runs < 8
    assert ids.map.find(ids.hashes.take(slice(0, 50)), rows_max=50).keys.tolist() == list(range(50))


def test_rows_that_left_are_swept_before_they_are_half_as_many_as_the_entries() -> None:
    rows = 60_000
    ids = Ids(rows)
    ids.add(0, rows)
    ids.gone = BitMap64(range(31_000))
    ids.map.left(BitMap64(range(29_000)))
    ids.steps_until_done()
    assert len(ids.map) == rows
    ids.map.left(BitMap64(range(29_000, 31_000)))
    assert ids.steps_until_done() <= STEP_ROWS_MAX
    assert len(ids.map) == 29_000
    assert ids.map.nbytes == ENTRY_BYTES * 29_000


def test_short_runs_beside_a_long_one_do_not_make_steps_short() -> None:
    rows = 60_000
    ids = Ids(rows)
    ids.add(0, 57_000)
    for first in range(57_000, rows, 300):
        ids.add(first, first + 300)
    ids.map.left(BitMap64(range(rows, 2 * rows)))
    steps = 1
    while ids.map.step(always):
        steps += 1
    assert ids.map.runs == 1
    assert steps <= 3 * rows // column_runs.STEP_ROWS


def test_an_id_that_is_replaced_all_the_time_keeps_few_entries() -> None:
    """A cart that changes with each click: each look-up looks at the entries of its id."""
    topic = Topic()
    topic.map.loaded()
    topic.put({0: (0, 1)})
    for key in range(1, 2_500):
        topic.take([key - 1])
        topic.put({key: (0, 1)})
    before = topic.looked_up
    assert listed(topic.map.find(hashes_of([0]), rows_max=1)) == [(0, 2_499, 1)]
    assert topic.looked_up - before <= column_runs.SMALL_ROWS
    assert len(topic.map) <= column_runs.SMALL_ROWS


def test_an_id_with_many_rows_is_looked_at_in_portions() -> None:
    rows = 100_000
    ids = Ids(rows)
    ids.hashes.high[:] = ids.hashes.low[:] = 7
    ids.add(0, rows)
    found = ids.map.find(ids.hashes.take(slice(0, 1)), rows_max=rows, one_each=True)
    assert found.complete == 1
    assert 0 < ids.looked_up <= 2 * id_map.LOOKED_AT_ROWS
    found = ids.map.find(ids.hashes.take(slice(0, 1)), rows_max=20_000)
    assert (found.rows, found.complete) == (20_000, 0)
    assert found.keys.tolist() == list(range(rows - 1, rows - 20_001, -1))


def test_dead_rows_are_gone_before_many_rows_come() -> None:
    topic = Topic()
    topic.map.loaded()
    topic.put({0: (0, 1)})
    topic.take([0])
    topic.put({key: (key, 1) for key in range(1, 3_000)})
    assert (len(topic.map), topic.map.runs) == (2_999, 1)
    assert listed(topic.map.find(hashes_of([0, 2_999]), rows_max=2)) == [(1, 2_999, 1)]
