"""`SubscribeMany`: many subscriptions on one stream, each in a lane.

Owns: lanes, their numbers and how many there may be, reading and writing for all of them, and that the end of the
stream ends them.
Does not own: what a lane is and does (`subscribe`), the bytes (`lane_messages`), and who sends how much when
(`lane_outbox`).

One reader gives each lane what is for it, one writer sends what lanes have put out when it gets its turn. What a lane
does not read in time waits, up to a bound; then the stream is not read any more: back-pressure.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyroaring

from daemon import config, errors
from daemon.grpc_services import lane_messages, pipeline, status, subscribe
from daemon.grpc_services.admission import Context
from daemon.grpc_services.lane_outbox import Outbox
from daemon.topic.waiting_line import Waiter

if TYPE_CHECKING:
    from daemon.owner.engine import Engine

LANES_MAX = 4_096
LANES_RETRY_MS = 5_000
# So many lanes are given a request at once: then they take it, and others have their turn, before the next are.
LANES_A_TURN = 32
# What a request that waits takes beside its bytes.
_REQUEST_BYTES = 256


class Lane:
    """One subscription on the stream: its dispatcher, as `subscribe` sees it."""

    def __init__(self, number: int, outbox: Outbox, check_topic: Callable[[str], None], read: Callable[[int], None]):
        """`read` is told how many bytes wait no longer."""
        self.number = number
        self.check_topic = check_topic
        self._outbox = outbox
        self._read = read
        self._requests: collections.deque[bytes] = collections.deque()
        self._is_closed = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    def arrive(self, request: bytes) -> int:
        """A request has come; how many bytes it takes until it is read. What comes behind the last one is dropped."""
        if self._is_closed:
            return 0
        self._requests.append(request)
        self._changed.set()
        return len(request) + _REQUEST_BYTES

    def close(self) -> None:
        """The caller has sent its last request."""
        self._is_closed = True
        self._changed.set()

    async def read(self) -> bytes | None:
        while not self._requests:
            if self._is_closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        request = self._requests.popleft()
        self._read(len(request) + _REQUEST_BYTES)
        return request

    async def write(self, answer: bytes, /) -> None:
        """Returns when it is on its way out; waits for room before."""
        while not self._outbox.takes(self.number, self):
            self._room.clear()
            await self._room.wait()
        self.put(answer)

    def put(self, answer: bytes) -> None:
        """Has an answer on its way out, whether there is room or not."""
        self._outbox.put(self.number, lane_messages.response(self.number, answer))

    def notify(self) -> None:
        """There may be room."""
        self._room.set()

    def takes(self, stream: Waiter) -> bool:
        """Whether more may be handed out; else the stream is notified when that may be."""
        return self._outbox.takes(self.number, stream)

    def end(self, error: Exception | None) -> None:
        """Tells its end. What was not read is dropped."""
        self._is_closed = True
        while self._requests:
            self._read(len(self._requests.popleft()) + _REQUEST_BYTES)
        self._outbox.put(self.number, _ended(self.number, error))


class SubscribeManyStream:
    """One `SubscribeMany`."""

    def __init__(self, engine: Engine, settings: config.Config, context: Context, draining: asyncio.Event) -> None:
        self._engine = engine
        self._settings = settings
        self._context = context
        self._draining = draining
        self._outbox = Outbox()
        # Held while a message is written: a status that comes between would break the call.
        self._writing = asyncio.Lock()
        self._lanes: dict[int, Lane] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._used = pyroaring.BitMap()
        self._unread_bytes = 0
        self._room = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> None:
        reader, writer = asyncio.create_task(self._read()), asyncio.create_task(self._write())
        draining = asyncio.create_task(self._draining.wait())
        for task in (reader, writer, draining):
            task.add_done_callback(lambda _: self._changed.set())
        try:
            while not writer.done() and not self._is_over(reader.done() or draining.done()):
                if reader.done():
                    reader.result()
                    for lane in self._lanes.values():
                        lane.close()
                await self._changed.wait()
                self._changed.clear()
            if writer.done():
                writer.result()
            if not reader.done():
                raise errors.Unavailable("the daemon is stopping; try again")
            reader.result()
        finally:
            async with self._writing:
                await pipeline.end(reader, writer, draining, *self._serving.values())

    def _is_over(self, is_ending: bool) -> bool:
        """Whether every lane has ended, and its end is sent, when no more lanes are to come."""
        return is_ending and not self._lanes and not self._outbox and not self._writing.locked()

    async def _read(self) -> None:
        size_bytes_max = self._settings.limits.message_bytes_max
        while isinstance(data := await self._context.read(), bytes):
            requests = lane_messages.requests(data, size_bytes_max=size_bytes_max)
            for first in range(0, len(requests), LANES_A_TURN):
                if first:
                    await asyncio.sleep(0)
                for request in requests[first : first + LANES_A_TURN]:
                    self._take(request)
            while self._unread_bytes >= self._settings.grpc.stream_bytes_in_flight_max:
                self._room.clear()
                await self._room.wait()

    async def _write(self) -> None:
        while True:
            await self._outbox.filled()
            async with self._writing:
                await self._context.write(self._outbox.take())
            if not self._outbox:
                self._changed.set()

    def _take(self, given: lane_messages.LaneRequest) -> None:
        if not given.lane:
            raise errors.InvalidArgument("lane: 0; it must be at least 1")
        lane = self._lanes.get(given.lane)
        if lane is None:
            if given.lane in self._used:
                # It has ended meanwhile.
                return
            lane = self._begin(given.lane)
            if lane is None:
                return
        if given.request is not None:
            self._unread_bytes += lane.arrive(given.request)
        if given.close:
            lane.close()

    def _begin(self, number: int) -> Lane | None:
        """A lane; None: there are too many, which it is told."""
        self._used.add(number)
        if len(self._lanes) >= LANES_MAX:
            refusal = errors.QuotaExceeded(
                f"the stream has {len(self._lanes)} lanes, the limit is {LANES_MAX}; open another stream",
                retry_after_ms=LANES_RETRY_MS,
            )
            self._outbox.put(number, _ended(number, refusal))
            return None
        lane = self._lanes[number] = Lane(number, self._outbox, self._context.check_topic, self._was_read)
        self._serving[number] = asyncio.create_task(self._serve(lane))
        return lane

    async def _serve(self, lane: Lane) -> None:
        error = await subscribe.serve(self._engine, self._settings, lane, outlet=lane, put=lane.put)
        del self._lanes[lane.number], self._serving[lane.number]
        lane.end(error)

    def _was_read(self, size_bytes: int) -> None:
        self._unread_bytes -= size_bytes
        self._room.set()


def _ended(lane: int, error: Exception | None) -> bytes:
    return lane_messages.ended(lane, status.OK if error is None else status.refusal(error))
