"""The gauges of topics, read from the engine when Prometheus asks.

Owns: their names and meaning, the numbers of one topic that they are made of, and the bound on the number of topics
among the series.
Does not own: the numbers (`daemon.owner.topic_inspection`), and what is reported as it happens (`metrics`).
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import metrics_core
from prometheus_client.registry import Collector

ALL_TOPICS = "_all"
OTHER_TOPICS = "_other"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopicNumbers:
    """One topic at the moment of a scrape."""

    topic: str
    pending: int
    mutable_rows: int
    loaded_rows: int
    # Sealed buckets and the mutable one, as PIP-195 counts them.
    buckets: int
    bucket_bytes: int
    backlog: int
    in_flight: int
    leased: int
    # Of the backlog, rows that wait for their redelivery.
    nacked: int
    dead_letters: int
    # Lost with damaged buckets and not added again.
    rebuild_needed: int
    # Consumers of KEY_SHARED streams, rows that wait for their key, and hashes that wait: for what another consumer
    # holds, and for what was negatively acknowledged.
    key_shared_consumers: int
    key_shared_waiting: int
    draining_hashes: int
    nack_blocked_hashes: int
    # 0.0 when nothing is due that was not handed out.
    oldest_due_age_s: float
    # Pending rows by delay level, of levels that have any.
    pending_by_level: Mapping[int, int]
    # Ledgers that have rows, and the lowest position that the log is needed from, None: it is not.
    ledgers: int
    lowest: tuple[int, int] | None


class TopicLabels:
    """Bounds the label `topic`: the first `per_topic_max` topics have their own, the others share one."""

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


class TopicGauges(Collector):
    """The gauges of topics; topics that share a label are summed, ages are the largest of them, and positions, which
    are of different logs, are left out.
    """

    def __init__(self, snapshot: Callable[[], Sequence[TopicNumbers]], labels: TopicLabels) -> None:
        self._snapshot = snapshot
        self._labels = labels

    def describe(self) -> Iterable[metrics_core.Metric]:
        """The families without numbers, so that registering does not ask the engine."""
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
