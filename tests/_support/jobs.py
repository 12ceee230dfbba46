"""Jobs as processes for a test: the real command, observed from outside, ended with everything that it started.

Owns: how a job is started, its exit status, its summary, what its processes read, where one of them is stopped or
killed, and that none is left. Does not own: what the job is asked to do, and `observer` (which runs inside).

A job has a session of its own. All its processes are in it: the driver, the workers of the local engine, Java and the
Python workers of Spark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.processes import REPOSITORY, ChildProcess, guard
from tests._support import spark

OBSERVER = REPOSITORY / "tests" / "batch" / "compaction" / "observer"
SPARK_SUBMIT_ENTRY = REPOSITORY / "deploy" / "spark" / "tarry_spark.py"
PATIENCE_S = 600.0
_LOG_TAIL_CHARACTERS = 8_000
_POLL_S = 0.01


@dataclasses.dataclass(frozen=True)
class Action:
    """What happens where a process of the job first reaches a crash point: `kill`, `kill-driver` or `stop`."""

    point: str
    kind: str


@dataclasses.dataclass(frozen=True)
class SparkTask:
    """A task as Spark's own metrics tell of it. `sql`: by name, what the operators of its stage counted in it."""

    stage: int
    index: int
    attempt: int
    succeeded: bool
    executor: str
    launched_ms: int
    finished_ms: int
    run_ms: int
    sql: Mapping[str, int]


