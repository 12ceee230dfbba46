"""Tests that the series of a relay's metrics stay few."""

from __future__ import annotations

from tarry_relay.health import Health
from tarry_relay.relay_metrics import RelayMetrics


def test_answers_share_a_series_from_the_fifty_first_code_on() -> None:
    metrics = RelayMetrics(Health())
    for number in range(10_000):
        metrics.not_taken("refused for good", f"no such reason: {number}")
    samples = [
        sample
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "tarry_relay_answers_total"
    ]
    assert len(samples) == 51
    assert {sample.value for sample in samples if sample.labels["code"] == "other"} == {9_950}
