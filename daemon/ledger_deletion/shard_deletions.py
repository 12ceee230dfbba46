"""Makes decisions on the deletions of one shard durable in its slots, and then applies them.

Owns: staging decisions and giving each what it came to, so that memory never holds what is not durable; that no slot
holds more of them than the loop can apply in a moment; writing begins and answers in batches; what an attempt's end
means; the attempts that are under way, and their end. Changes of what is in use go in portions, too, and nobody changes
a topic while all that it uses is being replaced.
Does not own: what a decision comes to (`daemon.core.deletions`), when an attempt begins and its thread
(`deletion_workers`), what it does (`daemon.ledger_stores`), the slots (`daemon.group_commit`) and the checkpoint
(`checkpointing`).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from daemon.config import Config
from daemon.core.deletions import ledger_deletions
from daemon.core.deletions.ledger_deletions import (
    Answered,
    Begun,
    DeletionCut,
    InUseChanged,
    LedgerDeletions,
    Purged,
    Recorded,
    Result,
    Retried,
)
from daemon.errors import InvariantViolated, TarryError
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.shard_slots import ShardSlots
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed
from daemon.runtime.environment import Environment
from daemon.topic.topic_settings import TopicSettings
from storage_backends.crash_points import crash_point
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    Deletion,
    DeletionAnswer,
    DeletionOutcome,
    DeletionRecord,
    InUseChange,
    InUseLedgers,
    PurgeDeletes,
    RecordDeletes,
    RetryDeletes,
)

# This many ledgers cost the loop as much as recording one delete.
LEDGERS_A_DELETE = 20
LEDGERS_A_DECISION = 4_000
# A revived deletion costs some 30 us: while more than `HELD_FEW` may be revived, fewer ledgers are forgotten at once.
HELD_FEW = 100
FORGOTTEN_A_DECISION = 256


def rows_of(ledgers: InUseLedgers, rows: slice) -> InUseLedgers:
    """Return some of them."""
    return InUseLedgers(ledgers.ledger_type, ledgers.ledger_id[rows], ledgers.uuid_msb[rows], ledgers.uuid_lsb[rows])


R = TypeVar("R", bound=Result)

# Recording a delete costs the loop some 10 us.
DELETES_A_DECISION = 200
# Limit on the cost of decisions that wait for their slots, in deletes
STAGED_COST_MAX = DELETES_A_DECISION
# No client waits for answers: this many, or those of this time (seconds), form one decision.
ANSWERS_MAX = 32
GATHER_S = 0.02
# A request that waits for other decisions checks the state of the shard at this interval (seconds).
ROOM_S = 0.5
# In a clean end, attempts in flight have this long (seconds), and at most this part of the whole time.
ATTEMPTS_END_S = 5.0
ATTEMPTS_END_PART = 0.25
END_LOOK_S = 0.05


def ending_s(settings: Config) -> float:
    """Return how long a clean end waits for requests to stores (seconds)."""
    return min(ATTEMPTS_END_S, ATTEMPTS_END_PART * settings.daemon.drain_s)


@dataclasses.dataclass(eq=False, slots=True)
class _Decision:
    """A staged decision. `result` is set once its slot was applied."""

    record: DeletionRecord
    cost: int
    slot: asyncio.Future[int] | None = None
    result: Result | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Attempt:
    """An attempt whose begin is durable. `over` is whether its result was decided.

    `may_delete` is whether it may have sent a deletion. Its thread sets it before checking whether it is allowed; the
    loop forbids first and reads it afterwards. So no deletion is missed.
    """

    deletions: ShardDeletions
    deletion: Deletion
    may_delete: bool = False
    refused: bool = False
    over: bool = False

    def guard(self) -> None:
        """Raise DeletionFailed if the daemon may not delete now. Called in the thread of the attempt."""
        self.may_delete = True
        if not self.deletions.may_delete:
            self.may_delete, self.refused = False, True
            raise DeletionFailed("the daemon does not know whether the shard is its own still", maybe_deleted=False)


class DeletingShard(Protocol):
    """A shard, as its deletions see it, and those who make deletions and ask for them."""

    @property
    def number(self) -> int: ...

    @property
    def slots(self) -> ShardSlots: ...

    @property
    def is_confirmed(self) -> bool:
        """True if no successor is active yet; any thread may read it."""
        ...

    @property
    def alone_in_s(self) -> float:
        """The time until no former owner is active any longer (seconds); 0.0 if that is so."""
        ...

    def lose(self, error: BaseException) -> None:
        """Give up a shard that cannot be served any longer."""
        ...

    @property
    def deletions(self) -> ShardDeletions: ...

    async def settings_of(self, topic: str) -> TopicSettings | None:
        """Return the settings in force for a topic, or None if it does not exist."""
        ...


class ShardDeletions:
    """The deletions of one shard, used on one event loop except for `may_delete`.

    `changed` is called when something may be due, or may begin now.
    """

    def __init__(
        self,
        shard: DeletingShard,
        state: LedgerDeletions,
        environment: Environment,
        *,
        changed: Callable[[ShardDeletions], None],
    ) -> None:
        self.state = state
        self._shard = shard
        self._environment = environment
        self._changed = changed
        settings = environment.config.deletion
        self._retry_policy = ledger_deletions.RetryPolicy(
            reconsume_later_ms=settings.reconsume_later_seconds * 1000,
            max_retry_delete_count=settings.max_retry_delete_count,
            jitter=settings.jitter,
        )
        self._staged: collections.deque[_Decision] = collections.deque()
        self._staged_cost = 0
        # Deletes of requests in flight that are not recorded yet
        self._deletes_to_come = 0
        self._ledgers_to_come = 0
        # Topic with a long REPLACE in flight -> a future that ends with it
        self._replacing: dict[str, asyncio.Future[None]] = {}
        self._room: asyncio.Future[None] | None = None
        # Attempts of a former owner that have no answer
        self._begun_before = collections.deque(state.begun_before())
        self._beginning = False
        self._under_way: set[Attempt] = set()
        self._answers: list[DeletionAnswer] = []
        self._answering: asyncio.Task[None] | None = None
        self._draining = False
        self._forbidden = False
        changed(self)

    # ---- decisions

    async def record(self, record: RecordDeletes, effects: RequestEffects) -> Recorded:
        """Record deletes portion by portion and return when they are durable.

        Raises Unavailable, QuotaExceeded, OutcomeUnknown, and the error that ended the shard.
        """
        new: tuple[int, ...] = ()
        already: tuple[int, ...] = ()
        left = len(record.deletes)
        self._deletes_to_come += left
        try:
            with effects:
                for first in range(0, len(record.deletes), DELETES_A_DECISION):
                    portion = record.deletes[first : first + DELETES_A_DECISION]
                    decided = await self.decided_in_room(
                        dataclasses.replace(record, deletes=portion), Recorded, effects, cost=len(portion)
                    )
                    new += decided.new
                    already += tuple(first + place for place in decided.already)
                    self._deletes_to_come -= len(portion)
                    left -= len(portion)
        finally:
            self._deletes_to_come -= left
        return Recorded(new, already)

    async def retry(self, record: RetryDeletes, effects: RequestEffects) -> Retried:
        """Retry dead letters in one decision; return when it is durable. Raise as `record` does."""
        return await self.decided_in_room(record, Retried, effects, cost=len(record.deletion_id))

    async def purge(self, record: PurgeDeletes, effects: RequestEffects) -> Purged:
        """Forget dead letters in one decision; return when it is durable. Raise as `record` does."""
        return await self.decided_in_room(record, Purged, effects, cost=len(record.deletion_id))

    def apply(self, records: Sequence[DeletionRecord]) -> None:
        """Apply the decisions of a durable slot, and set the results that callers wait for."""
        for record in records:
            decision = self._staged.popleft()
            if decision.record is not record:
                raise InvariantViolated(f"shard {self._shard.number}: a decision on deletions is applied out of order")
            decision.result = self.state.apply(record)
            self._staged_cost -= decision.cost
            self._count(record, decision.result)
        if records:
            room, self._room = self._room, None
            if room is not None and not room.done():
                room.set_result(None)
            self._changed(self)

    async def decided_in_room(self, record: DeletionRecord, kind: type[R], effects: RequestEffects, *, cost: int) -> R:
        """Decide in a slot that is applied in a moment and return the result.

        Raise the request's error if staging fails.
        """
        self._shard.slots.check_accepting()
        while self._staged_cost and self._staged_cost + cost > STAGED_COST_MAX:
            if self._room is None or self._room.done():
                self._room = asyncio.get_running_loop().create_future()
            await asyncio.wait([self._room], timeout=ROOM_S)
            self._shard.slots.check_accepting()
        return await self._decided(record, kind, effects, cost=cost)

    async def _decided(
        self,
        record: DeletionRecord,
        kind: type[R],
        effects: RequestEffects | None = None,
        *,
        cost: int = 0,
        patient: bool = False,
    ) -> R:
        """Stage a record, of a request with these effects or of none; return its result once it is applied."""
        decision = _Decision(record, cost)
        decision.slot = self._shard.slots.stage_deletions(record, patient=patient, effects=effects)
        self._staged.append(decision)
        self._staged_cost += cost
        await asyncio.shield(decision.slot)
        if not isinstance(decision.result, kind):
            raise InvariantViolated(f"shard {self._shard.number}: {record} came to {decision.result}")
        return decision.result

    def _count(self, record: DeletionRecord, result: Result) -> None:
        metrics = self._environment.metrics.deletions
        match result:
            case Recorded() if isinstance(record, RecordDeletes):
                already = set(result.already)
                new = (each.ledger_type for place, each in enumerate(record.deletes) if place not in already)
                for ledger_type, deletions in collections.Counter(new).items():
                    metrics.recorded(ledger_type, deletions)
            case Begun():
                for deletion in result.ended:
                    metrics.ended(deletion.outcome)
            case Answered():
                for deletion in result.ended:
                    metrics.ended(deletion.outcome)
                for _ in result.given_up:
                    metrics.given_up()
            case _:
                return

    # ---- what is in use

    async def change_in_use(self, record: ChangeInUse) -> InUseChanged:
        """Change what is in use, portion by portion; returns when that is durable. Raises as `record`."""
        while (replacing := self._replacing.get(record.topic)) is not None:
            await asyncio.wait([replacing])
        to_come = len(record.ledgers) if record.change is not InUseChange.FORGET else 0
        self._ledgers_to_come += to_come
        try:
            with RequestEffects() as effects:
                if record.change is not InUseChange.REPLACE:
                    return await self._change_in_portions(record, effects)
                there = self.state.in_use.ledgers_of(record.topic, record.ledgers.ledger_type)
                if max(there, len(record.ledgers)) <= self._ledgers_a_portion(record.change):
                    return await self._change_in_portions(record, effects)
                return await self._replace_in_use(record, effects)
        finally:
            self._ledgers_to_come -= to_come

    async def _replace_in_use(self, record: ChangeInUse, effects: RequestEffects) -> InUseChanged:
        """Record what is in use, then forget what was in use at the beginning and is not named, then say that is all.

        What the record names is never out of use meanwhile; what it does not name may be so until it is answered.
        """
        ledgers = record.ledgers
        over = self._replacing[record.topic] = asyncio.get_running_loop().create_future()
        try:
            before = self.state.in_use.of(record.topic, ledgers.ledger_type)
            others = await self._environment.run(lambda: before.beside(ledgers))
            recorded = await self._change_in_portions(dataclasses.replace(record, change=InUseChange.RECORD), effects)
            forgotten = await self._change_in_portions(
                dataclasses.replace(record, change=InUseChange.FORGET, ledgers=others), effects
            )
            nothing = rows_of(ledgers, slice(0))
            await self._change_in_portions(
                dataclasses.replace(record, change=InUseChange.COMPLETE, ledgers=nothing), effects
            )
        finally:
            del self._replacing[record.topic]
            over.set_result(None)
        return InUseChanged(
            recorded.changed + forgotten.changed, recorded.being_deleted, recorded.revived + forgotten.revived
        )

    async def _change_in_portions(self, record: ChangeInUse, effects: RequestEffects) -> InUseChanged:
        changed = revived = 0
        being_deleted: tuple[int, ...] = ()
        rows = self._ledgers_a_portion(record.change)
        ledgers_a_delete = LEDGERS_A_DELETE if rows == LEDGERS_A_DECISION else 1
        for first in range(0, max(1, len(record.ledgers)), rows):
            portion = rows_of(record.ledgers, slice(first, first + rows))
            decided = await self.decided_in_room(
                dataclasses.replace(record, ledgers=portion),
                InUseChanged,
                effects,
                cost=math.ceil(len(portion) / ledgers_a_delete),
            )
            changed, revived = changed + decided.changed, revived + decided.revived
            being_deleted += tuple(first + place for place in decided.being_deleted)
        return InUseChanged(changed, being_deleted, revived)

    def _ledgers_a_portion(self, change: InUseChange) -> int:
        none_or_few = change is InUseChange.RECORD or self.state.counts.held <= HELD_FEW
        return LEDGERS_A_DECISION if none_or_few else FORGOTTEN_A_DECISION

    # ---- size of the state

    @property
    def ledgers_in_use(self) -> int:
        """The number of ledgers in use, including those being recorded."""
        return self.state.in_use.ledgers + self._ledgers_to_come

    @property
    def kept(self) -> int:
        """The number of deletions that are pending, dead letters or held, including those being recorded."""
        counts = self.state.counts
        return counts.in_flight + counts.dead + counts.held + self._deletes_to_come

    def cut(self) -> DeletionCut | None:
        """Return the state as of the last slot, for a checkpoint."""
        return self.state.cut()

    # ---- attempts

    @property
    def may_delete(self) -> bool:
        """True if an attempt may delete something now; any thread may read it."""
        return not self._forbidden and self._shard.is_confirmed

    @property
    def may_start(self) -> bool:
        """True if an attempt that has begun may be made now."""
        return not self._draining and self.may_delete and not self._shard.alone_in_s

    @property
    def may_begin(self) -> bool:
        """True if another attempt may begin now: no begin is in flight, and the shard is not stalled."""
        if self._beginning or not self.may_start:
            return False
        try:
            self._shard.slots.check_accepting()
        except TarryError:
            return False
        return True

    @property
    def is_closed(self) -> bool:
        """True if this daemon no longer serves the shard, or is giving it up: nothing begins any longer."""
        return self._draining or self._forbidden

    @property
    def next_due_ms(self) -> int | None:
        """The time at which the next attempt may begin (Unix ms), or None while none waits."""
        return 0 if self._begun_before else self.state.next_due_ms

    def due(self, limit: int) -> list[int]:
        """Hand out deletions whose next attempt should begin now, each once."""
        ids = [self._begun_before.popleft() for _ in range(min(limit, len(self._begun_before)))]
        if len(ids) < limit:
            now_ms = self._environment.clock.now_ms()
            ids += self.state.due(now_ms, limit - len(ids), self._retry_policy.latest_ms(now_ms))
        return ids

    async def begin(self, deletion_ids: Sequence[int]) -> list[Attempt]:
        """Begin attempts and return them when that is durable. Raise the error that ended the shard."""
        self._beginning = True
        try:
            crash_point("deletion.before_begin")
            record = BeginDeletes(self._environment.clock.now_ms(), tuple(deletion_ids))
            begun = await self._decided(record, Begun, patient=True)
        finally:
            self._beginning = False
        return [Attempt(self, deletion) for deletion in begun.attempts]

    def started(self, attempt: Attempt) -> None:
        """Count an attempt whose thread begins."""
        self._under_way.add(attempt)
        self._environment.metrics.deletions.attempted()

    def put_back(self, attempt: Attempt) -> bool:
        """Take back an attempt that its guard refused; return whether to make it later. It deleted nothing."""
        self._under_way.discard(attempt)
        return not attempt.over and not self.is_closed

    def answered(self, attempt: Attempt, answer: Answer) -> None:
        """End an attempt with the store's final answer."""
        deletion = attempt.deletion
        if answer.outcome is DeletionOutcome.DELETED:
            self._environment.metrics.deletions.deleted(deletion.pending_delete.ledger_type)
        now_ms, text = self._environment.clock.now_ms(), ledger_deletions.shortened(answer.text)
        self._end(attempt, DeletionAnswer(deletion.deletion_id, answer.outcome, now_ms, text=text))

    def failed(self, attempt: Attempt, failure: DeletionFailed) -> None:
        """End a failed attempt: another one follows, or the deletion is given up."""
        deletion = attempt.deletion
        if not attempt.over:
            self._environment.metrics.deletions.failed(deletion.pending_delete.ledger_type)
        answer = ledger_deletions.answer_of_failure(
            deletion,
            now_ms=self._environment.clock.now_ms(),
            policy=self._retry_policy,
            random=self._environment.jitter(),
            text=failure.reason,
            maybe_deleted=failure.maybe_deleted,
        )
        self._end(attempt, answer)

    def _end(self, attempt: Attempt, answer: DeletionAnswer) -> None:
        self._under_way.discard(attempt)
        if attempt.over:
            return
        attempt.over = True
        self._answers.append(answer)
        if self._answering is None or self._answering.done():
            self._answering = asyncio.ensure_future(self._write_answers())
            self._answering.add_done_callback(self._answers_written)

    async def _write_answers(self) -> None:
        while self._answers:
            if len(self._answers) < ANSWERS_MAX and not self._draining:
                await self._environment.sleep(GATHER_S)
            answers, self._answers = tuple(self._answers[:ANSWERS_MAX]), self._answers[ANSWERS_MAX:]
            try:
                await self._decided(AnswerDeletes(answers), Answered, patient=True)
            except InvariantViolated:
                raise
            except TarryError:
                # The shard is lost: for the next owner the attempts have begun.
                return
            crash_point("deletion.after_answer")

    def _answers_written(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._shard.lose(error)

    # ---- end

    def begin_drain(self) -> None:
        """Stop beginning and starting attempts."""
        self._draining = True

    async def attempts_ended(self) -> None:
        """Wait until attempts in flight have ended and their results are durable.

        An attempt that takes too long may not delete anything from then on; if it may have sent a deletion, it counts
        as failed. Attempts that have begun without an answer are left to the next owner.
        """
        left_s = ending_s(self._environment.config)
        while self._under_way and left_s > 0 and not self._forbidden:
            await self._environment.sleep(END_LOOK_S)
            left_s -= END_LOOK_S
        self._forbidden = True
        for attempt in list(self._under_way):
            if attempt.may_delete and not attempt.over:
                ended = "the daemon ended before the store had answered"
                self.failed(attempt, DeletionFailed(ended, maybe_deleted=True))
            attempt.over = True
        if self._answering is not None:
            await asyncio.wait([self._answering])

    def close(self) -> None:
        """Close a shard that this daemon no longer serves."""
        self._draining = self._forbidden = True
        for attempt in self._under_way:
            attempt.over = True
        if self._answering is not None:
            self._answering.cancel()
