"""Requests on what was handed out, of the engine that is all in memory: acknowledging, positively and negatively, and
keeping longer; and the columns of what is handed out.

Owns: what these do to `fake_topic`'s rows.
Does not own: who is handed what and when (`fake_engine`).
"""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from daemon import call_values, config, errors
from daemon.core import limits
from daemon.core.decisions.claims import HeldPositions, Ignored, IgnoredReason
from daemon.topic import leases
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.row_columns import Rows
from tests._support.fake_topic import EPOCH, DeadLetter, Lease, Row, Subscription, Topic

if TYPE_CHECKING:
    from tests._support.fake_stream import FakeDispatchStream


class FakeClaims(abc.ABC):
    """The calls that name what was handed out."""

    settings: config.Config
    topics: dict[str, Topic]
    now_ms: Callable[[], int]

    @abc.abstractmethod
    def find(self, topic: str, subscription: str) -> Subscription: ...

    @abc.abstractmethod
    async def _begin(self) -> int: ...

    async def acknowledge(self, topic: str, subscription: str, claims: HeldPositions) -> Ignored:
        self.check_claims(claims)
        now_ms = await self._begin()
        known = self.find(topic, subscription)
        claimed = rows_of(claims)
        owed = set(self.topics[topic].backlog(known, now_ms)).intersection(claimed)
        known.acknowledge(owed)
        return ignored(claims, [row not in owed for row in claimed], IgnoredReason.NOT_THERE)

    async def negative_acknowledge(
        self, topic: str, subscription: str, nack: call_values.Nack
    ) -> call_values.NackOutcome:
        now_ms = await self._begin()
        known, rows = self.find(topic, subscription), rows_of(nack.positions)
        policy_ms, bits = self._check_nack(known, nack), known.policy.nack_precision_bits or 0
        left, dead_lettered = [], 0
        backlog = set(self.topics[topic].backlog(known, now_ms))
        hashes = np.zeros(len(rows), np.uint32) if nack.key_hash is None else nack.key_hash
        for row, given_ms, key_hash in zip(rows, policy_ms, hashes.tolist(), strict=True):
            left.append(not known.enter(row, backlog, key_hash))
            if left[-1]:
                continue
            redeliver_at_ms = -(-(now_ms + given_ms) >> bits) << bits
            too_often = not nack.reject and known.nack(row, redeliver_at_ms, now_ms)
            if nack.reject or too_often:
                dead_lettered += 1
                letter = DeadLetter(
                    row=row[:3],
                    redelivery_count=known.counts.get(row, 0) + (nack.reject and known.nacked.get(row, 0) <= now_ms),
                    dead_at_ms=now_ms,
                    reason=2 if nack.reject else 1,
                    text=nack.text if nack.reject else "",
                    key_hash=self.topics[topic].key_hash(row[1:]),
                    batch_index=row[3] if len(row) > 3 else NO_BATCH_INDEX,
                )
                known.bury(letter)
        known.wake()
        reason = IgnoredReason.NOT_THERE
        return call_values.NackOutcome(ignored(nack.positions, left, reason), dead_lettered)

    def _check_nack(self, known: Subscription, nack: call_values.Nack) -> list[int]:
        """The delay of each row."""
        self.check_claims(nack.positions)
        columns = (nack.positions.ledger_id, nack.positions.entry_id, nack.positions.batch_index)
        limits.check_distinct(*columns)
        if len(nack.text.encode()) > 1024:
            raise errors.InvalidArgument(f"reason has {len(nack.text.encode())} bytes; it may have at most 1024")
        field, delay_ms = "delay_ms", nack.delay_ms
        if nack.delay_level is not None:
            field, delay_ms = "delay_level", self.settings.read_delay_levels().delays_of(nack.delay_level)
        if delay_ms is None:
            policy = known.policy.redelivery
            constant_ms = self.settings.redelivery.delay_ms if policy is None else policy.initial_ms
            return [constant_ms] * len(nack.positions)
        limits.check_delay(field, delay_ms, self.settings.limits.delay_max_ms)
        given: list[int] = delay_ms.tolist()
        return given

    def check_claims(self, claims: HeldPositions, *, least: int = 1) -> None:
        if least or len(claims):
            limits.check_rows("entry_id", len(claims), self.settings.limits.rows_per_request_max)
        limits.check_batch_index(claims.entry_id, claims.batch_index)

    async def held_by(
        self, topic: str, subscription: str, holder: FakeDispatchStream, claims: HeldPositions
    ) -> Ignored:
        """The positions that a stream does not hold."""
        self.check_claims(claims)
        await self._begin()
        known = self.find(topic, subscription)
        owed = set(self.topics[topic].backlog(known, self.now_ms()))
        left = [row not in owed or known.in_flight.get(row[1:]) is not holder for row in rows_of(claims)]
        return ignored(claims, left, IgnoredReason.NOT_HELD)

    async def extend_lease(self, topic: str, subscription: str, claims: HeldPositions, lease_ms: int) -> Ignored:
        self.check_claims(claims)
        leases.check_lease(lease_ms)
        await self._begin()
        known = self.find(topic, subscription)
        owed = set(self.topics[topic].backlog(known, self.now_ms()))
        rows = rows_of(claims)
        moved = {row for row in rows if row in owed and isinstance(known.in_flight.get(row[1:]), Lease)}
        lease = Lease()
        known.in_flight.update({row[1:]: lease for row in moved})
        self.end_later(known, lease, lease_ms)
        return ignored(claims, [row not in moved for row in rows], IgnoredReason.NOT_HELD)

    def handed_out(self, topic: str, subscription: Subscription, rows: list[Row]) -> call_values.HandedOut:
        due, ledger_id, entry_id = zip(*(row[:3] for row in rows), strict=True) if rows else ((), (), ())
        hashes = [self.topics[topic].key_hash(row[1:]) for row in rows]
        counts = [subscription.counts.get(row, 0) for row in rows]
        parts = [row[3] if len(row) > 3 else NO_BATCH_INDEX for row in rows]
        return call_values.HandedOut(
            epoch=EPOCH,
            rows=Rows(
                np.array(due, np.uint64),
                np.array(ledger_id, np.uint64),
                np.array(entry_id, np.uint64),
                np.array(hashes, np.uint32) if any(hashes) else None,
            ),
            redelivery_count=np.array(counts, np.uint32) if any(counts) else None,
            batch_index=np.array(parts, np.uint32) if any(len(row) > 3 for row in rows) else None,
        )

    def end_later(self, subscription: Subscription, lease: Lease, lease_ms: int) -> None:
        def end() -> None:
            subscription.release(lease)
            subscription.wake()

        if lease_ms:
            asyncio.get_running_loop().call_later(lease_ms / 1000, end)
        else:
            end()


def ignored(claims: HeldPositions, left: Sequence[bool], reason: IgnoredReason) -> Ignored:
    return Ignored.all_of(claims.take(np.flatnonzero(left)), reason)


def rows_of(claims: HeldPositions) -> list[Row]:
    """Of one message of a batch with its batch index."""
    columns = (claims.deliver_at_ms.tolist(), claims.ledger_id.tolist(), claims.entry_id.tolist())
    rows: list[Row] = list(zip(*columns, strict=True))
    if claims.batch_index is None:
        return rows
    parts = claims.batch_index.tolist()
    return [row if part == NO_BATCH_INDEX else (*row, part) for row, part in zip(rows, parts, strict=True)]
