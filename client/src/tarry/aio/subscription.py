"""Receiving what is due and acknowledging it, through broken streams and changes of owner, on the event loop.

Owns: waiting, and settling futures; what all kinds of subscriptions have alike.
Does not own: permits, what is held, acknowledgements (`tarry.receiving`); the stream (`tarry.aio.session`); consumers
and plans (`tarry.aio.key_shared_subscription`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from tarry import batch, calls, columns, errors, futures, receiving, results, retry, streams
from tarry.aio import changes, connections, session

R = TypeVar("R")
Received = TypeVar("Received")
Opened = TypeVar("Opened", bound="Receiver[Any]")


class Receiver(Generic[Received]):
    """What `Subscription` and `KeySharedSubscription` have alike; `Received` is what they give."""

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        subscription: str,
        state: receiving.Receiving[asyncio.Future[Any], Received],
    ) -> None:
        self._timeout_s = known.timeout_s
        self._changes = changes.Changes()
        self._receiving = state
        name = f"subscription {subscription!r} of topic {topic!r}"
        self._lifetime = streams.Lifetime(known.owners, known.policy, topic, name)
        self._session = session.Session(shared, self._lifetime, receiving.METHOD, self)

    @property
    def epoch(self) -> int:
        """As `tarry.Subscription.epoch`."""
        return self._receiving.epoch

    @property
    def streams_opened(self) -> int:
        """As `tarry.Subscription.streams_opened`."""
        return self._receiving.streams_opened

    @property
    def rebuild_needed(self) -> tuple[results.RebuildNeeded, ...]:
        """As `tarry.Subscription.rebuild_needed`."""
        return self._receiving.rebuild_needed

    @property
    def held(self) -> int:
        """As `tarry.Subscription.held`."""
        return self._receiving.held

    async def wait_until_open(self, deadline: retry.Deadline) -> None:
        """As `tarry.Subscription.wait_until_open`."""
        state = self._receiving
        if not await self._changes.wait_for(
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

    async def receive(self, timeout_s: float | None = None) -> Received | None:
        """As `tarry.Subscription.receive`.

        Example: `if (batch := await subscription.receive(1.0)) is not None: await subscription.ack(batch)`
        """
        await self._changes.wait_for(lambda: self._receiving.has_news, timeout_s)
        return self._receiving.take()

    def ack(self, given: batch.HandedOut) -> asyncio.Future[int]:
        """As `tarry.Subscription.ack`: it is sent at once; await the future to know that it is durable.

        Cancelling the future takes nothing back.

        Example: `ignored = await subscription.ack(batch)`
        """
        return whole(self._receiving.acknowledge(given, promise), sum)

    def nack(
        self,
        given: batch.HandedOut,
        *,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
    ) -> asyncio.Future[results.Nacked]:
        """As `tarry.Subscription.nack`; sent and awaited as `ack`.

        Example: `await subscription.nack(batch.take([0]), delay_ms=10_000)`
        """
        parts = self._receiving.nack(
            given,
            promise,
            delay_ms=delay_ms,
            delay_level=delay_level,
            batch_index=batch_index,
            key_hash=key_hash,
        )
        return whole(parts, results.Nacked.merge)

    def reject(
        self,
        given: batch.HandedOut,
        reason: str = "",
        *,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
    ) -> asyncio.Future[results.Nacked]:
        """As `tarry.Subscription.reject`; sent and awaited as `ack`."""
        parts = self._receiving.nack(
            given, promise, reject=True, reason=reason, batch_index=batch_index, key_hash=key_hash
        )
        return whole(parts, results.Nacked.merge)

    def extend(self, given: batch.HandedOut) -> asyncio.Future[int]:
        """As `tarry.Subscription.extend`; sent and awaited as `ack`."""
        return whole(self._receiving.extend(given, promise), sum)

    def ack_unconfirmed(self, given: batch.HandedOut) -> None:
        """As `tarry.Subscription.ack_unconfirmed`."""
        self._receiving.acknowledge_unconfirmed(given)

    def release(self, given: batch.Batch) -> None:
        """As `tarry.Subscription.release`."""
        self._receiving.release(given)

    async def flush(self, timeout_s: float | None = None) -> None:
        """As `tarry.Subscription.flush`."""
        if not await self._changes.wait_for(lambda: self._receiving.is_confirmed, timeout_s):
            raise self._receiving.unconfirmed(timeout_s)
        self._receiving.raise_ended()

    async def close(self) -> None:
        """As `tarry.Subscription.close`."""
        self._receiving.closed = True
        self._changes.notify()
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

    # The session's handler.

    async def wait_until_wanted(self) -> bool:
        return not self._receiving.closed

    def opened(self, sending: streams.Sending) -> None:
        self._receiving.opened(sending)

    def received(self, response: receiving.Response) -> bool:
        is_progress, settled = self._receiving.received(response)
        if not settled:
            self._changes.notify()
        self._settle(settled)
        return is_progress

    def interrupted(self, error: errors.TarryError) -> None:
        self._settle(self._receiving.interrupted(error))

    def failed(self, error: errors.TarryError) -> None:
        self._settle(self._receiving.failed(error))
        self._changes.notify()

    def _settle(self, settled: Iterable[receiving.Settled[asyncio.Future[Any]]]) -> None:
        for each in settled:
            futures.settle(each)
            self._receiving.remove(each.request_id)
            self._changes.notify()


class Subscription(Receiver[batch.Batch]):
    """As `tarry.Subscription`; made by `Client.subscribe`.

    Example: `async for batch in subscription: await subscription.ack(batch)`
    """

    def __init__(
        self, shared: connections.Connections, known: calls.Calls, topic: str, subscription: str, *, permits: int
    ) -> None:
        state: receiving.SharedReceiving[asyncio.Future[Any]] = receiving.SharedReceiving(
            topic, subscription, permits=permits, rows_max=known.rows_max, policy=known.policy
        )
        super().__init__(shared, known, topic, subscription, state)


def promise() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


def whole(parts: list[asyncio.Future[R]], combine: Callable[[list[R]], R]) -> asyncio.Future[R]:
    """One future of a call that was sent as several requests."""
    if len(parts) == 1:
        return parts[0]
    joined: asyncio.Future[R] = promise()
    futures.join(parts, combine, joined)
    return joined


class Opening(Generic[Opened]):
    """A subscription that is being opened: await it, or enter it with `async with`."""

    def __init__(self, opening: Callable[[], Coroutine[Any, Any, Opened]]) -> None:
        self._opening = opening
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, None, Opened]:
        return self._opening().__await__()

    async def __aenter__(self) -> Opened:
        self._opened = await self
        return await self._opened.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, traceback)
