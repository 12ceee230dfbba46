"""The rows of a service: each is added once, to its topic, in its time, and is found again by its position."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import service_load
from benchmarks.service_load import Load, Mode


def load(*, topics: int, rows_per_s: int, one_by_one: bool) -> Load:
    return Load(
        seconds=2,
        topics=topics,
        subscriptions=1,
        rows_per_s=rows_per_s,
        delays_ms=(1, 5),
        seed=1,
        mode=Mode.PLAIN,
        one_by_one=one_by_one,
        clients=2,
    )


@pytest.mark.parametrize("one_by_one", [True, False])
@pytest.mark.parametrize(("topics", "rows_per_s"), [(1, 1_000), (20, 1_000), (7, 3_210), (100, 60)])
def test_each_row_is_added_once_in_order_of_time_to_its_topic(topics: int, rows_per_s: int, one_by_one: bool) -> None:
    of = load(topics=topics, rows_per_s=rows_per_s, one_by_one=one_by_one)
    requests = list(of.requests())
    rows = np.concatenate([request.rows for request in requests])
    assert sorted(rows.tolist()) == list(range(of.rows))
    times = [request.after_s for request in requests]
    assert times == sorted(times)
    assert times[-1] <= of.seconds + topics * of.rows_a_request / rows_per_s
    for request in requests:
        assert {service_load.topic_name(row % topics) for row in request.rows.tolist()} == {request.topic}
        assert len(request.rows) <= of.rows_a_request
    assert np.array_equal(service_load.rows_at(*service_load.positions(rows)), rows)
