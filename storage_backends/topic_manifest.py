"""Defines the operations on a topic's manifest: those of its owner, and the merge of neighbouring live buckets.

Every operation of an owner carries its epoch: an owner that was replaced is refused. An epoch has one owner, whose
operations on a topic come one after the other; therefore each can tell that it has landed, and may be committed again
when its outcome is unknown.

A merge carries no epoch: any process may merge. A commit of the owner between plan and merge either leaves the sources
live, and then its progress counts for the rows that were copied into the merged bucket; or it drops one of them, and
the merge is refused.

`manifest_collection` has the operations of collection, `commit` commits, `formats.manifest` defines the stored form,
and `formats.merge` the rows of a merged bucket.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Sequence

from storage_backends import commit
from storage_backends.formats import index_ids, manifest, merge, names, requirements
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    LiveBucket,
    ObjectReference,
    Progress,
    Subscription,
    Tombstone,
    TopicDelayLevels,
    TopicManifest,
    TopicPolicy,
)
from storage_backends.formats.position_bitmap import PositionSet
from storage_backends.object_store import ObjectStore

CODEC = commit.Codec(
    encode=manifest.encode_topic_manifest,
    decode=manifest.decode_topic_manifest,
    with_head=lambda value, head: dataclasses.replace(value, head=head),
)


FIRST_INCARNATION = 1
NO_TOPIC = "the topic does not exist"
TOPIC_DELETED = "the topic was deleted"


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
    """Return the manifests of one topic. One of another topic is damage, and so is one that names what cannot exist."""

    def decode(body: bytes) -> TopicManifest:
        return manifest.check_topic(CODEC.decode(body), shard, topic_id)

    return commit.ManifestLog(
        store,
        names.topic_manifest_prefix(shard, topic_id),
        dataclasses.replace(CODEC, decode=decode),
        monotonic=monotonic,
        sleep=sleep,
        jitter=jitter,
        new_id=new_id,
        observer=observer,
    )


def reference_to(key: str, base: int, body: bytes) -> ObjectReference:
    """Return the reference to an object of these bytes."""
    return ObjectReference(name=key, base=base, size_bytes=len(body), sha256=hashlib.sha256(body).digest())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """The creation of a topic, also after a deletion, which raised the incarnation.

    No slot up to `applied` names it. The tip of a deleted topic need not be claimed before: an epoch below its owner's
    is refused.
    """

    topic: str
    topic_id: str
    epoch: int
    applied: ShardSlot

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return None
        if not tip.deleted:
            return f"topic {self.topic} exists"
        if tip.owner_epoch > self.epoch:
            return f"owner epoch is {tip.owner_epoch}, above {self.epoch}"
        return _moved_back(tip, self.applied)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        if tip is not None:
            return dataclasses.replace(tip, deleted=False, owner_epoch=self.epoch, applied=self.applied)
        return TopicManifest(
            head=commit.NO_HEAD,
            topic=self.topic,
            topic_id=self.topic_id,
            incarnation=FIRST_INCARNATION,
            owner_epoch=self.epoch,
            applied=self.applied,
        )

    def landed(self, tip: TopicManifest) -> bool:
        return not tip.deleted and (tip.owner_epoch, tip.applied) == (self.epoch, self.applied)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClaimTopic:
    """The claim of a new owner of the shard.

    It must come before anything relies on the manifest (R5), also if the topic was deleted.
    """

    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        return None if tip.owner_epoch < self.epoch else f"owner epoch is {tip.owner_epoch}, not below {self.epoch}"

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(existing(tip), owner_epoch=self.epoch)

    def landed(self, tip: TopicManifest) -> bool:
        return tip.owner_epoch == self.epoch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """The seal of `buckets`, after which live buckets and progress hold everything of the topic up to `slot_to`.

    Either `progress` is inline, or `progress_object` names an object that was written before. Progress is as of
    `slot_to`; it may name buckets that have been merged since (`formats.merge.bits_of`). A bucket of a deleted
    subscription does not become live. It, and the object that held the progress before, may be deleted after
    `replaced_delete_after_ms` (Unix milliseconds).
    """

    buckets: tuple[LiveBucket, ...]
    progress: Progress | None
    progress_object: ObjectReference | None
    slot_from: ShardSlot
    slot_to: ShardSlot
    epoch: int
    replaced_delete_after_ms: int

    def __post_init__(self) -> None:
        if (self.progress is None) == (self.progress_object is None):
            raise ValueError("a seal has its progress inline or as an object")

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if (reason := _not_owned(tip, self.epoch)) is not None:
            return reason
        if tip.applied != self.slot_from:
            return f"applied is {tip.applied}, not {self.slot_from}"
        if (reason := _moved_back(tip, self.slot_to)) is not None:
            return reason
        known: set[str] = set()
        for reference in self._objects:
            if (reason := not_bringable(tip, reference)) is not None:
                return reason
            if reference.name in known:
                return _named_twice(reference)
            known.add(reference.name)
        return None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        owed = _owed(self.buckets, tip.subscriptions)
        leaving = [bucket.object for bucket in self.buckets if bucket not in owed]
        if tip.progress_object is not None:
            leaving.insert(0, tip.progress_object)
        sealed = dataclasses.replace(
            tip, applied=self.slot_to, progress=self.progress, progress_object=self.progress_object
        )
        return with_live(sealed, (*tip.live, *owed), self.replaced_delete_after_ms, leaving=leaving)

    def landed(self, tip: TopicManifest) -> bool:
        own = {reference.name for reference in self._objects}
        if own:
            return not own.isdisjoint(names_in(tip))
        return tip.owner_epoch == self.epoch and tip.applied == self.slot_to > self.slot_from

    @property
    def _objects(self) -> tuple[ObjectReference, ...]:
        """The objects that it adds to the manifest."""
        buckets = tuple(bucket.object for bucket in self.buckets)
        return buckets if self.progress_object is None else (*buckets, self.progress_object)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DropBuckets:
    """The drop of buckets whose rows are all gone.

    Their objects may be deleted after `delete_after_ms` (Unix ms). Buckets that are no longer live were merged since,
    and have left. Their progress stays until the next seal, or, if it is inline, until no bucket is left. A quarantined
    bucket stays, because its content is unknown.
    """

    buckets: tuple[str, ...]
    epoch: int
    delete_after_ms: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if (reason := _not_owned(tip, self.epoch)) is not None:
            return reason
        kept = set(self.buckets) & {bucket.object.name for bucket in tip.live if bucket.quarantined}
        return f"buckets {sorted(kept)} are quarantined" if kept else None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        live = tuple(bucket for bucket in tip.live if bucket.object.name not in self.buckets)
        return with_live(tip, live, self.delete_after_ms)

    def landed(self, tip: TopicManifest) -> bool:
        return set(self.buckets).isdisjoint(bucket.object.name for bucket in tip.live)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Quarantine:
    """The quarantine of a live bucket, which is then never read, nor deleted while the topic exists.

    `damage` says what was found; `slot` is the last one that was applied then.
    """

    bucket: str
    damage: str
    slot: ShardSlot
    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if (reason := _not_owned(tip, self.epoch)) is not None:
            return reason
        bucket = _live(tip, self.bucket)
        if bucket is None:
            return f"bucket {self.bucket} is not live"
        return f"bucket {self.bucket} is quarantined: {bucket.damage}" if bucket.quarantined else None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        live = (
            dataclasses.replace(bucket, quarantined=True, damage=self.damage, quarantined_slot=self.slot)
            if bucket.object.name == self.bucket
            else bucket
            for bucket in tip.live
        )
        return dataclasses.replace(tip, live=tuple(live))

    def landed(self, tip: TopicManifest) -> bool:
        bucket = _live(tip, self.bucket)
        return (
            bucket is not None and bucket.quarantined and (tip.owner_epoch, bucket.damage) == (self.epoch, self.damage)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetPolicy:
    """The replacement of the whole policy."""

    policy: TopicPolicy
    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return NO_TOPIC if tip is None else _not_owned(tip, self.epoch)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(existing(tip), policy=self.policy)

    def landed(self, tip: TopicManifest) -> bool:
        return not tip.deleted and (tip.owner_epoch, tip.policy) == (self.epoch, self.policy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetDelayLevels:
    """The replacement of the delay levels. With None the daemon's apply."""

    levels: TopicDelayLevels | None
    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return NO_TOPIC if tip is None else _not_owned(tip, self.epoch)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        return dataclasses.replace(existing(tip), delay_levels=self.levels)

    def landed(self, tip: TopicManifest) -> bool:
        return not tip.deleted and (tip.owner_epoch, tip.delay_levels) == (self.epoch, self.levels)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequireOfTopic:
    """The addition of a requirement (`requirements`), before the first object of the topic that needs it.

    The manifest of the shard requires it already. It stays for ever, also when the topic is deleted.
    """

    requirement: str
    epoch: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return NO_TOPIC if tip is None else _not_owned(tip, self.epoch)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        return dataclasses.replace(tip, requires=requirements.joined(tip.requires, self.requirement))

    def landed(self, tip: TopicManifest) -> bool:
        return tip.owner_epoch == self.epoch and self.requirement in tip.requires


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteTopic:
    """The deletion of a topic, which voids all decisions on it in slots up to `slot`.

    Its objects may be deleted after `delete_after_ms` (Unix milliseconds). The manifest stays: the next topic of the
    name has the raised incarnation, and none of its subscriptions gets an id that was used before.
    """

    slot: ShardSlot
    epoch: int
    delete_after_ms: int

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if (reason := _not_owned(tip, self.epoch)) is not None:
            return reason
        return _moved_back(tip, self.slot)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        deleted = dataclasses.replace(
            tip,
            incarnation=tip.incarnation + 1,
            applied=self.slot,
            subscriptions=(),
            policy=TopicPolicy(),
            delay_levels=None,
            properties_object=None,
            deleted=True,
        )
        return with_live(deleted, (), self.delete_after_ms, leaving=_replaced(tip.properties_object, None))

    def landed(self, tip: TopicManifest) -> bool:
        return tip.deleted and (tip.owner_epoch, tip.applied) == (self.epoch, self.slot)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SetSubscriptions:
    """The replacement of all subscriptions.

    `properties_object` holds their properties: a new object that was written before, or the current one. None means
    that they have none. `last_subscription_id` is the highest id ever given, also to a deleted subscription. The
    buckets of a deleted subscription leave with it, quarantined ones included; their objects, and the one that held the
    properties before, may be deleted after `delete_after_ms` (Unix milliseconds).
    """

    subscriptions: tuple[Subscription, ...]
    last_subscription_id: int
    epoch: int
    delete_after_ms: int
    properties_object: ObjectReference | None = None

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if (reason := _not_owned(tip, self.epoch)) is not None:
            return reason
        highest = max((each.subscription_id for each in self.subscriptions), default=0)
        if self.last_subscription_id < max(tip.last_subscription_id, highest):
            return (
                f"the last subscription id is {max(tip.last_subscription_id, highest)}, it cannot become "
                f"{self.last_subscription_id}"
            )
        if self.properties_object is None or self.properties_object == tip.properties_object:
            return None
        return not_bringable(tip, self.properties_object)

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        changed = dataclasses.replace(
            tip,
            subscriptions=self.subscriptions,
            properties_object=self.properties_object,
            last_subscription_id=self.last_subscription_id,
        )
        live, leaving = _owed(tip.live, self.subscriptions), _replaced(tip.properties_object, self.properties_object)
        return with_live(changed, live, self.delete_after_ms, leaving=leaving)

    def landed(self, tip: TopicManifest) -> bool:
        wanted = self.epoch, self.subscriptions, self.properties_object, self.last_subscription_id
        found = tip.owner_epoch, tip.subscriptions, tip.properties_object, tip.last_subscription_id
        return not tip.deleted and found == wanted


