"""The life of buckets, each rule of it broken: merges, deletions, cancellations, reschedules, own indexes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from daemon.core.decisions.withdrawal_decisions import WithdrawalDecisions
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.position_keys import KeyedRows
from daemon.owner import collection_pass
from daemon.topic import stored_topic
from daemon.topic.bucket_lifecycle import BucketLifecycle
from daemon.topic.merged_buckets import BucketMerging
from daemon.topic.topic_withdrawals import TopicWithdrawals
from storage_backends import shard_listing, topic_manifest
from storage_backends.formats import manifest, merge
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import BucketProgress, LiveBucket, TopicManifest
from storage_backends.formats.slot_format import Record
from storage_backends.shard_listing import Listed
from tests._support.fault_places import JOURNAL
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed

# ---- deletions


def an_orphan_is_deleted_without_a_floor(patch: pytest.MonkeyPatch) -> None:
    """R4: what is on its way into a manifest goes."""

    def orphans(listed: Listed, named: Any, floor: int) -> list[tuple[str, int]]:
        return [(key, size_bytes) for key, (_, size_bytes) in listed.unnamed(named).items()]

    patch.setattr(shard_listing, "orphans", orphans)


def a_tombstone_is_dropped_before_its_object_is_deleted(patch: pytest.MonkeyPatch) -> None:
    """What a crash leaves then nobody ever deletes."""
    collect = collection_pass.Collector.collect_tombstones
    delete = collection_pass.Collector._delete

    def later(self: collection_pass.Collector[Any], warm: Any, *, dry_run: bool = False) -> Any:
        late: list[str] = []
        self._delete = lambda keys: late.extend(keys) or {}  # type: ignore[method-assign,func-returns-value]
        try:
            return collect(self, warm, dry_run=dry_run)
        finally:
            del self._delete
            delete(self, late)

    patch.setattr(collection_pass.Collector, "collect_tombstones", later)


# ---- merges


def a_merge_drops_what_is_gone_in_memory_alone(patch: pytest.MonkeyPatch) -> None:
    plan_of = BucketMerging._plan

    def plan(self: BucketMerging, run: Sequence[str]) -> Any:
        planned = plan_of(self, run)
        index = self._topic.indexes.holding(run[0])
        stored = (
            stored_topic.progress_to_stored(index.pages, index.cut().bits) if index is not None else manifest.Progress()
        )
        return dataclasses.replace(planned, tip=dataclasses.replace(planned.tip, progress=stored, progress_object=None))

    patch.setattr(BucketMerging, "_plan", plan)
    patch.setattr(topic_manifest.Merge, "_not_gone", lambda self, tip: None)


def bits_under_the_names_of_sources_are_overlooked_at_recovery(patch: pytest.MonkeyPatch) -> None:
    def of_bucket(
        name: str, kept: Sequence[KeptRows], by_bucket: Mapping[str, BucketProgress]
    ) -> BucketProgress | None:
        return by_bucket.get(name)

    patch.setattr(stored_topic, "progress_of_bucket", of_bucket)


def the_sources_of_sources_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    def kept(parts: Sequence[Any]) -> tuple[KeptRows, ...]:
        copied = ((part.source.name, part.kept) for part in parts)
        return tuple(KeptRows(source=name, positions=positions.bitmaps()) for name, positions in copied if positions)

    patch.setattr(merge, "_kept", kept)


def an_owner_overwrites_a_merge_by_others(patch: pytest.MonkeyPatch) -> None:
    """Its seals are based on what it committed last, not on the newest manifest."""
    apply = topic_manifest.Seal.apply
    known: dict[tuple[str, int], tuple[LiveBucket, ...]] = {}

    def applied(self: topic_manifest.Seal, tip: TopicManifest | None) -> TopicManifest:
        made = apply(self, tip)
        key = made.topic_id, made.owner_epoch
        brought = {bucket.object.name for bucket in self.buckets}
        new = tuple(bucket for bucket in made.live if bucket.object.name in brought)
        known[key] = (*known[key], *new) if key in known else made.live
        return dataclasses.replace(made, live=known[key])

    patch.setattr(topic_manifest.Seal, "apply", applied)


def a_stale_merge_is_accepted(patch: pytest.MonkeyPatch) -> None:
    """Also when the topic was deleted and born again since it was planned."""
    apply = topic_manifest.Merge.apply

    def applied(self: topic_manifest.Merge, tip: TopicManifest | None) -> TopicManifest:
        existing = topic_manifest.existing(tip)
        if self._merging(existing):
            return apply(self, tip)
        made = () if self.bucket is None else (dataclasses.replace(self.bucket, level=1),)
        return dataclasses.replace(existing, live=(*existing.live, *made))

    patch.setattr(topic_manifest.Merge, "precondition", lambda self, tip: None)
    patch.setattr(topic_manifest.Merge, "apply", applied)


def a_manifest_of_its_own_tells_an_owner_of_no_merge(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketLifecycle, "_names_unknown", lambda life, newest: False)


# ---- cancellations and reschedules


def a_row_that_is_leaving_is_handed_out(patch: pytest.MonkeyPatch) -> None:
    def staying(self: Indexes, due: KeyedRows) -> KeyedRows:
        return due

    patch.setattr(Indexes, "_staying", staying)
    # Else the daemon finds it out itself.
    remove = Index.remove
    patch.setattr(Index, "remove", lambda self, keys: remove(self, keys) and None)


def a_reschedule_leaves_both_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WithdrawalDecisions, "cancelled", lambda self, index, keys: self._indexes.leaving.difference_update(keys)
    )


def a_cancellation_is_answered_before_its_slot(patch: pytest.MonkeyPatch) -> None:
    async def at_once(
        self: TopicWithdrawals,
        records: Sequence[Record],
        staged: Callable[[asyncio.Future[int]], object] = lambda _: None,
    ) -> None:
        if records:
            staged(self._topic.slots.stage(*records))

    patch.setattr(TopicWithdrawals, "_durable", at_once)


def that_rows_leave_is_decided_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    """It is answered when no former owner hands out any more: by then one may have."""
    durable = TopicWithdrawals._durable

    async def later(self: TopicWithdrawals, *arguments: Any) -> None:
        await durable(self, *arguments)
        await self._topic.alone()

    patch.setattr(TopicWithdrawals, "_decidable", _decidable_at_once)
    patch.setattr(TopicWithdrawals, "_durable", later)


def that_rows_have_left_is_answered_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TopicWithdrawals, "_decidable", _decidable_at_once)


async def _decidable_at_once(self: TopicWithdrawals, find: Callable[[], Any]) -> Any:
    """As it is where nobody owned the shard before."""
    async with self._in_time():
        while True:
            await self._topic.gate.passed()
            await self._topic.settle_due()
            asked = find()
            if self._topic.gate.is_open and not self._topic.core.withdrawals.is_staged(asked):
                return asked
            await self._topic.slots.settled()


# ---- own indexes


def buckets_of_a_deleted_subscription_stay(patch: pytest.MonkeyPatch) -> None:
    def owed(buckets: Iterable[LiveBucket], subscriptions: Any) -> tuple[LiveBucket, ...]:
        return tuple(buckets)

    patch.setattr(topic_manifest, "_owed", owed)


# Buckets are small and many, so that merges are, and collection comes at its earliest moment.
SMALL = (
    "bucket.min_index_count_per_bucket=5",
    "bucket.rows_max=10",
    "bucket.max_num_buckets=2",
    "collection.interval_s=0.5",
    "collection.orphan_interval_s=0.5",
    "collection.grace_s=0.0",
    "collection.orphan_age_s=20.0",
)
MANY_BUCKETS = Directed(settings=SMALL, chaos_s=20.0)
# Only others merge, and the owner is killed when it has not heard of it.
BY_OTHERS = Directed(
    tuple(Trouble("kill", "put_if_absent", JOURNAL, nth, False, 0.3) for nth in (20, 40, 60)),
    settings=(*SMALL, "bucket.max_num_buckets=-1", "journal.checkpoint_slots=2"),
    mergers=2,
    chaos_s=20.0,
)
OVERTAKEN = Directed(
    tuple(Trouble("suspend", "put_if_absent", JOURNAL, nth, False, 13.0) for nth in (9, 30, 60)),
    settings=("ownership.heartbeat_interval_s=0.5", "journal.checkpoint_slots=2"),
    daemons=2,
    chaos_s=43.0,
)

BUGS = (
    Bug("R4", an_orphan_is_deleted_without_a_floor, MANY_BUCKETS, seed=3),
    Bug("tombstones", a_tombstone_is_dropped_before_its_object_is_deleted, MANY_BUCKETS, seed=6),
    Bug("kept", a_merge_drops_what_is_gone_in_memory_alone, MANY_BUCKETS, seed=8),
    Bug("kept", bits_under_the_names_of_sources_are_overlooked_at_recovery, BY_OTHERS, seed=15),
    Bug("kept", the_sources_of_sources_are_forgotten, MANY_BUCKETS, seed=6),
    Bug("merged buckets", an_owner_overwrites_a_merge_by_others, BY_OTHERS, seed=4),
    Bug("merged buckets", a_stale_merge_is_accepted, BY_OTHERS, seed=4),
    Bug("merged buckets", a_manifest_of_its_own_tells_an_owner_of_no_merge, BY_OTHERS, seed=4),
    Bug("cancel", a_row_that_is_leaving_is_handed_out, seed=1),
    Bug("reschedule", a_reschedule_leaves_both_rows),
    Bug("cancel", a_cancellation_is_answered_before_its_slot),
    Bug("cancel", that_rows_leave_is_decided_at_once_after_a_takeover, OVERTAKEN, seed=4),
    Bug("cancel", that_rows_have_left_is_answered_at_once_after_a_takeover, OVERTAKEN, seed=4),
    Bug("own indexes", buckets_of_a_deleted_subscription_stay, MANY_BUCKETS, seed=14),
)
