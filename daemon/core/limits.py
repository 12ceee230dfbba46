"""What a request may ask for.

Owns: the limits of requests and the checks that need nothing but the request, the limits and the time.
Does not own: the shape of columns (`daemon.grpc_services.columns`) and where the numbers come from (`daemon.settings`).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from daemon.errors import DelayTooLong, InvalidArgument
from storage_backends.formats.rows import U64

# Spreads positions over 64 bits, so that two of them rarely fall together.
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """`delay_max_ms`: how far ahead of now a row may be due."""

    rows_max: int
    topic_max_bytes: int
    subscription_max_bytes: int
    subscriptions_max: int
    delay_max_ms: int


def check_name(field: str, name: str, max_bytes: int) -> None:
    """Raises InvalidArgument for a name that is empty or too long in UTF-8."""
    size_bytes = len(name.encode())
    if not 1 <= size_bytes <= max_bytes:
        raise InvalidArgument(f"{field} has {size_bytes} bytes in UTF-8; it must have 1 to {max_bytes}")


def check_rows(field: str, rows: int, rows_max: int) -> None:
    """Raises InvalidArgument for no rows or too many."""
    if not 1 <= rows <= rows_max:
        raise InvalidArgument(f"{field} has {rows} rows; a request must have 1 to {rows_max}")


def check_copies(field: str, rows: int, copies: int, rows_max: int) -> None:
    """Raises InvalidArgument when rows, each of which is stored so many times, are too many; one row passes always."""
    most = max(1, rows_max // max(1, copies))
    if rows > most:
        raise InvalidArgument(
            f"{field} has {rows} rows, each for {copies} subscriptions that share no index; a request of this topic "
            f"may have {most}, since it may store {rows_max}"
        )


def check_distinct(ledger_id: U64, entry_id: U64) -> None:
    """Raises InvalidArgument when a position is named twice."""
    mixed = np.sort(ledger_id * _ODD + entry_id)
    if (mixed[1:] != mixed[:-1]).all():
        return
    # Two positions, or one that is named twice.
    order = np.lexsort((entry_id, ledger_id))
    ledgers, entries = ledger_id[order], entry_id[order]
    same = np.flatnonzero((ledgers[1:] == ledgers[:-1]) & (entries[1:] == entries[:-1]))
    if len(same):
        place = int(same[0])
        raise InvalidArgument(
            f"entry_id[{order[place + 1]}]: position ({ledgers[place]}, {entries[place]}) is that of "
            f"entry_id[{order[place]}], too; a request names a position once"
        )


def absolute_times(deliver_at_ms: U64 | None, delay_ms: U64 | None, *, now_ms: int, delay_max_ms: int) -> U64:
    """The absolute times of a request that gives one of the two columns, u64[n], Unix ms.

    Raises DelayTooLong when a row is further ahead than the limit.
    """
    if delay_ms is not None:
        _check_delay("delay_ms", delay_ms, int(delay_ms.max()), delay_max_ms, delay_max_ms)
        return delay_ms + np.uint64(now_ms)
    if deliver_at_ms is None:
        raise InvalidArgument("deliver_at_ms and delay_ms are both missing; give one of them")
    _check_delay("deliver_at_ms", deliver_at_ms, int(deliver_at_ms.max()), now_ms + delay_max_ms, delay_max_ms)
    return deliver_at_ms


def _check_delay(field: str, column: U64, largest: int, allowed: int, delay_max_ms: int) -> None:
    if largest > allowed:
        row = int(column.argmax())
        raise DelayTooLong(
            f"{field}[{row}] is {largest}; the largest delay is {delay_max_ms} ms, so it may be at most {allowed}"
        )
