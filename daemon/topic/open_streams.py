"""Runs dispatcher streams on a subscription: permits in, due rows out, acknowledgements in, positive and negative.

`OpenStream` is common to all types, `DispatchStream` is SHARED; KEY_SHARED is in `key_shared_streams`, opening in
`served_subscription`. `topic_acks` processes the acknowledgements.

Streams with permits and pullers wait in one line for the rows of a subscription. The first one takes rows and leaves,
and the next one is woken: each gets a share of a trickle, and a row wakes one waiter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

import numpy as np
import numpy.typing as npt

from daemon.call_values import HandedOut, Nack, NackOutcome
from daemon.core.decisions.claims import HeldPositions, Ignored
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index.bucket import RebuildNeeded
from daemon.core.index.position_keys import KeyedRows
from daemon.errors import Unavailable
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic.topic_acks import AckRequests, NackRequests
from daemon.topic.topic_port import TopicPort


class Waiter(Protocol):
    """A stream or puller in a line."""

    def notify(self) -> None:
        """Wake the waiter, since there may be rows to take, or it may be its turn."""
        ...


class WaitingLine:
    """The line of waiters, in the order in which they began to wait. `first` is the one whose turn it is."""

    def __init__(self) -> None:
        self.first: Waiter | None = None
        self._waiters: dict[Waiter, None] = {}

    def __len__(self) -> int:
        return len(self._waiters)

    def is_turn_of(self, waiter: Waiter) -> bool:
        """Return whether the waiter is the first one. It keeps its place, or joins at the end."""
        self._waiters.setdefault(waiter)
        if self.first is None:
            self.first = waiter
        return self.first is waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter that has taken, or waits no longer, and wake the first one. May be called more than once."""
        if waiter not in self._waiters:
            return
        del self._waiters[waiter]
        if self.first is waiter:
            self.first = next(iter(self._waiters), None)
        if self.first is not None:
            self.first.notify()

    def notify(self) -> None:
        """Wake the first waiter, since there may be something to take."""
        if self.first is not None:
            self.first.notify()


# The most rows of a delivery
MESSAGES_ROWS_MAX = 10_000
# The most rows of a delivery within a pass
IN_PASS_ROWS_MAX = 500
# Larger grants are cut to this, since no consumer holds more rows.
PERMITS_MAX = (1 << 32) - 1


class SubscriptionPort(Protocol):
    """A subscription as its streams, its leases and its sharing by key see it; see `served_subscription`."""

    @property
    def topic(self) -> TopicPort: ...

    @property
    def state(self) -> SubscriptionState: ...

    @property
    def acks(self) -> AckRequests: ...

    @property
    def nacks(self) -> NackRequests: ...

    @property
    def line(self) -> WaitingLine:
        """The line of streams and pullers that wait for rows."""
        ...

    @property
    def may_hand_out(self) -> bool:
        """True if rows may be delivered now."""
        ...

    def check_mode(self, *, key_shared: bool) -> None:
        """Raise Conflict if the subscription is open in another mode."""
        ...

    # ---- dispatchers

    def next_dispatcher(self) -> int:
        """Return a number that no other stream, consumer or lease has."""
        ...

    def listen(self, dispatcher: int) -> None:
        """Keep READY for a dispatcher that holds no rows itself."""
        ...

    def close_stream(self, stream: OpenStream) -> None:
        """Close a stream; the rows that it holds are READY again."""
        ...

    # ---- rows

    def hand_out(self, dispatcher: int, limit: int) -> KeyedRows:
        """Take at most `limit` rows, IN_FLIGHT at the dispatcher from now on. Empty if none may be delivered now."""
        ...

    def handed_out(self, taken: KeyedRows) -> HandedOut:
        """Return delivered rows as their dispatcher sees them."""
        ...

    def count_handed_out(self, rows: KeyedRows) -> None:
        """Count delivered rows in the metrics."""
        ...

    def notify(self) -> None:
        """Wake streams and pullers, since rows may be ready."""
        ...

    def refill(self) -> None:
        """Fill READY, since it may have room."""
        ...

    async def settle_ready(self) -> None:
        """Wait until there are READY rows, or no row that is due now is left to become READY."""
        ...


class Outlet(Protocol):
    """The way by which deliveries leave."""

    def takes(self, stream: Waiter) -> bool:
        """Return whether more may be delivered; otherwise the stream is notified once that may be."""
        ...


class Unbounded:
    """An outlet whose user takes the next delivery when the last one has left."""

    def takes(self, stream: Waiter) -> bool:
        return True


UNBOUNDED = Unbounded()


class StreamClosed(Unavailable):
    """The error of a stream that was closed while a caller waited for it."""

    def __init__(self) -> None:
        super().__init__("the stream was closed")


