"""One subscription of a served topic: who listens, whose turn it is, and what is handed out.

Owns: its mode, its streams, its line, the numbers of its dispatchers, taking rows out of READY, and reading its backlog
again when it is behind.
Does not own: which rows (`daemon.core.decisions.subscription_state`), leases (`leases`), rounds of sharing by key
(`sharing_rounds`), what must hold for a stream to open (`stream_opening`), and when rows come due (`served_topic`).
"""

from __future__ import annotations

import asyncio
import enum
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from daemon.call_values import HandedOut
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import batch_parts
from daemon.core.index.positions import KeyedRows
from daemon.core.index.segments import SegmentRange
from daemon.errors import Conflict
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic.leases import Leases
from daemon.topic.open_stream import DispatchStream, OpenStream, TopicOfStreams
from daemon.topic.sharing_rounds import KeySharing
from daemon.topic.waiting_line import WaitingLine

# Portions that a backlog is read again by.
CATCH_UP_PORTIONS = 1
# A subscription that is behind is read on for when READY has fewer rows.
READY_LOW_ROWS = 20_000
# Numbers of dispatchers are 32 bits wide where they stand with a row.
DISPATCHER_MAX = (1 << 32) - 1


class Mode(enum.Enum):
    """In which way a subscription is open; see `ServedSubscription`."""

    CLOSED = "closed"
    SHARED = "shared"
    LEASED = "leased"
    KEY_SHARED = "key-shared"


class TopicOfSubscription(TopicOfStreams, Protocol):
    """What a subscription asks of its topic beside."""

    @property
    def has_ended(self) -> bool:
        """Whether the topic is served here no longer."""
        ...

    def may_hand_out(self, state: SubscriptionState) -> bool:
        """Whether anything may be handed out to the subscription now."""
        ...

    def pass_due(self, now_ms: int) -> int:
        """Passes some portions of what is due and in memory; how many rows."""
        ...

    def wake_at(self, at_ms: int | None) -> None:
        """The topic wakes then, if it would not sooner. Unix time in ms; None: it need not."""
        ...

    def contained(self) -> AbstractContextManager[None]:
        """What goes wrong inside is the topic's failure, and nobody else's."""
        ...


