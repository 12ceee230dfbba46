"""Implements `tarry-spark compact`: options, signals, progress, result. `batch.compaction.job` does the work."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import click
import ulid
from rich import filesize

from batch.cli import options
from batch.cli.options import Shared
from batch.compaction import job, merge_task, plan, tally
from batch.compaction.tally import Advance, Summary
from batch.engine.job_settings import store_of
from batch.engine.root import Root

_log = logging.getLogger(__name__)

_SIZE = re.compile(r"(\d+)\s*(|[KMGT])(|B|IB)", re.IGNORECASE)
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(|ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}


class Size(click.ParamType[int]):
    """A size in bytes: 1000000, 64M, 64MiB (powers of 1,024)."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None or not int(match[1]):
            self.fail(f"{value!r} is not a size such as 1000000, 64M or 2G", param, ctx)
        return int(match[1]) << 10 * " KMGT".index(match[2].upper() or " ")


class Duration(click.ParamType[float]):
    """A duration in seconds: 90, 90s, 15m, 2h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = _DURATION.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a duration such as 90 (seconds), 15m or 2h", param, ctx)
        return float(match[1]) * _SECONDS[match[2]]


@click.command()
@options.shared
@click.option(
    "--target-bytes",
    type=Size(),
    default="64M",
    show_default=True,
    help="Largest size of a merged bucket. bucket.merge_rows_max or the topic's policy limits its rows.",
)
@click.option(
    "--max-sources",
    type=click.IntRange(min=2),
    default=plan.SOURCES_MAX,
    show_default=True,
    help="Most buckets to merge into one; a worker holds their rows in memory.",
)
@click.option(
    "--min-sources",
    type=click.IntRange(min=2),
    default=plan.SOURCES_MIN,
    show_default=True,
    help="Fewest buckets to merge into one; fewer neighbours stay as they are.",
)
@click.option(
    "--soon",
    type=Duration(),
    default="5m",
    show_default=True,
    help="Skip a bucket whose rows are mostly due within this time.",
)
@click.option(
    "--max-bytes",
    type=Size(),
    help="Most bytes of buckets to read. Merges that remove the most buckets per byte come first.",
)
@click.option("--deadline", type=Duration(), help="Start no wave of merges after this time: 90 (seconds), 15m, 2h.")
@click.option(
    "--attempts",
    type=click.IntRange(min=1),
    default=job.ATTEMPTS_MAX,
    show_default=True,
    help="How often to plan a topic, at most, if other processes change it meanwhile.",
)
@click.option("--dry-run", is_flag=True, help="Show the merges; change nothing, and start no engine.")
@click.option(
    "--metrics-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write metrics for the node exporter's textfile collector to this file; its name ends in .prom.",
)
@click.pass_context
def compact(
    ctx: click.Context,
    shared: Shared,
    *,
    target_bytes: int,
    max_sources: int,
    min_sources: int,
    soon: float,
    max_bytes: int | None,
    deadline: float | None,
    attempts: int,
    dry_run: bool,
    metrics_file: Path | None,
) -> None:
    """Merge small neighbouring buckets, while daemons serve from them.

    The job copies all rows except gone ones. Daemons adopt the merged buckets without a restart. You may kill a job at
    any time, and run two at once: no row is lost, and the daemons delete unused outputs.

    \b
    Exit status:
      0    done; the summary shows merges that --deadline or --max-bytes left
      75   conflicts are left, because other processes changed the topics; run it again
      1    an error: a bucket is damaged, or a topic or the store cannot be read
      2    a wrong option or setting
      130, 143   ended by SIGINT or SIGTERM, after the commit in flight

    \b
    Examples:
      tarry-spark compact --config /etc/tarry/tarryd.toml --engine local
      tarry-spark compact --store s3://delays/root --topic flights --deadline 15m --metrics-file compaction.prom
      tarry-spark compact --store /var/lib/tarry --dry-run
    """
    if min_sources > max_sources:
        raise click.UsageError(f"--min-sources {min_sources} is above --max-sources {max_sources}")
    asked = job.Options(
        topics=shared.topics or None,
        target_bytes=target_bytes,
        sources_max=max_sources,
        sources_min=min_sources,
        soon_ms=int(soon * 1000),
        bytes_max=max_bytes,
        deadline_s=deadline,
        attempts_max=attempts,
    )
    done: Summary | None = None
    try:
        done = _run(shared, asked, dry_run=dry_run)
    finally:
        if metrics_file is not None and not dry_run:
            _write_metrics(metrics_file, done)
    _show(done, shared)
    ctx.exit(done.exit_status)


def _run(shared: Shared, asked: job.Options, *, dry_run: bool) -> Summary:
    """Run the job. Raises the errors of opening the store and the root."""
    environment = job.JobEnvironment(
        now_ms=lambda: time.time_ns() // 1_000_000, elapsed_s=time.monotonic, new_id=lambda: str(ulid.ULID())
    )
    stop = job.Stop()
    with contextlib.ExitStack() as stack:
        engine = None
        if not dry_run:
            engine = stack.enter_context(shared.open_engine("compact", preload=("batch.compaction.merge_task",)))
            if shared.engine == "spark":
                # Its workers start with their first tasks, and the job finds them running.
                for _ in engine.run(merge_task.ready, range(engine.parallelism), lambda ended: None):
                    pass
        root = Root.open(store_of(shared.settings))
        # After the engine: Spark sets handlers of its own.
        stack.enter_context(_signals(stop))
        show = stack.enter_context(options.progress("planning", shown=not shared.quiet))
        return job.compact(
            root,
            engine,
            shared.settings,
            asked,
            environment=environment,
            stop=stop,
            watch=lambda advance: _show_advance(show, advance),
        )


@contextlib.contextmanager
def _signals(stop: job.Stop) -> Iterator[None]:
    """End the job cleanly at the first signal, and at once at a second one of the same kind."""

    def handle(number: int, frame: FrameType | None) -> None:
        stop.request(number)
        signal.signal(number, signal.SIG_DFL)

    former = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def _show_advance(show: Callable[..., None], advance: Advance) -> None:
    done, total = advance.done, advance.total
    sizes = f"{filesize.decimal(done.size_bytes)} of {filesize.decimal(total.size_bytes)}"
    what = f"{advance.phase} buckets, {sizes}" if total.runs else advance.phase
    show(done.sources, total.sources or None, what)


def _write_metrics(path: Path, done: Summary | None) -> None:
    """Write the metrics; a file that cannot be written does not undo the merges."""
    try:
        if done is None:
            tally.write_failure_metrics(path, ended_ms=time.time_ns() // 1_000_000, exit_status=tally.EXIT_ERROR)
        else:
            tally.write_metrics(path, done)
    except OSError as error:
        _log.warning("cannot write metrics to %s: %s", path, error.strerror)


def _show(done: Summary, shared: Shared) -> None:
    if shared.as_json:
        options.print_json(done)
        return
    to = options.results()
    to.print(tally.plan_table(done) if done.dry_run else tally.table(done))
    for line in tally.summary_lines(done):
        to.print(line, soft_wrap=True, markup=False, highlight=False)
