"""Merges several buckets of one index into one, and applies progress of the sources to the merged bucket.

A merge drops only rows that are gone by the progress that it was planned with: it knows no clock, no trimming and no
entitlement. A row that leaves its source between plan and commit, and any later progress that names a source, counts
for the rows that `kept` says were copied from it. The `kept` of a source is carried on for those of its rows that were
copied again, so that a name that is two merges old still has a meaning.

A check ensures that no row is lost or doubled. `bucket_merging` reads and writes, `topic_manifest.Merge` commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from storage_backends.formats import bucket_format, format_errors
from storage_backends.formats.bucket_format import BucketMetadata, EncodedBucket, KeptRows
from storage_backends.formats.manifest import BucketProgress, LiveBucket, Progress
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionSet
from storage_backends.formats.row_columns import Rows, id_hash, row_hash
from storage_backends.formats.segment import SegmentLimits

_U64_MASK = (1 << 64) - 1


class NotConserved(Exception):
    """The error of a merge that would lose a row or hold it twice, and must not be written."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Bits:
    """The positions gone from a bucket, and those acknowledged in it by each subscription that acknowledged any."""

    gone: PositionSet
    acknowledged: Mapping[int, PositionSet]


def bits_of(bucket: str, kept: Sequence[KeptRows], progress: Progress) -> Bits:
    """Return what progress says about the bucket of that name.

    `kept` is that of its metadata. Progress may name a source of the bucket, or a source of a source. Names that the
    bucket does not know are ignored. Raises FormatError for bytes that are no bitmap.
    """
    copied: dict[str, list[KeptRows | None]] = {bucket: [None]}
    for each in kept:
        copied.setdefault(each.source, []).append(each)
    gone = NO_POSITIONS
    acknowledged: dict[int, PositionSet] = {}
    for part in progress.buckets:
        for within in copied.get(part.bucket, ()):
            found = _within(part, None if within is None else PositionSet.of(within.positions))
            gone |= found.gone
            for subscription_id, positions in found.acknowledged.items():
                acknowledged[subscription_id] = acknowledged.get(subscription_id, NO_POSITIONS) | positions
    return Bits(gone, {number: positions for number, positions in acknowledged.items() if positions})


def concerning(progress: Progress, buckets: Iterable[tuple[str, Sequence[KeptRows]]]) -> Progress:
    """Return the progress under the names that `bits_of` looks for: each bucket's own and those in its `kept`.

    The bits of some buckets among many are read from the result: to search all progress for each bucket would take time
    proportional to the product.
    """
    names = {name for bucket, kept in buckets for name in (bucket, *(each.source for each in kept))}
    return Progress(buckets=tuple(part for part in progress.buckets if part.bucket in names))


def _within(part: BucketProgress, within: PositionSet | None) -> Bits:
    """Return the bits of a part of progress, of those positions only, or of all if `within` is None."""

    def counting(positions: PositionSet) -> PositionSet:
        return positions if within is None else positions & within

    return Bits(
        counting(PositionSet.of(part.gone)),
        {each.subscription_id: counting(PositionSet.of(each.positions)) for each in part.acknowledged},
    )


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Source:
    """A live bucket that was read whole: as the manifest names it, its metadata, and its rows in due order."""

    live: LiveBucket
    metadata: BucketMetadata
    rows: Rows

    @property
    def name(self) -> str:
        return self.live.object.name


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Merged:
    """The result of a merge.

    `encoded` is None if no row is left. `dropped` holds by source the positions that were gone and not copied,
    `dropped_hash` the hash of their rows, `dropped_id_hash` that of those with schedule ids. `level` and `rows`, in due
    order, are those of the merged bucket.
    """

    encoded: EncodedBucket | None
    kept: tuple[KeptRows, ...]
    dropped: Mapping[str, PositionSet]
    dropped_hash: tuple[int, int]
    dropped_id_hash: tuple[int, int]
    level: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """A source, and which of its rows are copied."""

    source: Source
    kept: PositionSet
    dropped: PositionSet
    rows: Rows
    dropped_rows: Rows


