"""A planted bug, and how long the simulation takes to find it.

Owns: the shape of a bug and the search. Does not own: the bugs (`rules`, `invariants`, `state`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest

from tests.simulation.run import AS_IT_COMES, Directed, run

Plant = Callable[[pytest.MonkeyPatch], None]

# What Python says of a call that does not fit what takes the place of the real code.
DOES_NOT_FIT = re.compile(r"TypeError\(.*(takes|missing|unexpected)")


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """`plant` breaks one rule of the real code. `breaks`: which rule, invariant, or kind of state.

    `directed`: what its runs have, where runs as they come meet the bug too seldom. `seed`: of the run that is tried
    first, since it meets the bug; any other may, when what happens in it has changed.
    """

    breaks: str
    plant: Plant
    directed: Directed = AS_IT_COMES
    seed: int = 0

    @property
    def name(self) -> str:
        return self.plant.__name__

    @property
    def course(self) -> Directed:
        """What its runs have. Ledgers have owners where the bug is about them."""
        return dataclasses.replace(self.directed, owners=bool(self.directed.owners))


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """`seed`: of the run that broke a rule, `seeds`: how many were run until then, `steps`: how many the last took.
    `breach`: the rule.
    """

    seed: int
    seeds: int
    steps: int
    breach: str


def search(bug: Bug, seeds_max: int) -> Found | None:
    """Runs seeds with the bug planted, its own first, until one breaks a rule; None when none does.

    Raises AssertionError where what was planted does not fit the code: that is found, and the bug is not.
    """
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for tried, seed in enumerate(dict.fromkeys((bug.seed, *range(seeds_max))), 1):
            result = run(seed, directed=bug.course)
            if result.breaches:
                assert not DOES_NOT_FIT.search(result.breaches[0]), result.breaches[0]
                return Found(seed, tried, result.steps, result.breaches[0])
    return None
