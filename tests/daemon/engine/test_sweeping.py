"""A sweep finds the offloaded ledgers that nobody knows, and those alone; what it records is verified as always."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

import pytest

from daemon import settings
from daemon.core.deletions import orphans
from daemon.core.deletions.listing import ListedState
from daemon.core.object_count import ObjectCount
from daemon.engine import sweeping
from daemon.engine.deletion_calls import DeletionFilter, SweepProgress, SweepWish
from daemon.engine.served_topic import ServedTopic
from daemon.engine.shard import ServedShard
from daemon.errors import (
    Conflict,
    Corruption,
    InvalidArgument,
    NotFound,
    NotOwner,
    QuotaExceeded,
    Unavailable,
)
from daemon.ledger_stores.ledger_store import DeletionFailed, InUseAnswer
from daemon.ledger_stores.ledger_stores import LedgerStores
from daemon.ledger_stores.offloaded import OffloadedLedgers
from daemon.ledger_stores.owner import Owner
from storage_backends.formats import names
from storage_backends.formats.deletions import Deletion, DeletionOutcome, LedgerComponent, LedgerType, PendingDelete
from storage_backends.memory import MemoryStore
from tests.support.engine_fixture import Daemon, EngineFixture
from tests.support.fault_store import Fault, FaultStore, Pause, Script
from tests.support.owned_ledgers import DRIVER, OwnedLedger, in_use
from tests.support.virtual_loop import Gate

STORE = "offloaded"
JOURNAL = "/journal/"
DAY_MS = 86_400_000
BODY_BYTES = len(b"entries")
# Everything is old, and nothing is so much that it is suspicious.
OLD = SweepWish(STORE, grace_ms=0)
DELETE = dataclasses.replace(OLD, delete=True)


class Swept:
    """An object store with offloaded ledgers, swept by daemons of a fixture. `script`: faults of that store.

    `owner`: what an owner says whose topics begin with `asked/`; None: there is no such owner.
    """

    def __init__(
        self, machines: EngineFixture, *, owner: Callable[[str, PendingDelete], InUseAnswer] | None = None
    ) -> None:
        self.machines = machines
        self.store = MemoryStore(wall_clock=lambda: machines.now_ms() / 1000)
        self.script = Script()
        self.faults = FaultStore(self.store, self.script)
        entry = settings.DeletionObjectStore(name=STORE, drivers=(DRIVER,), kind="local", path="given")
        owners = [] if owner is None else [AskedOwner(owner)]
        stores = LedgerStores(object_stores=[OffloadedLedgers(entry, lambda _: self.faults)], owners=owners)
        machines.ledger_stores = lambda daemon: stores
        self._ids = iter(range(1, 1_000_000))

    async def daemon(self, *overrides: str) -> Daemon:
        return await self.machines.served_by("one", "daemon.shards=4", *overrides)

    def write(
        self, count: int, topic: str = "t", component: LedgerComponent = LedgerComponent.MANAGED_LEDGER
    ) -> list[OwnedLedger]:
        """Offloaded ledgers, two objects of `BODY_BYTES` each."""
        made = [OwnedLedger(topic, component, (number, 0xABCD, number)) for number in self._next(count)]
        for each in made:
            each.write(self.store)
        return made

    def keys(self) -> set[str]:
        return {listed.key for listed in self.store.list("")}

    def hold(self, daemon: Daemon, operation: str, key: str = "") -> Holding:
        """The next such call to the store waits until it is released."""
        gate = daemon.gate()
        pause = Pause(released=gate)
        self.script.plan(operation, pause, key_part=key)
        return Holding(daemon, pause, gate)

    def _next(self, count: int) -> list[int]:
        return [next(self._ids) for _ in range(count)]


@dataclasses.dataclass
class Holding:
    daemon: Daemon
    pause: Pause
    gate: Gate

    async def reached(self) -> None:
        await self.daemon.until(self.pause.reached.is_set)

    def release(self) -> None:
        self.gate.set()


class AskedOwner(Owner):
    """An owner of the topics `asked/...` that answers without a network."""

    def __init__(self, answer: Callable[[str, PendingDelete], InUseAnswer]) -> None:
        super().__init__(
            settings.DeletionOwner(name="owner", topic_prefixes=("asked/",), in_use_url="http://127.0.0.1:1/in-use")
        )
        self._answer = answer

    def ask_in_use(self, topic: str, delete: PendingDelete) -> InUseAnswer:
        return self._answer(topic, delete)


async def steps(daemon: Daemon, wish: SweepWish = OLD) -> list[SweepProgress]:
    async def all_of() -> list[SweepProgress]:
        return [each async for each in daemon.engine.deletion_requests.sweep(wish)]

    return await daemon.call(all_of())


async def sweep(daemon: Daemon, wish: SweepWish = OLD) -> SweepProgress:
    """How it ended, with everything that it found."""
    progress = await steps(daemon, wish)
    assert [each.done for each in progress] == [False] * (len(progress) - 1) + [True]
    found = [orphan for each in progress for orphan in each.orphans]
    return dataclasses.replace(progress[-1], orphans=tuple(found))


def found(progress: SweepProgress) -> set[int]:
    return {orphan.pending_delete.ledger_id for orphan in progress.orphans}


def ids(ledgers: Sequence[OwnedLedger]) -> set[int]:
    return {each.ledger[0] for each in ledgers}


def objects(count: int) -> ObjectCount:
    return ObjectCount(count, count * BODY_BYTES)


async def say_in_use(daemon: Daemon, topic: str, ledgers: Sequence[OwnedLedger], *, replace: bool = True) -> None:
    """These, and no others."""
    await daemon.call(daemon.engine.deletion_requests.record_in_use(topic, in_use(ledgers), replace=replace))


async def listed(daemon: Daemon, state: ListedState) -> list[Deletion]:
    page = await daemon.call(daemon.engine.deletion_requests.list_deletes(state, DeletionFilter(), 1_000, None))
    return [each.deletion for each in page.deletions]


async def all_over(daemon: Daemon) -> list[Deletion]:
    """What came of all deletions, when they are over."""
    await daemon.until(lambda: all(shard.deletions.state.counts.in_flight == 0 for shard in daemon.shards.values()))
    return await listed(daemon, ListedState.ENDED)


# ---- what is an orphan


async def test_exactly_the_ledgers_that_nobody_knows_are_orphans(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    used, recorded, orphaned = (swept.write(7) for _ in range(3))
    foreign_topic = swept.write(2, "never-heard-of")
    schemas = swept.write(1, component=LedgerComponent.SCHEMA_STORAGE)
    swept.store.put("readme", b"entries")
    await say_in_use(one, "t", used)
    await record_in_vain(swept, one, recorded)
    machines.step_ms += 1_000
    young = swept.write(3)

    done = await sweep(one, dataclasses.replace(OLD, grace_ms=500))

    assert found(done) == ids(orphaned) | ids(foreign_topic)
    assert {orphan.pending_delete.ledger_id for orphan in done.orphans if orphan.unknown_topic} == ids(foreign_topic)
    counts = done.counts
    assert counts.listed == objects(2 * (7 + 7 + 7 + 2 + 1 + 3) + 1)
    assert counts.foreign == objects(1)
    assert counts.in_use == objects(14)
    assert counts.recorded == objects(14)
    assert counts.young == objects(2 * len(young))
    assert counts.orphaned == objects(14)
    assert counts.of_unknown_topics == objects(4)
    assert counts.unidentified == objects(2 * len(schemas))
    assert counts.unanswered == objects(0)
    assert (counts.ledgers_recorded, counts.ledgers_left) == (0, 0)


async def record_in_vain(swept: Swept, daemon: Daemon, ledgers: Sequence[OwnedLedger]) -> None:
    """Recorded; the store is away, and the next attempt is long after."""
    swept.faults.go_down()
    deletes = [ledger.pending_delete() for ledger in ledgers]
    await daemon.call(daemon.engine.deletion_requests.record_pending_deletes("t", deletes))
    await daemon.until(lambda: no_attempt_is_due(daemon))
    swept.faults.come_back()


def no_attempt_is_due(daemon: Daemon) -> bool:
    """All that is in flight waits for a later time."""
    states = [shard.deletions.state for shard in daemon.shards.values() if shard.deletions.state.counts.in_flight]
    return all(
        not state.counts.begun and state.next_due_ms is not None and state.next_due_ms > daemon.now_ms()
        for state in states
    )


async def test_an_orphan_is_told_as_it_would_be_recorded(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (cursor,) = swept.write(1, "persistent://tenant/space/flights", LedgerComponent.MANAGED_CURSOR)
    modified_ms = machines.now_ms()
    machines.step_ms += 1_000

    (orphan,) = (await sweep(one)).orphans

    assert orphan.topic == "persistent://tenant/space/flights"
    assert orphan.pending_delete == cursor.pending_delete()
    assert (orphan.size_bytes, orphan.modified_ms, orphan.unknown_topic) == (2 * BODY_BYTES, modified_ms, True)


@pytest.mark.parametrize("part", ["index", "data"])
async def test_one_object_without_the_other_is_an_orphan_and_is_deleted(machines: EngineFixture, part: str) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", swept.write(1))
    there = swept.keys()
    (ledger,) = swept.write(1)
    swept.store.delete(ledger.keys[0 if part == "data" else 1])

    done = await sweep(one, DELETE)
    ended = await all_over(one)

    assert found(done) == ids([ledger])
    assert done.counts.orphaned == objects(1)
    assert [each.outcome for each in ended] == [DeletionOutcome.DELETED]
    assert swept.keys() == there


async def test_a_pair_of_which_one_half_is_young_stays(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (ledger,) = swept.write(1)
    index_key, _ = ledger.keys
    machines.step_ms += DAY_MS
    swept.store.put(index_key, b"entries", metadata=ledger.object_metadata)

    done = await sweep(one, SweepWish(STORE))

    assert (done.orphans, done.counts.young) == ((), objects(2))


async def test_the_grace_is_the_configured_one_unless_the_sweep_has_its_own(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.sweep_grace_s=3600")
    swept.write(1)
    machines.step_ms += 3_590_000

    assert (await sweep(one, SweepWish(STORE))).orphans == ()
    assert len((await sweep(one, SweepWish(STORE, grace_ms=3_000_000))).orphans) == 1
    machines.step_ms += 20_000
    assert len((await sweep(one, SweepWish(STORE))).orphans) == 1


async def test_a_topic_of_which_some_ledgers_are_said_to_be_in_use_is_not_known(machines: EngineFixture) -> None:
    """Nothing is said of the others."""
    swept = Swept(machines)
    one = await swept.daemon()
    new, *older = swept.write(4)
    await say_in_use(one, "t", [new], replace=False)
    plain = dataclasses.replace(new, ledger=(new.ledger[0], 0, 0))
    await one.call(one.engine.deletion_requests.record_in_use("t", in_use([plain], LedgerType.LEDGER), replace=True))

    done = await sweep(one, DELETE)

    assert (done.counts.of_unknown_topics, done.counts.in_use) == (objects(6), objects(2))
    assert found(done) == ids(older)
    assert done.counts.ledgers_recorded == 0


async def test_a_topic_is_known_once_its_owner_has_said_that_it_uses_nothing(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    orphaned = swept.write(2)
    assert (await sweep(one)).counts.of_unknown_topics == objects(4)

    await say_in_use(one, "t", [])
    done = await sweep(one)

    assert done.counts.orphaned == objects(4)
    assert found(done) == ids(orphaned)


async def test_a_ledger_in_use_stays_whatever_topic_its_metadata_claims(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "forger", [])
    (ledger,) = swept.write(1, "victim")
    await say_in_use(one, "victim", [ledger])
    for key in ledger.keys:
        swept.store.put(key, b"entries", metadata=dataclasses.replace(ledger, topic="forger").object_metadata)

    done = await sweep(one, dataclasses.replace(DELETE, unknown_topics=True, force=True))

    assert (done.orphans, done.counts.in_use) == ((), objects(2))


async def test_a_ledger_that_is_in_use_without_a_uuid_stays(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (ledger,) = swept.write(1)
    without = dataclasses.replace(ledger, ledger=(ledger.ledger[0], 0, 0))
    await say_in_use(one, "t", [without])

    assert (await sweep(one)).counts.in_use == objects(2)


async def test_what_is_a_dead_letter_is_recorded_and_no_orphan(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.max_retry_delete_count=0")
    ledgers = swept.write(2)
    await record_in_vain(swept, one, ledgers)
    assert len(await listed(one, ListedState.DEAD)) == 2

    done = await sweep(one, DELETE)

    assert (done.orphans, done.counts.recorded) == ((), objects(4))


async def test_objects_that_somebody_else_put_there_stay_whatever_the_sweep_may(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    mixed, bare = swept.write(2)
    swept.store.put(mixed.keys[0], b"entries", metadata=dataclasses.replace(mixed, topic="other").object_metadata)
    for key in bare.keys:
        swept.store.put(key, b"entries")
    swept.store.put(f"folder/{bare.keys[0]}", b"entries", metadata=bare.object_metadata)
    there = swept.keys()

    done = await sweep(one, dataclasses.replace(DELETE, unknown_topics=True, force=True))

    assert (done.counts.unidentified, done.counts.foreign) == (objects(4), objects(1))
    assert done.counts.ledgers_recorded == 0
    assert await all_over(one) == []
    assert swept.keys() == there


# ---- what owners say


@pytest.mark.parametrize("answer", [InUseAnswer.NOT_IN_USE, InUseAnswer.NO_SUCH_TOPIC])
async def test_a_ledger_whose_owner_does_not_use_it_is_an_orphan_of_a_known_topic(
    machines: EngineFixture, answer: InUseAnswer
) -> None:
    swept = Swept(machines, owner=lambda topic, delete: answer)
    one = await swept.daemon()
    swept.write(2, "asked/t")

    assert (await sweep(one)).counts.orphaned == objects(4)


async def test_an_owner_is_asked_also_of_topics_that_stated_what_is_in_use(machines: EngineFixture) -> None:
    swept = Swept(machines, owner=lambda topic, delete: InUseAnswer.IN_USE)
    one = await swept.daemon()
    await say_in_use(one, "asked/t", [])
    swept.write(2, "asked/t")

    done = await sweep(one, DELETE)

    assert (done.orphans, done.counts.in_use) == ((), objects(4))


async def test_a_ledger_whose_owner_does_not_answer_is_no_orphan_and_stays(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Answers come between.
    monkeypatch.setattr(sweeping, "UNANSWERED_IN_A_ROW_MAX", 2)

    def answer(topic: str, delete: PendingDelete) -> InUseAnswer:
        if delete.ledger_id % 2:
            raise DeletionFailed("no answer", maybe_deleted=False)
        return InUseAnswer.NOT_IN_USE

    swept = Swept(machines, owner=answer)
    one = await swept.daemon("deletion.parallelism=1")
    ledgers = swept.write(10, "asked/t")

    done = await sweep(one, DELETE)
    await all_over(one)

    assert (done.counts.orphaned, done.counts.unanswered) == (objects(10), objects(10))
    kept = [ledger for ledger in ledgers if ledger.ledger[0] % 2]
    assert swept.keys() == {key for ledger in kept for key in ledger.keys}


async def test_an_owner_that_never_answers_ends_the_sweep(machines: EngineFixture) -> None:
    asked = 0

    def answer(topic: str, delete: PendingDelete) -> InUseAnswer:
        nonlocal asked
        asked += 1
        raise DeletionFailed("nobody is there", maybe_deleted=False)

    swept = Swept(machines, owner=answer)
    one = await swept.daemon()
    swept.write(300, "asked/t")

    with pytest.raises(Unavailable, match=r"100 questions in a row had no answer.*nobody is there"):
        await sweep(one, DELETE)

    assert asked < 300
    assert await listed(one, ListedState.PENDING) == []


async def test_objects_that_may_not_be_looked_at_stay_and_do_not_end_the_sweep(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    locked, orphaned = swept.write(2)
    swept.script.plan("head", Fault.REFUSE, key_part=locked.keys[1])

    done = await sweep(one)

    assert found(done) == ids([orphaned])
    assert done.counts.unanswered == objects(2)


# ---- deleting


async def test_what_a_sweep_records_is_deleted_and_nothing_else(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    used, orphaned, unknown = swept.write(20), swept.write(4), swept.write(3, "never-heard-of")
    await say_in_use(one, "t", used)

    done = await sweep(one, dataclasses.replace(DELETE))
    ended = await all_over(one)

    assert (done.refused, done.counts.ledgers_recorded, done.counts.ledgers_left) == ("", 4, 0)
    assert {each.pending_delete for each in ended} == {each.pending_delete() for each in orphaned}
    assert all(each.by_sweeper and each.outcome is DeletionOutcome.DELETED for each in ended)
    assert swept.keys() == {key for ledger in (*used, *unknown) for key in ledger.keys}


async def test_ledgers_of_unknown_topics_are_recorded_only_on_request(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(3, "never-heard-of")
    swept.write(2, "nor-of-this")

    assert (await sweep(one, DELETE)).counts.ledgers_recorded == 0
    done = await sweep(one, dataclasses.replace(DELETE, unknown_topics=True))
    await all_over(one)

    assert done.counts.ledgers_recorded == 5
    assert swept.keys() == set()


async def test_without_delete_nothing_is_recorded(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(3)
    there = swept.keys()

    done = await sweep(one, dataclasses.replace(OLD, unknown_topics=True, force=True))

    assert (len(done.orphans), done.counts.ledgers_recorded, done.refused) == (3, 0, "")
    assert await all_over(one) == []
    assert swept.keys() == there


@pytest.mark.parametrize("written", [0, 5])
async def test_a_sweep_that_finds_no_orphan_ends_well(machines: EngineFixture, written: int) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.guard_bytes=0", "deletion.guard_share=0")
    await say_in_use(one, "t", swept.write(written))

    done = await sweep(one, DELETE)

    assert (done.orphans, done.refused, done.counts.ledgers_recorded) == ((), "", 0)
    assert done.counts.listed == objects(2 * written)


@pytest.mark.parametrize(("used", "refused"), [(15, True), (16, False)])
async def test_more_orphans_than_a_fifth_are_refused_and_all_stays(
    machines: EngineFixture, used: int, refused: bool
) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.guard_bytes=0")
    await say_in_use(one, "t", swept.write(used))
    swept.write(4)
    there = swept.keys()

    done = await sweep(one, DELETE)

    assert bool(done.refused) is refused
    assert done.counts.ledgers_recorded == (0 if refused else 4)
    if refused:
        assert await all_over(one) == []
        assert swept.keys() == there
        forced = await sweep(one, dataclasses.replace(DELETE, force=True))
        assert (forced.refused, forced.counts.ledgers_recorded) == ("", 4)
        await all_over(one)
        assert len(swept.keys()) == 2 * used


async def test_few_bytes_are_never_suspicious(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon(f"deletion.guard_bytes={8 * BODY_BYTES}")
    await say_in_use(one, "t", [])
    swept.write(4)

    assert (await sweep(one, DELETE)).counts.ledgers_recorded == 4


async def test_ledgers_of_unknown_topics_count_for_the_guard_when_they_are_to_go(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.guard_bytes=0")
    await say_in_use(one, "t", swept.write(9))
    swept.write(1)
    swept.write(3, "never-heard-of")

    assert (await sweep(one, dataclasses.replace(DELETE, unknown_topics=True))).refused
    assert (await sweep(one, DELETE)).counts.ledgers_recorded == 1


async def test_orphans_beyond_the_limit_are_told_and_left_to_the_next_sweep(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "ORPHANS_MAX", 3)
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    swept.write(5)

    assert (await sweep(one)).counts.ledgers_left == 0
    first = await sweep(one, DELETE)
    await all_over(one)
    second = await sweep(one, DELETE)
    await all_over(one)

    assert (len(first.orphans), first.counts.ledgers_recorded, first.counts.ledgers_left) == (5, 3, 2)
    assert (len(second.orphans), second.counts.ledgers_recorded, second.counts.ledgers_left) == (2, 2, 0)
    assert swept.keys() == set()


async def test_ledgers_of_a_topic_that_has_it_switched_off_are_left(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.two_phase_deletion_enabled=false")
    await say_in_use(one, "t", [])
    swept.write(3)

    done = await sweep(one, DELETE)

    assert (done.counts.ledgers_recorded, done.counts.ledgers_left) == (0, 3)
    assert len(swept.keys()) == 6


async def test_a_topic_that_cannot_be_read_keeps_its_ledgers_and_no_others(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    for name in ("damaged", "t"):
        await say_in_use(one, name, [])
    kept = swept.write(2, "damaged")
    swept.write(3)
    topic_of = ServedShard.topic

    async def topic(shard: ServedShard, name: str) -> ServedTopic | None:
        if name == "damaged":
            raise Corruption("its manifest cannot be read")
        return await topic_of(shard, name)

    monkeypatch.setattr(ServedShard, "topic", topic)

    done = await sweep(one, DELETE)
    await all_over(one)

    assert (done.counts.ledgers_recorded, done.counts.ledgers_left) == (3, 2)
    assert swept.keys() == {key for ledger in kept for key in ledger.keys}


async def test_more_orphans_than_may_be_pending_end_the_sweep_and_what_was_recorded_stays(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "BATCHES_AT_ONCE", 1)
    swept = Swept(machines)
    one = await swept.daemon("deletion.pending_max=4")
    for topic in ("a", "b", "c"):
        await say_in_use(one, topic, [])
        swept.write(2, topic)
    swept.script.plan("delete", Fault.FAIL_BEFORE, times=10)

    with pytest.raises(QuotaExceeded, match="pending_max"):
        await sweep(one, DELETE)

    assert len(await listed(one, ListedState.PENDING)) == 4


async def test_a_second_sweep_finds_the_records_of_the_first(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    swept.write(3)
    swept.script.plan("delete", Fault.FAIL_BEFORE, times=3)
    await sweep(one, DELETE)
    await one.until(lambda: no_attempt_is_due(one))

    again = await sweep(one, DELETE)

    assert (again.orphans, again.counts.recorded, again.counts.ledgers_recorded) == ((), objects(6), 0)
    assert len(await listed(one, ListedState.PENDING)) == 3


# ---- what happens meanwhile


@pytest.mark.parametrize("part", [0, 1], ids=["index", "data"])
async def test_an_object_that_is_written_after_the_listing_makes_its_ledger_young(
    machines: EngineFixture, part: int
) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    (ledger,) = swept.write(1)
    swept.store.delete(ledger.keys[part])
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    swept.store.put(ledger.keys[part], b"entries", metadata=ledger.object_metadata)
    held.release()

    done = await sweeping_

    assert (done.orphans, done.counts.young, done.counts.ledgers_recorded) == ((), objects(1), 0)


async def test_what_vanishes_during_the_sweep_is_no_orphan(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    (ledger,) = swept.write(1)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    for key in ledger.keys:
        swept.store.delete(key)
    held.release()

    done = await sweeping_

    assert (done.orphans, done.counts.listed) == ((), objects(2))
    assert done.counts == orphans.SweepCounts(listed=objects(2))


async def test_a_ledger_that_is_used_before_it_is_recorded_is_not_recorded(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    used, _ = swept.write(2)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    await say_in_use(one, "t", [used])
    held.release()

    done = await sweeping_
    await all_over(one)

    assert (done.counts.ledgers_recorded, done.counts.ledgers_left) == (1, 1)
    assert swept.keys() == set(used.keys)


async def test_a_ledger_that_is_used_in_a_slot_before_its_record_is_not_deleted(machines: EngineFixture) -> None:
    """The sweep looks it up before that slot is applied."""
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", [])
    (ledger,) = swept.write(1)
    number = names.shard_of("t", 4)
    head = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await head.reached()
    slot = one.pause("put_if_absent", names.journal_prefix(number))
    saying = one.call(one.engine.deletion_requests.record_in_use("t", in_use([ledger]), replace=False))
    await slot.reached()
    head.release()
    # The record is staged behind it.
    await one.until(lambda: one.shards[number].deletions.kept == 1)
    slot.release()

    done = await sweeping_
    ended = await all_over(one)

    assert done.counts.ledgers_recorded == 1
    assert (await saying).being_deleted == ()
    assert [each.outcome for each in ended] == [DeletionOutcome.IN_USE]
    assert swept.keys() == set(ledger.keys)


async def test_an_owner_that_begins_to_use_a_ledger_after_its_record_is_asked_again(machines: EngineFixture) -> None:
    answers = iter([InUseAnswer.NOT_IN_USE, InUseAnswer.IN_USE])
    swept = Swept(machines, owner=lambda topic, delete: next(answers))
    one = await swept.daemon()
    (ledger,) = swept.write(1, "asked/t")

    done = await sweep(one, DELETE)
    ended = await all_over(one)

    assert done.counts.ledgers_recorded == 1
    assert [each.outcome for each in ended] == [DeletionOutcome.IN_USE]
    assert swept.keys() == set(ledger.keys)


async def test_adds_and_answers_go_on_while_a_store_that_is_swept_hangs(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, OLD))
    await held.reached()

    assert (await one.add("t", 1, range(10))).accepted == 10

    held.release()
    assert len((await sweeping_).orphans) == 1


async def test_the_loop_comes_round_while_ledgers_are_looked_up(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "LOOKUPS_A_TURN", 40)
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", swept.write(500))
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = one.call(count())
    await sweep(one)
    counting.cancel()

    # 500 ledgers in 4 shards, 10 of them a turn.
    assert turns >= 50


async def _whole(daemon: Daemon, wish: SweepWish) -> SweepProgress:
    progress = [each async for each in daemon.engine.deletion_requests.sweep(wish)]
    return dataclasses.replace(progress[-1], orphans=tuple(each for one in progress for each in one.orphans))


# ---- how it goes, and when it does not


async def test_progress_comes_page_by_page_and_tells_each_orphan_once(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "LISTED_AT_ONCE", 50)
    monkeypatch.setattr(sweeping, "LOOKED_AT_ONCE", 10)
    swept = Swept(machines)
    one = await swept.daemon()
    await say_in_use(one, "t", swept.write(200))
    orphaned = swept.write(33)

    progress = await steps(one)

    told = [orphan.pending_delete.ledger_id for each in progress for orphan in each.orphans]
    assert sorted(told) == sorted(ids(orphaned))
    assert all(len(each.orphans) <= 10 for each in progress)
    seen = [each.counts.listed.objects for each in progress]
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 466)
    assert len(set(seen)) > 5


@pytest.mark.parametrize("page", [1, 3, 1_000])
async def test_pages_of_the_listing_may_end_anywhere(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(sweeping, "LISTED_AT_ONCE", page)
    swept = Swept(machines)
    one = await swept.daemon()
    used, orphaned = swept.write(10), swept.write(10)
    await say_in_use(one, "t", used)

    done = await sweep(one)

    assert found(done) == ids(orphaned)
    assert (done.counts.in_use, done.counts.orphaned) == (objects(20), objects(20))


async def test_only_what_begins_with_the_prefix_is_swept(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(2)
    other = OwnedLedger("t", LedgerComponent.MANAGED_LEDGER, (9, 0xFF00_0000_0000_0000, 1))
    other.write(swept.store)

    done = await sweep(one, dataclasses.replace(OLD, prefix="ff"))

    assert (found(done), done.counts.listed) == ({9}, objects(2))


async def test_one_sweep_of_a_store_at_a_time(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)
    held = swept.hold(one, "head")
    first = one.call(_whole(one, OLD))
    await held.reached()

    with pytest.raises(Conflict, match="a sweep of object store offloaded is under way"):
        await sweep(one)

    held.release()
    await first
    assert len((await sweep(one)).orphans) == 1


async def test_a_caller_that_leaves_ends_its_sweep(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.parallelism=1")
    swept.write(50)
    held = swept.hold(one, "head")
    first = one.call(_whole(one, DELETE))
    await held.reached()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    held.release()
    await machines.loop.jobs_ended()

    heads = [call for call in swept.faults.calls if call.operation == "head"]
    assert len(heads) <= 2
    assert await listed(one, ListedState.PENDING) == []
    assert len((await sweep(one)).orphans) == 50


async def test_a_caller_that_stops_reading_ends_its_sweep(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)

    async def first_step() -> None:
        progress = one.engine.deletion_requests.sweep(OLD)
        await anext(progress)
        await progress.aclose()

    await one.call(first_step())

    assert len((await sweep(one)).orphans) == 1


async def test_a_daemon_without_every_shard_sweeps_nothing(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    for index in range(1, 40):
        await one.add(f"t{index}", 1, range(3))
    one.kill()
    (key, *_) = [
        key for key in machines.keys(names.journal_prefix(2)) if "data" in machines.store.head(key).metadata.values()
    ]
    body, metadata = machines.store.get_with_metadata(key)
    machines.store.put(key, body[: len(body) // 2], metadata=metadata)
    one = await swept.daemon()
    assert 2 not in one.shards
    swept.write(1)

    with pytest.raises(NotOwner, match="may be in use in any of 4 shards, this daemon serves 3"):
        await sweep(one, DELETE)

    assert swept.faults.calls == ()


async def test_a_standby_sweeps_nothing(machines: EngineFixture) -> None:
    swept = Swept(machines)
    await swept.daemon()
    two = await machines.daemon("two", "daemon.shards=4").start()
    await two.until(lambda: "waiting for daemon one" in two.engine.health.reason)

    with pytest.raises((NotOwner, Unavailable)):
        await sweep(two)


async def test_a_sweep_ends_when_a_shard_is_lost(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(3)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    one.shards[2].lose(NotOwner("superseded"))
    held.release()

    with pytest.raises(NotOwner, match="does not own every shard any more"):
        await sweeping_


async def test_a_sweep_ends_when_the_daemon_stops(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(3)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    one.engine.begin_drain()
    held.release()

    with pytest.raises(Unavailable, match="stopping"):
        await sweeping_


@pytest.mark.parametrize("is_left", [False, True], ids=["its caller waits", "its caller has left"])
async def test_an_orderly_end_does_not_wait_long_for_a_store_that_is_swept_and_hangs(
    machines: EngineFixture, is_left: bool
) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    if is_left:
        sweeping_.cancel()
    began_s = machines.elapsed_s()
    left = await one.call(one.engine.stop())
    assert machines.elapsed_s() - began_s < 7
    assert left == ["1 questions of sweeps wait for their stores"]
    held.release()


async def test_an_orderly_end_waits_for_the_question_that_a_sweep_is_at(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)
    held = swept.hold(one, "head")
    sweeping_ = one.call(_whole(one, DELETE))
    await held.reached()
    stopping = one.call(one.engine.stop())
    await asyncio.sleep(2)
    assert not stopping.done()
    held.release()
    assert await stopping == []
    with pytest.raises(Unavailable, match="stopping"):
        await sweeping_


@pytest.mark.parametrize("operation", ["list", "head"])
async def test_a_store_that_is_away_ends_the_sweep_and_the_next_one_works(
    machines: EngineFixture, operation: str
) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(1)
    swept.script.plan(operation, Fault.FAIL_BEFORE)

    with pytest.raises(Unavailable, match="object store offloaded"):
        await sweep(one, DELETE)

    assert len((await sweep(one)).orphans) == 1


async def test_a_sweep_that_fails_asks_nothing_more(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon("deletion.parallelism=4")
    swept.write(100)
    swept.script.plan("head", Fault.FAIL_BEFORE)

    with pytest.raises(Unavailable):
        await sweep(one)
    await machines.loop.jobs_ended()

    # Those that were under way: two objects each.
    assert len([call for call in swept.faults.calls if call.operation == "head"]) <= 2 * 4 * 2


async def test_what_cannot_be_swept_is_refused(machines: EngineFixture) -> None:
    one = await Swept(machines).daemon()

    with pytest.raises(NotFound, match="elsewhere"):
        await sweep(one, SweepWish("elsewhere"))
    with pytest.raises(InvalidArgument, match="prefix"):
        await sweep(one, SweepWish(STORE, prefix="../up"))


async def test_too_many_halves_end_the_sweep(machines: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans.Pairing.__init__, "__defaults__", (10,))
    swept = Swept(machines)
    one = await swept.daemon()
    for ledger in swept.write(11):
        swept.store.delete(ledger.keys[0])

    with pytest.raises(QuotaExceeded, match="longer prefixes"):
        await sweep(one)


async def test_orphans_of_the_last_sweep_are_a_metric(machines: EngineFixture) -> None:
    swept = Swept(machines)
    one = await swept.daemon()
    swept.write(3)

    await sweep(one)

    assert one.metrics.registry.get_sample_value("tarry_sweep_orphans", {"store": STORE}) == 3.0
