"""Which part a run has is a matter of its files: neither of the commits before it, nor of the day or the machine. And
the parts of `make test-long` are all of its tests, each once.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from examples import processes
from tests._support import long_parts, parts
from tests._support.processes import run_child

CASES = """
import pytest

@pytest.mark.rotating
@pytest.mark.parametrize("number", range(64))
def test_rotating(number): ...

def test_always(): ...
"""
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["cases"]
markers = ["rotating", "unit"]
"""


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, timeout=600)


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--allow-empty", "--message", "m")


def write(folder: Path, content: str) -> None:
    (folder / "cases").mkdir(parents=True, exist_ok=True)
    (folder / "cases" / "test_small.py").write_text(content)
    (folder / "pyproject.toml").write_text(SETTINGS)
    # A run leaves compiled modules behind.
    (folder / ".gitignore").write_text("__pycache__/\n.pytest_cache/\n")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    write(folder, CASES)
    git(folder, "init")
    commit(folder)
    return folder


def selected(folder: Path) -> list[str]:
    """The tests that a run of every test has."""
    run = run_child([sys.executable, "-m", "pytest", "-p", "tests.conftest", "--collect-only", "--quiet"], cwd=folder)
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if "::" in line]


def test_two_runs_on_one_tree_have_the_same_tests(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(processes.REPOSITORY))
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    first = selected(repository)
    assert len(first) == 64 // parts.PARTS + 1
    commit(repository)
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert selected(repository) == first


def test_commits_that_change_no_file_change_no_part(repository: Path, tmp_path: Path) -> None:
    part = parts.of_tree(repository)
    for _ in range(3):
        commit(repository)
        assert parts.of_tree(repository) == part
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--depth", "1", repository.as_uri(), str(shallow))
    assert parts.of_tree(shallow) == part


def test_a_tree_has_its_part_again_after_others(repository: Path) -> None:
    part, met = parts.of_tree(repository), set()
    for number in range(20):
        write(repository, f"{CASES}# {number}")
        commit(repository)
        met.add(parts.of_tree(repository))
    assert len(met) > 1
    assert met <= {*parts.ALL}
    write(repository, CASES)
    commit(repository)
    assert parts.of_tree(repository) == part


def test_without_git_the_files_choose_and_not_what_a_run_leaves(tmp_path: Path) -> None:
    folder = tmp_path / "archive"
    write(folder, CASES)
    part = parts.of_tree(folder)
    for made in (".hypothesis/example", "cases/__pycache__/test_small.pyc", "dist/tarry.whl"):
        (folder / made).parent.mkdir(parents=True)
        (folder / made).write_text("made")
    assert parts.of_tree(folder) == part
    met = set()
    for number in range(20):
        write(folder, f"{CASES}# {number}")
        met.add(parts.of_tree(folder))
    assert len(met) > 1
    assert met <= {*parts.ALL}


def test_an_archive_in_a_repository_of_somebody_else_has_its_own_part(repository: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    shutil.copytree(repository, archive, ignore=shutil.ignore_patterns(".git"))
    part = parts.of_tree(archive)
    inside = shutil.copytree(archive, repository / "downloads" / "archive")
    for number in range(20):
        (repository / "other").write_text(str(number))
        git(repository, "add", "other")
        git(repository, "commit", "--message", "m")
        assert parts.of_tree(inside) == part


def collected(*arguments: str) -> list[str]:
    """The tests that a run of this repository has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", "--part=all", "-m", "long or not long"]
    run = run_child([*command, *arguments], cwd=processes.REPOSITORY)
    assert run.returncode == 0, run.stdout + run.stderr
    return sorted(line for line in run.stdout.splitlines() if "::" in line)


@pytest.mark.long
def test_each_test_is_in_one_of_the_long_parts() -> None:
    of_parts = [collected(f"--long-part={name}") for name in long_parts.NAMES]
    assert all(of_parts)
    assert sorted(itertools.chain.from_iterable(of_parts)) == collected()


def test_each_long_part_has_files() -> None:
    tests = processes.REPOSITORY / "tests"
    files = [str(path.relative_to(tests)) for path in tests.rglob("test_*.py")]
    assert {long_parts.part_of(file) for file in files} == set(long_parts.NAMES)
    unknown = [place for places in long_parts.PLACES.values() for place in places if not any(tests.glob(f"{place}*"))]
    assert unknown == [], "a place that is moved takes its tests to another part"


def test_make_knows_each_long_part() -> None:
    makefile = (processes.REPOSITORY / "Makefile").read_text(encoding="utf-8")
    (line,) = re.findall(r"^LONG_PARTS := (.*)$", makefile, re.MULTILINE)
    assert sorted(line.split()) == sorted((*long_parts.NAMES, "mutants"))
