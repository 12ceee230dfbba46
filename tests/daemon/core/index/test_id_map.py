"""The id map of a topic, against a dict of the rows that are there, whatever comes and leaves."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap64

from daemon.core.index import column_runs, id_map
from daemon.core.index.column_runs import ColumnRuns, Columns, Hits, Mask, MayTake
from daemon.core.index.id_hashes import IdHashes
from daemon.core.index.id_map import ENTRY_BYTES, FoundRows, HasIds, IdMap, _Departed
from daemon.core.index.id_map_loading import IdMapLoading
from daemon.errors import InvariantViolated
from tests.daemon.core._support.id_map_topic import IDS, Row, Rows, Topic, hashes_of, u64
from tests.planted import registry

KEYS = range(8)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows meet every case."""
    for module in (column_runs, id_map):
        monkeypatch.setattr(module, "SMALL_ROWS", 2)
    monkeypatch.setattr(column_runs, "STEP_ROWS", 3)
    monkeypatch.setattr(column_runs, "_LIKE_RUNS", 3)
    monkeypatch.setattr(id_map, "LOOKED_AT_ROWS", 3)


ids_or_none = st.one_of(st.none(), st.sampled_from(IDS))
some_keys = st.sets(st.sampled_from(KEYS), min_size=1, max_size=4).map(sorted)
Step = tuple[object, ...]
ONE_STEP = st.one_of(
    st.tuples(st.just("add"), some_keys, st.lists(ids_or_none, min_size=4, max_size=4), st.integers(0, 3)),
    st.tuples(st.just("leave"), some_keys),
    st.tuples(st.just("reschedule"), some_keys, st.integers(4, 6)),
    st.tuples(st.just("step"), st.integers(1, 4), st.booleans()),
)
STEPS = st.lists(ONE_STEP, max_size=25)


def follow(topic: Topic, step: Step) -> None:
    """Take one step of a story."""
    match step:
        case ("add", list(keys), list(ids), int(time)):
            free = [key for key in keys if key not in topic.rows]
            topic.put({key: (each, time + key) for key, each in zip(free, ids, strict=False)})
        case ("leave", list(keys)):
            topic.take([key for key in keys if key in topic.rows])
        case ("reschedule", list(keys), int(time)):
            moved = {key: (topic.rows[key][0], time) for key in keys if key in topic.rows}
            topic.take([*moved])
            topic.put(moved)
        case ("step", int(count), bool(is_room)):
            for _ in range(count):
                topic.map.step(lambda _: is_room)


def told(steps: Sequence[Step]) -> Topic:
    """Tell a story of a map that has no rows at first, and check it."""
    topic = Topic()
    topic.map.loaded()
    for step in steps:
        follow(topic, step)
        topic.check()
    topic.check_bounds()
    topic.run_steps()
    topic.check()
    return topic


@given(STEPS)
def test_the_rows_that_are_there_are_found_under_their_ids_whatever_came_and_left(steps: list[Step]) -> None:
    told(steps)


