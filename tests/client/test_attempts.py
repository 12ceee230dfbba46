"""Whom a call asks, and for how long, where the daemon that owns its topic has taken it over."""

from __future__ import annotations

import grpc
import pytest

import tarry
from tarry import attempts, daemons
from tarry.v1 import cluster_pb2

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


def test_an_unknown_outcome_is_asked_about_at_once_where_it_says_and_may_have_landed() -> None:
    plan = asking(timeout_s=5.0).ask_and_tell(attempts.Method("m", len), b"r", topic="t")
    next(plan)
    assert plan.throw(tarry.OutcomeUnknown("it was staged", owner_address=NEW)) == attempts.Wait(0.0)
    second = plan.send(None)
    assert isinstance(second, attempts.Send)
    assert second.address == NEW
    with pytest.raises(StopIteration) as ended:
        plan.send(7)
    assert ended.value.value == (7, True)


@pytest.mark.parametrize(
    ("last", "may_have_landed"),
    [
        (tarry.OutcomeUnknown("it was staged"), True),
        (tarry.DeadlineExceeded("no answer"), True),
        (tarry.NotOwner("not here"), False),
    ],
)
def test_a_call_without_an_answer_says_whether_it_may_have_landed(
    last: tarry.TarryError, may_have_landed: bool
) -> None:
    late = attempts.RetryPolicy(uniform=lambda low, high: 60.0)
    asked = attempts.Asking(daemons.Daemons([OLD]), late, attempts.Deadline.after(5.0))
    plan = asked.ask_and_tell(attempts.Method("m", len), b"r", topic="t")
    next(plan)
    with pytest.raises(tarry.DeadlineExceeded) as raised:
        plan.throw(last)
    assert raised.value.may_have_landed is may_have_landed


def search(*addresses: str, waits_s: float = 1.0) -> attempts.Search:
    policy = attempts.RetryPolicy(initial_s=waits_s, max_s=waits_s * 2, uniform=lambda low, high: high)
    return attempts.Search(daemons.Daemons(addresses), policy, "t")


def test_each_address_is_asked_once_between_two_back_offs() -> None:
    of_two = search(OLD, NEW)
    asked = [(of_two.address, of_two.failed(of_two.address, tarry.Unavailable("down"))) for _ in range(4)]
    assert asked == [(OLD, 0.0), (NEW, 1.0), (OLD, 0.0), (NEW, 2.0)]


def test_a_daemon_that_says_when_to_retry_is_asked_then_though_another_one_is_dead() -> None:
    of_two = search(NEW, OLD)
    assert of_two.failed(NEW, tarry.Unavailable("taking over", retry_after_ms=25)) == 0.0
    assert of_two.failed(OLD, tarry.Unavailable("dead")) == 0.025


def test_a_standby_that_names_a_dead_owner_is_asked_again_after_one_back_off() -> None:
    of_two = search(OLD, NEW)
    asked = []
    for _ in range(6):
        address = of_two.address
        error = tarry.Unavailable("dead") if address == OLD else tarry.NotOwner("stands by", owner_address=OLD)
        asked.append((address, of_two.failed(address, error)))
    assert asked == [(OLD, 0.0), (NEW, 1.0), (OLD, 0.0), (NEW, 2.0), (OLD, 0.0), (NEW, 2.0)]


def test_a_daemon_that_says_when_to_retry_is_asked_no_sooner_because_of_another() -> None:
    of_two = search(OLD, NEW)
    assert of_two.failed(OLD, tarry.Unavailable("dead")) == 0.0
    assert of_two.failed(NEW, tarry.NotOwner("stands by", owner_address=NEW)) == 0.0
    busy = search(NEW)
    assert busy.failed(NEW, tarry.ResourceExhausted("full", retry_after_ms=5_000)) == 5.0


