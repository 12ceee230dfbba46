"""Stages the decisions of one shard for the commit log, and answers callers once they are durable.

It holds the decisions that no slot has yet, and those whose slot is in flight. `slot_sender` decides when a slot is
written; the shard gives `applied`, which applies a slot that is certain. A topic that has ended stages nothing
(`TopicSlots`).

A decision that is staged may land, whatever comes after. Its slot therefore ends with a number or with OutcomeUnknown,
and what a request awaits besides its slots stands inside its `RequestEffects`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence

from daemon.errors import OutcomeUnknown, QuotaExceeded, Unavailable
from daemon.group_commit.confirmation import Confirmation
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.slot_sender import LandedSection, Section, SlotSender
from daemon.runtime import backoff
from storage_backends.formats import deletion_format
from storage_backends.formats.slot_format import DeletionRecord, Record, SlotBuilder, size_max

# Time that the store may be silent before a call fails with OutcomeUnknown or Unavailable (seconds)
STALL_ANSWER_S = 10.0
# Full sections that may wait for a slot before requests are refused
STAGED_SLOTS_MAX = 4
BACK_PRESSURE_RETRY_MS = 100
# Time that a slot may be uncertain before new requests are refused (seconds)
STALL_REFUSE_S = 2.0
# Records that no caller awaits go with the next slot, or after this time (seconds)
UNAWAITED_S = 1.0

Applied = Callable[[LandedSection, Sequence[Record], Sequence[DeletionRecord]], None]


@dataclasses.dataclass(slots=True)
class _Slot:
    """A section that is being filled or is in flight.

    `certain` and `applied` are set when it is durable and applied. Both end with OutcomeUnknown if the shard ends
    before; `certain` does so, too, if that takes too long.
    """

    builder: SlotBuilder
    certain: asyncio.Future[int]
    applied: asyncio.Future[int]


class ShardSlots:
    """The staged decisions of one shard. The sender must be running.

    `applied` turns a certain slot into state. `failed` is called with what it raises; then nothing more is staged.
    """

    def __init__(
        self,
        shard: int,
        sender: SlotSender,
        confirmation: Confirmation,
        *,
        clock: backoff.Clock,
        slot_bytes_max: int,
        applied: Applied,
        failed: Callable[[Exception], None],
    ) -> None:
        self._shard = shard
        self._sender = sender
        self._confirmation = confirmation
        self._clock = clock
        self._slot_bytes_max = slot_bytes_max
        self._applied = applied
        self._failed = failed
        self._slots: collections.deque[_Slot] = collections.deque()
        self._on_its_way: _Slot | None = None
        self._ended: Exception | None = None

    # ---- requests

    def check_accepting(self) -> None:
        """Raise the error for a request if nothing can be staged now."""
        if self._ended is not None:
            raise self._ended
        stalled_s = self._sender.stalled_s
        if stalled_s > STALL_REFUSE_S:
            raise Unavailable(f"the store has not answered for {stalled_s:.0f} s; nothing was stored, try again")
        if len(self._slots) >= STAGED_SLOTS_MAX:
            raise QuotaExceeded(
                f"{len(self._slots)} full slots wait to be written; the limit is {STAGED_SLOTS_MAX}; try again",
                retry_after_ms=BACK_PRESSURE_RETRY_MS,
            )

    def stage(
        self,
        *records: Record,
        awaited: bool = True,
        may_wait: bool = False,
        effects: RequestEffects | None = None,
    ) -> asyncio.Future[int]:
        """Stage decisions. Never cancel the future.

        It ends with the number of their slot, once that is durable and applied, or with OutcomeUnknown. Decisions that
        are not `awaited` ride with the next slot, or go within a second. With `may_wait` they may wait for company
        while the loop is busy; only the answer is delayed. A request that awaits more than the future has `effects`.
        """
        slot = self._append(records, effects)
        if not awaited:
            asyncio.get_running_loop().call_later(UNAWAITED_S, self._sender.send)
        elif may_wait:
            self._sender.send_soon()
        else:
            self._sender.send()
        return slot.certain

    def stage_together(
        self, records: Sequence[Record], *, effects: RequestEffects | None = None
    ) -> asyncio.Future[int]:
        """Stage decisions that share one slot. Never cancel the future.

        It ends as that of `stage`, but not if the slot takes long: until it ends, the decisions are in flight.
        """
        slot = self._append(records, effects)
        self._sender.send()
        return slot.applied

    def stage_deletions(
        self, record: DeletionRecord, *, patient: bool = False, effects: RequestEffects | None = None
    ) -> asyncio.Future[int]:
        """Stage a decision on the shard's deletions. Never cancel the future.

        It ends as that of `stage`. With `patient` it does not end if the slot takes long.
        """
        slot = self._slot_with_room(deletion_format.size_max(record))
        slot.builder.append_deletions(record)
        if effects is not None:
            effects.begin()
        self._sender.send()
        return slot.applied if patient else slot.certain

    def _append(self, records: Sequence[Record], effects: RequestEffects | None) -> _Slot:
        sizes_bytes = list(map(size_max, records))
        slot = self._slot_with_room(sum(sizes_bytes))
        for record, size_bytes in zip(records, sizes_bytes, strict=True):
            slot.builder.append(record, size_bytes)
        if effects is not None:
            effects.begin()
        return slot

    def _slot_with_room(self, size_bytes: int) -> _Slot:
        if self._ended is not None:
            raise self._ended
        slot = self._slots[-1] if self._slots else None
        if slot is None or (len(slot.builder) and slot.builder.size_bytes + size_bytes > self._slot_bytes_max):
            if slot is not None:
                # It is full, and waits for no company.
                self._sender.send()
            slot = _Slot(SlotBuilder(), _future(), _future())
            self._slots.append(slot)
            self._sender.join(self)
        return slot

    async def confirmed(self) -> None:
        """Wait until all that a request may have seen is durable and the epoch was confirmed after this call.

        This is for answers without a decision of their own: they ride with the next slot or one probe.
        """
        if self._ended is not None:
            raise self._ended
        if self._slots:
            self._sender.send()
            await self._over(self._slots[-1].certain)
            return
        asked_s = self._clock()
        if self._on_its_way is not None:
            await self._over(self._on_its_way.certain)
        try:
            await asyncio.wait_for(self._confirmation.confirm_after(asked_s), STALL_ANSWER_S)
        except TimeoutError:
            raise Unavailable(f"the store has not answered for {STALL_ANSWER_S:.0f} s; try again") from None

    async def flush(self) -> None:
        """Wait until everything staged now is durable and applied."""
        self._sender.send()
        slot = self._last
        if slot is not None:
            await self._over(slot.certain)

    async def settled(self) -> None:
        """Wait until everything staged now is durable and applied, however long that takes."""
        self._sender.send()
        slot = self._last
        if slot is not None:
            await self._over(slot.applied)
        if self._ended is not None:
            raise self._ended

    async def _over(self, slot: asyncio.Future[int]) -> None:
        """Wait for a slot on behalf of a caller that has nothing in it.

        Raises what ended the shard, if that did, and Unavailable if the slot takes long.
        """
        try:
            await asyncio.shield(slot)
        except OutcomeUnknown as unknown:
            raise self._ended or Unavailable(str(unknown)) from None

    @property
    def _last(self) -> _Slot | None:
        return self._slots[-1] if self._slots else self._on_its_way

    @property
    def _all(self) -> list[_Slot]:
        return [slot for slot in (self._on_its_way, *self._slots) if slot is not None]

    @property
    def staged_rows(self) -> int:
        """The number of rows in decisions that are not durable yet."""
        return sum(slot.builder.rows for slot in self._all)

    @property
    def stalled_s(self) -> float:
        """Seconds the slot in flight has been pending; 0.0 if none is."""
        return self._sender.stalled_s

    def answer_stalled(self) -> None:
        """Answer callers that have waited too long with OutcomeUnknown; the slot is still being tried."""
        if self.stalled_s > STALL_ANSWER_S:
            error = OutcomeUnknown(f"the store has not answered for {self.stalled_s:.0f} s; a retry is safe")
            for slot in self._all:
                if not slot.certain.done():
                    slot.certain.set_exception(error)
                    slot.certain = _future()

    # ---- the sender

    @property
    def waiting_slots(self) -> int:
        """The number of sections that wait for a slot; the last one may still have room."""
        return len(self._slots)

    @property
    def next_bytes(self) -> int:
        """An upper bound of the size of the first waiting section (bytes)."""
        return self._slots[0].builder.size_bytes

    def take(self) -> Section:
        """Take the first waiting section, which is in flight from now on.

        None is taken again before it has `landed`.
        """
        self._on_its_way = self._slots.popleft()
        if self._slots:
            self._sender.join(self)
        builder = self._on_its_way.builder
        return Section(self._shard, builder.freeze(), builder.deletions)

    def never_lands(self, error: Exception) -> None:
        """End the shard, since its section cannot be encoded and its memory can no longer be relied on.

        Raises nothing.
        """
        if self._on_its_way is not None:
            self.end(Unavailable(f"this daemon no longer serves the shard: {error}"))
            self._failed(error)

    def landed(self, section: Section, landed: LandedSection) -> None:
        """Apply the section that was taken, which is certain, and answer its callers. Raises nothing."""
        taken = self._on_its_way
        if taken is None:
            # The shard ended meanwhile and dropped its state.
            return
        try:
            self._applied(landed, section.records, section.deletions)
        except Exception as error:  # noqa: BLE001 - any error is this shard's alone
            self.end(Unavailable(f"this daemon no longer serves the shard: {error}"))
            self._failed(error)
            return
        for future in (taken.certain, taken.applied):
            if not future.done():
                future.set_result(landed.slot)
        self._on_its_way = None

    def end(self, error: Exception) -> None:
        """Stop staging; callers of what is staged get OutcomeUnknown, all others the error."""
        if self._ended is not None:
            return
        self._ended = error
        self._sender.leave(self)
        unknown = OutcomeUnknown.after(error)
        for slot in self._all:
            for future in (slot.certain, slot.applied):
                if not future.done():
                    future.set_exception(unknown)
        self._slots.clear()
        self._on_its_way = None


class TopicSlots:
    """The slots of a shard for one of its topics, until the topic ends.

    Work that still runs for a topic that is loaded again must decide nothing: it has seen state that is no longer
    valid.
    """

    def __init__(self, slots: ShardSlots) -> None:
        self._slots = slots
        self._ended: Exception | None = None

    def end(self, error: Exception) -> None:
        """Stop staging; later callers get the error. Decisions that are staged already are still written."""
        if self._ended is None:
            self._ended = error

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def check_accepting(self) -> None:
        self._check()
        self._slots.check_accepting()

    def stage(
        self,
        *records: Record,
        awaited: bool = True,
        may_wait: bool = False,
        effects: RequestEffects | None = None,
    ) -> asyncio.Future[int]:
        self._check()
        return self._slots.stage(*records, awaited=awaited, may_wait=may_wait, effects=effects)

    def stage_together(
        self, records: Sequence[Record], *, effects: RequestEffects | None = None
    ) -> asyncio.Future[int]:
        self._check()
        return self._slots.stage_together(records, effects=effects)

    async def confirmed(self) -> None:
        self._check()
        await self._slots.confirmed()

    async def settled(self) -> None:
        self._check()
        await self._slots.settled()


def _future() -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    # No caller may be waiting when it fails.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
