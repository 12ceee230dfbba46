"""The contract of `ObjectStore`: one suite, every store."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from storage_backends.object_store import (
    METADATA_BYTES_MAX,
    AlreadyExists,
    Damaged,
    ListedObject,
    NotFound,
    ObjectStore,
)
from storage_backends.probe import probe
from tests.contract.conftest import OpenStore

RACERS = 8


def _keys(store: ObjectStore, prefix: str, *, start_after: str | None = None) -> set[str]:
    listed = list(store.list(prefix, start_after=start_after))
    keys = {found.key for found in listed}
    assert len(keys) == len(listed), "a listing shows no object twice"
    return keys


def test_what_was_put_is_read_whole(store: ObjectStore) -> None:
    body = bytes(range(256)) * 1000
    store.put("a/b/c", body, metadata={"commitid": "01ABC", "epoch": "7"})
    assert store.get("a/b/c") == body
    assert store.get_with_metadata("a/b/c") == (body, {"commitid": "01ABC", "epoch": "7"})


def test_a_put_replaces_body_and_metadata(store: ObjectStore) -> None:
    store.put("daemons/one", b"first, and longer", metadata={"sequence": "1"})
    store.put("daemons/one", b"second", metadata={"address": "127.0.0.1:7461"})
    assert store.get_with_metadata("daemons/one") == (b"second", {"address": "127.0.0.1:7461"})
    assert store.head("daemons/one").size_bytes == len(b"second")


def test_an_empty_body_is_an_object(store: ObjectStore) -> None:
    store.put("empty", b"")
    store.put_if_absent("created-empty", b"", metadata={})
    assert store.get("empty") == b""
    assert store.head("created-empty").size_bytes == 0
    assert _keys(store, "") == {"empty", "created-empty"}


def test_head_tells_size_and_metadata(store: ObjectStore) -> None:
    store.put_if_absent("slot", b"x" * 1234, metadata={"commitid": "A=B; c d~!"})
    info = store.head("slot")
    assert (info.key, info.size_bytes, dict(info.metadata)) == ("slot", 1234, {"commitid": "A=B; c d~!"})


def test_metadata_of_the_largest_size_comes_back(store: ObjectStore) -> None:
    metadata = {"a": "v" * 1000, "b2": "w" * (METADATA_BYTES_MAX - 1003)}
    store.put_if_absent("slot", b"body", metadata=metadata)
    assert dict(store.head("slot").metadata) == metadata
    assert store.get("slot") == b"body"


def test_names_of_metadata_may_have_hyphens(store: ObjectStore) -> None:
    metadata = {"application": "pulsar", "pulsar-managed-ledger": "t/n/persistent/x%20y", "a-1-b": "-"}
    store.put("put", b"body", metadata=metadata)
    store.put_if_absent("created", b"body", metadata=metadata)
    for key in ("put", "created"):
        assert dict(store.head(key).metadata) == metadata
        assert store.get_with_metadata(key) == (b"body", metadata)


def test_reading_what_does_not_exist_is_not_found(store: ObjectStore) -> None:
    store.put("no/such2", b"x")
    with pytest.raises(NotFound, match="no/such"):
        store.get("no/such")
    with pytest.raises(NotFound, match="no/such"):
        store.get_range("no/such", 0, 1)
    with pytest.raises(NotFound, match="no/such"):
        store.head("no/such")


def test_a_run_is_read_up_to_the_first_object_that_does_not_exist(store: ObjectStore) -> None:
    keys = [f"run/{number}" for number in range(5)]
    assert store.get_run(keys) == []
    for key in (*keys[:3], keys[4]):
        store.put(key, key.encode())
    assert store.get_run(keys) == [key.encode() for key in keys[:3]]
    assert store.get_run([]) == []


def test_a_key_that_is_only_a_folder_is_not_found(store: ObjectStore) -> None:
    store.put("a/b/c", b"x")
    for key in ("a", "a/b", "a/b/c/d"):
        with pytest.raises(NotFound):
            store.get(key)
        with pytest.raises(NotFound):
            store.get_range(key, 0, 1)
        with pytest.raises(NotFound):
            store.head(key)
        store.delete(key)
    assert store.get("a/b/c") == b"x"


def test_a_range_is_exact(store: ObjectStore) -> None:
    body = bytes(number % 251 for number in range(1000))
    store.put("bucket", body, metadata={"name": "value"})
    for offset, length in ((0, 1), (0, 1000), (1, 998), (999, 1), (500, 500)):
        assert store.get_range("bucket", offset, length) == body[offset : offset + length], (offset, length)


def test_a_range_beyond_the_end_is_damage(store: ObjectStore) -> None:
    store.put("bucket", b"x" * 1000)
    for offset, length in ((0, 1001), (999, 2), (1000, 1), (5000, 10)):
        with pytest.raises(Damaged, match="bucket"):
            store.get_range("bucket", offset, length)


def test_a_range_without_bytes_is_refused(store: ObjectStore) -> None:
    store.put("bucket", b"x" * 10)
    for offset, length in ((-1, 1), (0, 0), (5, -1)):
        with pytest.raises(ValueError, match="range"):
            store.get_range("bucket", offset, length)


def test_deleting_removes_and_may_be_repeated(store: ObjectStore) -> None:
    store.put("a/b", b"x")
    store.delete("a/b")
    store.delete("a/b")
    store.delete("never/was/there")
    with pytest.raises(NotFound):
        store.get("a/b")
    assert _keys(store, "") == set()


def test_a_deleted_key_can_be_created_again(store: ObjectStore) -> None:
    store.put_if_absent("slot", b"first", metadata={"commitid": "1"})
    store.delete("slot")
    store.put_if_absent("slot", b"second", metadata={"commitid": "2"})
    assert store.get_with_metadata("slot") == (b"second", {"commitid": "2"})


def test_the_second_creation_loses_and_changes_nothing(open_store: OpenStore) -> None:
    first, second = open_store(), open_store()
    first.put_if_absent("slot", b"first", metadata={"commitid": "1"})
    for store in (first, second):
        with pytest.raises(AlreadyExists, match="slot"):
            store.put_if_absent("slot", b"other", metadata={"commitid": "2"})
    assert second.get_with_metadata("slot") == (b"first", {"commitid": "1"})


def test_a_racer_calls_once_before_it_sends_and_then_creates_as_others_do(store: ObjectStore) -> None:
    there: list[set[str]] = []
    for _ in range(2):
        with contextlib.suppress(AlreadyExists):
            store.race_put_if_absent("a", b"x", metadata={"a": "b"}, at_the_line=lambda: there.append(_keys(store, "")))
    assert there == [set(), {"a"}]
    assert store.get_with_metadata("a") == (b"x", {"a": "b"})
    with pytest.raises(AlreadyExists):
        store.put_if_absent("a", b"y", metadata={})
    assert len(there) == 2


def test_of_concurrent_creations_exactly_one_wins(open_store: OpenStore) -> None:
    stores = [open_store(), open_store()]
    barrier = threading.Barrier(RACERS, timeout=300)

    def race(round_number: int, racer: int) -> bool:
        barrier.wait()
        try:
            stores[racer % 2].put_if_absent(
                f"race/journal/{round_number:020d}", b"%d" % racer * 5000, metadata={"racer": str(racer)}
            )
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(RACERS) as threads:
        for round_number in range(10):
            won = list(threads.map(race, [round_number] * RACERS, range(RACERS)))
            assert sum(won) == 1
            winner = won.index(True)
            body, metadata = stores[1].get_with_metadata(f"race/journal/{round_number:020d}")
            assert (body, metadata) == (b"%d" % winner * 5000, {"racer": str(winner)})


def test_a_reader_sees_the_old_or_the_new_object_never_a_mixture(open_store: OpenStore) -> None:
    writer, reader = open_store(), open_store()
    bodies = [bytes([number]) * (1000 + number) for number in range(20)]
    writer.put("heartbeat", bodies[0], metadata={"number": "0"})
    done = threading.Event()

    def write() -> None:
        for number, body in enumerate(bodies):
            writer.put("heartbeat", body, metadata={"number": str(number)})
        done.set()

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        seen = 0
        while not (done.is_set() and seen) and not writing.done():
            body, metadata = reader.get_with_metadata("heartbeat")
            assert body == bodies[int(metadata["number"])]
            seen += 1
        writing.result()
    assert reader.get("heartbeat") == bodies[-1]


def test_a_listing_is_complete_and_knows_sizes(store: ObjectStore) -> None:
    keys = {f"logs/00000000000000000000000001/{number:020d}": number % 7 for number in range(970, 1030)}
    with ThreadPoolExecutor(4) as threads:
        for _ in threads.map(lambda key: store.put(key, b"x" * keys[key]), keys):
            pass
    listed = {found.key: found.size_bytes for found in store.list("logs/00000000000000000000000001/")}
    assert listed.keys() == keys.keys()
    assert all(listed[key] >= size for key, size in keys.items())


def test_a_listing_of_many_pages_is_complete(store: ObjectStore) -> None:
    keys = {f"many/{number:04d}" for number in range(101)}
    with ThreadPoolExecutor(8) as threads:
        for _ in threads.map(lambda key: store.put(key, b""), keys):
            pass
    assert _keys(store, "many/") == keys
    assert _keys(store, "many/", start_after="many/0089") == {f"many/{number:04d}" for number in range(90, 101)}


def test_a_prefix_may_end_inside_a_part_of_the_key(store: ObjectStore) -> None:
    keys = ["a/1", "a/10", "a/1x/2", "a/2", "ab/1", "b"]
    for key in keys:
        store.put(key, key.encode())
    for prefix in ("", "a", "a/", "a/1", "a/10", "a/1x", "a/1x/", "ab", "b", "c", "a/1/"):
        assert _keys(store, prefix) == {key for key in keys if key.startswith(prefix)}, prefix


def test_a_key_that_begins_with_another_is_another_object(store: ObjectStore) -> None:
    for key in ("slot", "slot1", "slot.1", "slot-1"):
        store.put_if_absent(key, key.encode(), metadata={"name": key})
    store.delete("slot")
    assert _keys(store, "slot") == {"slot1", "slot.1", "slot-1"}
    assert store.get("slot.1") == b"slot.1"


def test_numbered_keys_are_listed_under_their_names(store: ObjectStore) -> None:
    keys = {"shards/03/journal/other"}
    for number in (0, 999, 1000, 123_456, 2**64 - 1):
        keys |= {f"shards/03/journal/{number:020d}", f"shards/03/journal/{number:020d}-01ABC"}
    for key in keys:
        store.put(key, key.encode())
        assert store.get(key) == key.encode()
    assert _keys(store, "") == keys
    for length in (0, 5, 16, 17, 18, 20):
        prefix = "shards/03/journal/00000000000000123456"[: len("shards/03/journal/") + length]
        assert _keys(store, prefix) == {key for key in keys if key.startswith(prefix)}, prefix


def test_a_listing_begins_above_start_after(store: ObjectStore) -> None:
    numbers = [1, 998, 999, 1000, 1001, 1999, 2000, 3000]
    for number in numbers:
        store.put(f"journal/{number:020d}", b"")
        store.put(f"other/{number:020d}/x", b"")
    for start in (0, 998, 999, 1000, 1001, 2999, 5000):
        assert _keys(store, "journal/", start_after=f"journal/{start:020d}") == {
            f"journal/{number:020d}" for number in numbers if number > start
        }
        assert _keys(store, "", start_after=f"other/{start:020d}/w") == {
            f"other/{number:020d}/x" for number in numbers if number >= start
        }


def test_an_empty_listing_is_empty(store: ObjectStore) -> None:
    assert list(store.list("nothing/here/")) == []
    assert list(store.list("", start_after="a")) == []


def test_a_listing_tells_keys_that_can_be_read(store: ObjectStore) -> None:
    store.put("a/b", b"body")
    (found,) = store.list("a/")
    assert isinstance(found, ListedObject)
    assert store.get(found.key) == b"body"


def test_a_listing_knows_when_each_object_was_written(store: ObjectStore) -> None:
    # A store may know only the second, and its clock may be read a moment before.
    before_ms = int(time.time() - 1) * 1000
    store.put("a/b", b"body")
    store.put_if_absent("a/c", b"body", metadata={})
    after_ms = int(time.time() * 1000)
    assert all(before_ms <= found.modified_ms <= after_ms for found in store.list("a/"))


def test_a_bad_key_is_refused_by_every_operation(store: ObjectStore) -> None:
    malformed = ("", "/a", "a/", "a//b", ".", "..", "a/../b", ".hidden", "a/.locks", "a b", "a+b", "ä", "a\n", "a\\b")
    too_long = ("k" * 201, "/".join(["k" * 100] * 10))
    for key in (*malformed, *too_long):
        with pytest.raises(ValueError, match="key"):
            store.put(key, b"")
        with pytest.raises(ValueError, match="key"):
            store.put_if_absent(key, b"", metadata={})
        with pytest.raises(ValueError, match="key"):
            store.get(key)
        with pytest.raises(ValueError, match="key"):
            store.get_range(key, 0, 1)
        with pytest.raises(ValueError, match="key"):
            store.head(key)
        with pytest.raises(ValueError, match="key"):
            store.delete(key)
    assert _keys(store, "") == set()


def test_a_bad_prefix_is_refused(store: ObjectStore) -> None:
    for prefix in ("/", "a//", "../", "a/..", ".locks/", "a+", "a b"):
        with pytest.raises(ValueError, match="prefix"):
            store.list(prefix)


def test_bad_metadata_is_refused(store: ObjectStore) -> None:
    bad_keys = ({"Upper": "a"}, {"a-": "a"}, {"-a": "a"}, {"a--b": "a"}, {"a_b": "a"}, {"a/b": "a"}, {"": "a"})
    bad_values = ({"a": ""}, {"a": " b"}, {"a": "b "}, {"a": "ä"}, {"a": "b\n"}, {"a": "x" * METADATA_BYTES_MAX})
    for metadata in (*bad_keys, *bad_values):
        with pytest.raises(ValueError, match="metadata"):
            store.put("a", b"", metadata=metadata)
        with pytest.raises(ValueError, match="metadata"):
            store.put_if_absent("a", b"", metadata=metadata)
    assert _keys(store, "") == set()


def test_the_probe_passes_and_leaves_nothing_behind(store: ObjectStore) -> None:
    store.put("probe/other", b"")
    probe(store, "probe/one", races=5)
    assert _keys(store, "") == {"probe/other"}
    probe(store, "probe/one", races=5)


def test_closing_may_be_repeated(open_store: OpenStore) -> None:
    with open_store() as store:
        store.put("a", b"x")
    store.close()
    assert open_store().get("a") == b"x"
