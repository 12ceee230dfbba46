"""Messages that no relay may fall over, through kills of relay, daemon and broker: each arrives or is a dead letter."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import tarry
import tarry.aio
from examples.processes import DaemonProcess, local_store
from tests.relay._support import hostile_judgement, hostile_kinds, hostile_messages
from tests.relay._support.hostile_messages import HostileMessage
from tests.relay._support.raw_messages import Fields, Position, Raw, fields_of
from tests.relay.brokers._support import raw_brokers
from tests.relay.brokers._support.raw_brokers import RawBroker
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import (
    DEAD,
    DUE,
    FAILED,
    GONE,
    RESULTS,
    SOURCE,
    AnyBroker,
    configuration,
)
from tests.relay.brokers.test_kills import Outages

RELAY = "missing_target_s = 3\n"
SOURCE_SETTINGS = f'results = "{RESULTS}"\nawait_commit_s = 5\ndelay_max = "1d"'
REPEATS_AFTER_MS = 30_000
"""How long after an outage Kafka may still have a message twice."""
DURATION_S = 600
"""How long rounds go on for each broker."""
_AT_ONCE = 1_000
_SHOWN = 30
_CHANGED_BY_NATS = b"Nats-Trace-Dest"


def read_back(broker: str, raw: Raw) -> Fields:
    """Return the headers that a client finds."""
    fields = fields_of(raw)
    if broker == "kafka":
        if any(name.startswith(b"\xff\xfe") for name, _ in fields):
            return ((raw_brokers.UNREADABLE, None),)
        fields = tuple((name.partition(b"\0")[0], value) for name, value in fields)
    return tuple(each for each in fields if each[0] != _CHANGED_BY_NATS)


async def test_a_broker_stores_every_hostile_message_as_it_was_published(broker: AnyBroker) -> None:
    messages = hostile_messages.generate(
        broker.kind, 0, 400, now_ms=time.time_ns() // 1_000_000, span_ms=1_000, share=0.8
    )
    async with raw_brokers.opened(broker) as raw:
        positions = await raw.publish(SOURCE, [each.raw for each in messages])
        stored = await raw.read(SOURCE)
    assert len(set(positions)) == len(stored) == len(messages)
    found = {(tuple(each for each in one.fields if each[0] != _CHANGED_BY_NATS), one.body) for one in stored}
    wrong = [each for each in messages if (read_back(broker.kind, each.raw), each.raw.body) not in found]
    assert [(each.kind, str(each.raw)[:200]) for each in wrong] == []


@dataclasses.dataclass
class Suite:
    """A relay between a broker and a daemon, the consumer of all its targets, and what is judged."""

    broker: AnyBroker
    raw: RawBroker
    daemon: DaemonProcess
    relay: RelayProcess
    judgement: hostile_judgement.Judgement
    seed: int = 0
    topic: str = ""
    outages: Outages = dataclasses.field(default_factory=Outages)
    memory_bytes_max: int = 0
    _to_return: list[Raw] = dataclasses.field(default_factory=list)

    async def round(self, seed: int, rows: int, *, share: float, span_ms: int, limit_s: float, first: int = 0) -> None:
        """Publish messages, kill one process after the other while they are on their way, and judge."""
        self.seed = seed
        now_ms = time.time_ns() // 1_000_000
        messages = hostile_messages.generate(
            self.broker.kind, seed, rows, now_ms=now_ms, span_ms=span_ms, share=share, first_number=first
        )
        await self._publish(messages)
        await self._until(lambda: self.relay.metric("tarry_relay_added_total") > 0, limit_s)
        self.topic = self.topic or str((await asyncio.to_thread(self.relay.told, "status"))["topic"])
        kills = [self._kill_relay, self._kill_daemon, self._kill_broker]
        random.Random(seed).shuffle(kills)
        settled = self.judgement.settled
        for part, kill in enumerate(kills, 1):
            await self._until(lambda part=part: self.judgement.settled >= settled + rows * part // 5, limit_s)  # type: ignore[misc]
            with self.outages.lasting():
                kill()
        await self._until(lambda: not self.judgement.unsettled, limit_s)
        await self._until(lambda: self.relay.metric("tarry_relay_messages") == 0, limit_s)
        # What came at last, or comes though it must not.
        await self._look()
        self._note_memory()
        self.outages.add_rebalances(self.relay)
        assert self.relay.health()["status"] == "ok", self._told(str(self.relay.health()))
        faults = self.judgement.faults(self._may_repeat)
        assert not faults, self._told("\n".join([f"{len(faults)} faults", *faults[:_SHOWN]]))

    async def _publish(self, messages: list[HostileMessage]) -> None:
        for first in range(0, len(messages), _AT_ONCE):
            some = messages[first : first + _AT_ONCE]
            for stream, is_returned in ((SOURCE, False), (FAILED, True)):
                of_stream = [each for each in some if each.is_returned is is_returned]
                sent_at_ms = time.time_ns() // 1_000_000
                if of_stream:
                    positions = await self.raw.publish(stream, [each.raw for each in of_stream])
                    self.judgement.send(of_stream, positions, sent_at_ms)

    def _kill_relay(self) -> None:
        self._note_memory()
        self.relay.kill()
        self.relay.start()

    def _kill_daemon(self) -> None:
        self.daemon.kill()
        self.daemon.start_serving()

    def _kill_broker(self) -> None:
        self.broker.server.kill()
        self.broker.server.start()
        self.broker.server.wait_until_loaded()

    def _note_memory(self) -> None:
        self._must_live()
        self.memory_bytes_max = max(self.memory_bytes_max, self.relay.usage().resident_bytes_max)

    def _must_live(self) -> None:
        assert self.relay.alive, self._told(str(self.relay.failed("ended by itself")))

    async def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        deadline_s = time.monotonic() + limit_s
        while not reached():
            self._must_live()
            with contextlib.suppress(*GONE, tarry.TarryError):
                await self._look()
            if time.monotonic() > deadline_s:
                faults = self.judgement.faults(self._may_repeat)
                what = f"not done within {limit_s:g} s, {len(self.judgement.unsettled)} are not settled"
                raise AssertionError(self._told("\n".join([what, *faults[:_SHOWN], self.relay.log_text()[-3_000:]])))
            await asyncio.sleep(0.05)

    async def _look(self) -> None:
        """Take what is new, and return what fails to the retry log."""
        for stream in await self.raw.streams() - {DEAD, RESULTS}:
            for message, delivery_id in self.judgement.take(await self.raw.read(stream)):
                self._to_return.append(hostile_messages.retry_of(self.broker.kind, message, delivery_id))
        self.judgement.take_dead(await self.raw.read(DEAD))
        self.judgement.take_results(await self.raw.read(RESULTS))
        if self._to_return:
            await self.raw.publish(FAILED, self._to_return)
            self._to_return.clear()
        if self.topic:
            self.judgement.take_dead_in_tarry([each async for each in self._dead_in_tarry()])

    async def _dead_in_tarry(self) -> AsyncIterator[tuple[Position, str]]:
        async with tarry.aio.Client(self.daemon.address) as client:
            async for page in client.dead_letters(self.topic, "relay"):
                columns = (page.ledger_id.tolist(), page.entry_id.tolist(), page.text_index.tolist())
                for ledger_id, entry_id, text in zip(*columns, strict=True):
                    yield (ledger_id, entry_id), page.texts[text]

    def _may_repeat(self, first_ms: int, again_ms: int) -> bool:
        """Only Kafka drops nothing by its name."""
        return self.broker.kind == "kafka" and self.outages.lie_between(first_ms, again_ms, REPEATS_AFTER_MS)

    def _told(self, what: str) -> str:
        return f"{self.broker.kind}, seed {self.seed}: {what}"


@contextlib.asynccontextmanager
async def suite(broker: AnyBroker, directory: Path) -> AsyncIterator[Suite]:
    patterns = [f"{{ pattern = '{each}' }}" for each in hostile_kinds.PATTERNS[broker.kind]]
    with DaemonProcess("daemon", directory, local_store(directory / "root")) as daemon:
        daemon.start_serving()
        named = f'{{ name = "{DUE}" }}'
        settings = configuration(broker, daemon.address, SOURCE_SETTINGS)
        assert named in settings
        settings = settings.replace(named, ", ".join([named, *patterns]))
        async with raw_brokers.opened(broker) as raw:
            with RelayProcess("relay", directory, settings, RELAY) as relay:
                relay.start()
                judgement = hostile_judgement.Judgement(broker.kind, raw_brokers.SMALL)
                yield Suite(broker, raw, daemon, relay, judgement)


@pytest.mark.long
async def test_no_message_stops_a_relay_through_kills(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Every kind there is, once."""
    async with suite(broker, tmp_path) as running:
        await running.round(0, 400, share=0.8, span_ms=3_000, limit_s=600)
        record_property("bytes of memory at most", running.memory_bytes_max)
        assert running.relay.terminate() == 0


