"""A topic's manifest, and an operation of every kind that may follow it."""

from __future__ import annotations

import dataclasses

from storage_backends import commit
from storage_backends.formats import names, requirements
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    BucketProgress,
    LiveBucket,
    ManifestHead,
    ObjectReference,
    Progress,
    Subscription,
    Tombstone,
    TopicDelayLevels,
    TopicManifest,
    TopicPolicy,
)
from storage_backends.topic_manifest import (
    ClaimTopic,
    Create,
    DeleteTopic,
    DropBuckets,
    Quarantine,
    RequireOfTopic,
    Seal,
    SetDelayLevels,
    SetPolicy,
    SetSubscriptions,
)

TOPIC = "flights"
TOPIC_ID = names.topic_id(TOPIC)
EPOCH = 4
APPLIED = 100
FLOOR = 10
DELETE_AFTER_MS = 9_000

Operation = commit.Operation[TopicManifest]


def reference(name: str, base: int = 20) -> ObjectReference:
    return ObjectReference(name=name, base=base, size_bytes=7, sha256=b"\2" * 32)


def bucket(name: str, base: int = 20, *, subscription_id: int = 0) -> LiveBucket:
    return LiveBucket(
        object=reference(name, base),
        rows=3,
        first_ledger_id=1,
        last_ledger_id=2,
        min_deliver_at_ms=5,
        max_deliver_at_ms=6,
        hash_low=1,
        hash_high=2,
        subscription_id=subscription_id,
    )


def subscription(number: int) -> Subscription:
    return Subscription(subscription_id=number, name=f"s{number}", since_ms=0, created_slot=ShardSlot(1))


def progress(*buckets: str) -> Progress:
    return Progress(buckets=tuple(BucketProgress(bucket=each) for each in buckets))


def tombstone(name: str) -> Tombstone:
    return Tombstone(object=reference(name), removed_in=3, delete_after_ms=1)


def buried(*names: str) -> tuple[Tombstone, ...]:
    """What an operation on `TIP` leaves of objects."""
    return tuple(Tombstone(object=reference(name), removed_in=31, delete_after_ms=DELETE_AFTER_MS) for name in names)


TIP = TopicManifest(
    head=ManifestHead(
        number=30, previous_sha256=b"", commit_id="c", writer="w", created_ms=1, lineage=("c",), orphan_floor=FLOOR
    ),
    topic=TOPIC,
    topic_id=TOPIC_ID,
    incarnation=1,
    owner_epoch=EPOCH,
    applied=ShardSlot(APPLIED),
    live=(bucket("b1"), bucket("b2")),
    tombstones=(tombstone("dead"),),
    subscriptions=(subscription(1), subscription(3)),
    last_subscription_id=5,
    progress=progress("b1", "b2"),
)

CREATE = Create(topic=TOPIC, topic_id=TOPIC_ID, epoch=EPOCH, applied=ShardSlot(50))
CLAIM = ClaimTopic(epoch=EPOCH + 1)
SEAL = Seal(
    buckets=(bucket("b3"),),
    progress=progress("b1", "b3"),
    progress_object=None,
    slot_from=ShardSlot(APPLIED),
    slot_to=ShardSlot(APPLIED + 20),
    epoch=EPOCH,
    replaced_delete_after_ms=DELETE_AFTER_MS,
)
DROP = DropBuckets(buckets=("b1",), epoch=EPOCH, delete_after_ms=DELETE_AFTER_MS)
SUBSCRIPTIONS = SetSubscriptions(
    subscriptions=(subscription(6),), last_subscription_id=6, epoch=EPOCH, delete_after_ms=DELETE_AFTER_MS
)
QUARANTINE = Quarantine(bucket="b1", damage="segment 3 is damaged", slot=ShardSlot(APPLIED + 3), epoch=EPOCH)
POLICY = SetPolicy(policy=TopicPolicy(delay_max_ms=9, compatible_form=False), epoch=EPOCH)
LEVELS = SetDelayLevels(levels=TopicDelayLevels(table="1s 5s", clamp=False), epoch=EPOCH)
REQUIREMENT = RequireOfTopic(requirement=requirements.SCHEDULE_IDS, epoch=EPOCH)
DELETE = DeleteTopic(slot=ShardSlot(APPLIED + 7), epoch=EPOCH, delete_after_ms=DELETE_AFTER_MS)


def tip_with(**changes: object) -> TopicManifest:
    return dataclasses.replace(TIP, **changes)  # type: ignore[arg-type]


QUARANTINED = tip_with(
    live=(
        dataclasses.replace(
            bucket("b1"), quarantined=True, damage="segment 3 is damaged", quarantined_slot=ShardSlot(APPLIED + 3)
        ),
        bucket("b2"),
    )
)
DELETED = DELETE.apply(TIP)
CREATE_AGAIN = dataclasses.replace(CREATE, applied=ShardSlot(APPLIED + 9))


def seal_with(**changes: object) -> Seal:
    return dataclasses.replace(SEAL, **changes)  # type: ignore[arg-type]
