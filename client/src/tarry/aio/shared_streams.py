"""Shares streams between the subscriptions of a client: each subscription has a lane.

This module numbers the lanes, reads for all of them, and ends every lane when its stream ends. To its session, a lane
is the same as a call of its own. Answers wait in their lane, so that no lane waits for another; permits and unanswered
requests bound how many.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from typing import Any, Generic, TypeVar

import grpc

from tarry import errors, on_event_loop, streams, wire
from tarry.aio import connections

Response = TypeVar("Response")

METHOD: streams.StreamMethod[list[wire.LaneResponse]] = streams.StreamMethod(
    "/tarry.v1.Dispatch/SubscribeMany", wire.decode_lanes
)
# Far below the daemon's limit, so that lanes which the daemon has not ended yet do not matter
LANES_MAX = 1_000
# Requests that are ready together form one message of at most this size, or of one more request (bytes).
_JOINED_BYTES = 256 << 10


class Lane(Generic[Response]):
    """One subscription's part of a stream: sends requests and iterates over the answers."""

    def __init__(
        self,
        number: int,
        sending: streams.Requests,
        read: Callable[[bytes], Response],
        left: Callable[[int], None],
    ) -> None:
        """Call `left` with the lane's number once nothing more is sent."""
        self._number = number
        self._sending = sending
        self._read = read
        self._left = left
        self._arrived: on_event_loop.Arrivals[bytes | errors.TarryError | None] = on_event_loop.Arrivals()
        self._is_closed = False

    def put(self, message: bytes) -> None:
        """Send a message after all earlier ones."""
        self._sending.put(wire.encode_lane(self._number, message))

    def put_after(self, delay_s: float, message: Callable[[], bytes | None]) -> None:
        """Call `message` after `delay_s` and send its result, unless the lane or the stream has ended."""

        def in_lane() -> bytes | None:
            ready = None if self._is_closed else message()
            return None if ready is None else wire.encode_lane(self._number, ready)

        self._sending.put_after(delay_s, in_lane)

    def close(self) -> None:
        """Send nothing more, so that the daemon gives up what the lane holds. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._sending.put(wire.encode_lane_close(self._number))
            self._left(self._number)

    def cancel(self) -> None:
        """End the iteration."""
        self._arrived.put(None)

    def arrive(self, response: bytes) -> None:
        """Append an answer."""
        self._arrived.put(response)

    def end(self, error: errors.TarryError) -> None:
        """Make the iteration raise this after all earlier answers: the lane or its stream has ended."""
        self._arrived.put(error)

    def __aiter__(self) -> AsyncIterator[Response]:
        return self

    async def __anext__(self) -> Response:
        item = await self._arrived.get()
        if item is None:
            raise StopAsyncIteration
        if isinstance(item, errors.TarryError):
            raise item
        return self._read(item)


class _SharedStream:
    """One stream, which ends when its last lane has left."""

    def __init__(self, shared: connections.Connections, connected: connections.Connected) -> None:
        self.connected = connected
        self._shared = shared
        # Guards the fields below.
        self._changed = on_event_loop.Condition()
        self._lanes: dict[int, Lane[Any]] = {}
        self._last = 0
        self._is_over = False
        name = f"the stream of subscriptions at {connected.address}"
        self._ending: errors.TarryError = errors.Closed(f"{name} is closed")
        self._begun = shared.begin(connected, METHOD, joined_bytes=_JOINED_BYTES)
        self._running = on_event_loop.Running(self._run, self._ended, name=name)

    @property
    def is_over(self) -> bool:
        """True if the stream takes no more lanes."""
        return self._is_over

    def lane(self, read: Callable[[bytes], Response]) -> Lane[Response] | None:
        """Return another lane, or None if there is no room for one."""
        with self._changed:
            if self._is_over or len(self._lanes) >= LANES_MAX:
                return None
            self._last += 1
            lane = Lane(self._last, self._begun.sending, read, self._leave)
            self._lanes[self._last] = lane
            return lane

    async def join(self) -> None:
        """Wait for the end of the stream."""
        await self._running.join()

    def _leave(self, number: int) -> None:
        with self._changed:
            self._lanes.pop(number, None)
            if self._lanes or self._is_over:
                return
            self._is_over = True
        self._begun.sending.close()
        self._begun.cancel()

    async def _run(self) -> None:
        try:
            self._ending = await self._read()
        except Exception as bug:
            self._ending = errors.Internal(f"the stream of subscriptions ended by a bug of the client: {bug!r}")
            raise

    def _ended(self) -> None:
        with self._changed:
            self._is_over = True
            lanes = list(self._lanes.values())
        self._begun.sending.close()
        self._begun.cancel()
        for lane in lanes:
            # Each session raises a copy of its own.
            lane.end(copy.copy(self._ending))

    async def _read(self) -> errors.TarryError:
        """Read to the end and return why the stream ended."""
        try:
            async for responses in self._begun.answers:
                self._shared.heard(self.connected)
                for each in responses:
                    self._received(each)
        except grpc.RpcError as failure:
            error = self._shared.why_ended(failure, self.connected)
            if not errors.is_unknown_call(error):
                return error
            # Opening again asks the daemon that is there now for its features.
            return errors.Unavailable(f"the daemon at {self.connected.address} is one of before: {error.message}")
        return self._shared.why_ended(None, self.connected)

    def _received(self, response: wire.LaneResponse) -> None:
        with self._changed:
            lane = self._lanes.get(response.lane)
        if lane is None:
            # The lane was left meanwhile.
            return
        if response.ended is None:
            lane.arrive(response.response)
        else:
            lane.end(self._shared.judged(streams.why_lane_ended(response.ended), self.connected))


class SharedStreams:
    """The streams that the subscriptions of one client share, at all its daemons."""

    def __init__(self, shared: connections.Connections) -> None:
        self.connections = shared
        self._changed = on_event_loop.Condition()
        self._streams: list[_SharedStream] = []

    def open(self, address: str, read: Callable[[bytes], Response]) -> connections.Opened[Response]:
        """Begin a lane at a daemon, on a stream that shows the current credentials.

        Raises Closed, or InvalidArgument if the token may not be sent.
        """
        with self._changed:
            connected = self.connections.connect(address)
            self._streams = [each for each in self._streams if not each.is_over]
            for stream in self._streams:
                if stream.connected == connected and (lane := stream.lane(read)) is not None:
                    break
            else:
                stream = _SharedStream(self.connections, connected)
                lane = stream.lane(read)
                self._streams.append(stream)
        if lane is None:
            # The stream failed at once.
            raise errors.Unavailable(f"the stream at {address} ended as it began")
        return connections.Opened(connected, lane, lane, lane.cancel)

    async def close(self) -> None:
        """Wait until every stream is over; every lane must have been left before."""
        for stream in self._streams:
            await stream.join()
