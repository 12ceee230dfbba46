"""Encodes and decodes a log slot: one group commit of a daemon, with at most one section for each shard.

`slot_format` defines the bytes of a section, `slot_log` is the port to the log.

    magic "TyLS" | u16 version | u8 kind | u8 0 | log id, 26 ASCII | u64 number | u32 entries | u16 bytes of the writer
    | u32 CRC32C of all before it, of the writer and of the entries
    | writer: three texts, u16 length and UTF-8 each; nothing in DATA and CLOSE
    | an entry for each shard of the heads, by shard: u32 shard | u64 epoch | u64 last section number
      | u32 offset, 0 without a section | u32 length | u32 CRC32C of the section
    | the sections, one behind the other                                                         little-endian

A wrong bit in a section damages that section alone; one before the sections damages the whole slot. A slot that ends
too early has lost the sections that lie behind its end.

`ShardSlot` is the section number of a shard: the clock of everything that the shard stores, dense over all its epochs.
Arithmetic on one gives a plain int, which type checks refuse as a section number.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import struct
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, NewType, TypeAlias

from storage_backends.formats import format_errors, framing, names

FORMAT_VERSION: Final = 1
MAGIC: Final = b"TyLS"
SLOT_BYTES_MAX: Final = 256 * 1024 * 1024
"""The longest slot (bytes). A daemon ends a slot long before; one decision may exceed the size that it aims at."""

_FIXED: Final = struct.Struct("<4sHBB26sQIH")
_CRC: Final = struct.Struct("<I")
_TEXT: Final = struct.Struct("<H")
_ENTRY: Final = struct.Struct("<IQQIII")
HEADER_BYTES: Final = _FIXED.size + _CRC.size
ENTRY_BYTES: Final = _ENTRY.size
_KIND_AT: Final = 6
TEXT_BYTES_MAX: Final = 1_000
"""The longest text that says who wrote a slot (bytes)"""

_WHAT: Final = "log slot"
# A ULID: 26 digits of Crockford's base 32, which has no I, L, O and U.
_LOG_ID: Final = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")


class LogSlotKind(enum.IntEnum):
    """The kind of a log slot.

    OPEN is the first slot of a log, and its owner writes DATA. Any process may write FENCE; the owner writes CLOSE at
    the end. The owner writes nothing behind either.
    """

    OPEN = 1
    DATA = 2
    FENCE = 3
    CLOSE = 4

    @property
    def ends(self) -> bool:
        """True if a slot of this kind, as the highest of its log, is the log's end."""
        return self in (LogSlotKind.FENCE, LogSlotKind.CLOSE)


class Head(NamedTuple):
    """The end of a log for one shard: the newest epoch, and its last section number."""

    epoch: int
    last_slot: int


Heads: TypeAlias = Mapping[int, Head]
"""Heads by shard, one for each shard that ever had a section in the log"""

NO_HEADS: Final[Heads] = MappingProxyType({})


@dataclasses.dataclass(frozen=True, slots=True)
class Writer:
    """The writer of an OPEN or a FENCE, for people who read a log. `address` is host:port."""

    daemon_id: str
    address: str
    version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogSlotHeader:
    """The part of a log slot before its sections.

    `number` is that of the slot in its log, from 1 on. `heads` are those after this slot. Only OPEN and FENCE have a
    `writer`. Raises ValueError for values that no slot can have.
    """

    log_id: str
    number: int
    kind: LogSlotKind
    heads: Heads = dataclasses.field(default_factory=lambda: NO_HEADS)
    writer: Writer | None = None

    def __post_init__(self) -> None:
        if not is_log_id(self.log_id):
            raise ValueError(f"log id is {self.log_id!r}; it must be a ULID")
        if self.number < 1 or (self.number == 1) != (self.kind is LogSlotKind.OPEN):
            raise ValueError(f"number {self.number} of {self.kind.name}: OPEN is number 1, and no other kind is")
        if self.kind is LogSlotKind.OPEN and self.heads:
            raise ValueError(f"OPEN has the heads of {len(self.heads)} shards: no shard has sections before it")
        if (self.writer is None) == (self.kind in (LogSlotKind.OPEN, LogSlotKind.FENCE)):
            raise ValueError(f"{self.kind.name} and writer {self.writer}: OPEN and FENCE have one, no other kind does")


class _Place(NamedTuple):
    """The range of a section in the bytes of its slot."""

    offset: int
    length: int
    crc32c: int


