"""Messages byte by byte, as a producer writes them and as they stand at a target."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

Position = tuple[int, int]
"""Ledger and entry."""
Fields = tuple[tuple[bytes, bytes | None], ...]
"""Headers as pairs. None is a header of Kafka without a value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Raw:
    """A message as it is published."""

    number: int
    fields: Fields
    body: bytes | None = b""
    """None is a record of Kafka without a value."""
    block: bytes | None = None
    """All of the headers of a message of NATS, if `fields` cannot say them."""
    timestamp_ms: int | None = None
    """The time that its producer gives to a record of Kafka; None for now."""
    key: bytes | None = None
    """The key of a record of Kafka."""

    @property
    def size(self) -> int:
        """Bytes of headers and body, at least what the broker counts but for a fixed amount."""
        headers = sum(len(name) + len(value or b"") + 4 for name, value in self.fields)
        return headers + len(self.block or b"") + len(self.body or b"")


@dataclasses.dataclass(frozen=True, slots=True)
class Arrived:
    """A message as it stands at a target."""

    target: str
    at_ms: int
    fields: Fields
    body: bytes | None
    block: bytes = b""
    """All of the headers of a message of NATS, as they stand there."""
    key: bytes | None = None
    """The key of a record of Kafka."""


def fields_of(raw: Raw) -> Fields:
    """Return the headers of a message, also those that stand in a block."""
    return raw.fields if raw.block is None else tuple(fields_of_block(raw.block))


def fields_of_block(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the headers of a block of NATS, with their bytes as they are but for a blank behind the colon."""
    for line in block.split(b"\r\n")[1:]:
        if line:
            name, _, value = line.partition(b":")
            yield name, value.removeprefix(b" ")
