"""A histogram in a terminal.

Owns: widths of bars that people like, where they begin, and how bars are drawn.
Does not own: the counts, and how a histogram is shown elsewhere (`tarry.cli.pending`).
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator

import rich.bar
import rich.console
import rich.table
import rich.text

from tarry import inspection
from tarry.cli import output

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

# As many as a screen has room for.
BARS_WANTED = 30
# A longer run of empty bars is one line.
_EMPTY_SHOWN = 6
# Room for the bars however long their labels are.
_BAR_COLUMNS_MIN = 10


def round_width_ms(span_ms: int) -> int:
    """The least width that people like which makes at most `BARS_WANTED` bars and a part of one."""
    for width_ms in _WIDTHS_MS:
        if span_ms <= width_ms * BARS_WANTED:
            return width_ms
    return -(-span_ms // (BARS_WANTED * _DAY_MS)) * _DAY_MS


def begin_ms(now_ms: int, width_ms: int) -> int:
    """The last moment until now at which a bar of this width begins, counted from midnight here."""
    offset = output.local_time(now_ms).utcoffset() or datetime.timedelta()
    offset_ms = offset // datetime.timedelta(milliseconds=1)
    return max(0, (now_ms + offset_ms) // width_ms * width_ms - offset_ms)


def draw(histogram: inspection.Histogram, title: str) -> None:
    """A line a bar: when it begins and ends in local time, its rows, and a bar; the longest has the whole width."""
    console = rich.console.Console()
    lines = list(_lines(histogram))
    most = int(histogram.rows.max(initial=0))
    label_columns = max((len(label) for label, _ in lines), default=0)
    bar_columns = max(_BAR_COLUMNS_MIN, console.width - label_columns - len(f"{most:,}") - 4)
    grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(no_wrap=True)
    for label, rows in lines:
        if rows is None:
            grid.add_row(rich.text.Text(label, style="dim"), "", "")
            continue
        # A single row among millions is seen, too: an eighth of a column is the least that is drawn, and a bit more
        # is not rounded to nothing.
        length = max(rows, most / (8 * bar_columns - 1)) if rows else 0
        grid.add_row(rich.text.Text(label), f"{rows:,}", rich.bar.Bar(most or 1, 0, length, width=bar_columns))
    console.print(rich.text.Text(title))
    console.print(grid)


def _lines(histogram: inspection.Histogram) -> Iterator[tuple[str, int | None]]:
    """Labels with rows; a run of many empty bars is one line, without rows."""
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
    """Where a bar begins, and where it ends, itself not included."""
    from_ms = histogram.from_ms + number * histogram.width_ms
    return from_ms, min(from_ms + histogram.width_ms, histogram.until_ms)


def _label(from_ms: int, until_ms: int, width_ms: int) -> tuple[str, str, str]:
    """The day on which a bar begins, when it begins, and when it ends."""
    begin, end = output.local_time(from_ms), output.local_time(until_ms)
    at_midnight = begin.time() == end.time() == datetime.time()
    if at_midnight and width_ms % _DAY_MS == 0:
        return f"{begin:%Y-%m-%d}", "", f"{end:%Y-%m-%d}"
    # As fine as the bars: a last one that is cut short may end a bit later than is said.
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
