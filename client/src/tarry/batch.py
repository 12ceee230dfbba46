"""Batches of delivered positions, streamed or leased, and the account of those still held.

Also reads and writes the names of deliveries as text, with the headers that carry them through another system.
`tarry.receiving` decides which batches are joined automatically.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import columns, errors, results, wire
from tarry.v1 import dispatch_pb2

DELIVERY_ID_HEADER = "tarry-delivery-id"
"""Header of a message that was passed on, with the name of its delivery"""
REDELIVERY_COUNT_HEADER = "tarry-redelivery-count"
"""Header of a message that was passed on, with how often it was negatively acknowledged or timed out before"""

_FORM = re.compile(
    r"(0|[1-9]\d*)-(0|[1-9]\d*)(?:\.(0|[1-9]\d*))?-(0|[1-9]\d*)-(0|[1-9]\d*)(?:-([0-9a-f]{8}))?", re.ASCII
)
_BITS = (64, 64, 32, 64, 32)


@dataclasses.dataclass(frozen=True, slots=True)
class DeliveryId:
    """The name of one delivery of a position to a subscription.

    Names of the same delivery are equal and hash alike, whatever `log` is.
    Example: `client.nack(topic, subscription, tarry.DeliveryId.parse(text).positions, forwarded=True)`
    """

    ledger_id: int
    entry_id: int
    batch_index: int | None
    """None for the entry as a whole"""
    deliver_at_ms: int
    redelivery_count: int
    log: str = dataclasses.field(default="", compare=False)
    """Eight hexadecimal digits for topic and subscription (`log_of`); empty if the text has none"""

    def __str__(self) -> str:
        part = "" if self.batch_index is None else f".{self.batch_index}"
        log = "" if not self.log else f"-{self.log}"
        return f"{self.ledger_id}-{self.entry_id}{part}-{self.deliver_at_ms}-{self.redelivery_count}{log}"

    @staticmethod
    def log_of(topic: str, subscription: str) -> str:
        """Return the eight hexadecimal digits that stand for a topic and a subscription at the end of a name."""
        return hashlib.sha256(f"{topic}\0{subscription}".encode()).hexdigest()[:8]

    @staticmethod
    def parse(text: str) -> DeliveryId:
        """Parse the text that `str` gives. Raises InvalidArgument."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise errors.InvalidArgument(
                f"delivery id {text!r} is none; it has the form <ledger>-<entry>[.<batch index>]-<time>-<count>[-<log>]"
            )
        *digits, log = found.groups()
        numbers = [None if each is None else int(each) for each in digits]
        for number, bits in zip(numbers, _BITS, strict=True):
            if number is not None and number >> bits:
                raise errors.InvalidArgument(f"delivery id {text!r} holds {number}, which has more than {bits} bits")
        ledger_id, entry_id, batch_index, deliver_at_ms, redelivery_count = numbers
        return DeliveryId(
            ledger_id or 0, entry_id or 0, batch_index, deliver_at_ms or 0, redelivery_count or 0, log or ""
        )

    @staticmethod
    def of(positions: columns.Positions, row: int) -> DeliveryId:
        """Return the delivery id of one row of these positions."""
        index = None if positions.batch_index is None else int(positions.batch_index[row])
        count = 0 if positions.redelivery_count is None else int(positions.redelivery_count[row])
        return DeliveryId(
            int(positions.ledger_id[row]),
            int(positions.entry_id[row]),
            None if index == columns.NO_BATCH_INDEX else index,
            int(positions.deliver_at_ms[row]),
            count,
        )

    @property
    def positions(self) -> columns.Positions:
        """The columns that acknowledge this delivery, positively or negatively."""
        index = columns.NO_BATCH_INDEX if self.batch_index is None else self.batch_index
        return columns.positions(self.ledger_id, self.entry_id, self.deliver_at_ms, index, self.redelivery_count)


