"""Recovers one topic from its manifest, its part of the shard checkpoint and the sections above it.

A bucket whose seal was cut before the part's slot, and that is not in the manifest by then, is in the part with its
rows. If `applied` has reached the cut's slot, its rows come from the bucket and only its bits are used. Else they are
rows of the mutable bucket. Stored progress of a bucket that was merged since applies to the merged one. Redeliveries in
progress name positions, whatever bucket their rows are in. Rows in the indexes of a deleted subscription are owed to no
subscription: they are left out.

`merged_runs` merges the decisions of many slots, so that replay applies few large ones: an ordinary service has a slot
a row. Only adds and acknowledgements are merged, in runs that nothing else interrupts. Within a run the adds come
first: those of different positions commute, and an acknowledgement of a position never overtakes its add. A position
that is added again after its acknowledgement ends the run before that add.

`ShardClaim` is the result of taking a shard over. `storage_backends.checkpoints` decides which stored part applies.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from pyroaring import BitMap, BitMap64

from daemon.core.decisions.topic_state import TopicState
from daemon.core.deletions.ledger_deletions import LedgerDeletions
from daemon.core.index import entitlement
from daemon.core.index.bucket import GoneSet, QuarantinedBucket, SealedBucket
from daemon.core.index.index import Index
from daemon.core.index.position_keys import KeyedRows, PageTable, bitmap_of, contained, pages_of
from daemon.errors import Corruption, InvariantViolated
from daemon.runtime.failure_scope import NewerData
from daemon.topic import bucket_reads, stored_topic
from daemon.topic.stored_topic import PropertiesById
from storage_backends import checkpoints, commit, object_store
from storage_backends.checkpoints import DecodedSection, TopicTail
from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    index_ids,
    log_slot_format,
    manifest,
    slot_format,
)
from storage_backends.formats.checkpoint_format import CarriedSlot
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import BucketProgress, ShardManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, AddRecord, Record

# Records that are merged together. More would hardly be faster, and are in memory twice.
RUN_RECORDS_MAX = 5_000

Decided: TypeAlias = tuple[int, Record]


def merged_runs(decided: Iterable[Decided], *, created_slots: Iterable[int]) -> Iterator[Decided]:
    """Merge the decisions of one topic into fewer ones that lead to the same state, each with its last slot.

    `created_slots` are those of its subscriptions; a decision applies only to those created in a slot below its own.
    """
    borders = sorted(created_slots)

    def run_of(one: Decided) -> tuple[bool, int]:
        slot, record = one
        return isinstance(record, AddRecord | AcknowledgeRecord), bisect_left(borders, slot)

    for (may_merge, _), run in itertools.groupby(decided, run_of):
        if not may_merge:
            yield from run
            continue
        while part := list(itertools.islice(run, RUN_RECORDS_MAX)):
            while part:
                end = _first_added_again(part)
                yield from _as_few(part[:end])
                part = part[end:]


def _as_few(run: Sequence[Decided]) -> Iterator[Decided]:
    slot = run[-1][0]
    for kind in (AddRecord, AcknowledgeRecord):
        groups: dict[tuple[object, ...], list[Record]] = {}
        for _, record in run:
            if isinstance(record, kind):
                groups.setdefault(slot_format.merge_key(record), []).append(record)
        for records in groups.values():
            yield slot, slot_format.merged(records)


def _first_added_again(run: Sequence[Decided]) -> int:
    """Return the place of the first add of a position that an earlier record of the run acknowledges.

    Returns the number of records if there is none.
    """
    records = [record for _, record in run]
    rows = [record.rows for record in records if isinstance(record, AddRecord | AcknowledgeRecord)]
    place = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    is_add = np.repeat([isinstance(record, AddRecord) for record in records], [len(each) for each in rows])
    if is_add.all() or not is_add.any():
        return len(run)
    order, begins = _by_position(rows)
    place, is_add = place[order], is_add[order]
    first_left = np.minimum.reduceat(np.where(is_add, len(run), place), begins)
    again = is_add & (place > np.repeat(first_left, np.diff(begins, append=len(place))))
    return int(place[again].min()) if again.any() else len(run)


def _by_position(rows: Sequence[Rows]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the order of all rows by position, and where each position begins in it."""
    ledger_id = np.concatenate([each.ledger_id for each in rows])
    entry_id = np.concatenate([each.entry_id for each in rows])
    order = np.lexsort((entry_id, ledger_id))
    ledger_id, entry_id = ledger_id[order], entry_id[order]
    other = np.ones(len(order), dtype=np.bool_)
    other[1:] = (ledger_id[1:] != ledger_id[:-1]) | (entry_id[1:] != entry_id[:-1])
    return order, np.flatnonzero(other)


