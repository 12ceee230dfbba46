"""The delay of a redelivery by how often its position was negatively acknowledged, with the arithmetic."""

from __future__ import annotations

import math

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from daemon.core.decisions import redelivery_policy
from daemon.core.index import delay_levels
from daemon.errors import InvalidArgument
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy

DAY_MS = 24 * 3_600_000
LEVELS = delay_levels.parse(delay_levels.DEFAULT_TABLE, clamp=True, delay_max_ms=DAY_MS)
U32_MAX = (1 << 32) - 1
delays_there_may_be = st.integers(0, DAY_MS)


def nothing_is_drawn(rows: int) -> npt.NDArray[np.float64]:
    raise AssertionError("a policy without jitter draws")


def delays(policy: RedeliveryPolicy, *counts: int, most: int = DAY_MS, draw: float | None = None) -> list[int]:
    found = redelivery_policy.delays_ms(
        policy,
        np.array(counts, np.uint32),
        LEVELS,
        delay_max_ms=most,
        draw=nothing_is_drawn if draw is None else lambda rows: np.full(rows, draw),
    )
    assert found.dtype == np.uint64
    return [int(delay) for delay in found]


def constant(delay_ms: int) -> RedeliveryPolicy:
    return RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=delay_ms)


def linear(initial_ms: int, step_ms: int, max_ms: int = 0) -> RedeliveryPolicy:
    return RedeliveryPolicy(kind=RedeliveryKind.LINEAR, initial_ms=initial_ms, step_ms=step_ms, max_ms=max_ms)


def exponential(initial_ms: int, multiplier: float = 0.0, max_ms: int = 0, jitter: float = 0.0) -> RedeliveryPolicy:
    return RedeliveryPolicy(
        kind=RedeliveryKind.EXPONENTIAL, initial_ms=initial_ms, multiplier=multiplier, max_ms=max_ms, jitter=jitter
    )


def listed(*delays_ms: int) -> RedeliveryPolicy:
    return RedeliveryPolicy(kind=RedeliveryKind.LIST, delays_ms=delays_ms)


LADDER = RedeliveryPolicy(kind=RedeliveryKind.LADDER)


@pytest.mark.parametrize(
    ("policy", "counts", "wanted"),
    [
        (constant(60_000), (1, 2, 1_000), [60_000, 60_000, 60_000]),
        (constant(0), (1, 2), [0, 0]),
        # 1,000 + (n - 1) * 500
        (linear(1_000, 500), (1, 2, 3, 11), [1_000, 1_500, 2_000, 6_000]),
        # 1,000 + 3 * 500 = 2,500 would be more than 2,400
        (linear(1_000, 500, 2_400), (1, 2, 3, 4, 5), [1_000, 1_500, 2_000, 2_400, 2_400]),
        # exactly at the most
        (linear(1_000, 500, 2_000), (2, 3, 4), [1_500, 2_000, 2_000]),
        (linear(0, 0, 10), (1, 9), [0, 0]),
        # 100 * 2^(n - 1); 0 is 2
        (exponential(100), (1, 2, 3, 4, 11), [100, 200, 400, 800, 102_400]),
        # 100 * 3^(n - 1) = 100, 300, 900, 2,700
        (exponential(100, 3, 2_000), (1, 2, 3, 4, 5), [100, 300, 900, 2_000, 2_000]),
        # 1,000 * 1.5^(n - 1) = 1,000, 1,500, 2,250, 3,375
        (exponential(1_000, 1.5), (1, 2, 3, 4), [1_000, 1_500, 2_250, 3_375]),
        # 1,000 * 1.1^3 = 1,331 although 1.1 is not a number of the machine
        (exponential(1_000, 1.1), (3, 4), [1_210, 1_331]),
        (exponential(7, 1), (1, 5, U32_MAX), [7, 7, 7]),
        # the last one from then on
        (listed(5, 10, 7), (1, 2, 3, 4, 99), [5, 10, 7, 7, 7]),
        # level 3 + n, n redeliveries before: 10 s, 30 s, 1 m, ..., 2 h
        (LADDER, (1, 2, 3, 15, 16, 17, 1_000), [10_000, 30_000, 60_000, 3_600_000, 7_200_000, 7_200_000, 7_200_000]),
    ],
)
def test_the_delay_of_a_count_is_as_computed_by_hand(
    policy: RedeliveryPolicy, counts: tuple[int, ...], wanted: list[int]
) -> None:
    assert delays(policy, *counts) == wanted


