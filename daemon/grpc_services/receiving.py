"""Bounds the bytes of requests that are received and not decided, of all connections together.

Python reaches no resource quota of gRPC, and learns the size of a message only once it is whole. Two things of gRPC
bound it: a call buffers one window until its next message is awaited, and no message is taken that says it is larger
than the largest. So a message that is awaited counts as the largest.

Half of the budget is for such messages. Calls take turns: those with one request, and streams whose caller has not
named a topic yet that it may use. A stream that has is awaited without a turn, since it is awaited all the time. The
other half is for whole requests. While these exceed it, nothing more is awaited: no turn is given, and streams wait
for room. A call with one request waits for its turn as long as for its request. A stream waits as long as it takes:
it has back-pressure, and what it has sent is answered meanwhile.

Requests that wait for their lane take at most half of the latter. A caller that reads no answers may keep them for as
long as it likes, so they alone must not keep the others out.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from typing import Final, Protocol, TypeAlias

from daemon import config, errors

# Bytes that a call may send before its message is awaited
WINDOW_BYTES: Final = 64 << 10
# A message that is slightly too large is still received, so that it can be refused by name. Beyond that gRPC itself
# ends the call with RESOURCE_EXHAUSTED.
MESSAGE_ROOM_BYTES: Final = 1 << 20
# Large messages are counted from this size, and memory is given back after so much of them (bytes).
LARGE_BYTES: Final = 1 << 20
GIVE_BACK_BYTES: Final = 32 << 20
# Interval at which late messages are looked for (seconds)
SWEEP_S: Final = 0.25
RETRY_MS: Final = 1_000

_Line: TypeAlias = tuple[str, bool]
"""A caller, and whether the calls need room"""


class Arriving(Protocol):
    """A call whose message is awaited."""

    @property
    def caller(self) -> str:
        """The identity that makes the call, or else its host. Callers share the turns."""

    @property
    def is_ending(self) -> bool:
        """True once the call was told to end."""

    def end(self, why: errors.TarryError, /) -> None:
        """End the call early."""


class Receiving:
    """The budget. Every call of the daemon asks it before its message is awaited."""

    def __init__(self, settings: config.Config, give_back: Callable[[], None] = lambda: None) -> None:
        """Start with nothing received. Calls `give_back` in a thread when large messages have left free memory."""
        self._give_back = give_back
        self._large_bytes = 0
        half_bytes = settings.grpc.received_bytes_max // 2
        self._turns_max = max(1, half_bytes // (settings.limits.message_bytes_max + MESSAGE_ROOM_BYTES))
        # Each has sent up to one window.
        self._waiting_max = half_bytes // WINDOW_BYTES
        self.free_bytes = half_bytes
        """The room for whole requests; if there is none, a stream must wait for `room` before it is read"""
        self._queued_bytes_max = half_bytes // 2
        self._arrival_s = settings.grpc.request_arrival_s
        # Calls whose messages are awaited, and their number by caller. gRPC tells a caller only while its call is open.
        self._turns: dict[Arriving, tuple[str, int]] = {}
        """Caller, and the number of sweeps before the turn"""
        self._held: collections.defaultdict[str, int] = collections.defaultdict(int)
        self._waiting: dict[_Line, dict[Arriving, asyncio.Future[None]]] = {}
        """Calls that wait for a turn, by line; first the one whose last turn is the longest ago"""
        # By whether they need room, since those that do must not keep the others out while there is none
        self._waiting_calls = {True: 0, False: 0}
        self._sweeps = 0
        self._sweeping: asyncio.TimerHandle | None = None
        self._queued_bytes = 0
        self._long = asyncio.Lock()
        self._room = asyncio.Event()
        self._streams_waiting = 0
        """How many wait for room"""

    def received(self, size_bytes: int) -> None:
        """Count a request until it is decided."""
        self.free_bytes -= size_bytes
        if size_bytes >= LARGE_BYTES:
            self._large_bytes += size_bytes

    def decided(self, size_bytes: int) -> None:
        """Count a request no longer."""
        self.free_bytes += size_bytes
        if (self._streams_waiting or self._waiting) and self.free_bytes > 0:
            self._tell_room()

    def queued(self, size_bytes: int) -> None:
        """Count a request until its lane reads it."""
        counted_bytes = min(self._queued_bytes, self._queued_bytes_max)
        self._queued_bytes += size_bytes
        self.free_bytes += counted_bytes - min(self._queued_bytes, self._queued_bytes_max)

    def dequeued(self, size_bytes: int) -> None:
        """Count a request that waited for its lane no longer."""
        self.queued(-size_bytes)
        if (self._streams_waiting or self._waiting) and self.free_bytes > 0:
            self._tell_room()

    @property
    def queues_are_full(self) -> bool:
        """True if a stream whose lanes have not read everything must not queue more."""
        return self._queued_bytes >= self._queued_bytes_max

    def _tell_room(self) -> None:
        self._room.set()
        self._pass_turns()

    async def room(self) -> None:
        """Wait until another request of a stream may be received."""
        while self.free_bytes <= 0:
            self._room.clear()
            self._streams_waiting += 1
            try:
                await self._room.wait()
            finally:
                self._streams_waiting -= 1

    @contextlib.asynccontextmanager
    async def long_request(self, name: str) -> AsyncGenerator[None]:
        """Receive a request of several messages, one at a time. Raises `Unavailable` if it is not whole in time."""
        async with self._long:
            try:
                async with asyncio.timeout(self._arrival_s):
                    yield
            except TimeoutError as late:
                refusal = f"{name} was not whole within {self._arrival_s:g} s; nothing was changed"
                raise errors.Unavailable(refusal) from late

    async def in_turn(
        self, call: Arriving, read: Callable[[], Awaitable[object]], *, needs_room: bool = True
    ) -> object:
        """Await the call's message in its turn. Count it as received, unless it needs no room.

        A message that is decided at once needs none. Ends the call if the message is not whole in time. Raises
        `QuotaExceeded` if too many calls wait, and if the turn does not come in time.
        """
        caller = call.caller
        try:
            if self._waiting or len(self._turns) >= self._turns_max or (needs_room and self.free_bytes <= 0):
                await self._turn_of(call, (caller, needs_room))
            else:
                self._turns[call] = caller, self._sweeps
                self._held[caller] += 1
            if self._sweeping is None:
                self._sweep()
            message = await read()
            # Before the turn is passed, which takes room
            if isinstance(message, bytes):
                size_bytes = len(message)
                if needs_room:
                    self.free_bytes -= size_bytes
                if size_bytes >= LARGE_BYTES:
                    self._large_bytes += size_bytes
            return message
        except asyncio.CancelledError:
            if call in self._turns:
                # A part of a large message may have come.
                self._large_bytes += LARGE_BYTES
            raise
        finally:
            if call in self._turns:
                del self._turns[call]
                self._held[caller] -= 1
                if not self._held[caller]:
                    del self._held[caller]
                if self._waiting:
                    self._pass_turns()

    async def _turn_of(self, call: Arriving, line: _Line) -> None:
        """Wait for the call's turn. Raises `QuotaExceeded`."""
        _, needs_room = line
        if self._waiting_calls[needs_room] >= self._waiting_max:
            raise _refusal(f"{self._waiting_calls[needs_room]} requests wait to be received")
        turn = self._waiting.setdefault(line, {})[call] = asyncio.get_running_loop().create_future()
        self._waiting_calls[needs_room] += 1
        # There may be a turn for a call that needs no room.
        self._pass_turns()
        try:
            async with asyncio.timeout(self._arrival_s):
                await turn
        except TimeoutError:
            others = "others are not whole yet, or not decided"
            raise _refusal(f"the request was not received within {self._arrival_s:g} s: {others}") from None
        finally:
            if call in self._waiting.get(line, ()):
                self._leave_line(call, line)

    def _leave_line(self, call: Arriving, line: _Line) -> None:
        """Take a call out of those that wait; its caller's others go behind all callers."""
        calls = self._waiting.pop(line)
        del calls[call]
        if calls:
            self._waiting[line] = calls
        self._waiting_calls[line[1]] -= 1

    def _next_lines(self) -> Collection[_Line]:
        """Return the lines whose calls may have the next turn; without room only those that need none."""
        if self.free_bytes > 0:
            return self._waiting
        return [(caller, needs_room) for caller, needs_room in self._waiting if not needs_room]

    def _pass_turns(self) -> None:
        """Give each free turn to a call that waits, of a caller that has the fewest."""
        while len(self._turns) < self._turns_max and (lines := self._next_lines()):
            line = min(lines, key=lambda each: self._held.get(each[0], 0))
            caller, _ = line
            call, turn = next(iter(self._waiting[line].items()))
            self._leave_line(call, line)
            # A call that has left cannot take the turn.
            if not turn.done():
                self._turns[call] = caller, self._sweeps
                self._held[caller] += 1
                turn.set_result(None)

    def _sweep(self) -> None:
        """End calls whose messages are late, and come again while any is awaited in a turn.

        If others wait for a turn, a message is late after two sweeps. Those of the caller that has the most turns end
        first.
        """
        self._sweeping = None
        self._sweeps += 1
        slow = [call for call, (_, since) in self._turns.items() if self._sweeps - since > 1 and not call.is_ending]
        slow.sort(key=lambda call: -self._held[self._turns[call][0]])
        waiting_calls = self._waiting_calls[False] + (self._waiting_calls[True] if self.free_bytes > 0 else 0)
        for index, call in enumerate(slow):
            if (self._sweeps - self._turns[call][1] - 1) * SWEEP_S >= self._arrival_s:
                call.end(
                    errors.Unavailable(f"no whole message arrived within {self._arrival_s:g} s; nothing was changed")
                )
            elif index < waiting_calls:
                call.end(_refusal("the message arrived slowly, and others wait to be received"))
        if self._turns:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        elif self._large_bytes >= GIVE_BACK_BYTES:
            self._large_bytes = 0
            _ = asyncio.get_running_loop().run_in_executor(None, self._give_back)


def _refusal(why: str) -> errors.QuotaExceeded:
    return errors.QuotaExceeded(
        f"{why}; grpc.received_bytes_max limits them; nothing was changed, try again", retry_after_ms=RETRY_MS
    )
