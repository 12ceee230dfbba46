"""Batch parts: messages of entries that were negatively acknowledged by themselves, as positions of an index.

Owns: which keys the parts of an entry have, and showing parts as messages of their entries.
Does not own: what numbers they have (`storage_backends.formats.index_ids`), and what becomes of them (`nack_decisions`,
`ack_decisions`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.positions import UNKNOWN_KEY, KeyedRows, keys_of
from storage_backends.formats.index_ids import (
    BATCH_BITS,
    BATCH_INDEX_MAX,
    BATCHED_ENTRY_ID_MAX,
    NO_BATCH_INDEX,
    batch_parts_of,
    of_part,
)
from storage_backends.formats.row_columns import U32, U64, Rows

_PARTS = 1 << BATCH_BITS


def first_keys(index: Index, ledger_id: U64, entry_id: U64) -> U64:
    """The key that the first part of each entry has; UNKNOWN_KEY where neither it nor its neighbours have a row."""
    keys = index.pages.find(ledger_id, entry_id << np.uint64(BATCH_BITS))
    keys[entry_id > np.uint64(BATCHED_ENTRY_ID_MAX)] = UNKNOWN_KEY
    return keys


def keys_from(first: U64) -> BitMap64:
    """Every key that parts of entries may have, by those of their first ones."""
    keys = BitMap64()
    for key in first[first != UNKNOWN_KEY].tolist():
        keys.add_range(key, key + _PARTS)
    return keys


def keys_of_entries(index: Index, ledger_id: U64, entry_id: U64) -> BitMap64:
    """Every key that a part of the entries may have. `index`: of batch parts."""
    return keys_from(first_keys(index, ledger_id, entry_id))


def first_keys_of(parts: BitMap64) -> U64:
    """The keys of the first parts of the entries that parts are of, each once."""
    return np.unique(first_key_of(keys_of(parts)))


def first_key_of(parts: U64) -> U64:
    """The key of the first part of its entry, for each part by its key."""
    first: U64 = parts & ~np.uint64(BATCH_INDEX_MAX)
    return first


def unpacked(keyed: KeyedRows, indexes: Indexes, subscription_id: int) -> tuple[Rows, U32 | None]:
    """Rows of a subscription's indexes, each with the entry id of its entry: (these, u32[n] of batch indexes; None when
    all rows are entries as a whole).
    """
    rows = keyed.rows
    index_id = batch_parts_of(subscription_id)
    if index_id not in indexes:
        return rows, None
    parts = indexes.places.owners(keyed.keys) == np.uint64(index_id)
    if not parts.any():
        return rows, None
    entry_id, batch_index = of_part(rows.entry_id)
    return (
        dataclasses.replace(rows, entry_id=np.where(parts, entry_id, rows.entry_id)),
        np.where(parts, batch_index, np.uint32(NO_BATCH_INDEX)),
    )
