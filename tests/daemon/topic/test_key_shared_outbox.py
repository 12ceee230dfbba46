"""Rows that wait to be sent by key, and leave meanwhile: they are not sent after the answer that says so."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from storage_backends.formats.manifest import HashSelector, KeySharedPolicy, NackOrder
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import ignored_by
from tests.daemon._support.calling import clear, stats
from tests.daemon._support.key_dispatching import (
    HASHES,
    KeyDispatcher,
    Sent,
    add,
    by_key,
    consumer,
    open_by_key,
    planned,
    sticky,
)
from tests.daemon._support.nacking import claims, constant, nack
from tests.daemon.topic._support.full_outlet import FullOutlet

ALL = (0, (1 << 16) - 1)


async def entries_of(shared: KeyDispatcher) -> list[tuple[int, int]]:
    """What came since the rows that were asked for: entry and redelivery count."""
    await asyncio.sleep(2)
    return [(each.entry, each.row.redeliveries) for each in shared.got[shared._waited :]]


async def taken_back_and_in_flight_again(
    machines: EngineFixture, *, permits: int = 100
) -> tuple[Daemon, KeyDispatcher, Sent, FullOutlet]:
    """Entries 1 and 2 of one key came, 1 was negatively acknowledged, so that 2 was taken back; both are in flight
    again, and nothing of this has been sent. Returns 2 as it came, too.
    """
    one = await machines.served_by("one")
    policy = sticky(nack_order=NackOrder.BLOCK_KEY)
    shared = await open_by_key(one, [consumer(1, ALL, permits=permits)], policy=policy)
    await add(one, 1, [1, 2], [7, 7])
    first, second = await shared.next(2)
    shared.stream.outlet = outlet = FullOutlet()
    # It is answered when this is sent.
    _ = shared.nack([first], 100)
    await one.until(lambda: len(shared.stream.state.in_flight) == 0)
    await one.until(lambda: len(shared.stream.state.in_flight) == 2)
    return one, shared, second, outlet


async def test_a_row_that_is_acknowledged_by_its_earlier_delivery_does_not_come_after_the_answer(
    machines: EngineFixture,
) -> None:
    _, shared, second, outlet = await taken_back_and_in_flight_again(machines)
    assert await shared.acknowledge([second]) == 0
    assert shared.taken_back == []
    outlet.make_room()
    assert await entries_of(shared) == [(1, 1)]
    assert [each.entry for each in shared.taken_back] == [2]
    assert len(shared.stream.state.in_flight) == 1


async def test_the_permit_of_a_row_that_is_not_sent_may_be_used_again(machines: EngineFixture) -> None:
    one, shared, second, outlet = await taken_back_and_in_flight_again(machines, permits=4)
    assert await shared.acknowledge([second]) == 0
    await add(one, 1, [3, 4], [7, 7])
    outlet.make_room()
    assert await entries_of(shared) == [(1, 1), (3, 0)]


async def acknowledged_elsewhere(daemon: Daemon, rows: list[Sent]) -> None:
    request = daemon.engine.requests.acknowledge
    assert await daemon.call(ignored_by(request, "t", "s", claims([each.row for each in rows]))) == 0


async def nacked_elsewhere(daemon: Daemon, rows: list[Sent]) -> None:
    assert (await nack(daemon, [each.row for each in rows], 60_000)).ignored == 0


async def rejected_elsewhere(daemon: Daemon, rows: list[Sent]) -> None:
    assert (await nack(daemon, [each.row for each in rows], reject=True)).dead_lettered == len(rows)


async def cleared(daemon: Daemon, rows: list[Sent]) -> None:
    assert await clear(daemon) == len(rows) + 1


@pytest.mark.parametrize("leave", [acknowledged_elsewhere, nacked_elsewhere, rejected_elsewhere, cleared])
async def test_a_row_that_leaves_by_another_call_is_not_sent_after_its_answer(
    machines: EngineFixture, leave: Callable[[Daemon, list[Sent]], Awaitable[None]]
) -> None:
    one, shared, second, outlet = await taken_back_and_in_flight_again(machines)
    await leave(one, [second])
    outlet.make_room()
    assert await entries_of(shared) == ([] if leave is cleared else [(1, 1)])


async def test_a_row_that_times_out_before_it_is_sent_comes_once_with_its_new_count(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = constant(100, ack_timeout_ms=3_000, key_shared=KeySharedPolicy())
    shared = await open_by_key(one, [consumer(1, permits=2)], policy=policy)
    shared.stream.outlet = outlet = FullOutlet()
    await add(one, 1, [1], [7])
    await one.until(lambda: len(shared.stream.state.in_flight) == 1)
    await one.until(lambda: len(shared.stream.state.in_flight) == 0)
    await one.until(lambda: len(shared.stream.state.in_flight) == 1)
    outlet.make_room()
    assert await entries_of(shared) == [(1, 1)]
    await add(one, 1, [2], [8])
    assert (await entries_of(shared))[1:] == [(2, 0)]


async def test_a_row_that_was_never_sent_is_not_taken_back(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = sticky(nack_order=NackOrder.BLOCK_KEY)
    shared = await open_by_key(one, [consumer(1, ALL)], policy=policy)
    await add(one, 1, [1], [7])
    rows = await shared.next(1)
    shared.stream.outlet = outlet = FullOutlet()
    await add(one, 1, [2], [7])
    await one.until(lambda: len(shared.stream.state.in_flight) == 2)
    nacked = shared.nack(rows, 20_000)
    await one.until(lambda: len(shared.stream.state.in_flight) == 0)
    outlet.make_room()
    assert (await nacked).ignored == 0
    assert (await entries_of(shared), shared.taken_back) == ([], [])
    again = await shared.next(2)
    assert [(each.entry, each.row.redeliveries) for each in again] == [(1, 1), (2, 0)]
    assert (await shared.nack(again[:1], 20_000)).ignored == 0
    assert [each.entry for each in shared.taken_back] == [2], "this one was sent"


# ---- plans


async def planning(shared: KeyDispatcher, request_id: int, *entries: int) -> None:
    await shared.stream.plan(request_id, np.full(len(entries), 9, np.uint64), np.array(entries, np.uint64), None)


async def test_a_plan_does_not_give_a_consumer_what_was_acknowledged_before_its_answer(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL, permits=3)], policy=sticky())
    assert await shared.plan(9, [1]) == [1]
    shared.stream.outlet = outlet = FullOutlet()
    asked = one.call(planning(shared, 7, 1, 2, 3))
    await one.until(lambda: len(shared.stream.state.in_flight) == 3)
    assert await shared.acknowledge(planned(9, [1, 2])) == 0
    outlet.make_room()
    await asked
    assert shared.planned[7] == [0, 0, 1]
    assert await shared.plan(9, [4, 5]) == [1, 0], "one of the three used no permit"


async def test_what_is_marked_as_deleted_does_not_come_after_the_answer(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL, permits=0)], policy=sticky())
    assert await shared.plan(9, [1, 2]) == [0, 0]
    shared.stream.outlet = outlet = FullOutlet()
    shared.stream.grant(10, 1)
    await one.until(lambda: len(shared.stream.state.in_flight) == 2)
    await one.call(_marked(shared, 1))
    outlet.make_room()
    assert await entries_of(shared) == [(2, 0)]


async def _marked(shared: KeyDispatcher, entry: int) -> None:
    await shared.stream.mark_delete(9, entry)


# ---- several streams


async def test_a_key_comes_to_another_stream_once_the_former_one_was_told_what_was_taken_back(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    policy = by_key(selector=HashSelector.AUTO_SPLIT, nack_order=NackOrder.BLOCK_KEY)
    former = await open_by_key(one, [consumer(1)], policy=policy)
    await add(one, 1, range(4), [7, HASHES - 1] * 2)
    rows = await former.next(4)
    other = await open_by_key(one, [consumer(1)])
    sharing = other.stream.state.key_shared
    assert sharing is not None
    moved = [each for each in rows if sharing.selector.owners[each.row.key_hash] == 2]
    former.stream.outlet = outlet = FullOutlet()
    nacked = former.nack(moved[:1], 100)
    await one.until(lambda: len(former.stream.state.in_flight) == 2)
    assert await other.nothing_more(for_s=3), "the former consumer works on the second one"
    former.going_on.clear()
    outlet.make_room()
    assert await other.nothing_more(), "it is being written"
    former.going_on.set()
    assert [each.entry for each in await other.next(2)] == [each.entry for each in moved]
    assert [each.entry for each in former.taken_back] == [moved[1].entry]
    assert (await nacked).ignored == 0


async def test_of_a_message_that_waits_only_what_left_is_not_sent(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    first = await open_by_key(one, [consumer(1, (0, 9))], policy=sticky())
    other = await open_by_key(one, [consumer(1, (10, 19))])
    first.stream.outlet, other.stream.outlet = outlets = FullOutlet(), FullOutlet()
    await add(one, 1, range(6), [7, 17] * 3)
    state = first.stream.state
    await one.until(lambda: len(state.in_flight) == 6)
    due_ms = int(state.in_flight.find(state.in_flight.keys()).rows.deliver_at_ms[0])
    assert await first.acknowledge([(1, 2, due_ms), (1, 3, due_ms)]) == 0
    for outlet in outlets:
        outlet.make_room()
    assert (await entries_of(first), await entries_of(other)) == ([(0, 0), (4, 0)], [(1, 0), (5, 0)])
    assert await first.acknowledge([*first.got, *other.got]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0