_UNKNOWN: Final = _Place(0, 0, 0)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LogSlot:
    """A log slot that was read: header and table are whole or restored, its sections may be damaged."""

    header: LogSlotHeader
    _places: Mapping[int, _Place]
    _data: bytes

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards with a section here, ascending.

        A section has the epoch and section number of `header.heads[shard]`.
        """
        return tuple(self._places)

    @property
    def lost(self) -> tuple[int, ...]:
        """The shards whose sections are damaged with the table, which would show where they lie."""
        return tuple(shard for shard, place in self._places.items() if place == _UNKNOWN)

    def section(self, shard: int) -> bytes:
        """Return the bytes of a section.

        Raises FormatError if they are damaged, KeyError if the shard has none here.
        """
        place = self._places[shard]
        body = self._data[place.offset : place.offset + place.length]
        what = f"section of shard {shard} in slot {self.header.number} of log {self.header.log_id}"
        if place == _UNKNOWN:
            detail = f"the {len(self._data)} bytes of the slot do not show where it lies"
            raise format_errors.FormatError(what, 0, detail)
        if len(body) != place.length:
            detail = f"it ends after {len(body)} of {place.length} bytes"
            raise format_errors.FormatError(what, len(self._data), detail)
        framing.check_crc32c(body, place.crc32c, what, place.offset)
        return body


def without_sections(header: LogSlotHeader, shards: Iterable[int], data: bytes) -> LogSlot:
    """Return a slot whose header is known although its bytes do not show it; the sections of `shards` are damaged."""
    return LogSlot(header, MappingProxyType(dict.fromkeys(shards, _UNKNOWN)), data)


def is_log_id(log_id: str) -> bool:
    """Return whether it is a ULID in its written form of 26 characters."""
    return _LOG_ID.fullmatch(log_id) is not None


def encode_log_slot(header: LogSlotHeader, sections: Mapping[int, bytes] = MappingProxyType({})) -> bytes:
    """Encode a log slot.

    `sections` are by shard, each of the epoch and section number in the heads. Raises ValueError if the slot is too
    long, or cannot have these sections.
    """
    if bool(sections) != (header.kind is LogSlotKind.DATA):
        raise ValueError(f"{header.kind.name} with {len(sections)} sections: DATA has some, no other kind has any")
    unknown = sorted(sections.keys() - header.heads.keys())
    if unknown:
        raise ValueError(f"sections of shards {unknown} are not in the heads")
    writer = _encode_writer(header.writer)
    offset = HEADER_BYTES + len(writer) + _ENTRY.size * len(header.heads)
    entries, bodies = [], []
    for shard, head in sorted(header.heads.items()):
        body = sections.get(shard)
        if body is None:
            entries.append(_ENTRY.pack(shard, head.epoch, head.last_slot, 0, 0, 0))
            continue
        if not body:
            raise ValueError(f"the section of shard {shard} is empty")
        entries.append(_ENTRY.pack(shard, head.epoch, head.last_slot, offset, len(body), framing.crc32c(body)))
        bodies.append(body)
        offset += len(body)
        if offset > SLOT_BYTES_MAX:
            raise ValueError(
                f"the section of shard {shard}, {len(body)} bytes, makes a log slot of {offset} bytes: the limit is "
                f"{SLOT_BYTES_MAX}, write it with the next one"
            )
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        header.kind,
        0,
        header.log_id.encode("ascii"),
        header.number,
        len(header.heads),
        len(writer),
    )
    checksum = _CRC.pack(framing.crc32c(fixed, writer, *entries))
    return b"".join((fixed, checksum, writer, *entries, *bodies))


class SlotIdentity(NamedTuple):
    """The distinction of a slot from others of its number.

    `fingerprint` is the CRC32C in its header, which covers the CRC32C of each section.
    """

    kind: LogSlotKind
    fingerprint: int


def identity_of(data: bytes) -> SlotIdentity:
    """Return the identity of a slot by its first bytes, unchecked. Raises ValueError if they are no header."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise ValueError(f"it begins with {data[:4]!r} and has {len(data)} bytes; it is not a log slot")
    return SlotIdentity(LogSlotKind(data[_KIND_AT]), _fingerprint(data))


class SlotNote(NamedTuple):
    """The note that a store keeps of a slot beside its bytes.

    `sections` are the heads of the shards that have a section in it, or None if they are not noted.
    """

    identity: SlotIdentity
    sections: Heads | None


def _fingerprint(data: bytes) -> int:
    (fingerprint,) = _CRC.unpack_from(data, _FIXED.size)
    return int(fingerprint)


def sections_begin(shards: int) -> int:
    """Return where the sections of a DATA slot begin whose heads are those of so many shards (bytes)."""
    return HEADER_BYTES + ENTRY_BYTES * shards


