"""Which rows the checkpoint and the sections of a shard know of: that wait there, or that left.

Owns: reading them for some topics, and what of it accounts for a position.
Does not own: rows of buckets (`row_tasks`).

The sections above the checkpoint before the newest are read, also those that the newest covers: what they say of a row
that has left since tells that it was not lost.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterable, Set
from typing import TypeAlias, assert_never

from batch.audit import reading as audit_reading
from batch.engine import log_tails
from batch.engine.root import Root
from storage_backends import log_reading, object_store, progress_objects
from storage_backends.formats import (
    checkpoint_format,
    format_errors,
    index_ids,
    position_bitmap,
    redelivery_columns,
    slot_format,
)
from storage_backends.formats.manifest import Progress, ShardManifest, TopicManifest
from storage_backends.formats.position_bitmap import NO_POSITIONS, PositionBitmap, PositionSet
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import (
    AcknowledgeRecord,
    AddRecord,
    DeadLetterRecord,
    GoneRecord,
    NackRecord,
    PurgeRecord,
    Record,
    ReplayRecord,
    RescheduleRecord,
    WaiveRecord,
)
from storage_backends.slot_log import SlotLogs

Bitmaps: TypeAlias = dict[tuple[str, int], list[PositionBitmap]]


@dataclasses.dataclass(slots=True)
class HeldRows:
    """By topic id and index: positions that wait in sections or checkpoint or left as a whole; and, with the
    subscription, those that it alone is done with.
    """

    root: Root
    _positions: Bitmaps = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    _done: dict[tuple[str, int, int], list[PositionBitmap]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )

    def accounted(self, tip: TopicManifest, index_id: int) -> PositionSet:
        """The positions of an index of which it is known where they are, or that they left; those of buckets apart.

        Raises the store's errors, and FormatError.
        """
        found = PositionSet.of(self._positions.get((tip.topic_id, index_id), ()))
        owed = [each.subscription_id for each in tip.subscriptions if index_ids.serves(index_id, each.subscription_id)]
        by_all: PositionSet | None = None
        for subscription_id in owed:
            done = PositionSet.of(self._done.get((tip.topic_id, index_id, subscription_id), ()))
            by_all = done if by_all is None else by_all & done
        found |= NO_POSITIONS if by_all is None else by_all
        return found | PositionSet.of(_dead_letters(progress_objects.progress_of(self.root.store, tip), index_id))

    # ---- filling

    def take_checkpoint(self, found: checkpoint_format.Checkpoint, wanted: Set[str]) -> None:
        """Records that the rows which a checkpoint holds of the wanted topics wait, by index. Raises FormatError."""
        for part in found.topics:
            if part.topic_id not in wanted:
                continue
            self._wait(part.topic_id, index_ids.SHARED, part.mutable_rows)
            for own in part.own_rows:
                self._wait(part.topic_id, own.subscription_id, own.rows)
            for sealing in part.sealing:
                self._wait(part.topic_id, sealing.subscription_id, sealing.rows)
            for carried in part.carried:
                for record in carried.records:
                    self.take(record.decoded() if isinstance(record, slot_format.StoredRecord) else record)

    def take(self, record: Record) -> None:
        """What a decision says of rows."""
        topic_id = record.topic_id
        match record:
            case AddRecord():
                self._wait(topic_id, record.subscription_id, record.rows)
            case RescheduleRecord():
                # Its rows leave the one index and wait in the shared one.
                self._wait(topic_id, record.subscription_id, record.rows)
                self._wait(topic_id, index_ids.SHARED, record.rows)
            case NackRecord() | ReplayRecord():
                self._wait(topic_id, record.index_id, record.rows)
            case GoneRecord():
                self._positions[topic_id, record.subscription_id] += record.positions
            case AcknowledgeRecord() | DeadLetterRecord():
                key = topic_id, record.index_id, record.subscription_id
                self._done[key] += _bitmaps(record.rows)
            case WaiveRecord():
                self._done[topic_id, index_ids.SHARED, record.subscription_id] += record.positions
            case PurgeRecord():
                pass
            case _:
                assert_never(record)

    def _wait(self, topic_id: str, index_id: int, rows: Rows) -> None:
        self._positions[topic_id, index_id] += _bitmaps(rows)


def _bitmaps(rows: Rows) -> tuple[PositionBitmap, ...]:
    return position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)


def _dead_letters(progress: Progress, index_id: int) -> Iterable[PositionBitmap]:
    """The positions of dead letters of subscriptions that the index serves: they left, and are known."""
    for each in progress.redeliveries:
        if each.dead_letters is None or not index_ids.serves(index_id, each.subscription_id):
            continue
        letters = redelivery_columns.decode_dead_letters(each.dead_letters)
        yield from position_bitmap.position_bitmaps(letters.ledger_id, letters.entry_id)


def read(root: Root, shard: int, wanted: Set[str], *, tries_max: int) -> HeldRows | None:
    """What checkpoint and sections hold of the topics with these ids; None when they changed each time meanwhile.

    Raises the store's errors, Damaged among them.
    """
    with concurrent.futures.ThreadPoolExecutor(audit_reading.READ_AHEAD, thread_name_prefix="audit") as threads:
        for _ in range(tries_max):
            before = _tip(root, shard)
            found = HeldRows(root)
            if before is None:
                return found
            try:
                _read_checkpoint(root, before, found, wanted)
                _read_sections(root.logs(threads), before, found, wanted)
            except (object_store.Damaged, object_store.NotFound):
                if _stands(before, _tip(root, shard)):
                    raise
            else:
                if _stands(before, _tip(root, shard)):
                    return found
    return None


def _tip(root: Root, shard: int) -> ShardManifest | None:
    tip = root.shard_tip(shard)
    return None if tip is None else tip.manifest


def _stands(before: ShardManifest, now: ShardManifest | None) -> bool:
    """Whether what was read by a manifest is all there is, as of the other one."""
    return (
        now is not None
        and now.checkpoint == before.checkpoint
        and log_reading.judged(before, now) is log_reading.Verdict.STANDS
    )


def _read_checkpoint(root: Root, tip: ShardManifest, found: HeldRows, wanted: Set[str]) -> None:
    """Raises Damaged, NotFound, and the store's errors."""
    if tip.checkpoint is None:
        return
    key = tip.checkpoint.object.name
    try:
        found.take_checkpoint(checkpoint_format.decode_checkpoint(root.store.get(key)), wanted)
    except format_errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error


def _read_sections(logs: SlotLogs, tip: ShardManifest, found: HeldRows, wanted: Set[str]) -> None:
    """Raises Damaged, and the store's errors."""
    tail = log_tails.read_tail(logs, tip, tip.previous_slot)
    for key, section in zip(tail.keys, tail.sections, strict=True):
        try:
            for record in section.records:
                if record.topic_id in wanted:
                    found.take(record.decoded())
        except format_errors.FormatError as error:
            raise object_store.Damaged(key, str(error)) from error