def existing(tip: TopicManifest | None) -> TopicManifest:
    """Return the tip for an `apply` that needs one. Raises ValueError if there is none."""
    if tip is None:
        raise ValueError(NO_TOPIC)
    return tip


def _not_owned(tip: TopicManifest, epoch: int) -> str | None:
    """Return why the owner of `epoch` may not change the topic, or None if it may."""
    if tip.owner_epoch != epoch:
        return f"owner epoch is {tip.owner_epoch}, not {epoch}"
    return TOPIC_DELETED if tip.deleted else None


def _moved_back(tip: TopicManifest, slot: ShardSlot) -> str | None:
    return f"applied is {tip.applied}, it cannot become {slot}" if slot < tip.applied else None


def _live(tip: TopicManifest, name: str) -> LiveBucket | None:
    return next((bucket for bucket in tip.live if bucket.object.name == name), None)


def _replaced(before: ObjectReference | None, after: ObjectReference | None) -> tuple[ObjectReference, ...]:
    return () if before is None or before == after else (before,)


def _owed(buckets: Iterable[LiveBucket], subscriptions: Iterable[Subscription]) -> tuple[LiveBucket, ...]:
    """Return the buckets of the shared index and of the indexes of these subscriptions."""
    owed = {index_ids.SHARED, *(each.subscription_id for each in subscriptions)}
    return tuple(bucket for bucket in buckets if index_ids.subscription_of(bucket.subscription_id) in owed)


