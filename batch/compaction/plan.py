"""Chooses which buckets of a topic to merge: pure, from its manifest alone.

A run of neighbouring small buckets is chosen such that merging again and again stays cheap. No source has more than two
thirds of the rows of its run, so each merge makes a row's bucket at least half as large again; a row is copied O(log)
times until its bucket is as large as it may be. There are many ways to cut the buckets into such runs. The chosen one
leaves the fewest buckets; among those, its runs are most alike in size. Planning again from the outcome ends: every run
leaves fewer buckets.

Buckets that are delivered soon are left alone, because they would be copied just before their rows leave; buckets on
both sides of one are no neighbours. `storage_backends.topic_manifest` defines the order of neighbours.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np
import numpy.typing as npt

from storage_backends.formats.manifest import LiveBucket, Progress, TopicManifest
from storage_backends.formats.position_bitmap import count_of
from storage_backends.topic_manifest import adjacent_order

STORED_ROWS_FACTOR: Final = 2
"""Multiple of the merged bucket's largest row count that the objects of a run may hold.

Rows that are gone are read as well, into memory.
"""

LARGEST_SHARE: Final = (2, 3)
"""The largest part of the rows of a run that one source may have.

A half would part two buckets that are nearly alike; with more, large buckets would be copied for the sake of small
ones.
"""

TARGET_BYTES: Final = 64 << 20
SOURCES_MAX: Final = 64
SOURCES_MIN: Final = 2
SOON_MS: Final = 300_000

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """The limits of a run.

    `now_ms` is Unix time (ms). `target_bytes` and `rows_max` limit a merged bucket, `sources_max` and `sources_min` the
    buckets of a run. Buckets that are delivered within `soon_ms` are left alone.
    """

    now_ms: int
    rows_max: int
    target_bytes: int = TARGET_BYTES
    sources_max: int = SOURCES_MAX
    sources_min: int = SOURCES_MIN
    soon_ms: int = SOON_MS

    def __post_init__(self) -> None:
        if not 2 <= self.sources_min <= self.sources_max:
            raise ValueError(f"a run has {self.sources_min} to {self.sources_max} sources: it needs at least 2")
        if self.rows_max < 1 or self.target_bytes < 1 or self.soon_ms < 0:
            raise ValueError(f"limits of {self.rows_max} rows, {self.target_bytes} bytes, {self.soon_ms} ms")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Neighbouring buckets of one index that become one.

    `rows` and `size_bytes` are those of their objects, which are read.
    """

    sources: tuple[LiveBucket, ...]
    rows: int
    size_bytes: int

    @staticmethod
    def of(sources: Sequence[LiveBucket]) -> Run:
        return Run(
            sources=tuple(sources),
            rows=sum(live.rows for live in sources),
            size_bytes=sum(live.object.size_bytes for live in sources),
        )

    @property
    def removed(self) -> int:
        """The number of buckets that the run removes."""
        return len(self.sources) - 1

    @property
    def benefit(self) -> float:
        """The number of buckets removed for each byte read."""
        return self.removed / max(1, self.size_bytes)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(live.object.name for live in self.sources)


def gone_rows(progress: Progress) -> Mapping[str, int]:
    """Return by bucket how many rows progress says are gone under its own name; more rows may be gone."""
    return {part.bucket: count_of(part.gone) for part in progress.buckets if part.gone}


def plan(
    tip: TopicManifest,
    parameters: Parameters,
    *,
    gone: Mapping[str, int] | None = None,
    left_out: AbstractSet[str] = frozenset(),
) -> list[Run]:
    """Return the runs to merge, the most useful first, no bucket in two of them.

    `gone` counts the rows that a merge drops, by bucket, as far as they are known. `left_out` are buckets that no run
    may have.
    """
    runs = [
        run
        for stretch in _stretches(tip.live, parameters, left_out)
        if len(stretch) >= parameters.sources_min
        for run in _runs(stretch, parameters, gone or {})
    ]
    return by_benefit(runs)


def by_benefit(runs: Iterable[Run]) -> list[Run]:
    """Sort runs, the most useful first."""
    return sorted(runs, key=lambda run: (-run.benefit, run.sources[0].object.name))


