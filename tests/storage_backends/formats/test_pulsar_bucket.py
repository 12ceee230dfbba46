"""A bucket that the tracker of Pulsar itself has sealed says what ours says of the same rows, byte for byte.

`scripts/seal_by_pulsar.py` has made it: the entries, each behind its length (u32, big-endian).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from storage_backends.formats import bucket_format, format_errors, segment
from storage_backends.formats.generated import bucket_pb2
from storage_backends.formats.row_columns import Rows
from tests.storage_backends.formats._support import examples

FOLDER = Path(__file__).parent / "pulsar"
BUCKETS = sorted(FOLDER.glob("bucket-*.bin"))
# As the script has them; without a minimum of rows the cut is PIP-195's.
LIMITS = segment.SegmentLimits(time_step_ms=60_000, rows_max=50, rows_min=0)


def entries(bucket: Path) -> Iterator[bytes]:
    """Entry 0 is the metadata, the others are segments."""
    body, place = bucket.read_bytes(), 0
    while place < len(body):
        (length,) = struct.unpack_from(">I", body, place)
        yield body[place + 4 : place + 4 + length]
        place += 4 + length


def added() -> Rows:
    """What was added to the tracker, in due order."""
    ledger_id, entry_id, deliver_at_ms = np.loadtxt(FOLDER / "rows.csv", np.uint64, delimiter=",", skiprows=1).T.copy()
    return Rows(deliver_at_ms, ledger_id, entry_id).sorted_by_due()


def parts() -> list[Rows]:
    rows = added()
    return [rows.take(slice(*each)) for each in segment.cut(rows.deliver_at_ms, LIMITS)]


def number_of(part: Rows) -> bytes:
    """The one field that we write behind Pulsar's."""
    return bucket_pb2.SnapshotSegment(rows=len(part)).SerializeToString()


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda path: path.stem)
def test_the_segments_of_pulsar_are_ours_but_for_the_number_of_rows(bucket: Path) -> None:
    _, *sealed = entries(bucket)
    assert len(sealed) >= 5
    assert [payload + number_of(part) for payload, part in zip(sealed, parts(), strict=True)] == [
        segment.encode_compatible(part) for part in parts()
    ]


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda path: path.stem)
def test_our_reader_reads_the_rows_that_pulsar_has_written(bucket: Path) -> None:
    _, *sealed = entries(bucket)
    for payload, part in zip(sealed, parts(), strict=True):
        read = segment.decode(payload + number_of(part), len(part), what="segment", offset=0)
        assert examples.tuples(read) == examples.tuples(part)
        with pytest.raises(format_errors.FormatError, match=f"{len(part)} indexes and no field rows.*as Pulsar seals"):
            segment.decode(payload, len(part), what="segment", offset=0)


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda path: path.stem)
def test_times_and_bitmaps_of_the_segments_are_ours(bucket: Path) -> None:
    metadata, *_ = entries(bucket)
    encoded = bucket_format.encode_bucket(added(), topic="", subscription_id=0, limits=LIMITS, compatible=True)
    offset, length = encoded.table.metadata.offset, encoded.table.metadata.length
    ours = bucket_pb2.SnapshotMetadata.FromString(encoded.body[offset + 8 : offset + length])
    assert ours.metadata_list
    for each in ours.metadata_list:
        each.ClearField("rows")
    assert bucket_pb2.SnapshotMetadata.FromString(metadata).metadata_list == ours.metadata_list


@pytest.mark.parametrize("bucket", BUCKETS, ids=lambda path: path.stem)
def test_an_object_of_pulsar_s_entries_is_not_taken_for_one_of_ours(bucket: Path) -> None:
    with pytest.raises(format_errors.FormatError, match="magic is"):
        bucket_format.decode_bucket(bucket.read_bytes())


def test_there_is_a_bucket_and_its_entry_ids_are_varints_of_every_length() -> None:
    assert BUCKETS
    assert {max(1, -(-int(entry_id).bit_length() // 7)) for entry_id in added().entry_id} == {1, 2, 3, 4, 5}