def with_live(
    tip: TopicManifest,
    live: tuple[LiveBucket, ...],
    delete_after_ms: int,
    *,
    leaving: Iterable[ObjectReference] = (),
) -> TopicManifest:
    """Return the next manifest, with these live buckets.

    All other buckets become tombstones, and so do the objects `leaving`. If no bucket is left, only the dead letters of
    inline progress stay, because no row can be gone. A progress object may hold dead letters while there is a
    subscription; without one it leaves too.
    """
    staying = {bucket.object.name for bucket in live}
    left = [*leaving, *(bucket.object for bucket in tip.live if bucket.object.name not in staying)]
    progress, progress_object = tip.progress, tip.progress_object
    if not live:
        progress = _dead_letters_of(progress, tip.subscriptions)
        if progress_object is not None and not tip.subscriptions:
            left.append(progress_object)
            progress_object = None
    buried = (
        Tombstone(object=reference, removed_in=tip.head.number + 1, delete_after_ms=delete_after_ms)
        for reference in left
    )
    return dataclasses.replace(
        tip,
        live=live,
        tombstones=(*tip.tombstones, *buried),
        progress=progress,
        progress_object=progress_object,
    )


def _dead_letters_of(progress: Progress | None, subscriptions: Iterable[Subscription]) -> Progress | None:
    """Return the dead letters of these subscriptions in inline progress."""
    if progress is None:
        return None
    owed = {each.subscription_id for each in subscriptions}
    left = tuple(
        dataclasses.replace(each, nacked=(), counts=())
        for each in progress.redeliveries
        if each.last_dead_letter_id and each.subscription_id in owed
    )
    return Progress(redeliveries=left) if left else None


