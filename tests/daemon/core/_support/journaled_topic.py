"""A topic with its journal, manifest, checkpoint and store, in one thread: what the engine does, without waiting.

Owns: slots, seals, loading and recovery around a `Topic`, through the product's own stored forms.
Does not own: what is right (`oracle`) and what happens next (`topic_machine`, the tests).

Fault model: a crash loses the topic in memory, what is staged and every seal that is not finished; objects, the
manifest, the checkpoint and written slots stay.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from daemon.core.decisions.add_decisions import AddBatch, AddOutcome
from daemon.core.decisions.claims import ClaimedRows, HeldPositions, rows_claimed
from daemon.core.decisions.departures import Departure, LedgerRanges
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index.bucket import SealedBucket
from daemon.core.index.index import BucketBits, SeenRows
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows
from daemon.core.index.segments import SegmentCache, SegmentRange
from daemon.core.limits import NO_BACKLOG_LIMITS, BacklogLimits, RequestLimits
from daemon.shard import recovery
from daemon.topic import bucket_lifecycle, bucket_reads
from storage_backends import checkpoints, topic_manifest
from storage_backends.formats import checkpoint_format, manifest, slot_format
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import U32
from storage_backends.formats.schedule_ids import ScheduleIds
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore
from tests._support.virtual_loop import InlineExecutor
from tests.daemon.core._support.oracle import Claim

Position = tuple[int, int]

LIMITS = RequestLimits(
    rows_max=100_000, topic_max_bytes=1024, subscription_max_bytes=255, subscriptions_max=100, delay_max_ms=10**9
)
TOPIC_ID = "topic"
EPOCH = 1
PLAIN = manifest.SubscriptionPolicy()
# Enough turns for anything that comes to an end.
TURNS_MAX = 5_000


def batch_of(
    positions: Sequence[Position],
    *,
    deliver_at_ms: Sequence[int] | None = None,
    delay_ms: Sequence[int] | None = None,
    key_hash: Sequence[int] | None = None,
    return_already_due: bool = False,
    schedule_ids: Sequence[bytes] | None = None,
) -> AddBatch:
    return AddBatch(
        ledger_id=np.array([ledger for ledger, _ in positions], np.uint64),
        entry_id=np.array([entry for _, entry in positions], np.uint64),
        deliver_at_ms=None if deliver_at_ms is None else np.array(deliver_at_ms, np.uint64),
        delay_ms=None if delay_ms is None else np.array(delay_ms, np.uint64),
        key_hash=None if key_hash is None else np.array(key_hash, np.uint32),
        return_already_due=return_already_due,
        schedule_ids=ids_of(schedule_ids),
    )


def ids_of(each: Sequence[bytes] | None) -> ScheduleIds | None:
    """The column of these ids; empty bytes stand for none."""
    if each is None:
        return None
    return ScheduleIds.of_piece(np.array(list(map(len, each)), np.uint64), b"".join(each))


def claims_of(claims: Iterable[tuple[Position, int] | Claim]) -> HeldPositions:
    """Claims of (position, deliver_at_ms), or of messages of batches."""
    named = [Claim(*claim) for claim in claims]
    counts = [claim.delivery for claim in named if claim.delivery is not None]
    return HeldPositions(
        np.array([claim.at[0] for claim in named], np.uint64),
        np.array([claim.at[1] for claim in named], np.uint64),
        np.array([claim.deliver_at_ms for claim in named], np.uint64),
        np.array([NO_BATCH_INDEX if claim.batch_index is None else claim.batch_index for claim in named], np.uint32),
        np.array(counts, np.uint32) if counts else None,
    )


def listed(rows: KeyedRows) -> list[tuple[int, int, int]]:
    """(deliver_at_ms, ledger_id, entry_id) of each row, in the order of the rows."""
    columns = (rows.rows.deliver_at_ms, rows.rows.ledger_id, rows.rows.entry_id)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def key_hashes_of(rows: KeyedRows) -> list[int]:
    key_hash: U32 | None = rows.rows.key_hash
    return [0] * len(rows) if key_hash is None else key_hash.tolist()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class _Seal:
    cuts: tuple[bucket_lifecycle.SealCut, ...]
    bits: tuple[BucketBits, ...]
    redelivery: RedeliveryCut
    memory: tuple[MutableBucket, ...]


class Until(enum.Enum):
    """How far a subscription is deleted before a crash: its rows are gone, it left the manifest, all is done."""

    GONE = enum.auto()
    COMMITTED = enum.auto()
    SERVED = enum.auto()


class JournaledTopic:
    """`budget_bytes`: of the segments in memory. `segment_limits`: how buckets are cut into segments. `elapsed_ms`: of
    the clock that never steps.
    """

    def __init__(
        self,
        *,
        now_ms: int = 1_000_000,
        budget_bytes: int = 1 << 30,
        ready_rows_max: int = 1 << 30,
        segment_limits: SegmentLimits | None = None,
        compatible: bool = False,
        backlog_limits: BacklogLimits = NO_BACKLOG_LIMITS,
        requires: str = "",
    ) -> None:
        self.now_ms = now_ms
        self.elapsed_ms = 0
        self.slot = 0
        self.store = MemoryStore()
        self.slots: list[bytes] = []
        self.checkpoint: bytes | None = None
        self.seals: collections.deque[_Seal] = collections.deque()
        self.staged = slot_format.SlotBuilder()
        self._budget_bytes = budget_bytes
        self._ready_rows_max = ready_rows_max
        self._backlog_limits = backlog_limits
        self._segment_limits = segment_limits or SegmentLimits(time_step_ms=1_000, rows_max=4, rows_min=0)
        self.shared_index = True
        self._compatible = compatible
        self._names = itertools.count(1)
        self._changed_slot = 0
        create = topic_manifest.Create(topic="topic", topic_id=TOPIC_ID, epoch=EPOCH, applied=ShardSlot(0))
        self.tip = create.apply(None)
        if requires:
            self.tip = topic_manifest.RequireOfTopic(requirement=requires, epoch=EPOCH).apply(self.tip)
        self.core = self._new_core()

    def _new_core(self) -> TopicState:
        return TopicState(
            self.tip.topic,
            self.tip.topic_id,
            self.tip.incarnation,
            self.tip.subscriptions,
            now_ms=self.now_ms,
            cache=SegmentCache(self._budget_bytes),
            ready_rows_max=self._ready_rows_max,
            backlog_limits=self._backlog_limits,
        )

    # ---- requests

    def stage_add(self, batch: AddBatch, subscription_id: int = 0) -> AddOutcome:
        records, outcome = self.core.stage_add(
            batch,
            now_ms=self.now_ms,
            request_limits=LIMITS,
            subscription_id=subscription_id,
            shared_index=self.shared_index,
        )
        for record in records:
            self.staged.append(record)
        return outcome

    def add(
        self, positions: Sequence[Position], deliver_at_ms: int | Sequence[int], subscription_id: int = 0
    ) -> AddOutcome:
        times = [deliver_at_ms] * len(positions) if isinstance(deliver_at_ms, int) else deliver_at_ms
        outcome = self.stage_add(batch_of(positions, deliver_at_ms=times), subscription_id)
        self.commit()
        return outcome

    def stage_acknowledge(self, state: SubscriptionState, claims: Iterable[tuple[Position, int] | Claim]) -> int:
        """The number of claims that were ignored."""
        records, rest = self.core.acknowledging.stage(state, claims_of(claims))
        for record in records:
            self.staged.append(record)
        if not len(rest):
            return 0
        found = self.find_in_backlog(state, rest)
        records, rest = self.core.acknowledging.stage_found(state, rest, found)
        for record in records:
            self.staged.append(record)
        return len(rest)

    def acknowledge(self, state: SubscriptionState, claims: Iterable[tuple[Position, int] | Claim]) -> int:
        ignored = self.stage_acknowledge(state, claims)
        self.commit()
        return ignored

    def find_in_backlog(self, state: SubscriptionState, claims: HeldPositions, *, any_time: bool = False) -> KeyedRows:
        seen: SeenRows = {}
        for _ in range(TURNS_MAX):
            found, missing = self.core.find_in_backlog(state, claims, seen, any_time=any_time)
            if not missing:
                return found
            self.load(missing)
        raise AssertionError("finding claimed rows in the backlog makes no progress")

    def claimed(self, state: SubscriptionState, claims: HeldPositions) -> ClaimedRows:
        """What a dispatcher that comes back may hold."""
        found = self.find_in_backlog(state, claims)
        return rows_claimed(self.core.indexes.serving(state.subscription_id), state, claims, found)

    def hand_out(self, state: SubscriptionState, dispatcher: int, limit: int) -> KeyedRows:
        return state.hand_out(dispatcher, limit, elapsed_ms=self.elapsed_ms)

    def commit(self) -> None:
        """What is staged is one slot, durable and applied."""
        records = self.staged.freeze()
        if not records:
            return
        self.staged = slot_format.SlotBuilder()
        self.slot += 1
        header = slot_format.SlotHeader(1, EPOCH, ShardSlot(self.slot), len(records))
        self.slots.append(slot_format.encode_slot(header, records))
        self._changed_slot = self.slot
        self.core.apply_all(records, self.slot, elapsed_ms=self.elapsed_ms)

    # ---- subscriptions

    def create_subscription(
        self,
        meanwhile: Callable[[], object] = lambda: None,
        policy: manifest.SubscriptionPolicy = PLAIN,
    ) -> SubscriptionState:
        """`meanwhile`: what happens while the manifest is being committed."""
        self.commit()
        number = self.tip.last_subscription_id + 1
        stored = manifest.Subscription(
            subscription_id=number,
            name=f"subscription-{number}",
            since_ms=self.core.since_for_new_subscription(self.now_ms),
            created_slot=ShardSlot(self.slot),
            policy=policy,
        )
        coming = self.core.begin_subscription(stored)
        for records in self.core.passed_before(coming).slots():
            self.commit_together(records)
        self.commit()
        meanwhile()
        self._set_subscriptions((*self.tip.subscriptions, stored), number)
        return self.core.add_subscription()

    def pass_due(self, limit: int) -> int:
        passed = self.core.pass_due(self.now_ms, limit)
        for record in self.core.take_not_owed():
            self.staged.append(record)
        return passed

    # ---- trims and damage

    def trim(self, ranges: LedgerRanges | None, subscription_id: int | None) -> Iterator[Departure]:
        self.commit()
        return (departure for departure in self.core.trim(ranges, subscription_id) if departure is not None)

    def trim_at_once(self, ranges: LedgerRanges | None = None, subscription_id: int | None = None) -> int:
        rows = 0
        for departure in self.trim(ranges, subscription_id):
            rows += departure.rows
            for records in departure.slots():
                self.commit_together(records)
        return rows

    def commit_together(self, records: Iterable[slot_format.Record]) -> None:
        """They are in one slot, with whatever else is staged."""
        for record in records:
            self.staged.append(record)
        self.commit()

    def quarantine(self, name: str, damage: str = "damaged") -> None:
        operation = topic_manifest.Quarantine(bucket=name, damage=damage, slot=ShardSlot(self.slot), epoch=EPOCH)
        assert operation.precondition(self.tip) is None
        self.tip = operation.apply(self.tip)
        self.core.quarantine(next(live for live in self.tip.live if live.object.name == name))

    # ---- subscriptions that go

    def gone_with(self, subscription_id: int) -> list[slot_format.GoneRecord]:
        """What deleting the subscription will make gone: first of its two steps."""
        self.commit()
        self.pass_all()
        return self.core.gone_with_subscription(subscription_id)

    def delete_subscription(
        self, subscription_id: int, gone: Sequence[slot_format.GoneRecord], *, until: Until = Until.SERVED
    ) -> None:
        for record in gone:
            self.staged.append(record)
        self.commit()
        if until is Until.GONE:
            return
        left = tuple(each for each in self.tip.subscriptions if each.subscription_id != subscription_id)
        self._set_subscriptions(left, self.tip.last_subscription_id)
        if until is Until.SERVED:
            self.core.remove_subscription(subscription_id)

    def _set_subscriptions(self, subscriptions: tuple[manifest.Subscription, ...], last: int) -> None:
        operation = topic_manifest.SetSubscriptions(
            subscriptions=subscriptions, last_subscription_id=last, epoch=EPOCH, delete_after_ms=0
        )
        assert operation.precondition(self.tip) is None
        self.tip = operation.apply(self.tip)

    # ---- due rows

    def pass_all(self) -> None:
        """Every row that is due now is passed, whatever must be loaded for it."""
        for _ in range(TURNS_MAX):
            if self.pass_due(1_000):
                continue
            wanted = self.core.indexes.wanted_segments(self.now_ms)
            if not wanted:
                return
            self.load(wanted)
        raise AssertionError("passing due rows makes no progress")

    def catch_up(self, state: SubscriptionState, limit: int = 1_000) -> None:
        for _ in range(TURNS_MAX):
            needed = self.core.catch_up(state, limit)
            if not needed:
                return
            self.load(needed)
        raise AssertionError("reading a backlog again makes no progress")

    def drain(self, state: SubscriptionState, dispatcher: int, limit: int = 1_000) -> list[KeyedRows]:
        """Everything that is due is handed out to one dispatcher."""
        self.pass_all()
        batches = []
        for _ in range(TURNS_MAX):
            self.catch_up(state, limit)
            rows = self.hand_out(state, dispatcher, limit)
            redelivery_ms = self.core.next_redelivery_ms()
            if len(rows):
                batches.append(rows)
            elif redelivery_ms is not None and redelivery_ms <= self.now_ms:
                # There is room again.
                self.pass_all()
            elif state.reader is None:
                return batches
        raise AssertionError("handing out makes no progress")

    def load(self, wanted: Iterable[SegmentRange]) -> None:
        for segments in wanted:
            index = self.core.indexes.holding(segments.bucket)
            assert index is not None
            infos = index.sealed[segments.bucket].table.infos[segments.first : segments.last + 1]
            rows = bucket_reads.read_segments(self.store, segments.bucket, infos)
            for offset, each in enumerate(rows):
                self.core.indexes.load(segments.bucket, segments.first + offset, index.pages.keyed(each))

    # ---- buckets

    def begin_seal(self) -> bool:
        """All indexes are cut; whether any of them has rows."""
        indexes = self.core.indexes
        if not indexes.has_mutable_rows:
            return False
        taken, redelivery = dict(indexes.cut()), self.core.redelivery_cut()
        bits = tuple(each for cut in taken.values() for each in cut.bits)
        memory = indexes.begin_seal(lambda number: f"buckets/{next(self._names):03}", now_ms=self.now_ms)
        cuts = tuple(
            bucket_lifecycle.SealCut(
                topic="topic",
                key=bucket.name,
                base=0,
                slot=ShardSlot(self.slot),
                rows=taken[number].mutable,
                index_id=number,
            )
            for number, bucket in memory
        )
        self.seals.append(_Seal(cuts, bits, redelivery, tuple(bucket for _, bucket in memory)))
        return True

    def write_seal(self) -> list[bucket_lifecycle.WrittenBucket | None]:
        """The oldest seal is committed: a bucket for each cut, progress, manifest."""
        cuts = self.seals[0].cuts
        written = [
            bucket_lifecycle.write_bucket(self.store, cut, limits=self._segment_limits, compatible=self._compatible)
            for cut in cuts
        ]
        stored = bucket_lifecycle.progress_of(cuts, self.seals[0].bits, self.seals[0].redelivery)
        progress: manifest.Progress | None = stored
        reference = None
        if cuts[0].slot % 2:
            body = manifest.encode_progress(stored)
            reference = topic_manifest.reference_to(f"progress/{next(self._names):03}", 0, body)
            self.store.put(reference.name, body)
            progress = None
        operation = topic_manifest.Seal(
            buckets=tuple(each.live for each in written if each is not None),
            progress=progress,
            progress_object=reference,
            slot_from=self.tip.applied,
            slot_to=cuts[0].slot,
            epoch=EPOCH,
            replaced_delete_after_ms=0,
        )
        assert operation.precondition(self.tip) is None
        self.tip = operation.apply(self.tip)
        return written

    def finish_seal(
        self, written: Sequence[bucket_lifecycle.WrittenBucket | None], *, near_ms: int | None = None
    ) -> None:
        """The buckets that `write_seal` committed are served."""
        seal = self.seals.popleft()
        for cut, memory, each in zip(seal.cuts, seal.memory, written, strict=True):
            index = self.core.indexes.get(cut.index_id)
            if index is None:
                continue
            sealed = None
            if each is not None:
                sealed = SealedBucket(
                    each.live,
                    each.table.segments,
                    present=memory.present,
                    gone=memory.gone_since_cut(),
                    pages=index.pages,
                    with_ids=each.with_ids,
                )
            rows = KeyedRows.empty() if each is None else each.rows
            near = self.now_ms if near_ms is None else near_ms
            self.core.finish_seal(cut.index_id, memory, sealed, rows, near_ms=near)

    def seal(self, *, near_ms: int | None = None) -> None:
        """Cuts, commits and serves the buckets that take new rows."""
        self.begin_seal()
        while self.seals:
            self.finish_seal(self.write_seal(), near_ms=near_ms)

    def drop_empty(self) -> list[str]:
        empty = [bucket.name for bucket in self.core.indexes.droppable()]
        if empty:
            operation = topic_manifest.DropBuckets(buckets=tuple(empty), epoch=EPOCH, delete_after_ms=0)
            assert operation.precondition(self.tip) is None
            self.tip = operation.apply(self.tip)
            for name in empty:
                self.core.drop(name)
                self.store.delete(name)
        return empty

    # ---- checkpoint and crash

    def take_checkpoint(self) -> None:
        """Of everything that is applied, as the shard's owner writes it."""
        parts: tuple[checkpoint_format.TopicPart, ...] = ()
        if self._changed_slot > self.tip.applied:
            cut = bucket_lifecycle.TopicCut(
                topic_id=TOPIC_ID,
                topic="topic",
                incarnation=1,
                indexes=self.core.indexes.cut(),
                sealing=tuple(cut for seal in self.seals for cut in seal.cuts),
                redelivery=self.core.redelivery_cut(),
            )
            parts = (bucket_lifecycle.checkpoint_part(cut),)
        value = checkpoint_format.Checkpoint(shard=1, epoch=EPOCH, slot=ShardSlot(self.slot), topics=parts)
        self.checkpoint = checkpoint_format.encode_checkpoint(value)

    def crash_and_recover(self) -> None:
        self.seals.clear()
        self.staged = slot_format.SlotBuilder()
        self.tip = manifest.decode_topic_manifest(manifest.encode_topic_manifest(self.tip))
        loaded = None if self.checkpoint is None else checkpoint_format.decode_checkpoint(self.checkpoint)
        slots = map(slot_format.decode_slot, self.slots)
        tails = checkpoints.tails_of(loaded, ((header.slot, records) for header, records in slots))
        tail = tails.get(TOPIC_ID, checkpoints.NOTHING)
        part = checkpoints.counting_part(self.tip, tail)
        objects = recovery.TopicReads(self.store, InlineExecutor()).objects(self.tip, part)
        self.core = self._new_core()
        recovery.restore(self.core, self.tip, objects, part, elapsed_ms=0)
        recovery.replay(self.core, self.tip, tail, elapsed_ms=0)
