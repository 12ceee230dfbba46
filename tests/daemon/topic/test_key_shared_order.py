"""What order of keys survives: plans beside delayed rows, negative acknowledgements, time-outs, takeovers."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from daemon.errors import Conflict, InvalidArgument, Unavailable
from daemon.topic import key_shared_streams
from daemon.topic.open_streams import StreamClosed
from storage_backends.formats.manifest import HashSelector, KeyOrder, KeySharedPolicy, NackOrder, SubscriptionPolicy
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import Counts, ended, ignored_by
from tests.daemon._support.calling import get, held, rows_of, stats
from tests.daemon._support.key_dispatching import (
    HALF,
    HASHES,
    add,
    by_key,
    consumer,
    halves,
    open_by_key,
    planned,
    sticky,
)
from tests.daemon._support.nacking import claims, constant, dispatcher, update

ALL = (0, HASHES - 1)
LOW, HIGH = (0, HALF - 1), (HALF, HASHES - 1)
FAR_MS = 3_600_000


# ---- plans


async def test_a_plan_names_the_consumer_of_each_position_and_uses_permits(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(permits=2), policy=sticky())
    assert await shared.plan(9, range(6), [7, HALF, 7, 7, HALF, HALF]) == [1, 2, 1, 0, 2, 0]
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.in_flight, found.waiting, found.permits) == (0, 4, 2, 0)
    shared.stream.grant(10, 1)
    (row,) = await shared.next(1)
    assert (row.consumer, row.entry, row.row.deliver_at_ms, row.row.key_hash) == (1, 3, 0, 7)
    assert await shared.acknowledge(planned(9, range(5))) == 0
    assert await shared.acknowledge(planned(9, range(5))) == 5
    shared.stream.grant(10, 2)
    assert [each.entry for each in await shared.next(1)] == [5]


async def test_positions_without_a_key_are_of_one_hash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky())
    assert await shared.plan(9, range(3)) == [1, 1, 1]


async def test_what_was_planned_and_is_held_goes_out_before_what_comes_later(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL, permits=3)], policy=sticky())
    await add(one, 1, [1], [7])
    assert await shared.plan(9, [1, 2, 3], [7, 7, 7]) == [1, 1, 0]
    await add(one, 1, [2], [7])
    assert await shared.plan(9, [4], [7]) == [0]
    await shared.next(1)
    shared.stream.grant(10, 1)
    assert [(each.row.ledger, each.entry) for each in await shared.next(3)] == [(9, 3), (1, 2), (9, 4)]
    assert shared.answered == [(1, 1), (2, 1)], "decided before, sent before"


async def test_delayed_rows_and_plans_of_one_key_wait_for_each_other(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1)], policy=by_key(selector=HashSelector.AUTO_SPLIT))
    assert await shared.plan(9, [1, 2], [7, HASHES - 1]) == [1, 1]
    shared.stream.add_consumer(consumer(2))
    await add(one, 1, [5, 6], [7, HASHES - 1])
    (stays,) = await shared.next(1)
    assert await shared.nothing_more(), "the other one has moved to a consumer while its hash drains"
    assert stays.consumer == 1
    moved = 2 if stays.row.key_hash == 7 else 1
    assert await shared.plan(9, [7], [HASHES - 1 if moved == 2 else 7]) == [0]
    await shared.acknowledge(planned(9, [moved]))
    rows = await shared.next(2)
    assert [each.consumer for each in rows] == [2, 2]
    assert [each.row.ledger for each in rows] == [1, 9], "as they came"


async def test_a_position_that_has_a_row_is_held_and_comes_when_it_is_due(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    await add(one, 9, [1], [7], 3_000)
    assert await shared.plan(9, [1, 2], [7, 7]) == [0, 1]
    (row,) = await shared.next(1)
    assert (row.entry, row.row.deliver_at_ms > 0) == (1, True)
    assert row.row.at_ms >= row.row.deliver_at_ms
    assert await shared.nothing_more()


async def test_held_positions_come_on_the_stream_of_their_consumer(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    first = await open_by_key(one, [consumer(1, LOW)], policy=sticky())
    second = await open_by_key(one, [consumer(1, HIGH)])
    assert await first.plan(9, range(4), [7, HALF, 7, HALF]) == [1, 0, 1, 0]
    rows = await second.next(2)
    assert [each.entry for each in rows] == [1, 3]
    assert await second.plan(9, range(4), [7, HALF, 7, HALF]) == [0, 1, 0, 1], "planned again: who has it"
    assert await second.nothing_more()


async def test_a_plan_ends_with_its_stream_but_for_what_others_hold(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    first = await open_by_key(one, [consumer(1, LOW, permits=1)], policy=sticky())
    second = await open_by_key(one, [consumer(1, HIGH, permits=1)])
    assert await first.plan(9, range(4), [7, HALF, 7, HALF]) == [1, 0, 0, 0]
    rows = await second.next(1)
    first.stream.close()
    second.stream.grant(10, 1)
    assert await second.nothing_more()
    found = (await stats(one)).subscriptions[0]
    assert (found.in_flight, found.waiting, found.backlog) == (1, 0, 0)
    assert await second.acknowledge(rows) == 0
    again = await open_by_key(one, [consumer(1, LOW)])
    assert await again.plan(9, range(4), [7, HALF, 7, HALF]) == [1, 0, 1, 0]


async def test_what_is_marked_as_deleted_is_acknowledged(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = by_key(selector=HashSelector.AUTO_SPLIT, order=KeyOrder.LAST_SENT_POSITION)
    shared = await open_by_key(one, [consumer(1)], policy=policy)
    assert await shared.plan(9, range(10), [7, HASHES - 1] * 5) == [1] * 10
    shared.stream.add_consumer(consumer(2))
    answer = await shared.plan(9, range(10, 14), [7, HASHES - 1] * 2)
    assert sorted(answer) == [0, 0, 1, 1], "who joined waits until what was sent before is acknowledged"
    page = await one.call(one.engine.requests.list_consumers("t", "s", 0, 0))
    assert [each.stats.last_sent_position_when_joining for each in page.consumers] == [None, (9, 9)]
    assert page.key_shared is not None
    assert [each.name for each in page.key_shared.consumers_after_mark_delete_position] == ["consumer-2"]
    await one.call(ended(shared.stream.mark_delete, 9, 9))
    assert [each.consumer for each in await shared.next(2)] == [2, 2]
    assert (await stats(one)).subscriptions[0].in_flight == 4


async def test_plans_that_are_wrong_or_come_too_early_are_refused(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", "limits.rows_per_request_max=50000")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    too_many = range(key_shared_streams.PLAN_ROWS_MAX + 1)
    for bad, says in (([], "entry_id has 0"), (too_many, "entry_id has 10001 rows.*10000"), ([5, 5], "entry_id.1")):
        with pytest.raises(InvalidArgument, match=says):
            await shared.plan(9, bad)
    monkeypatch.setattr(type(one.topic("t").shard), "may_hand_out", False)
    with pytest.raises(Unavailable):
        await shared.plan(9, [1])
    await add(one, 1, [1], [7])
    assert await shared.nothing_more()
    monkeypatch.undo()
    await shared.next(1)


async def test_nothing_goes_out_while_a_successor_may_serve(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    shared.going_on.clear()
    await add(one, 1, [1], [7])
    await one.until(lambda: len(shared.stream.state.in_flight) == 1 and not shared.stream.outbox)
    await add(one, 1, [2], [7])
    await one.until(lambda: shared.stream.outbox.rows == 1)
    monkeypatch.setattr(type(one.topic("t").shard), "may_hand_out", False)
    shared.going_on.set()
    await shared.next(1)
    assert await shared.nothing_more(), "what waits on its way waits on"
    monkeypatch.undo()
    await shared.next(1)


async def test_a_plan_whose_answer_nobody_takes_out_ends_with_the_stream(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    shared.going_on.clear()
    await add(one, 1, [1], [7])
    await one.until(lambda: len(shared.stream.state.in_flight) == 1 and not shared.stream.outbox)
    columns = np.array([9], np.uint64), np.array([1], np.uint64)
    asked = one.call(ended(shared.stream.plan, 1, *columns, None))
    await asyncio.sleep(1)
    assert not asked.done()
    shared.stream.sends_no_more()
    with pytest.raises(Unavailable, match="the daemon sends nothing more"):
        await asked
    with pytest.raises(Unavailable):
        await one.call(ended(shared.stream.plan, 2, *columns, None))
    shared.stream.close()
    with pytest.raises(StreamClosed):
        await one.call(ended(shared.stream.plan, 3, *columns, None))


async def test_a_plan_is_decided_before_an_acknowledgement_that_is_read_with_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    assert await shared.plan(9, [1], [7]) == [1]

    async def both() -> int:
        again = asyncio.ensure_future(shared.stream.plan(7, np.array([9], np.uint64), np.array([1], np.uint64), None))
        ignored = await ignored_by(shared.stream.acknowledge, claims(planned(9, [1])))
        await again
        return ignored

    assert await one.call(both()) == 0
    assert shared.planned[7] == [0]
    assert await shared.nothing_more()
    assert not len(shared.stream.state.in_flight)


async def test_plans_wait_for_a_change_of_the_topic_before_acknowledgements_that_were_asked_for_later(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    assert await shared.plan(9, [1], [7]) == [1]
    gate, ending = one.topic("t").gate, asyncio.Event()
    changing = one.call(gate.change(ending.wait))
    await one.until(lambda: not gate.is_open)
    plans = [asyncio.ensure_future(shared.plan(9, entries, [7] * len(entries))) for entries in ([2, 3], [1])]
    await asyncio.sleep(0)
    acknowledged = shared.acknowledge(planned(9, [1]))
    ending.set()
    await changing
    assert [await plan for plan in plans] == [[1, 1], [0]]
    assert await acknowledged == 0
    assert await shared.nothing_more()
    assert len(shared.stream.state.in_flight) == 2


# ---- negative acknowledgements


async def test_later_rows_of_a_key_are_taken_back_and_wait_for_the_nacked_one(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky(nack_order=NackOrder.BLOCK_KEY))
    await add(one, 1, range(5), [7, 7, 8, 7, 8])
    rows = await shared.next(5)
    assert await shared.nack([rows[1]], 10_000) == Counts(0, 0)
    assert [(each.consumer, each.entry) for each in shared.taken_back] == [(1, 3)], "before it is answered"
    assert await shared.acknowledge([rows[3]]) == 1, "it is not held any more"
    assert await shared.acknowledge([rows[0], rows[2]]) == 0
    await add(one, 1, [5, 6], [7, 8])
    assert [each.entry for each in await shared.next(1)] == [6]
    assert await shared.nothing_more(for_s=5)
    rows = await shared.next(3)
    assert [(each.entry, each.row.redeliveries) for each in rows] == [(1, 1), (3, 0), (5, 0)]
    counter = one.metrics.registry.get_sample_value("tarry_key_shared_taken_back_rows_total", {"topic": "t"})
    assert counter == 1


async def test_an_acknowledgement_right_behind_a_nack_of_an_earlier_row_of_its_key_is_ignored(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky(nack_order=NackOrder.BLOCK_KEY))
    await add(one, 1, [1, 2, 3], [7, 7, 8])
    rows = await shared.next(3)
    nacked, acknowledged = shared.nack(rows[:1], 1_000), shared.acknowledge(rows[1:])
    assert await nacked == Counts(0, 0)
    assert await acknowledged == 1
    assert [each.entry for each in await shared.next(2)] == [1, 2]


async def test_where_nacked_rows_are_skipped_the_later_ones_go_on(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    await add(one, 1, range(3), [7, 7, 7])
    rows = await shared.next(3)
    await shared.nack([rows[0]], 5_000)
    assert shared.taken_back == []
    assert await shared.acknowledge(rows[1:]) == 0
    await add(one, 1, [3], [7])
    assert [each.entry for each in await shared.next(2)] == [3, 0]


async def test_a_key_waits_for_a_nacked_row_no_longer_than_its_policy_says(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = sticky(nack_order=NackOrder.BLOCK_KEY, nack_block_max_ms=10_000)
    shared = await open_by_key(one, [consumer(1, ALL)], policy=policy)
    await add(one, 1, range(2), [7, 7])
    rows = await shared.next(2)
    nacked_s = machines.loop.time()
    await shared.nack([rows[0]], FAR_MS)
    (row,) = await shared.next(1)
    assert row.entry == 1
    assert 10 <= machines.loop.time() - nacked_s <= 12


async def test_a_dead_letter_makes_way_for_its_key(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = SubscriptionPolicy(
        nack_precision_bits=0,
        max_redeliver_count=1,
        key_shared=KeySharedPolicy(selector=HashSelector.STICKY, nack_order=NackOrder.BLOCK_KEY),
    )
    shared = await open_by_key(one, [consumer(1, ALL)], policy=policy)
    await add(one, 1, range(2), [7, 7])
    rows = await shared.next(2)
    await shared.nack(rows[:1], 1_000)
    again = await shared.next(2)
    assert [each.entry for each in again] == [0, 1]
    assert await shared.nack(again[:1], 1_000) == Counts(0, 1)
    assert [each.entry for each in shared.taken_back] == [1]
    assert await shared.acknowledge(again[1:]) == 0
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_rows_that_time_out_are_nacked_and_take_back_as_well(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = constant(
        1_000,
        ack_timeout_ms=5_000,
        key_shared=KeySharedPolicy(selector=HashSelector.STICKY, nack_order=NackOrder.BLOCK_KEY),
    )
    shared = await open_by_key(one, [consumer(1, ALL)], policy=policy)
    await add(one, 1, [0], [7])
    await shared.next(1)
    await asyncio.sleep(3)
    await add(one, 1, [1, 2], [7, 8])
    rows = await shared.next(2)
    assert await shared.extend(rows) == 0
    await one.until(lambda: bool(shared.taken_back))
    assert [each.entry for each in shared.taken_back] == [1]
    again = await shared.next(2)
    assert [(each.entry, each.row.redeliveries) for each in again] == [(0, 1), (1, 0)]
    assert await shared.extend([*again, rows[1]]) == 0, "the other one was extended"
    assert await shared.acknowledge([*again, rows[1]]) == 0
    assert await shared.extend(again) == 2


async def test_a_planned_position_that_is_nacked_comes_back_as_a_row(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky(nack_order=NackOrder.BLOCK_KEY))
    assert await shared.plan(9, [1, 2], [HALF, HALF]) == [2, 2]
    assert await shared.nack(planned(9, [1]), 2_000) == Counts(0, 0)
    assert [(each.consumer, each.entry) for each in shared.taken_back] == [(2, 2)]
    assert (await stats(one)).subscriptions[0].nacked == 1
    rows = await shared.next(2)
    assert [(each.consumer, each.entry, each.row.redeliveries) for each in rows] == [(2, 1, 1), (2, 2, 0)]
    assert await shared.acknowledge(rows) == 0
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.in_flight, found.waiting) == (0, 0, 0)


async def test_keys_of_rows_that_were_nacked_before_are_blocked_from_the_beginning(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky(nack_order=NackOrder.BLOCK_KEY))
    await add(one, 1, range(3), [7, 7, 8])
    rows = await shared.next(3)
    await shared.nack(rows[:1], 20_000)
    one.kill()
    two = await machines.served_by("one")
    again = await open_by_key(two, [consumer(1, ALL)])
    assert [each.entry for each in await again.next(1)] == [2]
    assert await again.nothing_more(for_s=10)
    assert [each.entry for each in await again.next(2)] == [0, 1]


# ---- types


async def test_all_streams_of_a_subscription_are_of_one_type(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    listener = await dispatcher(one, policy=sticky())
    with pytest.raises(Conflict, match="is open as SHARED"):
        await open_by_key(one, [consumer(1, ALL)])
    listener.stream.close()
    shared = await open_by_key(one, [consumer(1, ALL)])
    with pytest.raises(Conflict, match="is open as KEY_SHARED"):
        await dispatcher(one, policy=None)
    with pytest.raises(Conflict, match="is open as KEY_SHARED"):
        await get(one)
    shared.stream.close()
    await add(one, 1, [1], [7])
    (leased,) = rows_of(await get(one, wait_ms=1_000))
    with pytest.raises(Conflict, match="leased"):
        await open_by_key(one, [consumer(1, ALL)])
    await one.call(one.engine.requests.acknowledge("t", "s", held([leased])))
    waiting = get(one, wait_ms=5_000)
    await asyncio.sleep(1)
    with pytest.raises(Conflict, match="leased or being leased"):
        await open_by_key(one, [consumer(1, ALL)])
    assert rows_of(await waiting) == []
    shared = await open_by_key(one, [consumer(1, ALL)])
    await add(one, 1, [2], [7])
    assert [each.entry for each in await shared.next(1)] == [2]
    shared.stream.close()
    (leased,) = rows_of(await get(one, wait_ms=1_000))
    assert leased[1] == 2, "nothing of the sharing is left"


async def test_how_keys_are_shared_changes_when_no_stream_is_open(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    first = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    await update(one, by_key(selector=HashSelector.AUTO_SPLIT))
    second = await open_by_key(one, [])
    with pytest.raises(InvalidArgument, match="hash_ranges"):
        second.stream.add_consumer(consumer(1))
    assert (await in_force(one)).selector is HashSelector.STICKY
    first.stream.close()
    second.stream.close()
    third = await open_by_key(one, [consumer(1)])
    assert (await in_force(one)).selector is HashSelector.AUTO_SPLIT
    with pytest.raises(InvalidArgument, match="hash_ranges"):
        third.stream.add_consumer(consumer(2, ALL))


async def in_force(daemon: Daemon) -> KeySharedPolicy:
    page = await daemon.call(daemon.engine.requests.list_consumers("t", "s", 0, 0))
    assert page.key_shared is not None
    return page.key_shared.policy
