"""KEY_SHARED subscriptions: consumers that come and go, on one stream or several, and who receives what."""

from __future__ import annotations

from tests.daemon.engine.key_dispatching import (
    HALF,
    HASHES,
    add,
    consumer,
    halves,
    open_by_key,
    sticky,
)
from tests.support.engine_fixture import EngineFixture


async def test_every_row_goes_to_the_consumer_that_has_its_hash(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    dispatcher = await open_by_key(one, halves(), policy=sticky())
    await add(one, 1, range(10), [7, HALF, 8, HALF + 1, 7, HASHES - 1, 0, HALF, 7, HALF])
    rows = await dispatcher.next(10)
    assert dispatcher.of(1) == [0, 2, 4, 6, 8]
    assert dispatcher.of(2) == [1, 3, 5, 7, 9]
    assert await dispatcher.acknowledge(rows) == 0
    assert await dispatcher.acknowledge(rows) == 10


async def test_one_without_permits_never_blocks_others(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    consumers = [consumer(1, (0, HALF - 1), permits=2), consumer(2, (HALF, HASHES - 1))]
    dispatcher = await open_by_key(one, consumers, policy=sticky())
    await add(one, 1, range(100), [7, HALF] * 50)
    await dispatcher.next(52)
    assert dispatcher.of(1) == [0, 2]
    assert dispatcher.of(2) == list(range(1, 100, 2))
    assert await dispatcher.nothing_more()
    dispatcher.stream.grant(3, 1)
    assert [each.entry for each in await dispatcher.next(3)] == [4, 6, 8]
    assert await dispatcher.nothing_more()
    dispatcher.stream.grant(3, 77)
    assert await dispatcher.nothing_more(), "there is no such consumer"
