"""The size of a bucket with the default limits of its segments, entry 0, table and footer included."""

from __future__ import annotations

import numpy as np
import pytest

from storage_backends.formats import bucket_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends.formats._support import examples

ROWS = 200_000


def bytes_a_row(rows: Rows, *, compatible: bool = False) -> float:
    encoded = bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="orders", subscription_id=0, limits=SegmentLimits(), compatible=compatible
    )
    return len(encoded.body) / len(rows)


def several_ledgers() -> Rows:
    rows = examples.random_delays(ROWS)
    ledger, entry = np.divmod(rows.entry_id, np.uint64(20_000))
    return Rows(rows.deliver_at_ms, ledger, entry)


@pytest.mark.parametrize(
    ("case", "rows", "limit"),
    [
        ("random delays over a day", examples.random_delays(ROWS), 4.5),
        ("random delays over an hour", examples.random_delays(ROWS, span_ms=3_600_000), 4.5),
        ("random delays over a day, ten ledgers", several_ledgers(), 4.5),
        ("random delays over a day, random key hashes", examples.random_delays(ROWS, keyed=True), 8.5),
        ("fixed delay, 1,000 rows a second", examples.fixed_delay(ROWS, gap_ms=1), 2.0),
        ("fixed delay, 100 rows a second", examples.fixed_delay(ROWS, gap_ms=10), 2.0),
        ("fixed delay, 1 row a second", examples.fixed_delay(ROWS, gap_ms=1_000), 2.0),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_row_takes_at_most(case: str, rows: Rows, limit: float, capsys: pytest.CaptureFixture[str]) -> None:
    size = bytes_a_row(rows)
    with capsys.disabled():
        print(f"\n{case}: {size:.3f} bytes a row")  # noqa: T201
    assert size <= limit


def test_the_compatible_form_takes_no_more_than_the_pip_needs() -> None:
    assert bytes_a_row(examples.random_delays(ROWS), compatible=True) <= 17.5
