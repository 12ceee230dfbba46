"""Collecting garbage in the shards that this daemon owns: by itself now and then, and when it is asked to.

Owns: when a shard has its pass, one pass at a time in the daemon, which topics of it need one, the guard, stopping when
the shard is lost or the daemon drains, and telling how far a pass is.
Does not own: what may be deleted (`daemon.durability.garbage_rules`) and in which order (`garbage`), and the journal
(`checkpointing`).

A pass of the daemon's own looks at the journal and at what served topics know of their tombstones: it asks the store
nothing about topics that are at rest. Every few hours it lists the shard as well, and so finds orphans, old manifests,
and what is left of topics that were deleted or cannot be served.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, TypeVar

from daemon.durability import garbage, garbage_rules
from daemon.durability.garbage_rules import NOTHING, NOTHING_DONE, Count, Listed, ShardListing, Summary
from daemon.engine import manifests
from daemon.engine.calls import GarbageProgress
from daemon.engine.environment import Environment
from daemon.errors import NotOwner, OutcomeUnknown, TarryError, Unavailable
from storage_backends import commit
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.object_store import Damaged, ListedObject, StoreError

if TYPE_CHECKING:
    from daemon.engine.shard import ServedShard

log = logging.getLogger(__name__)

T = TypeVar("T")
M = TypeVar("M", TopicManifest, ShardManifest)

# How often it is looked whether a shard's pass is due.
LOOK_S = 5.0
# After passes that failed, the next one comes at the latest after this time.
LAST_DELAY_S = 21_600.0
# Keys that are listed in one go, and topics that are looked at without asking the store, before others have their turn.
LISTED_AT_ONCE = 1000
TOPICS_A_TURN = 50

# What keeps a pass from going on; the next one tries again.
FAILURES = (StoreError, commit.CommitOutcomeUnknown)


class _Halted(Exception):
    """The shard is not ours any more, or the daemon drains."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Wish:
    """What a pass does beside the journal and known tombstones."""

    listing: bool
    dry_run: bool = False
    force: bool = False


class _Shard:
    """One ownership of a shard, and what is known for its next passes; times are monotonic seconds."""

    def __init__(self, shard: ServedShard, now_s: float, first_s: float) -> None:
        self.shard = shard
        self.next_s = first_s
        self.next_listing_s = first_s
        self.worked_s = now_s
        self.failures = 0
        self.waiting = NOTHING
        # Topics that are not served and have tombstones: when the first of them is due, Unix time in ms.
        self.unserved: dict[str, int] = {}


