"""What dispatchers of KEY_SHARED subscriptions hold from before, under this owner or a former one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from daemon.errors import InvalidArgument, QuotaExceeded, TarryError
from storage_backends.formats.manifest import HashSelector
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_places import JOURNAL
from tests.daemon._support.calling import stats
from tests.daemon._support.key_dispatching import (
    HALF,
    HASHES,
    KeyDispatcher,
    Sent,
    add,
    by_key,
    claim_of,
    consumer,
    halves,
    open_by_key,
    planned,
    sticky,
)
from tests.daemon._support.nacking import MINUTE_MS, dispatcher

ALL = (0, HASHES - 1)
FAR_MS = 3_600_000


async def test_what_consumers_held_under_a_former_owner_they_hold_on(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(permits=3), policy=sticky())
    await add(one, 1, range(8), [7, HALF] * 4)
    rows = await shared.next(6)
    await shared.acknowledge(rows[:1])
    one.kill()
    two = await machines.served_by("one")
    again = await open_by_key(two, halves(), held=[claim_of(each) for each in rows])
    assert (again.stream.held, again.stream.not_held.tolist()) == (5, [0])
    assert [(each.consumer, each.entry) for each in await again.next(2)] == [(1, 6), (2, 7)]
    assert await again.acknowledge([*rows[1:], *again.got]) == 0
    assert (await stats(two)).subscriptions[0].backlog == 0


async def test_who_comes_later_does_not_hold_what_others_have_gone_on_with(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    policy = by_key(selector=HashSelector.AUTO_SPLIT)
    first = await open_by_key(one, [consumer(1)], policy=policy)
    second = await open_by_key(one, [consumer(5)])
    await add(one, 1, range(4), [7, 7, HASHES - 1, HASHES - 1])
    await one.until(lambda: len(first.got) + len(second.got) == 4)
    one.kill()
    two = await machines.served_by("one")
    alone = await open_by_key(two, [consumer(1)], held=[claim_of(each) for each in first.got])
    assert alone.stream.held == 2
    await alone.next(2)
    late = await open_by_key(two, [consumer(5)], held=[claim_of(each) for each in second.got])
    assert (late.stream.held, late.stream.not_held.tolist()) == (0, [0, 1])
    assert await alone.acknowledge([*first.got, *alone.got]) == 0


async def test_planned_positions_are_held_on_and_planned_again(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky())
    assert await shared.plan(9, range(4), [7, HALF, 7, HALF]) == [1, 2, 1, 2]
    await add(one, 9, [50], [7], FAR_MS)
    one.kill()
    two = await machines.served_by("one")
    declared = [(1, (9, 0, 0), 7), (2, (9, 1, 0), HALF), (1, (9, 50, 0), 7)]
    again = await open_by_key(two, halves(), held=declared)
    assert (again.stream.held, again.stream.not_held.tolist()) == (2, [2]), "what has a row comes when it is due"
    assert await again.plan(9, range(4), [7, HALF, 7, HALF]) == [1, 2, 1, 2]
    assert await again.nothing_more()
    assert await again.acknowledge(planned(9, range(4))) == 0
    assert (await stats(two)).subscriptions[0].in_flight == 0


async def test_a_nacked_message_that_is_held_is_its_row(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky())
    await shared.plan(9, [1], [7])
    await shared.nack(planned(9, [1]), 500)
    rows = await shared.next(1)
    one.kill()
    two = await machines.served_by("one")
    again = await open_by_key(two, halves(), held=[claim_of(each) for each in rows])
    assert again.stream.held == 1
    assert await again.nothing_more()
    assert await again.acknowledge(rows) == 0
    assert (await stats(two)).subscriptions[0].backlog == 0


async def test_shared_streams_say_which_positions_are_not_held_as_well(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    listener = await dispatcher(one)
    await one.add("t", 1, range(5), delay_ms=0)
    rows = await listener.next(5)
    await listener.acknowledge(rows[1:2])
    await listener.nack(rows[3:4], MINUTE_MS)
    listener.stream.close()
    again = await dispatcher(one, policy=None, held=[*rows, (7, 7, 7), rows[0]])
    assert (again.stream.held, again.stream.not_held.tolist()) == (3, [1, 3, 5, 6])


async def test_bad_declarations_are_refused(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await open_by_key(one, [], policy=sticky())
    with pytest.raises(InvalidArgument, match=r"held_consumer_id\[1\] is 3"):
        await open_by_key(one, [consumer(1, ALL)], held=[(1, (1, 1, 5), 0), (3, (1, 1, 5), 0)])
    assert (await stats(one)).subscriptions[0].dispatchers == 1


async def test_of_two_claims_for_one_position_the_first_counts(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, [1], [7])
    (row,) = await shared.next(1)
    assert await shared.plan(9, [1], [7]) == [1]
    shared.stream.close()
    held_row, held_plan = claim_of(row), (1, (9, 1, 0), 7)
    again = await open_by_key(one, halves(), held=[held_row, held_plan, held_plan, held_row])
    assert (again.stream.held, again.stream.not_held.tolist()) == (2, [2, 3])
    assert await again.acknowledge([row, *planned(9, [1])]) == 0
    found = (await stats(one)).subscriptions[0]
    assert (found.backlog, found.in_flight) == (0, 0)


async def test_two_rows_of_one_position_are_both_held(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    shared = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, [1], [7])
    await one.add("t", 1, [1], delay_ms=1, subscription="s")
    rows = await shared.next(2)
    one.kill()
    two = await machines.served_by("one")
    again = await open_by_key(two, halves(), held=[claim_of(each) for each in rows])
    assert again.stream.held == 2
    assert await again.acknowledge(rows) == 0
    assert (await stats(two)).subscriptions[0].backlog == 0


# ---- callers that go away


async def test_a_topic_that_ends_while_a_stream_opens_leaves_nothing(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")
    shared = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, range(40), [7] * 40)
    rows = await shared.next(40)
    one.kill()
    two = await machines.served_by("one")
    opening = two.call(_opened(two, rows))
    deleting = two.call(two.engine.requests.delete_topic("t"))
    await deleting
    with pytest.raises(TarryError):
        (await opening).stream.add_consumer(consumer(9, (1, 1)))


async def _opened(daemon: Daemon, rows: Sequence[Sent]) -> KeyDispatcher:
    return await open_by_key(daemon, halves(), held=[claim_of(each) for each in rows])


async def test_streams_are_limited(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "limits.streams_per_subscription_max=2")
    policy = by_key(selector=HashSelector.AUTO_SPLIT)
    await open_by_key(one, [consumer(1)], policy=policy)
    await open_by_key(one, [consumer(1)])
    with pytest.raises(QuotaExceeded, match="2 open streams"):
        await open_by_key(one, [consumer(1)])


async def test_a_hash_waits_for_an_acknowledgement_of_who_had_it_before_though_all_have_gone(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one")
    first = await open_by_key(one, [consumer(1, permits=1)], policy=by_key())
    await add(one, 1, range(2), [7, 7])
    rows = await first.next(1)
    held = one.pause("put_if_absent", JOURNAL)
    acknowledging = first.acknowledge(rows)
    await held.reached()
    first.stream.close()
    opening = asyncio.ensure_future(open_by_key(one, [consumer(1)]))
    await asyncio.sleep(1)
    assert not opening.done()
    held.release()
    second = await opening
    assert [each.entry for each in await second.next(1)] == [1]
    await asyncio.wait([acknowledging])
