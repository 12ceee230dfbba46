"""`tarry-spark`: the command.

Owns: which commands there are, and the exit status of an error: 1, 2 for a wrong option or setting, 130 when
it is interrupted.
Does not own: the commands, whose modules are imported when they are asked for.
"""

from __future__ import annotations

import importlib
import signal
from typing import Any, Final

import click

from batch.engine import engine_port, root
from storage_backends.object_store import StoreError
from storage_backends.storage_settings import SettingsError

EXIT_INTERRUPTED: Final = 128 + signal.SIGINT
"""Of a command that has no more to say when it is interrupted."""

_COMMANDS = {
    "audit": "batch.cli.audit",
    "compact": "batch.cli.compact",
    "forecast": "batch.cli.forecast",
}
"""Where the command of each name is: a function of that name in this module."""


class Commands(click.Group):
    """The commands, each imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        try:
            found: click.Command = getattr(importlib.import_module(_COMMANDS[cmd_name]), cmd_name)
        except ModuleNotFoundError as error:
            raise click.ClickException(
                f"{error.name} is not installed; install tarryd[spark] (docs/INSTALL.md)"
            ) from error
        return found

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except SettingsError as error:
            raise click.UsageError(str(error)) from error
        except (root.RootAbsent, StoreError, engine_port.WorkFailed, engine_port.EngineUnusable) as error:
            raise click.ClickException(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="tarryd", prog_name="tarry-spark")
def cli() -> None:
    """Batch jobs on the object store of Tarry, while daemons serve from it.

    They read the daemons' root with the daemon's configuration. They run on Spark (`--engine spark`, also through
    spark-submit) or on processes of this machine (`--engine local`).

    \b
    Examples:
      tarry-spark compact --config /etc/tarry/tarryd.toml --engine local
      tarry-spark compact --store s3://delays/root --topic flights --dry-run
    """


def main() -> None:
    """The script: never returns."""
    cli(prog_name="tarry-spark")


if __name__ == "__main__":
    main()
