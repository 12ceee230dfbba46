"""What the oracle of key order knows of one position, one consumer and one hash.

Owns: these forms. Does not own: what they mean (`order_oracle`).
"""

from __future__ import annotations

import collections
import dataclasses
import enum

from daemon.core.key_shared.hash_slots import HashRange

Position = tuple[int, int]


class Where(enum.Enum):
    """`UNPLANNED`: an ordinary position that nobody plans now. `STAGED`: a decision about it is not durable yet."""

    PENDING = enum.auto()
    UNPLANNED = enum.auto()
    WAITS = enum.auto()
    IN_FLIGHT = enum.auto()
    STAGED = enum.auto()
    NACKED = enum.auto()
    LEFT = enum.auto()


@dataclasses.dataclass(eq=False, slots=True)
class Item:
    """A position. `deliver_at_ms`: 0 of an ordinary one, which has a row only since it was negatively acknowledged.
    `arrived`: in which round it came. `sent`: the number of its first delivery, 0 before. `planners`: the streams that
    planned it or declared to hold it. `is_unread`: it is read from its bucket, or comes while others are, so that its
    place among them is not known until all that is READY was looked at.
    """

    at: Position
    deliver_at_ms: int
    key_hash: int
    where: Where
    has_row: bool
    consumer: int = 0
    back: bool = False
    arrived: int = 0
    order: tuple[int, ...] = ()
    sent: int = 0
    count: int = 0
    until_ms: int = 0
    planners: set[int] = dataclasses.field(default_factory=set)
    taken_back: bool = False
    is_unread: bool = False

    @property
    def slot(self) -> int:
        return self.key_hash & 0xFFFF

    @property
    def claim(self) -> tuple[Position, int]:
        return self.at, self.deliver_at_ms

    def __repr__(self) -> str:
        told = " ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self)[5:])
        return f"<{self.at} due {self.deliver_at_ms} slot {self.slot} {self.where.name} {told}>"


@dataclasses.dataclass(frozen=True, slots=True)
class Receiver:
    """A consumer as it joins."""

    number: int
    stream: int
    name: str
    hash_ranges: tuple[HashRange, ...] = ()


@dataclasses.dataclass(slots=True)
class Slot:
    """What is of one hash. `held`: rows by consumer, those of decisions that are not durable yet included. `nacked`:
    NACKED, or about to be. `outstanding`: were NACKED, and have not left.
    """

    waits: dict[Item, None] = dataclasses.field(default_factory=dict)
    held: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    holding: dict[Item, int] = dataclasses.field(default_factory=dict)
    nacked: dict[Item, None] = dataclasses.field(default_factory=dict)
    outstanding: dict[Item, None] = dataclasses.field(default_factory=dict)
    since_ms: int = 0
    is_bounded_out: bool = False
    is_disordered: bool = False

    @property
    def blocks(self) -> bool:
        return bool(self.nacked) and not self.is_bounded_out


@dataclasses.dataclass(frozen=True, slots=True)
class Delivery:
    consumer: int
    at: Position
    deliver_at_ms: int
    key_hash: int
    count: int