def differs_in_part(made: bytes, stored: bytes) -> bool:
    """Return whether `made`, a whole slot, is what the damaged bytes were: by their checksum, or by all but that."""
    if len(made) != len(stored):
        return False
    at = slice(_FIXED.size, HEADER_BYTES)
    return made[at] == stored[at] or (made[: at.start], made[at.stop :]) == (stored[: at.start], stored[at.stop :])


def decode_log_slot(data: bytes) -> LogSlot:
    """Decode a slot whose header and table are whole, without checking its sections.

    Raises FormatError, or UnsupportedVersion if only another release can read it.
    """
    if len(data) < HEADER_BYTES:
        raise format_errors.FormatError(_WHAT, len(data), f"it ends after {len(data)} bytes, inside its header")
    magic, version, kind, nothing, log_id, number, entries, writer_bytes = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise format_errors.FormatError(_WHAT, 0, f"magic is {magic!r}, not {MAGIC!r}")
    entries_at = HEADER_BYTES + writer_bytes
    end = entries_at + _ENTRY.size * entries
    if end > len(data):
        detail = f"it ends after {len(data)} bytes, its table of {entries} entries at {end}"
        raise format_errors.FormatError(_WHAT, len(data), detail)
    framing.check_crc32c(data[: _FIXED.size] + data[HEADER_BYTES:end], _fingerprint(data), _WHAT, 0)
    if version != FORMAT_VERSION:
        raise format_errors.UnsupportedVersion(_WHAT, 4, found=version, supported=(FORMAT_VERSION,))
    with format_errors.reading(_WHAT, 0):
        if nothing:
            raise ValueError(f"byte 7 is {nothing}, not 0")
        heads, places, sections_end = _decode_entries(data, entries_at, end)
        header = LogSlotHeader(
            log_id=log_id.decode("ascii"),
            number=number,
            kind=LogSlotKind(kind),
            heads=MappingProxyType(heads),
            writer=_decode_writer(data[HEADER_BYTES:entries_at]),
        )
        if bool(places) != (header.kind is LogSlotKind.DATA):
            raise ValueError(f"{header.kind.name} with {len(places)} sections")
    if sections_end < len(data):
        detail = f"{len(data) - sections_end} bytes follow the last section"
        raise format_errors.FormatError(_WHAT, sections_end, detail)
    return LogSlot(header, MappingProxyType(places), data)


def _decode_entries(data: bytes, begin: int, end: int) -> tuple[dict[int, Head], dict[int, _Place], int]:
    """Return the heads, the places of the sections, and the end of the last section. Raises ValueError."""
    heads: dict[int, Head] = {}
    places: dict[int, _Place] = {}
    expected, before = end, -1
    for shard, epoch, last_slot, offset, length, crc32c in _ENTRY.iter_unpack(data[begin:end]):
        if shard <= before:
            raise ValueError(f"shard {shard} follows shard {before} in the table")
        if max(epoch, last_slot) > names.NUMBER_MAX:
            raise ValueError(f"shard {shard} has epoch {epoch} and section {last_slot}; {names.NUMBER_MAX} is the last")
        before = shard
        heads[shard] = Head(epoch, last_slot)
        if offset or length:
            if offset != expected or not length:
                raise ValueError(f"section of shard {shard}: {length} bytes from {offset}, not from {expected}")
            places[shard] = _Place(offset, length, crc32c)
            expected += length
    return heads, places, expected


def _encode_writer(writer: Writer | None) -> bytes:
    if writer is None:
        return b""
    parts = []
    for text in (writer.daemon_id, writer.address, writer.version):
        encoded = text.encode()
        if len(encoded) > TEXT_BYTES_MAX:
            raise ValueError(f"{text[:40]!r}...: {len(encoded)} bytes, the limit is {TEXT_BYTES_MAX}")
        parts += [_TEXT.pack(len(encoded)), encoded]
    return b"".join(parts)


def _decode_writer(data: bytes) -> Writer | None:
    """Decode the writer. Raises ValueError, struct.error."""
    if not data:
        return None
    texts, place = [], 0
    while place < len(data):
        (length,) = _TEXT.unpack_from(data, place)
        place += _TEXT.size + length
        texts.append(data[place - length : place].decode())
    if place != len(data) or len(texts) != 3:
        raise ValueError(f"the writer has {len(texts)} texts, which end at {place} of {len(data)} bytes")
    return Writer(*texts)


ShardSlot = NewType("ShardSlot", int)

BEFORE_THE_FIRST: Final = ShardSlot(0)


def next_after(slot: ShardSlot) -> ShardSlot:
    """Return the section number after this one."""
    return ShardSlot(slot + 1)
