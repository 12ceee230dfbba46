"""Each adapter does what the port says, with a real broker."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from tarry_relay import port, relay_command, relay_settings, sessions
from tests._support.processes import run_program
from tests.relay.brokers._support.relay_process import PROGRAM
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    FAILED,
    SOURCE,
    STREAMS,
    AnyBroker,
    NatsStreams,
    configuration,
)

NOWHERE = "127.0.0.1:1"
"""The daemon is not asked."""
BY_MESSAGE = pytest.mark.parametrize("broker", ["redis", "nats"], indirect=True)
"""Brokers that share out a log by messages, and whose outputs know ids."""


@contextlib.asynccontextmanager
async def adapter(broker: AnyBroker, directory: Path, identity: str = "one") -> AsyncIterator[port.Broker]:
    file = directory / f"{identity}.toml"
    file.write_text(configuration(broker, NOWHERE, f'[relay]\ntopic = "orders"\nid = "{identity}"'))
    async with sessions.opened(relay_settings.load(file)) as opened:
        yield opened.broker


async def read_all(reader: port.Reader, rows: int) -> list[port.Read]:
    """So many, however many calls they take."""
    found: list[port.Read] = []
    while len(found) < rows:
        found += (await reader.read(rows - len(found), 5)).read
    return found


def bodies(messages: Sequence[port.Message | None]) -> list[str | None]:
    return [None if not isinstance(each, port.Message) else each.headers["n"] for each in messages]


async def publish(broker: AnyBroker, numbers: range) -> None:
    await broker.publish(SOURCE, [({"n": str(number)}, f"payload {number}") for number in numbers])


async def test_what_is_read_is_fetched_by_its_position_and_what_is_gone_is_none(
    broker: AnyBroker, tmp_path: Path
) -> None:
    await publish(broker, range(10))
    async with adapter(broker, tmp_path) as opened:
        read = await read_all(opened.source, 10)
        assert bodies([each.message for each in read]) == [str(number) for number in range(10)]
        positions = sorted((each.ledger_id, each.entry_id) for each in read)
        by_position = {(each.ledger_id, each.entry_id): each.message for each in read}
        now = await opened.log.generation()
        assert await opened.log.fetch(positions, now) == [by_position[each] for each in positions]
        await broker.cut(SOURCE, keep=4)
        assert sorted(each for each in bodies(await opened.log.fetch(positions, now)) if each is not None) == list(
            "6789"
        )
        first = await opened.log.first_entries([ledger for ledger, _ in positions])
        there = [message is not None for message in await opened.log.fetch(positions, now)]
        assert there == [entry >= first[ledger] for ledger, entry in positions]


@pytest.mark.parametrize("identity", ["one", "another"])
async def test_what_is_not_committed_is_read_again(broker: AnyBroker, tmp_path: Path, identity: str) -> None:
    await publish(broker, range(6))
    async with adapter(broker, tmp_path) as opened:
        read = await read_all(opened.source, 6)
        await opened.source.commit(read[:4])
    async with adapter(broker, tmp_path, identity) as opened:
        again = await read_all(opened.source, 2)
        assert [each.entry_id for each in again] == [each.entry_id for each in read[4:]]


async def test_what_was_committed_is_passed_and_what_was_read_alone_is_not(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(6))
    async with adapter(broker, tmp_path) as opened:
        read = await read_all(opened.source, 4)
        positions = [(each.ledger_id, each.entry_id) for each in read]
        assert await opened.source.passed(positions) == [False] * 4
        await opened.source.commit(read[:3])
        while await opened.source.passed(positions) != [True, True, True, False]:
            pass
        assert all(each.alone_until_s > 0 for each in read) == (broker.kind != "kafka")
    async with adapter(broker, tmp_path) as opened:
        again, *unread = sorted(await read_all(opened.source, 3), key=lambda each: each.entry_id)
        assert again.alone_until_s == 0
        assert await opened.source.passed([(again.ledger_id, again.entry_id)]) == [False]
        assert all(each.alone_until_s > 0 for each in unread) == (broker.kind != "kafka")


async def test_a_position_is_named_as_the_broker_names_it_to_its_producer(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(1))
    named = {
        "kafka": ("3-17", (3, 17)),
        "nats": ("1", (1, 1)),
        "redis": ("1795773600000-3", (3, 1795773600000)),
    }
    text, position = named[broker.kind]
    async with adapter(broker, tmp_path) as opened:
        assert opened.position_of(text) == position
        for bad in ("", "0", *([] if broker.kind == "kafka" else ["0-0"]), "-1", "x", " 1", "1-", "1-1-1", "9" * 21):
            with pytest.raises(port.BadPosition, match=f"^{bad!r} is no "):
                opened.position_of(bad)


async def test_what_the_relay_reads_is_no_target(broker: AnyBroker, tmp_path: Path) -> None:
    async with adapter(broker, tmp_path) as opened:
        assert set(opened.own_targets()) == {SOURCE, FAILED}
        assert [opened.comes_back(target) for target in (SOURCE, FAILED, DUE, f"{SOURCE}.x")] == [
            *(True, True),
            *(False, False),
        ]


async def test_a_target_that_goes_round_is_refused_before_a_relay_runs(broker: AnyBroker, tmp_path: Path) -> None:
    file = tmp_path / "round.toml"
    text = configuration(broker, NOWHERE, '[relay]\ntopic = "orders"\nlisten = "127.0.0.1:0"')
    file.write_text(text.replace('{ name = "due" }', '{ pattern = "due|o.*" }'))
    for command in ("run", "check"):
        ended = await asyncio.to_thread(run_program, [*PROGRAM, command, str(file)])
        assert ended.returncode == relay_command.EXIT_SETTINGS
        assert "targets[0].pattern is 'due|o.*', which fits 'orders'" in ended.stderr


@BY_MESSAGE
async def test_two_relays_share_what_is_read(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(20))
    async with adapter(broker, tmp_path, "one") as one, adapter(broker, tmp_path, "two") as two:
        first = (await one.source.read(10, 5)).read
        rest = await read_all(two.source, 20 - len(first))
        numbers = [each.message.headers["n"] for each in (*first, *rest) if each.message is not None]
        assert sorted(numbers, key=int) == [str(number) for number in range(20)]


@BY_MESSAGE
async def test_an_output_drops_what_it_has(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(2))
    async with adapter(broker, tmp_path) as opened:
        messages = [each.message for each in await read_all(opened.source, 2)]
        outgoing = [
            port.Outgoing(DUE, message, {"tarry-delivery-id": str(row)}, f"id {row}")
            for row, message in enumerate(messages)
        ]
        for _ in range(2):
            assert set(await opened.output.produce(outgoing)) == {port.Produced()}
        await opened.output.produce([port.Outgoing(DEAD, None, {"tarry-reason": "none"}, "id 3")])
    published = await broker.read(DUE)
    assert [(each.headers["n"], each.headers["tarry-delivery-id"], each.body) for each in published] == [
        ("0", "0", "payload 0"),
        ("1", "1", "payload 1"),
    ]
    assert [each.headers["tarry-reason"] for each in await broker.read(DEAD)] == ["none"]


async def test_what_a_target_did_not_take_does_not_count_as_there(broker: AnyBroker, tmp_path: Path) -> None:
    async with adapter(broker, tmp_path) as opened:
        outgoing = [port.Outgoing(DUE, None, {"n": "1"}, "id 1")]
        await broker.take_away(DUE)
        (away,) = await opened.output.produce(outgoing)
        assert not away.is_taken
        assert away.text.startswith(f"{DUE}: ")
        await broker.bring_back(DUE)
        async with asyncio.timeout(300):
            # A client of Kafka may take a while to learn of it.
            while await opened.output.produce(outgoing) != [port.Produced()]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    assert [each.headers["n"] for each in await broker.read(DUE)] == ["1"]


async def test_a_log_that_is_made_anew_has_another_generation(broker: AnyBroker, tmp_path: Path) -> None:
    async with adapter(broker, tmp_path) as opened:
        first = await opened.log.generation()
        assert await opened.log.generation() == first
        for stream in STREAMS:
            await broker.delete(stream)
        with pytest.raises(port.NotThere):
            await opened.log.generation()
        await broker.set_up()
        assert await opened.log.generation() != first


async def test_what_waits_is_never_fetched_from_a_log_that_was_made_anew(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(3))
    async with adapter(broker, tmp_path) as opened:
        positions = sorted((each.ledger_id, each.entry_id) for each in await read_all(opened.source, 3))
        former = await opened.log.generation()
        await made_anew(broker)
        with pytest.raises(port.NotThere, match=former):
            await opened.log.fetch(positions, former)
        now = await opened.log.generation()
        others = bodies(await opened.log.fetch(positions, now))
        # Ids of Redis are times, which do not come again.
        assert set(others) == ({None} if broker.kind == "redis" else set("789"))


@BY_MESSAGE
async def test_a_log_that_was_made_anew_is_not_read_on(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(3))
    async with adapter(broker, tmp_path) as opened:
        await read_all(opened.source, 3)
        await made_anew(broker)
        with pytest.raises(port.NotThere):
            await read_until_there(opened.source)


async def test_a_relay_that_has_not_noticed_takes_nothing_of_a_log_that_was_made_anew(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Another relay reads it by then, and has made there what it reads with."""
    await publish(broker, range(9))
    async with adapter(broker, tmp_path, "one") as one:
        before = await read_all(one.source, 9)
        await made_anew(broker)
        async with adapter(broker, tmp_path, "two") as two:
            after = await read_all(two.source, 9)
            await publish(broker, range(9))
            # Of the log that is no more; at the same positions there are other messages.
            with contextlib.suppress(port.NotThere, port.Unreachable):
                await one.source.commit(before)
            with pytest.raises(port.NotThere):
                await read_until_there(one.source)
            assert not any(await two.source.passed([(each.ledger_id, each.entry_id) for each in after]))
    async with adapter(broker, tmp_path, "three") as three:
        assert len(await read_all(three.source, 18)) == 18


