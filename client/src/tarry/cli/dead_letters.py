"""Commands for dead letters: list, replay, purge.

Replay and purge work through many of them in portions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import click

from tarry import inspection, redelivery, results
from tarry.cli import connection, output, pending, rows
from tarry.threads import client

REASONS = {reason.name.lower().replace("_", "-"): reason for reason in redelivery.DeadLetterReason}
"""Reasons by option value: too-often, rejected"""

# Most ids in one request: the maximum of a page
_PORTION = 10_000
_COLUMNS = ("id", "dead since", "ledger", "entry", "batch index", "redelivered", "reason", "said", "due", "key hash")
# Left out in a terminal if they are empty or seldom needed
_OPTIONAL = {"batch index", "said", "key hash"}
_NOT_IN_TERMINAL = {"due"}


@click.group("dead-letters", cls=connection.Group)
def dead_letters() -> None:
    """Inspect the positions that a subscription gave up, redeliver them, forget them.

    \b
    Examples:
      tarry dead-letters list flights departures
      tarry dead-letters replay flights departures --delay 10s
      tarry dead-letters purge flights departures --until -7d
    """


def _filter_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose dead letters; `_which` makes the filter."""
    for option in (
        click.option("--until", "until_ms", type=rows.Moment(past=True), help="Died before this time: -1h, ISO 8601."),
        click.option(
            "--since", "from_ms", type=rows.Moment(past=True), help="Died at this time or later: -1h, ISO 8601."
        ),
        click.option("--reason", type=click.Choice(list(REASONS)), help="Only of this reason."),
        click.option(
            "--ledger",
            "--ledgers",
            "ledgers",
            type=rows.EntryRange("ledgers"),
            metavar="N or FIRST-LAST",
            help="Only these, both ends included.",
        ),
        click.option(
            "--id", "ids", multiple=True, type=click.IntRange(0, rows.U64_MAX), help="Only this one; repeatable."
        ),
    ):
        command = option(command)
    return command


def _which(
    *,
    ids: tuple[int, ...],
    ledgers: range | None,
    reason: str | None,
    from_ms: int | None,
    until_ms: int | None,
    **_: object,
) -> redelivery.DeadLetterFilter | None:
    """Return the chosen filter, or None for all."""
    if not ids and (ledgers, reason, from_ms, until_ms) == (None, None, None, None):
        return None
    return redelivery.DeadLetterFilter(
        ids=list(ids) or None,
        ledgers=pending.ends_of(ledgers),
        reason=None if reason is None else REASONS[reason],
        from_ms=from_ms,
        until_ms=until_ms,
    )


@dead_letters.command("list")
@click.argument("topic")
@click.argument("subscription")
@_filter_options
@pending.limit_option
@connection.connected
def list_dead_letters(
    *, connected: client.Client, topic: str, subscription: str, limit: int | None, as_json: bool, **chosen: Any
) -> None:
    """List the dead letters of SUBSCRIPTION, in the order in which they died.

    A dead letter was negatively acknowledged or timed out more often than the policy allows, or was rejected.

    \b
    Examples:
      tarry dead-letters list flights departures
      tarry dead-letters list flights departures --reason rejected --since -1h
      tarry dead-letters list flights departures --ledger 7 --json
    """
    which = _which(**chosen)
    pages = pending.Pages(
        lambda token, page_size: connected.dead_letters_page(topic, subscription, which, token, page_size=page_size),
        pending.limit_of(limit, as_json=as_json),
    )
    if as_json:
        for page in pages:
            lines = [json.dumps(row) for row in _rows(page)]
            if lines:
                click.echo("\n".join(lines))
    else:
        names: Sequence[str] = _COLUMNS
        listed: Iterable[Sequence[object]] = (_shown(row) for page in pages for row in _rows(page))
        if sys.stdout.isatty():
            names, listed = output.for_terminal(names, listed, optional=_OPTIONAL, left_out=_NOT_IN_TERMINAL)
        chosen_text = " of these" if which else ""
        about = connection.of_topic(topic, subscription)
        output.table(
            f"Dead letters of {about}", names, listed, empty=f"there are no dead letters{chosen_text} of {about}"
        )
    pages.note_more()


def _rows(page: inspection.DeadLetterPage) -> Iterator[dict[str, Any]]:
    names = ("dead_letter_id", "ledger_id", "entry_id", "deliver_at_ms", "redelivery_count", "dead_at_ms")
    for *numbers, index, key_hash, reason, text_index in zip(
        *(getattr(page, name).tolist() for name in names),
        output.batch_indexes(page.batch_index, len(page)),
        page.key_hash.tolist(),
        page.reason.tolist(),
        page.text_index.tolist(),
        strict=True,
    ):
        yield {
            **dict(zip(names, numbers, strict=True)),
            "batch_index": index,
            "key_hash": key_hash or None,
            "reason": redelivery.DeadLetterReason(reason).name.lower(),
            "text": page.texts[text_index],
        }


