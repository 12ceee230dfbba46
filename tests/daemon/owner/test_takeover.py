"""A takeover leaves one owner, who knows everything that was ever answered, in every order of everybody's steps."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
import pytest

from daemon.errors import Corruption, NotOwner
from daemon.owner import takeover
from daemon.shard import checkpoint_store, journal_tail, ownership_lost, shard_manifest, slot_put
from daemon.shard.journal_truncation import JournalTruncation
from daemon.shard.journal_writer import JournalWriter
from daemon.shard.shard_claim import ShardClaim
from storage_backends import commit, crash_points, memory_store, object_store, shard_manifests
from storage_backends.formats import checkpoint_format, manifest, names, slot_format
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.shard_slot import ShardSlot, next_after
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.virtual_clock import VirtualClock
from tests.daemon.shard._support.interleaving import InlineExecutor, Scheduler, SteppedStore
from tests.planted import registry

T = TypeVar("T")
SHARD = 3
TOPIC_ID = "a" * 32
DATA, FENCE = slot_format.SlotKind.DATA, slot_format.SlotKind.FENCE


class Ids:
    def __init__(self, name: str) -> None:
        self._ids = (f"{name}-{number}" for number in itertools.count())

    def __call__(self) -> str:
        return next(self._ids)


def shard_log_of(
    store: object_store.ObjectStore, name: str = "x", clock: VirtualClock | None = None
) -> commit.ManifestLog[manifest.ShardManifest]:
    clock = clock or VirtualClock()
    return shard_manifests.shard_log(
        store, SHARD, monotonic=clock.now, sleep=clock.block, jitter=lambda: 0.5, new_id=Ids(f"commit-{name}")
    )


def claimant_of(
    name: str, clock: VirtualClock | None = None, executor: concurrent.futures.Executor | None = None
) -> takeover.Claimant:
    clock = clock or VirtualClock()
    return takeover.Claimant(
        daemon_id=name,
        address=f"{name}:7461",
        executor=executor or InlineExecutor(),
        clock=clock.now,
        sleep=clock.block,
        jitter=lambda: 0.5,
        wall_clock_ms=lambda: 0,
        new_id=Ids(f"fence-{name}"),
        checkpoint_damaged=lambda key: None,
    )


def take_over(store: object_store.ObjectStore, name: str) -> ShardClaim:
    return takeover.take_over(store, shard_log_of(store, name), shard=SHARD, claimant=claimant_of(name))


def entries_of(records: tuple[slot_format.Record, ...]) -> set[int]:
    return {
        entry
        for record in records
        if isinstance(record, slot_format.AddRecord)
        for entry in record.rows.entry_id.tolist()
    }


def entries_known_by(claim: ShardClaim) -> set[int]:
    """What the checkpoint and the slots of a claim give together."""
    known = entries_of(tuple(record.decoded() for slot in claim.slots for record in slot.records))
    for part in claim.checkpoint.topics if claim.checkpoint else ():
        known |= set(part.mutable_rows.entry_id.tolist())
    return known


def rows_of(entries: set[int]) -> Rows:
    column = np.array(sorted(entries), np.uint64)
    return Rows(column, column, column)


class Owner:
    """What a shard's owner does after its takeover, one step at a time. `known`: every entry it answers for."""

    def __init__(self, store: object_store.ObjectStore, claim: ShardClaim, name: str) -> None:
        self.store = store
        self.claim = claim
        self.name = name
        self.clock = VirtualClock()
        self.log = shard_log_of(store, name, self.clock)
        self.tip = claim.tip
        self.answered: list[tuple[int, int]] = []
        self.known = entries_known_by(claim)
        self.at_takeover = frozenset(self.known)
        ids = Ids(f"slot-{name}")
        self.writer = JournalWriter(
            store,
            shard=SHARD,
            epoch=claim.epoch,
            last_slot=claim.last_slot,
            run=self._run,
            clock=self.clock.now,
            sleep=self._sleep,
            jitter=lambda: 0.5,
            new_id=ids,
            written=lambda written: None,
        )
        self.truncation = self.truncation_after(claim)

    def truncation_after(self, claim: ShardClaim) -> JournalTruncation:
        return JournalTruncation(
            self.store,
            shard=SHARD,
            epoch=claim.epoch,
            fence_slot=claim.last_slot,
            known_kinds={slot.header.slot: slot.header.kind for slot in claim.slots},
            executor=InlineExecutor(),
        )

    @staticmethod
    async def _run(work: Callable[[], T]) -> T:
        return work()

    async def _sleep(self, seconds: float) -> None:
        self.clock.block(seconds)

    async def write(self) -> None:
        entry = self.claim.epoch * 1000 + self.writer.next_slot
        slot = await self.writer.write([slot_format.AddRecord(TOPIC_ID, 1, 0, rows_of({entry}))])
        self.known.add(entry)
        self.answered.append((slot, entry))

    def checkpoint(self) -> None:
        slot = self.writer.next_slot - 1
        part = checkpoint_format.TopicPart(
            topic_id=TOPIC_ID, topic="flights", incarnation=1, mutable_rows=rows_of(self.known)
        )
        written = checkpoint_store.write_checkpoint(
            self.store,
            checkpoint_format.Checkpoint(shard=SHARD, epoch=self.claim.epoch, slot=ShardSlot(slot), topics=(part,)),
            base=self.tip.number,
            unique=f"{self.name}{slot}",
        )
        reference = manifest.CheckpointReference(object=written, slot=ShardSlot(slot), replay_from=ShardSlot(slot))
        self.tip = commit.commit(
            self.log,
            shard_manifest.WriteCheckpoint(
                reference=reference, replay_from=ShardSlot(slot), epoch=self.claim.epoch, delete_after_ms=0
            ),
            writer=self.name,
            created_ms=0,
            warm=self.tip,
            deadline_s=30.0,
        )

    def truncate(self) -> None:
        while self.truncation.truncate(self.tip.manifest):
            pass


