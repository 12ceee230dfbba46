"""Receives due positions and acknowledges them, across broken streams and changes of owner.

Callers wait here and the session settles their futures. `tarry.receiving` keeps permits, held positions and
acknowledgements. A KEY_SHARED subscription also has consumers and plans, which `tarry.key_shared_receiving` keeps.
"""

from __future__ import annotations

import contextlib
import time
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from tarry import (
    attempts,
    batch,
    calls,
    columns,
    daemons,
    errors,
    key_shared,
    key_shared_receiving,
    on_event_loop,
    receiving,
    results,
    stream_requests,
    streams,
)
from tarry.aio import connections, futures, session, shared_streams

Received = TypeVar("Received")


class _Guarded:
    """A stream whose delayed messages are made under the guard of the state that they are made from."""

    def __init__(self, sending: streams.Sending, guard: on_event_loop.Condition) -> None:
        self._sending = sending
        self._guard = guard

    def put(self, message: bytes) -> None:
        self._sending.put(message)

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        def guarded() -> bytes | None:
            with self._guard:
                return message()

        self._sending.put_after(delay_s, guarded)


class Receiver(Generic[Received]):
    """The common part of `Subscription` and `KeySharedSubscription`; `Received` is what they yield."""

    def __init__(
        self,
        shared: shared_streams.SharedStreams,
        known: calls.Calls,
        topic: str,
        subscription: str,
        state: receiving.Receiving[Future[Any], Received],
    ) -> None:
        self._timeout_s = known.timeout_s
        # Guards the state, and is not held while a future is settled. Only the session settles futures and removes
        # requests.
        self._changed = on_event_loop.Condition()
        self._receiving = state
        name = f"subscription {subscription!r} of topic {topic!r}"
        self._lifetime = streams.Lifetime(known.daemons, known.policy, topic, name, timeout_s=self._timeout_s)
        # The address of the last stream
        self._address = self._lifetime.address
        self._shared = shared
        self._session = session.Session(shared.connections, self._lifetime, self._open_at, self)

    @property
    def epoch(self) -> int:
        """The highest epoch seen; 0 before the first stream is open."""
        return self._receiving.epoch

    @property
    def streams_opened(self) -> int:
        """The number of streams opened so far; more than 1 after a reconnect."""
        return self._receiving.streams_opened

    @property
    def rebuild_needed(self) -> tuple[results.RebuildNeeded, ...]:
        """The ranges to add again, because a damaged bucket lost rows of them, as reported when the last stream opened.

        Example: `for lost in subscription.rebuild_needed: add_again(lost.first_ledger_id, lost.last_ledger_id)`
        """
        return self._receiving.rebuild_needed

    @property
    def held(self) -> int:
        """The number of positions received and neither acknowledged nor released."""
        with self._changed:
            return self._receiving.held

    async def wait_until_open(self, deadline: attempts.Deadline) -> None:
        """Wait for the first stream. Raises what refused it, or DeadlineExceeded."""
        state = self._receiving
        with self._changed, self._shared.connections.watched(self._address, deadline.timeout_s):
            if not await self._changed.wait_for(
                lambda: state.streams_opened or state.ended is not None, deadline.remaining_s()
            ):
                raise deadline.exceeded(state.last_error, attempts=self._lifetime.failures)
            if not state.streams_opened:
                state.raise_ended()

    def __aiter__(self) -> AsyncIterator[Received]:
        return self

    async def __anext__(self) -> Received:
        received = await self.receive()
        if received is None:
            raise StopAsyncIteration
        return received

    async def receive(
        self, timeout_s: float | None = None, *, max_rows: int = receiving.ROWS_MAX, linger_ms: int = 0
    ) -> Received | None:
        """Return what came next, or None if nothing was due within `timeout_s` or the subscription was closed.

        It never returns an empty batch: check for None before using the result. Without `timeout_s` (seconds) it waits
        until something comes. Batches that have arrived are joined into one of at most `max_rows` rows; if there are
        several consumers, into one of a single consumer. While there are fewer rows, the first of them waits for more
        for `linger_ms` from its arrival, within `timeout_s`. Iterating receives without lingering. Raises
        InvalidArgument, DeadlineExceeded if nothing came and the daemon cannot be reached at the end of `timeout_s`, or
        the failure that ended the subscription.
        Example: `batch = await subscription.receive(10, max_rows=1_000, linger_ms=20)`
        """
        receiving.check(max_rows, linger_ms)
        state = self._receiving
        deadline = None if timeout_s is None else attempts.Deadline.after(timeout_s)
        with self._changed, self._watched(timeout_s):
            while await self._changed.wait_for(lambda: state.has_news, _left_s(deadline)):
                if linger_ms:
                    linger_s = state.lingers_s(linger_ms, time.time_ns() // 1_000_000)
                    await self._changed.wait_for(lambda: state.is_enough(max_rows), _left_s(deadline, linger_s))
                if state.has_news:
                    break
                # Another caller has taken it meanwhile.
            if timeout_s is not None and not state.has_news:
                self._check_reached(timeout_s)
            return state.take(max_rows)

    def ack(self, given: batch.HandedOut) -> Future[results.Ignored]:
        """Acknowledge a batch, a part of one, or columns (`tarry.HandedOut`).

        It is sent together with other acknowledgements that arrive while it lingers; its permits are free at once. The
        future is settled when it is durable, with how many positions were ignored, which, and why. A batch names its
        deliveries: a position that was redelivered since, after a negative acknowledgement, is not acknowledged by it.
        After a reconnect, positions that the first try acknowledged may be ignored.
        Raises InvalidArgument, Closed, or the failure that ended the subscription.
        Example: `ignored = await subscription.ack(batch)`
        """
        with self._changed:
            parts = self._receiving.acknowledge(given, on_event_loop.promise)
        return futures.whole(parts, results.Ignored.merge)

    def nack(
        self,
        given: batch.HandedOut,
        *,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        forwarded: bool = False,
    ) -> Future[results.Nacked]:
        """Negatively acknowledge positions, as in `Client.nack`: they hold no permit until they are redelivered.

        The future is settled as that of `ack`. With `batch_index` the entry as a whole stays here: acknowledge it too.
        With `forwarded` the positions may have been acknowledged, here or elsewhere, and received on any stream.
        Raises what `ack` raises. Raises Unsupported, also from the future, if the daemon does not support `forwarded`.
        Example: `await subscription.nack(batch.take([0]), delay_ms=10_000)`
        """
        with self._changed:
            parts = self._receiving.nack(
                given,
                on_event_loop.promise,
                delay_ms=delay_ms,
                delay_level=delay_level,
                batch_index=batch_index,
                key_hash=key_hash,
                forwarded=forwarded,
            )
        return futures.whole(parts, results.Nacked.merge)

    def reject(
        self,
        given: batch.HandedOut,
        reason: str = "",
        *,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        forwarded: bool = False,
    ) -> Future[results.Nacked]:
        """Turn positions into dead letters, as in `Client.reject`. The future is settled as that of `nack`.

        Example: `await subscription.reject(batch.take([0]), "no such gate")`
        """
        with self._changed:
            parts = self._receiving.nack(
                given,
                on_event_loop.promise,
                reject=True,
                reason=reason,
                batch_index=batch_index,
                key_hash=key_hash,
                forwarded=forwarded,
            )
        return futures.whole(parts, results.Nacked.merge)

    def extend(self, given: batch.HandedOut) -> Future[results.Ignored]:
        """Restart the ack timeout of positions; it matters only if the policy has one (`ack_timeout_ms`).

        The future has how many positions, and which, were ignored because they are not in flight on this stream.
        Example: `ignored = await subscription.extend(batch)`
        """
        with self._changed:
            parts = self._receiving.extend(given, on_event_loop.promise)
        return futures.whole(parts, results.Ignored.merge)

    def ack_unconfirmed(self, given: batch.HandedOut) -> None:
        """Acknowledge without an answer.

        Nothing is repeated: positions whose acknowledgement is lost are redelivered.
        """
        with self._changed:
            self._receiving.acknowledge_unconfirmed(given)

    def release(self, given: batch.Batch) -> None:
        """Take the permits back without acknowledging.

        The positions stay in flight while this stream lives, and may still be acknowledged. They are redelivered after
        the stream ends, even if this library opens the next one.
        """
        with self._changed:
            self._receiving.release(given)

    async def flush(self, timeout_s: float | None = None) -> None:
        """Send what lingers, and wait until every acknowledgement, positive or negative, is durable.

        Raises DeadlineExceeded after `timeout_s` (seconds), or the failure that ended the subscription.
        """
        with self._changed:
            self._receiving.send_lingering()
            if not await self._changed.wait_for(lambda: self._receiving.is_confirmed, timeout_s):
                raise self._receiving.unconfirmed(timeout_s)
            self._receiving.raise_ended()

    async def close(self) -> None:
        """End the stream at once. Idempotent.

        Unacknowledged positions are redelivered, and unsettled futures fail with Closed.
        """
        with self._changed:
            self._receiving.send_lingering()
            self._receiving.closed = True
            self._changed.notify_all()
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._receiving.closed:
                await self.flush(self._timeout_s)
        finally:
            await self.close()

    def _watched(self, timeout_s: float | None) -> contextlib.AbstractContextManager[None]:
        """Watch the daemon of the open stream while a caller waits for as long (seconds).

        None is up to the stream, and so is a wait that is too short to tell silence from a busy daemon.
        """
        too_short = timeout_s is None or timeout_s < daemons.JUDGED_S
        if too_short or self._receiving.has_news or not self._receiving.is_open:
            return contextlib.nullcontext()
        return self._shared.connections.watched(self._address, timeout_s)

    def _check_reached(self, timeout_s: float) -> None:
        """Raise DeadlineExceeded if no daemon could have sent what was due within this time (seconds)."""
        last = self._receiving.last_error
        if self._receiving.is_open:
            last = self._shared.connections.why_quiet(self._address, timeout_s)
            if last is None:
                return
        text = f"{self._lifetime.name} reached no daemon within {timeout_s:g} s"
        raise errors.DeadlineExceeded(text, last=last)

    def _open_at(self, address: str) -> connections.Opened[receiving.Response]:
        """Open a lane if the daemon has lanes, otherwise a stream."""
        self._address = address
        if attempts.SUBSCRIBE_MANY in (self._lifetime.features or ()):
            return self._shared.open(address, receiving.METHOD.read)
        return self._shared.connections.open(address, receiving.METHOD)

    # Callbacks of the session

    async def wait_until_wanted(self) -> bool:
        return not self._receiving.closed

    def opened(self, sending: streams.Sending) -> None:
        with self._changed:
            guarded = _Guarded(sending, self._changed)
            refused = self._receiving.opened(guarded, self._lifetime.features or frozenset())
        self._settle(refused)

    def received(self, response: receiving.Response) -> bool:
        with self._changed:
            is_progress, settled = self._receiving.received(response)
            if not settled:
                self._changed.notify_all()
        self._settle(settled)
        return is_progress

    def interrupted(self, error: errors.TarryError) -> None:
        with self._changed:
            lost = self._receiving.interrupted(error)
        self._settle(lost)

    def failed(self, error: errors.TarryError) -> None:
        with self._changed:
            left = self._receiving.failed(error)
            self._changed.notify_all()
        self._settle(left)

    def _settle(self, settled: Iterable[stream_requests.Settled[Future[Any]]]) -> None:
        for each in settled:
            futures.settle(each)
            with self._changed:
                self._receiving.remove(each.request_id)
                self._changed.notify_all()


class Subscription(Receiver[batch.Batch]):
    """A SHARED subscription, made by `Client.subscribe`: an iterator of batches that ends when it is closed.

    A context manager: leaving it waits until every acknowledgement, positive or negative, is durable, at most for the
    client's `timeout_s` (seconds). A failure that no retry fixes, such as a deleted subscription, is raised from the
    iteration, after what was received before it.
    Used by one event loop.
    Example: `async for batch in subscription: await subscription.ack(batch)`
    """

    def __init__(
        self,
        shared: shared_streams.SharedStreams,
        known: calls.Calls,
        topic: str,
        subscription: str,
        *,
        permits: int,
        ack_linger: stream_requests.AckLinger,
    ) -> None:
        state: receiving.SharedReceiving[Future[Any]] = receiving.SharedReceiving(
            topic,
            subscription,
            permits=permits,
            rows_max=known.rows_max,
            bytes_max=lambda: known.bytes_max,
            policy=known.policy,
            ack_linger=ack_linger,
        )
        super().__init__(shared, known, topic, subscription, state)


def _left_s(deadline: attempts.Deadline | None, at_most_s: float | None = None) -> float | None:
    """Return how long to wait (seconds), or None for no limit."""
    bounds = [at_most_s, None if deadline is None else deadline.remaining_s()]
    return min((each for each in bounds if each is not None), default=None)


class KeySharedSubscription(Receiver[key_shared.Event]):
    """A KEY_SHARED subscription, made by `Client.subscribe_key_shared`: an iterator that ends when it is closed.

    A context manager. It yields a `ConsumerBatch` for one consumer, `TakenBack` or `PlanAgain`, for each consumer in
    the order in which the daemon decided them: batches of one consumer are joined past those of others, and past
    nothing else. Each `Consumer` has its own permits; everything else is as in `Subscription`.
    Example: `async for event in subscription: match event: case tarry.ConsumerBatch(): send(event.consumer, event)`
    """

    _receiving: key_shared_receiving.KeySharedReceiving[Future[Any]]

    def __init__(
        self,
        shared: shared_streams.SharedStreams,
        known: calls.Calls,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
        ack_linger: stream_requests.AckLinger,
    ) -> None:
        state: key_shared_receiving.KeySharedReceiving[Future[Any]] = key_shared_receiving.KeySharedReceiving(
            topic,
            subscription,
            consumers,
            rows_max=known.rows_max,
            bytes_max=lambda: known.bytes_max,
            policy=known.policy,
            ack_linger=ack_linger,
        )
        super().__init__(shared, known, topic, subscription, state)

    @property
    def consumers(self) -> tuple[key_shared.Consumer, ...]:
        """The consumers that were not removed, in the order in which they were added."""
        with self._changed:
            return self._receiving.consumers

    def add_consumer(self, consumer: key_shared.Consumer) -> Future[None]:
        """Add a consumer: keys move to it from the others.

        The future is settled when it has joined. Raises InvalidArgument, also from the future, if another consumer has
        its STICKY ranges.
        Example: `await subscription.add_consumer(tarry.Consumer("gate-3"))`
        """
        with self._changed:
            return self._receiving.add_consumer(consumer, on_event_loop.promise)

    def remove_consumer(self, consumer: key_shared.Consumer) -> Future[None]:
        """Remove a consumer: the positions that it holds are redelivered to others, in the order of positions.

        It receives nothing more from now on. Finished positions may still be acknowledged. Raises InvalidArgument if
        the consumer is not here.
        Example: `await subscription.remove_consumer(gate_1)`
        """
        with self._changed:
            return self._receiving.remove_consumer(consumer, on_event_loop.promise)

    def plan(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        key_hash: columns.Column | None = None,
        *,
        anew: bool = False,
    ) -> Future[NDArray[np.uint32]]:
        """Ask which consumers receive messages that are not delayed, given in the order of the message log.

        The future has for each position the `consumer_id` that receives it now, or HELD. All of them arrive through
        `receive`, the HELD ones when they are free, and are acknowledged like anything received. Positions that
        consumers already hold are not delivered again. Calls are answered one after the other.
        Set `anew` for the first plan from the mark-delete position on, after `PlanAgain`. Raises InvalidArgument.
        Raises PlanLost, also from the future, if the stream has ended, and its plans with it.
        Example: `(await subscription.plan(1, range(100), tarry.key_hash(keys)) == tarry.HELD).sum()`
        """
        with self._changed:
            parts = self._receiving.plan(ledger_id, entry_id, key_hash, on_event_loop.promise, anew=anew)
        return futures.whole(parts, np.concatenate)

    def mark_delete(self, ledger_id: int, entry_id: int) -> Future[None]:
        """Report that everything planned up to and including this position is acknowledged.

        With LAST_SENT_POSITION, consumers that joined wait for it if positions are not acknowledged here one by one.
        Positions that this subscription holds must be acknowledged all the same.
        Example: `await subscription.mark_delete(7, 1_999)`
        """
        with self._changed:
            return self._receiving.mark_delete(ledger_id, entry_id, on_event_loop.promise)