class ServedSubscription:
    """A subscription that somebody listens to, or has listened to since its topic is served here.

    | mode | who listens | a row of READY goes to | a SHARED stream, or a pull | a KEY_SHARED stream |
    |---|---|---|---|---|
    | CLOSED | nobody; READY may be kept for pullers | nobody | opens: SHARED, LEASED | opens: KEY_SHARED |
    | SHARED | streams, and pullers beside them | whose turn it is in the line | opens beside | Conflict |
    | LEASED | pullers, or leases hold rows | whose turn it is in the line | opens: SHARED; beside | Conflict |
    | KEY_SHARED | streams with consumers | the consumer that has its key | Conflict | opens beside |

    SHARED ends with its last stream, LEASED with its last lease and puller, KEY_SHARED with its last stream. What a
    stream or a lease holds when it ends is READY again.
    """

    def __init__(self, topic: TopicOfSubscription, state: SubscriptionState, environment: Environment) -> None:
        self.topic = topic
        self.state = state
        self.streams: dict[int, OpenStream] = {}
        self.line = WaitingLine()
        self.leases = Leases(self, environment)
        self.key_sharing = KeySharing(self, environment)
        self._environment = environment
        self._behind: asyncio.Task[None] | None = None
        self._last_dispatcher = 0

    # ---- the mode

    @property
    def mode(self) -> Mode:
        """O(leases)."""
        if self.key_sharing.is_open:
            return Mode.KEY_SHARED
        if self.streams:
            return Mode.SHARED
        return Mode.LEASED if self.leases.are_under_way else Mode.CLOSED

    def check_mode(self, *, key_shared: bool) -> None:
        """Raises Conflict when the subscription is open in another way."""
        name, mode = self.state.stored.name, self.mode
        if not key_shared and mode is Mode.KEY_SHARED:
            raise Conflict(f"subscription {name!r} is open as KEY_SHARED; close these streams first")
        if key_shared and mode is Mode.SHARED:
            raise Conflict(f"subscription {name!r} is open as SHARED; close these streams first")
        if key_shared and mode is Mode.LEASED:
            raise Conflict(f"positions of subscription {name!r} are leased, or about to be; let the leases end first")

    # ---- dispatchers

    def next_dispatcher(self) -> int:
        """A number for a stream, a consumer or a lease, that no other one has."""
        while True:
            number = self._last_dispatcher = self._last_dispatcher % DISPATCHER_MAX + 1
            taken = number in self.streams or self.key_sharing.has(number) or self.leases.has(number)
            if not taken and not self.state.held_rows(number):
                return number

    def listen(self, dispatcher: int) -> None:
        """READY is kept for a dispatcher that holds nothing itself."""
        self.topic.core.open(self.state, dispatcher)
        self.refill()

    def close_stream(self, stream: OpenStream) -> None:
        """What the stream holds is READY again; it listens no more."""
        if self.streams.pop(stream.dispatcher, None) is None:
            return
        self.state.close(stream.dispatcher)
        self.key_sharing.closed(stream)
        self.notify()

    def end(self, error: Exception) -> None:
        """The streams and leases of the subscription end with the error."""
        for stream in list(self.streams.values()):
            self.close_stream(stream)
            stream.end(error)
        self.leases.end(error)

    def abandon(self, error: Exception) -> None:
        """The streams of the subscription end with the error. None is asked to give anything back: the state cannot be
        relied on.
        """
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.end(error)

    def close(self, error: Exception) -> None:
        """The topic is served here no longer."""
        self.end(error)
        if self._behind is not None:
            self._behind.cancel()

    # ---- handing out

    def hand_out(self, dispatcher: int, limit: int) -> KeyedRows:
        """At most `limit` rows, IN_FLIGHT at the dispatcher from now on; empty when nothing may be handed out now.

        Raises TopicFailed when something goes wrong: rows that were taken out of READY would be nowhere.
        """
        state = self.state
        if not state.available_rows or not self.may_hand_out:
            return KeyedRows.empty()
        try:
            rows = state.hand_out(dispatcher, limit, elapsed_ms=self._environment.elapsed_ms())
            if len(rows):
                self.count_handed_out(rows)
                self.topic.redelivery.watch(state)
            self.refill()
        except Exception as error:
            self.topic.failed(error)
            raise TopicFailed(self.topic.core.name) from error
        return rows

    @property
    def may_hand_out(self) -> bool:
        """Whether anything may be handed out now."""
        return self.topic.may_hand_out(self.state)

    def handed_out(self, taken: KeyedRows) -> HandedOut:
        """Rows that were handed out, as their dispatcher sees them."""
        rows, batch_index = batch_parts.unpacked(taken, self.topic.core.indexes, self.state.subscription_id)
        return HandedOut(self.topic.shard.epoch, rows, taken.redelivery_count, batch_index)

    def count_handed_out(self, rows: KeyedRows) -> None:
        """Counts rows that were handed out in the metrics."""
        core, metrics = self.topic.core, self._environment.metrics
        now_ms = self._environment.clock.now_ms()
        for index in core.indexes.serving(self.state.subscription_id):
            if index.levels:
                for level, first in index.levels.handed_out(rows.keys):
                    metrics.level_handed_out(core.name, level, now_ms - rows.rows.deliver_at_ms[first].astype(np.int64))
        metrics.handed_out(core.name, rows.rows.deliver_at_ms, rows.redelivery_count, now_ms=now_ms)

    def notify(self) -> None:
        """There may be something to hand out."""
        self.key_sharing.notify()
        if self.state.available_rows:
            self.line.notify()

    def passed(self) -> None:
        """Rows came due. Where one stream waits for them it has them before this returns, if it can."""
        self.key_sharing.notify()
        if self.state.available_rows:
            waiter = self.line.only
            if not (isinstance(waiter, DispatchStream) and waiter.hand_out_in_pass()):
                self.line.notify()

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        self.leases.look_after()
        self.key_sharing.look_after()
        self.notify()

    # ---- reading what it is behind with

    def refill(self) -> None:
        """There may be room in READY: for what is redelivered, and for what was not read."""
        self._redeliver_on()
        self.read_on()

    def _redeliver_on(self) -> None:
        """Nacked rows whose time has come may have had no room until now."""
        if len(self.state.nacks) and self.topic.core.takes_redeliveries(self.state):
            self.topic.wake_at(self.state.nacks.next_due_ms())

    async def settle_ready(self) -> None:
        """Returns when there are READY rows, or nothing that is due now is left to be READY."""
        topic, now_ms = self.topic, self._environment.clock.now_ms()
        while not topic.has_ended and not self.state.ready_rows:
            if self._behind is not None:
                await asyncio.wait([self._behind])
            elif self.state.reader is not None:
                self.read_on()
            elif topic.pass_due(now_ms):
                await asyncio.sleep(0)
            elif wanted := topic.core.indexes.wanted_segments(now_ms):
                await topic.load(wanted)
            else:
                return

    def read_on(self) -> None:
        """Derives READY rows when the subscription is behind and runs low."""
        if self._behind is not None or self.topic.has_ended:
            return
        state, core, pace = self.state, self.topic.core, self.topic.pace
        if state.reader is None and state.key_shared is None:
            return
        limit = CATCH_UP_PORTIONS * pace.rows_of(len(core.indexes.readable))
        needed: list[SegmentRange] = []
        goes_on = False
        runs_low = state.reader is not None and state.ready_rows < READY_LOW_ROWS and not state.is_full
        if runs_low:
            needed += core.catch_up(state, limit)
            goes_on = state.reader is None or not state.reader.is_held_up
        # However long that goes on. While nothing may be handed out READY stays: it would be passed over for ever.
        if state.key_shared is not None and state.key_shared.reads_on and self.may_hand_out:
            needed += core.key_sharing.find_let_go(state, limit)
            goes_on = goes_on or not state.key_shared.is_held_up
        if not goes_on and not needed:
            # Nothing to look at, or not before more rows have been passed: who passes them comes here again.
            return
        if not needed:
            self.notify()
            if not state.looks_on:
                return
        # Of all that was looked at nothing may be handed out: others have their turn.
        waits = self.topic.load(needed) if needed else pace.give_way()
        self._behind = asyncio.ensure_future(waits)
        self._behind.add_done_callback(self._read_on_after)

    def _read_on_after(self, task: asyncio.Task[None]) -> None:
        self._behind = None
        if not task.cancelled():
            with self.topic.contained():
                self.read_on()
