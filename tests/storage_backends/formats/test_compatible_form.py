"""A reader that knows PIP-195's two .proto files, as printed there, and the frame of our object."""

from __future__ import annotations

import functools
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyroaring
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings

from storage_backends.formats import bucket_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from tests._support import parts
from tests.storage_backends.formats._support import examples

PIP195 = Path(__file__).parent / "pip195"
LIMITS = SegmentLimits(time_step_ms=1_000, rows_max=9, rows_min=3)


@functools.cache
def pip195_messages() -> tuple[Any, Any]:
    """PIP-195's SnapshotMetadata and SnapshotSegment, compiled by buf now."""
    buf = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
    assert buf, "buf is not installed: uv sync"
    compiled = subprocess.run([buf, "build", str(PIP195), "-o", "-"], check=True, capture_output=True).stdout
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(compiled).file:
        pool.Add(file)
    found = [pool.FindMessageTypeByName(f"pulsar.delay.{name}") for name in ("SnapshotMetadata", "SnapshotSegment")]
    metadata, segment = (message_factory.GetMessageClass(descriptor) for descriptor in found)
    return metadata, segment


def payloads(body: bytes) -> Iterator[bytes]:
    """The entries one after the other, up to the table: what a reader of the format document would write."""
    (table_offset,) = struct.unpack_from("<Q", body, len(body) - 32)
    offset = 8
    while offset < table_offset:
        (length,) = struct.unpack_from("<I", body, offset)
        yield body[offset + 8 : offset + 8 + length]
        offset += 8 + length


def read(rows: Rows, *, compatible: bool) -> tuple[Any, list[Any]]:
    encoded = bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="orders", subscription_id=3, limits=LIMITS, compatible=compatible
    )
    assert encoded.compatible == compatible
    metadata_class, segment_class = pip195_messages()
    first, *others = payloads(encoded.body)
    return metadata_class.FromString(first), [segment_class.FromString(payload) for payload in others]


def below_2_to_the_32(rows: Rows) -> Rows:
    return Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id & np.uint64(0xFFFF_FFFF), rows.key_hash)


@given(examples.rows(min_size=1).map(below_2_to_the_32))
@settings(max_examples=parts.examples(50))
def test_a_reader_of_the_pip_sees_every_row_of_a_compatible_bucket_in_order(rows: Rows) -> None:
    _, segments = read(rows, compatible=True)
    seen = [(index.timestamp, index.ledger_id, index.entry_id) for part in segments for index in part.indexes]
    assert seen == sorted(row[:3] for row in examples.tuples(rows))


@given(examples.rows(min_size=1).map(below_2_to_the_32))
@settings(max_examples=parts.examples(50))
def test_a_reader_of_the_pip_finds_times_and_positions_of_each_segment_in_the_metadata(rows: Rows) -> None:
    metadata, segments = read(rows, compatible=True)
    assert len(metadata.metadata_list) == len(segments)
    for listed, part in zip(metadata.metadata_list, segments, strict=True):
        due = [index.timestamp for index in part.indexes]
        assert (listed.min_schedule_timestamp, listed.max_schedule_timestamp) == (min(due), max(due))
        expected: dict[int, set[int]] = {}
        for index in part.indexes:
            expected.setdefault(index.ledger_id, set()).add(index.entry_id)
        found = {
            ledger: set(pyroaring.BitMap.deserialize(bitmap)) for ledger, bitmap in listed.delayed_index_bit_map.items()
        }
        assert found == expected


@pytest.mark.parametrize("keyed", [False, True])
def test_a_reader_of_the_pip_sees_the_metadata_of_a_columnar_bucket_and_no_rows(keyed: bool) -> None:
    rows = examples.random_delays(100, span_ms=50_000, keyed=keyed)
    metadata, segments = read(rows, compatible=False)
    assert len(metadata.metadata_list) == len(segments) > 10
    assert min(listed.min_schedule_timestamp for listed in metadata.metadata_list) == rows.deliver_at_ms.min()
    assert max(listed.max_schedule_timestamp for listed in metadata.metadata_list) == rows.deliver_at_ms.max()
    assert [len(part.indexes) for part in segments] == [0] * len(segments)
    assert all(not listed.delayed_index_bit_map for listed in metadata.metadata_list)


def test_key_hashes_of_a_compatible_bucket_come_back_to_us() -> None:
    rows = examples.random_delays(100, span_ms=50_000, keyed=True)
    encoded = bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="orders", subscription_id=3, limits=LIMITS, compatible=True
    )
    assert examples.tuples(bucket_format.decode_bucket(encoded.body)[1]) == examples.tuples(rows.sorted_by_due())


def test_each_row_is_written_as_protobuf_itself_writes_it() -> None:
    """The rows are formed without message objects: the bytes must be the ones of the library."""
    values = [0, 1, 127, 128, 16_383, 16_384, (1 << 32) - 1]
    column = examples.column(values)
    rows = Rows(column, column, column)
    _, segment_class = pip195_messages()
    encoded = bucket_format.encode_bucket(rows, topic="", subscription_id=0, limits=SegmentLimits(), compatible=True)
    _, payload = payloads(encoded.body)
    expected = segment_class()
    for value in values:
        expected.indexes.add(timestamp=value, ledger_id=value, entry_id=value)
    assert payload.startswith(expected.SerializeToString())
