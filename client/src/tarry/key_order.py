"""How consumers of a subscription share keys.

Owns: the policy of key order and ranges of hash slots as frozen values, to and from their messages.
Does not own: limits, defaults and the sharing, which are the daemon's; the hash of a key (`tarry.hashing`); what is
seen of consumers (`tarry.consumer_stats`).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TypeVar

from tarry import errors
from tarry.v1 import policy_pb2

E = TypeVar("E", bound=enum.IntEnum)


class HashSelector(enum.IntEnum):
    """Which consumer has a hash slot."""

    AUTO_SPLIT = policy_pb2.HASH_SELECTOR_AUTO_SPLIT
    """One range each: who joins has half of the largest one, who leaves gives its range to a neighbour."""
    CONSISTENT_HASHING = policy_pb2.HASH_SELECTOR_CONSISTENT_HASHING
    """Each has points on a ring: who joins or leaves moves few slots of everybody, evenly."""
    STICKY = policy_pb2.HASH_SELECTOR_STICKY
    """The ranges that each says."""


class KeyOrder(enum.IntEnum):
    """What keeps the order of keys when slots move from one consumer to another."""

    DRAINING_HASHES = policy_pb2.KEY_ORDER_DRAINING_HASHES
    """A hash goes to its new consumer when the old one has nothing unacknowledged of it; others do not wait."""
    LAST_SENT_POSITION = policy_pb2.KEY_ORDER_LAST_SENT_POSITION
    """A consumer that joined receives nothing behind the last sent position of then, until everything up to it is
    acknowledged (PIP-282)."""


class NackOrder(enum.IntEnum):
    """What becomes of the later positions of a key when one is negatively acknowledged."""

    SKIP = policy_pb2.NACK_ORDER_SKIP
    """They go on."""
    BLOCK_KEY = policy_pb2.NACK_ORDER_BLOCK_KEY
    """They wait until it is acknowledged or a dead letter, or for `nack_block_max_ms`."""


@dataclasses.dataclass(frozen=True)
class HashRange:
    """Hash slots from the first to the last, both included, 0 to 65,535. Example: `HashRange(0, 32_767)`."""

    first: int
    last: int

    def to_message(self) -> policy_pb2.HashRange:
        """Raises InvalidArgument: a value that the field cannot hold."""
        try:
            return policy_pb2.HashRange(first=self.first, last=self.last)
        except (TypeError, ValueError) as wrong:
            raise errors.InvalidArgument(f"hash range is {self!r}; a field cannot hold it: {wrong}") from wrong

    @staticmethod
    def from_message(message: policy_pb2.HashRange) -> HashRange:
        return HashRange(message.first, message.last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySharedPolicy:
    """How KEY_SHARED streams share keys. A field that is None has the daemon's default.

    Example: `KeySharedPolicy(selector=tarry.HashSelector.STICKY, nack_order=tarry.NackOrder.BLOCK_KEY)`.
    """

    selector: HashSelector | None = None
    """None: CONSISTENT_HASHING."""
    points_per_consumer: int | None = None
    """How many points of the ring each has, 1 to 1,000, None: 100. Only with CONSISTENT_HASHING."""
    order: KeyOrder | None = None
    """None: DRAINING_HASHES."""
    allow_out_of_order_delivery: bool = False
    """Positions go to the consumer that has their slot now: neither of the two orders is kept. Not with BLOCK_KEY."""
    nack_order: NackOrder | None = None
    """None: SKIP."""
    nack_block_max_ms: int | None = None
    """For how long a hash waits for a position that is not acknowledged after all; 1 ms to 12 hours, None: 10 minutes.
    Only with BLOCK_KEY."""

    def to_message(self) -> policy_pb2.KeySharedPolicy:
        """Raises InvalidArgument: a value that the field cannot hold."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        try:
            return policy_pb2.KeySharedPolicy(**fields)
        except (TypeError, ValueError) as wrong:
            raise errors.InvalidArgument(f"key_shared is {self!r}; a field cannot hold it: {wrong}") from wrong

    @staticmethod
    def from_message(message: policy_pb2.KeySharedPolicy) -> KeySharedPolicy:
        return KeySharedPolicy(
            selector=_known(HashSelector, "selector", message.selector),
            points_per_consumer=message.points_per_consumer if message.HasField("points_per_consumer") else None,
            order=_known(KeyOrder, "order", message.order),
            allow_out_of_order_delivery=message.allow_out_of_order_delivery,
            nack_order=_known(NackOrder, "nack_order", message.nack_order),
            nack_block_max_ms=message.nack_block_max_ms if message.HasField("nack_block_max_ms") else None,
        )


def _known(kind: type[E], name: str, number: int) -> E | None:
    """None for unspecified."""
    try:
        return kind(number) if number else None
    except ValueError:
        raise errors.Internal(f"key_shared.{name} is {number}; this version of the client does not know it") from None
