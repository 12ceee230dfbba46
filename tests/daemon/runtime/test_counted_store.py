"""Failed requests are counted by operation and kind; answers are not failures."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import pytest

from daemon.runtime.pools import CountedStore
from storage_backends import memory_store, object_store
from tests._support.fault_store import Fault, FaultStore, Script


def test_failures_are_counted_and_answers_are_not() -> None:
    script = Script()
    counted: collections.Counter[tuple[str, str]] = collections.Counter()
    store = CountedStore(
        FaultStore(memory_store.MemoryStore(), script), lambda operation, kind: counted.update([(operation, kind)])
    )
    store.put_if_absent("a", b"1", metadata={"commitid": "x"})
    with pytest.raises(object_store.AlreadyExists):
        store.put_if_absent("a", b"2", metadata={"commitid": "y"})
    with pytest.raises(object_store.NotFound):
        store.get("b")
    assert not counted
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    with pytest.raises(object_store.OutcomeUnknown):
        store.put_if_absent("c", b"3", metadata={"commitid": "z"})
    script.plan("list", Fault.FAIL_BEFORE)
    with pytest.raises(object_store.StoreUnavailable):
        list(store.list(""))
    assert counted == {("put_if_absent", "OutcomeUnknown"): 1, ("list", "StoreUnavailable"): 1}
    assert {entry.key for entry in store.list("")} == {"a", "c"}


def test_the_requests_are_those_of_the_store_beneath() -> None:
    class Asked(memory_store.MemoryStore):
        @property
        def requests_sent(self) -> Mapping[str, int]:
            return {"GET": 7}

    assert CountedStore(Asked(), lambda operation, kind: None).requests_sent == {"GET": 7}
