"""What may be deleted and when: the decisions alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core import garbage_rules
from daemon.core.garbage_rules import CollectionLimits, ObjectCount, Summary
from storage_backends import shard_listing
from storage_backends.formats import names
from storage_backends.formats.manifest import ObjectReference, Tombstone
from storage_backends.object_store import ListedObject
from storage_backends.shard_listing import Listed, ShardListing

SHARD = 3
TOPIC_ID = names.topic_id("flights")
LIMITS = CollectionLimits(
    orphan_age_ms=1, manifests_kept=1, manifests_age_ms=1, attempts_max=10, guard_share=0.2, guard_bytes=1000
)


def tombstone(attempts: int, delete_after_ms: int = 1_000_000) -> Tombstone:
    reference = ObjectReference(name=f"n{attempts}", base=1, size_bytes=7, sha256=b"")
    return Tombstone(object=reference, removed_in=2, delete_after_ms=delete_after_ms, attempts=attempts)


def listed_with(*numbers: int) -> Listed:
    listed = Listed()
    for number in numbers:
        listed.add_manifest(number, number * 10)
    return listed


@pytest.mark.parametrize(
    ("attempts", "minutes"), [(0, 0), (1, 10), (2, 30), (3, 70), (5, 310), (6, 630), (8, 2550), (9, 3240), (40, 14_400)]
)
def test_what_could_not_be_deleted_is_tried_again_later_each_time(attempts: int, minutes: int) -> None:
    each = tombstone(attempts)
    due_at_ms = 1_000_000 + minutes * 60_000
    assert garbage_rules.due_at_ms(each) == due_at_ms
    assert garbage_rules.due([each], due_at_ms) == [each]
    assert garbage_rules.due([each], due_at_ms - 1) == []


def test_the_first_of_several_tombstones_says_when_to_look_again() -> None:
    assert garbage_rules.next_due_at_ms([]) is None
    assert garbage_rules.next_due_at_ms([tombstone(1), tombstone(0, 1_500_000)]) == 1_500_000
    assert garbage_rules.count([tombstone(1), tombstone(2)]) == ObjectCount(2, 14)


def test_an_orphan_is_below_the_floor_and_named_nowhere() -> None:
    listed = Listed()
    listed.objects |= {"named": (1, 5), "below": (6, 6), "at": (7, 7), "above": (8, 8)}
    assert shard_listing.orphans(listed, {"named"}, 7) == [("below", 6)]
    listed.forget(["below", "unknown"])
    assert shard_listing.orphans(listed, {"named"}, 7) == []


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 30))
def test_the_manifest_of_a_time_is_the_last_that_was_created_by_then(times: list[int], at_ms: int) -> None:
    times.sort()
    numbers = list(range(100, 100 + len(times)))
    asked: list[int] = []

    def created_ms(number: int) -> int:
        asked.append(number)
        return times[number - 100]

    expected = max((number for number, time in zip(numbers, times, strict=True) if time <= at_ms), default=None)
    assert garbage_rules.tip_at(numbers, created_ms, at_ms) == expected
    assert len(asked) <= 5, "each is read from the store"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.integers(0, 30))
def test_clocks_that_step_make_it_one_that_was_followed_by_a_later_one(times: list[int], at_ms: int) -> None:
    numbers = list(range(len(times)))
    found = garbage_rules.tip_at(numbers, times.__getitem__, at_ms)
    if found is None:
        assert times[0] > at_ms or len(times) > 1
    else:
        assert times[found] <= at_ms
        assert found == numbers[-1] or times[found + 1] > at_ms


def test_a_manifest_whose_time_cannot_be_told_is_young() -> None:
    times = {1: 5, 2: None, 3: 50}
    assert garbage_rules.tip_at([1, 2, 3], times.__getitem__, 10) == 1


@pytest.mark.parametrize(
    ("tip", "kept", "beyond"), [(9, 1, [3, 5, 8]), (9, 4, [3, 5]), (9, 9, []), (8, 1, [3, 5]), (9, 0, [3, 5, 8])]
)
def test_the_newest_manifests_are_kept_and_always_the_tip(tip: int, kept: int, beyond: list[int]) -> None:
    listed = listed_with(5, 9, 3, 8)
    assert garbage_rules.beyond_kept(listed, tip, kept) == [(number, number * 10) for number in beyond]


@pytest.mark.parametrize(
    ("orphans", "shard", "suspicious"),
    [(1000, 1000, False), (1001, 1001, True), (1001, 5005, False), (1002, 5005, True)],
)
def test_orphans_are_suspicious_that_are_much_both_in_bytes_and_of_their_shard(
    orphans: int, shard: int, suspicious: bool
) -> None:
    assert garbage_rules.is_suspicious(ObjectCount(1, orphans), shard, LIMITS) is suspicious


def test_a_listing_is_sorted_by_what_it_shows_and_what_is_unknown_is_left_alone() -> None:
    listing = ShardListing(SHARD)
    keys = [
        names.shard_manifest_key(SHARD, 4),
        names.checkpoint_key(SHARD, 2, "U"),
        f"{names.shard_prefix(SHARD)}other/00000000000000000009",
        names.topic_manifest_key(SHARD, TOPIC_ID, 7),
        names.bucket_key(SHARD, TOPIC_ID, 5, "U"),
        names.progress_key(SHARD, TOPIC_ID, 6, "U"),
        f"{names.shard_prefix(SHARD)}topics/{TOPIC_ID}/buckets/mine",
        f"{names.shard_prefix(SHARD)}topics/other/buckets/{5:020d}-U",
        f"{names.shard_prefix(SHARD)}note",
    ]
    listing.add(ListedObject(key, 10, 0) for key in keys)
    assert listing.size_bytes == 90
    assert (list(listing.shard.manifests), listing.shard.objects) == ([4], {keys[1]: (2, 10)})
    assert list(listing.topics) == [TOPIC_ID]
    topic = listing.topics[TOPIC_ID]
    assert (list(topic.manifests), topic.objects) == ([7], {keys[4]: (5, 10), keys[5]: (6, 10)})


def test_summaries_add_up_by_kind() -> None:
    one = Summary(orphans=ObjectCount(1, 2), failed=ObjectCount(3, 4))
    assert one + one == Summary(orphans=ObjectCount(2, 4), failed=ObjectCount(6, 8))
    assert one + Summary(waiting=ObjectCount(1, 1)) == Summary(
        orphans=ObjectCount(1, 2), failed=ObjectCount(3, 4), waiting=ObjectCount(1, 1)
    )
