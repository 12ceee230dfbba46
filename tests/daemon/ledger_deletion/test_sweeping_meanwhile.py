"""What happens while a sweep is under way, and what ends it."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from daemon.core.deletions import orphans
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.errors import (
    Conflict,
    InvalidArgument,
    NotFound,
    NotOwner,
    QuotaExceeded,
    Unavailable,
)
from daemon.ledger_deletion import sweeping
from daemon.ledger_deletion.deletion_values import SweepProgress, SweepWish
from daemon.ledger_stores.ledger_store import InUseAnswer
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerComponent
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault
from tests._support.owned_ledgers import OwnedLedger, in_use
from tests.daemon.ledger_deletion._support.sweeps import (
    DELETE,
    OLD,
    STORE,
    Swept,
    all_over,
    found,
    ids,
    listed,
    objects,
    say_in_use,
    steps,
    sweep,
)

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
    slot = one.pause("put_if_absent", "logs/")
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

    with pytest.raises(Conflict, match="a sweep of object store offloaded is in progress"):
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
    (key, *_) = machines.slots_of(2)
    body, metadata = machines.store.get_with_metadata(key)
    section = log_slot_format.decode_log_slot(body).section(2)
    machines.store.put(key, body.replace(section, section[:-1] + bytes([section[-1] ^ 1])), metadata=metadata)
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

    with pytest.raises(NotOwner, match="no longer owns every shard"):
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
