"""A candidate opens one log, and owns every shard that it can read; what it cannot have costs as little as may be."""

from __future__ import annotations

import asyncio
import collections
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from daemon.errors import Corruption
from daemon.owner.candidate import Candidate, ClaimedShards
from daemon.owner.engine import DAMAGED_LOOK_S
from daemon.owner.heartbeat import Heartbeat
from storage_backends.file_log import FileLogs
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.formats.manifest import LogForm
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Call, Fault
from tests.daemon.group_commit._support import log_owner
from tests.daemon.group_commit._support.log_owner import SHARDS, LogOwner, owner_of
from tests.storage_backends._support import log_slots

OPEN, FENCE, CLOSE = LogSlotKind.OPEN, LogSlotKind.FENCE, LogSlotKind.CLOSE
ALL = tuple(range(SHARDS))


class Standing:
    """A daemon that stands by. `reasons`: whom it has waited for; `lost`: what has ended its log."""

    def __init__(self, daemon: Daemon, former: Heartbeat | None = None) -> None:
        self.daemon = daemon
        self.reasons: list[str] = []
        self.lost: list[BaseException] = []
        self.candidate = Candidate(
            daemon.environment,
            waiting=lambda wait: self.reasons.append(wait.reason),
            log_lost=self.lost.append,
            company_s=lambda: 0.0,
        )
        self.candidate.configure(SHARDS, daemon.environment.open_logs(LogForm.OBJECTS), former)

    def become_owner(self) -> asyncio.Task[ClaimedShards]:
        return self.daemon.call(self.candidate.become_owner())

    def waits_for(self, part: str) -> Callable[[], bool]:
        return lambda: any(part in reason for reason in self.reasons)


def logs_of(machines: EngineFixture) -> dict[str, list[LogSlotKind]]:
    """The kinds of the slots of every log."""
    log_ids = {key.split("/")[1] for key in machines.slots()}
    return {log_id: [header.kind for header in log_owner.headers_of(machines, log_id)] for log_id in log_ids}


async def dead(machines: EngineFixture, *shards: int) -> LogOwner:
    """An owner that has written a section of each of these, closed its log and gone."""
    north = await owner_of(machines, "north", *shards)
    await north.write(*shards)
    await north.run(north.living.close())
    north.daemon.kill()
    return north


# ---- all is well


async def test_a_new_root_has_every_shard_in_one_log(machines: EngineFixture) -> None:
    south = Standing(machines.daemon("south"))
    claimed = await south.become_owner()
    assert [claim.shard for claim in claimed.claims] == list(ALL)
    assert (claimed.damaged, claimed.unread) == ({}, {})
    assert logs_of(machines) == {claimed.takeover.living.log_id: [OPEN]}
    assert south.candidate.log_state == (claimed.takeover.living.log_id, 1, False)
    assert not south.candidate.is_taking_over