def _shown(row: dict[str, Any]) -> tuple[object, ...]:
    """Return the cells of `_COLUMNS`; ids and hashes are text, because they are names, not counts."""
    return (
        str(row["dead_letter_id"]),
        output.At(row["dead_at_ms"]),
        str(row["ledger_id"]),
        str(row["entry_id"]),
        output.name_text(row["batch_index"]),
        row["redelivery_count"],
        row["reason"].replace("_", " "),
        row["text"] or "-",
        output.At(row["deliver_at_ms"] or None),
        output.name_text(row["key_hash"]),
    )


@dead_letters.command("replay")
@click.argument("topic")
@click.argument("subscription")
@_filter_options
@click.option(
    "--delay", "--in", "delay_ms", type=rows.Duration(), default=0, help="Deliver them after this time instead of now."
)
@connection.connected
def replay_dead_letters(
    *, connected: client.Client, topic: str, subscription: str, delay_ms: int, as_json: bool, **chosen: Any
) -> None:
    """Redeliver dead letters of SUBSCRIPTION, now or after a delay; without a filter, all of them.

    A replayed position counts as never redelivered. A dead letter stays if its position was added again for this
    subscription alone and that row still exists.
    Exit status: 0 all are redelivered, 4 some stay.

    \b
    Examples:
      tarry dead-letters replay flights departures
      tarry dead-letters replay flights departures --id 7 --id 9
      tarry dead-letters replay flights departures --ledger 7 --delay 10m
    """
    which = _which(**chosen)
    counts = connection.subscription_stats(connected, topic, subscription)
    answers: list[results.Replayed] = []
    total = None if which else counts.dead_letters
    with output.progress(f"replaying for {subscription}", total=total, quiet=as_json) as shown:
        for portion in _portions(connected, topic, subscription, which):
            wanted = redelivery.DeadLetterFilter(ids=portion)
            answers.append(connected.replay_dead_letters(topic, subscription, wanted, delay_ms=delay_ms))
            shown.advance(len(portion))
    became = results.Replayed.merge(answers)
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, **vars(became)})
    else:
        stayed = f"; {became.skipped:,} stay, because a row of their position exists" if became.skipped else ""
        output.line(f"replayed {output.count_text(became.replayed, 'dead letter')} of {subscription}{stayed}")
    if became.skipped:
        raise click.exceptions.Exit(output.EXIT_NOT_ALL)


def _purge_question(*, connected: client.Client, topic: str, subscription: str, **chosen: Any) -> str | None:
    letters = connection.subscription_stats(connected, topic, subscription).dead_letters
    if not letters:
        return None
    dead = output.count_text(letters, "dead letter")
    if _which(**chosen) is None:
        return f"Forget {dead} of {connection.of_topic(topic, subscription)}?"
    return f"Forget those that these options name, of {dead} of {connection.of_topic(topic, subscription)}?"


@dead_letters.command("purge")
@click.argument("topic")
@click.argument("subscription")
@_filter_options
@connection.connected
@connection.asked_first(_purge_question)
def purge_dead_letters(
    *, connected: client.Client, topic: str, subscription: str, as_json: bool, **chosen: Any
) -> None:
    """Forget dead letters of SUBSCRIPTION; without a filter, all of them. The message log keeps the messages.

    \b
    Examples:
      tarry dead-letters purge flights departures --id 7
      tarry dead-letters purge flights departures --until -7d --yes
      tarry dead-letters purge flights departures --yes --json
    """
    which = _which(**chosen)
    purged = 0
    with output.progress(f"purging for {subscription}", total=None, quiet=as_json) as shown:
        for portion in _portions(connected, topic, subscription, which):
            purged += connected.purge_dead_letters(topic, subscription, redelivery.DeadLetterFilter(ids=portion))
            shown.advance(len(portion))
    if as_json:
        output.as_json({"topic": topic, "subscription": subscription, "purged": purged})
    else:
        output.line(f"forgot {output.count_text(purged, 'dead letter')} of {subscription}")


def _portions(
    connected: client.Client, topic: str, subscription: str, which: redelivery.DeadLetterFilter | None
) -> Iterator[list[int]]:
    """Yield ids that were dead when the first portion was requested: a replayed position may soon be dead again."""
    token, begun_ms = "", None
    while True:
        page = connected.dead_letters_page(topic, subscription, which, token, page_size=_PORTION)
        begun_ms = page.as_of_ms if begun_ms is None else begun_ms
        ids = page.dead_letter_id[page.dead_at_ms <= begun_ms].tolist()
        if ids:
            yield ids
        token = page.next_page_token
        if not token or (len(page) and not ids):
            return
