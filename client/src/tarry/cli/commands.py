"""The commands of `tarry`.

Owns: which there are.
Does not own: what they do (the modules beside this one).
"""

from __future__ import annotations

import importlib.metadata

import click

from tarry.cli import (
    consumers,
    dead_letters,
    deletion_changes,
    deletion_listing,
    dispatching,
    levels,
    looking,
    pending,
    producing,
    subscribing,
    sweep,
    upkeep,
    whole_topics,
    withdrawing,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(importlib.metadata.version("tarry"), prog_name="tarry")
def tarry() -> None:
    """Delayed positions: add them, receive them when they are due, look at topics, operate them.

    \b
    Examples:
      tarry add flights --ledger 1 --entries 0-4 --in 5s
      tarry watch flights departures --create
      tarry topics
      tarry histogram flights

    Exit status: 0 done, 1 refused by the daemon, 2 wrong usage or input, 3 the daemon did not answer in time, 4 only a
    part is done.
    """


for command in (
    producing.add,
    withdrawing.cancel,
    withdrawing.reschedule,
    producing.contains,
    producing.trim,
    producing.clear,
    dispatching.watch,
    dispatching.get,
    dispatching.ack,
    dispatching.nack,
    dead_letters.dead_letters,
    subscribing.subscription,
    looking.topics,
    looking.stats,
    looking.subscriptions,
    consumers.consumers,
    looking.buckets,
    pending.scheduled,
    pending.histogram,
    pending.backlog,
    looking.retention,
    looking.lookup,
    whole_topics.policy,
    levels.levels,
    upkeep.seal,
    upkeep.merge,
    upkeep.gc,
    deletion_listing.deletions_group,
    sweep.sweep,
    whole_topics.delete,
):
    tarry.add_command(command)

for command in (deletion_changes.retry, deletion_changes.purge, deletion_changes.record):
    deletion_listing.deletions_group.add_command(command)
