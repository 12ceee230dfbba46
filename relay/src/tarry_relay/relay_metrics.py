"""Counts what a relay does, as metrics in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from tarry_relay.delivery_steps import TABLE, Passage
from tarry_relay.health import ENDS, Health

_CODES_MAX = 50
"""Codes of answers with a series of their own; others are counted as `other`"""
_LATENESS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 3_600)


class RelayMetrics:
    """The metrics of one relay."""

    def __init__(self, health: Health) -> None:
        """Begin with zeros. `health` supplies the gauges of ends that do not answer."""
        self.health = health
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
        self.returned = counter("returned", "Messages of the retry log that were negatively acknowledged to Tarry.")
        self.returned_early = counter(
            "returned_early", "Messages of the retry log that came back before this relay had acknowledged them."
        )
        self.withdrawals = counter(
            "withdrawals", "Cancels and reschedules of the source that were answered, by result.", "result"
        )
        self.lost = counter("lost", "Due messages that cannot be delivered and are dead letters of Tarry.")
        self.buried = counter(
            "buried", "Messages whose dead letter was refused, bare too: dead letters of Tarry by their position."
        )
        self.unreported = counter(
            "unreported", "Dead letters and results that nothing takes; a line of the log has their position."
        )
        self.overdue = counter(
            "overdue", "Messages without a time that waited too long for their target, and wait in Tarry."
        )
        self.surprises = counter("surprises", "Unexpected exceptions; of: one message, or the session.", "of")
        self.sessions = counter("sessions", "Sessions that were opened.")
        self.answers = counter(
            "answers", "Answers of targets that did not take a message, by meaning and code.", "meaning", "code"
        )
        self._codes: set[str] = set()
        self.failures = counter("failures", "Calls that failed and are repeated; end: broker, target, daemon.", "end")
        self.lateness = Histogram(
            "tarry_relay_lateness_seconds",
            "From the time at which a message is due until its target has confirmed it, by the clock of this machine.",
            registry=self.registry,
            buckets=_LATENESS_S,
        )
        self.cut_ledgers = 0
        """Ledgers of which the source has dropped waiting entries, at the last look"""
        self.warnings = 0
        """Warnings of the last judgement"""
        self.passage: Passage[Any, Any] = Passage("")
        self.registry.register(_UnderWay(self))

    def watch(self, passage: Passage[Any, Any]) -> None:
        """Report the number of messages at each step from now on."""
        self.passage = passage

    def late(self, seconds: float) -> None:
        """Record how long after its due time a message was confirmed (seconds)."""
        self.lateness.observe(max(0.0, seconds))

    def failed(self, end: str, error: str, which: str = "") -> None:
        """Record a call that failed and is repeated; `which` is the name of a target."""
        self.failures.labels(end).inc()
        self.health.failed(end, error, which)

    def not_taken(self, meaning: str, code: str) -> None:
        """Record an answer of a target. Codes beyond the first fifty share a series."""
        if code not in self._codes and len(self._codes) >= _CODES_MAX:
            code = "other"
        self._codes.add(code)
        self.answers.labels(meaning, code).inc()


class _UnderWay:
    """A collector of the messages in flight."""

    def __init__(self, metrics: RelayMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[GaugeMetricFamily]:
        under_way = GaugeMetricFamily("tarry_relay_messages", "Messages in flight, by step.", labels=["step"])
        for step in TABLE:
            under_way.add_metric([step.name.lower()], self._metrics.passage.count(step))
        yield under_way
        yield GaugeMetricFamily(
            "tarry_relay_cut_ledgers",
            "Ledgers of which the source has dropped entries that still wait, at the last look.",
            value=self._metrics.cut_ledgers,
        )
        yield GaugeMetricFamily(
            "tarry_relay_warnings", "Warnings of the last judgement of broker and daemon.", value=self._metrics.warnings
        )
        health = self._metrics.health
        failing = GaugeMetricFamily(
            "tarry_relay_failing_seconds", "How long calls of an end have failed.", labels=["end"]
        )
        for end in (*ENDS, "target"):
            failing.add_metric([end], health.failing_s(end))
        yield failing
        silent = GaugeMetricFamily("tarry_relay_silent_seconds", "How long an end has not answered.", labels=["end"])
        for end in ENDS:
            silent.add_metric([end], health.silent_s(end))
        yield silent
