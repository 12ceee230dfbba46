"""One pass of garbage collection over one shard.

Owns: the order of its steps, which topics need one, the guard against deleting suspiciously much, and the count.
Does not own: what may be deleted (`daemon.core.garbage_rules`) and in which order (`garbage`), logs
(`living_log`, `dead_logs`), and when there is a pass (`garbage_collection`).

Without a listing a pass looks at the checkpoints and at what served topics know of their tombstones: it asks the store
nothing about topics that are at rest. With one it finds orphans, old manifests, and what is left of topics that were
deleted or cannot be served.

A pass that finds nothing commits nothing. This daemon learns of the commits of its own collector, so that none of its
work is based on a manifest below the floor.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

from daemon.core import garbage_rules
from daemon.core.garbage_rules import NOTHING_DONE, Summary
from daemon.core.object_count import NOTHING, ObjectCount
from daemon.errors import TarryError
from daemon.owner import garbage
from daemon.runtime.environment import Environment
from daemon.topic import topic_manifests
from storage_backends import commit
from storage_backends.formats import format_errors, names
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.object_store import Damaged, ListedObject
from storage_backends.shard_listing import Listed, ShardListing

if TYPE_CHECKING:
    from daemon.shard.shard import ServedShard

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", TopicManifest, ShardManifest)

# Keys that are listed, and topics that are looked at, in one go: then others have their turn.
LISTED_AT_ONCE = 1000
TOPICS_AT_ONCE = 50


class Halted(Exception):
    """The shard is not ours any more, or the daemon drains."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What a pass does beside checkpoints and known tombstones. `force`: orphans go however many there are.
    `retry_dead`: what was given up is tried again.
    """

    listing: bool
    dry_run: bool = False
    force: bool = False
    retry_dead: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Look:
    """What is known of a topic. `wanted`: whether the store has to be asked. `waiting`: its tombstones."""

    wanted: bool
    waiting: ObjectCount


class Pass:
    """One pass over one shard. `topics`: that are looked at; `summary`: so far.

    `unserved`: topics that are not served and have tombstones, and when the first of them is due (Unix time in ms);
    kept from one pass to the next. `check` raises Halted when the pass must not go on.
    """

    def __init__(
        self,
        shard: ServedShard,
        environment: Environment,
        tools: garbage.Tools,
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
        # Objects that were given up: they are tried again only when somebody asks for it.
        self._given_up: frozenset[str] = frozenset()
        self._orphans: list[tuple[garbage.Collector[Any], Sequence[tuple[str, int]]]] = []
        self._orphans_count = NOTHING

    async def steps(self) -> AsyncIterator[None]:
        """Each step, in order. Raises Halted, and commit.UNCERTAIN: the next pass tries again."""
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
        """Writes those of an idle shard, so that it holds up no slot of the log."""
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
        self._given_up = await self._run(lambda: garbage.given_up_in(self._environment.store, prefix))
        self._listing = listing

    async def _look_at_shard(self) -> None:
        tip = self._shard.tip.newest
        listed = None if self._listing is None else self._listing.shard
        look = self._look(tip.manifest, garbage.SHARD.named(tip.manifest), listed)
        if look.wanted:
            shard_log = topic_manifests.shard_log(self._environment, self._shard.number)
            collector = garbage.Collector(shard_log, garbage.SHARD, self._tools)
            tip = await self._collect(collector, listed, tip) or tip
            self._shard.tip.saw(tip)
        self._add(Summary(waiting=self._kept(tip.manifest)))

    async def _look_at_topics(self) -> AsyncIterator[None]:
        served = {topic.topic_id: name for name, topic in self._shard.topics.items()}
        listed = {} if self._listing is None else self._listing.topics
        topic_ids = list(dict.fromkeys((*served, *listed, *self._unserved)))
        self.topics = len(topic_ids)
        for start in range(0, len(topic_ids), TOPICS_AT_ONCE):
            known = {
                topic_id: topic.commits.manifest
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
        commits = None if topic is None else topic.commits
        tip = await self._collect_topic(topic_id, listed, None if commits is None else commits.tip)
        if commits is None:
            self._remember(topic_id, tip)
        else:
            self._unserved.pop(topic_id, None)
            if tip is not None:
                commits.saw(tip)
        if tip is not None:
            self._add(Summary(waiting=self._kept(tip.manifest)))

    async def _collect_topic(
        self, topic_id: str, listed: Listed | None, warm: commit.Tip[TopicManifest] | None
    ) -> commit.Tip[TopicManifest] | None:
        topic_log = topic_manifests.topic_log(self._environment, self._shard.number, topic_id)
        collector = garbage.Collector(topic_log, garbage.TOPIC, self._tools)
        try:
            return await self._collect(collector, listed, warm)
        except Damaged as error:
            # Whoever loads the topic says so; the others are collected.
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
        self, collector: garbage.Collector[M], listed: Listed | None, warm: commit.Tip[M] | None
    ) -> commit.Tip[M] | None:
        """Tombstones, orphans and manifests of one sequence; its newest manifest, None when it has none."""
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
                for start in range(0, len(found), garbage.BATCH):
                    batch = found[start : start + garbage.BATCH]
                    self._add(await self._run(functools.partial(collector.delete_orphans, batch)))
                    yield

    async def _retry_given_up(self) -> AsyncIterator[None]:
        store = self._environment.store
        for name in sorted(self._given_up):
            try:
                retry = functools.partial(garbage.retry_given_up, store, name, self._is_live)
                summary = await self._run(functools.partial(retry, dry_run=self._wish.dry_run))
            except Damaged as error:
                log.error("object %s, which was given up, is not tried again: %s", name, error)
                continue
            self._add(summary)
            yield

    def _is_live(self, name: str) -> bool:
        """Whether the newest manifest of its sequence names the object, or no manifest could. In a thread."""
        number = self._shard.number
        if name.startswith(names.checkpoint_prefix(number)):
            shard_tip = topic_manifests.shard_log(self._environment, number).read_tip()
            return shard_tip is None or name in garbage.SHARD.named(shard_tip.manifest)
        try:
            topic_id = names.topic_id_of(name)
        except format_errors.FormatError:
            return True
        if not name.startswith((names.buckets_prefix(number, topic_id), names.progress_prefix(number, topic_id))):
            return True
        tip = topic_manifests.topic_log(self._environment, number, topic_id).read_tip()
        return tip is None or name in garbage.TOPIC.named(tip.manifest)

    # ---- deciding without asking the store

    def _looks(self, known: Mapping[str, TopicManifest | None]) -> dict[str, _Look]:
        """By topic id; None is a topic that is not served. In a thread: it takes as long as there are buckets."""
        listed = {} if self._listing is None else self._listing.topics
        return {
            topic_id: self._look_at_unserved(topic_id, listed.get(topic_id))
            if newest is None
            else self._look(newest, garbage.TOPIC.named(newest), listed.get(topic_id))
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
        # Of a deleted topic nothing is left but its last manifest.
        left = self._needs_look(listed, frozenset()) or (listed is not None and len(listed.manifests) > 1)
        return _Look(due or left, NOTHING)

    def _remember(self, topic_id: str, tip: commit.Tip[TopicManifest] | None) -> None:
        """A topic that is not served is looked at again when its next tombstone is due."""
        due_at_ms = None if tip is None else garbage_rules.next_due_at_ms(tip.manifest.tombstones)
        if due_at_ms is None:
            self._unserved.pop(topic_id, None)
        else:
            self._unserved[topic_id] = due_at_ms

    def _kept(self, manifest: TopicManifest | ShardManifest) -> ObjectCount:
        """Tombstones that stay for now; in a dry run, those that are due would not."""
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
        """A step in a thread, if the pass may go on."""
        self._check()
        return await self._environment.pools.collection.run(step)
