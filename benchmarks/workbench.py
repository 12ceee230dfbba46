"""Provides what every measurement needs: sizes, servers on their core, and rounds in which contenders take turns.

Servers are fresh, on directories of their own, pinned to the server's core and gone afterwards. It also keeps the
samples and the problems of one measurement.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import tarry
from benchmarks import machine, report
from examples import processes
from tests.brokers import redis_server

T = TypeVar("T")
# One turn of a contender: its figures by name
Turn = Callable[[], Mapping[str, float]]

MISSING = f"{redis_server.MISSING} These figures are Tarry's alone."
LEFT_OUT = "Redis was left out: these figures are Tarry's alone."
_START_S = 300.0
# Multiples of its plan's time that a turn is given, one after the other
TIME_FACTORS = (1, 4, 16)


class TimeTooShort(Exception):
    """The error if the machine was too slow for the times of a plan."""


@dataclasses.dataclass(frozen=True)
class Workbench:
    """The environment of a measurement.

    `directory` is on the disk that is measured. `redis` is the program, or None if there is none.
    """

    directory: Path
    cores: machine.Cores
    redis: Path | None
    rounds: int
    quick: bool
    batch_rows: int
    in_flight: int
    seed: int
    why_without_redis: str
    settings: Mapping[str, object]
    say: Callable[[str], None]

    def size(self, full: int, quick: int) -> int:
        """Return the number for a full run, or for a quick one, which shows only that it works."""
        return quick if self.quick else full

    @property
    def parameters(self) -> dict[str, report.Value]:
        """The parameters that all results state."""
        set_here: dict[str, report.Value] = {name: str(value) for name, value in self.settings.items()}
        return {"rounds": self.rounds, "batch_rows": self.batch_rows, "in_flight": self.in_flight} | set_here

    @property
    def rest_s(self) -> float:
        """The time until seals, checkpoints and returned memory are complete (seconds)."""
        return 0.5 if self.quick else 5.0

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes for results that include Redis."""
        return () if self.redis is not None else (self.why_without_redis,)

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Make a directory that is removed after the block."""
        path = Path(tempfile.mkdtemp(dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextlib.contextmanager
    def daemon(
        self,
        root: Path | None = None,
        settings: Mapping[str, object] | None = None,
        *,
        configuration: str = "",
        tls: tarry.Tls | None = None,
    ) -> Iterator[processes.DaemonProcess]:
        """Start a serving daemon, on a root of its own unless one is given.

        A failure in the block is reported with its log. `tls` is what its clients need.
        """
        with self.folder() as folder:
            store = processes.local_store(root or folder / "root")
            given = {**store, **(settings or {}), **self.settings}
            with processes.DaemonProcess("tarryd", folder, given, configuration=configuration, tls=tls) as daemon:
                try:
                    self.start(daemon)
                    yield daemon
                except (processes.ProcessFailed, TimeTooShort):
                    raise
                except Exception as error:
                    raise daemon.failed(f"was being measured ({type(error).__name__}: {error})") from error

    def start(self, daemon: processes.DaemonProcess) -> None:
        """Start a daemon; return when it serves. The client's threads are not started on the server's core."""
        with machine.on_core(self.cores.server):
            daemon.start(_START_S)
        daemon.wait_for_health(serving=True, timeout_s=_START_S)

    def with_time(self, name: str, turn: Callable[[int], T]) -> T:
        """Return the result of a turn that has time enough.

        `turn` is called with the multiple of its plan's time, which grows if it raises TimeTooShort. Raises
        TimeoutError if no multiple was enough.
        """
        for factor in TIME_FACTORS:
            try:
                return turn(factor)
            except TimeTooShort as error:
                self.say(f"{name}: {error}, with {factor} times the time of the plan")
        raise TimeoutError(f"{name}: {TIME_FACTORS[-1]} times the time of the plan was too short")

    @contextlib.contextmanager
    def rival(self, aof: redis_server.Aof) -> Iterator[redis_server.RedisServer]:
        """Start an empty redis-server that answers. `redis` must not be None."""
        if self.redis is None:
            raise processes.ProcessFailed(self.why_without_redis)
        with self.folder() as folder, redis_server.RedisServer(self.redis, folder, aof) as server:
            self.start_redis(server)
            server.wait_until_loaded()
            yield server

    def start_redis(self, server: redis_server.RedisServer) -> None:
        with machine.on_core(self.cores.server):
            server.start()


class Rounds:
    """The samples of one measurement. Each round every contender has one turn, in the same order."""

    def __init__(self, bench: Workbench, measurement: str) -> None:
        self._bench = bench
        self._measurement = measurement
        self._samples: dict[str, list[float]] = {}
        self.problems: list[str] = []

    def run(self, contenders: Mapping[str, Turn]) -> None:
        for number in range(1, self._bench.rounds + 1):
            for name, turn in contenders.items():
                self.turn(f"round {number} of {self._bench.rounds}, {name}", turn)

    def turn(self, name: str, turn: Turn) -> None:
        """Take one turn outside the rounds."""
        figures = turn()
        for figure, value in figures.items():
            self._samples.setdefault(figure, []).append(value)
        said = ", ".join(f"{figure} {value:,.6g}" for figure, value in figures.items())
        self._bench.say(f"{self._measurement}: {name}: {said}")

    @property
    def names(self) -> list[str]:
        """The names of the samples."""
        return list(self._samples)

    def check(self, who: str, problem: str | None) -> None:
        """Note a problem of the account; None means that there is none."""
        if problem is not None:
            self.problems.append(f"{who}: {problem}")
            self._bench.say(f"{self._measurement}: NOT ACCOUNTED FOR: {who}: {problem}")

    def check_count(self, who: str, rows: int, wanted: int) -> None:
        self.check(who, None if rows == wanted else f"{rows:,} rows of {wanted:,}")

    def figure(self, name: str, unit: str, goal: report.Goal | None = None) -> report.Figure:
        """Return the samples of that name as a figure."""
        return report.Figure(name, unit, tuple(self._samples[name]), goal)

    def figures(self, unit: str, goals: Mapping[str, report.Goal] | None = None) -> list[report.Figure]:
        """Return all samples as figures, if they have one unit."""
        return [self.figure(name, unit, (goals or {}).get(name)) for name in self._samples]