def deletion_records(
    loaded: checkpoint_format.Checkpoint | None,
    slots: Iterable[tuple[log_slot_format.ShardSlot, Sequence[slot_format.DeletionRecord]]],
) -> list[slot_format.DeletionRecord]:
    """Return the decisions on the shard's deletions above the checkpoint, in order."""
    covered = log_slot_format.BEFORE_THE_FIRST if loaded is None else loaded.slot
    return [record for slot, records in slots if slot > covered for record in records]


def deletions_of(
    loaded: checkpoint_format.Checkpoint | None,
    slots: Iterable[tuple[log_slot_format.ShardSlot, Sequence[slot_format.DeletionRecord]]],
) -> LedgerDeletions:
    """Return the deletions of the shard as of now. O(n): for a thread."""
    restored = LedgerDeletions.restored(None if loaded is None else loaded.deletions)
    for record in deletion_records(loaded, slots):
        restored.apply(record)
    return restored


def carried_part(topic_id: str, tail: TopicTail) -> checkpoint_format.TopicPart:
    """Make the checkpoint part of a topic that is not in memory; its slot is not below any of the tail's."""
    part = tail.part
    if part is None:
        # Its name and incarnation are in its manifest, which was not read.
        part = checkpoint_format.TopicPart(
            topic_id=topic_id, topic="", incarnation=0, mutable_rows=Rows.empty(), slot=log_slot_format.BEFORE_THE_FIRST
        )
    return dataclasses.replace(part, carried=tail.slots)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OpenedBucket:
    """The result of reading a live bucket.

    `head` is its table and entry 0, or None if they are damaged or missing; then `damage` describes that.
    """

    head: tuple[bucket_format.BucketTable, bucket_format.BucketMetadata] | None
    damage: str = ""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicObjects:
    """The objects of a topic: its live buckets by name, its progress, and the properties of its subscriptions."""

    buckets: Mapping[str, OpenedBucket]
    progress: manifest.Progress
    properties: PropertiesById


class TopicReads:
    """A reader that reads the objects of one topic's manifests in parallel, each once.

    Used in one thread, which must not be one of `executor`.
    """

    def __init__(self, store: object_store.ObjectStore, executor: concurrent.futures.Executor) -> None:
        self._store = store
        self._executor = executor
        self._buckets: dict[str, concurrent.futures.Future[OpenedBucket]] = {}
        self._progress: dict[str, concurrent.futures.Future[manifest.Progress]] = {}
        self._properties: dict[str, concurrent.futures.Future[PropertiesById]] = {}

    def begin(self, tip: manifest.TopicManifest, part: checkpoint_format.TopicPart | None) -> None:
        """Begin to read the objects that the manifest names.

        `part` is the checkpoint part that applies, or None; progress is not read if there is one.
        """
        for live in tip.live:
            if live.object.name not in self._buckets:
                self._buckets[live.object.name] = self._executor.submit(_opened, self._store, live)
        if part is None and tip.progress_object is not None and tip.progress_object.name not in self._progress:
            read = self._executor.submit(stored_topic.progress_of_manifest, self._store, tip)
            self._progress[tip.progress_object.name] = read
        if (named := tip.properties_object) is not None and named.name not in self._properties:
            self._properties[named.name] = self._executor.submit(stored_topic.read_properties, self._store, named)

    def objects(self, tip: manifest.TopicManifest, part: checkpoint_format.TopicPart | None) -> TopicObjects:
        """Return the objects that the manifest names.

        Raises Corruption if progress or properties are damaged, NewerData if only a newer release reads a bucket, and
        the store's errors.
        """
        self.begin(tip, part)
        buckets = {live.object.name: self._buckets[live.object.name].result() for live in tip.live}
        named = tip.properties_object
        properties = {} if named is None else self._properties[named.name].result()
        if part is not None:
            progress = part.progress
        elif tip.progress_object is not None:
            progress = self._progress[tip.progress_object.name].result()
        else:
            progress = tip.progress or manifest.Progress()
        return TopicObjects(buckets, progress, properties)


