"""A second daemon stands by, says whom it waits for, and takes its turn when the owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from daemon.errors import Corruption
from daemon.owner import heartbeat, standby
from daemon.owner.standby import OwnerLock, Wait
from storage_backends import commit, local_directory, memory_store, object_store
from storage_backends.formats import names
from storage_backends.formats.manifest import LogRange, ManifestHead, ShardManifest
from tests._support.virtual_clock import VirtualClock
from tests._support.virtual_loop import InlineExecutor

T = TypeVar("T")
Tip = commit.Tip[ShardManifest]


async def run(work: Callable[[], T]) -> T:
    return work()


def log_of(owner: str) -> str:
    """The log of an owner."""
    return f"log of {owner}"


class Shard:
    """The shard manifest's log as far as it is read here."""

    def __init__(self, owner: str | None) -> None:
        self.down = False
        self.damaged = False
        self.reads = 0
        self.tip = None if owner is None else self.tip_of(owner)

    @staticmethod
    def tip_of(owner: str, epoch: int = 1, *, number: int = 1, read_at_s: float = 0.0) -> Tip:
        head = ManifestHead(number=number, previous_sha256=b"", commit_id="c", writer=owner, created_ms=0)
        address = f"{owner}:7461" if owner else ""
        opened = LogRange(log_id=log_of(owner), epoch=epoch, after=1, through=None, first_slot=1, last_slot=None)
        ranges = (opened,) if owner else ()
        manifest = ShardManifest(head=head, shard=3, epoch=epoch, owner=owner, address=address, ranges=ranges)
        return commit.Tip(number=number, manifest=manifest, sha256=b"", read_at=read_at_s)

    def read_tip(self, warm: Tip | None = None) -> Tip | None:
        self.reads += 1
        if self.down:
            raise object_store.StoreUnavailable("manifest", "no route")
        if self.damaged:
            raise object_store.Damaged("manifest", "flipped bit")
        return self.tip


class Store(memory_store.MemoryStore):
    """Counts listings, and may be out of reach."""

    down = False
    listings = 0

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[object_store.ListedObject]:
        self.listings += 1
        return super().list(prefix, start_after=start_after)

    def get_with_metadata(self, key: str) -> tuple[bytes, Mapping[str, str]]:
        if self.down:
            raise object_store.StoreUnavailable(key, "no route")
        return super().get_with_metadata(key)


class Fixture:
    """The daemon south stands by for two shards."""

    def __init__(self) -> None:
        self.store = Store()
        self.clock = VirtualClock()
        self.shards = [Shard("north"), Shard("north")]
        self.locks: dict[str, OwnerLock] = {}
        self.reasons: list[str] = []
        # Logs with an end, and which of them were looked at.
        self.ended_logs: set[str] = set()
        self.logs_looked_at: list[str] = []
        self.logs_down = False
        self.beating: dict[str, asyncio.Task[None]] = {}
        self.standby = self.new_standby()

    def new_standby(self) -> standby.Standby:
        """What south observes from now on, of the shards as they are now."""
        return standby.Standby(
            self.store,
            self.shards,
            daemon_id="south",
            lock=lambda daemon_id: self.locks.get(daemon_id, OwnerLock.UNKNOWN),
            log_has_ended=self.log_has_ended,
            run=run,
            parts=InlineExecutor(),
            clock=self.clock.now,
            sleep=self.clock.sleep,
            look_interval_s=1.0,
        )

    def stand_by(self) -> asyncio.Task[standby.Claimable]:
        return asyncio.create_task(self.standby.until_claimable(lambda wait: self.reasons.append(wait.reason)))

    def log_has_ended(self, log_id: str) -> bool:
        self.logs_looked_at.append(log_id)
        if self.logs_down:
            raise object_store.StoreUnavailable("log", "no route")
        return log_id in self.ended_logs

    def beat(
        self, daemon_id: str, log_state: Callable[[], heartbeat.LogState] | None = None, *, instance: str = "a"
    ) -> None:
        """It beats from now on, and claims what is recorded as its own."""
        heart = heartbeat.HeartbeatLoop(
            self.store,
            daemon_id=daemon_id,
            address=f"{daemon_id}:7461",
            owned=lambda: self.owned_by(daemon_id),
            log_state=log_state or (lambda: heartbeat.LogState(log_of(daemon_id), 1)),
            instance=instance,
            run=run,
            sleep=self.clock.sleep,
        )
        self.beating[daemon_id] = asyncio.create_task(heart.beats())

    def owned_by(self, daemon_id: str) -> dict[int, heartbeat.ReportedShard]:
        """Its shards, by what is recorded."""
        return {
            number: heartbeat.ReportedShard(shard.tip.manifest.epoch, shard.tip.number)
            for number, shard in enumerate(self.shards)
            if shard.tip is not None and shard.tip.manifest.owner == daemon_id
        }

    def reads(self) -> list[int]:
        """How often the manifests of the shards were read since this was asked last."""
        reads = [shard.reads for shard in self.shards]
        for shard in self.shards:
            shard.reads = 0
        return reads

    async def silence(self, daemon_id: str) -> None:
        self.beating[daemon_id].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.beating.pop(daemon_id)


