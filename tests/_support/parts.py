"""Which part of the seeds, bounds and planted bugs a run has. The commit chooses it: a few commits in a row meet all.

Owns: the parts, the choice, and dividing by it. Does not own: the option and what is left out (`tests.conftest`).
"""

from __future__ import annotations

import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

PARTS = 16
ALL = tuple(range(PARTS))

_chosen = ALL


def chosen() -> tuple[int, ...]:
    """Those of this process; all of them where nobody has chosen."""
    return _chosen


def choose(parts: Sequence[int]) -> None:
    global _chosen
    _chosen = tuple(parts)


def of_commit(repository: Path) -> int | None:
    """Each in its turn. Where the history is cut off, by the commit's name; None where there is no history."""
    try:
        if _git(repository, "rev-parse", "--is-shallow-repository") == "true":
            return int(_git(repository, "rev-parse", "HEAD"), 16) % PARTS
        return int(_git(repository, "rev-list", "--count", "HEAD")) % PARTS
    except (OSError, subprocess.CalledProcessError):
        return None


def has(name: str, place: int) -> bool:
    """Whether a case of a test is in this run. `place`: among the cases of the test of that `name`."""
    return (zlib.crc32(name.encode()) + place) % PARTS in _chosen


def first_and_rotating(cases: Sequence[tuple[Any, ...]]) -> list[Any]:
    """For `parametrize`: each run has the first of the cases, and of the others those of its part."""
    return [cases[0], *(pytest.param(*each, marks=pytest.mark.rotating) for each in cases[1:])]


def examples(of_all: int) -> int:
    """How many a test of Hypothesis draws in this process, where one that has all parts draws so many. Those of a part
    are its own: the parts together draw more.
    """
    return of_all if _chosen == ALL else -(-of_all // 4)


def seeds(count: int) -> list[range]:
    """So many seeds, as many of each part: those of this run, by part."""
    share = -(-count // PARTS)
    return [range(part * share, min(count, (part + 1) * share)) for part in _chosen]


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True, timeout=600
    ).stdout.strip()
