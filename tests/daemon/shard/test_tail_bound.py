"""How much of the log a successor has to read, and which shard is checkpointed when."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterator

import pytest

from daemon.shard import tail_bound
from daemon.shard.tail_bound import AT_ONCE, BEGIN_AT, RETRY_S, Tail, TailBound
from storage_backends.formats import log_slot_format
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault

WORK_MAX = 400
BEGIN = int(BEGIN_AT * WORK_MAX)
SHARDS = 16


class Shards:
    """Shards in one log, whose checkpoints end when the test says so."""

    def __init__(self, count: int, work_max: int = WORK_MAX) -> None:
        self.now_s = 100.0
        self.work = 0
        self.bound = TailBound(work_max, lambda: self.now_s)
        self.begun: list[int] = []
        self.busy: set[int] = set()
        self.tails: list[Tail] = [self._tail(number) for number in range(count)]

    def _tail(self, number: int) -> Tail:
        def begin() -> bool:
            if number in self.busy:
                return False
            self.begun.append(number)
            self.busy.add(number)
            return True

        return self.bound.tail(begin)

    def write(self, *numbers: int, slots: int = 1) -> None:
        """So many slots with a section of each of these shards."""
        for _ in range(slots):
            self.work += 1 + len(numbers)
            for number in numbers:
                self.tails[number].grown(self.work)
            self.bound.consider(self.work)

    def end(self, number: int) -> None:
        with self.writing(number):
            pass

    @contextlib.contextmanager
    def writing(self, number: int) -> Iterator[None]:
        """Its checkpoint is written, and is under way no more."""
        try:
            with self.tails[number].covering():
                yield
        finally:
            self.busy.discard(number)

    @property
    def to_read(self) -> int:
        """What a successor has to read at most."""
        begins = [tail.from_work for tail in self.tails if tail.from_work is not None]
        return self.work - min(begins, default=self.work)


def test_nothing_begins_while_the_log_is_short() -> None:
    shards = Shards(2)
    shards.write(0, slots=20)
    shards.write(1, slots=20)
    assert shards.begun == []


def test_the_shard_whose_first_section_is_the_oldest_is_next_however_little_it_has() -> None:
    shards = Shards(3)
    shards.write(2)
    shards.write(0, 1, slots=200)
    assert shards.begun[0] == 2
    shards.end(2)
    shards.write(0, 1, slots=200)
    assert 2 not in shards.begun[1:], "it needs nothing"


def test_what_former_owners_left_lies_before_the_log() -> None:
    shards = Shards(1)
    shards.tails[0].grown(-BEGIN)
    shards.bound.consider(0)
    assert shards.begun == [0]


@pytest.mark.parametrize("together", [1, SHARDS], ids=["a slot each", "in each slot"])
def test_shards_that_are_written_alike_take_turns_far_apart(together: int) -> None:
    work_max = 10 * WORK_MAX
    shards, most, at = Shards(SHARDS, work_max), 0, []
    lines = [tuple(range(first, first + together)) for first in range(0, SHARDS, together)]
    for numbers in itertools.islice(itertools.cycle(lines), 20_000 // together):
        shards.write(*numbers)
        for begun in shards.begun:
            at.append((shards.work, begun))
            shards.end(begun)
        shards.begun.clear()
        most = max(most, shards.to_read)
    assert most <= work_max
    steady = at[SHARDS * 4 :]
    spans = [after - before for (before, _), (after, _) in itertools.pairwise(steady)]
    assert min(spans) >= 0.9 * BEGIN_AT * work_max / SHARDS, "spread over time"
    turns = [number for _, number in steady[: SHARDS * 4]]
    assert all(len(set(turns[first : first + SHARDS])) == SHARDS for first in range(0, SHARDS * 3, SHARDS))


@pytest.mark.parametrize("written", [1, 3, SHARDS - 4])
def test_shards_that_are_not_written_make_the_others_turns_no_shorter(written: int) -> None:
    work_max = 10 * WORK_MAX
    shards, most, begun = Shards(SHARDS, work_max), 0, 0
    while shards.work < 20 * work_max:
        shards.write(*range(written))
        begun += len(shards.begun)
        for each in shards.begun:
            shards.end(each)
        shards.begun.clear()
        most = max(most, shards.to_read)
    assert most <= work_max
    assert begun <= 1.1 * written * shards.work / (BEGIN_AT * work_max)


def test_a_store_that_takes_long_has_few_checkpoints_under_way() -> None:
    shards = Shards(SHARDS)
    for number in range(SHARDS):
        shards.write(number, slots=WORK_MAX)
    assert len(shards.begun) == shards.bound.under_way == AT_ONCE


def test_a_shard_whose_checkpoint_cannot_begin_lets_the_next_one_begin() -> None:
    shards = Shards(2)
    shards.tails[0].begin = lambda: False
    shards.write(0)
    shards.write(1, slots=WORK_MAX)
    assert set(shards.begun) == {1}


def test_what_a_checkpoint_that_failed_was_to_cover_is_needed_still_and_another_shard_is_next() -> None:
    shards = Shards(2)
    shards.write(0, slots=150)
    assert shards.begun == [0]
    before = 2
    with pytest.raises(OSError, match="disk"), shards.writing(0):
        raise OSError("disk")
    assert (shards.tails[0].from_work, shards.bound.under_way) == (before, 0)
    shards.write(1, slots=160)
    assert shards.begun == [0, 1], "it is not asked again so soon"
    shards.end(1)
    shards.now_s += RETRY_S
    shards.bound.consider(shards.work)
    assert shards.begun[2] == 0


def test_sections_that_come_while_a_checkpoint_is_written_are_not_covered_by_it() -> None:
    shards = Shards(1)
    shards.write(0, slots=150)
    assert shards.begun == [0]
    with shards.writing(0):
        shards.write(0)
    assert shards.tails[0].from_work == shards.work


def test_a_shard_that_is_lost_in_the_middle_of_its_checkpoint_counts_no_more() -> None:
    shards = Shards(2)
    shards.write(0, slots=150)
    with shards.tails[0].covering():
        shards.tails[0].forget()
    shards.tails[0].grown(1)
    assert (shards.to_read, shards.bound.under_way) == (0, 0)


def test_a_shard_that_is_lost_before_its_checkpoint_began_to_be_written_counts_no_more() -> None:
    shards = Shards(2)
    shards.write(0, slots=150)
    assert shards.bound.under_way == 1
    shards.tails[0].forget()
    shards.tails[0].forget()
    assert (shards.to_read, shards.bound.under_way) == (0, 0)


def test_another_log_is_measured_from_its_beginning() -> None:
    shards = Shards(2)
    shards.write(0, slots=2_000)
    shards.end(0)
    for tail in shards.tails:
        tail.forget()
    shards.bound.new_log()
    shards.work, shards.begun = 0, []
    shards.tails = [shards._tail(number) for number in range(2)]
    shards.write(0, slots=BEGIN)
    assert shards.begun


async def write_slots(daemon: Daemon, count: int) -> None:
    for number in range(count):
        for topic in range(6):
            await daemon.add(f"t{topic}", number, [0], delay_ms=900_000)
    await asyncio.sleep(1)


def work_to_read(machines: EngineFixture) -> int:
    """What a successor would have to read, over all shards: a unit for each slot, and for each section in it."""
    tips = [machines.shard_tip(shard) for shard in range(4)]
    wanted: dict[str, int] = {}
    for shard, tip in enumerate(tips):
        for key in machines.slots_of(shard):
            slot = log_slot_format.decode_log_slot(machines.store.get(key))
            if slot.header.heads[shard].last_slot > tip.checkpoint_slot:
                wanted[key] = 1 + len(slot.shards)
    return sum(wanted.values())


async def tail_after_many_slots(machines: EngineFixture) -> int:
    machines.tail_work_max = 20
    one = await machines.served_by("one", "daemon.shards=4")
    await write_slots(one, 30)
    return work_to_read(machines)


async def test_a_successor_reads_no_more_than_the_bound_of_all_shards(machines: EngineFixture) -> None:
    assert await tail_after_many_slots(machines) <= 20
    two = await machines.served_by("one", "daemon.shards=4")
    assert sum(two.topic(f"t{topic}").core.index.pending_rows for topic in range(6)) == 180


async def test_a_checkpoint_that_fails_is_made_up_for(machines: EngineFixture) -> None:
    machines.tail_work_max = 20
    one = await machines.served_by("one", "daemon.shards=4")
    one.script.plan("put", Fault.FAIL_BEFORE, key_part="/checkpoint/", times=4)
    await write_slots(one, 30)
    assert work_to_read(machines) > 20
    # No slot is written any more: it is tried again all the same.
    await asyncio.sleep(5)
    assert one.script.unmet() == 0
    assert work_to_read(machines) <= 20


async def test_a_bound_that_begins_no_checkpoint_is_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_bound.TailBound, "_begin_one", lambda self, tails: False)
    assert await tail_after_many_slots(machines) > 20


async def test_slots_that_are_counted_for_one_shard_only_are_found(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_all = tail_bound.TailBound.tail

    def of_one(self: TailBound, begin: object) -> Tail:
        return of_all(TailBound(20, self.elapsed_s), begin)  # type: ignore[arg-type]

    monkeypatch.setattr(tail_bound.TailBound, "tail", of_one)
    assert await tail_after_many_slots(machines) > 20
