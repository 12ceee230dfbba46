"""Positions and rows as the calls of a daemon take and give them, and as the oracle has them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from daemon.call_values import HandedOut
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.decisions.claims import HeldPositions
from daemon.core.index.containment import EntryRanges
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import U32, U64, Rows
from storage_backends.formats.schedule_ids import ScheduleIds
from tests.simulation.positions import Position, named, part_of

# In one of so many runs, some rows have schedule ids.
_RUNS_A_RUN_WITH_IDS = 4


def has_ids(seed: int) -> bool:
    """Whether some rows of a run have schedule ids."""
    return seed % _RUNS_A_RUN_WITH_IDS == 1


def batch_of(
    positions: Sequence[Position],
    times: Sequence[int],
    *,
    by_delay: bool = False,
    return_already_due: bool = False,
    key_hash: U32 | None = None,
    schedule_ids: ScheduleIds | None = None,
) -> AddBatch:
    """`times`: when each is due, or its delay, in ms."""
    column = np.array(times, np.uint64)
    ledger_id, entry_id = columns_of(positions)
    return AddBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=None if by_delay else column,
        delay_ms=column if by_delay else None,
        key_hash=key_hash,
        return_already_due=return_already_due,
        schedule_ids=schedule_ids,
    )


def ids_of(listed: Sequence[bytes]) -> ScheduleIds | None:
    """The column of these ids, if one is not empty."""
    lengths = np.array(list(map(len, listed)), np.uint64)
    return ScheduleIds.of_piece(lengths, b"".join(listed)) if any(listed) else None


def batch_by_level(
    positions: Sequence[Position], levels: Sequence[int], schedule_ids: ScheduleIds | None = None
) -> AddBatch:
    """The same, each due by a delay level."""
    ledger_id, entry_id = columns_of(positions)
    return AddBatch(
        ledger_id=ledger_id,
        entry_id=entry_id,
        deliver_at_ms=None,
        delay_ms=None,
        key_hash=None,
        return_already_due=False,
        delay_level=np.array(levels, np.int32),
        schedule_ids=schedule_ids,
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


def handed_of(handed_out: HandedOut, subscription_id: int) -> list[tuple[Position, int, int]]:
    """(ledger and entry, or a batch part; deliver_at_ms; redelivery count) of each row."""
    rows = rows_of(handed_out.rows)
    counts = [0] * len(rows) if handed_out.redelivery_count is None else handed_out.redelivery_count.tolist()
    return [
        (position, deliver_at_ms, count)
        for position, (_, _, deliver_at_ms), count in zip(
            positions_of(handed_out.rows, handed_out.batch_index, subscription_id), rows, counts, strict=True
        )
    ]


def positions_of(rows: Rows, batch_index: U32 | None, subscription_id: int) -> list[Position]:
    """Ledger and entry of each row, or the batch part of the subscription."""
    positions: list[Position] = [(ledger_id, entry_id) for ledger_id, entry_id, _ in rows_of(rows)]
    if batch_index is None:
        return positions
    return [
        position if number == NO_BATCH_INDEX else part_of(position, number, subscription_id)
        for position, number in zip(positions, batch_index.tolist(), strict=True)
    ]


def entries_of(ranges: EntryRanges) -> list[Position]:
    columns = (ranges.ledger_id.tolist(), ranges.first_entry_id.tolist(), ranges.last_entry_id.tolist())
    return [
        (ledger_id, entry_id)
        for ledger_id, first, last in zip(*columns, strict=True)
        for entry_id in range(first, last + 1)
    ]


def held_positions(claims: Iterable[tuple[Position, int]], counts: Iterable[int] | None = None) -> HeldPositions:
    """Positions with their times, in this order. `counts`: which hand-outs of them; None: any."""
    claims = list(claims)
    names = [named(position) for position, _ in claims]
    batch_index = np.array([number for _, number in names], np.uint32)
    ledger_id, entry_id = columns_of([entry for entry, _ in names])
    deliver_at_ms = np.array([time for _, time in claims], np.uint64)
    whole = bool((batch_index == NO_BATCH_INDEX).all())
    redelivery_count = None if counts is None else np.array(list(counts), np.uint32)
    return HeldPositions(ledger_id, entry_id, deliver_at_ms, None if whole else batch_index, redelivery_count)
