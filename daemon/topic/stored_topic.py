"""Translates a topic's progress, redeliveries and properties between their forms in memory and in storage.

Progress is what is gone and acknowledged of each bucket, with negative acknowledgements, dead letters and delay levels.
A merged bucket is found under the names of its sources, too. Entries of an index that no longer exists, or of positions
that no longer have a row, are skipped when read. `bucket_lifecycle` writes progress, `storage_backends.formats.merge`
maps positions in a merge.

Properties are for people and applications; the daemon does nothing with them. Their object is written once, before the
manifest that names it, and never changed: manifests carry its reference until the properties change.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import zstandard
from pyroaring import BitMap64

from daemon.core.backlog.dead_letter_rows import DeadLetterRows, FrozenDeadLetters
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions.topic_state import RedeliveryCut, SubscriptionCut, TopicState
from daemon.core.index.index import BucketBits
from daemon.core.index.position_keys import UNKNOWN_KEY, KeyedRows, PageTable, bitmap_of, keys_of, ordinals_of, pages_of
from daemon.errors import Corruption
from storage_backends import bucket_reading, object_store, topic_manifest
from storage_backends.crash_points import crash_point
from storage_backends.formats import format_errors, index_ids, manifest, merge, redelivery_columns, segment
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import (
    BucketProgress,
    NamedValues,
    ObjectReference,
    Progress,
    SubscriptionProgress,
)
from storage_backends.formats.row_columns import U64

# ---- writing


def redeliveries_to_stored(
    pages: PageTable, cut: RedeliveryCut
) -> tuple[tuple[manifest.Redeliveries, ...], tuple[manifest.LevelRows, ...]]:
    """Return the part of progress on redeliveries and delay levels. O(n): runs in an executor.

    `pages` are those of any index of the topic.
    """
    zstd = segment.compressor()
    by_id = sorted(cut.subscriptions, key=operator.attrgetter("subscription_id"))
    redeliveries = (_redeliveries(pages, each, zstd) for each in by_id)
    return tuple(each for each in redeliveries if each is not None), _levels(pages, cut.levels)


def _redeliveries(
    pages: PageTable, cut: SubscriptionCut, zstd: zstandard.ZstdCompressor
) -> manifest.Redeliveries | None:
    """Return the redeliveries of a subscription, or None if there are none."""
    stored = manifest.Redeliveries(
        subscription_id=cut.subscription_id,
        nacked=_nacked(pages, cut.nacked, zstd),
        counts=tuple(
            manifest.CountPlane(index_id=index_id, bit=bit, positions=pages.to_stored(keys))
            for bit, plane in enumerate(cut.planes)
            for index_id, keys in _by_index(pages, plane)
        ),
        dead_letters=_dead_letters(cut.dead_letters, zstd),
        last_dead_letter_id=cut.last_dead_letter_id,
    )
    return None if stored == manifest.Redeliveries(subscription_id=cut.subscription_id) else stored


def _nacked(pages: PageTable, frozen: FrozenNacks, zstd: zstandard.ZstdCompressor) -> tuple[manifest.NackedRows, ...]:
    rows, times = frozen.rows()
    owners = pages.places.owners(rows.keys)
    stored = []
    for owner in np.unique(owners).tolist():
        here = owners == np.uint64(owner)
        stored.append(redelivery_columns.encode_nacked(owner, rows.rows.take(here), times[here], zstd))
    return tuple(stored)


def _dead_letters(frozen: FrozenDeadLetters, zstd: zstandard.ZstdCompressor) -> manifest.DeadLetters | None:
    rows = frozen.rows()
    if not len(rows):
        return None
    columns = redelivery_columns.DeadLetterColumns(
        rows.dead_letter_id,
        rows.ledger_id,
        rows.entry_id,
        rows.batch_index,
        rows.deliver_at_ms,
        rows.key_hash,
        rows.redelivery_count,
        rows.dead_at_ms,
        rows.reason,
        rows.text_index,
        rows.texts,
        rows.schedule_ids,
    )
    return redelivery_columns.encode_dead_letters(columns, zstd)


def _levels(pages: PageTable, levels: Iterable[tuple[int, int, BitMap64]]) -> tuple[manifest.LevelRows, ...]:
    """Join the positions of each level of an index, which may be given several times with other positions."""
    joined: dict[tuple[int, int], list[BitMap64]] = {}
    for index_id, level, keys in levels:
        if keys:
            joined.setdefault((index_id, level), []).append(keys)
    return tuple(
        manifest.LevelRows(index_id=index_id, delay_level=level, positions=pages.to_stored(BitMap64.union(*sets)))
        for (index_id, level), sets in sorted(joined.items(), key=lambda item: item[0])
    )


def _by_index(pages: PageTable, keys: BitMap64) -> Iterator[tuple[int, BitMap64]]:
    """Yield the keys of each index that the set has any of, by index id."""
    owners = np.unique(pages.places.owners_of(ordinals_of(pages_of(keys))))
    if len(owners) < 2:
        yield from ((owner, keys) for owner in owners.tolist())
        return
    listed = keys_of(keys)
    owner_of = pages.places.owners(listed)
    for owner in owners.tolist():
        yield owner, bitmap_of(listed[owner_of == np.uint64(owner)])


# ---- reading


def restore_redeliveries(topic: TopicState, progress: manifest.Progress) -> None:
    """Add what progress has on redeliveries to a topic that has its rows. Raises Corruption."""
    for stored in progress.redeliveries:
        if stored.subscription_id not in topic.subscriptions:
            continue
        try:
            nacked, times = _nacked_of(topic, stored)
            dead_letters = DeadLetterRows.empty()
            if stored.dead_letters is not None:
                dead_letters = DeadLetterRows(*redelivery_columns.decode_dead_letters(stored.dead_letters))
        except format_errors.FormatError as error:
            raise Corruption(f"progress of subscription {stored.subscription_id}: {error}") from error
        planes = _planes_of(topic, stored)
        topic.redelivery.restore(
            stored.subscription_id, nacked, times, planes, dead_letters, stored.last_dead_letter_id
        )
    for level in progress.levels:
        index = topic.indexes.get(level.index_id)
        if index is not None:
            index.levels.restore(level.delay_level, index.pages.find_stored(level.positions))


def _nacked_of(topic: TopicState, stored: manifest.Redeliveries) -> tuple[KeyedRows, U64]:
    """Return the nacked rows whose pages are known, and when they are redelivered (Unix ms)."""
    parts, times = [], [np.empty(0, np.uint64)]
    for each in stored.nacked:
        rows, redeliver_at_ms = redelivery_columns.decode_nacked(each)
        pages = _pages(topic, stored.subscription_id, each.index_id)
        if pages is None:
            continue
        found = pages.keyed(rows)
        known = found.keys != UNKNOWN_KEY
        parts.append(found.take(known))
        times.append(redeliver_at_ms[known])
    return KeyedRows.concat(parts), np.concatenate(times)


def _planes_of(topic: TopicState, stored: manifest.Redeliveries) -> list[BitMap64]:
    planes = [BitMap64() for _ in range(1 + max((each.bit for each in stored.counts), default=-1))]
    for each in stored.counts:
        pages = _pages(topic, stored.subscription_id, each.index_id)
        if pages is not None:
            planes[each.bit] |= pages.find_stored(each.positions)
    return planes


def _pages(topic: TopicState, subscription_id: int, index_id: int) -> PageTable | None:
    """Return the pages of an index, or None if it does not serve the subscription."""
    index = topic.indexes.get(index_id) if index_ids.serves(index_id, subscription_id) else None
    return None if index is None else index.pages


def progress_of_topic(pages: PageTable, bits: Iterable[BucketBits], redelivery: RedeliveryCut) -> Progress:
    """Return the progress of a topic as of one slot. O(n): runs in an executor."""
    stored = progress_to_stored(pages, bits)
    of_subscriptions, levels = redeliveries_to_stored(pages, redelivery)
    return dataclasses.replace(stored, redeliveries=of_subscriptions, levels=levels)


def progress_to_stored(pages: PageTable, bits: Iterable[BucketBits]) -> Progress:
    """Return the part of progress on buckets. O(n): runs in an executor.

    Buckets of which nothing is gone or acknowledged are left out.
    """
    buckets = []
    for each in bits:
        gone = BitMap64.union(*each.gone) if each.gone else BitMap64()
        acknowledged = acknowledged_to_stored(pages, each.acknowledged)
        if gone or acknowledged:
            buckets.append(BucketProgress(bucket=each.bucket, gone=pages.to_stored(gone), acknowledged=acknowledged))
    return Progress(buckets=tuple(buckets))


def acknowledged_to_stored(pages: PageTable, acknowledged: Mapping[int, BitMap64]) -> tuple[SubscriptionProgress, ...]:
    return tuple(
        SubscriptionProgress(subscription_id=number, positions=pages.to_stored(keys))
        for number, keys in sorted(acknowledged.items())
        if keys
    )


def acknowledged_from_stored(pages: PageTable, stored: Iterable[SubscriptionProgress]) -> dict[int, BitMap64]:
    return {part.subscription_id: pages.from_stored(part.positions) for part in stored}


def progress_of_bucket(
    name: str, kept: Sequence[KeptRows], by_bucket: Mapping[str, BucketProgress]
) -> BucketProgress | None:
    """Return the stored progress of a live bucket, or None if there is none.

    `kept` are the rows of each source that a merged bucket kept; `by_bucket` is all stored progress. Progress under the
    name of a source applies to the rows that were kept of it. Nothing is decoded if no source is named.
    """
    own = by_bucket.get(name)
    sources = [each for each in kept if each.source in by_bucket]
    if not sources:
        return own
    named = tuple(by_bucket[each.source] for each in sources)
    bits = merge.bits_of(name, sources, Progress(buckets=named if own is None else (own, *named)))
    return BucketProgress(
        bucket=name,
        gone=bits.gone.bitmaps(),
        acknowledged=tuple(
            SubscriptionProgress(subscription_id=number, positions=positions.bitmaps())
            for number, positions in sorted(bits.acknowledged.items())
        ),
    )


def progress_of_manifest(store: object_store.ObjectStore, tip: manifest.TopicManifest) -> Progress:
    """Return the progress as of the manifest's `applied`, inline or from its object.

    Raises Corruption if the object is damaged or missing, and the store's errors.
    """
    try:
        return bucket_reading.progress_of(store, tip)
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"progress {error}") from error


# Subscription id -> its properties, if it has any
PropertiesById = Mapping[int, NamedValues]


def read_properties(store: object_store.ObjectStore, reference: ObjectReference) -> PropertiesById:
    """Read the object. Raises Corruption if it is damaged or missing, and the store's errors."""
    try:
        body = store.get(reference.name)
        manifest.check_bytes(reference, body, "properties")
        stored = manifest.decode_properties(body)
    except format_errors.FormatError as error:
        raise Corruption(f"properties {reference.name}: {error}") from error
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"properties {error}") from error
    return {each.subscription_id: each.properties for each in stored.subscriptions}


def encode_properties(properties: PropertiesById) -> bytes:
    """Return the body of the object with the properties of a topic's subscriptions. O(n): runs in an executor."""
    of_subscriptions = (
        manifest.SubscriptionProperties(subscription_id=number, properties=named)
        for number, named in sorted(properties.items())
    )
    return manifest.encode_properties(manifest.Properties(subscriptions=tuple(of_subscriptions)))


def write_properties(store: object_store.ObjectStore, body: bytes, *, key: str, base: int) -> ObjectReference:
    """Put the object. May be repeated: it is the same."""
    crash_point("properties.before_put")
    store.put(key, body)
    crash_point("properties.after_put")
    return topic_manifest.reference_to(key, base, body)
