"""Shows the dead letters of a topic's subscriptions, delivers them again, and forgets them.

A replay or a purge covers the dead letters that exist when it is requested. One that is made meanwhile has a higher id
and is left alone, so that a message which dies again at once is not replayed again and again. It goes on when its
caller has gone. It works in portions, between which others have their turn. A portion is one decision, and it is
applied before the next one of the topic is made: of two concurrent calls each finds what the other has left.

`daemon.core` makes the decisions and keeps the dead letters.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from daemon.call_values import DeadLetterPage, Replayed
from daemon.core import limits
from daemon.core.backlog.dead_letter_rows import DeadLetterFilter, DeadLetterRows
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.errors import DelayTooLong, InvalidArgument, OutcomeUnknown, QuotaExceeded, TarryError, Unavailable
from daemon.group_commit.request_effects import RequestEffects
from daemon.runtime.environment import Environment
from daemon.topic.topic_port import TopicPort
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import Record

log = logging.getLogger(__name__)

T = TypeVar("T")

# Dead letters of one decision
PORTION_ROWS = 10_000
# Time that a caller waits for its replay or purge (seconds)
ANSWER_S = 60.0
# Time after which a page ends early (seconds)
LOOK_S = 30.0
# Time until a replay or purge that has begun, and finds no room, tries again (seconds)
ROOM_S = 0.2


def check_filter(asked: DeadLetterFilter, *, ids_max: int) -> None:
    """Check a filter: at most `ids_max` ascending ids, its range of ledgers, and its times.

    Raises InvalidArgument.
    """
    if asked.ids is not None:
        if len(asked.ids) > ids_max:
            raise InvalidArgument(f"dead_letter_id has {len(asked.ids)} ids; it must have at most {ids_max}")
        unordered = np.flatnonzero(asked.ids[1:] <= asked.ids[:-1])
        if len(unordered):
            row = int(unordered[0]) + 1
            raise InvalidArgument(
                f"dead_letter_id[{row}] is {asked.ids[row]}; it must be above the id before it, {asked.ids[row - 1]}"
            )
    limits.check_ledgers(asked.ledgers)
    if asked.from_ms is not None and asked.until_ms is not None and asked.until_ms < asked.from_ms:
        raise InvalidArgument(f"until_ms is {asked.until_ms}; it must be at least from_ms, which is {asked.from_ms}")


@dataclasses.dataclass(slots=True)
class _Left:
    """The dead letters that a replay or a purge has not read yet: ids above `after_id` up to `last_id`.

    `after_id` is None if none is left. `begun` is true if some of it is decided.
    """

    asked: DeadLetterFilter
    last_id: int
    after_id: int | None = 0
    begun: bool = False


class TopicDeadLetters:
    """The dead letters of one topic. Called on the loop."""

    def __init__(self, topic: TopicPort, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        self._turn = asyncio.Lock()

    async def page(
        self, state: SubscriptionState, asked: DeadLetterFilter, page_size: int, after_id: int
    ) -> DeadLetterPage:
        """Return the requested dead letters with a higher id, ascending. Raises NotFound, InvalidArgument."""
        limit = limits.page_rows(page_size)
        clock = self._environment.clock
        as_of_ms, until_s = clock.now_ms(), clock.elapsed_s() + LOOK_S
        parts: list[DeadLetterRows] = []
        rows = 0
        while True:
            found = state.dead_letters.page(asked, after_id, limit - rows)
            parts.append(found.rows)
            rows += len(found.rows)
            if found.next_after is None or rows == limit or clock.elapsed_s() > until_s:
                return DeadLetterPage(DeadLetterRows.concat(parts), found.next_after, as_of_ms)
            after_id = found.next_after
            await asyncio.sleep(0)
            self._topic.check_there(state)

    async def replay(self, state: SubscriptionState, asked: DeadLetterFilter, *, delay_ms: int) -> Replayed:
        """Make dead letters rows of the subscription again, due in `delay_ms` from now; return once durable.

        Raises NotFound, DelayTooLong, QuotaExceeded; OutcomeUnknown if it takes long, and goes on, or if a portion was
        decided and a later one cannot be.
        """
        delay_max_ms = self._topic.settings.request_limits.delay_max_ms
        if delay_ms > delay_max_ms:
            raise DelayTooLong(f"delay_ms is {delay_ms}; the largest delay is {delay_max_ms} ms")
        deliver_at_ms = self._environment.clock.now_ms() + delay_ms
        with RequestEffects(self._topic.failed) as effects:
            return await self._answered("replay", self._replay(state, asked, deliver_at_ms, effects))

    async def purge(self, state: SubscriptionState, asked: DeadLetterFilter) -> int:
        """Forget the requested dead letters; return how many, once that is durable.

        Raises NotFound, and as `replay`.
        """
        with RequestEffects(self._topic.failed) as effects:
            return await self._answered("purge", self._purge(state, asked, effects))

    # ---- decisions

    async def _replay(
        self, state: SubscriptionState, asked: DeadLetterFilter, deliver_at_ms: int, effects: RequestEffects
    ) -> Replayed:
        topic, left = self._topic, _Left(asked, state.last_dead_letter_id)
        quotas = topic.quotas
        # No limit refuses such a portion if there are no other rows. A limit of 0 means none.
        maxima = quotas.limits.pending_rows_max, quotas.limits.due_rows_per_second_max, quotas.pending.rows_max
        rows_max = min([PORTION_ROWS, *(rows for rows in maxima if rows)])
        replayed_rows = skipped_rows = 0
        await quotas.counted()
        while left.after_id is not None:
            async with self._turn:
                letters = await self._portion(state, left, rows_max, topic.check_room)
                if not len(letters):
                    continue
                admission = quotas.admission(None, now_ms=self._environment.clock.now_ms())
                times = np.full(len(letters), deliver_at_ms, np.uint64)
                admission.admit([Rows(times, letters.ledger_id, letters.entry_id)])
                records, skipped = topic.core.dead_lettering.stage_replay(state, letters, deliver_at_ms)
                await self._applied(records, effects, admission.staged)
            replayed_rows += len(letters) - skipped
            skipped_rows += skipped
            self._environment.metrics.dead_letters_left(topic.core.name, "replayed", rows=len(letters) - skipped)
        if not replayed_rows:
            await topic.slots.confirmed()
        return Replayed(replayed_rows, skipped_rows)

    async def _purge(self, state: SubscriptionState, asked: DeadLetterFilter, effects: RequestEffects) -> int:
        topic, left = self._topic, _Left(asked, state.last_dead_letter_id)
        purged_rows = 0
        while left.after_id is not None:
            async with self._turn:
                letters = await self._portion(state, left, PORTION_ROWS, lambda: None)
                if not len(letters):
                    continue
                record = topic.core.dead_lettering.stage_purge(state, letters.dead_letter_id)
                await self._applied(() if record is None else (record,), effects)
            purged_rows += len(letters)
            self._environment.metrics.dead_letters_left(topic.core.name, "purged", rows=len(letters))
        if not purged_rows:
            await topic.slots.confirmed()
        return purged_rows

    async def _portion(
        self, state: SubscriptionState, left: _Left, rows_max: int, check_room: Callable[[], None]
    ) -> DeadLetterRows:
        """Return the next dead letters, none if so many were read that others have their turn first.

        It returns at a moment at which they may be decided: decide before awaiting anything.
        """
        topic = self._topic
        await asyncio.sleep(0)
        while True:
            await topic.gate.passed()
            topic.check_there(state)
            try:
                topic.slots.check_accepting()
                check_room()
                break
            except (QuotaExceeded, Unavailable):
                if not left.begun:
                    raise
            await topic.slots.settled()
            await self._environment.sleep(ROOM_S)
        found = state.dead_letters.page(left.asked, left.after_id or 0, rows_max)
        is_last = found.next_after is None or found.next_after >= left.last_id
        left.after_id = None if is_last else found.next_after
        letters = found.rows
        if len(letters) and letters.dead_letter_id[-1] > left.last_id:
            letters = letters.take(letters.dead_letter_id <= np.uint64(left.last_id))
        left.begun = left.begun or len(letters) > 0
        return letters

    async def _applied(
        self,
        records: Sequence[Record],
        effects: RequestEffects,
        staged: Callable[[asyncio.Future[int] | None], object] = lambda slot: None,
    ) -> None:
        """Stage the records and wait until they are applied. `staged` is called with their slot, or None."""
        slot = self._topic.slots.stage_together(records, effects=effects) if records else None
        staged(slot)
        if slot is not None:
            await asyncio.shield(slot)

    # ---- callers

    async def _answered(self, what: str, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task], timeout=ANSWER_S)
        finally:
            if not task.done():
                task.add_done_callback(lambda task: self._tell(what, task))
        name = self._topic.core.name
        if not task.done():
            raise OutcomeUnknown(
                f"topic {name}: the {what} has taken {ANSWER_S:.0f} s; it continues, and a retry is safe"
            )
        if task.cancelled():
            raise Unavailable(f"topic {name} is no longer served by this daemon; try again")
        return task.result()

    def _tell(self, what: str, task: asyncio.Task[Any]) -> None:
        """Log the failure of work whose caller has gone."""
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, TarryError) else logging.ERROR
            log.log(level, "topic %s: a %s failed after its caller had left: %r", self._topic.core.name, what, error)
