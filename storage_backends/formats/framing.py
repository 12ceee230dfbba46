"""Frames every object that is one protobuf message, and computes CRC32C.

Such objects are FORMAT, manifests, progress, properties, checkpoints and dead objects. Sections and buckets have frames
of their own, which carry more (`slot_format`, `bucket_format`).

    magic 4 | u32 version | u64 payload length | payload | u32 CRC32C of all before it          little-endian
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import google_crc32c
from google.protobuf import message as protobuf
from google.protobuf import message_factory

from storage_backends.formats import format_errors

M = TypeVar("M", bound=protobuf.Message)

_HEADER = struct.Struct("<4sIQ")
HEADER_BYTES = _HEADER.size
_TRAILER = struct.Struct("<I")


def crc32c(*parts: bytes | memoryview) -> int:
    """Compute the CRC32C (Castagnoli) of the concatenated parts."""
    value = 0
    for part in parts:
        value = google_crc32c.extend(value, part if isinstance(part, bytes) else bytes(part))
    return int(value)


def check_crc32c(data: bytes, stored: int, what: str, offset: int) -> None:
    """Raise FormatError, naming `what` and `offset`, if `stored` is not the CRC32C of `data`."""
    computed = crc32c(data)
    if computed != stored:
        raise format_errors.FormatError(what, offset, f"CRC32C is {computed:#010x}, stored is {stored:#010x}")


def frame(magic: bytes, version: int, payload: bytes) -> bytes:
    header = _HEADER.pack(magic, version, len(payload))
    return b"".join((header, payload, _TRAILER.pack(crc32c(header, payload))))


def unframe(data: bytes, magic: bytes, versions: Sequence[int], what: str) -> bytes:
    """Return the payload of an object of one of these versions.

    Raises FormatError, or UnsupportedVersion if only another release can read it.
    """
    if len(data) < _HEADER.size + _TRAILER.size:
        raise format_errors.FormatError(what, len(data), f"it ends after {len(data)} bytes, inside header or trailer")
    found_magic, found_version, payload_bytes = _HEADER.unpack_from(data)
    if found_magic != magic:
        raise format_errors.FormatError(what, 0, f"magic is {found_magic!r}, not {magic!r}")
    end = _HEADER.size + payload_bytes
    if end + _TRAILER.size != len(data):
        detail = f"the payload length {payload_bytes} makes {end + _TRAILER.size} bytes, there are {len(data)}"
        raise format_errors.FormatError(what, 8, detail)
    (stored,) = _TRAILER.unpack_from(data, end)
    check_crc32c(data[:end], stored, what, end)
    if found_version not in versions:
        raise format_errors.UnsupportedVersion(what, 4, found=found_version, supported=versions)
    return data[_HEADER.size : end]


def parse(message_class: type[M], payload: bytes, what: str, offset: int) -> M:
    """Parse a message; all required fields must be present and all text UTF-8. Raises FormatError."""
    message = message_class()
    try:
        message.ParseFromString(payload)
    except protobuf.DecodeError as error:
        detail = f"not a {message_class.DESCRIPTOR.name}: {_first_wrong(message_class.DESCRIPTOR, payload)}"
        raise format_errors.FormatError(what, offset, f"{detail}; it begins with {payload[:8]!r}") from error
    if not message.IsInitialized():
        untyped: Any = message  # its stubs lack the method
        lacking = ", ".join(untyped.FindInitializationErrors()[:3])
        raise format_errors.FormatError(
            what, offset, f"{message_class.DESCRIPTOR.name} lacks a required field: {lacking}"
        )
    check = _text_check(message_class.DESCRIPTOR)
    if check is not None and (field := check(message)):
        raise format_errors.FormatError(what, offset, f"{message_class.DESCRIPTOR.name}: {field} is not UTF-8")
    return message


# Wire type -> size of its values (bytes), for types of a fixed size
_FIXED_BYTES = {1: 8, 5: 4}
_VARINT, _LENGTH = 0, 2
_VARINT_BYTES_MAX = 10
_FIELD_NUMBER_MAX = 2**29 - 1


def _first_wrong(of: Any, payload: bytes) -> str:
    """Describe the field of a message, and its byte in the payload, at which a parser stops."""
    place = 0
    while place < len(payload):
        begin = place
        tag, place = _varint(payload, place)
        number, wire_type = tag >> 3, tag & 7
        known = of.fields_by_number.get(number)
        name = f"byte {begin}, field {number if known is None else known.name}"
        if not 0 < number <= _FIELD_NUMBER_MAX or wire_type not in (_VARINT, _LENGTH, *_FIXED_BYTES):
            return f"{name} has wire type {wire_type}, which no field of a message has"
        length = _FIXED_BYTES.get(wire_type, 0)
        if wire_type in (_VARINT, _LENGTH):
            value, place = _varint(payload, place)
            length = value if wire_type == _LENGTH else 0
        if place > len(payload) or length > len(payload) - place:
            return f"{name} goes past the end, at {len(payload)}"
        if wire_type == _LENGTH and known is not None and known.message_type is not None:
            part = payload[place : place + length]
            if not _parses(known.message_type, part):
                return f"{name}: {_first_wrong(known.message_type, part)}"
        place += length
    return "it ends in a field"


def _varint(payload: bytes, place: int) -> tuple[int, int]:
    """Return the value and the place behind it, which is beyond the payload if it is cut off or too long."""
    value = 0
    for shift, byte in enumerate(payload[place : place + _VARINT_BYTES_MAX]):
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return value, place + shift + 1
    return value, len(payload) + 1


def _parses(of: Any, payload: bytes) -> bool:
    try:
        message_factory.GetMessageClass(of).FromString(payload)
    except protobuf.DecodeError:
        return False
    return True


_TextCheck = Callable[[Any], str]
"""A check that returns the name of a field, also in a nested message, whose text is not UTF-8, or an empty text"""


@functools.cache
def _text_check(of: Any) -> _TextCheck | None:
    """Make a check of text, or return None if no field can hold text.

    Text of proto2 that is not UTF-8 is read as bytes.
    """
    texts: list[tuple[str, bool]] = [
        (each.name, each.is_repeated) for each in of.fields if each.type == each.TYPE_STRING
    ]
    nested: list[tuple[str, bool, _TextCheck]] = [
        (each.name, each.is_repeated, check)
        for each in of.fields
        if each.message_type is not None and (check := _text_check(each.message_type)) is not None
    ]
    if not texts and not nested:
        return None

    def check_text(message: Any) -> str:
        for name, repeated in texts:
            content = getattr(message, name)
            if not all(isinstance(text, str) for text in (content if repeated else (content,))):
                return name
        for name, repeated, check in nested:
            parts = getattr(message, name) if repeated else (getattr(message, name),) if message.HasField(name) else ()
            for part in parts:
                if found := check(part):
                    return f"{name}.{found}"
        return ""

    return check_text
