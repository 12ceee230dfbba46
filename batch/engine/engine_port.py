"""The port for parallel work: what a job asks of the engine that runs its tasks.

Owns: what an engine promises. Does not own: how it keeps the promise (`local_engine`: processes of this machine;
`spark_engine`: tasks of Spark), nor what a task does.

An engine does not promise that a task runs once: after the loss of a worker it may run again, and with speculative
execution twice at once. So what a task writes has a name that no other attempt has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class EngineUnusable(Exception):
    """The engine does not start, or is not to be used in this way; the message says why and what to do."""


class WorkFailed(Exception):
    """A task failed with what it does not expect, or a worker was lost for good; the message says with what."""


class TaskEngine(Protocol):
    """Runs tasks in parallel; a context manager, and usable only inside."""

    @property
    def name(self) -> str:
        """`local` or `spark`."""

    @property
    def parallelism(self) -> int:
        """Tasks at once."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        """Does `work` for each task, and yields (place in `tasks`, result) as they become known, in any order.

        What `work` expects to fail with it returns as a value. Any other exception ends the run. Leaving the iterator
        early (`close`) ends the tasks that run.

        :param work: a function of a module; tasks and results are values that can be pickled.
        :param done: told how many tasks have ended so far.
        :raises WorkFailed: a task raised, or could not be run.
        """
