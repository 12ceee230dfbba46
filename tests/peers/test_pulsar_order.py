"""The merge of what is due, as `DelayedIndexQueueTest` has it, and sparse delays, which no test of Pulsar has."""

from __future__ import annotations

import random

import numpy as np
import pytest

from daemon.core.decisions.departures import LedgerRanges
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.runs import SortedRun, take_due
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from tests.daemon.core._support.journaled_topic import JournaledTopic, listed

Place = tuple[int, int, int]
"""deliver_at_ms, ledger, entry"""

DAY_MS = 86_400_000


def rows_of(places: list[Place]) -> KeyedRows:
    columns = np.array(places, np.uint64).reshape(-1, 3)
    keys = np.arange(len(places), dtype=np.uint64)
    return KeyedRows(Rows(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()), keys)


class Source:
    """A bucket as the merge sees it: one run after the other, each of one segment."""

    def __init__(self, segments: list[list[Place]]) -> None:
        self._left = [rows_of(segment) for segment in segments]
        self.run = self._next()

    def _next(self) -> SortedRun:
        return SortedRun(self._left.pop(0), continues=bool(self._left))

    def go_on(self) -> bool:
        """Whether there is something to take, now or in a later segment."""
        while not len(self.run) and self.run.continues:
            self.run = self._next()
        return len(self.run) > 0


@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_the_merge_of_three_lists_of_segments_one_of_them_empty_has_all_58_rows_in_order(limit: int) -> None:
    numbers = random.Random(58)
    places = [(numbers.randrange(40), numbers.randrange(3), entry) for entry in range(58)]
    lists: list[list[list[Place]]] = []
    for sizes in ([10, 0, 10], [19], [9, 10]):
        rows = sorted(places.pop() for _ in range(sum(sizes)))
        lists.append([[rows.pop(0) for _ in range(size)] for size in sizes])
    expected = sorted(row for segments in lists for segment in segments for row in segment)
    sources = [Source(segments) for segments in lists]
    merged: list[Place] = []
    while left := [source for source in sources if source.go_on()]:
        taken = take_due([source.run for source in left], 40, limit)
        merged += sorted(row for _, rows in taken for row in listed(rows))
    assert merged == expected
    assert len(merged) == 58


def test_three_buckets_one_of_them_with_a_segment_that_was_trimmed_away_give_58_rows_in_order() -> None:
    topic = JournaledTopic(now_ms=1_000, segment_limits=SegmentLimits(time_step_ms=DAY_MS, rows_max=4, rows_min=0))
    state = topic.create_subscription()
    topic.core.open(state, 1)
    numbers = random.Random(59)
    expected: list[Place] = []
    for bucket, count in enumerate((20, 20, 22), start=1):
        times = sorted(numbers.randrange(2_000, 5_000) for _ in range(count))
        # Of the second bucket, all of the second segment is of one ledger, and nothing else is.
        ledgers = [9 if bucket == 2 and 4 <= entry < 8 else bucket for entry in range(count)]
        topic.add(list(zip(ledgers, range(count), strict=True)), times)
        topic.seal(near_ms=0)
        expected += [row for row in zip(times, ledgers, range(count), strict=True) if row[1] != 9]
    assert topic.trim_at_once(LedgerRanges(np.array([9], np.uint64), np.array([99], np.uint64))) == 4
    topic.now_ms = 10_000
    handed = [row for rows in topic.drain(state, 1) for row in listed(rows)]
    assert handed == sorted(expected)
    assert len(handed) == 58


@pytest.mark.parametrize("rows_min", [0, 1_000])
def test_sparse_random_delays_come_each_at_its_time_whether_the_time_step_cuts_them_or_not(rows_min: int) -> None:
    """By PIP-195's rule nearly each row is a segment of its own; with a minimum they share one."""
    limits = SegmentLimits(time_step_ms=300_000, rows_max=5_000, rows_min=rows_min)
    topic = JournaledTopic(now_ms=1_000_000, segment_limits=limits)
    state = topic.create_subscription()
    topic.core.open(state, 1)
    numbers = random.Random(60)
    rows = sorted(
        (1_000_000 + numbers.randrange(1, 11 * DAY_MS), numbers.randrange(1 << 63), numbers.randrange(1 << 32))
        for _ in range(300)
    )
    shuffled = numbers.sample(rows, len(rows))
    for first in range(0, 300, 100):
        part = shuffled[first : first + 100]
        topic.add([row[1:] for row in part], [row[0] for row in part])
        topic.seal(near_ms=0)
    segments = sum(len(bucket.table) for bucket in topic.core.index.sealed.values())
    assert segments == 3 if rows_min else segments > 200
    for row in rows:
        topic.now_ms = row[0] - 1
        assert topic.drain(state, 1) == []
        topic.now_ms = row[0]
        (handed,) = topic.drain(state, 1)
        assert listed(handed) == [row]
