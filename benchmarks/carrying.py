"""Carries delayed messages from a producer to a consumer that sometimes fails, while processes are killed.

It has the messages, the consumer's account, which is the oracle, and the run: publishing, consuming, kills.
`redis_carriers`, `nats_carriers` and `kafka_carriers` implement `Carrier`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Protocol

from benchmarks import load
from examples import processes

# One in so many of the messages that fail does so twice.
TWICE_EVERY = 4
RETRY_MS = 200
CHUNK = 100
_AGAIN_S = 0.05


@dataclasses.dataclass(frozen=True)
class Message:
    """A message of the producer; its payload is its number."""

    number: int
    due_ms: int


@dataclasses.dataclass(frozen=True)
class Delivery:
    """A delivery to the consumer.

    `place` in the output is the same when it is read again. `attempt` is 0 for the first.
    """

    number: int
    attempt: int
    place: str
    received_ms: int
    handle: str = ""


# Returns the deliveries that have failed.
Take = Callable[[Sequence[Delivery]], Sequence[Delivery]]


class Carrier(Protocol):
    """A service that delays messages. Its methods raise one of `failures` while a server of it is unreachable."""

    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    async def publish(self, messages: Sequence[Message]) -> None:
        """Publish the messages; return when all are durable. A repeated call publishes none a second time."""

    async def consume(self, take: Take) -> None:
        """Read and commit until cancelled; call `take`, and redeliver what failed RETRY_MS later."""


class Account:
    """The account of the consumer's deliveries. One of `fails_every` messages fails."""

    def __init__(self, messages: int, *, fails_every: int) -> None:
        self._fails_every = fails_every
        self._due_ms: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
        self._first_ms: dict[tuple[int, int], int] = {}
        self._received = asyncio.Event()
        self._wanted = {(number, attempt) for number in range(messages) for attempt in range(self.failures(number) + 1)}

    def failures(self, number: int) -> int:
        """Return how often the message fails before it is processed."""
        if number % self._fails_every:
            return 0
        return 2 if number % (self._fails_every * TWICE_EVERY) == 0 else 1

    def publish(self, messages: Sequence[Message]) -> None:
        """Note messages that are about to be published."""
        self._due_ms.update({(message.number, 0): message.due_ms for message in messages})

    def take(self, delivered: Sequence[Delivery]) -> list[Delivery]:
        """Note deliveries; return those that fail.

        A delivery that is read again is noted once, and fails again.
        """
        failed = []
        for each in delivered:
            key = (each.number, each.attempt)
            self._places[key].add(each.place)
            self._first_ms.setdefault(key, each.received_ms)
            if each.attempt < self.failures(each.number):
                self._due_ms.setdefault((each.number, each.attempt + 1), each.received_ms + RETRY_MS)
                failed.append(each)
        self._received.set()
        return failed

    async def wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait until the condition holds, checking it after each delivery."""
        while not reached():
            self._received.clear()
            await self._received.wait()

    def has(self, share: float) -> bool:
        """Return whether that share of all deliveries has arrived."""
        return len(self._first_ms) >= share * len(self._wanted)

    def has_come(self, number: int) -> bool:
        return (number, 0) in self._first_ms

    @property
    def is_complete(self) -> bool:
        return self.has(1.0) and self._wanted <= self._first_ms.keys()

    def lateness_ms(self) -> list[int]:
        """Return received minus due (ms) of the first delivery of each message but the first one."""
        return [
            self._first_ms[number, attempt] - due_ms
            for (number, attempt), due_ms in self._due_ms.items()
            if number and not attempt and (number, attempt) in self._first_ms
        ]

    @property
    def first_deliveries_s(self) -> float:
        """The time from the second message's due time to the last first delivery (seconds), if all are due at once."""
        due_ms = min(due_ms for (number, attempt), due_ms in self._due_ms.items() if number and not attempt)
        return (max(at_ms for (_, attempt), at_ms in self._first_ms.items() if not attempt) - due_ms) / 1000

    @property
    def doubles(self) -> list[tuple[int, int]]:
        """(number, attempt) of the deliveries that arrived at more than one place."""
        return [key for key, places in self._places.items() if len(places) > 1]

    def problems(self) -> list[str]:
        """Return what is wrong with the deliveries, or nothing."""
        missing = self._wanted - self._first_ms.keys()
        unasked = self._first_ms.keys() - self._wanted
        early = [key for key, at_ms in self._first_ms.items() if key in self._due_ms and at_ms < self._due_ms[key]]
        found = {"never arrived": missing, "arrived though nobody asked": unasked, "arrived early": early}
        return [f"{len(keys)} {what}, as {sorted(keys)[:5]}" for what, keys in found.items() if keys]


