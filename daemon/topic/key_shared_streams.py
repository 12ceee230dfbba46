"""Serves KEY_SHARED streams: their consumers, rounds that share rows out, and what goes out to each dispatcher.

Changes for which rows may wait request a round: rows came due, were acknowledged or redelivered, permits were granted,
a consumer came or left, an outbox has room. All requests in one turn of the loop get one round.
`daemon.core.key_shared` decides who receives what.

An outbox keeps one order for messages, answers to plans, rows that were taken back, and marks, which end when
everything before them is out. It joins messages that follow each other, and says when it is full. Answers to
acknowledgements do not wait for it, so a row that is no longer in flight at its consumer does not leave it.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TypeAlias

import numpy as np
from pyroaring import BitMap64

from daemon.call_values import Consumer, HandedOut, Nack, NackOutcome, Planned, TakenBack
from daemon.core import limits
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions.claims import HeldPositions
from daemon.core.index.position_keys import KeyedRows, Mask, bitmap_of, contained
from daemon.core.key_shared import hash_slots
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import KeyShared
from daemon.errors import InvalidArgument, InvariantViolated, QuotaExceeded, TarryError, Unavailable
from daemon.runtime.environment import Environment
from daemon.topic.leases import Leases
from daemon.topic.open_streams import MESSAGES_ROWS_MAX, OpenStream, SubscriptionPort
from storage_backends.formats.row_columns import U32, U64, Rows

# Rows with which a stream is full until some are taken, and the most rows of one message
ROWS_MAX = 10_000
NO_NUMBERS: U64 = np.empty(0, np.uint64)
NO_POSITIONS = HeldPositions(NO_NUMBERS, NO_NUMBERS, NO_NUMBERS)


@dataclasses.dataclass(eq=False, slots=True)
class Sent:
    """Rows that were sent to consumers, or taken back from them.

    `numbers` are the dispatcher numbers of the consumers, u32[n] for each part of the rows.
    """

    taken_back: bool
    rows: list[KeyedRows]
    numbers: list[U32]
    count: int

    def columns(self) -> tuple[KeyedRows, U32]:
        return KeyedRows.concat(self.rows), np.concatenate(self.numbers)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The answer to a plan. `new` is the mask of rows that were not planned before; `sent` ends when it is out."""

    request_id: int
    rows: KeyedRows
    numbers: U32
    new: Mask
    sent: asyncio.Future[None]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Mark:
    """A position in the order. `passed` ends when everything before it is out."""

    passed: asyncio.Future[None]


class KeySharedOutbox:
    """The outgoing items of one KEY_SHARED stream, in order. `rows` counts those in messages that were not taken."""

    def __init__(self) -> None:
        self.rows = 0
        self._items: collections.deque[Sent | Plan | Mark] = collections.deque()
        # Positions dropped instead of sent: nothing is to be taken back of them
        self._dropped = BitMap64()
        self._ended: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._items)

    @property
    def is_full(self) -> bool:
        return self.rows >= ROWS_MAX

    def send(self, rows: KeyedRows, numbers: U32) -> None:
        """Add rows that consumers have from now on."""
        self.rows += len(rows)
        self._add(rows, numbers, taken_back=False)

    def take_back(self, rows: KeyedRows, numbers: U32) -> None:
        """Add rows that consumers no longer have."""
        self._add(rows, numbers, taken_back=True)

    def _add(self, rows: KeyedRows, numbers: U32, *, taken_back: bool) -> None:
        if not self._items:
            self._dropped.clear()
        last = self._items[-1] if self._items else None
        if isinstance(last, Sent) and last.taken_back == taken_back and last.count + len(rows) <= ROWS_MAX:
            last.rows.append(rows)
            last.numbers.append(numbers)
            last.count += len(rows)
        else:
            self._items.append(Sent(taken_back, [rows], [numbers], len(rows)))

    def plan(self, request_id: int, rows: KeyedRows, numbers: U32, new: Mask) -> asyncio.Future[None]:
        """Add the answer to a plan; the future ends when it is out."""
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            sent.set_exception(self._ended)
        else:
            self._items.append(Plan(request_id, rows, numbers, new, sent))
        return sent

    def mark(self) -> asyncio.Future[None]:
        """Return a future that ends when everything in the outbox now is out."""
        passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._ended is not None:
            passed.set_result(None)
        else:
            self._items.append(Mark(passed))
        return passed

    def pass_marks(self) -> None:
        """End the marks that come first now, since what was taken is out."""
        while self._items and isinstance(mark := self._items[0], Mark):
            self._items.popleft()
            _end(mark.passed)

    def take(self) -> Sent | Plan:
        """Take the first item, which is not a mark."""
        item = self._items.popleft()
        if isinstance(item, Plan):
            self._items.appendleft(Mark(item.sent))
        elif isinstance(item, Sent):
            self.rows -= 0 if item.taken_back else item.count
        else:
            raise InvariantViolated("a mark was taken as an item to send")
        return item

    def drop(self, rows: KeyedRows, dropped: Mask) -> None:
        """Note which rows of an item that was taken are dropped; the others are sent."""
        if dropped.any():
            self._dropped |= bitmap_of(rows.keys[dropped])
        if self._dropped:
            self._dropped -= bitmap_of(rows.keys[~dropped])

    def were_sent(self, taken_back: KeyedRows) -> Mask:
        """Return the mask of rows, taken back from consumers, that had been sent to them."""
        dropped = contained(taken_back.keys, self._dropped)
        self._dropped -= bitmap_of(taken_back.keys)
        return ~dropped

    def end(self, error: Exception) -> None:
        """Drop all items; callers that wait for a plan get the error."""
        self._ended = error
        for item in self._items:
            if isinstance(item, Plan):
                _end(item.sent, error)
            elif isinstance(item, Mark):
                _end(item.passed)
        self._items.clear()
        self.rows = 0


