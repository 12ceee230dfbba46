"""Every order of an owner that brings in objects, and a collector that acts as early as its rules let it.

What holds after each run, whatever answers were lost: what a manifest names is there. Every way to break R4 and R9 is
found in one of the orders.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from daemon.owner import collection_pass
from daemon.owner.collection_pass import Collector
from storage_backends import commit, shard_listing, topic_manifest
from storage_backends.formats import manifest, names
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import LiveBucket, TopicManifest, TopicPolicy
from storage_backends.object_store import ObjectStore
from storage_backends.shard_listing import Listed, ShardListing
from storage_backends.topic_manifest import Seal, SetPolicy
from tests._support.virtual_loop import InlineExecutor
from tests.daemon.owner._support.topic_with_garbage import BODY, LIMITS, SHARD
from tests.planted import registry
from tests.storage_backends._support import interleavings
from tests.storage_backends._support.interleavings import Bounds, Broken, Choices, Run, SteppedStore
from tests.storage_backends._support.topic_manifests import CREATE, EPOCH, TOPIC_ID, bucket, progress

MANIFESTS = names.topic_manifest_prefix(SHARD, TOPIC_ID)
# Every time has passed: R4 alone protects what is on its way.
AT_ONCE = dataclasses.replace(LIMITS, orphan_age_ms=0)
NOW_MS = 10**9
BOUNDS = Bounds(preemptions=2, lost_puts=1, collections=0)

Plant = Callable[[pytest.MonkeyPatch], None]


def log_of(store: ObjectStore, run: Run, name: str) -> commit.ManifestLog[TopicManifest]:
    ids = iter(f"{name}-{number}" for number in range(10**6))
    return topic_manifest.topic_log(
        store,
        SHARD,
        TOPIC_ID,
        monotonic=run.clock.now,
        sleep=run.clock.block,
        jitter=lambda: 0.5,
        new_id=lambda: next(ids),
    )


def put(
    log: commit.ManifestLog[TopicManifest],
    operation: commit.Operation[TopicManifest],
    warm: commit.Tip[TopicManifest] | None = None,
) -> commit.Tip[TopicManifest]:
    return commit.commit(log, operation, writer="w", created_ms=1, warm=warm, deadline_s=1.0)


def policy(delay_max_ms: int) -> SetPolicy:
    return SetPolicy(policy=TopicPolicy(delay_max_ms=delay_max_ms), epoch=EPOCH)


def seal_of(tip: TopicManifest, live: LiveBucket) -> Seal:
    return Seal(
        buckets=(live,),
        progress=progress(),
        progress_object=None,
        slot_from=tip.applied,
        slot_to=ShardSlot(tip.applied + 1),
        epoch=EPOCH,
        replaced_delete_after_ms=NOW_MS,
    )


def key_of(base: int, unique: str) -> str:
    return names.bucket_key(SHARD, TOPIC_ID, base, unique)


class Owner:
    """Brings in an object that was begun long ago, and one that it begins now."""

    def __init__(self, run: Run) -> None:
        self.sealed: list[str] = []
        self.refused: list[str] = []
        self._run = run

    def act(self) -> None:
        store = SteppedStore(self._run)
        log = log_of(store, self._run, "owner")
        tip = log.read_tip()
        assert tip is not None
        tip = self._seal(log, tip, key_of(1, "OLD"), 1)
        key = key_of(tip.number, "NEW")
        store.put(key, BODY)
        self._seal(log, tip, key, tip.number)

    def _seal(
        self, log: commit.ManifestLog[TopicManifest], tip: commit.Tip[TopicManifest], key: str, base: int
    ) -> commit.Tip[TopicManifest]:
        try:
            tip = put(log, seal_of(tip.manifest, bucket(key, base)), tip)
        except commit.Refused as refused:
            self.refused.append(key)
            return refused.tip or tip
        self.sealed.append(key)
        return tip


def collect(run: Run) -> Callable[[], None]:
    def act() -> None:
        store = SteppedStore(run)
        tools = collection_pass.Tools(
            store=store, executor=InlineExecutor(), now_ms=lambda: NOW_MS, writer="collector", limits=AT_ONCE
        )
        collector = Collector(log_of(store, run, "collector"), collection_pass.TOPIC, tools)
        listing = ShardListing(SHARD)
        listing.add(store.list(names.shard_prefix(SHARD)))
        listed = listing.topics[TOPIC_ID]
        orphans = collector.find_orphans(listed, None, given_up=frozenset())
        collector.delete_orphans(orphans.found)

    return act


def explore(bounds: Bounds = BOUNDS) -> tuple[int, int, int]:
    """Makes every run; how many there were, and in how many the old object was sealed, and refused."""
    sealed = refused = 0

    def once(choices: Choices) -> None:
        nonlocal sealed, refused
        run = Run(choices, bounds, MANIFESTS)
        before = log_of(run.store, run, "before")
        put(before, CREATE)
        run.store.put(key_of(1, "OLD"), BODY)
        put(before, policy(1))
        owner = Owner(run)
        try:
            run.run({"owner": owner.act, "collector": collect(run)})
            check(run)
        except Broken as broken:
            broken.add_note(" | ".join(run.trace))
            raise
        sealed += key_of(1, "OLD") in owner.sealed
        refused += key_of(1, "OLD") in owner.refused

    return interleavings.explore(once), sealed, refused


def check(run: Run) -> None:
    number = max(names.number_of(each.key) for each in run.store.list(MANIFESTS))
    tip = manifest.decode_topic_manifest(run.store.get(names.topic_manifest_key(SHARD, TOPIC_ID, number)))
    there = {each.key for each in run.store.list(names.buckets_prefix(SHARD, TOPIC_ID))}
    missing = {each.object.name for each in tip.live} - there
    if missing:
        raise Broken(f"manifest {number} names {missing}, which were deleted")


def test_what_a_manifest_names_is_there_whatever_the_order() -> None:
    runs, sealed, refused = explore()
    assert runs > 500
    assert min(sealed, refused) > 50, "both who is first and who is second are tried"


# Planted bugs


def the_floor_is_not_committed(patch: pytest.MonkeyPatch) -> None:
    """R4: an object is deleted that may still be brought in. R9: time alone decides."""

    def only_here(self: Collector[TopicManifest], floor: int, tip: commit.Tip[TopicManifest]) -> Any:
        head = dataclasses.replace(tip.manifest.head, orphan_floor=floor)
        return dataclasses.replace(tip, manifest=dataclasses.replace(tip.manifest, head=head))

    patch.setattr(Collector, "_move_floor", only_here)


def the_manifest_is_read_before_the_floor_is_committed(patch: pytest.MonkeyPatch) -> None:
    """R4: what came in between is not seen."""
    move = Collector._move_floor

    def read_before(self: Collector[TopicManifest], floor: int, tip: commit.Tip[TopicManifest]) -> Any:
        moved = move(self, floor, tip)
        head = dataclasses.replace(tip.manifest.head, orphan_floor=moved.manifest.head.orphan_floor)
        return dataclasses.replace(tip, manifest=dataclasses.replace(tip.manifest, head=head))

    patch.setattr(Collector, "_move_floor", read_before)


def everything_that_is_listed_and_not_named_is_an_orphan(patch: pytest.MonkeyPatch) -> None:
    """R9: a listing alone decides."""

    def by_listing(listed: Listed, named: Any, floor: int) -> list[tuple[str, int]]:
        return [(key, size_bytes) for key, (_, size_bytes) in listed.unnamed(named).items()]

    patch.setattr(shard_listing, "orphans", by_listing)


def whoever_brings_in_an_object_does_not_look_at_the_floor(patch: pytest.MonkeyPatch) -> None:
    """R4, the other half."""
    patch.setattr(topic_manifest, "not_bringable", lambda tip, reference: None)


BUGS: tuple[Plant, ...] = (
    the_floor_is_not_committed,
    the_manifest_is_read_before_the_floor_is_committed,
    everything_that_is_listed_and_not_named_is_an_orphan,
    whoever_brings_in_an_object_does_not_look_at_the_floor,
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_every_planted_bug_is_found_in_one_of_the_orders(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(Broken, match="which were deleted"):
        explore()


registry.register("orders of an owner and a collector", BUGS)
