"""Keeps deletions in memory, each in one byte string, and finds them by id and by ledger.

`ledger_deletions` alone uses it; it stands apart because it is the form in memory, without the states. Common
properties (topic, component, driver ...) are kept once; the rest is numbers.

A pending deletion of an offloaded ledger takes some 350 bytes, including all indexes, and 320 more if no other one has
its kind (each topic and cursor is one). It takes some 170 more and its text after a failed attempt that may have
deleted something. 200,000 take 70 MB, or 135 MB if each has a topic of its own.
"""

from __future__ import annotations

import array
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from daemon.core.deletions.sorted_keys import Mask
from daemon.errors import InvariantViolated
from storage_backends.formats.deletion_format import (
    Deletion,
    DeletionOutcome,
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    MadeWhenRead,
    OffloadContext,
    PendingDelete,
)
from storage_backends.formats.row_columns import U64

# Kind, outcome, flags, failures, ledger, UUID, recorded, next attempt, ended; the text follows them.
_NUMBERS = struct.Struct("<IBBIQQQQQQ")
_KIND, _LEDGER_ID = slice(0, 4), slice(10, 18)
_BEGUN, _MAYBE_DELETED, _BY_SWEEPER, _HELD = 1, 2, 4, 8

_COMPONENTS = {int(component): component for component in LedgerComponent}
_TYPES = {int(ledger_type): ledger_type for ledger_type in LedgerType}
_OUTCOMES = {int(outcome): outcome for outcome in DeletionOutcome}


# (name, metadata)
Driver: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


class DeletionKind(NamedTuple):
    """The properties that a deletion shares with others. `driver` is None without an offload context."""

    topic: str
    component: int
    ledger_type: int
    cursor_name: str | None
    schema_id: str | None
    driver: Driver | None


def kind_of(topic: str, delete: PendingDelete) -> DeletionKind:
    context = delete.offload_context
    driver = None if context is None else (context.driver_name, context.driver_metadata)
    return DeletionKind(topic, delete.component, delete.ledger_type, delete.cursor_name, delete.schema_id, driver)


class FrozenDeletions:
    """The deletions as they were at one moment. Finding any is for a thread."""

    def __init__(self, rows: Mapping[int, bytes], kinds: Sequence[DeletionKind | None]) -> None:
        self._rows = rows
        self._kinds = kinds

    def all(self) -> MadeWhenRead[int]:
        """Return all deletions, ascending by id."""
        return MadeWhenRead(sorted(self._rows), self._made)

    def of_topic(self, topic: str) -> Iterator[Deletion]:
        """Yield the deletions of one topic, without building the others."""
        wanted = {number for number, kind in enumerate(self._kinds) if kind is not None and kind.topic == topic}
        return (self._made(each) for each, row in self._rows.items() if wanted and _kind_number(row) in wanted)

    def _made(self, deletion_id: int) -> Deletion:
        return _deletion(deletion_id, self._rows[deletion_id], self._kinds)


class KeptDeletions:
    def __init__(self) -> None:
        self._rows: dict[int, bytes] = {}
        self._kinds = _Kinds()

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, deletion_id: int) -> bool:
        return deletion_id in self._rows

    def __getitem__(self, deletion_id: int) -> Deletion:
        """Return the deletion with this id. Raise KeyError if it is not kept."""
        return _deletion(deletion_id, self._rows[deletion_id], self._kinds.kinds)

    def kind_number(self, kind: DeletionKind) -> int | None:
        """Return the number of a kind, or None if no deletion has it."""
        return self._kinds.numbers.get(kind)

    def kind(self, number: int) -> DeletionKind:
        """Return the kind with this number, which a deletion has."""
        return _of(self._kinds.kinds, number)

    def kind_number_of(self, deletion_id: int) -> int:
        """Return the number of the deletion's kind. Raise KeyError if the deletion is not kept."""
        return _kind_number(self._rows[deletion_id])

    def ledger_id_of(self, deletion_id: int) -> int:
        """Return the id of the ledger to be deleted. Raise KeyError if the deletion is not kept."""
        return int.from_bytes(self._rows[deletion_id][_LEDGER_ID], "little")

    def add(self, deletion: Deletion) -> int:
        """Add a deletion; return the number of its kind."""
        number = self._kinds.use(kind_of(deletion.topic, deletion.pending_delete))
        self._rows[deletion.deletion_id] = _row(number, deletion)
        return number

    def change(self, deletion: Deletion) -> None:
        """Replace a kept deletion by one in another state."""
        self._rows[deletion.deletion_id] = _row(self.kind_number_of(deletion.deletion_id), deletion)

    def remove(self, deletion_id: int) -> None:
        """Remove a deletion. Raise KeyError if it is not kept."""
        self._kinds.release(self.kind_number_of(deletion_id))
        del self._rows[deletion_id]

    def freeze(self) -> FrozenDeletions:
        """Return the deletions as they are now, for a thread; copies pointers only."""
        return FrozenDeletions(self._rows.copy(), self._kinds.kinds.copy())


