"""Presents a forecast in the terminal and as JSON.

`batch.cli.forecast` alone uses this module, which needs no command line.
"""

from __future__ import annotations

from typing import Any, Final

from rich import cells
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text

from batch.forecast.result import STEP_NAMES, Bars, Forecast, TopicForecast, shown, timestamp, utc, width_name

BARS_MAX: Final = 32
"""Lines of the chart: as many as fit on a screen"""

_BAR_COLUMNS_MIN: Final = 10
# Room for the names of topics before columns are left out, in this order
_NAME_COLUMNS: Final = 24
_SPARE_COLUMNS: Final = ("share", "beyond", "redeliveries", "deliveries", "from (UTC)")


def print_forecast(forecast: Forecast, top: int, console: Console) -> None:
    """Print the totals, a chart of all topics together, and the `top` busiest topics and steps."""
    console.print(_totals(forecast))
    if forecast.peak is not None:
        console.print()
        _print_chart(forecast, console)
        console.print()
    if busiest := forecast.busiest_topics(top):
        console.print(_topics(forecast, busiest, console.width))
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
        # A single row is visible, too: an eighth of a column is the least that is drawn.
        length = max(count, most / (8 * columns - 1)) if count else 0
        label = f"{date if date != day else '':10} {time}"
        grid.add_row(Text(label), f"{count:,}", Bar(most, 0, length, width=columns, color="cyan"))
        day = date
    console.print(Text(f"Rows due per {width_name(bars.width_ms)}, from (UTC)", style="bold"))
    console.print(grid)


def _topics(forecast: Forecast, busiest: list[TopicForecast], columns_max: int) -> Table:
    """Make the table of topics.

    If the terminal has fewer than the needed columns, spare columns are left out.
    """
    columns = _columns_of_topics(forecast, busiest)
    name_columns = min(_NAME_COLUMNS, max(map(cells.cell_len, columns["topic"])))
    for spare in _SPARE_COLUMNS:
        needed = sum(max(map(len, [name, *column])) + 2 for name, column in columns.items() if name != "topic")
        if needed + name_columns <= columns_max:
            break
        columns.pop(spare, None)
    table = _table(f"Busiest topics ({len(busiest)} of {len(forecast.topics):,})")
    for name in columns:
        if name == "topic":
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for line in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, line))
    return table


def _columns_of_topics(forecast: Forecast, topics: list[TopicForecast]) -> dict[str, list[str]]:
    """Return the columns by their names, without those whose values would all be the same."""
    steps, total = forecast.steps, forecast.load.rows_within
    loads = [topic.load for topic in topics]
    peaks = [int(load.rows.argmax()) if len(load.rows) else None for load in loads]
    at = [None if place is None else int(load.step[place]) for load, place in zip(loads, peaks, strict=True)]
    most = [None if place is None else int(load.rows[place]) for load, place in zip(loads, peaks, strict=True)]
    columns = {
        "topic": [shown(topic.topic) for topic in topics],
        "rows": [f"{topic.rows:,}" for topic in topics],
        "redeliveries": [f"{topic.redeliveries:,}" for topic in topics],
        "share": [f"{load.rows_within / total:.1%}" if total else "" for load in loads],
        "deliveries": [f"{topic.deliveries:,}" for topic in topics],
        f"peak {_step(forecast)}": ["" if rows is None else f"{rows:,}" for rows in most],
        "from (UTC)": ["" if step is None else utc(steps.begin_ms(step)) for step in at],
        "overdue": [f"{topic.overdue_rows:,}" for topic in topics],
        "beyond": [f"{load.beyond_rows:,}" for load in loads],
    }
    if not forecast.redeliveries:
        del columns["redeliveries"]
    if forecast.deliveries in (0, total):
        del columns["deliveries"]
    return columns


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
    """Return the forecast as one JSON document.

    Times are RFC 3339, UTC; `load` is rows and redeliveries together. Only the Parquet file has every step of every
    topic.
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
