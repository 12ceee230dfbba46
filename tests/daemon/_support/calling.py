"""The calls of a daemon with their columns, for tests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from daemon import call_values
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.departures import LedgerRanges
from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleBatch, RescheduleOutcome
from storage_backends.formats.manifest import NamedValues, SubscriptionPolicy
from tests._support.engine_fixture import Daemon
from tests._support.outcomes import ignored_by

NO_POLICY = SubscriptionPolicy()
Row = tuple[int, int, int]
"""ledger, entry, deliver_at_ms"""


def held(rows: Sequence[Row]) -> HeldPositions:
    ledger_id, entry_id, deliver_at_ms = (np.array([row[index] for row in rows], np.uint64) for index in range(3))
    return HeldPositions(ledger_id, entry_id, deliver_at_ms)


def rows_of(leased: call_values.Leased) -> list[Row]:
    rows = leased.handed_out.rows
    return list(zip(rows.ledger_id.tolist(), rows.entry_id.tolist(), rows.deliver_at_ms.tolist(), strict=True))


def entries_of(leased: call_values.Leased) -> list[int]:
    return [row[1] for row in rows_of(leased)]


def up_to(last_entry_id: int, *ledger_ids: int, all_lower_ledgers: bool = False) -> LedgerRanges:
    return LedgerRanges(
        np.array(ledger_ids, np.uint64),
        np.full(len(ledger_ids), last_entry_id, np.uint64),
        all_lower_ledgers,
    )


def trim(
    daemon: Daemon, ranges: LedgerRanges, *, topic: str = "t", subscription: str | None = None
) -> asyncio.Task[int]:
    async def rows() -> int:
        return (await daemon.engine.requests.trim(topic, subscription, ranges)).rows

    return daemon.call(rows())


def dead_letter(
    daemon: Daemon, ranges: LedgerRanges, *, topic: str = "t", subscription: str = "s"
) -> asyncio.Task[call_values.Trimmed]:
    """A trim that leaves dead letters."""
    return daemon.call(daemon.engine.requests.trim(topic, subscription, ranges, dead_letter=True))


def clear(daemon: Daemon, *, topic: str = "t", subscription: str | None = None) -> asyncio.Task[int]:
    return daemon.call(daemon.engine.requests.clear(topic, subscription))


def cancel(
    daemon: Daemon, ledger_id: int, entries: Sequence[int], *, topic: str = "t", subscription: str | None = None
) -> asyncio.Task[CancelOutcome]:
    ledgers, entry_id = np.full(len(entries), ledger_id, np.uint64), np.array(entries, np.uint64)
    return daemon.call(daemon.engine.requests.cancel(topic, subscription, ledgers, entry_id))


def reschedule(
    daemon: Daemon,
    ledger_id: int,
    entries: Sequence[int],
    delay_ms: int,
    *,
    topic: str = "t",
    subscription: str | None = None,
) -> asyncio.Task[RescheduleOutcome]:
    """To times that are as far from now, by absolute times; they may be past."""
    rows = len(entries)
    batch = RescheduleBatch(
        ledger_id=np.full(rows, ledger_id, np.uint64),
        entry_id=np.array(entries, np.uint64),
        deliver_at_ms=np.full(rows, daemon.now_ms() + delay_ms, np.uint64),
        delay_ms=None,
        key_hash=None,
    )
    return daemon.call(daemon.engine.requests.reschedule(topic, subscription, batch))


def results(
    outcome: CancelOutcome | RescheduleOutcome,
) -> tuple[int, list[int], list[int], list[int]]:
    """(cancelled or rescheduled, then the rows that are not found, already due, in flight)."""
    left = outcome.cancelled if isinstance(outcome, CancelOutcome) else outcome.rescheduled
    return left, outcome.not_found.tolist(), outcome.already_due.tolist(), outcome.in_flight.tolist()


def get(
    daemon: Daemon,
    max_rows: int = 1000,
    *,
    topic: str = "t",
    subscription: str = "s",
    lease_ms: int = 0,
    wait_ms: int = 0,
) -> asyncio.Task[call_values.Leased]:
    return daemon.call(
        daemon.engine.requests.get_scheduled(topic, subscription, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms)
    )


def acknowledge(daemon: Daemon, rows: Sequence[Row], *, topic: str = "t", subscription: str = "s") -> asyncio.Task[int]:
    return daemon.call(ignored_by(daemon.engine.requests.acknowledge, topic, subscription, held(rows)))


def extend(
    daemon: Daemon, rows: Sequence[Row], lease_ms: int, *, topic: str = "t", subscription: str = "s"
) -> asyncio.Task[int]:
    return daemon.call(ignored_by(daemon.engine.requests.extend_lease, topic, subscription, held(rows), lease_ms))


def create(
    daemon: Daemon,
    subscription: str = "s",
    *,
    topic: str = "t",
    policy: SubscriptionPolicy = NO_POLICY,
    properties: NamedValues = (),
) -> asyncio.Task[call_values.SubscriptionCreated]:
    return daemon.call(daemon.engine.requests.create_subscription(topic, subscription, policy, properties))


def delete_topic(daemon: Daemon, topic: str = "t") -> asyncio.Task[call_values.TopicDeleted]:
    return daemon.call(daemon.engine.requests.delete_topic(topic))


def stats(daemon: Daemon, topic: str = "t") -> asyncio.Task[call_values.TopicStats]:
    return daemon.call(daemon.engine.requests.topic_stats(topic))
