"""The unary calls of redelivery as plans: negative acknowledgements, dead letters, delay levels.

Owns: as `tarry.calls`, of which this is a part.
Does not own: the attempts (`tarry.attempts`), performing them, and the calls' documentation (`tarry.Client`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tarry import attempts, batch, columns, errors, inspection, planning, policies, redelivery, results, wire
from tarry.v1 import admin_pb2, dispatch_pb2, inspect_pb2

NACK = attempts.Method("/tarry.v1.Dispatch/NegativeAcknowledge", dispatch_pb2.NegativeAcknowledgeResponse.FromString)
LIST_DEAD_LETTERS = attempts.Method("/tarry.v1.Inspect/ListDeadLetters", inspect_pb2.ListDeadLettersResponse.FromString)
REPLAY_DEAD_LETTERS = attempts.Method(
    "/tarry.v1.Admin/ReplayDeadLetters", admin_pb2.ReplayDeadLettersResponse.FromString
)
PURGE_DEAD_LETTERS = attempts.Method("/tarry.v1.Admin/PurgeDeadLetters", admin_pb2.PurgeDeadLettersResponse.FromString)
SET_DELAY_LEVELS = attempts.Method("/tarry.v1.Admin/SetDelayLevels", admin_pb2.SetDelayLevelsResponse.FromString)
GET_DELAY_LEVELS = attempts.Method("/tarry.v1.Admin/GetDelayLevels", admin_pb2.GetDelayLevelsResponse.FromString)

# The most that a request may name.
DEAD_LETTER_IDS_MAX = 100_000


class RedeliveryCalls(planning.Planning):
    """A part of `tarry.calls.Calls`."""

    def nack(
        self,
        topic: str,
        subscription: str,
        given: batch.HandedOut,
        *,
        batch_index: columns.Column | None,
        key_hash: columns.Column | None,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        reject: bool = False,
        reason: str = "",
        forwarded: bool = False,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Nacked]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription)
        rows = columns.nack_columns(
            batch.positions_of(given, batch_index),
            delay_ms=delay_ms,
            delay_level=delay_level,
            key_hash=batch.key_hash_of(given) if forwarded and key_hash is None else key_hash,
            reject=reject,
            reason=reason,
            forwarded=forwarded,
        )
        answers = []
        for part in rows.requests(self.rows_max):
            request = wire.encode_nack_request(*names, part)
            message = yield from asking.ask(NACK, request, topic=topic, needs=attempts.FORWARDED if forwarded else None)
            answers.append(results.Nacked.from_message(message, part.positions.rows))
        return results.Nacked.merge(answers)

    def dead_letters_page(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None,
        page_token: str,
        *,
        page_size: int,
        timeout_s: float | None,
    ) -> attempts.Plan[inspection.DeadLetterPage]:
        planning.check_names(topic, subscription)
        columns.check_unsigned("page_size", page_size, bits=32)
        (wanted,) = _filters(which, ids_max=2**32)
        request = inspect_pb2.ListDeadLettersRequest(
            topic=topic, subscription=subscription, filter=wanted, page_size=page_size, page_token=page_token
        )
        asking = self.asking(timeout_s)
        message = yield from asking.ask(LIST_DEAD_LETTERS, request.SerializeToString(), topic=topic)
        return inspection.DeadLetterPage.from_message(message)

    def replay_dead_letters(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None,
        *,
        delay_ms: int,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Replayed]:
        planning.check_names(topic, subscription)
        columns.check_unsigned("delay_ms", delay_ms, bits=64)
        asking = self.asking(timeout_s)
        answers = []
        for wanted in _filters(which, DEAD_LETTER_IDS_MAX):
            request = admin_pb2.ReplayDeadLettersRequest(
                topic=topic, subscription=subscription, filter=wanted, delay_ms=delay_ms
            )
            message = yield from asking.ask(REPLAY_DEAD_LETTERS, request.SerializeToString(), topic=topic)
            answers.append(results.Replayed.from_message(message))
        return results.Replayed.merge(answers)

    def purge_dead_letters(
        self, topic: str, subscription: str, which: redelivery.DeadLetterFilter | None, *, timeout_s: float | None
    ) -> attempts.Plan[int]:
        planning.check_names(topic, subscription)
        asking = self.asking(timeout_s)
        purged = 0
        for wanted in _filters(which, DEAD_LETTER_IDS_MAX):
            request = admin_pb2.PurgeDeadLettersRequest(topic=topic, subscription=subscription, filter=wanted)
            message = yield from asking.ask(PURGE_DEAD_LETTERS, request.SerializeToString(), topic=topic)
            purged += message.purged
        return purged

    def delay_levels(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.DelayLevelsInForce]:
        planning.check_names(topic)
        request = admin_pb2.GetDelayLevelsRequest(topic=topic)
        asking = self.asking(timeout_s)
        message = yield from asking.ask(GET_DELAY_LEVELS, request.SerializeToString(), topic=topic or None)
        return results.DelayLevelsInForce.from_message(message)

    def set_delay_levels(
        self, topic: str, levels: policies.DelayLevels | None, *, timeout_s: float | None
    ) -> attempts.Plan[results.DelayLevelsSet]:
        planning.check_names(topic)
        request = admin_pb2.SetDelayLevelsRequest(topic=topic, levels=None if levels is None else levels.to_message())
        asking = self.asking(timeout_s)
        message = yield from asking.ask(SET_DELAY_LEVELS, request.SerializeToString(), topic=topic)
        return results.DelayLevelsSet.from_message(message)


def _filters(which: redelivery.DeadLetterFilter | None, ids_max: int) -> list[inspect_pb2.DeadLetterFilter]:
    """One for each so many ids; one when none are named. Raises InvalidArgument."""
    which = which or redelivery.DeadLetterFilter()
    others: dict[str, Any] = {
        "ledgers": planning.ledger_range(which.ledgers),
        "reason": which.reason or 0,
        **planning.time_range("from_ms", which.from_ms, "until_ms", which.until_ms),
    }
    if which.ids is None:
        return [inspect_pb2.DeadLetterFilter(**others)]
    ids = np.unique(columns.u64("ids", which.ids))
    if not len(ids):
        raise errors.InvalidArgument("ids names no dead letter; leave it out for all")
    return [
        inspect_pb2.DeadLetterFilter(dead_letter_id=ids[first : first + ids_max].tolist(), **others)
        for first in range(0, len(ids), ids_max)
    ]
