"""Encodes and decodes one column of integers.

A u64 or u32 column has a plain form (log slots, checkpoints) and a dense one (bucket segments). The CRC is in the frame
around the columns.

    u8 form | u64 base | body                                    little-endian

`form`, bits 0 to 3: width w, 0 to 8. Row i is stored as an offset of w bytes.
    bit 4  PLANES   the body is byte plane 0 (the lowest byte of each offset), then plane 1, ...; else row after row
    bit 5  DELTAS   value[i] = base + offset[0] + ... + offset[i]; else value[i] = base + offset[i]
    bit 6  ZSTD     the body is one zstd frame, of rows * w bytes of content
    bit 7  is 0
Width 0 has no body: every offset is 0. The number of rows is stored next to the column, not in it.

A few bytes may thus stand for any number of rows. `Columns` checks the number before memory is taken for it.

Schedule ids are a column of their lengths (0 for a row without one), and the bytes of all ids, one behind the other:

    u8 form | body      form 0: the bytes; 1: one zstd frame of them
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from storage_backends.formats import format_errors
from storage_backends.formats.row_columns import U32, U64
from storage_backends.formats.schedule_ids import PIECE_BYTES_MAX, ScheduleIds, wrong_with

_HEADER = struct.Struct("<BQ")
HEADER_BYTES = _HEADER.size
_WIDTH_MASK = 0x0F
_PLANES = 0x10
_DELTAS = 0x20
_ZSTD = 0x40
_KNOWN = _WIDTH_MASK | _PLANES | _DELTAS | _ZSTD
_U64_MAX = (1 << 64) - 1
_U32_MAX = (1 << 32) - 1
# Up to this many rows plain Python is faster than columns.
_FEW = 16
# Bytes below which a zstd frame costs more than it saves.
_ZSTD_BYTES_MIN = 32
ROWS_MAX = 1 << 24
"""The most rows that take less than a byte each in the columns that tell them apart."""
# Up to this many rows take too little memory for a proof (64 KiB a column): a segment has 5,000 of them.
_ROWS_UNPROVEN_MAX = 8_192
# Rows that prove that a set of rows is none of nonsense
_ROWS_COMPARED = 1_024
# The largest window of a frame that is read in parts: what zstd asks of every decoder (bytes)
_WINDOW_BYTES_MAX = 8 << 20
_ID_BYTES, _ID_FRAME = b"\0", b"\1"
# A frame of ids has at most so much content (bytes), or so many times its own bytes if that is more.
_ID_CONTENT_MAX = 64 << 20
_ID_CONTENT_RATIO_MAX = 256


def size_max(rows: int) -> int:
    """Return the largest size of a plain column of so many rows (bytes)."""
    return HEADER_BYTES + 8 * rows


def encode_u64(values: U64, zstd: zstandard.ZstdCompressor | None = None) -> bytes:
    """Encode the plain form, fast both ways, or, with a compressor, the dense form, the smallest."""
    if not len(values):
        return _HEADER.pack(0, 0)
    return _plain(values) if zstd is None else _dense(values, zstd)


def encode_u32(values: U32, zstd: zstandard.ZstdCompressor | None = None) -> bytes:
    return encode_u64(values.astype(np.uint64), zstd)


def encode_ids(ids: ScheduleIds, zstd: zstandard.ZstdCompressor | None = None) -> tuple[bytes, bytes]:
    """Encode schedule ids; return the column of lengths, and the bytes."""
    lengths, content = encode_u64(ids.lengths, zstd), ids.gathered()
    if zstd is not None and len(content) >= _ZSTD_BYTES_MIN:
        packed = zstd.compress(content)
        if len(packed) < len(content) <= _id_content_max(packed):
            return lengths, _ID_FRAME + packed
    return lengths, _ID_BYTES + content


def ids_size_max(ids: ScheduleIds) -> int:
    """Return the largest size of plain schedule ids (bytes)."""
    return size_max(len(ids)) + len(_ID_BYTES) + int(ids.lengths.sum())


def _id_content_max(frame: bytes) -> int:
    return min(max(_ID_CONTENT_MAX, _ID_CONTENT_RATIO_MAX * len(frame)), PIECE_BYTES_MAX)


def _plain(values: U64) -> bytes:
    if len(values) <= _FEW:
        few = values.tolist()
        least = min(few)
        width = _width(max(few) - least)
        header = _HEADER.pack(width, least)
        return header + b"".join([(value - least).to_bytes(width, "little") for value in few]) if width else header
    base = values.min()
    offsets = values - base
    width = _width(int(offsets.max()))
    return _HEADER.pack(width, int(base)) + _row_major(offsets, width)


def _dense(values: U64, zstd: zstandard.ZstdCompressor) -> bytes:
    """Encode offsets from the minimum, or from the value before if the values never fall.

    They are split into byte planes, each a zstd block of its own, so that a random plane does not spoil the statistics
    of the next one.
    """
    form = _PLANES
    if bool((values[1:] >= values[:-1]).all()):
        form |= _DELTAS
        base = values[0]
        offsets = np.empty(len(values), np.uint64)
        offsets[0] = 0
        np.subtract(values[1:], values[:-1], out=offsets[1:])
    else:
        base = values.min()
        offsets = values - base
    width = _width(int(offsets.max()))
    if width == 0:
        return _HEADER.pack(0, int(base))
    planes = offsets.astype("<u8", copy=False).view(np.uint8).reshape(len(values), 8)[:, :width].T.tobytes()
    if len(planes) >= _ZSTD_BYTES_MIN:
        packed = _compress_planes(planes, len(values), zstd)
        if len(packed) < len(planes):
            return _HEADER.pack(form | _ZSTD | width, int(base)) + packed
    return _HEADER.pack(form | width, int(base)) + planes


def decode_u64(
    data: bytes | memoryview,
    rows: int,
    *,
    what: str = "column",
    offset: int = 0,
    zstd: zstandard.ZstdDecompressor | None = None,
) -> U64:
    """Decode a column of so many rows.

    `what` and `offset` (of the column in its object) are for the error. `zstd` saves making a decompressor for each
    column; it must not be shared between threads. Raises FormatError if the bytes are not a column of exactly so many
    rows.
    """
    form, base, width = _header(data, what, offset)
    body: bytes | memoryview = memoryview(data)[HEADER_BYTES:]
    if form & _ZSTD:
        body = _decompress(body, rows * width, zstd or zstandard.ZstdDecompressor(), what, offset + HEADER_BYTES)
    if len(body) != rows * width:
        detail = f"{rows} rows of {width} bytes take {rows * width} bytes, the body has {len(body)}"
        raise format_errors.FormatError(what, offset + HEADER_BYTES, detail)
    if width == 0 or rows == 0:
        return np.full(rows, base, np.uint64)
    offsets = _from_planes(body, rows, width) if form & _PLANES else _from_row_major(body, rows, width)
    if form & _DELTAS:
        values = offsets.cumsum()
        # These rows are too few, and of too small a width, to add up to 2^64.
        can_wrap = rows.bit_length() + 8 * width > 64
        wrapped = (can_wrap and bool((values[1:] < values[:-1]).any())) or int(values[-1]) > _U64_MAX - base
    else:
        values = offsets
        wrapped = base > _U64_MAX - (1 << 8 * width) + 1 and int(values.max()) > _U64_MAX - base
    if wrapped:
        raise format_errors.FormatError(what, offset, f"a value from base {base} does not fit in 64 bits")
    values += np.uint64(base)
    return values


def decode_u32(
    data: bytes | memoryview,
    rows: int,
    *,
    what: str = "column",
    offset: int = 0,
    zstd: zstandard.ZstdDecompressor | None = None,
) -> U32:
    values = decode_u64(data, rows, what=what, offset=offset, zstd=zstd)
    if rows and int(values.max()) > _U32_MAX:
        raise format_errors.FormatError(what, offset, f"value {values.max()} does not fit in 32 bits")
    return values.astype(np.uint32)


class Columns:
    """A reader of the columns of some rows, which checks their number before it takes memory for them.

    No two rows agree in all of the `distinct` columns, so one of these has a body: without zstd, of a byte a row at
    least. With zstd a row may take less; then there are at most `rows_max`, and the first ones differ. `what` and
    `offset` (of the payload that holds the columns) are for the error, `zstd` is that of `decode_u64`. Raises
    FormatError.
    """

    __slots__ = ("_offset", "_rows", "_what", "_zstd")

    def __init__(
        self,
        rows: int,
        distinct: Sequence[bytes],
        *,
        what: str,
        offset: int,
        rows_max: int = ROWS_MAX,
        zstd: zstandard.ZstdDecompressor | None = None,
    ) -> None:
        self._rows, self._what, self._offset, self._zstd = rows, what, offset, zstd
        if rows > 1 and rows > (size_bytes := sum(map(len, distinct))):
            self._check_rows(distinct, size_bytes, rows_max)

    def u64(self, name: str, data: bytes) -> U64:
        return decode_u64(data, self._rows, what=f"{self._what} {name}", offset=self._offset, zstd=self._zstd)

    def u32(self, name: str, data: bytes) -> U32:
        return decode_u32(data, self._rows, what=f"{self._what} {name}", offset=self._offset, zstd=self._zstd)

    def schedule_ids(self, lengths: bytes, ids: bytes) -> ScheduleIds:
        """Decode schedule ids, whose bytes are no more than the input or what its frame may have."""
        found = self.u32("schedule_ids lengths", lengths).astype(np.uint64)
        what, content = f"{self._what} schedule_ids", ids[len(_ID_BYTES) :]
        match ids[: len(_ID_BYTES)]:
            case b"\0":
                pass
            case b"\1":
                size_bytes = int(found.sum())
                if size_bytes > _id_content_max(content):
                    detail = f"a frame of {len(content)} bytes cannot have {size_bytes} bytes of ids"
                    raise format_errors.FormatError(what, self._offset, detail)
                zstd = self._zstd or zstandard.ZstdDecompressor()
                content = _decompress(content, size_bytes, zstd, what, self._offset)
            case form:
                raise format_errors.FormatError(what, self._offset, f"form {form.hex()!r} of ids is not known")
        if wrong := wrong_with(found, content):
            raise format_errors.FormatError(what, self._offset, wrong)
        return ScheduleIds.of_piece(found, content)

    def _check_rows(self, distinct: Sequence[bytes], size_bytes: int, rows_max: int) -> None:
        rows = self._rows
        said = f"it says {rows} rows, and the columns that tell them apart have {size_bytes} bytes"
        if not any(data and data[0] & _ZSTD for data in distinct):
            raise format_errors.FormatError(self._what, self._offset, f"{said}, none compressed")
        if rows > rows_max:
            raise format_errors.FormatError(self._what, self._offset, f"{said}; the limit is {rows_max} rows")
        if rows > _ROWS_UNPROVEN_MAX and _any_twice([self._first_rows(data) for data in distinct]):
            raise format_errors.FormatError(self._what, self._offset, f"{said}; two of its first rows are the same")

    def _first_rows(self, data: bytes) -> U64:
        first = _cut(data, self._rows, _ROWS_COMPARED, self._what, self._offset)
        return decode_u64(first, _ROWS_COMPARED, what=self._what, offset=self._offset)


def _any_twice(columns: Sequence[U64]) -> bool:
    """Return whether two rows agree in all of the columns."""
    order = np.lexsort(columns)
    return bool(np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns]).any())


def _cut(data: bytes, rows: int, first: int, what: str, offset: int) -> bytes:
    """Return the column of the first of its rows, uncompressed, in memory for these alone. Raises FormatError."""
    form, base, width = _header(data, what, offset)
    body = memoryview(data)[HEADER_BYTES:]
    content: zstandard.ZstdDecompressionReader | io.BytesIO = io.BytesIO(body)
    parts = [_HEADER.pack(form & ~_ZSTD, base)]
    try:
        if form & _ZSTD:
            _check_frame(body, rows * width, what, offset + HEADER_BYTES)
            content = zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES_MAX).stream_reader(body)
        if form & _PLANES:
            for number in range(width):
                content.seek(number * rows)
                parts.append(content.read(first))
        else:
            parts.append(content.read(first * width))
    except zstandard.ZstdError as error:
        raise format_errors.FormatError(what, offset + HEADER_BYTES, f"zstd: {error}") from error
    return b"".join(parts)


def _header(data: bytes | memoryview, what: str, offset: int) -> tuple[int, int, int]:
    """Return form, base and width. Raises FormatError."""
    if len(data) < HEADER_BYTES:
        raise format_errors.FormatError(
            what, offset, f"a column has at least {HEADER_BYTES} bytes, this one has {len(data)}"
        )
    form, base = _HEADER.unpack_from(data)
    width = form & _WIDTH_MASK
    if form & ~_KNOWN or width > 8:
        raise format_errors.FormatError(what, offset, f"column form {form:#04x} is not known")
    return form, base, width


def _width(largest: int) -> int:
    return (largest.bit_length() + 7) // 8


def _row_major(offsets: U64, width: int) -> bytes:
    if width == 0:
        return b""
    if width in (1, 2, 4):
        return offsets.astype(f"<u{width}").tobytes()
    return offsets.astype("<u8", copy=False).view(np.uint8).reshape(len(offsets), 8)[:, :width].tobytes()


def _from_row_major(body: bytes | memoryview, rows: int, width: int) -> U64:
    if width in (1, 2, 4, 8):
        return np.frombuffer(body, f"<u{width}").astype(np.uint64)
    wide = np.zeros((rows, 8), np.uint8)
    wide[:, :width] = np.frombuffer(body, np.uint8).reshape(rows, width)
    values: U64 = wide.view("<u8").reshape(rows).astype(np.uint64, copy=False)
    return values


def _from_planes(body: bytes | memoryview, rows: int, width: int) -> U64:
    planes: npt.NDArray[np.uint8] = np.frombuffer(body, np.uint8).reshape(width, rows)
    values: U64 = planes[0].astype(np.uint64)
    for number in range(1, width):
        values |= planes[number].astype(np.uint64) << np.uint64(8 * number)
    return values


def _compress_planes(planes: bytes, rows: int, zstd: zstandard.ZstdCompressor) -> bytes:
    frame = zstd.compressobj(size=len(planes))
    last = len(planes) - rows
    parts = []
    for start in range(0, last, rows):
        parts.append(frame.compress(planes[start : start + rows]))
        parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
    parts.append(frame.compress(planes[last:]))
    parts.append(frame.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
    return b"".join(parts)


def _decompress(
    body: bytes | memoryview, size_bytes: int, zstd: zstandard.ZstdDecompressor, what: str, offset: int
) -> bytes:
    try:
        _check_frame(body, size_bytes, what, offset)
        return zstd.decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise format_errors.FormatError(what, offset, f"zstd: {error}") from error


def _check_frame(body: bytes | memoryview, size_bytes: int, what: str, offset: int) -> None:
    """Check that the frame declares so many bytes of content, which is all that it is then read into.

    Raises FormatError if not, and ZstdError if it is no frame.
    """
    declared = zstandard.get_frame_parameters(body).content_size
    if declared != size_bytes:
        raise format_errors.FormatError(what, offset, f"the zstd frame declares {declared} bytes, not {size_bytes}")
