"""Mutants are what their kinds say, each day has its own, and each module of the core has suites."""

from __future__ import annotations

import ast
import datetime
from pathlib import Path

import pytest

from examples.processes import REPOSITORY
from tests.planted import mutants

MODULE = Path("daemon/core/small.py")
SOURCE = '''
def above(numbers: list[int], bound: int) -> list[int]:
    """Return the numbers that are above a bound."""
    found = []
    for number in numbers:
        if number > bound:
            found.append(number)
    return found
'''
DAY = datetime.date(2026, 11, 29)


@pytest.fixture(scope="module")
def every() -> list[mutants.Mutant]:
    return mutants.all_mutants(REPOSITORY)


def test_one_thing_of_a_function_is_changed() -> None:
    found = mutants.mutants_of(MODULE, SOURCE.encode())
    assert sorted((mutant.kind, mutant.text) for mutant in found) == [
        ("delete a statement", "pass"),
        ("empty a result", "return []"),
        ("move a bound", "(number >= bound)"),
        ("negate a condition", "(not (number > bound))"),
    ]
    changed = {}
    for mutant in found:
        names: dict[str, object] = {}
        exec(mutant.applied(SOURCE.encode()), names)
        changed[mutant.kind] = names["above"]([1, 2, 3], 2)  # type: ignore[operator]
    assert changed == {
        "delete a statement": [],
        "empty a result": [],
        "move a bound": [2, 3],
        "negate a condition": [1, 2],
    }


def test_a_mutant_is_told_by_its_line_and_both_texts() -> None:
    (moved,) = [each for each in mutants.mutants_of(MODULE, SOURCE.encode()) if each.kind == "move a bound"]
    assert moved.told(SOURCE.encode()) == (
        "daemon/core/small.py:6 above: move a bound: number > bound -> (number >= bound)"
    )


def test_every_mutant_of_the_core_is_a_program(every: list[mutants.Mutant]) -> None:
    for mutant in mutants.chosen(every, DAY, 200):
        ast.parse(mutant.applied((REPOSITORY / mutant.path).read_bytes()))


def test_a_day_has_its_own_mutants(every: list[mutants.Mutant]) -> None:
    today = mutants.chosen(every, DAY, mutants.MUTANTS)
    assert len(set(today)) == mutants.MUTANTS
    assert mutants.chosen(every, DAY, mutants.MUTANTS) == today
    assert mutants.chosen(every, DAY + datetime.timedelta(days=1), mutants.MUTANTS) != today


def test_each_module_of_the_core_has_suites_near_by(every: list[mutants.Mutant]) -> None:
    paths = {mutant.path for mutant in every}
    assert len(paths) > 40
    assert [path for path in paths if not mutants.suites_of(Path(path), REPOSITORY)[0]] == []
