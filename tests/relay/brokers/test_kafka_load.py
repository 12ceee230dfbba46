"""Many messages of many partitions, due in any order, while relays come and go: how much is read for each of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tarry
from tests.brokers import kafka_server
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DUE, SOURCE, KafkaTopics, Published
from tests.relay.brokers.test_kills import Outages, ends_after_ms, nothing_is_left, processes

PARTITIONS = 12
SPAN_MS = 60_000
LIMIT_S = 1_500.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("rows", "kept_bytes", "read_for_each"),
    # What is due next lies anywhere. If nothing is kept, some messages are read on to each. If all is kept, each relay
    # reads each message about twice at most, however late it is; if a part is kept, a late relay reads the rest again
    # for each portion.
    [(10_000, 0, 100), (100_000, 64 * 2**20, 20)],
    ids=["nothing is kept", "all is kept"],
)
async def test_few_messages_are_read_for_each_that_is_due_in_any_order(
    tmp_path: Path, rows: int, kept_bytes: int, read_for_each: float, record_property: Callable[[str, object], None]
) -> None:
    if (jars := kafka_server.find()) is None:
        pytest.skip(kafka_server.MISSING)
    directory = tmp_path / "broker"
    directory.mkdir()
    with kafka_server.KafkaServer(jars, directory) as server:
        server.start()
        server.wait_until_loaded()
        broker = KafkaTopics(server, PARTITIONS)
        await broker.set_up()
        told = await load(broker, tmp_path, rows, kept_bytes)
        await broker.close()
    record_property("told", told)
    assert told["read for each"] <= read_for_each


async def load(broker: KafkaTopics, directory: Path, rows: int, kept_bytes: int) -> dict[str, Any]:
    """A relay is killed at a third, and another one joins at two thirds."""
    own = {"kept_bytes = 0": f"kept_bytes = {kept_bytes}"}
    # At most an eighth of the relay's memory is for what is kept.
    relay = f"memory_bytes = {max(256 * 2**20, 8 * kept_bytes)}\n"
    with processes(broker, directory, own=own, relay=relay) as (daemon, one, two):
        due_ms = await published(broker, rows)
        outages = Outages()
        two.start()
        await arrived(broker, rows // 3)
        with outages.lasting():
            one.kill()
        await arrived(broker, 2 * rows // 3)
        with outages.lasting():
            one.start()
        record = await arrived(broker, rows)
        await nothing_is_left(one)
        cpu_s = {each.name: round(each.usage().cpu_s, 1) for each in (daemon, one, two, broker.server)}
        assert (one.terminate(), two.terminate()) == (0, 0)
        record = await broker.read(DUE)
        outages.add_rebalances(one, two)
        repeats = judged(record, due_ms, outages)
        fetched = [figures(each) for each in (one, two)]
    late_ms = sorted(each.at_ms - due_ms[each.body] for each in record)
    read, kept, messages = (
        sum(each[name] for each in fetched) for name in ("read_for_the_rest", "of_these_kept", "messages")
    )
    return {
        "fetched by relays that ended in order": messages,
        "of these kept": kept,
        "read for each": round(read / messages, 2),
        "came again": repeats,
        "ms late, p50, p99": [late_ms[len(late_ms) // 2], late_ms[len(late_ms) * 99 // 100]],
        "CPU seconds since the last start": cpu_s,
    }


async def published(broker: KafkaTopics, rows: int) -> dict[str, int]:
    """When each is due, by its body."""
    draw = random.Random(1)
    begins_ms = time.time_ns() // 1_000_000 + 30_000
    due_ms = {str(row): begins_ms + draw.randrange(SPAN_MS) for row in range(rows)}
    asked = [({"deliver-at": str(due), "target": DUE}, body) for body, due in due_ms.items()]
    for first in range(0, rows, 1_000):
        await broker.publish(SOURCE, asked[first : first + 1_000])
    return due_ms


async def arrived(broker: KafkaTopics, rows: int) -> list[Published]:
    """Returns when so many different messages are there."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            record = await broker.read(DUE)
            if len(record) >= rows and len({each.body for each in record}) >= rows:
                return record
            await asyncio.sleep(0.5)


def judged(record: list[Published], due_ms: dict[str, int], outages: Outages) -> int:
    """How many came again. Each arrived, none early, and none twice but around an outage."""
    assert {each.body for each in record} == set(due_ms)
    assert [each for each in record if each.at_ms < due_ms[each.body]] == []
    first_ms: dict[str, int] = {}
    again_ms = []
    for each in record:
        name = each.headers[tarry.DELIVERY_ID_HEADER]
        if name in first_ms:
            again_ms.append((first_ms[name], each.at_ms))
        first_ms.setdefault(name, each.at_ms)
    after_ms = ends_after_ms(record, due_ms)
    assert [each for each in again_ms if not outages.lie_between(*each, after_ms)] == []
    return len(again_ms)


def figures(relay: RelayProcess) -> dict[str, int]:
    """What it has told of its fetching at its last end."""
    told = [json.loads(line) for line in relay.log_text().splitlines() if '"has fetched"' in line]
    last: dict[str, int] = told[-1]
    return last
