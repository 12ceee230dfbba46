"""How much memory a relay takes for messages that are large, due all at once, and far more than it may hold."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from examples.processes import DaemonProcess, local_store
from tarry_relay.memory_shares import ROWS_FIRST
from tests.relay._support.raw_messages import Arrived
from tests.relay.brokers._support import raw_brokers
from tests.relay.brokers._support.raw_brokers import RawBroker
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DEAD, DUE, SOURCE, AnyBroker, configuration

MIB = 2**20
KEPT = {"kafka": 64 * MIB, "nats": 0, "redis": 0}
"""The `kept_bytes` of the file, which come on top of `memory_bytes` and are at most an eighth of it."""
UNKNOWN = 2 * ROWS_FIRST
"""So many messages may come before their size is known: one portion is read, and one is fetched."""
BESIDE = 16 * MIB
"""What else grows with the work: the names of what is under way, what a client reads ahead and publishes, what the
allocator keeps.
"""
_SMALL = 100
_PUBLISHED_AT_ONCE = 1_000
_PUBLISHED_AT_ONCE_BYTES = 8 * MIB
_BYTES_A_SECOND = 20 * MIB
"""So fast, at least, the tests publish and the relay reads."""


@dataclasses.dataclass
class Load:
    """Messages of one size, all due at one moment, and what has arrived of them."""

    rows: int
    size: int
    small: int = 0
    """How many small messages come first: by their bytes, far more could be asked for at once."""
    arrived: dict[int, int] = dataclasses.field(default_factory=dict)
    """Number of a message -> how often it came, whole."""

    @property
    def count(self) -> int:
        return self.small + self.rows

    def body(self, row: int) -> str:
        return f"{row} ".ljust(_SMALL if row < self.small else self.size, "x")

    async def publish(self, broker: AnyBroker) -> None:
        due_ms = time.time_ns() // 1_000_000 + 1_000 * self.rows * self.size // _BYTES_A_SECOND
        headers: Mapping[str, str] = {"deliver-at": str(due_ms)}
        for first in range(0, self.small, _PUBLISHED_AT_ONCE):
            rows = range(first, min(first + _PUBLISHED_AT_ONCE, self.small))
            await broker.publish(SOURCE, [({}, self.body(row)) for row in rows])
        at_once = max(1, _PUBLISHED_AT_ONCE_BYTES // self.size)
        for first in range(self.small, self.count, at_once):
            rows = range(first, min(first + at_once, self.count))
            await broker.publish(SOURCE, [(headers, self.body(row)) for row in rows])

    def take(self, messages: list[Arrived]) -> None:
        for each in messages:
            body = each.body or dict(each.fields).get(b"body") or b""
            row = int(body.partition(b" ")[0])
            assert hashlib.sha256(body).digest() == hashlib.sha256(self.body(row).encode()).digest()
            self.arrived[row] = self.arrived.get(row, 0) + 1

    async def come(self, raw: RawBroker, relay: RelayProcess, limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while len(self.arrived) < self.count:
            self.take(await raw.read(DUE))
            assert relay.alive, relay.log_text()[-3_000:]
            assert time.monotonic() < deadline_s, f"{len(self.arrived)} came; {relay.log_text()[-3_000:]}"
            await asyncio.sleep(0.05)


async def peak(
    broker: AnyBroker, directory: Path, load: Load, memory_bytes: int, *, limit_s: float
) -> Mapping[str, object]:
    """Let them all come; return what the relay's process took at most, in MiB."""
    own = f"memory_bytes = {memory_bytes}\n"
    with DaemonProcess("daemon", directory, local_store(directory / "root")) as daemon:
        daemon.start_serving()
        settings = configuration(broker, daemon.address).replace("kept_bytes = 0", f"kept_bytes = {KEPT['kafka']}")
        async with raw_brokers.opened(broker) as raw:
            with RelayProcess("relay", directory, settings, own) as relay:
                relay.start()
                await asyncio.to_thread(relay.wait_for_log, '"message":"relays"')
                base_bytes = relay.usage().resident_bytes_max
                began_s = time.monotonic()
                await load.publish(broker)
                await load.come(raw, relay, limit_s)
                took_s = time.monotonic() - began_s
                usage = relay.usage()
                assert await raw.read(DEAD) == []
                assert relay.terminate() == 0
    assert set(load.arrived.values()) == {1}
    kept_bytes = min(KEPT[broker.kind], memory_bytes // 8)
    bound_bytes = base_bytes + memory_bytes + kept_bytes + UNKNOWN * load.size + BESIDE
    told = {
        "MiB that it may hold": memory_bytes // MIB,
        "MiB of messages": load.rows * load.size // MIB,
        "MiB at the start": base_bytes // MIB,
        "MiB at most": usage.resident_bytes_max // MIB,
        "MiB of the bound": bound_bytes // MIB,
        "above the start, for each that it may hold": round((usage.resident_bytes_max - base_bytes) / memory_bytes, 2),
        "seconds": round(took_s, 1),
    }
    assert usage.resident_bytes_max < bound_bytes, f"{broker.kind}: {told}"
    return told


@pytest.mark.long
@pytest.mark.parametrize("memory_mib", [256, 64])
@pytest.mark.parametrize("load", [(500, 900_000, 0), (10_000, 100_000, 0), (500, 900_000, 20_000)])
async def test_messages_that_are_due_at_once_take_no_more_memory_than_the_file_says(
    broker: AnyBroker,
    tmp_path: Path,
    load: tuple[int, int, int],
    memory_mib: int,
    record_property: Callable[[str, object], None],
) -> None:
    told = await peak(broker, tmp_path, Load(*load), memory_mib * MIB, limit_s=600)
    record_property("told", told)
    rows, size, small = load
    print(f"{broker.kind}, {rows} of {size} bytes, {small} small ones before: {told}")  # noqa: T201


@pytest.mark.long
async def test_few_large_messages_come_through_little_memory(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    told = await peak(broker, tmp_path, Load(60, 900_000, small=1_500), 8 * MIB, limit_s=120)
    record_property("told", told)
    print(f"{broker.kind}: {told}")  # noqa: T201
