"""What a sweep records is verified and deleted as always; a sweep that finds too much records nothing."""

from __future__ import annotations

import dataclasses

import pytest

from daemon.core.deletions import orphans
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.errors import (
    Corruption,
    OutcomeUnknown,
)
from daemon.ledger_deletion import sweeping
from daemon.shard.shard import ServedShard
from daemon.topic.served_topic import ServedTopic
from storage_backends.formats.deletion_format import DeletionOutcome
from tests._support.engine_fixture import EngineFixture
from tests._support.fault_store import Fault
from tests.daemon.ledger_deletion._support.sweeps import (
    BODY_BYTES,
    DELETE,
    OLD,
    Swept,
    all_over,
    listed,
    no_attempt_is_due,
    objects,
    say_in_use,
    sweep,
)

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

    with pytest.raises(OutcomeUnknown, match="pending_max"):
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
