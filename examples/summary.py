"""Shows the figures of a demo run, as JSON and drawn in the terminal.

`examples.flights` alone uses this module, which measures nothing itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import rich.box
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from examples import verdict

_BARS = " ▁▂▃▄▅▆▇█"
_HISTOGRAM_ROWS = 6
_HISTOGRAM_COLUMNS = 72


@dataclasses.dataclass(frozen=True)
class Lateness:
    """The lateness of rows: receipt by the client minus due time, of the first receipt of each row."""

    rows: int
    p50_ms: float
    p99_ms: float
    max_ms: float

    @staticmethod
    def of(lateness_ms: NDArray[np.int64]) -> Lateness:
        if not len(lateness_ms):
            return Lateness(0, 0.0, 0.0, 0.0)
        p50, p99 = np.percentile(lateness_ms, [50, 99])
        return Lateness(len(lateness_ms), float(p50), float(p99), float(lateness_ms.max()))


@dataclasses.dataclass(frozen=True)
class Kill:
    """One SIGKILL: the work at risk just before it, and how long the recovery took."""

    name: str
    at_ms: int
    buckets: int
    sealed_rows: int
    mutable_rows: int
    backlog: int
    requests_in_flight: int
    rows_in_flight: int
    serving_after_s: float
    """From the kill until health said SERVING (seconds)"""
    working_after_s: float
    """From the kill until the client had the first answer (adds) or the first rows (deliveries) (seconds)"""


@dataclasses.dataclass(frozen=True)
class Figures:
    """One run of the demo."""

    store: str
    settings: dict[str, object]
    rows: int
    span_s: float
    run_s: float
    add_rows_per_s: float
    """While adding, without the outage"""
    receive_rows_per_s: float
    """The median over the seconds in which rows came"""
    ordinary: Lateness
    late_on_arrival: Lateness
    """Rows whose time had come before their add was answered"""
    delayed_by_kills: Lateness
    """Rows that came due during an outage of the daemon"""
    kills: tuple[Kill, ...]
    bucket_bytes_per_row: float
    stored_bytes_per_row: float
    """Everything on the store, log included, when all rows were added"""
    resident_idle_bytes: int
    resident_loaded_bytes: int
    """With every row pending"""
    resident_bytes_max: int
    due_histogram: tuple[int, ...]
    verdict: verdict.Verdict

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"kept": self.verdict.kept}


def due_histogram(deliver_at_ms: NDArray[np.int64]) -> tuple[int, ...]:
    """Count rows by due time, in as many columns as are drawn."""
    counts, _ = np.histogram(deliver_at_ms, bins=_HISTOGRAM_COLUMNS)
    return tuple(counts.tolist())


def draw(console: Console, figures: Figures) -> None:
    """Print everything."""
    _draw_histogram(console, figures)
    console.print(_figures_table(figures), _lateness_table(figures), _kills_table(figures), _verdict_table(figures))
    console.print("[bold green]kept: every promise[/]" if figures.verdict.kept else "[bold red]BROKEN: see above[/]")


def _draw_histogram(console: Console, figures: Figures) -> None:
    peak = max(figures.due_histogram)
    width_s = figures.span_s / len(figures.due_histogram)
    console.print(
        f"\n[bold]Due times[/]: {figures.rows:,} rows, a column is {width_s:.2f} s, the highest {peak:,} rows"
    )
    for row in reversed(range(_HISTOGRAM_ROWS)):
        eighths = (round(8 * (count * _HISTOGRAM_ROWS / peak - row)) for count in figures.due_histogram)
        console.print("  [cyan]" + "".join(_BARS[min(8, max(0, each))] for each in eighths) + "[/]")
    console.print(f"  0 s{f'{figures.span_s:.0f} s':>{_HISTOGRAM_COLUMNS - 3}}\n")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _figures_table(figures: Figures) -> Table:
    table = _table(f"Run of {figures.run_s:.1f} s on {figures.store}", "", "")
    grown = figures.resident_loaded_bytes - figures.resident_idle_bytes
    mebibyte = 2**20
    for name, value in (
        ("settings", ", ".join(f"{name}={value}" for name, value in figures.settings.items())),
        ("rows added a second", f"{figures.add_rows_per_s:,.0f}"),
        ("rows received a second, median", f"{figures.receive_rows_per_s:,.0f}"),
        ("bytes a row in sealed buckets", f"{figures.bucket_bytes_per_row:.2f}"),
        ("bytes a row on the store, journal included", f"{figures.stored_bytes_per_row:.1f}"),
        ("resident, idle", f"{figures.resident_idle_bytes / mebibyte:.0f} MiB"),
        ("resident, all rows pending", f"{figures.resident_loaded_bytes / mebibyte:.0f} MiB"),
        ("resident growth, bytes a pending row", f"{grown / figures.rows:.1f}"),
        ("resident, highest", f"{figures.resident_bytes_max / mebibyte:.0f} MiB"),
    ):
        table.add_row(name, value)
    return table


def _lateness_table(figures: Figures) -> Table:
    table = _table("Lateness: receipt by the client minus due time, ms", "rows", "number", "p50", "p99", "max")
    for name, lateness in (
        ("ordinary", figures.ordinary),
        ("late on arrival", figures.late_on_arrival),
        ("delayed by a kill", figures.delayed_by_kills),
    ):
        times = (lateness.p50_ms, lateness.p99_ms, lateness.max_ms)
        table.add_row(name, f"{lateness.rows:,}", *(f"{each:,.0f}" if lateness.rows else "-" for each in times))
    return table


def _kills_table(figures: Figures) -> Table:
    table = _table("SIGKILL: what there was to lose, and the way back", "", *(kill.name for kill in figures.kills))
    for name, field in (
        ("sealed buckets", "buckets"),
        ("pending rows in sealed buckets", "sealed_rows"),
        ("pending rows in the mutable bucket", "mutable_rows"),
        ("due and not acknowledged", "backlog"),
        ("requests in flight", "requests_in_flight"),
        ("rows in flight", "rows_in_flight"),
    ):
        table.add_row(name, *(f"{getattr(kill, field):,}" for kill in figures.kills))
    table.add_row("serving again after", *(f"{kill.serving_after_s:.2f} s" for kill in figures.kills))
    table.add_row("client at work again after", *(f"{kill.working_after_s:.2f} s" for kill in figures.kills))
    return table


def _verdict_table(figures: Figures) -> Table:
    table = _table("Checked by identity, every row", "promise", "broken by")
    for rule in figures.verdict.rules:
        table.add_row(rule.name, "[green]0[/]" if rule.broken == 0 else f"[bold red]{rule.broken:,}[/]")
    table.add_row(
        "[dim]no breach: handed out again because of a kill[/]", f"[dim]{figures.verdict.handed_out_again:,}[/]"
    )
    return table