class OpenStream:
    """A dispatcher that listens under a number, `dispatcher`, and an `epoch`.

    `held` is how many of the positions that it declared are IN_FLIGHT here, `not_held` are the places of the others,
    i64[n]. Close it always; the rows that it holds are READY again then.
    """

    def __init__(self, subscription: SubscriptionPort) -> None:
        self.epoch = subscription.topic.epoch
        self.held = 0
        self.not_held: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self.rebuild_needed: tuple[RebuildNeeded, ...] = ()
        # May be set before anything is delivered
        self.outlet: Outlet = UNBOUNDED
        self.state = subscription.state
        self.dispatcher = subscription.next_dispatcher()
        self._subscription = subscription
        self._topic = subscription.topic
        self._loop = asyncio.get_running_loop()
        # For the caller that takes deliveries; done unless it waits now
        self._waiting: asyncio.Future[None] | None = None
        self._ended: Exception | None = None

    def notify(self) -> None:
        """Wake the caller that waits, since there may be rows to deliver."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def holders(self) -> Collection[int]:
        """The dispatcher numbers under which rows are IN_FLIGHT at the stream."""
        return (self.dispatcher,)

    def acknowledge(self, claims: HeldPositions, *, awaited: bool = True) -> Awaitable[Ignored]:
        """Acknowledge positions with the times they were delivered with; return the ignored ones, once durable.

        Without `awaited` no caller waits, and the acknowledgement may ride along with the next slot.
        """
        if self._ended is not None:
            raise self._ended
        return self._subscription.acks.acknowledge(self.state, claims, awaited=awaited)

    def negative_acknowledge(self, nack: Nack, *, awaited: bool = True) -> Awaitable[NackOutcome]:
        """Redeliver positions later, or make them dead letters; the result ends when that is durable."""
        self._check_open()
        return self._subscription.nacks.negative_acknowledge(self.state, nack, awaited=awaited)

    def extend(self, claims: HeldPositions) -> Awaitable[Ignored]:
        """Restart the ack time-out of positions; return those that are not IN_FLIGHT at this stream."""
        self._check_open()
        return self._subscription.acks.extend(self.state, claims, self.holders)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    def _change(self) -> asyncio.Future[None]:
        """Return a future that ends when there may be something to deliver. One caller may wait at a time."""
        self._waiting = self._loop.create_future()
        return self._waiting

    def end(self, error: Exception) -> None:
        """End the stream with the error, since the topic is no longer served here."""
        if self._ended is None:
            self._ended = error
            self.notify()

    def close(self) -> None:
        """Close the stream. May be called more than once."""
        if self._ended is None:
            self._subscription.close_stream(self)
        self.end(StreamClosed())


class DispatchStream(OpenStream):
    """A SHARED stream. See `OpenStream`."""

    def __init__(self, subscription: SubscriptionPort) -> None:
        super().__init__(subscription)
        self.permits = 0
        # Sends a delivery without waiting; None if only callers of `next_messages` can send.
        self.send: Callable[[HandedOut], None] | None = None
        # Took the most rows at once: the others have their turn before it takes more.
        self._took_many = False

    def grant(self, permits: int) -> None:
        """Add permits, up to PERMITS_MAX."""
        self.permits = min(self.permits + permits, PERMITS_MAX)
        self.notify()

    def hand_out_in_pass(self) -> bool:
        """Deliver and send a portion of the rows that came due, if that is possible without waiting.

        Returns whether nothing is left for a caller of `next_messages`. Call it if no other waiter is in the line.
        """
        if self.send is None or not self.permits or self._waiting is None or self._waiting.done():
            return False
        if self.outlet is not UNBOUNDED and not self.outlet.takes(self):
            return False
        limit = min(self.permits, IN_PASS_ROWS_MAX)
        try:
            rows = self._subscription.hand_out(self.dispatcher, limit)
        except TopicFailed:
            # The failure has ended the stream.
            return True
        count = len(rows.keys)
        if count:
            self.permits -= count
            self.send(self._subscription.handed_out(rows))
        if not self.permits:
            self._subscription.line.leave(self)
        return count < limit

    async def next_messages(self) -> HandedOut:
        """Wait for rows and permits, in line with all others that wait for rows of the subscription.

        Raises NotOwner or Unavailable if the shard is lost, NotFound if the topic or the subscription is deleted, and
        StreamClosed after `close`.
        """
        line, state = self._subscription.line, self.state
        try:
            while True:
                if self._ended is not None:
                    raise self._ended
                if self._took_many:
                    self._took_many = False
                    await self._topic.pace.give_way()
                    continue
                if self.permits and self.outlet is not UNBOUNDED and not self.outlet.takes(self):
                    line.leave(self)
                elif self.permits and (line.first is self or line.is_turn_of(self)) and state.ready_rows:
                    limit = min(self.permits, MESSAGES_ROWS_MAX, self._topic.pace.rows)
                    rows = self._subscription.hand_out(self.dispatcher, limit)
                    if count := len(rows.keys):
                        self.permits -= count
                        self._took_many = count == limit
                        return self._subscription.handed_out(rows)
                await self._change()
        finally:
            line.leave(self)