def kinds_in(store: object_store.ObjectStore) -> dict[int, slot_format.SlotHeader]:
    headers = (slot_format.decode_header(store.get(listed.key)) for listed in store.list(names.journal_prefix(SHARD)))
    return {header.slot: header for header in headers}


# One takeover after the other


def test_the_first_owner_of_a_new_root_fences_slot_one_with_epoch_one() -> None:
    store = memory_store.MemoryStore()
    claim = take_over(store, "north")
    assert (claim.shard, claim.epoch, claim.last_slot, claim.replay_from) == (SHARD, 1, 1, 0)
    assert (claim.slots, claim.checkpoint) == ((), None)
    assert (claim.tip.manifest.owner, claim.tip.manifest.address) == ("north", "north:7461")
    assert kinds_in(store) == {1: slot_format.SlotHeader(SHARD, 1, ShardSlot(1), FENCE, 0)}


async def test_a_successor_reads_what_was_written_and_fences_behind_it() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    await first.write()
    claim = take_over(store, "south")
    assert (claim.epoch, claim.last_slot) == (2, 4)
    assert [slot.header.slot for slot in claim.slots] == [1, 2, 3]
    assert Owner(store, claim, "south").known == first.known
    with pytest.raises(ownership_lost.Fenced):
        await first.write()


async def test_replay_begins_behind_the_checkpoint() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    first.checkpoint()
    await first.write()
    claim = take_over(store, "south")
    assert claim.checkpoint is not None
    assert (claim.replay_from, [slot.header.slot for slot in claim.slots]) == (2, [3])
    assert Owner(store, claim, "south").known == first.known


async def test_a_damaged_checkpoint_is_made_up_for_by_the_slots_kept_for_its_predecessor() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    for _ in range(2):
        await first.write()
        await first.write()
        first.checkpoint()
    first.truncate()
    await first.write()
    newest = first.tip.manifest.checkpoint
    assert newest is not None
    store.put(newest.object.name, b"damaged")
    alarms: list[str] = []
    claimant = dataclasses.replace(claimant_of("south"), checkpoint_damaged=alarms.append)
    claim = takeover.take_over(store, shard_log_of(store, "south"), shard=SHARD, claimant=claimant)
    # Slots 2 and 3 are covered by the first checkpoint, 4 and 5 by the damaged one.
    assert (claim.replay_from, [slot.header.slot for slot in claim.slots]) == (3, [4, 5, 6])
    assert Owner(store, claim, "south").known == first.known
    assert alarms == [newest.object.name]


