"""Collects garbage in the shards that this daemon owns: regularly, and on request.

It runs one pass at a time in the daemon (`collection_pass`), retries later and later after failures, and stops when a
shard is lost or the daemon drains.

It also deletes slots of logs that no shard needs (L7, L12), in this daemon's log and in logs that have an end:

    the logs that have an end are found        a FENCE or CLOSE is their highest slot
    the manifests of all shards are read       after that: a claim that names such a log later proves that it is empty
    logs that no manifest names are deleted    all below that end; the end stays for ever
    unnamed logs without an end                are fenced if no daemon has reported one for `SILENT_S`: a crash left it
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import NamedTuple

from daemon.call_values import GarbageProgress
from daemon.core import garbage_rules
from daemon.core.garbage_rules import NOTHING, ObjectCount, Summary
from daemon.errors import NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.daemon_log import DaemonLog
from daemon.owner import collection_pass, heartbeat
from daemon.owner.collection_pass import Halted, Pass, Wish
from daemon.owner.heartbeat import Heartbeat
from daemon.owner.takeover import Fences
from daemon.owner.traces import Traces
from daemon.runtime.environment import Environment
from daemon.shard.shard import ServedShard
from storage_backends import commit, log_fence, object_store
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import StoreError
from storage_backends.slot_log import LogHeld, SlotLogs

log = logging.getLogger(__name__)

# Silence of its daemon's heartbeat after which an unnamed log is fenced (seconds)
SILENT_S = 3600.0


class _Told(NamedTuple):
    """The heartbeat that reports a log, None without one, and since when it has been the same (monotonic seconds)."""

    heartbeat: Heartbeat | None
    since_s: float


class LogCollection:
    """The collection of logs. `manifests` has those of every shard of the root.

    `living` returns this daemon's log, or None while there is none.
    """

    def __init__(
        self,
        logs: SlotLogs,
        manifests: Sequence[commit.ManifestLog[ShardManifest]],
        living: Callable[[], DaemonLog | None],
        environment: Environment,
    ) -> None:
        self._logs = logs
        self._manifests = manifests
        self._living = living
        self._environment = environment
        self._traces = Traces(environment.store, logs, lambda: heartbeat.read_heartbeats(environment.store))
        # Logs that have no end and that no manifest names
        self._told: dict[str, _Told] = {}
        self._logged_heartbeats: dict[str, heartbeat.LoggedDamage] = {}

    async def own(self, *, dry_run: bool) -> ObjectCount:
        """Delete slots of this daemon's log that no shard needs. Returns their count; a dry run only counts."""
        living = self._living()
        if living is None:
            return NOTHING
        if dry_run:
            return living.unneeded()
        before = living.deleted
        await living.truncated()
        living.truncate()
        await living.truncated()
        return living.deleted - before

    async def dead(self) -> None:
        """Delete all below the end of each log that no manifest names; fence unnamed logs of silent daemons.

        A damaged manifest may name any log, and a damaged log has no end: then nothing is deleted. Raises the store's
        errors if it cannot be reached.
        """
        living = self._living()
        own = None if living is None else living.log_id
        try:
            silent = await self._environment.pools.collection.run(lambda: self._delete_dead(own))
        except object_store.Damaged as damage:
            log.warning("no log of a former owner is deleted: %s", damage)
            return
        fences = Fences(self._logs, self._environment)
        for log_id in silent:
            try:
                await fences.of(log_id)
            except (LogHeld, object_store.Damaged) as error:
                log.warning("log %s, which no shard names, has no end and gets none: %s", log_id, error)

    def _delete_dead(self, own: str | None) -> list[str]:
        """Delete slots of logs that have an end; return the logs without one that must be fenced."""
        ends = {log_id: log_fence.ended_at(self._logs, log_id) for log_id in sorted(self._logs.log_ids() - {own})}
        if not ends:
            return []
        named: set[str] = set()
        for shard, manifests in enumerate(self._manifests):
            tip = manifests.read_tip()
            if tip is None:
                # A shard that has lost its manifests may need any log; a new one may be claimed meanwhile.
                self._traces.check_new(shard, manifests)
                tip = manifests.read_tip()
            if tip is not None:
                named.update(each.log_id for each in tip.manifest.ranges)
        unnamed = sorted(ends.keys() - named)
        for log_id in unnamed:
            end = ends[log_id]
            if end is not None and end > 1:
                slots = self._logs.log(log_id)
                try:
                    slots.delete_through(end - 1)
                finally:
                    slots.close()
        return self._silent([log_id for log_id in unnamed if ends[log_id] is None])

    def _silent(self, logs: Sequence[str]) -> list[str]:
        """Return those logs that the same heartbeat, or none, has reported for `SILENT_S`."""
        now_s = self._environment.clock.elapsed_s()
        beats = self._heartbeats() if logs else {}
        before, self._told = self._told, {}
        for log_id in logs:
            now = _Told(beats.get(log_id), now_s)
            told = before.get(log_id, now)
            self._told[log_id] = told if told.heartbeat == now.heartbeat else now
        return [log_id for log_id, each in self._told.items() if now_s - each.since_s >= SILENT_S]

    def _heartbeats(self) -> dict[str, Heartbeat]:
        """Return by log the newest heartbeat of the daemon that writes it."""
        beats = heartbeat.read_heartbeats(self._environment.store, logged=self._logged_heartbeats)
        return {beat.log_id: beat for beat in beats if not beat.log_ended}


