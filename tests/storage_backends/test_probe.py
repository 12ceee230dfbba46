"""The probe refuses stores that break a promise, and no others.

Owns: a store for each promise, which breaks it; correct stores whose answers are missing or misleading.
Does not own: servers (`test_probe_of_servers`), and what a daemon probes when (`tests.daemon.test_store_probe`).
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest

from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    Bucket,
    ListedObject,
    NotFound,
    ObjectInfo,
    StoreRefused,
    StoreUnavailable,
)
from storage_backends.probe import (
    MISSED_BY_A_RACE,
    MISSED_MAX,
    RACERS,
    RACES,
    RACES_WITHOUT_WINNER_MAX,
    BrokenPromise,
    NotJudged,
    forget,
    has_passed,
    probe,
    remember,
)
from tests._support.fault_store import Call, Fault, FaultStore, Script


class IgnoresConditions(MemoryStore):
    """Takes a conditional write for a plain one."""

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        self.put(key, body, metadata=metadata)


class ChecksThenActs(MemoryStore):
    """Looks whether the key is free, and writes later: two that look at once both write."""

    def __init__(self) -> None:
        super().__init__()
        self._looked = threading.Barrier(2)

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        try:
            self.head(key)
        except NotFound:
            if "race" in key:
                self._meet()
            self.put(key, body, metadata=metadata)
        else:
            raise AlreadyExists(key, "exists")

    def _meet(self) -> None:
        """Wait for a second one that found the key free, if there is one."""
        try:
            self._looked.wait(timeout=300)
        except threading.BrokenBarrierError:
            self._looked.reset()


class TellsTheLoserThatItWon(MemoryStore):
    """Keeps the first object, and hides that it refused the second."""

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        try:
            super().put_if_absent(key, body, metadata=metadata)
        except AlreadyExists:
            return


class CreatesNothing(MemoryStore):
    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        raise AlreadyExists(key, "exists, it says")


class LosesMetadata(MemoryStore):
    def head(self, key: str) -> ObjectInfo:
        info = super().head(key)
        return ObjectInfo(info.key, info.size_bytes, NO_METADATA)


class ListsLate(MemoryStore):
    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ListedObject]:
        return iter(tuple(super().list(prefix, start_after=start_after))[:-1])


class IgnoresRanges(MemoryStore):
    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.get(key)


class KeepsTheFirstPut(MemoryStore):
    def put(self, key: str, body: bytes, *, metadata: Mapping[str, str] = NO_METADATA) -> None:
        try:
            self.put_if_absent(key, body, metadata=metadata)
        except AlreadyExists:
            return


class MissesTheDeleted(MemoryStore):
    def delete(self, key: str) -> None:
        self.head(key)
        super().delete(key)


class DeletesNothing(MemoryStore):
    def delete(self, key: str) -> None:
        self.head(key)


@pytest.mark.parametrize(
    ("store", "reason"),
    [
        (IgnoresConditions(), "ignores the condition"),
        (ChecksThenActs(), "the store checks, and writes later"),
        (TellsTheLoserThatItWon(), "ignores the condition"),
        (CreatesNothing(), "says that an absent object exists"),
        (LosesMetadata(), "does not give back the metadata"),
        (ListsLate(), "list does not show"),
        (IgnoresRanges(), "get_range gives other bytes"),
        (KeepsTheFirstPut(), "does not give what that put stored"),
        (MissesTheDeleted(), "must succeed"),
        (DeletesNothing(), "still there"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, MemoryStore) else "",
)
def test_a_store_that_breaks_a_promise_is_refused_by_name(store: MemoryStore, reason: str) -> None:
    with pytest.raises(StoreRefused, match=reason) as refused:
        probe(store, "probe/one", races=5)
    assert refused.value.key.startswith("probe/one")


@pytest.mark.parametrize(
    "store", [IgnoresConditions(), ChecksThenActs(), IgnoresRanges()], ids=lambda s: type(s).__name__
)
def test_a_refused_store_is_left_clean(store: MemoryStore) -> None:
    with pytest.raises(StoreRefused):
        probe(store, "probe/one", races=5)
    assert list(store.list("")) == []


def test_a_prefix_that_is_in_use_is_refused() -> None:
    store = MemoryStore()
    store.put("probe/one/once", b"somebody's")
    with pytest.raises(StoreRefused, match="the prefix is not free"):
        probe(store, "probe/one", races=5)


def test_the_long_probe_misses_one_store_in_a_hundred_thousand() -> None:
    assert MISSED_BY_A_RACE**RACES <= MISSED_MAX < MISSED_BY_A_RACE ** (RACES - 1)


class HidesItMostly(MemoryStore):
    """Checks first and writes later; what a race shows of it is chosen by its key."""

    def __init__(self, shows: Callable[[str], bool]) -> None:
        super().__init__()
        self._shows = shows

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        try:
            super().put_if_absent(key, body, metadata=metadata)
        except AlreadyExists:
            if "race-" not in key or not self._shows(key):
                raise
            self.put(key, body, metadata=metadata)


def test_a_store_that_hides_it_until_the_last_race_is_refused() -> None:
    store = HidesItMostly(lambda key: key.endswith(f"race-{RACES - 1}"))
    with pytest.raises(BrokenPromise, match=r"8 of 8 concurrent put_if_absent won: the store checks, and writes later"):
        probe(store, "probe/one", races=RACES)
    assert list(store.list("")) == []


@pytest.mark.parametrize("seed", range(30))
def test_a_store_that_hides_it_as_often_as_was_measured_is_refused(seed: int) -> None:
    store = HidesItMostly(lambda key: random.Random(f"{seed} {key}").random() >= MISSED_BY_A_RACE)
    with pytest.raises(BrokenPromise, match="the store checks, and writes later"):
        probe(store, "probe/one", races=RACES)


def test_what_is_broken_is_told_with_what_to_do() -> None:
    with pytest.raises(BrokenPromise, match="use another store, or a release of its server that keeps it"):
        probe(IgnoresConditions(), "probe/one", races=1)


def test_a_lost_answer_is_no_broken_promise() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER, times=2)
    script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="race-1", times=RACERS)
    store = FaultStore(MemoryStore(), script)
    probe(store, "probe/one", races=5)
    assert script.unmet() == 0
    assert list(store.list("")) == []


def conditional(decide: Callable[[Call], Fault]) -> Callable[[Call], Fault]:
    """Faults of conditional writes alone: the stores themselves repeat everything else."""
    return lambda call: decide(call) if call.operation == "put_if_absent" else Fault.NONE


def drawn(seed: int, part: float) -> Callable[[Call], Fault]:
    """One of the ways to fail, of that part of the conditional writes: answers are missing, or say 409 for nothing."""
    ways = (Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE, Fault.ANSWER_EXISTS)
    source = random.Random(seed)
    drawing = threading.Lock()

    def decide(call: Call) -> Fault:
        with drawing:
            return source.choice(ways) if source.random() < part else Fault.NONE

    return conditional(decide)


@pytest.mark.parametrize("part", [0.05, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(10))
def test_a_correct_store_of_which_requests_fail_passes(seed: int, part: float) -> None:
    store = FaultStore(MemoryStore(), drawn(seed, part))
    probe(store, "probe/one", races=RACES, wait=lambda seconds: None)
    assert list(store.list("")) == []
    # A race without a winner, or with writers that were not answered, is made up for.
    assert len({call.key for call in store.calls if "race-" in call.key}) > RACES


@pytest.mark.parametrize("first", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE, Fault.ANSWER_EXISTS])
@pytest.mark.parametrize("number", range(20))
def test_no_single_answer_that_is_missing_or_misleading_accuses(number: int, first: Fault) -> None:
    writes = itertools.count()
    store = FaultStore(MemoryStore(), conditional(lambda call: first if next(writes) == number else Fault.NONE))
    probe(store, "probe/one", races=1)
    assert next(writes) > number
    store.deliver_late()
    assert len(list(store.list(""))) <= 1, "what lands late is all that may be left"


class RepeatedOnItsWay(MemoryStore):
    """A store behind a proxy that repeats some writes whose answer it lost: the winner is told that it exists."""

    def __init__(self, is_repeated: Callable[[], bool]) -> None:
        super().__init__()
        self._is_repeated = is_repeated

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        if self._is_repeated():
            raise AlreadyExists(key, "exists")


def test_a_store_behind_a_proxy_that_repeats_writes_passes() -> None:
    source = random.Random(7)
    store = RepeatedOnItsWay(lambda: source.random() < 0.3)
    probe(store, "probe/one", races=RACES)
    assert list(store.list("")) == []


def test_a_store_is_not_judged_by_writes_that_are_always_repeated() -> None:
    with pytest.raises(NotJudged, match="none of 20 writes succeeded: an object of its own is said"):
        probe(RepeatedOnItsWay(lambda: True), "probe/one", races=RACES)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER])
@pytest.mark.parametrize("trial", ["once", "race", "replaced", "deleted"])
def test_a_store_that_does_not_answer_a_trial_is_not_judged_and_it_is_said_why(trial: str, fault: Fault) -> None:
    store = FaultStore(MemoryStore(), conditional(lambda call: fault if f"{trial}-" in call.key else Fault.NONE))
    waits: list[float] = []
    with pytest.raises(NotJudged, match=r"the store could not be judged: .*: fault: ") as told:
        probe(store, "probe/one", races=RACES, wait=waits.append)
    assert "does not accuse it" in told.value.reason
    assert len({call.key for call in store.calls if f"{trial}-" in call.key}) == 20
    assert sum(waits) <= RACES_WITHOUT_WINNER_MAX * 2.0
    assert list(store.list("")) == []


def test_a_store_that_answers_too_slowly_is_not_judged() -> None:
    clock = itertools.count(0, 11)
    with pytest.raises(NotJudged, match=r"races were answered within 3\d\d s"):
        probe(MemoryStore(), "probe/one", races=RACES, monotonic=lambda: float(next(clock)))


def test_a_race_counts_for_the_pairs_of_writers_that_were_answered() -> None:
    """Half of the writers are answered: six pairs of twenty-eight."""
    answered: dict[str, int] = {}
    counting = threading.Lock()

    def decide(call: Call) -> Fault:
        with counting:
            answered[call.key] = answered.get(call.key, 0) + 1
            return Fault.NONE if "race-" not in call.key or answered[call.key] <= RACERS // 2 else Fault.FAIL_BEFORE

    store = FaultStore(MemoryStore(), conditional(decide))
    probe(store, "probe/one", races=10)
    raced = sum("race-" in key for key in answered)
    missed = 1 - (1 - MISSED_BY_A_RACE) * 6 / 28
    assert missed**raced <= MISSED_BY_A_RACE**10 < missed ** (raced - 1)


def test_the_probe_ends_when_it_is_not_waited_for_any_longer() -> None:
    class Ended(Exception):
        pass

    def wait(seconds: float) -> None:
        assert seconds == 0.5
        if next(waits) == 12:
            raise Ended

    waits = itertools.count()
    store = MemoryStore()
    with pytest.raises(Ended):
        probe(store, "probe/one", races=RACES, between_s=0.5, wait=wait)
    assert list(store.list("")) == []


def test_a_pass_is_that_of_the_same_bucket_of_the_same_server_and_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    store, bucket = MemoryStore(), Bucket("http://one:9000", "orders")
    assert not has_passed(store, bucket)
    remember(store, bucket, now_ms=7)
    assert has_passed(store, bucket)
    assert not has_passed(store, Bucket("http://two:9000", "orders"))
    assert not has_passed(store, Bucket("http://one:9000", "others"))
    monkeypatch.setattr("storage_backends.probe.VERSION", 2)
    assert not has_passed(store, bucket)


def test_a_damaged_pass_counts_for_nothing_and_a_forgotten_one_neither() -> None:
    store, bucket = MemoryStore(), Bucket("http://one:9000", "orders")
    remember(store, bucket, now_ms=7)
    store.put("probe/passed", store.get("probe/passed")[:-1])
    assert not has_passed(store, bucket)
    remember(store, bucket, now_ms=7)
    forget(store)
    assert not has_passed(store, bucket)
    forget(store)


def test_a_store_that_is_away_is_not_called_broken() -> None:
    store = FaultStore(MemoryStore())
    store.go_down()
    with pytest.raises(StoreUnavailable):
        probe(store, "probe/one", races=5)


def test_the_race_is_run_as_often_as_it_is_said() -> None:
    store = FaultStore(MemoryStore())
    probe(store, "probe/one", races=5)
    raced = [call for call in store.calls if call.operation == "put_if_absent" and "race" in call.key]
    assert len(raced) == RACERS * 5 == 40
