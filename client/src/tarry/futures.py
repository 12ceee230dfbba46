"""Promises of answers that come on another thread.

Owns: making, settling and joining futures. A future of this library cannot be cancelled: its request may be durable.
Does not own: what the answers mean.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def promise() -> Future[T]:
    """A future whose `cancel` has no effect."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


def join(parts: Sequence[Future[T]], combine: Callable[[list[T]], R]) -> Future[R]:
    """A future of all parts, settled when all are: their results combined, or the first failure in their order."""
    whole: Future[R] = promise()
    lock = threading.Lock()
    unsettled = len(parts)

    def settled(_: Future[T]) -> None:
        nonlocal unsettled
        with lock:
            unsettled -= 1
            if unsettled:
                return
        failures = [failure for part in parts if (failure := part.exception()) is not None]
        if failures:
            whole.set_exception(failures[0])
        else:
            whole.set_result(combine([part.result() for part in parts]))

    for part in parts:
        part.add_done_callback(settled)
    return whole
