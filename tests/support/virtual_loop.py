"""An event loop whose time passes only when nothing can happen without it, threads included.

Owns: the loop's time, the jobs that run in threads for it, and gates at which such a job waits.
Does not own: the wall clock and what the jobs do.

While a job runs the loop waits for it in real time; a job that waits at a gate, or for virtual time, does not count.
When nothing is left but timers, the time jumps to the next one. A test that waits for what never comes fails: its
time-out is the next timer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import selectors
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# A job that takes longer than this, in real seconds, is stuck.
JOB_MAX_S = 20.0

_job: contextvars.ContextVar[object | None] = contextvars.ContextVar("job", default=None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual, seconds."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        self._jobs: set[object] = set()
        self._held: set[object] = set()
        self._job_ended = asyncio.Event()
        super().__init__(_Selector(self))
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now_s

    @property
    def busy(self) -> bool:
        """Whether a job runs that waits for nothing."""
        return bool(self._jobs - self._held)

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        answer: asyncio.Future[T] = self.create_future()
        if executor is None:
            raise ValueError("name the executor")
        job = object()
        context = contextvars.copy_context()
        context.run(_job.set, job)
        self._jobs.add(job)
        executor.submit(context.run, func, *args).add_done_callback(
            lambda done: self.call_soon_threadsafe(self._finished, job, done, answer)
        )
        return answer

    def _finished(self, job: object, done: concurrent.futures.Future[T], answer: asyncio.Future[T]) -> None:
        self._jobs.discard(job)
        self._job_ended.set()
        if answer.done():
            return
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        else:
            answer.set_exception(error)

    async def jobs_ended(self) -> None:
        """Returns when no job is left."""
        while self._jobs:
            self._job_ended.clear()
            await self._job_ended.wait()

    # ---- called in a job's thread

    def block(self, seconds: float) -> None:
        """What time.sleep is to a thread. In the loop's own thread the time simply passes."""
        if _job.get() is None:
            self.pass_time(seconds)
            return
        gate = Gate(self)
        self.call_soon_threadsafe(self.call_later, seconds, gate.set)
        gate.wait()

    def hold(self, job: object) -> None:
        self._held.add(job)
        self.call_soon_threadsafe(lambda: None)

    def let_go(self, job: object) -> None:
        self._held.discard(job)


class Gate(threading.Event):
    """A job that waits here does not keep the time from passing. `set` is called on the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._waiting: set[object] = set()
        self._lock = threading.Lock()

    def wait(self, timeout: float | None = None) -> bool:
        """`timeout` counts for nothing: the test's own does."""
        job = _job.get()
        with self._lock:
            if not self.is_set() and job is not None:
                self._waiting.add(job)
                self._loop.hold(job)
        return super().wait()

    def set(self) -> None:
        with self._lock:
            for job in self._waiting:
                self._loop.let_go(job)
            self._waiting.clear()
            super().set()


class InlineExecutor(concurrent.futures.Executor):
    """Does what is submitted at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as an executor does: it belongs to who asks for the result
            future.set_exception(error)
        return future


class _Selector(selectors.DefaultSelector):
    """Waits for threads in real time, and for timers not at all."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if events or (timeout is not None and timeout <= 0):
            return events
        if self._loop.busy:
            events = super().select(JOB_MAX_S)
            if not events:
                raise TimeoutError(f"a job has run for {JOB_MAX_S} s")
            return events
        if timeout is None:
            raise RuntimeError("nothing is left to happen")
        self._loop.pass_time(timeout)
        return events
