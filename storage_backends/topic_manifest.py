"""The operations on a topic's manifest: what may follow what.

Owns: precondition and effect of each operation.
Does not own: committing (`commit`), the stored form (`formats.manifest`), and when an operation is wanted.

Every operation of an owner carries its epoch: an owner that was replaced is refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

from storage_backends import commit
from storage_backends.formats import manifest, names
from storage_backends.formats.manifest import (
    LiveBucket,
    ManifestHead,
    ObjectReference,
    Progress,
    Subscription,
    Tombstone,
    TopicManifest,
)
from storage_backends.object_store import ObjectStore

# Replaced by the commit.
NO_HEAD = ManifestHead(number=0, previous_sha256=b"", commit_id="", writer="", created_ms=0)

CODEC = commit.Codec(
    encode=manifest.encode_topic_manifest,
    decode=manifest.decode_topic_manifest,
    with_head=lambda value, head: dataclasses.replace(value, head=head),
)


def topic_log(
    store: ObjectStore,
    shard: int,
    topic_id: str,
    *,
    monotonic: Callable[[], float],
    sleep: Callable[[float], None],
    jitter: Callable[[], float],
    new_id: Callable[[], str],
    observer: commit.Observer | None = None,
) -> commit.ManifestLog[TopicManifest]:
    """The manifests of one topic."""
    return commit.ManifestLog(
        store,
        names.topic_manifest_prefix(shard, topic_id),
        CODEC,
        monotonic=monotonic,
        sleep=sleep,
        jitter=jitter,
        new_id=new_id,
        observer=observer,
    )


def reference_to(key: str, base: int, body: bytes) -> ObjectReference:
    return ObjectReference(name=key, base=base, size_bytes=len(body), sha256=hashlib.sha256(body).digest())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """The topic is born; no slot up to `applied` names it."""

    topic: str
    topic_id: str
    incarnation: int
    epoch: int
    applied: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None if tip is None else f"topic {self.topic} exists"

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return TopicManifest(
            head=NO_HEAD,
            topic=self.topic,
            topic_id=self.topic_id,
            incarnation=self.incarnation,
            owner_epoch=self.epoch,
            applied=self.applied,
            last_subscription_id=0,
        )

    def landed(self, tip: TopicManifest) -> bool:
        return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A new owner of the shard; must come before the manifest is relied on (R5)."""

    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return "the topic does not exist"
        return None if tip.owner_epoch < self.epoch else f"owner epoch is {tip.owner_epoch}, not below {self.epoch}"

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(_existing(tip), owner_epoch=self.epoch)

    def landed(self, tip: TopicManifest) -> bool:
        return tip.owner_epoch == self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """Buckets of rows up to `slot_to` are live, and everything of the topic is as of that slot.

    `progress` is inline; or None, and `progress_object` (which `replaced_delete_after_ms` may one day replace) holds it.
    """

    buckets: tuple[LiveBucket, ...]
    progress: Progress | None
    progress_object: ObjectReference | None
    slot_from: int
    slot_to: int
    epoch: int
    replaced_delete_after_ms: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return "the topic does not exist"
        if tip.owner_epoch != self.epoch:
            return _other_epoch(tip, self.epoch)
        if tip.applied != self.slot_from:
            return f"applied is {tip.applied}, not {self.slot_from}"
        known = {bucket.object.name for bucket in tip.live}
        for bucket in self.buckets:
            if bucket.object.base < tip.head.orphan_floor:
                return f"bucket {bucket.object.name} was started below the orphan floor {tip.head.orphan_floor}"
            if bucket.object.name in known:
                return f"bucket {bucket.object.name} is live"
        return None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = _existing(tip)
        live = (*tip.live, *self.buckets)
        tombstones = tip.tombstones
        if tip.progress_object is not None:
            tombstones = (*tombstones, _tombstone(tip, tip.progress_object, self.replaced_delete_after_ms))
        return dataclasses.replace(
            tip,
            applied=self.slot_to,
            live=live,
            tombstones=tombstones,
            progress=None if self.progress is None else _of_live(self.progress, live),
            progress_object=self.progress_object,
        )

    def landed(self, tip: TopicManifest) -> bool:
        own = {bucket.object.name for bucket in self.buckets}
        if self.progress_object is not None:
            own.add(self.progress_object.name)
        return bool(own & _objects_of(tip))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropBuckets:
    """Buckets every row of which is gone leave; their objects may be deleted after `delete_after_ms` (Unix time)."""

    buckets: tuple[str, ...]
    epoch: int
    delete_after_ms: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return "the topic does not exist"
        if tip.owner_epoch != self.epoch:
            return _other_epoch(tip, self.epoch)
        missing = set(self.buckets) - {bucket.object.name for bucket in tip.live}
        return f"buckets {sorted(missing)} are not live" if missing else None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = _existing(tip)
        dropped = [bucket.object for bucket in tip.live if bucket.object.name in self.buckets]
        live = tuple(bucket for bucket in tip.live if bucket.object.name not in self.buckets)
        return dataclasses.replace(
            tip,
            live=live,
            tombstones=(*tip.tombstones, *(_tombstone(tip, each, self.delete_after_ms) for each in dropped)),
            progress=None if tip.progress is None else _of_live(tip.progress, live),
        )

    def landed(self, tip: TopicManifest) -> bool:
        return set(self.buckets) <= {tombstone.object.name for tombstone in tip.tombstones}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetSubscriptions:
    """The subscriptions from now on."""

    subscriptions: tuple[Subscription, ...]
    last_subscription_id: int
    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return "the topic does not exist"
        if tip.owner_epoch != self.epoch:
            return _other_epoch(tip, self.epoch)
        if self.last_subscription_id < tip.last_subscription_id:
            return f"the last subscription id is {tip.last_subscription_id}, it cannot become {self.last_subscription_id}"
        return None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(
            _existing(tip), subscriptions=self.subscriptions, last_subscription_id=self.last_subscription_id
        )

    def landed(self, tip: TopicManifest) -> bool:
        return False


def _existing(tip: TopicManifest | None) -> TopicManifest:
    if tip is None:
        raise ValueError("the operation was applied to a topic that does not exist")
    return tip


def _other_epoch(tip: TopicManifest, epoch: int) -> str:
    return f"owner epoch is {tip.owner_epoch}, not {epoch}"


def _tombstone(tip: TopicManifest, reference: ObjectReference, delete_after_ms: int) -> Tombstone:
    return Tombstone(object=reference, removed_in=tip.head.number + 1, delete_after_ms=delete_after_ms)


def _of_live(progress: Progress, live: tuple[LiveBucket, ...]) -> Progress:
    """A bucket that is no longer live was dropped with every row gone: it needs no progress."""
    known = {bucket.object.name for bucket in live}
    return Progress(buckets=tuple(bucket for bucket in progress.buckets if bucket.bucket in known))


def _objects_of(tip: TopicManifest) -> set[str]:
    objects = {bucket.object.name for bucket in tip.live} | {each.object.name for each in tip.tombstones}
    return objects if tip.progress_object is None else objects | {tip.progress_object.name}
