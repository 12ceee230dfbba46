"""What a dispatcher of a KEY_SHARED subscription says and is told.

Owns: its consumers, and what `tarry.KeySharedSubscription` gives: batches of one consumer, what is taken back.
Does not own: who gets what, which the daemon decides; permits and streams (`tarry.key_shared_receiving`); policies of
key order (`tarry.policies`); what is seen of consumers (`tarry.inspection`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Self, TypeAlias

from tarry import batch, columns, errors, policies, wire
from tarry.v1 import dispatch_pb2

HELD = 0
"""In the answer to a plan: nobody receives it yet. It comes by itself when it is free."""


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Consumer:
    """A receiver behind a dispatcher. Each object is a consumer of its own, also with the name of another.

    Example: `tarry.Consumer("gate-1", permits=500, address="10.0.0.7:4711")`
    """

    name: str = dataclasses.field(kw_only=False)
    """1 to 255 bytes of UTF-8. With CONSISTENT_HASHING one that comes back with its name has about the same keys."""
    permits: int = 1_000
    """How many positions it may have received and neither acknowledged nor released."""
    address: str = ""
    """Where it is connected from, shown to people."""
    hash_ranges: tuple[policies.HashRange, ...] = ()
    """STICKY: its slots, at least one range. Otherwise none."""

    def message(self, consumer_id: int, permits: int) -> dispatch_pb2.Consumer:
        """Raises InvalidArgument: a value that a field cannot hold."""
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
    """Positions for one consumer, in the order in which it is to have them.

    Those that were planned and never delayed have 0 in `deliver_at_ms`.
    """

    consumer: Consumer
    consumer_id: int
    """Its number on the stream, which `tarry consumers` shows; no other one of this subscription has it."""

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
    """What a consumer received and must not go on with: it comes again, here or elsewhere, if it is still there.

    Acknowledgements of it are ignored until then. So it is with `nack_order` BLOCK_KEY behind a position that was
    negatively acknowledged, and, after another stream had to be opened, with what another consumer has keys of by now.
    """

    consumer: Consumer
    consumer_id: int
    positions: columns.Positions
    epoch: int

    def __len__(self) -> int:
        return self.positions.rows


@dataclasses.dataclass(frozen=True)
class PlanAgain:
    """Another stream is open, and what was planned on the one before and came to nobody yet is forgotten.

    From now on plan everything from the mark-delete position on that is not acknowledged, the first time with
    `anew=True`; any other plan fails with PlanLost. What consumers hold of it stays with them and comes in no batch
    again.
    """

    epoch: int


Event: TypeAlias = ConsumerBatch | TakenBack | PlanAgain
"""What `KeySharedSubscription.receive` gives, for each consumer in the order in which the daemon decided it."""