async def read_until_there(reader: port.Reader) -> list[port.Read]:
    """Something, however often the reader cannot be reached."""
    while True:
        with contextlib.suppress(port.Unreachable):
            return await read_all(reader, 1)


async def made_anew(broker: AnyBroker) -> None:
    """The source, with other messages wherever there was one."""
    await broker.delete(SOURCE)
    await broker.bring_back(SOURCE)
    for _ in range(3):
        # Of Kafka each call fills another partition.
        await publish(broker, range(7, 10))


async def test_a_reader_says_that_its_log_is_gone(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(1))
    async with adapter(broker, tmp_path) as opened:
        await read_all(opened.source, 1)
        await broker.delete(SOURCE)
        with pytest.raises((port.NotThere, port.Unreachable)):
            await read_all(opened.source, 1)


async def test_a_broker_that_is_away_is_unreachable_and_then_there_again(broker: AnyBroker, tmp_path: Path) -> None:
    await publish(broker, range(1))
    async with adapter(broker, tmp_path) as opened:
        (read,) = await read_all(opened.source, 1)
        now = await opened.log.generation()
        broker.server.kill()
        position = (read.ledger_id, read.entry_id)
        with pytest.raises(port.Unreachable):
            await opened.log.fetch([position], now)
        broker.server.start()
        broker.server.wait_until_loaded()
        while True:
            with contextlib.suppress(port.Unreachable):
                assert bodies(await opened.log.fetch([position], now)) == ["0"]
                break


