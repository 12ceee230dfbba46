"""Loads the topics of a shard that was taken over while it is served. It stands alone since it has its own queue.

Requested topics are loaded first. Then come those with rows due soon, of these the topics that checkpoint and commit
log name before those that a listing shows. The others follow by their first due row.

A topic takes few requests one after the other: its newest manifest, by its listed number if there is one, then the
claim, while the objects that the manifest names are read.

A topic is loaded once, and again when it has failed. Until then no slot of this owner names it: its content of
checkpoint and commit log stays as it was found, and every checkpoint carries it over. Damaged topics, topics whose
loading breaks an invariant, and topics that the store does not return are retried later; the others do not wait for
them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from daemon.core.decisions.topic_state import TopicState
from daemon.errors import Corruption, NotOwner, Unavailable
from daemon.runtime import backoff
from daemon.runtime.environment import Environment
from daemon.runtime.failure_scope import Failures, TopicFailed
from daemon.shard import recovery
from daemon.topic import topic_manifests, topic_settings
from daemon.topic.bucket_lifecycle import AGE_SPREAD
from storage_backends import checkpoints, commit, topic_manifest
from storage_backends.formats import format_errors, names
from storage_backends.formats.checkpoint_format import TopicPart
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import TopicManifest
from storage_backends.object_store import Damaged

log = logging.getLogger(__name__)

# Topics of one shard that are read in parallel
TOPICS_AT_ONCE = 8
# Time for which a call waits for its topic (seconds), and after which it may retry (ms)
LOADING_WAIT_S = 2.0
LOADING_RETRY_MS = 500
# Time until a damaged topic is tried again (seconds); shorter for one that the store does not return
DAMAGED_LOOK_S = 30.0
RETRY_S = 1.0
# A topic that has no row due sooner waits until the others are loaded (ms).
SOON_MS = 60_000
NEVER_MS = 1 << 63


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class LoadedTopic:
    """A topic as it is now. With `changed` the manifest `tip` does not hold all of it."""

    core: TopicState
    manifests: commit.ManifestLog[TopicManifest]
    tip: commit.Tip[TopicManifest]
    rows_replayed: int
    changed: bool


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Later:
    """A topic that has no row due before `due_ms` (Unix time, ms): it is loaded after the others."""

    topic_id: str
    tip: commit.Tip[TopicManifest]
    due_ms: int


class TopicLoading:
    """The topics of one shard that are not loaded yet. Used on one event loop.

    No slot above `last_slot` names a topic that is not loaded yet; `newest_slot` returns the last applied one. `tails`
    is the content of checkpoint and commit log. `known` has the topics that the checkpoint knows, by id, with the
    number of a manifest that each had. `new_topic` makes an empty topic for a manifest, in a thread. `loaded`
    takes each loaded topic over, on the loop. `is_served` returns whether a topic needs no loading. Calls `lost` with
    the error that ends the shard.
    """

    def __init__(
        self,
        *,
        shard: int,
        epoch: int,
        last_slot: ShardSlot,
        newest_slot: Callable[[], ShardSlot],
        tails: Mapping[str, checkpoints.TopicTail],
        known: Mapping[str, int],
        environment: Environment,
        new_topic: Callable[[TopicManifest], TopicState],
        loaded: Callable[[LoadedTopic], None],
        is_served: Callable[[str], bool],
        lost: Callable[[BaseException], None],
    ) -> None:
        self.damaged: dict[str, Corruption] = {}
        # Topics that have failed repeatedly, in loading or since; they are loaded later each time
        self.failing: dict[str, Exception] = {}
        self.rows_replayed = 0
        # Set when every topic is loaded, damaged, or has failed
        self.ended = asyncio.Event()
        self._shard = shard
        self._epoch = epoch
        self._last_slot = last_slot
        self._newest_slot = newest_slot
        self._tails = dict(tails)
        # Topic id -> number of a manifest that it had, for topics that exist and are not loaded
        self.known = dict(known)
        # Topic id -> last slot that may name it, for topics that are loaded again
        self._as_of: dict[str, ShardSlot] = {}
        self._failures = Failures()
        self._environment = environment
        self._new_topic = new_topic
        self._take_over = loaded
        self._is_served = is_served
        self._lost = lost
        self._listed = False
        # Unread topic id -> highest manifest number listed; then when the listing was sent (elapsed seconds)
        self._numbers: dict[str, int] = {}
        self._listed_at_s = 0.0
        # Topics that exist, though a listing that was sent before does not show them
        self._born_since: set[str] = set()
        # Topic ids, in the order of loading; requested ones go first. Each id is in one of the five.
        self._asked: dict[str, None] = {}
        self._waiting: dict[str, None] = dict.fromkeys(tails)
        self._later: dict[str, _Later] = {}
        self._under_way: set[str] = set()
        # Topics that wait until they are tried again
        self._put_off: set[str] = set()
        # Topics being read that were deleted since
        self._deleted: set[str] = set()
        # First due times and ids of topics that are loaded later
        self._by_due: list[tuple[int, str]] = []
        self._outcomes: dict[str, asyncio.Future[None]] = {}
        self._some = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def start(self) -> None:
        for _ in range(TOPICS_AT_ONCE):
            self._spawn(self._work())
        self._spawn(self._list())

    def close(self) -> None:
        """Stop loading; waiting callers get Unavailable."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        for outcome in self._outcomes.values():
            if not outcome.done():
                outcome.set_exception(Unavailable(f"shard {self._shard} is no longer served by this daemon; try again"))
        self._outcomes.clear()

    # ---- requests

    @property
    def unserved(self) -> int:
        """The number of known topics that are not loaded, for any reason."""
        return sum(map(len, self._known))

    @property
    def left(self) -> int:
        """The number of known topics that are neither loaded nor refused as damaged or failed."""
        return self.unserved - len(self.damaged.keys() | self.failing.keys())

    def carried(self) -> tuple[TopicPart, ...]:
        """Return the parts of a checkpoint of now for the topics that are not loaded."""
        return tuple(recovery.carried_part(topic_id, tail) for topic_id, tail in self._tails.items())

    async def settled(self, topic_id: str, name: str) -> None:
        """Wait until the topic is loaded, or is known not to exist.

        Raises Corruption if it is damaged, Unavailable if it takes longer than `LOADING_WAIT_S`.
        """
        damage = self.damaged.get(topic_id)
        if damage is not None:
            raise Corruption(f"topic {name}: {damage}", of_topic=True)
        if topic_id in self.failing:
            raise TopicFailed(name)
        if self._listed and not self.knows(topic_id):
            return
        try:
            await asyncio.wait_for(asyncio.shield(self._ask(topic_id)), LOADING_WAIT_S)
        except TimeoutError:
            raise Unavailable(f"topic {name} is being loaded; try again", retry_after_ms=LOADING_RETRY_MS) from None
        except Corruption as error:
            raise Corruption(f"topic {name}: {error}", of_topic=True) from error
        except TopicFailed as error:
            raise TopicFailed(name) from error

    def begin_reload(self, topic_id: str) -> None:
        """Note that a served topic has failed: callers wait until `load_again` has loaded it."""
        self._put_off.add(topic_id)

    def load_again(self, topic_id: str, tail: checkpoints.TopicTail, slot: ShardSlot) -> None:
        """Load a topic again that was unloaded; one that fails repeatedly is loaded later each time.

        `tail` is all that checkpoint and commit log hold of it. No slot above `slot` names it.
        """
        self._tails[topic_id] = tail
        self.known.setdefault(topic_id, 0)
        self._as_of[topic_id] = slot
        if not self._closed:
            delay_s = self._failures.delay_s(topic_id, now_s=self._environment.clock.elapsed_s())
            if delay_s:
                # Callers get the error at once meanwhile.
                self.failing[topic_id] = TopicFailed(topic_id)
            self._put_off_for(topic_id, delay_s)

    async def found(self, topic_id: str) -> None:
        """Load a topic that exists although it was not listed. Raises Corruption."""
        self._born_since.add(topic_id)
        await asyncio.shield(self._ask(topic_id))

    def may_come(self, topic_id: str) -> bool:
        """Return whether the topic is being loaded, or may be found and loaded later."""
        return not self._listed or self.knows(topic_id)

    def deleted(self, topic_id: str) -> None:
        """Discard what is being read of a topic that was served, since it was created, and is now deleted."""
        if topic_id in self._under_way:
            self._deleted.add(topic_id)

    def knows(self, topic_id: str) -> bool:
        """Return whether the topic is to be loaded."""
        return any(topic_id in ids for ids in self._known)

    @property
    def _known(self) -> tuple[Collection[str], ...]:
        return self._asked, self._waiting, self._later, self._under_way, self._put_off

    def _ask(self, topic_id: str) -> asyncio.Future[None]:
        if self._closed:
            raise Unavailable(f"shard {self._shard} is no longer served by this daemon; try again")
        if topic_id not in self._under_way and topic_id not in self._put_off:
            self._waiting.pop(topic_id, None)
            self._later.pop(topic_id, None)
            self._asked[topic_id] = None
            self._some.set()
        outcome = self._outcomes.get(topic_id)
        if outcome is None:
            outcome = self._outcomes[topic_id] = asyncio.get_running_loop().create_future()
            # No caller may be waiting when it fails.
            outcome.add_done_callback(lambda done: done.cancelled() or done.exception())
        return outcome

    # ---- the queue

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._lost(error)

    async def _list(self) -> None:
        numbers, self._listed_at_s = await self._until_listed()
        for topic_id, number in numbers.items():
            if not self._is_served(topic_id):
                self.known[topic_id] = max(number, self.known.get(topic_id, 0))
        for topic_id in sorted(self.known):
            if not self._is_served(topic_id) and not self.knows(topic_id):
                self._waiting[topic_id] = None
        # A topic that is served already may have other manifests by the time at which it is loaded again.
        self._numbers = {
            topic_id: numbers[topic_id] for topic_id in (*self._asked, *self._waiting) if topic_id in numbers
        }
        self._listed = True
        # A topic that does not exist waits for no turn to load.
        there = (self.known, self._tails, self._born_since)
        for topic_id in [asked for asked in self._asked if not any(asked in ids for ids in there)]:
            del self._asked[topic_id]
            self._settle(topic_id)
        self._some.set()
        self._look_whether_ended()

    async def _until_listed(self) -> tuple[dict[str, int], float]:
        return await backoff.until_answered(
            lambda: self._environment.run(self._listed_numbers),
            failed=lambda error: log.warning(
                "shard %d: its topics cannot be listed, trying again: %s", self._shard, error
            ),
            waiting=self._environment,
        )

    def _listed_numbers(self) -> tuple[dict[str, int], float]:
        """List the highest manifest number of each topic, 0 if it has none; return also when the listing was sent."""
        numbers: dict[str, int] = {}
        sent_at_s, prefix = self._environment.clock.elapsed_s(), names.topics_prefix(self._shard)
        for entry in self._environment.store.list(prefix):
            topic_id = entry.key[len(prefix) :].partition("/")[0]
            if names.is_topic_id(topic_id):
                number = names.number_in(names.topic_manifest_prefix(self._shard, topic_id), entry.key) or 0
                numbers[topic_id] = max(number, numbers.get(topic_id, 0))
        return numbers, sent_at_s

    async def _work(self) -> None:
        while True:
            if not (self._asked or self._waiting or self._later):
                self._some.clear()
                await self._some.wait()
                continue
            async with self._environment.loading_turns:
                # The next topic is chosen once there is a turn for it.
                await self._load_next()

    async def _load_next(self) -> None:
        queue = self._asked or self._waiting
        if queue:
            topic_id = next(iter(queue))
            del queue[topic_id]
            await self._load(topic_id, None, may_wait=queue is self._waiting)
        elif later := self._next_later():
            await self._load(later.topic_id, later.tip, may_wait=False)

    def _next_later(self) -> _Later | None:
        while self._by_due:
            _, topic_id = heapq.heappop(self._by_due)
            # Topics that were requested since leave their place in the order.
            if (later := self._later.pop(topic_id, None)) is not None:
                return later
        return None

    async def _load(self, topic_id: str, tip: commit.Tip[TopicManifest] | None, *, may_wait: bool) -> None:
        self._under_way.add(topic_id)
        self._deleted.discard(topic_id)
        number = self._numbers.pop(topic_id, 0)
        try:
            loaded = await self._environment.pools.loads.run(
                lambda: self._read(topic_id, tip, number, may_wait=may_wait)
            )
            if isinstance(loaded, _Later):
                self._load_later(loaded)
            else:
                self._found(topic_id, loaded)
        except Corruption as error:
            self._found_damaged(topic_id, error)
        except commit.UNCERTAIN as error:
            log.warning("shard %d: topic %s cannot be read, trying again: %s", self._shard, topic_id, error)
            self._put_off_for(topic_id, RETRY_S)
        except (commit.Refused, NotOwner):
            raise
        except Exception as error:  # noqa: BLE001 - any error affects this topic alone
            self._found_failing(topic_id, error)
        self._look_whether_ended()

    def _load_later(self, later: _Later) -> None:
        topic_id = later.topic_id
        self._under_way.discard(topic_id)
        if topic_id in self._outcomes:
            # It was requested meanwhile.
            self._asked[topic_id] = None
        else:
            self._later[topic_id] = later
            heapq.heappush(self._by_due, (later.due_ms, topic_id))
        self._some.set()

    def _found(self, topic_id: str, loaded: LoadedTopic | None) -> None:
        if loaded is not None and topic_id not in self._deleted and not self._is_served(topic_id):
            self._take_over(loaded)
            self.rows_replayed += loaded.rows_replayed
        self._under_way.discard(topic_id)
        self.known.pop(topic_id, None)
        self._tails.pop(topic_id, None)
        self._as_of.pop(topic_id, None)
        self._born_since.discard(topic_id)
        mended = [self.damaged.pop(topic_id, None), self.failing.pop(topic_id, None)]
        if any(mended):
            log.info("shard %d: topic %s can be served again", self._shard, topic_id)
        if topic_id in self._put_off:
            # It has failed again at once, so callers keep waiting.
            return
        self._settle(topic_id)

    def _settle(self, topic_id: str, error: Exception | None = None) -> None:
        """Let callers that wait for the topic continue, or fail with `error`."""
        outcome = self._outcomes.pop(topic_id, None)
        if outcome is None or outcome.done():
            return
        if error is None:
            outcome.set_result(None)
        else:
            outcome.set_exception(error)

    def _found_damaged(self, topic_id: str, error: Corruption) -> None:
        before = self.damaged.get(topic_id)
        if before is None or str(before) != str(error):
            log.error("shard %d: topic %s cannot be served: %s", self._shard, topic_id, error)
            self._environment.metrics.damage_found("topic")
        self.damaged[topic_id] = error
        self._settle(topic_id, error)
        self._put_off_for(topic_id, DAMAGED_LOOK_S)

    def _found_failing(self, topic_id: str, error: Exception) -> None:
        delay_s = self._failures.delay_s(topic_id, now_s=self._environment.clock.elapsed_s()) or RETRY_S
        self._environment.metrics.topic_failed()
        log.error(
            "shard %d: topic %s cannot be loaded, next in %.0f s: %r",
            self._shard,
            topic_id,
            delay_s,
            error,
            exc_info=error,
        )
        self.failing[topic_id] = error
        self._settle(topic_id, TopicFailed(topic_id))
        self._put_off_for(topic_id, delay_s)

    def _put_off_for(self, topic_id: str, seconds: float) -> None:
        self._under_way.discard(topic_id)
        self._put_off.add(topic_id)
        self._spawn(self._again(topic_id, seconds))

    async def _again(self, topic_id: str, seconds: float) -> None:
        await self._environment.sleep(seconds)
        self._put_off.discard(topic_id)
        queue = self._asked if topic_id in self._outcomes else self._waiting
        queue[topic_id] = None
        self._some.set()

    def _look_whether_ended(self) -> None:
        if self._listed and not self.left:
            self.ended.set()

    # ---- reading one topic, in a thread

    def _read(
        self, topic_id: str, tip: commit.Tip[TopicManifest] | None, number: int, *, may_wait: bool
    ) -> LoadedTopic | _Later | None:
        """Claim and restore the topic. Returns None if it does not exist. May be repeated after any error.

        `tip` is its newest manifest if that was read before. `number` is the listed number of the newest manifest, or
        0. With `may_wait` a topic that has no row due soon is not loaded yet.
        """
        topic_log = topic_manifests.topic_log(self._environment, self._shard, topic_id)
        tail = self._tails.get(topic_id, checkpoints.NOTHING)
        try:
            if tip is None and number:
                # The claim finds later ones.
                tip = topic_log.read_at(number, self._listed_at_s)
            tip = tip or topic_log.read_tip()
            self._check_there(topic_log, tip, topic_id)
            if tip is None or tip.manifest.deleted:
                return None
            if may_wait:
                due_ms = recovery.first_due_ms(tip.manifest, tail)
                due_ms = NEVER_MS if due_ms is None else due_ms
                if due_ms > self._environment.clock.now_ms() + SOON_MS:
                    return _Later(topic_id, tip, due_ms)
            return self._restored(topic_log, tip, tail)
        except Damaged as error:
            raise Corruption(f"manifest {error}") from error
        except format_errors.FormatError as error:
            # From content that is decoded only when needed
            raise Corruption(str(error)) from error

    def _check_there(
        self, topic_log: commit.ManifestLog[TopicManifest], tip: commit.Tip[TopicManifest] | None, topic_id: str
    ) -> None:
        """Raise Corruption if the store has lost the topic, or its newest manifests: the highest one stays for ever."""
        number = self.known.get(topic_id, 0)
        if tip is None and (topic_id in self.known or topic_id in self._tails):
            raise Corruption(
                f"its manifests are missing under {topic_log.prefix}, but checkpoint, log or objects name it"
            )
        prefix = names.topic_prefix(self._shard, topic_id)
        has_objects = tip is None and not self._listed and any(True for _ in self._environment.store.list(prefix))
        # Another request may have created it since the tip was read.
        if has_objects and topic_log.read_tip() is None:
            raise Corruption(f"its manifests are missing under {topic_log.prefix}, but there are objects of it")
        if tip is not None and tip.number < number:
            raise Corruption(f"{topic_log.key(number)}: it is missing, and the checkpoint names it")

    def _restored(
        self, topic_log: commit.ManifestLog[TopicManifest], tip: commit.Tip[TopicManifest], tail: checkpoints.TopicTail
    ) -> LoadedTopic | None:
        environment = self._environment
        reads = recovery.TopicReads(environment.store, environment.pools.loads.parts)
        # In parallel with the claim, which rarely finds another manifest
        reads.begin(tip.manifest, checkpoints.counting_part(tip.manifest, tail))
        tip = self._commit(topic_log, topic_manifest.ClaimTopic(epoch=self._epoch), tip, just_read=True)
        if tip.manifest.deleted:
            # The former owner's last commit, before the claim landed
            return None
        self._check_as_of(tip.manifest)
        part = checkpoints.counting_part(tip.manifest, tail)
        tip, objects = self._objects(topic_log, tip, part, reads)
        topic = self._new_topic(tip.manifest)
        # Jitter, since topics as old as this daemon would be sealed together. None is old enough to be sealed at once.
        age_max_ms = topic_settings.settings_of(environment, tip.manifest.policy).seal_limits.age_max_ms
        began_ms = environment.elapsed_ms() - int(environment.jitter() * (1 - AGE_SPREAD) * age_max_ms)
        recovery.restore(topic, tip.manifest, objects, part, elapsed_ms=began_ms)
        rows = recovery.replay(topic, tip.manifest, tail, elapsed_ms=began_ms)
        return LoadedTopic(topic, topic_log, tip, rows, changed=bool(rows) or part is not None)

    def _check_as_of(self, manifest: TopicManifest) -> None:
        """Raise Corruption if the shard has lost slots that the topic has applied.

        The topic would skip what is written under their numbers. Served topics of the shard use these up.
        """
        newest = self._newest_slot()
        if manifest.applied > newest:
            raise Corruption(
                f"it was sealed as of shard slot {manifest.applied}, and the last one that is left is {newest}: the "
                f"store has lost slots. It is served when shard {self._shard} has used up their numbers"
            )

    def _objects(
        self,
        topic_log: commit.ManifestLog[TopicManifest],
        tip: commit.Tip[TopicManifest],
        part: TopicPart | None,
        reads: recovery.TopicReads,
    ) -> tuple[commit.Tip[TopicManifest], recovery.TopicObjects]:
        """Return the manifest, with damaged buckets quarantined, and the objects that it names.

        Another process may merge meanwhile, and the sources be deleted: then the merged buckets are read. A successor
        may have replaced the other objects, and deleted them: then nothing is damaged.
        """
        while True:
            try:
                objects = reads.objects(tip.manifest, part)
            except Corruption:
                self._check_own(topic_log.read_tip(tip) or tip)
                raise
            tip = self._quarantined(topic_log, tip, objects)
            if all(live.object.name in objects.buckets for live in tip.manifest.live):
                return tip, objects

    def _quarantined(
        self,
        topic_log: commit.ManifestLog[TopicManifest],
        tip: commit.Tip[TopicManifest],
        objects: recovery.TopicObjects,
    ) -> commit.Tip[TopicManifest]:
        for live in tip.manifest.live:
            damage = objects.buckets[live.object.name].damage
            if damage and not live.quarantined:
                # No later slot has named the topic so far, unless it is loaded again.
                operation = topic_manifest.Quarantine(
                    bucket=live.object.name,
                    damage=damage[: topic_manifests.DAMAGE_CHARACTERS_MAX],
                    slot=self._as_of.get(tip.manifest.topic_id, self._last_slot),
                    epoch=self._epoch,
                )
                try:
                    tip = self._commit(topic_log, operation, tip)
                except commit.Refused as refused:
                    overtaken = topic_manifests.overtaken(refused, epoch=self._epoch)
                    if overtaken is None or overtaken.tip is None:
                        raise
                    tip = overtaken.tip
                    continue
                log.error(
                    "topic %s: quarantined a damaged bucket; the others are served: %s", tip.manifest.topic, damage
                )
                self._environment.metrics.damage_found("bucket")
        return tip

    def _commit(
        self,
        topic_log: commit.ManifestLog[TopicManifest],
        operation: topic_manifests.Operation,
        tip: commit.Tip[TopicManifest],
        *,
        just_read: bool = False,
    ) -> commit.Tip[TopicManifest]:
        landed = topic_manifests.commit_once(self._environment, topic_log, operation, warm=tip, just_read=just_read)
        # A successor may have continued after it; what that one has sealed is not lost here.
        self._check_own(landed)
        return landed

    def _check_own(self, tip: commit.Tip[TopicManifest]) -> None:
        """Raise commit.Refused if a successor has claimed the topic."""
        if tip.manifest.owner_epoch != self._epoch:
            raise commit.Refused(f"owner epoch is {tip.manifest.owner_epoch}, not {self._epoch}", tip)
