from __future__ import annotations

import struct

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import column_format, format_errors, segment
from tests.storage_backends.formats._support import examples

ascending = st.lists(examples.u64, max_size=40).map(sorted)
values = st.one_of(st.lists(examples.u64, max_size=40), st.lists(examples.times_ms, max_size=40), ascending)


def test_a_plain_column_is_width_minimum_and_little_endian_offsets() -> None:
    assert column_format.encode_u64(examples.column([1_000, 1_300, 1_001])) == (
        bytes([2]) + struct.pack("<Q", 1_000) + struct.pack("<HHH", 0, 300, 1)
    )


def test_a_constant_column_has_no_body() -> None:
    assert column_format.encode_u64(np.full(10_000, 77, np.uint64)) == bytes([0]) + struct.pack("<Q", 77)


def test_a_dense_column_that_never_falls_holds_deltas_in_byte_planes() -> None:
    encoded = column_format.encode_u64(examples.column([10, 11, 311, 311]), segment.compressor())
    assert encoded == bytes([0x32]) + struct.pack("<Q", 10) + bytes([0, 1, 44, 0]) + bytes([0, 0, 1, 0])


def test_a_dense_column_in_no_order_holds_offsets_in_byte_planes() -> None:
    encoded = column_format.encode_u64(examples.column([311, 10, 11]), segment.compressor())
    assert encoded == bytes([0x12]) + struct.pack("<Q", 10) + bytes([45, 0, 1]) + bytes([1, 0, 0])


def test_a_long_dense_column_is_one_zstd_frame() -> None:
    numbers = np.arange(5_000, dtype=np.uint64)[::-1].copy()
    encoded = column_format.encode_u64(numbers, segment.compressor())
    assert encoded[0] == 0x52
    planes = zstandard.ZstdDecompressor().decompress(encoded[9:])
    assert planes == bytes(number & 0xFF for number in numbers.tolist()) + bytes(
        number >> 8 for number in numbers.tolist()
    )
    assert (column_format.decode_u64(encoded, 5_000) == numbers).all()


@given(values, st.booleans())
def test_a_column_comes_back_as_it_was(numbers: list[int], dense: bool) -> None:
    encoded = column_format.encode_u64(examples.column(numbers), segment.compressor() if dense else None)
    decoded = column_format.decode_u64(encoded, len(numbers))
    assert decoded.dtype == np.uint64
    assert decoded.tolist() == numbers


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=40), st.booleans())
def test_a_u32_column_comes_back_as_it_was(numbers: list[int], dense: bool) -> None:
    encoded = column_format.encode_u32(np.array(numbers, np.uint32), segment.compressor() if dense else None)
    decoded = column_format.decode_u32(encoded, len(numbers))
    assert decoded.dtype == np.uint32
    assert decoded.tolist() == numbers


@pytest.mark.parametrize("width", range(9))
@pytest.mark.parametrize("dense", [False, True])
def test_every_width_comes_back_as_it_was(width: int, dense: bool) -> None:
    largest = (1 << 8 * width) - 1
    numbers = [largest, 0, largest // 2, largest, 1 if width else 0] * 20
    encoded = column_format.encode_u64(examples.column(numbers), segment.compressor() if dense else None)
    assert encoded[0] & 0x0F == width
    assert column_format.decode_u64(encoded, len(numbers)).tolist() == numbers


@given(values.filter(bool), st.booleans(), st.data())
def test_a_truncated_column_is_refused(numbers: list[int], dense: bool, data: st.DataObject) -> None:
    encoded = column_format.encode_u64(examples.column(numbers), segment.compressor() if dense else None)
    kept = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(format_errors.FormatError):
        column_format.decode_u64(encoded[:kept], len(numbers))


@given(values, st.booleans(), st.binary(min_size=1, max_size=20))
def test_a_column_with_bytes_after_it_is_refused(numbers: list[int], dense: bool, more: bytes) -> None:
    encoded = column_format.encode_u64(examples.column(numbers), segment.compressor() if dense else None)
    with pytest.raises(format_errors.FormatError):
        column_format.decode_u64(encoded + more, len(numbers))


def test_a_column_of_another_number_of_rows_is_refused() -> None:
    encoded = column_format.encode_u64(examples.column([1, 2, 3]))
    with pytest.raises(format_errors.FormatError, match="4 rows of 1 bytes take 4 bytes, the body has 3"):
        column_format.decode_u64(encoded, 4)


@pytest.mark.parametrize("form", [0x80, 0x09, 0x0F])
def test_an_unknown_form_is_refused_with_the_place_of_the_column(form: int) -> None:
    with pytest.raises(format_errors.FormatError, match="form") as caught:
        column_format.decode_u64(bytes([form]) + bytes(8), 0, what="column entry_id", offset=120)
    assert (caught.value.what, caught.value.offset) == ("column entry_id", 120)


@pytest.mark.parametrize("form", [0x01, 0x11, 0x21])
def test_a_value_past_64_bits_is_refused(form: int) -> None:
    data = bytes([form]) + struct.pack("<Q", examples.U64_MAX - 5) + bytes([0, 6])
    with pytest.raises(format_errors.FormatError, match="64 bits"):
        column_format.decode_u64(data, 2)


def test_deltas_that_wrap_around_are_refused() -> None:
    data = bytes([0x28]) + struct.pack("<Q", 0) + struct.pack("<QQ", 10, examples.U64_MAX)
    with pytest.raises(format_errors.FormatError, match="64 bits"):
        column_format.decode_u64(data, 2)


def test_a_value_past_32_bits_is_refused_in_a_u32_column() -> None:
    with pytest.raises(format_errors.FormatError, match="32 bits"):
        column_format.decode_u32(column_format.encode_u64(examples.column([1 << 32])), 1)


def test_a_frame_that_declares_another_size_is_refused_before_it_is_unpacked() -> None:
    frame = zstandard.ZstdCompressor().compress(bytes(10_000_000))
    with pytest.raises(format_errors.FormatError, match="declares 10000000 bytes, not 4"):
        column_format.decode_u64(bytes([0x51]) + bytes(8) + frame, 4)