async def test_a_slot_missing_for_the_predecessor_of_a_damaged_checkpoint_refuses_the_shard() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    first.checkpoint()
    newest = first.tip.manifest.checkpoint
    assert newest is not None
    store.delete(newest.object.name)
    store.delete(names.journal_slot_key(SHARD, 2))
    with pytest.raises(Corruption, match="slot 2 is missing"):
        take_over(store, "south")


async def test_a_damaged_slot_refuses_the_shard_by_name_and_the_next_try_says_the_same() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    key = names.journal_slot_key(SHARD, 2)
    store.put(key, store.get(key)[:-1])
    for name in ("south", "east"):
        with pytest.raises(journal_tail.SlotDamaged, match=key):
            take_over(store, name)


class Crash(BaseException):
    """The process ends here."""


async def test_after_a_crash_between_claim_and_fence_the_next_claimant_repeats_with_a_higher_epoch() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()

    def crash(name: str) -> None:
        if name == "takeover.after_claim":
            raise Crash

    with crash_points.intercepted(crash), pytest.raises(Crash):
        take_over(store, "south")
    # Nothing stands in the way of the first owner yet: what it writes is kept.
    await first.write()
    claim = take_over(store, "east")
    assert (claim.epoch, claim.last_slot) == (3, 4)
    assert Owner(store, claim, "east").known == first.known
    with pytest.raises(ownership_lost.Fenced) as fenced:
        await first.write()
    assert fenced.value.holder_epoch == 3


async def test_an_owner_that_writes_between_probe_and_fence_is_heard_and_then_fenced() -> None:
    store = memory_store.MemoryStore()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    late: list[int] = []

    def interleave(name: str) -> None:
        if name == "takeover.after_probe":
            with concurrent.futures.ThreadPoolExecutor(1) as other:
                other.submit(asyncio.run, write_two()).result()

    async def write_two() -> None:
        owner = Owner(store, dataclasses.replace(first.claim, last_slot=ShardSlot(2)), "north")
        await owner.write()
        await owner.write()
        late.extend(entry for _, entry in owner.answered)

    with crash_points.intercepted(interleave):
        claim = take_over(store, "south")
    assert claim.last_slot == 5
    assert Owner(store, claim, "south").known == first.known | set(late)


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.FAIL_BEFORE, Fault.ANSWER_EXISTS, Fault.REFUSE])
def test_a_fence_whose_answer_was_lost_stands_once(fault: Fault) -> None:
    script = Script()
    store = FaultStore(memory_store.MemoryStore(), script)

    def fail_the_fence(name: str) -> None:
        if name == "takeover.after_probe":
            script.plan("put_if_absent", fault)

    with crash_points.intercepted(fail_the_fence):
        claim = take_over(store, "north")
    assert claim.last_slot == 1
    assert kinds_in(store) == {1: slot_format.SlotHeader(SHARD, 1, ShardSlot(1), FENCE, 0)}


def test_a_store_that_stays_silent_about_the_fence_ends_the_takeover() -> None:
    script, clock = Script(), VirtualClock()
    store = FaultStore(memory_store.MemoryStore(), script)

    def cut_off(name: str) -> None:
        if name == "takeover.after_probe":
            script.plan("put_if_absent", Fault.DELIVER_LATE, key_part="journal", times=1000)

    with crash_points.intercepted(cut_off), pytest.raises(object_store.OutcomeUnknown):
        takeover.take_over(store, shard_log_of(store, clock=clock), shard=SHARD, claimant=claimant_of("north", clock))
    store.deliver_late()
    claim = take_over(store.inner, "north")
    assert (claim.epoch, claim.last_slot) == (2, 2)


