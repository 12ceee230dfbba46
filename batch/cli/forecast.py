"""Implements `tarry-spark forecast`: options, files, exit status. `batch.forecast.forecast_job` does the work."""

from __future__ import annotations

import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import click

from batch.cli import options
from batch.engine.job_settings import store_of
from batch.engine.root import Root
from batch.forecast import forecast_job
from batch.forecast import text as forecast_text
from batch.forecast.files import OutputFile, Unwritable
from batch.forecast.result import STEP_NAMES, Forecast
from batch.forecast.steps import DAY_MS, HOUR_MS, MINUTE_MS, STEPS_MAX, Steps

_log = logging.getLogger(__name__)

_STEPS_MS = {name: step_ms for step_ms, name in STEP_NAMES.items()}


@click.command()
@click.option(
    "--days", type=click.IntRange(min=1), default=7, show_default=True, metavar="N", help="Days to look ahead."
)
@click.option(
    "--step",
    type=click.Choice(["minute", "hour"]),
    default="hour",
    show_default=True,
    help="Step of the counts; steps begin at whole minutes or hours of UTC.",
)
@click.option(
    "--parquet",
    type=click.Path(path_type=Path),
    help="Write the rows of each topic and step to this file; an existing file is replaced.",
)
@click.option(
    "--png",
    type=click.Path(path_type=Path),
    help="Draw the rows of all topics to this file; an existing file is replaced.",
)
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="K",
    help="Number of busiest topics and steps to show.",
)
@options.shared
def forecast(shared: options.Shared, *, days: int, step: str, parquet: Path | None, png: Path | None, top: int) -> None:
    """Show how many rows come due when: in the terminal, as Parquet, or as a picture.

    All times are UTC. The forecast reads the store and writes nothing to it. It does not open a bucket whose rows all
    come due within one step.

    \b
    Exit status:
      0    done
      1    an error; if stored data is damaged, the rest is counted and written
      2    a wrong option or setting
      143  ended by SIGTERM, without any file

    \b
    Examples:
      tarry-spark forecast --config /etc/tarry/tarryd.toml --engine local
      tarry-spark forecast --store s3://delays/root --days 30 --parquet due.parquet --png due.png
    """
    steps = _steps(days, _STEPS_MS[step])
    with _ended_by_sigterm(), contextlib.ExitStack() as files:
        try:
            writers = _writers(files, parquet, png)
            found, seconds = _forecast(shared, steps)
            for file, write in writers:
                write(found, file.temporary)
                file.complete()
                _log.info("wrote %s", file.path)
        except Unwritable as error:
            raise click.ClickException(str(error)) from error
    if shared.as_json:
        options.print_json(forecast_text.document(found, top) | {"seconds": round(seconds, 3)})
    else:
        forecast_text.print_forecast(found, top, options.results())
    damaged = [each for each in found.unread if each.damaged]
    if damaged:
        raise click.ClickException(f"{len(damaged)} damaged buckets or topics are missing from the forecast")


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the tasks, remove incomplete files, and end the process at SIGTERM."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    former = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _steps(days: int, step_ms: int) -> Steps:
    """Return the steps from now on."""
    if days * DAY_MS // step_ms > STEPS_MAX:
        unit = STEP_NAMES[step_ms]
        raise click.UsageError(
            f"--days is {days}; by the {unit} it must be at most {STEPS_MAX * step_ms // DAY_MS}"
            + (f"; by the hour, at most {STEPS_MAX * HOUR_MS // DAY_MS}" if step_ms == MINUTE_MS else "")
        )
    return Steps.of_days(time.time_ns() // 1_000_000, step_ms, days)


def _writers(
    files: contextlib.ExitStack, parquet: Path | None, png: Path | None
) -> list[tuple[OutputFile, Callable[[Forecast, Path], None]]]:
    """Open the files to write, so that one that cannot be written is refused before the work begins."""
    writers: list[tuple[OutputFile, Callable[[Forecast, Path], None]]] = []
    if parquet is not None and png is not None and parquet.absolute() == png.absolute():
        raise click.UsageError(f"--parquet and --png are both {parquet}; they must be different files")
    try:
        # Each takes as long to import as a small forecast takes.
        if parquet is not None:
            from batch.forecast import parquet as forecast_parquet

            writers.append((files.enter_context(OutputFile(parquet)), forecast_parquet.write))
        if png is not None:
            from batch.forecast import picture as forecast_picture

            writers.append((files.enter_context(OutputFile(png)), forecast_picture.write))
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is not installed: install `tarryd[spark]`") from error
    return writers


def _forecast(shared: options.Shared, steps: Steps) -> tuple[Forecast, float]:
    """Return the forecast, and the time it took with an engine that had started (seconds)."""
    root = Root.open(store_of(shared.settings))
    places = root.topics(shared.topics) if shared.topics else None
    with (
        shared.open_engine("forecast", preload=("batch.forecast.forecast_job",)) as engine,
        options.progress("counting", shown=not shared.quiet) as progress,
    ):
        begun_s = time.monotonic()
        found = forecast_job.run(root, shared.settings, steps, places, engine, progress)
        seconds = time.monotonic() - begun_s
    absent = set(shared.topics) - {topic.topic for topic in found.topics} - {each.topic for each in found.unread}
    if absent:
        raise click.ClickException(f"no such topic: {', '.join(map(repr, sorted(absent)))}")
    return found, seconds
