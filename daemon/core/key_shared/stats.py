"""What is shown of a KEY_SHARED subscription (PIP-282 and the statistics of draining hashes).

Owns: the form.
Does not own: the numbers (`key_shared`) and the wire.
"""

from __future__ import annotations

import dataclasses

from daemon.core.key_shared.hash_slots import HashRange
from daemon.core.key_shared.last_sent_position import Position
from storage_backends.formats.manifest import KeySharedPolicy

# Of ranges and hashes so many are shown.
SHOWN_MAX = 1_000


@dataclasses.dataclass(frozen=True, slots=True)
class DrainingHash:
    """`unacked`: positions that are held of it; `blocked_attempts`: how often one was kept back for it."""

    hash: int
    unacked: int
    blocked_attempts: int


@dataclasses.dataclass(frozen=True, slots=True)
class ConsumerStats:
    """One consumer; `number`, `stream`: see `consumers`. `last_sent_position_when_joining`: None when nothing had been
    sent.
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
    """A consumer that receives nothing behind a position until everything up to it is acknowledged."""

    name: str
    number: int
    address: str
    last_sent_position_when_joining: Position


@dataclasses.dataclass(frozen=True, slots=True)
class KeySharedStats:
    """A subscription. `individually_sent_positions`: (after, up to) of each range."""

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
