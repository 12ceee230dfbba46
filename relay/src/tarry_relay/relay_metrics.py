"""What a relay tells of itself: metrics, and whether its two ends answer.

Owns: the metrics, their names, and the health of each end.
Does not own: when something is counted, and who asks (`tarry_relay.told_by_http`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from tarry_relay.passage import TABLE, Passage

_LATENESS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3_600)


class RelayMetrics:
    """The metrics of one relay, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tarry_relay_{name}", text, labels, registry=self.registry)

        self.read = counter("read", "Messages read from the source and from the retry log.")
        self.added = counter("added", "Messages added to Tarry that were new to it.")
        self.duplicates = counter("duplicates", "Messages added to Tarry that it had already.")
        self.bad = counter("bad", "Messages whose time, level, target or delivery id cannot be used.")
        self.committed = counter("committed", "Messages committed to the log that they were read from.")
        self.produced = counter(
            "produced",
            "Messages published and confirmed; step: fetched (they were due), direct, a result, bad or bare.",
            "step",
        )
        self.returned = counter("returned", "Messages of the retry log that were handed back to Tarry.")
        self.returned_early = counter(
            "returned_early", "Messages of the retry log that came back before this relay had acknowledged them."
        )
        self.withdrawals = counter(
            "withdrawals", "Cancels and reschedules of the source that were answered, by result.", "result"
        )
        self.lost = counter("lost", "Due messages that cannot be delivered and are dead letters of Tarry.")
        self.failures = counter("failures", "Calls that failed and are repeated; end: broker, target, daemon.", "end")
        self.lateness = Histogram(
            "tarry_relay_lateness_seconds",
            "From the time at which a message is due until its target has confirmed it, by the clock of this machine.",
            registry=self.registry,
            buckets=_LATENESS_S,
        )
        self.cut_ledgers = 0
        """Ledgers of which the source has dropped entries that still wait, at the last look."""
        self._failing: dict[tuple[str, str], tuple[float, str]] = {}
        self.passage: Passage[Any, Any] = Passage("")
        self.registry.register(_UnderWay(self))

    def watch(self, passage: Passage[Any, Any]) -> None:
        """Shows how many messages are at each step from now on."""
        self.passage = passage

    def late(self, seconds: float) -> None:
        """A message that was due was confirmed so much later."""
        self.lateness.observe(max(0.0, seconds))

    def failed(self, end: str, error: str, which: str = "") -> None:
        """A call has failed, and will be repeated. `which`: of targets, the name."""
        self.failures.labels(end).inc()
        since_s, _ = self._failing.get((end, which), (time.monotonic(), ""))
        self._failing[end, which] = since_s, error

    def reachable(self, end: str, which: str = "") -> None:
        """A call was answered."""
        self._failing.pop((end, which), None)

    def failing(self) -> dict[str, dict[str, object]]:
        """The ends whose last call has failed: for how long, and what the last failure said."""
        now_s = time.monotonic()
        # It is asked by another thread.
        return {
            f"{end} {which}".strip(): {"for_s": round(now_s - since_s, 1), "error": error}
            for (end, which), (since_s, error) in self._failing.copy().items()
        }

    def failing_s(self, end: str) -> float:
        """For how long an end, or that of the targets which has failed first, has not answered."""
        now_s = time.monotonic()
        failing = self._failing.copy().items()
        return max((now_s - since_s for (name, _), (since_s, _) in failing if name == end), default=0.0)


class _UnderWay:
    """What is under way, when it is asked for."""

    def __init__(self, metrics: RelayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        under_way = GaugeMetricFamily("tarry_relay_messages", "Messages that are under way, by step.", labels=["step"])
        for step in TABLE:
            under_way.add_metric([step.name.lower()], self._metrics.passage.count(step))
        yield under_way
        yield GaugeMetricFamily(
            "tarry_relay_cut_ledgers",
            "Ledgers of which the source has dropped entries that still wait, at the last look.",
            value=self._metrics.cut_ledgers,
        )
        failing = GaugeMetricFamily("tarry_relay_failing_seconds", "How long an end has not answered.", labels=["end"])
        for end in ("broker", "daemon", "target"):
            failing.add_metric([end], self._metrics.failing_s(end))
        yield failing
