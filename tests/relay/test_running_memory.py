"""How a relay keeps within `relay.memory_bytes`: what waits for what, what goes on, and what is let go."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

import tarry
from tarry_relay import pacing, port, publishing, relay_settings
from tarry_relay.health import Health
from tarry_relay.port import Produced
from tarry_relay.relay_metrics import RelayMetrics
from tests.relay._support.listed import OTHERS, Daemon, Listed, relayed, settings

MIB = 2**20
SIZE = 100_000
PORTION = MIB // 16


def message(size: int, **headers: str) -> port.Message:
    return port.Message(headers, "payload", sent_at_ms=1_000, size_bytes=size)


@dataclasses.dataclass
class Sized(Listed):
    """A broker whose messages have a size, and which gives no more of them than it is asked for."""

    log_of_messages: list[port.Message] = dataclasses.field(default_factory=list)
    """What is read on."""
    given: int = 0
    asked: list[int] = dataclasses.field(default_factory=list)
    """How many messages each read asks for."""
    fetched: list[list[int]] = dataclasses.field(default_factory=list)
    """The entries that each fetch asks for."""
    size_of: Callable[[int], int] = lambda entry: SIZE
    takes: asyncio.Event | None = None
    """Until when the target `due` answers nothing."""

    @property
    def source(self) -> port.Reader:
        return _SizedReader(self)

    async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Sequence[port.Message | None]:
        self.fetched.append([entry for _, entry in positions])
        found = await super().fetch(positions, generation)
        return [
            each and dataclasses.replace(each, size_bytes=self.size_of(entry))
            for each, (_, entry) in zip(found, positions, strict=True)
        ]

    async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[Produced]:
        if self.takes is not None and any(each.target == "due" for each in messages):
            await self.takes.wait()
        return await super().produce(messages)


class _SizedReader:
    commits_in_order = False
    hold_every_s: float | None = None

    def __init__(self, broker: Sized) -> None:
        self.broker = broker

    async def hold(self, read: Sequence[port.Read]) -> None:
        pass

    async def read(self, rows_max: int, wait_s: float) -> port.Portion:
        await asyncio.sleep(0.001)
        first = self.broker.given
        some = self.broker.log_of_messages[first : first + rows_max]
        if not some:
            return port.Portion()
        self.broker.asked.append(rows_max)
        self.broker.given += len(some)
        return port.Portion([port.Read(1, first + row, each, "lane") for row, each in enumerate(some)])

    async def commit(self, read: Sequence[port.Read]) -> None:
        self.broker.committed += read

    async def passed(self, positions: Sequence[tuple[int, int]]) -> Sequence[bool]:
        return [False] * len(positions)


def little(**relay: Any) -> relay_settings.Settings:
    """Return settings with one MiB, so that reading has half of it."""
    return msgspec.structs.replace(
        settings(), relay=relay_settings.Relay(topic="orders", memory_bytes=MIB, drain_s=5, **relay)
    )


def due(*entries: int) -> list[tarry.DeliveryId]:
    return [tarry.DeliveryId(1, entry, None, 5_000, 0) for entry in entries]


class Watched:
    """Says whether something has stayed the same for a while."""

    def __init__(self) -> None:
        self._seen: object = None
        self._looks = 0

    def is_still(self, value: object, looks: int = 40) -> bool:
        self._looks = self._looks + 1 if value == self._seen else 0
        self._seen = value
        return self._looks >= looks


async def test_reading_stops_at_half_of_the_memory_and_goes_on_when_it_is_added() -> None:
    broker = Sized(log_of_messages=[message(SIZE, delay="5s")] * 100)
    daemon, watched, stopped_at = Daemon(holds_adds=asyncio.Event()), Watched(), list[int]()
    assert daemon.holds_adds is not None

    def is_done() -> bool:
        if broker.given and not stopped_at and watched.is_still(broker.given):
            stopped_at.append(broker.given)
            assert daemon.holds_adds is not None
            daemon.holds_adds.set()
        return len(broker.committed) == 100

    await relayed(broker, daemon, is_done, said=little())
    # The first portion is of 16, since nothing is known of their size.
    assert stopped_at == [16]
    assert broker.asked[0] == 16
    assert set(broker.asked[5:]) == {1}, "each is larger than a portion, so each comes alone"
    assert len(daemon.added) == 100


async def test_what_is_due_is_fetched_while_reading_is_full() -> None:
    broker = Sized(log_of_messages=[message(SIZE, delay="5s")] * 100)
    daemon = Daemon(holds_adds=asyncio.Event())
    watched, now_due = Watched(), due(*range(30))
    assert daemon.holds_adds is not None

    def is_done() -> bool:
        if broker.given and now_due and watched.is_still(broker.given):
            daemon.due += now_due
            now_due.clear()
        if len(daemon.acknowledged) == 30 and daemon.holds_adds is not None and not daemon.holds_adds.is_set():
            assert broker.given == 16
            daemon.holds_adds.set()
        return len(broker.committed) == 100

    await relayed(broker, daemon, is_done, said=little())
    assert sorted(daemon.acknowledged) == list(range(30))


async def test_what_comes_is_read_and_added_while_fetching_is_full() -> None:
    broker = Sized(takes=asyncio.Event())
    daemon, watched, fetched_at = Daemon(due=due(*range(100))), Watched(), list[int]()

    def is_done() -> bool:
        if broker.fetched and not fetched_at and watched.is_still(len(broker.fetched)):
            fetched_at.append(sum(map(len, broker.fetched)))
            broker.log_of_messages += [message(SIZE, delay="5s")] * 50
        if len(broker.committed) == 50 and broker.takes is not None and not broker.takes.is_set():
            assert daemon.acknowledged == []
            broker.takes.set()
        return len(daemon.acknowledged) == 100

    await relayed(broker, daemon, is_done, said=little())
    assert fetched_at[0] <= 16
    assert len(daemon.added) == 50


async def test_messages_without_a_time_for_a_target_that_is_away_keep_nothing_that_is_due_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishing, "OVERDUE_S", 1.0)
    monkeypatch.setattr(pacing, "REST_S", 0.01)
    # Three times as much as the relay may hold.
    broker = Sized(log_of_messages=[message(SIZE)] * 30, failing={"due"})
    daemon = Daemon(due=due(*range(OTHERS, OTHERS + 30)))
    order: list[str] = []

    def is_done() -> bool:
        if len(daemon.acknowledged) == 30 and not order:
            order.append("what is due for another target has come")
            assert len(broker.committed) == 0
        return len(broker.committed) == 30

    await relayed(broker, daemon, is_done, said=little())
    assert order != []
    assert sorted(daemon.acknowledged) == list(range(OTHERS, OTHERS + 30))
    # And none of the others holds the source.
    assert sorted(entry for entry, _ in daemon.added_late) == list(range(30))


async def test_what_is_due_for_a_target_that_is_away_leaves_memory_to_what_is_due_for_another() -> None:
    broker, daemon = Sized(failing={"due"}), Daemon(due=due(*range(60), *range(OTHERS, OTHERS + 30)))

    def is_done() -> bool:
        if len(daemon.acknowledged) == 30 and broker.failing:
            assert min(daemon.acknowledged) == OTHERS
            broker.failing.clear()
        return len(daemon.acknowledged) == 90

    await relayed(broker, daemon, is_done, said=little())


@pytest.mark.parametrize("delay", [{}, {"delay": "5s"}])
async def test_a_message_larger_than_all_memory_comes(delay: dict[str, str]) -> None:
    broker = Sized(log_of_messages=[message(3 * MIB, **delay)] * 40, size_of=lambda entry: 3 * MIB)
    daemon = Daemon(due=due(*range(40)))
    await relayed(broker, daemon, lambda: len(broker.committed) == len(daemon.acknowledged) == 40, said=little(rows=16))
    assert broker.asked[:5] == [16, 8, 4, 2, 1]
    assert set(broker.asked[5:]) == {1}
    assert [len(each) for each in broker.fetched][:5] == [16, 8, 4, 2, 1]
    assert {len(each) for each in broker.fetched[5:]} == {1}


async def test_a_fetch_that_is_cut_keeps_what_came_and_asks_for_the_others_again() -> None:
    @dataclasses.dataclass
    class Cut(Sized):
        async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Any:
            found = await super().fetch(positions, generation)
            return [*found[:3], *[port.NOT_YET] * (len(found) - 3)] if len(self.fetched) == 1 else found

    broker, daemon = Cut(size_of=lambda entry: 100), Daemon(due=due(*range(10)))
    metrics = await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 10, said=little())
    assert broker.fetched == [list(range(10)), list(range(3, 10))]
    assert len(broker.published) == 10
    assert metrics.failures.labels("broker")._value.get() == 1


async def test_a_fetch_that_brings_less_than_it_was_asked_for_makes_the_next_one_no_larger() -> None:
    @dataclasses.dataclass
    class Cut(Sized):
        async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Any:
            found = await super().fetch(positions, generation)
            return [found[0], *[port.NOT_YET] * (len(found) - 1)] if len(self.fetched) < 4 else found

    broker, daemon = Cut(size_of=lambda entry: 100), Daemon(due=due(*range(100)))
    await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 100, said=little())
    assert [len(each) for each in broker.fetched[:4]] == [16, 16, 16, 16]


async def test_a_fetch_that_ends_because_its_portion_is_full_is_no_failure() -> None:
    @dataclasses.dataclass
    class Full(Sized):
        async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Any:
            found = await super().fetch(positions, generation)
            return [found[0], *[port.NOT_YET] * (len(found) - 1)]

    broker, daemon = Full(), Daemon(due=due(*range(40)))
    metrics = await relayed(broker, daemon, lambda: len(daemon.acknowledged) == 40, said=little())
    assert [len(each) for each in broker.fetched[:5]] == [16, 8, 4, 2, 1]
    assert metrics.failures.labels("broker")._value.get() == 0
    assert len(broker.published) == 40


class Payload:
    """What can be seen to be gone."""


async def test_a_payload_is_gone_when_it_is_added_published_or_parked_though_nothing_more_comes() -> None:
    payloads = [Payload() for _ in range(3)]
    seen = [weakref.ref(each) for each in payloads]

    @dataclasses.dataclass
    class Remembering(Sized):
        async def fetch(self, positions: Sequence[tuple[int, int]], generation: str) -> Any:
            found = await super().fetch(positions, generation)
            body = Payload()
            seen.append(weakref.ref(body))
            return [each and dataclasses.replace(each, body=body) for each in found]

        async def produce(self, messages: Sequence[port.Outgoing]) -> Sequence[Produced]:
            came = await super().produce(messages)
            self.published.clear()
            return came

    broker = Remembering(failing={"away"}, size_of=lambda entry: SIZE)
    log = [
        dataclasses.replace(message(SIZE, **headers), body=body)
        for headers, body in zip(({"delay": "5s"}, {}, {"delay": "soon"}), payloads, strict=True)
    ]
    broker.log_of_messages = log
    payloads.clear()
    daemon, metrics = Daemon(due=due(7, OTHERS)), RelayMetrics(Health())

    def all_gone() -> bool:
        if len(broker.committed) == 3 and len(daemon.acknowledged) == 2:
            # The log of the broker keeps none of them.
            broker.log_of_messages.clear()
            broker.committed[:] = [dataclasses.replace(each, message=None) for each in broker.committed]
            gc.collect()
            return [each for each in seen if each() is not None] == []
        return False

    del log
    async with asyncio.timeout(30):
        await relayed(broker, daemon, all_gone, said=little(), metrics=metrics)
    assert len(seen) >= 4
