"""A sound root has no findings; each kind of damage has exactly the finding that names it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from batch.audit import driver as audit
from batch.audit import findings as audit_findings
from batch.audit.findings import Kind, Severity
from batch.engine.root import RootAbsent
from storage_backends import probe, topic_manifest
from storage_backends.commit import COMMIT_ID
from storage_backends.formats import log_slot_format, manifest, names, slot_format
from storage_backends.formats.log_slot_format import Head
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Bucket, StoreUnavailable
from tests._support.engine_fixture import EPOCH_MS
from tests.batch.audit._support.audits import (
    BUCKETS,
    CHECKPOINTS,
    HOUR_MS,
    LIMITS,
    LOGS,
    MANIFESTS,
    SHARD_MANIFESTS,
    audited,
    copy_of,
    findings,
    keys,
    kinds,
    shard_tip,
    sound_root,
    topic_tip,
)

Pick = Callable[[MemoryStore], str]


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    return sound_root()


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A sound root of the test's own."""
    return copy_of(written)


def change(store: MemoryStore, key: str, changed: Callable[[bytes], bytes]) -> None:
    """The object has other bytes, and the metadata that it had."""
    body, metadata = store.get_with_metadata(key)
    store.put(key, changed(body), metadata=metadata)


def flipped(body: bytes) -> bytes:
    place = len(body) // 2
    return body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :]


def live_bucket(store: MemoryStore) -> str:
    return topic_tip(store).live[1].object.name


def progress_object(store: MemoryStore) -> str:
    found = topic_tip(store).progress_object
    assert found is not None
    return found.name


def properties(store: MemoryStore) -> str:
    found = topic_tip(store).properties_object
    assert found is not None
    return found.name


def checkpoint(store: MemoryStore) -> str:
    found = shard_tip(store).checkpoint
    assert found is not None
    return found.object.name


def buried(store: MemoryStore) -> str:
    return next(each.object.name for each in topic_tip(store).tombstones if "/buckets/" in each.object.name)


def unnamed_bucket(store: MemoryStore) -> str:
    (found,) = set(keys(store, BUCKETS)) - topic_manifest.names_in(topic_tip(store))
    return found


def nth(prefix: str, place: int) -> Pick:
    return lambda store: keys(store, prefix)[place]


OBJECTS = {
    "topic manifest": (nth(MANIFESTS, 5), Severity.ERROR),
    "newest topic manifest": (nth(MANIFESTS, -1), Severity.ERROR),
    "shard manifest": (nth(SHARD_MANIFESTS, 2), Severity.ERROR),
    "newest shard manifest": (nth(SHARD_MANIFESTS, -1), Severity.ERROR),
    "log slot": (nth(LOGS, -2), Severity.ERROR),
    "live bucket": (live_bucket, Severity.ERROR),
    "progress": (progress_object, Severity.ERROR),
    "properties": (properties, Severity.ERROR),
    "checkpoint": (checkpoint, Severity.ERROR),
    "bucket that left": (buried, Severity.WARNING),
    "bucket that is not named": (unnamed_bucket, Severity.WARNING),
    "format": (lambda store: names.FORMAT_KEY, Severity.ERROR),
}


# ---- sound


def test_a_sound_root_has_no_findings_but_what_was_on_its_way_when_a_daemon_died(store: MemoryStore) -> None:
    report = audited(store)
    assert findings(report) == []
    assert report.tally.kinds == {(Kind.UNNAMED, Severity.INFO): 2}
    assert report.topics == 3
    assert report.errors == 0


def test_every_object_but_heartbeats_is_read(store: MemoryStore) -> None:
    report = audited(store)
    stored = [entry for entry in store.list("") if not entry.key.startswith(names.DAEMONS_PREFIX)]
    assert report.tally.objects.total() == len(stored)
    assert report.tally.size_bytes.total() == sum(entry.size_bytes for entry in stored)
    assert report.tally.objects["log slot"] == len(keys(store, LOGS))
    assert report.tally.objects["checkpoint"] == len(keys(store, CHECKPOINTS))


def test_the_root_covers_what_the_damage_below_needs(store: MemoryStore) -> None:
    tip = topic_tip(store)
    assert any(live.level for live in tip.live)
    assert tip.progress_object is not None
    assert tip.tombstones
    assert shard_tip(store).epoch == 2
    found = manifest.decode_topic_manifest(store.get(keys(store, MANIFESTS)[0]))
    assert found.head.number == 1


def test_an_audit_of_what_is_no_root_says_so() -> None:
    with pytest.raises(RootAbsent, match="FORMAT"):
        audited(MemoryStore())


