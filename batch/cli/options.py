"""Defines the options that all commands share, and their output.

The options become settings, and an engine that is not running yet. Results go to standard output; messages and progress
go to standard error.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Literal

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from batch.engine import job_settings, local_engine
from batch.engine.engine_port import TaskEngine
from batch.engine.job_settings import Settings
from batch.forecast.result import shown

ROOMS: Final = ("batch",)
"""The packages whose messages people want to see; of all others only warnings and errors"""


def results() -> Console:
    """Return the console for results."""
    return Console()


def configure(*, quiet: bool) -> None:
    """Send messages of the jobs to standard error, from INFO on, or from WARNING on with `quiet`."""
    destination = _ToConsole(Console(stderr=True))
    destination.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    root = logging.getLogger()
    root.handlers[:] = [destination]
    root.setLevel(logging.WARNING)
    for room in ROOMS:
        logging.getLogger(room).setLevel(logging.WARNING if quiet else logging.INFO)


class _ToConsole(logging.Handler):
    """A handler that prints lines unwrapped, and not torn by a progress bar."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def emit(self, record: logging.LogRecord) -> None:
        lines = map(shown, self.format(record).split("\n"))
        self.console.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)


def console() -> Console:
    """Return the console for messages and progress, the one that log messages go to."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _ToConsole):
            return handler.console
    return Console(stderr=True)


def print_json(value: Any) -> None:
    """Print a value that msgspec can encode as one JSON document."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


@contextmanager
def progress(what: str, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Show a bar for the work in flight.

    The block's function is called with (done, total) and, if it has changed, with the description of the work, from any
    thread. Nothing is drawn if standard error is no terminal, or without `shown`.
    """
    to = console()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=to, transient=True, disable=not (shown and to.is_terminal)) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, description: str | None = None) -> None:
            bar.update(task, completed=done, total=total, description=description)

        yield advance


NICE_DEFAULT = 10
"""The niceness of worker processes: a daemon on the same machine comes first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The values of the shared options. `topics` are names; none means all topics."""

    settings: Settings
    engine: Literal["local", "spark"]
    master: str | None
    parallelism: int | None
    nice: int
    topics: tuple[str, ...]
    as_json: bool
    quiet: bool

    def open_engine(self, job: str, *, preload: Sequence[str] = ()) -> TaskEngine:
        """Return the engine, to be entered.

        `job` is its name for people; `preload` are modules that its tasks need. Raises click.ClickException if Spark is
        not installed.
        """
        if self.engine == "local":
            return local_engine.LocalEngine(parallelism=self.parallelism, preload=preload, nice=self.nice)
        try:
            # It takes seconds, and an installation that needs only the local engine does not have it.
            from batch.engine import spark_engine
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} is not installed: install `tarryd[spark]`, or use `--engine local`"
            ) from error
        return spark_engine.SparkEngine(f"tarry-spark {job}", master=self.master, parallelism=self.parallelism)


_OPTIONS = (
    click.option(
        "--config",
        type=click.Path(path_type=Path, dir_okay=False, exists=True),
        help="The daemon's TOML file; only its sections store, bucket and collection matter. Default: the defaults "
        "and TARRY_SECTION__KEY of the environment.",
    ),
    click.option("--set", "overrides", multiple=True, metavar="SECTION.KEY=VALUE", help="A setting; repeatable."),
    click.option("--store", metavar="PATH|S3-URL", help="The root: a local directory, or s3://bucket/prefix."),
    click.option("--topic", "topics", multiple=True, metavar="NAME", help="Only this topic; repeatable."),
    click.option(
        "--engine",
        type=click.Choice(["spark", "local"]),
        default="spark",
        show_default=True,
        help="Spark, or processes of this machine, which need neither Spark nor Java.",
    ),
    click.option(
        "--master",
        metavar="URL",
        help="Spark's master. Default: the one of spark-submit or spark-defaults.conf, else local[*].",
    ),
    click.option(
        "--parallelism",
        type=click.IntRange(min=1),
        metavar="N",
        help="Tasks at once. Default: the cores of this machine, or of Spark's executors.",
    ),
    click.option(
        "--nice",
        type=click.IntRange(0, 19),
        default=NICE_DEFAULT,
        show_default=True,
        help="Niceness of the local engine's processes, so that a daemon on this machine comes first.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Write the result as JSON to standard output."),
    click.option("--quiet", is_flag=True, help="Show only warnings and errors."),
)


def shared(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the shared options; its first argument holds their values.

    The command raises SettingsError for wrong settings.
    """

    @functools.wraps(command)
    def with_shared(
        *,
        config: Path | None,
        overrides: tuple[str, ...],
        store: str | None,
        topics: tuple[str, ...],
        engine: Literal["local", "spark"],
        master: str | None,
        parallelism: int | None,
        nice: int,
        as_json: bool,
        quiet: bool,
        **others: Any,
    ) -> Any:
        if engine == "local" and master is not None:
            raise click.UsageError("--master is for Spark; use it with --engine spark")
        configure(quiet=quiet)
        said = Shared(
            settings=job_settings.load(config, overrides, store=store),
            engine=engine,
            master=master,
            parallelism=parallelism,
            nice=nice,
            topics=topics,
            as_json=as_json,
            quiet=quiet,
        )
        return command(said, **others)

    made: Callable[..., Any] = with_shared
    for option in reversed(_OPTIONS):
        made = option(made)
    return made
