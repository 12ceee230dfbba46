"""A planted bug, and how long the simulation takes to find it.

Owns: the shape of a bug and the search. Does not own: the bugs (`rules`, `invariants`, `state`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from tests.simulation.run import run

Plant = Callable[[pytest.MonkeyPatch], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Bug:
    """`plant` breaks one rule of the real code. `breaks`: which rule, invariant, or kind of state."""

    breaks: str
    plant: Plant
    first_seed: int = 0

    @property
    def name(self) -> str:
        return self.plant.__name__


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """`seeds`: how many were run until one broke a rule. `breach`: what it broke first."""

    seeds: int
    seed: int
    breach: str


def search(bug: Bug, seeds_max: int) -> Found | None:
    """Runs seeds with the bug planted until one breaks a rule; None when none does."""
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for count, seed in enumerate(range(bug.first_seed, bug.first_seed + seeds_max), 1):
            result = run(seed)
            if result.breaches:
                return Found(count, seed, result.breaches[0])
    return None