async def test_a_log_says_for_how_long_it_keeps_messages(broker: AnyBroker, tmp_path: Path) -> None:
    async with adapter(broker, tmp_path) as opened:
        # Kafka keeps for a week by default.
        assert await opened.log.kept_ms() == (7 * 86_400_000 if broker.kind == "kafka" else None)
        if isinstance(broker, NatsStreams):
            await broker.keep_for(SOURCE, 7)
            assert await opened.log.kept_ms() == 7_000


async def test_what_a_relay_needs_is_looked_at(broker: AnyBroker, tmp_path: Path) -> None:
    async with adapter(broker, tmp_path) as opened:
        found = [each async for each in opened.findings()]
        assert found
        assert [each.text for each in found if each.grade not in (port.Grade.OK, port.Grade.WARNING)] == []


@pytest.mark.parametrize("broker", ["nats", pytest.param("kafka", marks=pytest.mark.long)], indirect=True)
async def test_what_is_missing_is_told_by_name_and_what_was_found_before_it(broker: AnyBroker, tmp_path: Path) -> None:
    await broker.delete(SOURCE)
    file = tmp_path / "away.toml"
    daemon = f'"{NOWHERE}"'
    text = configuration(broker, NOWHERE, '[relay]\ntopic = "orders"')
    file.write_text(text.replace(daemon, f"{daemon}\ndaemon.timeout_s = 0.1"))
    ended = await asyncio.to_thread(run_program, [*PROGRAM, "check", str(file)])
    kind = "topic" if broker.kind == "kafka" else "stream"
    assert ended.stdout.startswith(f"WRONG source: {kind} orders: ")
    assert "\nok    retry: " in ended.stdout
    assert ended.stderr.startswith("tarry-relay: the daemon cannot be reached, by daemon.address: DEADLINE_EXCEEDED: ")
    assert ended.returncode == relay_command.EXIT_UNREACHABLE
    ended = await asyncio.to_thread(run_program, [*PROGRAM, "status", str(file)])
    assert ended.stderr.startswith(f"tarry-relay: {kind} orders: ")
    assert ended.returncode == relay_command.EXIT_ENDED
