"""What of single adds counts."""

from __future__ import annotations

from benchmarks.single_adds import Call, Seen, quantiles

OK, GONE = "OK", "UNAVAILABLE"


def seen(*adds: Call, health: tuple[tuple[float, bool], ...] = ()) -> Seen:
    return Seen(adds, (), health)


def test_an_add_counts_from_when_its_topic_has_answered() -> None:
    refused, first, early, late = (
        Call("a", 1.0, 1.1, GONE),
        Call("a", 2.0, 4.0, OK),
        Call("a", 3.0, 4.1, OK),
        Call("a", 4.5, 4.6, GONE),
    )
    other = Call("b", 4.7, 4.8, OK)
    assert seen(refused, first, early, late, other).served_adds(0.0, 10.0) == [late]


def test_an_add_counts_in_the_time_in_which_it_was_sent() -> None:
    adds = [Call("a", float(second), second + 0.5, OK) for second in range(5)]
    assert seen(*adds).served_adds(2.0, 4.0) == adds[2:4]
    assert seen(*adds).first_served_s == 0.5


def test_rows_of_an_add_without_an_answer_may_be_there_or_not() -> None:
    counted = seen(
        Call("a", 1.0, 1.1, OK), Call("a", 2.0, 2.1, GONE), Call("a", 3.0, 3.1, OK), Call("b", 4.0, 4.1, GONE)
    )
    assert counted.answered() == {"a": 2}
    assert counted.unknown() == {"a": 1, "b": 1}


def test_health_is_lost_when_it_was_there_before() -> None:
    health = ((1.0, False), (2.0, True), (3.0, False), (4.0, False), (5.0, True), (6.0, False))
    assert seen(health=health).health_lost(0.0, 10.0) == 2
    assert seen(health=health).health_lost(0.0, 6.0) == 1
    assert seen(health=health).health_lost(0.0, 3.0) == 0


def test_of_no_call_there_is_no_quantile() -> None:
    assert quantiles([]) == {}
    assert quantiles([Call("a", 1.0, 1.5, OK)]) == {"p50": 500.0, "p99": 500.0, "max": 500.0}
