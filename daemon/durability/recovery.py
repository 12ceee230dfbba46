"""Recovery of one topic: from its manifest, its part of the shard checkpoint and the journal's tail.

Owns: which of them counts for what, and the topic in memory that results.
Does not own: taking the shard over (`takeover`), claiming the topic's manifest (the caller, before this reads it), and
serving.

    state as of max(applied, c)  =  manifest, and where `applied` < c and the checkpoint has a part for the topic,
                                    that part in place of the manifest's progress
    state now                    =  that, and the decisions of the slots above

`c` is the checkpoint's slot. A bucket whose seal was cut before the checkpoint and is not in the manifest by then is
in the part with its rows: if `applied` has reached the cut's slot, its rows come from the bucket and only its bits
count, else they are rows of the mutable bucket.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Iterable

from pyroaring import BitMap64

from daemon.core.bucket import GoneSet
from daemon.core.mutable_bucket import MutableBucket
from daemon.core.positions import KeyedRows, PageTable, bitmap_of, contained, pages_of
from daemon.core.sealed_bucket import SealedBucket
from daemon.core.topic import Topic
from daemon.durability import bucket_objects, progress
from daemon.errors import Corruption
from storage_backends import object_store
from storage_backends.formats import bucket, checkpoint, errors, journal, manifest
from storage_backends.formats.manifest import BucketProgress
from storage_backends.formats.rows import Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicObjects:
    """What was read for a topic: its live buckets and its progress."""

    buckets: tuple[tuple[manifest.LiveBucket, bucket.BucketTable, bucket.BucketMetadata], ...]
    progress: manifest.Progress


def read_objects(
    store: object_store.ObjectStore,
    tip: manifest.TopicManifest,
    part: checkpoint.TopicPart | None,
    executor: concurrent.futures.Executor,
) -> TopicObjects:
    """Reads what the manifest names, in parallel. `executor` must not be the one that runs this."""
    opened = executor.map(lambda live: (live, *bucket_objects.open_bucket(store, live)), tip.live)
    return TopicObjects(tuple(opened), _progress(store, tip, part))


def _progress(
    store: object_store.ObjectStore, tip: manifest.TopicManifest, part: checkpoint.TopicPart | None
) -> manifest.Progress:
    if part is not None:
        return part.progress
    if tip.progress_object is None:
        return tip.progress or manifest.Progress()
    key = tip.progress_object.name
    try:
        return manifest.decode_progress(store.get(key))
    except errors.FormatError as error:
        raise Corruption(f"progress {key}: {error}") from error
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"progress {error}") from error


def counting_part(tip: manifest.TopicManifest, loaded: checkpoint.Checkpoint | None) -> checkpoint.TopicPart | None:
    """The topic's part of the checkpoint, if it is newer than the manifest."""
    if loaded is None or tip.applied >= loaded.slot:
        return None
    parts = (part for part in loaded.topics if part.topic_id == tip.topic_id and part.incarnation == tip.incarnation)
    return next(parts, None)


def restore(
    topic: Topic,
    tip: manifest.TopicManifest,
    objects: TopicObjects,
    part: checkpoint.TopicPart | None,
    *,
    elapsed_ms: int,
) -> None:
    """Puts the state as of max(`applied`, c) into a new topic."""
    pages = topic.index.pages
    by_bucket = {each.bucket: each for each in objects.progress.buckets}
    for live, table, metadata in objects.buckets:
        topic.index.add_sealed(_sealed_bucket(pages, live, table, metadata, by_bucket.get(live.object.name)))
    if part is not None:
        _restore_mutable(topic.index.mutable, pages, part.mutable_rows, by_bucket.get(""), elapsed_ms)
        for sealing in part.sealing:
            if tip.applied < sealing.slot:
                _restore_mutable(topic.index.mutable, pages, sealing.rows, by_bucket.get(sealing.bucket), elapsed_ms)
    topic.index.dismiss_all_but(topic.subscriptions)


def _sealed_bucket(
    pages: PageTable,
    live: manifest.LiveBucket,
    table: bucket.BucketTable,
    metadata: bucket.BucketMetadata,
    bits: BucketProgress | None,
) -> SealedBucket:
    rows = pages.from_stored(metadata.positions)
    gone = pages.from_stored(bits.gone) if bits is not None else BitMap64()
    named = pages_of(rows)
    restored = SealedBucket(live, table.segments, present=rows - gone, gone=GoneSet(gone), pages=pages)
    if bits is not None:
        restored.acknowledged = progress.acknowledged_from_stored(pages, bits.acknowledged)
    # Of some pages everything may be gone.
    pages.forget_unheld(named)
    return restored


def _restore_mutable(
    mutable: MutableBucket, pages: PageTable, rows: Rows, bits: BucketProgress | None, elapsed_ms: int
) -> None:
    keyed = KeyedRows(rows, pages.intern(rows.ledger_id, rows.entry_id))
    named = pages_of(bitmap_of(keyed.keys))
    if bits is not None and bits.gone:
        keyed = keyed.take(~contained(keyed.keys, pages.from_stored(bits.gone)))
    if len(keyed):
        mutable.add(keyed, bitmap_of(keyed.keys), elapsed_ms=elapsed_ms)
    if bits is not None:
        for number, keys in progress.acknowledged_from_stored(pages, bits.acknowledged).items():
            mutable.acknowledged_by(number).update(keys)
    pages.forget_unheld(named)


def replay(
    topic: Topic,
    slots: Iterable[tuple[journal.SlotHeader, tuple[journal.Record, ...]]],
    *,
    state_slot: int,
    elapsed_ms: int,
) -> int:
    """Applies the topic's decisions of the slots above `state_slot`, in order; how many rows they name."""
    rows = 0
    for header, records in slots:
        if header.slot <= state_slot:
            continue
        for record in records:
            if record.topic_id == topic.topic_id:
                topic.apply(record, header.slot, elapsed_ms=elapsed_ms)
                rows += len(record.ledger_id if isinstance(record, journal.GoneRecord) else record.rows)
    return rows