# Time between checks whether a shard's pass is due (seconds)
LOOK_S = 5.0
# The longest delay of the next pass after failures (seconds)
LAST_DELAY_S = 21_600.0


class _Shard:
    """One ownership of a shard, and the state for its next passes. Times are monotonic (seconds)."""

    def __init__(self, shard: ServedShard, now_s: float, *, first_s: float, first_listing_s: float) -> None:
        self.shard = shard
        self.next_s = first_s
        self.next_listing_s = first_listing_s
        self.worked_s = now_s
        self.failures = 0
        self.waiting = NOTHING
        # Topics that are not served and have tombstones: when the first of these is due (Unix time, ms)
        self.unserved: dict[str, int] = {}


class Collection:
    """The garbage collection of one daemon. Used on one event loop. Call `configure` before anything is collected.

    `shards` returns those that are served now, `shards_total` the number of the root's, `living` this daemon's log.
    """

    def __init__(
        self,
        environment: Environment,
        shards: Callable[[], Mapping[int, ServedShard]],
        shards_total: Callable[[], int],
        *,
        living: Callable[[], DaemonLog | None],
    ) -> None:
        self._environment = environment
        self._shards = shards
        self._shards_total = shards_total
        self._living = living
        self._logs_listed_s: float | None = None
        self._known: dict[int, _Shard] = {}
        # One pass at a time.
        self._turn = asyncio.Lock()
        self._halted = False
        settings = environment.config.collection
        self._tools = collection_pass.Tools(
            store=environment.store,
            executor=environment.pools.collection.parts,
            now_ms=environment.clock.now_ms,
            writer=environment.config.daemon_id,
            limits=garbage_rules.CollectionLimits(
                orphan_age_ms=int(settings.orphan_age_s * 1000),
                manifests_kept=settings.manifests_kept,
                manifests_age_ms=int(settings.manifests_age_s * 1000),
                attempts_max=settings.attempts_max,
                guard_share=settings.guard_share,
                guard_bytes=settings.guard_bytes,
            ),
        )

    def configure(self, logs: SlotLogs, manifests: Sequence[commit.ManifestLog[ShardManifest]]) -> None:
        """Set the root's logs, and the manifests of its shards."""
        self._log_collection = LogCollection(logs, manifests, self._living, self._environment)

    # ---- automatically

    async def run(self) -> None:
        """Run every shard's passes when they are due, until it is cancelled."""
        look_s = min(LOOK_S, self._environment.config.collection.interval_s)
        while True:
            await self._environment.sleep(look_s)
            self._look()
            for known in list(self._known.values()):
                if known.next_s <= self._environment.clock.elapsed_s() and known.shard.loading.ended.is_set():
                    async with self._turn:
                        await self._pass_when_due(known)
            if self._known:
                await self._collect_dead_logs()

    async def _collect_dead_logs(self) -> None:
        """Collect the logs of former owners, as often as shards are listed."""
        now_s, interval_s = self._environment.clock.elapsed_s(), self._environment.config.collection.orphan_interval_s
        if self._halted or (self._logs_listed_s is not None and now_s - self._logs_listed_s < interval_s):
            return
        self._logs_listed_s = now_s
        try:
            await self._log_collection.dead()
        except StoreError as error:
            log.warning("the logs of former owners are not collected: %s", error)

    def halt(self) -> None:
        """Start no pass, and end the one in flight after its current step."""
        self._halted = True

    def every_second(self) -> None:
        """Report how long ago the last passes worked."""
        now_s = self._environment.clock.elapsed_s()
        ages_s = (now_s - known.worked_s for known in self._known.values())
        self._environment.metrics.set_collection_age(max(ages_s, default=0.0))

    def _look(self) -> None:
        """Add newly served shards, and drop those that are no longer served."""
        now_s = self._environment.clock.elapsed_s()
        served = self._shards()
        for number in [number for number, known in self._known.items() if served.get(number) is not known.shard]:
            del self._known[number]
        for number, shard in served.items():
            if number not in self._known:
                # Jitter, so that a newly started daemon does not run the passes of all its shards together. Listings
                # cost money: with it, daemons that are often started make no more of them.
                settings, jitter = self._environment.config.collection, self._environment.jitter()
                self._known[number] = _Shard(
                    shard,
                    now_s,
                    first_s=now_s + settings.interval_s * jitter,
                    first_listing_s=now_s + settings.orphan_interval_s * jitter,
                )

    async def _pass_when_due(self, known: _Shard) -> None:
        settings, now_s = self._environment.config.collection, self._environment.clock.elapsed_s()
        listing = known.next_listing_s <= now_s
        spread = 0.9 + 0.2 * self._environment.jitter()
        try:
            pass_ = self._pass(known, Wish(listing=listing))
            async for _ in pass_.steps():
                pass
            self._passed(known, pass_)
        except Halted:
            return
        except commit.UNCERTAIN as error:
            log.warning("shard %d: collection failed: %s", known.shard.number, error)
            self._put_off(known, spread)
            return
        except Exception as error:
            # Any error affects this shard alone.
            log.error("shard %d: collection failed: %r", known.shard.number, error, exc_info=error)
            self._put_off(known, spread)
            return
        known.failures = 0
        known.worked_s = self._environment.clock.elapsed_s()
        known.next_s = known.worked_s + settings.interval_s * spread
        if listing:
            known.next_listing_s = known.worked_s + settings.orphan_interval_s * spread

    def _put_off(self, known: _Shard, spread: float) -> None:
        known.failures += 1
        delay_s = min(self._environment.config.collection.interval_s * 2**known.failures, LAST_DELAY_S) * spread
        known.next_s = self._environment.clock.elapsed_s() + delay_s
        log.info("shard %d: collection begins again in %.0f s", known.shard.number, delay_s)

    # ---- on request

    async def collect(self, *, dry_run: bool, force: bool, retry_dead: bool) -> AsyncGenerator[GarbageProgress]:
        """Run a whole pass over every owned shard. Yields the progress of each step; the last is `done`.

        Raises NotOwner if objects that were given up are to be retried and another daemon owns a shard. Raises
        Unavailable and OutcomeUnknown if the pass could not continue.
        """
        if retry_dead and len(self._shards()) < self._shards_total():
            raise NotOwner(
                f"objects that were given up may belong to any of {self._shards_total()} shards, this daemon serves "
                f"{len(self._shards())} of them"
            )
        wish = Wish(listing=True, dry_run=dry_run, force=force, retry_dead=retry_dead)
        async with self._turn:
            self._look()
            known = [self._known[number] for number in sorted(self._known)]
            done = GarbageProgress(shards=len(known))
            yield done
            try:
                for each in known:
                    pass_ = self._pass(each, wish)
                    async for _ in pass_.steps():
                        yield done.plus(pass_.topics_done, pass_.topics, pass_.summary)
                    if not dry_run:
                        self._passed(each, pass_)
                    done = done.plus(pass_.topics_done, pass_.topics, pass_.summary, shards_done=1)
                if not dry_run:
                    await self._log_collection.dead()
                slots = await self._log_collection.own(dry_run=dry_run)
                done = done.plus(0, 0, Summary(journal_slots=slots))
            except Halted:
                raise Unavailable("this daemon no longer serves the shard, or is stopping; try again") from None
            except StoreError as error:
                raise Unavailable(f"the store cannot be reached: {error}") from error
            except commit.CommitOutcomeUnknown as error:
                raise OutcomeUnknown(f"{error}; a retry is safe") from error
            yield dataclasses.replace(done, done=True)

    # ---- passes

    def _pass(self, known: _Shard, wish: Wish) -> Pass:
        def check() -> None:
            if self._halted or self._shards().get(known.shard.number) is not known.shard:
                raise Halted

        return Pass(known.shard, self._environment, self._tools, wish, unserved=known.unserved, check=check)

    def _passed(self, known: _Shard, passed: Pass) -> None:
        """Record the results of a completed pass."""
        done = passed.summary
        known.waiting = done.waiting
        waiting = sum((each.waiting for each in self._known.values()), NOTHING)
        self._environment.metrics.set_tombstones(objects=waiting.objects, size_bytes=waiting.size_bytes)
        if done != Summary(waiting=done.waiting):
            log.info(
                "collected shard=%d tombstones=%d orphans=%d manifests=%d journal_slots=%d waiting=%d failed=%d "
                "given_up=%d refused=%d",
                known.shard.number,
                *(getattr(done, field.name).objects for field in dataclasses.fields(done)),
            )
