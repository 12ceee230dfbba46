"""Which ledgers have a record: pending, a dead letter, or held.

Owns: finding the record of a ledger, so that the same one is not recorded twice, and a sweep leaves it alone.
Does not own: the records (`kept`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from storage_backends.formats.deletion_format import PendingDelete

_LEDGER = struct.Struct(">Q")
_OBJECT = struct.Struct(">QQQ")


class RecordedLedgers:
    """`kind_of`: the number of the kind (`kept.Kind`) of an id. Records of one ledger and UUID differ in their kind,
    and hardly any ledger has more than one.
    """

    def __init__(self, kind_of: Callable[[int], int]) -> None:
        self._kind_of = kind_of
        # The id of the only one, or ids by kind.
        self._records: dict[bytes, int | dict[int, int]] = {}

    def find(self, delete: PendingDelete, kind: int) -> int | None:
        """The id of the record that is equal."""
        there = self._records.get(_key(delete))
        if isinstance(there, dict):
            return there.get(kind)
        return there if there is not None and self._kind_of(there) == kind else None

    def has(self, uuid_msb: int, uuid_lsb: int, ledger_id: int) -> bool:
        """Whether the offloaded ledger has a record, of any topic."""
        return _OBJECT.pack(ledger_id, uuid_msb, uuid_lsb) in self._records

    def add(self, delete: PendingDelete, kind: int, deletion_id: int) -> None:
        """One that is not there."""
        key = _key(delete)
        there = self._records.get(key)
        if there is None:
            self._records[key] = deletion_id
        elif isinstance(there, dict):
            there[kind] = deletion_id
        else:
            self._records[key] = {self._kind_of(there): there, kind: deletion_id}

    def remove(self, delete: PendingDelete, kind: int) -> None:
        """One that is there."""
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
