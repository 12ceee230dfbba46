"""The simulation can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import re

import pytest

from storage_backends.formats import slot_format
from tests.planted import bug, registry, table
from tests.simulation import fired
from tests.simulation.run import AS_IT_COMES, run
from tests.simulation.test_simulation import SEEDS

SEEDS_MAX = 120
# Each run that meets a bug once, unless `tests.simulation` has it anyway, by the name of the first bug that it meets.
CONTROLS = {
    (each.seed, repr(each.course)): each
    for each in reversed(table.BUGS)
    if each.course != AS_IT_COMES or each.seed not in range(SEEDS)
}


@pytest.mark.rotating
@pytest.mark.parametrize("planted", table.BUGS, ids=lambda planted: planted.name)
def test_the_simulation_finds_a_planted_bug(planted: bug.Bug) -> None:
    assert bug.search(planted, SEEDS_MAX) is not None


@pytest.mark.rotating
@pytest.mark.parametrize("planted", CONTROLS.values(), ids=lambda planted: planted.name)
def test_the_run_that_meets_a_planted_bug_breaks_no_rule_without_it(planted: bug.Bug) -> None:
    result = run(planted.seed, directed=planted.course)
    assert not result.breaches
    assert not result.unmet
    wanted = [fired.trouble(trouble.kind, trouble.place) for trouble in planted.course.troubles]
    assert not fired.missing(result.fired, wanted), "what was to befall it never did"


def test_a_bug_that_does_not_fit_the_code_is_not_found() -> None:
    def misfit(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(slot_format, "encode_slot", lambda header: b"")

    with pytest.raises(AssertionError, match="TypeError"):
        bug.search(bug.Bug("journal", misfit), SEEDS_MAX)


def test_each_rule_and_each_invariant_has_a_planted_bug_or_says_who_else_finds_it() -> None:
    known = {each.breaks for each in table.BUGS} | table.BY_OTHERS.keys()
    assert {f"L{number}" for number in range(1, 13)} | {f"I{number}" for number in range(1, 6)} <= known
    assert {"R1", "R2", "R3", "R4", "R9"} <= known, "those that hold for every object; logs have rules of their own"
    assert {"bucket objects", "progress", "properties", "checkpoint", "journal", "topic manifest"} <= known
    assert {"nacks", "hand-outs", "redelivery counts", "ack time-outs", "dead letters", "delay levels"} <= known
    assert {"pending deletes", "in-use records", "key order", "refusals", "ids"} <= known
    assert {"tombstones", "kept", "merged buckets", "cancel", "reschedule", "own indexes"} <= known


def test_no_two_planted_bugs_have_one_name() -> None:
    names = [each.name for each in table.BUGS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


def test_what_the_simulation_does_not_find_is_registered_by_the_suite_that_does() -> None:
    known = {f"{row.suite}: {row.name}" for row in registry.of_all_suites()}
    assert [each for each in table.BY_OTHERS.values() if each.partition(",")[0] not in known] == []
