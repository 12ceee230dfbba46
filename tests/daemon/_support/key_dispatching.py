"""Dispatchers of KEY_SHARED subscriptions with their consumers, for tests.

Owns: rows with keys, and a dispatcher that takes what goes out as it comes.
Does not own: what is tested.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from daemon import call_values
from daemon.core.decisions.add_decisions import AddBatch
from daemon.core.key_shared.hash_slots import HashRange
from daemon.topic.key_shared_streams import KeySharedStream
from storage_backends.formats.manifest import HashSelector, KeySharedPolicy, SubscriptionPolicy
from tests._support.engine_fixture import TIMEOUT_S, Daemon
from tests._support.outcomes import Counts, counts_of, ended, ignored_by
from tests.daemon._support.nacking import Claim, HandOut, claims, hand_outs, nack_of

MANY = 1_000_000
HASHES = 1 << 16
HALF = HASHES // 2


class Sent(NamedTuple):
    """A row as it came, and to whom."""

    consumer: int
    row: HandOut

    @property
    def entry(self) -> int:
        return self.row.entry


def claim_of(sent: Sent) -> tuple[int, Claim, int]:
    """As it is declared on a new stream."""
    return sent.consumer, sent.row[:3], sent.row.key_hash


def planned(ledger: int, entries: Sequence[int]) -> list[Claim]:
    """As positions that were planned are acknowledged."""
    return [(ledger, entry, 0) for entry in entries]


def sticky(**fields: Any) -> SubscriptionPolicy:
    """Consumers say which hashes they have."""
    return by_key(selector=HashSelector.STICKY, **fields)


def by_key(**fields: Any) -> SubscriptionPolicy:
    return SubscriptionPolicy(nack_precision_bits=0, key_shared=KeySharedPolicy(**fields))


def consumer(
    consumer_id: int, *ranges: tuple[int, int], permits: int = MANY, name: str = "", address: str = ""
) -> call_values.Consumer:
    return call_values.Consumer(
        consumer_id,
        name or f"consumer-{consumer_id}",
        address,
        permits,
        tuple(HashRange(first, last) for first, last in ranges),
    )


def halves(*, permits: int = MANY) -> list[call_values.Consumer]:
    """Consumer 1 has the lower half of the hashes, consumer 2 the upper one."""
    return [consumer(1, (0, HALF - 1), permits=permits), consumer(2, (HALF, HASHES - 1), permits=permits)]


class KeyDispatcher:
    """A KEY_SHARED stream; what goes out on it is taken as it comes."""

    def __init__(self, daemon: Daemon, stream: KeySharedStream) -> None:
        self.stream = stream
        self.got: list[Sent] = []
        self.taken_back: list[Sent] = []
        self.planned: dict[int, list[int]] = {}
        # Both in one order, and of each plan its number and how much of them came before it.
        self.log: list[tuple[str, Sent]] = []
        self.answered: list[tuple[int, int]] = []
        self.ended: Exception | None = None
        self._daemon = daemon
        self._waited = 0
        self._requests = 0
        # While it is not set what was taken last is being written, and nothing more is taken.
        self.going_on = asyncio.Event()
        self.going_on.set()
        self.task = daemon.call(self._receive())

    async def _receive(self) -> None:
        try:
            while True:
                outgoing = await self.stream.next()
                await self.going_on.wait()
                match outgoing:
                    case call_values.HandedOut() as handed:
                        sent = self._sent(handed)
                        self.got += sent
                        self.log += [("sent", each) for each in sent]
                    case call_values.TakenBack(rows):
                        taken = self._sent(rows)
                        self.taken_back += taken
                        self.log += [("taken back", each) for each in taken]
                    case call_values.Planned(request_id=request_id, consumer_id=consumer_id):
                        self.planned[request_id] = consumer_id.tolist()
                        self.answered.append((request_id, len(self.log)))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.ended = error

    def _sent(self, handed: call_values.HandedOut) -> list[Sent]:
        assert handed.consumer_id is not None
        rows = hand_outs(handed, self._daemon.now_ms())
        return [Sent(*each) for each in zip(handed.consumer_id.tolist(), rows, strict=True)]

    async def next(self, count: int, *, timeout_s: float = TIMEOUT_S) -> list[Sent]:
        """The next so many rows after those that were asked for before."""
        self._waited += count
        await self._daemon.until(lambda: len(self.got) >= self._waited or self.ended is not None, timeout_s=timeout_s)
        if len(self.got) < self._waited and self.ended is not None:
            raise self.ended
        return self.got[self._waited - count : self._waited]

    async def nothing_more(self, *, for_s: float = 2.0) -> bool:
        """Whether no row comes that was not asked for."""
        await asyncio.sleep(for_s)
        return len(self.got) == self._waited

    def of(self, consumer_id: int) -> list[int]:
        """The entries that a consumer has received."""
        return [each.entry for each in self.got if each.consumer == consumer_id]

    async def plan(self, ledger: int, entries: Sequence[int], hashes: Sequence[int] | None = None) -> list[int]:
        """Who receives each; 0: held."""
        self._requests += 1
        request_id = self._requests
        columns = np.full(len(entries), ledger, np.uint64), np.array(entries, np.uint64)
        key_hash = None if hashes is None else np.array(hashes, np.uint32)
        await self._daemon.call(ended(self.stream.plan, request_id, *columns, key_hash))
        await self._daemon.until(lambda: request_id in self.planned)
        return self.planned[request_id]

    def acknowledge(self, rows: Sequence[Sent | Claim]) -> asyncio.Task[int]:
        held = claims([each.row if isinstance(each, Sent) else each for each in rows])
        return self._daemon.call(ignored_by(self.stream.acknowledge, held))

    def nack(self, rows: Sequence[Sent | Claim], delay_ms: int | None = None) -> asyncio.Task[Counts]:
        asked = nack_of([each.row if isinstance(each, Sent) else each for each in rows], delay_ms)
        return self._daemon.call(counts_of(self.stream.negative_acknowledge, asked))

    def extend(self, rows: Sequence[Sent]) -> asyncio.Task[int]:
        return self._daemon.call(ignored_by(self.stream.extend, claims([each.row for each in rows])))


async def open_by_key(
    daemon: Daemon,
    consumers: Sequence[call_values.Consumer],
    *,
    policy: SubscriptionPolicy | None = None,
    held: Sequence[tuple[int, Claim, int]] = (),
    topic: str = "t",
    subscription: str = "s",
) -> KeyDispatcher:
    """Creates the subscription with the policy, if there is one, and opens a stream on it.

    `held`: (consumer id, position, hash) of each.
    """
    requests = daemon.engine.requests
    if policy is not None:
        await daemon.call(requests.create_subscription(topic, subscription, policy))
    positions = call_values.HeldByConsumers(
        claims([claim for _, claim, _ in held]),
        np.array([consumer_id for consumer_id, _, _ in held], np.uint32),
        np.array([key_hash for _, _, key_hash in held], np.uint32),
    )
    stream = await daemon.call(requests.open_key_shared(topic, subscription, list(consumers), positions))
    return KeyDispatcher(daemon, stream)


async def add(
    daemon: Daemon,
    ledger: int,
    entries: Sequence[int],
    hashes: Sequence[int],
    delay_ms: int = 0,
    *,
    topic: str = "t",
) -> None:
    """Entries with the hashes of their keys."""
    count = len(entries)
    batch = AddBatch(
        ledger_id=np.full(count, ledger, np.uint64),
        entry_id=np.array(entries, np.uint64),
        deliver_at_ms=np.full(count, daemon.now_ms() + delay_ms, np.uint64),
        delay_ms=None,
        key_hash=np.array(hashes, np.uint32),
        return_already_due=False,
    )
    await daemon.call(daemon.engine.requests.add(topic, batch))
