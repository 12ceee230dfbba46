"""The probe refuses stores that break a promise: each store here breaks one."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import pytest

from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import (
    NO_METADATA,
    AlreadyExists,
    ListedObject,
    NotFound,
    ObjectInfo,
    StoreRefused,
    StoreUnavailable,
)
from storage_backends.probe import RACERS, probe
from tests._support.fault_store import Fault, FaultStore, Script


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


def test_a_lost_answer_is_no_broken_promise() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER, times=2)
    script.plan("put_if_absent", Fault.FAIL_AFTER, key_part="race-1", times=RACERS)
    store = FaultStore(MemoryStore(), script)
    probe(store, "probe/one", races=5)
    assert script.unmet() == 0
    assert list(store.list("")) == []


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
