"""Frozen dataclasses that mirror protobuf messages field by field.

Owns: filling a message from its dataclass and making the dataclass from a message; fields are matched by name.
Does not own: the dataclasses (`manifest`, `bucket`, `checkpoint`) and the frame (`framing`).

A tuple stands for a repeated field, a tuple in it for a message of that many fields, in the order of their numbers. An
absent field is None where the dataclass allows it; else a scalar has the message's default and a message the
dataclass's. Not written are an empty repeated field, None, and what equals that default. A number that its `IntEnum`
does not have is a ValueError.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

from google.protobuf import message as protobuf

T = TypeVar("T")


def fill(message: protobuf.Message, value: Any) -> None:
    """Sets the fields of `message` from those of the dataclass `value` that have its names."""
    cls: Any = type(value)
    for name, _, _, is_optional, default in _fields(cls):
        content = getattr(value, name)
        if dataclasses.is_dataclass(content):
            if content == default:
                continue
            target = getattr(message, name)
            target.SetInParent()
            fill(target, content)
        elif isinstance(content, tuple):
            target = getattr(message, name)
            for item in content:
                if dataclasses.is_dataclass(item):
                    fill(target.add(), item)
                elif isinstance(item, tuple):
                    added = target.add()
                    for field, part in zip(added.DESCRIPTOR.fields, item, strict=True):
                        setattr(added, field.name, part)
                else:
                    target.append(item)
        elif content is not None:
            descriptor = message.DESCRIPTOR.fields_by_name[name]
            if descriptor.is_required or is_optional or content != descriptor.default_value:
                setattr(message, name, content)


def extend(repeated: Any, values: Iterable[Any]) -> None:
    """Appends a message for each of the dataclasses to a repeated field."""
    for value in values:
        fill(repeated.add(), value)


def made_from(cls: type[T], message: protobuf.Message) -> T:
    """The dataclass `cls` with the values of the fields of `message`."""
    values: dict[str, Any] = {}
    mirrored: Any = cls
    for name, nested, enumeration, is_optional, default in _fields(mirrored):
        content = getattr(message, name)
        if isinstance(content, protobuf.Message):
            present = nested is not None and message.HasField(name)
            values[name] = made_from(nested, content) if nested is not None and present else default
        elif isinstance(content, int) and enumeration is not None:
            values[name] = enumeration(content)
        elif isinstance(content, (int, float, str, bytes)):
            values[name] = None if is_optional and not message.HasField(name) else content
        else:
            values[name] = tuple(_item(nested, item) for item in content)
    return cls(**values)


def _item(nested: type | None, content: Any) -> Any:
    """One item of a repeated field."""
    if nested is not None:
        return made_from(nested, content)
    if isinstance(content, protobuf.Message):
        return tuple(getattr(content, field.name) for field in content.DESCRIPTOR.fields)
    return content


class _Field(NamedTuple):
    """`nested`: the dataclass of its value or of the items of its tuple. `enumeration`: of a number that is a member of
    one. `default`: of a field that holds a message, what stands for an absent one.
    """

    name: str
    nested: type | None
    enumeration: type[enum.IntEnum] | None
    is_optional: bool
    default: Any


@functools.cache
def _fields(cls: Hashable) -> tuple[_Field, ...]:
    mirrored: Any = cls
    hints = typing.get_type_hints(mirrored)
    return tuple(
        _Field(
            field.name,
            _nested(hints[field.name]),
            _enumeration(hints[field.name]),
            types.NoneType in typing.get_args(hints[field.name]),
            field.default if dataclasses.is_dataclass(field.default) else None,
        )
        for field in dataclasses.fields(mirrored)
    )


def _enumeration(hint: Any) -> type[enum.IntEnum] | None:
    return hint if isinstance(hint, type) and issubclass(hint, enum.IntEnum) else None


def _nested(hint: Any) -> type | None:
    if typing.get_origin(hint) in (tuple, types.UnionType):
        found = [_nested(argument) for argument in typing.get_args(hint)]
        return next((cls for cls in found if cls is not None), None)
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None
