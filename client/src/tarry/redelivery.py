"""Redelivery policies and the filter of dead letters, as frozen values.

The daemon checks limits, knows defaults and computes the delays.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, TypeAlias

from tarry import columns, errors
from tarry.v1 import inspect_pb2, policy_pb2


@dataclasses.dataclass(frozen=True)
class ConstantDelay:
    """A constant delay. Example: `ConstantDelay(10_000)`."""

    delay_ms: int
    kind: Literal["constant"] = dataclasses.field(default="constant", init=False)


@dataclasses.dataclass(frozen=True)
class LinearDelay:
    """A delay of `initial_ms` at first and `step_ms` more each further time, at most `max_ms`.

    Example: `LinearDelay(1_000, 5_000, max_ms=60_000)`.
    """

    initial_ms: int
    step_ms: int
    max_ms: int | None = None
    """None means the daemon's limit on delays"""
    kind: Literal["linear"] = dataclasses.field(default="linear", init=False)


@dataclasses.dataclass(frozen=True)
class ExponentialDelay:
    """A delay of `initial_ms` at first and `multiplier` times as much each further time, at most `max_ms`.

    Example: `ExponentialDelay(1_000, max_ms=600_000, jitter=0.2)`.
    """

    initial_ms: int
    multiplier: float = 2.0
    """1 to 100"""
    max_ms: int | None = None
    """None means the daemon's limit on delays"""
    jitter: float = 0.0
    """0 to 1: a delay d is drawn uniformly from [(1 - jitter) * d, d]."""
    kind: Literal["exponential"] = dataclasses.field(default="exponential", init=False)


@dataclasses.dataclass(frozen=True)
class DelayList:
    """One delay for each time, 1 to 100 of them; afterwards the last one.

    Example: `DelayList((1_000, 5_000, 30_000))`.
    """

    delays_ms: tuple[int, ...]
    kind: Literal["list"] = dataclasses.field(default="list", init=False)


@dataclasses.dataclass(frozen=True)
class DelayLadder:
    """The topic's delay levels from the third on, afterwards the highest (RocketMQ). Example: `DelayLadder()`."""

    kind: Literal["ladder"] = dataclasses.field(default="ladder", init=False)


RedeliveryPolicy: TypeAlias = ConstantDelay | LinearDelay | ExponentialDelay | DelayList | DelayLadder
"""The delay of a redelivery by how often the position was negatively acknowledged"""


def policy_to_message(policy: RedeliveryPolicy) -> policy_pb2.RedeliveryPolicy:
    """Return the message. Raises InvalidArgument if a field cannot hold a value."""
    try:
        match policy:
            case ConstantDelay():
                constant = policy_pb2.ConstantDelay(delay_ms=policy.delay_ms)
                return policy_pb2.RedeliveryPolicy(constant=constant)
            case LinearDelay():
                linear = policy_pb2.LinearDelay(
                    initial_ms=policy.initial_ms, step_ms=policy.step_ms, max_ms=policy.max_ms or 0
                )
                return policy_pb2.RedeliveryPolicy(linear=linear)
            case ExponentialDelay():
                exponential = policy_pb2.ExponentialDelay(
                    initial_ms=policy.initial_ms,
                    multiplier=policy.multiplier,
                    max_ms=policy.max_ms or 0,
                    jitter=policy.jitter,
                )
                return policy_pb2.RedeliveryPolicy(exponential=exponential)
            case DelayList():
                return policy_pb2.RedeliveryPolicy(list=policy_pb2.DelayList(delay_ms=policy.delays_ms))
            case DelayLadder():
                return policy_pb2.RedeliveryPolicy(ladder=policy_pb2.DelayLadder())
    except (TypeError, ValueError) as wrong:
        raise errors.InvalidArgument(f"redelivery is {policy!r}; a field cannot hold it: {wrong}") from wrong
    raise errors.InvalidArgument(
        f"redelivery is {policy!r}; it must be a ConstantDelay, LinearDelay, ExponentialDelay, DelayList or DelayLadder"
    )


def policy_from_message(message: policy_pb2.RedeliveryPolicy) -> RedeliveryPolicy:
    match message.WhichOneof("delay"):
        case "constant":
            return ConstantDelay(message.constant.delay_ms)
        case "linear":
            linear = message.linear
            return LinearDelay(linear.initial_ms, linear.step_ms, linear.max_ms or None)
        case "exponential":
            each = message.exponential
            return ExponentialDelay(each.initial_ms, each.multiplier or 2.0, each.max_ms or None, each.jitter)
        case "list":
            return DelayList(tuple(message.list.delay_ms))
        case "ladder":
            return DelayLadder()
    raise errors.Internal("redelivery is of a kind that this version of the client does not know")


class DeadLetterReason(enum.IntEnum):
    """The cause that made a position a dead letter."""

    TOO_OFTEN = inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN
    """Negatively acknowledged, or timed out, more often than the policy's `max_redeliver_count`"""
    REJECTED = inspect_pb2.DEAD_LETTER_REASON_REJECTED
    """Rejected by a dispatcher"""
    TRIMMED = inspect_pb2.DEAD_LETTER_REASON_TRIMMED
    """Trimmed from its log, by a trim with `dead_letter`; it has neither a time nor a key hash"""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeadLetterFilter:
    """A filter of dead letters; all given fields must match, and an empty filter matches all.

    Example: `DeadLetterFilter(reason=tarry.DeadLetterReason.REJECTED, ledgers=(7, 7))`.
    """

    ids: columns.Column | None = None
    """Their `dead_letter_id`s, in any order"""
    ledgers: tuple[int, int] | None = None
    """First and last ledger, both included"""
    reason: DeadLetterReason | None = None
    from_ms: int | None = None
    """Dead at this Unix time or later (ms)"""
    until_ms: int | None = None
    """Dead before this Unix time (ms)"""
