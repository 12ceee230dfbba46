"""What a process that merged leaves for the owner: the order in which it is written, read and cleared."""

from __future__ import annotations

import pytest

from storage_backends import merge_hints
from storage_backends.formats import names
from storage_backends.memory_store import MemoryStore
from storage_backends.merge_hints import MergeHint
from storage_backends.object_store import StoreUnavailable
from tests._support.fault_store import Fault, FaultStore, Script

HINTS = [MergeHint(shard, names.topic_id(f"t{shard}")) for shard in (0, 7, 103)]


def test_the_value_is_written_after_every_hint() -> None:
    store = FaultStore(MemoryStore(), Script())
    merge_hints.leave(store, HINTS, value="1")
    written = [call.key for call in store.calls]
    assert sorted(written[:-1]) == sorted(hint.key for hint in HINTS)
    assert written[-1] == names.MERGE_HINTS_CHANGED_KEY


def test_no_value_is_written_where_a_hint_could_not_be() -> None:
    memory, script = MemoryStore(), Script()
    script.plan("put", Fault.FAIL_BEFORE, key_part=HINTS[1].key)
    with pytest.raises(StoreUnavailable):
        merge_hints.leave(FaultStore(memory, script), HINTS, value="1")
    assert merge_hints.value(memory) is None


def test_hints_are_listed_as_they_were_left_and_other_keys_apart() -> None:
    store = MemoryStore()
    assert (merge_hints.value(store), merge_hints.listed(store)) == (None, ([], []))
    merge_hints.leave(store, HINTS, value="one")
    foreign = [f"{names.MERGE_HINTS_PREFIX}{key}" for key in ("1-short", f"1-{HINTS[0].topic_id}", "x/y")]
    for key in foreign:
        store.put(key, b"")
    hints, others = merge_hints.listed(store)
    assert (sorted(hints), sorted(others)) == (HINTS, sorted(foreign))
    assert merge_hints.value(store) == b"one"


def test_a_hint_may_be_left_and_cleared_again() -> None:
    store = MemoryStore()
    for value in ("one", "two"):
        merge_hints.leave(store, HINTS[:1] * 2, value=value)
        assert merge_hints.value(store) == value.encode()
        assert merge_hints.listed(store)[0] == HINTS[:1]
        for _ in range(2):
            merge_hints.clear(store, HINTS[0])
        assert merge_hints.listed(store)[0] == []
