"""The KEY_SHARED subscriptions of one topic: who joins, and rounds in which what may be sent is shared out.

Owns: consumers coming and going, when a round is made and how much is done in one, plans, and what of it is counted.
Does not own: who receives what (`daemon.core.key_shared`), streams and what is on its way out on them
(`key_shared_stream`, `key_shared_outbox`), opening (`stream_opening`), and what an acknowledgement does.

Whoever changes something for which rows wait asks for a round: rows came due, were acknowledged or came back, permits
were granted, a consumer came or went, an outbox has room. However many ask in one turn of the loop, there is one round.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from daemon.call_values import Consumer
from daemon.core import limits
from daemon.core.key_shared import hash_slots
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import KeyShared
from daemon.core.nack_tracker import FrozenNacks
from daemon.core.positions import KeyedRows
from daemon.core.subscription_state import SubscriptionState
from daemon.errors import Conflict, InvalidArgument, InvariantViolated, QuotaExceeded, TarryError, Unavailable
from daemon.subscription.key_shared_stream import KeySharedStream, TopicOfKeySharedStreams
from daemon.subscription.open_stream import MESSAGES_ROWS_MAX, OpenStream
from daemon.surroundings.environment import Environment
from storage_backends.formats.row_columns import Rows

NAME_MAX_BYTES = 255
ADDRESS_MAX_BYTES = 255
# A plan is made in one go, so that nothing stands between its positions.
PLAN_ROWS_MAX = MESSAGES_ROWS_MAX
CONSUMERS_RETRY_MS = 5_000


class Leasing(Protocol):
    """The leases of the topic, as the sharing of keys sees them."""

    def are_under_way(self, state: SubscriptionState) -> bool:
        """Whether positions of the subscription are leased, or somebody waits to lease some."""
        ...

    def stop_listening(self, state: SubscriptionState) -> None:
        """READY is not kept for pullers any longer."""
        ...


class TopicOfSharing(TopicOfKeySharedStreams, Protocol):
    """What the sharing of keys asks of its topic beside."""

    @property
    def leases(self) -> Leasing: ...

    @property
    def streams(self) -> Mapping[int, Mapping[int, OpenStream]]: ...

    def next_dispatcher(self, state: SubscriptionState) -> int:
        """A number for a consumer of a subscription, that no other consumer, stream or lease of it has."""
        ...

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Whether anything may be handed out to the subscription now."""
        ...

    def refill(self, state: SubscriptionState) -> None:
        """There may be room in READY."""
        ...

    def count_handed_out(self, state: SubscriptionState, rows: KeyedRows) -> None: ...


@dataclasses.dataclass(eq=False, slots=True)
class _Shared:
    """A subscription that is open as KEY_SHARED. `consumers`: by their numbers, on which stream each is."""

    state: SubscriptionState
    key_shared: KeyShared
    streams: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    consumers: dict[int, KeySharedStream] = dataclasses.field(default_factory=dict)
    round: asyncio.Handle | None = None
    # Of the blocked attempts so many are counted.
    blocked_counted: int = 0


