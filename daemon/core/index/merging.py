"""Chooses sealed buckets to merge, and derives the merged bucket's state from its sources.

A merged bucket holds the rows of each source that were not gone when the merge was planned. Every decision since was
made on the sources, so what is true of their rows at adoption is true of its own. A row that is not gone is in both,
and a row of the merged bucket that is no longer in a source is gone.

Late rows lie before the head of the merged bucket and still wait: the clock was set back, or a source could not be
read.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from pyroaring import BitMap64

from daemon.core.index.bucket import GoneSet, SealedBucket
from daemon.core.index.position_keys import PAGE_BITS, KeyedRows, PageTable, contained, pages_of, within
from daemon.core.index.runs import SortedRun, earliest, in_due_order
from daemon.errors import InvariantViolated
from storage_backends.formats.bucket_format import BucketMetadata, BucketTable, SegmentInfos
from storage_backends.formats.manifest import LiveBucket

# The weight of a run with rows that are about to be delivered: much of what would be copied leaves at once. The weight
# is not higher, since choosing larger runs again and again makes merging expensive.
SOON_WEIGHT = 4
# The objects of a run may have this many times the rows allowed in the merged bucket, since gone rows are read, too.
STORED_ROWS_FACTOR = 2
_RUN_LEAST = 2


@dataclasses.dataclass(frozen=True, slots=True)
class MergeCandidate:
    """A sealed bucket of one index. `live_rows` are not gone; `stored_rows` are in its object.

    With `left_out` it cannot be merged now, and buckets on both sides of it are not neighbours. With `soon`, rows of it
    are about to be delivered.
    """

    name: str
    first_ledger_id: int
    last_ledger_id: int
    live_rows: int
    stored_rows: int
    left_out: bool = False
    soon: bool = False

    @property
    def place(self) -> tuple[int, int, str]:
        """The sort key by which buckets are neighbours; their ranges of ledgers may overlap."""
        return self.first_ledger_id, self.last_ledger_id, self.name


def chosen_run(
    candidates: Iterable[MergeCandidate], *, buckets_max: int, merge_buckets_max: int, rows_max: int
) -> list[MergeCandidate]:
    """Choose the neighbours to merge next, so that the index approaches `buckets_max` buckets (at least 1).

    The result is empty if the index has at most that many, or if no two neighbours together have at most `rows_max`
    rows. Among runs that reach the limit, or have `merge_buckets_max` buckets, the one with the fewest live rows wins
    (PIP-195), the first of equal ones. Shorter runs are chosen if none of these has few enough rows.
    """
    ordered = sorted(candidates, key=lambda candidate: candidate.place)
    longest = min(merge_buckets_max, len(ordered) - buckets_max + 1)
    for length in range(longest, _RUN_LEAST - 1, -1):
        start = _fewest_rows(ordered, length, rows_max)
        if start is not None:
            return ordered[start : start + length]
    return []


def _fewest_rows(ordered: Sequence[MergeCandidate], length: int, rows_max: int) -> int | None:
    """Return where the best run of a length starts, or None if there is none."""
    live, stored, left_out, soon = (
        [0, *itertools.accumulate(column)]
        for column in (
            [each.live_rows for each in ordered],
            [each.stored_rows for each in ordered],
            [each.left_out for each in ordered],
            [each.soon for each in ordered],
        )
    )
    best: int | None = None
    best_rows = 0
    for start in range(len(ordered) - length + 1):
        end = start + length
        rows = live[end] - live[start]
        fits = rows <= rows_max and stored[end] - stored[start] <= STORED_ROWS_FACTOR * rows_max
        if not fits or left_out[end] > left_out[start]:
            continue
        if soon[end] > soon[start]:
            rows *= SOON_WEIGHT
        if best is None or rows < best_rows:
            best, best_rows = start, rows
    return best


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class MergedBucket:
    """A merged bucket of the manifest, in the keys of its index, to be adopted once.

    `positions` are those of all its rows, `with_ids` those of rows with schedule ids, or None. `kept` has the row
    origin: the positions that came from each source, and from the sources of its sources. So a daemon that missed a
    merge in between finds the buckets that it knows.
    """

    live: LiveBucket
    segments: SegmentInfos
    positions: BitMap64
    kept: Mapping[str, BitMap64]
    with_ids: BitMap64 | None = None

    @staticmethod
    def of(pages: PageTable, live: LiveBucket, table: BucketTable, metadata: BucketMetadata) -> MergedBucket:
        """Build the bucket. The pages of all positions must be known and held. O(n): for a thread."""
        return MergedBucket(
            live=live,
            segments=table.segments,
            positions=pages.find_stored(metadata.positions),
            kept={each.source: pages.find_stored(each.positions) for each in metadata.kept},
            with_ids=pages.find_stored(metadata.id_positions) or None,
        )

    @property
    def name(self) -> str:
        return self.live.object.name


def segments_needed(
    segments: SegmentInfos, sources: Iterable[SealedBucket], *, boundary_ms: int, ahead_ms: int, ahead_max: int
) -> range:
    """Return the segments of a merged bucket, from 0, that must be in memory for its adoption.

    These are the segment with the boundary, and earlier ones with rows that wait, because the clock was set back or a
    source cannot be read. At most `ahead_max` later ones that come due within `ahead_ms` are added, so that delivery
    goes on at once.
    """
    waits_from_ms = earliest(
        *[
            time_ms
            for source in sources
            if source.waiting_rows
            for time_ms in (source.head.next_due_ms(), source.late.next_due_ms())
        ]
    )
    from_ms = boundary_ms + 1 if waits_from_ms is None else min(waits_from_ms, boundary_ms + 1)
    min_ms, max_ms = segments.min_deliver_at_ms, segments.max_deliver_at_ms
    first = int(np.searchsorted(max_ms, np.uint64(from_ms), side="left"))
    end = max(first, int(np.searchsorted(min_ms, np.uint64(boundary_ms), side="right")))
    ahead_end = int(np.searchsorted(min_ms, np.uint64(boundary_ms + ahead_ms), side="right"))
    return range(first, max(end, min(ahead_end, end + ahead_max)))


def inherited(
    merged: MergedBucket,
    sources: Sequence[SealedBucket],
    pages: PageTable,
    loaded: Mapping[int, KeyedRows],
    *,
    boundary_ms: int,
) -> SealedBucket:
    """Build the merged bucket as the index serves it from now on.

    Its sets are those of `merged` and of the sources, which must not be used afterwards. The work is proportional to
    what is gone, passed or acknowledged, and to what was loaded. `sources` are those that the index serves. No passed
    row is due after `boundary_ms`. `loaded` has the segments that `segments_needed` names. Raises InvariantViolated if
    the bucket does not hold what it must.
    """
    if len(merged.positions) != merged.live.rows:
        raise InvariantViolated(
            f"bucket {merged.name} has {merged.live.rows} rows, and {len(merged.positions)} positions"
        )
    gone = _gone(merged, sources)
    present = merged.positions
    present -= gone
    _check_present(merged, sources)
    bucket = SealedBucket(
        merged.live, merged.segments, present=present, gone=GoneSet(gone), pages=pages, with_ids=merged.with_ids
    )
    bucket.passed = _united([source.passed for source in sources])
    bucket.passed_rows = sum(source.passed_rows for source in sources)
    for number in {number for source in sources for number in source.acknowledged}:
        found = [source.acknowledged[number] for source in sources if number in source.acknowledged]
        bucket.acknowledged[number] = _united(found)
    _place(bucket, loaded, boundary_ms)
    return bucket


def _gone(merged: MergedBucket, sources: Sequence[SealedBucket]) -> BitMap64:
    """Return the positions of the merged bucket that have left since the merge was planned."""
    gone = BitMap64()
    kept_rows = 0
    for source in sources:
        kept = merged.kept[source.name]
        kept_rows += len(kept)
        for part in () if source.gone is None else source.gone.freeze():
            gone |= part & kept
        # Pages without a row of the source when it was loaded, which may have had another ordinal then
        for page in pages_of(kept) - source.pages:
            gone |= within(kept, [(page << PAGE_BITS, (page + 1 << PAGE_BITS) - 1)])
    if kept_rows < len(merged.positions):
        # Every row of a source that is no longer served is gone.
        others = merged.positions.copy()
        for source in sources:
            others -= merged.kept[source.name]
        gone |= others
    return gone


def _check_present(merged: MergedBucket, sources: Iterable[SealedBucket]) -> None:
    """Check that present rows match. Gone rows of a source are never present, so equal counts mean equal rows."""
    rows = 0
    for source in sources:
        rows += source.present_rows
        if not source.present <= merged.positions:
            missing = source.present - merged.positions
            raise InvariantViolated(
                f"bucket {merged.name} does not hold {len(missing)} rows of its source {source.name} that are not gone"
            )
    if len(merged.positions) != rows:
        raise InvariantViolated(
            f"bucket {merged.name} has {len(merged.positions)} rows that are not gone, its sources have {rows}"
        )


def _united(sets: Sequence[BitMap64]) -> BitMap64:
    """Return the union, built in the largest of the sets."""
    united = max(sets, key=len, default=BitMap64())
    for each in sets:
        if each is not united:
            united |= each
    return united


def _place(bucket: SealedBucket, loaded: Mapping[int, KeyedRows], boundary_ms: int) -> None:
    """Move the head behind every row that is due by the boundary; pending ones among them are late."""
    table = bucket.table
    late = []
    head_row = 0
    for number, (first, end) in enumerate(table.row_ranges()):
        if int(table.min_ms[number]) > boundary_ms:
            break
        segment = loaded.get(number)
        if segment is not None:
            due_rows = int(np.searchsorted(segment.rows.deliver_at_ms, np.uint64(boundary_ms), side="right"))
            due = segment.take(slice(0, due_rows))
            waiting = contained(due.keys, bucket.present) & ~contained(due.keys, bucket.passed)
            late.append(due.take(waiting))
            head_row = first + due_rows
        elif int(table.max_ms[number]) <= boundary_ms:
            head_row = end
        else:
            raise InvariantViolated(f"bucket {bucket.name}: segment {number}, where its head is, is not in memory")
    bucket.late = SortedRun(in_due_order(late))
    bucket.head.move_to_row(head_row)
