"""Decides requests that remove rows before they are due, at a moment at which that is safe.

At that moment no former owner may deliver what was decided to leave, everything due has been passed, and nothing staged
names the positions. Adds of positions that are leaving wait, too. A request stages its decision at that moment before
it awaits anything. If several name the same positions, one is staged with each slot, in the order in which they came.
`daemon.core.decisions.withdrawal_decisions` makes the decision.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Literal

from daemon.core import limits
from daemon.core.decisions.withdrawal_decisions import (
    CancelOutcome,
    RescheduleBatch,
    RescheduleOutcome,
    WithdrawalTarget,
)
from daemon.errors import Unavailable
from daemon.group_commit.shard_slots import STALL_ANSWER_S
from daemon.runtime.environment import Environment
from daemon.topic.topic_port import TopicPort
from storage_backends.formats.row_columns import U64, Rows
from storage_backends.formats.slot_format import Record


class TopicWithdrawals:
    """The cancellations and reschedules of one topic."""

    def __init__(self, topic: TopicPort, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment

    async def cancel(self, subscription: str | None, ledger_id: U64, entry_id: U64) -> CancelOutcome:
        """Remove positions from the indexes; return the outcome of each. Raises NotFound, InvalidArgument."""
        core = self._topic.core
        asked = await self._decidable(lambda: self._asked(subscription, ledger_id, entry_id))
        rows_max = self._topic.settings.request_limits.rows_max
        records, outcome = core.withdrawals.stage_cancel(asked, rows_max=rows_max)
        await self._durable(records)
        self._count("cancelled", outcome.cancelled, outcome)
        return outcome

    async def reschedule(self, subscription: str | None, batch: RescheduleBatch) -> RescheduleOutcome:
        """Give positions other times; return the outcome of each.

        Raises NotFound, InvalidArgument, DelayTooLong and QuotaExceeded.
        """
        topic, core = self._topic, self._topic.core
        await topic.quotas.counted()
        asked = await self._decidable(lambda: self._asked(subscription, batch.ledger_id, batch.entry_id))
        topic.check_room()
        now_ms = self._environment.clock.now_ms()
        times = limits.absolute_times(
            batch.deliver_at_ms,
            batch.delay_ms,
            now_ms=now_ms,
            delay_max_ms=topic.settings.request_limits.delay_max_ms,
        )
        rows = Rows(times, batch.ledger_id, batch.entry_id, batch.key_hash, batch.schedule_ids)
        admission = topic.quotas.move(now_ms=now_ms)
        records, outcome = core.withdrawals.stage_reschedule(
            asked,
            rows,
            floor_ms=core.floor_ms,
            admit=admission.admit,
            rows_max=topic.settings.request_limits.rows_max,
        )
        await self._durable(records, admission.staged)
        self._count("rescheduled", outcome.rescheduled, outcome)
        return outcome

    async def none_leaving(self, ledger_id: U64, entry_id: U64) -> None:
        """Wait until none of the positions is leaving, and requests pass. Raises Unavailable."""
        withdrawals = self._topic.core.withdrawals
        if not self._topic.core.indexes.leaving:
            return
        async with self._in_time():
            while withdrawals.is_leaving(withdrawals.asked(ledger_id, entry_id, None)):
                await self._topic.slots.settled()
                await self._topic.gate.passed()

    def _asked(self, subscription: str | None, ledger_id: U64, entry_id: U64) -> WithdrawalTarget:
        number = None if subscription is None else self._topic.subscription(subscription).subscription_id
        return self._topic.core.withdrawals.asked(ledger_id, entry_id, number)

    async def _decidable(self, find: Callable[[], WithdrawalTarget]) -> WithdrawalTarget:
        """Return the target at a moment at which it may be decided: decide before awaiting anything."""
        topic = self._topic
        # A former owner that was paused may wake and deliver what is due by then: a decision before that may be wrong
        # before it is answered.
        await topic.alone()
        async with self._in_time():
            while True:
                await topic.gate.passed()
                await topic.settle_due()
                if not topic.gate.is_open:
                    continue
                topic.slots.check_accepting()
                asked = find()
                if not topic.core.withdrawals.is_staged(asked):
                    return asked
                await topic.slots.settled()

    async def _durable(
        self, records: Sequence[Record], staged: Callable[[asyncio.Future[int]], object] = lambda slot: None
    ) -> None:
        """Stage the records and wait until they are durable. `staged` is called with their slot."""
        slots = self._topic.slots
        if records:
            slot = slots.stage(*records)
            staged(slot)
            await asyncio.shield(slot)
        else:
            await slots.confirmed()

    def _count(
        self, result: Literal["cancelled", "rescheduled"], rows: int, outcome: CancelOutcome | RescheduleOutcome
    ) -> None:
        self._environment.metrics.withdrawn(
            self._topic.core.name,
            result,
            rows=rows,
            not_found=len(outcome.not_found),
            already_due=len(outcome.already_due),
            in_flight=len(outcome.in_flight),
        )

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """Raise Unavailable if the moment does not come."""
        try:
            async with asyncio.timeout(STALL_ANSWER_S):
                yield
        except TimeoutError:
            raise Unavailable(
                f"topic {self._topic.core.name}: due rows could not be read, or a slot with the positions "
                f"was not durable, for {STALL_ANSWER_S:.0f} s; nothing changed, try again"
            ) from None
