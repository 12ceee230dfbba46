"""A forecast for people and for programs: in the terminal, and as JSON.

Owns: what is shown of it, and how. Does not own: the numbers (`forecast_result`).
"""

from __future__ import annotations

from typing import Any, Final

from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from compaction.forecast_result import (
    STEP_NAMES,
    Bars,
    Forecast,
    TopicForecast,
    shown,
    timestamp,
    utc,
    width_name,
)

BARS_MAX: Final = 32
"""Lines of the chart: what a screen has room for."""

_BAR_COLUMNS_MIN: Final = 10


def print_forecast(forecast: Forecast, top: int, console: Console) -> None:
    """The totals, a chart of all topics together, the `top` busiest topics and steps."""
    console.print(_totals(forecast))
    if forecast.peak is not None:
        console.print()
        _print_chart(forecast, console)
        console.print()
    if busiest := forecast.busiest_topics(top):
        console.print(_topics(forecast, busiest))
    if forecast.peak is not None:
        console.print()
        console.print(_steps(forecast, top))


def _totals(forecast: Forecast) -> Table:
    steps = forecast.steps
    grid = Table.grid(padding=(0, 2, 0, 0))
    topics = f"{len(forecast.topics):,} topic{'' if len(forecast.topics) == 1 else 's'}"
    grid.add_row("forecast", f"{topics}, {utc(steps.now_ms)} to {utc(steps.until_ms)} UTC, by the {_step(forecast)}")
    again = f", and {forecast.redeliveries:,} redeliveries" if forecast.redeliveries else ""
    grid.add_row("due", f"{forecast.rows:,} rows{again}: {forecast.deliveries:,} deliveries")
    if forecast.peak is None:
        grid.add_row("peak", "none: nothing comes due")
    else:
        step, rows = forecast.peak
        grid.add_row("peak", f"{rows:,} in the {_step(forecast)} of {utc(steps.begin_ms(step))} UTC")
    grid.add_row("overdue", f"{forecast.overdue_rows:,} rows are due already and not acknowledged")
    grid.add_row("beyond", f"{forecast.beyond_rows:,} come due later")
    if forecast.unread_rows:
        grid.add_row(Text("not counted", style="bold red"), f"{forecast.unread_rows:,} rows that cannot be read")
    return grid


def _print_chart(forecast: Forecast, console: Console) -> None:
    steps = forecast.steps
    bars = Bars.of(steps, BARS_MAX)
    rows = bars.rows(forecast.load, steps).tolist()
    most = max(rows)
    label_columns = len(utc(steps.now_ms)) + len(f"{most:,}") + 4
    columns = max(_BAR_COLUMNS_MIN, console.width - label_columns - 1)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    day = ""
    for begin_ms, count in zip(bars.begins_ms(), rows, strict=True):
        date, time = utc(begin_ms).split()
        # A single row is seen, too: an eighth of a column is the least that is drawn.
        length = max(count, most / (8 * columns - 1)) if count else 0
        label = f"{date if date != day else '':10} {time}"
        grid.add_row(Text(label), f"{count:,}", Bar(most, 0, length, width=columns, color="cyan"))
        day = date
    console.print(Text(f"Rows due per {width_name(bars.width_ms)}, from (UTC)", style="bold"))
    console.print(grid)


def _topics(forecast: Forecast, busiest: list[TopicForecast]) -> Table:
    table = _table(f"Busiest topics ({len(busiest)} of {len(forecast.topics):,})")
    columns = ["topic", "rows", "redeliveries", "share", "deliveries", f"peak {_step(forecast)}", "from (UTC)"]
    columns += ["overdue", "beyond"]
    lines = [_topic_line(forecast, topic) for topic in busiest]
    # Where nothing is handed out or comes back, there is room for names.
    left_out = {"redeliveries"} if not forecast.redeliveries else set()
    left_out |= {"deliveries"} if not forecast.deliveries else set()
    shown_columns = [number for number, name in enumerate(columns) if name not in left_out]
    for number in shown_columns:
        name = columns[number]
        table.add_column(
            name,
            justify="left" if name in ("topic", "from (UTC)") else "right",
            overflow="fold",
            no_wrap=name != "topic",
        )
    for line in lines:
        table.add_row(*(line[number] for number in shown_columns))
    return table


