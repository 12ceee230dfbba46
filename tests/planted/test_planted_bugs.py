"""The simulation can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import re

import pytest

from tests.planted import bug, table
from tests.simulation.run import run

SEEDS_MAX = 120
UNHARMED = 4


@pytest.mark.timeout(180)
@pytest.mark.parametrize("planted", table.BUGS, ids=lambda planted: planted.name)
def test_the_simulation_finds_a_planted_bug(planted: bug.Bug) -> None:
    assert bug.search(planted, SEEDS_MAX) is not None


@pytest.mark.parametrize("directed", dict.fromkeys(map(repr, (each.directed for each in table.BUGS))))
def test_a_directed_run_without_the_bug_breaks_no_rule(directed: str) -> None:
    planted = next(each for each in table.BUGS if repr(each.directed) == directed)
    for seed in range(UNHARMED):
        result = run(seed, directed=planted.directed)
        assert not result.breaches, (seed, result.breaches)


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
