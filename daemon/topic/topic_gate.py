"""Lets requests pass, and gives a change of the topic as a whole the topic for itself.

A request passes the gate and stages its decision before it awaits anything, so it comes either before a change or after
it. A change that has begun goes on to its end even if its caller goes: its staged decisions may land at any time, and
no request may pass until then. `daemon.shard.topic_changes` makes the changes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from daemon.errors import OutcomeUnknown, TarryError, Unavailable
from daemon.group_commit.shard_slots import STALL_ANSWER_S, TopicSlots

log = logging.getLogger(__name__)

T = TypeVar("T")


class TopicGate:
    """The gate of one topic for requests and changes. `topic` is its name, for messages."""

    def __init__(self, topic: str, slots: TopicSlots) -> None:
        self._topic = topic
        self._slots = slots
        # True if requests pass now.
        self.is_open = True
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._change: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None

    async def passed(self) -> None:
        """Wait until requests pass; await nothing if they pass now.

        Raises Unavailable if a change takes too long, and the error that ended the topic.
        """
        if not self._open.is_set() and self._ended is None:
            try:
                async with asyncio.timeout(STALL_ANSWER_S):
                    while not self._open.is_set():
                        await self._open.wait()
            except TimeoutError:
                raise self._busy() from None
        if self._ended is not None:
            raise self._ended

    async def change(self, work: Callable[[], Coroutine[Any, Any, T]], *, closed: bool = True) -> T:
        """Do the work once no other change is in flight and everything staged before is applied.

        With `closed` no request passes until it is done. The work may decide and stage until it awaits something, and
        may take any time. Raises Unavailable if its turn did not come, after which nothing was done, and OutcomeUnknown
        if it takes long: it goes on.
        """
        await self._begin(closed)
        task: asyncio.Task[T] = asyncio.ensure_future(work())
        self._change = task
        task.add_done_callback(self._done)
        try:
            await asyncio.wait([task], timeout=STALL_ANSWER_S)
        finally:
            if not task.done():
                task.add_done_callback(self._tell)
        if not task.done():
            raise OutcomeUnknown(
                f"topic {self._topic}: the change is not durable after {STALL_ANSWER_S:.0f} s; a retry is safe"
            )
        if task.cancelled():
            raise self._ended or Unavailable(f"topic {self._topic} is no longer served by this daemon; try again")
        return task.result()

    def end(self, error: Exception) -> None:
        """End the gate, since the topic is no longer served here; waiting and later callers get the error."""
        if self._ended is not None:
            return
        self._ended = error
        self.is_open = False
        self._open.set()
        # A deletion ends its own topic.
        if self._change is not None and self._change is not asyncio.current_task():
            self._change.cancel()

    async def _begin(self, closed: bool) -> None:
        try:
            async with asyncio.timeout(STALL_ANSWER_S):
                await self._turn.acquire()
        except TimeoutError:
            raise self._busy() from None
        try:
            if self._ended is not None:
                raise self._ended
            if closed:
                self.is_open = False
                self._open.clear()
                async with asyncio.timeout(STALL_ANSWER_S):
                    await self._slots.settled()
            if self._ended is not None:
                raise self._ended
        except BaseException as error:
            self._leave()
            if isinstance(error, TimeoutError):
                raise self._busy() from None
            raise

    def _leave(self) -> None:
        self.is_open = self._ended is None
        self._open.set()
        self._turn.release()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._change = None
        self._leave()

    def _tell(self, task: asyncio.Task[Any]) -> None:
        """Log the failure of a change whose caller has gone."""
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, TarryError) else logging.ERROR
            log.log(level, "topic %s: a change failed after its caller had left: %r", self._topic, error)

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"topic {self._topic}: a change to the topic, or a slot before it, was not durable for "
            f"{STALL_ANSWER_S:.0f} s; try again"
        )
