"""Bounds the bytes of requests that are received and not decided, of all connections together.

Python reaches no resource quota of gRPC, and learns the size of a message only once it is whole. Two things of gRPC
bound it: a call buffers one window until its next message is awaited, and no message is taken that says it is larger
than the largest. So a message that is awaited counts as the largest.

Half of the budget is for such messages. Calls take turns: those with one request, and streams whose caller has not
named a topic yet that it may use. A stream that has is awaited without a turn, since it is awaited all the time. The
other half is for whole requests. While these exceed it, nothing more is awaited.

Requests that wait for their lane take at most half of the latter. A caller that reads no answers may keep them for as
long as it likes, so they alone must not keep the others out.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Final, Protocol, TypeVar

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

T = TypeVar("T")


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
        self._undecided_bytes_max = half_bytes
        self._queued_bytes_max = half_bytes // 2
        self._arrival_s = settings.grpc.request_arrival_s
        # Calls whose messages are awaited, and their number by caller. gRPC tells a caller only while its call is open.
        self._turns: dict[Arriving, tuple[str, int]] = {}
        """Caller, and the number of sweeps before the turn"""
        self._held: collections.defaultdict[str, int] = collections.defaultdict(int)
        self._waiting: dict[str, dict[Arriving, asyncio.Future[None]]] = {}
        """Calls that wait for a turn, by caller; first the one whose last turn is the longest ago"""
        self._waiting_calls = 0
        self._sweeps = 0
        self._sweeping: asyncio.TimerHandle | None = None
        self._undecided_bytes = 0
        self._queued_bytes = 0
        self._long = asyncio.Lock()
        self._room = asyncio.Event()
        self._awaits_room = 0
        """How many wait for room"""

    def received(self, size_bytes: int) -> None:
        """Count a request until it is decided."""
        self._undecided_bytes += size_bytes
        if size_bytes >= LARGE_BYTES:
            self._large_bytes += size_bytes

    def decided(self, size_bytes: int) -> None:
        """Count a request no longer."""
        self._undecided_bytes -= size_bytes
        if self._awaits_room:
            self._tell_room()

    def queued(self, size_bytes: int) -> None:
        """Count a request until its lane reads it."""
        self._queued_bytes += size_bytes

    def dequeued(self, size_bytes: int) -> None:
        """Count a request that waited for its lane no longer."""
        self._queued_bytes -= size_bytes
        if self._awaits_room:
            self._tell_room()

    @property
    def queues_are_full(self) -> bool:
        """True if a stream whose lanes have not read everything must not queue more."""
        return self._queued_bytes >= self._queued_bytes_max

    @property
    def _is_full(self) -> bool:
        queued_bytes = min(self._queued_bytes, self._queued_bytes_max)
        return self._undecided_bytes + queued_bytes >= self._undecided_bytes_max

    def _tell_room(self) -> None:
        if not self._is_full:
            self._room.set()

    async def room(self) -> None:
        """Wait until another request may be received."""
        while self._is_full:
            self._room.clear()
            self._awaits_room += 1
            try:
                await self._room.wait()
            finally:
                self._awaits_room -= 1

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

    async def in_turn(self, call: Arriving, read: Callable[[], Awaitable[T]], *, needs_room: bool = True) -> T:
        """Await the call's message in its turn, and not before there is room, unless it is decided at once.

        Ends the call if the message is not whole in time. Raises `QuotaExceeded` if too many calls wait.
        """
        caller = call.caller
        if needs_room and self._undecided_bytes + self._queued_bytes >= self._undecided_bytes_max:
            await self.room()
        if self._waiting or len(self._turns) >= self._turns_max:
            await self._turn_of(call, caller)
        else:
            self._turns[call] = caller, self._sweeps
            self._held[caller] += 1
        if self._sweeping is None:
            self._sweep()
        try:
            return await read()
        except asyncio.CancelledError:
            # A part of a large message may have come.
            self._large_bytes += LARGE_BYTES
            raise
        finally:
            self._end(call)

    async def _turn_of(self, call: Arriving, caller: str) -> None:
        if self._waiting_calls >= self._waiting_max:
            raise errors.QuotaExceeded(
                f"{len(self._turns)} requests are not whole yet, and {self._waiting_calls} wait to be received; "
                "grpc.received_bytes_max limits them; nothing was changed, try again",
                retry_after_ms=RETRY_MS,
            )
        turn = self._waiting.setdefault(caller, {})[call] = asyncio.get_running_loop().create_future()
        self._waiting_calls += 1
        try:
            await turn
        except asyncio.CancelledError:
            if call in self._turns:
                self._end(call)
            elif call in self._waiting.get(caller, ()):
                self._leave_queue(call, caller)
            raise

    def _leave_queue(self, call: Arriving, caller: str) -> None:
        """Take a call out of those that wait; its caller's others go behind all callers."""
        calls = self._waiting.pop(caller)
        del calls[call]
        if calls:
            self._waiting[caller] = calls
        self._waiting_calls -= 1

    def _end(self, call: Arriving) -> None:
        """Take the call's turn, and give it to a caller that has the fewest."""
        caller, _ = self._turns.pop(call)
        self._held[caller] -= 1
        if not self._held[caller]:
            del self._held[caller]
        while self._waiting and len(self._turns) < self._turns_max:
            caller = min(self._waiting, key=lambda each: self._held.get(each, 0))
            call, turn = next(iter(self._waiting[caller].items()))
            self._leave_queue(call, caller)
            # A call that has left cannot take the turn.
            if not turn.done():
                self._turns[call] = caller, self._sweeps
                self._held[caller] += 1
                turn.set_result(None)

    def _sweep(self) -> None:
        """End calls whose messages are late, and come again while any is awaited in a turn.

        If others wait, a message is late after two sweeps. Those of the caller that has the most turns end first.
        """
        self._sweeping = None
        self._sweeps += 1
        slow = [call for call, (_, since) in self._turns.items() if self._sweeps - since > 1 and not call.is_ending]
        slow.sort(key=lambda call: -self._held[self._turns[call][0]])
        for index, call in enumerate(slow):
            if (self._sweeps - self._turns[call][1] - 1) * SWEEP_S >= self._arrival_s:
                call.end(
                    errors.Unavailable(f"no whole message arrived within {self._arrival_s:g} s; nothing was changed")
                )
            elif index < self._waiting_calls:
                refusal = errors.QuotaExceeded(
                    "the message arrived slowly, and others wait to be received; grpc.received_bytes_max limits them; "
                    "nothing was changed, try again",
                    retry_after_ms=RETRY_MS,
                )
                call.end(refusal)
        if self._turns:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)
        elif self._large_bytes >= GIVE_BACK_BYTES:
            self._large_bytes = 0
            _ = asyncio.get_running_loop().run_in_executor(None, self._give_back)
