"""The gate of one topic: its requests pass, and a change of the topic as a whole has it for itself.

Owns: the turns of changes, that no request passes while one is under way, and who waits how long.
Does not own: what a change does (`topic_changes`, `topic_changes`).

A request passes the gate and stages what it has decided before it awaits anything: so it stands before a change or
after it. A change that has begun goes on to its end, whatever becomes of its caller: what it staged may land at any
time, and until then nothing may pass.
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
    """The gate of one topic: requests pass, and a change of the topic as a whole has it for itself. `topic`: its name,
    for messages.
    """

    def __init__(self, topic: str, slots: TopicSlots) -> None:
        self._topic = topic
        self._slots = slots
        # Whether requests pass now.
        self.is_open = True
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._change: asyncio.Task[Any] | None = None
        self._ended: Exception | None = None

    async def passed(self) -> None:
        """Returns when requests pass; without awaiting anything when they pass now.

        Raises Unavailable when a change takes too long, and what ended the topic.
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
        """Does the work when no other change is under way, and everything that was staged before it is applied.

        `closed`: no request passes until it is done. The work may decide and stage until it awaits something, and may
        take as long as it must. Raises Unavailable when its turn did not come, then nothing was done; OutcomeUnknown
        when it takes long: it goes on.
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
            raise self._ended or Unavailable(f"topic {self._topic} is served by this daemon no longer; try again")
        return task.result()

    def end(self, error: Exception) -> None:
        """The topic is served here no longer: whoever waits, and whoever comes, gets the error."""
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
        """The end of a change whose caller has gone."""
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, TarryError) else logging.ERROR
            log.log(level, "topic %s: a change that nobody waits for any longer failed: %r", self._topic, error)

    def _busy(self) -> Unavailable:
        return Unavailable(
            f"topic {self._topic}: a change of it, or a slot before it, has not been durable for "
            f"{STALL_ANSWER_S:.0f} s; try again"
        )
