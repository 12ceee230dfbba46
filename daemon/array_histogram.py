"""A histogram of Prometheus that takes whole columns.

Owns: counting columns into buckets. Does not own: which histograms there are (`metrics`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from prometheus_client import metrics_core
from prometheus_client.registry import Collector

# Columns of a histogram that are sorted in together; one of as many values is sorted in at once.
UNSORTED_COLUMNS_MAX = 256


class ArrayHistogram(Collector):
    """A histogram that takes a whole column at once; the library's takes one value at a time, 1 us each.

    Columns of few values are sorted into the buckets together, some time later. Without labels there is one series.
    """

    def __init__(self, name: str, meaning: str, bounds: Sequence[float], *labels: str) -> None:
        self._name = name
        self._meaning = meaning
        self._bounds = np.asarray(bounds, dtype=np.float64)
        self._label_names = labels
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {} if labels else {(): _Series(self._bounds)}

    def observe_ms(self, values: npt.NDArray[np.int64], *labels: str) -> None:
        """Counts each value, in ms, in the first bucket whose bound, in seconds, is not below it."""
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
        """(how many were at most each bound, their sum)."""
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
