from __future__ import annotations

import dataclasses
import hashlib
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import bucket_format, format_errors, index_ids, manifest, position_bitmap
from storage_backends.formats.bucket_format import EncodedBucket, KeptRows
from storage_backends.formats.row_columns import Rows, row_hash
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends.formats._support import examples

SMALL_SEGMENTS = SegmentLimits(time_step_ms=1_000, rows_max=7, rows_min=2)


def encode(
    rows: Rows, *, compatible: bool = False, limits: SegmentLimits = SMALL_SEGMENTS, kept: tuple[KeptRows, ...] = ()
) -> EncodedBucket:
    return bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="orders", subscription_id=3, limits=limits, compatible=compatible, kept=kept
    )


def entry(encoded: EncodedBucket, info: bucket_format.SegmentInfo) -> bytes:
    return encoded.body[info.offset : info.offset + info.length]


@given(examples.rows(min_size=1), st.booleans())
def test_a_bucket_of_either_form_comes_back_in_due_order(rows: Rows, compatible: bool) -> None:
    encoded = encode(rows, compatible=compatible)
    metadata, decoded = bucket_format.decode_bucket(encoded.body)
    assert examples.tuples(decoded) == examples.tuples(rows.sorted_by_due())
    assert (metadata.topic, metadata.subscription_id, metadata.rows) == ("orders", 3, len(rows))
    assert (metadata.hash_low, metadata.hash_high) == row_hash(rows) == (encoded.hash_low, encoded.hash_high)
    assert metadata.positions == encoded.positions
    assert metadata.positions == position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)


@given(examples.rows(min_size=1), st.booleans())
def test_what_the_manifest_says_of_a_bucket_is_what_is_in_it(rows: Rows, compatible: bool) -> None:
    encoded = encode(rows, compatible=compatible)
    listed = examples.tuples(rows)
    assert encoded.sha256 == hashlib.sha256(encoded.body).digest()
    assert encoded.rows == len(rows)
    assert (encoded.first_ledger_id, encoded.last_ledger_id) == (min(r[1] for r in listed), max(r[1] for r in listed))
    assert encoded.min_deliver_at_ms == min(r[0] for r in listed)
    assert encoded.max_deliver_at_ms == max(r[0] for r in listed)


@given(examples.rows(min_size=1), st.booleans())
def test_two_ranged_reads_reach_any_segment(rows: Rows, compatible: bool) -> None:
    encoded = encode(rows, compatible=compatible)
    offset, length = bucket_format.tail_range(len(encoded.body), len(encoded.segments))
    table = bucket_format.decode_tail(encoded.body[offset : offset + length], len(encoded.body))
    assert table == encoded.table
    parts = [bucket_format.decode_segment(entry(encoded, info), info) for info in table.segments]
    assert examples.tuples(Rows.concat(parts)) == examples.tuples(rows.sorted_by_due())
    for info, part in zip(table.segments, parts, strict=True):
        assert info.rows == len(part)
        assert info.min_deliver_at_ms == part.deliver_at_ms.min()
        assert info.max_deliver_at_ms == part.deliver_at_ms.max()


def test_a_reader_without_the_manifest_finds_the_table_by_the_footer() -> None:
    encoded = encode(examples.random_delays(100))
    offset, length = bucket_format.footer_range(len(encoded.body))
    place = bucket_format.decode_footer(encoded.body[offset : offset + length], len(encoded.body))
    table = bucket_format.decode_table(encoded.body[place.offset : place.offset + place.length], place)
    assert table == encoded.table
    assert bucket_format.decode_metadata(entry(encoded, table.metadata), table.metadata).rows == 100


def test_segments_are_numbered_from_one_and_follow_in_due_order() -> None:
    encoded = encode(examples.random_delays(1_000))
    assert [info.number for info in encoded.segments] == list(range(1, len(encoded.segments) + 1))
    bounds = [(info.min_deliver_at_ms, info.max_deliver_at_ms) for info in encoded.segments]
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(bounds))


def test_kept_rows_of_the_sources_come_back() -> None:
    positions = position_bitmap.position_bitmaps(np.full(3, 5, np.uint64), np.arange(3, dtype=np.uint64))
    kept = (KeptRows(source="a", positions=positions), KeptRows(source="b"))
    metadata, _ = bucket_format.decode_bucket(encode(examples.random_delays(10), kept=kept).body)
    assert metadata.kept == kept


