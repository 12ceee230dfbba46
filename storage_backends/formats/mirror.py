"""Converts between protobuf messages and frozen dataclasses that mirror them field by field, matched by name.

A tuple stands for a repeated field, a tuple in it for a message of that many fields, in the order of their numbers. An
absent field is None if the dataclass allows it; else a scalar has the message's default and a message the dataclass's.
Empty repeated fields, None, and values equal to that default are not written. A number that its `IntEnum` does not have
is a ValueError.

A manifest has thousands of entries of few kinds: the plan to write and read a kind is made once, and the content is
passed as a whole, which sets a message ten times as fast as field by field.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from google.protobuf import message as protobuf

T = TypeVar("T")


def fill(message: protobuf.Message, value: Any) -> None:
    """Set the fields of `message` from those of the dataclass `value` that have its names."""
    content = _content(message.DESCRIPTOR, value)
    if content:
        message.MergeFrom(type(message)(**content))


def extend(repeated: Any, values: Iterable[Any]) -> None:
    """Append a message for each of the dataclasses to a repeated field."""
    for value in values:
        fill(repeated.add(), value)


def made_from(cls: type[T], message: protobuf.Message) -> T:
    """Make the dataclass `cls` with the values of the fields of `message`."""
    mirrored: Any = cls
    made: T = _maker(mirrored, message.DESCRIPTOR)(message)
    return made


# ---- writing

_ALWAYS = object()
"""A value that equals no other: for fields that are always written"""


class _Written(NamedTuple):
    """A field that is written, unless its content is None or `absent`.

    `nested` is the descriptor of the message, or of the messages of its items.
    """

    name: str
    absent: Any
    nested: Any
    repeated: bool


def _content(of: Any, value: Any) -> dict[str, Any]:
    """Return the arguments of the message's constructor; a dict stands for a nested message."""
    cls: Any = type(value)
    content: dict[str, Any] = {}
    for name, absent, nested, repeated in _written(cls, of):
        item = getattr(value, name)
        if item is None or item == absent:
            continue
        if nested is None:
            content[name] = item
        elif repeated:
            content[name] = [_item_content(nested, each) for each in item]
        else:
            content[name] = _content(nested, item)
    return content


def _item_content(of: Any, item: Any) -> dict[str, Any]:
    if isinstance(item, tuple):
        return {field.name: part for field, part in zip(of.fields, item, strict=True)}
    return _content(of, item)


@functools.cache
def _written(cls: Any, of: Any) -> tuple[_Written, ...]:
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        stored = of.fields_by_name[field.name]
        if stored.is_repeated:
            absent: Any = ()
        elif stored.message_type is not None:
            absent = _default(field)
        else:
            absent = _ALWAYS if stored.is_required or _is_optional(hints[field.name]) else stored.default_value
        found.append(_Written(field.name, absent, stored.message_type, stored.is_repeated))
    return tuple(found)


# ---- reading


@functools.cache
def _maker(cls: Any, of: Any) -> Callable[[protobuf.Message], Any]:
    """Return a function that makes the dataclass from messages of this kind."""
    hints = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    names = tuple(field.name for field in fields)
    contents = operator.attrgetter(*names)
    # The fields whose value differs from the message's content
    readers = [
        (field.name, reader)
        for field in fields
        if (reader := _reader(field, of.fields_by_name[field.name], hints[field.name])) is not None
    ]

    def make(message: protobuf.Message) -> Any:
        found = contents(message)
        values = dict(zip(names, found if len(names) > 1 else (found,), strict=True))
        for name, read in readers:
            values[name] = read(message, values[name])
        return cls(**values)

    return make


def _reader(field: dataclasses.Field[Any], stored: Any, hint: Any) -> Callable[[protobuf.Message, Any], Any] | None:
    """Return a function from a message and its content to the field's value, or None if the content is the value."""
    name, kind, nested = field.name, stored.message_type, _nested(hint)
    if stored.is_repeated:
        return _items_reader(kind, nested)
    if kind is not None:
        default = _default(field)
        if nested is None:
            return lambda message, content: default
        make = _maker(nested, kind)
        return lambda message, content: make(content) if message.HasField(name) else default
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return lambda message, content: hint(content)
    if _is_optional(hint):
        return lambda message, content: content if message.HasField(name) else None
    return None


def _items_reader(kind: Any, nested: type | None) -> Callable[[protobuf.Message, Any], tuple[Any, ...]]:
    if kind is None:
        return lambda message, content: tuple(content)
    if nested is None:
        parts = [field.name for field in kind.fields]
        return lambda message, content: tuple(tuple(getattr(item, part) for part in parts) for item in content)
    make = _maker(nested, kind)
    return lambda message, content: tuple(map(make, content))


# ---- types


def _default(field: dataclasses.Field[Any]) -> Any:
    """Return the stand-in for an absent message."""
    return field.default if dataclasses.is_dataclass(field.default) else None


def _is_optional(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def _nested(hint: Any) -> type | None:
    """Return the dataclass of a field's value or of the items of its tuple, or None."""
    if typing.get_origin(hint) in (tuple, types.UnionType):
        found = [_nested(argument) for argument in typing.get_args(hint)]
        return next((cls for cls in found if cls is not None), None)
    return hint if dataclasses.is_dataclass(hint) and isinstance(hint, type) else None
