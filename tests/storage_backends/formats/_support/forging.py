"""Stored objects that say something else with the right checksums, as a mistake in a writer or a forger would make
them: each kind by its message, and how its bytes are made and read.

`read` decodes all that the object holds, also what callers decode later. What it may raise is FormatError alone.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from google.protobuf import message as protobuf

from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    framing,
    log_slot_format,
    manifest,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.bucket_format import SegmentInfo
from storage_backends.formats.generated import bucket_pb2, checkpoint_pb2, journal_pb2, manifest_pb2
from storage_backends.formats.manifest import Progress
from storage_backends.formats.position_bitmap import PositionSet
from tests.storage_backends.formats._support.known_ids import known_ids

GOLDEN = Path(__file__).parent.parent / "golden"
_SECTION_HEAD = struct.Struct("<4sHBBIQQIQ")
_LOG_SLOT_HEAD = struct.Struct("<4sHBB26sQIH")
_ENTRY = struct.Struct("<II")
# Form PLANES and ZSTD of a column, and the largest block of a frame (bytes)
_PACKED, _BLOCK_BYTES = 0x50, 1 << 17


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object: an example, its message, and how bytes are made of a payload and read."""

    message: protobuf.Message
    sealed: Callable[[protobuf.Message], bytes]
    read: Callable[[bytes], object]


def _framed(name: str, message: protobuf.Message, read: Callable[[bytes], object]) -> Kind:
    stored = (GOLDEN / name).read_bytes()
    message.ParseFromString(stored[framing.HEADER_BYTES : -4])
    magic, version = stored[:4], int.from_bytes(stored[4:8], "little")
    return Kind(message, lambda made: framing.frame(magic, version, made.SerializePartialToString()), read)


def _section(name: str) -> Kind:
    message, stored = journal_pb2.Slot(), (GOLDEN / name).read_bytes()
    message.ParseFromString(stored[slot_format.HEADER_BYTES :])
    return Kind(message, lambda made: _sealed_section(made, stored[4]), _read_section)


def _sealed_section(made: Any, version: int) -> bytes:
    payload: bytes = made.SerializePartialToString()
    records = len(made.records) + len(made.deletions)
    head = _SECTION_HEAD.pack(slot_format.MAGIC, version, 1, 0, 3, 4, 5, records, len(payload))
    return head + framing.crc32c(head, payload).to_bytes(4, "little") + payload


def _read_section(data: bytes) -> None:
    slot_format.decode_slot(data)


def _read_checkpoint(data: bytes) -> None:
    found = checkpoint_format.decode_checkpoint(data)
    for part in found.topics:
        _read_progress(part.progress)
        for record in (record for carried in part.carried for record in carried.records):
            if isinstance(record, slot_format.StoredRecord):
                record.decoded()


def _read_topic_manifest(data: bytes) -> None:
    _read_progress(manifest.decode_topic_manifest(data).progress or Progress())


def _read_progress(progress: Progress) -> None:
    for part in progress.buckets:
        PositionSet.of(part.gone)
        for acknowledged in part.acknowledged:
            PositionSet.of(acknowledged.positions)
    for level in progress.levels:
        PositionSet.of(level.positions)
    for each in progress.redeliveries:
        for nacked in each.nacked:
            redelivery_columns.decode_nacked(nacked)
        for plane in each.counts:
            PositionSet.of(plane.positions)
        if each.dead_letters is not None:
            redelivery_columns.decode_dead_letters(each.dead_letters)


def _part_of_bucket(name: str, number: int, message: Any, read: Callable[[bytes, SegmentInfo], object]) -> Kind:
    body = (GOLDEN / name).read_bytes()
    with known_ids():
        found = bucket_format.decode_footer(body[-32:], len(body))
    table = bucket_format.decode_table(body[found.offset : -32], found)
    info = table.segments[number - 1] if number else table.metadata
    message.ParseFromString(body[info.offset + _ENTRY.size : info.offset + info.length])

    def sealed(made: Any) -> bytes:
        payload: bytes = made.SerializePartialToString()
        return _ENTRY.pack(len(payload), framing.crc32c(payload)) + payload

    def read_entry(data: bytes) -> None:
        said = type(message)()
        said.ParseFromString(data[_ENTRY.size :])
        # A forged offset table agrees with a forged entry.
        rows = min(said.rows, (1 << 32) - 1)
        read(data, dataclasses.replace(info, length=len(data), crc32c=framing.crc32c(data[_ENTRY.size :]), rows=rows))

    return Kind(message, sealed, read_entry)


def _read_metadata(data: bytes, info: SegmentInfo) -> None:
    metadata = bucket_format.decode_metadata(data, info)
    PositionSet.of(metadata.positions)
    for each in metadata.kept:
        PositionSet.of(each.positions)
    PositionSet.of(metadata.id_positions)


