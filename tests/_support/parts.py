"""Which part of the seeds, bounds and planted bugs a run has. The content of the tree chooses it, and nothing else.

Owns: the parts, the choice, and dividing by it. Does not own: the option and what is left out (`tests.conftest`).
"""

from __future__ import annotations

import hashlib
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

PARTS = 16
ALL = tuple(range(PARTS))
# Folders that hold no source.
MADE = ("__pycache__", "build", "dist")

_chosen = ALL


def chosen() -> tuple[int, ...]:
    """Those of this process; all of them where nobody has chosen."""
    return _chosen


def choose(parts: Sequence[int]) -> None:
    global _chosen
    _chosen = tuple(parts)


def of_tree(repository: Path) -> int:
    """Return the part that the checked-out tree has: the same files have the same part, whatever was committed before.

    Git's name of the tree chooses it, or, where there is no git, a hash over the files.
    """
    try:
        # A source archive may lie in another repository, whose tree says nothing of it.
        name = _git(repository, "rev-parse", "HEAD:./")
    except (OSError, subprocess.CalledProcessError):
        name = _hash_of_files(repository)
    return int(name, 16) % PARTS


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


def _hash_of_files(folder: Path) -> str:
    """Hash names and contents, but not what tools and test runs leave behind."""
    found = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.name in MADE or path.name.startswith("."):
            continue
        content = _hash_of_files(path).encode() if path.is_dir() else path.read_bytes()
        found.update(b"%s\0%d\0%s" % (path.name.encode(), len(content), content))
    return found.hexdigest()


def _git(repository: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(repository), *arguments], capture_output=True, text=True, check=True, timeout=600
    ).stdout.strip()
