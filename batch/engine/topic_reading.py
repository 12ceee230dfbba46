"""Reads what topics hold as of now from the store alone, while daemons may be serving them.

The stored state of a topic (its manifest, or its part of the checkpoint if that is newer) becomes events that all later
decisions follow; `replay` applies them. `shard_reading` reads checkpoint and sections. A topic that changed meanwhile
is read again.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from batch.engine import replay
from batch.engine.replay import STORED_BITS_AT, STORED_ROWS_AT, Added, Decisions, Nacked, Settled
from batch.engine.root import Root, TopicPlace
from batch.engine.shard_reading import Beginning, ShardReading, begin_together
from batch.engine.topic_contents import BucketState, NackedRows, SubscriptionContents, TopicContents, UnsealedRows
from storage_backends import bucket_reading, commit
from storage_backends.checkpoints import NOTHING, TopicTail, counting_part, still_sealing
from storage_backends.formats import format_errors, index_ids, merge, redelivery_columns, slot_format
from storage_backends.formats.bucket_format import BucketMetadata
from storage_backends.formats.checkpoint_format import CarriedSlot, TopicPart
from storage_backends.formats.manifest import BucketProgress, LiveBucket, Progress, TopicManifest
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionSet, position_bitmaps, positions_of
from storage_backends.formats.record_columns import Record
from storage_backends.formats.row_columns import Rows
from storage_backends.object_store import NotFound, ObjectStore, StoreError, unreadable

log = logging.getLogger(__name__)

READS_MAX: Final = 16
"""Requests to the store at once"""

GROUP_TOPICS: Final = 256
"""Manifests that are read together, before the sections written since are read"""

SHARDS_TOGETHER: Final = 16
"""Shards that are begun together: each log is read once for all of them, and their sections are in memory at once."""

ATTEMPTS_MAX: Final = 5
"""Most readings of a topic whose manifest changes meanwhile"""


def read_states(
    root: Root,
    places: Sequence[TopicPlace] | None = None,
    *,
    failed: Callable[[TopicPlace, StoreError], None] | None = None,
) -> Iterator[TopicContents]:
    """Yield the topics at these places, or all that are listed, by shard, one at a time.

    Topics that do not exist, or were deleted, are left out. `failed` is called with a topic that cannot be read, and
    the error; the others follow. It is called for each topic of a shard whose manifest, checkpoint or sections cannot
    be read. Without it the error is raised: Damaged with the key of the object, NotFound for one that is named and
    missing, and the store's other errors.
    """
    with concurrent.futures.ThreadPoolExecutor(READS_MAX, thread_name_prefix="reads") as executor:
        shards = range(root.shards) if places is None else sorted({place.shard for place in places})
        for first in range(0, len(shards), SHARDS_TOGETHER):
            together = shards[first : first + SHARDS_TOGETHER]
            begun = begin_together(root, together, executor) if len(together) > 1 else {}
            for shard in together:
                here = (
                    root.listed(shard) if places is None else sorted({each for each in places if each.shard == shard})
                )
                if here:
                    yield from _of_shard(root, here, executor, failed, begun.pop(shard, None))


def _of_shard(
    root: Root,
    places: Sequence[TopicPlace],
    executor: concurrent.futures.Executor,
    failed: Callable[[TopicPlace, StoreError], None] | None,
    begun: Beginning | None,
) -> Iterator[TopicContents]:
    only = {place.topic_id for place in places}
    reading = ShardReading(root, places[0].shard, executor, only=only, begun=begun)
    for first in range(0, len(places), GROUP_TOPICS):
        group = places[first : first + GROUP_TOPICS]
        try:
            tips, tails = reading.around(functools.partial(_tips, root, group, executor))
        except StoreError as error:
            if failed is None:
                raise
            for place in group:
                failed(place, error)
            continue
        for place, tip in zip(group, tips, strict=True):
            try:
                state = _state_of(reading, place, tip, tails.get(place.topic_id, NOTHING))
            except StoreError as error:
                if failed is None:
                    raise
                failed(place, error)
                continue
            if state is not None:
                yield state


_FoundTip: TypeAlias = commit.Tip[TopicManifest] | StoreError | None


def _tips(root: Root, places: Sequence[TopicPlace], executor: concurrent.futures.Executor) -> list[_FoundTip]:
    """Read the newest manifest of each topic; return it, or the error."""

    def tip_of(place: TopicPlace) -> _FoundTip:
        try:
            return root.tip(place)
        except StoreError as error:
            return error

    return list(executor.map(tip_of, places))


def _state_of(reading: ShardReading, place: TopicPlace, tip: _FoundTip, tail: TopicTail) -> TopicContents | None:
    for attempt in itertools.count(1):
        if isinstance(tip, StoreError):
            raise tip
        if tip is None or tip.manifest.deleted:
            break
        try:
            return _TopicReading(reading, place, tip, tail).state()
        except NotFound as error:
            # An object that it names was replaced, and collected; or it is lost.
            newer, tails = reading.around(functools.partial(reading.root.tip, place))
            if attempt == ATTEMPTS_MAX or (newer is not None and newer.number == tip.number):
                raise
            tip, tail = newer, tails.get(place.topic_id, NOTHING)
            log.info("reading topic %s again: %s", place.topic_id, error)
    return None


class _TopicReading:
    """One topic by one manifest."""

    def __init__(
        self, reading: ShardReading, place: TopicPlace, tip: commit.Tip[TopicManifest], tail: TopicTail
    ) -> None:
        self._store: ObjectStore = reading.root.store
        self._executor = reading.executor
        self._reading = reading
        self._place = place
        self._tip = tip
        self._manifest = tip.manifest
        self._tail = tail
        self._opened: dict[str, BucketMetadata] = {}

    def state(self) -> TopicContents:
        manifest = self._manifest
        part = counting_part(manifest, self._tail)
        reading = self._reading
        named = reading.checkpoint_key if part is not None else reading.root.log(self._place).key(self._tip.number)
        stored = bucket_reading.progress_of(self._store, manifest) if part is None else part.progress
        decisions = Decisions(manifest)
        try:
            buckets = self._stored_buckets(stored, part, decisions)
            loose = {} if part is None else self._stored_rows(part, stored, decisions)
            self._stored_redeliveries(stored, decisions)
        except format_errors.FormatError as error:
            raise unreadable(named, error, f"topic {manifest.topic}: ") from error
        for slot in self._tail.slots_above(manifest):
            decisions.apply(slot.slot, self._decoded(slot))
        indexes = [
            self._index(decisions, index_id, buckets.get(index_id, []), loose.get(index_id))
            for index_id in sorted({*buckets, *(events.index_id for events in decisions.indexes)})
        ]
        by_name = {bucket.live.object.name: bucket for index in indexes for bucket in index.buckets}
        return TopicContents(
            place=self._place,
            tip=self._tip,
            applied_slot=max(manifest.applied, self._reading.last_slot),
            # In the manifest's order, without those of deleted indexes
            buckets=tuple(by_name[live.object.name] for live in manifest.live if live.object.name in by_name),
            unsealed=tuple(index.unsealed for index in indexes if len(index.unsealed.rows)),
            subscriptions=tuple(
                SubscriptionContents(
                    each,
                    tuple(
                        index.nacked[number] for index in indexes if (number := each.subscription_id) in index.nacked
                    ),
                    decisions.dead_letters[each.subscription_id].remaining(),
                )
                for each in manifest.subscriptions
            ),
        )

    def _decoded(self, slot: CarriedSlot) -> list[Record]:
        try:
            return [each.decoded() if isinstance(each, slot_format.StoredRecord) else each for each in slot.records]
        except format_errors.FormatError as error:
            key = self._reading.slot_key(slot.slot)
            raise unreadable(key, error, f"topic {self._manifest.topic}: ") from error

    # ---- the stored state

    def _stored_buckets(
        self, stored: Progress, part: TopicPart | None, decisions: Decisions
    ) -> dict[int, list[BucketState]]:
        """Return the live buckets by index, with the stored state of each and of those that were merged into it."""
        by_bucket = {each.bucket: each for each in stored.buckets}
        live_here = [live for live in self._manifest.live if decisions.has_index(live.subscription_id)]
        # Another bucket of the part's seals is live, or was merged or dropped after its seal.
        sealing = () if part is None else still_sealing(self._manifest, part)
        in_memory = {"", *(each.bucket for each in sealing)}
        if by_bucket.keys() - in_memory - {live.object.name for live in live_here}:
            # Some bucket was merged since, or dropped.
            self._open([live for live in live_here if live.level and not live.quarantined])
        found: dict[int, list[BucketState]] = {}
        for live in live_here:
            bits = self._bits_of(live, by_bucket)
            acknowledged = {
                number: positions
                for number, each in bits.acknowledged.items()
                if decisions.is_subscription(number) and (positions := each - bits.gone)
            }
            found.setdefault(live.subscription_id, []).append(BucketState(live, bits.gone, acknowledged))
        return found

    def _bits_of(self, live: LiveBucket, by_bucket: Mapping[str, BucketProgress]) -> merge.Bits:
        name = live.object.name
        opened = self._opened.get(name)
        kept = [each for each in opened.kept if each.source in by_bucket] if opened is not None else []
        named = tuple(
            by_bucket[key] for key in (name, *dict.fromkeys(each.source for each in kept)) if key in by_bucket
        )
        return merge.bits_of(name, kept, Progress(buckets=named))

    def _stored_rows(self, part: TopicPart, stored: Progress, decisions: Decisions) -> dict[int, UnsealedRows]:
        """Record the rows of mutable buckets as events; return them by index as they are without other events."""
        by_bucket = {each.bucket: each for each in stored.buckets}
        kept: dict[int, list[tuple[Rows, dict[int, PositionSet]]]] = {}
        parts = [(index_ids.SHARED, part.mutable_rows, by_bucket.get(""))]
        parts += [(own.subscription_id, own.rows, None) for own in part.own_rows]
        parts += [
            (sealing.subscription_id, sealing.rows, by_bucket.get(sealing.bucket))
            for sealing in still_sealing(self._manifest, part)
        ]
        for index_id, rows, progress in parts:
            if not len(rows) or not decisions.has_index(index_id):
                continue
            bits = merge.Bits(NO_POSITIONS, {})
            if progress is not None:
                bits = merge.bits_of(progress.bucket, (), Progress(buckets=(progress,)))
            if bits.gone:
                rows = rows.take(~bits.gone.mask_of(rows.ledger_id, rows.entry_id))
            # A few bytes may name 2^32 positions: expand those alone that have rows.
            held = (
                PositionSet.of(position_bitmaps(rows.ledger_id, rows.entry_id)) if bits.acknowledged else NO_POSITIONS
            )
            acknowledged = {
                number: positions & held
                for number, positions in bits.acknowledged.items()
                if decisions.is_subscription(number)
            }
            events = decisions.of(index_id)
            events.added.append(Added(STORED_ROWS_AT, rows))
            for number, positions in acknowledged.items():
                events.settled.append(Settled(STORED_BITS_AT, 0, number, *positions_of(positions.bitmaps()), None))
            kept.setdefault(index_id, []).append((rows, acknowledged))
        return {index_id: _unsealed(index_id, each) for index_id, each in kept.items()}

    def _stored_redeliveries(self, stored: Progress, decisions: Decisions) -> None:
        for each in stored.redeliveries:
            number = each.subscription_id
            if not decisions.is_subscription(number):
                continue
            for part in each.nacked:
                if index_ids.serves(part.index_id, number):
                    rows, redeliver_at_ms = redelivery_columns.decode_nacked(part)
                    decisions.of(part.index_id).nacked.append(Nacked(STORED_BITS_AT, number, rows, redeliver_at_ms))
            if each.dead_letters is not None:
                decisions.dead_letters[number].came(redelivery_columns.decode_dead_letters(each.dead_letters))

    # ---- decisions since

    def _index(
        self, decisions: Decisions, index_id: int, buckets: list[BucketState], loose: UnsealedRows | None
    ) -> replay.IndexState:
        events = decisions.of(index_id)
        lost = any(bucket.live.quarantined for bucket in buckets)
        if events.decided or (lost and events.nacked):
            return replay.replayed(events, buckets, decisions.subscriptions, self._positions)
        # The stored state is complete.
        return replay.IndexState(
            tuple(buckets),
            _unsealed(index_id, []) if loose is None else loose,
            {each.by: NackedRows(index_id, each.rows, each.redeliver_at_ms) for each in events.nacked},
        )

    def _positions(self, bucket: BucketState) -> PositionSet:
        self._open([bucket.live])
        try:
            return PositionSet.of(self._opened[bucket.live.object.name].positions)
        except format_errors.FormatError as error:
            raise unreadable(bucket.live.object.name, error) from error

    def _open(self, wanted: Sequence[LiveBucket]) -> None:
        missing = [live for live in wanted if live.object.name not in self._opened]
        opened = self._executor.map(lambda live: bucket_reading.open_bucket(self._store, live), missing)
        for live, (_, metadata) in zip(missing, opened, strict=True):
            self._opened[live.object.name] = metadata


def _unsealed(index_id: int, parts: Sequence[tuple[Rows, Mapping[int, PositionSet]]]) -> UnsealedRows:
    acknowledged: dict[int, PositionSet] = {}
    for _, each in parts:
        for number, positions in each.items():
            if positions:
                acknowledged[number] = acknowledged.get(number, NO_POSITIONS) | positions
    return UnsealedRows(index_id, Rows.concat([rows for rows, _ in parts]).sorted_by_due(), acknowledged)
