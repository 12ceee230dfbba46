"""Every object: truncated anywhere, a bit flipped anywhere, or of another version, it is refused and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import bucket, checkpoint, errors, journal, manifest, position_bitmap
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends.formats import examples

ROWS = examples.random_delays(40, span_ms=30_000, keyed=True)
POSITIONS = position_bitmap.position_bitmaps(ROWS.ledger_id, ROWS.entry_id)
HEAD = manifest.ManifestHead(number=1, previous_sha256=b"", commit_id="c", writer="w", created_ms=5, lineage=("c",))
LIMITS = SegmentLimits(time_step_ms=1_000, rows_max=15, rows_min=5)


def a_bucket(*, compatible: bool) -> bytes:
    return bucket.encode_bucket(
        ROWS.sorted_by_due(), topic="orders", subscription_id=0, limits=LIMITS, compatible=compatible
    ).body


def a_slot() -> bytes:
    records: tuple[journal.Record, ...] = (
        journal.AddRecord("id", 1, 0, ROWS),
        journal.AcknowledgeRecord("id", 1, 2, ROWS.take(slice(0, 4))),
        journal.GoneRecord("id", 1, 0, journal.GoneReason.TRIMMED, POSITIONS),
        journal.WaiveRecord("id", 1, 2, POSITIONS),
    )
    return journal.encode_slot(journal.SlotHeader(1, 2, 3, journal.SlotKind.DATA, len(records)), records)


def a_topic_manifest() -> bytes:
    return manifest.encode_topic_manifest(
        manifest.TopicManifest(head=HEAD, topic="orders", topic_id="id", incarnation=1, owner_epoch=1, applied=9)
    )


OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "columnar bucket": (a_bucket(compatible=False), bucket.decode_bucket),
    "compatible bucket": (a_bucket(compatible=True), bucket.decode_bucket),
    "journal slot": (a_slot(), journal.decode_slot),
    "FORMAT": (
        manifest.encode_root_format(manifest.RootFormat(format_version=1, shards=16, created_ms=5, root_id="r")),
        manifest.decode_root_format,
    ),
    "shard manifest": (
        manifest.encode_shard_manifest(manifest.ShardManifest(head=HEAD, shard=1, epoch=2, owner="o")),
        manifest.decode_shard_manifest,
    ),
    "topic manifest": (a_topic_manifest(), manifest.decode_topic_manifest),
    "progress": (
        manifest.encode_progress(manifest.Progress(buckets=(manifest.BucketProgress(bucket="b"),))),
        manifest.decode_progress,
    ),
    "checkpoint": (
        checkpoint.encode_checkpoint(
            checkpoint.Checkpoint(
                1, 2, 3, (checkpoint.TopicPart("id", "t", 1, ROWS, (checkpoint.SealingPart("b", 4, ROWS),)),)
            )
        ),
        checkpoint.decode_checkpoint,
    ),
}
every_object = pytest.mark.parametrize("name", OBJECTS)


@every_object
def test_an_object_truncated_at_any_byte_is_refused(name: str) -> None:
    data, decode = OBJECTS[name]
    for kept in range(len(data)):
        with pytest.raises(errors.FormatError):
            decode(data[:kept])


@every_object
def test_an_object_with_a_byte_after_it_is_refused(name: str) -> None:
    data, decode = OBJECTS[name]
    with pytest.raises(errors.FormatError):
        decode(data + b"\0")


@every_object
def test_an_object_with_any_byte_altered_is_refused(name: str) -> None:
    data, decode = OBJECTS[name]
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1 << place % 8
        with pytest.raises(errors.FormatError):
            decode(bytes(altered))


@given(st.sampled_from(sorted(OBJECTS)), st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused(name: str, data: bytes) -> None:
    with pytest.raises(errors.FormatError):
        OBJECTS[name][1](data)


@given(st.sampled_from(sorted(OBJECTS)), st.data())
def test_an_object_with_any_run_of_bytes_overwritten_is_refused(name: str, drawing: st.DataObject) -> None:
    data, decode = OBJECTS[name]
    place = drawing.draw(st.integers(0, len(data) - 1))
    run = drawing.draw(st.binary(min_size=1, max_size=min(64, len(data) - place)))
    altered = data[:place] + run + data[place + len(run) :]
    if altered != data:
        with pytest.raises(errors.FormatError):
            decode(altered)


@every_object
def test_an_object_taken_for_another_is_refused_by_its_magic(name: str) -> None:
    _, decode = OBJECTS[name]
    for other, (data, _) in OBJECTS.items():
        if other != name and not {other, name} <= {"columnar bucket", "compatible bucket"}:
            with pytest.raises(errors.FormatError):
                decode(data)


@every_object
def test_a_version_that_is_not_known_is_its_own_error(name: str) -> None:
    data, decode = OBJECTS[name]
    newer = bytearray(data)
    newer[4] = 2
    with pytest.raises(errors.UnsupportedVersion, match="format version 2 is not known, this release reads version 1"):
        decode(bytes(newer))


def test_a_reader_of_ranges_learns_the_version_from_the_footer() -> None:
    data, _ = OBJECTS["columnar bucket"]
    footer = bytearray(data[-32:])
    struct.pack_into("<I", footer, 20, 2)
    with pytest.raises(errors.UnsupportedVersion):
        bucket.decode_footer(bytes(footer), len(data))


def test_damage_in_a_slot_is_named_with_its_offset() -> None:
    data, _ = OBJECTS["journal slot"]
    altered = bytearray(data)
    altered[100] ^= 4
    with pytest.raises(errors.FormatError, match="journal slot is damaged at byte 40: CRC32C is 0x"):
        journal.decode_slot(bytes(altered))


def test_rows_that_do_not_add_up_to_the_hash_are_refused_though_every_crc_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a mistake in a writer would look like."""
    with monkeypatch.context() as patch:
        patch.setattr(bucket, "row_hash", lambda rows: (1, 2))
        data = a_bucket(compatible=False)
    with pytest.raises(errors.FormatError, match="hash of its rows"):
        bucket.decode_bucket(data)
