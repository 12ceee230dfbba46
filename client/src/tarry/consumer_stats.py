"""What is seen of the consumers of a KEY_SHARED subscription: frozen values, free of wire types.

Owns: the classes, and how each is read from its message.
Does not own: the meaning of a field, which is the comment on it in `proto/tarry/v1`; what else is seen of topics
(`tarry.inspection`).
"""

from __future__ import annotations

import dataclasses

from tarry import key_order
from tarry.inspection import Page
from tarry.v1 import inspect_pb2


@dataclasses.dataclass(frozen=True, order=True)
class Position:
    """A position of a log."""

    ledger_id: int
    entry_id: int

    def __str__(self) -> str:
        return f"{self.ledger_id}:{self.entry_id}"

    @staticmethod
    def from_message(message: inspect_pb2.Position) -> Position:
        return Position(message.ledger_id, message.entry_id)


@dataclasses.dataclass(frozen=True)
class PositionRange:
    """Positions behind `after` and up to `up_to`, which is included: (3:4, 3:5] is 3:5 alone."""

    after: Position
    up_to: Position

    def __str__(self) -> str:
        return f"({self.after}, {self.up_to}]"

    @staticmethod
    def from_message(message: inspect_pb2.PositionRange) -> PositionRange:
        return PositionRange(Position.from_message(message.after), Position.from_message(message.up_to))


@dataclasses.dataclass(frozen=True)
class DrainingHash:
    """A hash slot that a consumer must give up, and that waits for it."""

    hash: int
    unacked: int
    """Positions that the consumer holds of it."""
    blocked_attempts: int
    """How often a position was kept back for it."""

    @staticmethod
    def from_message(message: inspect_pb2.DrainingHash) -> DrainingHash:
        return DrainingHash(message.hash, message.unacked, message.blocked_attempts)


@dataclasses.dataclass(frozen=True)
class ConsumerStats:
    """One consumer. `instance_id` is given by the daemon, `consumer_id` by its dispatcher; consumers of one stream have
    the same `stream`.
    """

    name: str
    instance_id: int
    address: str
    consumer_id: int
    stream: int
    permits: int
    unacked: int
    """Positions in flight at it."""
    slots: int
    """Hash slots that it has; without any it receives nothing."""
    hash_ranges: tuple[key_order.HashRange, ...] = ()
    """The first 1,000 of them."""
    last_sent_position_when_joining: Position | None = None
    """LAST_SENT_POSITION: what it waits behind; None when it joined behind nothing."""
    draining_hashes_count: int = 0
    """Hashes that it has and must give up, and the positions that it holds of them."""
    draining_hashes_unacked: int = 0
    draining_hashes: tuple[DrainingHash, ...] = ()
    """The first 1,000 of them."""

    @staticmethod
    def from_message(message: inspect_pb2.ConsumerStats) -> ConsumerStats:
        return ConsumerStats(
            name=message.name,
            instance_id=message.instance_id,
            address=message.address,
            consumer_id=message.consumer_id,
            stream=message.stream,
            permits=message.permits,
            unacked=message.unacked,
            slots=message.slots,
            hash_ranges=tuple(key_order.HashRange.from_message(each) for each in message.hash_ranges),
            last_sent_position_when_joining=(
                Position.from_message(message.last_sent_position_when_joining)
                if message.HasField("last_sent_position_when_joining")
                else None
            ),
            draining_hashes_count=message.draining_hashes_count,
            draining_hashes_unacked=message.draining_hashes_unacked,
            draining_hashes=tuple(DrainingHash.from_message(each) for each in message.draining_hashes),
        )


@dataclasses.dataclass(frozen=True)
class ConsumerAfterMarkDelete:
    """A consumer that receives nothing behind a position until everything up to it is acknowledged."""

    name: str
    instance_id: int
    address: str
    last_sent_position_when_joining: Position

    @staticmethod
    def from_message(message: inspect_pb2.ConsumerAfterMarkDelete) -> ConsumerAfterMarkDelete:
        return ConsumerAfterMarkDelete(
            name=message.name,
            instance_id=message.instance_id,
            address=message.address,
            last_sent_position_when_joining=Position.from_message(message.last_sent_position_when_joining),
        )


@dataclasses.dataclass(frozen=True)
class KeySharedStats:
    """What the keys of a subscription wait for. `policy` is the one in force, every field that counts is set."""

    policy: key_order.KeySharedPolicy
    consumers: int
    waiting: int
    """Positions that are due or planned, and wait for their consumer's permits or for their hash."""
    draining_hashes: int
    """Hashes of which a consumer holds positions and another one has the slot."""
    draining_hashes_cleared: int
    """Hashes that became free and that a position had been kept back for, since the first consumer joined."""
    draining_hashes_unacked: int
    """Positions that are held of those that drain."""
    nack_blocked_hashes: int
    """Hashes that wait for a position that was negatively acknowledged."""
    last_sent_position: Position | None
    """LAST_SENT_POSITION (PIP-282); None when nothing was planned."""
    individually_sent_positions: tuple[PositionRange, ...]
    """Sent beyond it; the last 1,000 at most."""
    consumers_after_mark_delete_position: tuple[ConsumerAfterMarkDelete, ...]
    """Consumers that wait for everything up to their last sent position, in the order of these."""
    slots_without_consumer: int

    @staticmethod
    def from_message(message: inspect_pb2.KeySharedStats) -> KeySharedStats:
        return KeySharedStats(
            policy=key_order.KeySharedPolicy.from_message(message.policy),
            consumers=message.consumers,
            waiting=message.waiting,
            draining_hashes=message.draining_hashes,
            draining_hashes_cleared=message.draining_hashes_cleared,
            draining_hashes_unacked=message.draining_hashes_unacked,
            nack_blocked_hashes=message.nack_blocked_hashes,
            last_sent_position=(
                Position.from_message(message.last_sent_position) if message.HasField("last_sent_position") else None
            ),
            individually_sent_positions=tuple(
                PositionRange.from_message(each) for each in message.individually_sent_positions
            ),
            consumers_after_mark_delete_position=tuple(
                ConsumerAfterMarkDelete.from_message(each) for each in message.consumers_after_mark_delete_position
            ),
            slots_without_consumer=message.slots_without_consumer,
        )


@dataclasses.dataclass(frozen=True)
class ConsumerPage(Page[ConsumerStats]):
    """Consumers in the order in which they joined."""

    key_shared: KeySharedStats | None
    """None when nobody opened the subscription as KEY_SHARED."""

    @staticmethod
    def from_message(message: inspect_pb2.ListConsumersResponse) -> ConsumerPage:
        return ConsumerPage(
            items=tuple(ConsumerStats.from_message(each) for each in message.consumers),
            next_page_token=message.next_page_token,
            as_of_ms=message.as_of_ms,
            key_shared=KeySharedStats.from_message(message.key_shared) if message.HasField("key_shared") else None,
        )