@pytest.fixture
async def south() -> AsyncIterator[Fixture]:
    fixture = Fixture()
    yield fixture
    for daemon_id in list(fixture.beating):
        await fixture.silence(daemon_id)


async def test_a_new_root_is_claimable_at_once(south: Fixture) -> None:
    south.shards[:] = [Shard(None), Shard(None)]
    assert (await south.stand_by()).reason == "nobody ever owned it"


async def test_shards_that_were_given_up_are_claimable_at_once(south: Fixture) -> None:
    south.shards[:] = [Shard(""), Shard("south")]
    assert (await south.stand_by()).reason == "its owner gave it up"
    assert south.reasons == []


async def test_one_shard_of_a_living_owner_keeps_the_daemon_waiting(south: Fixture) -> None:
    south.shards[0] = Shard(None)
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(100.0)
    assert not waiting.done()
    south.shards[1].tip = Shard.tip_of("")
    await south.clock.advance(heartbeat.INTERVAL_S + 1.0)
    assert (await waiting).reason == "nobody ever owned it"


async def test_a_living_owner_is_waited_for_and_named(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(300.0)
    assert not waiting.done()
    assert {reason[: reason.index("(")] for reason in south.reasons} == {"waiting for daemon north at north:7461 "}
    waiting.cancel()


async def test_the_end_of_the_owners_process_is_seen_by_its_lock(south: Fixture) -> None:
    south.beat("north")
    south.locks["north"] = OwnerLock.HELD
    waiting = south.stand_by()
    await south.clock.advance(10.0)
    assert not waiting.done()
    await south.silence("north")
    south.locks["north"] = OwnerLock.FREE
    await south.clock.advance(1.0)
    assert (await waiting).reason == "the process of daemon north has ended"


@pytest.mark.parametrize("lock", [OwnerLock.HELD, OwnerLock.UNKNOWN])
async def test_a_silent_owner_is_succeeded_after_nine_seconds(south: Fixture, lock: OwnerLock) -> None:
    south.locks["north"] = lock
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    await south.silence("north")
    await south.clock.advance(8.0)
    assert not waiting.done()
    await south.clock.advance(5.0)
    assert "is silent" in (await waiting).reason


async def test_an_outage_of_the_store_is_no_silence_of_the_owner(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(10.0)
    await south.silence("north")
    south.store.down = True
    await south.clock.advance(60.0)
    assert south.reasons[-1] == "the store cannot be reached: daemons/north: no route"
    south.store.down = False
    await south.clock.advance(5.0)
    assert not waiting.done()
    await south.clock.advance(10.0)
    assert "is silent" in (await waiting).reason


async def test_manifests_that_cannot_be_read_are_no_silence_of_the_owner_either(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(10.0)
    await south.silence("north")
    for shard in south.shards:
        shard.down = True
    await south.clock.advance(60.0)
    assert not waiting.done()
    assert "the store cannot be reached: manifest: no route" in south.reasons
    for shard in south.shards:
        shard.down = False
    await south.clock.advance(15.0)
    assert "is silent" in (await waiting).reason


async def test_of_two_candidates_one_goes_first(south: Fixture) -> None:
    for daemon_id in ("north", "east", "west"):
        south.beat(daemon_id)

    async def claimed_at_s(candidate: standby.Standby) -> float:
        await candidate.until_claimable(lambda wait: None)
        return south.clock.now_s

    await south.clock.advance(30.0)
    candidates = []
    for daemon_id in ("east", "west"):
        other = standby.Standby(
            south.store,
            south.shards,
            daemon_id=daemon_id,
            lock=lambda _: OwnerLock.UNKNOWN,
            log_has_ended=lambda _: False,
            run=run,
            parts=InlineExecutor(),
            clock=south.clock.now,
            sleep=south.clock.sleep,
            look_interval_s=1.0,
        )
        candidates.append(asyncio.create_task(claimed_at_s(other)))
    await south.clock.advance(4.0)
    await south.silence("north")
    await south.clock.advance(30.0)
    first, second = sorted(await asyncio.gather(*candidates))
    assert second - first >= heartbeat.INTERVAL_S - 1.0


# ---- what a look asks for


async def test_while_the_owner_lives_its_manifests_are_not_read_again(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(10.0)
    assert south.reads() == [1, 1]
    await south.clock.advance(300.0)
    assert south.reads() == [0, 0]
    assert not waiting.done()
    waiting.cancel()


async def test_a_damaged_heartbeat_is_logged_once_for_each_content(
    south: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = south.stand_by()
    for body, times in ((b"{", 1), (b"{", 1), (b"[", 2)):
        south.store.put(names.daemon_key("north"), body)
        await south.clock.advance(2.0)
        assert caplog.text.count("the heartbeat of daemon north is damaged: daemons/north: ") == times
    south.beat("north")
    await south.clock.advance(2.0)
    await south.silence("north")
    south.store.put(names.daemon_key("north"), b"[")
    await south.clock.advance(2.0)
    assert caplog.text.count("the heartbeat of daemon north is damaged") == 3
    waiting.cancel()


async def test_heartbeats_are_listed_every_ten_seconds(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(299.5)
    assert south.store.listings == 30
    waiting.cancel()


async def test_a_manifest_is_read_when_a_heartbeat_says_that_it_changed(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    south.reads()
    south.shards[1].tip = Shard.tip_of("north", epoch=2)
    await south.clock.advance(30.0)
    assert south.reads() == [0, 1], "the epoch of shard 1 alone has changed"
    assert south.standby.tip(1) is south.shards[1].tip
    waiting.cancel()


async def test_a_manifest_that_its_owner_has_followed_by_another_is_read_again_so_that_a_takeover_knows_it(
    south: Fixture,
) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    south.reads()
    south.shards[0].tip = Shard.tip_of("north", number=9)
    await south.clock.advance(30.0)
    assert south.reads() == [1, 0]
    waiting.cancel()


async def test_a_manifest_is_read_again_before_its_successor_could_be_found_by_a_listing_only(south: Fixture) -> None:
    south.beat("north")
    south.shards[0].tip = Shard.tip_of("north", read_at_s=south.clock.now_s - commit.WARM_MAX_S / 2 + 30.0)
    south.shards[1].tip = Shard.tip_of("north", read_at_s=south.clock.now_s)
    waiting = south.stand_by()
    await south.clock.advance(20.0)
    assert south.reads() == [1, 1]
    await south.clock.advance(20.0)
    first, second = south.reads()
    assert first >= 1
    assert second == 0
    waiting.cancel()


async def test_a_successor_is_known_by_its_first_heartbeat_while_the_former_owner_still_seems_to_live(
    south: Fixture,
) -> None:
    south.beat("north")
    south.beat("east", lambda: heartbeat.LogState(log_of("east"), 1))
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    await south.silence("north")
    await south.silence("east")
    for shard in south.shards:
        shard.tip = Shard.tip_of("east", epoch=2)
    south.beat("east", lambda: heartbeat.LogState(log_of("east"), 1), instance="b")
    await south.clock.advance(1.0)
    assert south.standby.owner_address == "east:7461"
    await south.clock.advance(100.0)
    assert south.reasons[-1].startswith("waiting for daemon east")
    waiting.cancel()


async def test_the_heartbeats_of_an_older_version_say_nothing_of_manifests_which_are_read_at_each_look(
    south: Fixture,
) -> None:
    waiting = south.stand_by()
    for sequence in range(20):
        told = {"daemon_id": "north", "address": "north:7461", "shards": [0, 1], "instance": "a", "sequence": sequence}
        south.store.put(names.daemon_key("north"), json.dumps(told | {"log_id": log_of("north")}).encode())
        await south.clock.advance(3.0)
    assert min(south.reads()) >= 59
    assert south.reasons[-1].startswith("waiting for daemon north")
    waiting.cancel()


async def test_nothing_is_claimed_by_a_manifest_of_an_earlier_look(south: Fixture) -> None:
    """Another candidate was quicker, and its first heartbeat has not been found yet."""
    south.locks["north"] = OwnerLock.HELD
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(10.5)
    south.locks["north"] = OwnerLock.FREE
    for shard in south.shards:
        shard.tip = Shard.tip_of("east", epoch=2)
    south.beat("east")
    await south.clock.advance(30.0)
    assert not waiting.done()
    assert south.reasons[-1].startswith("waiting for daemon east")
    waiting.cancel()


async def test_a_daemon_that_comes_back_is_no_silent_owner(south: Fixture) -> None:
    """Its last heartbeat was that of a dead daemon, which is read at listings only."""
    south.beat("north")
    south.beat("east")
    waiting = south.stand_by()
    await south.clock.advance(5.0)
    await south.silence("east")
    await south.clock.advance(45.5)
    for shard in south.shards:
        shard.tip = Shard.tip_of("east", epoch=2)
    south.beat("east", instance="b")
    await south.clock.advance(3.0)
    assert not waiting.done()
    assert south.reasons[-1].startswith("waiting for daemon east")
    waiting.cancel()


async def test_the_manifests_of_a_silent_owner_are_read_at_each_look_while_another_candidate_goes_first(
    south: Fixture,
) -> None:
    first = next(
        each
        for each in ("east", "west", "centre", "coast")
        if standby.rendezvous_rank("south", others=[each], former_owner="north")
    )
    south.beat("north")
    south.beat(first)
    waiting = south.stand_by()
    await south.clock.advance(30.5)
    await south.silence("north")
    while "1 other candidates go first" not in south.reasons[-1]:
        await south.clock.advance(1.0)
    for shard in south.shards:
        shard.tip = Shard.tip_of(first, epoch=2)
    await south.clock.advance(1.0)
    assert south.standby.owner_address == f"{first}:7461"
    waiting.cancel()


async def test_a_manifest_that_was_damaged_is_read_again_although_it_is_claimed(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(5.0)
    for shard in south.shards:
        shard.damaged = True
    south.beat("north", lambda: heartbeat.LogState("another log", 1), instance="b")
    await south.clock.advance(5.0)
    with pytest.raises(Corruption, match="flipped bit"):
        await waiting
    for shard in south.shards:
        shard.damaged = False
    await south.silence("north")
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(5.0)
    assert not waiting.done()
    waiting.cancel()


# ---- the end of the owner's log


async def test_a_log_is_not_looked_at_while_its_owner_beats_in_it(south: Fixture) -> None:
    south.ended_logs.add(log_of("north"))
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(60.0)
    assert not waiting.done()
    assert south.logs_looked_at == [], "a look is a request, and a fence that the owner has not met costs it nothing"
    waiting.cancel()


async def test_after_a_missed_beat_a_log_with_an_end_is_claimed_at_once(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    await south.silence("north")
    south.ended_logs.add(log_of("north"))
    await south.clock.advance(7.0)
    assert (await waiting).reason == "the log of daemon north has ended"
    assert south.logs_looked_at == [log_of("north")]


async def test_an_owner_that_beats_again_is_looked_at_no_more(south: Fixture) -> None:
    south.beat("north")
    waiting = south.stand_by()
    await south.clock.advance(30.0)
    await south.silence("north")
    await south.clock.advance(5.0)
    looks = len(south.logs_looked_at)
    assert looks >= 1
    south.beat("north", instance="b")
    await south.clock.advance(30.0)
    assert len(south.logs_looked_at) <= looks + 1
    assert not waiting.done()
    waiting.cancel()


@pytest.mark.parametrize(
    "told",
    [heartbeat.LogState(log_of("north"), 9, True), heartbeat.LogState("another log", 1)],
    ids=["it says that its log has ended", "it writes another log"],
)
async def test_an_owner_that_beats_and_is_out_of_its_log_is_succeeded_at_once(
    south: Fixture, told: heartbeat.LogState
) -> None:
    south.ended_logs.add(log_of("north"))
    south.locks["north"] = OwnerLock.HELD
    south.beat("north", lambda: told)
    waiting = south.stand_by()
    await south.clock.advance(2.0)
    claimable = await waiting
    assert claimable.reason == "the log of daemon north has ended"
    assert claimable.gone_owners == {"", "south"}, "its process lives, and may hand out what it had"
    assert south.logs_looked_at == [log_of("north")]


async def test_an_end_that_cannot_be_looked_for_is_none_and_is_asked_for_again(south: Fixture) -> None:
    south.ended_logs.add(log_of("north"))
    south.logs_down = True
    south.beat("north", lambda: heartbeat.LogState("another log", 1))
    waiting = south.stand_by()
    await south.clock.advance(5.0)
    assert not waiting.done()
    south.logs_down = False
    await south.clock.advance(1.0)
    assert (await waiting).reason == "the log of daemon north has ended"


async def test_the_end_of_a_log_is_looked_for_once(south: Fixture) -> None:
    south.ended_logs.add(log_of("north"))
    south.shards[1] = Shard("west")
    south.beat("north", lambda: heartbeat.LogState(log_of("north"), 9, True))
    south.beat("west")
    waiting = south.stand_by()
    await south.clock.advance(20.0)
    assert not waiting.done(), "shard 1 has an owner that lives"
    assert south.logs_looked_at == [log_of("north")]
    waiting.cancel()


async def test_what_is_recorded_as_its_own_is_claimable_whatever_its_log(south: Fixture) -> None:
    south.shards[:] = [Shard("south"), Shard("south")]
    claimable = await south.stand_by()
    assert claimable.reason == "it belonged to this daemon before it was started again"
    assert south.logs_looked_at == []


# ---- one shard by itself


async def test_each_shard_is_claimable_by_itself(south: Fixture) -> None:
    south.shards[:] = [Shard(None), Shard("north"), Shard("west"), Shard("south")]
    south.standby = south.new_standby()
    south.beat("north")
    south.locks["west"] = OwnerLock.FREE
    await south.clock.advance(1.0)
    found = await south.standby.claimable([0, 1, 2, 3])
    assert {shard: type(each) for shard, each in found.items()} == {
        0: standby.Claimable,
        1: Wait,
        2: standby.Claimable,
        3: standby.Claimable,
    }
    gone = found[2]
    assert isinstance(gone, standby.Claimable)
    assert gone.gone_owners == {"", "south", "west"}
    south.shards[0].down = True
    down = (await south.standby.claimable([0, 2]))[0]
    assert down == Wait("its manifest cannot be read: manifest: no route")


# Locks


@pytest.fixture
def locks(tmp_path: Path) -> local_directory.LocalLocks:
    return local_directory.LocalLocks(tmp_path)


def test_the_lock_of_a_living_process_is_held_and_that_of_a_dead_one_is_free(
    locks: local_directory.LocalLocks, tmp_path: Path
) -> None:
    held = local_directory.LocalLocks(tmp_path).try_lock("north")
    assert held is not None
    assert standby.lock_of(locks, "north") is OwnerLock.HELD
    held.release()
    assert standby.lock_of(locks, "north") is OwnerLock.FREE
    again = locks.try_lock("north")
    assert again is not None
    again.release()


def test_without_local_locks_nothing_is_known_of_a_process() -> None:
    assert standby.lock_of(None, "north") is OwnerLock.UNKNOWN


def test_a_lock_that_cannot_be_tried_says_nothing(locks: local_directory.LocalLocks, tmp_path: Path) -> None:
    (tmp_path / local_directory.LOCKS_FOLDER).write_bytes(b"in the way")
    assert standby.lock_of(locks, "north") is OwnerLock.UNKNOWN


def test_heartbeats_are_read_from_where_they_are_written() -> None:
    assert names.daemon_key("north") == f"{names.DAEMONS_PREFIX}north"
