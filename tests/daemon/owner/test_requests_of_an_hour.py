"""What a root costs on S3, alone, beside a standby and under small loads, by its requests in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from daemon.owner.standby import LISTING_S
from daemon.runtime.environment import TAIL_REQUESTS_MAX
from storage_backends.formats import names
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver
from tests._support.fault_store import Call, Fault
from tests._support.request_prices import dollars_a_month

SETTINGS = ("daemon.shards=16", "journal.commit_latency_ms=500")
KINDS = {
    "get_with_metadata": "GET",
    "get_range": "GET",
    "head": "HEAD",
    "list": "LIST",
    "put": "PUT",
    "put_if_absent": "PUT",
    "delete": "DELETE",
}


@contextmanager
def counted(daemons: Sequence[Daemon]) -> Iterator[Counter[str]]:
    """The requests of the daemons while the block runs, by kind."""
    requests: Counter[str] = Counter()

    def count(call: Call) -> Fault:
        requests[KINDS[call.operation]] += 1
        return Fault.NONE

    for daemon in daemons:
        daemon.decide = count
    yield requests
    for daemon in daemons:
        daemon.decide = daemon.script


async def test_an_idle_root_costs_five_dollars_a_month(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SETTINGS)
    await asyncio.sleep(60.0)
    with counted([one]) as requests:
        await asyncio.sleep(1_200.0)
    assert requests["PUT"] == 400, "a heartbeat each 3 s is nearly all of the price"
    assert dollars_a_month({kind: 3 * count for kind, count in requests.items()}) <= 5.0


async def test_a_daemon_that_is_often_started_does_not_list_its_shards_more_often(machines: EngineFixture) -> None:
    shards = {names.shard_prefix(shard) for shard in range(16)}
    listings = 0
    for _ in range(4):
        one = await machines.served_by("one", *SETTINGS)
        await asyncio.sleep(600.0)
        listings += sum(call.operation == "list" and call.key in shards for call in one.store.calls)
        one.kill()
    assert 0 < listings <= 8, "each of 16 shards in six hours, which is 1.8 times in forty minutes"


async def test_a_root_with_a_standby_costs_twelve_dollars_a_month(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SETTINGS)
    two = await machines.daemon("two", *SETTINGS).start()
    await asyncio.sleep(60.0)
    with counted([one]) as of_owner, counted([two]) as of_standby:
        await asyncio.sleep(1_200.0)
    assert of_standby["LIST"] == 1_200.0 / LISTING_S
    assert of_standby["GET"] == 1_200 + 20, "a heartbeat each second, and the hints of mergers each minute"
    assert dollars_a_month({kind: 3 * count for kind, count in (of_owner + of_standby).items()}) <= 12.0


async def costs_at_most(
    dollars: float, machines: EngineFixture, *, topics: int, rows_a_second: int, seconds: int
) -> None:
    """Add rows to each topic one by one; every row is received and acknowledged, for so many dollars a month."""
    machines.tail_work_max = TAIL_REQUESTS_MAX
    one = await machines.served_by("one", *SETTINGS)
    receivers = [await one.receiver(f"t{topic}") for topic in range(topics)]
    acknowledging = [asyncio.create_task(_acknowledged(each, rows_a_second * seconds)) for each in receivers]
    with counted([one]) as requests:
        adding = [asyncio.create_task(_added(one, topic, topics, rows_a_second, seconds)) for topic in range(topics)]
        await asyncio.sleep(seconds)
    hours = seconds / 3_600.0
    assert dollars_a_month({kind: count / hours for kind, count in requests.items()}) <= dollars
    await asyncio.gather(*adding, *acknowledging)
    assert not any(each.early for each in receivers)


async def _added(one: Daemon, topic: int, topics: int, rows_a_second: int, seconds: int) -> None:
    """Topics take turns. Rows are due 1 to 8 seconds later."""
    await asyncio.sleep(topic / topics / rows_a_second)
    adds = []
    for row in range(rows_a_second * seconds):
        adds.append(one.add(f"t{topic}", 1, [row], delay_ms=1_000 + row * 7_919 % 7_000))
        await asyncio.sleep(1 / rows_a_second)
    assert sum(outcome.accepted for outcome in await asyncio.gather(*adds)) == rows_a_second * seconds


async def _acknowledged(receiver: Receiver, rows: int) -> None:
    done = 0
    while done < rows:
        received = await receiver.received(done + 1)
        new, done = received[done:], len(received)
        assert await receiver.acknowledge(new) == 0
    assert len(receiver.positions) == rows


async def test_ten_rows_a_second_cost_forty_dollars_a_month(machines: EngineFixture) -> None:
    await costs_at_most(40.0, machines, topics=1, rows_a_second=10, seconds=60)


async def test_a_row_a_second_in_each_of_a_hundred_topics_costs_a_hundred_dollars_a_month(
    machines: EngineFixture,
) -> None:
    await costs_at_most(100.0, machines, topics=100, rows_a_second=1, seconds=6)
