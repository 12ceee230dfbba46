"""Holds the schedule ids of rows as a column of references to pieces of bytes.

A piece is the ids of one add or segment, one behind the other. Rows are taken and joined by their references; the bytes
stay where they are until they are stored or sent, or until few rows of a piece are left. `IdPieces` collects the pieces
of a column that grows. `column_format` encodes the column.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Index = npt.NDArray[np.integer[Any]] | npt.NDArray[np.bool_] | slice

Piece: TypeAlias = bytes | bytearray
"""The bytes of ids. A `bytearray` grows by ids that no column has yet; the others stay as they are."""

BYTES_MAX: Final = 256
"""The most bytes of an id."""

# A reference, from its lowest bit: length, start in the piece, number of the piece
_LENGTH_BITS, _START_BITS = 9, 32
_LENGTH_MASK = np.uint64((1 << _LENGTH_BITS) - 1)
_START_MASK = np.uint64((1 << _START_BITS) - 1)
_START_SHIFT = np.uint64(_LENGTH_BITS)
_PIECE_SHIFT = np.uint64(_LENGTH_BITS + _START_BITS)
_PIECES_MAX = 1 << (64 - _LENGTH_BITS - _START_BITS)
PIECE_BYTES_MAX: Final = (1 << _START_BITS) - 1
"""The most bytes of a piece."""

# Up to this many ids plain Python joins faster than numpy.
_FEW = 16
# Ids copied at a time: an index of 8 bytes stands for each of their bytes meanwhile.
_COPIED = 8192
# Ids of which a piece has fewer, on average, are copied to one piece when they are joined.
_IDS_A_PIECE = 16
# Pieces of more than this many times the bytes that are needed are copied, or are read id by id.
_WASTE = 4
# Ids of at most so many bytes are copied to a block; a block has at most so many bytes.
_COPIED_BYTES_MAX = 1 << 12
_BLOCK_BYTES, _BLOCK_BYTES_MAX = 1 << 10, 1 << 16


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ScheduleIds:
    """The schedule ids of n rows: `references` u64[n] into `pieces`. A row without an id has a length of 0.

    Neither the pieces nor the references are copied, and they must not be changed afterwards.
    """

    pieces: tuple[Piece, ...]
    references: U64

    @staticmethod
    def of_piece(lengths: U64, piece: bytes) -> ScheduleIds:
        """Make the column of ids that lie one behind the other in one piece.

        `lengths` u64[n] are their bytes. Raises ValueError if they are none of a column (`wrong_with`).
        """
        if wrong := wrong_with(lengths, piece):
            raise ValueError(wrong)
        return ScheduleIds((piece,), _references(lengths))

    @staticmethod
    def none(rows: int) -> ScheduleIds:
        """Make the column of rows without ids."""
        return ScheduleIds((), np.zeros(rows, np.uint64))

    @staticmethod
    def concat(columns: Sequence[ScheduleIds | None], rows: Sequence[int]) -> ScheduleIds | None:
        """Concatenate the columns of so many rows each; None stands for a column without ids.

        Parts of one column share its pieces. Short pieces are joined to one.
        """
        if all(column is None for column in columns):
            return None
        parts = [ScheduleIds.none(count) if each is None else each for each, count in zip(columns, rows, strict=True)]
        pieces: list[Piece] = []
        first: dict[int, int] = {}
        references = []
        for part in parts:
            number = first.get(id(part.pieces))
            if number is None:
                number = first[id(part.pieces)] = len(pieces)
                pieces += part.pieces
            references.append(part.references + (np.uint64(number) << _PIECE_SHIFT) if number else part.references)
        if len(pieces) > _PIECES_MAX:
            raise ValueError(f"{len(pieces)} pieces of schedule ids; there may be {_PIECES_MAX}")
        joined = ScheduleIds(tuple(pieces), np.concatenate(references))
        return joined.copied() if joined._has_short_pieces else joined

    def __len__(self) -> int:
        return len(self.references)

    def __bool__(self) -> bool:
        """Return whether a row has an id."""
        return bool((self.references & _LENGTH_MASK).any())

    @property
    def lengths(self) -> U64:
        """The bytes of each id, 0 for a row without one."""
        return self.references & _LENGTH_MASK

    def take(self, index: Index) -> ScheduleIds:
        """Return the ids of the rows that an index array, a mask of n or a slice selects."""
        return ScheduleIds(self.pieces, self.references[index])

    def tolist(self) -> list[bytes]:
        """Return the id of each row; empty bytes stand for none."""
        lengths = self.lengths.tolist()
        starts = (self.references >> _START_SHIFT & _START_MASK).tolist()
        numbers = (self.references >> _PIECE_SHIFT).tolist()
        return [
            bytes(self.pieces[number][start : start + length]) if length else b""
            for number, start, length in zip(numbers, starts, lengths, strict=True)
        ]

    def gathered(self) -> bytes:
        """Return the bytes of all ids, one behind the other."""
        if len(self) <= _FEW:
            return b"".join(self.tolist())
        held = self.references[self.lengths != 0]
        if not len(held):
            return b""
        lengths, numbers = held & _LENGTH_MASK, held >> _PIECE_SHIFT
        starts = held >> _START_SHIFT & _START_MASK
        used, place = np.unique(numbers, return_inverse=True)
        pieces = [self.pieces[number] for number in used.tolist()]
        if sum(map(len, pieces)) > _WASTE * int(lengths.sum()):
            return b"".join(self.tolist())
        if len(pieces) > 1:
            begins = np.cumsum([0, *map(len, pieces[:-1])], dtype=np.uint64)
            starts = starts + begins[place]
        joined = b"".join(pieces)
        if bool((starts[1:] == starts[:-1] + lengths[:-1]).all()):
            return joined[int(starts[0]) : int(starts[-1] + lengths[-1])]
        content = np.frombuffer(joined, np.uint8)
        return b"".join(
            content[_places(starts[begin : begin + _COPIED], lengths[begin : begin + _COPIED])].tobytes()
            for begin in range(0, len(held), _COPIED)
        )

    def copied(self) -> ScheduleIds:
        """Return the same ids in a piece of their own, so that others can be freed."""
        return ScheduleIds((self.gathered(),), _references(self.lengths))

    def compact(self) -> ScheduleIds:
        """Return the same ids, to keep: in a piece of their own unless they need a good part of their pieces."""
        if self._has_short_pieces or sum(map(len, self.pieces)) > _WASTE * self.size_bytes:
            return self.copied()
        return self

    @property
    def size_bytes(self) -> int:
        """The size of the ids (bytes), without their references."""
        return int(self.lengths.sum())

    @property
    def _has_short_pieces(self) -> bool:
        return len(self.pieces) > max(_FEW, len(self) // _IDS_A_PIECE)

    def words(self) -> U64:
        """Return the ids as u64[n, w], little-endian, with zeros behind each."""
        lengths = self.lengths
        width = -(-int(lengths.max(initial=np.uint64(0))) // 8)
        padded = np.zeros((len(self), 8 * width), np.uint8)
        padded[np.arange(8 * width, dtype=np.uint64) < lengths[:, None]] = np.frombuffer(self.gathered(), np.uint8)
        return padded.view("<u8").astype(np.uint64, copy=False)


_NO_BLOCK: Final = bytearray()


class IdPieces:
    """Pieces of the schedule ids of a column that grows.

    Pieces never move, and what is in one never changes, so a column that was made of them stays right. Long pieces are
    taken as they are; ids of few bytes are copied to blocks, so that a row that comes alone costs no object.
    """

    __slots__ = ("_block", "_block_number", "_block_used", "_pieces", "_shown")

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._shown: tuple[Piece, ...] = ()
        # The last piece of copies, its number, and how much of it is used (bytes)
        self._block = _NO_BLOCK
        self._block_number = 0
        self._block_used = 0

    def take_in(self, ids: ScheduleIds) -> U64:
        """Return the references of ids, u64[n], for `column`."""
        if ids.pieces is self._shown or self._begins_with(ids.pieces):
            return ids.references
        lengths = ids.lengths
        size_bytes = int(lengths.sum())
        if size_bytes <= _COPIED_BYTES_MAX:
            start = self._copied(ids.gathered(), size_bytes)
            return _references(lengths) + np.uint64(self._block_number << int(_PIECE_SHIFT) | start << _LENGTH_BITS)
        ids, number = ids.compact(), len(self._pieces)
        self._pieces += ids.pieces
        return ids.references + np.uint64(number << int(_PIECE_SHIFT))

    def _begins_with(self, pieces: tuple[Piece, ...]) -> bool:
        """Return whether a column that was made earlier has these pieces.

        Equal bytes are not enough: those behind what is used of a block may change.
        """
        return len(pieces) <= len(self._pieces) and all(map(operator.is_, pieces, self._pieces))

    def _copied(self, content: bytes, size_bytes: int) -> int:
        """Copy ids to the block, or to a new one; return where they start in it."""
        start = self._block_used
        if start + size_bytes > len(self._block):
            grown = min(_BLOCK_BYTES_MAX, max(_BLOCK_BYTES, 2 * len(self._block)))
            self._block, self._block_number, start = bytearray(max(grown, size_bytes)), len(self._pieces), 0
            self._pieces.append(self._block)
        self._block_used = start + size_bytes
        self._block[start : start + size_bytes] = content
        return start

    def column(self, references: U64) -> ScheduleIds:
        """Return the ids of references that `take_in` returned; 0 refers to no id."""
        if len(self._shown) != len(self._pieces):
            self._shown = tuple(self._pieces)
        return ScheduleIds(self._shown, references)


def _references(lengths: U64) -> U64:
    """Return references to ids that lie one behind the other in the first piece."""
    references = np.cumsum(lengths, dtype=np.uint64)
    references -= lengths
    references <<= _START_SHIFT
    references |= lengths
    return references


def _places(starts: U64, lengths: U64) -> U64:
    """Return the place of every byte of ranges, one range behind the other."""
    ends = np.cumsum(lengths, dtype=np.uint64)
    return np.repeat(starts - (ends - lengths), lengths.astype(np.int64)) + np.arange(ends[-1], dtype=np.uint64)


def wrong_with(lengths: U64, piece: bytes) -> str:
    """Return why these are no ids of these lengths, one behind the other, or an empty text.

    Each is UTF-8 and has at most `BYTES_MAX` bytes. Nothing is allocated in proportion to the lengths.
    """
    longest = int(lengths.max(initial=np.uint64(0)))
    if longest > BYTES_MAX:
        return f"a schedule id has {longest} bytes; the limit is {BYTES_MAX}"
    size_bytes = int(lengths.sum(dtype=np.uint64))
    if size_bytes != len(piece):
        return f"the schedule ids have {size_bytes} bytes by their lengths, and {len(piece)} are there"
    if size_bytes > PIECE_BYTES_MAX:
        return f"the schedule ids have {size_bytes} bytes; the limit is {PIECE_BYTES_MAX}"
    return "" if piece.isascii() else _not_utf_8(lengths, piece)


def _not_utf_8(lengths: U64, piece: bytes) -> str:
    """Return why the ids are not UTF-8: together they are, and none begins within a character, if each of them is."""
    try:
        piece.decode()
    except UnicodeDecodeError as error:
        return f"the schedule ids are not UTF-8 at byte {error.start}"
    starts = np.cumsum(lengths, dtype=np.uint64) - lengths
    first = np.frombuffer(piece, np.uint8)[starts[lengths != 0]]
    return "a schedule id begins within a character of UTF-8" if bool(((first & 0xC0) == 0x80).any()) else ""