@pytest.mark.parametrize(
    ("draw", "wanted"),
    [
        # d - draw * 0.2 * d, of d = 1,000 and 2,000
        (0.0, [1_000, 2_000]),
        (0.5, [900, 1_800]),
        (0.999_999, [800, 1_600]),
    ],
)
def test_jitter_takes_off_the_part_that_was_drawn(draw: float, wanted: list[int]) -> None:
    assert delays(exponential(1_000, 2, jitter=0.2), 1, 2, draw=draw) == wanted


def test_jitter_is_taken_off_the_most_as_well_so_that_what_reached_it_spreads() -> None:
    assert delays(exponential(1_000, 2, 3_000, 0.5), 50, draw=0.4) == [2_400]


def test_with_a_jitter_of_all_the_delay_is_anything_down_to_nothing() -> None:
    assert delays(exponential(1_000, 2, jitter=1.0), 1, draw=0.999_999) == [0]


@pytest.mark.parametrize("count", [64, 65, 1_025, 10_000, U32_MAX])
@pytest.mark.parametrize(
    "policy",
    [exponential(1), exponential(1_000, 100), exponential(3, 1.000_001, 17), linear(1, (1 << 62) - 1), linear(5, 7)],
)
def test_a_delay_that_grows_ends_at_the_most_and_neither_wraps_nor_becomes_infinite(
    policy: RedeliveryPolicy, count: int
) -> None:
    """2^64 would be 0, 2^1,024 infinite, and 2^63 - 1 times 3 is small again."""
    with np.errstate(all="raise"):
        (delay_ms,) = delays(policy, count, most=1 << 40)
    reached = policy.max_ms or 1 << 40
    grown = {
        RedeliveryKind.EXPONENTIAL: lambda: min(
            float(reached), policy.initial_ms * math.exp(min(700, (count - 1) * math.log(policy.multiplier or 2)))
        ),
        RedeliveryKind.LINEAR: lambda: float(min(reached, policy.initial_ms + (count - 1) * policy.step_ms)),
    }[policy.kind]()
    assert delay_ms == pytest.approx(grown, abs=1)
    assert delay_ms <= reached


@hypothesis.given(
    st.integers(0, DAY_MS),
    st.integers(0, DAY_MS),
    st.integers(0, DAY_MS),
    st.integers(1, U32_MAX),
    st.integers(0, DAY_MS),
)
def test_a_linear_delay_is_what_whole_numbers_say(initial: int, step: int, most: int, count: int, limit: int) -> None:
    wanted = min(initial + (count - 1) * step, most or limit, limit)
    assert delays(linear(initial, step, most), count, most=limit) == [wanted]


@hypothesis.given(
    st.integers(1, DAY_MS),
    st.floats(1, 100),
    st.floats(0, 1),
    st.lists(st.integers(1, U32_MAX), min_size=2, max_size=2).map(sorted),
    st.floats(0, 1, exclude_max=True),
)
def test_an_exponential_delay_lies_between_its_bounds_and_never_falls(
    initial: int, multiplier: float, jitter: float, counts: list[int], draw: float
) -> None:
    without = delays(exponential(initial, multiplier), *counts)
    assert initial <= without[0] <= without[1] <= DAY_MS
    (drawn,) = delays(exponential(initial, multiplier, jitter=jitter), counts[0], draw=draw)
    assert (1 - jitter) * without[0] - 1 <= drawn <= without[0]


