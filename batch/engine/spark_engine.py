"""Runs tasks as tasks of Spark: exactly one for each piece of work, in one action.

A run is `range(n)` in n partitions through `mapInArrow`: no shuffle, so adaptive execution has nothing to coalesce, and
row i is task i. The action runs in a thread and a job group of its own, while the caller's thread watches its progress.
One action only: a second one over the same rows would do the work again.

Work that raises is not a failed task of Spark, which would do it again: its exception travels to the driver in an
accumulator, which ends the run. Spark repeats only the tasks of workers that died.

`batch.cli.options` alone uses this module, because importing it loads Spark.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

import pyarrow
from pyspark import SparkContext, TaskContext
from pyspark.accumulators import Accumulator, AccumulatorParam
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from batch.engine import engine_port, spark_session

T = TypeVar("T")
R = TypeVar("R")

_log = logging.getLogger(__name__)

_RESULT_SCHEMA = "place long, result binary, attempt long"
_LOOK_SECONDS = 0.1
# A cancelled task ends when its worker is killed, 2 s after the request (spark.python.task.killTimeout).
_CANCEL_SECONDS = 30


@dataclass(frozen=True)
class _Failure:
    """The exception of a task: one line, and the whole trace of the worker."""

    place: int
    summary: str
    trace: str


class _Failures(AccumulatorParam[tuple[_Failure, ...]]):
    def zero(self, value: tuple[_Failure, ...]) -> tuple[_Failure, ...]:
        return ()

    def addInPlace(self, value1: tuple[_Failure, ...], value2: tuple[_Failure, ...]) -> tuple[_Failure, ...]:
        return value1 + value2


class SparkEngine:
    """The `TaskEngine` on Spark."""

    def __init__(self, job: str, *, master: str | None = None, parallelism: int | None = None) -> None:
        """Take the arguments of `spark_session.session`, which is opened on entering."""
        self._open = contextlib.ExitStack()
        self._job, self._master, self._parallelism = job, master, parallelism
        self._session: SparkSession | None = None
        self._cores = 1

    @classmethod
    def of_session(cls, session: SparkSession) -> Self:
        """Make an engine on a session that is already open, and stays so."""
        made = cls(session.sparkContext.appName or "tarry")
        made._session = session
        return made

    @property
    def name(self) -> str:
        return "spark"

    @property
    def session(self) -> SparkSession:
        if self._session is None:
            raise RuntimeError("the engine is used outside its `with` statement")
        return self._session

    @property
    def parallelism(self) -> int:
        """The cores that executors offer now, which grow while they start; the last known number if Java is lost."""
        with contextlib.suppress(*spark_session.LOST):  # the next run reports it
            self._cores = max(1, self.session.sparkContext.defaultParallelism)
        return self._cores

    def __enter__(self) -> Self:
        if self._session is None:
            opened = spark_session.session(self._job, master=self._master, parallelism=self._parallelism)
            self._session = self._open.enter_context(opened)
            self._open.callback(self._forget)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def run(self, work: Callable[[T], R], tasks: Sequence[T], done: Callable[[int], None]) -> Iterator[tuple[int, R]]:
        """Do the tasks as `TaskEngine.run` says. Results are known when the last task has ended."""
        if not tasks:
            return
        context = self.session.sparkContext
        failures = context.accumulator((), _Failures())
        performer = _Performer(work, tuple(pickle.dumps(task) for task in tasks), failures)
        with _loss_said():
            rows = self.session.range(0, len(tasks), 1, numPartitions=len(tasks)).mapInArrow(performer, _RESULT_SCHEMA)
        action = _Action(context, rows.toArrow)
        try:
            while not action.wait(_LOOK_SECONDS) and not failures.value:
                done(action.ended_tasks())
        finally:
            action.end()
        if failures.value:
            raise _work_failed(failures.value)
        results = action.result().to_pylist()
        if sorted(row["place"] for row in results) != list(range(len(tasks))):
            raise engine_port.WorkFailed(f"Spark returned {len(results)} results for {len(tasks)} tasks")
        done(len(tasks))
        for row in results:
            _log.debug("task %d took attempt %d of Spark", row["place"], row["attempt"])
            yield row["place"], pickle.loads(row["result"])

    def _forget(self) -> None:
        self._session = None


class _Performer(Generic[T, R]):
    """The work of a worker on its one row: the task, or a note of its failure."""

    def __init__(
        self, work: Callable[[T], R], payloads: tuple[bytes, ...], failures: Accumulator[tuple[_Failure, ...]]
    ) -> None:
        self._work, self._payloads, self._failures = work, payloads, failures

    def __call__(self, batches: Iterable[pyarrow.RecordBatch]) -> Iterator[pyarrow.RecordBatch]:
        for batch in batches:
            for place in batch.column("id").to_pylist():
                yield self._perform(place)

    def _perform(self, place: int) -> pyarrow.RecordBatch:
        places, results = [], []
        try:
            results.append(pickle.dumps(self._work(pickle.loads(self._payloads[place])), protocol=5))
            places.append(place)
        except Exception as failure:  # noqa: BLE001 - it is passed on, to the driver
            self._failures.add((_failure(place, failure),))
        context = TaskContext.get()
        attempt = -1 if context is None else context.taskAttemptId()
        return pyarrow.RecordBatch.from_arrays(
            [
                pyarrow.array(places, pyarrow.int64()),
                pyarrow.array(results, pyarrow.binary()),
                pyarrow.array([attempt] * len(places), pyarrow.int64()),
            ],
            names=["place", "result", "attempt"],
        )


class _Action:
    """One action of Spark in a thread, in a job group of its own."""

    def __init__(self, context: SparkContext, act: Callable[[], pyarrow.Table]) -> None:
        self._context, self._act = context, act
        self._group = f"tarry-{uuid.uuid4()}"
        self._ended = threading.Event()
        self._outcome: pyarrow.Table | BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self._group, daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Return whether the action has ended within that time (seconds)."""
        return self._ended.wait(seconds)

    def ended_tasks(self) -> int:
        """Return how many of its tasks have ended. Raises WorkFailed if Java is lost."""
        with _loss_said():
            tracker = self._context.statusTracker()
            jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(self._group)]
            stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numCompletedTasks for stage in stages if stage is not None)

    def end(self) -> None:
        """Cancel the action if it still runs, and wait until it has ended."""
        if not self._ended.is_set():
            with contextlib.suppress(*spark_session.LOST):  # then the action ends without help, and its result says so
                self._context.cancelJobGroup(self._group)
            if not self._ended.wait(_CANCEL_SECONDS):
                _log.warning("a cancelled Spark action still runs after %d s", _CANCEL_SECONDS)

    def result(self) -> pyarrow.Table:
        """Return the result of the action. Raises WorkFailed if it failed."""
        if isinstance(self._outcome, (PySparkException, *spark_session.LOST)):
            raise engine_port.WorkFailed(f"Spark gave up: {spark_session.first_line(self._outcome)}") from self._outcome
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        try:
            self._context.setJobGroup(self._group, self._context.appName or self._group, interruptOnCancel=True)
            self._outcome = self._act()
        except BaseException as failure:  # noqa: BLE001 - it is raised where the result is asked for
            self._outcome = failure
        finally:
            self._ended.set()


@contextlib.contextmanager
def _loss_said() -> Iterator[None]:
    """Raise WorkFailed if Java is lost in the block."""
    try:
        yield
    except spark_session.LOST as failure:
        raise engine_port.WorkFailed(f"Spark's Java process died: {spark_session.first_line(failure)}") from failure


def _failure(place: int, failure: Exception) -> _Failure:
    summary = "".join(traceback.format_exception_only(failure)).strip()
    return _Failure(place, summary, "".join(traceback.format_exception(failure)))


def _work_failed(failures: tuple[_Failure, ...]) -> engine_port.WorkFailed:
    first = failures[0]
    _log.error("task %d failed in a Spark worker:\n%s", first.place, first.trace)
    others = f" (and {len(failures) - 1} more tasks failed)" if len(failures) > 1 else ""
    return engine_port.WorkFailed(f"task {first.place}: {first.summary}{others}")