class KeySharing:
    """The KEY_SHARED subscriptions of one topic: consumers come and go, and in rounds what may be
    sent is shared out.
    """

    def __init__(self, topic: TopicOfSharing, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        self._consumers_max = environment.config.limits.consumers_per_subscription_max
        self._shared: dict[int, _Shared] = {}
        self._reading: set[asyncio.Future[None]] = set()

    # ---- streams

    def check_type(self, state: SubscriptionState, *, key_shared: bool) -> None:
        """Raises Conflict when the subscription is open in another way."""
        name = state.stored.name
        if not key_shared and state.subscription_id in self._shared:
            raise Conflict(f"subscription {name!r} is open as KEY_SHARED; close these streams first")
        if key_shared and state.subscription_id not in self._shared:
            if self._topic.streams.get(state.subscription_id):
                raise Conflict(f"subscription {name!r} is open as SHARED; close these streams first")
            if self._topic.leases.are_under_way(state):
                raise Conflict(
                    f"positions of subscription {name!r} are leased, or about to be; let the leases end first"
                )

    def open(self, stream: KeySharedStream) -> None:
        """A stream listens. The first one begins the sharing."""
        core, state = self._topic.core, stream.state
        # Nobody but KEY_SHARED streams listens now.
        self._topic.leases.stop_listening(state)
        frozen = (
            core.key_sharing.begin(state, elapsed_ms=self._environment.elapsed_ms())
            if state.key_shared is None
            else None
        )
        core.open(state, stream.dispatcher)
        if state.key_shared is None:
            raise InvariantViolated(f"subscription {state.stored.name!r} is not shared by key after it was begun")
        shared = self._shared.setdefault(state.subscription_id, _Shared(state, state.key_shared))
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
        while self._shared.get(shared.state.subscription_id) is shared:
            portion = left.take(slice(0, pace.rows))
            left = left.take(slice(len(portion), None))
            if not len(left):
                sharing.finish(shared.state, portion)
                self._ask(shared)
                return
            sharing.learn(shared.state, portion)
            await pace.give_way()

    def closed(self, stream: OpenStream) -> None:
        """A stream listens no more, and its consumers are no more."""
        number = stream.state.subscription_id
        shared = self._shared.get(number)
        if shared is None or shared.streams.pop(stream.dispatcher, None) is None:
            return
        for holder in stream.holders:
            del shared.consumers[holder]
        if not shared.streams:
            del self._shared[number]
            if shared.round is not None:
                shared.round.cancel()

    def _of(self, stream: KeySharedStream) -> _Shared:
        return self._shared[stream.state.subscription_id]

    def has(self, state: SubscriptionState, number: int) -> bool:
        """Whether a consumer of the subscription has the dispatcher number."""
        shared = self._shared.get(state.subscription_id)
        return shared is not None and number in shared.consumers

    def consumer_id_of(self, state: SubscriptionState, number: int) -> int:
        """How the dispatcher of a consumer calls it."""
        return self._shared[state.subscription_id].consumers[number].consumer_id_of(number)

    # ---- consumers

    def check_consumers(self, state: SubscriptionState, consumers: Sequence[Consumer]) -> None:
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
        shared = self._shared.get(state.subscription_id)
        count = 0 if shared is None else len(shared.consumers)
        if consumers and count + len(consumers) > self._consumers_max:
            raise QuotaExceeded(
                f"subscription {state.stored.name!r} has {count} consumers, {len(consumers)} would join, the limit is "
                f"{self._consumers_max}",
                retry_after_ms=CONSUMERS_RETRY_MS,
            )

    def join(self, stream: KeySharedStream, consumers: Sequence[Consumer]) -> None:
        """Consumers of a stream join, all or none. Raises InvalidArgument, QuotaExceeded."""
        if not consumers:
            return
        shared = self._of(stream)
        self.check_consumers(stream.state, consumers)
        for consumer in consumers:
            if stream.has(consumer.consumer_id):
                raise InvalidArgument(f"consumer_id is {consumer.consumer_id}; a consumer of the stream has it already")
        numbers = [self._topic.next_dispatcher(stream.state) for _ in consumers]
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
        shared = self._of(stream)
        del shared.consumers[number]
        shared.key_shared.leave([number])
        self._ask(shared)

    def grant(self, stream: KeySharedStream, number: int, permits: int) -> None:
        """That many more rows may be sent to a consumer."""
        shared = self._of(stream)
        shared.key_shared.grant(number, permits)
        self._ask(shared)

    def set_full(self, stream: KeySharedStream, *, is_full: bool) -> None:
        """Whether nothing more is to be sent on a stream for now."""
        shared = self._of(stream)
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
        topic, state = self._topic, stream.state
        if not topic.may_hand_out(state):
            raise Unavailable(f"topic {topic.core.name}: nothing may be handed out now; try again")
        shared = self._of(stream)
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
        self._take_back(self._of(stream))
        return stream.outbox.mark()

    def mark_delete(self, stream: KeySharedStream, ledger_id: int, entry_id: int) -> None:
        """Everything that was planned up to this position is acknowledged."""
        shared = self._of(stream)
        shared.key_shared.plans.mark_delete(ledger_id, entry_id)
        self._ask(shared)

    # ---- rounds

    def notify(self, state: SubscriptionState) -> None:
        """Something changed for which rows may wait."""
        shared = self._shared.get(state.subscription_id)
        if shared is not None:
            self._ask(shared)

    def notify_all(self) -> None:
        """Decisions are applied: hashes of what they name are free."""
        for shared in self._shared.values():
            self._ask(shared)

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
            self._topic.close_stream(stream)

    def take_back(self, state: SubscriptionState) -> None:
        """Rows may have come to be NACKED: what is behind them of their hashes is at nobody from now on. To be called
        before anybody else can name it.
        """
        shared = self._shared.get(state.subscription_id)
        if shared is not None:
            self._take_back(shared)

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
        topic, state, key_shared = self._topic, shared.state, shared.key_shared
        if not topic.may_hand_out(state):
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
                topic.count_handed_out(state, KeyedRows.concat([sent.rows for sent in assigned]))
                topic.redelivery.watch(state)
            self._count_blocked(shared)
        topic.refill(state)
        return key_shared.may_hand_out

    def _count_blocked(self, shared: _Shared) -> None:
        attempts = shared.key_shared.blocked_attempts
        if attempts > shared.blocked_counted:
            self._environment.metrics.key_blocked(self._topic.core.name, rows=attempts - shared.blocked_counted)
            shared.blocked_counted = attempts

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        for shared in self._shared.values():
            shared.key_shared.look_after(elapsed_ms=self._environment.elapsed_ms())
            for stream in shared.streams.values():
                # It may have waited for the epoch to be confirmed.
                stream.notify()