class Collection:
    """The garbage collection of one daemon. Used on one event loop.

    `shards`: those that are served now. `shards_total`: of the root.
    """

    def __init__(
        self,
        environment: Environment,
        shards: Callable[[], Mapping[int, ServedShard]],
        shards_total: Callable[[], int],
    ) -> None:
        self._environment = environment
        self._shards = shards
        self._shards_total = shards_total
        self._known: dict[int, _Shard] = {}
        # One pass at a time.
        self._turn = asyncio.Lock()
        self._halted = False
        settings = environment.config.collection
        self._tools = garbage.Tools(
            store=environment.store,
            executor=environment.parts,
            now_ms=environment.clock.now_ms,
            writer=environment.config.daemon_id,
            limits=garbage_rules.Limits(
                orphan_age_ms=int(settings.orphan_age_s * 1000),
                manifests_kept=settings.manifests_kept,
                manifests_age_ms=int(settings.manifests_age_s * 1000),
                attempts_max=settings.attempts_max,
                guard_share=settings.guard_share,
                guard_bytes=settings.guard_bytes,
            ),
        )

    # ---- by itself

    async def run(self) -> None:
        """Gives every shard its passes, until it is cancelled."""
        look_s = min(LOOK_S, self._environment.config.collection.interval_s)
        while True:
            await self._environment.sleep(look_s)
            self._look()
            for known in list(self._known.values()):
                if known.next_s <= self._environment.clock.elapsed_s() and known.shard.loading.ended.is_set():
                    async with self._turn:
                        await self._pass_when_due(known)

    def halt(self) -> None:
        """No pass begins, and one that is under way ends with the step that it is at."""
        self._halted = True

    def look_after(self) -> None:
        """Once a second: how long ago the last passes worked."""
        now_s = self._environment.clock.elapsed_s()
        ages_s = (now_s - known.worked_s for known in self._known.values())
        self._environment.metrics.set_collection_age(max(ages_s, default=0.0))

    def _look(self) -> None:
        """Shards come and go."""
        now_s = self._environment.clock.elapsed_s()
        served = self._shards()
        for number in [number for number, known in self._known.items() if served.get(number) is not known.shard]:
            del self._known[number]
        for number, shard in served.items():
            if number not in self._known:
                # The shards of a daemon that has just started are not all looked at together.
                first_s = now_s + self._environment.config.collection.interval_s * self._environment.jitter()
                self._known[number] = _Shard(shard, now_s, first_s)

    async def _pass_when_due(self, known: _Shard) -> None:
        settings, now_s = self._environment.config.collection, self._environment.clock.elapsed_s()
        listing = known.next_listing_s <= now_s
        spread = 0.9 + 0.2 * self._environment.jitter()
        try:
            pass_ = _Pass(self, known, _Wish(listing=listing))
            async for _ in pass_.steps():
                pass
        except _Halted:
            return
        except FAILURES as error:
            known.failures += 1
            delay_s = min(settings.interval_s * 2**known.failures, LAST_DELAY_S) * spread
            known.next_s = self._environment.clock.elapsed_s() + delay_s
            log.warning("shard %d: collection failed, next in %.0f s: %s", known.shard.number, delay_s, error)
            return
        known.failures = 0
        known.worked_s = self._environment.clock.elapsed_s()
        known.next_s = known.worked_s + settings.interval_s * spread
        if listing:
            known.next_listing_s = known.worked_s + settings.orphan_interval_s * spread

    # ---- when it is asked to

    async def collect(self, *, dry_run: bool, force: bool, retry_dead: bool) -> AsyncGenerator[GarbageProgress]:
        """A whole pass over every shard that is owned; one message for each step, the last is `done`.

        Raises NotOwner when objects that were given up are to be tried again and a shard belongs to another,
        Unavailable and OutcomeUnknown when the pass could not go on.
        """
        if retry_dead and len(self._shards()) < self._shards_total():
            raise NotOwner(
                f"objects that were given up may belong to any of {self._shards_total()} shards, this daemon serves "
                f"{len(self._shards())} of them"
            )
        async with self._turn:
            self._look()
            known = [self._known[number] for number in sorted(self._known)]
            done = GarbageProgress(shards=len(known))
            yield done
            try:
                for each in known:
                    pass_ = _Pass(self, each, _Wish(listing=True, dry_run=dry_run, force=force), retry_dead=retry_dead)
                    async for _ in pass_.steps():
                        yield done.plus(pass_.topics_done, pass_.topics, pass_.summary)
                    done = done.plus(pass_.topics_done, pass_.topics, pass_.summary, shards_done=1)
            except _Halted:
                raise Unavailable(
                    "the shard is served by this daemon no longer, or it is stopping; try again"
                ) from None
            except StoreError as error:
                raise Unavailable(f"the store cannot be reached: {error}") from error
            except commit.CommitOutcomeUnknown as error:
                raise OutcomeUnknown(f"{error}; a retry is safe") from error
            yield dataclasses.replace(done, done=True)

    # ---- for the passes

    @property
    def environment(self) -> Environment:
        return self._environment

    @property
    def tools(self) -> garbage.Tools:
        return self._tools

    def check(self, shard: ServedShard) -> None:
        """Raises _Halted when the pass must not go on."""
        if self._halted or self._shards().get(shard.number) is not shard:
            raise _Halted

    def waiting(self) -> Count:
        """Tombstones, as the last passes saw them."""
        return sum((known.waiting for known in self._known.values()), NOTHING)