class Job(ChildProcess):
    """One run of a command. `command`: the whole of it; its standard output is the summary."""

    def __init__(
        self,
        name: str,
        directory: Path,
        command: Sequence[str],
        *,
        action: Action | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._directory = directory
        self._command = command
        self._output = directory / f"{name}.json"
        self._reads = directory / f"{name}.reads"
        self._marker = directory / f"{name}.reached"
        self._events = directory / f"{name}.events"
        observed = {
            **spark.environment(directory / f"{name}.conf", self._events),
            "PYTHONPATH": str(OBSERVER),
            # The `python3` of spark-submit finds Spark.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OBSERVED_READS": str(self._reads),
            **(environment or {}),
        }
        if action is not None:
            observed |= {
                "OBSERVED_POINT": action.point,
                "OBSERVED_ACTION": action.kind,
                "OBSERVED_MARKER": str(self._marker),
            }
        super().__init__(name, directory, observed)

    def start(self) -> None:
        with self.log.open("ab") as log, self._output.open("wb") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=REPOSITORY,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                start_new_session=True,
            )
        guard.watch(self._process.pid)

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        """Its exit status; below 0: the signal that ended it. Raises `ProcessFailed` when it does not end."""
        try:
            status: int = self._running().wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failed(f"did not end within {timeout_s:g} s") from None
        return status

    def expect(self, status: int, timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        """Waits for its end; its summary. Raises `ProcessFailed` when its exit status is another one."""
        found = self.wait(timeout_s)
        if found != status:
            raise self.failed(f"ended with status {found}, not {status}, and said {self._output.read_text()[:2000]!r}")
        return self.summary()

    def summary(self) -> dict[str, Any]:
        """The JSON that it wrote; empty when it wrote none."""
        text = self._output.read_text()
        return dict(json.loads(text)) if text.strip() else {}

    def output_text(self) -> str:
        return self._output.read_text()

    # ---- inside

    def wait_until_reached(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits until a process is at the crash point; its pid. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while not self._marker.exists():
            if not self.alive and not self._marker.exists():
                raise self.failed("ended before it reached its crash point")
            if time.monotonic() >= deadline_s:
                raise self.failed(f"did not reach its crash point within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return int(self._marker.read_text())

    def wait_until_stopped(self, timeout_s: float = PATIENCE_S) -> int:
        """Waits until a process has stopped at the crash point; its pid."""
        pid = self.wait_until_reached(timeout_s)
        deadline_s = time.monotonic() + timeout_s
        while _stat(pid)[0] != "T":
            if time.monotonic() >= deadline_s:
                raise self.failed(f"process {pid} did not stop within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return pid

    def resume(self) -> None:
        """Has the process that stopped at the crash point go on."""
        os.kill(self.wait_until_stopped(), signal.SIGCONT)

    def reads(self) -> Mapping[int, frozenset[str]]:
        """By pid, the names of the bucket objects (the last part) that the process opened to read."""
        found: dict[int, set[str]] = {}
        if self._reads.exists():
            for line in self._reads.read_text().splitlines():
                pid, path = line.split(" ", 1)
                found.setdefault(int(pid), set()).add(path.rpartition("/")[2])
        return {pid: frozenset(names) for pid, names in found.items()}

    def spark_tasks(self) -> list[SparkTask]:
        """Every attempt of a task that ended, by Spark's event log."""
        return spark_tasks(self._events)

    # ---- its processes

    def processes(self) -> dict[int, str]:
        """The command lines of its living processes, by pid."""
        found = {}
        for pid in (int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()):
            # It may end while it is looked at.
            with contextlib.suppress(OSError):
                if self._lives(pid):
                    found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def _lives(self, pid: int) -> bool:
        """Whether the process is one of the job, and has not ended."""
        try:
            state, session = _stat(pid)
        except OSError:
            return False
        return session == self.pid and state not in "ZX"

    def wait_until_nothing_is_left(self, timeout_s: float = PATIENCE_S) -> None:
        """Waits until each of its processes has ended. Raises `ProcessFailed`."""
        deadline_s = time.monotonic() + timeout_s
        while left := self.processes():
            # Looking at all processes of the machine takes longer than the pause between two looks.
            while any(map(self._lives, left)):
                if time.monotonic() >= deadline_s:
                    raise self.failed(f"left processes for {timeout_s:g} s: {left}")
                time.sleep(_POLL_S)

    def end(self) -> None:
        """Kills what is left of it; idempotent."""
        if self._process is None:
            return
        self.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Jobs:
    """Makes jobs on one root; `end` kills what is left of them, and nothing else."""

    def __init__(self, directory: Path, root: Path) -> None:
        self._directory = directory / "jobs"
        self._directory.mkdir()
        self._root = root
        self._made: list[Job] = []
        self._numbers = itertools.count(1)

    def compact(
        self,
        engine: str,
        *options: str,
        action: Action | None = None,
        master: str = "local[2]",
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        """`tarry-spark compact` with two tasks at once; started."""
        where = ("--master", master) if engine == "spark" else ("--parallelism", "2")
        command = (sys.executable, "-m", "batch.cli.entry", *self.arguments(*options, "--engine", engine, *where))
        return self.start(engine, command, action=action, environment=environment)

    def submit(
        self,
        *arguments: str,
        master: str = "local[2]",
        spark_options: Sequence[str] = (),
        action: Action | None = None,
    ) -> Job:
        """`spark-submit` of the entry file with these arguments; started."""
        program = (str(Path(sys.executable).parent / "spark-submit"), "--master", master, *spark_options)
        return self.start("submit", (*program, str(SPARK_SUBMIT_ENTRY), *arguments), action=action)

    def arguments(self, *options: str) -> tuple[str, ...]:
        """`compact` of the root, with a summary in JSON."""
        return ("compact", "--store", str(self._root), "--json", *options)

    def start(
        self,
        kind: str,
        command: Sequence[str],
        *,
        action: Action | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Job:
        name = f"{next(self._numbers)}-{kind}"
        job = Job(name, self._directory, command, action=action, environment=environment)
        self._made.append(job)
        job.start()
        return job

    def end(self) -> None:
        """pytest shows what is printed here with a test that failed."""
        for job in self._made:
            job.end()
            sys.stdout.write(f"---- the end of the log of {job.name}\n{job.log_text()[-_LOG_TAIL_CHARACTERS:]}\n")


def pause(seconds: float) -> None:
    """Between two looks at something that tells nobody when it changes."""
    threading.Event().wait(seconds)


def spark_tasks(events: Path) -> list[SparkTask]:
    """Every attempt of a task that ended, by the event logs in that folder."""
    lines = [json.loads(line) for path in events.iterdir() for line in path.read_text().splitlines()]
    return [_spark_task(event) for event in lines if event["Event"] == "SparkListenerTaskEnd"]


def most_at_once(tasks: Sequence[SparkTask]) -> int:
    """How many of them ran at one moment."""
    moments = sorted([(task.launched_ms, 1) for task in tasks] + [(task.finished_ms, -1) for task in tasks])
    return max(itertools.accumulate(step for _, step in moments), default=0)


def names_of(sources: Sequence[str]) -> Iterator[str]:
    """The last part of each key."""
    return (source.rpartition("/")[2] for source in sources)


def _stat(pid: int) -> tuple[str, int]:
    """State and session. Raises `OSError` when it is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[3])


def _spark_task(event: Mapping[str, Any]) -> SparkTask:
    info = event["Task Info"]
    sql = {
        each["Name"]: int(each["Update"])
        for each in info["Accumulables"]
        if each.get("Metadata") == "sql" and str(each.get("Update", "")).lstrip("-").isdigit()
    }
    return SparkTask(
        stage=event["Stage ID"],
        index=info["Index"],
        attempt=info["Attempt"],
        succeeded=event["Task End Reason"]["Reason"] == "Success",
        executor=info["Executor ID"],
        launched_ms=info["Launch Time"],
        finished_ms=info["Finish Time"],
        run_ms=(event.get("Task Metrics") or {}).get("Executor Run Time", 0),
        sql=sql,
    )
