"""The series of hand-outs: how many rows, and how late.

Owns: keeping what was handed out, as columns, until many hand-outs are counted together, or somebody asks.
Does not own: the other series (`metrics`).

Most hand-outs of a busy daemon are of one to three rows: to count each by itself costs a tenth of its loop.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from prometheus_client import metrics_core
from prometheus_client.registry import Collector

from daemon.array_histogram import ArrayHistogram
from storage_backends.formats.row_columns import U32, U64

# Hand-outs that are counted together; one of as many rows is counted at once.
TOGETHER_MAX = 256

# Label of the topic, due times, redelivery counts, and the time of the hand-out.
_HandOut = tuple[str, U64, U32 | None, int]


class HandOutCounts(Collector):
    """Counts hand-outs by topic, and their lateness over all topics. `label`: of a topic. May be used in any thread."""

    def __init__(self, label: Callable[[str], str], bounds_s: Sequence[float]) -> None:
        self._label = label
        self._lateness = ArrayHistogram(
            "tarry_lateness_seconds",
            "Delivery time minus due time; repeated deliveries count, redeliveries do not.",
            bounds_s,
        )
        self._rows: collections.Counter[str] = collections.Counter()
        self._lock = threading.Lock()
        self._uncounted: collections.deque[_HandOut] = collections.deque()

    def add(self, topic: str, deliver_at_ms: U64, redelivery_count: U32 | None, *, now_ms: int) -> None:
        """Rows were handed out. The columns are kept; they must not change."""
        self._uncounted.append((self._label(topic), deliver_at_ms, redelivery_count, now_ms))
        if len(self._uncounted) >= TOGETHER_MAX or len(deliver_at_ms) >= TOGETHER_MAX:
            self._count()

    def _count(self) -> None:
        with self._lock:
            columns, rows, times_ms = [], [], []
            while self._uncounted:
                label, due_ms, counts, now_ms = self._uncounted.popleft()
                self._rows[label] += len(due_ms)
                columns.append(due_ms if counts is None else due_ms[counts == 0])
                rows.append(len(columns[-1]))
                times_ms.append(now_ms)
            if columns:
                due_ms = np.concatenate(columns)
                lateness_ms = np.repeat(np.array(times_ms, np.int64), rows) - due_ms.astype(np.int64)
                # What was nacked or planned without having been pending has no time at which it was due.
                self._lateness.observe_ms(lateness_ms[due_ms > 0])

    def collect(self) -> Iterator[metrics_core.Metric]:
        self._count()
        family = metrics_core.CounterMetricFamily(
            "tarry_handed_out_rows", "Rows delivered to dispatchers, repeats included.", labels=["topic"]
        )
        with self._lock:
            for label, rows in self._rows.items():
                family.add_metric([label], rows)
        yield family
        yield from self._lateness.collect()
