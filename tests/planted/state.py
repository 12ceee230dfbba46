"""The invariants of the models, and every kind of durable state, each broken at the place where it lives."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.decisions.departures import Departure
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index.bucket import GoneSet
from daemon.core.index.index import BucketBits
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.owner import takeover
from daemon.shard import checkpointing, recovery
from daemon.shard.range_operations import WriteCheckpoint
from daemon.topic import bucket_lifecycle
from daemon.topic.bucket_lifecycle import BucketLifecycle
from storage_backends import checkpoints, commit, topic_manifest
from storage_backends.formats import checkpoint_format, manifest, slot_format
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AcknowledgeRecord
from storage_backends.object_store import StoreError
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed

# ---- I1 to I5 of the models


def a_checkpoint_claims_a_slot_that_it_does_not_hold(patch: pytest.MonkeyPatch) -> None:
    """I1: an add that was answered OK is lost."""
    apply, write_checkpoint = WriteCheckpoint.apply, checkpointing.write_checkpoint

    def further(self: WriteCheckpoint, tip: Any) -> Any:
        return apply(dataclasses.replace(self, cut=dataclasses.replace(self.cut, slot=self.cut.slot + 1)), tip)

    def written(store: Any, checkpoint: checkpoint_format.Checkpoint, **named: Any) -> Any:
        return write_checkpoint(store, dataclasses.replace(checkpoint, slot=ShardSlot(checkpoint.slot + 1)), **named)

    patch.setattr(WriteCheckpoint, "apply", further)
    patch.setattr(checkpointing, "write_checkpoint", written)


def a_bucket_is_written_after_the_manifest_that_names_it(patch: pytest.MonkeyPatch) -> None:
    """I2: a manifest names an object that is not there."""
    write_bucket = bucket_lifecycle.write_bucket

    class Later:
        def __init__(self, store: Any) -> None:
            self.store = store
            self.write: Any = None

        def put(self, key: str, body: bytes) -> None:
            self.write = lambda: self.store.put(key, body)

    pending: dict[str, Later] = {}
    late: list[asyncio.Future[None]] = []

    def unwritten(store: Any, cut: bucket_lifecycle.SealCut, **settings: Any) -> Any:
        later = pending[cut.key] = Later(store)
        return write_bucket(later, cut, **settings)  # type: ignore[arg-type]

    finish = BucketLifecycle._finish

    def finished(self: BucketLifecycle, seal: Any, written: Any) -> None:
        finish(self, seal, written)
        for cut in seal.cuts:
            later = pending.pop(cut.key)
            if later.write is not None:
                late.append(asyncio.ensure_future(self._environment.run(later.write)))

    patch.setattr(bucket_lifecycle, "write_bucket", unwritten)
    patch.setattr(BucketLifecycle, "_finish", finished)


def a_commit_without_an_answer_is_reported(patch: pytest.MonkeyPatch) -> None:
    """I3: a commit was reported and is not in the lineage."""
    put = commit._Commit._put

    class Trusting:
        def __init__(self, store: Any) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put_if_absent(self, key: str, body: bytes, *, metadata: Any) -> None:
            try:
                self._store.put_if_absent(key, body, metadata=metadata)
            except StoreError:
                return

    def reported(self: commit._Commit[Any], number: int, body: bytes, begun_at: float) -> Any:
        store, self._log.store = self._log.store, Trusting(self._log.store)  # type: ignore[assignment]
        try:
            return put(self, number, body, begun_at)
        finally:
            self._log.store = store

    patch.setattr(commit._Commit, "_put", reported)


def the_last_section_before_the_fence_is_not_replayed(patch: pytest.MonkeyPatch) -> None:
    """I4: a new owner does not know what was answered OK."""
    shard_claim = takeover._shard_claim
    patch.setattr(takeover, "_shard_claim", lambda won, loaded, read: shard_claim(won, loaded, read[:-1]))


def rows_of_a_committed_seal_are_taken_from_the_checkpoint_too(patch: pytest.MonkeyPatch) -> None:
    """I5: a row is in two places."""
    restore = recovery.restore

    def restored(topic: TopicState, tip: manifest.TopicManifest, objects: Any, part: Any, *, elapsed_ms: int) -> None:
        restore(topic, tip, objects, part, elapsed_ms=elapsed_ms)
        for seal in part.sealing if part else ():
            if tip.applied >= seal.slot:
                recovery._restore_rows(topic, seal.subscription_id, seal.rows, None, elapsed_ms)

    patch.setattr(recovery, "restore", restored)


# ---- rows of sealed buckets: bucket objects


def a_bucket_object_lacks_a_row(patch: pytest.MonkeyPatch) -> None:
    write_bucket = bucket_lifecycle.write_bucket

    def written(store: Any, cut: bucket_lifecycle.SealCut, **settings: Any) -> Any:
        kept = cut.rows.kept()
        if len(kept) > 1:
            lacking = kept.take(np.arange(len(kept) - 1))
            cut = dataclasses.replace(cut, rows=_Kept(lacking, cut.rows))  # type: ignore[arg-type]
        return write_bucket(store, cut, **settings)

    patch.setattr(bucket_lifecycle, "write_bucket", written)


class _Kept:
    def __init__(self, kept: Any, rows: Any) -> None:
        self._kept = kept
        self._rows = rows

    def kept(self) -> Any:
        return self._kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


# ---- everything of a topic as of `applied`: progress, committed with the seal


def a_seal_forgets_what_is_gone_and_acknowledged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bucket_lifecycle, "progress_of", lambda cuts, bits, redelivery: manifest.Progress())


def a_seal_forgets_what_was_acknowledged_in_its_own_rows(patch: pytest.MonkeyPatch) -> None:
    progress_of = bucket_lifecycle.progress_of

    def forgetting(
        cuts: Sequence[bucket_lifecycle.SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut
    ) -> manifest.Progress:
        rows = [dataclasses.replace(cut.rows, acknowledged={}) for cut in cuts]
        cuts = [dataclasses.replace(cut, rows=each) for cut, each in zip(cuts, rows, strict=True)]
        return progress_of(cuts, bits, redelivery)

    patch.setattr(bucket_lifecycle, "progress_of", forgetting)


def what_goes_while_a_bucket_is_sealed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MutableBucket, "gone_since_cut", lambda self: GoneSet())


# ---- the same, and the mutable rows, as of slot c: shard checkpoint


def a_checkpoint_forgets_the_mutable_rows(patch: pytest.MonkeyPatch) -> None:
    _patch_part(patch, mutable_rows=Rows.empty())


def a_checkpoint_forgets_progress(patch: pytest.MonkeyPatch) -> None:
    _patch_part(patch, progress=manifest.Progress())


def a_checkpoint_forgets_the_rows_of_a_seal_under_way(patch: pytest.MonkeyPatch) -> None:
    _patch_part(patch, sealing=())


def _patch_part(patch: pytest.MonkeyPatch, **forgotten: Any) -> None:
    part_of = bucket_lifecycle.checkpoint_part

    def forgetting(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
        return dataclasses.replace(part_of(cut), **forgotten)

    patch.setattr(bucket_lifecycle, "checkpoint_part", forgetting)


def a_checkpoint_counts_whatever_the_manifest_has_reached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoints, "counting_part", lambda tip, tail: tail.part)


# ---- what happened since: the sections of the log


def acknowledgements_are_not_journaled(patch: pytest.MonkeyPatch) -> None:
    not_journaled(patch, AcknowledgeRecord)


def not_journaled(patch: pytest.MonkeyPatch, kind: type[Any]) -> None:
    encode_slot = slot_format.encode_slot

    def without(header: slot_format.SlotHeader, records: Any, decided: Any = ()) -> bytes:
        kept = [record for record in records if not isinstance(record, kind)]
        return encode_slot(dataclasses.replace(header, records=len(kept) + len(decided)), kept, decided)

    patch.setattr(slot_format, "encode_slot", without)


def replay_begins_at_the_manifest_and_not_above_the_checkpoint(patch: pytest.MonkeyPatch) -> None:
    replay = recovery.replay

    def replayed(topic: TopicState, tip: Any, tail: Any, *, elapsed_ms: int) -> int:
        return replay(
            topic, dataclasses.replace(tip, applied=0), dataclasses.replace(tail, part=None), elapsed_ms=elapsed_ms
        )

    patch.setattr(recovery, "replay", replayed)


# ---- subscriptions, policies, incarnation: the topic manifest


def a_subscription_is_owed_what_was_passed_while_the_clock_was_ahead(patch: pytest.MonkeyPatch) -> None:
    """After a crash: until then memory knows better."""
    passed_before = TopicState.passed_before

    def none(self: TopicState, state: SubscriptionState) -> Departure:
        return dataclasses.replace(passed_before(self, state), waived=BitMap64())

    patch.setattr(TopicState, "passed_before", none)


def a_subscription_begins_with_what_was_passed_while_the_clock_was_ahead(patch: pytest.MonkeyPatch) -> None:
    """What is added then waits for that time."""

    def since(self: TopicState, now_ms: int) -> int:
        return max(now_ms, self.indexes.passed_until_ms) if self.subscriptions else 0

    patch.setattr(TopicState, "since_for_new_subscription", since)


def subscriptions_are_not_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest.SetSubscriptions, "apply", lambda self, tip: tip)


def a_deleted_topic_keeps_its_incarnation(patch: pytest.MonkeyPatch) -> None:
    apply = topic_manifest.DeleteTopic.apply

    def applied(self: topic_manifest.DeleteTopic, tip: Any) -> Any:
        return dataclasses.replace(apply(self, tip), incarnation=tip.incarnation)

    patch.setattr(topic_manifest.DeleteTopic, "apply", applied)


OFTEN = ("journal.checkpoint_slots=2", "bucket.min_index_count_per_bucket=5", "bucket.rows_max=5")


def killed(operation: str, key_part: str, *, before: bool = False) -> Directed:
    """Buckets are slow, checkpoints frequent, and the owner is killed at such a call."""
    troubles = tuple(Trouble("kill", operation, key_part, nth, before, 0.3) for nth in (3, 6, 9))
    return Directed(troubles, slow_kind="/buckets/", settings=OFTEN)


# Buckets are large, so that much is acknowledged before a seal; checkpoints are seldom, so that its progress counts.
SELDOM = Directed(
    tuple(Trouble("kill", "put_if_absent", "/topics/", nth, False, 0.3) for nth in (6, 12, 18)),
    settings=(
        "journal.checkpoint_slots=1000",
        "bucket.min_index_count_per_bucket=60",
        "bucket.rows_max=90",
        "bucket.age_max_s=8",
    ),
)

BUGS = (
    Bug("I1", a_checkpoint_claims_a_slot_that_it_does_not_hold, seed=9),
    Bug("I2", a_bucket_is_written_after_the_manifest_that_names_it, killed("put_if_absent", "/topics/"), seed=2),
    Bug("I3", a_commit_without_an_answer_is_reported, seed=3),
    Bug("I4", the_last_section_before_the_fence_is_not_replayed, seed=3),
    Bug("I5", rows_of_a_committed_seal_are_taken_from_the_checkpoint_too, killed("put_if_absent", "/topics/"), seed=1),
    Bug("bucket objects", a_bucket_object_lacks_a_row, seed=3),
    Bug("progress", a_seal_forgets_what_is_gone_and_acknowledged, seed=3),
    Bug("progress", a_seal_forgets_what_was_acknowledged_in_its_own_rows, SELDOM, seed=2),
    Bug("progress", what_goes_while_a_bucket_is_sealed_is_forgotten, seed=8),
    Bug("checkpoint", a_checkpoint_forgets_the_mutable_rows, seed=1),
    Bug("checkpoint", a_checkpoint_forgets_progress),
    Bug(
        "checkpoint", a_checkpoint_forgets_the_rows_of_a_seal_under_way, killed("put_if_absent", "00/manifest/"), seed=2
    ),
    Bug("checkpoint", a_checkpoint_counts_whatever_the_manifest_has_reached, seed=6),
    Bug("journal", acknowledgements_are_not_journaled, seed=3),
    Bug("journal", replay_begins_at_the_manifest_and_not_above_the_checkpoint, seed=11),
    Bug("topic manifest", subscriptions_are_not_committed, seed=3),
    Bug("entitlement", a_subscription_is_owed_what_was_passed_while_the_clock_was_ahead, seed=9),
    Bug("entitlement", a_subscription_begins_with_what_was_passed_while_the_clock_was_ahead, seed=8),
    Bug("topic manifest", a_deleted_topic_keeps_its_incarnation, seed=22),
)
