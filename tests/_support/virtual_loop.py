"""An event loop whose time passes only when nothing can happen without it, and whose threads take turns with it.

Owns: the loop's time, the jobs that run in threads for it, gates at which such a job waits, and processes that can be
suspended.
Does not own: the wall clock and what the jobs do.

One thing runs at a time, the loop or one job: a job has the turn until it waits (at a gate, or for virtual time) or
ends. So the order of everything follows from the program alone, and the same program gives the same run. When nothing
is left but timers, the time jumps to the next one. A test that waits for what never comes fails: its time-out is the
next timer.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import heapq
import math
import selectors
import threading
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")

# A job that does not give back the turn in this time, in real seconds, is stuck.
TURN_MAX_S = 300.0

_process: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` is virtual, seconds."""

    def __init__(self) -> None:
        self._now_s = 1_000.0
        self._turn = _taken_lock()
        self._worker: _Worker | None = None
        self._idle: list[_Worker] = []
        self._jobs = 0
        self._job_ended = asyncio.Event()
        self._stuck: str | None = None
        super().__init__(_Timers(self))
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self._now_s

    def pass_time(self, seconds: float) -> None:
        self._now_s += seconds

    def close(self) -> None:
        for worker in self._idle:
            worker.end()
        self._idle.clear()
        super().close()

    # ---- jobs

    def run_in_executor(  # type: ignore[override]
        self, executor: concurrent.futures.Executor | None, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Runs the job in a thread of the loop's own, whichever executor is named: it takes turns."""
        worker = self._idle.pop() if self._idle else _Worker(self._turn)
        job = _Job(func, args, self.create_future(), contextvars.copy_context())
        worker.job = job
        self._jobs += 1
        self.call_soon(_Turn(self, worker))
        return job.answer

    def give_turn(self, worker: _Worker) -> None:
        self._worker = worker
        worker.turn.release()
        if not self._turn.acquire(timeout=TURN_MAX_S):
            self._stuck = f"a job has kept the turn for {TURN_MAX_S:.0f} s: {worker.job}"
            self.stop()
            return
        self._worker = None
        job = worker.job
        if job is not None and job.ended:
            worker.job = None
            self._idle.append(worker)
            self._jobs -= 1
            self._job_ended.set()
            job.tell()

    async def jobs_ended(self) -> None:
        """Returns when no job is left."""
        while self._jobs:
            self._job_ended.clear()
            await self._job_ended.wait()

    # ---- called in a job's thread

    def block(self, seconds: float) -> None:
        """What time.sleep is to a thread. In the loop's own thread the time simply passes."""
        if self._worker is None:
            self.pass_time(seconds)
        else:
            self.call_later(seconds, self.turn_of_this_job())
            self.give_back_turn()

    def turn_of_this_job(self) -> Callable[[], None]:
        """To be called on the loop when the job that runs now, and will have given back the turn, may go on."""
        worker = self._worker
        if worker is None or worker.job is None:
            raise RuntimeError("no job runs")
        return _Turn(self, worker)

    def give_back_turn(self) -> None:
        """The job that runs now waits until its turn comes again."""
        worker = self._worker
        if worker is None:
            raise RuntimeError("no job runs")
        self._turn.release()
        worker.turn.acquire()

    @property
    def in_job(self) -> bool:
        return self._worker is not None

    # ---- processes

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: contextvars.Context | None
    ) -> asyncio.Handle:
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = _TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._scheduled, handle)  # type: ignore[attr-defined]
        handle._scheduled = True  # type: ignore[attr-defined]
        return handle

    def _asyncgen_firstiter_hook(self, generator: AsyncGenerator[Any, Any]) -> None:
        # What a process has begun ends with it: the end of the loop closes nothing of it.
        if _process.get() is None:
            super()._asyncgen_firstiter_hook(generator)  # type: ignore[misc]

    def go_on_with(self, handle: asyncio.Handle) -> None:
        """Runs a callback that a suspended process held back."""
        self._ready.append(handle)  # type: ignore[attr-defined]