def _opened(store: object_store.ObjectStore, live: manifest.LiveBucket) -> OpenedBucket:
    try:
        return OpenedBucket(bucket_reads.open_bucket(store, live))
    except NewerData:
        raise
    except Corruption as error:
        return OpenedBucket(None, str(error))


def restore(
    topic: TopicState,
    tip: manifest.TopicManifest,
    objects: TopicObjects,
    part: checkpoint_format.TopicPart | None,
    *,
    elapsed_ms: int,
) -> None:
    """Put the state as of the later of `applied` and the part's slot into a new topic. Raises Corruption.

    In `tip` every damaged bucket is quarantined.
    """
    by_bucket = {each.bucket: each for each in objects.progress.buckets}
    for live in tip.live:
        index = _index(topic, live.subscription_id)
        if index is None:
            continue
        head = objects.buckets[live.object.name].head
        bits = stored_topic.progress_of_bucket(live.object.name, () if head is None else head[1].kept, by_bucket)
        if live.quarantined:
            index.add_quarantined(_quarantined_bucket(index.pages, live, None if head is None else head[1], bits))
        elif head is None:
            raise InvariantViolated(f"bucket {live.object.name} is damaged and not quarantined")
        else:
            index.add_sealed(_sealed_bucket(index.pages, live, *head, bits))
    if part is not None:
        _restore_rows(topic, 0, part.mutable_rows, by_bucket.get(""), elapsed_ms)
        for own in part.own_rows:
            _restore_rows(topic, own.subscription_id, own.rows, None, elapsed_ms)
        for sealing in checkpoints.still_sealing(tip, part):
            bits = by_bucket.get(sealing.bucket)
            _restore_rows(topic, sealing.subscription_id, sealing.rows, bits, elapsed_ms)
    entitlement.dismiss_all_but(topic.index, topic.subscriptions)
    stored_topic.restore_redeliveries(topic, objects.progress)
    for subscription_id, state in topic.subscriptions.items():
        state.properties = objects.properties.get(subscription_id, ())


def _index(topic: TopicState, index_id: int) -> Index | None:
    """Return an index of the topic, or None if its subscription was deleted."""
    if index_id != index_ids.SHARED and index_ids.subscription_of(index_id) not in topic.subscriptions:
        return None
    return topic.indexes.of(index_id)


def _sealed_bucket(
    pages: PageTable,
    live: manifest.LiveBucket,
    table: bucket_format.BucketTable,
    metadata: bucket_format.BucketMetadata,
    bits: BucketProgress | None,
) -> SealedBucket:
    rows = pages.from_stored(metadata.positions)
    gone = pages.from_stored(bits.gone) if bits is not None else BitMap64()
    named = pages_of(rows)
    with_ids = pages.from_stored(metadata.id_positions) or None
    restored = SealedBucket(
        live, table.segments, present=rows - gone, gone=GoneSet(gone), pages=pages, with_ids=with_ids
    )
    if bits is not None:
        restored.acknowledged = stored_topic.acknowledged_from_stored(pages, bits.acknowledged)
    # Some pages may have no row left.
    pages.forget_unheld(named)
    return restored


