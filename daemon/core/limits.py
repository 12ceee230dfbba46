"""Checks requests against their limits, with nothing but the request, the limits and the time.

Owns: the limits of requests and the checks that need nothing but the request, the limits and the time.
Does not own: the shape of columns (`daemon.grpc_services.row_requests`) and where the numbers come from
(`daemon.settings`).
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from daemon.errors import DelayTooLong, InvalidArgument
from storage_backends.formats.index_ids import BATCH_INDEX_MAX, BATCHED_ENTRY_ID_MAX, NO_BATCH_INDEX
from storage_backends.formats.row_columns import U32, U64

PAGE_ROWS_DEFAULT = 1_000
PAGE_ROWS_MAX = 10_000
# A present-day time given in seconds is at least the first (a day in 2001). A time in ms is at least the second if it
# is in 2001 or later.
SECONDS_FROM = 10**9
SECONDS_BELOW = 978_307_200_000
# Odd multipliers that spread positions over 64 bits, so that two of them rarely collide.
_ODD = np.uint64(0x9E3779B97F4A7C15)
_ANOTHER_ODD = np.uint64(0xC2B2AE3D27D4EB4F)

Mask = npt.NDArray[np.bool_]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestLimits:
    """The limits of one request. A row may be due at most `delay_max_ms` ahead of now."""

    rows_max: int
    topic_max_bytes: int
    subscription_max_bytes: int
    subscriptions_max: int
    delay_max_ms: int


@dataclasses.dataclass(frozen=True, slots=True)
class BacklogLimits:
    """The limits on what one subscription keeps that no add has brought.

    `nacked_rows_max` is for negatively acknowledged rows outside the shared index.
    """

    nacked_rows_max: int = 1 << 62
    dead_letters_max: int = 1 << 62


NO_BACKLOG_LIMITS = BacklogLimits()


def check_name(field: str, name: str, max_bytes: int) -> None:
    """Raise InvalidArgument for a name that is empty or too long in UTF-8."""
    size_bytes = len(name.encode())
    if not 1 <= size_bytes <= max_bytes:
        raise InvalidArgument(f"{field} has {size_bytes} bytes in UTF-8; it must have 1 to {max_bytes}")


def page_rows(page_size: int) -> int:
    """Return how many rows a page has. Raise InvalidArgument if the size is out of range."""
    if not 0 <= page_size <= PAGE_ROWS_MAX:
        raise InvalidArgument(f"page_size is {page_size}; it must be 0 to {PAGE_ROWS_MAX}")
    return page_size or PAGE_ROWS_DEFAULT


def check_rows(field: str, rows: int, rows_max: int) -> None:
    """Raise InvalidArgument if a request has no rows or too many."""
    if not 1 <= rows <= rows_max:
        raise rows_refused(field, rows, rows_max)


def rows_refused(field: str, rows: int, rows_max: int) -> InvalidArgument:
    """Return the refusal of a request that has no rows or too many."""
    return InvalidArgument(f"{field} has {rows} rows; a request must have 1 to {rows_max}")


def check_ledgers(ledgers: tuple[int, int] | None) -> None:
    """Raise InvalidArgument for a range of ledgers (first, last) that ends before it begins."""
    if ledgers is not None and ledgers[1] < ledgers[0]:
        raise InvalidArgument(f"last_ledger_id is {ledgers[1]}, before first_ledger_id, which is {ledgers[0]}")


def check_copies(field: str, rows: int, copies: int, rows_max: int) -> None:
    """Raise InvalidArgument if the rows, each stored `copies` times, are too many; one row always passes."""
    most = max(1, rows_max // max(1, copies))
    if rows > most:
        raise InvalidArgument(
            f"{field} has {rows} rows, each for {copies} subscriptions that share no index; a request of this topic "
            f"may have {most}, since it may store {rows_max}"
        )


def check_distinct(ledger_id: U64, entry_id: U64, batch_index: U32 | None = None) -> None:
    """Raise InvalidArgument if a position is named twice; a whole entry and a message in it are distinct."""
    mixed = ledger_id * _ODD + entry_id
    if batch_index is not None:
        mixed += batch_index * _ANOTHER_ODD
    mixed.sort()
    if (mixed[1:] != mixed[:-1]).all():
        return
    # Two positions collided, or one is named twice.
    columns = [ledger_id, entry_id] if batch_index is None else [ledger_id, entry_id, batch_index.astype(np.uint64)]
    order = np.lexsort(columns[::-1])
    same = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in columns])
    if same.any():
        place = int(same.argmax())
        first, again = order[place], order[place + 1]
        position = ", ".join(str(column[first]) for column in columns)
        raise InvalidArgument(
            f"entry_id[{again}]: position ({position}) is that of entry_id[{first}], too; a request names a position "
            "once"
        )


def check_batch_index(entry_id: U64, batch_index: U32 | None) -> None:
    """Raise InvalidArgument for a message of a batch that cannot be named."""
    if batch_index is None:
        return
    parts = batch_index != NO_BATCH_INDEX
    beyond = np.flatnonzero(parts & (batch_index > BATCH_INDEX_MAX))
    if len(beyond):
        row = int(beyond[0])
        raise InvalidArgument(
            f"batch_index[{row}] is {batch_index[row]}; it may be at most {BATCH_INDEX_MAX}, or {NO_BATCH_INDEX} for "
            "the entry as a whole"
        )
    beyond = np.flatnonzero(parts & (entry_id > BATCHED_ENTRY_ID_MAX))
    if len(beyond):
        row = int(beyond[0])
        raise InvalidArgument(
            f"entry_id[{row}] is {entry_id[row]}, and batch_index[{row}] is {batch_index[row]}; an entry of which a "
            f"message is named may be at most {BATCHED_ENTRY_ID_MAX}"
        )


def absolute_times(deliver_at_ms: U64 | None, delay_ms: U64 | None, *, now_ms: int, delay_max_ms: int) -> U64:
    """Return the absolute times of a request that gives one of the two columns, u64[n] (Unix ms).

    Raises DelayTooLong if a row is further ahead than the limit, and InvalidArgument if a time can only be meant in
    seconds.
    """
    if delay_ms is not None:
        check_delay("delay_ms", delay_ms, delay_max_ms)
        return delay_ms + np.uint64(now_ms)
    if deliver_at_ms is None:
        raise InvalidArgument("deliver_at_ms and delay_ms are both missing; give one of them")
    _check_delay("deliver_at_ms", deliver_at_ms, now_ms + delay_max_ms, delay_max_ms)
    _check_unit("deliver_at_ms", deliver_at_ms, now_ms)
    return deliver_at_ms


def _check_unit(field: str, deliver_at_ms: U64, now_ms: int) -> None:
    """Raise InvalidArgument for a present-day time given in seconds.

    In ms it is long past, and would mean "at once". Smaller times are taken to mean that.
    """
    seconds = in_seconds(deliver_at_ms, now_ms)
    if seconds is not None:
        row = int(seconds.argmax())
        raise InvalidArgument(
            f"{field}[{row}] is {deliver_at_ms[row]}, a time in seconds; give Unix time in ms: a thousand times as much"
        )


def in_seconds(deliver_at_ms: U64, now_ms: int) -> Mask | None:
    """Return the mask of times that can only be meant in seconds, or None if there is none."""
    if now_ms < SECONDS_BELOW or int(deliver_at_ms.min()) >= SECONDS_BELOW:
        return None
    seconds = (deliver_at_ms >= np.uint64(SECONDS_FROM)) & (deliver_at_ms < np.uint64(SECONDS_BELOW))
    return seconds if seconds.any() else None


def above(column: U64, allowed: int) -> Mask | None:
    """Return the mask of values above the allowed one, or None if there is none."""
    return column > np.uint64(allowed) if int(column.max()) > allowed else None


def check_delay(field: str, delay_ms: U64, delay_max_ms: int) -> None:
    """Raise DelayTooLong if a delay is above the limit."""
    _check_delay(field, delay_ms, delay_max_ms, delay_max_ms)


def _check_delay(field: str, column: U64, allowed: int, delay_max_ms: int) -> None:
    if above(column, allowed) is not None:
        row = int(column.argmax())
        raise DelayTooLong(
            f"{field}[{row}] is {column[row]}; the largest delay is {delay_max_ms} ms, so it may be at most {allowed}"
        )
