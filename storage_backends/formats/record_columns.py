"""The decisions that a section holds, as columns.

Owns: the kinds of records and what each says.
Does not own: their stored form (`record_messages`), slots (`slot_format`) and what a record does when it is applied.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import numpy as np

from storage_backends.formats import index_ids, position_bitmap
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import U32, U64, Rows


class GoneReason(enum.IntEnum):
    UNSPECIFIED = 0
    # The last subscription was deleted: what was due leaves.
    NO_SUBSCRIPTION = 1
    # Trimmed, or cleared.
    TRIMMED = 2
    # It came due when every subscription had been created at or after its time.
    NOT_OWED = 3
    # Cancelled before it was due.
    CANCELLED = 4


class DeadLetterReason(enum.IntEnum):
    # Negatively acknowledged, or timed out, too often.
    TOO_OFTEN = 1
    # A dispatcher rejected it.
    REJECTED = 2
    # Its log was trimmed.
    TRIMMED = 3


class _OfRows:
    __slots__ = ()
    rows: Rows

    @property
    def row_count(self) -> int:
        """How many rows the record names."""
        return len(self.rows)


class _OfPositions:
    __slots__ = ()
    positions: tuple[PositionBitmap, ...]

    def __post_init__(self) -> None:
        if not position_bitmap.in_order(self.positions):
            raise ValueError("the bitmaps of positions do not ascend by ledger and page")

    @property
    def row_count(self) -> int:
        """How many positions the record names. As much work as its bitmaps are large."""
        return position_bitmap.count_of(self.positions)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AddRecord(_OfRows):
    """Rows that were accepted into the index `subscription_id` (`index_ids`), by `delay_level`; 0 = by none."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows
    delay_level: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RescheduleRecord(_OfRows):
    """Rows that take the place of those of their positions in the index `subscription_id`. None of them was due."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class AcknowledgeRecord(_OfRows):
    """Rows of an index that a subscription acknowledged; they carry no key hash."""

    topic_id: str
    incarnation: int
    subscription_id: int
    rows: Rows
    index_id: int = index_ids.SHARED

    def __post_init__(self) -> None:
        _check_index(self)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class GoneRecord(_OfPositions):
    """Positions that left the index `subscription_id`, due or not."""

    topic_id: str
    incarnation: int
    subscription_id: int
    reason: GoneReason
    positions: tuple[PositionBitmap, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class WaiveRecord(_OfPositions):
    """Positions that a subscription is owed no longer, due or not: they were trimmed for it.

    What nobody else is owed is named by a `GoneRecord` in the same slot.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    positions: tuple[PositionBitmap, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class NackRecord(_OfRows):
    """Rows of an index that a subscription negatively acknowledged.

    `redeliver_at_ms`: u64[n], when they come back; `redelivery_count`: u32[n], how often that happened to each, this
    time included. `added`: the rows are new in the index, and due.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    redeliver_at_ms: U64
    redelivery_count: U32
    added: bool = False

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class DeadLetterRecord(_OfRows):
    """Positions that became dead letters of a subscription, and leave its backlog as if it had acknowledged them; of
    those that were trimmed other records say that. They need not have rows in the index.

    `redelivery_count`: u32[n], how often each was negatively acknowledged; `dead_letter_id`: u64[n], ascending;
    `dead_at_ms`: u64[n]. `text`: what the dispatcher said.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    redelivery_count: U32
    dead_letter_id: U64
    dead_at_ms: U64
    reason: DeadLetterReason
    text: str = ""

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)

    @property
    def leaves_backlog(self) -> bool:
        """Whether the rows leave by this record. Trimmed ones leave by the `Gone` and `Waive` of its slot."""
        return self.reason is not DeadLetterReason.TRIMMED


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ReplayRecord(_OfRows):
    """Dead letters that are delivered again: `rows` of an index of the subscription, not the shared one.

    `dead_letter_id`: u64[n], which dead letter each was.
    """

    topic_id: str
    incarnation: int
    subscription_id: int
    index_id: int
    rows: Rows
    dead_letter_id: U64

    def __post_init__(self) -> None:
        _check_index(self)
        _check_columns(self)
        if self.index_id == index_ids.SHARED:
            raise ValueError("dead letters are not replayed into the shared index")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class PurgeRecord:
    """Dead letters, u64[n], that a subscription has no more."""

    topic_id: str
    incarnation: int
    subscription_id: int
    dead_letter_id: U64

    @property
    def row_count(self) -> int:
        """How many dead letters the record names."""
        return len(self.dead_letter_id)


Record: TypeAlias = (
    AddRecord
    | RescheduleRecord
    | AcknowledgeRecord
    | GoneRecord
    | WaiveRecord
    | NackRecord
    | DeadLetterRecord
    | ReplayRecord
    | PurgeRecord
)

# The columns that a kind of record has beside its rows.
COLUMNS: Final[Mapping[type[Any], tuple[str, ...]]] = MappingProxyType(
    {
        NackRecord: ("redeliver_at_ms", "redelivery_count"),
        DeadLetterRecord: ("redelivery_count", "dead_letter_id", "dead_at_ms"),
        ReplayRecord: ("dead_letter_id",),
        PurgeRecord: ("dead_letter_id",),
    }
)


def _check_index(record: AcknowledgeRecord | NackRecord | DeadLetterRecord | ReplayRecord) -> None:
    if not index_ids.serves(record.index_id, record.subscription_id):
        raise ValueError(f"index {record.index_id} does not serve subscription {record.subscription_id}")


def _check_columns(record: NackRecord | DeadLetterRecord | ReplayRecord) -> None:
    for name in COLUMNS[type(record)]:
        column = getattr(record, name)
        dtype = np.uint32 if name == "redelivery_count" else np.uint64
        if column.shape != (len(record.rows),) or column.dtype != dtype:
            raise ValueError(
                f"{name} is {column.dtype}{column.shape}, it must be {np.dtype(dtype)}({len(record.rows)},)"
            )
