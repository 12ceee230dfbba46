"""What may be set for one topic or one subscription.

Owns: the two policies and the table of delays as frozen values, to and from their messages. A field that is None has
the daemon's default.
Does not own: limits and defaults, which are the daemon's; when redeliveries come (`tarry.redelivery`); how keys are
shared (`tarry.policies`).

How consumers of a subscription share keys.

Owns: the policy of key order and ranges of hash slots as frozen values, to and from their messages.
Does not own: limits, defaults and the sharing, which are the daemon's; the hash of a key (`tarry.hashing`); what is
seen of consumers (`tarry.inspection`).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypeVar

from tarry import errors, redelivery
from tarry.v1 import admin_pb2, policy_pb2

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


class BucketForm(enum.IntEnum):
    """How the buckets of a topic are written."""

    COLUMNAR = policy_pb2.BUCKET_FORM_COLUMNAR
    """Small and fast."""
    COMPATIBLE = policy_pb2.BUCKET_FORM_COMPATIBLE
    """Read in full by programs made from PIP-195."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicPolicy:
    """Policy of a topic, as of PIP-195 where a name is its own. Rows keep their times, buckets their form.

    Example: `TopicPolicy(bucket_rows_max=50_000, delay_max_ms=7 * 86_400_000)`.
    """

    delay_max_ms: int | None = None
    """How far ahead a row may be due."""
    min_index_count_per_bucket: int | None = None
    """Rows from which the mutable bucket is sealed when a higher ledger arrives; at least 1."""
    bucket_rows_max: int | None = None
    """Rows, bytes and age in ms at which it is sealed whatever the ledger; at least 1."""
    bucket_bytes_max: int | None = None
    bucket_age_max_ms: int | None = None
    max_time_step_per_bucket_snapshot_segment_seconds: int | None = None
    """How a bucket is cut into segments: span of due times; rows, -1 = no limit; rows from which the span cuts."""
    max_indexes_per_bucket_snapshot_segment: int | None = None
    min_indexes_per_bucket_snapshot_segment: int | None = None
    bucket_form: BucketForm | None = None
    """How buckets are written from now on; both forms are always read."""
    shared_index: bool | None = None
    """Whether subscriptions share one index; if not, rows that are added from now on are copied to each one's own."""
    max_num_buckets: int | None = None
    """Sealed buckets of one index above which neighbours are merged; at least 1, -1 = never."""
    merge_buckets_max: int | None = None
    """Buckets that one merge reads, at least 2, and rows of a merged bucket, at least 1."""
    merge_rows_max: int | None = None
    tick_ms: int | None = None
    """Hand-outs are batched by as much, only ever later; 1 to 500."""
    pending_rows_max: int | None = None
    """Rows that may be pending, and that may come due within one second; 0 = no limit."""
    due_rows_per_second_max: int | None = None
    client_rows_per_second_max: int | None = None
    """What one client may add in a second, in rows and in bytes of requests; 0 = no limit."""
    client_bytes_per_second_max: int | None = None
    two_phase_deletion_enabled: bool | None = None
    """Whether deletions of the topic's ledgers are recorded (PIP-186), from now on."""

    def to_message(self) -> policy_pb2.TopicPolicy:
        """Raises InvalidArgument: a value that the field cannot hold."""
        message = policy_pb2.TopicPolicy()
        for field in dataclasses.fields(self):
            _set(message, field.name, getattr(self, field.name))
        return message

    @staticmethod
    def from_message(message: policy_pb2.TopicPolicy) -> TopicPolicy:
        values = {
            field.name: getattr(message, field.name)
            for field in dataclasses.fields(TopicPolicy)
            if message.HasField(field.name)  # type: ignore[arg-type]
        }
        if (form := values.pop("bucket_form", None)) is not None:
            values["bucket_form"] = _bucket_form(form)
        return TopicPolicy(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubscriptionPolicy:
    """Policy of a subscription. Example: `SubscriptionPolicy(in_flight_rows_max=1_000, lease_ms=60_000)`."""

    in_flight_rows_max: int | None = None
    """Positions that may be in flight at all dispatchers together; at least 1."""
    lease_ms: int | None = None
    """Lease of a `get` that names none; 1 ms to 12 hours."""
    properties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Free for the user: at most 64, names of at most 128 bytes, values of at most 1,024 bytes."""
    redelivery: redelivery.RedeliveryPolicy | None = None
    """When a negatively acknowledged position that names no delay comes back."""
    max_redeliver_count: int | None = None
    """What is negatively acknowledged more often becomes a dead letter; 0: at the first time, None: never."""
    ack_timeout_ms: int | None = None
    """What is in flight for so long is negatively acknowledged; 100 ms to 12 hours, None: never."""
    nack_precision_bits: int | None = None
    """Redelivery times are rounded up to multiples of 2^n ms (PIP-393): 0 to 20, 0 = exact."""
    key_shared: KeySharedPolicy | None = None
    """How KEY_SHARED streams share keys; it counts from the next time on that no such stream is open."""

    def to_message(self) -> policy_pb2.SubscriptionPolicy:
        """Raises InvalidArgument: a value that the field cannot hold."""
        message = policy_pb2.SubscriptionPolicy()
        for field in _PLAIN_FIELDS:
            _set(message, field, getattr(self, field))
        if self.redelivery is not None:
            message.redelivery.CopyFrom(redelivery.policy_to_message(self.redelivery))
        if self.key_shared is not None:
            message.key_shared.CopyFrom(self.key_shared.to_message())
        for name, value in self.properties.items():
            try:
                message.properties[name] = value
            except (TypeError, ValueError) as wrong:
                raise errors.InvalidArgument(
                    f"properties holds {name!r}: {value!r}; both must be UTF-8 text"
                ) from wrong
        return message

    @staticmethod
    def from_message(message: policy_pb2.SubscriptionPolicy) -> SubscriptionPolicy:
        delays = redelivery.policy_from_message(message.redelivery) if message.HasField("redelivery") else None
        shared = message.key_shared if message.HasField("key_shared") else None
        return SubscriptionPolicy(
            **{field: getattr(message, field) for field in _PLAIN_FIELDS if message.HasField(field)},  # type: ignore[arg-type]
            properties=dict(sorted(message.properties.items())),
            redelivery=delays,
            key_shared=None if shared is None else KeySharedPolicy.from_message(shared),
        )


_PLAIN_FIELDS = ("in_flight_rows_max", "lease_ms", "max_redeliver_count", "ack_timeout_ms", "nack_precision_bits")


@dataclasses.dataclass(frozen=True)
class DelayLevels:
    """A table of delays (RocketMQ). Example: `DelayLevels("1s 5s 10s 30s 1m")`."""

    table: str
    """1 to 256 delays, level 1 first: positive whole numbers, each with s, m, h or d, separated by white space."""
    clamp: bool = True
    """A level above the last one is the last one; if not, it is refused."""

    def to_message(self) -> admin_pb2.DelayLevels:
        """Raises InvalidArgument: a value that the field cannot hold."""
        message = admin_pb2.DelayLevels()
        _set(message, "table", self.table)
        _set(message, "clamp", self.clamp)
        return message

    @staticmethod
    def from_message(message: admin_pb2.DelayLevels) -> DelayLevels:
        return DelayLevels(message.table, message.clamp if message.HasField("clamp") else True)


def _set(
    message: policy_pb2.TopicPolicy | policy_pb2.SubscriptionPolicy | admin_pb2.DelayLevels, name: str, value: Any
) -> None:
    if value is None:
        return
    try:
        setattr(message, name, value)
    except (TypeError, ValueError) as wrong:
        raise errors.InvalidArgument(f"{name} is {value!r}; the field cannot hold it: {wrong}") from wrong


def _bucket_form(number: int) -> BucketForm:
    try:
        return BucketForm(number)
    except ValueError:
        raise errors.Internal(f"bucket_form is {number}; this version of the client does not know it") from None
