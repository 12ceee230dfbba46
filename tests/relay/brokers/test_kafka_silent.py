"""Tests a relay as a process beside a Kafka that is silent, and beside another relay with its id."""

from __future__ import annotations

import asyncio
import json
import time
import urllib.error
from pathlib import Path

import pytest

from examples.processes import DaemonProcess, local_store
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DUE, SOURCE, AnyBroker, configuration
from tests.relay.brokers.test_kills import LIMIT_S

pytestmark = [pytest.mark.long, pytest.mark.parametrize("broker", ["kafka"], indirect=True)]


async def test_a_broker_that_is_silent_is_told_and_keeps_no_relay_from_its_end(
    broker: AnyBroker, tmp_path: Path
) -> None:
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        with RelayProcess("relay", tmp_path, configuration(broker, daemon.address), "drain_s = 3") as relay:
            relay.start()
            await broker.publish(SOURCE, [({}, str(row)) for row in range(10)])
            await all_of(broker, 10)
            await until(relay, 200, "")
            broker.server.stop()
            try:
                # Nothing is due.
                await until(relay, 503, "orders")
                broker.server.resume()
                await until(relay, 200, "")
                await broker.publish(SOURCE, [({}, str(row)) for row in range(10, 20)])
                await all_of(broker, 20)
                broker.server.stop()
                await until(relay, 503, "orders")
                begun_s = time.monotonic()
                await asyncio.to_thread(relay.terminate)
                # 8 s of its own, and the machine may be busy; the client library alone would wait for minutes.
                assert time.monotonic() - begun_s < 30
            finally:
                broker.server.resume()


async def test_of_two_relays_with_one_id_the_one_that_is_fenced_says_so_and_lives(
    broker: AnyBroker, tmp_path: Path
) -> None:
    settings = configuration(broker, "{}").replace("kept_bytes = 0", "kept_bytes = 0, transactional = true")
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        settings = settings.replace("{}", daemon.address, 1)
        with RelayProcess("one", tmp_path, settings) as one, RelayProcess("two", tmp_path, settings) as two:
            two.file.write_text(two.file.read_text().replace('id = "two"', 'id = "one"'))
            for each in (one, two):
                each.start()
            fenced = asyncio.create_task(first_of(one, two, 503, "another relay publishes with relay.id 'one'"))
            rows = 0
            async with asyncio.timeout(LIMIT_S):
                while not fenced.done():
                    await broker.publish(SOURCE, [({}, str(row)) for row in range(rows, rows + 10)])
                    rows += 10
                    await asyncio.sleep(0.1)
            await fenced
            await all_of(broker, rows)
            assert (one.alive, two.alive) == (True, True)


async def all_of(broker: AnyBroker, rows: int) -> None:
    """Return once all numbers below that stand in the target, some of them twice perhaps."""
    async with asyncio.timeout(LIMIT_S):
        while {each.body for each in await broker.read(DUE)} != {str(row) for row in range(rows)}:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def first_of(one: RelayProcess, two: RelayProcess, status: int, text: str) -> None:
    """Return once either says so."""
    tasks = [asyncio.create_task(until(each, status, text)) for each in (one, two)]
    done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for each in left:
        each.cancel()
    for each in done:
        await each


async def until(relay: RelayProcess, status: int, text: str) -> None:
    """Return once the relay's health is so."""
    said = ""
    async with asyncio.timeout(LIMIT_S):
        while True:
            try:
                said = json.dumps(await asyncio.to_thread(relay.health))
                now = 200
            except urllib.error.HTTPError as error:
                now, said = error.code, error.read().decode()
            except OSError:
                now = 0
            if now == status and text in said:
                return
            assert relay.alive, relay.log_text()[-3_000:]
            await asyncio.sleep(0.1)