@pytest.mark.parametrize("policy", [constant(500), linear(500, 0), exponential(500), listed(500), LADDER])
def test_a_limit_that_became_lower_holds_for_policies_that_were_set_before(policy: RedeliveryPolicy) -> None:
    assert delays(policy, 1, most=100) == [100]


@pytest.mark.parametrize(
    ("policy", "max_count", "longest_ms"),
    [
        (constant(700), 5, 700),
        (constant(700), 0, 700),
        (constant(2 * DAY_MS), 5, DAY_MS),
        (listed(10, 900, 20), 1, 900),
        (linear(10, 5, 80), 1, 80),
        (linear(10, 5), 4, 25),
        (linear(10, 5), 0, 10),
        (exponential(10, 3.0, 400, 0.5), 1, 400),
        (exponential(10, 3.0, 0, 0.5), 3, 90),
        (LADDER, 1, 7_200_000),
    ],
)
def test_the_longest_delay_is_the_most_or_else_that_of_the_last_redelivery(
    policy: RedeliveryPolicy, max_count: int, longest_ms: int
) -> None:
    assert redelivery_policy.longest_ms(policy, max_count, LEVELS, delay_max_ms=DAY_MS) == longest_ms


def test_no_position_has_no_delay() -> None:
    for policy in (constant(5), linear(1, 1), exponential(1, 2), listed(1), LADDER):
        assert delays(policy) == []


@pytest.mark.parametrize(
    "policy",
    [
        constant(0),
        constant(DAY_MS),
        linear(0, 0),
        linear(5, DAY_MS, 5),
        exponential(1, 1, DAY_MS, 1.0),
        exponential(1, 100),
        listed(0),
        listed(*[DAY_MS] * 100),
        LADDER,
    ],
)
def test_a_policy_within_the_limits_is_allowed(policy: RedeliveryPolicy) -> None:
    redelivery_policy.check(policy, DAY_MS)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (constant(DAY_MS + 1), "redelivery.constant.delay_ms is 86400001; it may be at most 86400000"),
        (linear(DAY_MS + 1, 0), "redelivery.linear.initial_ms is 86400001; it may be at most 86400000"),
        (linear(6, 0, 5), "redelivery.linear.initial_ms is 6; it may be at most 5"),
        (linear(0, DAY_MS + 1), "redelivery.linear.step_ms is 86400001"),
        (linear(0, 0, DAY_MS + 1), "redelivery.linear.max_ms is 86400001"),
        (exponential(0), "redelivery.exponential.initial_ms is 0; it must be at least 1"),
        (exponential(6, 2, 5), "redelivery.exponential.initial_ms is 6; it may be at most 5"),
        (exponential(1, 2, DAY_MS + 1), "redelivery.exponential.max_ms is 86400001"),
        (exponential(1, 0.5), "redelivery.exponential.multiplier is 0.5; it must be 1 to 100, or 0 for 2"),
        (exponential(1, 100.5), "redelivery.exponential.multiplier is 100.5"),
        (exponential(1, math.nan), "redelivery.exponential.multiplier is nan"),
        (exponential(1, math.inf), "redelivery.exponential.multiplier is inf"),
        (exponential(1, -2), "redelivery.exponential.multiplier is -2"),
        (exponential(1, 2, jitter=1.5), "redelivery.exponential.jitter is 1.5; it must be 0 to 1"),
        (exponential(1, 2, jitter=-0.1), "redelivery.exponential.jitter is -0.1"),
        (exponential(1, 2, jitter=math.nan), "redelivery.exponential.jitter is nan"),
        (listed(), "redelivery.list.delay_ms has 0 delays; it must have 1 to 100"),
        (listed(*[1] * 101), "redelivery.list.delay_ms has 101 delays"),
        (listed(1, DAY_MS + 1), r"redelivery.list.delay_ms\[1\] is 86400001; it may be at most 86400000"),
    ],
)
def test_a_policy_beyond_a_limit_is_refused_with_field_value_and_limit(policy: RedeliveryPolicy, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        redelivery_policy.check(policy, DAY_MS)
