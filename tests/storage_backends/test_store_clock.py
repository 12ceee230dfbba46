"""What `Date` headers tell of a store's clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.object_store import NotFound
from storage_backends.s3 import READING_S, S3Store, StoreClock
from tests._support.moto_server import MotoServer, moto_server


def test_nothing_is_known_before_the_first_answer() -> None:
    assert StoreClock().skew_s() is None


def test_one_answer_tells_it_to_half_a_second_and_the_time_that_it_took() -> None:
    clock = StoreClock()
    clock.answered(1000.0, sent_s=1000.0, received_s=1000.5)
    assert clock.skew_s() == pytest.approx(0.25)


def test_answers_within_a_second_narrow_each_other_down() -> None:
    clock = StoreClock()
    for step in range(100):
        now_s = 5_000.0 + step * 0.1
        clock.answered(float(int(now_s + 3.21)), sent_s=now_s, received_s=now_s + 0.01)
    assert clock.skew_s() == pytest.approx(3.21, abs=0.06)


@given(
    skew_s=st.floats(-100.0, 100.0),
    gaps_s=st.lists(st.floats(0.001, 20.0), min_size=1, max_size=30),
    took_s=st.floats(0.001, 2.0),
    share=st.floats(0.0, 1.0),
)
def test_the_true_difference_is_never_further_than_the_first_answer_allows(
    skew_s: float, gaps_s: list[float], took_s: float, share: float
) -> None:
    clock = StoreClock()
    now_s = 1_000_000.0
    for gap_s in gaps_s:
        now_s += gap_s
        clock.answered(float(int(now_s + share * took_s + skew_s)), sent_s=now_s, received_s=now_s + took_s)
        found_s = clock.skew_s()
        assert found_s is not None
        assert abs(found_s - skew_s) <= (1.0 + took_s) / 2 + 1e-6


def test_a_clock_that_is_set_is_read_anew_at_once() -> None:
    clock = StoreClock()
    clock.answered(1000.0, sent_s=1000.2, received_s=1000.3)
    clock.answered(1011.0, sent_s=1001.2, received_s=1001.3)
    assert clock.skew_s() == pytest.approx(10.25)
    clock.answered(1002.0, sent_s=1002.2, received_s=1002.3)
    assert clock.skew_s() == pytest.approx(0.25)


def test_what_a_long_time_ago_was_so_does_not_hold_for_ever() -> None:
    clock = StoreClock()
    clock.answered(1000.9999, sent_s=1000.0, received_s=1000.0)
    now_s = 1000.0
    for _ in range(3):
        now_s += READING_S
        clock.answered(now_s + 0.5, sent_s=now_s, received_s=now_s)
    assert clock.skew_s() == pytest.approx(1.0)


@pytest.fixture(scope="module")
def moto() -> Iterator[MotoServer]:
    with moto_server() as server:
        yield server


@pytest.mark.parametrize("ahead_s", [0.0, 7.5, -3600.0])
def test_s3_tells_how_far_its_clock_is_from_ours(
    moto: MotoServer, ahead_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    with S3Store(moto.settings("clock"), wall_clock=lambda: now_s[0]) as store:
        assert store.clock_skew_s() is None
        store.put("a", b"1")
        first_s = store.clock_skew_s()
        assert first_s is not None
        # moto's clock is this machine's; ours is set beside it.
        now_s[0] = first_s - ahead_s
        store.head("a")
        found_s = store.clock_skew_s()
        assert found_s is not None
        assert abs(found_s - ahead_s) <= 2.0


def test_an_error_tells_the_time_too(moto: MotoServer) -> None:
    with S3Store(moto.settings("clock"), wall_clock=lambda: 0.0) as store:
        with pytest.raises(NotFound):
            store.head("nothing")
        found_s = store.clock_skew_s()
        assert found_s is not None
        assert found_s > 1_600_000_000