class _Kinds:
    """Kinds by number, as long as a deletion has them."""

    def __init__(self) -> None:
        self.numbers: dict[DeletionKind, int] = {}
        self.kinds: list[DeletionKind | None] = []
        # Number of deletions of each kind
        self._uses = array.array("Q")
        self._free: list[int] = []
        # Drivers are few, and long: equal ones are one object.
        self._drivers: dict[Driver, tuple[Driver, int]] = {}

    def use(self, kind: DeletionKind) -> int:
        """Return the number of a kind, and count one more deletion for it."""
        number = self.numbers.get(kind)
        if number is None:
            number = self._new(kind)
        self._uses[number] += 1
        return number

    def release(self, number: int) -> None:
        self._uses[number] -= 1
        if self._uses[number]:
            return
        kind, self.kinds[number] = _of(self.kinds, number), None
        del self.numbers[kind]
        self._free.append(number)
        if kind.driver is not None:
            driver, uses = self._drivers.pop(kind.driver)
            if uses > 1:
                self._drivers[driver] = driver, uses - 1

    def _new(self, kind: DeletionKind) -> int:
        if kind.driver is not None:
            driver, uses = self._drivers.get(kind.driver, (kind.driver, 0))
            self._drivers[driver] = driver, uses + 1
            kind = kind._replace(driver=driver)
        if self._free:
            number = self._free.pop()
            self.kinds[number] = kind
        else:
            number = len(self.kinds)
            self.kinds.append(kind)
            self._uses.append(0)
        self.numbers[kind] = number
        return number


def _row(kind: int, deletion: Deletion) -> bytes:
    delete = deletion.pending_delete
    context = delete.offload_context
    flags = (
        (_BEGUN if deletion.begun else 0)
        | (_MAYBE_DELETED if deletion.maybe_deleted else 0)
        | (_BY_SWEEPER if deletion.by_sweeper else 0)
        | (_HELD if deletion.held else 0)
    )
    numbers = _NUMBERS.pack(
        kind,
        deletion.outcome,
        flags,
        deletion.failures,
        delete.ledger_id,
        0 if context is None else context.uuid_msb,
        0 if context is None else context.uuid_lsb,
        deletion.recorded_at_ms,
        deletion.next_attempt_at_ms,
        deletion.ended_at_ms,
    )
    return numbers + deletion.text.encode() if deletion.text else numbers


def _kind_number(row: bytes) -> int:
    return int.from_bytes(row[_KIND], "little")


def _of(kinds: Sequence[DeletionKind | None], number: int) -> DeletionKind:
    kind = kinds[number]
    if kind is None:
        raise InvariantViolated(f"no deletion has kind {number}")
    return kind


def _deletion(deletion_id: int, row: bytes, kinds: Sequence[DeletionKind | None]) -> Deletion:
    number, outcome, flags, failures, ledger_id, msb, lsb, recorded, next_attempt, ended = _NUMBERS.unpack_from(row)
    kind = _of(kinds, number)
    return Deletion(
        deletion_id,
        kind.topic,
        PendingDelete(
            _COMPONENTS[kind.component],
            _TYPES[kind.ledger_type],
            ledger_id,
            kind.cursor_name,
            kind.schema_id,
            None if kind.driver is None else OffloadContext(msb, lsb, *kind.driver),
        ),
        recorded,
        bool(flags & _BY_SWEEPER),
        _OUTCOMES[outcome],
        bool(flags & _BEGUN),
        bool(flags & _MAYBE_DELETED),
        failures,
        next_attempt,
        ended,
        row[_NUMBERS.size :].decode(),
        bool(flags & _HELD),
    )


