"""Opens the manifests of a shard as a sequence.

The daemon defines the operations of its owners, `manifest_collection` those of collection, and `formats.manifest` the
stored form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from storage_backends import commit
from storage_backends.formats import manifest, names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import ObjectStore

CODEC = commit.Codec(
    encode=manifest.encode_shard_manifest,
    decode=manifest.decode_shard_manifest,
    with_head=lambda value, head: dataclasses.replace(value, head=head),
)


def shard_log(
    store: ObjectStore,
    shard: int,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    jitter: Callable[[], float],
    new_id: Callable[[], str],
    observer: commit.Observer | None = None,
) -> commit.ManifestLog[ShardManifest]:
    """Return the manifests of one shard. One of another shard is damage, and so is one that names what cannot exist."""

    def decode(body: bytes) -> ShardManifest:
        return manifest.check_shard(CODEC.decode(body), shard)

    return commit.ManifestLog(
        store,
        names.shard_manifest_prefix(shard),
        dataclasses.replace(CODEC, decode=decode),
        monotonic=monotonic,
        sleep=sleep,
        jitter=jitter,
        new_id=new_id,
        observer=observer,
    )
