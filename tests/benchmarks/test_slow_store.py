"""The store that takes a while: how long, and what it notes."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import slow_store
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import NO_METADATA, AlreadyExists, NotFound


def test_every_request_takes_the_delay_and_is_noted_when_it_has_ended(tmp_path: Path) -> None:
    log, delay_s = tmp_path / "requests", 0.01
    began_s = slow_store.clock_s()
    with slow_store.noting(log) as noted:
        store = slow_store.SlowStore(MemoryStore(), delay_s, noted)
        store.put("a-key", b"body")
        with pytest.raises(AlreadyExists):
            store.put_if_absent("a-key", b"other", metadata=NO_METADATA)
        store.get("a-key")
        store.get_range("a-key", 1, 2)
        store.head("a-key")
        assert [each.key for each in store.list("a")] == ["a-key"]
        store.delete("a-key")
        with pytest.raises(NotFound):
            store.get("a-key")
    requests = slow_store.read_requests(log)
    assert [each.operation for each in requests] == ["put", "put", "get", "get", "head", "list", "delete", "get"]
    assert [each.key for each in requests] == ["a-key"] * 5 + ["a", "a-key", "a-key"]
    assert all(each.ended_s - each.began_s >= delay_s for each in requests)
    assert began_s <= requests[0].began_s
    assert set(slow_store.OPERATIONS) == {each.operation for each in requests}


def test_a_listing_takes_a_request_for_each_page(tmp_path: Path) -> None:
    inner, noted = MemoryStore(), list[slow_store.Request]()
    for number in range(slow_store.KEYS_A_LISTING + 1):
        inner.put(f"key/{number}", b"")
    store = slow_store.SlowStore(inner, 0.0, noted.append)
    assert len(list(store.list("key/"))) == slow_store.KEYS_A_LISTING + 1
    assert [each.operation for each in noted] == ["list"] * 2


def test_of_the_log_what_began_in_time_is_read_and_not_a_line_that_is_being_written(tmp_path: Path) -> None:
    log = tmp_path / "requests"
    log.write_text("1.0 5.0 get a\n2.0 2.5 put b-c\n3.0 3.5 head d\n4.0 4.")
    assert [each.key for each in slow_store.read_requests(log)] == ["a", "b-c", "d"]
    assert slow_store.read_requests(log, from_s=2.0, until_s=3.0) == [slow_store.Request(2.0, 2.5, "put", "b-c")]
