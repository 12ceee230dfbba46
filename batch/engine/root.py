"""Reads a root as jobs find it: its number of shards, its topics, and the newest manifest of each.

It refuses a store without a root. It writes nothing itself: a job creates no root, and a log of manifests from here
writes only what is committed through it. `topic_contents` says what a topic holds.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import random
import time
from collections.abc import Sequence
from typing import Final

import ulid

from storage_backends import commit, root_format, shard_manifests, store_opening, topic_manifest
from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import RootFormat, ShardManifest, TopicManifest
from storage_backends.object_store import ObjectStore
from storage_backends.slot_log import SlotLogs

_ABSENT: Final = (
    "the store has no root: the object FORMAT is missing; a daemon creates it when it first serves the store"
)


class RootAbsent(Exception):
    """The error of a store without a root; it says what is missing."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class TopicPlace:
    """The place of a topic in a root."""

    shard: int
    topic_id: str

    @property
    def prefix(self) -> str:
        """The beginning of every key of the topic."""
        return names.topic_prefix(self.shard, self.topic_id)


class Root:
    """One root. Thread-safe: it holds no state but FORMAT."""

    def __init__(self, store: ObjectStore, found: RootFormat) -> None:
        self.store = store
        self.format = found

    @staticmethod
    def open(store: ObjectStore) -> Root:
        """Open the root of a store.

        Raises RootAbsent, Damaged if FORMAT cannot be read or is of another version, and the store's errors.
        """
        found = root_format.read(store)
        if found is None:
            raise RootAbsent(_ABSENT)
        return Root(store, found)

    def logs(self, executor: concurrent.futures.Executor) -> SlotLogs:
        """Return the logs of the daemons that write, or wrote, to this root.

        `executor` reads in parallel; it must not be the one that calls a log. Raises StoreRefused if they cannot be
        read from here.
        """
        return store_opening.open_logs(self.format.log_form, self.store, executor)

    @property
    def shards(self) -> int:
        """The number of shards of the root."""
        return self.format.shards

    # ---- topics

    def place_of(self, name: str) -> TopicPlace:
        """Return the place of the topic of that name, existing or not."""
        return TopicPlace(names.shard_of(name, self.shards), names.topic_id(name))

    def topics(self, named: Sequence[str] | None = None) -> list[TopicPlace]:
        """Return the places of the topics of those names, which need not exist, or of all that shards list, by shard.

        A deleted topic is listed as long as its manifest exists. Listing takes as many requests as the topics have
        pages of objects; names take none.
        """
        if named is not None:
            return sorted({self.place_of(name) for name in named})
        return [place for shard in range(self.shards) for place in self.listed(shard)]

    def listed(self, shard: int) -> list[TopicPlace]:
        """Return the topics that a shard lists. Objects that belong to no topic are ignored."""
        found: set[str] = set()
        for entry in self.store.list(names.topics_prefix(shard)):
            with contextlib.suppress(format_errors.FormatError):
                found.add(names.topic_id_of(entry.key))
        return [TopicPlace(shard, topic_id) for topic_id in sorted(found)]

    def log(self, place: TopicPlace) -> commit.ManifestLog[TopicManifest]:
        """Return the manifests of a topic."""
        return topic_manifest.topic_log(
            self.store,
            place.shard,
            place.topic_id,
            monotonic=_elapsed_s,
            sleep=time.sleep,
            jitter=random.random,
            new_id=_new_id,
        )

    def tip(self, place: TopicPlace) -> commit.Tip[TopicManifest] | None:
        """Read the newest manifest of a topic, also of a deleted one.

        Returns None if there never was one. Raises Damaged and the store's errors.
        """
        return self.log(place).read_tip()

    # ---- shards

    def shard_tip(self, shard: int) -> commit.Tip[ShardManifest] | None:
        """Read the newest manifest of a shard.

        Returns None before its first owner. Raises Damaged and the store's errors.
        """
        log = shard_manifests.shard_log(
            self.store, shard, monotonic=_elapsed_s, sleep=time.sleep, jitter=random.random, new_id=_new_id
        )
        return log.read_tip()


def _elapsed_s() -> float:
    """Return monotonic time (seconds), which counts while the machine is suspended if the system supports that."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def _new_id() -> str:
    return str(ulid.ULID())
