"""Lists the commands of `tarry` and the headings under which they are shown."""

from __future__ import annotations

import importlib.metadata

import click

from tarry.cli import (
    connection,
    consumers,
    dead_letters,
    deletion_commands,
    dispatching,
    looking,
    pending,
    producing,
    subscribing,
    upkeep,
    watching,
    whole_topics,
    withdrawing,
)

GROUPS: dict[str, tuple[click.Command, ...]] = {
    "Publish": (
        producing.add,
        withdrawing.cancel,
        withdrawing.reschedule,
        producing.contains,
        producing.trim,
        producing.clear,
    ),
    "Receive": (
        dispatching.receive,
        dispatching.get,
        dispatching.ack,
        dispatching.nack,
        subscribing.subscription,
        dead_letters.dead_letters,
    ),
    "Look": (
        watching.watch,
        looking.topics,
        looking.stats,
        looking.subscriptions,
        consumers.consumers,
        pending.scheduled,
        pending.histogram,
        pending.backlog,
        looking.buckets,
        looking.retention,
        looking.lookup,
    ),
    "Operate": (
        whole_topics.policy,
        whole_topics.levels,
        upkeep.seal,
        upkeep.merge,
        upkeep.gc,
        whole_topics.delete,
    ),
    "Delete ledgers of other systems": (deletion_commands.deletions_group, deletion_commands.sweep),
}
"""Commands by heading, in the order of the help"""


class Grouped(connection.Group):
    """A group that shows its commands under headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write its own options, those of every command, and the commands."""
        connection.write_options(self, ctx, formatter)
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each of `GROUPS`, with aligned texts."""
        width = max(map(len, self.commands))
        for heading, listed in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [
                        (str(each.name).ljust(width), each.get_short_help_str(formatter.width - width - 6))
                        for each in listed
                    ]
                )


@click.group(cls=Grouped, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@connection.common_options
@click.version_option(importlib.metadata.version("tarry"), prog_name="tarry")
def tarry(**_: object) -> None:
    """Add delayed positions, receive them when they are due, inspect topics, operate them.

    The options may stand before or after the command. `tarry COMMAND --help` has examples.

    \b
    Examples:
      tarry add flights --ledger 1 --entries 0-4 --in 5s
      tarry receive flights departures --create
      tarry --address tarry.example:7461 --tls-ca ca.pem --token-file token topics
      tarry histogram flights

    Exit status: 0 done, 1 refused by the daemon, 2 wrong usage or input, 3 the daemon did not answer in time, 4 only a
    part is done.
    """


for listed in GROUPS.values():
    for command in listed:
        tarry.add_command(command)

for command in (deletion_commands.retry, deletion_commands.purge, deletion_commands.record):
    deletion_commands.deletions_group.add_command(command)
