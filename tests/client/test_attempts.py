"""Whom a call asks, and for how long, where the daemon that owns its topic has taken it over."""

from __future__ import annotations

import pytest

import tarry
from tarry import attempts, daemons

OLD, NEW = "127.0.0.1:1", "127.0.0.1:2"
FORMER_S = 12.0


def asking(timeout_s: float) -> attempts.Asking:
    never = attempts.RetryPolicy(uniform=lambda low, high: 0.0)
    return attempts.Asking(daemons.Daemons([OLD]), never, attempts.Deadline.after(timeout_s))


def told_of_a_former_owner() -> tarry.Unavailable:
    milliseconds = int(FORMER_S * 1000)
    return tarry.Unavailable("taken over", retry_after_ms=milliseconds, former_owner_ms=milliseconds)


def test_whoever_says_how_long_a_former_owner_may_act_is_the_owner_and_is_asked_again() -> None:
    plan = asking(timeout_s=5.0).ask_and_tell(attempts.Method("m", len), b"r", topic="t")
    first = next(plan)
    assert isinstance(first, attempts.Send)
    assert first.address == OLD
    assert plan.throw(tarry.NotOwner("not here", owner_address=NEW)) == attempts.Wait(0.0)
    second = plan.send(None)
    assert isinstance(second, attempts.Send)
    assert second.address == NEW
    assert plan.throw(told_of_a_former_owner()) == attempts.Wait(FORMER_S, "taken over")
    third = plan.send(None)
    assert isinstance(third, attempts.Send)
    # The old one may be what was paused: it would not even say where to go.
    assert third.address == NEW
    with pytest.raises(StopIteration) as ended:
        plan.send(7)
    assert ended.value.value == (7, False), "what waited has not been carried out"


def test_the_time_for_which_a_former_owner_may_act_is_not_the_caller_s() -> None:
    plan = asking(timeout_s=5.0).ask_and_tell(attempts.Method("m", len), b"r", topic="t")
    next(plan)
    for _ in range(3):
        assert plan.throw(told_of_a_former_owner()) == attempts.Wait(FORMER_S, "taken over")
        again = plan.send(None)
        assert isinstance(again, attempts.Send)
        assert again.timeout_s > FORMER_S


def test_what_is_of_no_topic_is_asked_of_the_owner_that_a_standby_names() -> None:
    asked = asking(timeout_s=5.0)
    plan = asked.ask(attempts.Method("m", len), b"r", topic=None)
    next(plan)
    assert plan.throw(tarry.NotOwner("this daemon stands by", owner_address=NEW)) == attempts.Wait(0.0)
    second = plan.send(None)
    assert isinstance(second, attempts.Send)
    assert second.address == NEW
    again = next(asked.ask(attempts.Method("m", len), b"r", topic=None))
    assert isinstance(again, attempts.Send)
    assert again.address == NEW, "the next page is asked there at once"


def test_when_the_owner_of_what_is_of_no_topic_fails_the_target_is_asked_again() -> None:
    plan = asking(timeout_s=5.0).ask(attempts.Method("m", len), b"r", topic=None)
    next(plan)
    plan.throw(tarry.NotOwner("this daemon stands by", owner_address=NEW))
    plan.send(None)
    plan.throw(tarry.Unavailable("gone"))
    third = plan.send(None)
    assert isinstance(third, attempts.Send)
    assert third.address == OLD
