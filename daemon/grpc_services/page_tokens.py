"""Encodes page tokens and checks page sizes of lists.

A token names its list, so that another list refuses it. One that continues from a place holds a digest of its request,
too.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import struct
from typing import Protocol

from google.protobuf import message

from daemon import errors

_DIGEST_BYTES = 8


class List(enum.Enum):
    """The list whose pages a token turns: its first byte."""

    TOPICS = b"\x01"
    BUCKETS = b"\x02"
    SUBSCRIPTIONS = b"\x03"
    SCHEDULED = b"\x04"
    BACKLOG = b"\x05"
    DEAD_LETTERS = b"\x06"
    CONSUMERS = b"\x07"
    PENDING_DELETES = b"\x08"
    DEAD_DELETES = b"\x09"
    ENDED_DELETES = b"\x0a"
    RETENTION = b"\x0b"


class Paged(Protocol):
    """A request for a page."""

    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


def page_size(request: Paged, *, default: int, most: int) -> int:
    """Return how many entries a page may have: the given size or the default.

    Raises `InvalidArgument` if the size is above `most`.
    """
    if request.page_size > most:
        raise errors.InvalidArgument(f"page_size: {request.page_size}, the limit is {most}")
    return request.page_size or default


def of_name(after: str | None, of: List) -> str:
    """Return a token that continues after a name, for any request; "" if nothing follows."""
    return _encoded(of, after.encode()) if after else ""


def name_in(token: str, of: List) -> str:
    """Return the name after which the page begins; "" for the first page. Raises `InvalidArgument`."""
    if not token:
        return ""
    try:
        return _decoded(token, of).decode()
    except UnicodeDecodeError as error:
        raise _bad_token(token, of) from error


def of_place(after: tuple[int, ...] | None, request: message.Message, of: List, form: struct.Struct) -> str:
    """Return a token that turns the pages of one request; "" if nothing follows."""
    return "" if after is None else _encoded(of, _digest(request) + form.pack(*after))


def place_in(request: message.Message, token: str, of: List, form: struct.Struct) -> tuple[int, ...]:
    """Return the place after which the page begins; () for the first page.

    Raises `InvalidArgument`, also for the token of another request.
    """
    if not token:
        return ()
    data = _decoded(token, of)
    if len(data) != _DIGEST_BYTES + form.size:
        raise _bad_token(token, of)
    if data[:_DIGEST_BYTES] != _digest(request):
        raise errors.InvalidArgument(
            f"page_token: {token[:64]!r} is of another request; only page_size may change from page to page"
        )
    return form.unpack(data[_DIGEST_BYTES:])


def _digest(request: message.Message) -> bytes:
    """Return a digest of a request, the same for each of its pages."""
    asked = type(request)()
    asked.CopyFrom(request)
    for name in ("page_size", "page_token"):
        asked.ClearField(name)
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=_DIGEST_BYTES).digest()


def _encoded(of: List, place: bytes) -> str:
    return base64.urlsafe_b64encode(of.value + place).decode()


def _decoded(token: str, of: List) -> bytes:
    try:
        data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise _bad_token(token, of) from error
    if data[:1] != of.value or len(data) == 1:
        raise _bad_token(token, of)
    return data[1:]


def _bad_token(token: str, of: List) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f"page_token: {token[:64]!r} is not a next_page_token of this daemon for {of.name.lower()}"
    )