def _end(waited_for: asyncio.Future[None], error: Exception | None = None) -> None:
    """End a future; its caller may no longer be waiting."""
    if waited_for.done():
        return
    if error is None:
        waited_for.set_result(None)
    else:
        waited_for.set_exception(error)


Outgoing: TypeAlias = HandedOut | Planned | TakenBack


class KeySharedStream(OpenStream):
    """A stream that delivers a KEY_SHARED subscription's rows to consumers.

    The rows that they hold are READY again when it is closed.
    """

    def __init__(self, subscription: SubscriptionPort, sharing: SharingRounds) -> None:
        super().__init__(subscription)
        self._sharing = sharing
        self.outbox = KeySharedOutbox()
        # Consumer id -> dispatcher number, and back
        self._numbers: dict[int, int] = {}
        self._consumer_ids: dict[int, int] = {}
        # Columns of the numbers and the ids, by ascending number
        self._columns: tuple[U32, U32] | None = None
        # The consumers of rows that were taken back, in what was taken from the outbox last
        self._being_told: U32 | None = None

    @property
    def holders(self) -> Collection[int]:
        return self._consumer_ids.keys()

    # ---- consumers

    def joined(self, consumers: Sequence[Consumer], numbers: Sequence[int]) -> None:
        """Record that consumers joined under these numbers."""
        for consumer, number in zip(consumers, numbers, strict=True):
            self._numbers[consumer.consumer_id] = number
            self._consumer_ids[number] = consumer.consumer_id
        self._columns = None

    def has(self, consumer_id: int) -> bool:
        """Return whether the stream has a consumer with this id."""
        return consumer_id in self._numbers

    def numbers_of(self, consumer_ids: U32) -> U32:
        """Return the dispatcher numbers of consumers, 0 for those that do not exist."""
        distinct, inverse = np.unique(consumer_ids, return_inverse=True)
        return np.array([self._numbers.get(each, 0) for each in distinct.tolist()], np.uint32)[inverse]

    def consumer_id_of(self, number: int) -> int:
        return self._consumer_ids[number]

    def add_consumer(self, consumer: Consumer) -> None:
        """Add a consumer. Raises InvalidArgument, QuotaExceeded."""
        self._check_open()
        self._sharing.join(self, [consumer])

    def remove_consumer(self, consumer_id: int) -> Awaitable[None]:
        """Remove a consumer; the rows that it holds are READY. Raises InvalidArgument.

        Await the result: then nothing more goes out to it.
        """
        self._check_open()
        number = self._numbers.pop(consumer_id, None)
        if number is None:
            raise InvalidArgument(f"consumer_id is {consumer_id}; it must be the id of a consumer of the stream")
        del self._consumer_ids[number]
        self._columns = None
        self._sharing.leave(self, number)
        return self.flushed()

    def grant(self, permits: int, consumer_id: int) -> None:
        """Add permits, so that more rows may be sent to a consumer. Does nothing if it has left."""
        number = self._numbers.get(consumer_id)
        if number is not None and self._ended is None:
            self._sharing.grant(number, permits)

    # ---- messages that are not delayed

    def plan(self, request_id: int, ledger_id: U64, entry_id: U64, key_hash: U32 | None) -> Awaitable[None]:
        """Request who receives positions, in log order; `Planned` answers. The result ends when that is out.

        It is decided before every acknowledgement that is requested later, since nothing would be known of one that was
        decided before. Raises InvalidArgument, QuotaExceeded, and Unavailable if nothing may be sent now, at once or
        when it is awaited.
        """
        self._check_open()
        positions = Rows(np.zeros(len(entry_id), np.uint64), ledger_id, entry_id, key_hash)
        self._sharing.check_plan(positions)
        return self._decided(lambda: self._sharing.plan(self, request_id, positions))

    def mark_delete(self, ledger_id: int, entry_id: int) -> Awaitable[None]:
        """Record that everything planned up to this position is acknowledged."""
        self._check_open()
        return self._decided(lambda: self._sharing.mark_delete(ledger_id, entry_id))

    def _decided(self, decide: Callable[[], Awaitable[None]]) -> Awaitable[None]:
        """Decide a request that no staged decision conflicts with, in the order of all requests."""

        def decide_if_open() -> Awaitable[None]:
            self._check_open()
            return decide()

        return self._subscription.acks.decided(self.state, NO_POSITIONS, decide_if_open)

    # ---- going out

    async def next(self) -> Outgoing:
        """Wait for the next outgoing item. Raises as `DispatchStream.next_messages`."""
        while True:
            self._check_open()
            self._were_told()
            self.outbox.pass_marks()
            # Rows that a successor may have delivered since wait here.
            if self.outbox and self._topic.may_send and self.outlet.takes(self):
                outgoing = self._take()
                if outgoing is not None:
                    return outgoing
            else:
                await self._change()

    def _were_told(self) -> None:
        """Let others have the hashes of rows that were taken back, since what was taken is out."""
        if self._being_told is not None:
            self._sharing.told(self._being_told)
            self._being_told = None

    def _take(self) -> Outgoing | None:
        """Return the next outgoing item, or None if nothing of it goes out any longer."""
        was_full = self.outbox.is_full
        item = self.outbox.take()
        if was_full and not self.outbox.is_full:
            self._sharing.set_full(self, is_full=False)
        if isinstance(item, Plan):
            held = self._still_held(item.rows, item.numbers, item.new)
            numbers = np.where(held, item.numbers, np.uint32(0))
            return Planned(self.epoch, item.request_id, self._consumer_ids_of(numbers))
        rows, numbers = item.columns()
        if item.taken_back:
            self._being_told = numbers
        goes = self.outbox.were_sent(rows) if item.taken_back else self._still_held(rows, numbers)
        consumer_ids = self._consumer_ids_of(numbers)
        goes &= consumer_ids != 0
        if not goes.any():
            return None
        if not goes.all():
            rows, consumer_ids = rows.take(goes), consumer_ids[goes]
        handed_out = dataclasses.replace(self._subscription.handed_out(rows), consumer_id=consumer_ids)
        return TakenBack(handed_out) if item.taken_back else handed_out

    def _still_held(self, rows: KeyedRows, numbers: U32, with_permit: Mask | None = None) -> Mask:
        """Return the mask of rows that are in flight at their consumers as they were when they were put in.

        The others left since, by a decision that may be answered already, or were taken back: they are not sent, and
        their consumers have the permits again. `with_permit` is the mask of rows that used one; None means all.
        """
        held = self.state.in_flight.are_held(rows, numbers)
        dropped = ~held & (numbers != 0)
        self.outbox.drop(rows, dropped)
        if dropped.any():
            self._sharing.grant_again(numbers[dropped if with_permit is None else dropped & with_permit])
        return held

    def _consumer_ids_of(self, numbers: U32) -> U32:
        """Return the ids of consumers, 0 for those that have left."""
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
        """Negatively acknowledge positions; with `awaited`, the result ends once the rows taken back are out, too."""
        outcome = super().negative_acknowledge(nack, awaited=awaited)
        return self._once_out(outcome) if awaited else outcome

    async def _once_out(self, outcome: Awaitable[NackOutcome]) -> NackOutcome:
        decided = await outcome
        await self.flushed()
        return decided

    async def flushed(self) -> None:
        """Wait until everything in the outbox now is out."""
        if self._ended is None:
            passed = self._sharing.mark(self)
            self.notify()
            await passed

    def sends_no_more(self) -> None:
        """End the outbox, since the caller takes nothing more; those that wait for plans get an error."""
        if self._ended is None:
            self._sharing.set_full(self, is_full=True)
        self.outbox.end(Unavailable("the caller has ended its requests, so the daemon sends nothing more"))

    def end(self, error: Exception) -> None:
        super().end(error)
        self.outbox.end(error)