async def test_a_takeover_is_one_fence_and_a_claim_of_each_shard(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", *ALL)
    await north.write(*ALL)
    north.daemon.kill()
    south = Standing(machines.daemon("south"))
    claimed = await south.become_owner()
    assert {claim.shard: log_owner.known_by(claim) for claim in claimed.claims} == north.known
    puts = [call.key for call in south.daemon.store.calls if call.operation == "put_if_absent"]
    assert len(puts) == 2 + SHARDS, "a fence, OPEN, and the claims"
    assert puts[0].startswith(f"logs/{north.log_id}/"), "before a log is opened that nobody needs"
    assert puts[1] == log_owner.slot_key(claimed.takeover.living.log_id, 1)
    claims = [names.number_of(key) for key in puts[2:]]
    assert len(claims) == SHARDS
    assert puts[2].startswith(names.shard_manifest_prefix(0)), "of several candidates the one that gets it goes on"


async def test_a_takeover_asks_the_store_for_no_more_than_it_needs(machines: EngineFixture) -> None:
    """From the look for the end of the former log to the last claim; what a look asks before is not counted."""
    north = await owner_of(machines, "north", *ALL)
    await north.write(*ALL)
    north.daemon.kill()
    south = Standing(machines.daemon("south"))
    calls: list[Call] = []

    def noted(call: Call) -> Fault:
        calls.append(call)
        return Fault.NONE

    south.daemon.decide = noted
    await south.become_owner()
    fence = next(place for place, call in enumerate(calls) if call.key == log_owner.slot_key(north.log_id, 3))
    begin = max(place for place, call in enumerate(calls[:fence]) if call.operation == "list")
    end = max(place for place, call in enumerate(calls) if call.operation == "put_if_absent")
    asked = collections.Counter(call.operation for call in calls[begin : end + 1])
    # The fence, OPEN, the claims; the newest slot of the former log, the tip of each shard.
    assert asked == {"put_if_absent": 2 + SHARDS, "list": 1, "get_with_metadata": 1 + SHARDS}


async def test_a_log_that_was_closed_is_followed_at_once_and_settled(machines: EngineFixture) -> None:
    await dead(machines, *ALL)
    south = Standing(machines.daemon("south"))
    begin_s = machines.loop.time()
    claimed = await south.become_owner()
    assert machines.loop.time() - begin_s < 12, "what it takes to miss a beat of a daemon that has none"
    assert all(claim.settled for claim in claimed.claims)


# ---- others


async def test_a_candidate_waits_for_an_owner_whose_log_a_living_process_holds_and_leaves_no_log_behind(
    machines: EngineFixture, tmp_path: Path
) -> None:
    north = await owner_of(machines, "north", *ALL)
    # The log that the manifests name, in the form of files: its process lives.
    holder = FileLogs(tmp_path).log(north.log_id)
    holder.create(1, log_slots.opening(north.log_id))
    north.daemon.kill()
    south = Standing(machines.daemon("south"))
    south.candidate.configure(SHARDS, FileLogs(tmp_path))
    becoming = south.become_owner()
    try:
        await south.daemon.until(south.waits_for(f"process {os.getpid()}"))
        await asyncio.sleep(30.0)
        assert not becoming.done()
        assert FileLogs(tmp_path).log_ids() == {north.log_id}, "no log of its own"
        assert all(machines.shard_tip(shard).owner == "north" for shard in ALL)
        assert "which lives and may write to" in south.reasons[-1] or "north" in south.reasons[-1]
    finally:
        holder.close()
    claimed = await becoming
    assert len(claimed.claims) == SHARDS
    await south.daemon.call(claimed.takeover.living.close())


async def test_a_candidate_that_did_not_get_the_first_shard_closes_its_log_and_waits(machines: EngineFixture) -> None:
    south = Standing(machines.daemon("south"))
    held = south.daemon.pause("put_if_absent", names.shard_manifest_prefix(0))
    becoming = south.become_owner()
    await held.reached()
    east = await owner_of(machines, "east", *ALL)
    held.release()
    await south.daemon.until(south.waits_for("another daemon claims the shards"))
    await asyncio.sleep(0.1)
    kinds = logs_of(machines)
    assert kinds.pop(east.log_id) == [OPEN], "who has lost a race fences nobody"
    assert list(kinds.values()) == [[OPEN, CLOSE]]
    assert not becoming.done()
    becoming.cancel()


async def test_a_candidate_that_did_not_get_a_later_shard_lets_go_of_all(machines: EngineFixture) -> None:
    south = Standing(machines.daemon("south"))
    held = south.daemon.pause("put_if_absent", names.shard_manifest_prefix(2))
    becoming = south.become_owner()
    await held.reached()
    east = await owner_of(machines, "east", 2)
    held.release()
    await south.daemon.until(south.waits_for("another daemon claims the shards"))
    await asyncio.sleep(0.1)
    assert east.tip(0).owner == "south"
    ended = logs_of(machines)[east.tip(0).ranges[-1].log_id]
    assert ended[-1] is CLOSE, "what it has claimed is anybody's"
    becoming.cancel()


async def test_a_log_that_is_lost_while_shards_are_claimed_for_it_is_of_no_use(machines: EngineFixture) -> None:
    south = Standing(machines.daemon("south"))
    held = south.daemon.pause("put_if_absent", names.shard_manifest_prefix(2))
    becoming = south.become_owner()
    await held.reached()
    first = machines.shard_tip(0).ranges[-1].log_id
    log_owner.fence(machines, first)
    await asyncio.sleep(10.0)
    assert [type(error).__name__ for error in south.lost] == ["LogLost"]
    held.release()
    claimed = await becoming
    assert claimed.takeover.living.log_id != first
    assert [claim.epoch for claim in claimed.claims] == [2, 2, 2]
    assert {machines.shard_tip(shard).ranges[-1].log_id for shard in ALL} == {claimed.takeover.living.log_id}


# ---- what cannot be read


async def test_a_store_that_fails_for_one_shard_costs_that_shard(machines: EngineFixture) -> None:
    await dead(machines, *ALL)
    south = Standing(machines.daemon("south"))
    prefix = names.shard_manifest_prefix(1)
    south.daemon.script.plan("put_if_absent", Fault.FAIL_BEFORE, key_part=prefix, times=200)
    claimed = await south.become_owner()
    assert [claim.shard for claim in claimed.claims] == [0, 2]
    assert (claimed.damaged, list(claimed.unread)) == ({}, [1])
    south.daemon.decide = lambda call: Fault.NONE
    claim = await south.daemon.call(south.candidate.claim(claimed.takeover, 1, frozenset({""})))
    assert (claim.shard, claim.epoch) == (1, 2)
    assert machines.shard_tip(1).ranges[-1].log_id == claimed.takeover.living.log_id


async def test_a_log_that_the_store_does_not_give_costs_the_shards_that_need_it(machines: EngineFixture) -> None:
    await dead(machines, *ALL)
    east = await owner_of(machines, "east", 1)
    await east.write(1)
    await east.run(east.living.close())
    east.daemon.kill()
    south = Standing(machines.daemon("south"))
    south.daemon.script.plan(
        "get_with_metadata", Fault.FAIL_BEFORE, key_part=log_owner.slot_key(east.log_id, 2), times=200
    )
    claimed = await south.become_owner()
    assert [claim.shard for claim in claimed.claims] == [0, 2]
    assert (claimed.damaged, list(claimed.unread)) == ({}, [1])
    assert machines.shard_tip(1).owner == "", "it is given back, and damaged is nothing"
    south.daemon.decide = lambda call: Fault.NONE
    claim = await south.daemon.call(south.candidate.claim(claimed.takeover, 1, frozenset({""})))
    assert log_owner.known_by(claim) == east.known[1]
    assert machines.shard_tip(1).ranges[-1].log_id == claimed.takeover.living.log_id


async def test_a_damaged_shard_belongs_to_nobody_and_the_others_are_owned(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", *ALL)
    for shard in ALL:
        await north.write(shard)
    await north.run(north.living.close())
    north.daemon.kill()
    key = machines.slots_of(0)[0]
    whole, metadata = machines.store.get_with_metadata(key)
    machines.store.delete(key)
    south = Standing(machines.daemon("south"))
    claimed = await south.become_owner()
    assert [claim.shard for claim in claimed.claims] == [1, 2]
    assert list(claimed.damaged) == [0]
    assert machines.shard_tip(0).owner == ""
    written = machines.keys("")
    for _ in range(3):
        with pytest.raises(Corruption, match="shard slot 1"):
            await south.daemon.call(south.candidate.claim(claimed.takeover, 0, frozenset({""})))
    assert machines.keys("") == written, "to look again changes nothing"
    machines.store.put(key, whole, metadata=metadata)
    claim = await south.daemon.call(south.candidate.claim(claimed.takeover, 0, frozenset({""})))
    assert log_owner.known_by(claim) == north.known[0]


async def test_where_every_shard_is_damaged_nothing_is_owned_and_looking_again_opens_no_log(
    machines: EngineFixture,
) -> None:
    await dead(machines, *ALL)
    (key,) = machines.slots_of(0)
    whole, metadata = machines.store.get_with_metadata(key)
    machines.store.delete(key)
    south = Standing(machines.daemon("south"))
    with pytest.raises(Corruption, match="shard 0, shard slot 1"):
        await south.become_owner()
    assert sorted(kinds[-1].name for kinds in logs_of(machines).values()) == ["CLOSE", "CLOSE"]
    written = machines.keys("")
    for _ in range(3):
        with pytest.raises(Corruption, match="shard 0, shard slot 1"):
            await south.become_owner()
        await asyncio.sleep(DAMAGED_LOOK_S)
    assert machines.keys("") == written
    machines.store.put(key, whole, metadata=metadata)
    assert len((await south.become_owner()).claims) == SHARDS


async def test_a_log_whose_end_nobody_can_know_costs_its_shards(machines: EngineFixture) -> None:
    north = await owner_of(machines, "north", 0)
    await north.write(0)
    north.daemon.kill()
    machines.store.put(log_owner.slot_key(north.log_id, 2), b"damaged")
    south = Standing(machines.daemon("south"))
    claimed = await south.become_owner()
    assert [claim.shard for claim in claimed.claims] == [1, 2]
    assert log_owner.slot_key(north.log_id, 2) in str(claimed.damaged[0])
    assert machines.shard_tip(0).owner == "north", "nothing is claimed without a fence"


@pytest.mark.parametrize("name", ["south", "north"])
async def test_a_log_that_is_shorter_than_its_daemon_has_told_is_not_taken_over(
    machines: EngineFixture, name: str
) -> None:
    """Also by the daemon itself, when it is started again."""
    north = await owner_of(machines, "north", *ALL)
    for _ in range(2):
        await north.write(*ALL)
    told = Heartbeat(
        daemon_id="north", address="north:1", shards=ALL, instance="1", sequence=1, log_id=north.log_id, last_slot=3
    )
    north.daemon.kill()
    key = log_owner.slot_key(north.log_id, 3)
    whole, metadata = machines.store.get_with_metadata(key)
    machines.store.delete(key)
    standing = Standing(machines.daemon(name), former=told if name == "north" else None)
    machines.store.put(names.daemon_key("north"), msgspec.json.encode(told))
    written = machines.keys("")
    for _ in range(2):
        with pytest.raises(Corruption, match="the store has lost slots after 2"):
            await standing.become_owner()
    assert machines.keys("") == written, "no fence is made, and no log is opened"
    assert standing.candidate.log_state == ((north.log_id, 3, True) if name == "north" else ("", 0, False))
    machines.store.put(key, whole, metadata=metadata)
    claimed = await standing.become_owner()
    assert {claim.shard: log_owner.known_by(claim) for claim in claimed.claims} == north.known


async def test_a_store_that_is_away_is_waited_for_and_no_log_is_left_behind(machines: EngineFixture) -> None:
    south = Standing(machines.daemon("south"))
    south.daemon.store.go_down()
    becoming = south.become_owner()
    await south.daemon.until(south.waits_for("the store cannot be reached"))
    await asyncio.sleep(60.0)
    assert machines.slots() == []
    south.daemon.store.come_back()
    await becoming
    assert len(machines.slots()) == 1
