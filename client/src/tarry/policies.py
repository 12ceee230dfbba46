"""Policies of topics and subscriptions, the table of delays, and how consumers share keys.

All are frozen values, to and from their messages. A field that is None takes the daemon's default; the daemon checks
limits. `tarry.redelivery` has the delays of redeliveries.
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
    """The rule that gives hash slots to consumers."""

    AUTO_SPLIT = policy_pb2.HASH_SELECTOR_AUTO_SPLIT
    """One range each: a consumer that joins takes half of the largest, one that leaves gives its range to a neighbour.
    """
    CONSISTENT_HASHING = policy_pb2.HASH_SELECTOR_CONSISTENT_HASHING
    """Points on a ring: joining or leaving moves a few slots of every consumer, evenly."""
    STICKY = policy_pb2.HASH_SELECTOR_STICKY
    """The ranges that each consumer names"""


class KeyOrder(enum.IntEnum):
    """The rule that keeps keys in order when slots move between consumers."""

    DRAINING_HASHES = policy_pb2.KEY_ORDER_DRAINING_HASHES
    """A hash moves when its old consumer holds nothing unacknowledged of it; other hashes do not wait."""
    LAST_SENT_POSITION = policy_pb2.KEY_ORDER_LAST_SENT_POSITION
    """A consumer that joined receives nothing after the last sent position of that moment until everything up to it is
    acknowledged (PIP-282).
    """


class NackOrder(enum.IntEnum):
    """The treatment of a key's later positions when one is negatively acknowledged."""

    SKIP = policy_pb2.NACK_ORDER_SKIP
    """They are delivered."""
    BLOCK_KEY = policy_pb2.NACK_ORDER_BLOCK_KEY
    """They wait until it is acknowledged or a dead letter, or for `nack_block_max_ms`."""


@dataclasses.dataclass(frozen=True)
class HashRange:
    """Hash slots from the first to the last, both included, 0 to 65,535. Example: `HashRange(0, 32_767)`."""

    first: int
    last: int

    def to_message(self) -> policy_pb2.HashRange:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
        try:
            return policy_pb2.HashRange(first=self.first, last=self.last)
        except (TypeError, ValueError) as wrong:
            raise errors.InvalidArgument(f"hash range is {self!r}; a field cannot hold it: {wrong}") from wrong

    @staticmethod
    def from_message(message: policy_pb2.HashRange) -> HashRange:
        return HashRange(message.first, message.last)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeySharedPolicy:
    """The rules by which KEY_SHARED streams share keys. A field that is None takes the daemon's default.

    Example: `KeySharedPolicy(selector=tarry.HashSelector.STICKY, nack_order=tarry.NackOrder.BLOCK_KEY)`.
    """

    selector: HashSelector | None = None
    """Default: CONSISTENT_HASHING"""
    points_per_consumer: int | None = None
    """Points of each consumer on the ring, 1 to 1,000, default 100; only with CONSISTENT_HASHING"""
    order: KeyOrder | None = None
    """Default: DRAINING_HASHES"""
    allow_out_of_order_delivery: bool = False
    """Positions go to the current consumer of their slot, so neither order is kept. Not allowed with BLOCK_KEY."""
    nack_order: NackOrder | None = None
    """Default: SKIP"""
    nack_block_max_ms: int | None = None
    """Longest wait of a hash for an unacknowledged position, 1 ms to 12 hours, default 10 minutes; only with BLOCK_KEY
    """

    def to_message(self) -> policy_pb2.KeySharedPolicy:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
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
    """Return the member, or None for unspecified."""
    try:
        return kind(number) if number else None
    except ValueError:
        raise errors.Internal(f"key_shared.{name} is {number}; this version of the client does not know it") from None


