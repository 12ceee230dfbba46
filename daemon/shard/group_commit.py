"""Group commit: the decisions of a shard that arrive while a slot is being written are the next slot.

Owns: what is staged, the loop that writes slot after slot, and when each waiting request hears of its slot.
Does not own: what a decision is (`daemon.core.topic`), the slot's PUT (`daemon.shard.journal_writer`), and what is done
with a slot that is certain (`applied`, given by the shard).
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Callable, Sequence

from daemon.errors import NotOwner, OutcomeUnknown, QuotaExceeded, Unavailable
from daemon.shard.epoch_confirmation import EpochConfirmation
from daemon.shard.journal_writer import JournalWriter
from daemon.surroundings.environment import Environment
from daemon.topic_terms.topic_staging import STALL_ANSWER_S
from storage_backends.formats import deletion_format
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.formats.slot_format import DeletionRecord, Record, SlotBuilder, size_max

# What may wait for its slot before requests are refused; four full slots by default.
STAGED_SLOTS_MAX = 4
BACK_PRESSURE_RETRY_MS = 100
# So long may a slot be uncertain before new requests are refused.
STALL_REFUSE_S = 2.0
# Without a confirmation of the epoch for so long nothing is answered before there is one (R8).
ANSWER_UNCONFIRMED_S = 30.0
# Records that nobody awaits go with the next slot, or after this time.
UNAWAITED_S = 1.0

Applied = Callable[[ShardSlot, Sequence[Record], Sequence[DeletionRecord]], None]


@dataclasses.dataclass(slots=True)
class _Slot:
    """A slot that is being filled or written.

    `certain` and `applied` are set when it is durable and applied. Whoever waits for `certain` is told when that takes
    too long; `applied` ends with the slot itself.
    """

    builder: SlotBuilder
    certain: asyncio.Future[int]
    applied: asyncio.Future[int]


class GroupCommit:
    """The staged decisions of one shard. `run` must be running; it ends with the shard."""

    def __init__(
        self,
        journal: JournalWriter,
        confirmation: EpochConfirmation,
        environment: Environment,
        applied: Applied,
    ) -> None:
        self._journal = journal
        self._confirmation = confirmation
        self._environment = environment
        self._applied = applied
        self._slots: collections.deque[_Slot] = collections.deque()
        self._writing: _Slot | None = None
        self._writing_since_s = 0.0
        self._staged = asyncio.Event()
        self._slot_bytes_max = environment.config.journal.slot_bytes_max
        self._ended: Exception | None = None

    def check_accepting(self) -> None:
        """Raises what a request is to be answered with when nothing can be staged now."""
        if self._ended is not None:
            raise self._ended
        stalled_s = self.stalled_s
        if stalled_s > STALL_REFUSE_S:
            raise Unavailable(f"the store has not answered for {stalled_s:.0f} s; nothing was stored, try again")
        if len(self._slots) >= STAGED_SLOTS_MAX:
            raise QuotaExceeded(
                f"{len(self._slots)} full slots wait to be written, the limit is {STAGED_SLOTS_MAX}; try again",
                retry_after_ms=BACK_PRESSURE_RETRY_MS,
            )

    def stage(self, *records: Record, awaited: bool = True) -> asyncio.Future[int]:
        """The future ends with the number of the decisions' slot, once that is durable and applied. Never cancel it."""
        slot = self._append(records)
        if awaited:
            self._staged.set()
        else:
            asyncio.get_running_loop().call_later(UNAWAITED_S, self._staged.set)
        return slot.certain

    def stage_together(self, records: Sequence[Record]) -> asyncio.Future[int]:
        """Stages decisions that stand in one slot. Never cancel the future.

        It ends as that of `stage`, but not because the slot takes long: until it ends the decisions are on their way.
        """
        slot = self._append(records)
        self._staged.set()
        return slot.applied

    def stage_deletions(self, record: DeletionRecord, *, patient: bool = False) -> asyncio.Future[int]:
        """Stages a decision on the shard's deletions; the future ends with the number of its slot, once that is durable
        and applied. `patient`: it does not end because the slot takes long. Never cancel it.
        """
        slot = self._slot_with_room(deletion_format.size_max(record))
        slot.builder.append_deletions(record)
        self._staged.set()
        return slot.applied if patient else slot.certain

    def _append(self, records: Sequence[Record]) -> _Slot:
        slot = self._slot_with_room(sum(map(size_max, records)))
        for record in records:
            slot.builder.append(record)
        return slot

    def _slot_with_room(self, size_bytes: int) -> _Slot:
        if self._ended is not None:
            raise self._ended
        slot = self._slots[-1] if self._slots else None
        if slot is None or (len(slot.builder) and slot.builder.size_bytes + size_bytes > self._slot_bytes_max):
            slot = _Slot(SlotBuilder(), _future(), _future())
            self._slots.append(slot)
        return slot

    async def confirmed(self) -> None:
        """Returns when everything that a request may have seen is durable and the epoch was confirmed after this call.

        For answers without a decision of their own: they ride with the next slot, or one probe.
        """
        if self._ended is not None:
            raise self._ended
        if self._slots:
            self._staged.set()
            await asyncio.shield(self._slots[-1].certain)
            return
        asked_s = self._environment.clock.elapsed_s()
        if self._writing is not None:
            await asyncio.shield(self._writing.certain)
        try:
            await asyncio.wait_for(self._confirmation.confirm_after(asked_s), STALL_ANSWER_S)
        except TimeoutError:
            raise Unavailable(f"the store has not answered for {STALL_ANSWER_S:.0f} s; try again") from None

    async def flush(self) -> None:
        """Returns when everything that is staged now is durable and applied."""
        self._staged.set()
        slot = self._slots[-1] if self._slots else self._writing
        if slot is not None:
            await asyncio.shield(slot.certain)

    async def settled(self) -> None:
        """Returns when everything that is staged now is durable and applied, however long that takes."""
        self._staged.set()
        slot = self._slots[-1] if self._slots else self._writing
        if slot is not None:
            await asyncio.shield(slot.applied)
        if self._ended is not None:
            raise self._ended

    @property
    def staged_rows(self) -> int:
        """Rows of decisions that are not durable yet."""
        return sum(slot.builder.rows for slot in (self._writing, *self._slots) if slot is not None)

    @property
    def stalled_s(self) -> float:
        """For how long the slot that is being written has been on its way; 0.0 when none is."""
        return 0.0 if self._writing is None else self._environment.clock.elapsed_s() - self._writing_since_s

    def answer_stalled(self) -> None:
        """Whoever has waited too long is told that the outcome is unknown; the slot is still being tried."""
        if self.stalled_s > STALL_ANSWER_S:
            error = OutcomeUnknown(f"the store has not answered for {self.stalled_s:.0f} s; a retry is safe")
            for slot in (self._writing, *self._slots):
                if slot is not None and not slot.certain.done():
                    slot.certain.set_exception(error)
                    slot.certain = _future()

    async def run(self) -> None:
        """Writes slots until the journal raises: then the shard is lost, and everybody who waits is told."""
        try:
            while True:
                await self._staged.wait()
                self._staged.clear()
                while self._slots:
                    self._writing, self._writing_since_s = self._slots.popleft(), self._environment.clock.elapsed_s()
                    await self._write(self._writing)
                    self._writing = None
                    if self._slots and self._environment.linger_s and len(self._slots) == 1:
                        await self._environment.sleep(self._environment.linger_s)
        except NotOwner:
            # Whoever waits is told whose the shard is, as soon as that is known: the shard ends this then.
            raise
        except BaseException as error:
            self.end(Unavailable(f"the shard is served by this daemon no longer: {error}"))
            raise

    async def _write(self, slot: _Slot) -> None:
        records, deletion_records = slot.builder.freeze(), slot.builder.deletions
        number = await self._journal.write(records, deletion_records)
        if not self._confirmation.fresh_within(ANSWER_UNCONFIRMED_S):
            # The slot was sent long ago: a successor may have replayed it and gone on since.
            await self._confirmation.confirm_after(self._environment.clock.elapsed_s())
        self._applied(number, records, deletion_records)
        for future in (slot.certain, slot.applied):
            if not future.done():
                future.set_result(number)

    def end(self, error: Exception) -> None:
        """Nothing more is written; whoever waits gets the error."""
        if self._ended is not None:
            return
        self._ended = error
        for slot in (self._writing, *self._slots):
            for future in () if slot is None else (slot.certain, slot.applied):
                if not future.done():
                    future.set_exception(error)
        self._slots.clear()
        self._writing = None


def _future() -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    # Nobody may be waiting when it fails.
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
