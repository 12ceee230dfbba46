"""One dispatcher's KEY_SHARED stream: its consumers, and what goes out to them.

Owns: which dispatcher number each of its consumers has, and taking out what goes out in its order.
Does not own: sharing (`daemon.core.key_shared`), when it is done (`sharing_rounds`), the order of what goes out
(`key_shared_outbox`), what streams of every type do (`open_stream`), and the wire.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Collection, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from daemon.call_values import Consumer, HandedOut, Nack, NackOutcome, Planned, TakenBack
from daemon.core.index.positions import KeyedRows
from daemon.errors import InvalidArgument, Unavailable
from daemon.topic.key_shared_outbox import Outbox, Plan
from daemon.topic.open_stream import OpenStream, SubscriptionOfStreams
from storage_backends.formats.row_columns import U32, U64, Rows

Outgoing: TypeAlias = HandedOut | Planned | TakenBack


class Sharing(Protocol):
    """The sharing of keys, as a stream sees it: `daemon.topic.sharing_rounds.KeySharing`."""

    def join(self, stream: KeySharedStream, consumers: Sequence[Consumer]) -> None: ...

    def leave(self, stream: KeySharedStream, number: int) -> None: ...

    def grant(self, stream: KeySharedStream, number: int, permits: int) -> None: ...

    def set_full(self, stream: KeySharedStream, *, is_full: bool) -> None: ...

    def check_plan(self, positions: Rows) -> None: ...

    def plan(self, stream: KeySharedStream, request_id: int, positions: Rows) -> asyncio.Future[None]: ...

    def mark(self, stream: KeySharedStream) -> asyncio.Future[None]: ...

    def mark_delete(self, stream: KeySharedStream, ledger_id: int, entry_id: int) -> None: ...


class SubscriptionOfKeySharedStreams(SubscriptionOfStreams, Protocol):
    """What a KEY_SHARED stream asks of its subscription beside."""

    @property
    def key_sharing(self) -> Sharing: ...


class KeySharedStream(OpenStream):
    """A stream that hands a KEY_SHARED subscription's rows to consumers. What they hold is READY again when it is
    closed.
    """

    def __init__(self, subscription: SubscriptionOfKeySharedStreams) -> None:
        super().__init__(subscription)
        self._sharing = subscription.key_sharing
        self.outbox = Outbox()
        # Of each consumer its dispatcher number, and back.
        self._numbers: dict[int, int] = {}
        self._consumer_ids: dict[int, int] = {}
        # The same in columns, by ascending number.
        self._columns: tuple[U32, U32] | None = None
        # Plans and marks are decided in the order in which they were asked for.
        self._in_order = asyncio.Lock()

    @property
    def holders(self) -> Collection[int]:
        return self._consumer_ids.keys()

    # ---- consumers

    def joined(self, consumers: Sequence[Consumer], numbers: Sequence[int]) -> None:
        """Consumers joined under these numbers."""
        for consumer, number in zip(consumers, numbers, strict=True):
            self._numbers[consumer.consumer_id] = number
            self._consumer_ids[number] = consumer.consumer_id
        self._columns = None

    def has(self, consumer_id: int) -> bool:
        """Whether such a consumer is there."""
        return consumer_id in self._numbers

    def numbers_of(self, consumer_ids: U32) -> U32:
        """The dispatcher numbers of consumers, 0 of those that are not there."""
        distinct, inverse = np.unique(consumer_ids, return_inverse=True)
        return np.array([self._numbers.get(each, 0) for each in distinct.tolist()], np.uint32)[inverse]

    def consumer_id_of(self, number: int) -> int:
        return self._consumer_ids[number]

    def add_consumer(self, consumer: Consumer) -> None:
        """A consumer joins. Raises InvalidArgument, QuotaExceeded."""
        self._check_open()
        self._sharing.join(self, [consumer])

    def remove_consumer(self, consumer_id: int) -> Awaitable[None]:
        """A consumer leaves: what it holds is READY. To be awaited: nothing goes out to it any more. Raises
        InvalidArgument.
        """
        self._check_open()
        number = self._numbers.pop(consumer_id, None)
        if number is None:
            raise InvalidArgument(f"consumer_id is {consumer_id}; no consumer of the stream has it")
        del self._consumer_ids[number]
        self._columns = None
        self._sharing.leave(self, number)
        return self.flushed()

    def grant(self, permits: int, consumer_id: int) -> None:
        """Grants permits: that many more rows may be sent to a consumer; nothing when it is not there any more."""
        number = self._numbers.get(consumer_id)
        if number is not None and self._ended is None:
            self._sharing.grant(self, number, permits)

    # ---- messages that are not delayed

    async def plan(self, request_id: int, ledger_id: U64, entry_id: U64, key_hash: U32 | None) -> None:
        """Asks who receives positions, in the order of the log; `Planned` says it. Returns when that is out.

        Raises InvalidArgument, QuotaExceeded, and Unavailable when nothing may be handed out now.
        """
        self._check_open()
        positions = Rows(np.zeros(len(entry_id), np.uint64), ledger_id, entry_id, key_hash)
        self._sharing.check_plan(positions)
        async with self._in_order:
            # A former owner may still hand out by key.
            await self._topic.shard.alone()
            await self._passed()
            sent = self._sharing.plan(self, request_id, positions)
        await sent

    async def mark_delete(self, ledger_id: int, entry_id: int) -> None:
        """Everything that was planned up to this position is acknowledged."""
        self._check_open()
        async with self._in_order:
            await self._passed()
            self._sharing.mark_delete(self, ledger_id, entry_id)

    async def _passed(self) -> None:
        await self._topic.gate.passed()
        self._check_open()
        self._topic.check_there(self.state)

    # ---- going out

    async def next(self) -> Outgoing:
        """Waits for what goes out next. Raises as `DispatchStream.next_messages`."""
        while True:
            self._check_open()
            self.outbox.pass_marks()
            # What a successor may have handed out since waits here.
            if self.outbox and self._topic.shard.may_hand_out and self.outlet.takes(self):
                outgoing = self._take()
                if outgoing is not None:
                    return outgoing
            else:
                await self._change()

    def _take(self) -> Outgoing | None:
        """What goes out next; None when all of it was for consumers that left."""
        was_full = self.outbox.is_full
        item = self.outbox.take()
        if was_full and not self.outbox.is_full:
            self._sharing.set_full(self, is_full=False)
        if isinstance(item, Plan):
            return Planned(self.epoch, item.request_id, self._consumer_ids_of(item.numbers))
        rows, numbers = item.columns()
        consumer_ids = self._consumer_ids_of(numbers)
        if not consumer_ids.all():
            there = np.flatnonzero(consumer_ids)
            rows, consumer_ids = rows.take(there), consumer_ids[there]
        if not len(rows):
            return None
        handed_out = self._handed_out(rows, consumer_ids)
        return TakenBack(handed_out) if item.taken_back else handed_out

    def _handed_out(self, rows: KeyedRows, consumer_ids: U32) -> HandedOut:
        return dataclasses.replace(self._subscription.handed_out(rows), consumer_id=consumer_ids)

    def _consumer_ids_of(self, numbers: U32) -> U32:
        """What consumers are called, 0 where one has left since."""
        if self._columns is None:
            by_number = sorted(self._consumer_ids.items())
            columns = np.array(by_number, np.uint32).reshape(len(by_number), 2)
            self._columns = columns[:, 0].copy(), columns[:, 1].copy()
        known, consumer_ids = self._columns
        if not len(known):
            return np.zeros(len(numbers), np.uint32)
        places = np.searchsorted(known, numbers)
        places[places == len(known)] = 0
        return np.where(known[places] == numbers, consumer_ids[places], np.uint32(0))

    def negative_acknowledge(self, nack: Nack, *, awaited: bool = True) -> Awaitable[NackOutcome]:
        """Acknowledges negatively; what is taken back by it has gone out when what this returns ends, if anybody waits
        for it.
        """
        outcome = super().negative_acknowledge(nack, awaited=awaited)
        return self._once_out(outcome) if awaited else outcome

    async def _once_out(self, outcome: Awaitable[NackOutcome]) -> NackOutcome:
        decided = await outcome
        await self.flushed()
        return decided

    async def flushed(self) -> None:
        """Returns when what is on its way out now is out."""
        if self._ended is None:
            passed = self._sharing.mark(self)
            self.notify()
            await passed

    def sends_no_more(self) -> None:
        """Nobody takes out what goes out: who waits for the answer to a plan is told."""
        if self._ended is None:
            self._sharing.set_full(self, is_full=True)
        self.outbox.end(Unavailable("the caller has sent its last request: nothing is sent any more"))

    def end(self, error: Exception) -> None:
        super().end(error)
        self.outbox.end(error)
