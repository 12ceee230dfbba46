"""Runs one pass of garbage collection over one shard. It stands alone since it is the state of one pass.

Without a listing a pass reads checkpoints, and what served topics know of their tombstones. It sends the store no
request for idle topics. With a listing it finds orphans, old manifests, and the remains of topics that were deleted or
cannot be served. A guard keeps suspiciously many orphans.

`Collector` deletes unneeded objects of one sequence of manifests, a shard's or a topic's, in one thread:

    tombstones   read the tip, delete objects past their grace, then drop the tombstones; after a crash between the two
                 they are deleted once more, and a missing object is success
    orphans      commit the floor, and only then read which objects the manifest names: R4
    manifests    those with enough later ones that are old enough: R3

Any process may do that, also several at once: its commits carry no epoch, and each is valid for every owner.
`daemon.core.garbage_rules` decides what may be deleted.

A pass that finds nothing commits nothing. This daemon learns of the commits of its own collector, so that none of its
work is based on a manifest below the floor.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, Generic, TypeVar

from daemon.core import garbage_rules
from daemon.core.garbage_rules import NOTHING, NOTHING_DONE, CollectionLimits, ObjectCount, Summary
from daemon.errors import TarryError
from daemon.runtime.environment import Environment
from daemon.shard.shard import ServedShard
from daemon.topic import topic_manifests
from storage_backends import commit, manifest_collection, object_store, shard_listing, topic_manifest
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import DeadObject, ShardManifest, Tombstone, TopicManifest
from storage_backends.object_store import Damaged, ListedObject
from storage_backends.shard_listing import Listed, ShardListing

log = logging.getLogger(__name__)

BATCH: Final = 500
"""Objects deleted in one step, since the threads have other work"""

DEADLINE_S: Final = 10.0
"""Time for which a step tries to learn the outcome of its commit (seconds); the next pass tries again"""

ERROR_CHARACTERS_MAX: Final = 500
"""Length of the store's error in the record of an object that was given up"""


M = TypeVar("M", ShardManifest, TopicManifest)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """The names of objects that a step tried to delete. Those in `failed` are retried, those in `given_up` are not."""

    deleted: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    given_up: frozenset[str] = frozenset()

    def among(self, known: frozenset[str]) -> Outcome:
        """Return the outcome of these objects only."""
        return Outcome(self.deleted & known, self.failed & known, self.given_up & known)

    @property
    def names(self) -> frozenset[str]:
        return self.deleted | self.failed | self.given_up


