"""What a root has lost as a whole is found by what still names it, and nothing stored ends an audit."""

from __future__ import annotations

import dataclasses
import random

import msgspec
import pytest

from batch.audit.findings import Kind
from storage_backends.formats import framing, manifest, names
from storage_backends.memory_store import MemoryStore
from tests.batch.audit._support.audits import (
    CHECKPOINTS,
    LOGS,
    MANIFESTS,
    SHARD_MANIFESTS,
    TOPIC_ID,
    audited,
    copy_of,
    findings,
    keys,
    kinds,
    sound_root,
)
from tests.golden_root import mutations


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    return sound_root()


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A sound root of the test's own."""
    return copy_of(written)


def lose(store: MemoryStore, *prefixes: str) -> None:
    for key in [each.key for prefix in prefixes for each in store.list(prefix)]:
        store.delete(key)


def test_a_topic_of_which_nothing_is_left_is_found_by_the_checkpoint(store: MemoryStore) -> None:
    lose(store, names.topic_prefix(0, TOPIC_ID))
    assert (Kind.NO_MANIFEST, MANIFESTS) in kinds(audited(store))


def test_a_topic_whose_newest_manifest_is_gone_is_found_by_the_checkpoint(store: MemoryStore) -> None:
    newest = keys(store, MANIFESTS)[-1]
    store.delete(newest)
    assert (Kind.MANIFEST_MISSING, newest) in kinds(audited(store))


def test_a_shard_of_which_nothing_is_left_is_found_by_the_log(store: MemoryStore) -> None:
    lose(store, names.shard_prefix(0))
    assert (Kind.NO_MANIFEST, SHARD_MANIFESTS) in kinds(audited(store))


@pytest.mark.parametrize("at", [1 << 50, names.NUMBER_MAX])
def test_a_manifest_that_names_a_slot_far_behind_its_log_is_a_finding(store: MemoryStore, at: int) -> None:
    newest = keys(store, SHARD_MANIFESTS)[-1]
    body, metadata = store.get_with_metadata(newest)
    tip = manifest.decode_shard_manifest(body)
    assert tip.checkpoint is not None
    owned = tip.ranges[-1]
    cut = dataclasses.replace(tip.checkpoint, at=at, log_id=owned.log_id)
    store.put(newest, manifest.encode_shard_manifest(dataclasses.replace(tip, checkpoint=cut)), metadata=metadata)
    assert f"to {at} of log" in "".join(found.detail for found in findings(audited(store)))
    closed = dataclasses.replace(owned, through=at, last_slot=at)
    store.put(
        newest,
        manifest.encode_shard_manifest(dataclasses.replace(tip, owner="", address="", ranges=(closed,))),
        metadata=metadata,
    )
    assert f"to {at} of shard 0" in "".join(found.detail for found in findings(audited(store)))


def beat(store: MemoryStore, **said: object) -> None:
    body = {"daemon_id": "one", "address": "", "shards": [], "instance": "", "sequence": 1, **said}
    store.put(names.daemon_key("one"), msgspec.json.encode(body))


def test_a_shard_of_which_nothing_is_left_is_found_by_the_heartbeat(store: MemoryStore) -> None:
    lose(store, names.shard_prefix(0), LOGS, names.DAEMONS_PREFIX)
    beat(store, shards=[0])
    assert kinds(audited(store)) == [(Kind.NO_MANIFEST, SHARD_MANIFESTS)]


def test_a_log_that_is_shorter_than_its_daemon_reported_is_found(store: MemoryStore) -> None:
    newest = max(keys(store, LOGS))
    beat(store, log_id=newest.split("/")[1], last_slot=names.number_of(newest))
    assert findings(audited(store)) == []
    beat(store, log_id=newest.split("/")[1], last_slot=names.number_of(newest) + 1)
    (found,) = findings(audited(store))
    assert found.kind is Kind.SLOT_MISSING
    assert found.object == names.log_slot_key(newest.split("/")[1], names.number_of(newest) + 1)


def test_a_log_whose_slots_are_deleted_while_it_goes_on_has_lost_none(store: MemoryStore) -> None:
    log_id = max(keys(store, LOGS)).split("/")[1][:-1] + "Z"
    reported, next_one = names.log_slot_key(log_id, 1), names.log_slot_key(log_id, 2)
    store.put(reported, b"never read")
    beat(store, log_id=log_id, last_slot=1)

    def go_on(key: str) -> None:
        if key == reported:
            store.put(next_one, b"never listed")
            store.delete(reported)

    assert findings(audited(store, before_read=go_on)) == []
    assert keys(store, names.log_prefix(log_id)) == [next_one]


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"daemon_id":"one","shards":[1e9],"last_slot":-1}', b"\xff" * 9])
def test_a_heartbeat_that_makes_no_sense_is_none(store: MemoryStore, body: bytes) -> None:
    store.put(names.daemon_key("one"), body)
    store.put(names.DAEMONS_PREFIX + "a/b", b"mine")
    assert findings(audited(store)) == []


@pytest.mark.parametrize("folder", [SHARD_MANIFESTS, MANIFESTS, CHECKPOINTS])
@pytest.mark.parametrize("name", ["9" * 20, f"{1 << 63:020d}", "0" * 20, "notes", "0" * 19 + "7-x", "0" * 19 + "7/x"])
def test_a_foreign_name_is_told_and_ends_no_audit(store: MemoryStore, folder: str, name: str) -> None:
    if folder == CHECKPOINTS and name == "0" * 19 + "7-x":
        return
    store.put(folder + name, b"mine")
    told = [key for _, key in kinds(audited(store))]
    assert set(told) <= {folder + name}
    if folder != CHECKPOINTS:
        assert told == [folder + name]


@pytest.mark.parametrize("name", ["../../FORMAT", "shards/00/checkpoint/../x", "", "\u00e9", "x" * 3_000])
@pytest.mark.parametrize("of", ["checkpoint", "tombstone", "bucket", "owner", "log"])
def test_a_name_that_nothing_can_have_is_damage_of_what_says_it(store: MemoryStore, of: str, name: str) -> None:
    key = keys(store, MANIFESTS if of in ("tombstone", "bucket") else SHARD_MANIFESTS)[-1]
    body, metadata = store.get_with_metadata(key)
    message = mutations.MESSAGES[body[:4]]()
    message.ParseFromString(body[16:-4])
    if of == "checkpoint":
        message.checkpoint.object.name = name  # type: ignore[attr-defined]
    elif of == "owner":
        message.owner = name or "/"  # type: ignore[attr-defined]
    elif of == "log":
        message.ranges[-1].log_id = name  # type: ignore[attr-defined]
    else:
        (message.tombstones if of == "tombstone" else message.live)[0].object.name = name  # type: ignore[attr-defined]
    made = framing.frame(body[:4], 1, message.SerializePartialToString())
    store.put(key, made, metadata=metadata)
    assert (Kind.DAMAGED, key) in kinds(audited(store))


@pytest.mark.parametrize("kind", ["shard manifest", "topic manifest", "checkpoint", "log slot", "bucket", "progress"])
def test_nothing_that_is_forged_ends_an_audit(store: MemoryStore, kind: str) -> None:
    for seed in range(6):
        forged = copy_of(store)
        if mutations.mutate(forged, random.Random(seed), kind, mutations.FORGE) is not None:
            audited(forged)
