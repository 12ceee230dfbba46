"""The distributions of this checkout, built, and installed where nothing knows of it.

Owns: what `make dist` makes, and environments with some of it. The libraries are those of the lock, from uv's cache;
what is not there is fetched.
Does not own: what is run there.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from scripts import build_spark_env
from tests._support.processes import run_child

REPOSITORY = Path(__file__).resolve().parents[2]
# The interpreter below the environment of the tests.
BARE_PYTHON = getattr(sys, "_base_executable", sys.executable)
# What the tests and `make` themselves run in.
OF_THE_CHECKOUT = {"MAKEFLAGS", "MFLAGS", "PYTHONPATH", "UV_PROJECT_ENVIRONMENT", "VIRTUAL_ENV"}


def surroundings(**more: str) -> dict[str, str]:
    """The variables of this process, without those of the checkout."""
    return {name: value for name, value in os.environ.items() if name not in OF_THE_CHECKOUT} | more


def with_uv(*command: str, **environment: str) -> None:
    """Runs what takes libraries from uv's cache, and once more where they have to be fetched."""
    given = surroundings(**environment)
    ended = run_child(command, env=given | {"UV_OFFLINE": "1"}, cwd=REPOSITORY)
    if ended.returncode != 0:
        ended = run_child(command, env=given, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def make_dist(folder: Path) -> None:
    """What `make dist` makes."""
    with_uv("make", "dist", f"DIST={folder}", f"UV={build_spark_env.uv()}")


@dataclasses.dataclass(frozen=True)
class Environment:
    """`folder`: where it is; `elsewhere`: the working directory of its programs, in which there is nothing of ours."""

    folder: Path
    elsewhere: Path

    def run(self, program: str, *arguments: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        """Runs one of its programs in an environment that says nothing."""
        command = [str(self.folder / "bin" / program), *arguments]
        given = {"PATH": os.defpath, "HOME": str(self.elsewhere), "COLUMNS": "120"}
        ended = run_child(command, env=given, cwd=self.elsewhere)
        assert ended.returncode == status, f"{command}: {ended.stdout}{ended.stderr}"
        return ended


def installed(dist: Path, folder: Path, python: str, name: str, *extras: str) -> Environment:
    """An environment of its own, for one distribution and what it requires."""
    uv = build_spark_env.uv()
    libraries = ("--locked", "--no-install-workspace", "--no-default-groups", "--package", name)
    more = [f"--extra={extra}" for extra in extras]
    with_uv(uv, "sync", *libraries, *more, "--python", python, UV_PROJECT_ENVIRONMENT=str(folder))
    inside = ("--python", str(folder / "bin" / "python"))
    with_uv(uv, "pip", "install", *inside, "--no-index", "--find-links", str(dist), f"{name}[{','.join(extras)}]")
    with_uv(uv, "pip", "check", *inside)
    elsewhere = folder.with_name(f"{folder.name}-elsewhere")
    elsewhere.mkdir()
    return Environment(folder, elsewhere)
