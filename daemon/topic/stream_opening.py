"""Opening streams on the subscriptions of one topic, with the positions that a dispatcher holds already.

Owns: what must hold for a stream to open, finding the held positions, and that nothing is half done when it does not.
Does not own: streams once they are open (`open_stream`, `key_shared_stream`), consumers (`sharing_rounds`), and whether
a position that was found may be held (`daemon.core.decisions.topic`).

Everything is looked at before anything is awaited, so that a bad request is told at once, and again behind it: then the
stream is opened in one go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from daemon.call_values import Consumer, HeldByConsumers
from daemon.core import limits
from daemon.core.backlog.in_flight import Mask
from daemon.core.decisions.claims import HeldPositions
from daemon.core.decisions.holding import Claimed, rows_claimed
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.positions import KeyedRows
from daemon.errors import InvalidArgument, QuotaExceeded
from daemon.runtime.environment import Environment
from daemon.topic.key_shared_stream import KeySharedStream
from daemon.topic.open_stream import DispatchStream, OpenStream, TopicOfStreams
from daemon.topic.served_subscription import ServedSubscription
from storage_backends.formats.row_columns import Rows

STREAMS_RETRY_MS = 5_000


class TopicOfOpening(TopicOfStreams, Protocol):
    """What opening a stream asks of its topic beside."""

    def subscription(self, name: str) -> SubscriptionState:
        """The state of a subscription. Raises NotFound when it does not exist."""
        ...

    def served_subscription(self, state: SubscriptionState) -> ServedSubscription:
        """Who listens to a subscription, and in which mode it is."""
        ...


class Opening:
    """Opens streams on the subscriptions of one topic, with the positions that a dispatcher holds already."""

    def __init__(self, topic: TopicOfOpening, environment: Environment) -> None:
        self._topic = topic
        self._environment = environment
        self._streams_max = environment.config.limits.streams_per_subscription_max

    async def shared(self, subscription: str, held: HeldPositions) -> DispatchStream:
        """Opens a SHARED stream. Raises NotFound, Conflict, QuotaExceeded."""
        limits.check_batch_index(held.entry_id, held.batch_index)
        topic = self._topic
        await topic.gate.passed()
        state = topic.subscription(subscription)
        self._checked(state, key_shared=False)
        claimed = await self._find(state, held)
        served = self._checked(state, key_shared=False)
        stream = DispatchStream(served)
        topic.core.open(state, stream.dispatcher)
        with self._beginning(served, stream):
            elapsed_ms = self._environment.elapsed_ms()
            are_held = topic.core.hold(state, stream.dispatcher, claimed.rows, elapsed_ms=elapsed_ms)
            _declare(stream, claimed.of_claims(are_held))
        return stream

    async def key_shared(
        self, subscription: str, consumers: Sequence[Consumer], held: HeldByConsumers
    ) -> KeySharedStream:
        """Opens a KEY_SHARED stream with its first consumers. Raises as `shared`, and InvalidArgument."""
        topic, claims = self._topic, held.positions
        limits.check_batch_index(claims.entry_id, claims.batch_index)
        await topic.gate.passed()
        state = topic.subscription(subscription)
        self._checked(state, key_shared=True).key_sharing.check_consumers(consumers)
        _check_holders(held, consumers)
        if state.key_shared is None and (state.acknowledging or state.nacking):
            # Of those who had it open before: until that is durable nobody else gets rows of their hashes.
            await topic.shard.commits.settled()
        claimed = await self._find(state, claims)
        served = self._checked(state, key_shared=True)
        stream = KeySharedStream(served)
        served.key_sharing.open(stream)
        with self._beginning(served, stream):
            served.key_sharing.join(stream, consumers)
            _declare(stream, self._hold(stream, held, claimed))
        return stream

    def _checked(self, state: SubscriptionState, *, key_shared: bool) -> ServedSubscription:
        """The subscription, which a stream may listen to. Raises NotFound, Conflict, QuotaExceeded."""
        self._topic.check_there(state)
        served = self._topic.served_subscription(state)
        served.check_mode(key_shared=key_shared)
        if len(served.streams) >= self._streams_max:
            raise QuotaExceeded(
                f"subscription {state.stored.name!r} has {len(served.streams)} open streams, the limit is "
                f"{self._streams_max}",
                retry_after_ms=STREAMS_RETRY_MS,
            )
        return served

    async def _find(self, state: SubscriptionState, held: HeldPositions) -> Claimed:
        """The rows that the dispatcher holds; they have been passed before it asks for them."""
        if not len(held):
            return rows_claimed((), state, held, KeyedRows.empty())
        await self._topic.settle_due()
        found = await self._topic.acknowledging.find(state, held, held)
        return rows_claimed(self._topic.core.indexes.serving(state.subscription_id), state, held, found)

    def _hold(self, stream: KeySharedStream, held: HeldByConsumers, claimed: Claimed) -> Mask:
        """Which of the claims are held from now on."""
        core, state, claims = self._topic.core, stream.state, held.positions
        elapsed_ms = self._environment.elapsed_ms()
        numbers = stream.numbers_of(held.consumer_id)
        holders = numbers[claimed.claims]
        are_held = claimed.of_claims(core.key_sharing.hold(state, claimed.rows, holders, elapsed_ms=elapsed_ms))
        without_row = np.ones(len(claims), np.bool_)
        without_row[claimed.claims] = False
        planned = np.flatnonzero(without_row & (claims.deliver_at_ms == 0) & ~claims.are_parts())
        if len(planned):
            named = np.stack([claims.ledger_id[planned], claims.entry_id[planned]])
            planned = planned[np.sort(np.unique(named, axis=1, return_index=True)[1])]
            key_hash = np.zeros(len(claims), np.uint32) if held.key_hash is None else held.key_hash
            positions = Rows(claims.deliver_at_ms, claims.ledger_id, claims.entry_id, key_hash).take(planned)
            are_held[planned] = core.key_sharing.hold_planned(
                state, stream.dispatcher, positions, numbers[planned], elapsed_ms=elapsed_ms
            )
        return are_held

    @contextlib.contextmanager
    def _beginning(self, served: ServedSubscription, stream: OpenStream) -> Iterator[None]:
        """The stream listens; where that does not go well it does no longer."""
        topic = self._topic
        served.streams[stream.dispatcher] = stream
        try:
            yield
        except Exception:
            stream.close()
            raise
        stream.rebuild_needed = topic.core.rebuild_needed()
        topic.redelivery.watch(served.state)
        served.refill()
        served.notify()


def _declare(stream: OpenStream, are_held: Mask) -> None:
    stream.held = int(np.count_nonzero(are_held))
    stream.not_held = np.flatnonzero(~are_held)


def _check_holders(held: HeldByConsumers, consumers: Sequence[Consumer]) -> None:
    """Raises InvalidArgument for a position of a consumer that does not join."""
    known = np.array([consumer.consumer_id for consumer in consumers], np.uint32)
    strange = np.flatnonzero(~np.isin(held.consumer_id, known))
    if len(strange):
        row = int(strange[0])
        raise InvalidArgument(
            f"held_consumer_id[{row}] is {held.consumer_id[row]}, which none of the consumers of this open has"
        )