NAME_MAX_BYTES = 255
ADDRESS_MAX_BYTES = 255
# A plan is made in one turn, so that nothing comes between its positions.
PLAN_ROWS_MAX = MESSAGES_ROWS_MAX
CONSUMERS_RETRY_MS = 5_000


@dataclasses.dataclass(eq=False, slots=True)
class _Shared:
    """The state from the first KEY_SHARED stream to the last.

    `consumers` maps their numbers to their streams.
    """

    key_shared: KeyShared
    streams: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    consumers: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    round: asyncio.Handle | None = None
    # Blocked attempts that the metrics have counted
    blocked_counted: int = 0


class SharingRounds:
    """The sharing of one subscription by key: consumers, and the rounds in which rows are shared out."""

    def __init__(self, subscription: SubscriptionPort, leases: Leases, environment: Environment) -> None:
        self._subscription = subscription
        self._leases = leases
        self._topic = subscription.topic
        self._state = subscription.state
        self._environment = environment
        self._consumers_max = environment.config.limits.consumers_per_subscription_max
        self._shared: _Shared | None = None
        self._reading: set[asyncio.Future[None]] = set()

    # ---- streams

    @property
    def is_open(self) -> bool:
        """True if there is a KEY_SHARED stream."""
        return self._shared is not None

    def open(self, stream: KeySharedStream) -> None:
        """Add a stream. The first one begins the sharing."""
        core, state = self._topic.core, self._state
        # Only KEY_SHARED streams listen now.
        self._leases.stop_listening()
        frozen = (
            core.key_sharing.begin(state, elapsed_ms=self._environment.elapsed_ms())
            if state.key_shared is None
            else None
        )
        core.open(state, stream.dispatcher)
        if state.key_shared is None:
            raise InvariantViolated(f"subscription {state.stored.name!r} is not shared by key after its sharing began")
        if self._shared is None:
            self._shared = _Shared(state.key_shared)
        shared = self._shared
        shared.streams[stream.dispatcher] = stream
        if frozen is not None:
            reading = asyncio.ensure_future(self._read_nacked(shared, frozen))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read_nacked(self, shared: _Shared, frozen: FrozenNacks) -> None:
        """Read in a thread the rows NACKED before, and learn them in portions. Nothing is delivered until then."""
        try:
            rows, _ = await self._environment.run(frozen.rows)
            await self._learn_nacked(shared, rows)
        except Exception as error:  # noqa: BLE001 - the streams tell it
            self._fail(shared, error)

    async def _learn_nacked(self, shared: _Shared, rows: KeyedRows) -> None:
        sharing, pace, left = self._topic.core.key_sharing, self._topic.pace, rows
        while self._shared is shared:
            portion = left.take(slice(0, pace.rows))
            left = left.take(slice(len(portion), None))
            if not len(left):
                sharing.finish(self._state, portion)
                self._ask(shared)
                return
            sharing.learn(self._state, portion)
            await pace.give_way()

    def closed(self, stream: OpenStream) -> None:
        """Remove a closed stream and its consumers."""
        shared = self._shared
        if shared is None or shared.streams.pop(stream.dispatcher, None) is None:
            return
        for holder in stream.holders:
            del shared.consumers[holder]
        if not shared.streams:
            self._shared = None
            if shared.round is not None:
                shared.round.cancel()

    def _open(self) -> _Shared:
        if self._shared is None:
            raise InvariantViolated(f"subscription {self._state.stored.name!r} is not open as KEY_SHARED")
        return self._shared

    def has(self, number: int) -> bool:
        """Return whether a consumer has the dispatcher number."""
        return self._shared is not None and number in self._shared.consumers

    def consumer_id_of(self, number: int) -> int:
        """Return the id that its dispatcher gave to a consumer."""
        return self._open().consumers[number].consumer_id_of(number)

    # ---- consumers

    def check_consumers(self, consumers: Sequence[Consumer]) -> None:
        """Raise InvalidArgument if consumers are invalid by themselves, QuotaExceeded if there are too many."""
        known: set[int] = set()
        for consumer in consumers:
            consumer_id = consumer.consumer_id
            if not consumer_id:
                raise InvalidArgument("consumer_id is 0; it must be at least 1")
            if consumer_id in known:
                raise InvalidArgument(f"consumer_id is {consumer_id} for two consumers; it must be unique in a stream")
            known.add(consumer_id)
            limits.check_name(f"name of consumer {consumer_id}", consumer.name, NAME_MAX_BYTES)
            size_bytes = len(consumer.address.encode())
            if size_bytes > ADDRESS_MAX_BYTES:
                raise InvalidArgument(
                    f"address of consumer {consumer_id} has {size_bytes} bytes in UTF-8; it must have at most "
                    f"{ADDRESS_MAX_BYTES}"
                )
            hash_slots.check_ranges(f"hash_ranges of consumer {consumer_id}", consumer.hash_ranges)
        count = 0 if self._shared is None else len(self._shared.consumers)
        if consumers and count + len(consumers) > self._consumers_max:
            raise QuotaExceeded(
                f"subscription {self._state.stored.name!r} has {count} consumers and {len(consumers)} would join; the "
                f"limit is {self._consumers_max}",
                retry_after_ms=CONSUMERS_RETRY_MS,
            )

    def join(self, stream: KeySharedStream, consumers: Sequence[Consumer]) -> None:
        """Add consumers to a stream, all or none. Raises InvalidArgument, QuotaExceeded."""
        if not consumers:
            return
        shared = self._open()
        self.check_consumers(consumers)
        for consumer in consumers:
            if stream.has(consumer.consumer_id):
                raise InvalidArgument(f"consumer_id is {consumer.consumer_id}; it must be unique in a stream")
        numbers = [self._subscription.next_dispatcher() for _ in consumers]
        shared.key_shared.join(
            [
                Joining(number, stream.dispatcher, each.name, each.address, each.permits, each.hash_ranges)
                for number, each in zip(numbers, consumers, strict=True)
            ]
        )
        stream.joined(consumers, numbers)
        shared.consumers |= dict.fromkeys(numbers, stream)
        self._ask(shared)

    def leave(self, stream: KeySharedStream, number: int) -> None:
        """Remove a consumer from a stream; the rows that it holds are READY."""
        shared = self._open()
        del shared.consumers[number]
        shared.key_shared.leave([number])
        self._ask(shared)

    def grant(self, number: int, permits: int) -> None:
        """Grant a consumer permits: this many more rows may be sent to it."""
        shared = self._open()
        shared.key_shared.grant(number, permits)
        self._ask(shared)

    def grant_again(self, numbers: U32) -> None:
        """Grant the permit of each row, given by its consumer, that was not sent. Consumers that left have none."""
        for number, rows in zip(*(column.tolist() for column in np.unique(numbers, return_counts=True)), strict=True):
            if self.has(number):
                self.grant(number, rows)

    def told(self, numbers: U32) -> None:
        """Record that consumers, named once for each row, have been told what was taken back from them first."""
        shared = self._open()
        shared.key_shared.told(numbers)
        self._ask(shared)

    def set_full(self, stream: KeySharedStream, *, is_full: bool) -> None:
        """Set whether the stream accepts nothing more for now."""
        shared = self._open()
        shared.key_shared.set_full(stream.dispatcher, is_full)
        self._ask(shared)

    # ---- messages that are not delayed

    def check_plan(self, positions: Rows) -> None:
        """Check how many positions a plan names. Raises InvalidArgument."""
        limits.check_rows("entry_id", len(positions), min(PLAN_ROWS_MAX, self._environment.request_limits.rows_max))

    def plan(self, stream: KeySharedStream, request_id: int, positions: Rows) -> asyncio.Future[None]:
        """Plan who receives positions, in their order. The future ends when the answer is out.

        While rows may not be delivered, a position that no consumer holds is HELD. Raises InvalidArgument,
        QuotaExceeded, and Unavailable if nothing may be sent now.
        """
        topic, state = self._topic, self._state
        if not topic.may_send:
            raise Unavailable(f"topic {topic.core.name}: rows may not be delivered now; try again")
        shared = self._open()
        self._take_back(shared)
        new = ~shared.key_shared.plans.are_planned(positions.ledger_id, positions.entry_id)
        numbers = topic.core.key_sharing.plan(
            state,
            stream.dispatcher,
            positions,
            may_hand_out=self._subscription.may_hand_out,
            elapsed_ms=self._environment.elapsed_ms(),
        )
        planned = KeyedRows(positions, shared.key_shared.planned.find(positions.ledger_id, positions.entry_id))
        sent = stream.outbox.plan(request_id, planned, numbers, new)
        stream.notify()
        sent_rows = int(np.count_nonzero(numbers))
        self._environment.metrics.planned(topic.core.name, sent=sent_rows, held=len(numbers) - sent_rows)
        self._count_blocked(shared)
        self._subscription.nacks.watch(state)
        # Other streams may have a consumer for rows that no consumer of this stream takes.
        self._ask(shared)
        return sent

    def mark(self, stream: KeySharedStream) -> asyncio.Future[None]:
        """Return a future that ends when everything decided to go out on the stream is out."""
        self._take_back(self._open())
        return stream.outbox.mark()

    def mark_delete(self, ledger_id: int, entry_id: int) -> Awaitable[None]:
        """Record that everything planned up to this position is acknowledged; the result has ended."""
        shared = self._open()
        shared.key_shared.plans.mark_delete(ledger_id, entry_id)
        self._ask(shared)
        recorded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        recorded.set_result(None)
        return recorded

    # ---- rounds

    def notify(self) -> None:
        """Request a round, since something changed for which rows may wait."""
        if self._shared is not None:
            self._ask(self._shared)

    def _ask(self, shared: _Shared) -> None:
        if shared.round is None:
            shared.round = asyncio.get_running_loop().call_soon(self._round, shared, None)

    def _round(self, shared: _Shared, gave_way_s: float | None) -> None:
        """Share out one portion; the rest follows after others have had their turn."""
        shared.round = None
        if gave_way_s is not None:
            self._topic.pace.noted(asyncio.get_running_loop().time() - gave_way_s)
        try:
            self._take_back(shared)
            if self._hand_out(shared) and shared.round is None:
                loop = asyncio.get_running_loop()
                shared.round = loop.call_soon(self._round, shared, loop.time())
        except Exception as error:  # noqa: BLE001 - the streams tell it
            self._fail(shared, error)

    def _fail(self, shared: _Shared, error: Exception) -> None:
        """End the streams with the error, since the sharing can no longer be relied on.

        An unforeseen error ends the topic instead.
        """
        if not isinstance(error, TarryError) or isinstance(error, InvariantViolated):
            self._topic.failed(error)
            return
        streams = list(shared.streams.values())
        for stream in streams:
            stream.end(error)
        for stream in streams:
            self._subscription.close_stream(stream)

    def take_back(self) -> None:
        """Take back what consumers have behind a nacked row of its key.

        Call it whenever rows may be NACKED, before another request can name the rows behind.
        """
        if self._shared is not None:
            self._take_back(self._shared)

    def _take_back(self, shared: _Shared) -> None:
        rows = 0
        for taken in shared.key_shared.take_back():
            stream = shared.streams[taken.stream]
            stream.outbox.take_back(taken.rows, taken.consumers)
            stream.notify()
            rows += len(taken.rows)
        if rows:
            self._environment.metrics.taken_back(self._topic.core.name, rows=rows)

    def _hand_out(self, shared: _Shared) -> bool:
        """Share out a portion; return whether there may be more."""
        topic, key_shared = self._topic, shared.key_shared
        if not self._subscription.may_hand_out:
            return False
        if key_shared.may_hand_out:
            assigned = key_shared.hand_out(topic.pace.rows, elapsed_ms=self._environment.elapsed_ms())
            for sent in assigned:
                stream = shared.streams[sent.stream]
                stream.outbox.send(sent.rows, sent.consumers)
                stream.notify()
                if stream.outbox.is_full:
                    key_shared.set_full(sent.stream, True)
            if assigned:
                self._subscription.count_handed_out(KeyedRows.concat([sent.rows for sent in assigned]))
                self._subscription.nacks.watch(self._state)
            self._count_blocked(shared)
        self._subscription.refill()
        return key_shared.may_hand_out

    def _count_blocked(self, shared: _Shared) -> None:
        attempts = shared.key_shared.blocked_attempts
        if attempts > shared.blocked_counted:
            self._environment.metrics.key_blocked(self._topic.core.name, rows=attempts - shared.blocked_counted)
            shared.blocked_counted = attempts

    def every_second(self) -> None:
        """Do what depends on time alone. Called once a second."""
        if self._shared is not None:
            self._shared.key_shared.every_second(elapsed_ms=self._environment.elapsed_ms())
            for stream in self._shared.streams.values():
                # It may have waited for the epoch to be confirmed.
                stream.notify()
