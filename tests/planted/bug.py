"""A planted bug, and how long the simulation takes to find it.

Owns: the shape of a bug and the search. Does not own: the bugs (`rules`, `invariants`, `state`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.simulation.run import AS_IT_COMES, Directed, run

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """`plant` breaks one rule of the real code. `breaks`: which rule, invariant, or kind of state.

    `directed`: what its runs have, where runs as they come meet the bug too seldom.
    """

    breaks: str
    plant: Plant
    directed: Directed = AS_IT_COMES

    @property
    def name(self) -> str:
        return self.plant.__name__


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """`seeds`: how many were run until one broke a rule, `steps`: how many the last took. `breach`: the rule."""

    seeds: int
    steps: int
    breach: str


def search(bug: Bug, seeds_max: int) -> Found | None:
    """Runs seeds with the bug planted until one breaks a rule; None when none does. Ledgers have owners where the bug
    is about them.
    """
    directed = dataclasses.replace(bug.directed, owners=bool(bug.directed.owners))
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for seed in range(seeds_max):
            result = run(seed, directed=directed)
            if result.breaches:
                return Found(seed + 1, result.steps, result.breaches[0])
    return None
