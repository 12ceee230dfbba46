"""Cancelling and rescheduling positions of a `JournaledTopic`, as the engine does: at a moment at which that is right.

Owns: bringing that moment about, and outcomes as lists.
Does not own: what is right (`oracle`, the tests).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from daemon.core.decisions.withdrawal_decisions import CancelOutcome, RescheduleOutcome, WithdrawalTarget
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import Record
from tests.daemon.core._support.journaled_topic import JournaledTopic, Position, ids_of


@dataclasses.dataclass(frozen=True)
class Result:
    """`left`: how many positions are cancelled or rescheduled; the others are rows of the request."""

    left: int
    not_found: tuple[int, ...] = ()
    already_due: tuple[int, ...] = ()
    in_flight: tuple[int, ...] = ()
    raised: tuple[int, ...] = ()
    raised_deliver_at_ms: tuple[int, ...] = ()


def decidable(topic: JournaledTopic, positions: Sequence[Position], subscription_id: int | None) -> WithdrawalTarget:
    """The positions, when everything due has been passed and nothing that is staged names one of them."""
    topic.pass_all()
    ledgers, entries = (np.array(column, np.uint64) for column in zip(*positions, strict=True))
    withdrawals = topic.core.withdrawals
    if withdrawals.is_staged(withdrawals.asked(ledgers, entries, subscription_id)):
        topic.commit()
        topic.pass_all()
    asked = withdrawals.asked(ledgers, entries, subscription_id)
    assert not withdrawals.is_staged(asked)
    return asked


def stage_cancel(
    topic: JournaledTopic, positions: Sequence[Position], subscription_id: int | None = None
) -> tuple[Result, Sequence[Record]]:
    records, outcome = topic.core.withdrawals.stage_cancel(decidable(topic, positions, subscription_id))
    for record in records:
        topic.staged.append(record)
    return _result(outcome.cancelled, outcome), records


def cancel(topic: JournaledTopic, positions: Sequence[Position], subscription_id: int | None = None) -> Result:
    result, _ = stage_cancel(topic, positions, subscription_id)
    topic.commit()
    return result


def stage_reschedule(
    topic: JournaledTopic,
    positions: Sequence[Position],
    deliver_at_ms: int | Sequence[int],
    subscription_id: int | None = None,
    *,
    key_hash: Sequence[int] | None = None,
    schedule_ids: Sequence[bytes] | None = None,
) -> tuple[Result, Sequence[Record]]:
    asked = decidable(topic, positions, subscription_id)
    times = [deliver_at_ms] * len(positions) if isinstance(deliver_at_ms, int) else deliver_at_ms
    ledgers, entries = (np.array(column, np.uint64) for column in zip(*positions, strict=True))
    hashes = None if key_hash is None else np.array(key_hash, np.uint32)
    rows = Rows(np.array(times, np.uint64), ledgers, entries, hashes, ids_of(schedule_ids))
    records, outcome = topic.core.withdrawals.stage_reschedule(asked, rows, floor_ms=topic.core.floor_ms)
    for record in records:
        topic.staged.append(record)
    result = dataclasses.replace(
        _result(outcome.rescheduled, outcome),
        raised=tuple(outcome.raised_index.tolist()),
        raised_deliver_at_ms=tuple(outcome.raised_deliver_at_ms.tolist()),
    )
    return result, records


def reschedule(
    topic: JournaledTopic,
    positions: Sequence[Position],
    deliver_at_ms: int | Sequence[int],
    subscription_id: int | None = None,
    *,
    key_hash: Sequence[int] | None = None,
    schedule_ids: Sequence[bytes] | None = None,
) -> Result:
    result, _ = stage_reschedule(
        topic, positions, deliver_at_ms, subscription_id, key_hash=key_hash, schedule_ids=schedule_ids
    )
    topic.commit()
    return result


def _result(left: int, outcome: CancelOutcome | RescheduleOutcome) -> Result:
    return Result(
        left,
        tuple(outcome.not_found.tolist()),
        tuple(outcome.already_due.tolist()),
        tuple(outcome.in_flight.tolist()),
    )
