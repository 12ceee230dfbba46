"""Two-phase deletion in every order of its steps, within bounds, as its model has it; each planted bug is found."""

from __future__ import annotations

import pytest

from tests.models import deletion_model, exploration
from tests.models.deletion_model import BUGS, State
from tests.models.exploration import System
from tests.planted import registry

STATES_MAX = 400_000
# What its owner has said before anything happens.
BEGINNINGS = {
    "in-use": State(),
    "nothing-was-said": State(stated=False, relied_on=False, always=False),
}


def system(beginning: State, *bugs: str) -> System:
    return System(
        beginning,
        lambda state: deletion_model.following(state, frozenset(bugs)),
        lambda state, _: deletion_model.check(state),
    )


@pytest.mark.rotating
@pytest.mark.parametrize("beginning", BEGINNINGS.values(), ids=BEGINNINGS)
def test_nothing_in_use_is_deleted_and_nothing_deletable_is_without_a_record(beginning: State) -> None:
    explored = exploration.explore(system(beginning), STATES_MAX)
    assert explored.violation is None
    assert explored.exhausted


@pytest.mark.rotating
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_of_the_protocol_is_found(bug: str) -> None:
    found = [exploration.explore(system(beginning, bug), STATES_MAX).violation for beginning in BEGINNINGS.values()]
    assert any(found), f"{BUGS[bug]}: no order of steps breaks anything"


registry.register("model of two-phase deletion", BUGS)
