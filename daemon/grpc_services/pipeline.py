"""Tracks the requests of one stream that are in flight, and writes their answers.

Reading stops at a bound on unanswered requests: this is back-pressure. One writer sends answers in the order in which
they become known, and the last ones before an error ends the stream.

A request needs no task: its work is a future, whose callback queues the answer and wakes the writer.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from daemon import errors
from daemon.grpc_services.receiving import Receiving
from daemon.settings import GrpcSettings

# Time for which a failing stream waits for answers that are not known yet (seconds)
LAST_ANSWERS_S = 5.0

T = TypeVar("T")


class Connection(Protocol):
    """The port to a stream's caller: a call, or a lane of one."""

    @property
    def receiving(self) -> Receiving:
        """The budget of bytes that are not decided."""

    def read(self) -> Awaitable[object]:
        """Return the next request as bytes, or anything else after the caller's last one."""

    async def write(self, message: bytes, /) -> object:
        """Send an answer; return when the next one may be sent."""


class Pipeline:
    """The requests in flight of one stream. Its reader submits; its writer waits and flushes."""

    def __init__(self, context: Connection, settings: GrpcSettings) -> None:
        self._context = context
        self._receiving = context.receiving
        self._requests_max = settings.stream_requests_in_flight_max
        self._bytes_max = settings.stream_bytes_in_flight_max
        self._requests = 0
        self._bytes = 0
        self._answers: collections.deque[tuple[int, bytes | None]] = collections.deque()
        self._moved: errors.NotOwner | None = None
        self._room = asyncio.Event()
        self.wake = asyncio.Event()

    @property
    def busy(self) -> bool:
        """True if a request is unanswered, or its answer is being written."""
        return self._requests > 0

    def submit(
        self,
        size_bytes: int,
        work: Callable[[], Awaitable[T]],
        answer: Callable[[T | Exception], bytes | None],
        *,
        waits_for_caller: bool = False,
    ) -> None:
        """Start a request. `answer` encodes its outcome or error, or returns None for no answer.

        With `waits_for_caller` the work ends only once the caller has read other answers, which may take for ever: the
        request counts for this stream alone.
        """
        self._requests += 1
        self._bytes += size_bytes
        undecided_bytes = 0 if waits_for_caller else size_bytes
        self._receiving.received(undecided_bytes)
        try:
            future = asyncio.ensure_future(work())
        except Exception as error:  # noqa: BLE001 - every refusal is an answer
            self._finish(size_bytes, undecided_bytes, answer, error)
            return

        def finished(done: asyncio.Future[T]) -> None:
            if done.cancelled():
                # It may have been decided.
                cancelled = errors.OutcomeUnknown("the request was cancelled: the daemon stops; a retry is safe")
                self._finish(size_bytes, undecided_bytes, answer, cancelled)
                return
            error = done.exception()
            if error is None:
                self._finish(size_bytes, undecided_bytes, answer, done.result())
            elif isinstance(error, Exception):
                self._finish(size_bytes, undecided_bytes, answer, error)

        future.add_done_callback(finished)

    @property
    def has_room(self) -> bool:
        """True if another request may be read now."""
        is_full = self._requests >= self._requests_max or self._bytes >= self._bytes_max
        return not is_full and self._receiving.free_bytes > 0

    async def room(self) -> None:
        """Wait until another request may be read. A request larger than the bound is still served, alone."""
        while self._requests >= self._requests_max or self._bytes >= self._bytes_max:
            self._room.clear()
            await self._room.wait()
        await self._receiving.room()

    @property
    def known(self) -> int:
        """The number of answers that are known and not written."""
        return len(self._answers)

    async def flush(self, answers: int) -> None:
        """Write the first known answers. Raises `NotOwner` if that was the outcome of a request."""
        for _ in range(answers):
            await self._write_first()
        if self._moved is not None and not self._answers:
            raise self._moved

    async def settle(self) -> None:
        """Write the answers of requests in flight that become known in time, before the stream ends."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_ANSWERS_S):
                while self.busy:
                    self.wake.clear()
                    while self._answers:
                        await self._write_first()
                    if self.busy:
                        await self.wake.wait()

    async def _write_first(self) -> None:
        size_bytes, answer = self._answers.popleft()
        if answer is not None:
            await self._context.write(answer)
        self._requests -= 1
        self._bytes -= size_bytes
        self._room.set()

    def _finish(
        self, size_bytes: int, undecided_bytes: int, answer: Callable[[Any], bytes | None], outcome: object
    ) -> None:
        self._receiving.decided(undecided_bytes)
        if isinstance(outcome, errors.NotOwner):
            self._moved = outcome
            self._answers.append((size_bytes, None))
        else:
            self._answers.append((size_bytes, answer(outcome)))
        self.wake.set()


async def end(*tasks: asyncio.Future[Any]) -> None:
    """Cancel unfinished tasks and wait for them; ignore their outcomes."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