def merged(
    sources: Sequence[Source],
    progress: Progress,
    *,
    topic: str,
    subscription_id: int,
    limits: SegmentLimits,
    compatible: bool,
) -> Merged:
    """Merge the sources, all of the index of `subscription_id`, into one bucket.

    `progress` is that of the manifest which the merge is planned from. O(n log n): runs in a thread; its steps that
    hold the interpreter are short. Raises FormatError, naming the source, if a source contradicts the manifest or its
    metadata, and NotConserved if two sources hold the same position, or the hashes do not balance.
    """
    progress = concerning(progress, ((source.name, source.metadata.kept) for source in sources))
    parts = [_part(source, progress, subscription_id) for source in sources]
    kept_positions = _disjoint_union(parts)
    rows = Rows.merged_by_due([part.rows for part in parts])
    dropped_hash = _hash_sum(row_hash(part.dropped_rows) for part in parts)
    dropped_id_hash = _hash_sum(id_hash(part.dropped_rows) for part in parts)
    kept = _kept(parts)
    encoded = None
    if len(rows):
        encoded = bucket_format.encode_bucket(
            rows,
            topic=topic,
            subscription_id=subscription_id,
            limits=limits,
            compatible=compatible,
            kept=kept,
            positions=kept_positions.bitmaps(),
        )
    check_conserved([part.source.live for part in parts], encoded, dropped_hash, dropped_id_hash)
    return Merged(
        encoded,
        kept,
        {part.source.name: part.dropped for part in parts},
        dropped_hash,
        dropped_id_hash,
        1 + max(part.source.live.level for part in parts),
        rows,
    )


def check_conserved(
    sources: Sequence[LiveBucket],
    written: EncodedBucket | LiveBucket | None,
    dropped: tuple[int, int],
    dropped_ids: tuple[int, int],
) -> None:
    """Raise NotConserved unless the sources' rows are those written and dropped together, and so are their ids.

    `dropped` and `dropped_ids` are the hashes of the rows that were dropped, and of those with ids.
    """
    made = () if written is None else (written,)
    before = _hash_sum((each.hash_low, each.hash_high) for each in sources)
    after = _hash_sum((dropped, *((each.hash_low, each.hash_high) for each in made)))
    if before != after:
        raise NotConserved(f"the rows of the sources have hash {before}, those kept and dropped {after}")
    before = _hash_sum((each.id_hash_low, each.id_hash_high) for each in sources)
    after = _hash_sum((dropped_ids, *((each.id_hash_low, each.id_hash_high) for each in made)))
    if before != after:
        raise NotConserved(f"the schedule ids of the sources have hash {before}, those kept and dropped {after}")


def _hash_sum(hashes: Iterable[tuple[int, int]]) -> tuple[int, int]:
    low = high = 0
    for each in hashes:
        low += each[0]
        high += each[1]
    return low & _U64_MASK, high & _U64_MASK


def _part(source: Source, progress: Progress, subscription_id: int) -> _Part:
    live, rows = source.live, source.rows
    if live.subscription_id != subscription_id:
        raise ValueError(f"bucket {source.name} is of index {live.subscription_id}, not of {subscription_id}")
    positions = PositionSet.of(source.metadata.positions)
    dropped = positions & bits_of(source.name, source.metadata.kept, progress).gone
    kept = positions - dropped
    mask = kept.mask_of(rows.ledger_id, rows.entry_id)
    found, expected = (len(rows), int(mask.sum())), (live.rows, len(kept))
    if found != expected or len(positions) != live.rows:
        detail = (
            f"it has {found[0]} rows, {found[1]} of them among the {expected[1]} positions to keep; the manifest says "
            f"{live.rows} rows, its metadata {len(positions)} positions"
        )
        raise format_errors.FormatError(f"bucket {source.name}", 0, detail)
    if not dropped:
        return _Part(source, kept, dropped, rows, Rows.empty())
    return _Part(source, kept, dropped, rows.take(np.flatnonzero(mask)), rows.take(np.flatnonzero(~mask)))


def _disjoint_union(parts: Sequence[_Part]) -> PositionSet:
    union = NO_POSITIONS
    for part in parts:
        both = union & part.kept
        if both:
            (ledger_id, page), entries = next(iter(both.items()))
            raise NotConserved(
                f"{len(both)} rows of bucket {part.source.name} are held by another source as well, the first in "
                f"ledger {ledger_id} page {page} with low entry id {entries[0]}"
            )
        union |= part.kept
    return union


def _kept(parts: Sequence[_Part]) -> tuple[KeptRows, ...]:
    """Return the rows kept of each source, and of each source of a source.

    Sources of which no row was kept are left out.
    """
    copied = [(part.source.name, part.kept) for part in parts]
    for part in parts:
        copied += [
            (former.source, PositionSet.of(former.positions) & part.kept) for former in part.source.metadata.kept
        ]
    return tuple(KeptRows(source=name, positions=positions.bitmaps()) for name, positions in copied if positions)