# ---- bytes


@pytest.mark.parametrize("what", list(OBJECTS))
def test_a_flipped_bit_is_found_in_every_kind_of_object(store: MemoryStore, what: str) -> None:
    pick, severity = OBJECTS[what]
    key = pick(store)
    change(store, key, flipped)
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.severity) == (Kind.DAMAGED, key, severity)


@pytest.mark.parametrize("what", list(OBJECTS))
def test_a_truncated_object_of_every_kind_is_found(store: MemoryStore, what: str) -> None:
    pick, severity = OBJECTS[what]
    key = pick(store)
    change(store, key, lambda body: body[:-3])
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.severity) == (Kind.DAMAGED, key, severity)


def test_the_place_of_the_damage_is_told(store: MemoryStore) -> None:
    key = live_bucket(store)
    change(store, key, lambda body: body[:20] + bytes([body[20] ^ 1]) + body[21:])
    (found,) = findings(audited(store))
    assert found.offset == 8
    assert "bucket metadata is damaged at byte 8" in found.detail
    assert found.topic == "t"


def test_another_whole_bucket_under_the_name_is_damage(store: MemoryStore) -> None:
    mine, other = (live.object.name for live in topic_tip(store).live[-2:])
    assert len(store.get(mine)) == len(store.get(other))
    change(store, mine, lambda _: store.get(other))
    (found,) = findings(audited(store))
    assert (found.kind, found.object) == (Kind.DAMAGED, mine)
    assert "SHA-256" in found.detail


def test_a_damaged_topic_does_not_hide_what_is_wrong_with_another(store: MemoryStore) -> None:
    tip = keys(store, MANIFESTS)[-1]
    other = names.topic_manifest_prefix(0, names.topic_id("other"))
    second = keys(store, other)[1]
    change(store, tip, flipped)
    change(store, second, flipped)
    assert sorted(kinds(audited(store))) == sorted([(Kind.DAMAGED, tip), (Kind.DAMAGED, second)])


# ---- what is not there


@pytest.mark.parametrize("what", ["live bucket", "progress", "properties", "checkpoint"])
def test_what_a_manifest_lives_on_and_is_not_there_is_missing(store: MemoryStore, what: str) -> None:
    key = OBJECTS[what][0](store)
    store.delete(key)
    assert kinds(audited(store)) == [(Kind.MISSING, key)]


