"""Parses the bytes of a request, and refuses a bad one with INVALID_ARGUMENT that names the field.

gRPC's own parsing would end the call with INTERNAL for a name that is not UTF-8.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf import descriptor, empty_pb2, message, unknown_fields

from daemon import errors

M = TypeVar("M", bound=message.Message)

# A message's descriptor; its class depends on the protobuf runtime.
Declared = Any

_LENGTH_DELIMITED = 2


def parse(message_type: type[M], data: bytes, *, size_bytes_max: int) -> M:
    """Parse a request. Raises `InvalidArgument` if it is too large, or names the field that does not parse."""
    if len(data) > size_bytes_max:
        raise errors.InvalidArgument(f"message: {len(data)} bytes, the limit is {size_bytes_max}")
    try:
        return message_type.FromString(data)
    except message.DecodeError as error:
        declared = message_type.DESCRIPTOR
        fault = _text_fault(data, declared) or f"message: these {len(data)} bytes are no {declared.full_name}"
        raise errors.InvalidArgument(fault) from error


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