class OvertakenInItsClaim(memory_store.MemoryStore):
    """The answer to the first claim after `north` is lost, and before it is found out `west` has claimed as well."""

    def __init__(self) -> None:
        super().__init__()
        self.overtaken_by: ShardClaim | None = None
        self.armed = False

    def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
        super().put_if_absent(key, body, metadata=metadata)
        if self.armed and key.startswith(names.shard_manifest_prefix(SHARD)):
            self.armed = False
            self.overtaken_by = take_over(self, "west")
            raise object_store.OutcomeUnknown(key, "the answer is lost")


async def test_a_claimant_overtaken_before_it_knows_of_its_claim_does_not_take_the_other_ones_epoch_for_its_own() -> (
    None
):
    store = OvertakenInItsClaim()
    first = Owner(store, take_over(store, "north"), "north")
    await first.write()
    store.armed = True
    with pytest.raises(ownership_lost.Superseded):
        take_over(store, "south")
    west = store.overtaken_by
    assert west is not None
    assert west.epoch == 3
    tip = shard_log_of(store).read_tip()
    assert tip is not None
    assert (tip.manifest.epoch, tip.manifest.owner) == (3, "west")
    await Owner(store, west, "west").write()


def test_a_claimant_overtaken_before_its_fence_stops() -> None:
    store = memory_store.MemoryStore()
    overtaken = False

    def overtake(name: str) -> None:
        nonlocal overtaken
        if name == "takeover.after_claim" and not overtaken:
            overtaken = True
            assert take_over(store, "south").epoch == 2

    with crash_points.intercepted(overtake), pytest.raises(ownership_lost.Superseded) as superseded:
        take_over(store, "north")
    assert (superseded.value.owner, superseded.value.owner_address) == ("south", "south:7461")
    assert [header.epoch for header in kinds_in(store).values()] == [2]


def test_a_slot_of_an_epoch_that_was_never_given_refuses_the_shard() -> None:
    store = memory_store.MemoryStore()
    header = slot_format.SlotHeader(SHARD, 9, ShardSlot(1), DATA, 0)
    frozen = slot_put.FrozenSlot(header, slot_format.encode_slot(header, ()), "stray")
    store.put_if_absent(frozen.key, frozen.body, metadata=frozen.metadata)
    with pytest.raises(Corruption, match="epoch 9, which was not given"):
        take_over(store, "north")


# All orders of everybody's steps


class Broken(Exception):
    """A promise was broken in this order of steps."""


class World:
    """A first owner that is served by three actors at once: itself and two claimants, each of whom then owns the shard
    as long as it is let.
    """

    def __init__(self) -> None:
        self.store = SteppedStore()
        self.owners: list[Owner] = []
        self.tip_at_fence: dict[int, int] = {}
        self.store.landed = self._landed
        self.first = take_over(self.store, "first")

    def _landed(self, key: str, body: bytes) -> None:
        if not key.startswith(names.journal_prefix(SHARD)):
            return
        header = slot_format.decode_header(body)
        if header.kind is FENCE:
            manifests = [key for key in self.store._objects if key.startswith(names.shard_manifest_prefix(SHARD))]
            tip = manifest.decode_shard_manifest(self.store._objects[max(manifests)].body)
            self.tip_at_fence[header.epoch] = tip.epoch

    def act(self, name: str) -> None:
        try:
            asyncio.run(self._own(self.first if name == "first" else take_over(self.store, name), name))
        except NotOwner:
            pass

    async def _own(self, claim: ShardClaim, name: str) -> None:
        owner = Owner(self.store, claim, name)
        self.owners.append(owner)
        try:
            await owner.write()
            owner.checkpoint()
            await owner.write()
            owner.checkpoint()
            owner.truncate()
            await owner.write()
            await owner.write()
        except commit.Refused:
            pass

    def run(self, seed: int) -> None:
        self.store.scheduler = Scheduler(seed)
        self.store.scheduler.run({name: lambda name=name: self.act(name) for name in ("first", "north", "south")})  # type: ignore[misc]
        self.store.scheduler = None
        self._check()

    def _check(self) -> None:
        last = take_over(self.store, "last")
        known = {owner.claim.epoch: owner.at_takeover for owner in self.owners} | {last.epoch: entries_known_by(last)}
        for owner in self.owners:
            for slot, entry in owner.answered:
                for epoch, entries in known.items():
                    if epoch > owner.claim.epoch and entry not in entries:
                        raise Broken(f"epoch {epoch} does not know slot {slot} that epoch {owner.claim.epoch} answered")
        for epoch in known:
            if self.tip_at_fence.get(epoch, epoch) != epoch:
                raise Broken(f"epoch {epoch} is served though epoch {self.tip_at_fence[epoch]} was claimed before")


