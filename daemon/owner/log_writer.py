"""Writes the slots of this daemon's log, one after the other, each until its outcome is certain.

Owns: sending a slot, also again, and the time that each certain slot confirms (L10).
Does not own: what is in a slot (`own_log`), what an answer means (`slot_outcome`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Mapping
from typing import TypeVar

from daemon.errors import Corruption, InvariantViolated, NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.slot_outcome import Certain, Decision, Lost, Next, SlotOutcome
from daemon.group_commit.unless_ended import unless_ended
from daemon.owner.own_log import Frozen, FrozenSlot, LogCursor, SlotDraft
from daemon.runtime import backoff
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

    `run` encodes slots and asks the store in an executor. A writer that has raised is never used again: its last slot
    may still land.
    """

    def __init__(
        self,
        slots: SlotLog,
        own: LogCursor,
        *,
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
    ) -> None:
        self._slots = slots
        self._own = own
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._writing = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Nothing more is written: a pending `write` raises OutcomeUnknown, a later one Unavailable."""
        if not self._ended.done():
            self._ended.set_result(None)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is written, as it was closed or has raised."""
        return self._ended.done()

    async def write(self, filling: SlotDraft) -> Written:
        """Writes the slot that was begun in `own`; returns when it is certain.

        While the store cannot be reached this does not return. Raises LogLost, OutcomeUnknown after `close`, and
        Corruption when the store does not honour conditions.
        """
        if self._writing:
            raise InvariantViolated(f"log {self._slots.log_id}: a slot is still being written")
        if self.is_closed:
            raise Unavailable(f"log {self._slots.log_id} is closed")
        self._writing = True
        try:
            frozen, first = await self._unless_ended(self._run(lambda: self._freeze_and_send(filling)))
            self._own.frozen(frozen.slot)
            certain = None if frozen.slot is None else await self._until_certain(frozen.slot, first)
        except BaseException:
            self.close()
            raise
        finally:
            self._writing = False
        if certain is not None:
            self._own.certain()
        return Written(certain, frozen.unencodable)

    def probe(self) -> Awaitable[float | None]:
        """Looks whether the number behind the last certain slot is absent; the time at which the log was this daemon's.
        None when a slot has been sent there meanwhile, which confirms by itself.

        Raises InvariantViolated at once while a slot is uncertain. Raises LogLost when a fence is there, and the
        store's errors.
        """
        if not self._own.rests:
            raise InvariantViolated(f"log {self._slots.log_id}: a probe while a slot is not certain tells nothing")
        return self._probe(self._own.last_certain + 1, self._clock())

    async def _probe(self, number: int, sent_at_s: float) -> float | None:
        found = await self._run(lambda: self._slots.head(number))
        if found is None:
            return sent_at_s
        if not self._own.rests or self._own.last_certain >= number:
            return None
        if found.kind.ends:
            raise LogLost(self._slots.log_id, number)
        raise Corruption(f"log {self._slots.log_id}: slot {number} is DATA, and its owner has not written it")

    def _freeze_and_send(self, filling: SlotDraft) -> tuple[Frozen, _Copy]:
        """In one go: to hand a slot from thread to thread takes as long as to encode a small one."""
        frozen = filling.freeze()
        return frozen, _Copy(self._clock(), False) if frozen.slot is None else self._send(frozen.slot)

    def _send(self, slot: FrozenSlot) -> _Copy:
        crash_point("log.before_put")
        sent_at_s = self._clock()
        try:
            self._slots.create(slot.number, slot.body)
        except object_store.StoreError as error:
            log.info("slot %d of the log is not certain yet: %s", slot.number, error)
            return _Copy(sent_at_s, False)
        crash_point("log.after_put")
        return _Copy(sent_at_s, True)

    async def _until_certain(self, slot: FrozenSlot, first: _Copy) -> CertainSlot:
        if first.created:
            # The only copy that was sent: nothing is to be found out.
            return CertainSlot(slot, first.sent_at_s, 1, self._clock() - first.sent_at_s)
        outcome = SlotOutcome(self._slots.log_id, slot.number, slot.identity)
        delays_s = backoff.delays_s(self._jitter)
        decision = first.told_to(outcome)
        log.warning("slot %d of the log is uncertain: every shard waits for it", slot.number)
        while not isinstance(decision, Certain):
            if isinstance(decision, Lost):
                raise LogLost(self._slots.log_id, decision.fence)
            if decision is Next.SEND_AGAIN:
                await self._unless_ended(self._sleep(next(delays_s)))
                again = await self._unless_ended(self._run(lambda: self._send(slot)))
                decision = again.told_to(outcome)
                continue
            answer = await self._ask(slot, outcome, decision)
            if answer is None:
                await self._unless_ended(self._sleep(next(delays_s)))
                continue
            decision = answer
        log.warning("slot %d of the log is certain, it was sent %d times", slot.number, outcome.copies)
        return CertainSlot(slot, decision.confirmed_at_s, outcome.copies, self._clock() - first.sent_at_s)

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that was sent at that monotonic time; whether the store says that it was created."""

    sent_at_s: float
    created: bool

    def told_to(self, outcome: SlotOutcome) -> Decision:
        outcome.sent(self.sent_at_s)
        return outcome.created(self.sent_at_s) if self.created else outcome.open()
