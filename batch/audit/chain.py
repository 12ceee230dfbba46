"""What may follow what in a sequence of manifests: the rules that the operations keep, read backwards.

Owns: the checks of one manifest by itself and of two neighbours. Pure: manifests in, flaws out.
Does not own: reading manifests and which are missing (`manifest_task`), and the objects that they name
(`object_task`).

Every change is one operation of an owner, of a merger or of collection, so that what stays must stay as it was, what
leaves becomes a tombstone, and what never falls never falls.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from batch.audit.findings import Flaw, Kind
from storage_backends.formats import format_errors, log_slot_format, names, position_bitmap, shard_slot
from storage_backends.formats.manifest import (
    LINEAGE_MAX,
    LiveBucket,
    ManifestHead,
    ObjectReference,
    Progress,
    ShardManifest,
    Tombstone,
    TopicManifest,
)

M = TypeVar("M", ShardManifest, TopicManifest)
_U64_MASK = (1 << 64) - 1


def _rule(detail: str) -> Flaw:
    return Flaw(Kind.CHAIN_RULE, detail)


def _broken(detail: str) -> Flaw:
    return Flaw(Kind.CHAIN_BROKEN, detail)


# ---- one manifest


def flaws_of_topic(manifest: TopicManifest, *, number: int, shards: int, shard: int, commit_id: str) -> Iterator[Flaw]:
    """What a topic manifest says that it cannot. `commit_id`: what the store has as its metadata, "" without any."""
    yield from _flaws_of_head(manifest.head, number, commit_id)
    if manifest.topic_id != names.topic_id(manifest.topic):
        yield _rule(
            f"topic {manifest.topic!r} has id {names.topic_id(manifest.topic)}, "
            f"but the manifest says {manifest.topic_id}"
        )
    elif names.shard_of(manifest.topic, shards) != shard:
        yield _rule(f"topic {manifest.topic!r} belongs to shard {names.shard_of(manifest.topic, shards)} of {shards}")
    if manifest.deleted and (manifest.live or manifest.progress or manifest.beside_buckets or manifest.subscriptions):
        yield _rule("the topic is deleted, but has buckets, progress, properties or subscriptions")
    if manifest.properties_object is not None and not manifest.subscriptions:
        yield _rule("it has properties of subscriptions, but no subscription")
    if manifest.progress is not None and manifest.progress_object is not None:
        yield _rule("it has progress both inline and as an object")
    highest = max((each.subscription_id for each in manifest.subscriptions), default=0)
    if highest > manifest.last_subscription_id:
        yield _rule(f"subscription {highest} is above the last id {manifest.last_subscription_id}")
    live = [*(bucket.object for bucket in manifest.live), *manifest.beside_buckets]
    prefix = names.topic_prefix(shard, manifest.topic_id)
    yield from _flaws_of_objects(manifest.head, live, manifest.tombstones, prefix)


def flaws_of_shard(manifest: ShardManifest, *, number: int, commit_id: str) -> Iterator[Flaw]:
    """What a shard manifest says that it cannot."""
    yield from _flaws_of_head(manifest.head, number, commit_id)
    if manifest.settled_epoch > manifest.epoch:
        yield _rule(f"epoch {manifest.settled_epoch} is settled, above the epoch {manifest.epoch}")
    newest, previous = manifest.checkpoint, manifest.previous_checkpoint
    if newest is None and previous is not None:
        yield _rule("it has a checkpoint before the newest, but no newest")
    if newest is not None and previous is not None and newest.slot < previous.slot:
        yield _rule(f"its checkpoint is of slot {newest.slot}, the one before of slot {previous.slot}")
    yield from _flaws_of_ranges(manifest)
    live = [each.object for each in (newest, previous) if each is not None]
    yield from _flaws_of_objects(manifest.head, live, manifest.tombstones, names.checkpoint_prefix(manifest.shard))


def _flaws_of_ranges(manifest: ShardManifest) -> Iterator[Flaw]:
    """Every shard slot above the checkpoint before the newest is in one range; the last is open while it is owned."""
    owned = manifest.open_range
    if (owned is None) != (not manifest.owner):
        yield _rule(f"its owner is {manifest.owner!r}, but its last range is {'closed' if owned is None else 'open'}")
    if owned is not None and owned.epoch != manifest.epoch:
        yield _rule(f"its open range has epoch {owned.epoch}, but its own epoch is {manifest.epoch}")
    first = manifest.previous_slot + 1
    if manifest.ranges and manifest.ranges[0].first_slot > first:
        yield _rule(f"no range has sections {first} to {manifest.ranges[0].first_slot - 1}")
    for each in manifest.ranges:
        if not log_slot_format.is_log_id(each.log_id):
            yield _rule(f"a range names log {each.log_id!r}, which is not a ULID")
        if each.last_slot is not None and (each.last_slot < each.first_slot or (each.through or 0) <= each.after):
            yield _rule(f"the range of epoch {each.epoch} is empty")
    for earlier, later in itertools.pairwise(manifest.ranges):
        if later.epoch <= earlier.epoch:
            yield _rule(f"a range of epoch {later.epoch} follows one of epoch {earlier.epoch}")
        if earlier.last_slot is not None and later.first_slot != earlier.last_slot + 1:
            yield _rule(
                f"the range of epoch {later.epoch} begins at section {later.first_slot}, "
                f"but the one before it ends at {earlier.last_slot}"
            )


def _flaws_of_head(head: ManifestHead, number: int, commit_id: str) -> Iterator[Flaw]:
    if head.number != number:
        yield _broken(f"it says that its number is {head.number}")
    if not head.lineage or head.lineage[-1] != head.commit_id:
        yield _broken(f"its lineage does not end with its own commit {head.commit_id}")
    elif len(head.lineage) != min(head.number, LINEAGE_MAX):
        yield _broken(f"its lineage has {len(head.lineage)} commits, but should have {min(head.number, LINEAGE_MAX)}")
    if commit_id and commit_id != head.commit_id:
        yield _broken(f"it was written as commit {commit_id}, but says {head.commit_id}")
    if head.number == 1 and head.previous_sha256:
        yield _broken("it is the first manifest, but names a previous one")
    if head.orphan_floor > head.number:
        yield _rule(f"its orphan floor {head.orphan_floor} is above its number")


def _flaws_of_objects(
    head: ManifestHead, live: Sequence[ObjectReference], tombstones: Sequence[Tombstone], prefix: str
) -> Iterator[Flaw]:
    references = [*live, *(each.object for each in tombstones)]
    for name, count in collections.Counter(each.name for each in references).items():
        if count > 1:
            yield _rule(f"object {name} is named {count} times")
    for reference in references:
        if _base_of(reference.name) != reference.base or not reference.name.startswith(prefix):
            yield _rule(f"object {reference.name} with base {reference.base} has the key of another place or base")
        elif reference.base > head.number:
            yield _rule(f"object {reference.name} was started from a later manifest")
    for each in tombstones:
        if each.removed_in > head.number:
            yield _rule(f"object {each.object.name} left in manifest {each.removed_in}, which is later")


@functools.lru_cache(maxsize=100_000)
def _base_of(name: str) -> int | None:
    """The number in a key; None when it has none. The manifests of a topic mostly name the same objects."""
    try:
        return names.number_of(name)
    except format_errors.FormatError:
        return None


# ---- two neighbours


def flaws_of_following_head(before: ManifestHead, sha256: bytes, after: ManifestHead) -> Iterator[Flaw]:
    """`sha256`: of the manifest before."""
    if after.previous_sha256 != sha256:
        yield _broken(
            f"it follows a manifest with SHA-256 {after.previous_sha256.hex()}, number {before.number} has "
            f"{sha256.hex()}"
        )
    elif after.lineage != (*before.lineage, after.commit_id)[-LINEAGE_MAX:]:
        yield _broken(f"its lineage does not continue that of number {before.number}")
    yield from _never_falls("orphan_floor", before.orphan_floor, after.orphan_floor)


def flaws_of_following_topic(before: TopicManifest, after: TopicManifest) -> Iterator[Flaw]:
    """What a topic manifest says that may not follow the one before it, their heads apart."""
    if (before.topic, before.topic_id) != (after.topic, after.topic_id):
        yield _rule(f"topic {before.topic!r} became {after.topic!r}")
    for name in ("owner_epoch", "applied", "last_subscription_id"):
        yield from _never_falls(name, getattr(before, name), getattr(after, name))
    expected = before.incarnation + (1 if after.deleted and not before.deleted else 0)
    if after.incarnation != expected:
        yield _rule(f"incarnation {before.incarnation} became {after.incarnation}, but should be {expected}")
    yield from _flaws_of_live(before, after)
    leaving = [bucket.object for bucket in _not_in(before.live, after.live)]
    arriving = [bucket.object for bucket in _not_in(after.live, before.live)]
    leaving += [each for each in before.beside_buckets if each not in after.beside_buckets]
    arriving += [each for each in after.beside_buckets if each not in before.beside_buckets]
    yield from _flaws_of_change(before, after, leaving, arriving)
    merged = [bucket for bucket in _not_in(after.live, before.live) if bucket.level]
    if merged:
        yield from _flaws_of_merge(_not_in(before.live, after.live), merged)


def merge_dropped(before: TopicManifest, after: TopicManifest) -> int:
    """How many rows a merge did not copy; 0 when there was none."""
    made = [bucket for bucket in _not_in(after.live, before.live) if bucket.level]
    if not made:
        return 0
    return sum(bucket.rows for bucket in _not_in(before.live, after.live)) - sum(bucket.rows for bucket in made)


def flaws_of_dropped(before: TopicManifest, after: TopicManifest, progress: Progress) -> Iterator[Flaw]:
    """A merge drops only what is gone. `progress`: of the manifest before.

    Of sources that were merged themselves, progress may name what they were merged from: then every name counts that is
    not live. Raises FormatError.
    """
    dropped = merge_dropped(before, after)
    if dropped <= 0:
        return
    staying = {bucket.object.name for bucket in after.live}
    gone = sum(position_bitmap.count_of(part.gone) for part in progress.buckets if part.bucket not in staying)
    if dropped > gone:
        yield _rule(f"a merge did not copy {dropped} rows of its sources, but at most {gone} were gone")


def flaws_of_following_shard(before: ShardManifest, after: ShardManifest) -> Iterator[Flaw]:
    """What a shard manifest says that may not follow the one before it, their heads apart."""
    for name in ("epoch", "settled_epoch"):
        yield from _never_falls(name, getattr(before, name), getattr(after, name))
    if after.epoch > before.epoch + 1:
        yield _rule(f"epoch rose from {before.epoch} to {after.epoch}: each owner takes the next epoch")
    yield from _flaws_of_following_ranges(before, after)
    old = [each for each in (before.checkpoint, before.previous_checkpoint) if each is not None]
    new = [each for each in (after.checkpoint, after.previous_checkpoint) if each is not None]
    arriving = [each.object for each in new if each not in old]
    leaving = [each.object for each in old if each not in new]
    if old and after.checkpoint is None:
        yield _rule("its checkpoint disappeared")
    else:
        yield from _never_falls("checkpoint.slot", before.checkpoint_slot, after.checkpoint_slot)
        if after.checkpoint == before.checkpoint:
            follows = after.previous_checkpoint == before.previous_checkpoint
        else:
            # An owner that hands the shard over brings in two at once.
            follows = after.previous_checkpoint == before.checkpoint or (len(arriving) == 2 and not after.owner)
        if not follows:
            yield _rule("the previous checkpoint is not the former newest one")
    yield from _flaws_of_change(before, after, leaving, arriving)


def _flaws_of_following_ranges(before: ShardManifest, after: ShardManifest) -> Iterator[Flaw]:
    """A range stays as it is until the checkpoints cover it; an open one may be closed, or dropped by who leaves it."""
    kept = {(each.log_id, each.epoch): each for each in after.ranges}
    for was in before.ranges:
        now = kept.pop((was.log_id, was.epoch), None)
        what = f"the range of epoch {was.epoch} in log {was.log_id}"
        if now is None:
            covered = was.last_slot is not None and was.last_slot <= after.previous_slot
            left = was.last_slot is None and (after.epoch > before.epoch or not after.owner)
            if not covered and not left:
                yield _rule(f"{what} left before a checkpoint covered its sections")
            continue
        yield from _never_falls(f"{what}: after", was.after, now.after)
        if now.first_slot != was.first_slot:
            yield _rule(f"{what} began at section {was.first_slot}, but now begins at {now.first_slot}")
        closed = was.through is None and after.epoch > before.epoch
        if not closed and (now.through, now.last_slot) != (was.through, was.last_slot):
            yield _rule(f"{what} ended at slot {was.through}, but now ends at {now.through}")
    for came in kept.values():
        if came.epoch != after.epoch or after.epoch == before.epoch or came.through is not None:
            yield _rule(f"a range of epoch {came.epoch} in log {came.log_id} was added without a claim")


def _never_falls(name: str, before: int, after: int) -> Iterator[Flaw]:
    if after < before:
        yield _rule(f"{name} fell from {before} to {after}")


def _not_in(buckets: Iterable[LiveBucket], others: Iterable[LiveBucket]) -> list[LiveBucket]:
    known = {bucket.object.name for bucket in others}
    return [bucket for bucket in buckets if bucket.object.name not in known]


def _flaws_of_live(before: TopicManifest, after: TopicManifest) -> Iterator[Flaw]:
    """A bucket that stays is as it was; it may be quarantined, and stays so."""
    known = {bucket.object.name: bucket for bucket in before.live}
    for bucket in after.live:
        was = known.get(bucket.object.name)
        if was is None or was is bucket or was == bucket:
            continue
        found = dataclasses.replace(bucket, quarantined=False, damage="", quarantined_slot=shard_slot.BEFORE_THE_FIRST)
        if was.quarantined or was != found:
            yield _rule(f"bucket {bucket.object.name} changed while it was live")


def _flaws_of_change(
    before: M, after: M, leaving: Sequence[ObjectReference], arriving: Sequence[ObjectReference]
) -> Iterator[Flaw]:
    """What leaves becomes a tombstone; what arrives is new; a tombstone stays as it is until it is dropped."""
    buried = {each.object.name: each for each in before.tombstones}
    left = {each.object.name: each for each in after.tombstones}
    for reference in leaving:
        if reference.name not in left:
            yield _rule(f"object {reference.name} left without a tombstone")
    for reference in arriving:
        if reference.name in buried:
            yield _rule(f"object {reference.name} had left, but returned")
        elif reference.base < before.head.orphan_floor:
            yield _rule(f"object {reference.name} was added from below the orphan floor {before.head.orphan_floor}")
    for name, each in left.items():
        was = buried.get(name)
        if was is None:
            if each.removed_in != after.head.number:
                yield _rule(f"object {name} is a new tombstone, but left in manifest {each.removed_in}")
        elif each is not was and (
            dataclasses.replace(each, attempts=was.attempts) != was or each.attempts < was.attempts
        ):
            yield _rule(f"the tombstone of object {name} changed")


def _flaws_of_merge(sources: Sequence[LiveBucket], merged: Sequence[LiveBucket]) -> Iterator[Flaw]:
    """A merge brings in one bucket, for neighbours of its index, that has no row which they did not have."""
    made = merged[0]
    name = made.object.name
    if len(merged) > 1:
        yield _rule(f"{len(merged)} merged buckets were added at once")
        return
    if not sources or any(source.subscription_id != made.subscription_id for source in sources):
        yield _rule(f"merged bucket {name} replaces no buckets of its index")
        return
    level = 1 + max(source.level for source in sources)
    if made.level != level:
        yield _rule(f"merged bucket {name} has level {made.level}, but its sources require {level}")
    rows = sum(source.rows for source in sources)
    if made.rows > rows:
        yield _rule(f"merged bucket {name} has {made.rows} rows, but its sources had {rows}")
    elif made.rows == rows and _hash_sum(sources) != (made.hash_low, made.hash_high):
        yield _rule(f"merged bucket {name} has all {rows} rows of its sources, but not their hash")
    within = (
        made.first_ledger_id >= min(source.first_ledger_id for source in sources)
        and made.last_ledger_id <= max(source.last_ledger_id for source in sources)
        and made.min_deliver_at_ms >= min(source.min_deliver_at_ms for source in sources)
        and made.max_deliver_at_ms <= max(source.max_deliver_at_ms for source in sources)
    )
    if not within:
        yield _rule(f"merged bucket {name} has ledgers or times that its sources did not have")


def _hash_sum(sources: Iterable[LiveBucket]) -> tuple[int, int]:
    low = high = 0
    for source in sources:
        low += source.hash_low
        high += source.hash_high
    return low & _U64_MASK, high & _U64_MASK
