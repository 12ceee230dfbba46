"""Serves one shard that this daemon owns: finds and creates its topics, and applies durable sections to them.

When the shard is lost, this module finds its new owner. `topic_loading` loads topics, `topic_changes` changes them as a
whole, `daemon.topic` serves them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.segments import SegmentCache
from daemon.core.quotas import PendingRows
from daemon.errors import Corruption, NotOwner, OutcomeUnknown, Unavailable
from daemon.group_commit.confirmation import Confirmation
from daemon.group_commit.daemon_log import DaemonLog
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.shard_slots import STALL_ANSWER_S, ShardSlots, TopicSlots
from daemon.group_commit.slot_sender import LandedSection
from daemon.ledger_deletion.shard_deletions import ShardDeletions
from daemon.runtime import backoff
from daemon.runtime.due_loop import DueLoop
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import TopicFailed
from daemon.shard import range_operations
from daemon.shard.checkpointing import Checkpointing, ShardState
from daemon.shard.range_operations import KnownTip, RequireOfShard, Settle
from daemon.shard.recovery import ShardClaim
from daemon.shard.tail_bound import TailBound
from daemon.shard.topic_changes import TopicChanges
from daemon.shard.topic_loading import LoadedTopic, TopicLoading
from daemon.topic import bucket_lifecycle, topic_manifests
from daemon.topic.served_topic import ServedTopic
from daemon.topic.topic_manifests import TopicManifests, commit_until_certain
from daemon.topic.topic_settings import TopicSettings
from storage_backends import checkpoints, commit, topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.slot_format import AddRecord, DeletionRecord, Record
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# Nothing is delivered this long after the last confirmation of the epoch (seconds; R8): a successor may be serving.
HAND_OUT_UNCONFIRMED_S = 15.0
# Deadline of one attempt to record that no former owner is left (seconds)
SETTLE_S = 10.0
# Time for which the store is asked for the new owner of a lost shard (seconds); after that callers get no owner's name
SUCCESSOR_LOOK_S = 2.0
# Topics handled in one step
TOPICS_A_STEP = 200


class ServedShard:
    """An owned shard. Calls `lost` once with the error that ended it. `close` ends everything in it.

    `check_topics` raises QuotaExceeded if no further topic may be created.

    Until the claim is settled this owner is not alone. A former owner that was paused may wake and deliver rows from
    its memory, until it has gone for 15 s without a confirmation. Meanwhile acknowledgements and requests that drop
    rows are not answered, cancellations and reschedules are not decided, and no row is delivered by key.
    """

    def __init__(
        self,
        claim: ShardClaim,
        shard_log: commit.ManifestLog[manifest.ShardManifest],
        daemon_log: DaemonLog,
        due_loop: DueLoop,
        cache: SegmentCache,
        pending: PendingRows,
        tail_bound: TailBound,
        environment: Environment,
        *,
        check_topics: Callable[[], None],
        lost: Callable[[int, BaseException], None],
        deletions_changed: Callable[[ShardDeletions], None],
    ) -> None:
        self.number = claim.shard
        self.epoch = claim.epoch
        self.topics: dict[str, ServedTopic] = {}
        self.applied_slot = claim.last_slot
        self._shard_log = shard_log
        self.pending = pending
        self._due_loop = due_loop
        self._cache = cache
        self._environment = environment
        unsettled_s = 0.0 if claim.settled else HAND_OUT_UNCONFIRMED_S
        self._alone_from_s = environment.clock.elapsed_s() + unsettled_s
        self._alone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # No caller may be waiting when it fails.
        self._alone.add_done_callback(lambda done: done.cancelled() or done.exception())
        if claim.settled:
            self._alone.set_result(None)
        self.is_alone = claim.settled
        self._check_topics = check_topics
        self._lost = lost
        self._by_id: dict[str, ServedTopic] = {}
        self._releasing = False
        self._losing: asyncio.Task[BaseException] | None = None
        self._births: dict[str, asyncio.Task[ServedTopic]] = {}
        # Failed topic id -> reload task; no checkpoint is written meanwhile
        self.reloading: dict[str, asyncio.Task[None]] = {}
        self._loaded_once = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.tip = KnownTip(claim.tip)
        self._log = daemon_log
        self.confirmation: Confirmation = daemon_log.confirmation
        self.loading = TopicLoading(
            shard=claim.shard,
            epoch=claim.epoch,
            last_slot=claim.last_slot,
            newest_slot=lambda: self.applied_slot,
            tails=checkpoints.tails_of(claim.checkpoint, ((each.slot, each.records) for each in claim.sections)),
            known={} if claim.checkpoint is None else claim.checkpoint.known,
            environment=environment,
            new_topic=self._core_topic,
            loaded=self._loaded,
            is_served=self._by_id.__contains__,
            lost=self.lose,
        )
        self.changes = TopicChanges(self, environment)
        self.slots = ShardSlots(
            claim.shard,
            daemon_log.sender,
            self.confirmation,
            clock=environment.clock.elapsed_s,
            slot_bytes_max=environment.config.journal.slot_bytes_max,
            applied=self._apply,
            failed=self.lose,
        )
        self.deletions = ShardDeletions(self, claim.deletions, environment, changed=deletions_changed)
        self.checkpoints = Checkpointing(self, claim, self.tip, shard_log, daemon_log, tail_bound, environment)

    # ---- start and end

    def serve(self) -> None:
        """Start loading the topics, and record when no former owner is left."""
        for work in (self._settle(), self._note_loaded()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_done)
            self._tasks.append(task)
        self.loading.start()

    async def loaded(self) -> None:
        """Wait until every topic has been loaded or refused, or the shard is no longer served."""
        await self._loaded_once.wait()

    async def _note_loaded(self) -> None:
        await self.loading.ended.wait()
        self.checkpoints.topics_loaded()
        self._loaded_once.set()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lose(error)

    def lose(self, error: BaseException) -> None:
        """Give up a shard that is no longer owned, or cannot be served."""
        if self._losing is None:
            self._losing = asyncio.ensure_future(self._lose(error))

    async def superseded(self, refused: commit.Refused) -> NotOwner:
        """Lose the shard, since one of its operations was refused; return the error for the caller."""
        self.lose(refused)
        error = refused if self._losing is None else await asyncio.shield(self._losing)
        return error if isinstance(error, NotOwner) else NotOwner(f"shard {self.number} has another owner: {error}")

    async def _lose(self, error: BaseException) -> BaseException:
        if isinstance(error, commit.Refused) or (isinstance(error, NotOwner) and not error.owner_address):
            error = await self._successor() or error
        self._lost(self.number, error)
        return error

    async def _successor(self) -> NotOwner | None:
        """Return the shard's new owner, if the store answers at once."""
        look = self._environment.pools.journal.run(
            lambda: range_operations.existing_tip(self._shard_log, self.number, self.tip.newest)
        )
        try:
            tip = await asyncio.wait_for(look, SUCCESSOR_LOOK_S)
        except (StoreError, Corruption, TimeoutError) as error:
            log.warning("shard %d: cannot tell who owns it now: %s", self.number, error)
            return None
        return None if tip.manifest.epoch == self.epoch else range_operations.superseded_by(tip, epoch=self.epoch)

    def begin_drain(self) -> None:
        """Stop delivering and loading."""
        self._releasing = True
        self.loading.close()
        self.deletions.begin_drain()
        for topic in self.topics.values():
            topic.buckets.merging.close()

    async def drain(self) -> None:
        """End cleanly: staged decisions become durable and are answered, streams and attempts to delete ledgers end.

        The state goes into a checkpoint. The shard has no owner once the log is closed. May be repeated after an error
        of the store.
        """
        self.begin_drain()
        await self.slots.flush()
        for topic in self.topics.values():
            topic.end_streams(Unavailable("the daemon is stopping; try again"))
        await self.deletions.attempts_ended()
        await self._keep()

    async def _keep(self) -> None:
        """Write everything that is in memory into buckets and a checkpoint.

        Rows of mutable buckets go into the checkpoint: to seal them would take some requests for each of possibly
        thousands of topics.
        """
        await self.slots.flush()
        # Work in flight ends; no waiting seal begins.
        await asyncio.gather(*(topic.buckets.halt() for topic in self.topics.values()))
        await self.checkpoints.settled()
        while self.reloading:
            await asyncio.wait(self.reloading.values())
        self._check_not_lost()
        await self.checkpoints.write_last()
        self._check_not_lost()

    def _check_not_lost(self) -> None:
        """Raise Unavailable if the shard was lost, since its memory is no longer reliable."""
        if self._losing is not None:
            raise Unavailable(f"shard {self.number} was lost")

    def close(self, error: Exception) -> None:
        """Drop all state; waiting callers get the error."""
        self.loading.close()
        if not self._alone.done():
            self._alone.set_exception(error)
        self.slots.end(error)
        self.checkpoints.close()
        self.deletions.close()
        for topic in self.topics.values():
            topic.close(error)
        self._loaded_once.set()
        for task in (*self._tasks, *self._births.values(), *self.reloading.values()):
            task.cancel()

    # ---- used by topics

    @property
    def may_hand_out(self) -> bool:
        return not self._releasing and self.confirmation.fresh_within(HAND_OUT_UNCONFIRMED_S)

    @property
    def is_confirmed(self) -> bool:
        """True if no successor is active yet; any thread may read it."""
        return self.confirmation.fresh_within(HAND_OUT_UNCONFIRMED_S)

    @property
    def alone_in_s(self) -> float:
        """The time until no former owner is active any longer (seconds); 0.0 if that is so."""
        return 0.0 if self._alone.done() else max(0.0, self._alone_from_s - self._environment.clock.elapsed_s())

    async def alone(self) -> None:
        """Wait until no former owner is active any longer. Raises the error that ended the shard before."""
        await asyncio.shield(self._alone)

    async def _settle(self) -> None:
        """Record that no former owner is left, so that the next owner need not wait for any of them."""
        if self._alone.done():
            return
        while (wait_s := self.alone_in_s) > 0:
            await self._environment.sleep(wait_s)
        self._alone.set_result(None)
        self.is_alone = True
        await self._commit(Settle(epoch=self.epoch), "that it is settled")

    async def _commit(self, operation: commit.Operation[manifest.ShardManifest], what: str) -> None:
        """Commit to the shard's manifest, however long the store is unreachable. Raises commit.Refused."""
        committed = await backoff.until_answered(
            lambda: self._environment.pools.journal.run(
                lambda: topic_manifests.commit_once(
                    self._environment, self._shard_log, operation, warm=self.tip.newest, deadline_s=SETTLE_S
                )
            ),
            failed=lambda error: log.warning(
                "shard %d: %s cannot be noted, trying again: %s", self.number, what, error
            ),
            waiting=self._environment,
            again_after=commit.UNCERTAIN,
        )
        self.tip.saw(committed)
        self._log.manifest_committed(committed.manifest)

    async def require(self, requirement: str) -> None:
        """Commit what readers of the shard must know, if that is not done. Raises commit.Refused."""
        if requirement not in self.tip.newest.manifest.requires:
            operation = RequireOfShard(requirement=requirement, epoch=self.epoch)
            await self._commit(operation, f"that it requires {requirement}")

    # ---- slots

    def _apply(
        self, landed: LandedSection, records: Sequence[Record], deletion_records: Sequence[DeletionRecord]
    ) -> None:
        """Turn the decisions of a section that is certain into state, topic by topic."""
        slot = landed.slot
        self.checkpoints.written(landed.size_bytes)
        elapsed_ms = self._environment.elapsed_ms()
        for record in records:
            if isinstance(record, AddRecord) and (adding := self._by_id.get(record.topic_id)) is not None:
                with adding.contained():
                    adding.buckets.before_rows(int(record.rows.ledger_id.max()), self.applied_slot)
        decided: dict[str, list[Record]] = {}
        for record in records:
            decided.setdefault(record.topic_id, []).append(record)
        # Topic -> whether anything but acknowledgements was applied to it
        touched: dict[ServedTopic, bool] = {}
        for topic_id, of_topic in decided.items():
            topic = self._by_id.get(topic_id)
            if topic is None:
                # The topic was deleted since the records were staged, and drops them, as replay does; or it has failed,
                # and is loaded again from this slot, too.
                continue
            try:
                touched[topic] = topic.core.apply_all(of_topic, slot, elapsed_ms=elapsed_ms)
            except Exception as error:  # noqa: BLE001 - it is reported with the topic
                topic.failed(error)
        self.deletions.apply(deletion_records)
        self.applied_slot = slot
        for topic, has_more_rows in touched.items():
            topic.last_changed_slot = slot
            if self._by_id.get(topic.core.topic_id) is not topic:
                continue
            try:
                if has_more_rows:
                    topic.buckets.after_slot(slot)
                    topic.rows_added()
                else:
                    topic.buckets.rows_left(slot)
                    topic.rows_left()
            except Exception as error:  # noqa: BLE001 - it is reported with the topic
                topic.failed(error)
        self.checkpoints.consider()

    def every_second(self) -> Iterator[None]:
        """Do the work that depends on time alone, for some topics in each step.

        Other work may run between two steps, and may end the shard: then no other step may follow.
        """
        self.slots.answer_stalled()
        self.checkpoints.every_second()
        topics = list(self.topics.items())
        for first in range(0, len(topics), TOPICS_A_STEP):
            for name, topic in topics[first : first + TOPICS_A_STEP]:
                if self._releasing or self.topics.get(name) is not topic:
                    continue
                with topic.contained():
                    topic.buckets.every_second(self.applied_slot)
                    topic.every_second()
            yield

    def may_load(self, topic_id: str) -> bool:
        """Return whether the topic is not served yet but may be later."""
        return topic_id not in self._by_id and self.loading.may_come(topic_id)

    def look_for_merges(self, topic_id: str) -> None:
        """Check whether another process has merged buckets of the topic, if it is served."""
        topic = self._by_id.get(topic_id)
        if topic is not None:
            topic.buckets.look_for_merges()

    def state(self) -> ShardState:
        """Return the content of a checkpoint of now.

        Raises TopicFailed if a topic cannot be cut; that topic is reloaded.
        """
        cuts = self._cuts()
        known = {topic_id: topic.manifests.number for topic_id, topic in self._by_id.items()}
        return ShardState(cuts, self.loading.carried(), self.deletions.cut(), {**self.loading.known, **known})

    def _cuts(self) -> list[bucket_lifecycle.TopicCut]:
        cuts = []
        for name, topic in list(self.topics.items()):
            if not topic.is_in_manifest:
                try:
                    cuts.append(topic.cut())
                except Exception as error:
                    topic.failed(error)
                    raise TopicFailed(name) from error
        return cuts

    # ---- topics

    def _core_topic(self, stored: manifest.TopicManifest) -> TopicState:
        return TopicState(
            stored.topic,
            stored.topic_id,
            stored.incarnation,
            stored.subscriptions,
            now_ms=self._environment.clock.now_ms(),
            cache=self._cache,
            ready_rows_max=self._environment.config.delivery.ready_rows_max,
            backlog_limits=self._environment.backlog_limits,
        )

    def _loaded(self, loaded: LoadedTopic) -> None:
        served = self._serve_topic(loaded.core, loaded.manifests, loaded.tip)
        if loaded.changed:
            # No replayed decision is above it.
            served.last_changed_slot = self.applied_slot
        with served.contained():
            served.changed()

    def _serve_topic(
        self,
        topic: TopicState,
        topic_log: commit.ManifestLog[manifest.TopicManifest],
        tip: commit.Tip[manifest.TopicManifest],
    ) -> ServedTopic:
        served = ServedTopic(
            topic,
            self,
            TopicSlots(self.slots),
            TopicManifests(topic_log, tip, self._environment, shard=self.number, epoch=self.epoch),
            self._due_loop,
            self._environment,
            policy=tip.manifest.policy,
            delay_levels=tip.manifest.delay_levels,
        )
        self.topics[topic.name] = self._by_id[topic.topic_id] = served
        return served

    async def topic(self, name: str) -> ServedTopic | None:
        """Return the topic, loaded if necessary, or None if it does not exist.

        Raises Corruption if it is damaged, Unavailable if it cannot be loaded at once.
        """
        topic = self.topics.get(name)
        if topic is not None:
            return topic
        topic_id = names.topic_id(name)
        while (topic := self.topics.get(name)) is None:
            await self.loading.settled(topic_id, name)
            if name not in self.topics and not self.loading.knows(topic_id):
                return None
        return topic

    @property
    def topics_known(self) -> int:
        """The number of topics that exist or are being created, loaded or not.

        While a shard is taken over, deleted topics count until they are read.
        """
        coming = sum(name not in self.topics for name in self._births)
        return len(self.topics) + coming + self.loading.unserved

    async def settings_of(self, topic: str) -> TopicSettings | None:
        """Return the settings in force for a topic, or None if it does not exist. Raises as `topic`."""
        served = await self.topic(topic)
        return None if served is None else served.settings

    def effects_on(self, name: str) -> RequestEffects:
        """Return the effects of a request on a topic, which fails with an invariant that is violated."""
        return RequestEffects(functools.partial(self.begin_reload, name))

    async def topic_to_write(self, name: str, effects: RequestEffects) -> ServedTopic:
        """Return the topic, created if it does not exist: its first manifest is committed before any slot names it.

        Raises QuotaExceeded if it would be one too many.
        """
        topic = await self.topic(name)
        if topic is not None:
            return topic
        self.slots.check_accepting()
        birth = self._births.get(name)
        if birth is None:
            self._check_topics()
            birth = self._births[name] = asyncio.ensure_future(self._create_topic(name))
            birth.add_done_callback(functools.partial(self._birth_ended, name))
        try:
            with effects.committing():
                return await asyncio.wait_for(asyncio.shield(birth), STALL_ANSWER_S)
        except commit.Refused as refused:
            raise await self.superseded(refused) from refused
        except TimeoutError:
            raise OutcomeUnknown(f"topic {name} is new, and the store has not answered; a retry is safe") from None
        except asyncio.CancelledError:
            if birth.cancelled():
                raise Unavailable("this daemon no longer serves the shard; try again") from None
            raise

    def _birth_ended(self, name: str, birth: asyncio.Task[ServedTopic]) -> None:
        del self._births[name]
        if not birth.cancelled() and (error := birth.exception()) is not None:
            # The caller may have left.
            log.info("shard %d: topic %s could not be born: %r", self.number, name, error)

    def forget_topic(self, name: str, error: Exception) -> None:
        """Remove a deleted topic; callers that wait for it get the error."""
        topic = self.topics.pop(name)
        del self._by_id[topic.core.topic_id]
        self.loading.deleted(topic.core.topic_id)
        topic.close(error)

    # ---- topics that fail

    def topic_failed(self, topic: ServedTopic, error: BaseException) -> None:
        """Unload a topic whose memory is not reliable or whose manifest is damaged, and load it again.

        If the topic's epoch is over, the shard has another owner and is lost.
        """
        name, topic_id = topic.core.name, topic.core.topic_id
        if self.topics.get(name) is not topic:
            return
        if isinstance(error, commit.Refused | NotOwner):
            self.lose(error)
            return
        log.error("shard %d: topic %s has failed and is loaded again: %r", self.number, name, error, exc_info=error)
        self._environment.metrics.topic_failed()
        del self.topics[name], self._by_id[topic_id]
        topic.buckets.begin_close()
        self.loading.begin_reload(topic_id)
        self.reloading[topic_id] = asyncio.ensure_future(self._reload(topic))
        self.reloading[topic_id].add_done_callback(self._task_done)
        try:
            topic.abandon(TopicFailed(name))
        except Exception:
            log.exception("topic %s: what failed does not end in order either", name)

    def begin_reload(self, topic: str, error: BaseException) -> None:
        """Fail a topic that is no longer reliable."""
        if (owned := self.topics.get(topic)) is not None:
            owned.failed(error)

    async def _reload(self, topic: ServedTopic) -> None:
        """Read the topic again once its work in flight has ended, so that none of it lands later."""
        topic_id = topic.core.topic_id
        try:
            await topic.buckets.halt()
            await topic.manifests.settled()
        finally:
            topic.buckets.close()
            topic.manifests.close()
        tail, slot = await self._tail_of(topic_id)
        del self.reloading[topic_id]
        self.loading.load_again(topic_id, tail, slot)

    async def _tail_of(self, topic_id: str) -> tuple[checkpoints.TopicTail, ShardSlot]:
        return await backoff.until_answered(
            lambda: self.checkpoints.tail_of(topic_id),
            failed=lambda error: log.warning(
                "shard %d: topic %s cannot be read again yet: %s", self.number, topic_id, error
            ),
            waiting=self._environment,
        )

    async def _create_topic(self, name: str) -> ServedTopic:
        topic_id = names.topic_id(name)
        topic_log = topic_manifests.topic_log(self._environment, self.number, topic_id)
        create = topic_manifest.Create(topic=name, topic_id=topic_id, epoch=self.epoch, applied=self.applied_slot)
        try:
            tip = await commit_until_certain(self._environment, topic_log, create, warm=None)
        except commit.Refused:
            # The former owner's last commit, which landed after this owner had listed the topics, or the successor's
            await self.loading.found(topic_id)
            if name not in self.topics:
                raise
            return self.topics[name]
        # A successor may have listed the topics before this commit. Then it will find the topic, or this owner learns
        # of it.
        await self.slots.confirmed()
        if name in self.topics:
            # It was found by its first manifest before the commit returned.
            return self.topics[name]
        return self._serve_topic(self._core_topic(tip.manifest), topic_log, tip)
