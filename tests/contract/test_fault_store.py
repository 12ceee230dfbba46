"""The store that fails: each fault does what its name says, once, and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import (
    AlreadyExists,
    Damaged,
    NotFound,
    ObjectStore,
    OutcomeUnknown,
    StoreError,
    StoreRefused,
    StoreUnavailable,
)
from tests._support.fault_store import Fault, FaultStore, Pause, Script, applies, seeded

BODY = b"some bytes of a body"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def store(memory: MemoryStore, script: Script) -> FaultStore:
    return FaultStore(memory, script)


def test_failing_before_does_nothing(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    for operation in ("put_if_absent", "put"):
        script.plan(operation, Fault.FAIL_BEFORE)
    with pytest.raises(StoreUnavailable):
        store.put_if_absent("a", BODY, metadata={})
    with pytest.raises(StoreUnavailable):
        store.put("a", BODY)
    assert list(memory.list("")) == []
    store.put_if_absent("a", BODY, metadata={})


def test_failing_after_does_it_and_loses_the_answer(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    script.plan("put_if_absent", Fault.FAIL_AFTER, times=2)
    for _ in range(2):  # the second one loses a refusal
        with pytest.raises(OutcomeUnknown):
            store.put_if_absent("a", BODY, metadata={})
    assert memory.get("a") == BODY
    script.plan("put", Fault.FAIL_AFTER)
    with pytest.raises(StoreUnavailable):
        store.put("b", BODY)
    assert memory.get("b") == BODY
    script.plan("delete", Fault.FAIL_AFTER)
    with pytest.raises(StoreUnavailable):
        store.delete("b")
    with pytest.raises(NotFound):
        memory.get("b")
    script.plan("head", Fault.FAIL_AFTER)
    with pytest.raises(StoreUnavailable):
        store.head("b")


def test_a_late_write_lands_when_it_is_delivered(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    script.plan("put_if_absent", Fault.DELIVER_LATE, times=2)
    for key in ("free", "taken"):
        with pytest.raises(OutcomeUnknown):
            store.put_if_absent(key, BODY, metadata={"commitid": "late"})
    with pytest.raises(NotFound):
        store.head("free")
    store.put_if_absent("taken", b"fence", metadata={"commitid": "fence"})
    assert store.deliver_late() == 1
    assert memory.head("free").metadata == {"commitid": "late"}
    assert memory.head("taken").metadata == {"commitid": "fence"}
    assert store.deliver_late() == 0


def test_an_answer_of_existence_may_be_wrong(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    script.plan("put_if_absent", Fault.ANSWER_EXISTS)
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", BODY, metadata={})
    assert list(memory.list("")) == []


def test_reads_are_cut_and_altered(store: FaultStore, script: Script) -> None:
    store.put("a", BODY)
    for operation in ("get_with_metadata", "get_range"):
        script.plan(operation, Fault.SHORT)
        script.plan(operation, Fault.FLIP_BIT)
    with pytest.raises(Damaged):
        store.get("a")
    with pytest.raises(Damaged):
        store.get_range("a", 2, 5)
    altered, cut_out = store.get("a"), store.get_range("a", 2, 5)
    assert _bits_that_differ(altered, BODY) == 1
    assert _bits_that_differ(cut_out, BODY[2:7]) == 1
    assert store.get("a") == BODY


def _bits_that_differ(one: bytes, other: bytes) -> int:
    assert len(one) == len(other)
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


def test_a_refusal_does_nothing(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    script.plan("put", Fault.REFUSE)
    with pytest.raises(StoreRefused):
        store.put("a", BODY)
    assert list(memory.list("")) == []


def test_while_the_store_is_down_nothing_reaches_it(store: FaultStore, memory: MemoryStore) -> None:
    store.put("a", BODY)
    store.go_down()
    with pytest.raises(StoreUnavailable):
        store.get("a")
    with pytest.raises(StoreUnavailable):
        list(store.list(""))
    with pytest.raises(StoreUnavailable):
        store.put("b", BODY)
    store.come_back()
    assert [found.key for found in store.list("")] == ["a"]
    assert memory.get("a") == BODY


def test_a_paused_call_waits_until_it_is_released(store: FaultStore, memory: MemoryStore, script: Script) -> None:
    pause = script.pause("put_if_absent", key_part="journal/", then=Fault.FAIL_AFTER)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(store.put_if_absent, "journal/1", BODY, metadata={})
        assert pause.reached.wait(timeout=300)
        store.put("other", BODY)
        assert {found.key for found in memory.list("")} == {"other"}
        pause.released.set()
        with pytest.raises(OutcomeUnknown):
            writing.result(timeout=300)
    assert memory.get("journal/1") == BODY


def test_a_paused_call_that_is_released_while_the_store_is_down_fails(store: FaultStore, script: Script) -> None:
    pause = script.pause("put")
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(store.put, "a", BODY)
        assert pause.reached.wait(timeout=300)
        store.go_down()
        pause.released.set()
        with pytest.raises(StoreUnavailable):
            writing.result(timeout=300)


def test_a_script_meets_the_first_call_that_fits(store: FaultStore, script: Script) -> None:
    script.plan("put", Fault.REFUSE, key_part="/b", times=2)
    store.put("a/a", BODY)
    for _ in range(2):
        with pytest.raises(StoreRefused):
            store.put("a/b", BODY)
    store.put("a/b", BODY)
    assert script.unmet() == 0
    assert [(call.operation, call.key, call.number) for call in store.calls][:2] == [
        ("put", "a/a", 0),
        ("put", "a/b", 1),
    ]


def test_a_fault_that_cannot_happen_to_the_call_is_a_mistake_of_the_test(store: FaultStore, script: Script) -> None:
    script.plan("head", Fault.FLIP_BIT)
    with pytest.raises(ValueError, match="cannot happen"):
        store.head("a")


def test_one_seed_gives_one_course_of_faults() -> None:
    weights: dict[Fault, float] = {fault: 0.08 for fault in Fault if fault is not Fault.NONE}
    courses = [_course(FaultStore(MemoryStore(), seeded(Random(7), weights))) for _ in range(2)]
    assert courses[0] == courses[1]
    assert {"OutcomeUnknown", "StoreUnavailable", "AlreadyExists", "Damaged", "StoreRefused", "ok"} <= set(courses[0])
    assert _course(FaultStore(MemoryStore(), seeded(Random(8), weights))) != courses[0]


def _course(store: ObjectStore) -> list[str]:
    outcomes = []
    for number in range(200):
        try:
            store.put_if_absent(f"a/{number}", BODY, metadata={})
            store.get(f"a/{number}")
            outcomes.append("ok")
        except StoreError as error:
            outcomes.append(type(error).__name__)
    return outcomes


def test_every_fault_applies_to_something() -> None:
    operations = ("put", "put_if_absent", "get_with_metadata", "get_range", "head", "list", "delete")
    for fault in Fault:
        assert any(applies(fault, operation) for operation in operations)
    assert not Pause().released.is_set()
