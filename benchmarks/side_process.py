"""Runs clients that must not wait for each other, each in a process of its own."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, SpawnContext
from types import TracebackType
from typing import Any, Self

from examples import processes

#: Spawned processes run on the cores that their starter is pinned to.
context: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")


class SideProcess:
    """A process; a context manager, inside which the work runs and has sent its first message, that it is ready.

    `work` is a function of a module, called with the arguments and a `multiprocessing.connection.Connection` on which
    it sends its results.
    """

    def __init__(self, work: Callable[..., None], *arguments: object) -> None:
        self._mine, theirs = context.Pipe()
        self._name = work.__name__
        self._process = context.Process(target=work, args=(*arguments, theirs), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        assert self._process.pid is not None
        processes.guard.watch(self._process.pid)
        self.result()
        return self

    @property
    def cpu_s(self) -> float:
        """The CPU time that it has used (seconds)."""
        assert self._process.pid is not None
        return processes.usage(self._process.pid).cpu_s

    @property
    def failed(self) -> bool:
        """True if it ended by an error or a signal."""
        return self._process.exitcode not in (None, 0)

    def send(self, message: object) -> None:
        self._mine.send(message)

    def result(self) -> Any:
        """Return the next message that it sends. Raises `ProcessFailed` if it has ended."""
        while not self._mine.poll(1.0):
            if not self._process.is_alive():
                raise self._ended()
        try:
            return self._mine.recv()
        except EOFError:
            raise self._ended() from None

    def _ended(self) -> processes.ProcessFailed:
        self._process.join()
        return processes.ProcessFailed(f"{self._name} ended with {self._process.exitcode}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.join(1.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        assert self._process.pid is not None
        processes.guard.forget(self._process.pid)