AnyBatch = TypeVar("AnyBatch", bound="Batch")


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """The origin of each row of a joined batch, as columns of its length."""

    number: NDArray[np.int64]
    """Number of the batch in which the row arrived"""
    row: NDArray[np.intp]
    """Index of the row in that batch"""
    received_at_ms: NDArray[np.int64]

    def take(self, rows: slice | NDArray[Any] | list[int]) -> Origin:
        """Return some of the rows."""
        return Origin(self.number[rows], self.row[rows], self.received_at_ms[rows])

    def by_batch(self) -> Iterator[tuple[int, NDArray[np.intp]]]:
        """Yield the number of each batch with those of its rows that are here."""
        if not len(self.number):
            return
        order = np.argsort(self.number, kind="stable")
        numbers, begins = np.unique(self.number[order], return_index=True)
        yield from zip(numbers.tolist(), np.split(self.row[order], begins[1:]), strict=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Due positions in the order of delivery, as columns of one length."""

    __repr__ = columns.short_repr

    epoch: int
    ledger_id: NDArray[np.uint64]
    entry_id: NDArray[np.uint64]
    deliver_at_ms: NDArray[np.uint64]
    key_hash: NDArray[np.uint32] | None
    """None if no row has a key; rows without one have 0."""
    received_at_ms: int
    """Unix time by this machine's clock (ms); in a joined batch, that of the part that came last"""
    number: int
    """Counts the batches of the subscription from 1; 0 for leased ones. A part of a batch has the number of the whole,
    a joined batch that of its first part.
    """
    redelivery_count: NDArray[np.uint32]
    """Number of times that each row was negatively acknowledged or timed out before"""
    batch_index: NDArray[np.uint32] | None = None
    """None if all rows are whole entries; otherwise the index of the message that was negatively acknowledged within
    its batch entry, or `tarry.NO_BATCH_INDEX`.
    """
    rows: NDArray[np.intp] | None = dataclasses.field(default=None, repr=False)
    """Indexes of these rows in the whole batch; None for all, or if the batch is joined"""
    origin: Origin | None = dataclasses.field(default=None, repr=False)
    """Origins of the rows of a joined batch, otherwise None"""

    def __len__(self) -> int:
        return len(self.entry_id)

    @property
    def positions(self) -> columns.Positions:
        """The columns that an acknowledgement names, as a tuple."""
        return columns.Positions(
            self.ledger_id, self.entry_id, self.deliver_at_ms, self.batch_index, self.redelivery_count
        )

    def delivery_id(self, row: int) -> str:
        """Return the delivery's name: `<ledger>-<entry>[.<batch index>]-<deliver_at_ms>-<redelivery count>`.

        The name stays the same if the same delivery is sent again, after a broken stream or a crash, and changes after
        each negative acknowledgement and ack timeout. An output that drops messages whose id it already has, with topic
        and subscription as a prefix, holds each delivery once. `tarry.DeliveryId.parse` reads it.
        Example: `headers[tarry.DELIVERY_ID_HEADER] = batch.delivery_id(row)`
        """
        return str(DeliveryId.of(self.positions, row))

    @property
    def received_at_ms_by_row(self) -> NDArray[np.int64]:
        """The arrival of each row, also in a joined batch: Unix time by this machine's clock (ms)."""
        return np.full(len(self), self.received_at_ms) if self.origin is None else self.origin.received_at_ms

    @property
    def lateness_ms(self) -> NDArray[np.int64]:
        """The time from due to received of each row (ms)."""
        return self.received_at_ms_by_row - self.deliver_at_ms.astype(np.int64)

    def take(self, rows: slice | NDArray[Any] | list[int]) -> Self:
        """Return a part of the batch, by a slice, a mask or indexes; acknowledge and release it like the whole."""
        chosen = None if self.origin is not None else self._rows()[rows]
        return dataclasses.replace(
            self,
            ledger_id=self.ledger_id[rows],
            entry_id=self.entry_id[rows],
            deliver_at_ms=self.deliver_at_ms[rows],
            key_hash=None if self.key_hash is None else self.key_hash[rows],
            redelivery_count=self.redelivery_count[rows],
            batch_index=None if self.batch_index is None else self.batch_index[rows],
            rows=chosen,
            origin=None if self.origin is None else self.origin.take(rows),
        )

    @staticmethod
    def concat(batches: Iterable[AnyBatch]) -> AnyBatch:
        """Join batches of one subscription, or parts of them, into one batch with their rows in this order.

        It is acknowledged, negatively acknowledged, released and split like any other. Each row gives its permit back
        once, even if it is in several of them. `epoch` is the lowest of theirs. Raises InvalidArgument if there is
        none, or if they are of different kinds or, for KEY_SHARED, of different consumers.
        Example: `subscription.ack(tarry.Batch.concat(waiting))`
        """
        parts = list(batches)
        if not parts:
            raise errors.InvalidArgument("batches is empty; at least 1 batch is joined")
        first = parts[0]
        if len(parts) == 1:
            return first
        return dataclasses.replace(first, **_joined_columns(parts), **first._joined_fields(parts))

    def _joined_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        """Return the fields, besides columns, of this kind of batch when it is joined. Raises InvalidArgument."""
        kinds = {type(part).__name__ for part in parts}
        if len(kinds) > 1:
            raise errors.InvalidArgument(
                f"batches are {' and '.join(sorted(kinds))}; all that are joined are of one kind"
            )
        return {}

    def _rows(self) -> NDArray[np.intp]:
        """Return the indexes of the rows in the whole batch."""
        return np.arange(len(self)) if self.rows is None else self.rows

    def _origins(self) -> Origin:
        """Return the origins of the rows."""
        if self.origin is not None:
            return self.origin
        return Origin(np.full(len(self), self.number), self._rows(), self.received_at_ms_by_row)

    @staticmethod
    def from_columns(received: wire.MessagesColumns, number: int) -> Batch:
        """Make a batch that is received now."""
        return Batch(**columns_of(received), number=number)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Leased(Batch):
    """Due positions leased without a stream; in flight until they are acknowledged or the lease ends.

    Empty if nothing came due in time.
    """

    __repr__ = columns.short_repr

    lease_ms: int
    """Length of the lease from the answer on (ms); in a joined batch, how long all rows are leased from
    `received_at_ms` on
    """
    rebuild_needed: tuple[results.RebuildNeeded, ...]
    """Ranges to add again, because a damaged bucket lost rows of them"""

    def _joined_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        joined = super()._joined_fields(parts)
        ends_at_ms = min(part.received_at_ms + part.lease_ms for part in parts)
        return joined | {
            "lease_ms": max(0, ends_at_ms - max(part.received_at_ms for part in parts)),
            "rebuild_needed": tuple(dict.fromkeys(each for part in parts for each in part.rebuild_needed)),
        }

    @staticmethod
    def from_response(response: dispatch_pb2.GetScheduledMessagesResponse) -> Leased:
        """Make a leased batch that is received now."""
        return Leased(
            **columns_of(wire.messages_columns(response.messages)),
            number=0,
            lease_ms=response.lease_ms,
            rebuild_needed=tuple(results.RebuildNeeded.from_message(each) for each in response.rebuild_needed),
        )


HandedOut: TypeAlias = (
    Batch
    | tuple[columns.Column, columns.Column, columns.Column]
    | tuple[columns.Column, columns.Column, columns.Column, columns.Column | None]
    | tuple[columns.Column, columns.Column, columns.Column, columns.Column | None, columns.Column | None]
)
"""A batch, a part of one, or columns (ledger_id, entry_id, deliver_at_ms[, batch_index[, redelivery_count]]). A batch
names its deliveries by their redelivery counts; columns without counts mean any delivery.
"""


_NO_ROWS = np.empty(0, dtype=np.uint64)
NOTHING = columns.Positions(_NO_ROWS, _NO_ROWS, _NO_ROWS)


def positions_of(given: HandedOut, batch_index: columns.Column | None = None) -> columns.Positions:
    """Return the columns to acknowledge, of one length; `batch_index` replaces theirs. Raises InvalidArgument."""
    if batch_index is not None:
        named = given.positions if isinstance(given, Batch) else given
        return columns.positions(*named[:3], batch_index, *named[4:])
    return given.positions if isinstance(given, Batch) else columns.positions(*given)


def key_hash_of(given: HandedOut) -> NDArray[np.uint32] | None:
    """Return the hashes of their keys, or None if they are unknown."""
    return given.key_hash if isinstance(given, Batch) else None


def _joined_columns(parts: Sequence[Batch]) -> dict[str, Any]:
    """Return the fields that any kind of batch has when it is joined of these parts; omits columns that no part has."""
    positions = concatenate([part.positions for part in parts])
    origins = [part._origins() for part in parts]
    hashes = [np.zeros(len(part), np.uint32) if part.key_hash is None else part.key_hash for part in parts]
    return {
        "epoch": min(part.epoch for part in parts),
        "ledger_id": positions.ledger_id,
        "entry_id": positions.entry_id,
        "deliver_at_ms": positions.deliver_at_ms,
        "batch_index": positions.batch_index,
        "redelivery_count": positions.redelivery_count,
        "key_hash": None if all(part.key_hash is None for part in parts) else np.concatenate(hashes),
        "received_at_ms": max(part.received_at_ms for part in parts),
        "rows": None,
        "origin": Origin(
            np.concatenate([each.number for each in origins]),
            np.concatenate([each.row for each in origins]),
            np.concatenate([each.received_at_ms for each in origins]),
        ),
    }


def columns_of(received: wire.MessagesColumns) -> dict[str, Any]:
    """Return the fields that any kind of batch has of these columns, received now."""
    counts = received.redelivery_count
    return {
        "epoch": received.epoch,
        "ledger_id": received.ledger_id,
        "entry_id": received.entry_id,
        "deliver_at_ms": received.deliver_at_ms,
        "key_hash": received.key_hash,
        "received_at_ms": time.time_ns() // 1_000_000,
        "redelivery_count": np.zeros(len(received.entry_id), np.uint32) if counts is None else counts,
        "batch_index": received.batch_index,
    }


@dataclasses.dataclass(slots=True)
class _Share:
    """The held rows of one batch: all, or those that `left` marks."""

    batch: Batch
    count: int
    left: NDArray[np.bool_] | None = None

    def marks(self) -> NDArray[np.bool_]:
        if self.left is None:
            self.left = np.ones(len(self.batch), dtype=np.bool_)
        return self.left


class HeldPositions:
    """Received positions that are not given back yet. A whole batch costs one entry, however many rows it has."""

    def __init__(self) -> None:
        self._shares: dict[int, _Share] = {}
        self._rows = 0

    def __len__(self) -> int:
        """Return the number of rows held."""
        return self._rows

    def add(self, batch: Batch) -> None:
        """Hold a whole batch."""
        self._shares[batch.number] = _Share(batch, len(batch))
        self._rows += len(batch)

    def give_back(self, given: Batch | columns.Positions) -> int:
        """Stop holding these rows; return how many of them were held."""
        before = self._rows
        if isinstance(given, Batch):
            self._give_back_batch(given)
        else:
            for part in self.find(given):
                self._give_back_batch(part)
        return before - self._rows

    def find(self, positions: columns.Positions) -> list[Batch]:
        """Return the held rows of these positions, oldest batch first."""
        return among(self.batches(), positions)

    def batches(self) -> list[Batch]:
        """Return everything held, oldest batch first."""
        return [share.batch if share.left is None else share.batch.take(share.left) for share in self._shares.values()]

    def positions(self) -> columns.Positions:
        """Return the positions of everything held, oldest batch first."""
        return concatenate([part.positions for part in self.batches()])

    def _give_back_batch(self, batch: Batch) -> None:
        if batch.origin is None:
            self._give_back_rows(batch.number, batch.rows)
            return
        for number, rows in batch.origin.by_batch():
            self._give_back_rows(number, rows)

    def _give_back_rows(self, number: int, rows: NDArray[np.intp] | None) -> None:
        """Stop holding these rows of the batch with that number; None means all."""
        share = self._shares.get(number)
        if share is None:
            return
        if rows is None or len(share.batch) == 1:
            self._drop(number, share.count if rows is None or len(rows) else 0)
            return
        left = share.marks()
        left[rows] = False
        self._drop(number, share.count - int(np.count_nonzero(left)))

    def _drop(self, number: int, rows: int) -> None:
        share = self._shares[number]
        share.count -= rows
        self._rows -= rows
        if share.count == 0:
            del self._shares[number]


def concatenate(parts: list[columns.Positions]) -> columns.Positions:
    """Return one set of columns from many."""
    if not parts:
        return NOTHING
    if len(parts) == 1:
        return parts[0]
    return columns.Positions(
        np.concatenate([part.ledger_id for part in parts]),
        np.concatenate([part.entry_id for part in parts]),
        np.concatenate([part.deliver_at_ms for part in parts]),
        None
        if all(part.batch_index is None for part in parts)
        else np.concatenate([part.batch_indexes() for part in parts]),
        # If one part means any delivery, deliveries are not distinguished.
        np.concatenate([part.redelivery_count for part in parts if part.redelivery_count is not None])
        if all(part.redelivery_count is not None for part in parts)
        else None,
    )


def among(batches: list[Batch], positions: columns.Positions) -> list[Batch]:
    """Return the rows of the batches that are among the positions; leaves out batches without any."""
    if not batches:
        return []
    found = members(concatenate([part.positions for part in batches]), positions)
    begins = np.cumsum([len(part) for part in batches])[:-1]
    return [part.take(rows) for part, rows in zip(batches, np.split(found, begins), strict=True) if rows.any()]


def members(positions: columns.Positions, wanted: columns.Positions) -> NDArray[np.bool_]:
    """Return a mask of the positions that are among the wanted ones."""
    groups = _groups(concatenate([positions, wanted]))
    is_wanted = np.arange(len(groups)) >= positions.rows
    group_is_wanted = np.bincount(groups, weights=is_wanted) > 0
    found: NDArray[np.bool_] = group_is_wanted[groups[: positions.rows]]
    return found


def last_of_each(positions: columns.Positions) -> NDArray[np.bool_]:
    """Return a mask of the rows whose position no later row names."""
    groups = _groups(positions)
    last = np.zeros(len(groups), np.intp)
    np.maximum.at(last, groups, np.arange(len(groups)))
    is_last: NDArray[np.bool_] = last[groups] == np.arange(len(groups))
    return is_last


def _groups(positions: columns.Positions) -> NDArray[np.intp]:
    """Return a number for each row, equal for equal positions: sorting makes equal rows neighbours."""
    sorted_by = [column for column in positions if column is not None]
    order = np.lexsort(sorted_by[::-1])
    begins = np.zeros(len(order), dtype=np.bool_)
    for column in sorted_by:
        in_order = column[order]
        begins[1:] |= in_order[1:] != in_order[:-1]
    groups = np.empty(len(order), dtype=np.intp)
    groups[order] = np.cumsum(begins)
    return groups
