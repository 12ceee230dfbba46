"""A topic as its id map sees it: rows by key, and the map that must find them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.column_runs import Mask
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import FoundRows, IdMap
from storage_backends.formats.row_columns import U64

# Two ids share one half of their hash, which only chance does.
IDS = range(6)
Row = tuple[int | None, int]
Rows = dict[int, Row]
NOTHING: Row = (None, 0)


def hashes_of(ids: Sequence[int]) -> IdHashes:
    """Return hashes of ids that are numbers."""
    values = np.array(ids, np.uint64)
    return IdHashes(values // np.uint64(2), values)


def u64(values: Sequence[int]) -> U64:
    return np.array(values, np.uint64)


def always(_: int) -> bool:
    """There is memory for every merge."""
    return True


def listed(found: FoundRows) -> list[tuple[int, int, int]]:
    return list(zip(found.asked.tolist(), found.keys.tolist(), found.deliver_at_ms.tolist(), strict=True))


class Topic:
    """Rows by key, and the map that must find them."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.looked_up = 0
        self.map = IdMap(self.has_ids)

    def has_ids(self, keys: U64) -> Mask:
        self.looked_up += len(keys)
        return np.array([self.rows.get(key, NOTHING)[0] is not None for key in keys.tolist()], np.bool_)

    def put(self, rows: Rows) -> None:
        """Rows whose positions are free are applied."""
        self.rows |= rows
        named = {key: row for key, row in rows.items() if row[0] is not None}
        if named:
            ids, times = zip(*named.values(), strict=True)
            self.map.add(hashes_of(ids), u64([*named]), u64(times))

    def take(self, keys: Sequence[int]) -> None:
        self.map.left(BitMap64(keys))
        for key in keys:
            del self.rows[key]

    def expected(self) -> list[tuple[int, int, int]]:
        return sorted(
            (schedule_id, key, time) for key, (schedule_id, time) in self.rows.items() if schedule_id is not None
        )

    def check(self) -> None:
        """All rows are found, and no others."""
        found = self.map.find(hashes_of(IDS), rows_max=100)
        assert sorted(listed(found)) == self.expected()
        assert found.complete == len(IDS)

    def check_bounds(self) -> None:
        """Look-ups that need not find all rows find rows that are there, and enough.

        Positions of every third key are hidden, and rows of even times shall leave.
        """
        expected = [row for row in self.expected() if row[1] % 3]
        wanted = [row for row in expected if row[2] % 2 == 0]
        for rows_max in range(len(wanted) + 1):
            found = self.map.find(
                hashes_of(IDS),
                rows_max=rows_max,
                leave=lambda _, deliver_at_ms: deliver_at_ms % 2 == 0,
                hidden=lambda keys: keys % 3 == 0,
            )
            rows = listed(found)
            assert found.leave.tolist() == [row[2] % 2 == 0 for row in rows]
            assert int(found.leave.sum()) == rows_max
            assert set(rows) <= set(expected)
            complete = [row for row in expected if row[0] < found.complete]
            assert sorted(row for row in rows if row[0] < found.complete) == complete
            assert (found.complete == len(IDS)) == (rows_max == len(wanted))
        some = self.map.find(hashes_of(IDS), rows_max=100, one_each=True)
        assert set(listed(some)) <= set(self.expected())
        assert {asked for asked, _, _ in listed(some)} == {each for each, _, _ in self.expected()}

    def run_steps(self) -> None:
        for _ in range(10_000):
            if not self.map.step(always):
                return
        raise AssertionError("the steps do not end")
