"""Messages that a real broker or a target does not take wait, or are dead letters, and hold up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

import tarry
from examples.processes import DaemonProcess, local_store
from tests._support.processes import run_program
from tests.relay._support.raw_messages import Raw
from tests.relay.brokers._support import raw_brokers, relay_process
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    FAILED,
    SOURCE,
    AnyBroker,
    KafkaTopics,
    NatsStreams,
    configuration,
)
from tests.relay.brokers.test_outages import WRONG, arrived, configure, numbered, until_metric

FAR = {"deliver-at": "1900000000000"}
only_nats = pytest.mark.parametrize("broker", ["nats"], indirect=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as made:
        made.start_serving()
        yield made


@pytest.mark.long
async def test_a_message_whose_target_takes_nothing_holds_up_no_other_and_waits_in_tarry_at_last(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    """They wait here for many times as long as the broker lets a message wait for its commit."""
    if broker.kind == "redis":
        with redis.Redis.from_url(broker.server.url) as admin:
            admin.set("out.typo", "no stream")
    named = f'{{ name = "{DUE}" }}'
    settings = configuration(broker, daemon.address).replace(named, f"{named}, {{ pattern = 'out[.].*' }}")
    with RelayProcess("relay", tmp_path, settings) as relay:
        relay.start()
        rows = 1
        if isinstance(broker, KafkaTopics):
            # Times of their producers that are none, or are in seconds: by these Kafka takes them for old.
            await configure(broker, "retention.ms", -1)
            times = [-1, 1_900_000_000]
            rows += len(times)
            async with raw_brokers.opened(broker) as raw:
                fields = ((b"target", b"out.typo"),)
                await raw.publish(
                    SOURCE, [Raw(row, fields, b"typo", timestamp_ms=each) for row, each in enumerate(times)]
                )
        behind = sorted(numbered("behind", 20))
        await broker.publish(SOURCE, [({"target": "out.typo"}, "typo"), *(({}, each) for each in behind)])
        await arrived(broker, DUE, set(behind))
        await until_metric(relay, "tarry_relay_overdue_total", rows)
        await until_metric(relay, "tarry_relay_committed_total", rows + 20)
        assert relay.metric("tarry_relay_read_total") == rows + 20
        assert sorted(each.body for each in await broker.read(DUE)) == behind
        assert await broker.read(DEAD) == []
        told = await asyncio.to_thread(relay.told, "status")
        assert (told["due"], told["dead letters"]) == (rows, 0), told


async def test_an_id_of_a_former_source_is_a_dead_letter_and_no_other_message(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    more = "retention_every_s = 0.2"
    with RelayProcess("relay", tmp_path, configuration(broker, daemon.address, more)) as relay:
        relay.start()
        await broker.publish(SOURCE, [({"delay": "0s"}, "former")])
        (former,) = await arrived(broker, DUE, {"former"})
        await until_metric(relay, "tarry_relay_committed_total", 1)
        await broker.delete(SOURCE)
        await broker.bring_back(SOURCE)
        # One of them stands at the position of the former one, but in Redis, where no position comes back.
        for _ in range(3):
            await broker.publish(SOURCE, [(FAR, "another")])
        await until_metric(relay, "tarry_relay_committed_total", 4)
        name = former.headers[tarry.DELIVERY_ID_HEADER]
        await broker.publish(FAILED, [({tarry.DELIVERY_ID_HEADER: name}, "failed")])
        (dead,) = await arrived(broker, DEAD, {"failed"})
        assert "of a former source" in dead.headers["tarry-reason"]
        await until_metric(relay, "tarry_relay_committed_total", 5)
        told = await asyncio.to_thread(relay.told, "status")
        assert (told["pending"], told["due"], told["dead letters"]) == (3, 0, 0)
        assert [each.body for each in await broker.read(DUE)] == ["former"]


@only_nats
async def test_a_work_queue_is_refused_and_keeps_what_it_has(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    js = await js_of(broker)
    await broker.delete(SOURCE)
    await js.add_stream(name=SOURCE, subjects=[SOURCE], retention="workqueue")
    await broker.publish(SOURCE, [({"delay": "1h"}, "kept")])
    with RelayProcess("relay", tmp_path, configuration(broker, daemon.address)) as relay:
        for command in ("check", "run"):
            ended = await asyncio.to_thread(run_program, [*relay_process.PROGRAM, command, str(relay.file)])
            assert (ended.returncode, "retention" in ended.stdout + ended.stderr) == (WRONG, True)
    assert (await js.stream_info(SOURCE)).state.messages == 1


@only_nats
async def test_what_finds_its_target_full_comes_when_there_is_room(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    js = await js_of(broker)
    config = (await js.stream_info(DUE)).config
    config.max_bytes, config.discard = 230_000, "new"
    await js.update_stream(config)
    with RelayProcess("relay", tmp_path, configuration(broker, daemon.address)) as relay:
        relay.start()
        large = {f"{row}{'x' * 60_000}" for row in range(5)}
        small = numbered("small", 50)
        await broker.publish(SOURCE, [({}, each) for each in sorted(large)])
        await broker.publish(SOURCE, [({}, each) for each in sorted(small)])
        found = {each.body for each in await arrived(broker, DUE, small)}
        assert not large <= found
        config.max_bytes = -1
        await js.update_stream(config)
        await arrived(broker, DUE, large | small)
        assert await broker.read(DEAD) == []


async def js_of(broker: AnyBroker) -> Any:
    assert isinstance(broker, NatsStreams)
    return await broker._js()
