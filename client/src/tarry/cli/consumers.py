"""The command that shows the consumers of a KEY_SHARED subscription, and what its keys wait for."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence

import click

from tarry import inspection, policies
from tarry.cli import connection, output, policy_text
from tarry.threads import client

_COLUMNS = (
    *("consumer", "instance", "address", "id", "stream", "permits", "unacked", "slots", "hash ranges"),
    *("joined behind", "draining", "draining unacked", "draining hashes"),
)
_HASH_SLOTS = 1 << 16
# Consumers named in notes at most
_NOTED_MAX = 10
_OPTIONAL = {"address", "joined behind", "draining", "draining unacked", "draining hashes"}


@connection.command()
@click.argument("topic")
@click.argument("subscription")
@connection.connected
def consumers(*, connected: client.Client, topic: str, subscription: str, as_json: bool) -> None:
    """List the consumers of SUBSCRIPTION in the order in which they joined, and what its keys wait for.

    Each consumer has hash slots, of 0 to 65,535. A position goes to the consumer that has the slot of its key.

    Draining: the hash has moved to another consumer, which waits until the former consumer has acknowledged what it
    holds. The list shows, for each draining hash, how many positions the former consumer holds and how often a position
    was kept back.

    Joined behind: the consumer receives nothing later than this position until everything up to it is acknowledged.

    Individually sent: positions that were sent beyond the last sent position; (3:4, 3:5] is entry 5 of ledger 3 alone.

    With --json the answer is one object.

    \b
    Examples:
      tarry consumers flights departures
      tarry consumers flights departures --json
    """
    listed: list[inspection.ConsumerStats] = []
    token = ""
    while True:
        page = connected.consumers_page(topic, subscription, token)
        listed += page.items
        token = page.next_page_token
        if not token:
            break
    if as_json:
        output.as_json(
            {
                "topic": topic,
                "subscription": subscription,
                "as_of_ms": page.as_of_ms,
                "key_shared": None if page.key_shared is None else dataclasses.asdict(page.key_shared),
                "consumers": [dataclasses.asdict(each) for each in listed],
            }
        )
        return
    about = connection.of_topic(topic, subscription)
    if page.key_shared is not None:
        output.facts(f"Keys of {about}", {**_summary(page.key_shared), "as of": output.time_text(page.as_of_ms)})
        click.echo("")
    names: Sequence[str] = _COLUMNS
    rows: Iterable[Sequence[object]] = (_shown(each) for each in listed)
    if sys.stdout.isatty():
        names, rows = output.for_terminal(names, rows, optional=_OPTIONAL)
    output.table(
        f"Consumers of {about}",
        names,
        rows,
        empty=f"{about} has no consumer: no dispatcher has it open as KEY_SHARED with one",
    )
    _notes(page.key_shared, listed)


def _summary(stats: inspection.KeySharedStats) -> dict[str, object]:
    facts: dict[str, object] = {
        "policy": policy_text.key_shared_text(stats.policy),
        "consumers": stats.consumers,
        "waiting": stats.waiting,
        "draining hashes": stats.draining_hashes,
        "unacked of draining hashes": stats.draining_hashes_unacked,
        "draining hashes cleared": stats.draining_hashes_cleared,
        "nack-blocked hashes": stats.nack_blocked_hashes,
        "slots without consumer": stats.slots_without_consumer,
    }
    if stats.policy.order == policies.KeyOrder.LAST_SENT_POSITION:
        behind = (
            f"{each.name} ({each.instance_id}) at {each.last_sent_position_when_joining}"
            for each in stats.consumers_after_mark_delete_position
        )
        facts |= {
            "last sent position": _position(stats.last_sent_position),
            "individually sent": output.Several(tuple(map(str, stats.individually_sent_positions))),
            "consumers after the mark-delete position": output.Several(tuple(behind)),
        }
    return facts


def _shown(each: inspection.ConsumerStats) -> tuple[object, ...]:
    """Return the cells of `_COLUMNS`; ids are text, because they are names, not counts."""
    draining = (
        f"{hashed.hash} ({hashed.unacked:,} unacked, {hashed.blocked_attempts:,} kept back)"
        # The most blocked first, because a terminal shows no more
        for hashed in sorted(each.draining_hashes, key=lambda hashed: -hashed.blocked_attempts)
    )
    ranges = tuple(f"{held.first}-{held.last}" for held in each.hash_ranges)
    listed = sum(held.last - held.first + 1 for held in each.hash_ranges)
    return (
        each.name,
        str(each.instance_id),
        each.address or "-",
        str(each.consumer_id),
        str(each.stream),
        each.permits,
        each.unacked,
        each.slots,
        output.Several(ranges, is_all=listed == each.slots),
        _position(each.last_sent_position_when_joining),
        each.draining_hashes_count,
        each.draining_hashes_unacked,
        output.Several(tuple(draining), is_all=len(each.draining_hashes) == each.draining_hashes_count),
    )


def _position(position: inspection.Position | None) -> str:
    return "-" if position is None else str(position)


def _notes(stats: inspection.KeySharedStats | None, listed: Sequence[inspection.ConsumerStats]) -> None:
    """Print what does not work, and how to fix it."""
    if stats is None:
        return
    hashing = stats.policy.selector == policies.HashSelector.CONSISTENT_HASHING
    cure = ": `tarry subscription update --points` with more of them fixes it" if hashing else ""
    without = [each for each in listed if not each.slots]
    for each in without[:_NOTED_MAX]:
        output.note(f"{each.name} (instance {each.instance_id}) has no hash slot and receives nothing{cure}")
    if len(without) > _NOTED_MAX:
        output.note(f"{len(without) - _NOTED_MAX:,} more consumers have no hash slot{cure}")
    if listed and stats.slots_without_consumer:
        slots = output.count_text(stats.slots_without_consumer, "hash slot")
        output.note(f"{slots} of {_HASH_SLOTS:,} without a consumer: positions of these keys wait")
