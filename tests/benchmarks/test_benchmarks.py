"""Each measurement in small: it runs, accounts for every row, and says what it compares with. No figure is judged.

`make test` has one of them, to show that they run at all, and `make test-long` the others.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import benchmarks.__main__
from benchmarks import machine, side_process, steady_load, workbench
from benchmarks.__main__ import MEASUREMENTS
from examples import processes
from tests._support.processes import child, run_child
from tests.brokers import redis_server

SMOKE = "add"
WITH_REDIS = ["add", "drain", "memory", "relays", "restart", "stored"]
needs_redis = pytest.mark.skipif(redis_server.find() is None, reason=redis_server.MISSING)


@pytest.fixture(autouse=True, scope="module")
def side_processes_are_loaded_once() -> Iterator[None]:
    """And not by each of them, which would take longer than what it does. It is not on the cores that its measurement
    names.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.steady_load"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(side_process, "context", context)
        yield


def measure(folder: Path, *arguments: str) -> dict[str, Any]:
    """The JSON of a quick run of one round that accounted for every row. It is made in this process: one of its own
    would load everything anew, and so would its daemons.
    """
    written = folder / "figures.json"
    options = ["--quick", "--rounds", "1", "--json", str(written), "--directory", str(folder)]
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        assert benchmarks.__main__.main([*options, *arguments]) == 0
    finally:
        signal.signal(signal.SIGTERM, terminate)
    document: dict[str, Any] = json.loads(written.read_text())
    return document


def names(document: dict[str, Any]) -> list[str]:
    return [figure["name"] for result in document["results"] for figure in result["figures"]]


@pytest.mark.parametrize(
    "measurement",
    [pytest.param(name, marks=[] if name == SMOKE else [pytest.mark.long]) for name in MEASUREMENTS],
)
def test_a_measurement_accounts_for_every_row(measurement: str, tmp_path: Path) -> None:
    document = measure(tmp_path, measurement)
    (result,) = document["results"]
    assert result["measurement"] == measurement
    assert result["problems"] == []
    assert any("redis" not in name for name in names(document))
    if measurement in WITH_REDIS and redis_server.find() is not None:
        assert document["machine"]["redis_server"].startswith("v=")
        assert any(name.startswith("tarry") for name in names(document))
        assert any("redis" in name for name in names(document))
        assert workbench.MISSING not in result["notes"]


def test_make_test_has_a_measurement() -> None:
    assert SMOKE in MEASUREMENTS


@needs_redis
def test_the_measurements_above_had_their_rival() -> None:
    assert redis_server.find() is not None


@pytest.mark.long
def test_a_measurement_without_redis_says_so(tmp_path: Path) -> None:
    document = measure(tmp_path, "add", "--without-redis")
    assert document["results"][0]["notes"] == [workbench.LEFT_OUT]
    assert names(document)
    assert not any("redis" in name for name in names(document))


def test_a_turn_whose_time_is_too_short_has_more(tmp_path: Path) -> None:
    said: list[str] = []
    bench = workbench.Workbench(
        directory=tmp_path,
        cores=machine.Cores.of_this_machine(),
        redis=None,
        rounds=1,
        quick=True,
        batch_rows=1,
        in_flight=1,
        seed=1,
        why_without_redis=workbench.MISSING,
        settings={},
        say=said.append,
    )

    def turn(factor: int) -> int:
        with bench.daemon():
            if factor == 1:
                raise workbench.TimeTooShort("nothing came")
        return factor

    assert bench.with_time("lateness", turn) == 4
    assert said == ["lateness: nothing came, with 1 times the time of the plan"]


def test_a_span_without_a_row_that_was_added_in_time_is_too_short() -> None:
    came = steady_load.Came(np.array([10, 20]), np.array([1, 3]), None)
    assert came.lateness_of((0, 11), (20, 21)).tolist() == [1, 3]
    with pytest.raises(workbench.TimeTooShort, match=r"was due within \(\(11, 20\),\)"):
        came.lateness_of((11, 20))


def test_what_is_not_a_measurement_is_refused_by_name() -> None:
    run = run_child([sys.executable, "-m", "benchmarks", "speed"], cwd=processes.REPOSITORY)
    assert run.returncode == 2
    assert "speed: no such measurement" in run.stderr


@pytest.mark.long
def test_a_run_that_is_told_to_end_leaves_no_server_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "lateness", "--quick", "--directory", str(tmp_path)]
    with child(command, cwd=processes.REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        ready = wait_for(lambda: next(tmp_path.rglob("tarryd.ready"), None))
        pid = json.loads(ready.read_text())["pid"]
        run.terminate()
        run.communicate(timeout=600)
        assert run.returncode == 128 + signal.SIGTERM
    assert not Path(f"/proc/{pid}").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_run_that_is_killed_leaves_no_server_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "lateness", "--quick", "--directory", str(tmp_path)]
    with child(command, cwd=processes.REPOSITORY, stdout=subprocess.DEVNULL) as run:
        ready = wait_for(lambda: next(tmp_path.rglob("tarryd.ready"), None))
        pid = json.loads(ready.read_text())["pid"]
        assert Path(f"/proc/{pid}").exists()
        run.kill()
    wait_for(lambda: None if Path(f"/proc/{pid}").exists() else tmp_path)


def wait_for(look: Callable[[], Path | None], timeout_s: float = 600.0) -> Path:
    deadline_s = time.monotonic() + timeout_s
    while (found := look()) is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found