def _topic_line(forecast: Forecast, topic: TopicForecast) -> list[str | Text]:
    load, total = topic.load, forecast.load.rows_within
    place = int(load.rows.argmax()) if len(load.rows) else None
    return [
        Text(shown(topic.topic)),
        f"{topic.rows:,}",
        f"{topic.redeliveries:,}",
        f"{load.rows_within / total:.1%}" if total else "",
        f"{topic.deliveries:,}",
        "" if place is None else f"{int(load.rows[place]):,}",
        "" if place is None else utc(forecast.steps.begin_ms(int(load.step[place]))),
        f"{topic.overdue_rows:,}",
        f"{load.beyond_rows:,}",
    ]


def _steps(forecast: Forecast, top: int) -> Table:
    table = _table(f"Busiest {_step(forecast)}s")
    table.add_column("from (UTC)", no_wrap=True)
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("most of them of", overflow="fold")
    for busy in forecast.busiest_steps(top):
        topics = ", ".join(f"{shown(name)} {rows:,}" for name, rows in busy.topics)
        table.add_row(utc(forecast.steps.begin_ms(busy.step)), f"{busy.rows:,}", Text(topics))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=None, padding=(0, 2, 0, 0))


def _step(forecast: Forecast) -> str:
    return STEP_NAMES[forecast.steps.step_ms]


def document(forecast: Forecast, top: int) -> dict[str, Any]:
    """The same as one JSON document; times are RFC 3339, UTC; `load` is rows and redeliveries together. Every step of
    every topic is in the Parquet file only.
    """
    steps = forecast.steps
    bars = Bars.of(steps, BARS_MAX)
    peak = forecast.peak
    return {
        "as_of": timestamp(steps.now_ms),
        "from": timestamp(steps.begin_ms(0)),
        "until": timestamp(steps.until_ms),
        "step": _step(forecast),
        "topics": len(forecast.topics),
        "rows": forecast.rows,
        "redeliveries": forecast.redeliveries,
        "deliveries": forecast.deliveries,
        "overdue_rows": forecast.overdue_rows,
        "beyond_rows": forecast.beyond_rows,
        "unread_rows": forecast.unread_rows,
        "peak": None if peak is None else {"from": timestamp(steps.begin_ms(peak[0])), "load": peak[1]},
        "chart": {
            "from": timestamp(bars.begin_ms),
            "width_ms": bars.width_ms,
            "load": bars.rows(forecast.load, steps).tolist(),
        },
        "busiest_topics": [_topic_document(forecast, topic) for topic in forecast.busiest_topics(top)],
        "busiest_steps": [
            {
                "from": timestamp(steps.begin_ms(busy.step)),
                "load": busy.rows,
                "topics": [{"topic": name, "load": rows} for name, rows in busy.topics],
            }
            for busy in forecast.busiest_steps(top)
        ],
        "unread": list(forecast.unread),
        "effort": forecast.effort,
    }


def _topic_document(forecast: Forecast, topic: TopicForecast) -> dict[str, Any]:
    load = topic.load
    place = int(load.rows.argmax()) if len(load.rows) else None
    return {
        "topic": topic.topic,
        "shard": topic.shard,
        "rows": topic.rows,
        "redeliveries": topic.redeliveries,
        "deliveries": topic.deliveries,
        "overdue_rows": topic.overdue_rows,
        "beyond_rows": load.beyond_rows,
        "unread_rows": topic.unread_rows,
        "peak": None
        if place is None
        else {"from": timestamp(forecast.steps.begin_ms(int(load.step[place]))), "load": int(load.rows[place])},
        "owed": [
            {
                "subscription": owed.subscription,
                "rows": owed.rows.rows_within,
                "redeliveries": owed.redeliveries.rows_within,
            }
            for owed in topic.owed
        ],
    }
