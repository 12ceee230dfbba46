"""What a cursor is told to skip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from daemon.core.index.containment import Contained, EntryRanges
from daemon.errors import InvalidArgument, NotFound, TarryError, Unavailable
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import create, trim, up_to

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")


def contains(
    daemon: Daemon, asked: Sequence[tuple[int, int, int]], *, topic: str = "t", subscription: str | None = None
) -> asyncio.Task[Contained]:
    columns = [np.array([each[index] for each in asked], np.uint64) for index in range(3)]
    return daemon.call(daemon.engine.requests.contains(topic, EntryRanges(*columns), subscription))


def listed(ranges: EntryRanges) -> list[tuple[int, int, int]]:
    columns = ranges.ledger_id.tolist(), ranges.first_entry_id.tolist(), ranges.last_entry_id.tolist()
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("settings", [(), ("bucket.rows_max=4", "bucket.min_index_count_per_bucket=4")])
async def test_of_entries_0_to_9_with_1_to_8_delayed_a_cursor_reads_0_and_9(
    machines: EngineFixture, settings: tuple[str, ...]
) -> None:
    one = await machines.served_by("one", *settings)
    await one.add("t", 1, range(1, 9), delay_ms=60_000)
    await asyncio.sleep(5)
    found = await contains(one, [(1, 0, 9)])
    assert listed(found.pending) == [(1, 1, 8)]
    assert listed(found.due) == []
    assert found.continuation is None


async def test_what_is_due_and_not_acknowledged_is_contained_for_whom_it_is_owed(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver, other = await one.receiver("t", "s"), await one.receiver("t", "other")
    await one.add("t", 1, range(10), delay_ms=0)
    await one.add("t", 1, range(10, 15), delay_ms=60_000)
    rows = await receiver.received(10)
    await other.received(10)
    await receiver.acknowledge(rows[:4])
    await other.acknowledge(other.rows[:2])
    whole = [(1, 0, 100)]
    found = await contains(one, whole, subscription="s")
    assert (listed(found.due), listed(found.pending)) == ([(1, 4, 9)], [(1, 10, 14)])
    found = await contains(one, whole, subscription="other")
    assert (listed(found.due), listed(found.pending)) == ([(1, 2, 9)], [(1, 10, 14)])
    found = await contains(one, whole)
    assert (listed(found.due), listed(found.pending)) == ([(1, 2, 9)], [(1, 10, 14)])


async def test_a_topic_that_is_not_there_contains_nothing_and_is_not_born(machines: EngineFixture) -> None:
    one = await machines.served_by()
    found = await contains(one, [(1, 0, 9)], topic="nothing")
    assert (listed(found.due), listed(found.pending), found.continuation) == ([], [], None)
    assert not machines.keys("/topics/")


async def test_an_answer_that_would_be_too_long_goes_on_where_it_ended(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("daemon.topic.served_topic.CONTAINED_RANGES_MAX", 7)
    one = await machines.served_by()
    await one.add("t", 1, range(0, 100, 2), delay_ms=60_000)
    await one.add("t", 2, range(0, 30, 3), delay_ms=60_000)
    asked = [(1, 0, 200), (2, 0, 200), (3, 0, 200)]
    found, index, entry_id, rounds = [], 0, 0, 0
    while True:
        rest = [(asked[index][0], entry_id, asked[index][2]), *asked[index + 1 :]]
        answer = await contains(one, rest)
        found += listed(answer.pending)
        rounds += 1
        if answer.continuation is None:
            break
        index, entry_id = index + answer.continuation[0], answer.continuation[1]
    assert found == [(1, entry, entry) for entry in range(0, 100, 2)] + [(2, e, e) for e in range(0, 30, 3)]
    assert rounds >= 9


async def test_an_answer_waits_for_the_slots_that_came_before_it(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    held = one.pause("put_if_absent", JOURNAL)
    trimming = trim(one, up_to(4, 1))
    await held.reached()
    asked = contains(one, [(1, 0, 9)])
    await asyncio.sleep(8)
    assert not asked.done()
    held.release()
    await trimming
    assert listed((await asked).pending) == [(1, 0, 9)], "as of when it was asked"
    assert listed((await contains(one, [(1, 0, 9)])).pending) == [(1, 5, 9)]


async def test_only_the_owner_says_what_is_contained(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(10), delay_ms=60_000)
    await asyncio.sleep(0.1)
    one.freeze()
    asked = [contains(one, [(1, 0, 9)]), contains(one, [(1, 0, 9)], topic="new")]
    await machines.served_by("two")
    one.thaw()
    for task in asked:
        with pytest.raises(TarryError):
            await task


async def test_without_the_store_nothing_is_said(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(10), delay_ms=60_000)
    await asyncio.sleep(0.1)
    one.store.go_down()
    with pytest.raises(Unavailable):
        await contains(one, [(1, 0, 9)])


async def test_bad_requests_are_refused_by_name(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.rows_per_request_max=3")
    await one.add("t", 1, [1], delay_ms=60_000)
    with pytest.raises(InvalidArgument, match="has 0 rows"):
        await contains(one, [])
    with pytest.raises(InvalidArgument, match="has 4 rows"):
        await contains(one, [(1, 0, 9)] * 4)
    with pytest.raises(InvalidArgument, match=r"last_entry_id\[1\] is 4, before entry_id\[1\], which is 5"):
        await contains(one, [(1, 0, 9), (1, 5, 4)])
    with pytest.raises(NotFound):
        await contains(one, [(1, 0, 9)], subscription="nobody")
    await create(one)
    assert listed((await contains(one, [(1, 0, 9)], subscription="s")).pending) == [(1, 1, 1)]