@given(STEPS)
def test_a_sweep_leaves_the_entries_that_count_and_forgets_what_left(steps: list[Step]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Of one row that was rescheduled, two entries may stay if the end of a step separates them.
        patch.setattr(column_runs, "STEP_ROWS", 1_000)
        swept(told(steps))


def swept(topic: Topic) -> None:
    """Have rows without ids leave, so many that a sweep is due."""
    topic.map.left(BitMap64(range(1_000, 1_000 + len(topic.map) + 3)))
    topic.run_steps()
    assert len(topic.map) == len(topic.expected())
    assert topic.map.nbytes == ENTRY_BYTES * len(topic.map)
    topic.check()


# ---- loading


class Loaded(Topic):
    """A topic with sealed buckets, whose map is loaded beside whatever happens."""

    def __init__(self, sealed: Sequence[Rows]) -> None:
        super().__init__()
        self.buckets = {str(number): dict(rows) for number, rows in enumerate(sealed)}
        self.rows = {key: row for rows in sealed for key, row in rows.items()}
        self.memory: set[int] = set()
        self.names = map(str, itertools.count(100))
        # Bucket that is being read -> its rows when the reading began, or None if its object is deleted
        self.reading: dict[str, Rows | None] = {}
        self.loading: IdMapLoading | None = None
        # The rows that were in memory when loading began
        self.in_memory: Rows = {}

    def begin(self) -> None:
        """A call needs the map: those of before, which nobody loaded, are not asked."""
        self.map = IdMap(self.has_ids)
        self.loading = IdMapLoading(self.buckets)
        self.in_memory = {key: self.rows[key] for key in self.memory}

    def put(self, rows: Rows) -> None:
        self.memory |= rows.keys()
        super().put(rows)

    def take(self, keys: Sequence[int]) -> None:
        self.memory -= set(keys)
        for rows in self.buckets.values():
            for key in keys:
                rows.pop(key, None)
        super().take(keys)

    def seal(self) -> None:
        self.buckets[next(self.names)] = {key: self.rows[key] for key in sorted(self.memory)}
        self.memory.clear()

    def merge(self, sources: Sequence[str]) -> None:
        name = next(self.names)
        self.buckets[name] = {key: row for source in sources for key, row in self.buckets.pop(source).items()}
        assert self.loading is not None
        self.loading.replaced(sources, name)

    def lose(self, bucket: str) -> None:
        """Quarantine a bucket, or drop an empty one."""
        rows = self.buckets.pop(bucket)
        assert self.loading is not None
        self.loading.left(bucket)
        super().take([*rows])

    def read_next(self) -> None:
        assert self.loading is not None
        bucket = self.loading.next()
        if bucket is not None:
            rows = self.buckets.get(bucket)
            self.reading[bucket] = None if rows is None else dict(rows)

    def end_reading(self, place: int, *, finds_object: bool) -> None:
        if not self.reading:
            return
        assert self.loading is not None
        bucket = [*self.reading][place % len(self.reading)]
        rows = self.reading.pop(bucket)
        if rows is None or (bucket not in self.buckets and not finds_object):
            self.loading.is_missing(bucket)
            return
        self.give(rows)
        self.loading.has_read(bucket)

    def give(self, rows: Rows) -> None:
        """The map takes rows of a bucket."""
        named = {key: row for key, row in rows.items() if row[0] is not None}
        if named:
            ids, times = zip(*named.values(), strict=True)
            self.map.read(IdMap.run_of(hashes_of(ids), u64([*named]), u64(times)))

    def finish(self) -> None:
        assert self.loading is not None
        self.give(self.in_memory)
        while not self.loading.is_done:
            self.read_next()
            self.end_reading(0, finds_object=True)
        self.map.loaded()


LOADING_STEPS = st.lists(
    st.one_of(
        ONE_STEP,
        st.tuples(st.just("seal")),
        st.tuples(st.just("merge"), st.integers(0, 5)),
        st.tuples(st.just("lose"), st.integers(0, 5)),
        st.tuples(st.just("read")),
        st.tuples(st.just("end reading"), st.integers(0, 5), st.booleans()),
    ),
    max_size=25,
)
# The rows of two sealed buckets, and what comes and leaves before the map is needed
BEFORE = st.tuples(
    st.lists(st.tuples(ids_or_none, st.integers(0, 3)), max_size=4),
    st.lists(st.tuples(ids_or_none, st.integers(0, 3)), max_size=4),
    st.lists(ONE_STEP, max_size=3),
)


def loaded_beside(
    before: tuple[Sequence[Row], Sequence[Row], Sequence[Step]], steps: Sequence[Step], after: Sequence[Step]
) -> None:
    """Load a map beside the steps of a story, and check it."""
    first, second, earlier = before
    topic = Loaded([dict(enumerate(first)), dict(enumerate(second, start=len(first)))])
    for step in earlier:
        follow(topic, step)
    topic.begin()
    for step in steps:
        match step:
            case ("seal",):
                topic.seal()
            case ("merge", int(place)) if len(topic.buckets) > 1:
                names = [*topic.buckets]
                topic.merge([names[place % len(names)], names[(place + 1) % len(names)]])
            case ("lose", int(place)) if topic.buckets:
                topic.lose([*topic.buckets][place % len(topic.buckets)])
            case ("read",):
                topic.read_next()
            case ("end reading", int(place), bool(finds_object)):
                topic.end_reading(place, finds_object=finds_object)
            case _:
                follow(topic, step)
    topic.finish()
    topic.check()
    topic.check_bounds()
    for step in after:
        follow(topic, step)
        topic.check()
    topic.run_steps()
    topic.check()


@given(BEFORE, LOADING_STEPS, STEPS)
def test_a_map_loaded_beside_everything_finds_the_rows_that_are_there(
    before: tuple[list[Row], list[Row], list[Step]], steps: list[Step], after: list[Step]
) -> None:
    loaded_beside(before, steps, after)


def test_nothing_is_found_before_all_is_read_or_after_the_map_has_made_room() -> None:
    topic = Topic()
    topic.put({1: (0, 5)})
    with pytest.raises(InvariantViolated, match="not loaded"):
        topic.map.find(hashes_of([0]), rows_max=1)
    topic.map.loaded()
    assert topic.map.find(hashes_of([0]), rows_max=1).rows == 1
    topic.map.close()
    topic.put({2: (0, 5)})
    topic.map.left(BitMap64([2]))
    topic.map.read(IdMap.run_of(hashes_of([0]), u64([3]), u64([5])))
    topic.map.loaded()
    assert (topic.map.is_open, topic.map.is_loaded, topic.map.nbytes) == (False, False, 0)
    with pytest.raises(InvariantViolated, match="not loaded"):
        topic.map.find(hashes_of([0]), rows_max=1)


def test_without_memory_nothing_is_merged_and_all_is_found() -> None:
    topic = Topic()
    topic.map.loaded()
    for key in range(20):
        topic.put({key: (0, key)})
    asked: list[int] = []

    def refused(size_bytes: int) -> bool:
        asked.append(size_bytes)
        return False

    assert not topic.map.step(refused)
    assert asked
    assert all(each % ENTRY_BYTES == 0 for each in asked)
    assert topic.map.find(hashes_of([0]), rows_max=20).rows == 20
    assert topic.map.nbytes == ENTRY_BYTES * 20


def read_by(loading: IdMapLoading) -> list[str]:
    """Read all that is left, each bucket at once."""
    read = []
    while (bucket := loading.next()) is not None:
        loading.has_read(bucket)
        read.append(bucket)
    assert loading.is_done
    return read


def test_what_took_the_place_of_a_missing_bucket_is_read_however_often_it_was_merged() -> None:
    loading = IdMapLoading(["a", "b", "c"])
    assert [loading.next(), loading.next()] == ["a", "b"]
    loading.replaced(["a", "sealed later"], "d")
    loading.replaced(["d", "b"], "e")
    loading.has_read("b")
    loading.is_missing("a")
    assert read_by(loading) == ["c", "e"]


def test_a_bucket_is_read_as_part_of_what_took_its_place_and_once() -> None:
    loading = IdMapLoading(["a", "b", "c"])
    loading.replaced(["a", "b"], "d")
    loading.replaced(["d", "c"], "e")
    assert read_by(loading) == ["e"]


def test_what_was_dropped_or_quarantined_is_not_read() -> None:
    loading = IdMapLoading(["a", "b", "c"])
    loading.left("c")
    assert loading.next() == "a"
    loading.replaced(["a"], "d")
    loading.left("d")
    loading.is_missing("a")
    assert read_by(loading) == ["b"]
    assert read_by(IdMapLoading([])) == []


def test_a_bucket_that_is_not_being_read_has_not_been_read() -> None:
    loading = IdMapLoading(["a"])
    with pytest.raises(InvariantViolated, match="bucket a is not being read"):
        loading.has_read("a")
    assert loading.next() == "a"
    assert loading.next() is None
    assert not loading.is_done
    loading.has_read("a")
    assert loading.is_done


# ---- these tests can fail

Plant = Callable[[pytest.MonkeyPatch], None]


def what_came_back_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Departed, "ids_of", lambda self, keys: (np.empty(0, np.intp), keys[:0], keys[:0]))


