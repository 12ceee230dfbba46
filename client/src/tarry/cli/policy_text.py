"""Formats and parses policies of subscriptions.

Redelivery policies are shown as `--redelivery` takes them. The daemon checks limits.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import TypeVar

import click

from tarry import policies, redelivery
from tarry.cli import output, rows

E = TypeVar("E", bound=enum.Enum)

FORMS = "'constant 10s', 'linear 1s +5s max 1m', 'exponential 1s x2 max 10m jitter 0.2', 'list 1s 5s 30s' or 'ladder'"

# Options that may follow the delays of a kind, with a value each
_OPTIONS = {"linear": {"max"}, "exponential": {"max", "jitter"}}


def choices(kind: type[E]) -> dict[str, E]:
    """Return the members of an enum by option value, such as `draining-hashes`."""
    return {choice_text(each): each for each in kind}


def choice_text(member: enum.Enum) -> str:
    return member.name.lower().replace("_", "-")


class Redelivery(click.ParamType[redelivery.RedeliveryPolicy]):
    """A redelivery policy, in one of `FORMS`."""

    name = "policy"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> redelivery.RedeliveryPolicy:
        if not isinstance(value, str):
            return value  # type: ignore[return-value]
        try:
            return parse(value)
        except (ValueError, click.BadParameter) as wrong:
            why = wrong.message if isinstance(wrong, click.BadParameter) else str(wrong)
            self.fail(f"{value!r}: {why}; write for example {FORMS}", param, ctx)


def parse(written: str) -> redelivery.RedeliveryPolicy:
    """Parse a redelivery policy. Raises ValueError, or click.BadParameter for a duration, with what is wrong."""
    kind, *words = written.split() or [""]
    delays, options = _split(kind, words)
    max_ms = _ms(options["max"]) if "max" in options else None
    match kind, delays:
        case "constant", [delay]:
            return redelivery.ConstantDelay(_ms(delay))
        case "linear", [initial, step] if step.startswith("+"):
            return redelivery.LinearDelay(_ms(initial), _ms(step[1:]), max_ms)
        case "exponential", [initial, *factor] if len(factor) < 2 and all(each.startswith("x") for each in factor):
            multiplier = _number(factor[0][1:]) if factor else 2.0
            jitter = _number(options["jitter"]) if "jitter" in options else 0.0
            return redelivery.ExponentialDelay(_ms(initial), multiplier, max_ms, jitter)
        case "list", [_, *_]:
            return redelivery.DelayList(tuple(map(_ms, delays)))
        case "ladder", []:
            return redelivery.DelayLadder()
        case "constant" | "linear" | "exponential" | "list" | "ladder", _:
            raise ValueError(f"that is not how {kind} is written")
    raise ValueError(f"there is no kind {kind!r}")


def redelivery_text(policy: redelivery.RedeliveryPolicy) -> str:
    """Return the text that `--redelivery` takes."""
    return " ".join(_words(policy))


def _words(policy: redelivery.RedeliveryPolicy) -> Iterator[str]:
    yield policy.kind
    match policy:
        case redelivery.ConstantDelay():
            yield output.duration_text(policy.delay_ms)
        case redelivery.LinearDelay():
            yield output.duration_text(policy.initial_ms)
            yield f"+{output.duration_text(policy.step_ms)}"
        case redelivery.ExponentialDelay():
            yield output.duration_text(policy.initial_ms)
            yield f"x{_number_text(policy.multiplier)}"
        case redelivery.DelayList():
            yield from map(output.duration_text, policy.delays_ms)
    if isinstance(policy, (redelivery.LinearDelay, redelivery.ExponentialDelay)) and policy.max_ms is not None:
        yield from ("max", output.duration_text(policy.max_ms))
    if isinstance(policy, redelivery.ExponentialDelay) and policy.jitter:
        yield from ("jitter", _number_text(policy.jitter))


def _split(kind: str, words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the delays, and the options that follow them."""
    first = next((at for at, word in enumerate(words) if word in ("max", "jitter")), len(words))
    options: dict[str, str] = {}
    named = words[first:]
    for name, value in zip(named[::2], [*named[1::2], None], strict=False):
        if name not in _OPTIONS.get(kind, ()):
            raise ValueError(f"{kind} has no {name!r} there")
        if value is None or name in options:
            raise ValueError(f"{name} has one value")
        options[name] = value
    return words[:first], options


def _ms(duration: str) -> int:
    return int(rows.Duration()(duration))


def _number(written: str) -> float:
    try:
        return float(written)
    except ValueError:
        raise ValueError(f"{written!r} is not a number") from None


def _number_text(number: float) -> str:
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


def key_shared_text(policy: policies.KeySharedPolicy) -> str:
    """Return the fields that are set, in the words of the options; `defaults` if none is."""
    points, block_ms = policy.points_per_consumer, policy.nack_block_max_ms
    groups = (
        (_chosen(policy.selector), "" if points is None else f"{points} points"),
        (_chosen(policy.order),),
        (_chosen(policy.nack_order), "" if block_ms is None else output.duration_text(block_ms)),
        ("out of order" if policy.allow_out_of_order_delivery else "",),
    )
    return ", ".join(filter(None, (" ".join(filter(None, words)) for words in groups))) or "defaults"


def _chosen(member: enum.Enum | None) -> str:
    return "" if member is None else choice_text(member)


def subscription(policy: policies.SubscriptionPolicy) -> dict[str, object]:
    """Return the fields of a subscription's policy by option name; `-` stands for the daemon's default."""
    return {
        "in flight max": "-" if policy.in_flight_rows_max is None else policy.in_flight_rows_max,
        "lease": "-" if policy.lease_ms is None else output.duration_text(policy.lease_ms),
        "redelivery": "-" if policy.redelivery is None else redelivery_text(policy.redelivery),
        "max redeliver count": "-" if policy.max_redeliver_count is None else policy.max_redeliver_count,
        "ack timeout": "-" if policy.ack_timeout_ms is None else output.duration_text(policy.ack_timeout_ms),
        "nack precision bits": "-" if policy.nack_precision_bits is None else policy.nack_precision_bits,
        "key shared": "-" if policy.key_shared is None else key_shared_text(policy.key_shared),
        "properties": ", ".join(f"{name}={value}" for name, value in policy.properties.items()) or "-",
    }


NAMES = tuple(subscription(policies.SubscriptionPolicy()))
"""Names of the fields of a subscription's policy"""
