"""FIFO runs of a mutable bucket, against `sorted`: every row that is due, once, in hand-out order."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.core.index import runs
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of
from daemon.core.index.runs import FifoRuns, Place, Ranges, SortedRun
from storage_backends.formats.row_columns import Rows
from tests.planted import registry

START_MS = 1_000_000
# Constant delays, as levels have them.
DELAYS_MS = (0, 700, 5_000, 60_000)
Plant = Callable[[pytest.MonkeyPatch], None]


class Wrong(Exception):
    """What was passed is not what had to be."""


# ---- ranges


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=30),
    st.lists(st.integers(1, 12), max_size=40),
    st.integers(0, 30),
)
def test_ranges_give_their_rows_in_their_order_each_once(
    parts: list[tuple[int, int]], takes: list[int], early: int
) -> None:
    ranges, place = Ranges(), 0
    expected: list[int] = []
    found: list[int] = []
    for number, (gap, rows) in enumerate(parts):
        place += gap
        ranges.add(place, place + rows)
        expected += range(place, place + rows)
        place += rows
        if number >= early and takes and len(ranges):
            found += taken_from(ranges, takes.pop())
    assert np.arange(place)[ranges.rows()].tolist() == expected[len(found) :]
    for rows_max in takes:
        if len(ranges):
            assert ranges.first == expected[len(found)]
            found += taken_from(ranges, rows_max)
    assert expected[: len(found)] == found
    assert len(ranges) == len(expected) - len(found)


def taken_from(ranges: Ranges, rows_max: int) -> list[int]:
    before = len(ranges)
    taken: list[int] = np.arange(10_000)[ranges.take(rows_max)].tolist()
    assert 1 <= len(taken) <= rows_max
    assert before - len(ranges) == len(taken)
    return taken


# ---- a bucket with runs


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that come after `pause_ms`: of one delay, of several ones, or of random times; `in_order` by position."""

    pause_ms: int
    rows: int
    kind: str
    delay: int
    ledgers: int
    in_order: bool
    seed: int

    def places(self, now_ms: int, first_entry: int) -> list[Place]:
        draw = random.Random(self.seed)
        places = []
        for number in range(self.rows):
            delay_ms = {
                "constant": DELAYS_MS[self.delay],
                "several": DELAYS_MS[(self.delay + number * 4 // self.rows) % len(DELAYS_MS)],
                "random": draw.randrange(90_000),
            }[self.kind]
            places.append((now_ms + delay_ms, number * self.ledgers // self.rows, first_entry + number))
        if not self.in_order:
            draw.shuffle(places)
        return places


@dataclasses.dataclass(frozen=True)
class Passing:
    """Everything that is due after `pause_ms` is passed, about `limit` rows at a time; then some positions leave."""

    pause_ms: int
    limit: int
    leave: int


BATCHES = st.builds(
    Batch,
    pause_ms=st.integers(0, 3) | st.integers(0, 9_000),
    rows=st.integers(1, 4) | st.integers(1, 60),
    kind=st.sampled_from(["constant", "constant", "several", "random"]),
    delay=st.integers(0, len(DELAYS_MS) - 1),
    ledgers=st.integers(1, 3),
    in_order=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
PASSINGS = st.builds(
    Passing, pause_ms=st.integers(0, 4_000), limit=st.integers(1, 50) | st.just(10_000), leave=st.integers(0, 5)
)
STEPS = st.lists(BATCHES | PASSINGS, max_size=25)


class Driven:
    """A bucket, and what it should have."""

    def __init__(self, runs_max: int) -> None:
        self.pages = PageTable()
        self.bucket = MutableBucket(self.pages, horizon_ms=START_MS, fifo_runs_max=runs_max)
        self.now_ms = START_MS
        self.pending: set[Place] = set()
        self.gone: list[Place] = []
        self.entries = 0
        self.in_order_rows = 0

    def do(self, step: Batch | Passing) -> None:
        self.now_ms += step.pause_ms
        if isinstance(step, Passing):
            self.pass_all(step.limit)
            self.leave(step.leave)
        else:
            self.add(step)

    def add(self, batch: Batch) -> None:
        places = batch.places(self.now_ms, self.entries)
        self.entries += batch.rows
        # Positions that left come back, with another time.
        for number in range(min(len(self.gone), len(places) // 3)):
            _, ledger_id, entry_id = self.gone.pop()
            places[number] = (places[number][0], ledger_id, entry_id)
        self.pending.update(places)
        columns = np.array(places, np.uint64).reshape(-1, 3)
        rows = Rows(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())
        keyed = KeyedRows(rows, self.pages.intern(rows.ledger_id, rows.entry_id))
        self.in_order_rows += self.bucket.add(keyed, bitmap_of(keyed.keys), elapsed_ms=0)

    def leave(self, count: int) -> None:
        for place in sorted(self.pending)[:count]:
            self.pending.remove(place)
            self.gone.append(place)
            keys = self.pages.find(np.array([place[1]], np.uint64), np.array([place[2]], np.uint64))
            self.bucket.remove(bitmap_of(keys))

    def pass_all(self, limit: int) -> None:
        expected = sorted(place for place in self.pending if place[0] <= self.now_ms)
        next_due_ms = self.bucket.next_due_ms()
        if expected and (next_due_ms is None or next_due_ms > expected[0][0]):
            raise Wrong(f"the next row is said to be due at {next_due_ms}, it is at {expected[0][0]}")
        found: list[Place] = []
        while taken := runs.take_due(self.bucket.runs_at(self.now_ms), self.now_ms, limit):
            portion = [place for _, rows in taken for place in listed(self.bucket.pass_rows(rows))]
            found += sorted(portion)
        if found != expected:
            raise Wrong(f"{len(found)} rows were passed, {len(expected)} were due, or in another order")
        self.pending -= set(found)


def listed(rows: KeyedRows) -> list[Place]:
    columns = (rows.rows.deliver_at_ms, rows.rows.ledger_id, rows.rows.entry_id)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def drive(steps: list[Batch | Passing], runs_max: int) -> Driven:
    driven = Driven(runs_max)
    for step in [*steps, Passing(100_000, 7, 0)]:
        driven.do(step)
    if driven.pending:
        raise Wrong(f"{len(driven.pending)} rows were never passed")
    return driven


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows meet every case."""
    monkeypatch.setattr(runs, "CHUNK_ROWS", 7)
    monkeypatch.setattr(runs, "PIECE_ROWS_LEAST", 3)
    monkeypatch.setattr(runs, "MISSES_MAX", 12)


@settings(deadline=None)
@given(steps=STEPS, runs_max=st.integers(0, 6))
def test_every_row_is_passed_once_when_due_and_in_order_whatever_follows_a_run(
    steps: list[Batch | Passing], runs_max: int
) -> None:
    drive(steps, runs_max)


# ---- which rows follow a run


def constant(delay: int, rows: int = 5, *, pause_ms: int = 1) -> Batch:
    return Batch(pause_ms, rows, "constant", delay, 1, True, 0)


def test_rows_of_one_delay_all_follow_one_run() -> None:
    driven = drive([constant(2) for _ in range(50)], runs_max=1)

    assert driven.in_order_rows == 250


def test_several_delays_that_come_by_turns_follow_as_many_runs() -> None:
    driven = drive([constant(delay) for _ in range(30) for delay in (3, 1, 2)], runs_max=3)

    assert driven.in_order_rows == 450


def test_a_delay_that_finds_no_run_comes_the_other_way_and_the_others_still_follow_theirs() -> None:
    steps: list[Batch | Passing] = [constant(delay) for _ in range(4) for delay in (3, 2, 1)]

    assert drive(steps, runs_max=2).in_order_rows == 40


def test_a_batch_that_mixes_two_delays_follows_two_runs() -> None:
    driven = drive([Batch(1, 40, "several", 2, 1, True, 0) for _ in range(20)], runs_max=4)

    assert driven.in_order_rows == 800


def test_random_times_follow_no_run() -> None:
    driven = drive([Batch(1, 60, "random", 0, 1, True, seed) for seed in range(20)], runs_max=32)

    assert driven.in_order_rows == 0


def test_rows_that_come_one_by_one_with_random_delays_soon_follow_no_run_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runs, "MISSES_MAX", 64)
    driven = drive([Batch(1, 1, "random", 0, 1, True, seed) for seed in range(3_000)], runs_max=32)

    assert driven.in_order_rows < 1_000


def test_rows_of_one_time_follow_a_run_in_the_order_of_their_positions_only() -> None:
    driven = Driven(1)
    driven.do(Batch(0, 30, "constant", 2, 2, True, 0))
    assert driven.in_order_rows == 30
    driven.do(Batch(0, 30, "constant", 2, 2, False, 5))
    assert driven.in_order_rows == 30
    driven.do(Passing(10_000, 10, 0))


def test_a_run_that_was_used_up_makes_room_for_another_one() -> None:
    driven = Driven(1)
    for _ in range(5):
        driven.do(constant(3))
        driven.do(constant(1))
        driven.do(Passing(60_000, 100, 0))

    assert driven.in_order_rows == 25


# ---- these tests can fail


def a_run_takes_what_lies_before_its_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FifoRuns, "_run_to_follow", lambda self, rows, start, stop: (len(self._ends) - 1, stop))


def rows_of_one_time_may_come_in_any_order(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rows, "in_position_order", lambda self: True)


def nothing_follows_a_chunk(patch: pytest.MonkeyPatch) -> None:
    runs_at = FifoRuns.runs_at

    def cut_short(self: FifoRuns, *args: object) -> list[SortedRun]:
        found = runs_at(self, *args)  # type: ignore[arg-type]
        for run in found:
            run.continues = False
        return found

    patch.setattr(FifoRuns, "runs_at", cut_short)


def a_run_is_dropped_with_its_chunk(patch: pytest.MonkeyPatch) -> None:
    take = Ranges.take

    def forget(self: Ranges, rows_max: int) -> runs.Index:
        index = take(self, rows_max)
        self._at, self.rows_left = len(self._ends), 0
        return index

    patch.setattr(Ranges, "take", forget)


def loose_rows_are_not_remembered(patch: pytest.MonkeyPatch) -> None:
    rows = Ranges.rows

    def all_but_the_last(self: Ranges) -> runs.Index:
        index = rows(self)
        return slice(index.start, max(index.start, index.stop - 1)) if isinstance(index, slice) else index[:-1]

    patch.setattr(Ranges, "rows", all_but_the_last)


PLANTED = (
    a_run_takes_what_lies_before_its_end,
    rows_of_one_time_may_come_in_any_order,
    nothing_follows_a_chunk,
    a_run_is_dropped_with_its_chunk,
    loose_rows_are_not_remembered,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(400):
        draw = random.Random(seed)
        try:
            drive([_drawn(draw) for _ in range(20)], runs_max=draw.randrange(1, 5))
        except Wrong:
            return
    pytest.fail("not found")


def _drawn(draw: random.Random) -> Batch | Passing:
    if draw.random() < 0.25:
        return Passing(draw.choice([0, 700, 4_000, 30_000]), draw.choice([1, 5, 40]), draw.randrange(3))
    kind = draw.choice(["constant", "constant", "several", "random"])
    return Batch(
        draw.choice([0, 1, 50]),
        draw.randrange(1, 30),
        kind,
        draw.randrange(4),
        2,
        draw.random() < 0.7,
        draw.randrange(99),
    )


registry.register("rows of a bucket by the order in which they come", PLANTED)