class _Pass:
    """One pass over one shard. `topics`: that are looked at; `summary`: so far."""

    def __init__(self, collection: Collection, known: _Shard, wish: _Wish, *, retry_dead: bool = False) -> None:
        self.topics = 0
        self.topics_done = 0
        self.summary = NOTHING_DONE
        self._collection = collection
        self._environment = collection.environment
        self._known = known
        self._shard = known.shard
        self._wish = wish
        self._retry_dead = retry_dead
        self._listing: ShardListing | None = None
        # Objects that were given up: they are tried again only when somebody asks for it.
        self._given_up: frozenset[str] = frozenset()
        self._orphans: list[tuple[garbage.Collector[Any], Sequence[tuple[str, int]]]] = []

    async def steps(self) -> AsyncIterator[None]:
        """Each step, in order. Raises _Halted, and FAILURES."""
        await self._journal()
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
        if self._retry_dead:
            async for _ in self._retry_given_up():
                yield
        self._report()

    # ---- the steps

    async def _journal(self) -> None:
        self._collection.check(self._shard)
        try:
            checkpoints = self._shard.checkpoints
            slots = await (checkpoints.covered() if self._wish.dry_run else checkpoints.collect())
        except (commit.Refused, TarryError) as error:
            self._shard.lose(error)
            raise _Halted from error
        self._add(Summary(journal_slots=slots))

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
        shard_log = manifests.shard_log(self._environment, self._shard.number)
        collector = garbage.Collector(shard_log, garbage.SHARD, self._collection.tools)
        tip = self._shard.checkpoints.newest
        listed = None if self._listing is None else self._listing.shard
        if self._is_due(tip.manifest) or self._needs_look(listed, garbage.SHARD.named(tip.manifest)):
            tip = await self._collect(collector, listed, tip) or tip
            self._shard.checkpoints.saw(tip)
        self._add(Summary(waiting=self._kept(tip.manifest)))

    async def _look_at_topics(self) -> AsyncIterator[None]:
        served = {topic.core.topic_id: name for name, topic in self._shard.topics.items()}
        listed = {} if self._listing is None else self._listing.topics
        topic_ids = list(dict.fromkeys((*served, *listed, *self._known.unserved)))
        self.topics = len(topic_ids)
        for topic_id in topic_ids:
            asked = await self._look_at_topic(topic_id, served.get(topic_id, ""), listed.get(topic_id))
            self.topics_done += 1
            if asked:
                yield
            elif self.topics_done % TOPICS_A_TURN == 0:
                await asyncio.sleep(0)

    async def _look_at_topic(self, topic_id: str, name: str, listed: Listed | None) -> bool:
        """Whether the store was asked."""
        commits = self._shard.topic_commits.get(name)
        if commits is None:
            asked = self._needs_look_unserved(topic_id, listed)
            tip = await self._collect_topic(topic_id, listed, None) if asked else None
            self._remember(topic_id, tip, asked=asked)
        else:
            self._known.unserved.pop(topic_id, None)
            tip = commits.tip
            asked = self._is_due(tip.manifest) or self._needs_look(listed, garbage.TOPIC.named(tip.manifest))
            if asked and (newest := await self._collect_topic(topic_id, listed, tip)) is not None:
                commits.saw(newest)
                tip = newest
        if tip is not None:
            self._add(Summary(waiting=self._kept(tip.manifest)))
        return asked

    async def _collect_topic(
        self, topic_id: str, listed: Listed | None, warm: commit.Tip[TopicManifest] | None
    ) -> commit.Tip[TopicManifest] | None:
        topic_log = manifests.topic_log(self._environment, self._shard.number, topic_id)
        collector = garbage.Collector(topic_log, garbage.TOPIC, self._collection.tools)
        try:
            return await self._collect(collector, listed, warm)
        except Damaged as error:
            # Whoever loads the topic says so; the others are collected.
            log.debug("shard %d: topic %s is not collected: %s", self._shard.number, topic_id, error)
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
        newest = found.tip
        if newest is not None:
            self._add(await self._run(lambda: collector.collect_manifests(listed, newest, dry_run=dry_run)))
        return newest

    async def _delete_orphans(self) -> AsyncIterator[None]:
        if self._listing is None:
            return
        sizes = [size_bytes for _, found in self._orphans for _, size_bytes in found]
        total = Count(len(sizes), sum(sizes))
        limits = self._collection.tools.limits
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
        """Whether the newest manifest of its sequence names the object. In a thread."""
        number = self._shard.number
        if name.startswith(names.checkpoint_prefix(number)):
            shard_tip = manifests.shard_log(self._environment, number).read_tip()
            return shard_tip is None or name in garbage.SHARD.named(shard_tip.manifest)
        topic_id = names.topic_id_of(name)
        if not name.startswith((names.buckets_prefix(number, topic_id), names.progress_prefix(number, topic_id))):
            return True
        tip = manifests.topic_log(self._environment, number, topic_id).read_tip()
        return tip is None or name in garbage.TOPIC.named(tip.manifest)

    # ---- deciding without asking the store

    def _is_due(self, manifest: TopicManifest | ShardManifest) -> bool:
        return bool(garbage_rules.due(manifest.tombstones, self._environment.clock.now_ms()))

    def _needs_look(self, listed: Listed | None, named: Set[str]) -> bool:
        kept = self._collection.tools.limits.manifests_kept
        return listed is not None and garbage_rules.needs_look(listed, named | self._given_up, kept)

    def _needs_look_unserved(self, topic_id: str, listed: Listed | None) -> bool:
        due_at_ms = self._known.unserved.get(topic_id)
        if due_at_ms is not None and due_at_ms <= self._environment.clock.now_ms():
            return True
        # Of a deleted topic nothing is left but its last manifest.
        return self._needs_look(listed, frozenset()) or (listed is not None and len(listed.manifests) > 1)

    def _remember(self, topic_id: str, tip: commit.Tip[TopicManifest] | None, *, asked: bool) -> None:
        """A topic that is not served is looked at again when its next tombstone is due."""
        if not asked:
            return
        due_at_ms = None if tip is None else garbage_rules.next_due_at_ms(tip.manifest.tombstones)
        if due_at_ms is None:
            self._known.unserved.pop(topic_id, None)
        else:
            self._known.unserved[topic_id] = due_at_ms

    def _kept(self, manifest: TopicManifest | ShardManifest) -> Count:
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

    def _report(self) -> None:
        if self._wish.dry_run:
            return
        self._known.waiting = self.summary.waiting
        waiting = self._collection.waiting()
        self._environment.metrics.set_tombstones(objects=waiting.objects, size_bytes=waiting.size_bytes)
        done = self.summary
        if done != Summary(waiting=done.waiting):
            log.info(
                "collected shard=%d tombstones=%d orphans=%d manifests=%d journal_slots=%d waiting=%d failed=%d "
                "given_up=%d refused=%d",
                self._shard.number,
                *(getattr(done, field.name).objects for field in dataclasses.fields(done)),
            )

    async def _run(self, step: Callable[[], T]) -> T:
        """A step in a thread, if the pass may go on."""
        self._collection.check(self._shard)
        return await self._environment.run(step)