@dataclasses.dataclass(frozen=True, slots=True)
class SequenceKind(Generic[M]):
    """A kind of manifest. `is_over` returns whether it will name no object before it begins again."""

    named: Callable[[M], Set[str]]
    is_over: Callable[[M], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class Tools:
    """The means of a collector. `executor` deletes in parallel and must not be the one that runs the collector.

    `writer` and `now_ms` go into the manifests; no decision that could lose data depends on these times.
    """

    store: object_store.ObjectStore
    executor: concurrent.futures.Executor
    now_ms: Callable[[], int]
    writer: str
    limits: CollectionLimits


@dataclasses.dataclass(frozen=True, slots=True)
class Step(Generic[M]):
    """The result of a step. `tip` is the newest manifest that it saw. With `more` the same step has more to do."""

    tip: commit.Tip[M] | None
    summary: Summary = NOTHING_DONE
    deleted: frozenset[str] = frozenset()
    more: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Orphans(Generic[M]):
    """Keys and sizes of the objects that no manifest will ever name."""

    tip: commit.Tip[M] | None
    found: Sequence[tuple[str, int]] = ()
    count: ObjectCount = NOTHING


class Collector(Generic[M]):
    """The collector of one sequence of manifests. Each method may be repeated after any error.

    With `dry_run` nothing is deleted and nothing committed; objects are only counted.
    """

    def __init__(self, manifests: commit.ManifestLog[M], kind: SequenceKind[M], tools: Tools) -> None:
        self._log: commit.ManifestLog[M] = manifests
        self._kind: SequenceKind[M] = kind
        self._tools = tools
        self._created_ms: dict[int, int | None] = {}

    # ---- tombstones

    def collect_tombstones(self, warm: commit.Tip[M] | None, *, dry_run: bool = False) -> Step[M]:
        """Delete some of the objects that left a manifest and are past their grace.

        Raises the store's errors, Damaged among them, and CommitOutcomeUnknown.
        """
        tip = self._log.read_tip(warm)
        if tip is None:
            return Step(None)
        due = garbage_rules.due(tip.manifest.tombstones, self._tools.now_ms())
        if dry_run or not due:
            return Step(tip, Summary(tombstones=garbage_rules.count(due)))
        batch = due[:BATCH]
        outcome = self._outcome(batch, self._delete([each.object.name for each in batch]))
        tip = self._drop(outcome, tip)
        by_name = {each.object.name: each for each in batch}
        summary = Summary(
            tombstones=garbage_rules.count(by_name[name] for name in outcome.deleted),
            failed=garbage_rules.count(by_name[name] for name in outcome.failed),
            given_up=garbage_rules.count(by_name[name] for name in outcome.given_up),
        )
        return Step(tip, summary, outcome.deleted, more=len(due) > len(batch))

    def _outcome(self, tombstones: Sequence[Tombstone], failures: Mapping[str, str]) -> Outcome:
        deleted, failed, given_up = set(), set(), set()
        for tombstone in tombstones:
            name = tombstone.object.name
            if name not in failures:
                deleted.add(name)
            elif tombstone.attempts + 1 >= self._tools.limits.attempts_max and self._record(tombstone, failures[name]):
                given_up.add(name)
            else:
                failed.add(name)
        return Outcome(frozenset(deleted), frozenset(failed), frozenset(given_up))

    def _record(self, tombstone: Tombstone, error: str) -> bool:
        """Record that an object is given up; return whether that is durable.

        The record comes first: without it the object would be forgotten once its tombstone is dropped.
        """
        given_up = DeadObject(
            object=tombstone.object.name,
            size_bytes=tombstone.object.size_bytes,
            attempts=tombstone.attempts + 1,
            error=error[:ERROR_CHARACTERS_MAX],
            given_up_ms=self._tools.now_ms(),
        )
        key = names.dead_object_key(given_up.object)
        try:
            self._create(key, manifest.encode_dead_object(given_up))
        except object_store.StoreError as failure:
            log.warning("object %s is not given up yet: %s", given_up.object, failure)
            return False
        log.error(
            "object %s cannot be deleted and is given up attempts=%d: %s", given_up.object, given_up.attempts, error
        )
        return True

    def _create(self, key: str, body: bytes) -> None:
        """Create an object; an existing one is success.

        Raises the store's errors if it is unknown whether one exists.
        """
        try:
            self._tools.store.put_if_absent(key, body, metadata={})
        except object_store.AlreadyExists:
            # The store may answer 409 also while no writer has won.
            self._tools.store.head(key)

    def _drop(self, outcome: Outcome, tip: commit.Tip[M]) -> commit.Tip[M]:
        """Drop the tombstones of objects that are deleted or given up, and count the attempts of the others."""
        while outcome.names:
            operation: manifest_collection.CollectTombstones[M] = manifest_collection.CollectTombstones(
                deleted=outcome.deleted, failed=outcome.failed, given_up=outcome.given_up
            )
            try:
                return self._commit(operation, tip)
            except commit.Refused as refused:
                if refused.tip is None:
                    raise
                # Another collector has dropped some of them.
                tip = refused.tip
                outcome = outcome.among(frozenset(each.object.name for each in tip.manifest.tombstones))
        return tip

    # ---- orphans

    def find_orphans(
        self, listed: Listed, warm: commit.Tip[M] | None, *, given_up: frozenset[str], dry_run: bool = False
    ) -> Orphans[M]:
        """Find the orphans among the listed objects, and move the floor for that. `given_up` objects are ignored.

        Raises the store's errors, Damaged among them, and CommitOutcomeUnknown.
        """
        tip = self._log.read_tip(warm)
        if tip is None:
            return Orphans(None)
        if not listed.unnamed(self._kind.named(tip.manifest) | given_up):
            return Orphans(tip)
        floor = self._tip_at(listed, tip, self._tools.now_ms() - self._tools.limits.orphan_age_ms)
        if floor > tip.manifest.head.orphan_floor and not dry_run:
            tip = self._move_floor(floor, tip)
        # Only a manifest read after the floor counts: from then on an older object is refused.
        floor = max(floor, tip.manifest.head.orphan_floor) if dry_run else tip.manifest.head.orphan_floor
        named = self._kind.named(tip.manifest) | given_up
        found = shard_listing.orphans(listed, named, floor)
        return Orphans(tip, found, _count(found))

    def _move_floor(self, floor: int, tip: commit.Tip[M]) -> commit.Tip[M]:
        try:
            return self._commit(manifest_collection.SetFloor(floor=floor), tip)
        except commit.Refused as refused:
            if refused.tip is None:
                raise
            # Another collector has moved it further, and its manifest was read after that.
            return refused.tip

    def delete_orphans(self, found: Sequence[tuple[str, int]]) -> Summary:
        """Delete objects that `find_orphans` found."""
        failures = self._delete([key for key, _ in found])
        return Summary(
            orphans=_count(each for each in found if each[0] not in failures),
            failed=_count(each for each in found if each[0] in failures),
        )

    # ---- manifests

    def collect_manifests(self, listed: Listed, tip: commit.Tip[M], *, dry_run: bool = False) -> Summary:
        """Delete listed manifests that are old and not among those to keep. `tip` was read after the listing.

        Raises the store's errors.
        """
        limits = self._tools.limits
        kept = 1 if self._kind.is_over(tip.manifest) else limits.manifests_kept
        beyond = garbage_rules.beyond_kept(listed, tip.number, kept)
        if not beyond:
            return NOTHING_DONE
        oldest_kept = self._tip_at(listed, tip, self._tools.now_ms() - limits.manifests_age_ms)
        sizes = {self._log.key(number): size_bytes for number, size_bytes in beyond if number < oldest_kept}
        keys = list(sizes)
        failures: dict[str, str] = {}
        if not dry_run:
            for start in range(0, len(keys), BATCH):
                failures |= self._delete(keys[start : start + BATCH])
        return Summary(
            manifests=_count((key, sizes[key]) for key in keys if key not in failures),
            failed=_count((key, sizes[key]) for key in failures),
        )

    # ---- reading, deleting, committing

    def _tip_at(self, listed: Listed, tip: commit.Tip[M], at_ms: int) -> int:
        """Return the number of the manifest that was the tip at that time; 0 if none that old is left."""
        if tip.manifest.head.created_ms <= at_ms:
            return tip.number
        numbers = [number for number, _ in listed.in_order() if number < tip.number]
        return garbage_rules.tip_at(numbers, self._created_at_ms, at_ms) or 0

    def _created_at_ms(self, number: int) -> int | None:
        """Return when a manifest before the tip was created, or None if it is damaged."""
        if number not in self._created_ms:
            self._created_ms[number] = self._read_created_ms(number)
        return self._created_ms[number]

    def _read_created_ms(self, number: int) -> int | None:
        key = self._log.key(number)
        try:
            return self._log.codec.decode(self._tools.store.get(key)).head.created_ms
        except object_store.NotFound:
            # Another collector has deleted it, so it was old.
            return 0
        except (object_store.Damaged, format_errors.FormatError) as error:
            log.warning("manifest %s cannot be read: %s", key, error)
            return None

    def _delete(self, keys: Iterable[str]) -> dict[str, str]:
        """Delete objects; return key -> error of those that were not deleted."""
        return dict(failure for failure in self._tools.executor.map(self._try_to_delete, keys) if failure is not None)

    def _try_to_delete(self, key: str) -> tuple[str, str] | None:
        try:
            self._tools.store.delete(key)
        except object_store.StoreError as error:
            log.warning("object %s is not deleted yet: %s", key, error)
            return key, str(error)
        return None

    def _commit(self, operation: commit.Operation[M], tip: commit.Tip[M]) -> commit.Tip[M]:
        return commit.commit(
            self._log,
            operation,
            writer=self._tools.writer,
            created_ms=self._tools.now_ms(),
            warm=tip,
            deadline_s=DEADLINE_S,
        )


def _count(objects: Iterable[tuple[str, int]]) -> ObjectCount:
    sizes = [size_bytes for _, size_bytes in objects]
    return ObjectCount(len(sizes), sum(sizes))


TOPIC: Final[SequenceKind[TopicManifest]] = SequenceKind(
    named=topic_manifest.names_in, is_over=lambda newest: newest.deleted
)
SHARD: Final[SequenceKind[ShardManifest]] = SequenceKind(
    named=shard_listing.named_by_shard, is_over=lambda newest: False
)


# ---- objects that were given up


def given_up_in(store: object_store.ObjectStore, prefix: str) -> frozenset[str]:
    """Return the objects under the prefix that were given up. Raises the store's errors."""
    start = names.dead_objects_prefix()
    return frozenset(entry.key.removeprefix(start) for entry in store.list(f"{start}{prefix}"))


def retry_given_up(
    store: object_store.ObjectStore, name: str, is_live: Callable[[str], bool], *, dry_run: bool = False
) -> Summary:
    """Delete an object that was given up, and then the record of it.

    `is_live` returns whether the manifest that the object belongs to names it; it is called after the record was read.
    Raises the store's errors if the record cannot be read.
    """
    key = names.dead_object_key(name)
    try:
        record = manifest.decode_dead_object(store.get(key))
    except object_store.NotFound:
        return NOTHING_DONE
    except (object_store.Damaged, format_errors.FormatError) as error:
        log.error("the record %s of an object that was given up cannot be read: %s", key, error)
        return Summary(failed=ObjectCount(1, 0))
    found = ObjectCount(1, record.size_bytes)
    if record.object != name or is_live(name):
        log.error("the record %s names %s, which may not be deleted", key, record.object)
        return Summary(failed=found)
    if not dry_run:
        try:
            store.delete(name)
            store.delete(key)
        except object_store.StoreError as error:
            log.warning("object %s still cannot be deleted: %s", name, error)
            return Summary(failed=found)
    return Summary(tombstones=found)


T = TypeVar("T")

# Keys that are listed, and topics that are checked, at once before other tasks have their turn
LISTED_AT_ONCE = 1000
TOPICS_AT_ONCE = 50


class Halted(Exception):
    """The end of a pass whose shard is no longer owned, or whose daemon drains."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """Work of a pass besides checkpoints and known tombstones.

    With `force` orphans are deleted however many there are. With `retry_dead` objects that were given up are retried.
    """

    listing: bool
    dry_run: bool = False
    force: bool = False
    retry_dead: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """A decision on a topic: whether to ask the store (`wanted`), and its tombstones (`waiting`)."""

    wanted: bool
    waiting: ObjectCount


class Pass:
    """One pass over one shard. `topics` is the number of topics to check, `summary` the result so far.

    `unserved` has the unserved topics that have tombstones, and when the first of these is due (Unix time, ms). It is
    kept from pass to pass. `check` raises Halted if the pass must not continue.
    """

    def __init__(
        self,
        shard: ServedShard,
        environment: Environment,
        tools: Tools,
        wish: Wish,
        *,
        unserved: dict[str, int],
        check: Callable[[], None],
    ) -> None:
        self.topics = 0
        self.topics_done = 0
        self.summary = NOTHING_DONE
        self._environment = environment
        self._tools = tools
        self._shard = shard
        self._wish = wish
        self._unserved = unserved
        self._check = check
        self._listing: ShardListing | None = None
        # Objects that were given up: they are retried only on request.
        self._given_up: frozenset[str] = frozenset()
        self._orphans: list[tuple[Collector[Any], Sequence[tuple[str, int]]]] = []
        self._orphans_count = NOTHING

    async def steps(self) -> AsyncIterator[None]:
        """Run the steps in order; yield after each. Raises Halted, and commit.UNCERTAIN: the next pass tries again."""
        await self._checkpoints()
        yield
        if self._wish.listing:
            await self._list()
            yield
        await self._look_at_shard()
        yield
        async for _ in self._look_at_topics():
            yield
        async for _ in self._delete_orphans():
            yield
        if self._wish.retry_dead:
            async for _ in self._retry_given_up():
                yield

    # ---- the steps

    async def _checkpoints(self) -> None:
        """Write the checkpoints of an idle shard, so that it retains no slot of the log."""
        self._check()
        if self._wish.dry_run:
            return
        try:
            await self._shard.checkpoints.collect()
        except (commit.Refused, TarryError) as error:
            self._shard.lose(error)
            raise Halted from error

    async def _list(self) -> None:
        listing = ShardListing(self._shard.number)
        entries: Iterator[ListedObject] | None = None

        def some() -> int:
            nonlocal entries
            if entries is None:
                entries = self._environment.store.list(names.shard_prefix(self._shard.number))
            chunk = list(itertools.islice(entries, LISTED_AT_ONCE))
            listing.add(chunk)
            return len(chunk)

        while await self._run(some):
            pass
        prefix = names.shard_prefix(self._shard.number)
        self._given_up = await self._run(lambda: given_up_in(self._environment.store, prefix))
        self._listing = listing

    async def _look_at_shard(self) -> None:
        tip = self._shard.tip.newest
        listed = None if self._listing is None else self._listing.shard
        look = self._look(tip.manifest, SHARD.named(tip.manifest), listed)
        if look.wanted:
            shard_log = topic_manifests.shard_log(self._environment, self._shard.number)
            collector = Collector(shard_log, SHARD, self._tools)
            tip = await self._collect(collector, listed, tip) or tip
            self._shard.tip.saw(tip)
        self._add(Summary(waiting=self._kept(tip.manifest)))

    async def _look_at_topics(self) -> AsyncIterator[None]:
        served = {topic.core.topic_id: name for name, topic in self._shard.topics.items()}
        listed = {} if self._listing is None else self._listing.topics
        # The newest manifests of a topic that is damaged, or not loaded yet, may be lost: then nothing is garbage.
        unsure = self._shard.loading
        topic_ids = [
            topic_id
            for topic_id in dict.fromkeys((*served, *listed, *self._unserved))
            if topic_id in served or not (topic_id in unsure.damaged or unsure.knows(topic_id))
        ]
        self.topics = len(topic_ids)
        for start in range(0, len(topic_ids), TOPICS_AT_ONCE):
            known = {
                topic_id: topic.manifests.manifest
                if (topic := self._shard.topics.get(served.get(topic_id, ""))) is not None
                else None
                for topic_id in topic_ids[start : start + TOPICS_AT_ONCE]
            }
            looks = await self._run(functools.partial(self._looks, known))
            for topic_id, look in looks.items():
                if look.wanted:
                    await self._look_at_topic(topic_id, served.get(topic_id, ""), listed.get(topic_id))
                    yield
                else:
                    self._add(Summary(waiting=look.waiting))
                self.topics_done += 1

    async def _look_at_topic(self, topic_id: str, name: str, listed: Listed | None) -> None:
        topic = self._shard.topics.get(name)
        manifests = None if topic is None else topic.manifests
        tip = await self._collect_topic(topic_id, listed, None if manifests is None else manifests.tip)
        if manifests is None:
            self._remember(topic_id, tip)
        else:
            self._unserved.pop(topic_id, None)
            if tip is not None:
                manifests.saw(tip)
        if tip is not None:
            self._add(Summary(waiting=self._kept(tip.manifest)))

    async def _collect_topic(
        self, topic_id: str, listed: Listed | None, warm: commit.Tip[TopicManifest] | None
    ) -> commit.Tip[TopicManifest] | None:
        topic_log = topic_manifests.topic_log(self._environment, self._shard.number, topic_id)
        collector = Collector(topic_log, TOPIC, self._tools)
        try:
            return await self._collect(collector, listed, warm)
        except Damaged as error:
            # Loading the topic reports it; the others are collected.
            log.debug("shard %d: topic %s is not collected: %s", self._shard.number, topic_id, error)
        except (*commit.UNCERTAIN, Halted):
            raise
        except Exception as error:
            log.error(
                "shard %d: topic %s is not collected, the others are: %r",
                self._shard.number,
                topic_id,
                error,
                exc_info=error,
            )
        return None

    async def _collect(
        self, collector: Collector[M], listed: Listed | None, warm: commit.Tip[M] | None
    ) -> commit.Tip[M] | None:
        """Collect tombstones, orphans and manifests of one sequence.

        Returns its newest manifest, or None if it has none.
        """
        dry_run = self._wish.dry_run
        tip, more = warm, True
        while more:
            step = await self._run(functools.partial(collector.collect_tombstones, tip, dry_run=dry_run))
            self._add(step.summary)
            tip, more = step.tip, step.more
            if listed is not None:
                listed.forget(step.deleted)
        if listed is None or tip is None:
            return tip
        found = await self._run(lambda: collector.find_orphans(listed, tip, given_up=self._given_up, dry_run=dry_run))
        if found.found:
            self._orphans.append((collector, found.found))
            self._orphans_count += found.count
        newest = found.tip
        if newest is not None:
            self._add(await self._run(lambda: collector.collect_manifests(listed, newest, dry_run=dry_run)))
        return newest

    async def _delete_orphans(self) -> AsyncIterator[None]:
        if self._listing is None:
            return
        total, limits = self._orphans_count, self._tools.limits
        suspicious = garbage_rules.is_suspicious(total, self._listing.size_bytes, limits) and not self._wish.force
        self._environment.metrics.set_orphans_refused(self._shard.number, total.size_bytes if suspicious else 0)
        if suspicious:
            log.error(
                "shard %d: %d orphans of %d bytes are kept: they are more than %g of the %d bytes of the shard. If "
                "they are garbage, `tarry gc --force` deletes them",
                self._shard.number,
                total.objects,
                total.size_bytes,
                limits.guard_share,
                self._listing.size_bytes,
            )
            self._add(Summary(refused=total))
        elif self._wish.dry_run:
            self._add(Summary(orphans=total))
        else:
            for collector, found in self._orphans:
                for start in range(0, len(found), BATCH):
                    batch = found[start : start + BATCH]
                    self._add(await self._run(functools.partial(collector.delete_orphans, batch)))
                    yield

    async def _retry_given_up(self) -> AsyncIterator[None]:
        store = self._environment.store
        for name in sorted(self._given_up):
            try:
                retry = functools.partial(retry_given_up, store, name, self._is_live)
                summary = await self._run(functools.partial(retry, dry_run=self._wish.dry_run))
            except Damaged as error:
                log.error("object %s, which was given up, is not tried again: %s", name, error)
                continue
            self._add(summary)
            yield

    def _is_live(self, name: str) -> bool:
        """Return whether the newest manifest of its sequence names the object, or no manifest could.

        Runs in a thread.
        """
        number = self._shard.number
        if name.startswith(names.checkpoint_prefix(number)):
            shard_tip = topic_manifests.shard_log(self._environment, number).read_tip()
            return shard_tip is None or name in SHARD.named(shard_tip.manifest)
        try:
            topic_id = names.topic_id_of(name)
        except format_errors.FormatError:
            return True
        if not name.startswith((names.buckets_prefix(number, topic_id), names.progress_prefix(number, topic_id))):
            return True
        tip = topic_manifests.topic_log(self._environment, number, topic_id).read_tip()
        return tip is None or name in TOPIC.named(tip.manifest)

    # ---- deciding without asking the store

    def _looks(self, known: Mapping[str, TopicManifest | None]) -> dict[str, _Look]:
        """Decide by topic id; None is a topic that is not served.

        Runs in a thread, since it takes time in proportion to the buckets.
        """
        listed = {} if self._listing is None else self._listing.topics
        return {
            topic_id: self._look_at_unserved(topic_id, listed.get(topic_id))
            if newest is None
            else self._look(newest, TOPIC.named(newest), listed.get(topic_id))
            for topic_id, newest in known.items()
        }

    def _look(self, newest: TopicManifest | ShardManifest, named: Set[str], listed: Listed | None) -> _Look:
        due = garbage_rules.due(newest.tombstones, self._environment.clock.now_ms())
        return _Look(bool(due) or self._needs_look(listed, named), garbage_rules.count(newest.tombstones))

    def _needs_look(self, listed: Listed | None, named: Set[str]) -> bool:
        kept = self._tools.limits.manifests_kept
        return listed is not None and garbage_rules.needs_look(listed, named | self._given_up, kept)

    def _look_at_unserved(self, topic_id: str, listed: Listed | None) -> _Look:
        due_at_ms = self._unserved.get(topic_id)
        due = due_at_ms is not None and due_at_ms <= self._environment.clock.now_ms()
        # Only the last manifest of a deleted topic is left.
        left = self._needs_look(listed, frozenset()) or (listed is not None and len(listed.manifests) > 1)
        return _Look(due or left, NOTHING)

    def _remember(self, topic_id: str, tip: commit.Tip[TopicManifest] | None) -> None:
        """Note when the next tombstone of an unserved topic is due: then it is checked again."""
        due_at_ms = None if tip is None else garbage_rules.next_due_at_ms(tip.manifest.tombstones)
        if due_at_ms is None:
            self._unserved.pop(topic_id, None)
        else:
            self._unserved[topic_id] = due_at_ms

    def _kept(self, manifest: TopicManifest | ShardManifest) -> ObjectCount:
        """Count the tombstones that stay for now. In a dry run those that are due are not counted."""
        kept = garbage_rules.count(manifest.tombstones)
        if self._wish.dry_run:
            kept -= garbage_rules.count(garbage_rules.due(manifest.tombstones, self._environment.clock.now_ms()))
        return kept

    # ---- counting

    def _add(self, summary: Summary) -> None:
        self.summary += summary
        if self._wish.dry_run:
            return
        metrics = self._environment.metrics
        kinds = (("tombstone", summary.tombstones), ("orphan", summary.orphans), ("manifest", summary.manifests))
        for kind, count in kinds:
            if count.objects:
                metrics.collected(kind, objects=count.objects, size_bytes=count.size_bytes)  # type: ignore[arg-type]
        metrics.collection_failed(failed=summary.failed.objects, given_up=summary.given_up.objects)

    async def _run(self, step: Callable[[], T]) -> T:
        """Run a step in a thread, if the pass may continue."""
        self._check()
        return await self._environment.pools.collection.run(step)
