"""What a relay says of its health, and when it says so in its log."""

from __future__ import annotations

import pytest

from tarry_relay.health import AGAIN_S, SILENT_S, TARGETS_MAX, Health


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_an_end_that_has_not_answered_for_long_makes_the_relay_unhealthy_until_it_answers(clock: Clock) -> None:
    health = Health(clock)
    clock.now_s += SILENT_S / 2
    health.answered("daemon")
    clock.now_s += SILENT_S / 2
    is_healthy, body = health.body()
    assert not is_healthy
    assert body["reasons"] == {"broker": "has not answered for 10 s: nothing was answered"}
    health.answered("broker")
    assert health.body() == (True, {"status": "ok", "failing": {}})


def test_a_reason_makes_the_relay_unhealthy_until_it_is_settled(clock: Clock) -> None:
    health = Health(clock)
    health.explain("session", "broker: password refused")
    assert health.body()[0] is False
    health.settle("session")
    assert health.body()[0] is True


def test_targets_make_no_relay_unhealthy_and_only_some_are_named(clock: Clock) -> None:
    health = Health(clock)
    for number in range(TARGETS_MAX + 5):
        health.failed("target", "away", f"t{number}")
    is_healthy, body = health.body()
    assert is_healthy
    assert len(body["failing"]) == TARGETS_MAX  # type: ignore[arg-type]
    assert body["more_targets"] == 5


def test_a_failure_that_goes_on_is_logged_once_and_then_each_minute_with_its_count(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(clock)
    for _ in range(130):
        health.failed("broker", "refused")
        clock.now_s += 1
    told = [(each.message, getattr(each, "failures", None)) for each in caplog.records]
    assert told == [
        ("does not answer", None),
        ("still does not answer", AGAIN_S),
        ("still does not answer", AGAIN_S),
    ]


def test_an_end_that_fails_and_answers_in_turns_floods_no_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    health = Health(clock)
    for _ in range(20):
        health.failed("broker", "refused")
        health.answered("broker")
        clock.now_s += 1
    assert [each.message for each in caplog.records] == ["does not answer"]
    assert health.body()[1]["failing"] == {}
    assert health.failing_s("broker") == 0.0


def test_lanes_that_are_held_are_named(clock: Clock) -> None:
    health = Health(clock)
    health.hold_lanes(["orders (0, 1)"])
    assert health.body() == (True, {"status": "ok", "failing": {}, "lanes_held": ["orders (0, 1)"]})
