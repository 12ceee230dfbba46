"""Stands between the edge and the calls of a real engine."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from daemon.owner.requests import Requests
from daemon.topic.open_streams import DispatchStream


class WatchedCalls:
    """The calls of an engine, which a test may count, hold and fail; those on its SHARED streams are among them.

    Every call raises `fail_with`, unless that is None. While `hold` is set, calls on the engine and answers of its
    streams wait for it. `begun` counts the calls so far, `opened` has the streams. `former_owner_s` is the time that a
    former owner may still act (seconds); None leaves that to the engine. ListTopics is left alone, since its answer
    shows that the server has what was sent before it on the connection.
    """

    def __init__(self, requests: Requests) -> None:
        self.fail_with: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.former_owner_s: float | None = None
        self.begun = 0
        self.opened: list[DispatchStream] = []
        self._alone_in_s = requests.alone_in_s
        self._open_dispatch = requests.open_dispatch
        changed = {
            "add_at_once": self._left_to_add(requests.add_at_once),
            "add_row": self._left_to_add(requests.add_row),
            "alone_in_s": self._time_of_former_owner,
            "open_dispatch": self._watched(self._open_watched),
        }
        coroutines = inspect.getmembers(requests, inspect.iscoroutinefunction)
        watched = {name: self._watched(call) for name, call in coroutines if name != "list_topics" and name[0] != "_"}
        vars(requests).update(watched | changed)

    def _watched(
        self, call: Callable[..., Awaitable[Any]], *, of_stream: bool = False
    ) -> Callable[..., Awaitable[Any]]:
        def watched(*arguments: Any, **fields: Any) -> Awaitable[Any]:
            self.begun += 1
            if self.fail_with is not None:
                return failed(self.fail_with)
            if self.hold is None:
                return call(*arguments, **fields)
            answer = call(*arguments, **fields) if of_stream else None
            return held(self.hold, lambda: call(*arguments, **fields) if answer is None else answer)

        async def failed(error: Exception) -> Any:
            raise error

        async def held(released: asyncio.Event, answer: Callable[[], Awaitable[Any]]) -> Any:
            await released.wait()
            return await answer()

        return watched

    def _left_to_add(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return a call that answers None, so that `add` follows, while calls are held or fail."""

        def watched(*arguments: Any) -> Any:
            if self.fail_with is not None or self.hold is not None:
                return None
            answer = call(*arguments)
            self.begun += answer is not None
            return answer

        return watched

    async def _open_watched(self, *arguments: Any) -> Any:
        stream = await self._open_dispatch(*arguments)
        self.opened.append(stream)
        for name in ("acknowledge", "negative_acknowledge", "extend"):
            setattr(stream, name, self._watched(getattr(stream, name), of_stream=True))
        return stream

    def _time_of_former_owner(self, topic: str) -> float:
        return self._alone_in_s(topic) if self.former_owner_s is None else self.former_owner_s


async def until(condition: Callable[[], bool]) -> None:
    """Return when the condition holds. Fail after five minutes."""
    async with asyncio.timeout(300):
        while not condition():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.001)