def _quarantined_bucket(
    pages: PageTable,
    live: manifest.LiveBucket,
    metadata: bucket_format.BucketMetadata | None,
    bits: BucketProgress | None,
) -> QuarantinedBucket:
    rows = None if metadata is None else pages.from_stored(metadata.positions)
    gone = pages.from_stored(bits.gone) if bits is not None else BitMap64()
    acknowledged = stored_topic.acknowledged_from_stored(pages, bits.acknowledged) if bits is not None else {}
    named = BitMap.union(*map(pages_of, (gone, *acknowledged.values(), *(() if rows is None else (rows,)))))
    restored = QuarantinedBucket(
        live,
        present=None if rows is None else rows - gone,
        gone=GoneSet(gone),
        acknowledged=acknowledged,
        pages=pages,
    )
    pages.forget_unheld(named)
    return restored


def _restore_rows(topic: TopicState, index_id: int, rows: Rows, bits: BucketProgress | None, elapsed_ms: int) -> None:
    """Put rows into the mutable bucket of an index, except those that are gone."""
    index = _index(topic, index_id)
    if index is None:
        return
    mutable, pages = index.mutable, index.pages
    keyed = KeyedRows(rows, pages.intern(rows.ledger_id, rows.entry_id))
    named = pages_of(bitmap_of(keyed.keys))
    if bits is not None and bits.gone:
        keyed = keyed.take(~contained(keyed.keys, pages.from_stored(bits.gone)))
    if len(keyed):
        mutable.add(keyed, bitmap_of(keyed.keys), elapsed_ms=elapsed_ms)
    if bits is not None:
        for number, keys in stored_topic.acknowledged_from_stored(pages, bits.acknowledged).items():
            mutable.acknowledged_by(number).update(keys)
    pages.forget_unheld(named)


def first_due_ms(tip: manifest.TopicManifest, tail: TopicTail) -> int | None:
    """Return a lower bound on the due times and redeliveries of the topic (Unix time, ms), or None if it has no row.

    Returns 0 if only decoding the stored data would show it.
    """
    part = checkpoints.counting_part(tip, tail)
    known = tip.progress if part is None else part.progress
    undecoded = part is None and tip.progress_object is not None
    if undecoded or (known is not None and known.redeliveries) or any(tail.slots_above(tip)):
        return 0
    times = [live.min_deliver_at_ms for live in tip.live if not live.quarantined]
    if part is not None:
        rows = (part.mutable_rows, *(own.rows for own in part.own_rows), *(cut.rows for cut in part.sealing))
        times += [int(each.deliver_at_ms.min()) for each in rows if len(each)]
    return min(times, default=None)


def replay(topic: TopicState, tip: manifest.TopicManifest, tail: TopicTail, *, elapsed_ms: int) -> int:
    """Apply the decisions above the restored state in order; return how many rows they name.

    Raises Corruption if one of them cannot be decoded.
    """
    rows = 0
    decided: Iterable[Decided] = ((slot.slot, record) for slot in tail.slots_above(tip) for record in _decoded(slot))
    if not any(index.quarantined for index in topic.indexes.values()):
        created_slots = (each.stored.created_slot for each in topic.subscriptions.values())
        decided = merged_runs(decided, created_slots=created_slots)
    # Otherwise the slot of each add shows the content of a damaged bucket.
    for number, decision in decided:
        topic.apply(decision, number, elapsed_ms=elapsed_ms)
        rows += decision.row_count
    return rows


def _decoded(slot: CarriedSlot) -> list[slot_format.Record]:
    try:
        return [each.decoded() if isinstance(each, slot_format.StoredRecord) else each for each in slot.records]
    except format_errors.FormatError as error:
        raise Corruption(f"slot {slot.slot}: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True)
class ShardClaim:
    """A shard that was taken over.

    `tip` is the shard manifest that the claim has committed. `last_slot` is the last number that was given before; the
    first section of this owner has the next one. `checkpoint` is the state to begin with; `sections` continue it.
    `deletions` are the ledger deletions of both.
    """

    shard: int
    epoch: int
    tip: commit.Tip[ShardManifest]
    last_slot: ShardSlot
    checkpoint: checkpoint_format.Checkpoint | None
    sections: tuple[DecodedSection, ...]
    deletions: LedgerDeletions

    @property
    def settled(self) -> bool:
        """True if no former owner delivers rows any longer."""
        return self.tip.manifest.settled_epoch == self.epoch