@pytest.mark.long
async def test_no_message_of_twenty_thousand_stops_a_relay_through_kills(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    rows, began_s = 20_000, time.monotonic()
    async with suite(broker, tmp_path) as running:
        await running.round(1, rows, share=0.05, span_ms=30_000, limit_s=900)
        told = {
            "messages": rows,
            "seconds": round(time.monotonic() - began_s, 1),
            "bytes of memory at most": running.memory_bytes_max,
        }
        record_property("told", told)
        print(f"{broker.kind}: {told}")  # noqa: T201
        assert running.relay.terminate() == 0


@pytest.mark.long
async def test_rounds_of_hostile_messages_go_on_for_long(
    broker: AnyBroker, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Other messages each time; a failure says by which seed."""
    rows, ends_s = 2_000, time.monotonic() + DURATION_S
    seed = time.time_ns() // 1_000_000_000
    async with suite(broker, tmp_path) as running:
        for number in itertools.count():
            await running.round(seed + number, rows, share=0.3, span_ms=5_000, limit_s=600, first=number * rows)
            if time.monotonic() > ends_s:
                break
        told = {"seed": seed, "rounds": number + 1, "bytes of memory at most": running.memory_bytes_max}
        record_property("told", told)
        print(f"{broker.kind}: {told}")  # noqa: T201
        assert running.relay.terminate() == 0
