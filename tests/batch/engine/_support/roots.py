"""A root without a daemon: topics with sealed buckets and with progress, as manifests and objects.

Owns: writing it, and what rows are waiting in it by the newest manifests. Does not own: what a daemon does with it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from storage_backends import bucket_reading, commit, root_format, topic_manifest
from storage_backends.formats import bucket_format, index_ids, manifest, merge, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import (
    BucketProgress,
    LiveBucket,
    LogForm,
    Progress,
    TopicManifest,
)
from storage_backends.formats.position_bitmap import PositionSet, position_bitmaps
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import ObjectStore
from storage_backends.topic_manifest import ClaimTopic, Create, Quarantine, Seal

HOUR_MS = 3_600_000
NOW_MS = 4_000_000_000_000
"""In 2096: what is due after it is due later by the machine's clock as well."""

LATER_MS = (NOW_MS + HOUR_MS, NOW_MS + 24 * HOUR_MS)
SHARDS = 2
LIMITS = SegmentLimits()

Positions = Mapping[int, Sequence[int]]
"""Ledger -> entries."""


class StoredTopic:
    """A topic that no daemon serves; its shard's owner is played by the caller."""

    _numbers = itertools.count(1)

    def __init__(self, store: ObjectStore, name: str) -> None:
        self.store = store
        self.name = name
        self.shard = names.shard_of(name, SHARDS)
        self.topic_id = names.topic_id(name)
        self.epoch = 1
        self.slot = 0
        self.log = topic_manifest.topic_log(
            store,
            self.shard,
            self.topic_id,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            jitter=lambda: 0.5,
            new_id=lambda: f"owner-{next(self._numbers):08}",
        )
        self.commit(Create(topic=name, topic_id=self.topic_id, epoch=self.epoch, applied=ShardSlot(self.slot)))

    # ---- what the owner does

    def commit(self, operation: commit.Operation[TopicManifest]) -> None:
        commit.commit(self.log, operation, writer="owner", created_ms=NOW_MS, deadline_s=1.0)

    def take_over(self) -> None:
        self.epoch += 1
        self.commit(ClaimTopic(epoch=self.epoch))

    def seal(
        self, buckets: Sequence[LiveBucket] = (), *, gone: Mapping[str, Positions] | None = None, inline: bool = True
    ) -> None:
        """Buckets become live; what is gone by now is in `gone`, by bucket, beside what was gone before."""
        tip = self.tip()
        progress = _more_gone(bucket_reading.progress_of(self.store, tip), gone or {})
        reference = None
        if not inline:
            body = manifest.encode_progress(progress)
            key = names.progress_key(self.shard, self.topic_id, tip.head.number, f"p{next(self._numbers):08}")
            self.store.put(key, body)
            reference = topic_manifest.reference_to(key, tip.head.number, body)
        self.commit(
            Seal(
                buckets=tuple(buckets),
                progress=progress if inline else None,
                progress_object=reference,
                slot_from=ShardSlot(self.slot),
                slot_to=ShardSlot(self.slot + 1),
                epoch=self.epoch,
                replaced_delete_after_ms=NOW_MS,
            )
        )
        self.slot += 1

    def quarantine(self, name: str) -> None:
        self.commit(Quarantine(bucket=name, damage="planted", slot=ShardSlot(self.slot), epoch=self.epoch))

    def write(self, rows: Rows, *, index: int = index_ids.SHARED) -> LiveBucket:
        """A bucket object that no manifest names yet."""
        base = self.tip().head.number
        key = names.bucket_key(self.shard, self.topic_id, base, f"s{next(self._numbers):08}")
        encoded = bucket_format.encode_bucket(
            rows.sorted_by_due(), topic=self.name, subscription_id=index, limits=LIMITS, compatible=False
        )
        self.store.put(key, encoded.body)
        return encoded.live_bucket(key, base=base, subscription_id=index)

    def add(self, ledgers: Iterable[int], rows: int = 20, *, index: int = index_ids.SHARED) -> list[LiveBucket]:
        """One bucket for each ledger, sealed at once."""
        made = [self.write(rows_of_ledger(ledger, rows), index=index) for ledger in ledgers]
        self.seal(made)
        return made

    # ---- contents

    def tip(self) -> TopicManifest:
        tip = self.log.read_tip()
        assert tip is not None
        return tip.manifest

    def waiting(self) -> list[tuple[int, int, int, int]]:
        """(index, ledger, entry, due) of every row that is in a live bucket and not gone, in order; one that is there
        twice is there twice.
        """
        tip = self.tip()
        progress = bucket_reading.progress_of(self.store, tip)
        found: list[tuple[int, int, int, int]] = []
        for live in tip.live:
            metadata, rows = bucket_reading.read_bucket(self.store, live)
            gone = merge.bits_of(live.object.name, metadata.kept, progress).gone
            left = rows.take(~gone.mask_of(rows.ledger_id, rows.entry_id))
            columns = (left.ledger_id.tolist(), left.entry_id.tolist(), left.deliver_at_ms.tolist())
            found += [(live.subscription_id, *row) for row in zip(*columns, strict=True)]
        return sorted(found)


def make_root(store: ObjectStore, log_form: LogForm = LogForm.OBJECTS) -> None:
    root_format.read_or_create(store, shards=SHARDS, log_form=log_form, root_id="root-1", created_ms=NOW_MS)


def rows_of_ledger(ledger: int, count: int, due_ms: tuple[int, int] = LATER_MS) -> Rows:
    """Entries 0, 1, ... of a ledger, their due times spread at random, the same each time."""
    drawn = np.random.default_rng(ledger).integers(due_ms[0], due_ms[1], count, dtype=np.uint64, endpoint=True)
    return Rows(drawn, np.full(count, ledger, np.uint64), np.arange(count, dtype=np.uint64))


def _more_gone(progress: Progress, gone: Mapping[str, Positions]) -> Progress:
    sets = {part.bucket: PositionSet.of(part.gone) for part in progress.buckets}
    for name, positions in gone.items():
        pairs = [(ledger, entry) for ledger, entries in positions.items() for entry in entries]
        ledgers, entries = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
        added = PositionSet.of(position_bitmaps(ledgers, entries))
        sets[name] = sets[name] | added if name in sets else added
    buckets = tuple(BucketProgress(bucket=name, gone=found.bitmaps()) for name, found in sorted(sets.items()))
    return dataclasses.replace(progress, buckets=buckets)
