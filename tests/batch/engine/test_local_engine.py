"""The engine of one machine."""

from __future__ import annotations

import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from batch.engine import engine_port
from batch.engine.local_engine import LocalEngine, cores


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEngine]:
    with LocalEngine(parallelism=2) as made:
        yield made


def no_matter(ended: int) -> None:
    """Whoever asks nothing about progress."""


def test_every_task_is_done_once_and_its_result_comes_with_its_place(local: LocalEngine) -> None:
    ended: list[int] = []
    results = dict(local.run(operator.neg, list(range(20)), ended.append))
    assert results == {place: -place for place in range(20)}
    assert (ended[0], ended[-1]) == (0, 20)
    assert ended == sorted(ended)


def test_tasks_run_in_as_many_processes_as_it_is_parallel(local: LocalEngine) -> None:
    pids = {pid for _, pid in local.run(process_of, [0.3] * 4, no_matter)}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_no_tasks_are_no_work(local: LocalEngine) -> None:
    assert list(local.run(operator.neg, [], no_matter)) == []


def test_a_task_that_raises_ends_the_run_and_says_what_it_raised(local: LocalEngine) -> None:
    with pytest.raises(engine_port.WorkFailed, match=r"task 1 failed: ZeroDivisionError"):
        list(local.run(operator.truth, [0, Unlucky()], no_matter))
    assert list(local.run(operator.neg, [1], no_matter)) == [(0, -1)], "it goes on with the next run"


def test_a_worker_that_dies_ends_the_run_and_its_exit_code_is_said(local: LocalEngine) -> None:
    with pytest.raises(engine_port.WorkFailed, match="died in task 0, exit code 9"):
        list(local.run(os._exit, [9], no_matter))
    assert list(local.run(operator.neg, [1], no_matter)) == [(0, -1)]


def test_what_done_raises_ends_the_tasks_that_run(local: LocalEngine) -> None:
    began = time.monotonic()

    def stop(ended: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(local.run(time.sleep, [3_600.0, 3_600.0], stop))
    assert time.monotonic() - began < 600


def test_leaving_the_results_early_ends_the_tasks_that_run(local: LocalEngine) -> None:
    began = time.monotonic()
    results = local.run(time.sleep, [0.0, 3_600.0], no_matter)
    next(results)
    results.close()  # type: ignore[attr-defined] # a generator
    assert time.monotonic() - began < 600


def test_workers_pay_no_heed_to_control_c_and_give_way_to_others() -> None:
    with LocalEngine(parallelism=1, nice=3) as made:
        ((_, found),) = made.run(signals_and_niceness, [signal.SIGINT], no_matter)
    assert found == (signal.SIG_IGN, os.nice(0) + 3)


def test_it_is_as_parallel_as_the_machine_unless_it_is_told() -> None:
    assert LocalEngine().parallelism == cores() >= 1
    assert LocalEngine(parallelism=7).parallelism == 7


def test_no_worker_outlives_a_driver_that_is_killed() -> None:
    command = [sys.executable, "-c", _KILLED_DRIVER]
    driver = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert driver.returncode == -signal.SIGKILL
    pids = [int(pid) for pid in driver.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 300
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


_KILLED_DRIVER = """
import os, signal
from batch.engine.local_engine import LocalEngine
from tests.batch.engine.test_local_engine import process_of, say_and_sleep
with LocalEngine(parallelism=2) as engine:
    pids = {pid for _, pid in engine.run(process_of, [0.3] * 4, lambda ended: None)}
    print(*pids, flush=True)
    looks = iter(range(5))
    def kill(ended):
        if next(looks, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
    list(engine.run(say_and_sleep, [3_600.0, 3_600.0], kill))
"""


def process_of(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def say_and_sleep(seconds: float) -> None:
    time.sleep(seconds)


def signals_and_niceness(number: int) -> tuple[object, int]:
    return signal.getsignal(number), os.nice(0)


class Unlucky:
    """It is neither true nor false."""

    def __bool__(self) -> bool:
        raise ZeroDivisionError("unlucky")


def is_running(pid: int) -> bool:
    """Zombies do not count: they wait for whoever adopted them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
