"""Metrics of a compaction as a text file, which the node exporter's textfile collector shows to Prometheus.

Owns: the metrics' names, and that the time of the last success outlives a failure.
Does not own: what they count (`summary`), alerts on them (deploy/).

A job is no server that could be asked: the file says how the last run ended, and is replaced as a whole. All are
gauges: a counter would have to be carried on from file to file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import prometheus_client
from prometheus_client import parser

from batch.compaction.summary import Summary

LAST_RUN: Final = "tarry_compaction_last_run_timestamp_seconds"
LAST_SUCCESS: Final = "tarry_compaction_last_success_timestamp_seconds"


def write(path: Path, summary: Summary) -> None:
    """Replaces the file at once, so that the collector sees the former one or this. Raises OSError."""
    last_success_s = _read(path, LAST_SUCCESS)
    ended_s = summary.began_ms / 1000 + summary.seconds.total
    _write(path, ended_s, ended_s if summary.exit_status == 0 else last_success_s, summary.exit_status, summary)


def write_failure(path: Path, *, ended_ms: int, exit_status: int) -> None:
    """The job failed before it could say what it did. Raises OSError."""
    _write(path, ended_ms / 1000, _read(path, LAST_SUCCESS), exit_status, None)


def _read(path: Path, name: str) -> float | None:
    """A value of the file of the last run; None where there is none, or it is no such file."""
    with contextlib.suppress(OSError, ValueError):
        for family in parser.text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples:
                if sample.name == name:
                    return sample.value
    return None


def _write(path: Path, ended_s: float, last_success_s: float | None, exit_status: int, summary: Summary | None) -> None:
    registry = prometheus_client.CollectorRegistry()

    def gauge(name: str, help_text: str, value: float) -> None:
        prometheus_client.Gauge(name, help_text, registry=registry).set(value)

    gauge(LAST_RUN, "End of the last compaction, in Unix time (seconds).", ended_s)
    if last_success_s is not None:
        gauge(LAST_SUCCESS, "End of the last compaction with exit status 0, in Unix time (seconds).", last_success_s)
    gauge(
        "tarry_compaction_exit_status",
        "Exit status of the last compaction: 0 done, 75 conflicts are left, 1 error.",
        exit_status,
    )
    if summary is not None:
        _add(registry, summary)
    prometheus_client.write_to_textfile(str(path), registry)


def _add(registry: prometheus_client.CollectorRegistry, summary: Summary) -> None:
    runs, seconds = summary.runs, summary.seconds
    labelled: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
        (
            "tarry_compaction_buckets",
            "Live buckets of all topics before and after the last compaction.",
            "when",
            {"before": summary.buckets_before, "after": summary.buckets_after},
        ),
        (
            "tarry_compaction_runs",
            "Merges of the last compaction, by outcome.",
            "outcome",
            {
                "committed": runs.committed,
                "refused": runs.refused,
                "failed": runs.failed,
                "left": runs.left,
                "unknown": runs.unknown,
                "replanned": runs.replanned,
            },
        ),
        (
            "tarry_compaction_rows",
            "Rows of the merges that the last compaction committed: kept, or dropped because they were gone.",
            "what",
            {"kept": summary.rows_kept, "dropped": summary.rows_dropped},
        ),
        (
            "tarry_compaction_bytes",
            "Bytes of the merges that the last compaction committed: read and written.",
            "what",
            {"read": summary.bytes_read, "written": summary.bytes_written},
        ),
        (
            "tarry_compaction_phase_seconds",
            "Time of the last compaction by phase (seconds); worker_ phases are sums over the workers.",
            "phase",
            {name: getattr(seconds, name) for name in seconds.__struct_fields__ if name != "total"},
        ),
    )
    for name, help_text, label, values in labelled:
        family = prometheus_client.Gauge(name, help_text, [label], registry=registry)
        for value_name, value in values.items():
            family.labels(value_name).set(value)
    for name, help_text, value in (
        ("tarry_compaction_duration_seconds", "Duration of the last compaction (seconds).", seconds.total),
        ("tarry_compaction_topics", "Topics that the last compaction read.", summary.topics),
        ("tarry_compaction_topics_unreadable", "Topics that the last compaction could not read.", _unreadable(summary)),
    ):
        prometheus_client.Gauge(name, help_text, registry=registry).set(value)


def _unreadable(summary: Summary) -> int:
    return sum(1 for topic in summary.topic_results if topic.error)
