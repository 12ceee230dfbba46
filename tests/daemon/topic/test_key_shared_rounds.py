"""When rows are shared out by key, in which portions, and what is counted of it."""

from __future__ import annotations

import asyncio

import pytest

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.index.position_keys import Mask
from daemon.core.key_shared.waiting_rows import EvictedSlots
from daemon.metrics import TopicNumbers
from daemon.owner.requests import Requests
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic.open_streams import StreamClosed
from storage_backends.formats.manifest import HashSelector, NackOrder
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.outcomes import Counts, counts_of
from tests.daemon._support.key_dispatching import (
    HALF,
    HASHES,
    KeyDispatcher,
    add,
    by_key,
    consumer,
    halves,
    open_by_key,
    sticky,
)
from tests.daemon._support.nacking import nack_of

LOW, HIGH = (0, HALF - 1), (HALF, HASHES - 1)
ALL = (0, HASHES - 1)


def sample(daemon: Daemon, name: str, **labels: str) -> float | None:
    return daemon.metrics.registry.get_sample_value(f"tarry_key_shared_{name}", {"topic": "t", **labels})


async def test_many_changes_of_one_turn_make_one_round(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [], policy=sticky())
    await add(one, 1, range(100), range(100))
    await asyncio.sleep(1)
    core = shared.stream.state.key_shared
    assert core is not None
    limits: list[int] = []
    hand_out = type(core).hand_out

    def counted(self: object, limit: int, *, elapsed_ms: int) -> object:
        limits.append(limit)
        return hand_out(core, limit, elapsed_ms=elapsed_ms)

    monkeypatch.setattr(type(core), "hand_out", counted)
    await one.call(changed_at_once(shared))
    rows = await shared.next(100)
    assert {each.consumer for each in rows} == set(range(1, 101))
    assert len(limits) <= 2, "one, and one more that finds nothing"


async def changed_at_once(shared: KeyDispatcher) -> None:
    for number in range(100):
        shared.stream.add_consumer(consumer(number + 1, (number, number), permits=0))
        shared.stream.grant(1, number + 1)


async def test_others_have_their_turn_between_portions(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(permits=0), policy=sticky())
    for first in range(0, 20_000, 10_000):
        await add(one, 1, range(first, first + 10_000), [7, HALF] * 5_000)
    await one.until(lambda: shared.stream.state.ready_rows == 20_000)
    turns = 0
    shared.stream.grant(10_000, 1)
    shared.stream.grant(10_000, 2)
    while len(shared.got) < 20_000:
        before = len(shared.got)
        await asyncio.sleep(0)
        turns += 1
        assert len(shared.got) - before <= 10_000
    assert turns > 4


