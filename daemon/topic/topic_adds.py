"""Decides adds to one topic and answers callers once rows are durable.

`served_topic` alone uses it; it stands apart because it collects the rows of many requests before it decides them. One
callback of a slot answers all adds in it: an add costs neither a task nor a wait of its own. Rows that are requests by
themselves are decided together, so that they share the cost of each numpy call.

| rows of such requests that are not durable yet | such a row is decided |
|---|---|
| none | in this turn of the loop, with those of the same turn |
| some | once they are durable and none has come for 1 ms, or at the tenth check, one per ms |

This takes fewer slots, which are most of the cost of a row. A row whose outcome may be more than "new" or "duplicate"
is decided alone.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from daemon.core.decisions.add_decisions import ACCEPTED, DUPLICATE, AddBatch, AddOutcome, AddRow, admit_all
from daemon.core.quotas import Caller
from daemon.errors import InvariantViolated, TarryError
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic.topic_port import TopicPort
from daemon.topic.topic_withdrawals import TopicWithdrawals
from storage_backends.formats.row_columns import Rows

log = logging.getLogger(__name__)

# Time between two checks whether more rows come (seconds), and the most checks
LOOK_S = 0.001
LOOKS_MAX = 10


class _Waiting(NamedTuple):
    """A row that waits for its decision, due at `deliver_at_ms`, and the answer to its caller."""

    row: AddRow
    deliver_at_ms: int
    caller: Caller
    answer: asyncio.Future[AddOutcome]


class _Decided(NamedTuple):
    """The outcome of an add when it is durable, and the answer to its caller."""

    outcome: AddOutcome
    answer: asyncio.Future[AddOutcome]


class TopicAdds:
    """The adds of one topic. The futures that it returns may be cancelled: the rows are added nevertheless."""

    def __init__(self, topic: TopicPort, withdrawals: TopicWithdrawals, environment: Environment) -> None:
        self._topic = topic
        self._withdrawals = withdrawals
        self._environment = environment
        self._loop = asyncio.get_running_loop()
        # The slot that was staged last, until it is durable, and the adds that are answered with it
        self._slot: asyncio.Future[int] | None = None
        self._with_slot: list[_Decided] = []
        self._waiting: list[_Waiting] = []
        # The number of waiting rows at the last check, the time of the next one, and how many checks are left
        self._seen = 0
        self._look_s = 0.0
        self._looks_left = 0
        # The last slot with rows that are requests by themselves
        self._rows_slot: asyncio.Future[int] | None = None

    # ---- requests

    async def add(self, batch: AddBatch, subscription: str | None = None, caller: Caller | None = None) -> AddOutcome:
        """Add rows for every subscription, or for one alone. Raises NotFound, QuotaExceeded."""
        topic = self._topic
        await topic.quotas.counted()
        await topic.gate.passed()
        await self._withdrawals.none_leaving(batch.ledger_id, batch.entry_id)
        return await self._decide(batch, subscription, caller)

    def add_at_once(self, batch: AddBatch, caller: Caller | None) -> asyncio.Future[AddOutcome] | None:
        """Add rows for every subscription; return a future, or None if `add` would have to wait to decide.

        The future ends as `add` does. Raises QuotaExceeded, and TopicFailed if an invariant is broken.
        """
        topic = self._topic
        if not (topic.quotas.are_counted and topic.gate.is_open) or topic.core.indexes.leaving:
            return None
        try:
            return self._decide(batch, None, caller)
        except InvariantViolated as error:
            raise self._failed(error) from error

    def _decide(self, batch: AddBatch, subscription: str | None, caller: Caller | None) -> asyncio.Future[AddOutcome]:
        topic = self._topic
        subscription_id = 0 if subscription is None else topic.subscription(subscription).subscription_id
        slots = topic.slots
        slots.check_accepting()
        topic.check_room()
        now_ms = self._environment.clock.now_ms()
        admission = topic.quotas.admission(caller, now_ms=now_ms) if topic.quotas.apply else None
        records, outcome = topic.core.stage_add(
            batch,
            now_ms=now_ms,
            request_limits=topic.settings.request_limits,
            subscription_id=subscription_id,
            shared_index=topic.settings.shared_index,
            levels=topic.settings.levels,
            admit=admit_all if admission is None else admission.admit,
        )
        slot = slots.stage(*records) if records else None
        if admission is not None:
            admission.staged(slot, rows=len(batch.entry_id) - len(outcome.refused))
        answer: asyncio.Future[AddOutcome] = self._loop.create_future()
        self._answer_with(slot, [_Decided(outcome, answer)])
        return answer

    # ---- rows that are requests by themselves

    def add_row(self, row: AddRow, caller: Caller) -> asyncio.Future[AddOutcome] | None:
        """Add a row; return a future, or None if the row is decided alone.

        That is so if its time has come or may be invalid. The future ends as `add` does.
        """
        now_ms = self._environment.clock.now_ms()
        deliver_at_ms = now_ms + (row.delay_ms or 0) if row.deliver_at_ms is None else row.deliver_at_ms
        if not now_ms < deliver_at_ms <= now_ms + self._topic.settings.request_limits.delay_max_ms:
            return None
        answer: asyncio.Future[AddOutcome] = self._loop.create_future()
        if not self._waiting:
            if self._on_their_way:
                self._looks_left = LOOKS_MAX
                self._look_later(self._loop.time(), 1)
            else:
                self._loop.call_soon(self._decide_rows)
        self._waiting.append(_Waiting(row, deliver_at_ms, caller, answer))
        return answer

    @property
    def _on_their_way(self) -> bool:
        return self._rows_slot is not None and not self._rows_slot.done()

    def _look_later(self, now_s: float, seen: int) -> None:
        self._seen, self._look_s = seen, now_s + LOOK_S
        self._looks_left -= 1
        self._loop.call_at(self._look_s, self._look)

    def _look(self) -> None:
        now_s, rows = self._loop.time(), len(self._waiting)
        # A loop that is late for its check is busy, and may not have come to rows that have arrived.
        may_come = self._on_their_way or rows > self._seen or now_s > self._look_s + LOOK_S
        if may_come and self._looks_left:
            # Callers that are answered meanwhile may send again.
            self._look_later(now_s, 0 if self._on_their_way else rows)
        else:
            self._decide_rows()

    def _decide_rows(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            if self._may_together(waiting):
                self._stage_rows(waiting)
            else:
                for each in waiting:
                    asyncio.ensure_future(self._by_itself(each)).add_done_callback(functools.partial(_tell, each))
        except InvariantViolated as error:
            _fail(waiting, self._failed(error))
        except Exception as error:  # noqa: BLE001 - every caller gets the error
            _fail(waiting, error)

    def _may_together(self, waiting: Sequence[_Waiting]) -> bool:
        """Return whether each of the rows is new or a duplicate, and nothing has to be waited for."""
        topic, core = self._topic, self._topic.core
        return (
            topic.gate.is_open
            and not topic.quotas.apply
            and not core.indexes.leaving
            and (topic.settings.shared_index or not core.subscriptions)
            and min([each.deliver_at_ms for each in waiting]) > core.floor_ms
        )

    def _stage_rows(self, waiting: Sequence[_Waiting]) -> None:
        topic = self._topic
        slots = topic.slots
        slots.check_accepting()
        topic.check_room()
        record, accepted = topic.core.stage_rows(_rows_of(waiting))
        self._rows_slot = None if record is None else slots.stage(record)
        self._answer_with(
            self._rows_slot,
            [
                _Decided(ACCEPTED if is_new else DUPLICATE, each.answer)
                for each, is_new in zip(waiting, accepted.tolist(), strict=True)
            ],
        )

    async def _by_itself(self, waiting: _Waiting) -> AddOutcome:
        try:
            return await self.add(waiting.row.batch(), None, waiting.caller)
        except InvariantViolated as error:
            raise self._failed(error) from error

    # ---- answers

    def _answer_with(self, slot: asyncio.Future[int] | None, decided: Sequence[_Decided]) -> None:
        """Answer callers once the slot is durable; None means that nothing was staged, so a confirmation is enough."""
        if slot is None:
            confirming = asyncio.ensure_future(self._topic.slots.confirmed())
            confirming.add_done_callback(functools.partial(self._durable, decided))
            return
        if slot is not self._slot:
            self._slot, self._with_slot = slot, []
            slot.add_done_callback(functools.partial(self._durable, self._with_slot))
        self._with_slot += decided

    def _durable(self, decided: Sequence[_Decided], durable: asyncio.Future[int] | asyncio.Future[None]) -> None:
        if decided is self._with_slot:
            self._slot, self._with_slot = None, []
        if durable.cancelled():
            for each in decided:
                each.answer.cancel()
        elif (error := durable.exception()) is not None:
            _fail(decided, error)
        else:
            self._count([each.outcome for each in decided])
            for each in decided:
                if not each.answer.done():
                    each.answer.set_result(each.outcome)

    def _count(self, outcomes: Iterable[AddOutcome]) -> None:
        accepted = duplicates = returned = late_on_arrival = refused = 0
        for outcome in outcomes:
            accepted += outcome.accepted
            duplicates += outcome.duplicates
            returned += len(outcome.returned_index)
            late_on_arrival += outcome.late_on_arrival
            refused += len(outcome.refused.index)
        self._environment.metrics.added(
            self._topic.core.name,
            accepted=accepted,
            duplicates=duplicates,
            returned=returned,
            late_on_arrival=late_on_arrival,
            refused=refused,
        )

    def _failed(self, error: InvariantViolated) -> TopicFailed:
        """End the topic, which can no longer be relied on; return the error for callers."""
        self._topic.failed(error)
        return TopicFailed(self._topic.core.name)


def _rows_of(waiting: Sequence[_Waiting]) -> Rows:
    key_hash = None
    if [each for each in waiting if each.row.key_hash is not None]:
        key_hash = np.array([each.row.key_hash or 0 for each in waiting], np.uint32)
    return Rows(
        np.array([each.deliver_at_ms for each in waiting], np.uint64),
        np.array([each.row.ledger_id for each in waiting], np.uint64),
        np.array([each.row.entry_id for each in waiting], np.uint64),
        key_hash,
    )


def _tell(waiting: _Waiting, adding: asyncio.Future[AddOutcome]) -> None:
    if adding.cancelled():
        waiting.answer.cancel()
    elif (error := adding.exception()) is not None:
        _fail([waiting], error)
    elif not waiting.answer.done():
        waiting.answer.set_result(adding.result())


def _fail(adds: Sequence[_Waiting | _Decided], error: BaseException) -> None:
    for each in adds:
        if not each.answer.done():
            each.answer.set_exception(error)
        else:
            level = logging.INFO if isinstance(error, TarryError) else logging.ERROR
            log.log(level, "an add failed after its caller had left: %r", error)