@pytest.mark.parametrize(
    ("failure", "may_have_landed"),
    [
        ("failed to connect to all addresses; last error: refused", False),
        ("DNS resolution failed for h: not found", False),
        ("the daemon stops", True),
    ],
)
def test_a_call_that_had_no_connection_cannot_have_landed(failure: str, may_have_landed: bool) -> None:
    plan = asking(timeout_s=5.0).ask_and_tell(attempts.Method("m", len), b"r", topic="t")
    next(plan)
    assert isinstance(plan.throw(tarry.Unavailable(failure)), attempts.Wait)
    plan.send(None)
    with pytest.raises(StopIteration) as ended:
        plan.send(7)
    assert ended.value.value == (7, may_have_landed)


def test_asking_for_a_feature_changes_nothing() -> None:
    plan = asking(timeout_s=5.0).ask_and_tell(attempts.Method("m", len), b"r", topic="t", needs=attempts.RETAINED)
    first = next(plan)
    assert isinstance(first, attempts.Send)
    assert first.method is attempts.VERSION
    assert isinstance(plan.throw(tarry.Unavailable("the daemon stops")), attempts.Wait)
    plan.send(None)
    asked = plan.send(cluster_pb2.GetVersionResponse(feature=[attempts.RETENTION]))
    assert isinstance(asked, attempts.Send)
    assert asked.method.path == "m"
    with pytest.raises(StopIteration) as ended:
        plan.send(7)
    assert ended.value.value == (7, False)


def test_a_stream_that_makes_progress_searches_from_the_beginning() -> None:
    of_one = search(OLD, waits_s=0.25)
    assert [of_one.failed(OLD, tarry.Unavailable("down")) for _ in range(2)] == [0.25, 0.5]
    of_one.restart()
    assert of_one.failures == 0
    assert of_one.failed(OLD, tarry.Unavailable("down")) == 0.25


def test_a_call_that_is_made_once_is_preceded_by_a_question_where_there_is_a_choice() -> None:
    def planned(*addresses: str) -> attempts.Plan[attempts.Send]:
        policy = attempts.RetryPolicy(uniform=lambda low, high: 0.0)
        planning = attempts.Planning(daemons.Daemons(addresses), policy, timeout_s=5.0, rows_max=1, bytes_max=1)
        return planning.once(attempts.Method("once", len), b"r", None)

    with pytest.raises(StopIteration) as ended:
        next(planned(OLD))
    assert (ended.value.value.address, ended.value.value.request) == (OLD, b"r")
    plan = planned(OLD, NEW)
    first = next(plan)
    assert isinstance(first, attempts.Send)
    assert (first.method, first.address) == (attempts.VERSION, OLD)
    assert plan.throw(tarry.Unavailable("dead")) == attempts.Wait(0.0)
    second = plan.send(None)
    assert isinstance(second, attempts.Send)
    assert second.address == NEW
    with pytest.raises(StopIteration) as ended:
        plan.throw(tarry.TarryError("one of before", code=grpc.StatusCode.UNIMPLEMENTED))
    assert ended.value.value.address == NEW


@pytest.mark.parametrize(
    ("given", "told", "most"),
    [
        (None, {}, 4 << 20),
        (None, {OLD: 0}, 4 << 20),
        (None, {OLD: 1 << 20}, 1 << 20),
        (None, {OLD: 16 << 20}, 16 << 20),
        (None, {OLD: 16 << 20, NEW: 8 << 20}, 8 << 20),
        (16 << 20, {}, 16 << 20),
        (16 << 20, {OLD: 4 << 20}, 4 << 20),
        (1 << 20, {OLD: 4 << 20}, 1 << 20),
    ],
)
def test_requests_have_at_most_the_bytes_that_every_daemon_takes(
    given: int | None, told: dict[str, int], most: int
) -> None:
    known = daemons.Daemons([OLD, NEW])
    planning = attempts.Planning(known, attempts.RetryPolicy(), timeout_s=5.0, rows_max=100_000, bytes_max=given)
    for address, request_bytes in told.items():
        known.learn_features(address, frozenset(), request_bytes)
        known.learn(None, address, tarry.Unavailable("gone"))
    assert planning.bytes_max == most
    assert planning.positions_max == min(100_000, (most - 4096) // 44)
