"""Computes the delay of a negatively acknowledged position that names none, and checks policies.

The delay follows from the number of negative acknowledgements, which `subscription_state` counts; randomness is passed
in. Every delay is at most the limit, whatever the count: growing values are capped before they are multiplied, so they
neither wrap around nor become infinite.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from daemon.core.index.delay_levels import DelayLevels
from daemon.errors import InvalidArgument
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy
from storage_backends.formats.row_columns import U32, U64

# Returns n numbers, distributed evenly over [0, 1).
Draw = Callable[[int], npt.NDArray[np.float64]]

MULTIPLIER_DEFAULT = 2.0
MULTIPLIER_MAX = 100.0
DELAYS_MAX = 100


def delays_ms(policy: RedeliveryPolicy, counts: U32, levels: DelayLevels, *, delay_max_ms: int, draw: Draw) -> U64:
    """Return the delays, u64[n] (ms), of the `counts`-th negative acknowledgements; the first is 1."""
    match policy.kind:
        case RedeliveryKind.CONSTANT:
            delays = np.full(len(counts), policy.initial_ms, np.uint64)
        case RedeliveryKind.LINEAR:
            delays = _linear(policy, counts, _most(policy, delay_max_ms))
        case RedeliveryKind.EXPONENTIAL:
            delays = _exponential(policy, counts, _most(policy, delay_max_ms), draw)
        case RedeliveryKind.LIST:
            last = np.uint32(len(policy.delays_ms))
            delays = np.array(policy.delays_ms, np.uint64)[np.minimum(counts, last) - np.uint32(1)]
        case _:
            delays = levels.ladder(counts)
    # The limit may have been lowered since the policy was set.
    return np.minimum(delays, np.uint64(delay_max_ms))


def longest_ms(policy: RedeliveryPolicy, max_count: int, levels: DelayLevels, *, delay_max_ms: int) -> int:
    """Return the longest delay of a policy (ms). One that grows without a maximum ends at the `max_count`-th time."""
    match policy.kind:
        case RedeliveryKind.LIST:
            longest = max(policy.delays_ms)
        case RedeliveryKind.LADDER:
            longest = max(levels.delays_ms)
        case RedeliveryKind.LINEAR | RedeliveryKind.EXPONENTIAL if policy.max_ms:
            longest = policy.max_ms
        case _:
            counts = np.array([max(1, max_count)], np.uint32)
            longest = int(delays_ms(policy, counts, levels, delay_max_ms=delay_max_ms, draw=np.zeros)[0])
    return min(longest, delay_max_ms)


def _most(policy: RedeliveryPolicy, delay_max_ms: int) -> int:
    return min(policy.max_ms or delay_max_ms, delay_max_ms)


def _linear(policy: RedeliveryPolicy, counts: U32, most_ms: int) -> U64:
    """Return initial + (n - 1) * step."""
    if policy.initial_ms >= most_ms:
        return np.full(len(counts), most_ms, np.uint64)
    # The number of whole steps below the maximum; one more exceeds it.
    steps_max = (most_ms - policy.initial_ms) // policy.step_ms if policy.step_ms else 0
    steps = np.minimum(counts.astype(np.uint64) - np.uint64(1), np.uint64(steps_max))
    delays: U64 = np.uint64(policy.initial_ms) + steps * np.uint64(policy.step_ms)
    if policy.step_ms:
        delays[counts.astype(np.uint64) - np.uint64(1) > np.uint64(steps_max)] = most_ms
    return delays


def _exponential(policy: RedeliveryPolicy, counts: U32, most_ms: int, draw: Draw) -> U64:
    """Return initial * multiplier^(n - 1), less a part drawn from [0, jitter)."""
    delays = np.full(len(counts), float(min(policy.initial_ms, most_ms)))
    multiplier = policy.multiplier or MULTIPLIER_DEFAULT
    if 0 < policy.initial_ms < most_ms and multiplier > 1:
        # From this power on the delay is the maximum.
        powers_max = math.ceil(math.log(most_ms / policy.initial_ms) / math.log(multiplier))
        powers = np.minimum(counts.astype(np.float64) - 1, powers_max)
        delays = np.minimum(policy.initial_ms * np.power(multiplier, powers), most_ms)
    if policy.jitter:
        delays -= delays * policy.jitter * draw(len(counts))
    rounded: U64 = np.rint(delays).astype(np.uint64)
    return rounded


def check(policy: RedeliveryPolicy, delay_max_ms: int) -> None:
    """Raise InvalidArgument with field, value and limit if the policy is not allowed."""
    match policy.kind:
        case RedeliveryKind.CONSTANT:
            _check_delay("constant.delay_ms", policy.initial_ms, delay_max_ms)
        case RedeliveryKind.LINEAR:
            _check_delay("linear.max_ms", policy.max_ms, delay_max_ms)
            _check_delay("linear.initial_ms", policy.initial_ms, policy.max_ms or delay_max_ms)
            _check_delay("linear.step_ms", policy.step_ms, delay_max_ms)
        case RedeliveryKind.EXPONENTIAL:
            _check_exponential(policy, delay_max_ms)
        case RedeliveryKind.LIST:
            if not 1 <= len(policy.delays_ms) <= DELAYS_MAX:
                raise InvalidArgument(
                    f"redelivery.list.delay_ms has {len(policy.delays_ms)} delays; it must have 1 to {DELAYS_MAX}"
                )
            for place, delay_ms in enumerate(policy.delays_ms):
                _check_delay(f"list.delay_ms[{place}]", delay_ms, delay_max_ms)


def _check_exponential(policy: RedeliveryPolicy, delay_max_ms: int) -> None:
    if policy.initial_ms < 1:
        raise InvalidArgument("redelivery.exponential.initial_ms is 0; it must be at least 1")
    _check_delay("exponential.max_ms", policy.max_ms, delay_max_ms)
    _check_delay("exponential.initial_ms", policy.initial_ms, policy.max_ms or delay_max_ms)
    # Written so that NaN is refused.
    if not (policy.multiplier == 0 or 1 <= policy.multiplier <= MULTIPLIER_MAX):
        raise InvalidArgument(
            f"redelivery.exponential.multiplier is {policy.multiplier:g}; it must be 1 to {MULTIPLIER_MAX:g}, or 0 for "
            f"{MULTIPLIER_DEFAULT:g}"
        )
    if not 0 <= policy.jitter <= 1:
        raise InvalidArgument(f"redelivery.exponential.jitter is {policy.jitter:g}; it must be 0 to 1")


def _check_delay(field: str, delay_ms: int, most_ms: int) -> None:
    if delay_ms > most_ms:
        raise InvalidArgument(f"redelivery.{field} is {delay_ms}; it may be at most {most_ms}")
