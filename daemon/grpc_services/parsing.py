"""Parses the bytes of a request, and refuses a bad one with INVALID_ARGUMENT that names the field.

gRPC's own parsing would end the call with INTERNAL for a name that is not UTF-8.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from google.protobuf import descriptor, empty_pb2, message, unknown_fields

from daemon import config, errors
from daemon.core import limits
from tarry.packed_fields import NotPlainError, varint_at

M = TypeVar("M", bound=message.Message)

# A message's descriptor; its class depends on the protobuf runtime.
Declared = Any

_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
# The columns that have a value for each row
_ROW_COLUMNS = frozenset(("entry_id", "ledger_id"))
# Fields that are looked at before a request is parsed. Packed columns and names are fewer.
_FIELDS_SEEN_MAX = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The most bytes and rows of one request."""

    size_bytes_max: int
    rows_max: int

    @classmethod
    def of(cls, settings: config.Config) -> Bounds:
        return cls(settings.limits.message_bytes_max, settings.limits.rows_per_request_max)


def parse(message_type: type[M], data: bytes, bounds: Bounds) -> M:
    """Parse a request. Raises `InvalidArgument` if it is too large, or names the field that does not parse.

    Too many rows in packed columns are refused before they are parsed, which takes several times their bytes.
    """
    if len(data) > bounds.size_bytes_max:
        raise errors.InvalidArgument(
            f"message: {len(data)} bytes, the limit is {bounds.size_bytes_max}; send fewer rows in a request, or raise "
            "limits.message_bytes_max of the daemon"
        )
    _check_rows(data, message_type.DESCRIPTOR, bounds.rows_max)
    try:
        return message_type.FromString(data)
    except message.DecodeError as error:
        declared = message_type.DESCRIPTOR
        fault = _text_fault(data, declared) or f"message: these {len(data)} bytes are no {declared.full_name}"
        raise errors.InvalidArgument(fault) from error


def _check_rows(data: bytes, declared: Declared, rows_max: int) -> None:
    """Refuse a message of which a packed column has too many rows. Raises `InvalidArgument`.

    Leaves to the parser what is no message, has many fields, or has columns that are not packed.
    """
    place = 0
    try:
        for _ in range(_FIELDS_SEEN_MAX):
            if place >= len(data):
                return
            tag, place = varint_at(data, place)
            kind = tag & 7
            if kind == 0:
                _, place = varint_at(data, place)
                continue
            size, place = varint_at(data, place) if kind == _LENGTH_DELIMITED else (_FIXED_BYTES[kind], place)
            field = declared.fields_by_number.get(tag >> 3)
            if field is not None and field.name in _ROW_COLUMNS and size >> 3 > rows_max:
                raise limits.rows_refused(field.name, size >> 3, rows_max)
            place += size
    except (NotPlainError, IndexError, KeyError):
        return


def leading_number(data: bytes) -> int | None:
    """Return field 1 of a message that does not parse if it is a number, else None.

    This is the `request_id` of a request to refuse in band.
    """
    for field in _unparsed(data):
        if field.field_number == 1 and isinstance(field.data, int):
            return field.data
    return None


def require_known(field: str, number: int, declared: descriptor.EnumDescriptor) -> None:
    """Check the number of an enum, since proto3 accepts unknown ones. Raises `InvalidArgument`."""
    if number not in declared.values_by_number:
        known = ", ".join(f"{value.number} = {value.name}" for value in declared.values)
        raise errors.InvalidArgument(f"{field}: {number} is not known; known are {known}")


def _unparsed(data: bytes) -> list[Any]:
    """Return the fields by number, without a schema; none if the bytes are not a message."""
    try:
        fields = unknown_fields.UnknownFieldSet(empty_pb2.Empty.FromString(data))
    except message.DecodeError:
        return []
    return [fields[place] for place in range(len(fields))]


def _text_fault(data: bytes, declared: Declared) -> str:
    """Describe the first text that is not UTF-8, with its field's name. Returns "" if there is none."""
    for unparsed in _unparsed(data):
        field = declared.fields_by_number.get(unparsed.field_number)
        if field is None or unparsed.wire_type != _LENGTH_DELIMITED:
            continue
        if field.type == descriptor.FieldDescriptor.TYPE_STRING:
            try:
                unparsed.data.decode()
            except UnicodeDecodeError as error:
                return f"{_name(field)}: not UTF-8 at byte {error.start}: {unparsed.data[:64]!r}"
        elif field.message_type is not None and (fault := _text_fault(unparsed.data, field.message_type)):
            return fault
    return ""


def _name(field: Declared) -> str:
    """Return the field's name; that of a map's key or value begins with the map's name."""
    entry = field.containing_type
    if not entry.GetOptions().map_entry:
        return str(field.name)
    maps = (each.name for each in entry.containing_type.fields if each.message_type is entry)
    return f"{next(maps)} {field.name}"
