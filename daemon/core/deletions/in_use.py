"""What the owners of ledgers say is in use, of all topics of a shard.

Owns: which ledger of which topic is in use, and of which topics anything was ever said.
Does not own: for which ledgers that comes too late (`being_deleted`), and who asks.

A ledger of a topic has a type, an id, and a UUID or none. One that is in use without a UUID is so under whatever UUID,
and so is one with a UUID for a deletion that has none. Rows are kept in order twice: by topic, for the topic's
deletions, and, of the offloaded ones, by ledger, for a sweep, which does not know the topic of an object. Of each
order those without a UUID have keys of their own, which are shorter.

A ledger takes 13 bytes, with a UUID 29; an offloaded one 25, with a UUID 57; chunks that are not full take up to
twice as much. A topic takes some 150 bytes and its name; topics are not forgotten.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from daemon.core.deletions.sorted_keys import Keys, Mask, SortedKeys, ascending, bytes_of, contained, joined, moved
from storage_backends.formats.deletions import (
    InUseChange,
    InUseLedgers,
    LedgerType,
    PendingDelete,
    TopicInUse,
)
from storage_backends.formats.rows import U64

# Type, number of the topic, ledger[, UUID].
_OF_TOPIC = struct.Struct(">BI")
_OF_LEDGER = struct.Struct(">BIQ")
_UUID = struct.Struct(">QQ")
_LEDGER = struct.Struct(">Q")
_TOPIC = slice(1, 5)
_FROM_LEDGER = slice(5, None)


class InUse:
    def __init__(self) -> None:
        self._topics: dict[str, int] = {}
        # By topic: (type, topic, ledger), and with the UUID behind.
        self._plain = SortedKeys(13)
        self._named = SortedKeys(29)
        # Offloaded ones, by ledger: (ledger, topic), (ledger, UUID, topic).
        self._plain_objects = SortedKeys(12)
        self._named_objects = SortedKeys(28)

    @property
    def ledgers(self) -> int:
        """How many are in use."""
        return len(self._plain) + len(self._named)

    @property
    def topics(self) -> int:
        """Of how many topics anything was ever said."""
        return len(self._topics)

    def knows(self, topic: str) -> bool:
        """Whether anything was ever said of the topic, be it that nothing is in use."""
        return topic in self._topics

    def is_in_use(self, topic: str, delete: PendingDelete) -> bool:
        """Whether the ledger that is to be deleted is in use, whatever component the deletion names."""
        number = self._topics.get(topic)
        if number is None:
            return False
        ledger = _OF_LEDGER.pack(delete.ledger_type, number, delete.ledger_id)
        context = delete.offload_context
        uuid = b"" if context is None else _UUID.pack(context.uuid_msb, context.uuid_lsb)
        return self._plain.has(ledger) or self._named.has(ledger + uuid)

    def holds(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Whether the offloaded ledger is in use by any topic of the shard."""
        ledger = _LEDGER.pack(ledger_id)
        return self._plain_objects.has(ledger) or self._named_objects.has(ledger + _UUID.pack(uuid_msb, uuid_lsb))

    def change(self, topic: str, change: InUseChange, ledgers: InUseLedgers) -> int:
        """What an owner says of ledgers of the topic, each of them in time. How many that changes: they were not in use
        and are, or they were and are no longer.

        FORGET of a ledger without a UUID forgets it under whatever UUID; with one, under that one.
        """
        rows = _rows(self._number(topic), ledgers)
        if change is InUseChange.RECORD:
            return self._add(rows)
        if change is InUseChange.FORGET:
            return self._remove(_Rows(rows.plain, self._under_whatever_uuid(rows)))
        prefix = np.array([_OF_TOPIC.pack(ledgers.ledger_type, self._number(topic))], f"S{_OF_TOPIC.size}")
        were = _Rows(self._plain.beginning_with(prefix), self._named.beginning_with(prefix))
        gone = _Rows(_without(were.plain, rows.plain), _without(were.named, rows.named))
        return self._remove(gone) + self._add(rows)

    def freeze(self) -> FrozenInUse:
        """As it is now: copies of pointers."""
        return FrozenInUse(tuple(self._topics), self._plain.chunks(), self._named.chunks())

    @classmethod
    def restored(cls, state: Sequence[TopicInUse]) -> InUse:
        made = cls()
        for topic in state:
            made._number(topic.topic)
        parts = [_rows(made._number(topic.topic), ledgers) for topic in state for ledgers in topic.ledgers]
        if parts:
            plain = np.concatenate([part.plain for part in parts])
            named = np.concatenate([part.named for part in parts])
            made._add(_Rows(ascending(plain), ascending(named)))
        return made

    def _number(self, topic: str) -> int:
        return self._topics.setdefault(topic, len(self._topics))

    def _under_whatever_uuid(self, rows: _Rows) -> Keys:
        if not len(self._named):
            return rows.named
        return ascending(np.concatenate([rows.named, self._named.beginning_with(rows.plain)]))

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
    """What was in use at one moment."""

    topics: tuple[str, ...]
    plain: tuple[Keys, ...]
    named: tuple[Keys, ...]

    def state(self) -> tuple[TopicInUse, ...]:
        """O(n): for a thread."""
        of_topics: dict[int, list[InUseLedgers]] = {}
        for ledger_type in LedgerType:
            for number, ledgers in _by_topic(ledger_type, self.plain, self.named):
                of_topics.setdefault(number, []).append(ledgers)
        return tuple(TopicInUse(topic, tuple(of_topics.get(number, ()))) for number, topic in enumerate(self.topics))


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Rows:
    """Keys by topic, ascending: of ledgers without a UUID and with one."""

    plain: Keys
    named: Keys


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


def _without(keys: Keys, others: Keys) -> Keys:
    return keys[~contained(keys, others)]


def _objects(rows: Keys) -> Keys:
    """Of the keys by topic, those of offloaded ledgers, by ledger."""
    offloaded = rows[bytes_of(rows)[:, 0] == LedgerType.OFFLOADED_LEDGER]
    return ascending(moved(offloaded, [_FROM_LEDGER, _TOPIC]))


def _by_topic(
    ledger_type: LedgerType, plain: Iterable[Keys], named: Iterable[Keys]
) -> Iterable[tuple[int, InUseLedgers]]:
    """The ledgers of one type of each topic that has any, by its number; ascending by ledger and UUID."""
    matrix = np.concatenate([_widened(plain), _widened(named)])
    matrix = matrix[matrix[:, 0] == ledger_type]
    topic = _column(matrix, 1, 5, ">u4")
    ledger_id, uuid_msb, uuid_lsb = (_column(matrix, start, start + 8, ">u8") for start in (5, 13, 21))
    order = np.lexsort((uuid_lsb, uuid_msb, ledger_id, topic))
    numbers, starts = np.unique(topic[order], return_index=True)
    ends = np.append(starts, len(order))[1:]
    for number, start, end in zip(numbers.tolist(), starts, ends, strict=True):
        rows = order[start:end]
        yield number, InUseLedgers(ledger_type, ledger_id[rows], uuid_msb[rows], uuid_lsb[rows])


def _widened(chunks: Iterable[Keys]) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
    """u8[n, 29]: zeros where there is no UUID."""
    matrices = [bytes_of(chunk.astype("S29")) for chunk in chunks]
    return np.concatenate([np.empty((0, 29), np.uint8), *matrices])


def _column(matrix: np.ndarray[tuple[int, int], np.dtype[np.uint8]], start: int, end: int, kind: str) -> U64:
    return np.ascontiguousarray(matrix[:, start:end]).view(kind).reshape(-1).astype(np.uint64)
