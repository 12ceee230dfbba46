"""Runs `tarry-spark` as a process of its own, on both cores, and measures its time and its memory.

`compaction` alone uses this module, which knows nothing of the jobs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from benchmarks import machine
from examples import processes

DRIVER, WORKER, JVM = "driver", "worker", "JVM"
_LOOK_S = 0.1
_END_S = 900.0


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a job.

    `document` is its JSON. `seconds` count from its start to its end. `resident_bytes_max` is that of the largest
    process of each kind.
    """

    document: dict[str, Any]
    seconds: float
    resident_bytes_max: dict[str, int]


def run(
    cores: machine.Cores, directory: Path, command: str, root: Path, options: Sequence[str], *, niceness: int = 0
) -> Ended:
    """Run a job to its end. Raises `ProcessFailed` if it fails."""
    log = directory / f"{command}.log"
    environment = {
        # An installed program runs from bytecode.
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    job_command = (
        sys.executable,
        "-m",
        "batch.cli.entry",
        command,
        "--store",
        str(root),
        "--json",
        "--quiet",
        *options,
    )
    asked = ("nice", "-n", str(niceness), *job_command)
    began_s = time.perf_counter()
    with log.open("wb") as errors, machine.on_cores(cores):
        job = subprocess.Popen(
            asked,
            cwd=processes.REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            # A session makes all of its processes known.
            start_new_session=True,
        )
    processes.guard.watch(job.pid)
    try:
        with _Memory(job.pid) as memory:
            said, _ = job.communicate(timeout=_END_S)
            seconds = time.perf_counter() - began_s
    finally:
        job.kill()
        job.wait()
        processes.guard.forget(job.pid)
    if job.returncode:
        what = f"{' '.join(asked)} ended with status {job.returncode}"
        raise processes.ProcessFailed(f"{what}:\n{said.decode()[-2_000:]}\n{log.read_text(errors='replace')[-4_000:]}")
    return Ended(json.loads(said), seconds, memory.resident_bytes_max)


class _Memory:
    """The memory of the processes of a session, whose leader is the driver, polled in a thread."""

    def __init__(self, session: int) -> None:
        self.resident_bytes_max: dict[str, int] = {}
        self._session = session
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK_S):
            for process in Path("/proc").glob("[0-9]*"):
                try:
                    name, _, rest = (process / "stat").read_text().partition("(")[2].rpartition(")")
                    if int(rest.split()[3]) == self._session:
                        self._note(int(process.name), name)
                except (OSError, KeyError):
                    continue  # it has ended

    def _note(self, pid: int, name: str) -> None:
        kind = DRIVER if pid == self._session else JVM if name == "java" else WORKER
        # The most that it ever had
        most = processes.usage(pid).resident_bytes_max
        self.resident_bytes_max[kind] = max(most, self.resident_bytes_max.get(kind, 0))
