"""The flights are a log: ledgers ascend, entries count, and the year fits the span."""

from __future__ import annotations

import numpy as np
import pytest

import tarry
from examples import flights_log


@pytest.fixture(scope="module")
def log() -> flights_log.FlightsLog:
    return flights_log.read()


def test_every_flight_of_the_year_is_one_entry_of_its_days_ledger(log: flights_log.FlightsLog) -> None:
    assert len(log) == 336_776
    ledgers, first, rows = np.unique(log.ledger_id, return_index=True, return_counts=True)
    assert ledgers.tolist() == list(range(15_706, 15_706 + 365))
    assert (np.diff(log.ledger_id.astype(np.int64)) >= 0).all()
    assert all((log.entry_id[at : at + count] == np.arange(count)).all() for at, count in zip(first, rows, strict=True))


def test_the_key_is_the_tail_number_and_a_flight_without_one_has_none(log: flights_log.FlightsLog) -> None:
    assert log.key_hash[0] == tarry.key_hash("N14228")[0]
    assert np.count_nonzero(log.key_hash == 0) == 2_512


def test_the_first_flight_leaves_at_0515_and_the_year_is_compressed_onto_the_span(log: flights_log.FlightsLog) -> None:
    assert log.departure_minute.min() == 5 * 60 + 15
    assert log.departure_minute.max() < 365 * 1440
    due = log.deliver_at_ms(1_000_000, 60_000)
    assert (due.min(), due.max()) == (1_000_000, 1_060_000)
