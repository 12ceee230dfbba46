"""How the tasks of an audit read: ahead, twice before they believe damage, and the tip again before they call anything
missing.

Owns: reading objects by key, several under way at once; which sequence of manifests an object belongs to.
Does not own: what is done with what was read.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, TypeVar

from batch.engine.root import Root, TopicPlace
from storage_backends import object_store, shard_listing, topic_manifest
from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.object_store import ObjectStore

T = TypeVar("T")

READ_AHEAD: Final = 4
"""Objects of a task that are read at once; a merged bucket has several megabytes."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A sequence of manifests: that of a topic, or with `topic_id` "" that of the shard itself."""

    shard: int
    topic_id: str = ""

    @property
    def of_topic(self) -> TopicPlace:
        return TopicPlace(self.shard, self.topic_id)

    @property
    def manifest_prefix(self) -> str:
        if not self.topic_id:
            return names.shard_manifest_prefix(self.shard)
        return names.topic_manifest_prefix(self.shard, self.topic_id)


@dataclasses.dataclass(frozen=True, slots=True)
class WallClock:
    """Unix time where a task runs: an audit takes so long that what was young when it began may be gone by right.
    `offset_ms`: what is added to the machine's.
    """

    offset_ms: int = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


SYSTEM_CLOCK: Final = WallClock()


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """An object that was read. `body` is None when it is not there, is damaged (`damage` says how), or was not given
    (`failure` says why).
    """

    key: str
    body: bytes | None
    metadata: Mapping[str, str] = dataclasses.field(default_factory=dict)
    damage: str = ""
    failure: str = ""

    @property
    def absent(self) -> bool:
        return self.body is None and not self.damage and not self.failure


def read(store: ObjectStore, key: str) -> Read:
    """One object; what goes wrong is in the answer. Damage is believed when two reads have found it."""
    found = _read(store, key)
    return _read(store, key) if found.damage else found


def _read(store: ObjectStore, key: str) -> Read:
    try:
        body, metadata = store.get_with_metadata(key)
    except object_store.NotFound:
        return Read(key, None)
    except object_store.Damaged as error:
        return Read(key, None, damage=error.reason)
    except object_store.StoreError as error:
        return Read(key, None, failure=str(error))
    return Read(key, body, dict(metadata))


def decoded(store: ObjectStore, found: Read, body: bytes, decode: Callable[[bytes], T]) -> tuple[bytes, T]:
    """The body of an object that was read, and what it is. Raises FormatError when two reads have found the damage."""
    try:
        return body, decode(body)
    except format_errors.FormatError:
        again = _read(store, found.key).body
        if again is None or again == body:
            raise
        return again, decode(again)


def read_all(store: ObjectStore, keys: Iterable[str]) -> Iterator[Read]:
    """The objects, in the order of the keys, a few of them read ahead."""
    ahead: collections.deque[concurrent.futures.Future[Read]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="audit") as threads:
        try:
            for key in keys:
                ahead.append(threads.submit(read, store, key))
                if len(ahead) > READ_AHEAD:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for later in ahead:
                later.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """What a manifest names. `needed`: what it lives on, that is live buckets, progress, properties, checkpoints.
    `buried`: its tombstones.
    """

    needed: frozenset[str]
    buried: frozenset[str]


def named_in(tip: TopicManifest | ShardManifest) -> Named:
    """What the manifest names."""
    buried = frozenset(each.object.name for each in tip.tombstones)
    named = shard_listing.named_by_shard(tip) if isinstance(tip, ShardManifest) else topic_manifest.names_in(tip)
    return Named(frozenset(named) - buried, buried)


def named_now(root: Root, place: Place) -> Named | None:
    """What the newest manifest of the place names; None when there is none. Raises Damaged and the store's errors."""
    if place.topic_id:
        topic = root.tip(place.of_topic)
        return None if topic is None else named_in(topic.manifest)
    shard = root.shard_tip(place.shard)
    return None if shard is None else named_in(shard.manifest)