def what_came_back_earlier_decides(patch: pytest.MonkeyPatch) -> None:
    generations = IdMap._generations
    patch.setattr(IdMap, "_generations", lambda self: iter([*generations(self)][::-1]))


def a_sweep_forgets_what_left_meanwhile(patch: pytest.MonkeyPatch) -> None:
    step = IdMap.step

    def forgets(self: IdMap, may_take: MayTake) -> bool:
        is_swept = self._departed_before is not None
        goes_on = step(self, may_take)
        if is_swept and self._departed_before is None:
            self._departed = _Departed()
        return goes_on

    patch.setattr(IdMap, "step", forgets)


def a_merge_of_some_runs_counts_as_a_sweep(patch: pytest.MonkeyPatch) -> None:
    step = ColumnRuns.step
    patch.setattr(ColumnRuns, "step", lambda self, may_take: step(self, may_take)._replace(swept=True))


def a_merge_puts_newer_rows_first(patch: pytest.MonkeyPatch) -> None:
    in_order = column_runs._in_order
    patch.setattr(column_runs, "_in_order", lambda parts: in_order([*reversed(parts)]))


def half_a_hash_is_compared(patch: pytest.MonkeyPatch) -> None:
    counting = IdMap._counting

    def compares_all(self: IdMap, candidates: list[Hits], hashes: IdHashes, hidden: HasIds | None) -> FoundRows:
        asked, entries = column_runs.rows_of(candidates)
        low = hashes.low.copy()
        low[asked] = entries[1]
        return counting(self, candidates, IdHashes(hashes.high, low), hidden)

    patch.setattr(IdMap, "_counting", compares_all)


