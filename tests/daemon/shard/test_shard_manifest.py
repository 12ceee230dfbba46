"""What may follow what in a shard's manifest, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from daemon.shard.shard_manifest import Claim, Release, WriteCheckpoint
from storage_backends import commit, shard_manifests
from storage_backends.formats import manifest
from storage_backends.formats.manifest import (
    CheckpointReference,
    ManifestHead,
    ObjectReference,
    ShardManifest,
    Tombstone,
)
from storage_backends.formats.shard_slot import ShardSlot
from storage_backends.manifest_collection import CollectTombstones, SetFloor
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged, ObjectStore
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.virtual_clock import VirtualClock

SHARD = 3
EPOCH = 4
FLOOR = 10

Operation = commit.Operation[ShardManifest]


def checkpoint(name: str, slot: int, base: int = 20) -> CheckpointReference:
    written = ObjectReference(name=name, base=base, size_bytes=7, sha256=b"\2" * 32)
    return CheckpointReference(object=written, slot=ShardSlot(slot), replay_from=ShardSlot(slot))


TIP = ShardManifest(
    head=ManifestHead(
        number=30, previous_sha256=b"", commit_id="c", writer="w", created_ms=1, lineage=("c",), orphan_floor=FLOOR
    ),
    shard=SHARD,
    epoch=EPOCH,
    owner="a",
    address="a:1",
    checkpoint=checkpoint("c2", 90),
    previous_checkpoint=checkpoint("c1", 50),
    replay_from=ShardSlot(80),
    fence_slot=40,
)
CLAIM = Claim(shard=SHARD, epoch=EPOCH + 1, owner="b", address="b:2")
CHECKPOINT = WriteCheckpoint(
    reference=checkpoint("c3", 120), replay_from=ShardSlot(110), epoch=EPOCH, delete_after_ms=77
)
RELEASE = Release(epoch=EPOCH)


def tip_with(**changes: object) -> ShardManifest:
    return dataclasses.replace(TIP, **changes)  # type: ignore[arg-type]


def checkpoint_with(**changes: object) -> WriteCheckpoint:
    return dataclasses.replace(CHECKPOINT, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "tip"),
    [
        (CLAIM, None),
        (CLAIM, TIP),
        (CLAIM, tip_with(owner="")),
        (CHECKPOINT, TIP),
        (CHECKPOINT, tip_with(checkpoint=None, previous_checkpoint=None, replay_from=0)),
        (checkpoint_with(reference=checkpoint("c3", 90), replay_from=80), TIP),
        (checkpoint_with(reference=checkpoint("c3", 120, base=FLOOR)), TIP),
        (RELEASE, TIP),
    ],
    ids=str,
)
def test_an_operation_is_accepted_when_all_of_its_precondition_holds(
    operation: Operation, tip: ShardManifest | None
) -> None:
    assert operation.precondition(tip) is None
    assert tip is None or not operation.landed(tip)


@pytest.mark.parametrize(
    ("operation", "tip", "reason"),
    [
        (CLAIM, tip_with(epoch=EPOCH + 1), "the epoch is 5, not below 5"),
        (CLAIM, tip_with(epoch=EPOCH + 2), "the epoch is 6, not below 5"),
        (CHECKPOINT, None, "nobody ever owned the shard"),
        (CHECKPOINT, tip_with(epoch=EPOCH + 1), "the epoch is 5, not 4"),
        (CHECKPOINT, tip_with(epoch=EPOCH - 1), "the epoch is 3, not 4"),
        (CHECKPOINT, tip_with(replay_from=111), "replay begins above slot 111, it cannot begin above 110"),
        (
            CHECKPOINT,
            tip_with(checkpoint=checkpoint("c2", 121)),
            "there is a checkpoint of slot 121, after slot 120",
        ),
        (
            checkpoint_with(reference=checkpoint("c3", 120, base=9)),
            TIP,
            "checkpoint c3 was started below the orphan floor 10",
        ),
        (RELEASE, None, "nobody ever owned the shard"),
        (RELEASE, tip_with(epoch=EPOCH + 1), "the epoch is 5, not 4"),
    ],
    ids=str,
)
def test_an_operation_is_refused_when_one_part_of_its_precondition_fails(
    operation: Operation, tip: ShardManifest | None, reason: str
) -> None:
    assert operation.precondition(tip) == reason


def test_the_first_claim_makes_the_first_manifest() -> None:
    assert CLAIM.apply(None) == ShardManifest(
        head=commit.NO_HEAD, shard=SHARD, epoch=EPOCH + 1, owner="b", address="b:2"
    )


def test_a_claim_changes_the_owner_and_leaves_what_recovery_needs() -> None:
    assert CLAIM.apply(TIP) == tip_with(epoch=EPOCH + 1, owner="b", address="b:2")


def test_a_checkpoint_keeps_the_one_before_and_buries_the_one_before_that() -> None:
    buried = Tombstone(object=checkpoint("c1", 50).object, removed_in=31, delete_after_ms=77)
    assert CHECKPOINT.apply(TIP) == tip_with(
        checkpoint=checkpoint("c3", 120),
        previous_checkpoint=checkpoint("c2", 90),
        replay_from=110,
        tombstones=(buried,),
    )


def test_the_first_two_checkpoints_bury_nothing() -> None:
    first = CHECKPOINT.apply(tip_with(checkpoint=None, previous_checkpoint=None))
    assert (first.checkpoint, first.previous_checkpoint, first.tombstones) == (CHECKPOINT.reference, None, ())
    second = checkpoint_with(reference=checkpoint("c4", 130)).apply(first)
    assert (second.previous_checkpoint, second.tombstones) == (CHECKPOINT.reference, ())


def test_a_released_shard_has_no_owner_and_keeps_its_epoch() -> None:
    assert RELEASE.apply(TIP) == tip_with(owner="", address="")


@pytest.mark.parametrize("operation", [CHECKPOINT, RELEASE], ids=str)
def test_nothing_but_a_claim_is_applied_to_a_shard_that_nobody_owned(operation: Operation) -> None:
    with pytest.raises(ValueError, match="nobody ever owned"):
        operation.apply(None)


def test_a_checkpoint_finds_itself_as_long_as_the_manifest_names_its_object() -> None:
    tip = CHECKPOINT.apply(TIP)
    assert CHECKPOINT.landed(tip)
    for number in (4, 5, 6):
        tip = checkpoint_with(reference=checkpoint(f"c{number}", 100 + 10 * number)).apply(tip)
        assert CHECKPOINT.landed(tip)


def test_a_claim_never_takes_the_epoch_of_another_claimant_for_its_own() -> None:
    assert not CLAIM.landed(CLAIM.apply(TIP))


def test_a_release_finds_itself_only_in_its_own_epoch() -> None:
    released = RELEASE.apply(TIP)
    assert RELEASE.landed(released)
    assert not RELEASE.landed(dataclasses.replace(released, epoch=EPOCH + 1))


# ---- with the primitive


def log_of(store: ObjectStore, name: str = "id") -> commit.ManifestLog[ShardManifest]:
    clock, ids = VirtualClock(), (f"{name}-{number}" for number in itertools.count())
    return shard_manifests.shard_log(
        store, SHARD, monotonic=clock.now, sleep=clock.block, jitter=lambda: 0.5, new_id=lambda: next(ids)
    )


def put(log: commit.ManifestLog[ShardManifest], operation: Operation) -> ShardManifest:
    return commit.commit(log, operation, writer="d", created_ms=1, deadline_s=10.0).manifest


def owned() -> MemoryStore:
    store = MemoryStore()
    put(log_of(store, "owner"), Claim(shard=SHARD, epoch=EPOCH, owner="a", address="a:1"))
    return store


def test_of_two_claims_of_one_epoch_one_is_refused_also_when_answers_are_lost() -> None:
    inner = owned()
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    first = put(log_of(FaultStore(inner, script), "first"), CLAIM)
    with pytest.raises(commit.Refused, match="the epoch is 5, not below 5"):
        put(log_of(inner, "second"), dataclasses.replace(CLAIM, owner="c"))
    tip = log_of(inner).read_tip()
    assert tip is not None
    assert tip.manifest == first
    assert tip.manifest.owner == "b"


@pytest.mark.parametrize("fault", [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE])
@pytest.mark.parametrize("operation", [CHECKPOINT, RELEASE], ids=str)
def test_an_operation_whose_outcome_is_unknown_is_committed_again_and_applied_once(
    operation: Operation, fault: Fault
) -> None:
    script = Script()
    script.plan("put_if_absent", fault)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    store = FaultStore(owned(), script)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(store), operation)
    again = put(log_of(store.inner, "again"), operation)
    store.deliver_late()
    tip = log_of(store.inner).read_tip()
    assert tip is not None
    assert tip.manifest == again
    assert again.head.number == 2


def test_the_checkpoint_of_a_replaced_owner_is_refused_and_its_object_left_alone() -> None:
    store = owned()
    store.put("c3", b"state")
    put(log_of(store, "successor"), CLAIM)
    with pytest.raises(commit.Refused, match="the epoch is 5, not 4"):
        put(log_of(store), CHECKPOINT)
    assert store.get("c3") == b"state"


def test_a_checkpoint_that_was_begun_below_a_floor_that_rose_since_is_refused() -> None:
    store = owned()
    put(log_of(store, "collector"), SetFloor[ShardManifest](floor=1))
    begun = checkpoint_with(reference=checkpoint("c3", 120, base=0))
    with pytest.raises(commit.Refused, match="checkpoint c3 was started below the orphan floor 1"):
        put(log_of(store), begun)


def test_a_checkpoint_whose_tombstone_is_collected_leaves_the_others_as_they_are() -> None:
    store = owned()
    for number in (3, 4, 5, 6):
        put(log_of(store, f"c{number}"), checkpoint_with(reference=checkpoint(f"c{number}", 100 + 10 * number)))
    before = log_of(store).read_tip()
    assert before is not None
    assert [each.object.name for each in before.manifest.tombstones] == ["c3", "c4"]
    after = put(log_of(store, "collector"), CollectTombstones[ShardManifest](deleted=frozenset({"c3"})))
    assert [each.object.name for each in after.tombstones] == ["c4"]
    assert (after.checkpoint, after.previous_checkpoint) == (
        before.manifest.checkpoint,
        before.manifest.previous_checkpoint,
    )


def test_a_manifest_of_another_shard_is_damage() -> None:
    store = MemoryStore()
    log = log_of(store)
    other = dataclasses.replace(TIP, head=dataclasses.replace(TIP.head, number=1), shard=SHARD + 1)
    store.put(log.key(1), manifest.encode_shard_manifest(other))
    with pytest.raises(Damaged, match=f"{log.key(1)}: shard manifest is damaged at byte 16: it is of shard 4"):
        log.read_tip()
