"""What `tarryd give-up` does: an operator accepts that the newest slots of a dead daemon's log are damaged or lost.

Owns: reading the root for it, and what the operator is told. Does not own: the store and its settings
(`daemon.command`), what is damaged or lost, and what is written in its place (`daemon.owner.log_mending`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from typing import TypedDict

import ulid

from daemon.errors import Corruption
from daemon.owner import heartbeat, log_mending
from storage_backends import log_opening, object_store, root_format, shard_manifests, topic_manifest
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.shard_listing import ShardListing

THREADS = 8


class _Ways(TypedDict):
    monotonic: Callable[[], float]
    sleep: Callable[[float], None]
    jitter: Callable[[], float]
    new_id: Callable[[], str]


_WAYS: _Ways = {
    "monotonic": time.monotonic,
    "sleep": time.sleep,
    "jitter": random.random,
    "new_id": lambda: str(ulid.ULID()),
}


def give_up(store: object_store.ObjectStore, log_id: str, *, accepted: bool, say: Callable[[str], object]) -> bool:
    """Whether the log can be fenced now. `accepted`: what is damaged or lost is given up; otherwise nothing is written,
    and `say` hears what it is.

    Raises Corruption when it cannot be told, StillWritten when the log goes on, and the store's errors.
    """
    root = root_format.read(store)
    if root is None:
        raise Corruption("there is no FORMAT: this is no root")
    with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
        slots = log_opening.open_logs(root.log_form, store, threads).log(log_id)
        with contextlib.closing(slots):
            told = heartbeat.last_told(heartbeat.read_heartbeats(store), log_id)
            owned = [
                log_mending.Owned.of(tip, _topics_of(store, tip.shard))
                for tip in _tips(store, root.shards)
                if any(each.log_id == log_id for each in tip.ranges)
            ]
            loss = log_mending.find_loss(slots, owned, told=told)
            if loss is None:
                say(f"log {log_id}: its newest slot is whole, a standby can take over")
                return True
            say(loss.describe())
            if not accepted:
                say("nothing was written; with --accept-loss this is given up, and a standby can take over")
                return False
            log_mending.give_up(slots, loss)
    say("it was given up: a standby can take over")
    return True


def _tips(store: object_store.ObjectStore, shards: int) -> Iterator[ShardManifest]:
    for shard in range(shards):
        tip = shard_manifests.shard_log(store, shard, **_WAYS).read_tip()
        if tip is not None:
            yield tip.manifest


def _topics_of(store: object_store.ObjectStore, shard: int) -> Iterator[TopicManifest]:
    listing = ShardListing(shard)
    listing.add(store.list(names.topics_prefix(shard)))
    for topic_id in listing.topics:
        tip = topic_manifest.topic_log(store, shard, topic_id, **_WAYS).read_tip()
        if tip is not None:
            yield tip.manifest
