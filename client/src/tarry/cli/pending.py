"""Commands that show rows: scheduled, histogram, backlog.

Also draws the histogram in a terminal: round widths, round beginnings, and bars.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import click
import rich.bar
import rich.console
import rich.table
import rich.text

from tarry import inspection
from tarry.cli import connection, output, rows
from tarry.printable import printable
from tarry.threads import client

_SECOND_MS, _DAY_MS = 1000, 86_400_000
_WIDTHS_MS = tuple(
    count * unit_ms
    for unit_ms, counts in (
        (1, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (_SECOND_MS, (1, 2, 5, 10, 15, 30)),
        (60_000, (1, 2, 5, 10, 15, 30)),
        (3_600_000, (1, 2, 3, 6, 12)),
        (_DAY_MS, (1, 2, 7, 14, 28, 91, 182, 364)),
    )
    for count in counts
)

# Bars that fit a screen
BARS_WANTED = 30
# A longer run of empty bars becomes one line.
_EMPTY_SHOWN = 6
# Columns for the bars, however long their labels are
_BAR_COLUMNS_MIN = 10


def round_width_ms(span_ms: int) -> int:
    """Return the smallest round width that makes at most `BARS_WANTED` bars and a part of one."""
    for width_ms in _WIDTHS_MS:
        if span_ms <= width_ms * BARS_WANTED:
            return width_ms
    return -(-span_ms // (BARS_WANTED * _DAY_MS)) * _DAY_MS


def first_begin_ms(now_ms: int, width_ms: int) -> int:
    """Return the last moment until now at which a bar of this width begins, counted from local midnight."""
    offset = output.local_time(now_ms).utcoffset() or datetime.timedelta()
    offset_ms = offset // datetime.timedelta(milliseconds=1)
    return max(0, (now_ms + offset_ms) // width_ms * width_ms - offset_ms)


def draw(histogram: inspection.Histogram, title: str) -> None:
    """Draw a line for each bar: its beginning and end in local time, its rows, and a bar; the longest is full width."""
    console = rich.console.Console()
    lines = list(_lines(histogram))
    most = int(histogram.rows.max(initial=0))
    label_columns = max((len(label) for label, _ in lines), default=0)
    bar_columns = max(_BAR_COLUMNS_MIN, console.width - label_columns - len(f"{most:,}") - 4)
    grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    for label, drawn in lines:
        if drawn is None:
            grid.add_row(rich.text.Text(label, style="dim"), "", "")
            continue
        # A single row among millions must be visible: an eighth of a column is the smallest that is drawn, and a bit
        # more is not rounded to nothing.
        length = max(drawn, most / (8 * bar_columns - 1)) if drawn else 0
        grid.add_row(rich.text.Text(label), f"{drawn:,}", rich.bar.Bar(most or 1, 0, length, width=bar_columns))
    console.print(rich.text.Text(printable(title)))
    console.print(grid)


def _lines(histogram: inspection.Histogram) -> Iterator[tuple[str, int | None]]:
    """Yield labels with rows; a long run of empty bars is one line, without rows."""
    counts = histogram.rows.tolist()
    day = ""
    number = 0
    while number < len(counts):
        from_ms, until_ms = bounds_ms(histogram, number)
        date, begin, end = _label(from_ms, until_ms, histogram.width_ms)
        empty = next((ahead for ahead, rows in enumerate(counts[number:]) if rows), len(counts) - number)
        if empty > _EMPTY_SHOWN:
            yield f"{'':10} ... {empty:,} empty bars", None
            number += empty
            continue
        yield f"{date if date != day else '':10}{begin} - {end}", counts[number]
        day = date
        number += 1


def bounds_ms(histogram: inspection.Histogram, number: int) -> tuple[int, int]:
    """Return the beginning and the (excluded) end of a bar."""
    from_ms = histogram.from_ms + number * histogram.width_ms
    return from_ms, min(from_ms + histogram.width_ms, histogram.until_ms)


def _label(from_ms: int, until_ms: int, width_ms: int) -> tuple[str, str, str]:
    """Return the day on which a bar begins, its beginning, and its end."""
    begin, end = output.local_time(from_ms), output.local_time(until_ms)
    at_midnight = begin.time() == end.time() == datetime.time()
    if at_midnight and width_ms % _DAY_MS == 0:
        return f"{begin:%Y-%m-%d}", "", f"{end:%Y-%m-%d}"
    # Labels are as precise as the width: a last bar that is cut short may end slightly later than shown.
    if width_ms % 60_000 == 0 and from_ms % 60_000 == 0:
        timespec = "minutes"
    else:
        timespec = "milliseconds" if width_ms % _SECOND_MS else "seconds"
    ends_on = f"{end:%m-%d} " if width_ms >= _DAY_MS else ""
    return (
        f"{begin:%Y-%m-%d}",
        " " + begin.time().isoformat(timespec),
        ends_on + end.time().isoformat(timespec),
    )


# Rows that a terminal shows by default
ROWS_IN_TERMINAL = 50
# Most rows of a page
_PAGE_ROWS_MAX = 10_000


def _window_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a range of times and ledgers."""
    for option in (
        click.option("--subscription", help="Only what this subscription is owed."),
        _ledgers_option,
        click.option(
            "--until", "until_ms", type=rows.Moment(), help="Due before this time: +1h, ISO 8601 or Unix time in ms."
        ),
        click.option("--from", "from_ms", type=rows.Moment(), help="Due at this time or later: now, +30m, ISO 8601."),
    ):
        command = option(command)
    return command


