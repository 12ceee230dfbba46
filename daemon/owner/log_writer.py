"""Writes the slots of this daemon's log, one after the other, each until its outcome is certain.

Owns: sending a slot, also again and side by side, and the time that each certain slot confirms (L10).
Does not own: what is in a slot (`own_log`), what an answer means (`slot_outcome`).

No daemon uses it: daemons write the journals of their shards (`journal_writer`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from daemon.errors import Corruption, InvariantViolated, NotOwner, OutcomeUnknown, Unavailable
from daemon.owner.own_log import Filling, FrozenSlot, OwnLog
from daemon.owner.slot_outcome import Certain, Decision, Lost, Next, SlotOutcome
from daemon.surroundings import backoff
from daemon.surroundings.unless_ended import unless_ended
from storage_backends import object_store
from storage_backends.crash_points import crash_point
from storage_backends.slot_log import SlotLog

log = logging.getLogger(__name__)

T = TypeVar("T")


class LogLost(NotOwner):
    """Another process has ended the log: every shard of this daemon may be another's. `fence`: the slot where."""

    def __init__(self, log_id: str, fence: int) -> None:
        super().__init__(f"log {log_id} was ended at slot {fence}: another daemon takes over what this one owned")
        self.fence = fence


@dataclasses.dataclass(frozen=True, slots=True)
class CertainSlot:
    """`confirmed_at_s`: monotonic time at which the log was this daemon's. `copies`: how many were sent.
    `seconds`: from the first copy until it was certain.
    """

    slot: FrozenSlot
    confirmed_at_s: float
    copies: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """What became of a filling: a slot that is certain, None when nothing of it could be encoded, and which shards have
    no section in it, and why.
    """

    certain: CertainSlot | None
    unencodable: Mapping[int, Exception]


class LogWriter:
    """Writes the slots of `own`. Made and used on one event loop.

    `run` encodes slots and asks the store in an executor. `hedge_after_s`: a copy that is not answered for so long gets
    another one beside it; None: never. A writer that has raised is never used again: its last slot may still land.
    """

    def __init__(
        self,
        slots: SlotLog,
        own: OwnLog,
        *,
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
        hedge_after_s: float | None = None,
    ) -> None:
        self._slots = slots
        self._own = own
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._hedge_after_s = hedge_after_s
        self._writing = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Nothing more is written: a pending `write` raises OutcomeUnknown, a later one Unavailable."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def write(self, filling: Filling) -> Written:
        """Writes the slot that was begun in `own`; returns when it is certain.

        While the store cannot be reached this does not return. Raises LogLost, OutcomeUnknown after `close`, and
        Corruption when the store does not honour conditions.
        """
        if self._writing:
            raise InvariantViolated(f"log {self._slots.log_id}: a slot is still being written")
        if self._ended.done():
            raise Unavailable(f"log {self._slots.log_id} is closed")
        self._writing = True
        try:
            frozen = await self._unless_ended(self._run(filling.freeze))
            self._own.frozen(frozen.slot)
            certain = None if frozen.slot is None else await self._until_certain(frozen.slot)
        except BaseException:
            self.close()
            raise
        finally:
            self._writing = False
        if certain is not None:
            self._own.certain()
        return Written(certain, frozen.unencodable)

    async def probe(self) -> float | None:
        """Looks whether the number behind the last certain slot is absent; the time at which the log was this daemon's.
        None when a slot has been sent there meanwhile, which confirms by itself.

        Raises LogLost when a fence is there, InvariantViolated while a slot is uncertain, and the store's errors.
        """
        if not self._own.rests:
            raise InvariantViolated(f"log {self._slots.log_id}: a probe while a slot is not certain tells nothing")
        number, sent_at_s = self._own.last_certain + 1, self._clock()
        found = await self._run(lambda: self._slots.head(number))
        if found is None:
            return sent_at_s
        if not self._own.rests or self._own.last_certain >= number:
            return None
        if found.kind.ends:
            raise LogLost(self._slots.log_id, number)
        raise Corruption(f"log {self._slots.log_id}: slot {number} is DATA, and its owner has not written it")

    async def _until_certain(self, slot: FrozenSlot) -> CertainSlot:
        outcome = SlotOutcome(self._slots.log_id, slot.number, slot.identity)
        begun_at_s = self._clock()
        delays_s = backoff.delays_s(self._jitter)
        decision = await self._send(slot, outcome)
        while not isinstance(decision, Certain):
            if isinstance(decision, Lost):
                raise LogLost(self._slots.log_id, decision.fence)
            if decision is Next.SEND_AGAIN:
                if outcome.copies == 1:
                    log.warning("slot %d of the log is uncertain: every shard waits for it", slot.number)
                await self._unless_ended(self._sleep(next(delays_s)))
                decision = await self._send(slot, outcome)
                continue
            answer = await self._ask(slot, outcome, decision)
            if answer is None:
                await self._unless_ended(self._sleep(next(delays_s)))
                continue
            decision = answer
        return CertainSlot(slot, decision.confirmed_at_s, outcome.copies, self._clock() - begun_at_s)

    async def _send(self, slot: FrozenSlot, outcome: SlotOutcome) -> Decision:
        """Sends a copy, and another one when it takes long; what the first answer of them decides. What the other one
        is answered is of no use: the outcome is asked for.
        """
        copies = [self._copy(slot, outcome)]
        try:
            if self._hedge_after_s is not None:
                patience = asyncio.ensure_future(self._sleep(self._hedge_after_s))
                try:
                    await self._unless_ended(asyncio.wait((copies[0], patience), return_when=asyncio.FIRST_COMPLETED))
                finally:
                    patience.cancel()
                if not copies[0].done():
                    copies.append(self._copy(slot, outcome))
            await self._unless_ended(asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED))
            answered = next(copy for copy in copies if copy.done())
            sent_at_s = answered.result()
            return outcome.open() if sent_at_s is None else outcome.created(sent_at_s)
        finally:
            for copy in copies:
                copy.cancel()

    def _copy(self, slot: FrozenSlot, outcome: SlotOutcome) -> asyncio.Future[float | None]:
        """A copy that is being sent: when it was sent if the store says that it was created, else None."""
        sent_at_s = self._clock()
        outcome.sent(sent_at_s)

        def create() -> float | None:
            crash_point("log.before_put")
            try:
                self._slots.create(slot.number, slot.body)
            except object_store.StoreError as error:
                log.info("slot %d of the log is not certain yet: %s", slot.number, error)
                return None
            crash_point("log.after_put")
            return sent_at_s

        return asyncio.ensure_future(self._run(create))

    async def _ask(self, slot: FrozenSlot, outcome: SlotOutcome, what: Next) -> Decision | None:
        """None when the store does not say."""
        number = slot.number if what is Next.ASK else slot.number + 1
        try:
            found = await self._unless_ended(self._run(lambda: self._slots.head(number)))
        except object_store.Damaged as error:
            raise Corruption(f"log slot {error}") from error
        except object_store.StoreError as error:
            log.info("slot %d of the log cannot be asked for: %s", number, error)
            return None
        return outcome.asked(found) if what is Next.ASK else outcome.looked(found)

    def _unless_ended(self, work: Awaitable[T]) -> Awaitable[T]:
        """The result of `work`; raises OutcomeUnknown when the writer is closed first."""
        return unless_ended(work, self._ended, self._given_up)

    def _given_up(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"log {self._slots.log_id}: its last slot may or may not be durable")
