"""When what was negatively acknowledged comes back, and what was given up.

Owns: the redelivery policies and the filter of dead letters as frozen values, and the policies to and from their
messages.
Does not own: limits, defaults and the arithmetic, which are the daemon's.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, TypeAlias

from tarry import columns, errors
from tarry.v1 import inspect_pb2, policy_pb2


@dataclasses.dataclass(frozen=True)
class ConstantDelay:
    """Always the same. Example: `ConstantDelay(10_000)`."""

    delay_ms: int
    kind: Literal["constant"] = dataclasses.field(default="constant", init=False)


@dataclasses.dataclass(frozen=True)
class LinearDelay:
    """`initial_ms` the first time, `step_ms` more each further time, at most `max_ms`.

    Example: `LinearDelay(1_000, 5_000, max_ms=60_000)`.
    """

    initial_ms: int
    step_ms: int
    max_ms: int | None = None
    """None: the daemon's limit on delays."""
    kind: Literal["linear"] = dataclasses.field(default="linear", init=False)


@dataclasses.dataclass(frozen=True)
class ExponentialDelay:
    """`initial_ms` the first time, `multiplier` times as much each further time, at most `max_ms`.

    Example: `ExponentialDelay(1_000, max_ms=600_000, jitter=0.2)`.
    """

    initial_ms: int
    multiplier: float = 2.0
    """1 to 100."""
    max_ms: int | None = None
    """None: the daemon's limit on delays."""
    jitter: float = 0.0
    """0 to 1: of a delay d it is drawn evenly from [(1 - jitter) * d, d]."""
    kind: Literal["exponential"] = dataclasses.field(default="exponential", init=False)


@dataclasses.dataclass(frozen=True)
class DelayList:
    """One delay for each time, 1 to 100 of them; the last one from then on.

    Example: `DelayList((1_000, 5_000, 30_000))`.
    """

    delays_ms: tuple[int, ...]
    kind: Literal["list"] = dataclasses.field(default="list", init=False)


@dataclasses.dataclass(frozen=True)
class DelayLadder:
    """The topic's delay levels from the third on, and the highest from then on (RocketMQ). Example: `DelayLadder()`."""

    kind: Literal["ladder"] = dataclasses.field(default="ladder", init=False)


RedeliveryPolicy: TypeAlias = ConstantDelay | LinearDelay | ExponentialDelay | DelayList | DelayLadder
"""The delay of a redelivery by how often the position was negatively acknowledged."""


def policy_to_message(policy: RedeliveryPolicy) -> policy_pb2.RedeliveryPolicy:
    """Raises InvalidArgument: a value that the field cannot hold."""
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
    """Why a position became a dead letter."""

    TOO_OFTEN = inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN
    """Negatively acknowledged, or timed out, more often than the policy's `max_redeliver_count`."""
    REJECTED = inspect_pb2.DEAD_LETTER_REASON_REJECTED
    """A dispatcher rejected it."""
    TRIMMED = inspect_pb2.DEAD_LETTER_REASON_TRIMMED
    """Its log was trimmed, by a trim with `dead_letter`. It has neither a time nor a key hash."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class DeadLetterFilter:
    """Which dead letters: those that everything that is given holds for; nothing is given: all.

    Example: `DeadLetterFilter(reason=tarry.DeadLetterReason.REJECTED, ledgers=(7, 7))`.
    """

    ids: columns.Column | None = None
    """Their `dead_letter_id`s, in any order."""
    ledgers: tuple[int, int] | None = None
    """First and last ledger, both included."""
    reason: DeadLetterReason | None = None
    from_ms: int | None = None
    """Dead at this time or later, Unix time in ms."""
    until_ms: int | None = None
    """Dead before this time."""