def merging_keeps_the_first_of_a_position(patch: pytest.MonkeyPatch) -> None:
    superseded = id_map._superseded

    def reversed_(entries: Columns) -> Mask | None:
        found = superseded(tuple(column[::-1] for column in entries))
        return None if found is None else found[::-1]

    patch.setattr(id_map, "_superseded", reversed_)


def what_is_read_is_newest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IdMap, "read", lambda self, run: self._entries.add(run.columns))


def a_missing_bucket_is_skipped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IdMapLoading, "is_missing", IdMapLoading.has_read)


def what_left_while_the_map_was_loaded_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    loaded = IdMap.loaded

    def forgets(self: IdMap) -> None:
        self._departed = _Departed()
        loaded(self)

    patch.setattr(IdMap, "loaded", forgets)


STORY_BUGS = (
    what_came_back_is_forgotten,
    what_came_back_earlier_decides,
    a_sweep_forgets_what_left_meanwhile,
    a_merge_of_some_runs_counts_as_a_sweep,
    a_merge_puts_newer_rows_first,
    half_a_hash_is_compared,
    merging_keeps_the_first_of_a_position,
)
LOADING_BUGS = (
    what_is_read_is_newest,
    a_missing_bucket_is_skipped,
    what_left_while_the_map_was_loaded_is_forgotten,
)
# The most stories that are told to find a planted bug; the fourth part finds each of them.
STORIES = 400


def drawn_step(draw: random.Random) -> Step:
    keys = sorted(draw.sample(KEYS, draw.randint(1, 4)))
    return draw.choice(
        (
            ("add", keys, draw.choices((None, *IDS), k=4), draw.randint(0, 3)),
            ("leave", keys),
            ("reschedule", keys, draw.randint(4, 6)),
            ("step", draw.randint(1, 4), draw.random() < 0.8),
        )
    )


def drawn_loading_step(draw: random.Random) -> Step:
    places: list[Step] = [(name, draw.randint(0, 5)) for name in ("merge", "lose")]
    reading: list[Step] = [("read",), ("end reading", draw.randint(0, 5), draw.random() < 0.5)]
    return draw.choice((("seal",), *places, *reading, *reading, *(drawn_step(draw) for _ in range(5))))


def drawn_rows(draw: random.Random) -> list[Row]:
    return [(draw.choice((None, *IDS)), draw.randint(0, 3)) for _ in range(draw.randint(0, 4))]


def breaks(story: Callable[..., object], *parts: Any) -> bool:
    """Return whether a check of a story fails."""
    try:
        story(*parts)
    except (AssertionError, InvariantViolated, IndexError, KeyError):
        return True
    return False


@pytest.mark.rotating
@pytest.mark.parametrize("plant", STORY_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(STORIES):
        draw = random.Random(seed)
        if breaks(told, [drawn_step(draw) for _ in range(draw.randint(1, 25))]):
            return
    pytest.fail("no story breaks")


@pytest.mark.rotating
@pytest.mark.parametrize("plant", LOADING_BUGS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_loading_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(STORIES):
        draw = random.Random(seed)
        before = (drawn_rows(draw), drawn_rows(draw), [drawn_step(draw) for _ in range(draw.randint(0, 3))])
        steps = [drawn_loading_step(draw) for _ in range(draw.randint(1, 25))]
        if breaks(loaded_beside, before, steps, [drawn_step(draw) for _ in range(draw.randint(0, 25))]):
            return
    pytest.fail("no story breaks")


registry.register("id map", (*STORY_BUGS, *LOADING_BUGS))
