"""Which of its daemons a client asks, and when it takes one for silent: in virtual time."""

from __future__ import annotations

import math

import pytest

import tarry
from tarry import daemons

A, B, C = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"
DOWN = tarry.Unavailable("connection refused")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def moved(owner_address: str) -> tarry.NotOwner:
    return tarry.NotOwner("this daemon stands by", owner_address=owner_address)


def known(*addresses: str) -> tuple[daemons.Daemons, Clock]:
    clock = Clock()
    return daemons.Daemons(addresses, clock), clock


# ---- whom to ask


def test_what_one_call_learns_of_a_dead_address_holds_for_all() -> None:
    both, _ = known(A, B)
    assert both.address("t") == A
    both.learn("t", A, DOWN)
    assert both.address("t") == both.address("u") == both.address(None) == B
    # A call that was on its way to the dead one does not lead back there.
    both.learn("u", A, DOWN)
    assert both.address("u") == B


@pytest.mark.parametrize("error", [tarry.Aborted("a lease"), tarry.OutcomeUnknown("?"), tarry.ResourceExhausted("no")])
def test_a_daemon_that_serves_and_refuses_stays_the_one_to_ask(error: tarry.TarryError) -> None:
    both, _ = known(A, B)
    both.learn("t", A, moved(B))
    both.learn("t", B, error)
    assert both.address("t") == B
    both.learn("u", A, error)
    assert both.address("u") == A


def test_when_an_owner_that_a_redirect_has_named_dies_the_given_addresses_are_asked() -> None:
    one, _ = known(A)
    one.learn("t", A, moved(C))
    assert one.address("t") == C
    one.learn("t", C, DOWN)
    assert one.address("t") == A


def test_when_the_given_address_dies_the_owner_that_a_redirect_has_named_is_asked_for_every_topic() -> None:
    one, _ = known(A)
    one.learn("t", A, moved(C))
    one.learn("u", A, DOWN)
    assert one.address("t") == one.address("u") == C
    one.learn("u", C, DOWN)
    assert one.address("u") == A


def test_a_call_that_learns_late_does_not_undo_what_another_has_learned() -> None:
    both, _ = known(A, B)
    both.learn("t", A, moved(B))
    both.learn("t", B, moved(C))
    both.learn("t", B, DOWN)
    assert both.address("t") == C


# ---- silence


def silenced(both: daemons.Daemons, clock: Clock, address: str) -> None:
    both.begin(address, None)
    clock.now_s += 2 * daemons.SILENCE_S
    both.leave(address)


def test_a_daemon_is_asked_after_3_s_of_silence_and_again_only_3_s_after_its_answer() -> None:
    one, clock = known(A)
    began_s = clock.now_s
    waiting = one.begin(A, 30.0)
    assert (one.look_at_s(A), one.patience_s(A)) == (began_s + 3.0, 3.0)
    clock.now_s += 3.5
    one.heard(A)
    assert one.look_at_s(A) == clock.now_s + 3.0
    one.end(waiting)
    assert one.look_at_s(A) == math.inf, "no caller waits"


@pytest.mark.parametrize("timeout_s", [2.5, 4.0, 5.0, 10.0, 12.0, 20.0, 30.0, 3_600.0])
def test_a_silent_daemon_is_left_before_half_of_the_timeout(timeout_s: float) -> None:
    assert 2 * daemons.patience_s(timeout_s) < timeout_s / 2


def test_the_least_patient_caller_decides_when_a_daemon_is_asked() -> None:
    one, clock = known(A)
    one.begin(A, None)
    clock.now_s += 0.1
    hurried = one.begin(A, 5.0)
    assert one.look_at_s(A) == pytest.approx(clock.now_s + 0.9)
    one.end(hurried)
    assert one.look_at_s(A) == pytest.approx(clock.now_s + 2.9)


def test_calls_that_time_out_before_it_is_sure_show_together_that_a_daemon_is_silent() -> None:
    one, clock = known(A)
    began_s = clock.now_s
    for _ in range(3):
        short = one.begin(A, 1.0)
        clock.now_s += 1.0
        one.end(short)
        one.failed(A, tarry.DeadlineExceeded("no answer"))
    one.begin(A, 1.0)
    assert one.look_at_s(A) == began_s + 0.5


def test_a_refused_connection_is_no_silence_and_one_that_is_given_up_is() -> None:
    one, clock = known(A)
    one.begin(A, None)
    clock.now_s += 0.1
    one.failed(A, DOWN)
    assert one.quiet_s(A) == 0.0
    clock.now_s += 5.0
    one.failed(A, tarry.Unavailable("connection attempt timed out"))
    assert one.quiet_s(A) == 5.0


def test_no_call_goes_to_a_silent_daemon_though_a_standby_names_it_as_the_owner() -> None:
    both, clock = known(A, B)
    silenced(both, clock, A)
    assert both.address("t") == B
    both.learn("t", B, moved(A))
    assert both.address("t") == B
    # It is asked beside the calls, and comes back with its first answer.
    assert both.look_at_s(A) == clock.now_s
    both.heard(A)
    both.learn("t", B, moved(A))
    assert both.address("t") == A


def test_an_owner_that_has_become_silent_is_left_for_every_topic() -> None:
    both, clock = known(A, B)
    for topic in "tu":
        both.learn(topic, A, moved(C))
    silenced(both, clock, C)
    assert both.address("t") == both.address("u") == A


def test_a_client_of_silent_daemons_alone_asks_the_first_that_answers() -> None:
    both, clock = known(A, B)
    silenced(both, clock, A)
    silenced(both, clock, B)
    assert both.address("t") in (A, B)
    both.heard(A)
    assert both.address("t") == A
    both.heard(B)
    assert both.address("t") == A


def test_a_daemon_that_was_silent_for_ten_minutes_is_asked_no_more_and_tried_when_a_redirect_names_it() -> None:
    both, clock = known(A, B)
    silenced(both, clock, C)
    clock.now_s += 600.0
    assert both.look_at_s(C) == math.inf
    both.learn("t", A, moved(C))
    assert both.address("t") == C


@pytest.mark.parametrize(("waited_s", "quiet_s", "is_quiet"), [(2, 1, True), (2, 0.9, False), (0.9, 5, False)])
def test_a_caller_that_has_waited_takes_a_daemon_for_silent_that_should_have_answered(
    waited_s: float, quiet_s: float, is_quiet: bool
) -> None:
    one, clock = known(A)
    one.begin(A, waited_s)
    clock.now_s += quiet_s
    assert one.is_quiet(A, waited_s) is is_quiet


def test_a_caller_for_whom_nobody_asks_trusts_the_daemon_as_long_as_the_others_do() -> None:
    one, clock = known(A)
    one.begin(A, None)
    clock.now_s += 5.9
    assert not one.is_quiet(A, 3.0)
    assert not one.is_quiet(A, 60.0)
    clock.now_s += 0.1
    assert one.is_quiet(A, 60.0)


def test_a_daemon_that_is_left_is_the_owner_of_no_topic() -> None:
    both, clock = known(A, B)
    both.learn("t", B, moved(A))
    silenced(both, clock, A)
    both.heard(A)
    clock.now_s += 1.0
    assert both.address("t") == both.address(None)
