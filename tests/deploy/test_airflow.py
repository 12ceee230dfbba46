"""The example DAG runs what there is, and tries again, skips or fails by the exit status. Airflow itself is not
installed: its names are stood in for.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch.cli import entry
from batch.compaction import tally

FILE = Path(__file__).resolve().parents[2] / "deploy" / "airflow" / "tarry_compaction_dag.py"


class Failed(Exception):
    """Stands in for AirflowFailException: not tried again."""


class TriedAgain(Exception):
    """Stands in for AirflowException."""


class Skipped(Exception):
    """Stands in for AirflowSkipException."""


class Task:
    """What `@task` makes of a function."""

    def __init__(self, work: Callable[[], None], options: dict[str, Any], order: list[Task]) -> None:
        self.work, self.options, self.order = work, options, order

    def __call__(self) -> Task:
        return self

    def __rshift__(self, other: Task) -> Task:
        self.order += [each for each in (self, other) if each not in self.order]
        return other


class Airflow:
    """What the DAG sees of Airflow, and what it told it."""

    def __init__(self) -> None:
        self.dag: dict[str, Any] = {}
        self.order: list[Task] = []
        self.tried = types.SimpleNamespace(try_number=1, max_tries=2)

    def modules(self) -> dict[str, types.ModuleType]:
        exceptions, sdk = types.ModuleType("airflow.exceptions"), types.ModuleType("airflow.sdk")
        vars(exceptions).update(AirflowException=TriedAgain, AirflowFailException=Failed, AirflowSkipException=Skipped)
        vars(sdk).update(dag=self._dag, task=self._task, get_current_context=lambda: {"ti": self.tried})
        return {"airflow": types.ModuleType("airflow"), "airflow.exceptions": exceptions, "airflow.sdk": sdk}

    def _dag(self, **options: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
        self.dag = options
        return lambda function: function

    def _task(self, work: Callable[[], None] | None = None, **options: Any) -> Any:
        if work is not None:
            return Task(work, options, self.order)
        return lambda function: Task(function, options, self.order)


@pytest.fixture
def airflow() -> Airflow:
    return Airflow()


@pytest.fixture
def module(airflow: Airflow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """The DAG, imported; its command is a script that ends with the status in the file `status`."""
    command = tmp_path / "tarry-spark"
    command.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/said\nexit $(cat {tmp_path}/status)\n')
    command.chmod(0o755)
    monkeypatch.setenv("TARRY_SPARK", str(command))
    monkeypatch.setenv("TARRY_SPARK_REPORTS", str(tmp_path))
    for name, made in airflow.modules().items():
        monkeypatch.setitem(sys.modules, name, made)
    spec = importlib.util.spec_from_file_location("tarry_compaction_dag", FILE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_it_imports_nothing_but_airflow_and_the_standard_library() -> None:
    tree = ast.parse(FILE.read_text(encoding="utf-8"))
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert {name.partition(".")[0] for name in imported} - set(sys.stdlib_module_names) == {"airflow"}


@pytest.mark.usefixtures("module")
def test_it_runs_every_night_one_at_a_time(airflow: Airflow) -> None:
    assert (airflow.dag["catchup"], airflow.dag["max_active_runs"]) == (False, 1)
    assert len(airflow.dag["schedule"].split()) == 5
    assert [task.work.__name__ for task in airflow.order] == ["compact", "forecast", "audit"]
    compact, *others = airflow.order
    assert compact.options["retries"] > 0
    # A merge that failed or was skipped keeps nobody from looking.
    assert [task.options["trigger_rule"] for task in others] == ["all_done", "all_done"]


@pytest.mark.usefixtures("module")
def test_the_options_are_those_of_the_commands(airflow: Airflow, tmp_path: Path) -> None:
    (tmp_path / "status").write_text("0")
    for task in airflow.order:
        task.work()
    config = tmp_path / "tarryd.toml"
    config.write_text("")
    lines = (tmp_path / "said").read_text().replace("/etc/tarry/tarryd.toml", str(config)).splitlines()
    names = []
    for line in lines:
        name, *arguments = line.split()
        command = entry.cli.get_command(entry.cli.make_context("tarry-spark", [name]), name)
        assert command is not None
        given = command.make_context(name, arguments).params
        assert (given["engine"], given["as_json"], given["config"]) == ("local", True, config)
        names.append(name)
    assert names == ["compact", "forecast", "audit"]


@pytest.mark.usefixtures("module")
@pytest.mark.parametrize(
    ("status", "tries", "outcome"),
    [
        (tally.EXIT_CONFLICTS, 1, TriedAgain),
        (tally.EXIT_CONFLICTS, 2, TriedAgain),
        (tally.EXIT_CONFLICTS, 3, Skipped),
        (tally.EXIT_ERROR, 1, Failed),
        (2, 1, Failed),
        (143, 1, Failed),
    ],
)
def test_conflicts_are_tried_again_and_then_left_and_errors_fail(
    airflow: Airflow, tmp_path: Path, status: int, tries: int, outcome: type[Exception]
) -> None:
    (tmp_path / "status").write_text(str(status))
    airflow.tried.try_number = tries
    with pytest.raises(outcome, match=f"tarry-spark compact ended with exit status {status}"):
        airflow.order[0].work()


def test_a_task_that_is_ended_ends_its_command(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    command = tmp_path / "patient"
    ending = f"trap 'echo ended >{tmp_path}/ended; exit 143' TERM"
    command.write_text(f"#!/bin/sh\n{ending}\necho >{ready}\nwhile :; do sleep 0.05; done\n")
    command.chmod(0o755)

    class Process(subprocess.Popen[bytes]):
        ends = True

        def wait(self, timeout: float | None = None) -> int:
            if self.ends:
                self.ends = False
                ready.read_text()
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(module, "COMMAND", str(command))
    monkeypatch.setattr(module.subprocess, "Popen", Process)
    with pytest.raises(KeyboardInterrupt):
        module.run("compact")
    assert (tmp_path / "ended").read_text() == "ended\n"