def test_the_same_rows_give_the_same_bytes() -> None:
    rows = examples.random_delays(3_000, keyed=True)
    assert encode(rows).body == encode(rows).body


def test_entry_ids_from_2_to_the_32_make_a_bucket_columnar_though_compatible_was_asked_for() -> None:
    rows = examples.random_delays(10)
    within = Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id + np.uint64((1 << 32) - 10))
    beyond = Rows(rows.deliver_at_ms, rows.ledger_id, rows.entry_id + np.uint64((1 << 32) - 9))
    assert encode(within, compatible=True).compatible
    encoded = encode(beyond, compatible=True)
    assert not encoded.compatible
    assert examples.tuples(bucket_format.decode_bucket(encoded.body)[1]) == examples.tuples(beyond.sorted_by_due())


def test_messages_of_batches_make_a_bucket_columnar_though_compatible_was_asked_for() -> None:
    rows = examples.random_delays(10).sorted_by_due()
    parts, own = (
        bucket_format.encode_bucket(
            rows, topic="orders", subscription_id=index_id, limits=SMALL_SEGMENTS, compatible=True
        )
        for index_id in (index_ids.batch_parts_of(3), 3)
    )
    assert (parts.compatible, own.compatible) == (False, True)
    assert parts.live_bucket("b", base=1).compatible_form is False
    assert examples.tuples(bucket_format.decode_bucket(parts.body)[1]) == examples.tuples(rows)


def test_no_rows_and_unsorted_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one row"):
        encode(Rows.empty())
    with pytest.raises(ValueError, match="sorted"):
        bucket_format.encode_bucket(
            examples.random_delays(10), topic="t", subscription_id=0, limits=SMALL_SEGMENTS, compatible=False
        )


def test_a_full_read_is_checked_against_the_manifest() -> None:
    encoded = encode(examples.random_delays(10))
    named = manifest.ObjectReference(name="b", base=1, size_bytes=len(encoded.body), sha256=encoded.sha256)
    manifest.check_bytes(named, encoded.body, "bucket")
    with pytest.raises(format_errors.FormatError, match="SHA-256"):
        manifest.check_bytes(named, encoded.body[:-1] + b"x", "bucket")


def test_damage_in_a_segment_is_named_with_its_number_and_its_place_and_leaves_the_others() -> None:
    encoded = encode(examples.random_delays(30))
    second = encoded.segments[1]
    body = bytearray(encoded.body)
    body[second.offset + 20] ^= 1
    with pytest.raises(format_errors.FormatError, match="bucket segment 2 is damaged at byte") as caught:
        bucket_format.decode_segment(bytes(body[second.offset : second.offset + second.length]), second)
    assert caught.value.offset == second.offset
    third = encoded.segments[2]
    assert (
        len(bucket_format.decode_segment(bytes(body[third.offset : third.offset + third.length]), third)) == third.rows
    )


def test_a_segment_read_from_the_place_of_another_is_refused() -> None:
    encoded = encode(examples.random_delays(30))
    first, second = encoded.segments[:2]
    with pytest.raises(format_errors.FormatError, match="segment 1"):
        bucket_format.decode_segment(entry(encoded, second), dataclasses.replace(first, length=second.length))


def test_a_table_that_is_read_for_another_number_of_segments_is_refused() -> None:
    encoded = encode(examples.random_delays(30))
    size = len(encoded.body)
    for segments in (len(encoded.segments) - 1, len(encoded.segments) + 1):
        offset, length = bucket_format.tail_range(size, segments)
        with pytest.raises(format_errors.FormatError, match="offset table"):
            bucket_format.decode_tail(encoded.body[offset : offset + length], size)


def test_an_object_too_small_for_its_parts_is_refused() -> None:
    with pytest.raises(format_errors.FormatError, match="too few"):
        bucket_format.footer_range(39)
    with pytest.raises(format_errors.FormatError, match="too few"):
        bucket_format.tail_range(100, 2)
    with pytest.raises(format_errors.FormatError, match="footer"):
        bucket_format.decode_tail(b"x", 100)
