"""Runs the daemon's engine: every shard that it owns, or the wait to own them.

It stands by, serves, stands by again when the shards are lost, and computes health. `requests` has the calls of the
services; `daemon.process` starts and stops it.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from daemon.call_values import Health, TopicLocation
from daemon.core import quotas
from daemon.core.index.segments import SegmentCache
from daemon.core.quotas import PendingRows
from daemon.errors import (
    Corruption,
    NotOwner,
    OutcomeUnknown,
    TarryError,
    Unavailable,
)
from daemon.group_commit.daemon_log import DaemonLog
from daemon.ledger_deletion.deletion_requests import DeletionRequests
from daemon.ledger_deletion.deletion_workers import DeletionWorkers
from daemon.owner.candidate import Candidate, ClaimedShards
from daemon.owner.garbage_collection import Collection
from daemon.owner.heartbeat import Heartbeat, HeartbeatLoop, ReportedShard, read_heartbeat
from daemon.owner.merge_watch import MergeWatch
from daemon.owner.requests import Requests
from daemon.owner.standby import Claimable, Wait
from daemon.owner.takeover import LogMustClose, Takeover
from daemon.runtime import backoff
from daemon.runtime.clocks import ClockWatch
from daemon.runtime.due_loop import DueLoop
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import Failures, ProcessFailed, ShardLost, TopicFailed
from daemon.shard.recovery import ShardClaim
from daemon.shard.shard import ServedShard
from daemon.shard.tail_bound import TailBound
from storage_backends import commit, root_format, store_opening
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.object_store import Damaged
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

EVERY_S = 1.0
# Topics whose rows are counted before other tasks have their turn
TOPICS_A_TURN = 1_000
# Time between checks whether a damaged shard was fixed (seconds)
DAMAGED_LOOK_S = 30.0
# Time between checks whether a lost shard may be claimed again (seconds)
LOOK_S = 1.0
AWAY_RETRY_MS = 500
# A caller may retry this soon while the shards are being claimed (ms).
TAKING_OVER_RETRY_MS = 25
STARTING = "starting"
# Health is NOT_SERVING if a slot is uncertain for longer (seconds)
STALLED_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class UnownedShard:
    """A shard that is not served here while others are. It is not claimed before `again_s` (monotonic seconds)."""

    reason: str
    owner_address: str
    again_s: float

    def waiting(self, reason: str, recorded: ShardManifest | None) -> UnownedShard:
        return dataclasses.replace(self, reason=reason, owner_address="" if recorded is None else recorded.address)


class Engine:
    """The engine, one for each process. Made on the event loop that runs it."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._shards_total = 0
        self._due_loop = DueLoop(environment.clock, environment.busy_s, environment.metrics.set_tick)
        self._pending = PendingRows(environment.config.limits.pending_rows_max)
        self._tail_bound = TailBound(environment.tail_work_max, environment.clock.elapsed_s)
        self._shards: dict[int, ServedShard] = {}
        self._damaged: dict[int, Corruption] = {}
        # Shards that were lost while others are served
        self._away: dict[int, UnownedShard] = {}
        self._failures = Failures()
        # Serializes looks at shards to reclaim, and their claims
        self._taking = asyncio.Lock()
        self._candidate = Candidate(
            environment,
            waiting=lambda wait: self._wait_for(wait.reason, stands_by=wait.stands_by),
            log_lost=self._log_lost,
            company_s=self._due_loop.stretched_s,
        )
        # The takeover of the owned shards into their log; None if none is owned
        self._owned: Takeover | None = None
        self._health = Health(serving=False, reason=STARTING)
        self._health_callbacks: list[Callable[[Health], None]] = []
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        # Those of them that end when the engine drains
        self._serving_tasks: list[asyncio.Task[None]] = []
        self._draining = False
        self._loop = asyncio.get_running_loop()
        self._store_away = False
        self._heart = HeartbeatLoop(
            environment.store,
            daemon_id=environment.config.daemon_id,
            address=environment.config.daemon.address or "",
            owned=lambda: {
                number: ReportedShard(shard.epoch, shard.tip.newest.number) for number, shard in self._shards.items()
            },
            log_state=lambda: self._candidate.log_state,
            instance=environment.new_id(),
            run=environment.pools.journal.run,
            sleep=environment.sleep,
            interval_s=environment.config.ownership.heartbeat_interval_s,
        )
        self.collection = Collection(
            environment,
            lambda: self._shards,
            lambda: self._shards_total,
            living=lambda: None if self._owned is None else self._owned.living,
        )
        self._merge_watch = MergeWatch(environment, lambda: self._shards)
        self.requests = Requests(self, environment)
        self.deletion_requests = DeletionRequests(self, environment, shards_total=lambda: self._shards_total)
        self._deletion_workers = DeletionWorkers(environment, lambda: self._shards, failed=self._task_ended)
        # Fails with the error of a task that must not end: the process cannot continue
        self.failed: asyncio.Future[None] = self._loop.create_future()

    # ---- life

    async def start(self) -> None:
        """Read or create the root and begin to stand by and to serve; `health` shows the progress.

        Raises Corruption if this version cannot serve the root.
        """
        environment = self._environment
        self._shards_total, logs = await self._open_root()
        self._candidate.configure(self._shards_total, logs, await self._former_heartbeat())
        self.collection.configure(logs, self._candidate.shard_logs)
        watch = ClockWatch(
            environment.clock,
            environment.store,
            environment.metrics,
            running_s=self._loop.time,
            changed=self._clock_changed,
            resumed=self._resumed,
        )
        serving = (
            self._serve_for_ever(),
            self._due_loop.run(),
            self.collection.run(),
            self._merge_watch.run(),
            self._deletion_workers.run(),
        )
        for work in (*serving, self._every_second(), watch.run(), self._heart.beats()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        self._serving_tasks = self._tasks[: len(serving)]

    async def _open_root(self) -> tuple[int, SlotLogs]:
        """Return the root's number of shards, and its logs."""
        environment = self._environment

        def open_logs() -> tuple[int, SlotLogs]:
            config, store = environment.config, environment.store
            try:
                found = root_format.read_or_create(
                    store,
                    shards=config.daemon.shards,
                    log_form=store_opening.form_of_new_root(store, config.store.log_form),
                    root_id=environment.new_id(),
                    created_ms=environment.clock.now_ms(),
                )
            except Damaged as error:
                raise Corruption(f"the root cannot be served: {error}") from error
            return found.shards, environment.open_logs(found.log_form)

        return await backoff.until_answered(
            lambda: environment.run(open_logs),
            failed=lambda error: self._wait_for(f"the store cannot be reached: {error}"),
            waiting=environment,
        )

    async def _former_heartbeat(self) -> Heartbeat | None:
        """Return the last heartbeat of the process before this one, which the first beat of this one replaces."""
        environment = self._environment
        return await backoff.until_answered(
            lambda: environment.run(lambda: read_heartbeat(environment.store, environment.config.daemon_id)),
            failed=lambda error: self._wait_for(f"the store cannot be reached: {error}"),
            waiting=environment,
        )

    def begin_drain(self) -> None:
        """Accept and deliver nothing new from now on."""
        self._draining = True
        self._set_health(Health(serving=False, reason="stopping"))
        self.collection.halt()
        self.deletion_requests.sweeping.halt()
        for shard in self._shards.values():
            shard.begin_drain()

    async def drain(self) -> None:
        """Make staged decisions durable, end the streams, write checkpoints and close the log.

        Takes as long as the store needs; `left` lists the remaining work. Call `close` afterwards.
        """
        self.begin_drain()
        for task in self._serving_tasks:
            task.cancel()
        await asyncio.gather(
            self.deletion_requests.sweeping.answered(),
            *(self._drain_shard(shard) for shard in list(self._shards.values())),
        )
        await self._close_log()

    async def _close_log(self) -> None:
        """Close the log, so that the next owner need not wait for this one."""
        if self._owned is not None:
            owned, self._owned = self._owned, None
            await owned.living.close()
            await self._heart.beat()

    async def _drain_shard(self, shard: ServedShard) -> None:
        try:
            await backoff.until_answered(
                shard.drain,
                failed=lambda error: log.warning("shard %d cannot end yet, trying again: %s", shard.number, error),
                waiting=self._environment,
                again_after=(*commit.UNCERTAIN, OutcomeUnknown, TopicFailed),
            )
        except (NotOwner, commit.Refused, Unavailable) as error:
            log.warning("shard %d was lost while it ended: %s", shard.number, error)
        if self._shards.pop(shard.number, None) is not None:
            self._close(shard, _stopped())

    def left(self) -> list[str]:
        """Describe unfinished work for the log."""
        left = [
            f"shard {shard.number} has not ended, {shard.slots.staged_rows} of its rows are staged"
            for shard in self._shards.values()
        ]
        if self._owned is not None:
            left.append(f"log {self._owned.living.log_id} is not closed, the next owner fences it")
        if self._deletion_workers.under_way:
            left.append(f"{self._deletion_workers.under_way} attempts to delete a ledger wait for their stores")
        if self.deletion_requests.sweeping.asked:
            left.append(f"{self.deletion_requests.sweeping.asked} questions of sweeps wait for their stores")
        return left

    async def close(self) -> None:
        """End everything at once; durable state stays."""
        self._draining = True
        self._set_health(Health(serving=False, reason="stopping"))
        for task in self._tasks:
            task.cancel()
        self._deletion_workers.close()
        shards, self._shards = self._shards, {}
        for shard in shards.values():
            self._close(shard, _stopped())
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._owned is not None:
            await self._owned.living.abandon()

    async def stop(self) -> list[str]:
        """End cleanly within `daemon.drain_s` (seconds); return what was left then."""
        try:
            await asyncio.wait_for(self.drain(), self._environment.config.daemon.drain_s)
        except TimeoutError:
            log.error("the orderly end took longer than %g s", self._environment.config.daemon.drain_s)
        left = self.left()
        await self.close()
        return left

    async def _serve_for_ever(self) -> None:
        while True:
            try:
                shards = self._serve(await self._candidate.become_owner())
            except Corruption as error:
                self._damaged = dict.fromkeys(range(self._shards_total), error)
                self._wait_for(f"no shard can be served: {error}")
                await self._environment.sleep(DAMAGED_LOOK_S)
                continue
            beside = [asyncio.ensure_future(work) for work in (self._note_loaded(shards), self._mend())]
            for task in beside:
                task.add_done_callback(self._task_ended)
            try:
                await self._until_all_lost()
            finally:
                for task in beside:
                    task.cancel()
            await self._close_log()
            wait_s = max((away.again_s for away in self._away.values()), default=0.0)
            await self._environment.sleep(max(LOOK_S, wait_s - self._environment.clock.elapsed_s()))

    async def _until_all_lost(self) -> None:
        """Reclaim lost shards one by one; return when none is left."""
        while self._shards:
            self._lost.clear()
            if self._away:
                now_s = self._environment.clock.elapsed_s()
                await self._take_again([number for number, away in self._away.items() if away.again_s <= now_s])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S if self._away else None):
                    await self._lost.wait()

    async def _take_again(self, shards: Sequence[int]) -> None:
        """Claim those of the shards that may be claimed now; the others are served meanwhile."""
        async with self._taking:
            owned = self._owned
            if owned is None or owned.living.is_ended or self._kept_by_log:
                return
            taking: list[Coroutine[Any, Any, None]] = []
            for number, decision in (await self._candidate.claimable(shards) if shards else {}).items():
                if not isinstance(decision, Wait):
                    taking.append(self._take_one(owned, number, decision))
                elif number in self._away:
                    recorded = self._candidate.recorded(number)
                    if recorded is not None and recorded.owner == self._environment.config.daemon_id:
                        recorded = None
                    self._away[number] = self._away[number].waiting(decision.reason, recorded)
            await asyncio.gather(*taking)
            self._tell_which()
            if kept := self._kept_by_log:
                # With a new log they are claimed once more and given back: then they name no open log.
                self._log_lost(Unavailable(f"log {owned.living.log_id} is closed: shards {kept} are damaged in it"))

    @property
    def _kept_by_log(self) -> list[int]:
        """Damaged shards that can be given back only once the log that they were claimed in has an end."""
        return [number for number, error in self._damaged.items() if isinstance(error, LogMustClose)]

    async def _take_one(self, owned: Takeover, number: int, claimable: Claimable) -> None:
        try:
            self._serve_shard(await self._candidate.claim(owned, number, claimable.gone_owners), owned.living)
        except Corruption as error:
            self._away.pop(number, None)
            self._damaged[number] = error
            return
        except (*commit.UNCERTAIN, commit.Refused, NotOwner, Unavailable) as error:
            log.warning("shard %d cannot be taken over: %s", number, error)
            return
        self._away.pop(number, None)
        self._damaged.pop(number, None)
        log.info("shard %d is served again", number)

    def _serve(self, claimed: ClaimedShards) -> list[ServedShard]:
        self._lost.clear()
        # A new cache, since segment keys of an earlier ownership mean nothing now
        self._cache = SegmentCache(self._environment.config.delivery.segment_memory_bytes)
        self._damaged = dict(claimed.damaged)
        now_s = self._environment.clock.elapsed_s()
        self._away = {
            number: UnownedShard(f"it cannot be read: {error}", "", now_s) for number, error in claimed.unread.items()
        }
        self._tail_bound.new_log()
        shards = [self._serve_shard(claim, claimed.takeover.living) for claim in claimed.claims]
        # The data that was read is freed when the topics are loaded: nothing else holds it.
        self._owned = claimed.takeover
        log.info("serving shards=%d damaged=%d unread=%d", len(shards), len(self._damaged), len(self._away))
        self._store_away = False
        self._set_serving()
        return shards

    async def _note_loaded(self, shards: Sequence[ServedShard]) -> None:
        started_s = self._environment.clock.elapsed_s()
        for shard in shards:
            await shard.loaded()
        rows = sum(shard.loading.rows_replayed for shard in shards)
        seconds = self._environment.clock.elapsed_s() - started_s
        self._environment.metrics.recovered(seconds=seconds, rows_replayed=rows)
        # The sections and bytes of loaded topics are free now.
        await self._environment.run(self._environment.give_back_memory)
        topics = sum(len(shard.topics) for shard in shards)
        damaged = sum(len(shard.loading.damaged) for shard in shards)
        log.info(
            "the topics are loaded topics=%d damaged=%d rows_replayed=%d seconds=%.3f", topics, damaged, rows, seconds
        )

    def _serve_shard(self, claim: ShardClaim, living: DaemonLog) -> ServedShard:
        shard = ServedShard(
            claim,
            self._candidate.shard_logs[claim.shard],
            living,
            self._due_loop,
            self._cache,
            self._pending,
            self._tail_bound,
            self._environment,
            check_topics=self._check_topics,
            lost=self._shard_lost,
            deletions_changed=self._deletion_workers.look_at,
        )
        self._shards[shard.number] = shard
        self._heart.changed()
        self._environment.metrics.set_epoch(shard.number, shard.epoch)
        shard.serve()
        return shard

    def _check_topics(self) -> None:
        """Raise QuotaExceeded if one more topic would be too many."""
        topics = sum(shard.topics_known for shard in self._shards.values())
        quotas.check_topics(topics, self._environment.config.limits.topics_max)

    async def _mend(self) -> None:
        """Check repeatedly whether a damaged shard can be read; the others are served meanwhile."""
        while True:
            await self._environment.sleep(DAMAGED_LOOK_S)
            await self._take_again(list(self._damaged))

    def _log_lost(self, error: BaseException) -> None:
        """Lose every shard in the log, which has an end, gets one, or cannot be written."""
        for shard in list(self._shards.values()):
            shard.lose(error)

    def _shard_lost(self, number: int, error: BaseException) -> None:
        """Stop serving one shard and stand by for it; the others are served."""
        shard = self._shards.pop(number, None)
        if shard is None:
            return
        self._heart.changed()
        lost = ShardLost(number, error)
        log.error("shard %d is lost: %s", number, error, exc_info=error if lost.kind == "failed" else None)
        self._close(shard, lost.answer())
        if self._draining:
            # The other shards still have to be given up cleanly.
            return
        self._environment.metrics.shard_lost(lost.kind)
        if isinstance(error, Corruption):
            self._damaged[number] = error
        else:
            now_s = self._environment.clock.elapsed_s()
            wait_s = self._failures.delay_s(number, now_s=now_s) if lost.kind == "failed" else 0.0
            self._away[number] = UnownedShard(str(error), lost.owner_address, now_s + wait_s)
        if self._shards:
            self._tell_which()
        else:
            self._store_away = False
            self._candidate.succeeded_by(lost.owner_address)
            self._set_health(Health(serving=False, reason=f"the shards were lost: {error}"))
        self._lost.set()

    def _close(self, shard: ServedShard, answer: TarryError) -> None:
        self._environment.metrics.set_epoch(shard.number, 0)
        shard.close(answer)

    async def _every_second(self) -> None:
        while True:
            await self._environment.sleep(EVERY_S)
            for number, shard in list(self._shards.items()):
                for _ in shard.every_second() if self._shards.get(number) is shard else ():
                    await asyncio.sleep(0)
                    if self._shards.get(number) is not shard:
                        break
            if self._pending.rows_max:
                await self._count_pending()
            self._tell_progress()
            self.collection.every_second()
            if self._health.serving or self._store_away:
                self._update_health()

    async def _count_pending(self) -> None:
        """Count the pending rows of all topics, some at a time."""
        self._pending.begin_count()
        topics = [topic for shard in self._shards.values() for topic in shard.topics.values()]
        rows = 0
        for count, topic in enumerate(topics, 1):
            rows += topic.quotas.pending_rows
            if count % TOPICS_A_TURN == 0:
                await asyncio.sleep(0)
        self._pending.end_count(rows)

    def _clock_changed(self) -> None:
        """Check all timers again after the clock stepped: their times may have come, or be later now."""
        self._due_loop.look_again()
        self._deletion_workers.wake()
        for shard in list(self._shards.values()):
            collections.deque(shard.every_second(), maxlen=0)

    def _resumed(self) -> None:
        """Request confirmation of the epochs, since a successor may be serving; nothing is delivered before it."""
        asked_s = self._environment.clock.elapsed_s()
        for shard in self._shards.values():
            confirming = asyncio.ensure_future(shard.confirmation.confirm_after(asked_s))
            confirming.add_done_callback(functools.partial(_when_confirmed, shard))

    def _update_health(self) -> None:
        stalled = [shard for shard in self._shards.values() if shard.slots.stalled_s > STALLED_S]
        unconfirmed = [shard for shard in self._shards.values() if not shard.may_hand_out]
        if stalled or unconfirmed:
            shard = (stalled or unconfirmed)[0]
            self._store_away = True
            self._wait_for(f"the store cannot be reached: shard {shard.number} waits for it")
        elif self._shards:
            self._store_away = False
            self._set_serving()

    def _tell_progress(self) -> None:
        shards = self._shards.values()
        self._environment.metrics.set_topics(
            loaded=sum(len(shard.topics) for shard in shards),
            loading=self.topics_loading,
            damaged=self.topics_damaged,
        )
        self._environment.metrics.set_shards_damaged(len(self._damaged))
        if self._owned is not None:
            living = self._owned.living
            self._environment.metrics.set_log(living.kept, uncertain_s=living.sender.stalled_s)
        self._deletion_workers.report_metrics()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a task of the engine has ended: %r", error, exc_info=error)
        failed = ProcessFailed(f"a task of the engine has ended: {error!r}")
        failed.__cause__ = error
        shards, self._shards = self._shards, {}
        self._set_health(Health(serving=False, reason=str(failed)))
        for shard in shards.values():
            self._close(shard, Unavailable(str(failed)))
        self._lost.set()
        if not self.failed.done():
            self.failed.set_exception(failed)

    # ---- health

    @property
    def health(self) -> Health:
        return self._health

    def on_health_change(self, callback: Callable[[Health], None]) -> None:
        """Call `callback` on the loop at each change."""
        self._health_callbacks.append(callback)

    def _wait_for(self, reason: str, *, stands_by: bool = False) -> None:
        self._set_health(Health(serving=False, reason=reason, stands_by=stands_by))

    def _tell_which(self) -> None:
        """Report the shards that are served, unless the last was lost meanwhile."""
        if self._shards and not self._store_away:
            self._set_serving()

    def _set_serving(self) -> None:
        damaged = "".join(f"; shard {number} is damaged: {self._damaged[number]}" for number in sorted(self._damaged))
        away = "".join(
            f"; shard {number} is not served here: {self._away[number].reason}" for number in sorted(self._away)
        )
        topics = f"; {self.topics_damaged} topics are damaged" if self.topics_damaged else ""
        self._set_health(Health(serving=True, reason=f"serving{damaged}{away}{topics}"))

    def _set_health(self, health: Health) -> None:
        if health == self._health or (self._draining and health.reason != "stopping"):
            return
        # Not compared from the bracket on, since that changes every second
        if health.reason.split(" (")[0] != self._health.reason.split(" (")[0]:
            log.info("health serving=%s reason=%r", health.serving, health.reason)
        self._health = health
        self._environment.metrics.set_serving(health.serving)
        for callback in self._health_callbacks:
            callback(health)

    # ---- used by the calls

    @property
    def shards(self) -> Mapping[int, ServedShard]:
        return self._shards

    @property
    def topics_loading(self) -> int:
        """The number of known topics that are not loaded yet, damaged ones excluded."""
        return sum(shard.loading.left for shard in self._shards.values())

    @property
    def topics_damaged(self) -> int:
        return sum(len(shard.loading.damaged) for shard in self._shards.values())

    @property
    def loaded(self) -> bool:
        """True if every topic of the served shards is loaded or damaged."""
        return all(shard.loading.ended.is_set() for shard in self._shards.values())

    def check_serving(self) -> None:
        """Raise the caller's error while no shard is served here."""
        if self._draining:
            raise _stopped()
        if self._shards and (self._health.serving or self._store_away):
            return
        if self._candidate.owner_address and not self._shards:
            raise NotOwner(f"this daemon stands by: {self._health.reason}", owner_address=self._candidate.owner_address)
        soon = self._candidate.is_taking_over or self._health.reason == STARTING
        raise Unavailable(
            f"this daemon does not serve yet: {self._health.reason}",
            retry_after_ms=TAKING_OVER_RETRY_MS if soon else None,
        )

    def shard_of(self, topic: str) -> ServedShard:
        """Return the shard of a topic.

        Raises as `check_serving` does, Corruption if the shard is damaged, and NotOwner or Unavailable if it is not
        among those served here.
        """
        self.check_serving()
        number = names.shard_of(topic, self._shards_total)
        damage = self._damaged.get(number)
        if damage is not None:
            raise Corruption(
                f"shard {number}, which topic {topic} belongs to, cannot be served: {damage}", of_topic=True
            )
        shard = self._shards.get(number)
        if shard is not None:
            return shard
        away = self._away.get(number)
        reason = "it is being taken over" if away is None else away.reason
        if away is not None and away.owner_address:
            raise NotOwner(f"shard {number} is not served here: {reason}", owner_address=away.owner_address)
        raise Unavailable(f"shard {number} is not served now: {reason}", retry_after_ms=AWAY_RETRY_MS)

    def location_of(self, topic: str) -> TopicLocation:
        """Return the owner of the topic's shard. Raises Unavailable while it is unknown."""
        number = names.shard_of(topic, self._shards_total) if self._shards_total else 0
        shard = self._shards.get(number)
        if shard is not None:
            config = self._environment.config
            return TopicLocation(number, config.daemon.address or "", config.daemon_id, shard.epoch, served_here=True)
        recorded = self._candidate.recorded(number)
        if recorded is None or recorded.owner == self._environment.config.daemon_id:
            raise Unavailable(f"the owner of shard {number} is not known yet: {self._health.reason}")
        return TopicLocation(number, recorded.address, recorded.owner, recorded.epoch, served_here=False)


def _when_confirmed(shard: ServedShard, confirming: asyncio.Future[None]) -> None:
    # The shard's own tasks report that it is lost.
    if not confirming.cancelled() and confirming.exception() is None:
        collections.deque(shard.every_second(), maxlen=0)


def _stopped() -> Unavailable:
    return Unavailable("the daemon is stopping; try again")
