"""What a service reads from the daemon's histograms."""

from __future__ import annotations

import math

import pytest

from benchmarks import service

BEFORE = {0.001: 50.0, 0.005: 60.0, 0.05: 61.0, math.inf: 62.0}


@pytest.mark.parametrize(
    ("late", "longest_s"),
    [
        ({}, 0.001),
        ({0.001: 7}, 0.001),
        ({0.001: 7, 0.005: 1}, 0.005),
        ({0.001: 7, 0.05: 2}, 0.05),
        ({math.inf: 1}, math.inf),
    ],
)
def test_the_longest_pause_is_of_the_beats_between_two_readings(late: dict[float, int], longest_s: float) -> None:
    after = {bound: count + sum(n for at, n in late.items() if at <= bound) for bound, count in BEFORE.items()}
    assert service.longest_pause_s(BEFORE, after) == longest_s
