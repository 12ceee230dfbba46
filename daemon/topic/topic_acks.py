"""Decides requests on delivered positions: acknowledgements, longer ack time-outs, negative acknowledgements.

`AckRequests` finds the moment at which a request is decided, finds in the backlog the positions that no dispatcher
holds, and answers once the result is durable. A position that a staged negative acknowledgement names is held by no
dispatcher until that is applied: requests that name it wait.

`NackRequests` checks negative acknowledgements, applies the current delays, and nacks rows after their ack time-out. A
topic has one timer for ack time-outs, set only while a row is IN_FLIGHT in a subscription that has a time-out. Overdue
rows are nacked in portions, each after the one before is durable. A new policy applies to new negative acknowledgements
only; a NACKED row keeps its time.

`daemon.core.decisions` makes the decisions; `served_topic` wakes when a position is redelivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from typing import Literal, TypeVar

from daemon.call_values import Nack, NackOutcome
from daemon.core import limits
from daemon.core.decisions import redelivery_policy
from daemon.core.decisions.claims import HeldPositions, Ignored, IgnoredReason
from daemon.core.decisions.nack_decisions import NackBatch, RedeliveryTerms
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.index import SeenRows
from daemon.core.index.position_keys import KeyedRows
from daemon.errors import InvalidArgument, InvariantViolated, QuotaExceeded, TarryError, Unavailable
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.shard_slots import STALL_ANSWER_S
from daemon.runtime.environment import Environment
from daemon.topic.topic_port import TopicPort
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy
from storage_backends.formats.row_columns import U32, U64
from storage_backends.formats.slot_format import DeadLetterRecord, NackRecord, Record

log = logging.getLogger(__name__)

T = TypeVar("T")

NONE_IGNORED = Ignored.nothing()


class AckRequests:
    """The acknowledgements of one topic, and the moment of every request that names delivered positions."""

    def __init__(self, topic: TopicPort, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        # Requests that wait for their moment: no later one is decided before them.
        self._undecided: set[object] = set()
        # Slot -> the answers that wait for it, with their numbers of rows
        self._waiting: dict[asyncio.Future[int], list[tuple[asyncio.Future[Ignored], int]]] = {}

    def acknowledge(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> Awaitable[Ignored]:
        """Acknowledge deliveries of positions; return the ignored ones, once that is durable.

        Raises NotFound, and the error that refuses the request, at once or when it is awaited.
        """
        self.check(claims)
        if self._is_now(state, claims):
            return self._decide(state, claims, awaited=awaited)
        return self._in_turn(state, claims, lambda: self._decide(state, claims, awaited=awaited))

    def decided(
        self,
        state: SubscriptionState,
        named: HeldPositions,
        decide: Callable[[], Awaitable[T]],
        *,
        is_forwarded: bool = False,
    ) -> Awaitable[T]:
        """Decide a request that names positions; return its result.

        It is decided now, unless it must wait for its moment or an earlier request waits. `decide` decides before it
        awaits anything. For `is_forwarded` see `decidable`.
        """
        if self._is_now(state, named, is_forwarded=is_forwarded):
            return decide()
        return self._in_turn(state, named, decide, is_forwarded=is_forwarded)

    def _is_now(self, state: SubscriptionState, named: HeldPositions, *, is_forwarded: bool = False) -> bool:
        """Return whether a request may be decided at once. Raises NotFound, and the error that ended the topic."""
        topic = self._topic
        if not topic.gate.is_open or self._undecided:
            return False
        if topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
            return False
        topic.check_there(state)
        return True

    def _in_turn(
        self,
        state: SubscriptionState,
        named: HeldPositions,
        decide: Callable[[], Awaitable[T]],
        *,
        is_forwarded: bool = False,
    ) -> Awaitable[T]:
        """Decide a request in its turn; return its result."""
        turn = object()
        self._undecided.add(turn)

        async def later() -> T:
            await self.decidable(state, named, is_forwarded=is_forwarded)
            deciding = decide()
            self._undecided.discard(turn)
            return await deciding

        task = asyncio.ensure_future(later())
        task.add_done_callback(lambda _: self._undecided.discard(turn))
        return task

    def _decide(self, state: SubscriptionState, claims: HeldPositions, *, awaited: bool) -> Awaitable[Ignored]:
        topic, slots = self._topic, self._topic.slots
        slots.check_accepting()
        records, rest = topic.core.acknowledging.stage(state, claims)
        # Later rows of the same key wait until this is durable.
        slot = slots.stage(*records, awaited=awaited, may_wait=not state.is_by_key) if records else None
        if state.ready_rows or state.key_shared is not None:
            # There may be room IN_FLIGHT again.
            topic.notify(state)
        if slot is None or len(rest.entry_id) or topic.alone_in_s:
            return self._decide_rest(state, claims, rest, slot, awaited=awaited)
        return self._answer_with(slot, len(claims.entry_id))

    async def _decide_rest(
        self,
        state: SubscriptionState,
        claims: HeldPositions,
        rest: HeldPositions,
        slot: asyncio.Future[int] | None,
        *,
        awaited: bool,
    ) -> Ignored:
        """Look in the backlog for `rest`, positions that no dispatcher holds.

        `slot` is that of the others, or None if there were none.
        """
        core, slots = self._topic.core, self._topic.slots
        ignored = Ignored.nothing()
        # Planned positions have left without a record.
        begun = slot is not None or len(rest) < len(claims)
        with RequestEffects(self._topic.failed, begun=begun) as effects:
            if len(rest):
                found = await self.find(state, rest, rest)
                records, rest = core.acknowledging.stage_found(state, rest, found)
                if records:
                    slot = slots.stage(*records, awaited=awaited, effects=effects)
                ignored = core.why_ignored(state, rest, found, now_ms=self._environment.clock.now_ms())
            if slot is not None:
                await asyncio.shield(slot)
            await self.answerable(ignored)
        self._environment.metrics.acknowledged(core.name, acknowledged=len(claims) - len(ignored), ignored=len(ignored))
        return ignored

    def _answer_with(self, slot: asyncio.Future[int], rows: int) -> asyncio.Future[Ignored]:
        """Return a future that ends with the slot.

        No task waits for it, and all acknowledgements of the topic in the slot end together.
        """
        waiting = self._waiting.get(slot)
        if waiting is None:
            waiting = self._waiting[slot] = []
            slot.add_done_callback(self._slot_ended)
        answer: asyncio.Future[Ignored] = asyncio.get_running_loop().create_future()
        waiting.append((answer, rows))
        return answer

    def _slot_ended(self, slot: asyncio.Future[int]) -> None:
        error, acknowledged = slot.exception(), 0
        for answer, rows in self._waiting.pop(slot):
            # The caller may have gone.
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(NONE_IGNORED)
                acknowledged += rows
        self._environment.metrics.acknowledged(self._topic.core.name, acknowledged=acknowledged, ignored=0)

    def extend(self, state: SubscriptionState, claims: HeldPositions, holders: Collection[int]) -> Awaitable[Ignored]:
        """Restart the ack time-out of positions that `holders` have; return those that they do not have."""
        self.check(claims)
        return self.decided(state, claims, lambda: self._extend(state, claims, holders))

    def _extend(self, state: SubscriptionState, claims: HeldPositions, holders: Collection[int]) -> Awaitable[Ignored]:
        elapsed_ms = self._environment.elapsed_ms()
        left = self._topic.core.redelivery.extend(state, claims, holders, elapsed_ms=elapsed_ms)
        return self.confirmed(Ignored.all_of(left, IgnoredReason.NOT_HELD), of=claims)

    async def confirmed(self, ignored: Ignored, *, of: HeldPositions) -> Ignored:
        """Return the ignored positions of a request that only memory keeps, once it may be answered.

        Under another owner the positions are due again.
        """
        with RequestEffects(self._topic.failed, begun=len(ignored) < len(of)):
            await self._topic.slots.confirmed()
        return ignored

    def check(self, claims: HeldPositions) -> None:
        """Check how many positions are named and that batch indexes fit their entries. Raises InvalidArgument."""
        limits.check_rows("entry_id", len(claims.entry_id), self._environment.request_limits.rows_max)
        if claims.batch_index is not None:
            limits.check_batch_index(claims.entry_id, claims.batch_index)

    async def decidable(self, state: SubscriptionState, named: HeldPositions, *, is_forwarded: bool = False) -> bool:
        """Wait until requests pass and nothing staged names the positions; return whether it awaited a slot.

        Decide before awaiting anything. With `is_forwarded` the positions come again even if they have left, so it
        waits for their departure, too, and for a row that is being added again. Raises NotFound, and Unavailable if the
        moment does not come.
        """
        topic = self._topic
        await topic.gate.passed()
        topic.check_there(state)
        if not topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
            return False
        async with self._in_time("a slot with the positions was not durable"):
            while topic.core.redelivery.is_staged(state, named, is_forwarded=is_forwarded):
                await topic.slots.settled()
                await topic.gate.passed()
                topic.check_there(state)
        return True

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str) -> AsyncIterator[None]:
        """Raise Unavailable if it takes too long."""
        try:
            async with asyncio.timeout(STALL_ANSWER_S):
                yield
        except TimeoutError:
            raise Unavailable(f"topic {self._topic.core.name}: {what} for {STALL_ANSWER_S:.0f} s; try again") from None

    async def find(
        self, state: SubscriptionState, claims: HeldPositions, named: HeldPositions, *, is_forwarded: bool = False
    ) -> KeyedRows:
        """Find claimed rows that are due: READY, NACKED, held over from an earlier stream, or IN_FLIGHT.

        When this returns, a request that names the positions may be decided, as after `decidable`. With `is_forwarded`,
        time 0 means a row of any time. Raises Unavailable if due rows cannot be read.
        """
        seen: SeenRows = {}
        while True:
            # Rows that a former owner delivered may not have been passed here, nor rows that were added again.
            async with self._in_time("due rows could not be read"):
                await self._topic.settle_due()
            # Even if nothing will be found: some requests decide something about such positions.
            if await self.decidable(state, named, is_forwarded=is_forwarded):
                continue
            if not len(self._topic.core.in_backlog(state, claims)):
                return KeyedRows.empty()
            found, missing = self._topic.core.find_in_backlog(state, claims, seen, any_time=is_forwarded)
            if not missing:
                return found
            await self._topic.load(missing)

    async def answerable(self, ignored: Ignored) -> None:
        """Wait until a request that ignored these positions, and whose slots are durable, may be answered."""
        if len(ignored):
            # Positions not in the backlog may have left it by a decision of a later slot.
            await self._topic.slots.confirmed()
        await self._topic.alone()


TEXT_MAX_BYTES = 1_024
# Checks for overdue rows in each ack time-out, and the limits of the time between two checks
LOOKS_A_TIMEOUT = 4
LOOK_LEAST_S = 0.05
LOOK_MOST_S = 1.0


class NackRequests:
    """Redelivery in one topic: negative acknowledgements of dispatchers, and ack time-outs."""

    def __init__(self, topic: TopicPort, acks: AckRequests, environment: Environment) -> None:
        self._topic = topic
        self._acks = acks
        self._environment = environment
        self._default = RedeliveryPolicy(
            kind=RedeliveryKind.CONSTANT, initial_ms=environment.config.redelivery.delay_ms
        )
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._closed = False

    # ---- requests

    def negative_acknowledge(self, state: SubscriptionState, nack: Nack, *, awaited: bool) -> Awaitable[NackOutcome]:
        """Redeliver positions later, or make them dead letters; return the outcome, once that is durable.

        Without `awaited` no caller waits, and it may ride along with the next slot. Raises InvalidArgument,
        DelayTooLong, NotFound and QuotaExceeded, at once or when it is awaited.
        """
        batch = self._checked(nack)
        is_forwarded = bool(batch.may_get_rows.any())
        return self._acks.decided(
            state,
            batch.positions,
            lambda: self._decide(state, batch, is_forwarded=is_forwarded, awaited=awaited),
            is_forwarded=is_forwarded,
        )

    def _decide(
        self, state: SubscriptionState, batch: NackBatch, *, is_forwarded: bool, awaited: bool
    ) -> Awaitable[NackOutcome]:
        topic, redelivery, slots = self._topic, self._topic.core.redelivery, self._topic.slots
        slots.check_accepting()
        if batch.positions.batch_index is not None or is_forwarded:
            # The positions may get rows of their own.
            topic.check_room()
        self._check_limits(state, batch)
        terms = self.terms(state)
        records, left = redelivery.stage(state, batch, terms)
        spared_rows = terms.spared_rows(records)
        topic.take_back(state)
        slot = slots.stage(*records, awaited=awaited) if records else None
        # There may be room IN_FLIGHT again.
        topic.notify(state)
        return self._decide_rest(
            state, batch, left, records, slot, spared_rows=spared_rows, is_forwarded=is_forwarded, awaited=awaited
        )

    def _check_limits(self, state: SubscriptionState, batch: NackBatch) -> None:
        """Raise QuotaExceeded if there is no room for what the positions become."""
        topic = self._topic
        try:
            topic.core.redelivery.check_room(state, batch)
        except QuotaExceeded:
            limit: Literal["dead_letters", "nacked"] = "dead_letters" if batch.reject else "nacked"
            self._environment.metrics.quota_refused(topic.core.name, limit)
            raise

    async def _decide_rest(
        self,
        state: SubscriptionState,
        batch: NackBatch,
        left: NackBatch,
        records: tuple[Record, ...],
        slot: asyncio.Future[int] | None,
        *,
        spared_rows: int,
        is_forwarded: bool,
        awaited: bool,
    ) -> NackOutcome:
        """Look in the backlog for `left`, positions that no dispatcher holds.

        `records` and `slot` are those of the others, of which `spared_rows` are no dead letters for want of room.
        """
        topic, redelivery, slots = self._topic, self._topic.core.redelivery, self._topic.slots
        ignored = Ignored.nothing()
        with RequestEffects(topic.failed, begun=slot is not None) as effects:
            if len(left.positions):
                found = await self._acks.find(
                    state, redelivery.positions_to_find(state, left), left.positions, is_forwarded=is_forwarded
                )
                # Others may have taken the room meanwhile.
                self._check_limits(state, left)
                terms = self.terms(state)
                found_records, ignored = redelivery.stage_found(state, left, found, terms)
                spared_rows += terms.spared_rows(found_records)
                topic.take_back(state)
                if found_records:
                    slot = slots.stage(*found_records, awaited=awaited, effects=effects)
                records = (*records, *found_records)
            if slot is not None:
                await asyncio.shield(slot)
            await self._acks.answerable(ignored)
        outcome = NackOutcome(ignored, self._count_dead_letters(records, spared_rows))
        self._environment.metrics.nacked(
            topic.core.name,
            nacked=len(batch.positions) - len(ignored) - outcome.dead_lettered,
            dead_lettered=outcome.dead_lettered,
            ignored=len(ignored),
        )
        return outcome

    def _checked(self, nack: Nack) -> NackBatch:
        """Check the request; return it with delays in ms. Raises InvalidArgument, DelayTooLong."""
        positions = nack.positions
        self._acks.check(positions)
        limits.check_distinct(positions.ledger_id, positions.entry_id, positions.batch_index)
        size_bytes = len(nack.text.encode())
        if size_bytes > TEXT_MAX_BYTES:
            raise InvalidArgument(f"reason has {size_bytes} bytes in UTF-8; it must have at most {TEXT_MAX_BYTES}")
        settings = self._topic.settings
        field, delay_ms = "delay_ms", nack.delay_ms
        if nack.delay_level is not None:
            field, delay_ms = "delay_level", settings.levels.delays_of(nack.delay_level)
        if delay_ms is not None:
            limits.check_delay(field, delay_ms, settings.request_limits.delay_max_ms)
        text = nack.text if nack.reject else ""
        return NackBatch(
            positions,
            delay_ms,
            nack.key_hash,
            reject=nack.reject,
            text=text,
            forwarded=nack.forwarded,
            schedule_ids=nack.schedule_ids,
        )

    def terms(self, state: SubscriptionState) -> RedeliveryTerms:
        """Return the terms of redeliveries that apply to a subscription now."""
        policy, settings, environment = state.stored.policy, self._topic.settings, self._environment
        redelivery = policy.redelivery or self._default
        bits = policy.nack_precision_bits

        def delays(counts: U32) -> U64:
            return redelivery_policy.delays_ms(
                redelivery,
                counts,
                settings.levels,
                delay_max_ms=settings.request_limits.delay_max_ms,
                draw=environment.random.random,
            )

        return RedeliveryTerms(
            now_ms=environment.clock.now_ms(),
            delays=delays,
            max_count=policy.max_redeliver_count,
            precision_bits=environment.config.redelivery.nack_precision_bits if bits is None else bits,
            longest_ms=lambda: redelivery_policy.longest_ms(
                redelivery,
                policy.max_redeliver_count or 0,
                settings.levels,
                delay_max_ms=settings.request_limits.delay_max_ms,
            ),
        )

    # ---- ack time-outs

    def watch(self, state: SubscriptionState) -> None:
        """Watch for ack time-outs, since rows are IN_FLIGHT or the policy changed. Free if there is no time-out."""
        if state.stored.policy.ack_timeout_ms is not None:
            self._arm()

    def _arm(self) -> None:
        """Set the timer for the next check, if rows may be IN_FLIGHT for too long by then."""
        if self._timer is not None or self._looking is not None or self._closed:
            return
        timeouts_ms = [timeout_ms for state in self._states() if (timeout_ms := _timeout_ms(state)) is not None]
        if timeouts_ms:
            in_s = min(timeouts_ms) / 1000 / LOOKS_A_TIMEOUT
            in_s = max(LOOK_LEAST_S, min(LOOK_MOST_S, in_s))
            self._timer = asyncio.get_running_loop().call_later(in_s, self._look)

    def _look(self) -> None:
        self._timer = None
        self._looking = asyncio.ensure_future(self._nack_overdue())
        self._looking.add_done_callback(self._looked)

    def _looked(self, task: asyncio.Task[None]) -> None:
        self._looking = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            if not isinstance(error, TarryError) or isinstance(error, InvariantViolated):
                self._topic.failed(error)
                return
            log.info("topic %s: cannot nack overdue rows, retrying: %r", self._topic.core.name, error)
        self._arm()

    async def _nack_overdue(self) -> None:
        """Nack rows IN_FLIGHT for too long, portion by portion, each after the one before is durable."""
        for state in self._states():
            while await self._nack_portion(state):
                await self._topic.pace.give_way()

    async def _nack_portion(self, state: SubscriptionState) -> bool:
        """Nack a portion of the overdue rows; return whether there were any."""
        topic, slots = self._topic, self._topic.slots
        await topic.gate.passed()
        timeout_ms = _timeout_ms(state)
        if timeout_ms is None or not topic.is_there(state):
            return False
        slots.check_accepting()
        before_ms = self._environment.elapsed_ms() - timeout_ms
        terms = self.terms(state)
        records = topic.core.redelivery.stage_overdue(state, before_ms, terms, limit=topic.pace.rows)
        spared_rows = terms.spared_rows(records)
        topic.take_back(state)
        if not records:
            return False
        slot = slots.stage(*records)
        topic.notify(state)
        await asyncio.shield(slot)
        rows = [len(record.rows) for record in records if isinstance(record, NackRecord | DeadLetterRecord)]
        self._environment.metrics.ack_timed_out(topic.core.name, rows=sum(rows))
        self._count_dead_letters(records, spared_rows)
        return True

    def _count_dead_letters(self, records: Sequence[Record], spared_rows: int) -> int:
        """Count in the metrics which positions became dead letters, and for how many there was no room.

        Returns how many became dead letters.
        """
        self._environment.metrics.dead_letters_full(self._topic.core.name, rows=spared_rows)
        dead_rows = 0
        for record in records:
            if isinstance(record, DeadLetterRecord):
                dead_rows += len(record.rows)
                self._environment.metrics.dead_lettered(self._topic.core.name, record.reason, rows=len(record.rows))
        return dead_rows

    def _states(self) -> list[SubscriptionState]:
        return list(self._topic.core.subscriptions.values())

    def close(self) -> None:
        """Stop, since the topic is no longer served here."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._looking is not None:
            self._looking.cancel()


def _timeout_ms(state: SubscriptionState) -> int | None:
    """Return the ack time-out (ms), or None if there is none or no row is IN_FLIGHT."""
    return state.stored.policy.ack_timeout_ms if len(state.in_flight) else None
