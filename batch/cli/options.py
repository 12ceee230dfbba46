"""The options that all commands have.

Owns: their names and help, and what they stand for: settings, and an engine that is not running yet.
Does not own: the options of one command alone, and what is shown (`terminal`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from batch.cli import terminal
from batch.engine import job_settings, local_engine
from batch.engine.engine_port import Engine
from batch.engine.job_settings import Settings

NICE_DEFAULT = 10
"""Of worker processes: a daemon on the same machine comes first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What the shared options say. `topics`: names, none of them = all topics."""

    settings: Settings
    engine: Literal["local", "spark"]
    master: str | None
    parallelism: int | None
    nice: int
    topics: tuple[str, ...]
    as_json: bool
    quiet: bool

    def open_engine(self, job: str, *, preload: Sequence[str] = ()) -> Engine:
        """The engine, to be entered. `job`: its name for people; `preload`: modules that its tasks need.

        Raises click.ClickException when Spark is not installed.
        """
        if self.engine == "local":
            return local_engine.LocalEngine(parallelism=self.parallelism, preload=preload, nice=self.nice)
        try:
            # Seconds, and not there in an installation that needs only the local engine.
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
    """Gives a command the shared options; its first argument is what they say.

    Raises SettingsError when it is called with settings that are wrong.
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
        terminal.configure(quiet=quiet)
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
