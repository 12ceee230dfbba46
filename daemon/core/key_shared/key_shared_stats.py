"""Reads the statistics of a KEY_SHARED subscription off its tables (PIP-282, draining hashes).

The cost does not grow with the number of rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from daemon.core.key_shared.hash_slots import U16, HashRange
from daemon.core.key_shared.key_consumers import Joining
from daemon.core.key_shared.key_share import KeyShared
from daemon.core.key_shared.last_sent_position import Position
from storage_backends.formats.manifest import KeySharedPolicy

# Ranges and hashes that are shown at most
SHOWN_MAX = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class DrainingHash:
    """A draining hash: `unacked` positions of it are held, and `blocked_attempts` counts positions kept back for it."""

    hash: int
    unacked: int
    blocked_attempts: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One consumer; for `number` and `stream` see `key_consumers`.

    `last_sent_position_when_joining` is None if nothing had been sent.
    """

    number: int
    stream: int
    name: str
    address: str
    permits: int
    unacked: int
    slots: int
    hash_ranges: tuple[HashRange, ...]
    last_sent_position_when_joining: Position | None
    draining_hashes_count: int
    draining_hashes_unacked: int
    draining_hashes: tuple[DrainingHash, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerAfterMarkDelete:
    """A consumer that receives nothing after a position until everything up to it is acknowledged."""

    name: str
    number: int
    address: str
    last_sent_position_when_joining: Position


@dataclasses.dataclass(frozen=True, slots=True)
class KeySharedStats:
    """A subscription. `individually_sent_positions` has (after, up to) of each range."""

    policy: KeySharedPolicy
    consumers: int
    waiting: int
    draining_hashes: int
    draining_hashes_cleared: int
    draining_hashes_unacked: int
    nack_blocked_hashes: int
    last_sent_position: Position | None
    individually_sent_positions: tuple[tuple[Position, Position], ...]
    consumers_after_mark_delete_position: tuple[ConsumerAfterMarkDelete, ...]
    slots_without_consumer: int


def draining_hashes(key_shared: KeyShared) -> U16:
    """Return the hashes of which a consumer holds rows while another one has the hash slot."""
    if key_shared.draining is None:
        return np.empty(0, np.uint16)
    return key_shared.draining.draining(key_shared.selector.owners)


def nack_blocked_hashes(key_shared: KeyShared) -> int:
    """Return how many hashes wait for a NACKED row."""
    return 0 if key_shared.nacks is None else key_shared.nacks.blocks.blocked_hashes


def permits(key_shared: KeyShared) -> int:
    """Return how many more rows may be sent to all consumers."""
    return key_shared.consumers.permits_together


def subscription_stats(key_shared: KeyShared) -> KeySharedStats:
    draining, last_sent = key_shared.draining, key_shared.last_sent
    hashes = draining_hashes(key_shared)
    return KeySharedStats(
        policy=key_shared.policy,
        consumers=len(key_shared.consumers),
        waiting=len(key_shared.waiting),
        draining_hashes=len(hashes),
        draining_hashes_cleared=0 if draining is None else draining.cleared_total,
        draining_hashes_unacked=0 if draining is None else int(draining.unacked[hashes].sum()),
        nack_blocked_hashes=nack_blocked_hashes(key_shared),
        last_sent_position=last_sent.last_sent,
        individually_sent_positions=tuple(last_sent.individually_sent(SHOWN_MAX)),
        consumers_after_mark_delete_position=tuple(
            _after_mark_delete(key_shared.consumers[ordinal], position)
            for ordinal, position in last_sent.after_mark_delete()
        ),
        slots_without_consumer=int(np.count_nonzero(key_shared.selector.owners == 0)),
    )


def _after_mark_delete(consumer: Joining, position: Position) -> ConsumerAfterMarkDelete:
    return ConsumerAfterMarkDelete(consumer.name, consumer.number, consumer.address, position)


def consumer_stats(key_shared: KeyShared, after: int, limit: int) -> list[ConsumerStats]:
    """Return the statistics of at most `limit` consumers with numbers above `after`, in the order of numbers."""
    hashes = draining_hashes(key_shared)
    return [_of_consumer(key_shared, ordinal, hashes) for ordinal, _ in key_shared.consumers.behind(after, limit)]


def _of_consumer(key_shared: KeyShared, ordinal: int, draining_slots: U16) -> ConsumerStats:
    consumer, selector, draining = key_shared.consumers[ordinal], key_shared.selector, key_shared.draining
    drained: tuple[DrainingHash, ...] = ()
    count = unacked = 0
    if draining is not None:
        slots = draining_slots[draining.holders[draining_slots] == ordinal]
        count, unacked = len(slots), int(draining.unacked[slots].sum())
        shown = slots[:SHOWN_MAX]
        columns = (shown.tolist(), draining.unacked[shown].tolist(), draining.attempts(shown).tolist())
        drained = tuple(DrainingHash(*each) for each in zip(*columns, strict=True))
    return ConsumerStats(
        number=consumer.number,
        stream=consumer.stream,
        name=consumer.name,
        address=consumer.address,
        permits=key_shared.consumers.permits_of(ordinal),
        unacked=key_shared.held_rows(consumer.number),
        slots=selector.slots_of_consumer(ordinal),
        hash_ranges=tuple(selector.ranges_of(ordinal)[:SHOWN_MAX]),
        last_sent_position_when_joining=key_shared.last_sent.joined_position(ordinal),
        draining_hashes_count=count,
        draining_hashes_unacked=unacked,
        draining_hashes=drained,
    )
