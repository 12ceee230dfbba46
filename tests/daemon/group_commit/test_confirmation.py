"""An owner knows since when its log is certain to be its own, and asks no more often than it must."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest

from daemon.errors import Corruption, NotOwner, Unavailable
from daemon.group_commit.confirmation import Probe, ProbedConfirmation
from daemon.shard.range_operations import KnownTip
from storage_backends import commit, object_store
from storage_backends.formats.manifest import ManifestHead, ShardManifest
from tests._support.virtual_clock import VirtualClock, settle

Tip = commit.Tip[ShardManifest]


def tip_of(epoch: int, number: int = 1, owner: str = "north") -> Tip:
    head = ManifestHead(number=number, previous_sha256=b"", commit_id="c", writer=owner, created_ms=0)
    manifest = ShardManifest(head=head, shard=3, epoch=epoch, owner=owner, address=f"{owner}:7461")
    return commit.Tip(number=number, manifest=manifest, sha256=b"", read_at=0.0)


class Probed(Probe):
    """The log: each look at it may be held under way. `ends`: what it ends with, if it does. `writing`: a slot is on
    its way, so that a look tells nothing.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self.ends: Exception | None = None
        self.down = self.writing = False
        self.looks = 0
        self.held: asyncio.Event | None = None
        self._clock = clock

    async def look(self) -> float | None:
        self.looks += 1
        sent_at_s = self._clock.now_s
        if self.held is not None:
            await self.held.wait()
        if self.down:
            raise object_store.StoreUnavailable("slot", "no route")
        if self.ends is not None:
            raise self.ends
        return None if self.writing else sent_at_s


class Fixture:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.probed = Probed(self.clock)
        self.confirmation = ProbedConfirmation(
            "log 7",
            self.probed,
            confirmed_at_s=self.clock.now_s,
            clock=self.clock.now,
            sleep=self.clock.sleep,
            jitter=lambda: 0.5,
        )
        self.watching = asyncio.create_task(self.confirmation.watch())

    def wait_for(self, after_s: float) -> asyncio.Task[None]:
        return asyncio.create_task(self.confirmation.confirm_after(after_s))


@pytest.fixture
async def owner() -> AsyncIterator[Fixture]:
    fixture = Fixture()
    await settle()
    yield fixture
    fixture.watching.cancel()
    with contextlib.suppress(asyncio.CancelledError, NotOwner, Corruption):
        await fixture.watching


async def test_a_confirmation_is_fresh_until_its_seconds_are_over(owner: Fixture) -> None:
    owner.probed.down = True
    assert owner.confirmation.fresh_within(15.0)
    await owner.clock.advance(14.9)
    assert owner.confirmation.fresh_within(15.0)
    await owner.clock.advance(0.1)
    assert not owner.confirmation.fresh_within(15.0)
    assert owner.confirmation.fresh_within(30.0)


async def test_an_idle_owner_probes_every_five_seconds(owner: Fixture) -> None:
    begin_s = owner.clock.now_s
    await owner.clock.advance(4.9)
    assert owner.probed.looks == 0
    await owner.clock.advance(0.1)
    assert (owner.probed.looks, owner.confirmation.confirmed_at_s) == (1, begin_s + 5.0)
    await owner.clock.advance(20.0)
    assert owner.probed.looks == 5


async def test_slots_that_are_written_save_the_probes(owner: Fixture) -> None:
    for _ in range(10):
        await owner.clock.advance(3.0)
        owner.confirmation.confirmed(owner.clock.now_s)
    assert owner.probed.looks == 0


async def test_a_confirmation_never_becomes_older(owner: Fixture) -> None:
    begin_s = owner.clock.now_s
    owner.confirmation.confirmed(begin_s + 2.0)
    owner.confirmation.confirmed(begin_s + 1.0)
    assert owner.confirmation.confirmed_at_s == begin_s + 2.0


async def test_a_wait_for_what_is_already_confirmed_asks_nobody(owner: Fixture) -> None:
    await owner.confirmation.confirm_after(owner.clock.now_s)
    assert owner.probed.looks == 0


async def test_one_probe_serves_all_who_waited_when_it_was_sent_and_nobody_who_came_later(owner: Fixture) -> None:
    owner.probed.held = asyncio.Event()
    await owner.clock.advance(1.0)
    early = [owner.wait_for(owner.clock.now_s) for _ in range(3)]
    await settle()
    await owner.clock.advance(1.0)
    late = [owner.wait_for(owner.clock.now_s) for _ in range(3)]
    await settle()
    assert owner.probed.looks == 1
    owner.probed.held.set()
    owner.probed.held = held = asyncio.Event()
    await settle()
    assert [task.done() for task in early] == [True] * 3
    assert [task.done() for task in late] == [False] * 3
    assert owner.probed.looks == 2
    held.set()
    await asyncio.gather(*early, *late)
    assert owner.probed.looks == 2