def _ledgers_option(command: Callable[..., None]) -> Callable[..., None]:
    return click.option(
        "--ledgers", type=rows.EntryRange("ledgers"), metavar="N or FIRST-LAST", help="Only these, both ends included."
    )(command)


def limit_option(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the option that limits its rows."""
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        help=f"At most this many rows.  [default: {ROWS_IN_TERMINAL} in a terminal, otherwise all]",
    )(command)


@connection.command()
@click.argument("topic")
@_window_options
@limit_option
@connection.connected
def scheduled(
    *,
    connected: client.Client,
    topic: str,
    from_ms: int | None,
    until_ms: int | None,
    ledgers: range | None,
    subscription: str | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the rows of TOPIC that are not due yet, in due order.

    The last column names the only subscription of a row; - means every subscription.

    \b
    Examples:
      tarry scheduled flights
      tarry scheduled flights --until +1h --ledgers 1-99
      tarry scheduled flights --from 2030-01-31T12:00 --until 2030-01-31T13:00 --json
    """
    limit = limit_of(limit, as_json=as_json)

    def page(token: str, page_size: int) -> inspection.ScheduledPage:
        return connected.scheduled_page(
            topic,
            token,
            from_ms=from_ms,
            until_ms=until_ms,
            ledgers=ends_of(ledgers),
            subscription=subscription,
            page_size=page_size,
        )

    def only_for(page: inspection.ScheduledPage) -> dict[str, list[Any]]:
        return {"subscription": [page.subscriptions[index] or None for index in page.subscription_index.tolist()]}

    window = "" if (from_ms, until_ms, ledgers) == (None, None, None) else " in this range"
    about = connection.of_topic(topic, subscription)
    _show_rows(
        Pages(page, limit),
        only_for,
        title=f"Scheduled in {about}",
        names=("due", "ledger", "entry", "key hash", "only for"),
        empty=f"nothing of {about} is pending{window}",
        as_json=as_json,
    )


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@_ledgers_option
@limit_option
@connection.connected
def backlog(
    *,
    connected: client.Client,
    topic: str,
    subscription: str,
    ledgers: range | None,
    limit: int | None,
    as_json: bool,
) -> None:
    """List the backlog of SUBSCRIPTION in due order: rows that are due and not acknowledged.

    The state of a row is ready, in flight (delivered on a stream or under a lease) or nacked (negatively acknowledged:
    the row is redelivered at its time).

    \b
    Examples:
      tarry backlog flights departures
      tarry backlog flights departures --ledgers 7 --limit 10
      tarry backlog flights departures --json | tarry ack flights departures --file -
    """
    limit = limit_of(limit, as_json=as_json)

    def page(token: str, page_size: int) -> inspection.BacklogPage:
        return connected.backlog_page(topic, subscription, token, ledgers=ends_of(ledgers), page_size=page_size)

    def states(page: inspection.BacklogPage) -> dict[str, list[Any]]:
        return {
            "state": [inspection.BacklogState(number).name.lower() for number in page.state.tolist()],
            "redeliver_at_ms": [each or None for each in page.redeliver_at_ms.tolist()],
            "redelivery_count": page.redelivery_count.tolist(),
            "batch_index": output.batch_indexes(page.batch_index, len(page)),
        }

    _show_rows(
        Pages(page, limit),
        states,
        title=f"Backlog of {connection.of_topic(topic, subscription)}",
        names=("due", "ledger", "entry", "key hash", "state", "back at", "redelivered", "batch index"),
        optional={"key hash", "back at", "redelivered", "batch index"},
        empty=f"{subscription} is owed nothing of {topic} that is due" + (" in these ledgers" if ledgers else ""),
        as_json=as_json,
    )


def limit_of(limit: int | None, *, as_json: bool) -> int | None:
    """Return the limit to use, which is None for no limit."""
    return ROWS_IN_TERMINAL if limit is None and not as_json and sys.stdout.isatty() else limit


def ends_of(ledgers: range | None) -> tuple[int, int] | None:
    """Return first and last, both included."""
    return None if ledgers is None else (ledgers.start, ledgers.stop - 1)


class Pages:
    """Pages until there are `limit` rows; afterwards `more` is True if others follow."""

    def __init__(self, page_of: Callable[[str, int], Any], limit: int | None) -> None:
        self._page_of = page_of
        self._limit = limit
        self.more = False

    def __iter__(self) -> Iterator[Any]:
        left, token = self._limit, ""
        while True:
            page = self._page_of(token, _PAGE_ROWS_MAX if left is None else min(left, _PAGE_ROWS_MAX))
            yield page
            token = page.next_page_token
            left = None if left is None else left - len(page)
            if not token or left == 0:
                self.more = bool(token)
                return

    def note_more(self) -> None:
        """Print how to see the rest, if there is one."""
        if self.more:
            output.note("there are more rows: give a higher --limit; --json or a pipe without --limit has all")


def _cells(name: str, values: list[Any]) -> list[object]:
    if name.endswith("_at_ms"):
        return [output.At(at_ms) for at_ms in values]
    if name == "redelivery_count":
        return values
    # Ids and hashes are text, because they are names, not counts.
    return ["-" if value is None else str(value) for value in values]


def _show_rows(
    pages: Pages,
    last_columns: Callable[[Any], dict[str, list[Any]]],
    *,
    title: str,
    names: Sequence[str],
    empty: str,
    as_json: bool,
    optional: Set[str] = frozenset(),
) -> None:
    """Print pages as they arrive, as JSON lines or as a table.

    `last_columns` returns a page's own columns by name. A terminal leaves out the `optional` ones if no row has a
    value.
    """

    def columns(page: Any) -> dict[str, list[Any]]:
        hashes = [each or None for each in page.key_hash.tolist()]
        shared = {name: getattr(page, name).tolist() for name in ("ledger_id", "entry_id", "deliver_at_ms")}
        return {**shared, "key_hash": hashes, **last_columns(page)}

    def shown() -> Iterator[tuple[object, ...]]:
        for page in pages:
            by_name = columns(page)
            # Times come first, without those of rows that were never scheduled.
            due = [output.At(at_ms or None) for at_ms in by_name.pop("deliver_at_ms")]
            cells = [_cells(name, values) for name, values in by_name.items()]
            yield from zip(due, *cells, strict=True)

    if as_json:
        for page in pages:
            by_name = columns(page)
            lines = [json.dumps(dict(zip(by_name, row, strict=True))) for row in zip(*by_name.values(), strict=True)]
            if lines:
                click.echo("\n".join(lines))
    elif sys.stdout.isatty():
        names, listed = output.for_terminal(names, shown(), optional=optional)
        output.table(title, names, listed, empty=empty)
    else:
        output.table(title, names, shown(), empty=empty)
    pages.note_more()


@connection.command()
@click.argument("topic")
@_window_options
@click.option("--width", "width_ms", type=rows.Duration(), help="Width of a bar: 500ms, 5m, 1h. Default: a round one.")
@connection.connected
def histogram(
    *,
    connected: client.Client,
    topic: str,
    from_ms: int | None,
    until_ms: int | None,
    ledgers: range | None,
    subscription: str | None,
    width_ms: int | None,
    as_json: bool,
) -> None:
    """Draw how many rows of TOPIC come due when, from now to the last one. The counts are exact.

    Times are local. Without --from, bars begin at round times.

    \b
    Examples:
      tarry histogram flights
      tarry histogram flights --until +1h --width 1m
      tarry histogram flights --from 2030-01-31 --until 2030-02-01 --width 1h --json
    """
    if width_ms == 0:
        raise click.BadParameter("a bar is at least 1ms wide", param_hint="--width")
    if width_ms is None or from_ms is None:
        from_ms, width_ms = _bars(connected, topic, from_ms, until_ms, width_ms)
    counted = connected.histogram(
        topic,
        from_ms=from_ms,
        until_ms=until_ms,
        width_ms=width_ms,
        ledgers=ends_of(ledgers),
        subscription=subscription,
    )
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **vars(counted), "rows": counted.rows.tolist()})
        return
    about = connection.of_topic(topic, subscription)
    zone = f", times {output.time_text(counted.from_ms)[-len('+00:00') :]}"
    title = f"Rows of {about} that come due, {output.duration_text(counted.width_ms)} a bar{zone}"
    empty = f"nothing of {about} comes due in this range"
    within = int(counted.rows.sum())
    if not sys.stdout.isatty():
        bounds = (bounds_ms(counted, number) for number in range(len(counted.rows)))
        listed = (
            (output.At(begin_ms), output.At(end_ms), rows_of_bar)
            for (begin_ms, end_ms), rows_of_bar in zip(bounds, counted.rows.tolist(), strict=True)
        )
        output.table(title, ("from", "until", "rows"), listed, empty=empty)
    elif within:
        draw(counted, title)
    else:
        output.note(empty)
    _totals(counted, within)


def _bars(
    connected: client.Client, topic: str, from_ms: int | None, until_ms: int | None, width_ms: int | None
) -> tuple[int, int]:
    """Return the beginning of the first bar and the width of each, as given or chosen."""
    now_ms = time.time_ns() // 1_000_000
    begin_ms = now_ms if from_ms is None else from_ms
    if width_ms is None:
        last_ms = until_ms or connected.stats(topic).last_due_ms or now_ms
        width_ms = round_width_ms(max(1, last_ms - begin_ms))
    return (first_begin_ms(now_ms, width_ms) if from_ms is None else from_ms), width_ms


def _totals(counted: inspection.Histogram, within: int) -> None:
    """Print the totals next to the bars, out of the way of what a pipe reads."""
    output.note(
        f"{output.rows_text(within)} in these bars, {counted.rows_before:,} pending before them, "
        f"{counted.rows_after:,} after them; as of {output.time_text(counted.as_of_ms)}"
    )
    output.note(f"segments: {counted.segments_counted:,} counted by their metadata, {counted.segments_read:,} read")