def explore(seeds: range) -> None:
    for seed in seeds:
        try:
            World().run(seed)
        except (Broken, Corruption) as error:
            error.add_note(f"seed {seed}")
            raise


def test_in_every_order_of_steps_one_owner_remains_and_knows_all_that_was_answered() -> None:
    explore(range(400))


class SkipsTheFence(takeover._Takeover):
    def _probe_and_fence(self) -> tuple[list[journal_tail.Slot], ShardSlot]:
        slots = self._read_from(self._tip.manifest.replay_from + 1)
        return slots, ShardSlot(self._tip.manifest.replay_from + len(slots))


class DoesNotLookAgain(takeover._Takeover):
    fence_stands = False

    def _put_fence(self, fence_slot: ShardSlot) -> None:
        super()._put_fence(fence_slot)
        self.fence_stands = True

    def _still_owner(self) -> None:
        if not self.fence_stands:
            super()._still_owner()


class DeletesFences(JournalTruncation):
    def _is_data(self, slot: int) -> bool:
        return True


def test_an_explored_takeover_without_a_fence_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_Takeover", SkipsTheFence)
    with pytest.raises((Broken, Corruption)):
        explore(range(400))


def test_an_explored_takeover_that_does_not_look_again_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(takeover, "_Takeover", DoesNotLookAgain)
    with pytest.raises((Broken, Corruption)):
        explore(range(400))


def test_an_explored_takeover_that_probes_before_its_claim_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = takeover._claim
    probed: dict[str, list[journal_tail.Slot]] = {}

    def probe_then_claim(
        log: commit.ManifestLog[manifest.ShardManifest], shard: int, claimant: takeover.Claimant
    ) -> commit.Tip[manifest.ShardManifest]:
        before = log.read_tip()
        replay_from = 0 if before is None else before.manifest.replay_from
        store = log.store
        probed[claimant.daemon_id] = journal_tail.read_tail(store, shard, replay_from + 1, executor=claimant.executor)
        return claim(log, shard, claimant)

    class ProbesBeforeItsClaim(takeover._Takeover):
        def _probe_and_fence(self) -> tuple[list[journal_tail.Slot], ShardSlot]:
            slots = probed[self._claimant.daemon_id]
            fence_slot = next_after(slots[-1].header.slot if slots else self._tip.manifest.replay_from)
            while True:
                try:
                    self._put_fence(fence_slot)
                except slot_put.Occupied:
                    self._still_owner()
                    slots = [*slots, *self._read_from(fence_slot)]
                    fence_slot = next_after(slots[-1].header.slot)
                else:
                    return slots, fence_slot

    monkeypatch.setattr(takeover, "_claim", probe_then_claim)
    monkeypatch.setattr(takeover, "_Takeover", ProbesBeforeItsClaim)
    with pytest.raises((Broken, Corruption)):
        explore(range(400))


def test_an_explored_truncation_that_deletes_fences_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def deleting_its_own_fence(self: Owner, claim: ShardClaim) -> JournalTruncation:
        return DeletesFences(
            self.store,
            shard=SHARD,
            epoch=claim.epoch,
            fence_slot=claim.last_slot - 1,
            known_kinds={},
            executor=InlineExecutor(),
        )

    monkeypatch.setattr(Owner, "truncation_after", deleting_its_own_fence)
    with pytest.raises((Broken, Corruption)):
        explore(range(400))


registry.register("orders of a takeover", [name for name in globals() if name.endswith("_is_found_out")])
