"""Serves one subscription of a topic: its mode, its streams, its line, and what is delivered.

`served_topic` alone uses it; it stands apart because it is the life of one subscription. It takes rows out of READY,
numbers the dispatchers, and reads the backlog again when the subscription is behind. Leases, rounds of sharing by key,
and streams are in modules of their own.

`StreamOpening` opens streams, with the positions that a dispatcher holds already. It checks everything before it awaits
anything, so that a bad request is answered at once, and again afterwards: then the stream is opened in one turn, or not
at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from daemon.call_values import Consumer, HandedOut, HeldByConsumers
from daemon.core import limits
from daemon.core.decisions.claims import ClaimedRows, HeldPositions, rows_claimed
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import indexes
from daemon.core.index.position_keys import KeyedRows, Mask
from daemon.core.index.segments import SegmentRange
from daemon.errors import Conflict, InvalidArgument, QuotaExceeded
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic.key_shared_streams import KeySharedStream, SharingRounds
from daemon.topic.leases import Leases
from daemon.topic.open_streams import DispatchStream, OpenStream, WaitingLine
from daemon.topic.topic_acks import AckRequests, NackRequests
from daemon.topic.topic_port import TopicPort
from storage_backends.formats.row_columns import Rows

# Portions of one read of a backlog
CATCH_UP_PORTIONS = 1
# A subscription that is behind reads on when READY has fewer rows.
READY_LOW_ROWS = 20_000
# Dispatcher numbers have 32 bits where they are stored with a row.
DISPATCHER_MAX = (1 << 32) - 1


class Mode(enum.Enum):
    """The way in which a subscription is open; see `ServedSubscription`."""

    CLOSED = "closed"
    SHARED = "shared"
    LEASED = "leased"
    KEY_SHARED = "key-shared"


class ServedSubscription:
    """A subscription that has, or had, listeners since its topic is served here.

    | mode | who listens | a READY row goes to | a SHARED stream, or a pull | a KEY_SHARED stream |
    |---|---|---|---|---|
    | CLOSED | none; READY may be kept for pullers | none | opens: SHARED, LEASED | opens: KEY_SHARED |
    | SHARED | streams, and pullers with them | the first in the line | opens, too | Conflict |
    | LEASED | pullers, or leases hold rows | the first in the line | opens: SHARED, LEASED, too | Conflict |
    | KEY_SHARED | streams with consumers | the consumer that has its key | Conflict | opens, too |

    SHARED ends with its last stream, LEASED with its last lease and puller, KEY_SHARED with its last stream. The rows
    that a stream or a lease holds when it ends are READY again.
    """

    def __init__(
        self,
        topic: TopicPort,
        state: SubscriptionState,
        acks: AckRequests,
        nacks: NackRequests,
        environment: Environment,
    ) -> None:
        self.topic = topic
        self.state = state
        self.acks = acks
        self.nacks = nacks
        self.streams: dict[int, OpenStream] = {}
        self.line = WaitingLine()
        self.leases = Leases(self, environment)
        self.key_sharing = SharingRounds(self, self.leases, environment)
        self._environment = environment
        self._behind: asyncio.Task[None] | None = None
        self._last_dispatcher = 0

    # ---- the mode

    @property
    def mode(self) -> Mode:
        """The mode now. O(leases)."""
        if self.key_sharing.is_open:
            return Mode.KEY_SHARED
        if self.streams:
            return Mode.SHARED
        return Mode.LEASED if self.leases.are_under_way else Mode.CLOSED

    def check_mode(self, *, key_shared: bool) -> None:
        """Raise Conflict if the subscription is open in another mode."""
        name, mode = self.state.stored.name, self.mode
        if not key_shared and mode is Mode.KEY_SHARED:
            raise Conflict(f"subscription {name!r} is open as KEY_SHARED; close these streams first")
        if key_shared and mode is Mode.SHARED:
            raise Conflict(f"subscription {name!r} is open as SHARED; close these streams first")
        if key_shared and mode is Mode.LEASED:
            raise Conflict(f"positions of subscription {name!r} are leased or being leased; let the leases end first")

    # ---- dispatchers

    def next_dispatcher(self) -> int:
        """Return a number for a stream, a consumer or a lease that no other one has."""
        while True:
            number = self._last_dispatcher = self._last_dispatcher % DISPATCHER_MAX + 1
            taken = number in self.streams or self.key_sharing.has(number) or self.leases.has(number)
            if not taken and not self.state.held_rows(number):
                return number

    def listen(self, dispatcher: int) -> None:
        """Keep READY for a dispatcher that holds no rows itself."""
        self.topic.core.open(self.state, dispatcher)
        self.refill()

    def close_stream(self, stream: OpenStream) -> None:
        """Remove a stream, which no longer listens; the rows that it holds are READY again."""
        if self.streams.pop(stream.dispatcher, None) is None:
            return
        self.state.close(stream.dispatcher)
        self.key_sharing.closed(stream)
        self.notify()

    def end(self, error: Exception) -> None:
        """End the streams and leases of the subscription with the error."""
        for stream in list(self.streams.values()):
            self.close_stream(stream)
            stream.end(error)
        self.leases.end(error)

    def abandon(self, error: Exception) -> None:
        """End the streams of the subscription with the error.

        None gives rows back, since the state can no longer be relied on.
        """
        streams = list(self.streams.values())
        self.streams.clear()
        for stream in streams:
            stream.end(error)

    def close(self, error: Exception) -> None:
        """End all work, since the topic is no longer served here."""
        self.end(error)
        if self._behind is not None:
            self._behind.cancel()

    # ---- delivering

    def hand_out(self, dispatcher: int, limit: int) -> KeyedRows:
        """Take at most `limit` rows, IN_FLIGHT at the dispatcher from now on. Empty if none may be delivered now.

        Raises TopicFailed if anything goes wrong: rows that were taken out of READY would be nowhere.
        """
        state = self.state
        if not state.ready_rows or not self.topic.may_hand_out(state):
            return KeyedRows.empty()
        try:
            rows = state.hand_out(dispatcher, limit, elapsed_ms=self._environment.elapsed_ms())
            if len(rows.keys):
                self.count_handed_out(rows)
                if state.stored.policy.ack_timeout_ms is not None:
                    self.nacks.watch(state)
                self.refill()
        except Exception as error:
            self.topic.failed(error)
            raise TopicFailed(self.topic.core.name) from error
        return rows

    @property
    def may_hand_out(self) -> bool:
        """True if rows may be delivered now."""
        return self.topic.may_hand_out(self.state)

    def handed_out(self, taken: KeyedRows) -> HandedOut:
        """Return delivered rows as their dispatcher sees them."""
        rows, batch_index = indexes.unpacked(taken, self.topic.core.indexes, self.state.subscription_id)
        return HandedOut(self.topic.epoch, rows, taken.redelivery_count, batch_index)

    def count_handed_out(self, rows: KeyedRows) -> None:
        """Count delivered rows in the metrics."""
        core, metrics = self.topic.core, self._environment.metrics
        now_ms = self._environment.clock.now_ms()
        for index in core.indexes.serving(self.state.subscription_id):
            if index.levels:
                for level, first in index.levels.handed_out(rows.keys):
                    metrics.level_handed_out(core.name, level, now_ms - rows.rows.deliver_at_ms[first].astype(np.int64))
        metrics.handed_out(core.name, rows.rows.deliver_at_ms, rows.redelivery_count, now_ms=now_ms)

    def notify(self) -> None:
        """Wake streams and pullers, since rows may be ready."""
        if self.state.key_shared is not None:
            self.key_sharing.notify()
        if self.state.ready_rows and self.state.in_flight_room:
            self.line.notify()

    def passed(self) -> None:
        """Deliver rows that came due. A single waiting stream has them before this returns, if it can."""
        state = self.state
        if state.key_shared is not None:
            self.key_sharing.notify()
        if state.ready_rows and state.in_flight_room:
            first = self.line.first
            if not isinstance(first, DispatchStream) or first.send is None:
                if first is not None:
                    first.notify()
            elif len(self.line) > 1 or not first.hand_out_in_pass():
                self.line.notify()
        if state.reader is not None or state.key_shared is not None:
            self.read_on()

    def every_second(self) -> None:
        """Do what depends on time alone. Called once a second."""
        self.leases.every_second()
        self.key_sharing.every_second()
        self.notify()

    # ---- reading the backlog

    def refill(self) -> None:
        """Fill READY, which may have room, with rows to redeliver and rows not read yet."""
        if len(self.state.nacks):
            self._redeliver_on()
        if self.state.reader is not None or self.state.key_shared is not None:
            self.read_on()

    def _redeliver_on(self) -> None:
        """Wake the topic for nacked rows whose time has come and that may have had no room until now."""
        if self.topic.core.takes_redeliveries(self.state):
            self.topic.wake_at(self.state.nacks.next_due_ms())

    async def settle_ready(self) -> None:
        """Wait until there are READY rows, or no row that is due now is left to become READY."""
        topic, now_ms = self.topic, self._environment.clock.now_ms()
        while not topic.has_ended and not self.state.ready_rows:
            if self._behind is not None:
                await asyncio.wait([self._behind])
            elif self.state.reader is not None:
                self.read_on()
            elif topic.pass_due(now_ms):
                await asyncio.sleep(0)
            elif unread := topic.core.indexes.unread_segments(now_ms):
                await topic.load(unread)
            else:
                return

    def read_on(self) -> None:
        """Read READY rows from the backlog if the subscription is behind and runs low."""
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
        # However long that goes on. While nothing may be delivered READY stays: it would be passed over for ever.
        if state.key_shared is not None and state.key_shared.reads_on and self.may_hand_out:
            needed += core.key_sharing.find_let_go(state, limit)
            goes_on = goes_on or not state.key_shared.is_held_up
        if not goes_on and not needed:
            # Nothing to read, or not before more rows are passed, after which this is called again
            return
        if not needed:
            self.notify()
            if not state.needs_more_backlog:
                return
        # No row that was read may be delivered, so others have their turn.
        waits = self.topic.load(needed) if needed else pace.give_way()
        self._behind = asyncio.ensure_future(waits)
        self._behind.add_done_callback(self._read_on_after)

    def _read_on_after(self, task: asyncio.Task[None]) -> None:
        self._behind = None
        if not task.cancelled():
            with self.topic.contained():
                self.read_on()


STREAMS_RETRY_MS = 5_000


class StreamOpening:
    """The opening of streams on the subscriptions of one topic, with the positions that a dispatcher holds already.

    `served` finds a subscription by its state. It is called again after each await, since the subscription may have
    been deleted meanwhile.
    """

    def __init__(
        self,
        topic: TopicPort,
        acks: AckRequests,
        served: Callable[[SubscriptionState], ServedSubscription],
        environment: Environment,
    ) -> None:
        self._topic = topic
        self._acks = acks
        self._served = served
        self._environment = environment
        self._streams_max = environment.config.limits.streams_per_subscription_max

    async def shared(self, subscription: str, held: HeldPositions) -> DispatchStream:
        """Open a SHARED stream. Raises NotFound, Conflict, QuotaExceeded."""
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
        """Open a KEY_SHARED stream with its first consumers. Raises as `shared`, and InvalidArgument."""
        topic, claims = self._topic, held.positions
        limits.check_batch_index(claims.entry_id, claims.batch_index)
        await topic.gate.passed()
        state = topic.subscription(subscription)
        self._checked(state, key_shared=True).key_sharing.check_consumers(consumers)
        _check_holders(held, consumers)
        if state.key_shared is None and (state.acknowledging or state.nacking):
            # Decisions of earlier streams: until they are durable no other consumer gets rows of their hashes.
            await topic.slots.settled()
        claimed = await self._find(state, claims)
        served = self._checked(state, key_shared=True)
        stream = KeySharedStream(served, served.key_sharing)
        served.key_sharing.open(stream)
        with self._beginning(served, stream):
            served.key_sharing.join(stream, consumers)
            _declare(stream, self._hold(stream, held, claimed))
        return stream

    def _checked(self, state: SubscriptionState, *, key_shared: bool) -> ServedSubscription:
        """Return the subscription if a stream may listen to it. Raises NotFound, Conflict, QuotaExceeded."""
        self._topic.check_there(state)
        served = self._served(state)
        served.check_mode(key_shared=key_shared)
        if len(served.streams) >= self._streams_max:
            raise QuotaExceeded(
                f"subscription {state.stored.name!r} has {len(served.streams)} open streams; the limit is "
                f"{self._streams_max}",
                retry_after_ms=STREAMS_RETRY_MS,
            )
        return served

    async def _find(self, state: SubscriptionState, held: HeldPositions) -> ClaimedRows:
        """Find the rows that the dispatcher holds, after all due rows have been passed."""
        if not len(held):
            return rows_claimed((), state, held, KeyedRows.empty())
        await self._topic.settle_due()
        found = await self._acks.find(state, held, held)
        return rows_claimed(self._topic.core.indexes.serving(state.subscription_id), state, held, found)

    def _hold(self, stream: KeySharedStream, held: HeldByConsumers, claimed: ClaimedRows) -> Mask:
        """Hold the claimed positions; return the mask of the claims that are held from now on."""
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
        """Register a stream, and close it again if its opening fails."""
        topic = self._topic
        served.streams[stream.dispatcher] = stream
        try:
            yield
        except Exception:
            stream.close()
            raise
        stream.rebuild_needed = topic.core.rebuild_needed()
        served.nacks.watch(served.state)
        served.refill()
        served.notify()


def _declare(stream: OpenStream, are_held: Mask) -> None:
    stream.held = int(np.count_nonzero(are_held))
    stream.not_held = np.flatnonzero(~are_held)


def _check_holders(held: HeldByConsumers, consumers: Sequence[Consumer]) -> None:
    """Raise InvalidArgument for a position of a consumer that does not join."""
    known = np.array([consumer.consumer_id for consumer in consumers], np.uint32)
    strange = np.flatnonzero(~np.isin(held.consumer_id, known))
    if len(strange):
        row = int(strange[0])
        raise InvalidArgument(
            f"held_consumer_id[{row}] is {held.consumer_id[row]}, but no consumer in this request has that id"
        )
