"""FORMAT is created once, and a root that cannot be served as it is meant is refused."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Mapping

import pytest

from storage_backends import root_format
from storage_backends.formats import framing, manifest, names
from storage_backends.formats.manifest import LogForm, RootFormat
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged, ObjectStore, OutcomeUnknown, StoreUnavailable
from tests._support.fault_store import Call, Fault, FaultStore, Script

MADE = RootFormat(format_version=2, shards=4, created_ms=9, root_id="root-a", log_form=LogForm.OBJECTS)


def read_or_create(
    store: ObjectStore, *, shards: int = 4, root_id: str = "root-a", log_form: LogForm = LogForm.OBJECTS
) -> RootFormat:
    return root_format.read_or_create(store, shards=shards, log_form=log_form, root_id=root_id, created_ms=9)


def test_a_new_root_gets_its_format_once() -> None:
    store = MemoryStore()
    assert read_or_create(store) == MADE
    assert manifest.decode_root_format(store.get(names.FORMAT_KEY)) == MADE
    assert read_or_create(store, root_id="root-b") == MADE


def test_an_existing_root_keeps_its_number_of_shards_and_the_form_of_its_logs() -> None:
    store = MemoryStore()
    read_or_create(store)
    found = read_or_create(store, shards=16, root_id="root-b", log_form=LogForm.FILES)
    assert (found.shards, found.log_form) == (4, LogForm.OBJECTS)


def test_of_several_that_create_a_root_at_once_all_get_the_same() -> None:
    together = threading.Barrier(4)

    class Crowded(MemoryStore):
        def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
            together.wait(300)
            super().put_if_absent(key, body, metadata=metadata)

    store = Crowded()
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda n: read_or_create(store, shards=n + 1, root_id=f"root-{n}"), range(4)))
    assert len(set(found)) == 1
    assert manifest.decode_root_format(store.get(names.FORMAT_KEY)) == found[0]


def test_a_creation_whose_answer_is_lost_is_read_back() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    assert read_or_create(FaultStore(MemoryStore(), script)) == MADE


def test_a_creation_that_may_still_arrive_is_no_success() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.DELIVER_LATE)
    store = FaultStore(MemoryStore(), script)
    with pytest.raises(OutcomeUnknown):
        read_or_create(store)
    assert store.deliver_late() == 1
    assert read_or_create(store, root_id="root-b") == MADE


def test_a_creation_that_nobody_won_is_no_damage_and_may_be_tried_again() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.ANSWER_EXISTS)
    store = FaultStore(MemoryStore(), script)
    with pytest.raises(StoreUnavailable):
        read_or_create(store, root_id="one")
    assert read_or_create(store, root_id="two").root_id == "two"


def test_a_store_that_is_away_is_its_own_error() -> None:
    store = FaultStore(MemoryStore())
    store.go_down()
    with pytest.raises(StoreUnavailable):
        read_or_create(store)


def test_a_root_that_has_shards_and_no_format_is_refused_and_gets_none() -> None:
    store = MemoryStore()
    store.put(names.shard_manifest_key(0, 1), b"")
    with pytest.raises(Damaged, match="FORMAT: it is missing, although the root has shards: their number is unknown"):
        read_or_create(store)
    with pytest.raises(Exception, match="no such object"):
        store.head(names.FORMAT_KEY)


def test_a_root_that_another_daemon_creates_meanwhile_is_not_refused() -> None:
    inner = MemoryStore()

    def decide(call: Call) -> Fault:
        if call.operation == "list":
            read_or_create(inner, root_id="root-b")
            inner.put(names.shard_manifest_key(0, 1), b"")
        return Fault.NONE

    assert read_or_create(FaultStore(inner, decide)).root_id == "root-b"


@pytest.mark.parametrize("place", range(0, len(manifest.encode_root_format(MADE)), 5))
def test_a_damaged_format_refuses_the_root_with_the_offset(place: int) -> None:
    store = MemoryStore()
    body = bytearray(manifest.encode_root_format(MADE))
    body[place] ^= 0x40
    store.put(names.FORMAT_KEY, bytes(body))
    with pytest.raises(Damaged, match=r"^FORMAT: (FORMAT is damaged at byte \d+|the root has format version \d+)"):
        read_or_create(store)


def test_another_version_refuses_the_root_and_names_both() -> None:
    store = MemoryStore()
    store.put(names.FORMAT_KEY, manifest.encode_root_format(dataclasses.replace(MADE, format_version=3)))
    with pytest.raises(Damaged, match="the root has format version 3; this release serves 2"):
        read_or_create(store)


def test_a_root_whose_shards_have_journals_is_refused() -> None:
    store = MemoryStore()
    payload = manifest.encode_root_format(MADE)[framing.HEADER_BYTES : -4]
    store.put(names.FORMAT_KEY, framing.frame(manifest.ROOT_MAGIC, 1, payload))
    with pytest.raises(Damaged, match=r"the root has format version 1; this release serves 2. Use the rel"):
        read_or_create(store)


def test_a_root_without_shards_is_refused() -> None:
    store = MemoryStore()
    store.put(names.FORMAT_KEY, manifest.encode_root_format(dataclasses.replace(MADE, shards=0)))
    with pytest.raises(Damaged, match="it says that the root has 0 shards"):
        read_or_create(store)


def test_a_root_of_more_shards_than_any_daemon_makes_is_refused() -> None:
    store = MemoryStore()
    store.put(names.FORMAT_KEY, manifest.encode_root_format(dataclasses.replace(MADE, shards=(1 << 32) - 1)))
    with pytest.raises(Damaged, match="it says that the root has 4294967295 shards"):
        read_or_create(store)
