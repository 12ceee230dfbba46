"""Draws a forecast as a PNG picture.

`batch.cli.forecast` alone uses this module, because importing it takes as long as a small forecast.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Final

import matplotlib.dates
import matplotlib.font_manager
import matplotlib.ft2font
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from batch.forecast.result import STEP_NAMES, Bars, Forecast, shown, utc, width_name
from batch.forecast.steps import I64

WIDTH_PIXELS: Final = 1200
HEIGHT_PIXELS: Final = 600
BARS_MAX: Final = 200
TOPICS_MAX: Final = 7
"""Topics with a colour of their own: more could not be distinguished."""

_DPI: Final = 100
_NAME_COLUMNS: Final = 26
# Okabe and Ito's colours, which colour-blind people can distinguish; the last is that of all other topics.
_COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
_OTHERS: Final = "#B0B0B0"


def write(forecast: Forecast, path: Path) -> None:
    """Draw the rows of each bar, stacked by topic, and write the file, replacing an existing one."""
    figure = Figure(figsize=(WIDTH_PIXELS / _DPI, HEIGHT_PIXELS / _DPI), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bars = Bars.of(forecast.steps, BARS_MAX)
    heights = _draw_bars(axes, forecast, bars)
    _name_axes(axes, forecast, bars)
    _mark_peak(axes, forecast, bars, heights)
    figure.savefig(path, format="png")


def _draw_bars(axes: Axes, forecast: Forecast, bars: Bars) -> I64:
    """Draw the bars; return the height of each."""
    steps = forecast.steps
    heights = bars.rows(forecast.load, steps)
    edges = [_moment(begin_ms) for begin_ms in [*bars.begins_ms(), bars.begin_ms + bars.count * bars.width_ms]]
    layers = [
        (shown(topic.topic), bars.rows(topic.load, steps), colour)
        for topic, colour in zip(forecast.busiest_topics(TOPICS_MAX), _COLOURS, strict=False)
        if topic.load.rows_within
    ]
    others = len([topic for topic in forecast.topics if topic.load.rows_within]) - len(layers)
    if others:
        rest = heights - np.sum([rows for _, rows, _ in layers], axis=0)
        layers.append((f"{others:,} other topic{'' if others == 1 else 's'}", rest, _OTHERS))
    bottom = np.zeros(len(heights), np.int64)
    handles, names = [], []
    for name, rows, colour in layers:
        top = bottom + rows
        # Its types do not know dates.
        drawn = axes.stairs(top, edges, baseline=bottom, fill=True, color=colour, linewidth=0)  # type: ignore[arg-type]
        bottom = top
        handles.append(drawn)
        names.append(f"{_drawable(name)}  {int(rows.sum()):,}")
    if handles:
        _add_legend(axes, handles, names)
    return heights


def _add_legend(axes: Axes, handles: list[Any], names: list[str]) -> None:
    """Draw the topics next to the picture, in the order in which they are stacked."""
    # A name that begins with an underscore would be left out, and one with two dollars be taken for a formula.
    legend = axes.legend(
        handles[::-1],
        [f"{number}" for number in range(len(handles))],
        title="rows by topic",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=9,
    )
    for text, name in zip(legend.get_texts(), reversed(names), strict=True):
        text.set_parse_math(False)
        text.set_text(name)


def _name_axes(axes: Axes, forecast: Forecast, bars: Bars) -> None:
    steps = forecast.steps
    axes.set_xlim(_moment(steps.begin_ms(0)), _moment(steps.until_ms))  # type: ignore[arg-type]
    locator = matplotlib.dates.AutoDateLocator(tz=datetime.UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    dates = matplotlib.dates.ConciseDateFormatter(locator, tz=datetime.UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(dates)
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True))
    axes.set_xlabel("time (UTC)")
    axes.set_ylabel(f"rows due per {width_name(bars.width_ms)}")
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"Rows that come due, as of {utc(steps.now_ms)} UTC: {forecast.load.rows_within:,} "
        f"(overdue {forecast.overdue_rows:,}, later {forecast.beyond_rows:,})",
        loc="left",
        fontsize=11,
    )


def _mark_peak(axes: Axes, forecast: Forecast, bars: Bars, heights: I64) -> None:
    """Mark the busiest step, on the bar that contains it."""
    steps = forecast.steps
    if forecast.peak is None:
        axes.set_ylim(0, 1)
        axes.text(0.5, 0.5, "nothing comes due", transform=axes.transAxes, ha="center", va="center", fontsize=14)
        return
    step, rows = forecast.peak
    bar = bars.bar_of(steps.begin_ms(step))
    share = bar / len(heights)
    middle_ms = bars.begins_ms()[bar] + bars.width_ms // 2
    highest = float(heights.max()) * 1.2
    axes.set_ylim(0, highest)
    axes.annotate(
        f"peak: {rows:,} in the {STEP_NAMES[steps.step_ms]} of {utc(steps.begin_ms(step))}",
        xy=(_moment(middle_ms), float(heights[bar])),
        xytext=(_moment(middle_ms), highest * 0.93),
        ha="left" if share < 0.2 else "right" if share > 0.8 else "center",
        va="center",
        fontsize=10,
        bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "#808080"},
        arrowprops={"arrowstyle": "-|>", "color": "black"},
    )


def _moment(time_ms: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC)


def _drawable(name: str) -> str:
    """Return a name that the font can draw and that is not too long."""
    known = matplotlib.ft2font.FT2Font(matplotlib.font_manager.findfont("DejaVu Sans")).get_charmap()
    drawn = "".join(char if ord(char) in known else "\u25a1" for char in name)
    return drawn if len(drawn) <= _NAME_COLUMNS else f"{drawn[: _NAME_COLUMNS - 1]}…"
