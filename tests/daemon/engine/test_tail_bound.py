"""How long the journals of all shards together become, and which of them is checkpointed when."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from daemon.surroundings import tail_bound
from daemon.surroundings.tail_bound import AT_ONCE, RETRY_S, Tail, TailBound
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault

SLOTS_MAX = 40
SHARDS = 16


class Shards:
    """Shards whose checkpoints end when the test says so."""

    def __init__(self, count: int) -> None:
        self.now_s = 100.0
        self.bound = TailBound(SLOTS_MAX, lambda: self.now_s)
        self.begun: list[int] = []
        self.tails: list[Tail] = [self._tail(number) for number in range(count)]

    def _tail(self, number: int) -> Tail:
        def begin() -> bool:
            self.begun.append(number)
            return True

        return self.bound.tail(begin)

    def write(self, number: int, slots: int = 1) -> None:
        self.tails[number].grown(slots)
        self.bound.consider()

    def end(self, number: int) -> None:
        with self.tails[number].covering():
            pass


def test_nothing_begins_while_the_tails_are_short_together() -> None:
    shards = Shards(2)
    shards.write(0, 14)
    shards.write(1, 15)
    assert shards.begun == []


def test_the_longest_tail_is_next() -> None:
    shards = Shards(3)
    for number, slots in enumerate((5, 15, 10)):
        shards.write(number, slots)
    assert shards.begun == [1]


def test_shards_that_are_written_alike_take_turns_far_apart() -> None:
    shards, most, at = Shards(SHARDS), 0, []
    for written, number in zip(range(4_000), itertools.cycle(range(SHARDS)), strict=False):
        shards.write(number)
        for begun in shards.begun:
            at.append(written)
            shards.end(begun)
        shards.begun.clear()
        most = max(most, shards.bound.open_slots)
    assert most <= SLOTS_MAX
    # After the first turns, which begin with tails of one length, the spans between two are even.
    spans = [after - before for before, after in itertools.pairwise(at[SHARDS * 4 :])]
    assert min(spans) >= 1
    assert max(spans) <= SHARDS


def test_of_a_store_that_takes_long_only_few_checkpoints_are_under_way() -> None:
    shards = Shards(SHARDS)
    for number in range(SHARDS):
        shards.write(number, SLOTS_MAX)
    assert len(shards.begun) == AT_ONCE


def test_slots_of_a_checkpoint_that_failed_count_again_and_another_shard_is_next() -> None:
    shards = Shards(2)
    shards.write(0, 30)
    with pytest.raises(OSError, match="disk"), shards.tails[0].covering():
        raise OSError("disk")
    assert shards.bound.open_slots == 30
    shards.write(1)
    assert shards.begun == [0, 1]
    shards.now_s += RETRY_S
    shards.end(1)
    shards.bound.consider()
    assert shards.begun == [0, 1, 0]


def test_a_shard_that_is_lost_in_the_middle_of_its_checkpoint_counts_no_more() -> None:
    shards = Shards(2)
    shards.write(0, 30)
    with shards.tails[0].covering():
        shards.tails[0].forget()
    shards.tails[0].grown(1)
    assert (shards.bound.open_slots, shards.bound.under_way) == (0, 0)


def test_a_shard_that_is_lost_before_its_checkpoint_began_to_be_written_counts_no_more() -> None:
    shards = Shards(2)
    shards.write(0, 30)
    shards.tails[0].forget()
    assert (shards.bound.open_slots, shards.bound.under_way) == (0, 0)


async def write_slots(daemon: Daemon, count: int) -> None:
    for number in range(count):
        for topic in range(6):
            await daemon.add(f"t{topic}", number, [0], delay_ms=900_000)
    await asyncio.sleep(1)


def slots_to_read(machines: EngineFixture) -> int:
    """What a successor would have to read, over all shards."""
    return sum(
        names.number_of(key) > machines.shard_tip(shard).replay_from
        for shard in range(4)
        for key in machines.keys(names.journal_prefix(shard))
    )


async def tail_after_many_slots(machines: EngineFixture) -> int:
    machines.tail_slots_max = 20
    one = await machines.served_by("one", "daemon.shards=4")
    await write_slots(one, 30)
    return slots_to_read(machines)


async def test_a_successor_reads_no_more_than_the_bound_of_all_shards(machines: EngineFixture) -> None:
    assert await tail_after_many_slots(machines) <= 20
    two = await machines.served_by("one", "daemon.shards=4")
    assert sum(two.topic(f"t{topic}").core.index.pending_rows for topic in range(6)) == 180


async def test_a_checkpoint_that_fails_is_made_up_for(machines: EngineFixture) -> None:
    machines.tail_slots_max = 20
    one = await machines.served_by("one", "daemon.shards=4")
    one.script.plan("put", Fault.FAIL_BEFORE, key_part="/checkpoint/", times=4)
    await write_slots(one, 30)
    assert slots_to_read(machines) > 20
    # No slot is written any more: it is tried again all the same.
    await asyncio.sleep(5)
    assert one.script.unmet() == 0
    assert slots_to_read(machines) <= 20


async def test_a_bound_that_begins_no_checkpoint_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_bound.TailBound, "_begin_longest", lambda self: False)
    assert await tail_after_many_slots(machines) > 20


async def test_slots_that_are_counted_for_one_shard_only_are_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = tail_bound.TailBound.tail

    def of_one(self: TailBound, begin: object) -> Tail:
        return of_all(TailBound(20, self.elapsed_s), begin)  # type: ignore[arg-type]

    monkeypatch.setattr(tail_bound.TailBound, "tail", of_one)
    assert await tail_after_many_slots(machines) > 20
