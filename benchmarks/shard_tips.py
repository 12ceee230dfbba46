"""The newest manifests of the shards of a root, read when no daemon runs."""

from __future__ import annotations

import random
import time
import uuid

from storage_backends import shard_manifests
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import ObjectStore


def newest(store: ObjectStore, shard: int) -> ShardManifest | None:
    """None: nobody ever owned the shard."""
    log = shard_manifests.shard_log(
        store,
        shard,
        monotonic=time.monotonic,
        sleep=time.sleep,
        jitter=random.random,
        new_id=lambda: uuid.uuid4().hex,
    )
    tip = log.read_tip()
    return None if tip is None else tip.manifest
