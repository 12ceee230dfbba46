"""Runs tasks in worker processes of this machine.

No worker outlives the process that started it, however that dies. Workers come from a fork server: a process without
threads that has imported the modules for the tasks, so that a worker starts at once and has no lock of another thread.
Each has a pipe of its own and does one task after the other. It ignores SIGINT: the job decides what Control-C means,
and only the job ends a worker that has begun to write.

`batch.cli.options` alone uses this module, which stands apart as one of two implementations of `engine_port`.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from batch.engine import engine_port

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

_LOOK_S: Final = 0.1
"""Interval of calls of `done` while no task ends (seconds)"""

_END_S: Final = 5.0
"""Time that an idle worker has to end (seconds)"""

_CONTEXT: Final = multiprocessing.get_context("forkserver")


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class _Raised:
    """The exception of a task."""

    trace: str


@dataclass(eq=False)
class _Worker:
    """A worker process, our end of its pipe, and the task that it is doing."""

    process: ForkServerProcess
    pipe: connection.Connection[Any, Any]
    place: int | None = None

    def end(self, *, at_once: bool) -> None:
        if at_once:
            self.process.kill()
        self.pipe.close()
        self.process.join(_END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.process.close()


class LocalEngine:
    """The `TaskEngine` on processes of this machine.

    One run at a time. `parallelism` None means as many as there are cores. `preload` are modules that the tasks need.
    `nice` is the niceness of the workers.
    """

    def __init__(self, *, parallelism: int | None = None, preload: Sequence[str] = (), nice: int = 0) -> None:
        self._parallelism = parallelism or cores()
        self._preload = list(preload)
        self._nice = nice
        self._workers: list[_Worker] = []

    @property
    def name(self) -> str:
        return "local"

    @property
    def parallelism(self) -> int:
        return self._parallelism

    def __enter__(self) -> Self:
        """Start the fork server, which imports while the caller does something else."""
        _CONTEXT.set_forkserver_preload(self._preload)
        forkserver.ensure_running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_workers(at_once=failure is not None)

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        """Do the tasks as `TaskEngine.run` says, yielding results as tasks end.

        `done` is called ten times a second, too.
        """
        waiting = deque(enumerate(tasks))
        ended = 0
        try:
            self._start(min(self._parallelism, len(tasks)))
            for worker in self._workers:
                self._give(worker, work, waiting)
            while ended < len(tasks):
                done(ended)
                for worker in self._ready():
                    place, result = self._answer(worker)
                    self._give(worker, work, waiting)
                    ended += 1
                    yield place, result
            done(ended)
        except BaseException:
            # The workers may be doing tasks that are no longer wanted.
            self._end_workers(at_once=True)
            raise

    def _start(self, wanted: int) -> None:
        for _ in range(wanted - len(self._workers)):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(theirs, self._nice), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours))

    def _give(self, worker: _Worker, work: Callable[[T], R], waiting: deque[tuple[int, T]]) -> None:
        """Give a worker the next task, if one waits."""
        worker.place = None
        if waiting:
            worker.place, task = waiting.popleft()
            try:
                worker.pipe.send((work, task))
            except OSError as error:
                raise _lost(worker) from error

    def _ready(self) -> list[_Worker]:
        """Return the workers that have answered, or have died."""
        busy = {worker.pipe: worker for worker in self._workers if worker.place is not None}
        return [busy[pipe] for pipe in connection.wait(list(busy), _LOOK_S) if isinstance(pipe, connection.Connection)]

    def _answer(self, worker: _Worker) -> tuple[int, Any]:
        """Return the answer of a worker. Raises WorkFailed if the task raised, or the worker died."""
        try:
            result = worker.pipe.recv()
        except (EOFError, OSError) as error:
            raise _lost(worker) from error
        if isinstance(result, _Raised):
            _log.error("task %s failed\n%s", worker.place, result.trace)
            raise engine_port.WorkFailed(f"task {worker.place} failed: {result.trace.strip().splitlines()[-1]}")
        if worker.place is None:
            raise engine_port.WorkFailed("a worker without a task answered")
        return worker.place, result

    def _end_workers(self, *, at_once: bool) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.end(at_once=at_once)


def _lost(worker: _Worker) -> engine_port.WorkFailed:
    worker.process.join(_END_S)
    return engine_port.WorkFailed(
        f"a worker process died in task {worker.place}, exit code {worker.process.exitcode} "
        "(-9: killed, perhaps for lack of memory; a lower --parallelism needs less)"
    )


def _serve(pipe: connection.Connection[Any, Any], nice: int) -> None:
    """Do the tasks that come through the pipe until its other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _die_with_parent()
    if nice:
        os.nice(nice)
    while True:
        try:
            work, task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result = work(task)
        except Exception:  # noqa: BLE001 - it is passed on, to the process that gave the task
            result = _Raised(traceback.format_exc())
        pipe.send(result)


def _die_with_parent() -> None:
    """End this process when its parent has died, even in the middle of a task.

    A task that ended after that would have written an object that no process knows of.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