class Process:
    """What runs in one context, its jobs, tasks and timers included, as if it were a process of its own."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.context = contextvars.copy_context()
        self.context.run(_process.set, self)
        self._held_back: list[asyncio.Handle] | None = None
        self._ended = False
        self.resumed_s = -math.inf
        """When it was resumed last."""

    @staticmethod
    def of(context: contextvars.Context | None) -> Process | None:
        """Whose code runs in the context; None stands for the current one."""
        return _process.get() if context is None else context.get(_process)

    @property
    def suspended(self) -> bool:
        return self._held_back is not None

    def suspend(self) -> None:
        """SIGSTOP: it does nothing at all until `resume`, and then notices that time has passed."""
        if self._held_back is None:
            self._held_back = []

    def resume(self) -> None:
        """Send SIGCONT."""
        held_back, self._held_back = self._held_back, None
        self.resumed_s = self.loop.time()
        for handle in held_back or ():
            self.loop.go_on_with(handle)

    def end(self) -> None:
        """From now on it is not there: nothing of it runs but the jobs that have begun, so that they can end."""
        self._ended = True

    def runs(self, handle: asyncio.Handle) -> bool:
        """Whether a callback of the process runs now."""
        if self._held_back is not None:
            self._held_back.append(handle)
            return False
        return not self._ended or isinstance(handle._callback, _Turn)  # type: ignore[attr-defined]


class _Handle(asyncio.Handle):
    """A callback that waits while its process is suspended."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_process)  # type: ignore[attr-defined]
        if process is None or process.runs(self):
            super()._run()


class _TimerHandle(asyncio.TimerHandle):
    """A timer that waits while its process is suspended."""

    __slots__ = ()

    def _run(self) -> None:
        process = self._context.get(_process)  # type: ignore[attr-defined]
        if process is None or process.runs(self):
            super()._run()


class _Job:
    """Work for a thread, and who waits for it."""

    def __init__(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        answer: asyncio.Future[Any],
        context: contextvars.Context,
    ) -> None:
        self.answer = answer
        self.context = context
        self.ended = False
        self._func = func
        self._args = args
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result = self.context.run(self._func, *self._args)
        except BaseException as error:  # noqa: BLE001 - it belongs to who waits
            self._error = error
        self.ended = True

    def tell(self) -> None:
        if self.answer.done():
            return
        if self._error is None:
            self.answer.set_result(self._result)
        else:
            self.answer.set_exception(self._error)


class _Turn:
    """A job goes on, on the loop."""

    __slots__ = ("_loop", "_worker")

    def __init__(self, loop: VirtualLoop, worker: _Worker) -> None:
        self._loop = loop
        self._worker = worker

    def __call__(self) -> None:
        self._loop.give_turn(self._worker)


class _Worker:
    """A thread that runs one job after the other, each in its turns."""

    def __init__(self, turn_of_loop: threading.Lock) -> None:
        self.job: _Job | None = None
        self.turn = _taken_lock()
        self._turn_of_loop = turn_of_loop
        self._thread = threading.Thread(target=self._run, name="job", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            self.turn.acquire()
            if self.job is None:
                return
            self.job.run()
            self._turn_of_loop.release()

    def end(self) -> None:
        self.turn.release()
        self._thread.join(TURN_MAX_S)


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


class Gate(threading.Event):
    """A job that waits here gives back the turn. `set` is called on the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._waiting: list[tuple[Callable[[], None], contextvars.Context]] = []

    def wait(self, timeout: float | None = None) -> bool:
        """`timeout` counts for nothing: the test's own does."""
        if not self.is_set() and self._loop.in_job:
            self._waiting.append((self._loop.turn_of_this_job(), contextvars.copy_context()))
            self._loop.give_back_turn()
        return True

    def set(self) -> None:
        super().set()
        waiting, self._waiting = self._waiting, []
        for go_on, context in waiting:
            self._loop.call_soon(go_on, context=context)


class InlineExecutor(concurrent.futures.Executor):
    """Does what is submitted at once, in the thread that submits it."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as an executor does: it belongs to who asks for the result
            future.set_exception(error)
        return future


class _Timers(selectors.BaseSelector):
    """Instead of waiting for what the machine does, time jumps to the next timer. Nothing else is ever selected."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._registered: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = selectors.SelectorKey(fileobj, fileobj if isinstance(fileobj, int) else fileobj.fileno(), events, data)
        self._registered[fileobj] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._registered.pop(fileobj)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._registered

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if self._loop._stuck is not None:
            raise TimeoutError(self._loop._stuck)
        if timeout is None:
            raise RuntimeError("nothing is left to happen")
        if timeout > 0:
            self._loop.pass_time(timeout)
        return []
