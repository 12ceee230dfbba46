"""A dispatcher's stream on a subscription: permits in, due rows out, acknowledgements in, positive and negative.

Owns: what streams of every type have in common; of a SHARED one its permits, and waiting until there is something to
hand out.
Does not own: which rows (`daemon.core.decisions.subscription_state`), whose turn it is (`waiting_line`), what an
acknowledgement does (`acknowledging`, `negative_acknowledging`), KEY_SHARED streams (`key_shared_stream`), opening
(`stream_opening`), durability (`shard`) and the wire.

The line of those who wait for rows of one subscription: streams with permits, and pullers.

Owns: whose turn it is.
Does not own: what there is to take (`daemon.core.decisions.subscription_state`) and whether it may be handed out now
(`served_topic`).

Whoever is first takes, leaves, and the next one is woken: of a trickle everybody gets a share, and a row wakes one.
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
    """Somebody in a line."""

    def notify(self) -> None:
        """There may be something to take, or it may be its turn."""
        ...


class WaitingLine:
    """The line of those who wait, in the order in which they began to. `first`: the waiter whose turn it is."""

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


# The largest hand-out at once.
MESSAGES_ROWS_MAX = 10_000
# The largest one within a pass.
IN_PASS_ROWS_MAX = 500
# Larger grants are cut to this: no consumer holds more rows.
PERMITS_MAX = (1 << 32) - 1


class SubscriptionPort(Protocol):
    """A subscription as its streams, its leases and its sharing by key see it; `served_subscription` fills it."""

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
        """Whether rows may be delivered now."""
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
    """What hand-outs leave by."""

    def takes(self, stream: Waiter) -> bool:
        """Whether more may be handed out; else the stream is notified when that may be."""
        ...


class Unbounded:
    """An outlet whose user takes the next hand-out when the last one has left."""

    def takes(self, stream: Waiter) -> bool:
        return True


UNBOUNDED = Unbounded()


class StreamClosed(Unavailable):
    """The stream was closed while somebody waited for it."""

    def __init__(self) -> None:
        super().__init__("the stream was closed")


class OpenStream:
    """A dispatcher that listens under a number, `dispatcher`, and an `epoch`.

    `held`: how many of the positions that it declared are IN_FLIGHT here. `not_held`: i64[n], the places of the others.
    Close it always; what it holds is READY again then.
    """

    def __init__(self, subscription: SubscriptionPort) -> None:
        self.epoch = subscription.topic.epoch
        self.held = 0
        self.not_held: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self.rebuild_needed: tuple[RebuildNeeded, ...] = ()
        # May be set before anything is handed out.
        self.outlet: Outlet = UNBOUNDED
        self.state = subscription.state
        self.dispatcher = subscription.next_dispatcher()
        self._subscription = subscription
        self._topic = subscription.topic
        self._loop = asyncio.get_running_loop()
        # For whoever takes out what is handed out; done unless it waits now.
        self._waiting: asyncio.Future[None] | None = None
        self._ended: Exception | None = None

    def notify(self) -> None:
        """There may be something to hand out."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def holders(self) -> Collection[int]:
        """The dispatcher numbers under which rows are IN_FLIGHT at the stream."""
        return (self.dispatcher,)

    def acknowledge(self, claims: HeldPositions, *, awaited: bool = True) -> Awaitable[Ignored]:
        """Acknowledges positions with the times they were handed out with; what it returns ends when that is durable.

        `awaited`: whether anybody waits for it; else it may ride along with the next slot. Answers with the positions
        to which nothing happened.
        """
        if self._ended is not None:
            raise self._ended
        return self._subscription.acks.acknowledge(self.state, claims, awaited=awaited)

    def negative_acknowledge(self, nack: Nack, *, awaited: bool = True) -> Awaitable[NackOutcome]:
        """Has positions come back later, or makes them dead letters; what it returns ends when that is durable."""
        self._check_open()
        return self._subscription.nacks.negative_acknowledge(self.state, nack, awaited=awaited)

    def extend(self, claims: HeldPositions) -> Awaitable[Ignored]:
        """The ack time-out of positions begins anew; those that are not IN_FLIGHT at this stream."""
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
        """The topic is served here no longer."""
        if self._ended is None:
            self._ended = error
            self.notify()

    def close(self) -> None:
        """May be called more than once."""
        if self._ended is None:
            self._subscription.close_stream(self)
        self.end(StreamClosed())


class DispatchStream(OpenStream):
    """A SHARED stream. See `OpenStream`."""

    def __init__(self, subscription: SubscriptionPort) -> None:
        super().__init__(subscription)
        self.permits = 0
        # Sends what was handed out and waits for nothing; None: only who waits for `next_messages` can.
        self.send: Callable[[HandedOut], None] | None = None
        # As many as may be taken at once: before there are more the others have a turn.
        self._took_many = False

    def grant(self, permits: int) -> None:
        """Grants permits: that many more rows may be handed out."""
        self.permits = min(self.permits + permits, PERMITS_MAX)
        self.notify()

    def hand_out_in_pass(self) -> bool:
        """Hands out a portion of what came due, and sends it, where nobody has to wait for that. Whether nothing is
        left for who waits for `next_messages`. Call when nobody else waits in the line.
        """
        if self.send is None or not self.permits or self._waiting is None or self._waiting.done():
            return False
        if self.outlet is not UNBOUNDED and not self.outlet.takes(self):
            return False
        limit = min(self.permits, IN_PASS_ROWS_MAX)
        try:
            rows = self._subscription.hand_out(self.dispatcher, limit)
        except TopicFailed:
            # Which has ended the stream.
            return True
        count = len(rows.keys)
        if count:
            self.permits -= count
            self.send(self._subscription.handed_out(rows))
        if not self.permits:
            self._subscription.line.leave(self)
        return count < limit

    async def next_messages(self) -> HandedOut:
        """Waits for rows and permits, in line with whoever else waits for rows of the subscription.

        Raises NotOwner or Unavailable when the shard is lost, NotFound when the topic or the subscription is deleted,
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