class Program(processes.ChildProcess):
    """A module of this checkout, run as a program."""

    def __init__(self, directory: Path, module: str, *arguments: str) -> None:
        super().__init__(module, directory, {})
        self._command = (sys.executable, "-m", module, *arguments)

    def start(self) -> None:
        self._spawn(*self._command)


@dataclasses.dataclass(frozen=True)
class Victim:
    """A process that may be killed. `start` returns when it serves."""

    process: processes.ChildProcess
    start: Callable[[], object]

    async def kill(self) -> None:
        """Send SIGKILL, and start it again."""
        self.process.kill()
        await asyncio.to_thread(self.start)


@dataclasses.dataclass(frozen=True)
class Kill:
    """A kill when the share `at` of all deliveries has arrived. Kills are done one after the other."""

    at: float
    kill: Callable[[], Awaitable[None]]


async def carry(
    carrier: Carrier,
    account: Account,
    delays_ms: Sequence[int],
    kills: Sequence[Kill] = (),
    *,
    take: Take | None = None,
    until_rest: Callable[[], Awaitable[None]] | None = None,
    timeout_s: float,
) -> None:
    """Publish messages with these delays (ms), consume and kill, until all have arrived.

    The first message is published alone: when it has arrived, everything works, and the others are published. `take`
    replaces the account's own. `until_rest` is awaited at the end, while further deliveries are consumed. Raises
    TimeoutError.
    """
    try:
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as tasks:
            consuming = tasks.create_task(_persist(lambda: carrier.consume(take or account.take), carrier.failures))
            killing = tasks.create_task(_kill(account, kills))
            await _publish(carrier, account, delays_ms[:1])
            await account.wait_until(lambda: account.has_come(0))
            await _publish(carrier, account, delays_ms[1:], first=1)
            await killing
            await account.wait_until(lambda: account.is_complete)
            if until_rest is not None:
                await until_rest()
            # In Python 3.11 one cancellation may be lost in a library that waits with `asyncio.wait_for`.
            while not consuming.done():
                consuming.cancel()
                await asyncio.wait([consuming], timeout=_AGAIN_S)
    except TimeoutError:
        raise TimeoutError(f"{account.problems()} within {timeout_s:g} s") from None


async def _publish(carrier: Carrier, account: Account, delays_ms: Sequence[int], *, first: int = 0) -> None:
    """Publish messages; `first` is the number of the first."""
    for begin in range(0, len(delays_ms), CHUNK):
        now_ms = load.now_ms()
        chunk = enumerate(delays_ms[begin : begin + CHUNK], first + begin)
        messages = [Message(number, now_ms + delay_ms) for number, delay_ms in chunk]
        account.publish(messages)
        await _persist(functools.partial(carrier.publish, messages), carrier.failures)


async def _kill(account: Account, kills: Sequence[Kill]) -> None:
    for kill in sorted(kills, key=lambda each: each.at):
        await account.wait_until(functools.partial(account.has, kill.at))
        await kill.kill()


async def _persist(attempt: Callable[[], Awaitable[None]], failures: tuple[type[Exception], ...]) -> None:
    """Repeat until the attempt succeeds."""
    while True:
        try:
            return await attempt()
        except failures:
            await asyncio.sleep(_AGAIN_S)


def delays(messages: int, *, most_ms: int, seed: int) -> list[int]:
    """Return random delays from 0 to `most_ms`, and 0 for the first message."""
    dice = random.Random(seed)
    return [0, *(dice.randrange(most_ms + 1) for _ in range(messages - 1))]
