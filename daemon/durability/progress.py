"""What is gone and acknowledged, between its form in memory and its stored form.

Owns: that translation, both ways, and reading the progress that a manifest names.
Does not own: writing progress (`sealing`, `checkpoint`) and what it means (`daemon.core.bucket`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pyroaring import BitMap64

from daemon.core.index import BucketBits
from daemon.core.positions import PageTable
from daemon.errors import Corruption
from storage_backends import object_store
from storage_backends.formats import errors, manifest
from storage_backends.formats.manifest import BucketProgress, Progress, SubscriptionProgress, TopicManifest


def to_stored(pages: PageTable, bits: Iterable[BucketBits]) -> Progress:
    """Buckets of which nothing is gone or acknowledged are left out. O(n): runs in an executor."""
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


def of_manifest(store: object_store.ObjectStore, tip: TopicManifest) -> Progress:
    """The progress as of the manifest's `applied`. Raises Corruption when it is damaged or missing."""
    if tip.progress_object is None:
        return tip.progress or Progress()
    key = tip.progress_object.name
    try:
        body = store.get(key)
        manifest.check_bytes(tip.progress_object, body, "progress")
        return manifest.decode_progress(body)
    except errors.FormatError as error:
        raise Corruption(f"progress {key}: {error}") from error
    except (object_store.NotFound, object_store.Damaged) as error:
        raise Corruption(f"progress {error}") from error