class BucketForm(enum.IntEnum):
    """The form in which a topic's buckets are written."""

    COLUMNAR = policy_pb2.BUCKET_FORM_COLUMNAR
    """Small and fast"""
    COMPATIBLE = policy_pb2.BUCKET_FORM_COMPATIBLE
    """Readable by any program made from PIP-195"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopicPolicy:
    """The policy of a topic, with the names of PIP-195 where it has one. Rows keep their times, buckets their form.

    Example: `TopicPolicy(bucket_rows_max=50_000, delay_max_ms=7 * 86_400_000)`.
    """

    delay_max_ms: int | None = None
    """Largest delay of a row"""
    min_index_count_per_bucket: int | None = None
    """Rows from which the mutable bucket is sealed when a higher ledger arrives; at least 1"""
    bucket_rows_max: int | None = None
    """Rows, bytes and age (ms) at which it is sealed whatever the ledger; at least 1"""
    bucket_bytes_max: int | None = None
    bucket_age_max_ms: int | None = None
    max_time_step_per_bucket_snapshot_segment_seconds: int | None = None
    """Limits of a segment: span of due times; rows, -1 for no limit; rows from which the span applies"""
    max_indexes_per_bucket_snapshot_segment: int | None = None
    min_indexes_per_bucket_snapshot_segment: int | None = None
    bucket_form: BucketForm | None = None
    """Form of buckets written from now on; both forms are always read"""
    shared_index: bool | None = None
    """True if subscriptions share one index; otherwise rows added from now on are copied into each subscription's index
    """
    max_num_buckets: int | None = None
    """Sealed buckets of one index above which neighbours are merged; at least 1, -1 for never"""
    merge_buckets_max: int | None = None
    """Buckets that one merge reads, at least 2, and rows of a merged bucket, at least 1"""
    merge_rows_max: int | None = None
    tick_ms: int | None = None
    """Interval in which deliveries are batched, which only ever delays them; 1 to 500"""
    pending_rows_max: int | None = None
    """Rows that may be pending, and that may come due within one second; 0 for no limit"""
    due_rows_per_second_max: int | None = None
    client_rows_per_second_max: int | None = None
    """Rows, and bytes of requests, that one client may add in a second; 0 for no limit"""
    client_bytes_per_second_max: int | None = None
    two_phase_deletion_enabled: bool | None = None
    """True if deletions of the topic's ledgers are recorded from now on (PIP-186)"""

    def to_message(self) -> policy_pb2.TopicPolicy:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
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
            try:
                values["bucket_form"] = BucketForm(form)
            except ValueError:
                raise errors.Internal(f"bucket_form is {form}; this version of the client does not know it") from None
        return TopicPolicy(**values)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubscriptionPolicy:
    """The policy of a subscription. Example: `SubscriptionPolicy(in_flight_rows_max=1_000, lease_ms=60_000)`."""

    in_flight_rows_max: int | None = None
    """Positions in flight at all dispatchers together, at most; at least 1"""
    lease_ms: int | None = None
    """Lease of a `get` that names none; 1 ms to 12 hours"""
    properties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Free for the user: at most 64, with names of at most 128 bytes and values of at most 1,024 bytes, and 64 KiB for
    a whole topic
    """
    redelivery: redelivery.RedeliveryPolicy | None = None
    """Delay of a negatively acknowledged position that names none"""
    max_redeliver_count: int | None = None
    """Redeliveries after which a negatively acknowledged position becomes a dead letter; 0 means at the first time,
    None never
    """
    ack_timeout_ms: int | None = None
    """Time after which a position in flight is negatively acknowledged; 100 ms to 12 hours, None for never"""
    nack_precision_bits: int | None = None
    """Redelivery times are rounded up to multiples of 2^n ms (PIP-393); 0 to 20, 0 for exact"""
    key_shared: KeySharedPolicy | None = None
    """Rules of KEY_SHARED streams, which apply from the next time on that no such stream is open"""

    def to_message(self) -> policy_pb2.SubscriptionPolicy:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
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
    """1 to 256 delays, level 1 first: positive whole numbers, each with s, m, h or d, separated by white space"""
    clamp: bool = True
    """True if a level above the last one means the last one; otherwise it is refused"""

    def to_message(self) -> admin_pb2.DelayLevels:
        """Return the message. Raises InvalidArgument if a field cannot hold a value."""
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
