"""Dispatchers that hand back what they get, for tests of redelivery."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from daemon import call_values
from daemon.call_values import Nack
from daemon.core.decisions.claims import HeldPositions
from daemon.topic.open_streams import DispatchStream
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.manifest import RedeliveryKind, RedeliveryPolicy, SubscriptionPolicy
from tests._support.engine_fixture import TIMEOUT_S, Daemon, EngineFixture, no_positions
from tests._support.outcomes import Counts, counts_of, ignored_by

EXACT = SubscriptionPolicy(nack_precision_bits=0)
MINUTE_MS = 60_000

SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")
TICK_MS = 6
NACKED, DEAD = Counts(0, 0), Counts(0, 1)

Claim = tuple[int | None, ...]
"""ledger, entry, deliver_at_ms, maybe the batch index; a `HandOut` is one"""


class HandOut(NamedTuple):
    """A row as it came, and when. `part`: None for the entry as a whole."""

    ledger: int
    entry: int
    deliver_at_ms: int
    part: int | None
    redeliveries: int
    key_hash: int
    at_ms: int


def constant(delay_ms: int, **fields: Any) -> SubscriptionPolicy:
    """Exact, with that delay."""
    redelivery = RedeliveryPolicy(kind=RedeliveryKind.CONSTANT, initial_ms=delay_ms)
    return SubscriptionPolicy(redelivery=redelivery, nack_precision_bits=0, **fields)


def claims(rows: Sequence[Claim]) -> HeldPositions:
    parts = [row[3] if len(row) > 3 and row[3] is not None else NO_BATCH_INDEX for row in rows]
    ledger_id, entry_id, deliver_at_ms = (np.array([row[place] for row in rows], np.uint64) for place in range(3))
    whole = all(part == NO_BATCH_INDEX for part in parts)
    return HeldPositions(ledger_id, entry_id, deliver_at_ms, None if whole else np.array(parts, np.uint32))


def nack_of(
    rows: Sequence[Claim],
    delay_ms: int | Sequence[int] | None = None,
    *,
    level: int | None = None,
    reject: bool = False,
    text: str = "",
    key_hash: Sequence[int] | None = None,
) -> Nack:
    count = len(rows)
    return Nack(
        claims(rows),
        delay_ms=None if delay_ms is None else np.broadcast_to(np.array(delay_ms, np.uint64), count).copy(),
        delay_level=None if level is None else np.full(count, level, np.int32),
        reject=reject,
        text=text,
        key_hash=None if key_hash is None else np.array(key_hash, np.uint32),
    )


def nack(
    daemon: Daemon,
    rows: Sequence[Claim],
    delay_ms: int | Sequence[int] | None = None,
    *,
    topic: str = "t",
    subscription: str = "s",
    level: int | None = None,
    reject: bool = False,
    text: str = "",
    key_hash: Sequence[int] | None = None,
) -> asyncio.Task[Counts]:
    """Without a stream."""
    asked = nack_of(rows, delay_ms, level=level, reject=reject, text=text, key_hash=key_hash)
    return daemon.call(counts_of(daemon.engine.requests.negative_acknowledge, topic, subscription, asked))


def hand_outs(handed: call_values.HandedOut, at_ms: int) -> list[HandOut]:
    rows, count = handed.rows, len(handed.rows)
    nothing = np.zeros(count, np.uint32)
    parts = [None] * count if handed.batch_index is None else handed.batch_index.tolist()
    columns = zip(
        rows.ledger_id.tolist(),
        rows.entry_id.tolist(),
        rows.deliver_at_ms.tolist(),
        [None if part == NO_BATCH_INDEX else part for part in parts],
        (nothing if handed.redelivery_count is None else handed.redelivery_count).tolist(),
        (nothing if rows.key_hash is None else rows.key_hash).tolist(),
        [at_ms] * count,
        strict=True,
    )
    return [HandOut(*row) for row in columns]


class Dispatcher:
    """A stream whose messages are taken as they come, all of them in `got`."""

    def __init__(self, daemon: Daemon, stream: DispatchStream) -> None:
        self.stream = stream
        self.got: list[HandOut] = []
        self.ended: Exception | None = None
        self._daemon = daemon
        self._waited = 0
        self.task = daemon.call(self._receive())

    async def _receive(self) -> None:
        try:
            while True:
                self.got += hand_outs(await self.stream.next_messages(), self._daemon.now_ms())
        except Exception as error:  # noqa: BLE001 - the test looks at it
            self.ended = error

    async def next(self, count: int, *, timeout_s: float = TIMEOUT_S) -> list[HandOut]:
        """The next so many rows after those that were asked for before."""
        self._waited += count
        await self._daemon.until(lambda: len(self.got) >= self._waited, timeout_s=timeout_s)
        return self.got[self._waited - count : self._waited]

    def nothing_more(self) -> bool:
        """Whether no row came that was not asked for."""
        return len(self.got) == self._waited

    def nack(
        self,
        rows: Sequence[Claim],
        delay_ms: int | Sequence[int] | None = None,
        *,
        level: int | None = None,
        reject: bool = False,
        text: str = "",
    ) -> asyncio.Task[Counts]:
        asked = nack_of(rows, delay_ms, level=level, reject=reject, text=text)
        return self._daemon.call(counts_of(self.stream.negative_acknowledge, asked))

    def acknowledge(self, rows: Sequence[Claim]) -> asyncio.Task[int]:
        return self._daemon.call(ignored_by(self.stream.acknowledge, claims(rows)))

    def extend(self, rows: Sequence[Claim]) -> asyncio.Task[int]:
        return self._daemon.call(ignored_by(self.stream.extend, claims(rows)))


async def dispatcher(
    daemon: Daemon,
    *,
    topic: str = "t",
    subscription: str = "s",
    policy: SubscriptionPolicy | None = EXACT,
    permits: int = 1_000_000,
    held: Sequence[Claim] = (),
) -> Dispatcher:
    """Creates the subscription with the policy, if there is one, and opens a stream on it."""
    requests = daemon.engine.requests
    if policy is not None:
        await daemon.call(requests.create_subscription(topic, subscription, policy))
    positions = claims(held) if held else no_positions()
    stream = await daemon.call(requests.open_dispatch(topic, subscription, positions))
    stream.grant(permits)
    return Dispatcher(daemon, stream)


async def with_rows(
    machines: EngineFixture,
    count: int,
    *settings: str,
    policy: SubscriptionPolicy = EXACT,
    permits: int = 1_000_000,
) -> tuple[Daemon, Dispatcher, list[HandOut]]:
    """A daemon, a dispatcher, and as many rows that it was handed out."""
    one = await machines.served_by("one", *settings)
    listener = await dispatcher(one, policy=policy, permits=permits)
    await one.add("t", 1, range(count), delay_ms=0)
    return one, listener, await listener.next(min(count, permits))


def counts(rows: Sequence[HandOut]) -> list[int]:
    return [row.redeliveries for row in rows]


def entries(rows: Sequence[HandOut]) -> list[int]:
    return [row.entry for row in rows]


def assert_back_after(rows: Sequence[HandOut], since_ms: int, delay_ms: int, *, late_ms: int = TICK_MS) -> None:
    """Never early, and hardly late."""
    for row in rows:
        assert since_ms + delay_ms <= row.at_ms <= since_ms + delay_ms + late_ms, (row, row.at_ms - since_ms)


async def update(daemon: Daemon, policy: SubscriptionPolicy, subscription: str = "s") -> None:
    await daemon.call(daemon.engine.requests.update_subscription("t", subscription, policy))
