"""What the tests of the formats share: strategies for rows, realistic rows, and how rows are compared."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from storage_backends.formats.rows import U32, U64, Rows

U64_MAX = (1 << 64) - 1
NOON_MS = 1_700_000_000_000
DAY_MS = 86_400_000

u64 = st.integers(0, U64_MAX)
# Close together as in practice, and at the ends of the range.
times_ms = st.one_of(st.integers(NOON_MS, NOON_MS + 600_000), u64)
ledgers = st.one_of(st.integers(5, 7), u64)
entries = st.one_of(st.integers(0, 300), st.integers((1 << 32) - 3, (1 << 32) + 3), u64)


def column(values: list[int]) -> U64:
    return np.array(values, np.uint64)


@st.composite
def u64_column(draw: st.DrawFn, size: int | None = None) -> U64:
    """So many values, or a few."""
    few = (0, 6) if size is None else (size, size)
    return column(draw(st.lists(u64, min_size=few[0], max_size=few[1])))


@st.composite
def u32_column(draw: st.DrawFn, size: int) -> U32:
    values = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=size, max_size=size))
    return np.array(values, np.uint32)


@st.composite
def rows(draw: st.DrawFn, *, min_size: int = 0, max_size: int = 60, keyed: bool | None = None) -> Rows:
    """Rows of any values; with key hashes, without, or as it comes."""
    drawn = draw(st.lists(st.tuples(times_ms, ledgers, entries), min_size=min_size, max_size=max_size))
    key_hash = None
    if draw(st.booleans()) if keyed is None else keyed:
        hashes = draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=len(drawn), max_size=len(drawn)))
        key_hash = np.array(hashes, np.uint32)
    return Rows(
        column([time for time, _, _ in drawn]),
        column([ledger for _, ledger, _ in drawn]),
        column([entry for _, _, entry in drawn]),
        key_hash,
    )


def tuples(some: Rows) -> list[tuple[int, int, int, int | None]]:
    """The rows one by one: (deliver_at_ms, ledger_id, entry_id, key_hash)."""
    hashes = [None] * len(some) if some.key_hash is None else some.key_hash.tolist()
    return list(zip(some.deliver_at_ms.tolist(), some.ledger_id.tolist(), some.entry_id.tolist(), hashes, strict=True))


def random_delays(count: int, *, span_ms: int = DAY_MS, keyed: bool = False, seed: int = 1) -> Rows:
    """One ledger, entries in arrival order, due at random within the span."""
    generator = np.random.default_rng(seed)
    return Rows(
        (NOON_MS + generator.integers(0, span_ms, count)).astype(np.uint64),
        np.full(count, 77, np.uint64),
        np.arange(count, dtype=np.uint64),
        generator.integers(0, 1 << 32, count, dtype=np.uint32) if keyed else None,
    )


def fixed_delay(count: int, *, gap_ms: float, seed: int = 1) -> Rows:
    """One ledger, entries in arrival order, each due the same time after its random arrival."""
    gaps = np.random.default_rng(seed).exponential(gap_ms, count)
    return Rows(
        (NOON_MS + np.cumsum(gaps)).astype(np.uint64),
        np.full(count, 77, np.uint64),
        np.arange(count, dtype=np.uint64),
    )
