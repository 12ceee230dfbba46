"""Quotas: what is allowed, what is refused, and when to come again."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core import quotas
from daemon.core.quotas import ClientRates, DueSeconds, PendingRows, QuotaLimits, RowsOfSeconds
from daemon.errors import QuotaExceeded

NOW_MS = 1_000_000


def times(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def coming(*values: int, now_ms: int = NOW_MS) -> RowsOfSeconds:
    return RowsOfSeconds.of(times(*values), now_ms=now_ms)


# ---- topics, and what a subscription keeps that no add has brought


def test_as_many_topics_are_created_as_the_limit_says_and_not_one_more() -> None:
    quotas.check_topics(9, 10)
    for topics in (10, 11):
        with pytest.raises(QuotaExceeded, match=rf"has {topics} topics, and limits\.topics_max is 10") as caught:
            quotas.check_topics(topics, 10)
        assert caught.value.retry_after_ms is None


def test_as_many_positions_get_a_row_as_the_limit_says_and_not_one_more() -> None:
    quotas.check_nacked("s", nacked_rows=7, rows=3, rows_max=10)
    quotas.check_nacked("s", nacked_rows=20, rows=0, rows_max=10)
    with pytest.raises(QuotaExceeded, match=r"'s'.* is 10; 8 rows .* has 3 positions") as caught:
        quotas.check_nacked("s", nacked_rows=8, rows=3, rows_max=10)
    assert caught.value.retry_after_ms == quotas.PENDING_RETRY_MS
    with pytest.raises(QuotaExceeded) as caught:
        quotas.check_nacked("s", nacked_rows=0, rows=11, rows_max=10)
    assert caught.value.retry_after_ms is None


def test_as_many_positions_become_dead_letters_as_the_limit_says_and_not_one_more() -> None:
    quotas.check_dead_letters("s", dead_letters=7, rows=3, rows_max=10)
    quotas.check_dead_letters("s", dead_letters=20, rows=0, rows_max=10)
    with pytest.raises(QuotaExceeded, match=r"'s'.* is 10; there are 8 dead letters.* make 3 more") as caught:
        quotas.check_dead_letters("s", dead_letters=8, rows=3, rows_max=10)
    assert caught.value.retry_after_ms is None


# ---- pending rows


def test_as_many_rows_may_be_pending_as_the_limit_says_and_not_one_more() -> None:
    quotas.check_pending("topic t", "pending_rows_max", pending_rows=7, rows=3, rows_max=10)
    with pytest.raises(QuotaExceeded, match=r"topic t: pending_rows_max is 10; 8 rows are pending.* 3 new") as caught:
        quotas.check_pending("topic t", "pending_rows_max", pending_rows=8, rows=3, rows_max=10)
    assert caught.value.retry_after_ms == quotas.PENDING_RETRY_MS


def test_a_limit_of_0_is_none_and_a_request_without_new_rows_passes_above_any() -> None:
    quotas.check_pending("topic t", "pending_rows_max", pending_rows=1 << 40, rows=1 << 20, rows_max=0)
    quotas.check_pending("topic t", "pending_rows_max", pending_rows=20, rows=0, rows_max=10)


def test_waiting_is_not_advised_to_a_request_that_is_larger_than_the_limit() -> None:
    with pytest.raises(QuotaExceeded) as caught:
        quotas.check_pending("topic t", "pending_rows_max", pending_rows=0, rows=11, rows_max=10)
    assert caught.value.retry_after_ms is None


def test_the_rows_of_all_topics_are_those_counted_and_those_accepted_since() -> None:
    pending = PendingRows(10)
    pending.accepted(4)
    assert pending.rows == 4
    pending.begin_count()
    pending.accepted(2)
    assert pending.rows == 6
    pending.end_count(3)
    assert pending.rows == 5, "what was accepted while it was counted may not be in the count"
    pending.check(5)
    with pytest.raises(QuotaExceeded, match=r"limits.pending_rows_max is 10; 5 rows .* 6 new"):
        pending.check(6)
    pending.begin_count()
    pending.end_count(3)
    assert pending.rows == 3


@given(
    st.lists(
        st.tuples(st.sampled_from(["accept", "leave", "count"]), st.integers(0, 2), st.integers(1, 5)), max_size=60
    )
)
def test_the_count_of_all_topics_is_never_too_low(events: list[tuple[str, int, int]]) -> None:
    """The topics are counted one after the other, and rows come and leave meanwhile."""
    pending = PendingRows(0)
    topics = [0, 0, 0]
    counted: list[int] = []
    for event, topic, rows in events:
        if event == "accept":
            topics[topic] += rows
            pending.accepted(rows)
        elif event == "leave":
            topics[topic] -= min(rows, topics[topic])
        else:
            if not counted:
                pending.begin_count()
            counted.append(topics[len(counted)])
            if len(counted) == len(topics):
                pending.end_count(sum(counted))
                counted = []
        assert pending.rows >= sum(topics)


# ---- rows that come due in one second


def test_rows_are_counted_by_the_second_in_which_they_come_due() -> None:
    assert dict(coming(1_000_000, 1_000_999, 1_001_000).pairs()) == {1000: 2, 1001: 1}


def test_what_is_due_already_comes_due_now() -> None:
    assert dict(coming(0, 5, 1_000_000).pairs()) == {1000: 3}


def test_a_second_takes_as_many_rows_as_the_limit_says_and_another_second_more() -> None:
    guard = DueSeconds()
    first = coming(1_005_000, 1_005_500, 1_005_999)
    guard.check("t", first, 4)
    guard.take(first)
    guard.check("t", coming(1_005_001), 4)
    with pytest.raises(
        QuotaExceeded, match=r"due_rows_per_second_max is 4; in the second from 1005000 ms on 3"
    ) as caught:
        guard.check("t", coming(1_006_000, 1_005_000, 1_005_001), 4)
    assert caught.value.retry_after_ms == quotas.DUE_RETRY_MS
    guard.check("t", coming(1_006_000, 1_006_001, 1_006_002, 1_006_003), 4)


def test_a_check_takes_nothing() -> None:
    guard = DueSeconds()
    for _ in range(5):
        guard.check("t", coming(1_005_000, 1_005_001), 2)


def test_waiting_is_not_advised_when_one_request_has_too_many_rows_for_one_second() -> None:
    with pytest.raises(QuotaExceeded) as caught:
        DueSeconds().check("t", coming(1_005_000, 1_005_001, 1_005_002), 2)
    assert caught.value.retry_after_ms is None


def test_a_count_finds_rows_of_mutable_buckets_and_segments_that_lie_in_one_second() -> None:
    columns = [times(1_000_000, 1_001_500, 1_001_999), times(1_001_000, 999_999, 3)]
    segments = [
        (times(1_001_000, 1_002_999, 500_000), times(1_001_999, 1_003_000, 500_001), np.array([10, 100, 7], np.uint32)),
        (times(1_004_000), times(1_004_000), np.array([1], np.uint32)),
    ]
    assert quotas.due_in_seconds(columns, segments, NOW_MS) == {1000: 1, 1001: 13, 1004: 1}


def test_what_is_staged_while_it_is_counted_is_added_to_the_count() -> None:
    guard = DueSeconds()
    assert guard.uncounted
    guard.begin_count([coming(1_005_000)])
    guard.take(coming(1_005_001, 1_006_000))
    guard.end_count({1005: 1, 1007: 2}, NOW_MS)
    assert not guard.uncounted
    for second, rows in ((1005, 3), (1006, 1), (1007, 2)):
        guard.check("t", coming(second * 1000), rows + 1)
        with pytest.raises(QuotaExceeded):
            guard.check("t", coming(second * 1000), rows)


def test_what_has_left_makes_room_after_a_count_but_not_in_this_second() -> None:
    guard = DueSeconds()
    guard.take(coming(1_000_000, 1_000_001, 1_005_000, 1_005_001))
    guard.begin_count([])
    guard.end_count({}, NOW_MS)
    guard.check("t", coming(1_005_000, 1_005_001), 2)
    with pytest.raises(QuotaExceeded):
        guard.check("t", coming(1_000_500), 2)


def test_a_refusal_wants_a_count() -> None:
    guard = DueSeconds()
    guard.begin_count([])
    guard.end_count({1005: 2}, NOW_MS)
    guard.check("t", coming(1_005_000), 3)
    assert not guard.wants_count
    with pytest.raises(QuotaExceeded):
        guard.check("t", coming(1_005_000), 2)
    assert guard.wants_count


def test_seconds_that_are_past_are_forgotten_by_a_count_that_they_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "STALE_SECONDS_MAX", 10)
    guard = DueSeconds()
    guard.begin_count([])
    guard.end_count({}, NOW_MS)
    for second in range(10):
        guard.take(coming(NOW_MS + second * 1000))
        assert not guard.wants_count
    guard.take(coming(NOW_MS + 10_000))
    assert guard.wants_count


# ---- what one client adds

LIMITS = QuotaLimits(client_rows_per_second_max=100, client_bytes_per_second_max=1_000)


def add(rates: ClientRates, now_s: float, *, rows: int = 1, size_bytes: int = 1, client: str = "c") -> None:
    rates.check(client, now_s)
    rates.charge(client, now_s, rows=rows, size_bytes=size_bytes)


@pytest.mark.parametrize(
    ("used", "field", "ahead"),
    [
        ((250, 1), "client_rows_per_second_max is 100", 150),
        ((1, 3_500), "client_bytes_per_second_max is 1000", 2_500),
    ],
)
def test_a_debt_is_waited_for_exactly_as_long_as_the_hint_says(used: tuple[int, int], field: str, ahead: int) -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 50.0, rows=used[0], size_bytes=used[1])
    with pytest.raises(QuotaExceeded, match=f"{field}; client 'c' is {ahead} ahead") as caught:
        add(rates, 50.0)
    retry_after_ms = caught.value.retry_after_ms
    assert retry_after_ms is not None
    with pytest.raises(QuotaExceeded):
        add(rates, 50.0 + (retry_after_ms - 2) / 1000)
    add(rates, 50.0 + retry_after_ms / 1000)


def test_a_request_passes_while_the_balance_is_positive_however_large_it_is() -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 0.0, rows=99)
    add(rates, 0.0, rows=100_000)
    with pytest.raises(QuotaExceeded):
        add(rates, 900.0)
    add(rates, 1_001.0)


def test_no_more_than_one_second_is_saved_up() -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 0.0)
    add(rates, 1_000_000.0, rows=100)
    with pytest.raises(QuotaExceeded):
        add(rates, 1_000_000.0)


def test_clients_do_not_share_what_they_may_add() -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 0.0, rows=1_000)
    add(rates, 0.0, client="other")
    with pytest.raises(QuotaExceeded):
        add(rates, 0.0)


def test_a_refused_request_costs_nothing() -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 0.0, rows=150)
    for _ in range(100):
        with pytest.raises(QuotaExceeded):
            add(rates, 0.1, rows=1_000)
    add(rates, 0.51)


def test_a_clock_that_stands_still_or_goes_back_gives_nothing_and_takes_nothing() -> None:
    rates = ClientRates("t", LIMITS)
    add(rates, 10.0, rows=50)
    add(rates, 5.0, rows=49)
    add(rates, 5.0)
    with pytest.raises(QuotaExceeded):
        add(rates, 5.0)


def test_the_clients_that_are_remembered_are_bounded_and_the_longest_silent_one_is_forgotten() -> None:
    rates = ClientRates("t", LIMITS, clients_max=3)
    for number in range(3):
        add(rates, float(number), rows=1_000, client=f"c{number}")
    add(rates, 3.0, client="new")
    assert len(rates) == 3
    add(rates, 3.0, client="c0")
    with pytest.raises(QuotaExceeded):
        add(rates, 3.0, client="c2")


def test_without_limits_nobody_is_remembered() -> None:
    rates = ClientRates("t", QuotaLimits())
    add(rates, 0.0, rows=1_000_000, size_bytes=1 << 30)
    add(rates, 0.0)
    assert len(rates) == 0


def test_a_limit_on_rows_does_not_limit_bytes() -> None:
    rates = ClientRates("t", QuotaLimits(client_rows_per_second_max=10))
    add(rates, 0.0, size_bytes=1 << 40)
    add(rates, 0.0, rows=20)
    with pytest.raises(QuotaExceeded, match="client_rows"):
        add(rates, 0.0)
