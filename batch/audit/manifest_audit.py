"""Audits sequences of manifests: reads runs of them in tasks, and finds those that are missing.

Each manifest is checked alone and against the one before it, by the rules that the operations keep. Every change is one
operation of an owner, of a merger or of collection: a part that stays is unchanged, an object that leaves becomes a
tombstone, and values that only rise never fall. A manifest that was collected is distinguished from one that was lost.
`object_audit` checks the objects that manifests name.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias, TypeVar

from batch.audit import object_audit
from batch.audit import reading as audit_reading
from batch.audit.findings import Finding, Flaw, Kind, Severity, Tally
from batch.audit.reading import Place, Read
from batch.engine.root import Root
from storage_backends import bucket_reading, object_store
from storage_backends.commit import COMMIT_ID
from storage_backends.formats import format_errors, log_slot_format, manifest, merge, names, position_bitmap
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


def _rule(detail: str) -> Flaw:
    return Flaw(Kind.CHAIN_RULE, detail)


def _broken(detail: str) -> Flaw:
    return Flaw(Kind.CHAIN_BROKEN, detail)


# ---- one manifest


def flaws_of_topic(manifest: TopicManifest, *, number: int, shards: int, shard: int, commit_id: str) -> Iterator[Flaw]:
    """Yield the contradictions within a topic manifest.

    `commit_id` is the one in the store's metadata, "" without any.
    """
    yield from _flaws_of_head(manifest.head, number, commit_id)
    if names.shard_of(manifest.topic, shards) != shard:
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
    """Yield the contradictions within a shard manifest."""
    yield from _flaws_of_head(manifest.head, number, commit_id)
    newest, previous = manifest.checkpoint, manifest.previous_checkpoint
    yield from _flaws_of_ranges(manifest)
    live = [each.object for each in (newest, previous) if each is not None]
    yield from _flaws_of_objects(manifest.head, live, manifest.tombstones, names.checkpoint_prefix(manifest.shard))


def _flaws_of_ranges(manifest: ShardManifest) -> Iterator[Flaw]:
    """Check that each section number above the checkpoint before the newest is in one range.

    The last range is open while the shard is owned.
    """
    owned = manifest.open_range
    if (owned is None) != (not manifest.owner):
        yield _rule(f"its owner is {manifest.owner!r}, but its last range is {'closed' if owned is None else 'open'}")
    first = manifest.previous_slot + 1
    if manifest.ranges and manifest.ranges[0].first_slot > first:
        yield _rule(f"no range has sections {first} to {manifest.ranges[0].first_slot - 1}")
    for each in manifest.ranges:
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
    """Return the number in a key, or None if it has none.

    Cached: the manifests of a topic mostly name the same objects.
    """
    try:
        return names.number_of(name)
    except format_errors.FormatError:
        return None


# ---- two neighbours


def flaws_of_following_head(before: ManifestHead, sha256: bytes, after: ManifestHead) -> Iterator[Flaw]:
    """Yield the flaws of a head against the manifest before, which has the hash `sha256`."""
    if after.previous_sha256 != sha256:
        yield _broken(
            f"it follows a manifest with SHA-256 {after.previous_sha256.hex()}, number {before.number} has "
            f"{sha256.hex()}"
        )
    elif after.lineage != (*before.lineage, after.commit_id)[-LINEAGE_MAX:]:
        yield _broken(f"its lineage does not continue that of number {before.number}")
    yield from _never_falls("orphan_floor", before.orphan_floor, after.orphan_floor)


def flaws_of_following_topic(before: TopicManifest, after: TopicManifest) -> Iterator[Flaw]:
    """Yield the flaws of a topic manifest against the one before it, except those of the heads."""
    if (before.topic, before.topic_id) != (after.topic, after.topic_id):
        yield _rule(f"topic {before.topic!r} became {after.topic!r}")
    for name in ("owner_epoch", "applied", "last_subscription_id"):
        yield from _never_falls(name, getattr(before, name), getattr(after, name))
    yield from _never_forgotten(before, after)
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
    """Return how many rows a merge did not copy, or 0 if there was no merge."""
    made = [bucket for bucket in _not_in(after.live, before.live) if bucket.level]
    if not made:
        return 0
    return sum(bucket.rows for bucket in _not_in(before.live, after.live)) - sum(bucket.rows for bucket in made)


def flaws_of_dropped(before: TopicManifest, after: TopicManifest, progress: Progress) -> Iterator[Flaw]:
    """Check that a merge drops only rows that are gone.

    `progress` is that of the manifest before. For sources that were merged themselves, progress may name the buckets
    they were merged from; therefore every name counts that is not live. Raises FormatError.
    """
    dropped = merge_dropped(before, after)
    if dropped <= 0:
        return
    staying = {bucket.object.name for bucket in after.live}
    gone = sum(position_bitmap.count_of(part.gone) for part in progress.buckets if part.bucket not in staying)
    if dropped > gone:
        yield _rule(f"a merge did not copy {dropped} rows of its sources, but at most {gone} were gone")


def flaws_of_following_shard(before: ShardManifest, after: ShardManifest) -> Iterator[Flaw]:
    """Yield the flaws of a shard manifest against the one before it, except those of the heads."""
    for name in ("epoch", "settled_epoch"):
        yield from _never_falls(name, getattr(before, name), getattr(after, name))
    yield from _never_forgotten(before, after)
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
            # An owner that hands the shard over adds two at once.
            follows = after.previous_checkpoint == before.checkpoint or (len(arriving) == 2 and not after.owner)
        if not follows:
            yield _rule("the previous checkpoint is not the former newest one")
    yield from _flaws_of_change(before, after, leaving, arriving)


def _flaws_of_following_ranges(before: ShardManifest, after: ShardManifest) -> Iterator[Flaw]:
    """Check that a range stays unchanged until the checkpoints cover it.

    An open one may be closed, or dropped by an owner that leaves it.
    """
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


def _never_forgotten(before: Manifest, after: Manifest) -> Iterator[Flaw]:
    if lost := sorted(set(before.requires) - set(after.requires)):
        yield _rule(f"it no longer requires {', '.join(lost)}")


def _never_falls(name: str, before: int, after: int) -> Iterator[Flaw]:
    if after < before:
        yield _rule(f"{name} fell from {before} to {after}")


def _not_in(buckets: Iterable[LiveBucket], others: Iterable[LiveBucket]) -> list[LiveBucket]:
    known = {bucket.object.name for bucket in others}
    return [bucket for bucket in buckets if bucket.object.name not in known]


def _flaws_of_live(before: TopicManifest, after: TopicManifest) -> Iterator[Flaw]:
    """Check that a bucket that stays is unchanged; it may be quarantined, and stays so."""
    known = {bucket.object.name: bucket for bucket in before.live}
    for bucket in after.live:
        was = known.get(bucket.object.name)
        if was is None or was is bucket or was == bucket:
            continue
        found = dataclasses.replace(
            bucket, quarantined=False, damage="", quarantined_slot=log_slot_format.BEFORE_THE_FIRST
        )
        if was.quarantined or was != found:
            yield _rule(f"bucket {bucket.object.name} changed while it was live")


def _flaws_of_change(
    before: M, after: M, leaving: Sequence[ObjectReference], arriving: Sequence[ObjectReference]
) -> Iterator[Flaw]:
    """Check that leaving objects become tombstones, arriving ones are new, and tombstones stay as they are."""
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
    """Check that a merge adds one bucket, for neighbours of its index, without a row that they did not have."""
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
    elif made.rows == rows:
        try:
            merge.check_conserved(sources, made, (0, 0), (0, 0))
        except merge.NotConserved as error:
            yield _rule(f"merged bucket {name} has all {rows} rows of its sources, but not their hash: {error}")
    within = (
        made.first_ledger_id >= min(source.first_ledger_id for source in sources)
        and made.last_ledger_id <= max(source.last_ledger_id for source in sources)
        and made.min_deliver_at_ms >= min(source.min_deliver_at_ms for source in sources)
        and made.max_deliver_at_ms <= max(source.max_deliver_at_ms for source in sources)
    )
    if not within:
        yield _rule(f"merged bucket {name} has ledgers or times that its sources did not have")


Manifest: TypeAlias = TopicManifest | ShardManifest


@dataclasses.dataclass(slots=True)
class ManifestsSeen:
    """The result of a run.

    `absent` are listed numbers that no longer existed. `deleted` is the highest manifest that says that the topic is
    deleted, or 0; manifests below it may be collected at once. `tip` is that of the run that ends with it, or None if
    it is unknown.
    """

    tally: Tally = dataclasses.field(default_factory=Tally)
    absent: list[int] = dataclasses.field(default_factory=list)
    deleted: int = 0
    tip: Manifest | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Good:
    """A manifest that was read and is whole."""

    number: int
    manifest: Manifest
    sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestRun:
    """A run of manifests of one sequence, by ascending number.

    `before` is the listed number below them, or None if there is none. With `is_last` no listed manifest follows them,
    and the run also reads those committed since.
    """

    place: Place
    numbers: tuple[int, ...]
    before: int | None
    is_last: bool

    def run(self, root: Root) -> ManifestsSeen:
        return _Run(self, root).seen()


class _Run:
    def __init__(self, run: ManifestRun, root: Root) -> None:
        self._run = run
        self._root = root
        self._place = run.place
        self._seen = ManifestsSeen()
        # None behind a manifest that could not be read
        self._last: _Good | None = None
        self._tip_is_damaged = False
        self._decoder = manifest.TopicManifestDecoder()

    def seen(self) -> ManifestsSeen:
        run, seen = self._run, self._seen
        if run.before is not None:
            found = audit_reading.read(self._root.store, self._key(run.before))
            self._last = self._good(run.before, found, report=False)
        listed = audit_reading.read_all(self._root.store, map(self._key, run.numbers))
        for number, found in zip(run.numbers, listed, strict=True):
            self._take(number, found)
        if run.is_last:
            for number, found in self._behind(run.numbers[-1]):
                self._take(number, found)
            seen.tip = self._tip()
        return seen

    def _key(self, number: int) -> str:
        return names.numbered_key(self._place.manifest_prefix, number)

    def _behind(self, number: int) -> Iterator[tuple[int, Read]]:
        """Yield the manifests committed since the listing."""
        while True:
            number += 1
            found = audit_reading.read(self._root.store, self._key(number))
            if found.absent:
                return
            yield number, found

    def _take(self, number: int, found: Read) -> None:
        before, self._last = self._last, self._good(number, found, report=True)
        self._tip_is_damaged = self._last is None and not found.absent
        if found.absent:
            self._seen.absent.append(number)
            return
        after = self._last
        if after is None or before is None or before.number != number - 1:
            return
        following = flaws_of_following_head(before.manifest.head, before.sha256, after.manifest.head)
        changed = [*_flaws_between(before.manifest, after.manifest), *self._flaws_of_merge(before, after)]
        self._report(number, after.manifest, [*following, *changed])

    def _flaws_of_merge(self, before: _Good, after: _Good) -> Iterator[Flaw]:
        """Check, as far as possible, that a merge dropped only rows that were gone."""
        was, made = before.manifest, after.manifest
        if not isinstance(was, TopicManifest) or not isinstance(made, TopicManifest):
            return
        if merge_dropped(was, made) <= 0:
            return
        try:
            progress = bucket_reading.progress_of(self._root.store, was)
            yield from flaws_of_dropped(was, made, progress)
        except (object_store.StoreError, format_errors.FormatError):
            # A progress object that has been replaced since may be gone; a damaged one has a finding of its own.
            return

    def _good(self, number: int, found: Read, *, report: bool) -> _Good | None:
        """Return the manifest if it is whole and has its number. With `report`, its flaws become findings."""
        if found.body is None:
            if report and found.damage:
                self._report(number, None, [Flaw(Kind.DAMAGED, found.damage)])
            elif report and found.failure:
                self._report(number, None, [Flaw(Kind.UNREADABLE, found.failure)])
            return None
        try:
            body, decoded = audit_reading.decoded(self._root.store, found, found.body, self._decoded)
        except format_errors.FormatError as error:
            if report:
                self._report(number, None, [object_audit.damaged(error)])
            return None
        if report:
            what = "topic manifest" if self._place.topic_id else "shard manifest"
            self._seen.tally.saw(what, len(body))
            flaws = [*self._own_flaws(number, decoded, found.metadata.get(COMMIT_ID, ""))]
            self._report(number, decoded, flaws)
            if isinstance(decoded, TopicManifest) and decoded.deleted:
                self._seen.deleted = number
        if decoded.head.number != number:
            return None
        return _Good(number, decoded, hashlib.sha256(body).digest())

    def _decoded(self, body: bytes) -> Manifest:
        """Decode a manifest. Raises FormatError, also if it is of another place, or names what cannot exist."""
        place = self._place
        if place.topic_id:
            return manifest.check_topic(self._decoder.decode(body), place.shard, place.topic_id)
        return manifest.check_shard(manifest.decode_shard_manifest(body), place.shard)

    def _own_flaws(self, number: int, decoded: Manifest, commit_id: str) -> Iterator[Flaw]:
        if decoded.head.number != number:
            yield Flaw(Kind.CHAIN_BROKEN, f"it says that its number is {decoded.head.number}")
        elif isinstance(decoded, ShardManifest):
            yield from flaws_of_shard(decoded, number=number, commit_id=commit_id)
        else:
            yield from flaws_of_topic(
                decoded, number=number, shards=self._root.shards, shard=self._place.shard, commit_id=commit_id
            )
            if decoded.progress is not None:
                yield from object_audit.progress_flaws(decoded.progress)

    def _tip(self) -> Manifest | None:
        """Return the last manifest read, or None if it is damaged: no older one stands in for it."""
        if self._last is not None:
            return self._last.manifest
        if self._tip_is_damaged:
            return None
        # The last one that was listed has been collected: there are later ones.
        try:
            if self._place.topic_id:
                topic = self._root.tip(self._place.of_topic)
                return None if topic is None else topic.manifest
            shard = self._root.shard_tip(self._place.shard)
            return None if shard is None else shard.manifest
        except object_store.Damaged as error:
            self._report(0, None, [object_audit.unreadable(error, str(error))])
        except object_store.StoreError as error:
            self._report(0, None, [Flaw(Kind.UNREADABLE, str(error))])
        return None

    def _report(self, number: int, decoded: Manifest | None, flaws: Iterable[Flaw]) -> None:
        topic = decoded.topic if isinstance(decoded, TopicManifest) else self._place.topic_id
        for flaw in flaws:
            self._seen.tally.find(
                Finding(
                    kind=flaw.kind,
                    severity=Severity.ERROR,
                    object=self._key(number) if number else self._place.manifest_prefix,
                    detail=flaw.detail,
                    shard=self._place.shard,
                    topic=topic,
                    offset=flaw.offset,
                )
            )


def _flaws_between(before: Manifest, after: Manifest) -> Iterator[Flaw]:
    if isinstance(before, TopicManifest) and isinstance(after, TopicManifest):
        yield from flaws_of_following_topic(before, after)
    elif isinstance(before, ShardManifest) and isinstance(after, ShardManifest):
        yield from flaws_of_following_shard(before, after)


# ---- missing manifests


def not_there(listed: Sequence[int], seen: Sequence[ManifestsSeen], tip: int, kept: int) -> list[int]:
    """Return the numbers below the tip that were not found and cannot have been collected, ascending.

    The newest `kept` manifests are never collected, except those below a manifest that says that the topic is deleted.
    """
    found = set(listed) - {number for part in seen for number in part.absent}
    deleted = max((part.deleted for part in seen), default=0)
    highest = max(found, default=0)
    return [number for number in range(max(tip - kept + 1, deleted, 1), min(tip, highest)) if number not in found]


def lost(root: Root, place: Place, candidates: Sequence[int], kept: int) -> list[int]:
    """Return the candidates that are missing and that no newer tip explains. Raises the store's errors."""
    log_of = root.log(place.of_topic) if place.topic_id else None
    gone = [number for number in candidates if not _is_there(root, names.numbered_key(place.manifest_prefix, number))]
    if not gone:
        return []
    tip = root.shard_tip(place.shard) if log_of is None else log_of.read_tip()
    newest = 0 if tip is None else tip.number
    return [number for number in gone if number > newest - kept]


def _is_there(root: Root, key: str) -> bool:
    try:
        root.store.head(key)
    except object_store.NotFound:
        return False
    except object_store.Damaged:
        return True
    return True
