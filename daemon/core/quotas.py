"""Counts the use of each quota and refuses what exceeds it.

Quotas limit the topics, the pending rows of all of them, the rows of a topic that come due in one second, what each
client adds in a second, and what a subscription keeps that no add has brought. `daemon.topic.topic_settings` knows
which limits apply to a topic; `daemon.topic.topic_quotas` starts the exact counts.

A limit of 0 on rows that are added means no limit. Every check precedes any change. Additions count at once; departures
are noticed only at the next exact count, so a count is never too low.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from daemon.errors import QuotaExceeded
from storage_backends.formats.row_columns import U32, U64

SECOND_MS = 1000
# The time in which rows come due and the daemon counts its rows again: about a second.
PENDING_RETRY_MS = 1_000
DUE_RETRY_MS = 1_000
# Clients of one topic whose use is remembered; beyond it, the client that has added nothing for the longest is
# forgotten.
CLIENTS_MAX = 10_000
# Past seconds are kept until the next count; this many more than at the last one make a new count worthwhile.
STALE_SECONDS_MAX = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuotaLimits:
    """The limits on adds to one topic, named as in its policy. A limit of 0 means no limit."""

    pending_rows_max: int = 0
    due_rows_per_second_max: int = 0
    client_rows_per_second_max: int = 0
    client_bytes_per_second_max: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, and the size of the request on the wire."""

    client: str
    size_bytes: int


# ---- topics


def check_topics(topics: int, topics_max: int) -> None:
    """Raise QuotaExceeded if one more topic would be too many."""
    if topics >= topics_max:
        raise QuotaExceeded(
            f"this daemon has {topics} topics, and limits.topics_max is {topics_max}: no topic is created. Delete "
            "topics that are not needed, or set the limit higher",
            retry_after_ms=None,
        )


# ---- what a subscription keeps that no add has brought


def check_nacked(subscription: str, *, nacked_rows: int, rows: int, rows_max: int) -> None:
    """Raise QuotaExceeded if `rows` more that get a row by a negative acknowledgement would be too many."""
    if rows and nacked_rows + rows > rows_max:
        raise QuotaExceeded(
            f"subscription {subscription!r}: limits.nacked_rows_per_subscription_max is {rows_max}; {nacked_rows} rows "
            f"outside the shared index are negatively acknowledged, and the request has {rows} positions without a "
            "row. Acknowledge some of these rows first, or set the limit higher",
            retry_after_ms=None if rows > rows_max else PENDING_RETRY_MS,
        )


def check_dead_letters(subscription: str, *, dead_letters: int, rows: int, rows_max: int) -> None:
    """Raise QuotaExceeded if `rows` more dead letters would be too many."""
    if rows and dead_letters + rows > rows_max:
        raise QuotaExceeded(
            f"subscription {subscription!r}: limits.dead_letters_per_subscription_max is {rows_max}; there are "
            f"{dead_letters} dead letters, and the request would make {rows} more. Replay or purge some, or set the "
            "limit higher",
            retry_after_ms=None,
        )


# ---- pending rows


def check_pending(where: str, field: str, *, pending_rows: int, rows: int, rows_max: int) -> None:
    """Raise QuotaExceeded if `rows` more would be too many. `where` names what the limit applies to."""
    if rows_max and rows and pending_rows + rows > rows_max:
        raise QuotaExceeded(
            f"{where}: {field} is {rows_max}; {pending_rows} rows are pending, and the request has {rows} new ones",
            retry_after_ms=None if rows > rows_max else PENDING_RETRY_MS,
        )


class PendingRows:
    """The pending rows of all topics: the last exact count plus the rows accepted since.

    Nothing is subtracted between two counts: rows that came due or left make room at the next one.
    """

    def __init__(self, rows_max: int) -> None:
        self.rows_max = rows_max
        self._counted = 0
        self._since_count = 0
        self._since_begin = 0

    @property
    def rows(self) -> int:
        return self._counted + self._since_count

    def check(self, rows: int) -> None:
        """Check that this many more rows fit into the limit of all topics. Raise QuotaExceeded if not."""
        check_pending(
            "all topics of this daemon",
            "limits.pending_rows_max",
            pending_rows=self.rows,
            rows=rows,
            rows_max=self.rows_max,
        )

    def accepted(self, rows: int) -> None:
        self._since_count += rows
        self._since_begin += rows

    def begin_count(self) -> None:
        """Begin a count. Rows accepted from now on are added to it, whether or not it finds them."""
        self._since_begin = 0

    def end_count(self, rows: int) -> None:
        """End a count that found this many rows pending since `begin_count`."""
        self._counted = rows
        self._since_count = self._since_begin


# ---- rows that come due in one second


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RowsOfSeconds:
    """Counts of the rows that come due in each second (Unix seconds), in columns; each second occurs once."""

    second: npt.NDArray[np.uint64]
    rows: npt.NDArray[np.int64]

    @staticmethod
    def of(deliver_at_ms: U64, *, now_ms: int) -> RowsOfSeconds:
        """Count rows by second. A row that is due already counts as due now."""
        seconds = np.maximum(deliver_at_ms, np.uint64(max(now_ms, 0))) // np.uint64(SECOND_MS)
        return RowsOfSeconds(*np.unique(seconds, return_counts=True))

    def pairs(self) -> Iterable[tuple[int, int]]:
        return zip(self.second.tolist(), self.rows.tolist(), strict=True)


