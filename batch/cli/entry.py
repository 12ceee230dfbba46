"""Implements the command `tarry-spark`: finds its subcommands and maps errors to exit statuses.

An error ends with status 1, a wrong option or setting with 2, an interruption with 130. The module of a subcommand is
imported when it is needed.
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
"""Exit status of a command that is interrupted and has nothing more to say"""

_COMMANDS = {
    "audit": "batch.cli.audit",
    "compact": "batch.cli.compact",
    "forecast": "batch.cli.forecast",
}
"""Command -> module with a function of that name"""


class Commands(click.Group):
    """The commands, each imported when it is needed."""

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
    """Run the command. Never returns."""
    cli(prog_name="tarry-spark")


if __name__ == "__main__":
    main()
