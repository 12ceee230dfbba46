"""Frozen dataclasses that mirror protobuf messages field by field.

Owns: filling a message from its dataclass and making the dataclass from a message; fields are matched by name.
Does not own: the dataclasses (`manifest`, `bucket`, `checkpoint`) and the frame (`framing`).

A tuple stands for a repeated field, None for a message that is absent; an absent scalar has its default. An empty
repeated field, an absent message and a scalar equal to its optional field's default are not written.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from google.protobuf import message as protobuf

T = TypeVar("T")


def fill(message: protobuf.Message, value: Any) -> None:
    """Sets the fields of `message` from those of the dataclass `value` that have its names."""
    cls: Any = type(value)
    for name, _ in _fields(cls):
        content = getattr(value, name)
        if dataclasses.is_dataclass(content):
            target = getattr(message, name)
            target.SetInParent()
            fill(target, content)
        elif isinstance(content, tuple):
            target = getattr(message, name)
            for item in content:
                if dataclasses.is_dataclass(item):
                    fill(target.add(), item)
                else:
                    target.append(item)
        elif content is not None:
            descriptor = message.DESCRIPTOR.fields_by_name[name]
            if descriptor.is_required or content != descriptor.default_value:
                setattr(message, name, content)


def extend(repeated: Any, values: Iterable[Any]) -> None:
    """Appends a message for each of the dataclasses to a repeated field."""
    for value in values:
        fill(repeated.add(), value)


def made_from(cls: type[T], message: protobuf.Message) -> T:
    """The dataclass `cls` with the values of the fields of `message`."""
    values: dict[str, Any] = {}
    mirrored: Any = cls
    for name, nested in _fields(mirrored):
        content = getattr(message, name)
        if isinstance(content, protobuf.Message):
            present = nested is not None and message.HasField(name)
            values[name] = made_from(nested, content) if nested is not None and present else None
        elif isinstance(content, (int, str, bytes, bool)):
            values[name] = content
        else:
            values[name] = tuple(content) if nested is None else tuple(made_from(nested, item) for item in content)
    return cls(**values)


@functools.cache
def _fields(cls: Hashable) -> tuple[tuple[str, type | None], ...]:
    """(name, dataclass of its value or of the items of its tuple) for each field."""
    mirrored: Any = cls
    hints = typing.get_type_hints(mirrored)
    return tuple((field.name, _nested(hints[field.name])) for field in dataclasses.fields(mirrored))


def _nested(hint: Any) -> type | None:
    if typing.get_origin(hint) in (tuple, types.UnionType):
        found = [_nested(argument) for argument in typing.get_args(hint)]
        return next((cls for cls in found if cls is not None), None)
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None
