"""How long acknowledgements wait for others: by how many there are, and until which moment."""

from __future__ import annotations

import dataclasses

import pytest

import tarry
from tarry import stream_requests


@dataclasses.dataclass
class Clock:
    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def longest_ms(per_second: int, least_ms: int, most_ms: int | None, *, alone: bool = False) -> float:
    """How long what is acknowledged waits at most, when there have been so many a second for a while."""
    pace = stream_requests.AckPace(clock := Clock())
    linger = stream_requests.AckLinger(least_ms, most_ms, pace)
    for _ in range(10 * per_second):
        clock.now_s += 1 / per_second
        linger.acknowledged(alone=alone)
    waits = []
    for _ in range(100):
        waits.append(linger.wait_s())
        clock.now_s += 0.000_7
    assert min(waits) > 0
    return max(waits) * 1_000


@pytest.mark.parametrize(
    ("per_second", "ms"), [(1, 5), (50, 5), (250, 10), (500, 20), (900, 40), (2_000, 50), (20_000, 50)]
)
def test_it_waits_the_longer_the_more_there_are(per_second: int, ms: int) -> None:
    assert ms * 0.85 < longest_ms(per_second, 5, 50) <= ms


def test_who_waits_for_each_answer_waits_as_at_rest() -> None:
    assert longest_ms(2_000, 5, 50, alone=True) <= 5


def test_the_time_is_what_the_caller_says() -> None:
    assert longest_ms(2_000, 5, 5) <= 5
    assert longest_ms(2_000, 5, None) <= 5
    assert longest_ms(2_000, 20, 10) <= 20
    assert longest_ms(1, 3_600_000, 50) == 3_600_000, "no moment is in common"
    assert stream_requests.AckLinger(0, 50).is_off
    with pytest.raises(tarry.InvalidArgument, match="ack_linger_ms is -1"):
        stream_requests.AckLinger(-1)
    with pytest.raises(tarry.InvalidArgument, match="ack_linger_max_ms is -1"):
        stream_requests.AckLinger(5, -1)


def test_all_subscriptions_of_a_client_wait_for_the_same_moment() -> None:
    pace = stream_requests.AckPace(clock := Clock())
    lingers = [stream_requests.AckLinger(5, 50, pace) for _ in range(20)]
    for _ in range(400):
        for linger in lingers:
            clock.now_s += 0.000_5
            linger.acknowledged(alone=False)
    moments = set()
    for linger in lingers:
        clock.now_s += 0.000_1
        moments.add(round(clock.now_s + linger.wait_s(), 6))
    assert len(moments) <= 2, "one, or two where one lies between"


def test_what_was_a_while_ago_counts_no_longer() -> None:
    pace = stream_requests.AckPace(clock := Clock())
    for _ in range(2_000):
        clock.now_s += 0.000_5
        pace.acknowledged()
    before = pace.per_second
    clock.now_s += 10
    assert before > 1_000
    assert pace.per_second < 1
