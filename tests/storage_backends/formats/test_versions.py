"""What holds schedule ids, or requires that they are known, has version 2; all else keeps version 1, byte for byte.

A reader that does not know the version, or what a manifest requires, refuses it by name, and as no damage.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    framing,
    manifest,
    requirements,
    segment,
    slot_format,
)
from storage_backends.formats.checkpoint_format import CarriedSlot, Checkpoint, OwnRows, SealingPart, TopicPart
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from tests.storage_backends.formats import test_golden
from tests.storage_backends.formats._support import examples

PLAIN = test_golden.golden_rows()
WITH_IDS = test_golden.golden_rows_with_ids()
NO_ID = dataclasses.replace(PLAIN, schedule_ids=examples.ids_of([b""] * len(PLAIN)))
HEADER = slot_format.SlotHeader(3, 4, ShardSlot(5), 1)


def section(rows: Rows) -> bytes:
    return slot_format.encode_slot(HEADER, (slot_format.AddRecord("id", 1, 0, rows),))


def bucket(rows: Rows, *, compatible: bool = False) -> bytes:
    return bucket_format.encode_bucket(
        rows.sorted_by_due(),
        topic="orders",
        subscription_id=0,
        limits=segment.SegmentLimits(),
        compatible=compatible,
    ).body


def progress(rows: Rows) -> bytes:
    return manifest.encode_progress(examples.redelivery_progress(rows))


def checkpoint(part: TopicPart) -> bytes:
    return checkpoint_format.encode_checkpoint(Checkpoint(3, 4, ShardSlot(7), (part,)))


def part_with(place: str, rows: Rows) -> TopicPart:
    part = TopicPart("id", "orders", 1, Rows.empty(), slot=ShardSlot(3))
    record = slot_format.AddRecord("id", 1, 0, rows)
    message = journal_pb2.Record()
    slot_format.fill_record(message, record)
    content: dict[str, Any] = {
        "mutable_rows": rows,
        "own_rows": (OwnRows(2, rows),),
        "sealing": (SealingPart("b", ShardSlot(6), rows),),
        "progress": examples.redelivery_progress(rows),
        "carried": (CarriedSlot(ShardSlot(6), (record,)),),
        "carried and not decoded": (CarriedSlot(ShardSlot(6), (slot_format.StoredRecord(message, "record", 0),)),),
    }
    return dataclasses.replace(part, **{place.partition(" ")[0]: content[place]})


PLACES = ("mutable_rows", "own_rows", "sealing", "progress", "carried", "carried and not decoded")
OBJECTS: dict[str, tuple[Callable[[Rows], bytes], Callable[[bytes], object]]] = {
    "journal slot": (section, slot_format.decode_slot),
    "bucket footer": (bucket, bucket_format.decode_bucket),
    "progress": (progress, manifest.decode_progress),
    **{
        f"checkpoint {place}": (
            lambda rows, place=place: checkpoint(part_with(place, rows)),  # type: ignore[misc]
            checkpoint_format.decode_checkpoint,
        )
        for place in PLACES
    },
}
every_object = pytest.mark.parametrize("name", OBJECTS)


def without_knowledge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(requirements, "KNOWN", frozenset())


@every_object
def test_an_object_has_version_2_if_a_row_has_an_id(name: str) -> None:
    encode, decode = OBJECTS[name]
    assert (encode(PLAIN)[4], encode(NO_ID)[4], encode(WITH_IDS)[4]) == (1, 1, 2)
    decode(encode(WITH_IDS))


@every_object
def test_an_object_of_rows_without_ids_is_the_same_whether_or_not_they_could_have_any(name: str) -> None:
    encode, _ = OBJECTS[name]
    assert encode(NO_ID) == encode(PLAIN)


@every_object
def test_a_release_that_does_not_know_ids_refuses_what_holds_them_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, decode = OBJECTS[name]
    without_knowledge(monkeypatch)
    decode(encode(PLAIN))
    with pytest.raises(format_errors.UnsupportedVersion) as refused:
        decode(encode(WITH_IDS))
    what = name.partition(" ")[0] if name.startswith("checkpoint") else name
    assert str(refused.value) == (
        f"{what} cannot be read by this release: format version 2 is not known, this release reads version 1; "
        "use a release that knows it"
    )


def test_a_bucket_with_ids_is_columnar_and_says_which_positions_have_one() -> None:
    encoded = bucket_format.encode_bucket(
        WITH_IDS.sorted_by_due(), topic="orders", subscription_id=0, limits=segment.SegmentLimits(), compatible=True
    )
    assert not encoded.compatible
    metadata, rows = bucket_format.decode_bucket(encoded.body)
    assert examples.tuples(rows) == examples.tuples(WITH_IDS.sorted_by_due())
    assert WITH_IDS.schedule_ids is not None
    has_id = WITH_IDS.schedule_ids.lengths != 0
    assert sum(len(each.bitmap()) for each in metadata.id_positions) == encoded.id_rows == int(has_id.sum())
    live = encoded.live_bucket("b", base=1)
    assert (live.id_rows, live.id_hash_low, live.id_hash_high) == (
        encoded.id_rows,
        metadata.id_hash_low,
        metadata.id_hash_high,
    )
    bucket_format.check_head(metadata, encoded.table, live)
    with pytest.raises(format_errors.FormatError, match="rows with ids and their hash"):
        bucket_format.check_head(metadata, encoded.table, dataclasses.replace(live, id_rows=live.id_rows - 1))


def test_a_bucket_whose_ids_are_others_than_its_metadata_says_is_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bucket_format, "id_hash", lambda rows: (1, 2))
        body = bucket(WITH_IDS)
    with pytest.raises(format_errors.FormatError, match="hash of its rows with ids is not the one in its metadata"):
        bucket_format.decode_bucket(body)


# ---- manifests


def shard(requires: tuple[str, ...]) -> bytes:
    return manifest.encode_shard_manifest(dataclasses.replace(test_golden.golden_shard_manifest(), requires=requires))


def topic(requires: tuple[str, ...]) -> bytes:
    return manifest.encode_topic_manifest(dataclasses.replace(test_golden.golden_topic_manifest(), requires=requires))


MANIFESTS: dict[str, tuple[Callable[[tuple[str, ...]], bytes], Callable[[bytes], object]]] = {
    "shard manifest": (shard, manifest.decode_shard_manifest),
    "topic manifest": (topic, manifest.decode_topic_manifest),
    "topic manifest of many": (topic, lambda data: manifest.TopicManifestDecoder().decode(data)),
}
every_manifest = pytest.mark.parametrize("name", MANIFESTS)


@every_manifest
def test_a_manifest_has_version_2_if_it_requires_something(name: str) -> None:
    encode, decode = MANIFESTS[name]
    assert (encode(())[4], encode(("schedule_ids",))[4]) == (1, 2)
    found = decode(encode(("schedule_ids",)))
    assert isinstance(found, manifest.ShardManifest | manifest.TopicManifest)
    assert found.requires == ("schedule_ids",)


@every_manifest
def test_a_manifest_that_requires_what_is_not_known_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, decode = MANIFESTS[name]
    for known, required, unknown in (
        (frozenset({"schedule_ids"}), ("later", "later_still", "schedule_ids"), "later, later_still"),
        (frozenset[str](), ("schedule_ids",), "schedule_ids"),
    ):
        monkeypatch.setattr(requirements, "KNOWN", known)
        with pytest.raises(format_errors.UnknownRequirement) as refused:
            decode(encode(required))
        what = name.removesuffix(" of many")
        assert str(refused.value) == (
            f"{what} cannot be read by this release: it requires {unknown}, which is not known; "
            "use a release that knows it"
        )


def test_what_is_required_and_not_known_is_named_though_the_rest_makes_no_sense() -> None:
    """A later release may mean something else by it."""
    data = shard(("later",))
    payload = data[framing.HEADER_BYTES : -4]
    # The last field: a settled epoch above the epoch makes no sense here.
    forged = framing.frame(data[:4], 2, payload + b"\x50\x63")
    with pytest.raises(format_errors.UnknownRequirement):
        manifest.decode_shard_manifest(forged)


def test_requirements_that_are_not_in_order_are_damage() -> None:
    with pytest.raises(ValueError, match="not in the order of their names"):
        shard(("b", "a"))
    data = shard(("schedule_ids",))
    twice = framing.frame(data[:4], 2, data[framing.HEADER_BYTES : -4] + b"\x5a\x0cschedule_ids")
    with pytest.raises(format_errors.FormatError, match="not in the order of their names"):
        manifest.decode_shard_manifest(twice)


def test_a_topic_with_ids_requires_that_they_are_known() -> None:
    plain = test_golden.golden_topic_manifest()
    live = dataclasses.replace(plain.live[0], id_rows=1)
    for changes in ({"live": (live,)}, {"progress": examples.redelivery_progress(WITH_IDS)}):
        with pytest.raises(ValueError, match="does not require schedule_ids"):
            dataclasses.replace(plain, **changes)
        dataclasses.replace(plain, **changes, requires=("schedule_ids",))


def test_records_that_become_one_keep_the_ids_of_their_rows() -> None:
    builder = slot_format.SlotBuilder()
    for rows in (WITH_IDS.take(slice(0, 9)), PLAIN.take(slice(9, 20)), WITH_IDS.take(slice(20, 30))):
        builder.append(slot_format.AddRecord("id", 1, 0, rows))
    (record,) = builder.freeze()
    data = slot_format.encode_slot(HEADER, (record,))
    assert len(data) <= builder.size_bytes
    (read,) = slot_format.decode_slot(data)[1]
    assert isinstance(read, slot_format.AddRecord)
    expected = [row[-1] for row in examples.tuples(WITH_IDS)]
    expected[9:20] = [b""] * 11
    assert [row[-1] for row in examples.tuples(read.rows)] == expected[:30]


def test_an_acknowledgement_stores_no_ids() -> None:
    acknowledged = slot_format.AcknowledgeRecord("id", 1, 2, dataclasses.replace(WITH_IDS, key_hash=None))
    assert slot_format.encode_slot(HEADER, (acknowledged,))[4] == 1
