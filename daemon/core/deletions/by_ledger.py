"""Some deletions, found by the ledgers that an owner names.

Owns: the index by ledger id, and which deletion is one of a ledger that is named with or without a UUID.
Does not own: which deletions are here (`ledger_deletions`), and what is in use (`in_use`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from daemon.core.deletions.sorted_keys import Mask
from storage_backends.formats.deletion_format import Deletion, InUseLedgers, LedgerType
from storage_backends.formats.row_columns import U64


class DeletionsByLedger:
    """`deletion_of`: the deletion of an id."""

    def __init__(self, deletion_of: Callable[[int], Deletion]) -> None:
        self._deletion_of = deletion_of
        # By ledger id; it has one deletion, or few. Whoever forges records gives it many.
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
        """Which of the topic's ledgers have one, whatever component it names. A ledger that is named without a UUID has
        one under whatever UUID.
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
        """All of the topic's ledgers of these ids, under whatever UUID."""
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
