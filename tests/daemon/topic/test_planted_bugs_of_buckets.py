"""Planted bugs of own indexes and of merges by other processes: each breaks one rule of the real code, and a story told
elsewhere finds it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import pytest

from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index.index import BucketBits, Index
from daemon.core.index.indexes import Indexes
from daemon.owner.merge_watch import MergeWatch
from daemon.shard import recovery
from daemon.topic import bucket_lifecycle, stored_topic, topic_manifests
from daemon.topic.bucket_lifecycle import BucketLifecycle
from storage_backends import topic_manifest
from storage_backends.formats import checkpoint_format, manifest
from storage_backends.formats.bucket_format import KeptRows
from storage_backends.formats.manifest import BucketProgress
from storage_backends.merge_hints import MergeHint
from tests._support.engine_fixture import EngineFixture
from tests.daemon.owner import test_merge_watch as hints
from tests.daemon.topic import test_foreign_merges as merges
from tests.daemon.topic import test_own_indexes as own
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]
Story = Callable[[EngineFixture], Coroutine[Any, Any, None]]

PART_OF = bucket_lifecycle.checkpoint_part
PROGRESS_OF = bucket_lifecycle.progress_of
DROP = BucketLifecycle._drop


def bits_under_the_names_of_sources_are_overlooked(patch: pytest.MonkeyPatch) -> None:
    def of_bucket(
        name: str, kept: Sequence[KeptRows], by_bucket: Mapping[str, BucketProgress]
    ) -> BucketProgress | None:
        return by_bucket.get(name)

    patch.setattr(stored_topic, "progress_of_bucket", of_bucket)


def a_bucket_is_dropped_before_a_merge_of_it_is_learned(patch: pytest.MonkeyPatch) -> None:
    async def later() -> None:
        return

    async def drop(life: BucketLifecycle) -> None:
        life._learn = later  # type: ignore[method-assign]
        try:
            await DROP(life)
        finally:
            del life._learn

    patch.setattr(BucketLifecycle, "_drop", drop)


def a_missing_bucket_counts_as_damaged(patch: pytest.MonkeyPatch) -> None:
    async def is_live(life: BucketLifecycle, bucket: str) -> bool:
        return True

    patch.setattr(BucketLifecycle, "is_live", is_live)


def who_was_overtaken_gives_the_shard_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifests, "overtaken", lambda refused, epoch: None)


def nobody_looks_for_merges(patch: pytest.MonkeyPatch) -> None:
    async def look(life: BucketLifecycle) -> None:
        life._look_wanted = False

    patch.setattr(BucketLifecycle, "_look", look)


def a_manifest_of_its_own_tells_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BucketLifecycle, "_names_unknown", lambda life, newest: False)


def every_topic_is_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(bucket_lifecycle, "MERGEABLE_BUCKETS", 0)


def a_seal_stores_nothing_of_the_buckets_before_it(patch: pytest.MonkeyPatch) -> None:
    def progress_of(
        cuts: Sequence[bucket_lifecycle.SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut
    ) -> manifest.Progress:
        return PROGRESS_OF(cuts, (), redelivery)

    patch.setattr(bucket_lifecycle, "progress_of", progress_of)


def a_checkpoint_has_the_rows_of_the_shared_index_alone(patch: pytest.MonkeyPatch) -> None:
    def part_of(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
        return dataclasses.replace(PART_OF(cut), own_rows=())

    patch.setattr(bucket_lifecycle, "checkpoint_part", part_of)


def rows_that_are_being_sealed_are_restored_for_all(patch: pytest.MonkeyPatch) -> None:
    def part_of(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
        part = PART_OF(cut)
        return dataclasses.replace(
            part, sealing=tuple(dataclasses.replace(each, subscription_id=0) for each in part.sealing)
        )

    patch.setattr(bucket_lifecycle, "checkpoint_part", part_of)


def rows_of_a_subscription_that_is_no_more_are_restored(patch: pytest.MonkeyPatch) -> None:
    def index_of(topic: TopicState, subscription_id: int) -> Index:
        return topic.indexes.of(subscription_id)

    patch.setattr(recovery, "_index", index_of)


def buckets_stay_when_their_subscription_goes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest, "_owed", lambda buckets, subscriptions: tuple(buckets))


async def a_seal_lands_after_a_deletion(machines: EngineFixture) -> None:
    await own.test_a_seal_that_was_cut_before_a_deletion_and_lands_after_it_does_not_bring_the_bucket_back(
        machines, crash=True
    )


async def a_bucket_is_merged_and_deleted(machines: EngineFixture) -> None:
    await merges.test_a_bucket_that_was_merged_and_deleted_is_not_damaged_but_read_from_what_took_its_place(
        machines, restarted=True
    )


async def rows_leave_between_plan_and_commit(machines: EngineFixture) -> None:
    await merges.test_what_left_between_the_plan_and_the_commit_of_a_merge_is_gone_also_after_a_restart(
        machines, settings=merges.ALONE, known=False, sealed=True
    )


async def a_merge_overtakes_a_drop(machines: EngineFixture) -> None:
    await merges.test_a_merge_between_the_decision_and_the_commit_of_a_drop(machines, adopted=True)


async def rows_for_one_are_in_a_checkpoint(machines: EngineFixture) -> None:
    await own.test_rows_for_one_subscription_go_to_it_alone_also_after_a_crash(
        machines, sealed=False, checkpointed=True
    )


async def rows_for_one_are_being_sealed_at_a_checkpoint(machines: EngineFixture) -> None:
    one = await own.with_subscriptions(await machines.served_by("one", "journal.checkpoint_slots=1"), "a", "b")
    await one.add("t", 1, range(10), 20_000, subscription="a")
    held = one.pause("put", own.BUCKETS)
    _ = one.call(one.engine.requests.seal("t"))
    await held.reached()
    await one.add("t", 2, range(5), 20_000, subscription="b")
    await asyncio.sleep(2)
    one.kill()
    two = await machines.served_by("one")
    assert (await own.everything(two, "a")).positions == own.positions(1, range(10))
    assert (await own.everything(two, "b")).positions == own.positions(2, range(5))


def all_topics_are_looked_at_together(patch: pytest.MonkeyPatch) -> None:
    made = BucketLifecycle.__init__

    def init(life: BucketLifecycle, *args: Any, **named: Any) -> None:
        made(life, *args, **named)
        life._look_in_s = bucket_lifecycle.LOOK_S

    patch.setattr(BucketLifecycle, "__init__", init)


def a_tip_is_read_before_its_hint_is_cleared(patch: pytest.MonkeyPatch) -> None:
    clear = MergeWatch._clear

    async def clear_late(watch: MergeWatch, of: Sequence[MergeHint]) -> None:
        for hint in of:
            watch._shards()[hint.shard].look_for_merges(hint.topic_id)
        await asyncio.sleep(1)
        with pytest.MonkeyPatch.context() as later:
            for shard in watch._shards().values():
                later.setattr(shard, "look_for_merges", lambda topic_id: None)
            await clear(watch, of)

    patch.setattr(MergeWatch, "_clear", clear_late)


def a_topic_that_is_being_loaded_has_no_merges(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MergeWatch, "_may_come", lambda watch, hint: False)


def what_was_merged_away_is_in_no_backlog(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Index, "expected", Index.readable)


def decisions_do_not_wait_for_what_was_merged_away(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "unread_segments", Indexes.wanted_segments)


PLANTED: list[tuple[Plant, Story]] = [
    (bits_under_the_names_of_sources_are_overlooked, rows_leave_between_plan_and_commit),
    (a_bucket_is_dropped_before_a_merge_of_it_is_learned, a_merge_overtakes_a_drop),
    (a_missing_bucket_counts_as_damaged, a_bucket_is_merged_and_deleted),
    (
        what_was_merged_away_is_in_no_backlog,
        merges.test_what_is_acknowledged_in_a_bucket_that_was_merged_and_deleted_is_not_ignored,
    ),
    (
        decisions_do_not_wait_for_what_was_merged_away,
        merges.test_what_came_due_in_a_bucket_that_was_merged_and_deleted_does_not_leave_as_if_it_had_not,
    ),
    (
        who_was_overtaken_gives_the_shard_up,
        merges.test_a_merge_between_a_claim_and_the_reading_of_what_it_found,
    ),
    (
        nobody_looks_for_merges,
        merges.test_a_merge_of_another_process_is_learned_within_a_minute_and_its_rows_are_handed_out_once,
    ),
    (a_manifest_of_its_own_tells_nothing, merges.test_a_commit_of_its_own_tells_the_owner_of_a_merge),
    (
        every_topic_is_looked_at,
        hints.test_an_idle_daemon_asks_for_one_key_a_minute_and_for_a_topic_once_in_twenty,
    ),
    (all_topics_are_looked_at_together, hints.test_topics_are_looked_at_one_after_the_other_though_loaded_together),
    (
        a_tip_is_read_before_its_hint_is_cleared,
        hints.test_a_merge_is_learned_whose_hint_was_left_again_before_it_was_cleared,
    ),
    (a_topic_that_is_being_loaded_has_no_merges, hints.test_the_hint_of_a_topic_that_is_being_loaded_stays_until_it_is),
    (
        a_seal_stores_nothing_of_the_buckets_before_it,
        own.test_what_was_acknowledged_in_an_own_bucket_before_a_seal_does_not_come_again_after_a_crash,
    ),
    (a_checkpoint_has_the_rows_of_the_shared_index_alone, rows_for_one_are_in_a_checkpoint),
    (rows_that_are_being_sealed_are_restored_for_all, rows_for_one_are_being_sealed_at_a_checkpoint),
    (
        rows_of_a_subscription_that_is_no_more_are_restored,
        own.test_what_is_left_of_a_deleted_subscription_in_checkpoint_and_journal_does_not_come_back,
    ),
    (buckets_stay_when_their_subscription_goes, a_seal_lands_after_a_deletion),
]


async def test_rows_for_one_that_are_being_sealed_at_a_checkpoint_are_restored_for_it(machines: EngineFixture) -> None:
    await rows_for_one_are_being_sealed_at_a_checkpoint(machines)


@pytest.mark.rotating
@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=[plant.__name__ for plant, _ in PLANTED])
async def test_a_story_finds_the_planted_bug(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, plant: Plant, story: Story
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError)):
        await story(machines)


registry.register("own indexes, and merges by others", (plant for plant, _ in PLANTED))
