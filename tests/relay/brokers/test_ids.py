"""A delivery id brings its own message again, and never another one: of the form before, of another relay, of a source
that was made anew.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tarry
from examples.processes import DaemonProcess, local_store
from tests._support.patience import wait_until
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    FAILED,
    RESULTS,
    SOURCE,
    AnyBroker,
    Published,
    configuration,
)
from tests.relay.brokers.test_kills import LIMIT_S, nothing_is_left

SECOND_DUE = RESULTS
_AT_ONCE = 500


def former(text: str) -> str:
    """Return an id in the form that it had before it named its log."""
    return str(dataclasses.replace(tarry.DeliveryId.parse(text), log=""))


def ids(found: Iterable[Published]) -> dict[str, str]:
    """Return the first delivery id of each message, by its body."""
    names: dict[str, str] = {}
    for each in found:
        names.setdefault(each.body, each.headers[tarry.DELIVERY_ID_HEADER])
    return names


async def hand_back(broker: AnyBroker, names: Sequence[str]) -> None:
    """Publish ids to the retry log, as consumers that have failed."""
    for first in range(0, len(names), _AT_ONCE):
        await broker.publish(
            FAILED, [({tarry.DELIVERY_ID_HEADER: each}, "") for each in names[first : first + _AT_ONCE]]
        )


def time_of(row: int, due_ms: int) -> dict[str, str]:
    """Return a time, in one of the forms that producers use."""
    moment = datetime.datetime.fromtimestamp((due_ms + row) / 1_000, datetime.UTC)
    forms = (
        {"deliver-at": str(due_ms + row)},
        {"deliver-at": moment.isoformat(timespec="milliseconds")},
        {"deliver-at": "0"},
        {"delay": "700ms"},
        {"delay-level": "1"},
        {"deliver-at": "2020-01-01T00:00:00Z"},
    )
    return forms[row % len(forms)]


async def publish(broker: AnyBroker, bodies: Sequence[str], due_ms: int, *, in_any_form: bool = False) -> None:
    """Publish messages, each due at a time of its own."""
    asked = [
        (time_of(row, due_ms) if in_any_form else {"deliver-at": str(due_ms + row)}, body)
        for row, body in enumerate(bodies)
    ]
    for first in range(0, len(asked), _AT_ONCE):
        await broker.publish(SOURCE, asked[first : first + _AT_ONCE])


async def standing(broker: AnyBroker, stream: str, rows: int) -> list[Published]:
    """Return what stands in a stream, as soon as it is so much."""
    async with asyncio.timeout(LIMIT_S):
        while len(found := list(await broker.read(stream))) < rows:  # noqa: ASYNC110 - a broker is asked
            await asyncio.sleep(0.05)
    return found


async def all_committed(relay: RelayProcess, rows: int) -> None:
    """Wait until a relay has committed so many messages since its start, and nothing is under way."""

    def is_done() -> bool:
        return relay.metric("tarry_relay_committed_total") >= rows and relay.metric("tarry_relay_messages") == 0

    await asyncio.to_thread(wait_until, is_done, f"{rows} are not committed", timeout_s=LIMIT_S)


def reasons(dead: Iterable[Published]) -> Counter[str]:
    """Return how often each reason of a dead letter stands there, from behind the id."""
    return Counter(each.headers["tarry-reason"].partition("': ")[2].partition(":")[0] for each in dead)


async def update(broker: AnyBroker, directory: Path, rows: int) -> None:
    """As many messages have failed before the update as are handed back after it."""
    bodies = [f"{row}" for row in range(2 * rows)]
    with DaemonProcess("daemon", directory, local_store(directory / "root")) as daemon:
        daemon.start_serving()
        with RelayProcess("relay", directory, configuration(broker, daemon.address)) as relay:
            relay.start()
            await publish(broker, bodies, time.time_ns() // 1_000_000, in_any_form=True)
            names = ids(await standing(broker, DUE, 2 * rows))
            await nothing_is_left(relay)
            assert relay.terminate() == 0
            # What the version before has given to its consumers.
            failed, under_way = bodies[:rows], bodies[rows:]
            await hand_back(broker, [former(names[each]) for each in failed])
            relay.start()
            await hand_back(broker, [former(names[each]) for each in under_way])
            await standing(broker, DUE, 4 * rows)
            await nothing_is_left(relay)
            assert relay.terminate() == 0
        found = list(await broker.read(DUE))
        assert await broker.read(DEAD) == []
    again = [each for each in found if each.headers[tarry.REDELIVERY_COUNT_HEADER] == "1"]
    assert Counter(each.body for each in again) == Counter(bodies)
    for each in again:
        before, now = (tarry.DeliveryId.parse(text) for text in (names[each.body], ids([each])[each.body]))
        assert dataclasses.replace(before, redelivery_count=1) == now
        assert before.log == now.log != ""
    assert len(found) == 4 * rows


async def test_ids_of_before_an_update_bring_their_own_messages_again(broker: AnyBroker, tmp_path: Path) -> None:
    await update(broker, tmp_path, 50)


@pytest.mark.long
async def test_a_thousand_ids_of_before_an_update_and_a_thousand_after_it_bring_their_own_messages_again(
    broker: AnyBroker, tmp_path: Path
) -> None:
    await update(broker, tmp_path, 1_000)


async def forget_readers(broker: Any, stream: str) -> None:
    """Remove what says that a relay reads a retry log, as its operator does when that relay is gone."""
    if broker.kind == "redis":
        for group in broker.server.client.xinfo_groups(stream):
            if group["name"].startswith(b"tarry-retry-of-"):
                broker.server.client.xgroup_destroy(stream, group["name"])
    elif broker.kind == "nats":
        js = await broker._js()
        for consumer in await js.consumers_info(stream):
            await js.delete_consumer(stream, consumer.name)
    else:
        admin = broker.server.admin
        groups = [each.group_id for each in admin.list_consumer_groups().result().valid]
        for each in admin.delete_consumer_groups([name for name in groups if f"-{stream}@" in name]).values():
            each.result()


@pytest.mark.long
async def test_ids_of_a_relay_that_another_one_reads_in_one_retry_log_are_dead_letters(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Both read one source, each for a subscription and to a target of its own."""
    rows = 20
    bodies = [f"{row}" for row in range(rows)]
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        settings = configuration(broker, daemon.address)
        other = settings.replace(f'"{DUE}"', f'"{SECOND_DUE}"')
        with (
            RelayProcess("one", tmp_path, settings) as one,
            RelayProcess("two", tmp_path, other, 'subscription = "second"\n') as two,
        ):
            one.start()
            await publish(broker, bodies, time.time_ns() // 1_000_000)
            of_one = ids(await standing(broker, DUE, rows))
            await nothing_is_left(one)
            assert one.terminate() == 0
            two.start()
            await asyncio.to_thread(wait_until, lambda: not two.alive, "it runs", timeout_s=LIMIT_S)
            assert "give each" in two.log_text(), two.log_text()[-1_000:]
            await forget_readers(broker, FAILED)
            await hand_back(broker, [of_one[each] for each in bodies])
            two.start()
            of_two = ids(await standing(broker, SECOND_DUE, rows))
            await hand_back(broker, [of_two[each] for each in bodies[: rows // 2]])
            dead = await standing(broker, DEAD, rows)
            again = (await standing(broker, SECOND_DUE, rows + rows // 2))[rows:]
            await nothing_is_left(two)
            assert two.terminate() == 0
        found = list(await broker.read(SECOND_DUE))
        assert len(await broker.read(DEAD)) == len(dead) == rows
    assert Counter(each.body for each in again) == Counter(bodies[: rows // 2])
    assert len(found) == rows + rows // 2
    assert reasons(dead) == {"it is of another source or relay, or of a former source": rows}
    assert {each.headers["tarry-reason"].split("'")[1] for each in dead} == set(of_one.values())
    assert set(of_one.values()).isdisjoint(of_two.values())


@pytest.mark.long
async def test_ids_of_before_the_source_was_made_anew_are_dead_letters(broker: AnyBroker, tmp_path: Path) -> None:
    """Where a position has another message now, and where it has none."""
    rows, fewer = 20, 10
    bodies = [f"{row}" for row in range(rows)]
    # Each call of a test publishes to another partition of Kafka.
    parts = [[f"new {part} {row}" for row in range(fewer)] for part in range(3 if broker.kind == "kafka" else 1)]
    new = [body for part in parts for body in part]
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        with RelayProcess("relay", tmp_path, configuration(broker, daemon.address, "retention_every_s = 0.2")) as relay:
            relay.start()
            due_ms = time.time_ns() // 1_000_000
            await publish(broker, bodies, due_ms)
            names = ids(await standing(broker, DUE, rows))
            await nothing_is_left(relay)
            generation = relay.told("status")["topic"]
            await broker.delete(SOURCE)
            await broker.bring_back(SOURCE)
            for part in parts:
                await publish(broker, part, due_ms + 10_000)
            await standing(broker, DUE, rows + len(new))
            assert relay.told("status")["topic"] != generation
            texts = [names[each] for each in bodies]
            await hand_back(broker, [*texts, *(former(each) for each in texts)])
            dead = await standing(broker, DEAD, 2 * rows)
            await nothing_is_left(relay)
            assert relay.terminate() == 0
        found = list(await broker.read(DUE))
        assert len(await broker.read(DEAD)) == 2 * rows
    assert Counter(each.body for each in found) == Counter([*bodies, *new])
    said = reasons(dead)
    assert said.pop("it is of another source or relay, or of a former source") == rows
    assert sum(said.values()) == rows
    assert all("has no message at its position" in each or "is another" in each for each in said), said
    # At half of the positions other messages stand; an id of Redis does not come back.
    others = sum(count for each, count in said.items() if "is another" in each)
    assert others == (0 if broker.kind == "redis" else fewer)
