"""A relay as a process goes on, and says what is wrong, while an end is silent, not there, or not as it must be."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
import urllib.error
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka.admin
import pytest
import redis

import tarry
import tarry.aio
from examples.processes import DaemonProcess, local_store
from tests._support.processes import run_program
from tests._support.tcp_proxy import TcpProxy
from tests.relay.brokers._support import relay_process
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    SOURCE,
    AnyBroker,
    KafkaTopics,
    NatsStreams,
    Published,
    RedisStreams,
    configuration,
)

LIMIT_S = 600.0
T = TypeVar("T")
WRONG = 4
"""The status of `check` and `run` when an end is not as it must be."""
_kafka_admin: Any = confluent_kafka.admin

only_kafka = pytest.mark.parametrize("broker", [pytest.param("kafka", marks=pytest.mark.long)], indirect=True)
only_nats = pytest.mark.parametrize("broker", ["nats"], indirect=True)
two_brokers_that_hold = pytest.mark.parametrize("broker", ["redis", "nats"], indirect=True)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as made:
        made.start_serving()
        yield made


def settings_of(broker: AnyBroker, address: str, source: str = "retention_every_s = 0.2", **instead: str) -> str:
    """The settings of a relay. `instead`: what stands in place of a part of them."""
    settings = configuration(broker, address, source)
    for part, other in instead.items():
        assert part in settings
        settings = settings.replace(part, other)
    return settings


async def health(relay: RelayProcess) -> tuple[int, str]:
    """The status of /health and what it says; 0 if it does not answer."""
    assert relay.alive, relay.failed("ended by itself")
    try:
        return 200, json.dumps(await asyncio.to_thread(relay.health))
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


async def until(ask: Callable[[], Awaitable[T]], holds: Callable[[T], bool]) -> T:
    """Ask until it is so, and return it."""
    async with asyncio.timeout(LIMIT_S):
        while not holds(found := await ask()):  # noqa: ASYNC110 - a process does it
            await asyncio.sleep(0.05)
    return found


async def until_health(relay: RelayProcess, status: int, text: str = "") -> None:
    await until(lambda: health(relay), lambda said: said[0] == status and text in said[1])


async def until_metric(relay: RelayProcess, name: str, value: float) -> None:
    await until(lambda: asyncio.to_thread(relay.metric, name), lambda now: now == value)


async def arrived(broker: AnyBroker, stream: str, bodies: set[str]) -> list[Published]:
    """What stands in a stream, as soon as all of these do."""
    return await until(lambda: broker.read(stream), lambda found: bodies <= {each.body for each in found})


def checked(relay: RelayProcess) -> int:
    """The status of `check`."""
    return run_program([*relay_process.PROGRAM, "check", str(relay.file)]).returncode


def numbered(name: str, rows: int) -> set[str]:
    return {f"{name} {row}" for row in range(rows)}


# An end that is silent.


@pytest.mark.long
async def test_a_broker_that_is_silent_makes_503_and_keeps_no_relay_from_ending(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    with RelayProcess("relay", tmp_path, settings_of(broker, daemon.address), "drain_s = 3") as relay:
        relay.start()
        await broker.publish(SOURCE, [({}, "first")])
        await arrived(broker, DUE, {"first"})
        await until_health(relay, 200)
        # Nothing is due.
        broker.server.stop()
        try:
            await until_health(relay, 503, "broker")
            broker.server.resume()
            await until_health(relay, 200)
            await broker.publish(SOURCE, [({}, "second")])
            await arrived(broker, DUE, {"second"})
            broker.server.stop()
            await until_health(relay, 503, "broker")
            began_s = time.monotonic()
            await asyncio.to_thread(relay.terminate)
            # 8 s by its own clock; the machine may be busy. Libraries of brokers wait for minutes.
            assert time.monotonic() - began_s < 30
        finally:
            broker.server.resume()


@pytest.mark.long
@two_brokers_that_hold
async def test_a_relay_that_is_cut_off_from_its_daemon_holds_nothing(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    with TcpProxy(int(daemon.address.rpartition(":")[2])) as proxy:
        cut_off = RelayProcess("one", tmp_path, settings_of(broker, f"127.0.0.1:{proxy.port}"))
        other = RelayProcess("two", tmp_path, settings_of(broker, daemon.address))
        with cut_off, other:
            cut_off.start()
            await broker.publish(SOURCE, [({"delay": "0s"}, "first")])
            await arrived(broker, DUE, {"first"})
            await until_metric(cut_off, "tarry_relay_messages", 0)
            proxy.hold_back()
            await broker.publish(SOURCE, [({"delay": "0s"}, each) for each in sorted(numbered("held", 20))])
            await until_metric(cut_off, "tarry_relay_read_total", 21)
            other.start()
            found = await arrived(broker, DUE, numbered("held", 20))
            assert len(found) == 21
            assert other.metric("tarry_relay_read_total") == 20
            await until_health(cut_off, 503)
            proxy.let_pass()
            await until_health(cut_off, 200)
            assert len(await broker.read(DUE)) == 21


# An end that is not there.


async def test_a_source_that_does_not_exist_is_waited_for_at_start_and_later(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    await broker.delete(SOURCE)
    with RelayProcess("relay", tmp_path, settings_of(broker, daemon.address)) as relay:
        relay.start()
        for name in ("made", "again"):
            await until_health(relay, 503, SOURCE)
            assert await asyncio.to_thread(checked, relay) == WRONG
            await broker.bring_back(SOURCE)
            await broker.publish(SOURCE, [({"delay": "10ms"}, each) for each in sorted(numbered(name, 20))])
            await arrived(broker, DUE, numbered(name, 20))
            await until_health(relay, 200)
            await broker.delete(SOURCE)
        assert await broker.read(DEAD) == []


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
async def test_a_file_of_the_password_that_is_not_there_for_a_while_ends_no_relay(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    password = tmp_path / "password"
    with redis.Redis.from_url(broker.server.url) as admin:
        admin.execute_command("ACL", "SETUSER", "relay", "on", ">old", "~*", "&*", "+@all")
        settings = settings_of(broker, daemon.address)
        settings = settings.replace(", timeout_s = 5", f', timeout_s = 5, user = "relay", password_file = "{password}"')
        with RelayProcess("relay", tmp_path, settings) as relay:
            # At its start it is a mistake.
            ended = await asyncio.to_thread(run_program, [*relay_process.PROGRAM, "run", str(relay.file)])
            assert (ended.returncode, str(password) in ended.stderr) == (2, True)
            password.write_text("old")
            relay.start()
            await broker.publish(SOURCE, [({}, "first")])
            await arrived(broker, DUE, {"first"})
            password.unlink()
            admin.execute_command("ACL", "SETUSER", "relay", "resetpass", ">new")
            admin.execute_command("CLIENT", "KILL", "USER", "relay")
            await until_health(relay, 503, str(password))
            password.write_text("new")
            await until_health(relay, 200)
            await broker.publish(SOURCE, [({}, "second")])
            await arrived(broker, DUE, {"second"})


@only_kafka
async def test_of_two_relays_with_one_id_the_fenced_one_says_so_and_lives(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    of_one = {"kept_bytes = 0": "kept_bytes = 0, transactional = true, confirm_s = 3"}
    settings = settings_of(broker, daemon.address, **of_one)
    with RelayProcess("one", tmp_path, settings) as one, RelayProcess("two", tmp_path, settings) as two:
        one.start()
        await broker.publish(SOURCE, [({}, "first")])
        await arrived(broker, DUE, {"first"})
        # Alone, and suspended for longer than a transaction may take.
        one.stop()
        await asyncio.sleep(10)
        one.resume()
        await broker.publish(SOURCE, [({}, each) for each in sorted(numbered("later", 20))])
        await arrived(broker, DUE, numbered("later", 20))
        await until_health(one, 200)
        two.file.write_text(two.file.read_text().replace('id = "two"', 'id = "one"'))
        two.start()
        row, said = 0, ""
        async with asyncio.timeout(LIMIT_S):
            while "another relay publishes" not in said:
                await broker.publish(SOURCE, [({}, f"both {row}")])
                row += 1
                said = "".join([(await health(each))[1] for each in (one, two)])
        await arrived(broker, DUE, numbered("both", row))
        assert (one.alive, two.alive) == (True, True)
        assert await broker.read(DEAD) == []


# A source that is not as it must be.


@contextlib.asynccontextmanager
async def spoiled(broker: AnyBroker) -> AsyncIterator[None]:
    """Let the source drop what waits, within the block."""
    if isinstance(broker, RedisStreams):
        trimming = asyncio.create_task(trim(broker))
        yield
        trimming.cancel()
    elif isinstance(broker, NatsStreams):
        await limit(broker, 5_000)
        yield
        await limit(broker, -1)
    elif isinstance(broker, KafkaTopics):
        await configure(broker, "retention.bytes", 100_000_000)
        yield
        await configure(broker, "retention.bytes", -1)


async def trim(broker: RedisStreams) -> None:
    """Go on with XADD and MAXLEN: nothing else says that somebody trims."""
    fields = {"deliver-at": "1900000000000", "body": "trims"}
    with redis.Redis.from_url(broker.server.url) as producer:
        while True:
            producer.execute_command("XADD", SOURCE, "MAXLEN", 1_000, "*", *itertools.chain(*fields.items()))
            await asyncio.sleep(0.02)


async def limit(broker: NatsStreams, max_msgs: int) -> None:
    js = await broker._js()
    config = (await js.stream_info(SOURCE)).config
    config.max_msgs = max_msgs
    await js.update_stream(config)


async def configure(broker: KafkaTopics, name: str, value: int) -> None:
    """Set a setting of the source."""
    entry = _kafka_admin.ConfigEntry(name, str(value), incremental_operation=_kafka_admin.AlterConfigOpType.SET)
    topic = _kafka_admin.ConfigResource("TOPIC", SOURCE, incremental_configs=[entry])
    for each in broker.server.admin.incremental_alter_configs([topic]).values():
        await asyncio.wrap_future(each)


async def test_a_source_that_begins_to_drop_what_waits_is_not_read_until_it_is_mended(
    broker: AnyBroker, daemon: DaemonProcess, tmp_path: Path
) -> None:
    with RelayProcess("relay", tmp_path, settings_of(broker, daemon.address)) as relay:
        relay.start()
        waiting = [f"waits {row}" for row in range(1_000)]
        await broker.publish(SOURCE, [({"deliver-at": "1900000000000"}, each) for each in waiting])
        await until_metric(relay, "tarry_relay_committed_total", 1_000)
        topic = (await asyncio.to_thread(relay.told, "status"))["topic"]
        async with spoiled(broker):
            await until_health(relay, 503, "is not read")
            if broker.kind != "redis":
                # A call that reads may be under way for a second. In Redis what is not read would be trimmed.
                await asyncio.sleep(3)
                await broker.publish(SOURCE, [({}, "not read")])
            async with tarry.aio.Client(daemon.address) as client:
                pages = [page async for page in client.scheduled(topic)]
                rows = [pair for page in pages for pair in zip(page.ledger_id, page.entry_id, strict=True)]
                # The youngest: a ledger of Redis is a sequence number, and its entries are times.
                ledgers, entries = zip(*sorted(rows, key=lambda pair: pair[::-1])[-50:], strict=True)
                await client.reschedule(topic, ledgers, entries, delay_ms=0)
            await until(lambda: broker.read(DUE), lambda found: len(found) >= 50)
            await until_health(relay, 503, "is not read")
            assert "not read" not in {each.body for each in await broker.read(DUE)}
        await until_health(relay, 200)
        await broker.publish(SOURCE, [({}, "read")])
        await arrived(broker, DUE, {"read"} if broker.kind == "redis" else {"read", "not read"})
