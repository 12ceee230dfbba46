"""A subscription that is shared by key: who joins, and rounds in which what may be sent is shared out.

Owns: consumers coming and going, when a round is made and how much is done in one, plans, and what of it is counted.
Does not own: who receives what (`daemon.core.key_shared`), streams and what is on its way out on them
(`key_shared_stream`, `key_shared_outbox`), opening (`stream_opening`), and what an acknowledgement does.

Whoever changes something for which rows wait asks for a round: rows came due, were acknowledged or came back, permits
were granted, a consumer came or went, an outbox has room. However many ask in one turn of the loop, there is one round.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from daemon.call_values import Consumer
from daemon.core import limits
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.index.positions import KeyedRows
from daemon.core.key_shared import hash_slots
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import KeyShared
from daemon.errors import InvalidArgument, InvariantViolated, QuotaExceeded, TarryError, Unavailable
from daemon.runtime.environment import Environment
from daemon.topic.key_shared_stream import KeySharedStream, SubscriptionOfKeySharedStreams
from daemon.topic.open_stream import MESSAGES_ROWS_MAX, OpenStream
from storage_backends.formats.row_columns import Rows

NAME_MAX_BYTES = 255
ADDRESS_MAX_BYTES = 255
# A plan is made in one go, so that nothing stands between its positions.
PLAN_ROWS_MAX = MESSAGES_ROWS_MAX
CONSUMERS_RETRY_MS = 5_000


class Leasing(Protocol):
    """The leases of the subscription, as the sharing of keys sees them."""

    def stop_listening(self) -> None:
        """READY is not kept for pullers any longer."""
        ...


class SubscriptionOfSharing(SubscriptionOfKeySharedStreams, Protocol):
    """What the sharing of keys asks of its subscription beside."""

    @property
    def leases(self) -> Leasing: ...

    @property
    def may_hand_out(self) -> bool:
        """Whether anything may be handed out now."""
        ...

    def refill(self) -> None:
        """There may be room in READY."""
        ...

    def count_handed_out(self, rows: KeyedRows) -> None:
        """Counts rows that were handed out in the metrics."""
        ...


@dataclasses.dataclass(eq=False, slots=True)
class _Shared:
    """From the first KEY_SHARED stream to the last. `consumers`: by their numbers, on which stream each is."""

    key_shared: KeyShared
    streams: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    consumers: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    round: asyncio.Handle | None = None
    # Of the blocked attempts so many are counted.
    blocked_counted: int = 0


class KeySharing:
    """The sharing of one subscription by key: consumers come and go, and in rounds what may be sent is shared out."""

    def __init__(self, subscription: SubscriptionOfSharing, environment: Environment) -> None:
        self._subscription = subscription
        self._topic = subscription.topic
        self._state = subscription.state
        self._environment = environment
        self._consumers_max = environment.config.limits.consumers_per_subscription_max
        self._shared: _Shared | None = None
        self._reading: set[asyncio.Future[None]] = set()

    # ---- streams

    @property
    def is_open(self) -> bool:
        """Whether there is a KEY_SHARED stream."""
        return self._shared is not None

    def open(self, stream: KeySharedStream) -> None:
        """A stream listens. The first one begins the sharing."""
        core, state = self._topic.core, self._state
        # Nobody but KEY_SHARED streams listens now.
        self._subscription.leases.stop_listening()
        frozen = (
            core.key_sharing.begin(state, elapsed_ms=self._environment.elapsed_ms())
            if state.key_shared is None
            else None
        )
        core.open(state, stream.dispatcher)
        if state.key_shared is None:
            raise InvariantViolated(f"subscription {state.stored.name!r} is not shared by key after it was begun")
        if self._shared is None:
            self._shared = _Shared(state.key_shared)
        shared = self._shared
        shared.streams[stream.dispatcher] = stream
        if frozen is not None:
            reading = asyncio.ensure_future(self._read_nacked(shared, frozen))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    async def _read_nacked(self, shared: _Shared, frozen: FrozenNacks) -> None:
        """What was NACKED before is read in a thread, and learnt by portions; nothing is handed out until then."""
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
        """A stream listens no more, and its consumers are no more."""
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
        """Whether a consumer has the dispatcher number."""
        return self._shared is not None and number in self._shared.consumers

    def consumer_id_of(self, number: int) -> int:
        """How the dispatcher of a consumer calls it."""
        return self._open().consumers[number].consumer_id_of(number)

    # ---- consumers

    def check_consumers(self, consumers: Sequence[Consumer]) -> None:
        """Raises InvalidArgument for what is wrong with them by themselves, QuotaExceeded when they are too many."""
        known: set[int] = set()
        for consumer in consumers:
            consumer_id = consumer.consumer_id
            if not consumer_id:
                raise InvalidArgument("consumer_id is 0; it must be at least 1")
            if consumer_id in known:
                raise InvalidArgument(f"consumer_id {consumer_id} is given to two consumers; each has one of its own")
            known.add(consumer_id)
            limits.check_name(f"name of consumer {consumer_id}", consumer.name, NAME_MAX_BYTES)
            size_bytes = len(consumer.address.encode())
            if size_bytes > ADDRESS_MAX_BYTES:
                raise InvalidArgument(
                    f"address of consumer {consumer_id} has {size_bytes} bytes in UTF-8; it may have at most "
                    f"{ADDRESS_MAX_BYTES}"
                )
            hash_slots.check_ranges(f"hash_ranges of consumer {consumer_id}", consumer.hash_ranges)
        count = 0 if self._shared is None else len(self._shared.consumers)
        if consumers and count + len(consumers) > self._consumers_max:
            raise QuotaExceeded(
                f"subscription {self._state.stored.name!r} has {count} consumers, {len(consumers)} would join, the "
                f"limit is {self._consumers_max}",
                retry_after_ms=CONSUMERS_RETRY_MS,
            )

    def join(self, stream: KeySharedStream, consumers: Sequence[Consumer]) -> None:
        """Consumers of a stream join, all or none. Raises InvalidArgument, QuotaExceeded."""
        if not consumers:
            return
        shared = self._open()
        self.check_consumers(consumers)
        for consumer in consumers:
            if stream.has(consumer.consumer_id):
                raise InvalidArgument(f"consumer_id is {consumer.consumer_id}; a consumer of the stream has it already")
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
        """A consumer of a stream leaves: what it holds is READY."""
        shared = self._open()
        del shared.consumers[number]
        shared.key_shared.leave([number])
        self._ask(shared)

    def grant(self, stream: KeySharedStream, number: int, permits: int) -> None:
        """Grants permits: that many more rows may be sent to a consumer."""
        shared = self._open()
        shared.key_shared.grant(number, permits)
        self._ask(shared)

    def set_full(self, stream: KeySharedStream, *, is_full: bool) -> None:
        """Whether nothing more is to be sent on a stream for now."""
        shared = self._open()
        shared.key_shared.set_full(stream.dispatcher, is_full)
        self._ask(shared)

    # ---- messages that are not delayed

    def check_plan(self, positions: Rows) -> None:
        """Checks how many positions a plan names. Raises InvalidArgument."""
        limits.check_rows("entry_id", len(positions), min(PLAN_ROWS_MAX, self._environment.request_limits.rows_max))

    def plan(self, stream: KeySharedStream, request_id: int, positions: Rows) -> asyncio.Future[None]:
        """Who receives positions, in their order. The future ends when the answer is out.

        Raises InvalidArgument, QuotaExceeded, and Unavailable when nothing may be handed out now.
        """
        topic, state = self._topic, self._state
        if not self._subscription.may_hand_out:
            raise Unavailable(f"topic {topic.core.name}: nothing may be handed out now; try again")
        shared = self._open()
        self._take_back(shared)
        numbers = topic.core.key_sharing.plan(
            state, stream.dispatcher, positions, elapsed_ms=self._environment.elapsed_ms()
        )
        sent = stream.outbox.plan(request_id, numbers)
        stream.notify()
        sent_rows = int(np.count_nonzero(numbers))
        self._environment.metrics.planned(topic.core.name, sent=sent_rows, held=len(numbers) - sent_rows)
        self._count_blocked(shared)
        topic.redelivery.watch(state)
        # Others may have a consumer for what this stream has none for.
        self._ask(shared)
        return sent

    def mark(self, stream: KeySharedStream) -> asyncio.Future[None]:
        """Ends when what was decided to go out on the stream is out."""
        self._take_back(self._open())
        return stream.outbox.mark()

    def mark_delete(self, stream: KeySharedStream, ledger_id: int, entry_id: int) -> None:
        """Everything that was planned up to this position is acknowledged."""
        shared = self._open()
        shared.key_shared.plans.mark_delete(ledger_id, entry_id)
        self._ask(shared)

    # ---- rounds

    def notify(self) -> None:
        """Something changed for which rows may wait."""
        if self._shared is not None:
            self._ask(self._shared)

    def _ask(self, shared: _Shared) -> None:
        if shared.round is None:
            shared.round = asyncio.get_running_loop().call_soon(self._round, shared, None)

    def _round(self, shared: _Shared, gave_way_s: float | None) -> None:
        """One portion; what is left is handed out when the others have had their turn."""
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
        """What is shared by key cannot be relied on any more: its streams end with the error, or, where that was not
        foreseen, with their topic.
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
        """Rows may have come to be NACKED: what is behind them of their hashes is at nobody from now on. To be called
        before anybody else can name it.
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
        """Shares out a portion; whether there may be more."""
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
                topic.redelivery.watch(self._state)
            self._count_blocked(shared)
        self._subscription.refill()
        return key_shared.may_hand_out

    def _count_blocked(self, shared: _Shared) -> None:
        attempts = shared.key_shared.blocked_attempts
        if attempts > shared.blocked_counted:
            self._environment.metrics.key_blocked(self._topic.core.name, rows=attempts - shared.blocked_counted)
            shared.blocked_counted = attempts

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        if self._shared is not None:
            self._shared.key_shared.look_after(elapsed_ms=self._environment.elapsed_ms())
            for stream in self._shared.streams.values():
                # It may have waited for the epoch to be confirmed.
                stream.notify()
