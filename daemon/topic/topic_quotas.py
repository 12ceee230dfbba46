"""Checks whether the rows of a request fit into the quotas of a topic, and counts the existing rows.

It orders the checks, tracks rows that are staged and not applied yet, and determines when the rows of each second are
counted again. `daemon.core.quotas` has the figures and the refusals, `topic_settings` the limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from daemon.core import quotas
from daemon.core.decisions.topic_state import TopicState
from daemon.core.quotas import Caller, ClientRates, DueSeconds, PendingRows, QuotaLimits, RowsOfSeconds
from daemon.errors import QuotaExceeded
from daemon.runtime.environment import Environment
from storage_backends.formats.row_columns import U64, Rows

# Least time between two counts of the rows, even if a client is refused again and again (seconds)
COUNT_INTERVAL_S = 0.5
UNLIMITED = QuotaLimits()


class TopicQuotas:
    """The quotas of one topic.

    `pending` counts the rows of all topics of the daemon. `settled` returns when everything staged now is applied.
    """

    def __init__(
        self,
        topic: TopicState,
        limits: QuotaLimits,
        pending: PendingRows,
        environment: Environment,
        *,
        settled: Callable[[], Awaitable[None]],
    ) -> None:
        self.limits = UNLIMITED
        self.pending = pending
        # True if anything is limited
        self.apply = bool(pending.rows_max)
        self.due: DueSeconds | None = None
        self._topic = topic
        self._environment = environment
        self._settled = settled
        self._rates = ClientRates(topic.name, self.limits)
        self._staged_rows = 0
        # Number of a staged decision that is not applied -> its rows by second
        self._staged_due: dict[int, RowsOfSeconds] = {}
        self._last_staged = 0
        self._counting: asyncio.Task[None] | None = None
        self._counted_at_s = -COUNT_INTERVAL_S
        self._count_later: asyncio.TimerHandle | None = None
        self.set_limits(limits)

    def set_limits(self, limits: QuotaLimits) -> None:
        """Set other limits; the rates of all clients start again."""
        if limits == self.limits:
            return
        self.limits = limits
        self.apply = limits != UNLIMITED or bool(self.pending.rows_max)
        self._rates = ClientRates(self._topic.name, limits)
        if not limits.due_rows_per_second_max:
            self.due = None
        elif self.due is None:
            self.due = DueSeconds()

    @property
    def are_counted(self) -> bool:
        """True if it is known how many rows come due in each second, or that is not limited."""
        return self.due is None or not self.due.uncounted

    async def counted(self) -> None:
        """Wait until it is known how many rows come due in each second, if that is limited."""
        if not self.are_counted:
            await asyncio.shield(self._count())

    def admission(self, caller: Caller | None, *, now_ms: int) -> QuotaAdmission:
        """Return the admission of one request; without a `caller` no rate applies. Raises QuotaExceeded."""
        if caller is not None:
            try:
                self._rates.check(caller.client, self._environment.clock.elapsed_s())
            except QuotaExceeded:
                self._environment.metrics.quota_refused(self._topic.name, "client")
                raise
        return QuotaAdmission(self, caller, now_ms)

    def move(self, *, now_ms: int) -> QuotaAdmission:
        """Return the admission of a request that gives pending rows other times: they come due in other seconds."""
        return QuotaAdmission(self, None, now_ms, are_pending=True)

    def charge(self, caller: Caller, rows: int) -> None:
        """Charge the caller for an accepted request with these rows."""
        now_s = self._environment.clock.elapsed_s()
        self._rates.charge(caller.client, now_s, rows=rows, size_bytes=caller.size_bytes)

    @property
    def pending_rows(self) -> int:
        """The number of rows of the topic that are pending or staged."""
        return self._topic.indexes.pending_rows + self._staged_rows

    def check_pending(self, rows: int) -> None:
        """Check that these rows fit into the limits of the topic and of all topics. Raises QuotaExceeded."""
        try:
            quotas.check_pending(
                f"topic {self._topic.name}",
                "pending_rows_max",
                pending_rows=self.pending_rows if self.limits.pending_rows_max else 0,
                rows=rows,
                rows_max=self.limits.pending_rows_max,
            )
            self.pending.check(rows)
        except QuotaExceeded:
            self._environment.metrics.quota_refused(self._topic.name, "pending")
            raise

    def check_due(self, deliver_at_ms: U64, *, now_ms: int) -> RowsOfSeconds | None:
        """Check the due-rate quota. Return the counts for `take`, or None if there are none.

        Raises QuotaExceeded.
        """
        if self.due is None or not len(deliver_at_ms):
            return None
        coming = RowsOfSeconds.of(deliver_at_ms, now_ms=now_ms)
        try:
            self.due.check(self._topic.name, coming, self.limits.due_rows_per_second_max)
        except QuotaExceeded:
            self._environment.metrics.quota_refused(self._topic.name, "due")
            self._consider_count()
            raise
        return coming

    def take(self, slot: asyncio.Future[int], *, rows: int, coming: RowsOfSeconds | None) -> None:
        """Take room for staged rows, pending and by the second they come due in; they are applied with the slot."""
        self.pending.accepted(rows)
        self._staged_rows += rows
        self._last_staged += 1
        number = self._last_staged
        if coming is not None and self.due is not None:
            self._staged_due[number] = coming
            self.due.take(coming)
            self._consider_count()

        def applied(_: asyncio.Future[int]) -> None:
            self._staged_rows -= rows
            self._staged_due.pop(number, None)

        slot.add_done_callback(applied)

    # ---- counting

    def _consider_count(self) -> None:
        """Count if that is worthwhile, now or when it is time again."""
        if self.due is None or not self.due.wants_count or self._count_later is not None:
            return
        in_s = self._counted_at_s + COUNT_INTERVAL_S - self._environment.clock.elapsed_s()
        self._count_later = asyncio.get_running_loop().call_later(max(0.0, in_s), self._count)

    def _count(self) -> asyncio.Task[None]:
        self._count_later = None
        if self._counting is None or self._counting.done():
            self._counting = asyncio.ensure_future(self._count_due())
        return self._counting

    async def _count_due(self) -> None:
        due = self.due
        if due is None:
            return
        if due.uncounted:
            # Rows staged while nothing was counted are counted after they are applied.
            await self._settled()
        now_ms = self._environment.clock.now_ms()
        indexes = list(self._topic.indexes.values())
        memory = [bucket.snapshot() for index in indexes for bucket in index.memory_buckets]
        tables = [bucket.table for index in indexes for bucket in index.sealed.values()]
        due.begin_count(self._staged_due.values())
        counted = await self._environment.run(
            lambda: quotas.due_in_seconds(
                (rows.kept().rows.deliver_at_ms for rows in memory),
                ((table.min_ms, table.max_ms, table.infos.rows) for table in tables),
                now_ms,
            )
        )
        due.end_count(counted, now_ms)
        self._counted_at_s = self._environment.clock.elapsed_s()

    def close(self) -> None:
        if self._counting is not None:
            self._counting.cancel()
        if self._count_later is not None:
            self._count_later.cancel()


class QuotaAdmission:
    """The admission of one request's rows to the topic: first `admit`, which changes nothing, then `staged`."""

    def __init__(self, of: TopicQuotas, caller: Caller | None, now_ms: int, *, are_pending: bool = False) -> None:
        """Create an admission; `are_pending` means that the rows are pending now."""
        self._quotas = of
        self._are_pending = are_pending
        self._caller = caller
        self._now_ms = now_ms
        self._pending_rows = 0
        self._coming: RowsOfSeconds | None = None

    def admit(self, accepted: Sequence[Rows]) -> None:
        """Check that the rows of each index fit into the quotas. Raises QuotaExceeded."""
        limits = self._quotas.limits
        if not self._are_pending and (limits.pending_rows_max or self._quotas.pending.rows_max):
            now_ms = np.uint64(self._now_ms)
            self._pending_rows = sum(int(np.count_nonzero(rows.deliver_at_ms > now_ms)) for rows in accepted)
            self._quotas.check_pending(self._pending_rows)
        if limits.due_rows_per_second_max:
            times = np.concatenate([rows.deliver_at_ms for rows in accepted])
            self._coming = self._quotas.check_due(times, now_ms=self._now_ms)

    def staged(self, slot: asyncio.Future[int] | None, *, rows: int = 0) -> None:
        """Take room for the staged rows; `slot` is None if none was new. The caller is charged for `rows`."""
        if self._caller is not None:
            self._quotas.charge(self._caller, rows)
        if slot is not None and (self._pending_rows or self._coming is not None):
            self._quotas.take(slot, rows=self._pending_rows, coming=self._coming)
