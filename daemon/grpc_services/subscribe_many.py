"""`SubscribeMany`: many subscriptions on one stream, each in a lane.

Owns: lanes, their numbers and how many there may be, reading and writing for all of them, and that the end of the
stream ends them.
Does not own: what a lane is and does (`subscribe`), the bytes (`lane_messages`), and who sends how much when
(`lane_outbox`).

One reader gives each lane what is for it, one writer sends what lanes have put out when it gets its turn. What a lane
does not read in time waits, up to a bound; then the stream is not read any more: back-pressure.

Messages of `SubscribeMany`: requests and answers of subscriptions, each with the number of its lane.

Owns: their bytes. What a lane carries is passed on as bytes: who serves the lane reads it.
Does not own: lanes (`subscribe_many`), and what they carry (`subscribe`).

What is on its way out on a stream of many lanes.

Owns: that lanes take turns, what goes into one message, and the bound on what is not sent.
Does not own: lanes and writing (`subscribe_many`), and the bytes (`lane_messages`).
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
    """`request`: a `SubscribeRequest`, encoded; None: there is none."""

    lane: int
    request: bytes | None
    close: bool


def lane_requests(data: bytes, *, size_bytes_max: int) -> list[LaneRequest]:
    """What a `SubscribeManyRequest` holds. Raises `InvalidArgument`."""
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
        message = parsing.parse(pb.SubscribeManyRequest, data, size_bytes_max=size_bytes_max)
        return [
            LaneRequest(each.lane, each.request.SerializeToString() if each.HasField("request") else None, each.close)
            for each in message.requests
        ]
    return requests


def lane_response(lane: int, encoded: bytes) -> bytes:
    """An encoded `SubscribeManyResponse` with one `SubscribeResponse`. Several in a row are one message."""
    return nested(_RESPONSES, b"".join((_RESPONSE["lane"], varint(lane), nested(_RESPONSE["response"], encoded))))


def lane_ended(lane: int, status: status_pb2.Status) -> bytes:
    """An encoded `SubscribeManyResponse` that tells the end of a lane."""
    ended = nested(_RESPONSE["ended"], status.SerializeToString())
    return nested(_RESPONSES, b"".join((_RESPONSE["lane"], varint(lane), ended)))


# A message is full with so many bytes, but for one answer that is larger by itself.
MESSAGE_BYTES = 256 << 10
# What one lane may put into a message while others wait.
TURN_BYTES = 64 << 10
# With so many bytes not sent, of all lanes or of one, nothing more is handed out.
UNSENT_BYTES_MAX = 1 << 20
LANE_UNSENT_BYTES_MAX = 256 << 10
# Of those who wait for room so many are woken by a message that leaves: each may fill what has become free.
_WOKEN_BY_A_MESSAGE = 8


class LaneOutbox:
    """Encoded answers by lane, those of one in their order. Used by all lanes of a stream, and by its one writer."""

    def __init__(self) -> None:
        self._answers: dict[int, collections.deque[bytes]] = {}
        """Of the lanes that have any, in the order of their turns."""
        self._lane_bytes: collections.Counter[int] = collections.Counter()
        self._unsent_bytes = 0
        self._filled = asyncio.Event()
        self._waiting: dict[Waiter, None] = {}

    def __bool__(self) -> bool:
        return bool(self._answers)

    def put(self, lane: int, answer: bytes) -> None:
        """Sends what must be sent, whether there is room or not."""
        self._answers.setdefault(lane, collections.deque()).append(answer)
        self._lane_bytes[lane] += len(answer)
        self._unsent_bytes += len(answer)
        self._filled.set()

    def takes(self, lane: int, waiter: Waiter) -> bool:
        """Whether the lane may send more now; else the waiter is notified when that may have become so."""
        if self._unsent_bytes < UNSENT_BYTES_MAX and self._lane_bytes[lane] < LANE_UNSENT_BYTES_MAX:
            return True
        self._waiting.setdefault(waiter)
        return False

    async def filled(self) -> None:
        """Returns when there is something to send."""
        while not self._answers:
            self._filled.clear()
            await self._filled.wait()

    def take(self) -> bytes:
        """The next message: of each lane in turn, until it is full or nothing is left."""
        taken: list[bytes] = []
        size_bytes = 0
        while self._answers and size_bytes < MESSAGE_BYTES:
            lane = next(iter(self._answers))
            room_bytes = MESSAGE_BYTES - size_bytes
            if taken and len(self._answers[lane][0]) > room_bytes:
                break
            size_bytes += self._take_turn(lane, taken, min(room_bytes, TURN_BYTES))
        self._unsent_bytes -= size_bytes
        # There is room again. When nothing is left to leave, nobody else would wake those who wait.
        woken = list(itertools.islice(self._waiting, _WOKEN_BY_A_MESSAGE) if self._answers else self._waiting)
        for waiter in woken:
            del self._waiting[waiter]
            waiter.notify()
        return b"".join(taken)

    def _take_turn(self, lane: int, taken: list[bytes], most_bytes: int) -> int:
        """Takes what the lane has, at least one answer, then as much as fits; its bytes. The next turn is another's."""
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
# So many lanes are given a request at once: then they take it, and others have their turn, before the next are.
LANES_A_TURN = 32
# What a request that waits takes beside its bytes.
_REQUEST_BYTES = 256


class Lane:
    """One subscription on the stream: its dispatcher, as `subscribe` sees it."""

    def __init__(
        self, number: int, outbox: LaneOutbox, check_topic: Callable[[str], None], read: Callable[[int], None]
    ):
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
        self._outbox.put(self.number, lane_response(self.number, answer))

    def notify(self) -> None:
        """There may be room."""
        self._room.set()

    def takes(self, stream: Waiter) -> bool:
        """Return whether more may be delivered; otherwise the stream is notified once that may be."""
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
        self._outbox = LaneOutbox()
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
            requests = lane_requests(data, size_bytes_max=size_bytes_max)
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

    def _take(self, given: LaneRequest) -> None:
        if not given.lane:
            raise errors.InvalidArgument("lane: 0; it must be at least 1")
        lane = self._lanes.get(given.lane)
        if lane is None:
            if given.lane in self._used:
                # The thread has ended meanwhile.
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
    return lane_ended(lane, status.OK if error is None else status.refusal(error))
