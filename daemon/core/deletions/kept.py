"""Deletions as they are kept in memory: by id, each in one byte string.

Owns: the form. What many have in common (topic, component, driver ...) is kept once; the rest is numbers.
Does not own: what state they are in (`life`) and finding them by anything but their id (`ledger_deletions`).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from storage_backends.formats.deletions import (
    Deletion,
    DeletionOutcome,
    LedgerComponent,
    LedgerType,
    OffloadContext,
    PendingDelete,
)

# Kind, outcome, flags, failures, ledger, UUID, recorded, next attempt, ended; the text stands behind.
_NUMBERS = struct.Struct("<IBBIQQQQQQ")
_BEGUN, _MAYBE_DELETED, _BY_SWEEPER = 1, 2, 4

_COMPONENTS = {int(component): component for component in LedgerComponent}
_TYPES = {int(ledger_type): ledger_type for ledger_type in LedgerType}
_OUTCOMES = {int(outcome): outcome for outcome in DeletionOutcome}


class Kind(NamedTuple):
    """What a deletion has in common with others. `driver`: name and metadata; None: it has no offload context."""

    topic: str
    component: int
    ledger_type: int
    cursor_name: str | None
    schema_id: str | None
    driver: tuple[str, tuple[tuple[str, str], ...]] | None


def kind_of(topic: str, delete: PendingDelete) -> Kind:
    context = delete.offload_context
    driver = None if context is None else (context.driver_name, context.driver_metadata)
    return Kind(topic, delete.component, delete.ledger_type, delete.cursor_name, delete.schema_id, driver)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class FrozenDeletions:
    """The deletions as they were at one moment."""

    rows: Mapping[int, bytes]
    kinds: Mapping[int, Kind]

    def all(self) -> Iterator[Deletion]:
        """Ascending by id. O(n): for a thread."""
        for deletion_id in sorted(self.rows):
            yield _deletion(deletion_id, self.rows[deletion_id], self.kinds)


class KeptDeletions:
    def __init__(self) -> None:
        self._rows: dict[int, bytes] = {}
        self._kinds: dict[int, Kind] = {}
        self._numbers: dict[Kind, int] = {}
        # How many deletions have the kind.
        self._uses: dict[int, int] = {}
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, deletion_id: int) -> bool:
        return deletion_id in self._rows

    def __getitem__(self, deletion_id: int) -> Deletion:
        """Raises KeyError."""
        return _deletion(deletion_id, self._rows[deletion_id], self._kinds)

    def kind_number(self, kind: Kind) -> int | None:
        """None: no deletion has it."""
        return self._numbers.get(kind)

    def kind_number_of(self, deletion_id: int) -> int:
        """Raises KeyError."""
        return int.from_bytes(self._rows[deletion_id][:4], "little")

    def add(self, deletion: Deletion) -> int:
        """The number of its kind."""
        kind = kind_of(deletion.topic, deletion.pending_delete)
        number = self._numbers.get(kind)
        if number is None:
            number = self._last_number = self._last_number + 1
            self._numbers[kind], self._kinds[number], self._uses[number] = number, kind, 0
        self._uses[number] += 1
        self._rows[deletion.deletion_id] = _row(number, deletion)
        return number

    def change(self, deletion: Deletion) -> None:
        """The same deletion, in another state."""
        self._rows[deletion.deletion_id] = _row(self.kind_number_of(deletion.deletion_id), deletion)

    def remove(self, deletion_id: int) -> None:
        number = self.kind_number_of(deletion_id)
        del self._rows[deletion_id]
        self._uses[number] -= 1
        if not self._uses[number]:
            del self._uses[number], self._numbers[self._kinds.pop(number)]

    def freeze(self) -> FrozenDeletions:
        """As they are now: copies of pointers."""
        return FrozenDeletions(self._rows.copy(), self._kinds.copy())


def _row(kind: int, deletion: Deletion) -> bytes:
    delete = deletion.pending_delete
    context = delete.offload_context
    flags = (
        (_BEGUN if deletion.begun else 0)
        | (_MAYBE_DELETED if deletion.maybe_deleted else 0)
        | (_BY_SWEEPER if deletion.by_sweeper else 0)
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


def _deletion(deletion_id: int, row: bytes, kinds: Mapping[int, Kind]) -> Deletion:
    number, outcome, flags, failures, ledger_id, msb, lsb, recorded, next_attempt, ended = _NUMBERS.unpack_from(row)
    kind = kinds[number]
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
    )
