"""Whatever joins and leaves, each slot has the owner that a plain model says, and counts and ranges say the same."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.key_shared import hash_selectors
from daemon.core.key_shared.hash_selectors import HashSelector, Joiner
from daemon.core.key_shared.hash_slots import HASH_SLOTS, U16, HashRange
from daemon.errors import InvalidArgument, InvariantViolated
from storage_backends.formats.manifest import HashSelector as Kind

POINTS = 3
ALL = HashRange(0, HASH_SLOTS - 1)
Plant = Callable[[pytest.MonkeyPatch], None]

# ---- models: everything again after each change


class Model:
    """`owners`, made anew from who is there."""

    def __init__(self) -> None:
        self.there: dict[int, Joiner] = {}

    def join(self, joiner: Joiner) -> None:
        """ValueError when it may not."""
        if joiner.hash_ranges:
            raise ValueError("ranges")
        self.there[joiner.ordinal] = joiner

    def leave(self, ordinal: int) -> None:
        del self.there[ordinal]

    def owners(self) -> U16:
        raise NotImplementedError


class AutoSplitModel(Model):
    slots = HASH_SLOTS

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, range]] = []

    def join(self, joiner: Joiner) -> None:
        super().join(joiner)
        if not self.ranges:
            self.ranges = [(joiner.ordinal, range(self.slots))]
            return
        place = max(range(len(self.ranges)), key=lambda each: (len(self.ranges[each][1]), -each))
        ordinal, slots = self.ranges[place]
        keeps = (len(slots) + 1) // 2
        self.ranges[place : place + 1] = [(ordinal, slots[:keeps]), (joiner.ordinal, slots[keeps:])]

    def leave(self, ordinal: int) -> None:
        super().leave(ordinal)
        place = [each for each, _ in self.ranges].index(ordinal)
        _, slots = self.ranges.pop(place)
        if self.ranges:
            heir, had = self.ranges[max(place - 1, 0)]
            self.ranges[max(place - 1, 0)] = heir, range(min(had[0], slots[0]), max(had[-1], slots[-1]) + 1)

    def owners(self) -> U16:
        owners = np.zeros(self.slots, np.uint16)
        for ordinal, slots in self.ranges:
            owners[slots] = ordinal
        return owners


class ConsistentHashingModel(Model):
    def __init__(self) -> None:
        super().__init__()
        self.instances: dict[int, int] = {}

    def join(self, joiner: Joiner) -> None:
        super().join(joiner)
        taken = {self.instances[each] for each in self.instances if self.there[each].name == joiner.name}
        self.instances[joiner.ordinal] = next(number for number in itertools.count() if number not in taken)

    def leave(self, ordinal: int) -> None:
        super().leave(ordinal)
        del self.instances[ordinal]

    def owners(self) -> U16:
        ring: dict[int, tuple[str, int, int]] = {}
        for ordinal, instance in self.instances.items():
            name = self.there[ordinal].name
            for point in hash_selectors.points_of(name, instance, POINTS).tolist():
                ring[point] = min(ring.get(point, (name, instance, ordinal)), (name, instance, ordinal))
        if not ring:
            return np.zeros(HASH_SLOTS, np.uint16)
        ascending = sorted(ring)
        owner_at = np.array([ring[point][2] for point in ascending], np.uint16)
        stands = np.arange(HASH_SLOTS, dtype=np.uint64) << np.uint64(16)
        return owner_at[np.searchsorted(np.array(ascending, np.uint64), stands) % len(ascending)]


class StickyModel(Model):
    def join(self, joiner: Joiner) -> None:
        had = self.owners()
        for each in joiner.hash_ranges:
            if had[each.first : each.last + 1].any():
                raise ValueError("overlap")
            had[each.first : each.last + 1] = joiner.ordinal
        if not joiner.hash_ranges:
            raise ValueError("no ranges")
        self.there[joiner.ordinal] = joiner

    def owners(self) -> U16:
        owners = np.zeros(HASH_SLOTS, np.uint16)
        for joiner in self.there.values():
            for each in joiner.hash_ranges:
                owners[each.first : each.last + 1] = joiner.ordinal
        return owners


MODELS: dict[Kind, type[Model]] = {
    Kind.AUTO_SPLIT: AutoSplitModel,
    Kind.CONSISTENT_HASHING: ConsistentHashingModel,
    Kind.STICKY: StickyModel,
}


# ---- histories


@dataclasses.dataclass(frozen=True)
class Change:
    """Names and ranges of those who join together; or which of those who are there leave together."""

    joining: tuple[tuple[str, tuple[HashRange, ...]], ...] = ()
    leaving: frozenset[int] = frozenset()


BOUNDS = (0, 1, 2, 9_999, 10_000, 32_767, 32_768, 40_000, HASH_SLOTS - 2, HASH_SLOTS - 1)
RANGES = st.tuples(st.sampled_from(BOUNDS), st.sampled_from(BOUNDS)).map(lambda pair: HashRange(min(pair), max(pair)))
NAMES = st.sampled_from(["a", "b", "c", "ab"])
# A search for a planted bug ends at the first history that meets it.
PLANTED_EXAMPLES_MAX = 400


def histories(kind: Kind) -> st.SearchStrategy[list[Change]]:
    # Also what is refused: ranges where there may be none, and none where there must be some.
    ranges = st.lists(RANGES, max_size=2) if kind is Kind.STICKY else st.just([])
    joins = st.lists(st.tuples(NAMES, ranges.map(tuple)), min_size=1, max_size=4)
    leaves = st.frozensets(st.integers(0, 12), min_size=1, max_size=4)
    changes = st.one_of(
        joins.map(lambda joining: Change(joining=tuple(joining))), leaves.map(lambda leaving: Change(leaving=leaving))
    )
    return st.lists(changes, min_size=1, max_size=12)


def check(selector: HashSelector, model: Model) -> None:
    expected = model.owners()
    assert np.array_equal(selector.owners, expected)
    for ordinal in model.there:
        slots = np.flatnonzero(expected == ordinal)
        assert selector.slots_of_consumer(ordinal) == len(slots)
        ranges = selector.ranges_of(ordinal)
        of_ranges = [np.arange(each.first, each.last + 1) for each in ranges]
        assert np.array_equal(np.concatenate([*of_ranges, np.empty(0, np.intp)]), slots)
        assert all(lower.last + 1 < upper.first for lower, upper in itertools.pairwise(ranges))


def follow(kind: Kind, history: Iterable[Change]) -> None:
    selector, model = hash_selectors.selector_of(kind, POINTS), MODELS[kind]()
    for change in history:
        free = (ordinal for ordinal in itertools.count(1) if ordinal not in model.there)
        joiners = [Joiner(next(free), name, ranges) for name, ranges in change.joining]
        trial = MODELS[kind]()
        trial.__dict__ = {name: value.copy() for name, value in vars(model).items()}
        try:
            for joiner in joiners:
                trial.join(joiner)
        except ValueError:
            with pytest.raises(InvalidArgument):
                selector.join(joiners)
        else:
            selector.join(joiners)
            model = trial
        there = list(model.there)
        leaving = {there[each] for each in change.leaving if each < len(there)}
        selector.leave(leaving)
        for ordinal in leaving:
            model.leave(ordinal)
        check(selector, model)


def crowd(patch: pytest.MonkeyPatch) -> None:
    """A ring of few places: points collide all the time, at the bounds of slots, too, and at both ends."""
    points_of = hash_selectors.points_of
    places = np.array([0, 1, 0xFFFF, 0x1_0000, 0x8000_0000, 0x8000_0001, 0xFFFF_0000, 0xFFFF_FFFF], np.uint32)
    patch.setattr(
        hash_selectors,
        "points_of",
        lambda name, instance, count: places[points_of(name, instance, count) % len(places)],
    )


def few_slots(patch: pytest.MonkeyPatch) -> None:
    """So few that ranges come to have an odd number of them."""
    for where, name in ((hash_selectors, "HASH_SLOTS"), (AutoSplitModel, "slots")):
        patch.setattr(where, name, 1_001)


def follow_any(kind: Kind, setting: Plant | None = None, *, is_planted: bool = False) -> None:
    """Follows histories. Where a bug is planted, until one meets it, which nobody needs to have shrunk."""
    of_search = hypothesis.settings(max_examples=PLANTED_EXAMPLES_MAX, phases=(hypothesis.Phase.generate,))

    @hypothesis.settings(
        of_search if is_planted else hypothesis.settings(),
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @given(history=histories(kind))
    def follow_each(history: list[Change]) -> None:
        follow(kind, history)

    with pytest.MonkeyPatch.context() as patch:
        if setting is not None:
            setting(patch)
        follow_each()


@pytest.mark.parametrize("kind", Kind)
def test_each_slot_has_the_owner_that_the_model_says_whatever_joins_and_leaves(kind: Kind) -> None:
    follow_any(kind)


def test_ranges_of_an_odd_number_of_slots_are_split_as_the_model_says_whatever_joins_and_leaves() -> None:
    follow_any(Kind.AUTO_SPLIT, few_slots)


def test_points_that_collide_are_ordered_by_name_and_instance_whatever_joins_and_leaves() -> None:
    follow_any(Kind.CONSISTENT_HASHING, crowd)


# ---- all of them


def joiners_of(kind: Kind, count: int, first: int = 1) -> list[Joiner]:
    width = HASH_SLOTS // 16
    return [
        Joiner(
            ordinal,
            f"consumer {ordinal}",
            (HashRange(width * (ordinal - 1), width * ordinal - 1),) if kind is Kind.STICKY else (),
        )
        for ordinal in range(first, first + count)
    ]


@pytest.mark.parametrize("kind", Kind)
def test_what_is_a_bug_of_the_caller_changes_nothing(kind: Kind) -> None:
    selector = hash_selectors.selector_of(kind, POINTS)
    selector.join(joiners_of(kind, 3))
    before = selector.owners.copy()
    wrong: list[Callable[[], object]] = [
        lambda: selector.join([*joiners_of(kind, 1, first=4), *joiners_of(kind, 1, first=3)]),
        lambda: selector.join([*joiners_of(kind, 1, first=4), *joiners_of(kind, 1, first=4)]),
        lambda: selector.join([dataclasses.replace(each, ordinal=0) for each in joiners_of(kind, 1, first=4)]),
        lambda: selector.join([dataclasses.replace(each, ordinal=65_536) for each in joiners_of(kind, 1, first=4)]),
        lambda: selector.leave([2, 4]),
        lambda: selector.leave([2, 2]),
        lambda: selector.slots_of_consumer(4),
        lambda: selector.ranges_of(4),
    ]
    for call in wrong:
        with pytest.raises(InvariantViolated):
            call()
        assert np.array_equal(selector.owners, before)
        assert sum(selector.slots_of_consumer(ordinal) for ordinal in (1, 2, 3)) == np.count_nonzero(before)
    selector.join(joiners_of(kind, 1, first=4))
    selector.leave([1, 2, 3, 4])
    assert not selector.owners.any()


@pytest.mark.parametrize("kind", [Kind.AUTO_SPLIT, Kind.CONSISTENT_HASHING])
def test_a_consumer_that_says_its_slots_is_refused_where_the_selector_divides_them(kind: Kind) -> None:
    selector = hash_selectors.selector_of(kind, POINTS)
    with pytest.raises(InvalidArgument, match=rf'hash_ranges of consumer "b" has 1 ranges; with {kind.name} it must'):
        selector.join([Joiner(1, "a"), Joiner(2, "b", (ALL,))])
    assert not selector.owners.any()
    with pytest.raises(InvariantViolated):
        selector.slots_of_consumer(1)


# ---- AUTO_SPLIT


def auto_split_of(count: int) -> hash_selectors.AutoSplit:
    selector = hash_selectors.AutoSplit()
    for joiner in joiners_of(Kind.AUTO_SPLIT, count):
        selector.join([joiner])
    return selector


def test_who_joins_has_the_upper_half_of_the_largest_range_the_lowest_of_several() -> None:
    selector = auto_split_of(1)
    assert selector.ranges_of(1) == [ALL]
    selector.join([Joiner(2, "b"), Joiner(3, "c")])
    assert selector.ranges_of(1) == [HashRange(0, 16_383)]
    assert selector.ranges_of(3) == [HashRange(16_384, 32_767)]
    assert selector.ranges_of(2) == [HashRange(32_768, 65_535)]
    selector.join([Joiner(4, "d")])
    assert selector.ranges_of(4) == [HashRange(49_152, 65_535)]


def test_who_leaves_gives_its_range_to_the_one_below_and_the_lowest_to_the_one_above() -> None:
    selector = auto_split_of(4)
    selector.leave([2])
    assert selector.ranges_of(3) == [HashRange(16_384, 49_151)]
    selector.leave([1])
    assert selector.ranges_of(3) == [HashRange(0, 49_151)]
    assert selector.ranges_of(4) == [HashRange(49_152, 65_535)]


@given(there=st.integers(1, 40), joins=st.integers(1, 10))
def test_joining_and_leaving_again_changes_nothing(there: int, joins: int) -> None:
    selector = auto_split_of(there)
    before = selector.owners.copy()
    for joiner in joiners_of(Kind.AUTO_SPLIT, joins, first=there + 1):
        selector.join([joiner])
    selector.leave(range(there + 1, there + joins + 1))
    assert np.array_equal(selector.owners, before)


def test_as_many_consumers_as_may_be_there_all_have_a_slot() -> None:
    selector = hash_selectors.AutoSplit()
    selector.join(joiners_of(Kind.AUTO_SPLIT, 10_000))
    slots = np.bincount(selector.owners)[1:]
    assert len(slots) == 10_000
    assert slots.min() >= 4
    assert slots.max() <= 2 * slots.min()


# ---- CONSISTENT_HASHING


def consistent_of(*batches: Sequence[Joiner], points: int = 100) -> hash_selectors.ConsistentHashing:
    selector = hash_selectors.ConsistentHashing(points)
    for joiners in batches:
        selector.join(joiners)
    return selector


def test_where_points_lie_is_the_same_for_every_daemon_and_version() -> None:
    assert hash_selectors.points_of("a", 0, 3).tolist() == [2466133276, 780192012, 2696851533]
    assert hash_selectors.points_of("a", 1, 2).tolist() == [3100543712, 193362681]


def test_more_points_begin_with_those_that_fewer_have() -> None:
    assert np.array_equal(hash_selectors.points_of("a", 0, 9)[:4], hash_selectors.points_of("a", 0, 4))


@given(seed=st.integers(0, 1 << 16), left=st.sets(st.integers(1, 30), max_size=29))
def test_who_was_there_once_and_who_came_first_do_not_matter(seed: int, left: set[int]) -> None:
    joiners = joiners_of(Kind.CONSISTENT_HASHING, 30)
    shuffled = joiners.copy()
    random.Random(seed).shuffle(shuffled)
    with pytest.MonkeyPatch.context() as patch:
        if seed % 2:
            crowd(patch)
        one_by_one = consistent_of(*([each] for each in shuffled), points=20)
        for ordinal in left:
            one_by_one.leave([ordinal])
        never = consistent_of([each for each in joiners if each.ordinal not in left], points=20)
    assert np.array_equal(one_by_one.owners, never.owners)


def test_only_slots_of_who_joins_or_leaves_move_and_about_1_in_n() -> None:
    selector = consistent_of(joiners_of(Kind.CONSISTENT_HASHING, 50))
    before = selector.owners.copy()
    selector.join([Joiner(51, "consumer 51")])
    moved = selector.owners != before
    assert set(selector.owners[moved].tolist()) == {51}
    assert 0.5 / 51 < moved.mean() < 2 / 51
    assert len(np.unique(before[moved])) > 25
    selector.leave([51])
    assert np.array_equal(selector.owners, before)


def test_consumers_of_one_name_are_different_instances_and_each_keeps_its_slots_when_another_leaves() -> None:
    selector = consistent_of([Joiner(ordinal, "same") for ordinal in range(1, 11)])
    assert min(map(selector.slots_of_consumer, range(1, 11))) > HASH_SLOTS // 20
    before = selector.owners.copy()
    selector.leave([1])
    kept = before != 1
    assert np.array_equal(selector.owners[kept], before[kept])
    # Who joins has the lowest number that is free.
    selector.leave([5, 3])
    selector.join([Joiner(ordinal, "same") for ordinal in (20, 21, 22)])
    for ordinal, former in ((20, 1), (21, 3), (22, 5)):
        assert np.array_equal(selector.owners == ordinal, before == former)


def test_who_comes_back_with_its_name_has_its_slots_again() -> None:
    selector = consistent_of(joiners_of(Kind.CONSISTENT_HASHING, 20))
    before = selector.owners.copy()
    selector.leave([7])
    selector.join([Joiner(33, "consumer 7")])
    assert np.array_equal(selector.owners == 33, before == 7)
    assert np.array_equal(selector.owners[before != 7], before[before != 7])


def test_a_consumer_whose_points_count_for_nothing_has_no_slots_until_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hash_selectors, "points_of", lambda name, instance, count: np.array([1 << 31], np.uint32))
    selector = consistent_of([Joiner(1, "z")], points=1)
    selector.join([Joiner(2, "b")])
    assert (selector.slots_of_consumer(1), selector.slots_of_consumer(2)) == (0, HASH_SLOTS)
    assert (selector.ranges_of(1), selector.ranges_of(2)) == ([], [ALL])
    selector.join([Joiner(3, "c")])
    assert selector.slots_of_consumer(3) == 0
    selector.leave([2])
    assert (selector.slots_of_consumer(1), selector.slots_of_consumer(3)) == (0, HASH_SLOTS)
    selector.leave([3])
    assert selector.ranges_of(1) == [ALL]


# ---- STICKY


def test_a_slot_of_another_consumer_is_refused_by_the_names_and_ranges_of_both() -> None:
    selector = hash_selectors.Sticky()
    selector.join([Joiner(1, "a", (HashRange(50, 99), HashRange(200, 299)))])
    before = selector.owners.copy()
    with pytest.raises(
        InvalidArgument,
        match='hash_ranges of consumer "b": 150 to 200 overlaps 200 to 299 of consumer "a"; a slot has one consumer',
    ):
        selector.join([Joiner(3, "c", (HashRange(0, 49),)), Joiner(2, "b", (HashRange(100, 149), HashRange(150, 200)))])
    with pytest.raises(InvalidArgument, match='"e": 600 to 600 overlaps 500 to 700 of consumer "d"'):
        selector.join([Joiner(4, "d", (HashRange(500, 700),)), Joiner(5, "e", (HashRange(600, 600),))])
    with pytest.raises(InvalidArgument, match='hash_ranges of consumer "f": 9 to 12 and 8 to 9 overlap'):
        selector.join([Joiner(6, "f", (HashRange(9, 12), HashRange(8, 9)))])
    with pytest.raises(InvalidArgument, match='hash_ranges of consumer "g" is empty'):
        selector.join([Joiner(7, "g")])
    assert np.array_equal(selector.owners, before)
    with pytest.raises(InvariantViolated):
        selector.slots_of_consumer(3)


def test_slots_that_nobody_says_are_nobodys() -> None:
    selector = hash_selectors.Sticky()
    selector.join([Joiner(1, "a", (HashRange(0, 9),)), Joiner(2, "b", (HashRange(20, 29), HashRange(30, 39)))])
    assert selector.ranges_of(2) == [HashRange(20, 39)]
    assert selector.owners[[0, 9, 10, 19, 20, 39, 40, 65_535]].tolist() == [1, 1, 0, 0, 2, 2, 0, 0]
    selector.leave([2])
    assert np.flatnonzero(selector.owners).tolist() == list(range(10))
    selector.join([Joiner(3, "c", (HashRange(10, 65_535),))])
    assert selector.slots_of_consumer(3) == 65_526
