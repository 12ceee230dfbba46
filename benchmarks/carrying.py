"""Delayed messages from a producer to a consumer that fails now and then, whatever carries them and whoever is killed.

Owns: the messages, the account of the consumer, which is the oracle, and the run: publishing, consuming, kills.
Does not own: how a message gets there (`redis_carriers`, `nats_carriers`).
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

# Of what fails, every so many fail twice.
TWICE_EVERY = 4
RETRY_MS = 200
CHUNK = 100
_AGAIN_S = 0.05


@dataclasses.dataclass(frozen=True)
class Message:
    """What the producer publishes; its payload is its number."""

    number: int
    due_ms: int


@dataclasses.dataclass(frozen=True)
class Delivery:
    """What the consumer reads. `place`: in the output, the same when it is read again. `attempt`: 0 for the first."""

    number: int
    attempt: int
    place: str
    received_ms: int
    handle: str = ""


# Says which of the deliveries have failed.
Take = Callable[[Sequence[Delivery]], Sequence[Delivery]]


class Carrier(Protocol):
    """Something that delays messages. Its methods raise one of `failures` while a server of it is away."""

    @property
    def failures(self) -> tuple[type[Exception], ...]: ...

    async def publish(self, messages: Sequence[Message]) -> None:
        """Returns when all are durable. Repeated, it publishes none a second time."""

    async def consume(self, take: Take) -> None:
        """Reads, asks `take`, has what failed come again RETRY_MS later, and commits, until it is cancelled."""


class Account:
    """What the consumer has received. `fails_every`: of so many messages one fails."""

    def __init__(self, messages: int, *, fails_every: int) -> None:
        self._fails_every = fails_every
        self._due_ms: dict[tuple[int, int], int] = {}
        self._places: dict[tuple[int, int], set[str]] = collections.defaultdict(set)
        self._first_ms: dict[tuple[int, int], int] = {}
        self._received = asyncio.Event()
        self._wanted = {(number, attempt) for number in range(messages) for attempt in range(self.failures(number) + 1)}

    def failures(self, number: int) -> int:
        """How often the message fails before it is dealt with."""
        if number % self._fails_every:
            return 0
        return 2 if number % (self._fails_every * TWICE_EVERY) == 0 else 1

    def publish(self, messages: Sequence[Message]) -> None:
        """They are about to be published."""
        self._due_ms.update({(message.number, 0): message.due_ms for message in messages})

    def take(self, delivered: Sequence[Delivery]) -> list[Delivery]:
        """Notes what was received; what of it fails. What is read again is noted once, and fails again."""
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
        """Looks whenever something was received."""
        while not reached():
            self._received.clear()
            await self._received.wait()

    def has(self, share: float) -> bool:
        """Whether that share of all deliveries has come."""
        return len(self._first_ms) >= share * len(self._wanted)

    def has_come(self, number: int) -> bool:
        return (number, 0) in self._first_ms

    @property
    def is_complete(self) -> bool:
        return self.has(1.0) and self._wanted <= self._first_ms.keys()

    def lateness_ms(self) -> list[int]:
        """Received minus due: of the first delivery of each message but the first one."""
        return [
            self._first_ms[number, attempt] - due_ms
            for (number, attempt), due_ms in self._due_ms.items()
            if number and not attempt and (number, attempt) in self._first_ms
        ]

    @property
    def first_deliveries_s(self) -> float:
        """From when the second message was due until each had come for the first time, where all were due at once."""
        due_ms = min(due_ms for (number, attempt), due_ms in self._due_ms.items() if number and not attempt)
        return (max(at_ms for (_, attempt), at_ms in self._first_ms.items() if not attempt) - due_ms) / 1000

    @property
    def doubles(self) -> list[tuple[int, int]]:
        """(number, attempt) of what came at more than one place."""
        return [key for key, places in self._places.items() if len(places) > 1]

    def problems(self) -> list[str]:
        """What is not as it must be; empty: everything is."""
        missing = self._wanted - self._first_ms.keys()
        unasked = self._first_ms.keys() - self._wanted
        early = [key for key, at_ms in self._first_ms.items() if key in self._due_ms and at_ms < self._due_ms[key]]
        found = {"never arrived": missing, "arrived though nobody asked": unasked, "arrived early": early}
        return [f"{len(keys)} {what}, as {sorted(keys)[:5]}" for what, keys in found.items() if keys]


class Program(processes.ChildProcess):
    """A module of this checkout that is run."""

    def __init__(self, directory: Path, module: str, *arguments: str) -> None:
        super().__init__(module, directory, {})
        self._command = (sys.executable, "-m", module, *arguments)

    def start(self) -> None:
        self._spawn(*self._command)


@dataclasses.dataclass(frozen=True)
class Victim:
    """A process that may be killed. `start`: returns when it serves."""

    process: processes.ChildProcess
    start: Callable[[], object]

    async def kill(self) -> None:
        """SIGKILL, and start again."""
        self.process.kill()
        await asyncio.to_thread(self.start)


@dataclasses.dataclass(frozen=True)
class Kill:
    """`at`: the share of all deliveries that have come by then. One is done after the other."""

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
    """Publishes messages with these delays, consumes and kills, until everything has come. Raises TimeoutError.

    The first message is published by itself: when it has come, everything works, and the others are published.
    `take`: in place of the account's own. `until_rest`: is waited for at the end, while what else comes is consumed.
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
    """`first`: the number of the first message."""
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
    """Tries until it returns."""
    while True:
        try:
            return await attempt()
        except failures:
            await asyncio.sleep(_AGAIN_S)


def delays(messages: int, *, most_ms: int, seed: int) -> list[int]:
    """Any delay from 0 to `most_ms`; 0 for the first message."""
    dice = random.Random(seed)
    return [0, *(dice.randrange(most_ms + 1) for _ in range(messages - 1))]