def test_an_object_that_left_may_be_deleted_after_its_grace_and_not_before(store: MemoryStore) -> None:
    key = buried(store)
    store.delete(key)
    assert findings(audited(store)) == []
    (found,) = findings(audited(store, now_ms=EPOCH_MS + HOUR_MS // 2))
    assert (found.kind, found.object, found.severity) == (Kind.TOMBSTONE_GONE, key, Severity.WARNING)


def test_an_object_that_left_and_is_never_deleted_is_overdue(store: MemoryStore) -> None:
    report = audited(store, now_ms=EPOCH_MS + 20 * HOUR_MS)
    tombstones = sum(1 for topic in ("t", "other", "gone") for _ in topic_tip(store, names.topic_id(topic)).tombstones)
    tombstones += len(shard_tip(store).tombstones)
    assert report.tally.kinds[Kind.TOMBSTONE_OVERDUE, Severity.WARNING] == tombstones > 20


def test_a_manifest_that_is_missing_in_the_middle_is_found(store: MemoryStore) -> None:
    for prefix in (MANIFESTS, SHARD_MANIFESTS):
        key = keys(store, prefix)[3]
        store.delete(key)
        assert (Kind.MANIFEST_MISSING, key) in kinds(audited(store))
    assert len(kinds(audited(store))) == 2


def test_manifests_that_collection_may_have_deleted_are_not_missed(store: MemoryStore) -> None:
    for place in (0, 2, 3):
        store.delete(keys(store, MANIFESTS)[place])
    newest = topic_tip(store).head.number
    kept = dataclasses.replace(LIMITS, manifests_kept=newest - 6)
    assert findings(audited(store, limits=kept)) == []
    assert len(findings(audited(store, limits=dataclasses.replace(kept, manifests_kept=newest - 4)))) == 1


def test_below_the_manifest_that_deleted_a_topic_none_is_missed(store: MemoryStore) -> None:
    prefix = names.topic_manifest_prefix(0, names.topic_id("gone"))
    for key in keys(store, prefix)[:-1]:
        store.delete(key)
    assert findings(audited(store)) == []


def test_a_topic_without_any_manifest_is_found(store: MemoryStore) -> None:
    for key in keys(store, MANIFESTS):
        store.delete(key)
    assert kinds(audited(store)) == [(Kind.NO_MANIFEST, MANIFESTS)]


def test_a_shard_without_any_manifest_is_found(store: MemoryStore) -> None:
    for key in keys(store, SHARD_MANIFESTS):
        store.delete(key)
    assert kinds(audited(store)) == [(Kind.NO_MANIFEST, SHARD_MANIFESTS)]


def test_a_slot_that_is_missing_in_the_middle_is_found_and_covered_ones_are_not_missed(store: MemoryStore) -> None:
    slots = keys(store, LOGS)
    store.delete(slots[-4])
    store.delete(slots[-3])
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.shard) == (Kind.SLOT_MISSING, slots[-4], 0)
    before, behind = names.number_of(slots[-5]), names.number_of(slots[-2])
    assert f"after slot {before} and before slot {behind}" in found.detail


def test_a_log_whose_end_was_lost_is_found(store: MemoryStore) -> None:
    newest = shard_tip(store).checkpoint
    assert newest is not None
    above = [key for key in keys(store, names.log_prefix(newest.log_id)) if names.number_of(key) >= newest.at]
    for key in above:
        store.delete(key)
    assert (Kind.SLOT_MISSING, above[0]) in kinds(audited(store))


# ---- the epochs of sections


def of_epoch(body: bytes, epoch: int) -> bytes:
    """A log slot whose section is of another epoch, and checksums that are right."""
    slot = log_slot_format.decode_log_slot(body)
    header, records = slot_format.decode_slot(slot.section(0))
    section = slot_format.encode_slot(dataclasses.replace(header, epoch=epoch), records)
    heads = {0: Head(epoch, slot.header.heads[0].last_slot)}
    return log_slot_format.encode_log_slot(dataclasses.replace(slot.header, heads=heads), {0: section})


def test_an_epoch_that_falls_is_found(store: MemoryStore) -> None:
    key = keys(store, LOGS)[-1]
    change(store, key, lambda body: of_epoch(body, 1))
    assert kinds(audited(store)) == [(Kind.LOG_RULE, key)]


def test_an_epoch_that_the_shard_never_had_is_found(store: MemoryStore) -> None:
    change(store, keys(store, LOGS)[-1], lambda body: of_epoch(body, 3))
    assert kinds(audited(store)) == [(Kind.BEYOND_LOG, keys(store, SHARD_MANIFESTS)[-1])]


# ---- what is nobody's


def test_what_is_none_of_the_objects_of_a_root_is_told(store: MemoryStore) -> None:
    key = f"{names.shard_prefix(0)}notes"
    store.put(key, b"mine")
    report = audited(store)
    assert [found.object for found in report.in_order() if found.kind is Kind.FOREIGN] == [key]
    assert report.errors == 0


def test_what_lies_among_manifests_is_an_error(store: MemoryStore) -> None:
    key = f"{MANIFESTS}00000000000000000007-copy"
    store.put(key, b"mine")
    assert kinds(audited(store)) == [(Kind.FOREIGN, key)]


def test_an_object_that_was_given_up_is_told_until_it_is_gone(store: MemoryStore) -> None:
    key = unnamed_bucket(store)
    record = manifest.DeadObject(object=key, size_bytes=258, attempts=10, error="denied", given_up_ms=EPOCH_MS)
    store.put(names.dead_object_key(key), manifest.encode_dead_object(record))
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.severity) == (
        Kind.GIVEN_UP,
        names.dead_object_key(key),
        Severity.WARNING,
    )
    assert "denied" in found.detail
    store.delete(key)
    assert findings(audited(store)) == []


def test_a_damaged_record_of_what_was_given_up_is_found(store: MemoryStore) -> None:
    key = names.dead_object_key(unnamed_bucket(store))
    store.put(key, b"TyDOwhatever")
    assert kinds(audited(store)) == [(Kind.DAMAGED, key)]


def test_the_pass_of_the_probe_is_known_and_its_damage_is_a_warning(store: MemoryStore) -> None:
    probe.remember(store, Bucket("http://127.0.0.1:9000", "orders"), now_ms=EPOCH_MS)
    after = audited(store)
    assert findings(after) == []
    assert after.tally.objects["probe pass"] == 1
    store.put(names.PROBE_PASS_KEY, store.get(names.PROBE_PASS_KEY)[:-1] + b"x")
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.severity) == (Kind.DAMAGED, names.PROBE_PASS_KEY, Severity.WARNING)

    def fail(read: str) -> None:
        if read == names.PROBE_PASS_KEY:
            raise StoreUnavailable(read, "out for lunch")

    (found,) = findings(audited(store, before_read=fail))
    assert (found.kind, found.object, found.severity) == (Kind.UNREADABLE, names.PROBE_PASS_KEY, Severity.WARNING)


