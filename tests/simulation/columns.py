"""Positions and rows as the calls of a daemon take and give them, and as the oracle has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from daemon.engine.calls import AddBatch, EntryRanges, HeldPositions
from storage_backends.formats.rows import U64, Rows
from tests.simulation.oracle import Position


def batch_of(
    positions: Sequence[Position], times: Sequence[int], *, by_delay: bool = False, return_already_due: bool = False
) -> AddBatch:
    """`times`: when each is due, or its delay, in ms."""
    column = np.array(times, np.uint64)
    ledger_id, entry_id = columns_of(positions)
    return AddBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=None if by_delay else column,
        delay_ms=column if by_delay else None,
        key_hash=None,
        return_already_due=return_already_due,
    )


def columns_of(positions: Sequence[Position]) -> tuple[U64, U64]:
    """Ledgers and entries."""
    return (
        np.array([ledger_id for ledger_id, _ in positions], np.uint64),
        np.array([entry_id for _, entry_id in positions], np.uint64),
    )


def rows_of(rows: Rows) -> list[tuple[int, int, int]]:
    """(ledger, entry, deliver_at_ms) of each row."""
    columns = (rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist())
    return list(zip(*columns, strict=True))


def entries_of(ranges: EntryRanges) -> list[Position]:
    columns = (ranges.ledger_id.tolist(), ranges.first_entry_id.tolist(), ranges.last_entry_id.tolist())
    return [
        (ledger_id, entry_id)
        for ledger_id, first, last in zip(*columns, strict=True)
        for entry_id in range(first, last + 1)
    ]


def held_positions(held: dict[Position, int]) -> HeldPositions:
    claims = sorted(held.items())
    return HeldPositions(
        np.array([position[0] for position, _ in claims], np.uint64),
        np.array([position[1] for position, _ in claims], np.uint64),
        np.array([deliver_at_ms for _, deliver_at_ms in claims], np.uint64),
    )
