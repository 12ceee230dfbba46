"""Declares every series that the daemon exports, and the typed events that feed them.

Layers above report events (`added`, `slot_written`, ...). docs/METRICS.md describes the series, `metrics_endpoint`
serves them, and `column_histogram` has those of deliveries. The gauges of topics are read from
`daemon.owner.topic_inspection` at each scrape. Every label of a deletion series exists from the start, so that the
first event of a kind is an increase.

A counter is declared in a `_declare_*` method and fed by one event. A gauge of a topic is a field of `TopicNumbers`
and a line of `_TOPIC_GAUGES`.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Literal

import numpy as np
import numpy.typing as npt
import prometheus_client
from prometheus_client import metrics_core
from prometheus_client.registry import Collector, CollectorRegistry

from daemon import errors
from daemon.column_histogram import ArrayHistogram, HandOutCounts
from daemon.core.garbage_rules import ObjectCount
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent, LedgerType
from storage_backends.formats.row_columns import U32, U64
from storage_backends.formats.slot_format import DeadLetterReason

_ENDED = (
    DeletionOutcome.DELETED,
    DeletionOutcome.ALREADY_GONE,
    DeletionOutcome.IN_USE,
    DeletionOutcome.METADATA_MISMATCH,
    DeletionOutcome.MALFORMED,
)


class DeletionMetrics:
    """The series of deletions (PIP-186). Methods are cheap; the event loop and any thread may call them."""

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
        # Looked up once, since they are set every second
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
        """Count deletions that are durable and were not recorded before."""
        self._recorded.labels(_label(ledger_type)).inc(deletions)

    def attempted(self) -> None:
        """Count an attempt whose store is asked."""
        self._attempted.inc()

    def deleted(self, ledger_type: LedgerType) -> None:
        """Count an attempt that has deleted a ledger."""
        self._deleted.labels(_label(ledger_type)).inc()

    def failed(self, ledger_type: LedgerType) -> None:
        """Count a failed attempt."""
        self._failed.labels(_label(ledger_type)).inc()

    def ended(self, outcome: DeletionOutcome) -> None:
        """Count a deletion that is durably over without having been given up."""
        self._ended.labels(_label(outcome)).inc()

    def given_up(self) -> None:
        """Count a deletion that has durably become a dead letter."""
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
        """Set the current numbers."""
        for component, series in self._in_flight.items():
            series.set(in_flight.get(component, 0))
        self._dead.set(dead)
        self._held.set(held)
        self._oldest.set(oldest_seconds)
        self._in_use.set(ledgers_in_use)

    def set_orphans(self, store: str, ledgers: int) -> None:
        """Set how many orphans a sweep of the whole store, or of a part of it, has found."""
        self._orphans.labels(store).set(ledgers)


def _label(value: Enum) -> str:
    return value.name.lower()


ALL_TOPICS = "_all"
OTHER_TOPICS = "_other"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopicNumbers:
    """One topic at the moment of a scrape."""

    topic: str
    pending: int
    mutable_rows: int
    loaded_rows: int
    # Sealed buckets and the mutable one, as PIP-195 counts them
    buckets: int
    bucket_bytes: int
    backlog: int
    in_flight: int
    leased: int
    # Rows of the backlog that are NACKED
    nacked: int
    dead_letters: int
    # Subscriptions that may have no more of them
    dead_letters_full: int
    # Lost with damaged buckets and not added again
    rebuild_needed: int
    # Consumers of KEY_SHARED streams; rows that wait for their key; hashes that wait for another consumer's rows, and
    # for negatively acknowledged ones
    key_shared_consumers: int
    key_shared_waiting: int
    draining_hashes: int
    nack_blocked_hashes: int
    # 0.0 if no row is due without having been delivered
    oldest_due_age_s: float
    # Delay level -> pending rows, without levels that have none
    pending_by_level: Mapping[int, int]
    # Ledgers that have rows, and the lowest position needed from the log, or None
    ledgers: int
    lowest: tuple[int, int] | None


class TopicLabels:
    """Bounded labels `topic`: the first `per_topic_max` topics have their own, the others share one."""

    def __init__(self, per_topic: bool, per_topic_max: int) -> None:
        self._per_topic = per_topic
        self._per_topic_max = per_topic_max
        self._own: set[str] = set()
        self._lock = threading.Lock()

    def label(self, topic: str) -> str:
        if topic in self._own:
            return topic
        if not self._per_topic:
            return ALL_TOPICS
        with self._lock:
            if len(self._own) < self._per_topic_max:
                self._own.add(topic)
        return topic if topic in self._own else OTHER_TOPICS


class StoreRequests(Collector):
    """The counter of requests to the store, by kind. `sent` returns those of this process so far."""

    def __init__(self, sent: Callable[[], Mapping[str, int]]) -> None:
        self._sent = sent

    def collect(self) -> Iterable[metrics_core.Metric]:
        family = metrics_core.CounterMetricFamily(
            "tarry_store_requests", "Requests sent to the object store, repeated ones included.", labels=("kind",)
        )
        for kind, requests in self._sent().items():
            family.add_metric((kind,), requests)
        yield family


class TopicGauges(Collector):
    """The gauges of topics.

    Topics with one label are summed, except for ages, of which the largest counts. Positions are left out for shared
    labels, since they are of different logs.
    """

    def __init__(self, snapshot: Callable[[], Sequence[TopicNumbers]], labels: TopicLabels) -> None:
        self._snapshot = snapshot
        self._labels = labels

    def describe(self) -> Iterable[metrics_core.Metric]:
        """Return the families without numbers, so that registering does not ask the engine."""
        return _topic_families().values()

    def collect(self) -> Iterable[metrics_core.Metric]:
        sums: dict[str, dict[str, float]] = {}
        levels: dict[tuple[str, str], int] = {}
        lowest: dict[str, tuple[int, int]] = {}
        for numbers in self._snapshot():
            if numbers.lowest is not None and self._labels.label(numbers.topic) == numbers.topic:
                lowest[numbers.topic] = numbers.lowest
            for level, rows in numbers.pending_by_level.items():
                key = (self._labels.label(numbers.topic), str(level))
                levels[key] = levels.get(key, 0) + rows
            mine = sums.setdefault(self._labels.label(numbers.topic), dict.fromkeys(_TOPIC_GAUGES, 0.0))
            for field in _TOPIC_GAUGES:
                value = getattr(numbers, field)
                mine[field] = max(mine[field], value) if field == "oldest_due_age_s" else mine[field] + value
        families = _topic_families()
        for label, values in sums.items():
            for field, value in values.items():
                families[field].add_metric([label], value)
        for key, rows in levels.items():
            families[_LEVELS].add_metric(key, rows)
        for topic, position in lowest.items():
            for field, value in zip(_LOWEST, position, strict=True):
                families[field].add_metric([topic], value)
        return families.values()


_TOPIC_GAUGES = {
    "buckets": ("tarry_delayed_message_index_bucket_total", "Buckets: the sealed ones and the mutable one."),
    "loaded_rows": ("tarry_delayed_message_index_loaded", "Rows of the index that are in memory."),
    "bucket_bytes": (
        "tarry_delayed_message_index_bucket_snapshot_size_bytes",
        "Bytes of the objects of sealed buckets.",
    ),
    "pending": ("tarry_pending_rows", "Rows that are not due yet."),
    "mutable_rows": ("tarry_mutable_rows", "Rows that are not due yet and in no sealed bucket yet."),
    "backlog": ("tarry_backlog_rows", "Rows that are due and not acknowledged, summed over subscriptions."),
    "in_flight": ("tarry_in_flight_rows", "Rows delivered and not acknowledged."),
    "leased": ("tarry_leased_rows", "Leased rows; they are in flight as well."),
    "nacked": ("tarry_nacked_rows", "Negatively acknowledged rows that wait for redelivery."),
    "dead_letters": ("tarry_dead_letter_rows", "Dead letters, summed over subscriptions."),
    "dead_letters_full": (
        "tarry_dead_letters_full",
        "Subscriptions that have as many dead letters as they may have.",
    ),
    "rebuild_needed": ("tarry_rebuild_needed_rows", "Rows that were lost with damaged buckets and not added again."),
    "key_shared_consumers": (
        "tarry_key_shared_consumers",
        "Consumers of KEY_SHARED streams, summed over subscriptions.",
    ),
    "key_shared_waiting": (
        "tarry_key_shared_waiting_rows",
        "Rows, due or planned, that wait in memory for their hash or for permits of their consumer.",
    ),
    "draining_hashes": (
        "tarry_key_shared_draining_hashes",
        "Hashes whose slot has moved while their former consumer still holds rows.",
    ),
    "nack_blocked_hashes": (
        "tarry_key_shared_nack_blocked_hashes",
        "Hashes that wait for a negatively acknowledged row.",
    ),
    "ledgers": ("tarry_retained_ledgers", "Ledgers with waiting or due rows, at most a minute old."),
    "oldest_due_age_s": (
        "tarry_oldest_due_seconds",
        "Age of the oldest due and undelivered row that does not wait for redelivery; 0 if there is none.",
    ),
}


_LEVELS = "pending_by_level"
_LOWEST = {
    "lowest_ledger": (
        "tarry_retained_lowest_ledger",
        "Ledger of the lowest position that the topic needs of its log, at most a minute old.",
    ),
    "lowest_entry": ("tarry_retained_lowest_entry", "Entry of the lowest position that the topic needs of its log."),
}


def _topic_families() -> dict[str, metrics_core.GaugeMetricFamily]:
    families = {
        field: metrics_core.GaugeMetricFamily(name, meaning, labels=["topic"])
        for field, (name, meaning) in {**_TOPIC_GAUGES, **_LOWEST}.items()
    }
    meaning = "Rows that are not due yet and were added by a delay level."
    families[_LEVELS] = metrics_core.GaugeMetricFamily("tarry_level_pending_rows", meaning, labels=["topic", "level"])
    return families


# Bounds of PIP-195 (seconds)
BUCKET_OPERATION_BOUNDS_S = (0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 60.0)
LATENESS_BOUNDS_S = (0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 60.0, 300.0, 900.0, 3600.0)
SLOT_BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 30.0)
SLOT_BOUNDS_BYTES = tuple(float(1 << shift) for shift in range(8, 25, 2))
LOOP_PAUSE_BOUNDS_S = (0.001, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
RECOVERY_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

MergeOutcome = Literal["merged", "refused", "damaged", "failed", "given_up"]


class Metrics:
    """The events that the layers report. Methods are cheap; the event loop and any thread may call them."""

    def __init__(self, *, per_topic: bool = True, per_topic_max: int = 1000) -> None:
        """Declare the series. For `per_topic` and `per_topic_max` see `daemon.settings.MetricsSettings`."""
        self.registry = CollectorRegistry()
        self._labels = TopicLabels(per_topic, per_topic_max)
        self._declare_lateness()
        self._declare_rows()
        self._declare_storage()
        self._declare_running()
        self.deletions = DeletionMetrics(self.registry)

    def _declare_lateness(self) -> None:
        self._hand_outs = HandOutCounts(self._labels.label, LATENESS_BOUNDS_S)
        self.registry.register(self._hand_outs)
        self._redelivery_lateness = ArrayHistogram(
            "tarry_redelivery_lateness_seconds",
            "Time at which a negatively acknowledged row is READY again, minus its redelivery time.",
            LATENESS_BOUNDS_S,
        )
        self.registry.register(self._redelivery_lateness)
        self._level_lateness = ArrayHistogram(
            "tarry_level_lateness_seconds",
            "Delivery time minus due time, at the first delivery of rows added by a delay level.",
            LATENESS_BOUNDS_S,
            "topic",
            "level",
        )
        self.registry.register(self._level_lateness)

    def _declare_rows(self) -> None:
        counter = self._counter
        self._add_rows = _Children(
            counter(
                "tarry_add_rows",
                "Rows of adds, by result: accepted, duplicate, returned or refused.",
                "topic",
                "result",
            )
        )
        self._late = counter("tarry_add_late_on_arrival_rows", "Added rows that were already due.", "topic")
        self._acknowledged = _Children(
            counter(
                "tarry_acknowledge_rows",
                "Rows of acknowledgements, by result: acknowledged or ignored.",
                "topic",
                "result",
            )
        )
        self._nacked = _Children(
            counter(
                "tarry_nack_rows",
                "Rows of negative acknowledgements, by result: nacked, dead_lettered or ignored.",
                "topic",
                "result",
            )
        )
        self._ack_timed_out = counter(
            "tarry_ack_timeout_rows", "Rows IN_FLIGHT for longer than the ack timeout of their subscription.", "topic"
        )
        self._in_due_order = _Children(
            counter(
                "tarry_add_in_due_order_rows",
                "Added rows that came in due order: the index did not sort them.",
                "topic",
            )
        )
        self._sorted = _Children(
            counter(
                "tarry_add_sorted_rows", "Added rows that did not come in due order: the index sorts them.", "topic"
            )
        )

        self._trimmed = counter(
            "tarry_trim_rows",
            "Rows trimmed or cleared, by scope: of the topic, or of one subscription.",
            "topic",
            "scope",
        )
        self._cancelled = counter(
            "tarry_cancel_rows",
            "Positions of cancellations, by result: cancelled, not_found, already_due or in_flight.",
            "topic",
            "result",
        )
        self._rescheduled = counter(
            "tarry_reschedule_rows",
            "Positions of reschedules, by result: rescheduled, not_found, already_due or in_flight.",
            "topic",
            "result",
        )
        self._dead_lettered = counter(
            "tarry_dead_lettered_rows",
            "Positions that became dead letters, by reason: too_often, rejected or trimmed.",
            "topic",
            "reason",
        )
        self._dead_letters_full = counter(
            "tarry_dead_letters_full_rows",
            "Redeliveries of positions that were to become dead letters, which were full.",
            "topic",
        )
        self._dead_letters_replayed = counter(
            "tarry_dead_letter_replayed_rows", "Dead letters that were replayed.", "topic"
        )
        self._dead_letters_purged = counter("tarry_dead_letter_purged_rows", "Dead letters that were purged.", "topic")
        self._planned = _Children(
            counter(
                "tarry_key_shared_planned_rows",
                "Positions that dispatchers planned, by outcome: sent or held.",
                "topic",
                "outcome",
            )
        )
        self._key_blocked = _Children(
            counter(
                "tarry_key_shared_blocked_rows",
                "Times that a draining hash held back a row.",
                "topic",
            )
        )
        self._taken_back = _Children(
            counter(
                "tarry_key_shared_taken_back_rows",
                "Rows taken back from their consumer because an earlier row of their hash was negatively acknowledged.",
                "topic",
            )
        )
        self._leases_over = counter(
            "tarry_lease_over_rows",
            "Rows READY again because their lease ended before they were acknowledged.",
            "topic",
        )
        self._topics_deleted = counter("tarry_topics_deleted", "Topics that were deleted on request.")

        self._refused = counter(
            "tarry_quota_refused_requests",
            "Requests that a quota refused: pending, due, client, nacked or dead_letters.",
            "topic",
            "quota",
        )

    def _declare_storage(self) -> None:
        counter, histogram, gauge = self._counter, self._histogram, self._gauge
        self._slot_bytes = histogram(
            "tarry_journal_slot_bytes", "Size of slots of the commit log of this daemon.", SLOT_BOUNDS_BYTES
        )
        self._slot_seconds = histogram(
            "tarry_journal_slot_seconds",
            "Time from the first attempt to write a slot until it is durable.",
            SLOT_BOUNDS_S,
        )
        self._log_slots = gauge("tarry_log_slots", "Slots of the commit log of this daemon that are not deleted.")
        self._log_bytes = gauge("tarry_log_bytes", "Bytes of the commit log of this daemon that are not deleted.")
        self._log_uncertain = gauge(
            "tarry_log_uncertain_seconds",
            "How long the slot in flight has been pending; 0 if there is none.",
        )
        self._fences = counter(
            "tarry_log_fences", "Logs of former owners that this daemon has ended, or found ended, to take shards over."
        )
        self._commits = counter(
            "tarry_commits", "Manifest commits, by outcome: committed, refused or unknown.", "operation", "outcome"
        )
        self._conflicts = counter(
            "tarry_commit_conflicts", "Manifest commits that were retried on a newer manifest.", "operation"
        )
        self._store_errors = counter(
            "tarry_store_errors", "Requests to the object store that failed, by kind of failure.", "operation", "kind"
        )

        name = "tarry_delayed_message_index_bucket_op"
        self._bucket_count = counter(
            f"{name}_count",
            "Operations on bucket snapshots, by type (create, load, merge) and state (succeed, failed).",
            "state",
            "type",
        )
        self._bucket_seconds = histogram(
            f"{name}_latency_seconds",
            "Duration of operations on bucket snapshots, by type: create, load or merge.",
            BUCKET_OPERATION_BOUNDS_S,
            "type",
        )

        self._merges = counter(
            "tarry_merges", "Merges of buckets, by outcome: merged, refused, damaged, failed or given_up.", "outcome"
        )
        self._merge_buckets = counter("tarry_merge_buckets", "Buckets that a merged bucket has replaced.")
        self._merge_rows = counter("tarry_merge_rows", "Rows that merges have copied.")
        self._merge_bytes = counter(
            "tarry_merge_bytes", "Bytes that merges have transferred, by direction: read or written.", "direction"
        )

        self._collected_objects = counter(
            "tarry_collected_objects",
            "Objects that collection has deleted, by kind: tombstone, orphan, manifest, journal_slot or dead_object.",
            "kind",
        )
        self._collected_bytes = counter(
            "tarry_collected_bytes", "Bytes of the objects that collection has deleted, by kind.", "kind"
        )
        self._collection_failures = counter(
            "tarry_collection_failures", "Deletions by collection that failed; each is retried."
        )
        self._given_up = counter("tarry_collection_given_up_objects", "Objects that collection has given up deleting.")
        self._orphans_refused = gauge(
            "tarry_orphans_refused_bytes",
            "Bytes of orphans that the last listing of a shard kept because they are suspiciously many.",
            "shard",
        )
        self._tombstones = gauge(
            "tarry_tombstones", "Objects that left a manifest and are kept until their grace is over."
        )
        self._tombstone_bytes = gauge(
            "tarry_tombstone_bytes", "Bytes of objects that left a manifest and are kept until their grace is over."
        )
        self._collection_age = gauge(
            "tarry_collection_age_seconds",
            "Time since the last successful collection pass, of the shard that has waited longest.",
        )

    def _declare_running(self) -> None:
        counter, histogram, gauge = self._counter, self._histogram, self._gauge
        self._epoch = gauge("tarry_epoch", "Epoch under which this daemon owns a shard; 0 if it does not.", "shard")
        self._serving = gauge("tarry_serving", "1 while the daemon serves, 0 while it waits for something.")
        self._files_refused = gauge(
            "tarry_files_refused",
            "1 while changed files are wrong and the former contents apply, by kind: certificates or identities.",
            "kind",
        )
        self._certificate_expiry = gauge(
            "tarry_certificate_expiry_timestamp_seconds",
            "When the first certificate of a file expires (Unix time), by setting; NaN without TLS or such a file.",
            "file",
        )
        self._refused_callers = counter(
            "tarry_refused_callers",
            "Calls, and requests of streams, refused because of their caller, by reason: unauthenticated or "
            "permission_denied.",
            "reason",
        )
        self._loop_pause = histogram(
            "tarry_event_loop_pause_seconds",
            "How late the event loop's heartbeat (every 10 ms) came: the daemon did nothing for so long.",
            LOOP_PAUSE_BOUNDS_S,
        )
        self._tick = gauge(
            "tarry_tick_seconds",
            "Time by which deliveries are batched now in topics without tick_ms: longer while the daemon is busy.",
        )
        self._clock_steps = counter(
            "tarry_clock_step", "Times that the wall clock was set, by direction: forward or back.", "direction"
        )
        self._store_clock_skew = gauge(
            "tarry_store_clock_skew_seconds", "Clock of the object store minus clock of this machine; 0 when unknown."
        )
        self._store_probed = gauge(
            "tarry_store_probed", "1 once the store has passed the probe of this start, 0 while it is being probed."
        )
        self._recovery_seconds = histogram(
            "tarry_recovery_seconds",
            "Time from the beginning of serving until every topic is loaded or found damaged.",
            RECOVERY_BOUNDS_S,
        )
        self._rows_replayed = counter(
            "tarry_recovery_rows_replayed", "Rows of records that were replayed when topics were loaded."
        )

        self._topics = gauge("tarry_topics", "Topics by state: loaded, loading or damaged.", "state")
        self._shards_damaged = gauge("tarry_shards_damaged", "Shards that cannot be served because of damage.")
        self._merged_away = counter(
            "tarry_merged_away_reads",
            "Reads of buckets that another process had merged and deleted.",
        )
        self._damage = counter(
            "tarry_damage_found", "Damage found, by kind: shard, checkpoint, topic or bucket; the log names it.", "kind"
        )
        self._topics_failed = counter(
            "tarry_topics_failed", "Topics that failed unexpectedly and are loaded again; the log names them."
        )
        self._shards_lost = counter(
            "tarry_shards_lost",
            "Shards lost while the daemon served, by cause: superseded, damaged or failed.",
            "cause",
        )

    def collect_topics_from(self, snapshot: Callable[[], Sequence[TopicNumbers]]) -> None:
        """Export the gauges of topics; `snapshot` is called at each scrape, in the scrape's thread."""
        self.registry.register(TopicGauges(snapshot, self._labels))

    def added(
        self, topic: str, *, accepted: int, duplicates: int, returned: int, late_on_arrival: int, refused: int = 0
    ) -> None:
        label = self._labels.label(topic)
        results = (("accepted", accepted), ("duplicate", duplicates), ("returned", returned), ("refused", refused))
        for result, rows in results:
            if rows:
                self._add_rows(label, result).inc(rows)
        if late_on_arrival:
            self._late.labels(label).inc(late_on_arrival)

    def added_in_order(self, topic: str, *, in_due_order: int, others: int) -> None:
        """Count added rows that arrived in due order, and others, which must be sorted."""
        label = self._labels.label(topic)
        if in_due_order:
            self._in_due_order(label).inc(in_due_order)
        if others:
            self._sorted(label).inc(others)

    def level_handed_out(self, topic: str, level: int, lateness_ms: npt.NDArray[np.int64]) -> None:
        """Record the lateness of first deliveries of rows of a delay level (ms)."""
        self._level_lateness.observe_ms(lateness_ms, self._labels.label(topic), str(level))

    def quota_refused(self, topic: str, quota: Literal["pending", "due", "client", "nacked", "dead_letters"]) -> None:
        """Count a refused request.

        It had too many pending rows, too many due in one second, too much from one client, or too many positions
        without a row or dead letters for one subscription.
        """
        self._refused.labels(self._labels.label(topic), quota).inc()

    def acknowledged(self, topic: str, *, acknowledged: int, ignored: int) -> None:
        label = self._labels.label(topic)
        for result, rows in (("acknowledged", acknowledged), ("ignored", ignored)):
            if rows:
                self._acknowledged(label, result).inc(rows)

    def nacked(self, topic: str, *, nacked: int, dead_lettered: int, ignored: int) -> None:
        """Count the results of a negative acknowledgement."""
        label = self._labels.label(topic)
        for result, rows in (("nacked", nacked), ("dead_lettered", dead_lettered), ("ignored", ignored)):
            if rows:
                self._nacked(label, result).inc(rows)

    def ack_timed_out(self, topic: str, *, rows: int) -> None:
        """Count rows that were IN_FLIGHT for longer than their subscription allows."""
        self._ack_timed_out.labels(self._labels.label(topic)).inc(rows)

    def redelivered(self, lateness_ms: npt.NDArray[np.int64]) -> None:
        """Record how late negatively acknowledged rows became READY again (ms)."""
        self._redelivery_lateness.observe_ms(lateness_ms)

    def handed_out(self, topic: str, deliver_at_ms: U64, redelivery_count: U32 | None, *, now_ms: int) -> None:
        """Count delivered rows with these due times. The columns are kept for a while and must not change."""
        self._hand_outs.add(topic, deliver_at_ms, redelivery_count, now_ms=now_ms)

    def planned(self, topic: str, *, sent: int, held: int) -> None:
        """Count the positions of a plan that go to consumers at once, and those that wait."""
        label = self._labels.label(topic)
        for outcome, rows in (("sent", sent), ("held", held)):
            if rows:
                self._planned(label, outcome).inc(rows)

    def key_blocked(self, topic: str, *, rows: int) -> None:
        """Count rows that were kept back because another consumer holds rows of their hash."""
        self._key_blocked(self._labels.label(topic)).inc(rows)

    def taken_back(self, topic: str, *, rows: int) -> None:
        """Count rows taken back from consumers, since they come after a negatively acknowledged one of their hash."""
        self._taken_back(self._labels.label(topic)).inc(rows)

    def trimmed(self, topic: str, *, rows: int, of_subscription: bool) -> None:
        """Count rows that left the topic, or the backlog of one subscription, by a trim or a clear."""
        self._trimmed.labels(self._labels.label(topic), "subscription" if of_subscription else "topic").inc(rows)

    def withdrawn(
        self,
        topic: str,
        result: Literal["cancelled", "rescheduled"],
        *,
        rows: int,
        not_found: int,
        already_due: int,
        in_flight: int,
    ) -> None:
        """Count the results of a cancellation or reschedule: `rows` positions were changed, the others were not."""
        label = self._labels.label(topic)
        series = self._cancelled if result == "cancelled" else self._rescheduled
        results = ((result, rows), ("not_found", not_found), ("already_due", already_due), ("in_flight", in_flight))
        for name, count in results:
            if count:
                series.labels(label, name).inc(count)

    def lease_over(self, topic: str, *, rows: int) -> None:
        """Count the unacknowledged rows of a lease that ended automatically."""
        if rows:
            self._leases_over.labels(self._labels.label(topic)).inc(rows)

    def dead_lettered(self, topic: str, reason: DeadLetterReason, *, rows: int) -> None:
        """Count positions of a subscription that became dead letters."""
        if rows:
            self._dead_lettered.labels(self._labels.label(topic), reason.name.lower()).inc(rows)

    def dead_letters_full(self, topic: str, *, rows: int) -> None:
        """Count positions that are redelivered more often than allowed, since the dead letters have no room."""
        if rows:
            self._dead_letters_full.labels(self._labels.label(topic)).inc(rows)

    def dead_letters_left(self, topic: str, how: Literal["replayed", "purged"], *, rows: int) -> None:
        """Count dead letters that were replayed or purged."""
        series = self._dead_letters_replayed if how == "replayed" else self._dead_letters_purged
        if rows:
            series.labels(self._labels.label(topic)).inc(rows)

    def topic_deleted(self) -> None:
        self._topics_deleted.inc()

    def set_log(self, kept: ObjectCount, *, uncertain_s: float) -> None:
        """Set the size of this daemon's log, and how long its newest slot has been in flight (seconds)."""
        self._log_slots.set(kept.objects)
        self._log_bytes.set(kept.size_bytes)
        self._log_uncertain.set(uncertain_s)

    def log_fenced(self) -> None:
        self._fences.inc()

    def slot_written(self, *, size_bytes: int, seconds: float) -> None:
        self._slot_bytes.observe(size_bytes)
        self._slot_seconds.observe(seconds)

    def commit(
        self, operation: str, outcome: Literal["committed", "refused", "unknown"], *, conflicts: int = 0
    ) -> None:
        """Count a commit that ended; `conflicts` counts how often another one came first."""
        self._commits.labels(operation, outcome).inc()
        self._conflicts.labels(operation).inc(conflicts)

    def store_error(self, operation: str, kind: str) -> None:
        """Count an error by `operation` (put, get ...) and `kind`, its class."""
        self._store_errors.labels(operation, kind).inc()

    def bucket_operation(
        self, type: Literal["create", "load", "merge"], state: Literal["succeed", "failed"], *, seconds: float
    ) -> None:
        self._bucket_count.labels(state, type).inc()
        self._bucket_seconds.labels(type).observe(seconds)

    def merge_ended(self, outcome: MergeOutcome, *, seconds: float) -> None:
        """Count a merge that was made or given up."""
        self._merges.labels(outcome).inc()
        self.bucket_operation("merge", "succeed" if outcome == "merged" else "failed", seconds=seconds)

    def merged(self, *, buckets: int, rows: int, read_bytes: int, written_bytes: int) -> None:
        """Count a bucket of this many rows that replaced others."""
        self._merge_buckets.inc(buckets)
        self._merge_rows.inc(rows)
        self._merge_bytes.labels("read").inc(read_bytes)
        self._merge_bytes.labels("written").inc(written_bytes)

    def set_epoch(self, shard: int, epoch: int) -> None:
        self._epoch.labels(str(shard)).set(epoch)

    def set_serving(self, serving: bool) -> None:
        self._serving.set(int(serving))

    def set_files_refused(self, kind: Literal["certificates", "identities"], refused: bool) -> None:
        """Set whether changed files that were read again are wrong."""
        self._files_refused.labels(kind).set(int(refused))

    def caller_refused(self, refusal: errors.Unauthenticated | errors.PermissionDenied) -> None:
        """Count a call, or a request of a stream, that was not authorized."""
        reason = "unauthenticated" if isinstance(refusal, errors.Unauthenticated) else "permission_denied"
        self._refused_callers.labels(reason).inc()

    def event_loop_paused(self, seconds: float) -> None:
        """Record how late the event loop ran (seconds)."""
        self._loop_pause.observe(seconds)

    def set_tick(self, tick_ms: int) -> None:
        """Set the tick by which deliveries are batched if none is configured (ms)."""
        self._tick.set(tick_ms / 1000)

    def clock_stepped(self, direction: Literal["forward", "back"]) -> None:
        self._clock_steps.labels(direction).inc()

    def set_store_clock_skew(self, seconds: float) -> None:
        self._store_clock_skew.set(seconds)

    def collect_store_requests_from(self, sent: Callable[[], Mapping[str, int]]) -> None:
        """Export the requests to the store by kind; `sent` is called at each scrape, in the scrape's thread."""
        self.registry.register(StoreRequests(sent))

    def collect_expiry_from(self, expiry: Callable[[str], float]) -> None:
        """Ask `expiry` at each scrape when the first certificate in the file of a setting expires (Unix time)."""
        for setting in ("tls.cert_file", "tls.client_ca_file"):
            self._certificate_expiry.labels(setting).set_function(functools.partial(expiry, setting))

    def collect_store_probe_from(self, has_passed: Callable[[], bool]) -> None:
        """Ask `has_passed` at each scrape."""
        self._store_probed.set_function(has_passed)

    def recovered(self, *, seconds: float, rows_replayed: int) -> None:
        """Record how long after the start of serving every topic was loaded or found damaged (seconds)."""
        self._recovery_seconds.observe(seconds)
        self._rows_replayed.inc(rows_replayed)

    def set_topics(self, *, loaded: int, loading: int, damaged: int) -> None:
        for state, topics in (("loaded", loaded), ("loading", loading), ("damaged", damaged)):
            self._topics.labels(state).set(topics)

    def set_shards_damaged(self, shards: int) -> None:
        self._shards_damaged.set(shards)

    def damage_found(self, kind: Literal["shard", "checkpoint", "topic", "bucket"]) -> None:
        """Count something stored that was found damaged or missing for the first time."""
        self._damage.labels(kind).inc()

    def topic_failed(self) -> None:
        self._topics_failed.inc()

    def shard_lost(self, cause: Literal["superseded", "damaged", "failed"]) -> None:
        self._shards_lost.labels(cause).inc()

    def collected(
        self,
        kind: Literal["tombstone", "orphan", "manifest", "journal_slot", "dead_object"],
        *,
        objects: int,
        size_bytes: int,
    ) -> None:
        """Count objects that were no longer needed and were deleted."""
        self._collected_objects.labels(kind).inc(objects)
        self._collected_bytes.labels(kind).inc(size_bytes)

    def collection_failed(self, *, failed: int, given_up: int) -> None:
        """Count objects that could not be deleted; the given-up ones are not tried again automatically."""
        self._collection_failures.inc(failed)
        self._given_up.inc(given_up)

    def set_orphans_refused(self, shard: int, size_bytes: int) -> None:
        """Set how much the last listing of the shard did not delete since it is suspiciously much (bytes)."""
        self._orphans_refused.labels(str(shard)).set(size_bytes)

    def set_tombstones(self, *, objects: int, size_bytes: int) -> None:
        self._tombstones.set(objects)
        self._tombstone_bytes.set(size_bytes)

    def set_collection_age(self, seconds: float) -> None:
        """Set the time since the last successful pass of the shard that has waited longest (seconds)."""
        self._collection_age.set(seconds)

    def read_merged_away(self) -> None:
        """Count a read of a bucket that another process had merged and whose object was deleted."""
        self._merged_away.inc()

    def _counter(self, name: str, meaning: str, *labels: str) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, meaning, labels, registry=self.registry)

    def _gauge(self, name: str, meaning: str, *labels: str) -> prometheus_client.Gauge:
        return prometheus_client.Gauge(name, meaning, labels, registry=self.registry)

    def _histogram(self, name: str, meaning: str, bounds: Sequence[float], *labels: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(name, meaning, labels, registry=self.registry, buckets=bounds)


class _Children:
    """The children of a counter by labels, for events of every row: the library takes 2 us to find one."""

    def __init__(self, counter: prometheus_client.Counter) -> None:
        self._counter = counter
        self._found: dict[tuple[str, ...], prometheus_client.Counter] = {}

    def __call__(self, *labels: str) -> prometheus_client.Counter:
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = self._counter.labels(*labels)
        return found


def export_process(registry: CollectorRegistry) -> None:
    """Add the `process_` series: memory, CPU, open files, start time."""
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    prometheus_client.ProcessCollector(registry=registry)
