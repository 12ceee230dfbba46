"""The series of deletions of ledgers (PIP-186), which the daemon exports beside its others.

Owns: their names, labels and meaning.
Does not own: the numbers, which layers above report; docs/METRICS.md describes them.

Every label has its series from the start, so that the first of a kind is an increase.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import prometheus_client
from prometheus_client.registry import CollectorRegistry

from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType

_ENDED = (
    DeletionOutcome.DELETED,
    DeletionOutcome.ALREADY_GONE,
    DeletionOutcome.IN_USE,
    DeletionOutcome.METADATA_MISMATCH,
    DeletionOutcome.MALFORMED,
)


class DeletionMetrics:
    """What happened to deletions. Methods are cheap and may be called on the event loop or in any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, meaning: str, *labels: str) -> prometheus_client.Counter:
            return prometheus_client.Counter(name, meaning, labels, registry=registry)

        def gauge(name: str, meaning: str, *labels: str) -> prometheus_client.Gauge:
            return prometheus_client.Gauge(name, meaning, labels, registry=registry)

        self._recorded = counter("tarry_deletions_recorded", "Deletions of ledgers that were recorded.", "ledger_type")
        self._attempted = counter("tarry_deletions_attempted", "Attempts to delete a ledger.")
        self._deleted = counter("tarry_deletions_deleted", "Attempts that deleted a ledger.", "ledger_type")
        self._failed = counter("tarry_deletions_failed", "Attempts to delete a ledger that failed.", "ledger_type")
        self._ended = counter("tarry_deletions_ended", "Deletions of ledgers that ended, by outcome.", "outcome")
        self._given_up = counter(
            "tarry_deletions_given_up", "Deletions of ledgers that failed too often and became dead letters."
        )
        in_flight = gauge("tarry_deletions_in_flight", "Deletions of ledgers that have not ended.", "component")
        # Looked up once: they are set every second.
        self._in_flight = {component: in_flight.labels(_label(component)) for component in LedgerComponent}
        self._dead = gauge("tarry_deletions_dead", "Deletions of ledgers that are dead letters.")
        self._held = gauge(
            "tarry_deletions_held",
            "Deletions that ended because the ledger is in use, until its owner takes that back.",
        )
        self._oldest = gauge(
            "tarry_deletions_oldest_seconds",
            "Time since the oldest deletion in flight was recorded or retried; 0 if there is none.",
        )
        self._in_use = gauge("tarry_deletion_ledgers_in_use", "Ledgers that their owners state to be in use.")
        self._orphans = gauge(
            "tarry_sweep_orphans",
            "Ledgers without a known owner that the last sweep of an object store found.",
            "store",
        )
        for series in (self._recorded, self._deleted, self._failed):
            for ledger_type in LedgerType:
                series.labels(_label(ledger_type))
        for outcome in _ENDED:
            self._ended.labels(_label(outcome))

    def recorded(self, ledger_type: LedgerType, deletions: int = 1) -> None:
        """Counts deletions that are durable and were not recorded before."""
        self._recorded.labels(_label(ledger_type)).inc(deletions)

    def attempted(self) -> None:
        """An attempt begins: its store is asked."""
        self._attempted.inc()

    def deleted(self, ledger_type: LedgerType) -> None:
        """An attempt has deleted what there was."""
        self._deleted.labels(_label(ledger_type)).inc()

    def failed(self, ledger_type: LedgerType) -> None:
        """An attempt has failed."""
        self._failed.labels(_label(ledger_type)).inc()

    def ended(self, outcome: DeletionOutcome) -> None:
        """One is over, durably; nothing was given up."""
        self._ended.labels(_label(outcome)).inc()

    def given_up(self) -> None:
        """One has become a dead letter, durably."""
        self._given_up.inc()

    def set_state(
        self,
        *,
        in_flight: Mapping[LedgerComponent, int],
        dead: int,
        held: int,
        oldest_seconds: float,
        ledgers_in_use: int,
    ) -> None:
        """What there is now."""
        for component, series in self._in_flight.items():
            series.set(in_flight.get(component, 0))
        self._dead.set(dead)
        self._held.set(held)
        self._oldest.set(oldest_seconds)
        self._in_use.set(ledgers_in_use)

    def set_orphans(self, store: str, ledgers: int) -> None:
        """A sweep of the whole store, or of a part of it, has found so many."""
        self._orphans.labels(store).set(ledgers)


def _label(value: Enum) -> str:
    return value.name.lower()
