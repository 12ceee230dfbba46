"""Counts whole columns in Prometheus histograms, and the series of deliveries.

`metrics` alone uses it; it stands apart because it is the hot path of the metrics. Most deliveries of a busy daemon
have one to three rows, and counting each separately costs a tenth of its loop. So columns are kept until many
deliveries are counted together, or a scrape asks.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import metrics_core
from prometheus_client.registry import Collector

from storage_backends.formats.row_columns import U32, U64

# Columns of a histogram that are sorted in together; a column of this many values is sorted in at once.
UNSORTED_COLUMNS_MAX = 256


class ArrayHistogram(Collector):
    """A histogram that takes a whole column at once; the library's takes one value at a time, 1 us each.

    Columns of few values are sorted into the buckets together later. Without labels there is one series.
    """

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], *labels: str) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = np.asarray(bounds, dtype=np.float64)
        self._label_names = labels
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {} if labels else {(): _Series(self._bounds)}

    def observe_ms(self, values: npt.NDArray[np.int64], *labels: str) -> None:
        """Count each value (ms) in the first bucket whose bound (seconds) is not below it."""
        with self._lock:
            series = self._series.get(labels)
            if series is None:
                series = self._series[labels] = _Series(self._bounds)
            series.add(values)

    def collect(self) -> Iterator[metrics_core.Metric]:
        bounds = [*map(str, self._bounds.tolist()), "+Inf"]
        family = metrics_core.HistogramMetricFamily(self._name, self._meaning, labels=self._label_names)
        with self._lock:
            for labels, series in self._series.items():
                cumulative, total = series.read()
                family.add_metric(labels, buckets=list(zip(bounds, cumulative, strict=True)), sum_value=total)
        yield family


class _Series:
    def __init__(self, bounds: npt.NDArray[np.float64]) -> None:
        self._bounds = bounds
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._unsorted: list[npt.NDArray[np.int64]] = []

    def add(self, values: npt.NDArray[np.int64]) -> None:
        self._unsorted.append(values)
        if len(self._unsorted) >= UNSORTED_COLUMNS_MAX or len(values) >= UNSORTED_COLUMNS_MAX:
            self._sort_in()

    def read(self) -> tuple[list[int], float]:
        """Return (number of values at or below each bound, sum of values)."""
        self._sort_in()
        cumulative: list[int] = np.cumsum(self._counts).tolist()
        return cumulative, self._sum

    def _sort_in(self) -> None:
        if not self._unsorted:
            return
        values = np.concatenate(self._unsorted) / 1000
        self._unsorted = []
        places = np.searchsorted(self._bounds, values, side="left")
        self._counts += np.bincount(places, minlength=len(self._counts))
        self._sum += float(values.sum())


# Deliveries that are counted together; one of this many rows is counted at once.
TOGETHER_MAX = 256

# (label of the topic, due times, redelivery counts, time of the delivery)
_HandOut = tuple[str, U64, U32 | None, int]


class HandOutCounts(Collector):
    """The number of rows delivered by topic, and their lateness over all topics. Any thread may use it.

    `label` returns the label of a topic.
    """

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
        """Count delivered rows. The columns are kept and must not change."""
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
                # Rows that were nacked or planned without having been pending have no due time.
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
