"""Positions as the truth has them: of every index of a topic in one dict.

Owns: the form, and what a position says of its index, its entry and its place in a batch.
Does not own: rows (`oracle`).
"""

from __future__ import annotations

import numpy as np

from storage_backends.formats import index_ids

# Of a row: ledger and entry, and the number of its index behind them unless that is the shared one. In an index of
# batch parts the entry is as it is there.
Position = tuple[int, ...]


def in_index(position: Position, index: int) -> Position:
    return (*position[:2], index) if index else position[:2]


def index_of(position: Position) -> int:
    return position[2] if position[2:] else 0


def owner_of(position: Position) -> int:
    """The subscription whose index it is in; 0: the shared one."""
    return index_ids.subscription_of(index_of(position))


def is_part(position: Position) -> bool:
    """Whether it is one message of its entry."""
    return index_ids.is_of_batch_parts(index_of(position))


def part_of(entry: Position, batch_index: int, subscription_id: int) -> Position:
    """A message of an entry, for one subscription."""
    number = np.array([entry[1]], np.uint64), np.array([batch_index], np.uint32)
    return entry[0], int(index_ids.part_entry_id(*number)[0]), index_ids.batch_parts_of(subscription_id)


def named(position: Position) -> tuple[Position, int]:
    """(ledger and entry, batch index) as clients name it."""
    if not is_part(position):
        return position[:2], index_ids.NO_BATCH_INDEX
    entry_id, batch_index = index_ids.of_part(np.array([position[1]], np.uint64))
    return (position[0], int(entry_id[0])), int(batch_index[0])


def entry_of(position: Position) -> Position:
    """Ledger and entry as clients know them."""
    return named(position)[0]
