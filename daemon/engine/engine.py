"""The daemon's engine: every shard that it owns, or what it waits for to own them.

Owns: standing by, serving, and standing by again when the shards are lost; health.
Does not own: the calls of the services (`requests`), decisions (`daemon.core`), durability, the wire, and how it is put
together (`daemon.main`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from daemon.core.segments import SegmentCache
from daemon.durability import backoff, heartbeat
from daemon.engine.calls import Health
from daemon.engine.due_loop import DueLoop
from daemon.engine.environment import Environment
from daemon.engine.ownership import Candidate, Claimed
from daemon.engine.requests import Requests
from daemon.engine.shard import ServedShard
from daemon.errors import (
    Corruption,
    InvariantViolated,
    NotOwner,
    TarryError,
    Unavailable,
)
from storage_backends import root_format, topic_manifest
from storage_backends.commit import ManifestLog
from storage_backends.formats import names
from storage_backends.formats.manifest import RootFormat, TopicManifest
from storage_backends.object_store import Damaged, StoreError

log = logging.getLogger(__name__)

LOOK_AFTER_S = 1.0
# A shard that cannot be given up in order within this time is left as it is: the journal has everything.
RELEASE_S = 20.0
# Whether a damaged shard was mended is looked at this often.
DAMAGED_LOOK_S = 30.0
# A slot that is uncertain for longer makes health say NOT_SERVING.
STALLED_S = 2.0


class Engine:
    """One for each process. Made on the event loop that runs it."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._shards_total = 0
        self._due_loop = DueLoop(environment.clock, tick_ms=environment.config.delivery.tick_ms)
        self._shards: dict[int, ServedShard] = {}
        self._candidate = Candidate(environment, waiting=self._wait_for)
        self._health = Health(serving=False, reason="starting")
        self._health_callbacks: list[Callable[[Health], None]] = []
        self._lost = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._store_away = False
        self.requests = Requests(self, environment)
        # Ends with the error of a task that must not end: the process cannot go on.
        self.failed: asyncio.Future[None] = self._loop.create_future()

    # ---- life

    async def start(self) -> None:
        """Reads or creates the root and begins to stand by and to serve; `health` tells how far it is.

        Raises Corruption when the root cannot be served by this version.
        """
        environment = self._environment
        self._shards_total = (await self._root_format()).shards
        self._candidate.look_at(self._shards_total)
        beat = heartbeat.beat(
            environment.store,
            daemon_id=environment.config.daemon_id,
            address=environment.config.daemon.address or "",
            shards=lambda: tuple(sorted(self._shards)),
            instance=environment.new_id(),
            run=environment.run,
            sleep=environment.sleep,
            interval_s=environment.config.ownership.heartbeat_interval_s,
        )
        for work in (self._serve_for_ever(), self._due_loop.run(), self._look_after(), beat):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)

    async def _root_format(self) -> RootFormat:
        environment = self._environment
        for delay_s in backoff.delays_s(environment.jitter):
            try:
                return await environment.run(
                    lambda: root_format.read_or_create(
                        environment.store,
                        shards=environment.config.daemon.shards,
                        root_id=environment.new_id(),
                        created_ms=environment.clock.now_ms(),
                    )
                )
            except Damaged as error:
                raise Corruption(f"the root cannot be served: {error}") from error
            except StoreError as error:
                self._wait_for(f"the store cannot be reached: {error}")
                await environment.sleep(delay_s)
        raise InvariantViolated("the delays ended")

    async def stop(self) -> None:
        """Makes durable what is staged, seals, writes checkpoints and gives the shards up."""
        self._stopping = True
        self._set_health(Health(serving=False, reason="stopping"))
        for task in self._tasks:
            task.cancel()
        shards = list(self._shards.values())
        releases = (asyncio.wait_for(shard.release(), RELEASE_S) for shard in shards)
        results = await asyncio.gather(*releases, return_exceptions=True)
        stopped = Unavailable("the daemon is stopping; try again")
        for shard, result in zip(shards, results, strict=True):
            if isinstance(result, BaseException):
                why = f"it took longer than {RELEASE_S:.0f} s" if isinstance(result, TimeoutError) else result
                log.error("shard %d could not be given up in order, what is durable stays: %s", shard.number, why)
            shard.close(stopped)
        self._shards = {}
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve_for_ever(self) -> None:
        while True:
            try:
                claimed = await self._candidate.become_owner()
            except Corruption as error:
                log.error("the shards cannot be served: %s", error)
                self._wait_for(f"a shard cannot be served: {error}")
                await self._environment.sleep(DAMAGED_LOOK_S)
                continue
            await self._serve(claimed)
            await self._lost.wait()
            await self._candidate.give_up({claim.shard: claim.epoch for claim in claimed.claims})
            await self._environment.sleep(1.0)

    async def _serve(self, claimed: Claimed) -> None:
        self._lost.clear()
        self._wait_for("recovering the topics")
        # Keys of segments that an earlier ownership loaded mean nothing now.
        cache = SegmentCache(self._environment.config.delivery.segment_memory_bytes)
        clock = self._environment.clock
        started_s = clock.elapsed_s()
        shards = [
            ServedShard(
                claim,
                self._candidate.shard_logs[claim.shard],
                self._topic_log,
                self._due_loop,
                cache,
                self._environment,
                acknowledgements_from_s=claimed.acknowledgements_from_s,
                lost=self._shard_lost,
            )
            for claim in claimed.claims
        ]
        self._shards = {shard.number: shard for shard in shards}
        recovered = await asyncio.gather(*(shard.recover() for shard in shards), return_exceptions=True)
        for result in recovered:
            if isinstance(result, BaseException):
                self._drop_all(result)
                return
        if self._shards.get(0) is not shards[0]:
            # Lost while it was being recovered.
            return
        rows = sum(result for result in recovered if isinstance(result, int))
        seconds = clock.elapsed_s() - started_s
        self._environment.metrics.recovered(seconds=seconds, rows_replayed=rows)
        for shard in shards:
            self._environment.metrics.set_epoch(shard.number, shard.epoch)
            shard.serve()
        topics = sum(len(shard.topics) for shard in shards)
        log.info("serving shards=%d topics=%d rows_replayed=%d seconds=%.3f", len(shards), topics, rows, seconds)
        self._store_away = False
        self._set_health(Health(serving=True, reason="serving"))

    def _topic_log(self, shard: int, topic_id: str) -> ManifestLog[TopicManifest]:
        environment = self._environment
        return topic_manifest.topic_log(
            environment.store,
            shard,
            topic_id,
            monotonic=environment.clock.elapsed_s,
            sleep=environment.blocking_sleep,
            jitter=environment.jitter,
            new_id=environment.new_id,
            observer=environment.commit_observer,
        )

    def _shard_lost(self, number: int, error: BaseException) -> None:
        if not self._stopping and number in self._shards:
            log.error("shard %d is lost: %s", number, error)
            self._drop_all(error)

    def _drop_all(self, error: BaseException) -> None:
        """One daemon owns all shards: when one is lost, all are given up, and this daemon stands by."""
        shards, self._shards = self._shards, {}
        self._store_away = False
        self._set_health(Health(serving=False, reason=f"the shards were lost: {error}"))
        if isinstance(error, NotOwner):
            self._candidate.succeeded_by(error.owner_address)
            answer: TarryError = NotOwner(str(error), owner_address=error.owner_address)
        elif isinstance(error, TarryError):
            answer = error
        else:
            answer = Unavailable(f"the shard is served by this daemon no longer: {error}")
        for shard in shards.values():
            self._environment.metrics.set_epoch(shard.number, 0)
            shard.close(answer)
        self._lost.set()

    async def _look_after(self) -> None:
        while True:
            await self._environment.sleep(LOOK_AFTER_S)
            for shard in self._shards.values():
                shard.look_after()
            if self._health.serving or self._store_away:
                self._look_after_health()

    def _look_after_health(self) -> None:
        stalled = [shard for shard in self._shards.values() if shard.commits.stalled_s > STALLED_S]
        unconfirmed = [shard for shard in self._shards.values() if not shard.may_hand_out]
        if stalled or unconfirmed:
            shard = (stalled or unconfirmed)[0]
            self._store_away = True
            self._wait_for(f"the store cannot be reached: shard {shard.number} waits for it")
        elif self._shards:
            self._store_away = False
            self._set_health(Health(serving=True, reason="serving"))

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.critical("a task of the engine has ended: %r", error, exc_info=error)
        self._drop_all(error)
        if not self.failed.done():
            self.failed.set_exception(error)

    # ---- health

    @property
    def health(self) -> Health:
        return self._health

    def on_health_change(self, callback: Callable[[Health], None]) -> None:
        """Calls back on the loop at each change."""
        self._health_callbacks.append(callback)

    def _wait_for(self, reason: str) -> None:
        self._set_health(Health(serving=False, reason=reason))

    def _set_health(self, health: Health) -> None:
        if health == self._health or (self._stopping and health.serving):
            return
        # What follows the bracket changes from second to second.
        if health.reason.split(" (")[0] != self._health.reason.split(" (")[0]:
            log.info("health serving=%s reason=%r", health.serving, health.reason)
        self._health = health
        self._environment.metrics.set_serving(health.serving)
        for callback in self._health_callbacks:
            callback(health)

    # ---- what the calls see

    @property
    def shards(self) -> Mapping[int, ServedShard]:
        return self._shards

    def check_serving(self) -> None:
        """Raises what a caller is told while the shards are not served here."""
        if self._shards and (self._health.serving or self._store_away):
            return
        if self._candidate.owner_address and not self._shards:
            raise NotOwner(f"this daemon stands by: {self._health.reason}", owner_address=self._candidate.owner_address)
        raise Unavailable(f"this daemon does not serve yet: {self._health.reason}")

    def shard_of(self, topic: str) -> ServedShard:
        """The shard of a topic. Raises as `check_serving` does."""
        self.check_serving()
        return self._shards[names.shard_of(topic, self._shards_total)]
