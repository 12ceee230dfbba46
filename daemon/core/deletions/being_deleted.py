"""Ledgers that cannot be said to be in use any more: something of them is, or may have been, deleted.

Owns: finding them by the rows in which an owner names ledgers.
Does not own: when that is so of a deletion (`life.too_late_to_use`), and what is in use (`in_use`).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from daemon.core.deletions.sorted_keys import Mask
from storage_backends.formats.deletions import Deletion, InUseLedgers


class BeingDeleted:
    """`deletion_of`: the deletion of an id."""

    def __init__(self, deletion_of: Callable[[int], Deletion]) -> None:
        self._deletion_of = deletion_of
        # By ledger id; a ledger id has one deletion, or few.
        self._ids: dict[int, int | frozenset[int]] = {}

    def add(self, deletion: Deletion) -> None:
        ledger_id = deletion.pending_delete.ledger_id
        there = self._ids.get(ledger_id)
        if there is None:
            self._ids[ledger_id] = deletion.deletion_id
        else:
            self._ids[ledger_id] = _set(there) | {deletion.deletion_id}

    def remove(self, deletion: Deletion) -> None:
        ledger_id = deletion.pending_delete.ledger_id
        left = _set(self._ids[ledger_id]) - {deletion.deletion_id}
        if left:
            self._ids[ledger_id] = left
        else:
            del self._ids[ledger_id]

    def mask(self, topic: str, ledgers: InUseLedgers) -> Mask:
        """Which of the topic's ledgers are being deleted, whatever component the deletion names."""
        mask = np.zeros(len(ledgers), np.bool_)
        if not self._ids:
            return mask
        for row, ledger_id in enumerate(ledgers.ledger_id.tolist()):
            ids = self._ids.get(ledger_id)
            if ids is not None:
                uuid = (int(ledgers.uuid_msb[row]), int(ledgers.uuid_lsb[row]))
                mask[row] = any(self._is(each, topic, ledgers, uuid) for each in _set(ids))
        return mask

    def _is(self, deletion_id: int, topic: str, ledgers: InUseLedgers, uuid: tuple[int, int]) -> bool:
        deletion = self._deletion_of(deletion_id)
        delete = deletion.pending_delete
        if deletion.topic != topic or delete.ledger_type is not ledgers.ledger_type:
            return False
        context = delete.offload_context
        return uuid == (0, 0) or context is None or uuid == (context.uuid_msb, context.uuid_lsb)


def _set(ids: int | frozenset[int]) -> frozenset[int]:
    return frozenset((ids,)) if isinstance(ids, int) else ids