async def test_a_probe_confirms_from_its_sending_on_however_long_it_took(owner: Fixture) -> None:
    owner.probed.held = asyncio.Event()
    await owner.clock.advance(1.0)
    sent_at_s = owner.clock.now_s
    waiting = owner.wait_for(sent_at_s)
    await owner.clock.advance(4.0)
    owner.probed.held.set()
    await waiting
    assert owner.confirmation.confirmed_at_s == sent_at_s


async def test_a_slot_sent_after_the_request_arrived_confirms_it_too(owner: Fixture) -> None:
    owner.probed.held = asyncio.Event()
    await owner.clock.advance(1.0)
    arrived_s = owner.clock.now_s
    waiting = owner.wait_for(arrived_s)
    await settle()
    owner.confirmation.confirmed(arrived_s - 0.5)
    await settle()
    assert not waiting.done()
    owner.confirmation.confirmed(arrived_s)
    await waiting


async def test_a_fence_ends_everything(owner: Fixture) -> None:
    await owner.clock.advance(1.0)
    owner.probed.ends = fenced = NotOwner("log 7 was ended at slot 9")
    waiting = [owner.wait_for(owner.clock.now_s) for _ in range(2)]
    for task in [*waiting, owner.watching]:
        with pytest.raises(NotOwner) as ended:
            await task
        assert ended.value is fenced
    assert not owner.confirmation.fresh_within(1000.0)
    with pytest.raises(NotOwner):
        await owner.confirmation.confirm_after(owner.clock.now_s)
    owner.confirmation.confirmed(owner.clock.now_s + 1.0)
    assert not owner.confirmation.fresh_within(1000.0)


async def test_a_look_that_a_slot_overtook_confirms_nothing_and_is_repeated_for_who_waits(owner: Fixture) -> None:
    await owner.clock.advance(1.0)
    owner.probed.held, owner.probed.writing = asyncio.Event(), True
    waiting = owner.wait_for(owner.clock.now_s)
    await settle()
    held, owner.probed.held = owner.probed.held, asyncio.Event()
    held.set()
    await settle()
    assert (owner.probed.looks, waiting.done()) == (2, False)
    owner.probed.writing = False
    owner.probed.held.set()
    await waiting


async def test_an_outage_delays_the_confirmation_and_ends_by_itself(owner: Fixture) -> None:
    await owner.clock.advance(1.0)
    owner.probed.down = True
    waiting = owner.wait_for(owner.clock.now_s)
    await owner.clock.advance(60.0)
    assert not waiting.done()
    # At most every 2 s: an outage is no reason to flood the store.
    assert owner.probed.looks < 60
    owner.probed.down = False
    await owner.clock.advance(2.0)
    await waiting
    assert owner.confirmation.fresh_within(3.0)


async def test_who_gives_up_waiting_disturbs_nobody(owner: Fixture) -> None:
    owner.probed.held = asyncio.Event()
    await owner.clock.advance(1.0)
    waiting = [owner.wait_for(owner.clock.now_s) for _ in range(2)]
    await settle()
    waiting[0].cancel()
    owner.probed.held.set()
    await waiting[1]
    assert waiting[0].cancelled()


async def test_closing_answers_all_who_wait(owner: Fixture) -> None:
    owner.probed.held = asyncio.Event()
    await owner.clock.advance(1.0)
    waiting = owner.wait_for(owner.clock.now_s)
    await settle()
    owner.confirmation.close()
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await owner.confirmation.confirm_after(owner.clock.now_s)


async def test_a_log_that_makes_no_sense_ends_it_and_whoever_waits_may_come_again(owner: Fixture) -> None:
    await owner.clock.advance(1.0)
    owner.probed.ends = Corruption("slot 9 is DATA, and its owner has not written it")
    waiting = owner.wait_for(owner.clock.now_s)
    with pytest.raises(Unavailable, match=r"log 7: cannot confirm that this daemon still owns it: slot 9 is DATA"):
        await waiting
    with pytest.raises(Corruption, match="slot 9"):
        await owner.watching


# ---- the tip that an owner knows


def test_an_owner_goes_on_from_the_newest_manifest_of_its_own_epoch_as_it_was_read_last() -> None:
    known = KnownTip(tip_of(epoch=5, number=3))
    newer = tip_of(epoch=5, number=4)
    for tip in (newer, tip_of(epoch=5, number=2), tip_of(epoch=6, number=9)):
        known.saw(tip)
    assert known.newest is newer
    read_later = dataclasses.replace(newer, read_at=60.0)
    known.saw(read_later)
    assert known.newest is read_later, "the older its reading, the sooner it is listed anew"