def due_in_seconds(
    deliver_at_ms: Iterable[U64], segments: Iterable[tuple[U64, U64, U32]], now_ms: int
) -> dict[int, int]:
    """Count the rows that come due from this second on, by second, in columns and in whole segments.

    `segments` has columns of least time, largest time, rows; a segment that spans several seconds is not counted. O(n):
    not for the event loop.
    """
    counted: dict[int, int] = {}
    from_second = np.uint64(now_ms // SECOND_MS)
    for times in deliver_at_ms:
        seconds = times // np.uint64(SECOND_MS)
        found, rows = np.unique(seconds[seconds >= from_second], return_counts=True)
        _add_to(counted, zip(found.tolist(), rows.tolist(), strict=True))
    for min_ms, max_ms, rows_of in segments:
        seconds = min_ms // np.uint64(SECOND_MS)
        whole = (seconds == max_ms // np.uint64(SECOND_MS)) & (seconds >= from_second)
        _add_to(counted, zip(seconds[whole].tolist(), rows_of[whole].tolist(), strict=True))
    return counted


def _add_to(counts: dict[int, int], pairs: Iterable[tuple[int, int]]) -> None:
    for second, rows in pairs:
        counts[second] = counts.get(second, 0) + rows


class DueSeconds:
    """The burst guard of one topic: the rows that come due in each second, about 100 bytes for each second with rows.

    `uncounted` is whether no count was made yet. `wants_count` is whether one is worthwhile: a request was refused
    since the last one, or much of what is remembered is past.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._since_begin: dict[int, int] | None = None
        self._seconds_counted = 0
        self.uncounted = True
        self.wants_count = True

    def check(self, topic: str, coming: RowsOfSeconds, rows_max: int) -> None:
        """Raise QuotaExceeded if a second would have too many rows."""
        counts = self._counts
        for second, rows in coming.pairs():
            there = counts.get(second, 0)
            if there + rows > rows_max:
                self.wants_count = True
                raise QuotaExceeded(
                    f"topic {topic}: due_rows_per_second_max is {rows_max}; in the second from {second * SECOND_MS} ms "
                    f"on {there} rows are due, and the request has {rows} new ones for it",
                    retry_after_ms=None if rows > rows_max else DUE_RETRY_MS,
                )

    def take(self, coming: RowsOfSeconds) -> None:
        """Add rows that are staged."""
        _add_to(self._counts, coming.pairs())
        if self._since_begin is not None:
            _add_to(self._since_begin, coming.pairs())
        if len(self._counts) > 2 * self._seconds_counted + STALE_SECONDS_MAX:
            self.wants_count = True

    def begin_count(self, staged: Iterable[RowsOfSeconds]) -> None:
        """Begin a count of the applied rows. `staged` rows, and rows staged from now on, are added to it."""
        self._since_begin = {}
        for coming in staged:
            _add_to(self._since_begin, coming.pairs())

    def end_count(self, counted: Mapping[int, int], now_ms: int) -> None:
        """End a count that found `counted` applied from `now_ms` on.

        Rows of the current second that have left already came due in it, so its count does not fall.
        """
        counts = dict(counted)
        _add_to(counts, (self._since_begin or {}).items())
        this_second = now_ms // SECOND_MS
        if this_second in self._counts:
            counts[this_second] = max(self._counts[this_second], counts.get(this_second, 0))
        self._counts = counts
        self._seconds_counted = len(counts)
        self._since_begin = None
        self.uncounted = self.wants_count = False


# ---- what one client adds


@dataclasses.dataclass(slots=True)
class _Balance:
    """The amount that a client may still add now; a negative balance is a debt."""

    rows: float
    size_bytes: float
    at_s: float


class ClientRates:
    """The adds of each client of one topic, as token buckets that hold one second's allowance.

    A request passes while the balance is positive, however large it is; the next one waits for its debt. So a request
    larger than the limit passes too, and the rate holds on average. `now_s` is from a clock that never steps.
    """

    def __init__(self, topic: str, limits: QuotaLimits, *, clients_max: int = CLIENTS_MAX) -> None:
        self._topic = topic
        self._rows_max = limits.client_rows_per_second_max
        self._bytes_max = limits.client_bytes_per_second_max
        self._clients_max = clients_max
        # Ordered by last add, the latest at the end.
        self._balances: collections.OrderedDict[str, _Balance] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._balances)

    def check(self, client: str, now_s: float) -> None:
        """Check that a client has no debt. Raise QuotaExceeded with the time after which it may try again."""
        balance = self._balances.get(client)
        if balance is None:
            return
        self._refill(balance, now_s)
        for field, left, limit in (
            ("client_rows_per_second_max", balance.rows, self._rows_max),
            ("client_bytes_per_second_max", balance.size_bytes, self._bytes_max),
        ):
            if limit and left <= 0:
                raise QuotaExceeded(
                    f"topic {self._topic}: {field} is {limit}; client {client!r} is {int(-left)} ahead of that",
                    retry_after_ms=int(-left * 1000 / limit) + 1,
                )

    def charge(self, client: str, now_s: float, *, rows: int, size_bytes: int) -> None:
        """Charge the client for an accepted request."""
        if not self._rows_max and not self._bytes_max:
            return
        balance = self._balances.pop(client, None)
        if balance is None:
            balance = _Balance(self._rows_max, self._bytes_max, now_s)
            if len(self._balances) >= self._clients_max:
                self._balances.popitem(last=False)
        self._balances[client] = balance
        self._refill(balance, now_s)
        balance.rows -= rows
        balance.size_bytes -= size_bytes

    def _refill(self, balance: _Balance, now_s: float) -> None:
        passed_s = max(0.0, now_s - balance.at_s)
        balance.rows = min(self._rows_max, balance.rows + passed_s * self._rows_max)
        balance.size_bytes = min(self._bytes_max, balance.size_bytes + passed_s * self._bytes_max)
        balance.at_s = now_s
