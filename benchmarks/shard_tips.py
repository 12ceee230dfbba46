"""Reads the newest manifests of a root's shards, and what they need of logs, when no daemon runs."""

from __future__ import annotations

import concurrent.futures
import random
import time
import uuid
from collections.abc import Iterable

from batch.engine import shard_reading
from batch.engine.root import Root
from storage_backends import log_fence, shard_manifests
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_reading import ShardSections, extents_once
from storage_backends.object_store import ObjectStore


def newest(store: ObjectStore, shard: int) -> ShardManifest | None:
    """Return the newest manifest of the shard, or None if no daemon ever owned it."""
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


def living_logs(store: ObjectStore) -> frozenset[str]:
    """Return the logs whose highest slot is no end: a daemon may write to them."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        logs = Root.open(store).logs(executor)
        return frozenset(log_id for log_id in logs.log_ids() if log_fence.ended_at(logs, log_id) is None)


def slots_to_read(store: ObjectStore, shards: Iterable[int]) -> int:
    """Count the log slots with sections that the newest checkpoints of these shards do not cover, each once."""
    tips = [tip for tip in (newest(store, shard) for shard in shards) if tip is not None]
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        logs = Root.open(store).logs(executor)
        living = {tip.open_range.log_id for tip in tips if tip.open_range is not None}
        ends = {log_id: shard_reading.end_of(logs, log_id) for log_id in living}
    wanted = [each for tip in tips for each in ShardSections(tip, tip.checkpoint_slot).extents(ends)]
    return sum(each.through - each.after for each in extents_once(wanted))
