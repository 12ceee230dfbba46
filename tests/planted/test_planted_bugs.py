"""The simulation can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import re

import pytest

from tests.planted import bug, table
from tests.simulation.run import run

SEEDS_MAX = 120


@pytest.mark.parametrize("planted", table.BUGS, ids=lambda planted: planted.name)
def test_the_simulation_finds_a_planted_bug(planted: bug.Bug) -> None:
    assert bug.search(planted, SEEDS_MAX) is not None


@pytest.mark.parametrize("seed", sorted({each.seed for each in table.BUGS}))
def test_the_runs_that_meet_a_planted_bug_break_no_rule_without_it(seed: int) -> None:
    for course in {repr(each.course): each.course for each in table.BUGS if each.seed == seed}.values():
        result = run(seed, directed=course)
        assert not result.breaches, (course, result.breaches)


def test_each_rule_and_each_invariant_has_a_planted_bug_or_says_who_else_finds_it() -> None:
    known = {each.breaks for each in table.BUGS} | table.BY_OTHERS.keys()
    assert {f"R{number}" for number in range(1, 10)} | {f"I{number}" for number in range(1, 6)} <= known
    assert {"bucket objects", "progress", "checkpoint", "journal", "topic manifest"} <= known
    assert {"nacks", "redelivery counts", "ack time-outs", "dead letters", "delay levels"} <= known
    assert {"pending deletes", "in-use records"} <= known
    assert {"tombstones", "kept", "merged buckets", "cancel", "reschedule", "own indexes"} <= known


def test_no_two_planted_bugs_have_one_name() -> None:
    names = [each.name for each in table.BUGS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    assert all(row.name for row in table.of_other_suites())
