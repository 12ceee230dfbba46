"""KEY_SHARED subscriptions: consumers that come and go, on one stream or several, and who receives what."""

from __future__ import annotations

import asyncio

import pytest

from daemon.errors import InvalidArgument, NotFound, QuotaExceeded, TarryError
from daemon.runtime.failure_scope import TopicFailed
from daemon.topic import key_shared_streams
from storage_backends.formats.manifest import HashSelector, KeyOrder
from tests._support.engine_fixture import Daemon, EngineFixture
from tests.daemon._support.calling import stats
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
from tests.daemon.topic._support.full_outlet import FullOutlet

LOW, HIGH = (0, HALF - 1), (HALF, HASHES - 1)
ALL = (0, HASHES - 1)


async def two_streams(one: Daemon) -> tuple[KeyDispatcher, KeyDispatcher]:
    """Consumer 1 of the first has the lower half of the hashes, consumer 1 of the second the upper one."""
    first = await open_by_key(one, [consumer(1, LOW)], policy=sticky())
    return first, await open_by_key(one, [consumer(1, HIGH)])


# ---- who receives what


async def test_every_row_goes_to_the_consumer_that_has_its_hash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, range(10), [7, HALF, 8, HALF + 1, 7, HASHES - 1, 0, HALF, 7, HALF])
    rows = await dispatcher.next(10)
    assert dispatcher.of(1) == [0, 2, 4, 6, 8]
    assert dispatcher.of(2) == [1, 3, 5, 7, 9]
    assert await dispatcher.acknowledge(rows) == 0
    assert await dispatcher.acknowledge(rows) == 10
    assert (await stats(one)).subscriptions[0].backlog == 0


async def test_what_there_is_no_room_to_send_waits_and_stays_in_order(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(), policy=sticky())
    dispatcher.stream.outlet = outlet = FullOutlet()
    await add(one, 1, range(6), [7, HALF, 7, HALF, 7, HALF])
    await asyncio.sleep(10)
    assert dispatcher.got == []
    outlet.make_room()
    await dispatcher.next(6)
    assert (dispatcher.of(1), dispatcher.of(2)) == ([0, 2, 4], [1, 3, 5])


async def test_rows_come_in_the_order_in_which_they_are_due_and_never_early(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, [1], [7], 3_000)
    await add(one, 1, [2], [7], 1_000)
    await add(one, 1, [3], [7], 2_000)
    rows = await dispatcher.next(3)
    assert [each.entry for each in rows] == [2, 3, 1]
    assert all(each.row.deliver_at_ms <= each.row.at_ms for each in rows)


