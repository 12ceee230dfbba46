"""Reads for the tasks of an audit: several objects ahead, and twice before damage counts.

It also reads the tip of a place again, before a task calls anything missing.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Final, TypeVar

import msgspec

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
    """A sequence of manifests: that of a topic, or that of the shard itself if `topic_id` is ""."""

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
    """The Unix time where a task runs, `offset_ms` added to the machine's.

    An audit takes so long that an object that was young when it began may rightly be gone.
    """

    offset_ms: int = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.offset_ms


SYSTEM_CLOCK: Final = WallClock()


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """An object that was read.

    `body` is None if the object does not exist, is damaged (`damage` says how), or could not be read (`failure` says
    why).
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
    """Read one object; errors are in the answer. Damage counts only if two reads have found it."""
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
    """Decode the body of an object that was read; return body and value.

    Raises FormatError if two reads have found the damage.
    """
    try:
        return body, decode(body)
    except format_errors.FormatError:
        again = _read(store, found.key).body
        if again is None or again == body:
            raise
        return again, decode(again)


def read_all(store: ObjectStore, keys: Iterable[str]) -> Iterator[Read]:
    """Yield the objects in the order of the keys, reading a few of them ahead."""
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


class Beat(msgspec.Struct, frozen=True):
    """The last report of a daemon: the shards that it owned, its log, and a slot that this certainly had."""

    daemon_id: str
    shards: tuple[int, ...]
    log_id: str = ""
    last_slot: Annotated[int, msgspec.Meta(ge=0, le=names.NUMBER_MAX)] = 0


def heartbeats(store: ObjectStore) -> list[Beat]:
    """Return the newest heartbeats. One that cannot be read is none: its daemon replaces it every few seconds.

    Raises the store's errors for the listing.
    """
    found = []
    for entry in store.list(names.DAEMONS_PREFIX):
        if names.is_daemon_id(entry.key.removeprefix(names.DAEMONS_PREFIX)):
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                found.append(msgspec.json.decode(_read(store, entry.key).body or b"", type=Beat))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """The names in a manifest.

    `needed` are live buckets, progress, properties and checkpoints; `buried` are its tombstones.
    """

    needed: frozenset[str]
    buried: frozenset[str]


def named_in(tip: TopicManifest | ShardManifest) -> Named:
    """Return the names in the manifest."""
    buried = frozenset(each.object.name for each in tip.tombstones)
    named = shard_listing.named_by_shard(tip) if isinstance(tip, ShardManifest) else topic_manifest.names_in(tip)
    return Named(frozenset(named) - buried, buried)


def named_now(root: Root, place: Place) -> Named | None:
    """Return the names in the newest manifest of the place, or None without one.

    Raises Damaged and the store's errors.
    """
    if place.topic_id:
        topic = root.tip(place.of_topic)
        return None if topic is None else named_in(topic.manifest)
    shard = root.shard_tip(place.shard)
    return None if shard is None else named_in(shard.manifest)
