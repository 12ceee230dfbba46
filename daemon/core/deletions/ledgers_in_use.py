"""Keeps which ledgers their owners report as in use, for all topics of a shard.

`ledger_deletions` alone uses it; it stands apart because it is a table with a limit of its own (`deletion.in_use_max`).
`ledger_deletions` knows for which ledgers a report comes too late.

A ledger of a topic has a type, an id, and a UUID or none. One that is in use without a UUID is so under any UUID, and
one with a UUID is so for a deletion that has none. Rows are kept in two orders: by topic, for the topic's deletions,
and, for offloaded ones, by ledger, for a sweep, which does not know the topic of an object. In each order, ledgers
without a UUID have separate, shorter keys.

A ledger takes 13 bytes, with a UUID 29; an offloaded one 25, with a UUID 57; chunks that are not full take up to twice
as much. 1,000,000 offloaded ones with UUIDs took 60 MB. A topic takes some 150 bytes and its name; topics are not
forgotten.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from daemon.core.deletions.sorted_keys import Keys, Mask, SortedKeys, ascending, bytes_of, contained, joined, moved
from storage_backends.formats.deletion_format import InUseChange, InUseLedgers, LedgerType, PendingDelete, TopicInUse
from storage_backends.formats.row_columns import U64

# Type, number of the topic, ledger[, UUID]
_OF_TOPIC = struct.Struct(">BI")
_OF_LEDGER = struct.Struct(">BIQ")
_UUID = struct.Struct(">QQ")
_LEDGER = struct.Struct(">Q")
_TOPIC = slice(1, 5)
_FROM_LEDGER = slice(5, None)

_OfTopic: TypeAlias = tuple[LedgerType, int]
"""(type, number of a topic)"""


class InUse:
    def __init__(self) -> None:
        self._topics: dict[str, int] = {}
        # By topic: (type, topic, ledger), and the same followed by the UUID
        self._plain = SortedKeys(13)
        self._named = SortedKeys(29)
        # Offloaded ones by ledger: (ledger, topic), and (ledger, UUID, topic)
        self._plain_objects = SortedKeys(12)
        self._named_objects = SortedKeys(28)
        # Types and topics for which the owner has reported everything in use
        self._complete: set[_OfTopic] = set()

    @property
    def ledgers(self) -> int:
        """The number of ledgers in use."""
        return len(self._plain) + len(self._named)

    @property
    def topics(self) -> int:
        """The number of topics with any report so far."""
        return len(self._topics)

    def knows(self, topic: str) -> bool:
        """Return whether the owner has reported all offloaded ledgers of the topic that are in use.

        Changes are reported from then on, so a ledger without a report is not in use.
        """
        number = self._topics.get(topic)
        return number is not None and (LedgerType.OFFLOADED_LEDGER, number) in self._complete

    def is_in_use(self, topic: str, delete: PendingDelete) -> bool:
        """Return whether the ledger to be deleted is in use, whatever component the deletion names."""
        number = self._topics.get(topic)
        if number is None:
            return False
        ledger = _OF_LEDGER.pack(delete.ledger_type, number, delete.ledger_id)
        context = delete.offload_context
        uuid = b"" if context is None else _UUID.pack(context.uuid_msb, context.uuid_lsb)
        return self._plain.has(ledger) or self._named.has(ledger + uuid)

    def holds(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Return whether any topic of the shard uses the offloaded ledger."""
        ledger = _LEDGER.pack(ledger_id)
        return self._plain_objects.has(ledger) or self._named_objects.has(ledger + _UUID.pack(uuid_msb, uuid_lsb))

    def holds_exactly(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Return whether any topic of the shard uses the offloaded ledger under this UUID."""
        return self._named_objects.has(_LEDGER.pack(ledger_id) + _UUID.pack(uuid_msb, uuid_lsb))

    def ledgers_of(self, topic: str, ledger_type: LedgerType | None = None) -> int:
        """Return how many ledgers of the topic are in use, of one type or of all."""
        number = self._topics.get(topic)
        if number is None:
            return 0
        types = LedgerType if ledger_type is None else (ledger_type,)
        prefixes = [_OF_TOPIC.pack(each, number) for each in types]
        return sum(self._plain.count(prefix) + self._named.count(prefix) for prefix in prefixes)

    def of(self, topic: str, ledger_type: LedgerType) -> LedgersInUse:
        """Return the ledgers of the topic that are in use now."""
        number = self._topics.get(topic)
        if number is None:
            none = np.empty(0, np.uint64)
            return LedgersInUse(ledger_type, 0, _rows(0, InUseLedgers(ledger_type, none, none, none)))
        return LedgersInUse(ledger_type, number, self._of(ledger_type, number))

    def change(self, topic: str, change: InUseChange, ledgers: InUseLedgers) -> int:
        """Apply an owner's report on ledgers of the topic, none of which is too late; return how many it changed.

        A ledger changes if it was not in use and now is, or the reverse. FORGET undoes equal reports only: for a ledger
        without a UUID it undoes its use without one.
        """
        if change is InUseChange.FORGET and topic not in self._topics:
            return 0
        number = self._number(topic)
        rows = _rows(number, ledgers)
        match change:
            case InUseChange.RECORD:
                return self._add(rows)
            case InUseChange.FORGET:
                return self._remove(rows)
            case InUseChange.REPLACE:
                self._complete.add((ledgers.ledger_type, number))
                return self._remove(self._of(ledgers.ledger_type, number).without(rows)) + self._add(rows)
            case InUseChange.COMPLETE:
                self._complete.add((ledgers.ledger_type, number))
                return 0

    def freeze(self) -> FrozenInUse:
        """Return the ledgers in use now, for a thread; copies pointers only."""
        return FrozenInUse(tuple(self._topics), self._plain.chunks(), self._named.chunks(), frozenset(self._complete))

    @classmethod
    def restored(cls, state: Sequence[TopicInUse]) -> InUse:
        made = cls()
        for topic in state:
            number = made._number(topic.topic)
            made._complete.update((ledger_type, number) for ledger_type in topic.complete)
        parts = [_rows(made._number(topic.topic), ledgers) for topic in state for ledgers in topic.ledgers]
        if parts:
            plain = np.concatenate([part.plain for part in parts])
            named = np.concatenate([part.named for part in parts])
            made._add(_Rows(ascending(plain), ascending(named)))
        return made

    def _number(self, topic: str) -> int:
        return self._topics.setdefault(topic, len(self._topics))

    def _of(self, ledger_type: LedgerType, number: int) -> _Rows:
        prefix = np.array([_OF_TOPIC.pack(ledger_type, number)], f"S{_OF_TOPIC.size}")
        return _Rows(self._plain.beginning_with(prefix), self._named.beginning_with(prefix))

    def _add(self, rows: _Rows) -> int:
        new = _Rows(self._plain.add(rows.plain), self._named.add(rows.named))
        self._plain_objects.add(_objects(new.plain))
        self._named_objects.add(_objects(new.named))
        return len(new.plain) + len(new.named)

    def _remove(self, rows: _Rows) -> int:
        gone = _Rows(self._plain.remove(rows.plain), self._named.remove(rows.named))
        self._plain_objects.remove(_objects(gone.plain))
        self._named_objects.remove(_objects(gone.named))
        return len(gone.plain) + len(gone.named)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrozenInUse:
    """The ledgers that were in use at one moment."""

    topics: tuple[str, ...]
    plain: tuple[Keys, ...]
    named: tuple[Keys, ...]
    complete: frozenset[_OfTopic]

    def state(self) -> tuple[TopicInUse, ...]:
        """Return the ledgers in use, by topic. O(n): runs in a thread."""
        of_topics: dict[int, list[InUseLedgers]] = {}
        for ledger_type in LedgerType:
            for number, ledgers in _by_topic(ledger_type, self.plain, self.named):
                of_topics.setdefault(number, []).append(ledgers)
        return tuple(
            TopicInUse(
                topic,
                tuple(of_topics.get(number, ())),
                tuple(ledger_type for ledger_type in LedgerType if (ledger_type, number) in self.complete),
            )
            for number, topic in enumerate(self.topics)
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LedgersInUse:
    """The ledgers of one type and topic that were in use at one moment."""

    _type: LedgerType
    _topic: int
    _rows: _Rows

    def __len__(self) -> int:
        return len(self._rows.plain) + len(self._rows.named)

    def beside(self, ledgers: InUseLedgers) -> InUseLedgers:
        """Return the ledgers that are not among `ledgers`, which have the same type. O(n): for a thread."""
        others = self._rows.without(_rows(self._topic, ledgers))
        matrix = np.concatenate([_widened([others.plain]), _widened([others.named])])
        return InUseLedgers(self._type, *_ledgers(matrix))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Rows:
    """Keys by topic, ascending, for ledgers without a UUID and with one."""

    plain: Keys
    named: Keys

    def without(self, others: _Rows) -> _Rows:
        plain, named = contained(self.plain, others.plain), contained(self.named, others.named)
        return _Rows(self.plain[~plain], self.named[~named])


def _rows(topic: int, ledgers: InUseLedgers) -> _Rows:
    rows = len(ledgers)
    columns: list[npt.NDArray[np.unsignedinteger[Any]]] = [
        np.full(rows, ledgers.ledger_type, np.uint8),
        np.full(rows, topic, np.uint32),
        ledgers.ledger_id,
        ledgers.uuid_msb,
        ledgers.uuid_lsb,
    ]
    named: Mask = (ledgers.uuid_msb | ledgers.uuid_lsb) != 0
    return _Rows(
        ascending(joined([column[~named] for column in columns[:3]])),
        ascending(joined([column[named] for column in columns])),
    )


def _objects(rows: Keys) -> Keys:
    """Convert the keys of offloaded ledgers from keys by topic to keys by ledger, ascending."""
    offloaded = rows[bytes_of(rows)[:, 0] == LedgerType.OFFLOADED_LEDGER]
    return ascending(moved(offloaded, [_FROM_LEDGER, _TOPIC]))


def _by_topic(
    ledger_type: LedgerType, plain: Iterable[Keys], named: Iterable[Keys]
) -> Iterable[tuple[int, InUseLedgers]]:
    """Yield the ledgers of one type for each topic number that has any, ascending by ledger and UUID."""
    matrix = np.concatenate([_widened(plain), _widened(named)])
    matrix = matrix[matrix[:, 0] == ledger_type]
    topic = _column(matrix, 1, 5, ">u4")
    ledger_id, uuid_msb, uuid_lsb = _ledgers(matrix)
    order = np.lexsort((uuid_lsb, uuid_msb, ledger_id, topic))
    numbers, starts = np.unique(topic[order], return_index=True)
    ends = np.append(starts, len(order))[1:]
    for number, start, end in zip(numbers.tolist(), starts, ends, strict=True):
        rows = order[start:end]
        yield number, InUseLedgers(ledger_type, ledger_id[rows], uuid_msb[rows], uuid_lsb[rows])


def _widened(chunks: Iterable[Keys]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """Return the bytes as u8[n, 29], with zeros for a missing UUID."""
    matrices = [bytes_of(chunk.astype("S29")) for chunk in chunks]
    return np.concatenate([np.empty((0, 29), np.uint8), *matrices])


def _ledgers(matrix: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> tuple[U64, U64, U64]:
    """Return (ids, upper halves of the UUIDs, lower halves)."""
    return _column(matrix, 5, 13, ">u8"), _column(matrix, 13, 21, ">u8"), _column(matrix, 21, 29, ">u8")


def _column(matrix: np.ndarray[tuple[int, int], np.dtype[np.uint8]], start: int, end: int, kind: str) -> U64:
    return np.ascontiguousarray(matrix[:, start:end]).view(kind).reshape(-1).astype(np.uint64)
