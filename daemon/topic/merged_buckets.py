"""Merges the sealed buckets of a topic, and replaces served buckets by merged ones.

`BucketMerging` merges above `max_num_buckets` of an index, or on request. A merge is made from the manifest alone, by a
thread of low priority, one at a time in the daemon; rows are served from the sources meanwhile. Only its commit
announces it: this owner learns of its own merges as it does of those of others. A merge that is given up half-way
leaves an object that no manifest names. `daemon.core.index.merging` chooses the buckets,
`storage_backends.bucket_merging` reads and writes them.

`Adoption` replaces the sources by a merged bucket in one turn of the loop. Until then the sources serve the rows; their
objects are kept for a while after they left the manifest. In that turn the segment in which the head will stand is in
memory, and every row before it waits: nothing is late, lost or passed twice, and a reader of a backlog goes on in the
merged bucket. Seals wait meanwhile. For that reason it waits for nothing that may never come: neither for the segment
of a source that is missing already, nor for the end of the due rows if there are too many.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from daemon.call_values import Merged
from daemon.core.decisions.topic_state import TopicState
from daemon.core.index import merging
from daemon.core.index.bucket import SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.merging import MergeCandidate, MergedBucket
from daemon.core.index.position_keys import KeyedRows
from daemon.errors import Corruption, InvariantViolated, OutcomeUnknown, Unavailable
from daemon.metrics import MergeOutcome
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import NewerData
from daemon.topic import bucket_reads, stored_topic, topic_manifests
from daemon.topic.topic_manifests import TopicManifests
from daemon.topic.topic_port import TopicPort
from daemon.topic.topic_settings import TopicSettings
from storage_backends import bucket_merging, topic_manifest
from storage_backends.bucket_merging import MergePlan, WrittenMerge
from storage_backends.formats import format_errors, index_ids, merge, names
from storage_backends.formats.bucket_format import BucketMetadata, BucketTable
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# Rows that are overdue by this time (ms), or a seal, come before a merge.
BEHIND_MS = 100
YIELD_S = 0.1
# A merge that has given way for this time is given up, so that others of the daemon may go on (seconds).
YIELD_MAX_S = 30.0
# Time that a caller waits for the merges that it asked for (seconds)
MERGE_ANSWER_S = 60.0


@dataclasses.dataclass(eq=False, slots=True)
class _Asked:
    """A call that waits until no index has more than `buckets_max` buckets, or no run is left that may be merged."""

    buckets_max: int
    answer: asyncio.Future[Merged]
    merges: int = 0
    merged_buckets: int = 0


class BucketMerging:
    """The merges of one topic.

    `settings` returns the current settings. `learn` returns when the merged buckets of the manifest are served.
    `is_live` returns whether the newest manifest names a missing bucket. `damaged` is called with a bucket whose object
    is damaged, and its damage; `failed` with an error that ends the topic or the shard.
    """

    def __init__(
        self,
        topic: TopicState,
        manifests: TopicManifests,
        environment: Environment,
        *,
        settings: Callable[[], TopicSettings],
        learn: Callable[[TopicManifest], Awaitable[None]],
        is_live: Callable[[str], Awaitable[bool]],
        damaged: Callable[[str, str], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._topic = topic
        self._settings = settings
        self._manifests = manifests
        self._environment = environment
        self._learn = learn
        self._is_live = is_live
        self._damaged = damaged
        self._failed = failed
        self._asked: list[_Asked] = []
        # Buckets that cannot be merged although each of them can be read
        self._unmergeable: set[str] = set()
        self._work: asyncio.Task[None] | None = None
        self._halted = False
        self._closed = False
        self.under_way = False

    # ---- asking

    def consider(self) -> None:
        """Begin to merge if an index has too many buckets. Called after buckets changed or time passed."""
        if not self._halted and (self._work is None or self._work.done()) and self._is_wanted():
            self._work = asyncio.ensure_future(self._run())
            self._work.add_done_callback(self._ended)

    async def merge(self, buckets_max: int) -> Merged:
        """Merge until no index has more than `buckets_max` buckets, or no run of any may be merged.

        Raises OutcomeUnknown if that takes too long: it goes on.
        """
        if self._closed:
            raise self._served_no_longer()
        asked = _Asked(buckets_max, asyncio.get_running_loop().create_future())
        self._asked.append(asked)
        self.consider()
        try:
            return await asyncio.wait_for(asyncio.shield(asked.answer), MERGE_ANSWER_S)
        except TimeoutError:
            raise OutcomeUnknown(
                f"topic {self._topic.name}: merging its buckets has taken {MERGE_ANSWER_S:.0f} s; the "
                "merge continues, and a retry is safe"
            ) from None

    async def halt(self) -> None:
        """Begin no merge until `go_on`, and give up the one in flight.

        The manifest shows whether its commit lands.
        """
        self._halted = True
        if self._work is not None and not self._work.done():
            self._work.cancel()
            await asyncio.wait([self._work])

    def go_on(self) -> None:
        self._halted = self._closed
        self.consider()

    def close(self) -> None:
        """Halt for good; waiting callers get an error."""
        self._halted = self._closed = True
        if self._work is not None:
            self._work.cancel()
        for asked in self._asked:
            if not asked.answer.done():
                # Some of its merges may be committed, or in flight.
                asked.answer.set_exception(OutcomeUnknown.after(self._served_no_longer()))
                # No caller may be waiting.
                asked.answer.exception()
        self._asked.clear()

    def _served_no_longer(self) -> Unavailable:
        return Unavailable(f"topic {self._topic.name} is no longer served by this daemon; try again")

    # ---- choosing

    @property
    def _buckets_max(self) -> int | None:
        """The fewest buckets that the settings or a call want; None if there is no limit."""
        wanted = (self._settings().max_num_buckets, *(asked.buckets_max for asked in self._asked))
        return min((buckets for buckets in wanted if buckets > 0), default=None)

    def _is_wanted(self) -> bool:
        """Return whether a merge may be needed. O(1) of buckets."""
        buckets_max = self._buckets_max
        return bool(self._asked) or (
            buckets_max is not None and any(len(index.sealed) > buckets_max for index in self._topic.indexes.values())
        )

    def _next_run(self, buckets_max: int | None) -> list[MergeCandidate]:
        """Return the buckets to merge next, in order: those of the first index that has any."""
        settings = self._settings()
        for index in self._topic.indexes.values():
            if buckets_max is not None and len(index.sealed) > buckets_max:
                run = merging.chosen_run(
                    self._candidates(index),
                    buckets_max=buckets_max,
                    merge_buckets_max=settings.merge_buckets_max,
                    rows_max=settings.merge_rows_max,
                )
                if run:
                    return run
        return []

    def _candidates(self, index: Index) -> list[MergeCandidate]:
        """Return the buckets of the manifest; those that are not served from it yet cannot be merged."""
        soon_ms = self._environment.clock.now_ms() + self._environment.config.delivery.lookahead_ms
        mergeable = {bucket.name: bucket for bucket in index.readable if bucket.name not in self._unmergeable}
        found = []
        for live in self._manifests.manifest.live:
            if live.subscription_id != index.index_id or live.quarantined:
                continue
            bucket = mergeable.get(live.object.name)
            next_due_ms = None if bucket is None or not bucket.waiting_rows else bucket.head.next_due_ms()
            found.append(
                MergeCandidate(
                    name=live.object.name,
                    first_ledger_id=live.first_ledger_id,
                    last_ledger_id=live.last_ledger_id,
                    live_rows=live.rows if bucket is None else bucket.present_rows,
                    stored_rows=live.rows,
                    left_out=bucket is None,
                    soon=next_due_ms is not None and next_due_ms <= soon_ms,
                )
            )
        return found

    # ---- merging

    async def _run(self) -> None:
        delays_s = backoff.delays_s(self._environment.jitter)
        while not self._halted:
            outcome = await self._merge_next()
            if outcome is None:
                return
            if outcome in ("merged", "refused"):
                await asyncio.shield(self._learn(self._manifests.manifest))
            if outcome == "merged":
                delays_s = backoff.delays_s(self._environment.jitter)
            else:
                await self._environment.sleep(next(delays_s))

    def _ended(self, work: asyncio.Task[None]) -> None:
        if not work.cancelled() and (error := work.exception()) is not None:
            self._failed(error)
        elif self._asked:
            # These calls came while it was ending.
            self.consider()

    async def _merge_next(self) -> MergeOutcome | None:
        """Try one merge, one at a time in the daemon; return None if there is none to make."""
        environment = self._environment
        if not await self._is_calm():
            return "given_up"
        async with environment.merging_turn:
            if self._is_behind():
                return "given_up"
            self._answer()
            run = self._next_run(self._buckets_max)
            if not run:
                return None
            self.under_way = True
            started_s = environment.clock.elapsed_s()
            try:
                outcome = await self._merge([candidate.name for candidate in run])
            finally:
                self.under_way = False
            seconds = environment.clock.elapsed_s() - started_s
            environment.metrics.merge_ended(outcome, seconds=seconds)
            return outcome

    def _answer(self) -> None:
        """Answer calls that have what they asked for, or all that is possible."""
        for asked in list(self._asked):
            if not self._next_run(asked.buckets_max if asked.buckets_max > 0 else None):
                self._asked.remove(asked)
                if not asked.answer.done():
                    buckets = len(self._topic.indexes.sealed)
                    asked.answer.set_result(Merged(asked.merges, asked.merged_buckets, buckets))

    async def _is_calm(self) -> bool:
        """Wait until no seal and no due row waits; return whether that happened in time."""
        clock = self._environment.clock
        until_s = clock.elapsed_s() + YIELD_MAX_S
        while self._is_behind():
            if clock.elapsed_s() >= until_s:
                return False
            await self._environment.sleep(YIELD_S)
        return True

    def _is_behind(self) -> bool:
        indexes = self._topic.indexes
        next_due_ms = indexes.next_due_ms()
        return bool(indexes.sealing) or (
            next_due_ms is not None and next_due_ms <= self._environment.clock.now_ms() - BEHIND_MS
        )

    async def _merge(self, run: Sequence[str]) -> MergeOutcome:
        try:
            return await self._made(self._plan(run))
        except (format_errors.FormatError, merge.NotConserved, NewerData) as error:
            # Each of them is undamaged, but together they contradict the manifest: no merge may hide that. Or this
            # release does not know all that a source holds.
            log.error("topic %s: cannot merge buckets: %s", self._topic.name, error)
            self._unmergeable.update(run)
        except (StoreError, Corruption) as error:
            log.warning("topic %s: cannot merge buckets now, retrying: %s", self._topic.name, error)
        return "failed"

    def _plan(self, run: Sequence[str]) -> MergePlan:
        """Plan a merge from the newest known manifest, in which every bucket of the run is live."""
        tip, shard = self._manifests.manifest, self._manifests.shard
        live = {bucket.object.name: bucket for bucket in tip.live}
        key = names.bucket_key(shard, tip.topic_id, tip.head.number, self._environment.new_id())
        return MergePlan(tip, tuple(live[name] for name in run), key)

    async def _made(self, plan: MergePlan) -> MergeOutcome:
        """Make a merge. Raises the errors of reading and merging."""
        environment, settings = self._environment, self._settings()
        sources = []
        for live in plan.sources:
            read = functools.partial(bucket_reads.read_source, environment.store, live)
            try:
                sources.append(await environment.pools.merges.run(read))
            except bucket_reads.BucketMissing as error:
                if not await self._is_live(live.object.name):
                    return "refused"
                self._damaged(live.object.name, str(error))
                return "damaged"
            except NewerData:
                raise
            except Corruption as error:
                self._damaged(live.object.name, str(error))
                return "damaged"
            if not await self._is_calm():
                return "given_up"
        made = await environment.pools.merges.run(
            lambda: bucket_merging.merged(
                plan,
                sources,
                stored_topic.progress_of_manifest(environment.store, plan.tip),
                limits=settings.segment_limits,
                compatible=settings.compatible_form,
            )
        )
        if not await self._is_calm():
            return "given_up"
        delete_after_ms = environment.clock.now_ms() + environment.grace_ms
        written = await environment.pools.merges.run(
            lambda: bucket_merging.write(
                environment.store,
                plan,
                sources,
                made,
                progress_of=functools.partial(stored_topic.progress_of_manifest, environment.store),
                delete_after_ms=delete_after_ms,
            )
        )
        try:
            await self._manifests.commit(lambda tip: written.operation)
        except topic_manifests.Overtaken as refused:
            log.info("topic %s: refused a merge and discarded its output: %s", self._topic.name, refused.reason)
            return "refused"
        self._count(plan, written)
        return "merged"

    def _count(self, plan: MergePlan, written: WrittenMerge) -> None:
        for asked in self._asked:
            asked.merges += 1
            asked.merged_buckets += len(plan.sources)
        self._environment.metrics.merged(
            buckets=len(plan.sources), rows=written.rows, read_bytes=plan.stored_bytes, written_bytes=written.size_bytes
        )
        log.info(
            "merged buckets topic=%s buckets=%d rows=%d level=%d",
            plan.tip.topic,
            len(plan.sources),
            written.rows,
            written.level,
        )


T = TypeVar("T")

# Segments of a merged bucket that are read ahead of its head before it is taken over
AHEAD_SEGMENTS = 8
# Time to try to pass everything that is due, and the time between two tries (seconds)
SETTLE_MAX_S = 5.0
SETTLE_S = 0.005


class Adoption:
    """The replacement of sources by merged buckets in one topic. `slot` returns the last applied slot."""

    def __init__(
        self, topic: TopicPort, manifests: TopicManifests, environment: Environment, *, slot: Callable[[], ShardSlot]
    ) -> None:
        self._topic = topic
        self._manifests = manifests
        self._environment = environment
        self._slot = slot

    async def adopt(self, manifest: TopicManifest) -> None:
        """Serve the merged buckets of the manifest, or of a newer one, in place of their sources.

        No seal, drop or quarantine of the topic may be in flight. Raises commit.Refused if the epoch is over,
        Corruption if the manifest is damaged, and NewerData for a bucket that only a newer release reads.
        """
        damaged: dict[str, str] = {}
        while True:
            unknown = self._unknown(manifest)
            fresh = [live for live in unknown if not live.quarantined and live.object.name not in damaged]
            if fresh:
                try:
                    await self._take_over(fresh[0])
                except NewerData:
                    raise
                except Corruption as error:
                    damaged[fresh[0].object.name] = str(error)
                manifest = self._manifests.manifest
            elif not unknown:
                self._forget_merged_away(manifest)
                return
            elif unknown[0].quarantined:
                # The rest of its sources, the only ones served that left the manifest, is lost with it.
                lost = unknown[0]
                sources = [each for each in self._merged_away(manifest) if each.index_id == lost.subscription_id]
                self._topic.core.lose_merged(lost, sources)
                self._topic.changed()
            else:
                await self._quarantine(unknown[0].object.name, damaged[unknown[0].object.name])
                manifest = self._manifests.manifest

    def _unknown(self, manifest: TopicManifest) -> list[LiveBucket]:
        """Return the buckets of the manifest that are not served here."""
        found = []
        for live in manifest.live:
            index = self._topic.core.indexes.get(live.subscription_id)
            # A missing index belongs to a subscription that is being deleted.
            if index is not None and not index.knows(live.object.name):
                if not live.level:
                    raise InvariantViolated(f"bucket {live.object.name} is live but neither served nor merged")
                found.append(live)
        return found

    def _forget_merged_away(self, manifest: TopicManifest) -> None:
        """Drop buckets that left the manifest and have no row in a merged bucket: all their rows are gone."""
        for bucket in self._merged_away(manifest):
            if bucket.present_rows:
                raise InvariantViolated(
                    f"bucket {bucket.name} left the manifest with {bucket.present_rows} rows still present"
                )
            self._topic.core.drop(bucket.name)

    def _merged_away(self, manifest: TopicManifest) -> list[SealedBucket]:
        live = {bucket.object.name for bucket in manifest.live}
        # The index of a subscription is dropped once its deletion is known to have landed.
        owed = {index_ids.SHARED, *(each.subscription_id for each in manifest.subscriptions)}
        return [
            bucket
            for bucket in self._topic.core.indexes.sealed.values()
            if bucket.name not in live and index_ids.subscription_of(bucket.index_id) in owed
        ]

    # ---- one bucket

    async def _take_over(self, live: LiveBucket) -> None:
        """Take over a merged bucket. Raises Corruption if it is damaged or missing, NewerData for a newer form."""
        store = self._environment.store
        table, metadata = await self._read(lambda: bucket_reads.open_bucket(store, live))
        index = self._topic.core.indexes.get(live.subscription_id)
        if index is None:
            return
        # Pages of which all rows are gone are held by no bucket.
        held = index.pages.intern_stored(metadata.positions)
        index.pages.hold(held)
        try:
            await self._adopt(index, live, table, metadata)
        finally:
            index.pages.release(held)

    async def _adopt(self, index: Index, live: LiveBucket, table: BucketTable, metadata: BucketMetadata) -> None:
        merged = await self._environment.run(lambda: MergedBucket.of(index.pages, live, table, metadata))
        loaded: dict[int, KeyedRows] = {}
        while True:
            await self._settle()
            # From here to the end of the loop is one turn, unless something must be read.
            boundary_ms = max(self._environment.clock.now_ms(), self._topic.core.indexes.passed_until_ms)
            needed = self._needed(index, merged, boundary_ms)
            missing = [number for number in needed if number not in loaded]
            if not missing:
                break
            first, last = missing[0], missing[-1]
            parts = await self._read(lambda: self._segments(index, merged, first, last))  # noqa: B023
            loaded.update(zip(range(first, last + 1), parts, strict=True))
        rows = {number: loaded[number] for number in needed}
        sources = self._topic.core.adopt(merged, rows, boundary_ms=boundary_ms)
        self._topic.changed()
        self._topic.read_on()
        name, buckets = self._topic.core.name, len(sources)
        log.info("serves a merged bucket topic=%s rows=%d sources=%d level=%d", name, live.rows, buckets, live.level)

    async def _settle(self) -> None:
        """Pass due rows, so that few of them have to be carried over; not for ever."""
        clock = self._environment.clock
        until_s = clock.elapsed_s() + SETTLE_MAX_S
        while clock.elapsed_s() < until_s:
            now_ms = clock.now_ms()
            self._topic.wake(now_ms)
            next_due_ms = self._topic.core.indexes.next_due_to_read_ms()
            # Few rows have come due since.
            if next_due_ms is None or next_due_ms > now_ms:
                return
            # The rest is more than one turn may pass, or its segments are being loaded.
            await self._environment.sleep(SETTLE_S)

    def _needed(self, index: Index, merged: MergedBucket, boundary_ms: int) -> range:
        return merging.segments_needed(
            merged.segments,
            index.sources_of(merged),
            boundary_ms=boundary_ms,
            ahead_ms=self._environment.config.delivery.lookahead_ms,
            ahead_max=AHEAD_SEGMENTS,
        )

    def _segments(self, index: Index, merged: MergedBucket, first: int, last: int) -> list[KeyedRows]:
        """Read segments; runs in a thread."""
        infos = merged.segments[first : last + 1]
        rows = bucket_reads.read_segments(self._environment.store, merged.name, infos)
        return [index.pages.keyed(each) for each in rows]

    async def _read(self, work: Callable[[], T]) -> T:
        return await backoff.until_answered(
            lambda: self._environment.run(work),
            failed=lambda error: log.warning(
                "topic %s: cannot read a merged bucket, retrying: %s", self._topic.core.name, error
            ),
            waiting=self._environment,
        )

    # ---- damage

    async def _quarantine(self, bucket: str, damage: str) -> None:
        """Quarantine a merged bucket that cannot be read, unless it was merged itself meanwhile."""
        manifest = await self._manifests.newest()
        if all(live.object.name != bucket for live in manifest.live):
            return
        try:
            await self._manifests.commit(
                lambda tip: topic_manifest.Quarantine(
                    bucket=bucket,
                    damage=damage[: topic_manifests.DAMAGE_CHARACTERS_MAX],
                    slot=self._slot(),
                    epoch=self._manifests.epoch,
                )
            )
        except topic_manifests.Overtaken:
            return
        log.error("topic %s: quarantined a merged bucket; the others are served: %s", self._topic.core.name, damage)
        self._environment.metrics.damage_found("bucket")
