"""One dispatcher's stream on a subscription: permits in, due rows out, acknowledgements in, positive and negative.

Owns: the stream's permits, and waiting until there is something to hand out.
Does not own: which rows (`daemon.core.subscription`), whose turn it is (`waiting_line`), what an acknowledgement does
(`acknowledging`, `redelivering`), durability (`shard`) and the wire.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from daemon.core.claims import HeldPositions
from daemon.core.quarantine import RebuildNeeded
from daemon.core.subscription import SubscriptionState
from daemon.engine.calls import HandedOut, Nack, NackOutcome
from storage_backends.formats.rows import U32, U64

if TYPE_CHECKING:
    from daemon.engine.served_topic import ServedTopic

# The largest hand-out at once.
MESSAGES_ROWS_MAX = 10_000
# A grant beyond this is cut: nobody holds more.
PERMITS_MAX = (1 << 32) - 1


class StreamClosed(Exception):
    """The stream was closed while somebody waited for its messages."""


class DispatchStream:
    """A dispatcher that listens, under `epoch`. `held`: how many of the positions that it declared it holds.

    Close it always; what it holds is READY again then.
    """

    def __init__(self, topic: ServedTopic, state: SubscriptionState, dispatcher: int, *, epoch: int) -> None:
        self.epoch = epoch
        self.held = 0
        self.rebuild_needed: tuple[RebuildNeeded, ...] = ()
        self.permits = 0
        self.state = state
        self.dispatcher = dispatcher
        self._topic = topic
        self._changed = asyncio.Event()
        self._ended: Exception | None = None
        # As many as may be taken at once: before there are more the others have a turn.
        self._took_many = False

    def grant(self, permits: int) -> None:
        """That many more rows may be handed out."""
        self.permits = min(self.permits + permits, PERMITS_MAX)
        self.notify()

    def notify(self) -> None:
        """There may be something to hand out."""
        self._changed.set()

    async def acknowledge(
        self,
        ledger_id: U64,
        entry_id: U64,
        deliver_at_ms: U64,
        batch_index: U32 | None = None,
        *,
        awaited: bool = True,
    ) -> int:
        """Acknowledges positions with the times they were handed out with; returns when that is durable.

        `awaited`: whether anybody waits for it; else it may ride along with the next slot. Answers with the number of
        positions that were not in the backlog with that time: nothing happened to them.
        """
        self._check_open()
        claims = HeldPositions(ledger_id, entry_id, deliver_at_ms, batch_index)
        return await self._topic.acknowledging.acknowledge(self.state, claims, awaited=awaited)

    async def negative_acknowledge(self, nack: Nack, *, awaited: bool = True) -> NackOutcome:
        """Has positions come back later, or makes them dead letters; returns when that is durable."""
        self._check_open()
        return await self._topic.redelivery.negative_acknowledge(self.state, nack, awaited=awaited)

    async def extend(self, claims: HeldPositions) -> int:
        """The ack time-out of positions begins anew; how many of them are not IN_FLIGHT at this stream."""
        self._check_open()
        return await self._topic.acknowledging.extend(self.state, claims, self.dispatcher)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended

    async def next_messages(self) -> HandedOut:
        """Waits for rows and permits, in line with whoever else waits for rows of the subscription.

        Raises NotOwner or Unavailable when the shard is lost, NotFound when the topic or the subscription is deleted,
        StreamClosed after `close`.
        """
        line = self._topic.line(self.state)
        try:
            while True:
                if self._ended is not None:
                    raise self._ended
                if self._took_many:
                    self._took_many = False
                    await self._topic.pace.give_way()
                    continue
                if self.permits and line.is_turn_of(self):
                    limit = min(self.permits, MESSAGES_ROWS_MAX, self._topic.pace.rows)
                    rows = self._topic.hand_out(self.state, self.dispatcher, limit)
                    if len(rows):
                        self.permits -= len(rows)
                        self._took_many = len(rows) == limit
                        return self._topic.handed_out(self.state, rows)
                self._changed.clear()
                await self._changed.wait()
        finally:
            line.leave(self)

    def end(self, error: Exception) -> None:
        """The topic is served here no longer."""
        if self._ended is None:
            self._ended = error
            self.notify()

    def close(self) -> None:
        """May be called more than once."""
        if self._ended is None:
            self._topic.close_stream(self)
        self.end(StreamClosed())