async def test_one_without_permits_never_blocks_others(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    consumers = [consumer(1, LOW, permits=2), consumer(2, HIGH)]
    dispatcher = await open_by_key(one, consumers, policy=sticky())
    await add(one, 1, range(100), [7, HALF] * 50)
    await dispatcher.next(52)
    assert dispatcher.of(1) == [0, 2]
    assert dispatcher.of(2) == list(range(1, 100, 2))
    assert await dispatcher.nothing_more()
    found = (await stats(one)).subscriptions[0]
    assert (found.consumers, found.waiting, found.in_flight, found.leased) == (2, 48, 52, 0)
    dispatcher.stream.grant(3, 1)
    assert [each.entry for each in await dispatcher.next(3)] == [4, 6, 8]
    assert await dispatcher.nothing_more()
    dispatcher.stream.grant(3, 77)
    assert await dispatcher.nothing_more(), "there is no such consumer"


async def test_a_slow_reader_is_not_buffered_for_without_end_and_holds_nobody_up(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    slow, other = await two_streams(one)
    slow.going_on.clear()
    rows = 3 * key_shared_streams.ROWS_MAX
    for first in range(0, rows, 10_000):
        await add(one, 1, range(first, first + 10_000), [7, HALF] * 5_000)
    await other.next(rows // 2)
    assert slow.got == []
    assert key_shared_streams.ROWS_MAX <= slow.stream.outbox.rows < 2 * key_shared_streams.ROWS_MAX
    slow.going_on.set()
    await slow.next(rows // 2)
    assert slow.of(1) == list(range(0, rows, 2))
    assert await slow.nothing_more()


async def test_a_backlog_larger_than_memory_holds_comes_in_order(machines: EngineFixture) -> None:
    one = await machines.served_by(
        "one", "delivery.ready_rows_max=1000", "bucket.min_index_count_per_bucket=500", "bucket.rows_max=500"
    )
    dispatcher = await open_by_key(one, [consumer(1, LOW, permits=0), consumer(2, HIGH)], policy=sticky())
    for first in range(0, 6_000, 500):
        await add(one, 1, range(first, first + 500), [7, HALF] * 250)
    rows = await dispatcher.next(3_000)
    assert dispatcher.of(2) == list(range(1, 6_000, 2))
    await dispatcher.acknowledge(rows)
    dispatcher.stream.grant(10_000, 1)
    rows = await dispatcher.next(3_000)
    assert dispatcher.of(1) == list(range(0, 6_000, 2))
    await dispatcher.acknowledge(rows)
    assert (await stats(one)).subscriptions[0].backlog == 0


# ---- joining and leaving


async def test_a_hash_moves_when_the_old_consumer_holds_nothing_of_it_and_others_do_not_wait(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, [consumer(1)], policy=by_key(selector=HashSelector.AUTO_SPLIT))
    await add(one, 1, range(4), [7, 8, HASHES - 1, HASHES - 2])
    held = await dispatcher.next(4)
    dispatcher.stream.add_consumer(consumer(2))
    await add(one, 1, range(4, 8), [7, 8, HASHES - 1, HASHES - 2])
    await add(one, 1, [8, 9], [9, HASHES - 3])
    rows = await dispatcher.next(4)
    moved = [each for each in rows if each.consumer == 2]
    stayed = [each for each in rows if each.consumer == 1]
    assert (len(moved), len(stayed)) == (1, 3), "one half moved, and what is held of it waits"
    assert await dispatcher.nothing_more()
    taken = [each for each in held if (each.row.key_hash < HALF) == (moved[0].row.key_hash < HALF)]
    assert await dispatcher.acknowledge(taken[:1]) == 0
    (now,) = await dispatcher.next(1)
    assert (now.consumer, now.row.key_hash) == (2, taken[0].row.key_hash)
    assert await dispatcher.nothing_more()
    assert await dispatcher.acknowledge(taken[1:]) == 0
    (now,) = await dispatcher.next(1)
    assert (now.consumer, now.row.key_hash) == (2, taken[1].row.key_hash)


async def test_what_a_consumer_that_leaves_held_goes_to_another_in_the_order_of_positions(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(
        one, [consumer(1), consumer(2, permits=0)], policy=by_key(selector=HashSelector.AUTO_SPLIT)
    )
    await add(one, 2, range(50), range(0, HASHES, HASHES // 50 + 1), 0)
    await add(one, 1, range(50), range(0, HASHES, HASHES // 50 + 1), 5)
    await dispatcher.nothing_more()
    held = len(dispatcher.got)
    dispatcher._waited = held
    await dispatcher.stream.remove_consumer(1)
    dispatcher.stream.grant(1_000, 2)
    rows = await dispatcher.next(100)
    assert {each.consumer for each in rows} == {2}
    positions = [(each.row.ledger, each.entry) for each in rows]
    again = [each for each in positions if each in {(sent.row.ledger, sent.entry) for sent in dispatcher.got[:held]}]
    assert positions[: len(again)] == again == sorted(again)


async def test_a_consumer_that_left_gets_nothing_that_was_on_its_way(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, [consumer(1)], policy=by_key(selector=HashSelector.AUTO_SPLIT))
    dispatcher.going_on.clear()
    await add(one, 1, [0], [7])
    stream = dispatcher.stream
    await one.until(lambda: len(stream.state.in_flight) == 1 and not stream.outbox)
    await add(one, 1, range(1, 5), [7] * 4)
    await one.until(lambda: stream.outbox.rows == 4)
    left = one.call(_left(dispatcher, 1))
    await asyncio.sleep(1)
    assert not left.done(), "it is answered when everything before is out"
    dispatcher.stream.add_consumer(consumer(1, name="another"))
    dispatcher.going_on.set()
    await left
    rows = await dispatcher.next(6)
    assert [each.entry for each in rows] == [0, 0, 1, 2, 3, 4], "each but the first once, to another of that number"
    assert await dispatcher.nothing_more()


async def _left(dispatcher: KeyDispatcher, consumer_id: int) -> None:
    await dispatcher.stream.remove_consumer(consumer_id)


async def test_consumers_of_two_streams_share_the_hashes(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    first, second = await two_streams(one)
    await add(one, 1, range(100), [7, HALF] * 50)
    rows = await first.next(50)
    await second.next(50)
    assert first.of(1) == list(range(0, 100, 2))
    assert second.of(1) == list(range(1, 100, 2))
    assert await second.acknowledge(rows) == 0, "positions are named, not consumers"


async def test_a_stream_that_dies_returns_what_its_consumers_held_in_the_order_of_positions(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    policy = by_key(selector=HashSelector.AUTO_SPLIT)
    first = await open_by_key(one, [consumer(1), consumer(2)], policy=policy)
    await add(one, 2, range(20), [7] * 20)
    await add(one, 1, range(20), [8] * 20)
    await first.next(40)
    second = await open_by_key(one, [consumer(1)])
    first.stream.close()
    rows = await second.next(40)
    positions = [(each.row.ledger, each.entry) for each in rows]
    assert positions == [(ledger, entry) for ledger in (1, 2) for entry in range(20)]
    assert {each.row.redeliveries for each in rows} == {0}
    await second.acknowledge(rows)
    second.stream.close()
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.consumers, found.dispatchers) == (0, 0, 0)


async def test_what_is_left_when_all_streams_closed_is_there_for_the_next_one(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, [consumer(1, LOW), consumer(2, HIGH, permits=0)], policy=sticky())
    await add(one, 1, range(10), [7, HALF] * 5)
    await dispatcher.next(5)
    dispatcher.stream.close()
    again = await open_by_key(one, [consumer(9, ALL)])
    assert [each.entry for each in await again.next(10)] == list(range(10))


@pytest.mark.parametrize("order", list(KeyOrder))
async def test_a_consumer_by_name_comes_back_as_another_instance(machines: EngineFixture, order: KeyOrder) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, [consumer(1, name="worker")], policy=by_key(order=order))
    dispatcher.stream.add_consumer(consumer(2, name="worker"))
    page = await one.call(one.engine.requests.list_consumers("t", "s", 0, 0))
    assert [(each.consumer_id, each.stats.name) for each in page.consumers] == [(1, "worker"), (2, "worker")]
    assert len({each.stats.number for each in page.consumers}) == 2


# ---- what is refused


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ([consumer(0, LOW)], "consumer_id is 0"),
        ([consumer(1, LOW), consumer(1, HIGH)], "consumer_id is 1 for two"),
        ([consumer(3, LOW, name="x" * 256)], "name of consumer 3 has 256 bytes"),
        ([consumer(3, LOW, address="ü" * 128)], "address of consumer 3 has 256 bytes"),
        ([consumer(3, (5, 4))], "hash_ranges of consumer 3: 5 to 4"),
        ([consumer(3, (0, HASHES))], "hash_ranges of consumer 3: 0 to 65536"),
        ([consumer(3, LOW), consumer(4, (HALF - 1, HALF))], "32767"),
        ([consumer(3)], "hash_ranges"),
    ],
    ids=["no id", "an id twice", "a long name", "a long address", "backwards", "too high", "overlapping", "no range"],
)
async def test_bad_consumers_are_refused_and_nothing_is_left_of_them(
    machines: EngineFixture, bad: list[object], says: str
) -> None:
    one = await machines.served_by("one")
    with pytest.raises(InvalidArgument, match=says):
        await open_by_key(one, bad, policy=sticky())  # type: ignore[arg-type]
    assert (await stats(one)).subscriptions[0].dispatchers == 0
    dispatcher = await open_by_key(one, [consumer(7, (40_000, 40_000))])
    for each in bad:
        if len(bad) == 1:
            with pytest.raises(InvalidArgument, match=says):
                dispatcher.stream.add_consumer(each)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="consumer_id is 7"):
        dispatcher.stream.add_consumer(consumer(7, (50_000, 50_000)))
    with pytest.raises(InvalidArgument, match="consumer_id is 8"):
        await dispatcher.stream.remove_consumer(8)
    dispatcher.stream.add_consumer(consumer(8, LOW))
    await add(one, 1, [1], [7])
    assert [each.consumer for each in await dispatcher.next(1)] == [8]


async def test_consumers_of_a_subscription_are_limited(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.consumers_per_subscription_max=3")
    policy = by_key(selector=HashSelector.AUTO_SPLIT)
    dispatcher = await open_by_key(one, [consumer(1), consumer(2)], policy=policy)
    with pytest.raises(QuotaExceeded, match="has 2 consumers and 2 would join; the limit is 3"):
        await open_by_key(one, [consumer(1), consumer(2)])
    dispatcher.stream.add_consumer(consumer(3))
    with pytest.raises(QuotaExceeded, match="limit is 3"):
        dispatcher.stream.add_consumer(consumer(4))
    await dispatcher.stream.remove_consumer(1)
    dispatcher.stream.add_consumer(consumer(1))


# ---- ends


async def test_deleting_the_subscription_ends_its_streams(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(permits=1), policy=sticky())
    await add(one, 1, range(10), [7, HALF] * 5)
    await dispatcher.next(2)
    await one.call(one.engine.requests.delete_subscription("t", "s"))
    await one.until(lambda: dispatcher.ended is not None)
    assert isinstance(dispatcher.ended, NotFound)
    for asked in (dispatcher.plan(1, [1]), dispatcher.acknowledge(dispatcher.got)):
        with pytest.raises(NotFound):
            await asked
    with pytest.raises(TarryError):
        dispatcher.stream.add_consumer(consumer(5, (1, 1)))


async def test_a_bug_in_sharing_ends_the_streams_and_not_the_daemon(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(), policy=sticky())
    state = dispatcher.stream.state
    assert state.key_shared is not None
    monkeypatch.setattr(type(state.key_shared), "hand_out", lambda *_, **__: 1 / 0)
    await add(one, 1, range(10), [7, HALF] * 5)
    await one.until(lambda: dispatcher.ended is not None)
    assert isinstance(dispatcher.ended, TopicFailed)
    monkeypatch.undo()
    again = await open_by_key(one, halves())
    await again.next(10)
