"""Settles and joins the futures of answers, and flushes what sends when it is left.

`tarry.on_event_loop` makes the futures.
"""

from __future__ import annotations

import abc
from asyncio import Future, InvalidStateError
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from tarry import errors, on_event_loop, streams

T = TypeVar("T")


def settle(settled: streams.Settled[Any, Any]) -> None:
    """Give a request's future its result or its failure."""
    if settled.error is None:
        _succeed(settled.answer, settled.result)
    else:
        _fail(settled.answer, settled.error)


def settle_each(promised: Sequence[Future[Any]], outcomes: Sequence[object]) -> None:
    """Give each future its result, or the TarryError that it fails with."""
    for future, outcome in zip(promised, outcomes, strict=True):
        if isinstance(outcome, errors.TarryError):
            _fail(future, outcome)
            continue
        try:
            future.set_result(outcome)
        except InvalidStateError:
            # The caller has cancelled the future; asking each one before would cost more.
            continue


def whole(parts: list[Future[T]], combine: Callable[[list[T]], T]) -> Future[T]:
    """Return one future for all parts, with their combined results or the first failure in their order."""
    if len(parts) == 1:
        return parts[0]
    joined: Future[T] = on_event_loop.promise()
    guard = on_event_loop.Condition()
    unsettled = len(parts)

    def settle_all() -> None:
        failures = [failure for part in parts if (failure := part.exception()) is not None]
        if failures:
            _fail(joined, failures[0])
        else:
            _succeed(joined, combine([part.result() for part in parts]))

    def settled(_: Any) -> None:
        nonlocal unsettled
        with guard:
            unsettled -= 1
            if unsettled:
                return
        settle_all()

    if not parts:
        settle_all()
    for part in parts:
        part.add_done_callback(settled)
    return joined


def _succeed(future: Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        # The caller may ignore the failure: it must not be logged as never retrieved.
        future.exception()


class FlushedWhenLeft(abc.ABC):
    """A context manager: leaving it waits for every answer, and raises as `flush` does."""

    _timeout_s: float

    @abc.abstractmethod
    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until everything is answered. Raises the first failure since the last flush, if any."""

    @abc.abstractmethod
    async def close(self) -> None:
        """End it at once. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # By then everything is answered or given up.
                await self.flush(self._timeout_s)
        finally:
            await self.close()
