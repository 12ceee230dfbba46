"""Producers of both clients and a real daemon: many who add, rows that cannot be stored, and the daemon's death."""

from __future__ import annotations

import asyncio
import time

import pytest

import tarry
import tarry.aio
from examples import processes
from tests.client.conformance._support.threaded import in_thread
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE_S = 600.0
FAR_MS = 3_600_000
STORED = tarry.Added()


async def test_many_add_and_every_row_is_there(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=PATIENCE_S)

    async def add(ledger: int) -> None:
        answers = [await producer.add(ledger, entry, delay_ms=FAR_MS) for entry in range(100)]
        assert [await each for each in answers] == [STORED] * 100

    async with client.producer(topic, batch_rows=64, max_outstanding=300) as producer:
        await asyncio.gather(*map(add, range(10)))
    found = await client.contains(topic, list(range(10)), 0, last_entry_id=200)
    assert [*found.pending] == [(ledger, 0, 99) for ledger in range(10)]


async def test_a_delay_is_never_shorter_for_having_lingered(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=PATIENCE_S)
    async with client.producer(topic, linger_ms=50) as producer:
        added_ms = time.time_ns() // 1_000_000
        await (await producer.add(7, 1, delay_ms=FAR_MS))
    page = await client.scheduled_page(topic)
    assert page.deliver_at_ms[0] >= added_ms + FAR_MS


async def test_a_bad_row_among_good_ones_fails_alone(
    shared_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(shared_daemon.address, timeout_s=PATIENCE_S)
    due_ms = time.time_ns() // 1_000_000 + FAR_MS
    producer = client.producer(topic)
    times = [due_ms, due_ms // 1_000, 2**64 - 1, due_ms]
    answers = [await producer.add(7, entry, deliver_at_ms=when) for entry, when in enumerate(times)]
    levels = [await producer.add(8, entry, delay_level=level) for entry, level in enumerate([1, -1, 1])]
    with pytest.raises((tarry.InvalidArgument, tarry.OutOfRange)):
        await producer.flush()
    with pytest.raises(tarry.InvalidArgument, match="seconds"):
        await answers[1]
    with pytest.raises(tarry.OutOfRange):
        await answers[2]
    with pytest.raises(tarry.InvalidArgument, match="delay_level"):
        await levels[1]
    assert [await each for each in (answers[0], answers[3], levels[0], levels[2])] == [STORED] * 4
    await producer.close()
    assert [*(await client.contains(topic, [7, 8], 0, last_entry_id=9)).pending] == [
        (7, 0, 0), (7, 3, 3), (8, 0, 0), (8, 2, 2),
    ]  # fmt: skip


async def test_rows_that_are_added_while_the_daemon_dies_are_there(
    mortal_daemon: processes.DaemonProcess, connect: Connect, topic: str
) -> None:
    client = connect(mortal_daemon.address, timeout_s=PATIENCE_S)
    async with client.producer(topic, batch_rows=10) as producer:
        await (await producer.add(7, 0, delay_ms=FAR_MS))
        answers = [await producer.add(7, entry, delay_ms=FAR_MS) for entry in range(1, 200)]
        await in_thread(mortal_daemon.kill)
        answers += [await producer.add(7, entry, delay_ms=FAR_MS) for entry in range(200, 400)]
        await in_thread(mortal_daemon.start_serving)
        assert [await each for each in answers] == [STORED] * 399
    assert [*(await client.contains(topic, 7, 0, last_entry_id=500)).pending] == [(7, 0, 399)]