def _stretches(
    live: Iterable[LiveBucket], parameters: Parameters, left_out: AbstractSet[str]
) -> Iterator[list[LiveBucket]]:
    """Yield neighbours of one index that may all be merged with one another."""
    for _, index in itertools.groupby(adjacent_order(live), key=lambda bucket: bucket.subscription_id):
        mergeable = itertools.groupby(
            index, key=lambda bucket: bucket.object.name not in left_out and not leaves_soon(bucket, parameters)
        )
        yield from (list(stretch) for may, stretch in mergeable if may)


def leaves_soon(bucket: LiveBucket, parameters: Parameters) -> bool:
    """Return whether most of the bucket is delivered soon.

    That holds if the middle of its span is near or past, and its end is not long over. Rows that should have left long
    ago wait for a subscriber that is not there.
    """
    middle_ms = (bucket.min_deliver_at_ms + bucket.max_deliver_at_ms) // 2
    until_ms = parameters.now_ms + parameters.soon_ms
    return middle_ms < until_ms and bucket.max_deliver_at_ms >= parameters.now_ms - parameters.soon_ms


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """Columns over the buckets of a stretch, sums with a 0 in front."""

    live_rows: I64
    live_rows_sum: I64
    stored_rows_sum: I64
    bytes_sum: I64
    live_bytes_sum: F64

    @staticmethod
    def of(buckets: Sequence[LiveBucket], gone: Mapping[str, int]) -> _Stretch:
        stored = np.array([bucket.rows for bucket in buckets], np.int64)
        dropped = np.array([gone.get(bucket.object.name, 0) for bucket in buckets], np.int64)
        size_bytes = np.array([bucket.object.size_bytes for bucket in buckets], np.int64)
        live = np.maximum(stored - dropped, 0)
        return _Stretch(
            live,
            _sums(live),
            _sums(stored),
            _sums(size_bytes),
            np.concatenate(([0.0], np.cumsum(size_bytes * (live / np.maximum(stored, 1))))),
        )


def _sums(column: I64) -> I64:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(column)))


def _runs(buckets: Sequence[LiveBucket], parameters: Parameters, gone: Mapping[str, int]) -> Iterator[Run]:
    """Return the best cut of a stretch, in order: O(n * sources_max)."""
    starts = _best_starts(_Stretch.of(buckets, gone), parameters)
    end = len(buckets)
    found = []
    while end > 0:
        start = starts[end]
        if end - start > 1:
            found.append(Run.of(buckets[start:end]))
        end = start
    return reversed(found)


def _best_starts(stretch: _Stretch, parameters: Parameters) -> list[int]:
    """Return for each end of a prefix of the stretch where the last part of its best cut starts.

    The part is a run, or one bucket that stays as it is.
    """
    count = len(stretch.live_rows)
    removed = np.zeros(count + 1, np.int64)
    # The sum of the squares of what runs read: least if they are alike
    cost = np.zeros(count + 1, np.float64)
    starts = [0] * (count + 1)
    for end in range(1, count + 1):
        starts[end], removed[end], cost[end] = end - 1, removed[end - 1], cost[end - 1]
        first = max(0, end - parameters.sources_max)
        # Longer and longer runs, from one bucket on
        window = slice(first, end)
        rows = (stretch.live_rows_sum[end] - stretch.live_rows_sum[window])[::-1]
        allowed = rows <= parameters.rows_max
        stored = (stretch.stored_rows_sum[end] - stretch.stored_rows_sum[window])[::-1]
        allowed &= stored <= STORED_ROWS_FACTOR * parameters.rows_max
        allowed &= (stretch.live_bytes_sum[end] - stretch.live_bytes_sum[window])[::-1] <= parameters.target_bytes
        part, whole = LARGEST_SHARE
        allowed &= whole * np.maximum.accumulate(stretch.live_rows[window][::-1]) <= part * rows
        allowed[: parameters.sources_min - 1] = False
        lengths = np.flatnonzero(allowed) + 1
        if not len(lengths):
            continue
        removed_with = removed[end - lengths] + lengths - 1
        most = lengths[removed_with == removed_with.max()]
        read = (stretch.bytes_sum[end] - stretch.bytes_sum[end - most]).astype(np.float64)
        cost_with = cost[end - most] + read * read
        best = int(np.argmin(cost_with))
        found = int(removed_with.max()), float(cost_with[best])
        if (-found[0], found[1]) < (-int(removed[end]), float(cost[end])):
            starts[end], removed[end], cost[end] = end - int(most[best]), found[0], found[1]
    return starts
