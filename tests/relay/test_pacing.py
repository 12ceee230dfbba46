"""How much may go to each target."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tarry_relay.pacing import MISSING_REST_MAX_S, REST_MAX_S, REST_S, Pacing


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 1_000)), max_size=50), st.floats(0.1, 5_000))
def test_a_target_gets_no_more_than_its_limit_and_a_burst(asked: list[tuple[float, int]], per_s: float) -> None:
    pacing = Pacing(lambda target: per_s)
    now_s, given_rows = 0.0, 0
    for wait_s, wanted in asked:
        now_s += wait_s
        given_rows += pacing.take("a", wanted, now_s)
        assert given_rows <= now_s * per_s + max(1.0, per_s * 0.1) + 1e-6


def test_a_slow_target_gets_its_next_message_in_the_end() -> None:
    pacing = Pacing(lambda target: 0.5)
    assert [pacing.take("a", 10, now_s) for now_s in (0.0, 1.0, 1.9, 2.1, 3.0)] == [1, 0, 0, 1, 0]


def test_each_target_has_a_limit_of_its_own() -> None:
    pacing = Pacing({"slow": 10.0}.get)
    assert pacing.take("slow", 100, 0) == 1
    assert pacing.take("fast", 100, 0) == 100


def test_a_target_that_has_failed_rests_for_longer_and_longer_until_one_message_is_taken() -> None:
    pacing = Pacing(lambda target: None)
    now_s = 5.0
    pacing.rest("a", now_s)
    assert pacing.take("a", 10, now_s + REST_S / 2) == 0
    assert pacing.takes_nothing("a", now_s + REST_S / 2)
    assert pacing.take("b", 10, now_s + REST_S / 2) == 10
    rests_s = REST_S
    for _ in range(10):
        now_s += rests_s
        assert pacing.take("a", 10, now_s) == 1
        assert pacing.is_failing("a")
        rests_s = min(2 * rests_s, REST_MAX_S)
        pacing.rest("a", now_s)
        assert pacing.takes_nothing("a", now_s + rests_s * 0.99)
    pacing.has_taken("a", now_s)
    assert not pacing.is_failing("a")
    assert pacing.take("a", 10, now_s) == 10


def test_many_messages_that_fail_at_once_make_a_target_rest_no_longer_than_one() -> None:
    pacing = Pacing(lambda target: None)
    pacing.take("a", 500, 0.0)
    assert {pacing.rest("a", 0.0, is_missing=True) for _ in range(500)} == {REST_S}
    now_s, rest_s = 0.0, REST_S
    for _ in range(12):
        now_s += rest_s
        assert pacing.take("a", 10, now_s) == 1
        rest_s = min(2 * rest_s, MISSING_REST_MAX_S)
        assert pacing.rest("a", now_s, is_missing=True) == now_s + rest_s
    assert rest_s == MISSING_REST_MAX_S


def test_what_a_target_has_taken_never_falls_however_many_targets_there_are() -> None:
    pacing = Pacing(lambda target: None)
    for _ in range(3):
        pacing.has_taken("a", 0.0)
    for number in range(20_000):
        pacing.has_taken(f"t{number}", 0.0)
    assert pacing.taken("a") >= 3


def test_a_target_at_its_limit_takes_nothing() -> None:
    pacing = Pacing(lambda target: 10.0)
    assert not pacing.takes_nothing("a", 0.0)
    assert pacing.take("a", 10, 0.0) == 1
    assert pacing.takes_nothing("a", 0.05)
    assert not pacing.takes_nothing("a", 0.1)
