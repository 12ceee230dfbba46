"""Serves `SubscribeMany`: many subscriptions on one stream, each in a lane. It stands alone since its lanes have state.

One reader passes requests to their lanes, as bytes that `subscribe` parses. One writer sends the lanes' answers in
turns. Requests that a lane does not read in time wait, up to a bound; then the stream is no longer read: this is
back-pressure. When the stream ends, all its lanes end.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import itertools
from collections.abc import Callable

import pyroaring
from google.rpc import status_pb2

from daemon import config, errors
from daemon.grpc_services import parsing, pipeline, status, subscribe
from daemon.grpc_services.admission import Context
from daemon.owner.engine import Engine
from daemon.topic.open_streams import Waiter
from tarry.packed_fields import NotPlainError, nested, scan_each, tag_bytes, tags, varint
from tarry.v1 import dispatch_pb2 as pb

(_REQUESTS,) = tags(pb.SubscribeManyRequest, "requests")
_LANE, _REQUEST, _CLOSE = _FIELDS = tags(pb.LaneRequest, "lane", "request", "close")
_KNOWN = frozenset(_FIELDS)
_LANE_MAX = (1 << 32) - 1

_RESPONSES = tag_bytes(pb.SubscribeManyResponse)["responses"]
_RESPONSE = tag_bytes(pb.LaneResponse)


@dataclasses.dataclass(frozen=True, slots=True)
class LaneRequest:
    """A request of a lane. `request` is an encoded `SubscribeRequest`, or None if there is none."""

    lane: int
    request: bytes | None
    close: bool


def lane_requests(data: bytes, bounds: parsing.Bounds) -> list[LaneRequest]:
    """Read a `SubscribeManyRequest`. Raises `InvalidArgument`."""
    requests: list[LaneRequest] = []
    try:
        for fields in scan_each(data, _REQUESTS, _KNOWN):
            lane = fields[_LANE][1] if _LANE in fields else 0
            if lane > _LANE_MAX:
                raise NotPlainError
            request = None
            if _REQUEST in fields:
                start, size = fields[_REQUEST]
                request = data[start : start + size]
            requests.append(LaneRequest(lane, request, bool(fields[_CLOSE][1]) if _CLOSE in fields else False))
    except (NotPlainError, IndexError):
        message = parsing.parse(pb.SubscribeManyRequest, data, bounds)
        return [
            LaneRequest(each.lane, each.request.SerializeToString() if each.HasField("request") else None, each.close)
            for each in message.requests
        ]
    return requests


def lane_response(lane: int, encoded: bytes) -> bytes:
    """Encode a `SubscribeManyResponse` with one `SubscribeResponse`. Several in a row are one message."""
    return nested(_RESPONSES, b"".join((_RESPONSE["lane"], varint(lane), nested(_RESPONSE["response"], encoded))))


def lane_ended(lane: int, status: status_pb2.Status) -> bytes:
    """Encode a `SubscribeManyResponse` that reports the end of a lane."""
    ended = nested(_RESPONSE["ended"], status.SerializeToString())
    return nested(_RESPONSES, b"".join((_RESPONSE["lane"], varint(lane), ended)))


# Size of a full message (bytes); only one answer that is larger itself exceeds it
MESSAGE_BYTES = 256 << 10
# The most that one lane may put into a message while others wait (bytes)
TURN_BYTES = 64 << 10
# With this much unsent, of all lanes or of one, no more rows are delivered (bytes).
UNSENT_BYTES_MAX = 1 << 20
LANE_UNSENT_BYTES_MAX = 256 << 10
# Waiters for room that each sent message wakes: every one may fill the freed room
_WOKEN_BY_A_MESSAGE = 8


class LaneOutbox:
    """Encoded answers by lane, in order within a lane. All lanes of a stream and its one writer use it."""

    def __init__(self) -> None:
        self._answers: dict[int, collections.deque[bytes]] = {}
        """Answers of the lanes that have any, in the order of their turns"""
        self._lane_bytes: collections.Counter[int] = collections.Counter()
        self._unsent_bytes = 0
        self._filled = asyncio.Event()
        self._waiting: dict[Waiter, None] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    def put(self, lane: int, answer: bytes) -> None:
        """Queue an answer that must be sent, even if there is no room."""
        self._answers.setdefault(lane, collections.deque()).append(answer)
        self._lane_bytes[lane] += len(answer)
        self._unsent_bytes += len(answer)
        self._filled.set()

    def takes(self, lane: int, waiter: Waiter) -> bool:
        """Return whether the lane may send more now. If not, notify the waiter when that may have changed."""
        if self._unsent_bytes < UNSENT_BYTES_MAX and self._lane_bytes[lane] < LANE_UNSENT_BYTES_MAX:
            return True
        self._waiting.setdefault(waiter)
        return False

    async def filled(self) -> None:
        """Wait until there is an answer to send."""
        while not self._answers:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> bytes:
        """Return the next message: a turn of each lane, until it is full or nothing is left."""
        taken: list[bytes] = []
        size_bytes = 0
        while self._answers and size_bytes < MESSAGE_BYTES:
            lane = next(iter(self._answers))
            room_bytes = MESSAGE_BYTES - size_bytes
            if taken and len(self._answers[lane][0]) > room_bytes:
                break
            size_bytes += self._take_turn(lane, taken, min(room_bytes, TURN_BYTES))
        self._unsent_bytes -= size_bytes
        # There is room again. If nothing is left to send, no later message would wake the other waiters.
        woken = list(itertools.islice(self._waiting, _WOKEN_BY_A_MESSAGE) if self._answers else self._waiting)
        for waiter in woken:
            del self._waiting[waiter]
            waiter.notify()
        return b"".join(taken)

    def _take_turn(self, lane: int, taken: list[bytes], most_bytes: int) -> int:
        """Take at least one answer of the lane, then as many as fit; return their bytes.

        Then it is another lane's turn.
        """
        answers = self._answers.pop(lane)
        size_bytes = 0
        while answers and (not size_bytes or size_bytes + len(answers[0]) <= most_bytes):
            taken.append(answers.popleft())
            size_bytes += len(taken[-1])
        if answers:
            self._answers[lane] = answers
            self._lane_bytes[lane] -= size_bytes
        else:
            del self._lane_bytes[lane]
        return size_bytes


LANES_MAX = 4_096
LANES_RETRY_MS = 5_000
# Requests passed to lanes at once. The lanes take them, and other tasks have their turn, before the next follow.
LANES_A_TURN = 32
# Memory that a waiting request takes besides its own bytes (bytes)
_REQUEST_BYTES = 256


class Lane:
    """One subscription on the stream, as the dispatcher that `subscribe` serves."""

    def __init__(self, number: int, outbox: LaneOutbox, context: Context, read: Callable[[int], None]) -> None:
        """Open the lane. Calls `read` with the bytes of each request that no longer waits."""
        self.number = number
        self.receiving = context.receiving
        self.check_topic = context.check_topic
        self.tell_request = context.tell_request
        self._outbox = outbox
        self._read = read
        self._requests: collections.deque[bytes] = collections.deque()
        self._is_closed = False
        self._changed = asyncio.Event()
        self._room = asyncio.Event()

    def arrive(self, request: bytes) -> int:
        """Queue a request; return the bytes that it takes until it is read. Drop it if the lane is closed."""
        if self._is_closed:
            return 0
        self._requests.append(request)
        self._changed.set()
        return len(request) + _REQUEST_BYTES

    def close(self) -> None:
        """Note that the caller has sent its last request."""
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
        """Wait for room, then queue an answer."""
        while not self._outbox.takes(self.number, self):
            self._room.clear()
            await self._room.wait()
        self.put(answer)

    def put(self, answer: bytes) -> None:
        """Queue an answer, even if there is no room."""
        self._outbox.put(self.number, lane_response(self.number, answer))

    def notify(self) -> None:
        """Wake the writer, since there may be room."""
        self._room.set()

    def takes(self, stream: Waiter) -> bool:
        """Return whether more may be delivered; otherwise the stream is notified once that may be."""
        return self._outbox.takes(self.number, stream)

    def end(self, error: Exception | None) -> None:
        """Report the lane's end, and drop its unread requests."""
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
        self._outbox = LaneOutbox()
        # Held while a message is written, since a status in between would break the call
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
            try:
                async with self._writing:
                    await pipeline.end(reader, writer, draining, *self._serving.values())
            finally:
                # Lanes that were cut off read no more.
                self._was_read(self._unread_bytes)

    def _is_over(self, is_ending: bool) -> bool:
        """Return whether no more lanes will open, and the end of every lane has been sent."""
        return is_ending and not self._lanes and not self._outbox and not self._writing.locked()

    async def _read(self) -> None:
        bounds = parsing.Bounds.of(self._settings)
        while isinstance(data := await self._context.read(), bytes):
            await self._take_all(lane_requests(data, bounds))
            # An idle stream keeps no request.
            del data
            while self._must_wait():
                self._room.clear()
                await self._room.wait()
            if self._context.receiving.free_bytes <= 0:
                await self._context.receiving.room()

    def _must_wait(self) -> bool:
        """Return whether lanes must read before the stream is read. One whose lanes have read everything is."""
        is_full = self._unread_bytes >= self._settings.grpc.stream_bytes_in_flight_max
        return is_full or (self._unread_bytes > 0 and self._context.receiving.queues_are_full)

    async def _take_all(self, requests: list[LaneRequest]) -> None:
        for first in range(0, len(requests), LANES_A_TURN):
            if first:
                await asyncio.sleep(0)
            for request in requests[first : first + LANES_A_TURN]:
                self._take(request)

    async def _write(self) -> None:
        while True:
            await self._outbox.filled()
            async with self._writing:
                await self._context.write(self._outbox.take())
            if not self._outbox:
                self._changed.set()

    def _take(self, given: LaneRequest) -> None:
        if not given.lane:
            raise errors.InvalidArgument("lane: 0; it must be at least 1")
        lane = self._lanes.get(given.lane)
        if lane is None:
            if given.lane in self._used:
                # The lane has ended meanwhile.
                return
            lane = self._begin(given.lane)
            if lane is None:
                return
        if given.request is not None:
            size_bytes = lane.arrive(given.request)
            self._unread_bytes += size_bytes
            self._context.receiving.queued(size_bytes)
        if given.close:
            lane.close()

    def _begin(self, number: int) -> Lane | None:
        """Open a lane. Returns None, and ends the lane with an error, if there are too many."""
        self._used.add(number)
        if len(self._lanes) >= LANES_MAX:
            refusal = errors.QuotaExceeded(
                f"the stream has {len(self._lanes)} lanes, the limit is {LANES_MAX}; open another stream",
                retry_after_ms=LANES_RETRY_MS,
            )
            self._outbox.put(number, _ended(number, refusal))
            return None
        lane = self._lanes[number] = Lane(number, self._outbox, self._context, self._was_read)
        self._serving[number] = asyncio.create_task(self._serve(lane))
        return lane

    async def _serve(self, lane: Lane) -> None:
        error = await subscribe.serve(self._engine, self._settings, lane, outlet=lane, put=lane.put)
        del self._lanes[lane.number], self._serving[lane.number]
        lane.end(error)

    def _was_read(self, size_bytes: int) -> None:
        # A lane that ends late reads what is not counted any longer.
        size_bytes = min(size_bytes, self._unread_bytes)
        self._unread_bytes -= size_bytes
        self._context.receiving.dequeued(size_bytes)
        self._room.set()


def _ended(lane: int, error: Exception | None) -> bytes:
    return lane_ended(lane, status.OK if error is None else status.refusal(error))