class DeletionsByLedger:
    """Deletions found by ledger. `deletion_of` returns the deletion with an id."""

    def __init__(self, deletion_of: Callable[[int], Deletion]) -> None:
        self._deletion_of = deletion_of
        # Ledger id -> its deletion; several are rare, unless a client forges records.
        self._ids: dict[int, int | set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._ids)

    def add(self, deletion: Deletion) -> None:
        ledger_id = deletion.pending_delete.ledger_id
        there = self._ids.get(ledger_id)
        if there is None:
            self._ids[ledger_id] = deletion.deletion_id
        elif isinstance(there, set):
            there.add(deletion.deletion_id)
        else:
            self._ids[ledger_id] = {there, deletion.deletion_id}

    def remove(self, deletion: Deletion) -> None:
        ledger_id = deletion.pending_delete.ledger_id
        there = self._ids[ledger_id]
        if isinstance(there, set) and len(there) > 1:
            there.remove(deletion.deletion_id)
        else:
            del self._ids[ledger_id]

    def mask(self, topic: str, ledgers: InUseLedgers) -> Mask:
        """Return the mask of the topic's ledgers that have a deletion, whatever its component.

        A ledger that is named without a UUID matches any UUID.
        """
        mask = np.zeros(len(ledgers), np.bool_)
        if not self._ids:
            return mask
        for row, ledger_id in enumerate(ledgers.ledger_id.tolist()):
            if ledger_id in self._ids:
                uuid = (int(ledgers.uuid_msb[row]), int(ledgers.uuid_lsb[row]))
                mask[row] = any(_has_uuid(each, uuid) for each in self._of(topic, ledgers.ledger_type, ledger_id))
        return mask

    def of(self, topic: str, ledger_type: LedgerType, ledger_id: U64) -> list[Deletion]:
        """Return all deletions of the topic's ledgers with these ids, under any UUID."""
        named = dict.fromkeys(ledger_id.tolist())
        return [deletion for each in named if each in self._ids for deletion in self._of(topic, ledger_type, each)]

    def _of(self, topic: str, ledger_type: LedgerType, ledger_id: int) -> Iterator[Deletion]:
        ids = self._ids[ledger_id]
        for deletion_id in sorted(ids) if isinstance(ids, set) else (ids,):
            deletion = self._deletion_of(deletion_id)
            if deletion.topic == topic and deletion.pending_delete.ledger_type is ledger_type:
                yield deletion


def _has_uuid(deletion: Deletion, uuid: tuple[int, int]) -> bool:
    context = deletion.pending_delete.offload_context
    return uuid == (0, 0) or context is None or uuid == (context.uuid_msb, context.uuid_lsb)


_LEDGER = struct.Struct(">Q")
_OBJECT = struct.Struct(">QQQ")


class RecordedLedgers:
    """The ledgers that have a record: pending, a dead letter, or held.

    It keeps equal records from being made twice, and sweeps off recorded ledgers. `kind_of` returns the kind number
    (`DeletionKind`) of an id. Records of one ledger and UUID differ in kind; hardly any ledger has more than one.
    """

    def __init__(self, kind_of: Callable[[int], int]) -> None:
        self._kind_of = kind_of
        # The id of the only record, or ids by kind
        self._records: dict[bytes, int | dict[int, int]] = {}

    def find(self, delete: PendingDelete, kind: int) -> int | None:
        """Return the id of the equal record, or None."""
        there = self._records.get(_key(delete))
        if isinstance(there, dict):
            return there.get(kind)
        return there if there is not None and self._kind_of(there) == kind else None

    def has(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Return whether the offloaded ledger has a record, of any topic."""
        return _OBJECT.pack(ledger_id, uuid_msb, uuid_lsb) in self._records

    def add(self, delete: PendingDelete, kind: int, deletion_id: int) -> None:
        """Add a record that does not exist yet."""
        key = _key(delete)
        there = self._records.get(key)
        if there is None:
            self._records[key] = deletion_id
        elif isinstance(there, dict):
            there[kind] = deletion_id
        else:
            self._records[key] = {self._kind_of(there): there, kind: deletion_id}

    def remove(self, delete: PendingDelete, kind: int) -> None:
        """Remove a record that exists."""
        key = _key(delete)
        there = self._records[key]
        if isinstance(there, dict) and len(there) > 1:
            del there[kind]
        else:
            del self._records[key]


def _key(delete: PendingDelete) -> bytes:
    context = delete.offload_context
    if context is None:
        return _LEDGER.pack(delete.ledger_id)
    return _OBJECT.pack(delete.ledger_id, context.uuid_msb, context.uuid_lsb)