async def test_what_was_let_go_is_not_sought_while_nothing_may_be_handed_out(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one", "delivery.ready_rows_max=10")
    # The third one has permits, so that rows of the others are looked at: they wait, and are let go.
    consumers = [consumer(number, (number, number), permits=number // 3) for number in (1, 2, 3)]
    shared = await open_by_key(one, consumers, policy=sticky())
    state = shared.stream.state
    await add(one, 1, range(12), [1, 2] * 6)
    await one.until(lambda: state.key_shared is not None and state.key_shared.let_go is not None)
    seeks, seek = 0, EvictedSlots.seek

    def counted(self: EvictedSlots, able: Mask, reader: BacklogReader) -> None:
        nonlocal seeks
        seeks += 1
        assert seeks < 100, "each time what is READY is passed over, and it begins again"
        seek(self, able, reader)

    monkeypatch.setattr(EvictedSlots, "seek", counted)
    monkeypatch.setattr(type(one.topic("t").shard), "may_hand_out", False)
    shared.stream.grant(1_000, 1)
    await add(one, 2, [0], [1])
    assert await shared.nothing_more()
    assert (state.ready_rows, seeks, shared.ended) == (1, 0, None)
    monkeypatch.undo()
    assert [(each.row.ledger, each.entry) for each in await shared.next(7)] == [
        *((1, entry) for entry in range(0, 12, 2)),
        (2, 0),
    ]


async def test_what_is_planned_kept_back_and_taken_back_is_counted(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = by_key(selector=HashSelector.AUTO_SPLIT, nack_order=NackOrder.BLOCK_KEY)
    shared = await open_by_key(one, [consumer(1, permits=3)], policy=policy)
    assert await shared.plan(9, range(4), [7, HASHES - 1, 7, 7]) == [1, 1, 1, 0]
    assert (sample(one, "planned_rows_total", outcome="sent"), sample(one, "planned_rows_total", outcome="held")) == (
        3,
        1,
    )
    shared.stream.add_consumer(consumer(2))
    await add(one, 1, [1, 2], [7, HASHES - 1])
    await asyncio.sleep(1)
    assert (sample(one, "blocked_rows_total") or 0) >= 1
    await shared.nack([(9, 0, 0)], 3_600_000)
    assert sample(one, "taken_back_rows_total") == 1
    (numbers,) = await one.call(_numbers(one.engine.requests))
    assert (numbers.key_shared_consumers, numbers.nack_blocked_hashes) == (2, 1)
    assert numbers.draining_hashes == 1
    assert numbers.key_shared_waiting == 4, "one that was taken back, one that was held, and two rows"


async def _numbers(requests: Requests) -> list[TopicNumbers]:
    return list(await requests._topic_numbers())


async def test_what_is_taken_back_from_a_stream_that_closes_in_the_same_turn_is_told_to_nobody(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    policy = sticky(nack_order=NackOrder.BLOCK_KEY)
    first = await open_by_key(one, [consumer(1, LOW)], policy=policy)
    second = await open_by_key(one, [consumer(1, HIGH)])
    await add(one, 1, range(3), [HALF] * 3)
    rows = await second.next(3)
    nacking = one.call(counts_of(first.stream.negative_acknowledge, nack_of([rows[0].row], 2_000)))
    closing = one.call(closed(second))
    assert await nacking == Counts(0, 0)
    await closing
    assert isinstance(second.ended, StreamClosed)
    assert (first.ended, first.taken_back, second.taken_back) == (None, [], [])
    third = await open_by_key(one, [consumer(4, HIGH)])
    assert [each.entry for each in await third.next(3)] == [0, 1, 2]


async def closed(shared: KeyDispatcher) -> None:
    shared.stream.close()


async def test_a_stream_that_closes_while_others_wait_for_it_tells_them(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky())
    await add(one, 1, range(2), [7, 8])
    rows = await shared.next(2)
    shared.going_on.clear()
    await add(one, 1, [2], [9])
    await one.until(lambda: len(shared.stream.state.in_flight) == 3 and not shared.stream.outbox)
    planning = one.call(shared.plan(9, [1]))
    nacking = shared.nack(rows[:1], 1_000)
    await asyncio.sleep(1)
    assert not planning.done()
    assert not nacking.done()
    shared.stream.close()
    with pytest.raises(StreamClosed):
        await planning
    assert await nacking == Counts(0, 0), "it was durable"


async def test_what_cannot_be_read_of_nacked_rows_ends_the_streams(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, [consumer(1, ALL)], policy=sticky(nack_order=NackOrder.BLOCK_KEY))
    await add(one, 1, range(2), [7, 7])
    rows = await shared.next(2)
    await shared.nack(rows[:1], 60_000)
    shared.stream.close()
    tracker = type(shared.stream.state.nacks.freeze())
    monkeypatch.setattr(tracker, "rows", lambda _: 1 / 0)
    again = await open_by_key(one, [consumer(1, ALL)])
    await one.until(lambda: again.ended is not None)
    assert isinstance(again.ended, TopicFailed)
    monkeypatch.undo()
    again = await open_by_key(one, [consumer(1, ALL)])
    assert await again.nothing_more()
    assert [each.entry for each in await again.next(2)] == [0, 1]


async def test_who_has_permits_gets_all_of_its_rows_though_memory_is_full_of_anothers(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "delivery.ready_rows_max=50")
    shared = await open_by_key(one, halves(permits=0), policy=sticky())
    entries, hashes = list(range(600)), [(HALF if entry % 3 else 0) + 1 + entry % 40 for entry in range(600)]
    await add(one, 1, entries, hashes)
    mine = [entry for entry in entries if hashes[entry] < HALF]
    others = [entry for entry in entries if hashes[entry] >= HALF]
    got: list[int] = []
    while len(got) < len(mine):
        # It has no permits again and again.
        shared.stream.grant(7, 1)
        rows = await shared.next(min(7, len(mine) - len(got)))
        got += [each.entry for each in rows]
        await shared.acknowledge(rows)
    assert_in_order(got, hashes)
    assert sorted(got) == mine
    shared.stream.grant(1_000, 2)
    rows = await shared.next(len(others))
    assert_in_order([each.entry for each in rows], hashes)
    assert sorted(each.entry for each in rows) == others


def assert_in_order(entries: list[int], hashes: list[int]) -> None:
    """Entries of one hash ascend."""
    last: dict[int, int] = {}
    for entry in entries:
        assert entry > last.get(hashes[entry], -1)
        last[hashes[entry]] = entry
