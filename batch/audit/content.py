"""Whether an object is whole and says what names it: the bytes of buckets, checkpoints, progress.

Owns: the full decoding of one object and what is checked of it. Pure: bytes in, flaws out.
Does not own: reading (`reading`), and how much a flaw matters (`object_task`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from batch.audit.findings import Flaw, Kind
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    manifest,
    position_bitmap,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.bucket_format import BucketMetadata
from storage_backends.formats.manifest import LiveBucket, ObjectReference, Progress
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class BucketContent:
    """A bucket that was decoded. `rows` is None when it could not be."""

    flaws: tuple[Flaw, ...]
    metadata: BucketMetadata | None = None
    rows: Rows | None = None


def damaged(error: format_errors.FormatError) -> Flaw:
    return Flaw(Kind.DAMAGED, str(error), error.offset)


def _disagrees(detail: str) -> Flaw:
    return Flaw(Kind.DISAGREES, detail)


def bytes_flaw(reference: ObjectReference, body: bytes, what: str) -> Flaw | None:
    """Whether the bytes are those that the manifest names."""
    try:
        manifest.check_bytes(reference, body, what)
    except format_errors.FormatError as error:
        return damaged(error)
    return None


# ---- buckets


def bucket_content(
    body: bytes, *, topic: str, reference: ObjectReference | None = None, live: LiveBucket | None = None
) -> BucketContent:
    """Everything that can be told of a bucket from its bytes and what its manifest says. `topic`: "" = not known."""
    named = bytes_flaw(reference, body, "bucket") if reference is not None else None
    try:
        metadata, rows = bucket_format.decode_bucket(body)
        positions = PositionSet.of(metadata.positions)
        kept = [PositionSet.of(each.positions) for each in metadata.kept]
    except format_errors.FormatError as error:
        return BucketContent((damaged(error),))
    if named is not None:
        # It is whole, and another one than the manifest names.
        return BucketContent((named,), metadata, rows)
    flaws = [*_row_flaws(metadata, rows, positions), *_kept_flaws(metadata, positions, kept)]
    if topic and metadata.topic != topic:
        flaws.append(_disagrees(f"it names topic {metadata.topic!r}"))
    if live is not None:
        flaws += _live_flaws(live, metadata, rows, body)
    return BucketContent(tuple(flaws), metadata, rows)


def _row_flaws(metadata: BucketMetadata, rows: Rows, positions: PositionSet) -> Iterator[Flaw]:
    """Rows against the metadata; `decode_bucket` has compared the hash, and that they are as many as the table says."""
    if len(rows) != metadata.rows:
        yield _disagrees(f"it has {len(rows)} rows, but its metadata says {metadata.rows}")
    held = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))
    if len(held) != len(rows):
        yield _disagrees(f"{len(rows) - len(held)} of its positions occur twice")
    if held != positions:
        yield _disagrees(
            f"its rows have {len(held - positions)} positions that its metadata has not, its metadata has "
            f"{len(positions - held)} that no row has"
        )
    if not position_bitmap.in_order(metadata.positions):
        yield _disagrees("the bitmaps of its positions do not ascend")
    if not _in_due_order(rows):
        yield _disagrees("its rows of one time are not ordered by position")


def _in_due_order(rows: Rows) -> bool:
    due, ledger, entry = rows.deliver_at_ms, rows.ledger_id, rows.entry_id
    same_due = due[1:] == due[:-1]
    same_ledger = ledger[1:] == ledger[:-1]
    falls = (ledger[1:] < ledger[:-1]) | (same_ledger & (entry[1:] < entry[:-1]))
    return not bool((same_due & falls).any())


def _kept_flaws(metadata: BucketMetadata, positions: PositionSet, kept: Sequence[PositionSet]) -> Iterator[Flaw]:
    """Every row of a merged bucket was copied from a source, and none that is not there."""
    copied = NO_POSITIONS
    for each, from_source in zip(metadata.kept, kept, strict=True):
        if not from_source <= positions:
            yield _disagrees(f"{len(from_source - positions)} positions kept from {each.source} are missing")
        copied |= from_source
    if kept and not positions <= copied:
        yield _disagrees(f"{len(positions - copied)} of its positions are kept from no source")


def _live_flaws(live: LiveBucket, metadata: BucketMetadata, rows: Rows, body: bytes) -> Iterator[Flaw]:
    """What the manifest says of the bucket against what it is."""
    if not len(rows):
        yield _disagrees("it has no rows")
        return
    # `decode_bucket` has compared the hash of the metadata with that of the rows.
    found = {
        "subscription_id": metadata.subscription_id,
        "rows": len(rows),
        "hash_low": metadata.hash_low,
        "hash_high": metadata.hash_high,
        "first_ledger_id": int(rows.ledger_id.min()),
        "last_ledger_id": int(rows.ledger_id.max()),
        "min_deliver_at_ms": int(rows.deliver_at_ms[0]),
        "max_deliver_at_ms": int(rows.deliver_at_ms[-1]),
        "segments": _segments(body),
    }
    for name, value in found.items():
        said = getattr(live, name)
        if said != value:
            yield _disagrees(f"its {name} is {value}, but the manifest says {said}")
    if bool(live.level) != bool(metadata.kept):
        yield _disagrees(f"the manifest says level {live.level}, but it keeps rows of {len(metadata.kept)} sources")


def _segments(body: bytes) -> int:
    start, length = bucket_format.footer_range(len(body))
    found = bucket_format.decode_footer(body[start : start + length], len(body))
    return len(bucket_format.decode_table(body[found.offset : start], found).segments)


# ---- progress and checkpoints


def progress_flaws(progress: Progress) -> Iterator[Flaw]:
    """Decodes every bitmap and every column."""
    try:
        for part in progress.buckets:
            _decode(part.gone)
            for acknowledged in part.acknowledged:
                _decode(acknowledged.positions)
        for level in progress.levels:
            _decode(level.positions)
        for each in progress.redeliveries:
            for nacked in each.nacked:
                redelivery_columns.decode_nacked(nacked)
            for plane in each.counts:
                _decode(plane.positions)
            if each.dead_letters is not None:
                redelivery_columns.decode_dead_letters(each.dead_letters)
    except format_errors.FormatError as error:
        yield damaged(error)


def _decode(bitmaps: Sequence[PositionBitmap]) -> None:
    if not position_bitmap.in_order(bitmaps):
        raise format_errors.FormatError("progress", 0, "the bitmaps of positions do not ascend by ledger and page")
    PositionSet.of(bitmaps)


def checkpoint_flaws(body: bytes, *, shard: int, reference: manifest.CheckpointCut | None) -> Iterator[Flaw]:
    """Decodes everything, what is carried over included. `reference`: what the manifest says, None when none does."""
    named = None if reference is None else bytes_flaw(reference.object, body, "checkpoint")
    try:
        found = checkpoint_format.decode_checkpoint(body)
        for part in found.topics:
            for carried in part.carried:
                for record in carried.records:
                    if isinstance(record, slot_format.StoredRecord):
                        record.decoded()
    except format_errors.FormatError as error:
        yield damaged(error)
        return
    if named is not None:
        yield named
        return
    if found.shard != shard:
        yield _disagrees(f"it names shard {found.shard}")
    if reference is not None and found.slot != reference.slot:
        yield _disagrees(f"it is of slot {found.slot}, the manifest says {reference.slot}")
    for part in found.topics:
        yield from progress_flaws(part.progress)
        for rows in (part.mutable_rows, *(own.rows for own in part.own_rows)):
            positions = PositionSet.of(position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id))
            if len(positions) != len(rows):
                yield _disagrees(f"topic {part.topic!r} has {len(rows) - len(positions)} positions twice")


def not_due(rows: Rows, now_ms: int) -> int:
    """How many of the rows are due later."""
    return int(np.count_nonzero(rows.deliver_at_ms > np.uint64(now_ms)))
