"""One shard that this daemon owns: its journal, its topics, its checkpoints.

Owns: applying slots to topics, the birth of topics, checkpoints and truncation.
Does not own: taking the shard over (`ownership`), writing slots (`group_commit`), a topic's requests (`served_topic`),
its buckets (`bucket_life`) and its subscriptions' coming and going (`subscription_changes`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

from daemon.core.segments import SegmentCache
from daemon.core.topic import Topic
from daemon.durability import checkpoint, checkpoint_store, journal_tail, recovery, shard_manifest
from daemon.durability.epoch_confirmation import EpochConfirmation
from daemon.durability.journal import JournalWriter, WrittenSlot
from daemon.durability.journal_truncation import JournalTruncation
from daemon.durability.takeover import ShardClaim
from daemon.engine.bucket_life import TOMBSTONE_GRACE_MS, BucketLife
from daemon.engine.due_loop import DueLoop
from daemon.engine.environment import Environment
from daemon.engine.group_commit import STALL_ANSWER_S, GroupCommit
from daemon.engine.manifests import TopicCommits, commit_until_certain
from daemon.engine.served_topic import ServedTopic
from daemon.engine.subscription_changes import SubscriptionChanges
from daemon.errors import Corruption, NotOwner, OutcomeUnknown, Unavailable
from storage_backends import commit, topic_manifest
from storage_backends.formats import checkpoint as checkpoint_format
from storage_backends.formats import manifest, names
from storage_backends.formats.journal import AddRecord, Record, SlotHeader
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

# Without a confirmation of the epoch for so long nothing is handed out (R8): a successor may be serving.
HAND_OUT_UNCONFIRMED_S = 15.0
# Topics that are recovered at the same time.
TOPICS_AT_ONCE = 8


TailSlot = tuple[SlotHeader, tuple[Record, ...]]


class ServedShard:
    """An owned shard. `lost` is called once with the error that ended it. `close` ends everything in it.

    `acknowledgements_from_s`: after an unclean takeover no acknowledgement is answered before that time: until then the
    former owner may hand out what it acknowledged.
    """

    def __init__(
        self,
        claim: ShardClaim,
        shard_log: commit.ManifestLog[manifest.ShardManifest],
        topic_logs: Callable[[int, str], commit.ManifestLog[manifest.TopicManifest]],
        due_loop: DueLoop,
        cache: SegmentCache,
        environment: Environment,
        *,
        acknowledgements_from_s: float,
        lost: Callable[[int, BaseException], None],
    ) -> None:
        self.number = claim.shard
        self.epoch = claim.epoch
        self.topics: dict[str, ServedTopic] = {}
        self.lives: dict[str, BucketLife] = {}
        self.topic_commits: dict[str, TopicCommits] = {}
        self.applied_slot = claim.fence_slot
        self._claim = claim
        self._shard_log = shard_log
        self._topic_logs = topic_logs
        self._due_loop = due_loop
        self._cache = cache
        self._environment = environment
        self._acknowledgements_from_s = acknowledgements_from_s
        self._lost = lost
        self._by_id: dict[str, ServedTopic] = {}
        # Topics that are damaged. Their slots are kept: no checkpoint moves on while there are any.
        self._refused: dict[str, Corruption] = {}
        self._recovered = False
        self._releasing = False
        self._births: dict[str, asyncio.Task[ServedTopic]] = {}
        self._bytes_since_checkpoint = 0
        self._slots_since_checkpoint = 0
        self._checkpointing: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        run, clock = environment.run, environment.clock.elapsed_s
        self.confirmation = EpochConfirmation(
            shard_log,
            tip=claim.tip,
            confirmed_at_s=claim.confirmed_at_s,
            run=run,
            clock=clock,
            sleep=environment.sleep,
            jitter=environment.jitter,
        )
        self.journal = JournalWriter(
            environment.store,
            shard=claim.shard,
            epoch=claim.epoch,
            next_slot=claim.fence_slot + 1,
            run=run,
            clock=clock,
            sleep=environment.sleep,
            jitter=environment.jitter,
            new_id=environment.new_id,
            written=self._written,
        )
        self.subscriptions = SubscriptionChanges(self, environment)
        self.commits = GroupCommit(self.journal, self.confirmation, environment, self._apply)
        self._truncation = JournalTruncation(
            environment.store,
            shard=claim.shard,
            epoch=claim.epoch,
            fence_slot=claim.fence_slot,
            known_kinds={slot.header.slot: slot.header.kind for slot in claim.slots},
            executor=environment.parts,
        )

    # ---- start and end

    async def recover(self) -> int:
        """Claims and restores every topic of the shard; how many rows were replayed. Then it may be served."""
        topic_ids = await self._environment.run(self._topic_ids)
        tails = _by_topic(self._claim.slots)
        turns = asyncio.Semaphore(TOPICS_AT_ONCE)

        async def recover(topic_id: str) -> int:
            async with turns:
                try:
                    return await self._recover_topic(topic_id, tails.get(topic_id, ()))
                except Corruption as error:
                    log.error("shard %d: topic %s cannot be served: %s", self.number, topic_id, error)
                    self._refused[topic_id] = error
                    return 0

        rows = sum(await asyncio.gather(*map(recover, topic_ids)))
        # Nothing reads the tail and the checkpoint again.
        self._claim = dataclasses.replace(self._claim, checkpoint=None, slots=())
        self._recovered = True
        return rows

    def serve(self) -> None:
        """Starts writing slots and confirming the epoch."""
        for work in (self.commits.run(), self.confirmation.watch()):
            task = asyncio.ensure_future(work)
            task.add_done_callback(self._task_done)
            self._tasks.append(task)
        for topic in self.topics.values():
            topic.changed()

    def _task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.lose(error)

    def lose(self, error: BaseException) -> None:
        """The shard is not ours any more, or cannot be served."""
        self._lost(self.number, error)

    def superseded(self, refused: commit.Refused) -> NotOwner:
        """An operation of ours was refused: the shard is lost. What to answer the caller."""
        self.lose(refused)
        return NotOwner(f"shard {self.number} has another owner: {refused.reason}")

    async def release(self) -> None:
        """Orderly end: what is staged becomes durable, the state goes into a checkpoint, the shard is given up."""
        self._releasing = True
        if self._recovered:
            await self._keep()
        for topic in self.topics.values():
            topic.end_streams(Unavailable("the daemon is stopping; try again"))
        await self._environment.run(
            lambda: commit.commit(
                self._shard_log,
                shard_manifest.Release(epoch=self.epoch),
                writer=self._environment.config.daemon_id,
                created_ms=self._environment.clock.now_ms(),
                warm=self.confirmation.tip,
                deadline_s=10.0,
            )
        )

    async def _keep(self) -> None:
        """Everything that is in memory is in buckets and a checkpoint when this returns."""
        await self.commits.flush()
        for life in self.lives.values():
            life.seal(self.applied_slot)
        for life in self.lives.values():
            await life.settled()
        if self._checkpointing is not None:
            await asyncio.wait([self._checkpointing])
        if not self._refused:
            await self._checkpoint()

    def close(self, error: Exception) -> None:
        """Drops all state; whoever waits gets the error."""
        self.commits.end(error)
        self.journal.close()
        self.confirmation.close()
        for life in self.lives.values():
            life.close()
        for topic in self.topics.values():
            topic.close(error)
        for task in (*self._tasks, *self._births.values(), self._checkpointing):
            if task is not None:
                task.cancel()

    # ---- what topics ask of their shard

    @property
    def may_hand_out(self) -> bool:
        return not self._releasing and self.confirmation.fresh_within(HAND_OUT_UNCONFIRMED_S)

    async def acknowledgements_open(self) -> None:
        wait_s = self._acknowledgements_from_s - self._environment.clock.elapsed_s()
        if wait_s > 0:
            await self._environment.sleep(wait_s)

    # ---- slots

    def _written(self, slot: WrittenSlot) -> None:
        self.confirmation.confirmed(slot.sent_at_s)
        self._environment.metrics.slot_written(size_bytes=slot.size_bytes, seconds=slot.seconds)
        self._bytes_since_checkpoint += slot.size_bytes
        self._slots_since_checkpoint += 1

    def _apply(self, slot: int, records: Sequence[Record]) -> None:
        """A slot is certain: its decisions become state, topic by topic."""
        elapsed_ms = int(self._environment.clock.elapsed_s() * 1000)
        for record in records:
            if isinstance(record, AddRecord):
                life = self.lives[self._by_id[record.topic_id].core.name]
                life.before_rows(int(record.rows.ledger_id.max()), self.applied_slot)
        touched: dict[str, ServedTopic] = {}
        for record in records:
            topic = touched[record.topic_id] = self._by_id[record.topic_id]
            topic.core.apply(record, slot, elapsed_ms=elapsed_ms)
            topic.last_changed_slot = slot
        self.applied_slot = slot
        for topic in touched.values():
            self.lives[topic.core.name].after_slot(slot)
            topic.rows_added()
        self._consider_checkpoint()

    def look_after(self) -> None:
        """Once a second: what depends on time alone."""
        if not self._recovered or self._releasing:
            return
        self.commits.answer_stalled()
        for life in self.lives.values():
            life.after_slot(self.applied_slot)
        if self.may_hand_out:
            for topic in self.topics.values():
                topic.notify_all()

    # ---- topics

    def _topic_ids(self) -> list[str]:
        prefix = names.topics_prefix(self.number)
        keys = (entry.key for entry in self._environment.store.list(prefix))
        return sorted({key[len(prefix) :].split("/", 1)[0] for key in keys})

    async def _recover_topic(self, topic_id: str, tail: Sequence[TailSlot]) -> int:
        environment = self._environment
        topic_log = self._topic_logs(self.number, topic_id)
        tip = await commit_until_certain(environment, topic_log, topic_manifest.Claim(epoch=self.epoch), warm=None)
        part = recovery.counting_part(tip.manifest, self._claim.checkpoint)
        objects = await environment.run(
            lambda: recovery.read_objects(environment.store, tip.manifest, part, environment.parts)
        )
        topic = self._core_topic(tip.manifest)
        elapsed_ms = int(environment.clock.elapsed_s() * 1000)
        checkpoint_slot = 0 if self._claim.checkpoint is None else self._claim.checkpoint.slot
        state_slot = max(tip.manifest.applied, checkpoint_slot)

        def restore() -> int:
            recovery.restore(topic, tip.manifest, objects, part, elapsed_ms=elapsed_ms)
            return recovery.replay(topic, tail, state_slot=state_slot, elapsed_ms=elapsed_ms)

        rows = await environment.run(restore)
        served = self._serve_topic(topic, topic_log, tip)
        if rows or part is not None:
            served.last_changed_slot = self._claim.fence_slot
        return rows

    def _core_topic(self, stored: manifest.TopicManifest) -> Topic:
        return Topic(
            stored.topic,
            stored.topic_id,
            stored.incarnation,
            stored.subscriptions,
            now_ms=self._environment.clock.now_ms(),
            cache=self._cache,
            ready_rows_max=self._environment.config.delivery.ready_rows_max,
        )

    def _serve_topic(
        self,
        topic: Topic,
        topic_log: commit.ManifestLog[manifest.TopicManifest],
        tip: commit.Tip[manifest.TopicManifest],
    ) -> ServedTopic:
        served = ServedTopic(topic, self, self._due_loop, self._environment)
        commits = TopicCommits(topic_log, tip, self._environment, shard=self.number, epoch=self.epoch)
        self.topic_commits[topic.name] = commits
        self.lives[topic.name] = BucketLife(topic, commits, self._environment, lost=self.lose, changed=served.changed)
        self._by_id[topic.topic_id] = served
        self.topics[topic.name] = served
        return served

    async def topic_to_write(self, name: str) -> ServedTopic:
        """The topic, which is born if there is none: its first manifest is committed before any slot names it."""
        topic = self.topic(name)
        if topic is not None:
            return topic
        self.commits.check_accepting()
        birth = self._births.get(name)
        if birth is None:
            birth = self._births[name] = asyncio.ensure_future(self._bear(name))
            birth.add_done_callback(lambda _: self._births.pop(name, None))
        try:
            return await asyncio.wait_for(asyncio.shield(birth), STALL_ANSWER_S)
        except commit.Refused as refused:
            raise self.superseded(refused) from refused
        except TimeoutError:
            raise OutcomeUnknown(f"topic {name} is new, and the store has not answered; a retry is safe") from None
        except asyncio.CancelledError:
            if birth.cancelled():
                raise Unavailable("the shard is served by this daemon no longer; try again") from None
            raise

    def topic(self, name: str) -> ServedTopic | None:
        """The topic; None when there is none. Raises Corruption when it cannot be served."""
        topic = self.topics.get(name)
        if topic is None and self._refused and (refused := self._refused.get(names.topic_id(name))) is not None:
            raise Corruption(f"topic {name}: {refused}")
        return topic

    async def _bear(self, name: str) -> ServedTopic:
        topic_id = names.topic_id(name)
        topic_log = self._topic_logs(self.number, topic_id)
        create = topic_manifest.Create(
            topic=name, topic_id=topic_id, incarnation=1, epoch=self.epoch, applied=self.applied_slot
        )
        try:
            tip = await commit_until_certain(self._environment, topic_log, create, warm=None)
        except commit.Refused:
            # The former owner's last act, which landed after this owner had listed the topics.
            await self._recover_topic(topic_id, ())
            return self.topics[name]
        return self._serve_topic(self._core_topic(tip.manifest), topic_log, tip)

    # ---- checkpoints

    def _consider_checkpoint(self) -> None:
        limits = self._environment.config.journal
        wanted = (
            self._bytes_since_checkpoint >= limits.checkpoint_bytes
            or self._slots_since_checkpoint >= limits.checkpoint_slots
        )
        if wanted and not self._refused and (self._checkpointing is None or self._checkpointing.done()):
            self._checkpointing = asyncio.ensure_future(self._try_checkpoint())
            self._checkpointing.add_done_callback(self._task_done)

    async def _try_checkpoint(self) -> None:
        try:
            await self._checkpoint()
        except (StoreError, commit.CommitOutcomeUnknown) as error:
            # The journal is longer for it; the next slots ask again.
            log.warning("shard %d: no checkpoint could be written: %s", self.number, error)

    async def _checkpoint(self) -> None:
        """Writes the state as of now, commits it, and deletes the slots that two checkpoints cover."""
        environment = self._environment
        size_bytes, slots = self._bytes_since_checkpoint, self._slots_since_checkpoint
        slot = self.applied_slot
        cuts = [
            life.cut()
            for name, life in self.lives.items()
            if self.topics[name].last_changed_slot > self.topic_commits[name].manifest.applied
        ]
        tip = self.confirmation.tip

        def write() -> commit.Tip[manifest.ShardManifest]:
            parts = tuple(checkpoint.part_of(cut) for cut in cuts)
            body = checkpoint_format.Checkpoint(shard=self.number, epoch=self.epoch, slot=slot, topics=parts)
            written = checkpoint_store.write_checkpoint(
                environment.store, body, base=tip.number, unique=environment.new_id()
            )
            reference = manifest.CheckpointReference(object=written, slot=slot, replay_from=slot)
            return commit.commit(
                self._shard_log,
                shard_manifest.WriteCheckpoint(
                    reference=reference,
                    replay_from=slot,
                    epoch=self.epoch,
                    delete_after_ms=environment.clock.now_ms() + TOMBSTONE_GRACE_MS,
                ),
                writer=environment.config.daemon_id,
                created_ms=environment.clock.now_ms(),
                warm=tip,
                deadline_s=30.0,
            )

        committed = await environment.run(write)
        self._bytes_since_checkpoint -= size_bytes
        self._slots_since_checkpoint -= slots
        while await environment.run(lambda: self._truncation.truncate(committed.manifest)):
            pass


def _by_topic(slots: Iterable[journal_tail.Slot]) -> dict[str, list[TailSlot]]:
    """The tail's records by topic: each topic is replayed without looking at the others' records."""
    tails: dict[str, list[TailSlot]] = {}
    for slot in slots:
        for topic_id in {record.topic_id for record in slot.records}:
            own = tuple(record for record in slot.records if record.topic_id == topic_id)
            tails.setdefault(topic_id, []).append((slot.header, own))
    return tails
