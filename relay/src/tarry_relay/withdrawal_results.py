"""Cancels and reschedules messages of the source by position, and says truly what came of each.

Owns: asking Tarry, what its answers are called, and when an earlier try may have done it.
Does not own: which message asks for what (`tarry_relay.sorting`); when it may be asked (`tarry_relay.passage`); to whom
the result goes (`tarry_relay.running`).
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import tarry
import tarry.aio
from tarry_relay.sorting import Withdrawal

Asking = TypeVar("Asking")


class Result(enum.Enum):
    """What came of a withdrawal; all but the first two have changed nothing."""

    CANCELLED = "CANCELLED"
    """It will never be delivered."""
    RESCHEDULED = "RESCHEDULED"
    """It has the new time."""
    ALREADY_DUE = "ALREADY_DUE"
    """Its time has come before."""
    IN_FLIGHT = "IN_FLIGHT"
    """It is on its way to its target."""
    NOT_FOUND = "NOT_FOUND"
    """It does not wait: it had no time, was delivered, cancelled before, or is a dead letter."""
    NOT_COMMITTED = "NOT_COMMITTED"
    """No relay has committed it in time, so it may still come."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What Tarry has answered about one withdrawal."""

    result: Result | None
    """None: it cannot be used."""
    deliver_at_ms: int | None = None
    """Of RESCHEDULED: the time that is stored."""
    may_have_landed: bool = False
    """Whether another try of this withdrawal may have done it, of which this one does not know."""
    refused: str = ""
    """Why it cannot be used."""


def rounds(asked: Iterable[tuple[Asking, Withdrawal]]) -> list[list[tuple[Asking, Withdrawal]]]:
    """Withdrawals, put together to be asked for at once: each round is of one kind and has no position twice, and those
    of one position stand in their order.
    """
    found: list[list[tuple[Asking, Withdrawal]]] = []
    times: dict[tuple[int, int], int] = {}
    for each in asked:
        _, withdrawal = each
        number = times.get(withdrawal.position, 0)
        is_of_reschedules = number % 2 == 1
        if is_of_reschedules != (withdrawal.deliver_at_ms is not None):
            number += 1
        times[withdrawal.position] = number + 1
        found += [[] for _ in range(number + 1 - len(found))]
        found[number].append(each)
    return [each for each in found if each]


async def outcomes(
    client: tarry.aio.Client, topic: str, asked: Sequence[Withdrawal], alone_until_s: Sequence[float]
) -> list[Outcome]:
    """What came of one round.

    `alone_until_s`: of each until when nobody else can have asked for it, by `time.monotonic`. Raises what another try
    may cure.
    """
    try:
        return await _outcomes(client, topic, asked, alone_until_s)
    except (tarry.InvalidArgument, tarry.OutOfRange) as error:
        # One of the times is none that Tarry takes, and nothing was done: the others are not to wait for it.
        if len(asked) == 1:
            return [Outcome(None, refused=f"Tarry refuses its time {asked[0].deliver_at_ms}: {error.message}")]
    return [
        outcome
        for withdrawal, until_s in zip(asked, alone_until_s, strict=True)
        for outcome in await outcomes(client, topic, [withdrawal], [until_s])
    ]


async def _outcomes(
    client: tarry.aio.Client, topic: str, asked: Sequence[Withdrawal], alone_until_s: Sequence[float]
) -> list[Outcome]:
    ledgers = [each.ledger_id for each in asked]
    entries = [each.entry_id for each in asked]
    times = [each.deliver_at_ms for each in asked if each.deliver_at_ms is not None]
    answer: tarry.Cancelled | tarry.Rescheduled
    stored_ms: dict[int, int] = dict(enumerate(times))
    if times:
        answer = await client.reschedule(topic, ledgers, entries, deliver_at_ms=times)
        done = Result.RESCHEDULED
        stored_ms |= zip(answer.raised_index.tolist(), answer.raised_deliver_at_ms.tolist(), strict=True)
    else:
        answer = await client.cancel(topic, ledgers, entries)
        done = Result.CANCELLED
    left = {
        **dict.fromkeys(answer.not_found_index.tolist(), Result.NOT_FOUND),
        **dict.fromkeys(answer.already_due_index.tolist(), Result.ALREADY_DUE),
        **dict.fromkeys(answer.in_flight_index.tolist(), Result.IN_FLIGHT),
    }
    found = []
    now_s = time.monotonic()
    for row, until_s in enumerate(alone_until_s):
        result = left.get(row, done)
        # A reschedule that has landed may have made it due since; a cancel that has landed leaves nothing to find.
        hides_a_landing = result is Result.NOT_FOUND or (bool(times) and result is not done)
        landed = hides_a_landing and (until_s < now_s or answer.may_have_landed)
        found.append(Outcome(result, stored_ms.get(row) if result is Result.RESCHEDULED else None, landed))
    return found
