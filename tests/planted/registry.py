"""Planted bugs whose own suite proves that they are found: each suite says which it has.

Owns: the list. Does not own: the bugs, and the proof that each is found (the suites), and those that the simulation
finds (`table`).
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A planted bug whose own suite proves that it is found."""

    suite: str
    name: str


_rows: dict[Row, None] = {}


def register(suite: str, planted: Iterable[Callable[..., object] | str]) -> None:
    """A suite has these planted bugs: what breaks the code, or its name. A suite may have several files."""
    for each in planted:
        _rows[Row(suite, each if isinstance(each, str) else each.__name__)] = None


def of_all_suites() -> tuple[Row, ...]:
    """What every suite of the repository has registered, by suite; those that are not loaded yet are loaded."""
    for path in sorted((REPOSITORY / "tests").rglob("test_*.py")):
        if "registry.register(" in path.read_text():
            importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
    return tuple(sorted(_rows, key=lambda row: row.suite))