KINDS = {
    "FORMAT": _framed("root-format-2.bin", manifest_pb2.RootFormat(), manifest.decode_root_format),
    "shard manifest": _framed("shard-manifest-1.bin", manifest_pb2.ShardManifest(), manifest.decode_shard_manifest),
    "topic manifest": _framed("topic-manifest-1.bin", manifest_pb2.TopicManifest(), _read_topic_manifest),
    "redeliveries": _framed("topic-manifest-redeliveries-1.bin", manifest_pb2.TopicManifest(), _read_topic_manifest),
    "key order": _framed("topic-manifest-key-order-1.bin", manifest_pb2.TopicManifest(), _read_topic_manifest),
    "progress": _framed(
        "progress-1.bin", manifest_pb2.Progress(), lambda data: _read_progress(manifest.decode_progress(data))
    ),
    "properties": _framed("properties-1.bin", manifest_pb2.Properties(), manifest.decode_properties),
    "dead object": _framed("dead-object-1.bin", manifest_pb2.DeadObject(), manifest.decode_dead_object),
    "checkpoint": _framed("checkpoint-1.bin", checkpoint_pb2.Checkpoint(), _read_checkpoint),
    "checkpoint of deletions": _framed("checkpoint-deletions-1.bin", checkpoint_pb2.Checkpoint(), _read_checkpoint),
    "section": _section("slot-1.bin"),
    "section of redeliveries": _section("slot-redeliveries-1.bin"),
    "section of withdrawals": _section("slot-withdrawals-1.bin"),
    "section of deletions": _section("slot-deletions-1.bin"),
    "metadata": _part_of_bucket("bucket-merged-1.bin", 0, bucket_pb2.SnapshotMetadata(), _read_metadata),
    "segment": _part_of_bucket("bucket-columnar-1.bin", 1, bucket_pb2.SnapshotSegment(), bucket_format.decode_segment),
    "metadata with ids": _part_of_bucket("bucket-ids-2.bin", 0, bucket_pb2.SnapshotMetadata(), _read_metadata),
    "segment with ids": _part_of_bucket(
        "bucket-ids-2.bin", 1, bucket_pb2.SnapshotSegment(), bucket_format.decode_segment
    ),
    "section with ids": _section("slot-ids-2.bin"),
    "checkpoint with ids": _framed("checkpoint-ids-2.bin", checkpoint_pb2.Checkpoint(), _read_checkpoint),
    "shard manifest with ids": _framed(
        "shard-manifest-ids-2.bin", manifest_pb2.ShardManifest(), manifest.decode_shard_manifest
    ),
    "topic manifest with ids": _framed("topic-manifest-ids-2.bin", manifest_pb2.TopicManifest(), _read_topic_manifest),
    "compatible segment": _part_of_bucket(
        "bucket-compatible-1.bin", 1, bucket_pb2.SnapshotSegment(), bucket_format.decode_segment
    ),
}


def with_header_checksum(slot: bytes) -> bytes:
    """A log slot whose checksum is that of its header and table, as far as these can be found."""
    fixed = _LOG_SLOT_HEAD.size
    entries, writer_bytes = struct.unpack_from("<IH", slot, fixed - 6)
    end = log_slot_format.HEADER_BYTES + writer_bytes + log_slot_format.ENTRY_BYTES * entries
    checksum = framing.crc32c(slot[:fixed] + slot[log_slot_format.HEADER_BYTES : end])
    return slot[:fixed] + checksum.to_bytes(4, "little") + slot[fixed + 4 :]


# ---- columns and bitmaps that take little and say much


def constant(value: int = 7) -> bytes:
    """A column of any number of rows."""
    return struct.pack("<BQ", 0, value)


def zeros(rows: int, width: int = 1) -> bytes:
    """A column of so many rows, packed by zstd, all of them 0."""
    return struct.pack("<BQ", _PACKED | width, 0) + frame_of_zeros(rows * width)


def frame_of_zeros(size_bytes: int) -> bytes:
    """A zstd frame with so much content, which takes a 32,768th of it."""
    blocks = []
    for start in range(0, size_bytes, _BLOCK_BYTES):
        size = min(_BLOCK_BYTES, size_bytes - start)
        last = start + size == size_bytes
        # Type 1: one byte, repeated
        blocks.append((last | 1 << 1 | size << 3).to_bytes(3, "little") + b"\0")
    # The content size in 8 bytes, and a window of 512 KiB
    return b"\x28\xb5\x2f\xfd\xc0\x48" + struct.pack("<Q", size_bytes) + b"".join(blocks)


def full_bitmap(containers: int) -> bytes:
    """A Roaring bitmap with 65,536 entries in each of its containers."""
    head = struct.pack("<I", 12347 | (containers - 1) << 16) + b"\xff" * ((containers + 7) // 8)
    described = b"".join(struct.pack("<HH", number, 0xFFFF) for number in range(containers))
    first = len(head) + len(described) + (4 * containers if containers >= 4 else 0)
    offsets = b"".join(struct.pack("<I", first + 6 * number) for number in range(containers if containers >= 4 else 0))
    return head + described + offsets + struct.pack("<HHH", 1, 0, 0xFFFF) * containers
