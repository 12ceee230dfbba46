"""A takeover leaves one owner of each shard, who knows everything that was ever answered.

Every order of everybody's steps is walked in `test_log_walks`; here each step fails in its turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from daemon.errors import Corruption, Unavailable
from daemon.group_commit.daemon_log import LogLost
from daemon.owner.takeover import Takeover, check_readable
from daemon.shard import range_operations
from daemon.shard.recovery import ShardClaim
from storage_backends import commit, object_store
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.formats.manifest import ShardManifest
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Call, Fault, Pause
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import LogOwner, known_by, owner_of
from tests.planted import registry

DATA, FENCE, CLOSE = LogSlotKind.DATA, LogSlotKind.FENCE, LogSlotKind.CLOSE
MANIFEST = names.shard_manifest_prefix(0)


def ranges_of(manifest: ShardManifest) -> list[tuple[str, int, int | None, int, int | None]]:
    return [(each.log_id, each.after, each.through, each.first_slot, each.last_slot) for each in manifest.ranges]


async def claimant(machines: EngineFixture, name: str) -> LogOwner:
    """A daemon with a log, that owns nothing yet."""
    return await owner_of(machines, name)


# ---- one takeover after the other


async def test_the_first_owner_of_a_new_root_claims_from_nobody(machines: EngineFixture) -> None:
    north = await claimant(machines, "north")
    claim = (await north.take(0))[0]
    assert (claim.shard, claim.epoch, claim.last_slot) == (0, 1, 0)
    assert (claim.checkpoint, claim.sections, claim.settled) == (None, (), True)
    tip = north.tip(0)
    assert (tip.owner, tip.address, tip.epoch) == ("north", "north:1", 1)
    assert ranges_of(tip) == [(north.log_id, 1, None, 1, None)]
    assert log_owner.numbers_of(machines, north.log_id) == [1], "a claim is no slot"


async def test_a_successor_reads_what_was_written_behind_one_fence(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0)
    await north.write(0, 1)
    south = await claimant(machines, "south")
    claims = await south.take(0, 1)
    assert [(claim.epoch, claim.last_slot) for claim in claims.values()] == [(2, 2), (2, 1)]
    assert [section.slot for section in claims[0].sections] == [1, 2]
    assert south.known == north.known
    assert ranges_of(south.tip(0)) == [(north.log_id, 1, 3, 1, 2), (south.log_id, 1, None, 3, None)]
    assert [header.kind for header in log_owner.headers_of(machines, north.log_id)][-2:] == [DATA, FENCE]
    with pytest.raises(LogLost):
        await north.write(0)
    landed = await south.write(0, 1)
    assert {shard: each.slot for shard, each in landed.sections.items()} == {0: 3, 1: 2}


async def test_an_owner_that_wrote_nothing_leaves_no_range(machines: EngineFixture) -> None:
    await owner_of(machines, "north", 0)
    south = await claimant(machines, "south")
    claim = (await south.take(0))[0]
    assert (claim.epoch, claim.last_slot) == (2, 0)
    assert ranges_of(south.tip(0)) == [(south.log_id, 1, None, 1, None)]


@pytest.mark.parametrize(
    ("closes", "gone_owners", "settled"),
    [(True, {""}, True), (False, {"", "north"}, True), (False, {""}, False)],
    ids=["it has closed its log", "its process is dead", "it was fenced, and may be paused"],
)
async def test_a_claim_is_settled_where_the_former_owner_hands_out_nothing_any_more(
    machines: EngineFixture, closes: bool, gone_owners: set[str], settled: bool
) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    if closes:
        await north.run(north.living.close())
    south = await claimant(machines, "south")
    assert (await south.take(0, gone_owners=frozenset(gone_owners)))[0].settled is settled


async def test_replay_begins_behind_the_checkpoint(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    await north.checkpoint(0)
    await north.write(0)
    south = await claimant(machines, "south")
    claim = (await south.take(0))[0]
    assert claim.checkpoint is not None
    assert (claim.checkpoint.slot, [section.slot for section in claim.sections]) == (1, [2])
    assert south.known == north.known


async def test_a_damaged_checkpoint_is_made_up_for_by_the_sections_kept_for_the_one_before(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    for _ in range(2):
        await north.write(0)
        await north.write(0)
        await north.checkpoint(0)
    await north.living.truncated()
    await north.write(0)
    newest = north.tip(0).checkpoint
    assert newest is not None
    machines.store.put(newest.object.name, b"damaged")
    south = await claimant(machines, "south")
    claim = (await south.take(0))[0]
    assert [section.slot for section in claim.sections] == [3, 4, 5]
    assert south.known == north.known


async def test_ranges_of_several_logs_follow_each_other(machines: EngineFixture) -> None:
    known: set[int] = set()
    for name in ("north", "west", "east"):
        owner = await owner_of(machines, name, 0)
        assert owner.known[0] == known
        await owner.write(0)
        await owner.write(0)
        known = owner.known[0]
    south = await claimant(machines, "south")
    claim = (await south.take(0))[0]
    assert [section.slot for section in claim.sections] == [1, 2, 3, 4, 5, 6]
    assert [section.epoch for section in claim.sections] == [1, 1, 2, 2, 3, 3]
    assert known_by(claim) == known


async def test_each_slot_is_read_once_for_all_shards(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1, 2)
    for _ in range(5):
        await north.write(0, 1, 2)
    south = await claimant(machines, "south")
    before = len(south.daemon.store.calls)
    await south.take(0, 1, 2)
    read = [call.key for call in south.daemon.store.calls[before:] if call.operation == "get_with_metadata"]
    slots = [key for key in read if key.startswith("logs/")]
    # The newest is read by the fencer for its heads.
    assert sorted(slots) == sorted([log_owner.slot_key(north.log_id, n) for n in (2, 3, 4, 5, 6, 6)])


# ---- what is damaged


@pytest.mark.parametrize("damage", ["lost", "bits"])
async def test_a_damaged_section_costs_its_shard_alone_by_name(machines: EngineFixture, damage: str) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0)
    await north.write(1)
    key = log_owner.slot_key(north.log_id, 2)
    body, metadata = machines.store.get_with_metadata(key)
    if damage == "lost":
        machines.store.delete(key)
    else:
        machines.store.put(key, body[:-1] + bytes([body[-1] ^ 1]), metadata=metadata)
    south = await claimant(machines, "south")
    found = await south.read(await south.claim_all([0, 1]))
    assert isinstance(found[0], Corruption)
    assert f"logs/{north.log_id}" in str(found[0])
    assert "shard 0, shard slot 1" in str(found[0])
    assert isinstance(found[1], ShardClaim)
    assert known_by(found[1]) == north.known[1]


async def test_a_damaged_shard_is_given_back_as_it_was_and_pins_no_log(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0, 1)
    await north.write(1)
    key = log_owner.slot_key(north.log_id, 2)
    whole, metadata = machines.store.get_with_metadata(key)
    machines.store.delete(key)
    south = await claimant(machines, "south")
    won = await south.claim(0)
    assert isinstance((await south.read([won]))[0], Corruption)
    await south.run(south.takeover.give_back(won))
    tip = south.tip(0)
    assert (tip.owner, tip.address, tip.epoch) == ("", "", 2)
    assert ranges_of(tip) == [(north.log_id, 1, 3, 1, 1)]
    await south.take(2)
    await south.write(2)
    assert south.living.truncation.bound(9) == 1, "for the claim of shard 2 alone"
    with pytest.raises(Corruption, match="shard slot 1"):
        await south.run(check_readable(south.logs, south.manifests[0], 0, south.environment, south.traces))
    assert south.tip(0) == tip, "to look changes nothing"
    machines.store.put(key, whole, metadata=metadata)
    await south.run(check_readable(south.logs, south.manifests[0], 0, south.environment, south.traces))
    claim = (await south.take(0))[0]
    assert (claim.epoch, claim.last_slot, known_by(claim)) == (3, 1, north.known[0])


async def test_a_manifest_that_makes_no_sense_is_damage_of_its_shard(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    machines.store.put(machines.keys(MANIFEST)[-1], b"damaged")
    south = await claimant(machines, "south")
    with pytest.raises(Corruption, match=MANIFEST):
        await south.claim_as_seen(0, None)
    assert north.ended == []


async def test_a_store_that_cannot_be_read_damages_nothing(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0, 1)
    await north.checkpoint(1)
    south = await claimant(machines, "south")
    won = await south.claim_all([0, 1])
    south.daemon.script.plan("get_with_metadata", Fault.FAIL_BEFORE, key_part="shards/01/checkpoint/")
    found = await south.read(won)
    assert isinstance(found[0], ShardClaim)
    assert isinstance(found[1], object_store.StoreUnavailable)
    again = await south.read(won)
    assert isinstance(again[1], ShardClaim)
    assert known_by(again[1]) == north.known[1]


async def test_the_hole_that_a_superseded_claimant_finds_is_no_damage(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    await north.write(0)
    south = await claimant(machines, "south")
    won = await south.claim(0)
    east = await owner_of(machines, "east", 0)
    for _ in range(2):
        await east.checkpoint(0)
    log_owner.log_of(machines, north.log_id).delete_through(3)
    found = (await south.read([won]))[0]
    assert isinstance(found, range_operations.Superseded)
    assert (found.owner, found.owner_address) == ("east", "east:1")


async def owner_with_two_checkpoints(machines: EngineFixture) -> LogOwner:
    north = await owner_of(machines, "north", 0)
    for _ in range(2):
        await north.write(0)
        await north.checkpoint(0)
    return north


async def overtaken(machines: EngineFixture, known: ShardManifest, *, gone: int = 2) -> None:
    """Another daemon has taken shard 0 over since, and has deleted `gone` of the checkpoints that were known then."""
    east = await owner_of(machines, "east", 0)
    for _ in range(2):
        await east.write(0)
        await east.checkpoint(0)
    for cut in (known.checkpoint, known.previous_checkpoint)[:gone]:
        assert cut is not None
        machines.store.delete(cut.object.name)


@pytest.mark.parametrize("gone", [1, 2])
async def test_the_checkpoint_that_a_superseded_claimant_does_not_find_is_no_damage(
    machines: EngineFixture, gone: int
) -> None:
    await owner_with_two_checkpoints(machines)
    south = await claimant(machines, "south")
    won = await south.claim(0)
    await overtaken(machines, won.tip.manifest, gone=gone)
    found = (await south.read([won]))[0]
    assert isinstance(found, range_operations.Superseded)
    assert (found.owner, found.owner_address) == ("east", "east:1")
    assert south.daemon.damage_found("checkpoint") == 0


@pytest.mark.parametrize("held_at", [names.checkpoint_prefix(0), names.LOGS_PREFIX])
async def test_a_shard_that_another_daemon_claims_while_it_is_looked_at_is_not_damaged(
    machines: EngineFixture, held_at: str
) -> None:
    north = await owner_with_two_checkpoints(machines)
    await north.write(0)
    south = await claimant(machines, "south")
    await south.run(south.takeover.give_back(await south.claim(0)))
    held = south.daemon.pause("get_with_metadata", held_at)
    looking = south.run(check_readable(south.logs, south.manifests[0], 0, south.environment, south.traces))
    await held.reached()
    await overtaken(machines, south.tip(0))
    log_owner.log_of(machines, north.log_id).delete_through(4)
    held.release()
    with pytest.raises(range_operations.Superseded):
        await looking
    assert south.daemon.damage_found("checkpoint") == 0


# ---- claims against each other


async def test_of_two_claimants_with_one_fence_one_wins_and_the_other_is_told_whose_the_shard_is(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south, east = await claimant(machines, "south"), await claimant(machines, "east")
    held = south.daemon.pause("put_if_absent", MANIFEST)
    losing = asyncio.ensure_future(south.claim(0))
    await held.reached()
    await east.take(0)
    held.release()
    with pytest.raises(range_operations.Superseded) as superseded:
        await losing
    assert superseded.value.owner_address == "east:1"
    assert log_owner.numbers_of(machines, north.log_id) == [1, 2, 3], "one fence"
    await east.write(0)
    assert south.living.truncation.bound(9) == 8, "the claim that was lost needs nothing"


async def test_who_looked_before_another_had_claimed_never_fences_the_winner(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    seen = south.look(0)
    east = await owner_of(machines, "east", 0)
    with pytest.raises(range_operations.Superseded) as superseded:
        await south.claim_as_seen(0, seen)
    assert superseded.value.owner_address == "east:1"
    await east.write(0)
    assert log_owner.headers_of(machines, east.log_id)[-1].kind is DATA
    assert south.living.truncation.bound(9) == 8


async def test_a_fence_that_may_stop_nobody_allows_no_claim_and_the_next_attempt_finds_the_true_one(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    held = south.daemon.pause("put_if_absent", f"logs/{north.log_id}")
    claiming = asyncio.ensure_future(south.claim(0))
    await held.reached()
    # South is about to fence slot 3. North writes on, and deletes.
    for _ in range(3):
        await north.write(0)
    for _ in range(2):
        await north.checkpoint(0)
    await north.living.truncated()
    assert log_owner.numbers_of(machines, north.log_id) == [5]
    held.release()
    with pytest.raises(Unavailable, match=r"the fence of log .* at slot 3 is not above slot 5.*it may stop nobody"):
        await claiming
    assert log_owner.numbers_of(machines, north.log_id) == [3, 5]
    await north.write(0)
    assert north.tip(0).epoch == 1
    claim = (await south.take(0))[0]
    assert (claim.epoch, known_by(claim)) == (2, north.known[0])
    with pytest.raises(LogLost, match="slot 7"):
        await north.write(0)


async def lose_the_answer(owner: LogOwner, shard: int) -> None:
    """A claim whose PUT is held back, and of which the store tells nothing until the claimant gives up."""
    prefix = names.shard_manifest_prefix(shard)
    owner.daemon.script.plan("put_if_absent", Fault.DELIVER_LATE, key_part=prefix)
    owner.daemon.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=prefix, times=200)
    owner.daemon.script.plan("head", Fault.FAIL_BEFORE, key_part=prefix, times=200)
    with pytest.raises(commit.CommitOutcomeUnknown):
        await owner.claim(shard)
    owner.daemon.decide = lambda call: Fault.NONE


async def test_a_claim_whose_outcome_was_unknown_is_found_when_it_has_landed_late(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    await lose_the_answer(south, 0)
    await south.take(1)
    await south.write(1)
    await south.write(1)
    for _ in range(2):
        await south.checkpoint(1)
    assert south.living.truncation.bound(9) == 1, "it may land yet, and names the log from there on"
    assert south.daemon.store.deliver_late() == 1
    claim = (await south.take(0))[0]
    assert (claim.epoch, known_by(claim)) == (2, north.known[0])
    assert ranges_of(south.tip(0))[-1] == (south.log_id, 1, None, 2, None)
    await south.write(0)


async def test_a_claim_whose_outcome_was_unknown_is_sent_again_as_it_was(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    await lose_the_answer(south, 0)
    await south.take(1)
    await south.write(1)
    claim = (await south.take(0))[0]
    assert claim.epoch == 2
    assert ranges_of(south.tip(0))[-1] == (south.log_id, 1, None, 2, None), "its log had one slot when it was made"
    assert south.daemon.store.deliver_late() == 0
    assert south.tip(0).epoch == 2


async def test_a_claim_whose_outcome_was_unknown_and_that_another_overtook_is_given_up(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    await lose_the_answer(south, 0)
    east = await owner_of(machines, "east", 0)
    await east.write(0)
    claim = (await south.take(0))[0]
    assert (claim.epoch, known_by(claim)) == (3, east.known[0]), "another claim, by a fence of the log of east"
    assert south.daemon.store.deliver_late() == 0
    with pytest.raises(LogLost):
        await east.write(0)


async def test_a_claimant_overtaken_before_it_knows_of_its_claim_does_not_take_the_other_ones_epoch_for_its_own(
    machines: EngineFixture,
) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    south = await claimant(machines, "south")
    answered = south.daemon.gate()
    asks = Pause(released=answered)
    landed = False

    def lose_the_answer_and_ask_late(call: Call) -> Fault | Pause:
        nonlocal landed
        if MANIFEST not in call.key:
            return Fault.NONE
        if call.operation == "put_if_absent":
            landed = True
            return Fault.FAIL_AFTER
        return asks if landed else Fault.NONE

    south.daemon.decide = lose_the_answer_and_ask_late
    claiming = asyncio.ensure_future(south.claim(0))
    await south.daemon.until(asks.reached.is_set)
    assert north.tip(0).owner == "south"
    east = await owner_of(machines, "east", 0)
    answered.set()
    with pytest.raises(range_operations.Superseded) as superseded:
        await claiming
    assert superseded.value.owner_address == "east:1"
    await east.write(0)
    assert south.living.truncation.bound(9) == 8
    assert north.tip(0).epoch == 3


# ---- from itself


async def test_a_shard_that_was_lost_alone_is_claimed_from_itself_without_a_fence(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0, 1)
    await north.write(0, 1)
    await north.write(0)
    known = set(north.known[0])
    claim = (await north.take(0))[0]
    assert (claim.epoch, claim.last_slot, known_by(claim)) == (2, 2, known)
    assert claim.settled, "no other process hands out anything"
    log_id = north.log_id
    assert ranges_of(north.tip(0)) == [(log_id, 1, 3, 1, 2), (log_id, 3, None, 3, None)]
    landed = await north.write(0, 1)
    assert {shard: each.slot for shard, each in landed.sections.items()} == {0: 3, 1: 2}
    assert [header.kind for header in log_owner.headers_of(machines, log_id)][1:] == [DATA] * 3
    south = await claimant(machines, "south")
    assert known_by((await south.take(0))[0]) == north.known[0]


async def test_a_claim_from_itself_waits_for_the_section_under_way_and_counts_it(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    held = north.daemon.pause("put_if_absent", "logs/")
    writing = asyncio.ensure_future(north.write(0))
    await held.reached()
    taking = asyncio.ensure_future(north.take(0))
    await asyncio.sleep(1.0)
    assert not taking.done()
    assert north.tip(0).epoch == 1
    held.release()
    await writing
    claim = (await taking)[0]
    assert (claim.epoch, claim.last_slot, known_by(claim)) == (2, 1, north.known[0])


async def test_a_claim_from_itself_of_a_log_that_has_ended_is_none(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    log_owner.fence(machines, north.log_id)
    with pytest.raises(LogLost):
        await north.write(0)
    with pytest.raises(Unavailable, match="has ended"):
        await north.claim(0)
    assert north.tip(0).epoch == 1


async def test_two_claims_from_itself_leave_no_empty_range(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    for epoch in (2, 3, 4):
        assert (await north.take(0))[0].epoch == epoch
    assert ranges_of(north.tip(0)) == [(north.log_id, 1, 2, 1, 1), (north.log_id, 2, None, 2, None)]


# ---- planted bugs


def a_hole_is_damage_whoever_owns_the_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Takeover, "_superseded", lambda self, won: None)


def a_checkpoint_that_is_gone_is_damage_whoever_owns_the_shard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(range_operations, "check_not_superseded", lambda shard_log, tip: None)


async def the_newest_of_two_checkpoints_is_gone(machines: EngineFixture) -> None:
    await test_the_checkpoint_that_a_superseded_claimant_does_not_find_is_no_damage(machines, 1)


def who_has_lost_a_race_fences_its_winner(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Takeover, "_check_owner", lambda self, looked_at, tip: None)


PLANTED: dict[Callable[[pytest.MonkeyPatch], None], Callable[[EngineFixture], Awaitable[None]]] = {
    a_hole_is_damage_whoever_owns_the_shard: test_the_hole_that_a_superseded_claimant_finds_is_no_damage,
    a_checkpoint_that_is_gone_is_damage_whoever_owns_the_shard: the_newest_of_two_checkpoints_is_gone,
    who_has_lost_a_race_fences_its_winner: test_who_looked_before_another_had_claimed_never_fences_the_winner,
}


@pytest.mark.parametrize(("plant", "story"), PLANTED.items(), ids=lambda each: each.__name__)
async def test_a_planted_bug_of_takeovers_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    story: Callable[[EngineFixture], Awaitable[None]],
    machines: EngineFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        await story(machines)


registry.register("takeovers into a log", PLANTED)