def not_bringable(tip: TopicManifest, reference: ObjectReference) -> str | None:
    """Return why the next manifest may not name an object that was written, or None if it may."""
    if reference.base < tip.head.orphan_floor:
        return f"object {reference.name} was started below the orphan floor {tip.head.orphan_floor}"
    return _named_twice(reference) if reference.name in names_in(tip) else None


def _named_twice(reference: ObjectReference) -> str:
    return f"object {reference.name} is named twice"


def names_in(tip: TopicManifest) -> set[str]:
    """Return the names of all objects that the manifest names."""
    named = {bucket.object.name for bucket in tip.live} | {tombstone.object.name for tombstone in tip.tombstones}
    return named | {each.name for each in tip.beside_buckets}


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class MergeSource:
    """A bucket to merge. `kept` is that of its metadata, `dropped` the positions that were not copied."""

    name: str
    kept: tuple[KeptRows, ...]
    dropped: PositionSet


@dataclasses.dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Merge:
    """The replacement of the sources, neighbours in one index, by `bucket`, or by nothing if that is None.

    `dropped_hash` is the hash of the rows that were not copied, `dropped_id_hash` that of those with schedule ids; they
    must be gone on the tip too. `incarnation` is the topic's when the merge was planned. `progress_of` returns the
    progress of a manifest, inline or not, and may raise the store's errors. The sources may be deleted after
    `delete_after_ms` (Unix milliseconds).
    """

    sources: tuple[MergeSource, ...]
    bucket: LiveBucket | None
    dropped_hash: tuple[int, int]
    incarnation: int
    progress_of: Callable[[TopicManifest], Progress]
    delete_after_ms: int
    dropped_id_hash: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        if not self.sources or len({source.name for source in self.sources}) < len(self.sources):
            raise ValueError(f"a merge has different sources, not {[source.name for source in self.sources]}")

    def precondition(self, tip: TopicManifest | None) -> str | None:
        if tip is None:
            return NO_TOPIC
        if tip.deleted:
            return TOPIC_DELETED
        if tip.incarnation != self.incarnation:
            return f"the incarnation is {tip.incarnation}, not {self.incarnation}"
        merging = self._merging(tip)
        missing = {source.name for source in self.sources} - {live.object.name for live in merging}
        if missing:
            return f"buckets {sorted(missing)} are not live"
        reasons = (self._not_neighbours(tip, merging), self._not_bringable(tip, merging), self._not_conserved(merging))
        return next((reason for reason in reasons if reason is not None), None) or self._not_gone(tip)

    def _merging(self, tip: TopicManifest) -> list[LiveBucket]:
        """Return the sources that are live."""
        names = {source.name for source in self.sources}
        return [bucket for bucket in tip.live if bucket.object.name in names]

    def _not_neighbours(self, tip: TopicManifest, merging: Sequence[LiveBucket]) -> str | None:
        quarantined = sorted(bucket.object.name for bucket in merging if bucket.quarantined)
        if quarantined:
            return f"buckets {quarantined} are quarantined"
        indexes = {bucket.subscription_id for bucket in merging}
        if len(indexes) > 1:
            return f"the buckets are of several indexes: {sorted(indexes)}"
        names = {bucket.object.name for bucket in merging}
        order = [bucket.object.name for bucket in adjacent_order(tip.live)]
        first = next(place for place, name in enumerate(order) if name in names)
        between = sorted(set(order[first : first + len(names)]) - names)
        return f"buckets {between} lie between the buckets" if between else None

    def _not_bringable(self, tip: TopicManifest, merging: Sequence[LiveBucket]) -> str | None:
        if self.bucket is None:
            return None
        if self.bucket.subscription_id != merging[0].subscription_id:
            return f"the bucket is of index {self.bucket.subscription_id}, its sources of {merging[0].subscription_id}"
        return not_bringable(tip, self.bucket.object)

    def _not_conserved(self, merging: Sequence[LiveBucket]) -> str | None:
        rows = sum(bucket.rows for bucket in merging)
        copied = 0 if self.bucket is None else self.bucket.rows
        dropped = sum(len(source.dropped) for source in self.sources)
        if rows != copied + dropped:
            return f"the sources have {rows} rows, {copied} were copied and {dropped} dropped"
        try:
            merge.check_conserved(merging, self.bucket, self.dropped_hash, self.dropped_id_hash)
        except merge.NotConserved as error:
            return str(error)
        return None

    def _not_gone(self, tip: TopicManifest) -> str | None:
        if not any(source.dropped for source in self.sources):
            return None
        progress = merge.concerning(self.progress_of(tip), ((source.name, source.kept) for source in self.sources))
        for source in self.sources:
            waiting = source.dropped - merge.bits_of(source.name, source.kept, progress).gone
            if waiting:
                return f"{len(waiting)} rows of bucket {source.name} were dropped and are not gone"
        return None

    def apply(self, tip: TopicManifest | None) -> TopicManifest:
        tip = existing(tip)
        merging = self._merging(tip)
        made: tuple[LiveBucket, ...] = ()
        if self.bucket is not None:
            level = 1 + max(source.level for source in merging)
            made = (dataclasses.replace(self.bucket, level=level),)
        place = tip.live.index(merging[0])
        names = {source.object.name for source in merging}
        after = tuple(bucket for bucket in tip.live[place:] if bucket.object.name not in names)
        return with_live(tip, (*tip.live[:place], *made, *after), self.delete_after_ms)

    def landed(self, tip: TopicManifest) -> bool:
        """Return whether the tip names the merged bucket.

        A merge without one leaves no trace: committed again, it finds no sources and is refused.
        """
        return self.bucket is not None and self.bucket.object.name in names_in(tip)


def adjacent_order(live: Iterable[LiveBucket]) -> list[LiveBucket]:
    """Return the buckets that may be merged, neighbours side by side: by index, then by ledgers and name."""

    def place(bucket: LiveBucket) -> tuple[int, int, int, str]:
        return bucket.subscription_id, bucket.first_ledger_id, bucket.last_ledger_id, bucket.object.name

    return sorted((bucket for bucket in live if not bucket.quarantined), key=place)