# ---- reading


def test_what_the_store_does_not_give_is_told(store: MemoryStore) -> None:
    key = live_bucket(store)

    def fail(read: str) -> None:
        if read == key:
            raise StoreUnavailable(read, "out for lunch")

    (found,) = findings(audited(store, before_read=fail))
    assert (found.kind, found.object, found.severity) == (Kind.UNREADABLE, key, Severity.ERROR)
    assert "out for lunch" in found.detail


@pytest.mark.parametrize("what", ["live bucket", "topic manifest", "log slot", "checkpoint"])
def test_damage_that_a_second_read_does_not_show_is_none(store: MemoryStore, what: str) -> None:
    key = OBJECTS[what][0](store)
    body = store.get(key)
    reads = 0

    def flicker(read: str) -> None:
        nonlocal reads
        if read == key:
            reads += 1
            change(store, key, lambda _: flipped(body) if reads == 1 else body)

    report = audited(store, before_read=flicker)
    assert reads > 1
    assert findings(report) == []


# ---- a part of the root


def test_an_audit_of_one_topic_reads_nothing_of_the_others(store: MemoryStore) -> None:
    broken = names.topic_manifest_key(0, names.topic_id("other"), 1)
    change(store, broken, flipped)
    read: set[str] = set()
    report = audited(store, topics=("t",), before_read=read.add)
    assert findings(report) == []
    assert report.topics == 1
    assert broken not in read
    assert kinds(audited(store, topics=("other",))) == [(Kind.DAMAGED, broken)]


def test_an_audit_of_a_topic_that_is_not_there_says_so(store: MemoryStore) -> None:
    with pytest.raises(audit.UnknownTopic, match="'nowhere'"):
        audited(store, topics=("t", "nowhere"))


def test_a_sample_reads_heads_of_live_buckets_and_everything_else_in_full(store: MemoryStore) -> None:
    report = audited(store, sample=0.0)
    live = sum(len(topic_tip(store, names.topic_id(topic)).live) for topic in ("t", "other"))
    assert report.tally.objects["bucket head"] == live
    assert findings(report) == []
    assert report.as_json()["sample"] == 0.0
    key = live_bucket(store)
    change(store, key, lambda body: body[:20] + bytes([body[20] ^ 1]) + body[21:])
    assert kinds(audited(store, sample=0.0)) == [(Kind.DAMAGED, key)]
    store.delete(key)
    assert kinds(audited(store, sample=0.0)) == [(Kind.MISSING, key)]


# ---- the report


def test_the_report_as_json_has_the_documented_keys(store: MemoryStore) -> None:
    key = live_bucket(store)
    change(store, key, flipped)
    said = audited(store).as_json()
    assert list(said) == [
        "version",
        "store",
        "engine",
        "started_ms",
        "seconds",
        "sample",
        "shards",
        "topics",
        "objects",
        "bytes",
        "rows",
        "by_object",
        "moved_on",
        "errors",
        "warnings",
        "infos",
        "counts",
        "left_out",
        "findings",
    ]
    assert (said["errors"], said["warnings"], said["infos"]) == (1, 0, 2)
    assert said["counts"] == {"damaged": 1, "unnamed": 2}
    found = said["findings"][0]
    assert {name: found[name] for name in ("severity", "kind", "object", "topic", "shard")} == {
        "severity": "error",
        "kind": "damaged",
        "object": key,
        "topic": "t",
        "shard": 0,
    }
    assert found["offset"] > 0


def test_too_many_findings_of_a_kind_are_counted_and_not_listed(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_findings, "FINDINGS_MAX", 4)
    for key in keys(store, MANIFESTS)[:9]:
        change(store, key, flipped)
    said = audited(store).as_json()
    assert said["counts"]["damaged"] == said["errors"] == 9
    assert sum(found["kind"] == "damaged" for found in said["findings"]) == 4
    assert said["left_out"] == {"damaged": 5}


def test_every_kind_has_a_meaning() -> None:
    assert set(audit_findings.MEANING) == set(Kind)


def test_a_manifest_that_was_put_as_another_commit_is_found(store: MemoryStore) -> None:
    key = keys(store, MANIFESTS)[4]
    store.put(key, store.get(key), metadata={COMMIT_ID: "somebody-else"})
    assert kinds(audited(store)) == [(Kind.CHAIN_BROKEN, key)]
