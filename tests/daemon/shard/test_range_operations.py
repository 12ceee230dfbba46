"""The operations on the manifest of a shard whose sections lie in logs: what each refuses, and what it makes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from daemon.group_commit.daemon_log import OwnLogEnd
from daemon.shard.range_operations import (
    ClaimShard,
    GiveBack,
    NeedLess,
    Release,
    RequireOfShard,
    WriteCheckpoint,
)
from storage_backends import commit, log_fence
from storage_backends.formats.log_slot_format import Head, Heads, LogSlotKind
from storage_backends.formats.manifest import CheckpointCut, LogRange, ObjectReference, ShardManifest
from storage_backends.log_fence import Fence

FORMER, OWN = "former", "own"
SHARD = 2


def range_of(log_id: str, epoch: int, numbers: tuple[int, int | None], slots: tuple[int, int | None]) -> LogRange:
    return LogRange(
        log_id=log_id, epoch=epoch, after=numbers[0], through=numbers[1], first_slot=slots[0], last_slot=slots[1]
    )


def fence(number: int, heads: Heads, kind: LogSlotKind = LogSlotKind.FENCE, log_id: str = FORMER) -> Fence:
    return Fence(log_id, number, kind, heads, proof=log_fence._PROOF)


def cut(slot: int, *, at: int = 0, log_id: str = FORMER, name: str | None = None, base: int = 5) -> CheckpointCut:
    reference = ObjectReference(name=name or f"checkpoint-{slot}", base=base, size_bytes=1, sha256=b"")
    return CheckpointCut(object=reference, slot=slot, log_id=log_id, at=at)


OWNED = ShardManifest(
    head=commit.NO_HEAD,
    shard=SHARD,
    epoch=3,
    owner="former owner",
    address="former:1",
    settled_epoch=3,
    ranges=(range_of("older", 2, (4, 9), (11, 20)), range_of(FORMER, 3, (1, None), (21, None))),
    checkpoint=cut(12),
    previous_checkpoint=cut(10),
)


def claim(**changed: Any) -> ClaimShard:
    fields: dict[str, Any] = {
        "shard": SHARD,
        "epoch": 4,
        "owner": "new owner",
        "address": "new:1",
        "log_id": OWN,
        "after": 1,
        "former": fence(8, {SHARD: Head(3, 25)}),
    }
    return ClaimShard(**(fields | changed))


def test_a_claim_closes_the_open_range_where_the_fence_says_and_opens_its_own() -> None:
    assert claim().precondition(OWNED) is None
    made = claim().apply(OWNED)
    assert made.ranges == (
        OWNED.ranges[0],
        range_of(FORMER, 3, (1, 7), (21, 25)),
        range_of(OWN, 4, (1, None), (26, None)),
    )
    assert (made.epoch, made.owner, made.address) == (4, "new owner", "new:1")
    assert (made.checkpoint, made.previous_checkpoint) == (OWNED.checkpoint, OWNED.previous_checkpoint)
    assert claim().landed(made)
    assert not claim(log_id="another").landed(made)


@pytest.mark.parametrize("heads", [{}, {SHARD: Head(2, 20)}, {SHARD + 1: Head(3, 25)}])
def test_an_open_range_without_a_section_is_dropped(heads: Heads) -> None:
    made = claim(former=fence(8, heads)).apply(OWNED)
    assert made.ranges == (OWNED.ranges[0], range_of(OWN, 4, (1, None), (21, None)))


def test_a_claim_drops_ranges_that_two_checkpoints_cover_and_goes_on_behind_them() -> None:
    covered = dataclasses.replace(OWNED, checkpoint=cut(25), previous_checkpoint=cut(25))
    own = range_of(OWN, 4, (1, None), (26, None))
    assert claim().apply(covered).ranges == (own,)
    given_back = dataclasses.replace(covered, owner="", ranges=(range_of(FORMER, 3, (1, 7), (21, 25)),))
    assert claim(former=None).apply(given_back).ranges == (own,)
    once = dataclasses.replace(covered, previous_checkpoint=cut(20))
    assert claim().apply(once).ranges == (range_of(FORMER, 3, (1, 7), (21, 25)), own), "the newest may be damaged"


def test_a_claim_goes_on_behind_the_checkpoint_where_the_log_has_lost_what_lay_below_it() -> None:
    ahead = dataclasses.replace(OWNED, checkpoint=cut(30))
    assert claim().apply(ahead).ranges[-1] == range_of(OWN, 4, (1, None), (31, None))
    assert claim(former=fence(8, {})).apply(ahead).ranges[-1] == range_of(OWN, 4, (1, None), (31, None))
    given_back = dataclasses.replace(ahead, owner="", ranges=OWNED.ranges[:1])
    assert claim(former=None).apply(given_back).ranges[-1] == range_of(OWN, 4, (1, None), (31, None))


def test_a_shard_that_nobody_owned_is_claimed_without_a_fence() -> None:
    first = claim(epoch=1, former=None)
    assert first.precondition(None) is None
    made = first.apply(None)
    assert (made.shard, made.ranges, made.settled_epoch) == (SHARD, (range_of(OWN, 1, (1, None), (1, None)),), 1)


def test_a_released_shard_is_claimed_behind_its_checkpoint_and_one_given_back_behind_its_ranges() -> None:
    released = dataclasses.replace(OWNED, owner="", ranges=(), checkpoint=cut(25), previous_checkpoint=cut(25))
    assert claim(former=None).apply(released).ranges == (range_of(OWN, 4, (1, None), (26, None)),)
    given_back = dataclasses.replace(OWNED, owner="", ranges=OWNED.ranges[:1])
    assert claim(former=None).apply(given_back).ranges[-1] == range_of(OWN, 4, (1, None), (21, None))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"epoch": 3}, "the epoch is 3, not 2"),
        ({"epoch": 5}, "the epoch is 3, not 4"),
        ({"former": None}, "has not fenced"),
        ({"former": fence(8, {}, log_id="another")}, "has not fenced"),
        ({"former": fence(1, {})}, "is not above slot 1"),
        ({"former": OwnLogEnd(log_id=FORMER, end=7, heads={})}, "log former is not the claimant's"),
    ],
)
def test_a_claim_is_refused(changed: dict[str, Any], reason: str) -> None:
    refused = claim(**changed).precondition(OWNED)
    assert refused is not None
    assert reason in refused


def test_a_fence_proves_nothing_where_an_older_range_still_needs_less_of_the_log() -> None:
    """The lowest number counts: of every range that names the log."""
    twice = dataclasses.replace(
        OWNED, ranges=(range_of(FORMER, 2, (4, 9), (11, 20)), range_of(FORMER, 3, (9, None), (21, None)))
    )
    assert claim(former=fence(5, {})).precondition(twice) is None
    assert claim(former=fence(4, {})).precondition(twice) is not None


def test_an_owner_claims_from_itself_behind_its_own_end() -> None:
    end = OwnLogEnd(log_id=FORMER, end=9, heads={SHARD: Head(3, 30)})
    again = claim(log_id=FORMER, former=end, after=9)
    assert again.precondition(OWNED) is None
    assert not again.landed(OWNED)
    made = again.apply(OWNED)
    assert made.ranges[1:] == (range_of(FORMER, 3, (1, 9), (21, 30)), range_of(FORMER, 4, (9, None), (31, None)))
    assert again.landed(made)


@pytest.mark.parametrize(
    ("changed", "tip", "settled"),
    [
        ({}, {}, False),
        ({"former_is_dead": True}, {}, True),
        ({"former_is_dead": True}, {"settled_epoch": 2}, False),
        ({"former": fence(8, {}, LogSlotKind.CLOSE)}, {}, True),
        ({"former": fence(8, {}, LogSlotKind.CLOSE)}, {"settled_epoch": 2}, False),
        ({"former": None}, {"owner": "", "ranges": ()}, True),
        ({"former": None}, {"owner": "", "ranges": (), "settled_epoch": 2}, False),
    ],
)
def test_an_epoch_is_settled_when_no_former_owner_can_hand_anything_out(
    changed: dict[str, Any], tip: dict[str, Any], settled: bool
) -> None:
    before = dataclasses.replace(OWNED, **tip)
    assert claim(**changed).precondition(before) is None
    assert claim(**changed).apply(before).settled_epoch == (4 if settled else before.settled_epoch)


# ---- checkpoints


def checkpoint(new: CheckpointCut, **changed: Any) -> WriteCheckpoint:
    return WriteCheckpoint(cut=new, epoch=3, delete_after_ms=9, **changed)


def test_a_checkpoint_keeps_the_one_before_it_and_drops_what_neither_needs() -> None:
    first = checkpoint(cut(23, at=5)).apply(OWNED)
    assert (first.checkpoint, first.previous_checkpoint) == (cut(23, at=5), cut(12))
    assert first.ranges == OWNED.ranges
    assert [each.object.name for each in first.tombstones] == ["checkpoint-10"]
    second = checkpoint(cut(24, at=7)).apply(first)
    assert second.ranges == (range_of(FORMER, 3, (5, None), (21, None)),)
    assert checkpoint(cut(23, at=5)).landed(second)


def test_a_checkpoint_that_was_cut_in_another_log_moves_nothing() -> None:
    tip = dataclasses.replace(OWNED, checkpoint=cut(20, at=8, log_id="older"))
    made = checkpoint(cut(23, at=5)).apply(tip)
    assert made.ranges == (range_of(FORMER, 3, (1, None), (21, None)),)


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        (checkpoint(cut(11)), "there is a checkpoint of shard slot 12, after 11"),
        (dataclasses.replace(checkpoint(cut(13)), epoch=2), "the epoch is 3, not 2"),
        (checkpoint(cut(13, base=1)), "was started below the orphan floor 2"),
    ],
)
def test_a_checkpoint_is_refused(operation: WriteCheckpoint, reason: str) -> None:
    tip = dataclasses.replace(OWNED, head=dataclasses.replace(commit.NO_HEAD, orphan_floor=2))
    refused = operation.precondition(tip)
    assert refused is not None
    assert reason in refused
    assert operation.precondition(None) == "nobody ever owned the shard"


def test_a_checkpoint_settles_its_epoch_when_the_owner_says_so() -> None:
    unsettled = dataclasses.replace(OWNED, settled_epoch=2)
    assert checkpoint(cut(13)).apply(unsettled).settled_epoch == 2
    assert checkpoint(cut(13), settles=True).apply(unsettled).settled_epoch == 3


def test_an_idle_shard_needs_nothing_of_the_log_that_grows() -> None:
    less = NeedLess(epoch=3, log_id=FORMER, after=40, last_slot=20)
    assert less.precondition(OWNED) == "the previous checkpoint is of shard slot 10, the last one is 20"
    idle = dataclasses.replace(OWNED, checkpoint=cut(20), previous_checkpoint=cut(20), ranges=OWNED.ranges[1:])
    assert less.precondition(idle) is None
    made = less.apply(idle)
    assert made.ranges == (range_of(FORMER, 3, (40, None), (21, None)),)
    assert less.landed(made)
    assert not less.landed(idle)


def test_what_is_required_of_readers_is_added_once_and_stays() -> None:
    requires = RequireOfShard(requirement="schedule_ids", epoch=3)
    assert requires.precondition(None) == "nobody ever owned the shard"
    assert requires.precondition(dataclasses.replace(OWNED, epoch=4)) == "the epoch is 4, not 3"
    assert requires.precondition(OWNED) is None
    assert not requires.landed(OWNED)
    made = RequireOfShard(requirement="more", epoch=3).apply(requires.apply(requires.apply(OWNED)))
    assert made.requires == ("more", "schedule_ids")
    assert requires.landed(made)
    assert dataclasses.replace(made, requires=()) == OWNED
    for later in (checkpoint(cut(13)), claim(), release()):
        assert later.apply(made).requires == made.requires


# ---- leaving


def release(**changed: Any) -> Release:
    fields: dict[str, Any] = {
        "epoch": 3,
        "log_id": FORMER,
        "last_slot": 25,
        "cut": cut(25, name="first"),
        "second": cut(25, name="second"),
        "delete_after_ms": 9,
    }
    return Release(**(fields | changed))


def test_a_released_shard_names_no_log_and_has_two_checkpoints_at_its_end() -> None:
    assert release().precondition(OWNED) is None
    made = release().apply(OWNED)
    assert (made.ranges, made.owner, made.address) == ((), "", "")
    assert (made.checkpoint_slot, made.previous_slot) == (25, 25)
    assert [each.object.name for each in made.tombstones] == ["checkpoint-12", "checkpoint-10"]
    assert release().landed(made)
    assert not release().landed(OWNED)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"epoch": 2}, "the epoch is 3, not 2"),
        ({"log_id": OWN}, "its owner writes log former, not own"),
        ({"cut": cut(24)}, "is of shard slot 24, the last one is 25"),
        ({"second": cut(25, name="first")}, "is named twice"),
    ],
)
def test_a_release_is_refused(changed: dict[str, Any], reason: str) -> None:
    refused = release(**changed).precondition(OWNED)
    assert refused is not None
    assert reason in refused


def test_what_is_given_back_is_as_it_was_before_the_claim() -> None:
    back = GiveBack(epoch=3, log_id=FORMER, own_head=Head(2, 9))
    assert back.precondition(OWNED) is None
    made = back.apply(OWNED)
    assert (made.ranges, made.owner, made.checkpoint) == (OWNED.ranges[:1], "", OWNED.checkpoint)
    assert back.landed(made)


def test_a_shard_with_a_section_of_the_epoch_is_not_given_back() -> None:
    refused = GiveBack(epoch=3, log_id=FORMER, own_head=Head(3, 21)).precondition(OWNED)
    assert refused == "shard slot 21 was written in epoch 3: release the shard instead"


def test_a_shard_whose_closed_range_names_the_own_log_is_not_given_back() -> None:
    twice = dataclasses.replace(OWNED, ranges=(range_of(FORMER, 2, (4, 9), (11, 20)), OWNED.ranges[1]))
    refused = GiveBack(epoch=3, log_id=FORMER, own_head=None).precondition(twice)
    assert refused == "sections of an earlier epoch lie in log former, too: close the log instead"
