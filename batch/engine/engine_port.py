"""Defines the port for parallel work: what a job asks of the engine that runs its tasks.

An engine does not promise that a task runs once: after the loss of a worker it may run again, and with speculative
execution twice at once. Therefore a task writes under a name that no other attempt has. `local_engine` and
`spark_engine` implement the port.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class EngineUnusable(Exception):
    """The error of an engine that cannot start, or cannot be used in this way; it says why and what to do."""


class WorkFailed(Exception):
    """The error of a task that failed unexpectedly, or of a worker that was lost for good; it says how."""


class TaskEngine(Protocol):
    """An engine that runs tasks in parallel; a context manager, usable only inside its block."""

    @property
    def name(self) -> str:
        """The engine's name: `local` or `spark`."""

    @property
    def parallelism(self) -> int:
        """The number of tasks that run at once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        """Do `work` for each task; yield (place in `tasks`, result) as they become known, in any order.

        `work` is a function of a module; tasks and results are values that can be pickled. `work` returns its expected
        failures as values; any other exception ends the run. `done` is called with the number of tasks that have ended.
        Leaving the iterator early (`close`) ends the tasks that run. Raises WorkFailed if a task raised, or could not
        be run.
        """
