"""Describes the machine, and pins the server to one core and the client to another."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import importlib.metadata
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report

PACKAGES = ("tarryd", "tarry", "grpcio", "numpy", "protobuf", "pyroaring", "redis", "hiredis")
_SYNCHRONISATIONS = 50


@dataclasses.dataclass(frozen=True)
class Cores:
    """The core of the server and that of the client, each None if it may run anywhere."""

    server: int | None
    client: int | None
    beside: frozenset[int] = frozenset()
    """All cores but that of the server"""

    @staticmethod
    def of_this_machine() -> Cores:
        """Choose two different cores, or none if there are not two."""
        usable = sorted(os.sched_getaffinity(0))
        return Cores(usable[0], usable[1], frozenset(usable[1:])) if len(usable) > 1 else Cores(None, None)


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin processes and threads that this thread starts in the block to the core; None changes nothing."""
    with _on(None if core is None else {core}):
        yield


@contextlib.contextmanager
def on_cores(cores: Cores) -> Iterator[None]:
    """Run processes and threads that this thread starts in the block on the server's and the client's core."""
    both = {core for core in (cores.server, cores.client) if core is not None}
    with _on(both or None):
        yield


@contextlib.contextmanager
def beside_server(cores: Cores) -> Iterator[None]:
    """Run processes and threads that this thread starts in the block on any core but the server's."""
    with _on(set(cores.beside) or None):
        yield


@contextlib.contextmanager
def _on(cores: set[int] | None) -> Iterator[None]:
    if cores is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def describe(directory: Path, cores: Cores, redis_server: Path | None) -> dict[str, report.Value]:
    """Describe the machine, the file system that is measured, and the versions."""
    pinned = cores.server is not None
    return {
        "taken_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": os.cpu_count() or 0,
        "pinned": f"server to core {cores.server}, client to core {cores.client}" if pinned else "no: one core only",
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "file_system": _file_system(directory),
        "fsync_ms_median": _synchronise_ms(directory),
        "python": platform.python_version(),
        "redis_server": "missing" if redis_server is None else _redis_version(redis_server),
        **{name: _version(name) for name in PACKAGES},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    """Return type and device of the mount that holds the directory."""
    where = directory.resolve()
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    device, _, kind = max((each[:3] for each in mounts if where.is_relative_to(each[1])), key=lambda each: len(each[1]))
    return f"{kind} on {device}"


def _synchronise_ms(directory: Path) -> float:
    """Return the median time of a 4 KiB write with fsync (ms)."""
    taken = []
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file:
        for _ in range(_SYNCHRONISATIONS):
            began_s = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            taken.append(time.perf_counter() - began_s)
    return round(1000 * statistics.median(taken), 3)


def _redis_version(redis_server: Path) -> str:
    said = subprocess.run([redis_server, "--version"], capture_output=True, text=True, check=True).stdout
    return " ".join(word for word in said.split() if word.startswith(("v=", "malloc=")))


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "missing"
