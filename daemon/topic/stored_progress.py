"""What is gone and acknowledged, between its form in memory and its stored form.

Owns: that translation, both ways, progress as a whole, reading that of a manifest, and finding what it says of a
bucket, also under the names of those that were merged into it.
Does not own: what progress says of redeliveries (`stored_redeliveries`), where it is written (`sealing`,
`checkpoint_parts`), what it means (`daemon.core.index.bucket`), and the mapping of a merge
(`storage_backends.formats.merge`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from pyroaring import BitMap64

from daemon.core.decisions.redelivery_cut import RedeliveryCut
from daemon.core.index.index import BucketBits
from daemon.core.index.positions import PageTable
from daemon.errors import Corruption
from daemon.topic import stored_redeliveries
from storage_backends import object_store, progress_objects
from storage_backends.formats import manifest, merge
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import BucketProgress, Progress, SubscriptionProgress


def of_topic(pages: PageTable, bits: Iterable[BucketBits], redelivery: RedeliveryCut) -> Progress:
    """The progress of a topic as of one slot. O(n): runs in an executor."""
    stored = to_stored(pages, bits)
    of_subscriptions, levels = stored_redeliveries.to_stored(pages, redelivery)
    return dataclasses.replace(stored, redeliveries=of_subscriptions, levels=levels)


def to_stored(pages: PageTable, bits: Iterable[BucketBits]) -> Progress:
    """The part of a progress on buckets; those of which nothing is gone or acknowledged are left out. O(n): runs in an
    executor.
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


def of_bucket(name: str, kept: Sequence[KeptRows], by_bucket: Mapping[str, BucketProgress]) -> BucketProgress | None:
    """What is stored of a live bucket; None when nothing is. `kept`: of a merged one; `by_bucket`: all that is stored.

    Of what is stored under the name of a source, the rows that were kept of it count. Nothing is decoded when no source
    is named.
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


def of_manifest(store: object_store.ObjectStore, tip: manifest.TopicManifest) -> Progress:
    """The progress as of the manifest's `applied`, inline or from its object. Raises Corruption when the object is
    damaged or missing, and the store's errors.
    """
    try:
        return progress_objects.progress_of(store, tip)
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"progress {error}") from error
