"""What garbage collection may change in a manifest, of a shard and of a topic."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import pytest

from storage_backends import commit, manifest_collection
from storage_backends.formats.manifest import ShardManifest, TopicManifest
from storage_backends.manifest_collection import CollectTombstones, SetFloor
from tests._support.fault_store import Fault, FaultStore, Script
from tests.storage_backends._support.topic_manifests import DELETED, DROP, FLOOR, TIP, tombstone
from tests.storage_backends.test_topic_manifest_commits import FIRST_SEAL, log_of, put, with_topic

Manifest: TypeAlias = ShardManifest | TopicManifest
Operation: TypeAlias = SetFloor[TopicManifest] | CollectTombstones[TopicManifest]

BURIED = tuple(dataclasses.replace(tombstone(name), attempts=3) for name in ("x", "y", "z"))
TOPIC_TIP = dataclasses.replace(TIP, tombstones=BURIED)
SHARD_TIP = ShardManifest(head=TIP.head, shard=3, epoch=9, owner="a", tombstones=BURIED)
NUMBER = TIP.head.number

tips = pytest.mark.parametrize(
    "tip",
    [TOPIC_TIP, SHARD_TIP, dataclasses.replace(DELETED, tombstones=BURIED)],
    ids=["a topic", "a shard", "a deleted topic"],
)


def floor(number: int) -> Operation:
    return SetFloor(floor=number)


def collected(*, deleted: str = "", failed: str = "", given_up: str = "") -> Operation:
    return CollectTombstones(deleted=frozenset(deleted), failed=frozenset(failed), given_up=frozenset(given_up))


@tips
@pytest.mark.parametrize(
    "operation",
    [floor(FLOOR + 1), floor(NUMBER), collected(deleted="xyz"), collected(failed="x", given_up="z")],
    ids=["floor by one", "floor to the tip", "deleted", "failed and given up"],
)
def test_an_operation_is_accepted_when_all_of_its_precondition_holds(operation: Operation, tip: TopicManifest) -> None:
    assert operation.precondition(tip) is None
    assert not operation.landed(tip)


@tips
@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (floor(FLOOR), "the orphan floor is 10, it cannot become 10"),
        (floor(FLOOR - 1), "the orphan floor is 10, it cannot become 9"),
        (floor(NUMBER + 1), "the orphan floor cannot become 31, above manifest 30"),
        (collected(deleted="xq"), "objects ['q'] are not tombstones"),
        (collected(failed="q", given_up="p"), "objects ['p', 'q'] are not tombstones"),
    ],
    ids=["the same floor", "a lower floor", "a floor above the tip", "one unknown", "two unknown"],
)
def test_an_operation_is_refused_when_one_part_of_its_precondition_fails(
    operation: Operation, tip: TopicManifest, reason: str
) -> None:
    assert operation.precondition(tip) == reason


@pytest.mark.parametrize("operation", [floor(1), collected(deleted="x")], ids=["floor", "collected"])
def test_nothing_is_collected_where_there_is_no_manifest(operation: Operation) -> None:
    assert operation.precondition(None) == "there is no manifest"
    with pytest.raises(ValueError, match="there is no manifest"):
        operation.apply(None)


@tips
def test_a_floor_changes_the_floor_and_nothing_else(tip: TopicManifest) -> None:
    raised = floor(20).apply(tip)
    assert raised == dataclasses.replace(tip, head=dataclasses.replace(tip.head, orphan_floor=20))
    assert floor(20).landed(raised)
    assert floor(15).landed(raised)


@tips
def test_what_was_deleted_or_given_up_is_a_tombstone_no_longer_and_what_failed_has_one_attempt_more(
    tip: TopicManifest,
) -> None:
    operation = collected(deleted="x", failed="y", given_up="z")
    after = operation.apply(tip)
    assert after == dataclasses.replace(tip, tombstones=(dataclasses.replace(BURIED[1], attempts=4),))
    assert operation.landed(after)


@tips
def test_a_live_object_is_never_touched(tip: TopicManifest) -> None:
    assert collected(deleted="xyz").apply(tip) == dataclasses.replace(tip, tombstones=())


def test_attempts_alone_do_not_show_that_they_were_counted() -> None:
    assert not collected(failed="x").landed(collected(failed="x").apply(TOPIC_TIP))


@pytest.mark.parametrize(
    "names", [{"deleted": "x", "failed": "x"}, {"failed": "y", "given_up": "yz"}, {"deleted": "z", "given_up": "z"}]
)
def test_an_object_has_one_outcome(names: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="exactly one of"):
        collected(**names)


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE])
@pytest.mark.parametrize("operation", [floor(2), CollectTombstones(deleted=frozenset({"b3"}))], ids=str)
def test_an_operation_whose_outcome_is_unknown_is_committed_again_and_applied_once(
    operation: Operation, fault: Fault
) -> None:
    inner = with_topic(FIRST_SEAL, dataclasses.replace(DROP, buckets=("b3",)))
    script = Script()
    script.plan("put_if_absent", fault)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    store = FaultStore(inner, script)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(store), operation)
    again = put(log_of(inner, "again"), operation)
    store.deliver_late()
    tip = log_of(inner).read_tip()
    assert tip is not None
    assert tip.manifest == again
    assert again.head.number == 4


def test_a_floor_keeps_a_seal_that_was_begun_below_it_from_naming_its_object() -> None:
    store = with_topic()
    begun = dataclasses.replace(
        FIRST_SEAL,
        buckets=tuple(
            dataclasses.replace(each, object=dataclasses.replace(each.object, base=0)) for each in FIRST_SEAL.buckets
        ),
    )
    put(log_of(store, "collector"), SetFloor[TopicManifest](floor=1))
    with pytest.raises(commit.Refused, match="object b3 was started below the orphan floor 1"):
        put(log_of(store, "owner"), begun)


# ---- planted bugs


class FloorThatFalls(SetFloor[TopicManifest]):
    """A slow collector takes the floor back."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None

    def landed(self, tip: TopicManifest) -> bool:
        return False


class DropsWhateverIsNamed(CollectTombstones[TopicManifest]):
    """What is no tombstone counts as dropped."""

    def precondition(self, tip: TopicManifest | None) -> str | None:
        return None


def the_floor_rises(kind: type[SetFloor[TopicManifest]]) -> None:
    store = with_topic(FIRST_SEAL)
    put(log_of(store, "one"), kind(floor=2))
    after = put(log_of(store, "other"), SetFloor[TopicManifest](floor=2))
    assert after.head.orphan_floor == 2
    assert put(log_of(store, "slow"), kind(floor=1)).head.orphan_floor == 2


def only_tombstones_are_dropped(kind: type[CollectTombstones[TopicManifest]]) -> None:
    with pytest.raises(commit.Refused, match="are not tombstones"):
        put(log_of(with_topic(FIRST_SEAL), "x"), kind(failed=frozenset({"b3"})))


def test_a_planted_bug_of_a_floor_is_found() -> None:
    the_floor_rises(SetFloor)
    with pytest.raises(AssertionError):
        the_floor_rises(FloorThatFalls)


def test_a_planted_bug_of_dropping_tombstones_is_found() -> None:
    only_tombstones_are_dropped(manifest_collection.CollectTombstones)
    with pytest.raises(pytest.fail.Exception):
        only_tombstones_are_dropped(DropsWhateverIsNamed)
