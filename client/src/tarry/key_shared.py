"""The values that a dispatcher of a KEY_SHARED subscription sends and receives.

They are its consumers, and what `tarry.KeySharedSubscription` yields: batches of one consumer, positions taken back,
and requests to plan again. The daemon decides who receives what.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

from tarry import batch, columns, errors, policies, wire
from tarry.v1 import dispatch_pb2

HELD = 0
"""In the answer to a plan, a position that no consumer receives yet; it arrives when it is free."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Consumer:
    """A receiver behind a dispatcher. Each object is a separate consumer, even with another's name.

    Example: `tarry.Consumer("gate-1", permits=500, address="10.0.0.7:4711")`
    """

    name: str = dataclasses.field(kw_only=False)
    """1 to 255 bytes of UTF-8. With CONSISTENT_HASHING, a consumer that returns under its name gets about the same
    keys.
    """
    permits: int = 1_000
    """Positions that it may have received and neither acknowledged nor released"""
    address: str = ""
    """Address from which it is connected, shown to people"""
    hash_ranges: tuple[policies.HashRange, ...] = ()
    """Its slots with STICKY, at least one range; otherwise empty"""

    def message(self, consumer_id: int, permits: int) -> dispatch_pb2.Consumer:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
        wire.utf8("name", self.name)
        wire.utf8("address", self.address)
        try:
            return dispatch_pb2.Consumer(
                consumer_id=consumer_id,
                name=self.name,
                address=self.address,
                permits=permits,
                hash_ranges=[each.to_message() for each in self.hash_ranges],
            )
        except (AttributeError, TypeError, ValueError) as wrong:
            raise errors.InvalidArgument(f"consumer is {self!r}; a field cannot hold it: {wrong}") from wrong


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class ConsumerBatch(batch.Batch):
    """Positions for one consumer, in the order in which it must receive them.

    Those that were planned and never delayed have 0 in `deliver_at_ms`.
    """

    __repr__ = columns.short_repr

    consumer: Consumer
    consumer_id: int
    """Its number on the stream, as `tarry consumers` shows; no other consumer of this subscription has it."""

    def _joined_fields(self, parts: Sequence[Self]) -> dict[str, Any]:
        joined = super()._joined_fields(parts)
        other = next((part for part in parts if part.consumer is not self.consumer), None)
        if other is not None:
            raise errors.InvalidArgument(
                f"batches are of {self.consumer.name!r} and {other.consumer.name!r}; those that are joined are of one "
                "consumer"
            )
        return joined


@dataclasses.dataclass(frozen=True, eq=False)
class TakenBack:
    """Positions that a consumer received and must stop processing.

    They are delivered again, here or elsewhere, if they still exist; until then acknowledgements of them are ignored.
    This happens with `nack_order` BLOCK_KEY behind a negatively acknowledged position. It also happens after a new
    stream, to positions whose keys another consumer has by now.
    """

    consumer: Consumer
    consumer_id: int
    positions: columns.Positions
    epoch: int

    def __len__(self) -> int:
        return self.positions.rows


@dataclasses.dataclass(frozen=True)
class PlanAgain:
    """The start of another stream, which forgets planned positions that no consumer has received.

    From now on plan everything unacknowledged from the mark-delete position on, the first time with `anew=True`; any
    other plan fails with PlanLost. Positions that consumers hold stay with them and are in no later batch.
    """

    epoch: int


Event: TypeAlias = ConsumerBatch | TakenBack | PlanAgain
"""Results of `KeySharedSubscription.receive`, for each consumer in the order in which the daemon decided them"""
