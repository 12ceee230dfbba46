"""Promises of answers: of threads (`concurrent.futures`) and of an event loop (`asyncio`), settled by the same code.

Owns: making, settling and joining them. A thread's promise cannot be cancelled, and cancelling an event loop's only
means that nobody waits any more: the request is on its way in either case.
Does not own: what the answers mean.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

from tarry import streams

T = TypeVar("T")
R = TypeVar("R")

AnyFuture: TypeAlias = concurrent.futures.Future[T] | asyncio.Future[T]


def promise() -> concurrent.futures.Future[Any]:
    """A thread's future whose `cancel` has no effect."""
    future: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()
    return future


def succeed(future: AnyFuture[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def fail(future: AnyFuture[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        # Whether the caller looks at it is the caller's choice: asyncio is not to complain.
        future.exception()


def settle(settled: streams.Settled[Any, Any]) -> None:
    """Gives a request's future its result or its failure."""
    if settled.error is None:
        succeed(settled.answer, settled.result)
    else:
        fail(settled.answer, settled.error)


def join(parts: Sequence[AnyFuture[T]], combine: Callable[[list[T]], R], whole: AnyFuture[R]) -> None:
    """Settles `whole` when all parts are: with their results combined, or the first failure in their order."""
    lock = threading.Lock()
    unsettled = len(parts)

    def settle() -> None:
        failures = [failure for part in parts if (failure := part.exception()) is not None]
        if failures:
            fail(whole, failures[0])
        else:
            succeed(whole, combine([part.result() for part in parts]))

    def settled(_: Any) -> None:
        nonlocal unsettled
        with lock:
            unsettled -= 1
            if unsettled:
                return
        settle()

    if not parts:
        settle()
    for part in parts:
        part.add_done_callback(settled)
