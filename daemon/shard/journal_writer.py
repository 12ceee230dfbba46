"""The journal of a shard: numbered slots, each one group commit, written one after the other by its owner.

Owns: writing the next slot until its outcome is certain (R1, R2, R3, R7).
Does not own: what is in a slot and when one is due (the engine), the fence (`takeover`), reading slots
(`journal_tail`), deleting them (`journal_truncation`).

A slot whose outcome is not certain stalls the shard: nothing else is written, and only the same bytes are tried again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from daemon.errors import InvariantViolated, OutcomeUnknown, Unavailable
from daemon.shard import slot_put
from daemon.surroundings import backoff
from daemon.surroundings.unless_ended import unless_ended
from storage_backends import object_store
from storage_backends.crash_points import crash_point
from storage_backends.formats import shard_slot, slot_format
from storage_backends.formats.shard_slot import ShardSlot

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class WrittenSlot:
    """A slot that is certain.

    `sent_at_s`: monotonic time before which it cannot have landed, that is, of a confirmation of the epoch (R8).
    `seconds`: from the first try until it was certain. `tries`: how many PUTs it took.
    """

    slot: ShardSlot
    sent_at_s: float
    size_bytes: int
    seconds: float
    tries: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Try:
    """One PUT of a slot, sent at `sent_at_s`. `error`: why its outcome is open, empty when it is certain."""

    sent_at_s: float
    outcome: slot_put.Outcome
    error: str = ""


class JournalWriter:
    """Writes the slots of one epoch of one shard, from the one behind `last_slot` on. Made and used on one event loop.

    `run` encodes and puts in an executor. `written` hears of each slot before `write` returns. `new_id` gives commit
    ids. A writer that has raised is never used again: its last slot may still land.
    """

    def __init__(
        self,
        store: object_store.ObjectStore,
        *,
        shard: int,
        epoch: int,
        last_slot: ShardSlot,
        run: backoff.Run,
        clock: backoff.Clock,
        sleep: backoff.Sleep,
        jitter: backoff.Jitter,
        new_id: Callable[[], str],
        written: Callable[[WrittenSlot], None],
    ) -> None:
        self._store = store
        self._shard = shard
        self._epoch = epoch
        self._next_slot = shard_slot.next_after(last_slot)
        self._run = run
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._new_id = new_id
        self._written = written
        self._writing = False
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def next_slot(self) -> ShardSlot:
        """The number that the next `write` gives."""
        return self._next_slot

    def close(self) -> None:
        """Nothing more is written: a pending `write` raises OutcomeUnknown, a later one Unavailable."""
        if not self._ended.done():
            self._ended.set_result(None)

    async def write(
        self, records: Sequence[slot_format.Record], deletions: Sequence[slot_format.DeletionRecord] = ()
    ) -> ShardSlot:
        """Writes the records, on topics and on deletions, as the next slot and returns its number once that is certain.

        While the store cannot be reached this does not return. Raises Fenced when the shard is lost, OutcomeUnknown
        after `close`, Corruption when the store does not honour conditions.
        """
        if self._writing:
            raise InvariantViolated(f"shard {self._shard}: slot {self._next_slot} is still being written")
        if self._ended.done():
            raise Unavailable(f"shard {self._shard}: its journal is closed")
        self._writing = True
        try:
            written = await self._write_until_certain(tuple(records), tuple(deletions))
        except BaseException:
            self.close()
            raise
        finally:
            self._writing = False
        self._next_slot = ShardSlot(self._next_slot + 1)
        self._written(written)
        return written.slot

    async def _write_until_certain(
        self, records: tuple[slot_format.Record, ...], deletions: tuple[slot_format.DeletionRecord, ...]
    ) -> WrittenSlot:
        slot, first = await self._unless_ended(self._run(lambda: self._freeze_and_try(records, deletions)))
        latest = first
        tries = 1
        delays_s = backoff.delays_s(self._jitter)
        while latest.outcome is slot_put.Outcome.ABSENT:
            if tries == 1:
                log.warning("slot %s is uncertain, the shard stalls: %s", slot.key, latest.error)
            await self._unless_ended(self._sleep(next(delays_s)))
            latest = await self._unless_ended(self._run(lambda: self._try(slot, again=True)))
            tries += 1
        if tries > 1:
            log.warning("slot %s is certain after %d tries", slot.key, tries)
        created = latest.outcome is slot_put.Outcome.CREATED
        return WrittenSlot(
            slot=slot.header.slot,
            # What was found may have landed with the first try.
            sent_at_s=latest.sent_at_s if created else first.sent_at_s,
            size_bytes=len(slot.body),
            seconds=self._clock() - first.sent_at_s,
            tries=tries,
        )

    def _freeze_and_try(
        self, records: tuple[slot_format.Record, ...], deletions: tuple[slot_format.DeletionRecord, ...]
    ) -> tuple[slot_put.FrozenSlot, _Try]:
        count = len(records) + len(deletions)
        header = slot_format.SlotHeader(self._shard, self._epoch, self._next_slot, slot_format.SlotKind.DATA, count)
        slot = slot_put.FrozenSlot(header, slot_format.encode_slot(header, records, deletions), self._new_id())
        return slot, self._try(slot, again=False)

    def _try(self, slot: slot_put.FrozenSlot, *, again: bool) -> _Try:
        """One PUT; ABSENT also when the store cannot say. Runs in the executor."""
        crash_point("journal.before_put")
        sent_at_s = self._clock()
        try:
            outcome = slot_put.try_once(self._store, slot)
            if again and outcome is slot_put.Outcome.CREATED:
                self._verify_not_emptied(slot)
        except slot_put.Occupied as occupied:
            raise slot_put.lost(slot.header, occupied) from None
        except object_store.StoreError as error:
            return _Try(sent_at_s, slot_put.Outcome.ABSENT, str(error))
        crash_point("journal.after_put")
        return _Try(sent_at_s, outcome, "it is absent" if outcome is slot_put.Outcome.ABSENT else "")

    def _verify_not_emptied(self, slot: slot_put.FrozenSlot) -> None:
        """R3: between two tries the slot may have landed, been replayed by a successor and deleted as covered.

        The successor's fence stands right behind it and is never deleted.
        """
        following = shard_slot.next_after(slot.header.slot)
        holder = slot_put.holder_of(self._store, self._shard, following)
        if holder is not None:
            raise slot_put.Occupied(following, holder.epoch)

    def _unless_ended(self, work: Awaitable[T]) -> Awaitable[T]:
        """The result of `work`; raises OutcomeUnknown when the writer is closed first."""
        return unless_ended(work, self._ended, self._given_up)

    def _given_up(self) -> OutcomeUnknown:
        return OutcomeUnknown(f"shard {self._shard}: slot {self._next_slot} may or may not be durable")
