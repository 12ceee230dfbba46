"""Determines the settings of one topic and its subscriptions from the configuration and their policies.

It has the limits of both kinds of policy. `daemon.shard.topic_changes` stores a policy. The defaults of a
subscription's policy are where they apply (`daemon.core.decisions.subscription_state`, `topic_acks`,
`daemon.owner.requests`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from daemon.config import Config
from daemon.core.decisions import redelivery_policy
from daemon.core.index import delay_levels
from daemon.core.index.delay_levels import DelayLevels
from daemon.core.index.mutable_bucket import SealLimits
from daemon.core.limits import RequestLimits
from daemon.core.quotas import QuotaLimits
from daemon.errors import InvalidArgument, QuotaExceeded
from daemon.runtime import due_loop
from daemon.runtime.environment import Environment
from storage_backends import storage_settings
from storage_backends.formats import column_format
from storage_backends.formats.manifest import (
    KeySharedPolicy,
    NackOrder,
    NamedValues,
    SubscriptionPolicy,
    TopicDelayLevels,
    TopicPolicy,
)
from storage_backends.formats.segment import SegmentLimits

TIME_MAX_MS = 1 << 53
ROWS_MAX = (1 << 32) - 1
SIZE_MAX_BYTES = 1 << 53
# Sealed at so many rows whatever is set: with those of another request a checkpoint is still read.
MUTABLE_ROWS_MAX = column_format.ROWS_MAX // 4
QUOTA_MAX = 1 << 53
# The longest tick: the daemon checks for due rows at least this often (ms)
TICK_MAX_MS = 500
LEASE_MAX_MS = 12 * 3_600_000
LEASE_DEFAULT_MS = 30_000
ACK_TIMEOUT_LEAST_MS = 100
ACK_TIMEOUT_MAX_MS = 12 * 3_600_000
PRECISION_BITS_MAX = 20
POINTS_PER_CONSUMER_MAX = 1000
NACK_BLOCK_MAX_MS = 12 * 3_600_000
PROPERTIES_MAX = 64
PROPERTY_NAME_MAX_BYTES = 128
PROPERTY_VALUE_MAX_BYTES = 1024
# Bytes of the object with the properties of all subscriptions of a topic: a change of one writes it again as a whole.
TOPIC_PROPERTIES_MAX_BYTES = 64 << 10
# Former such objects that wait for their deletion: each manifest of the topic names them all.
REPLACED_PROPERTIES_MAX = 1_000
REPLACED_RETRY_LEAST_MS = 1_000

# Field of a topic's policy -> its least and its largest value
_TOPIC_LIMITS = {
    "delay_max_ms": (1, TIME_MAX_MS),
    "min_index_count_per_bucket": (1, ROWS_MAX),
    "bucket_rows_max": (1, ROWS_MAX),
    "bucket_bytes_max": (1, SIZE_MAX_BYTES),
    "bucket_age_max_ms": (1, TIME_MAX_MS),
    "max_time_step_per_bucket_snapshot_segment_seconds": (1, ROWS_MAX),
    "max_indexes_per_bucket_snapshot_segment": (-1, (1 << 31) - 1),
    "min_indexes_per_bucket_snapshot_segment": (0, ROWS_MAX),
    "max_num_buckets": (-1, (1 << 31) - 1),
    "merge_buckets_max": (2, ROWS_MAX),
    "merge_rows_max": (1, SIZE_MAX_BYTES),
    "tick_ms": (1, TICK_MAX_MS),
    "pending_rows_max": (0, QUOTA_MAX),
    "due_rows_per_second_max": (0, QUOTA_MAX),
    "client_rows_per_second_max": (0, QUOTA_MAX),
    "client_bytes_per_second_max": (0, QUOTA_MAX),
}
# Fields that must not be 0 although their range includes it
_NOT_ZERO = {
    "max_indexes_per_bucket_snapshot_segment": "at least 1, or -1 for no limit",
    "max_num_buckets": "at least 1, or -1 for never",
}


@dataclasses.dataclass(frozen=True, slots=True)
class TopicSettings:
    """The settings in force for one topic.

    `policy` is as it was set, `effective` has every field filled. `max_num_buckets` is -1 if nothing is merged.
    `tick_ms` is None for the daemon's own (`daemon.runtime.due_loop`). `delay_levels` is as it was set, or None;
    `levels` are those in force.
    """

    policy: TopicPolicy
    effective: TopicPolicy
    seal_limits: SealLimits
    segment_limits: SegmentLimits
    request_limits: RequestLimits
    quota_limits: QuotaLimits
    max_num_buckets: int
    merge_buckets_max: int
    merge_rows_max: int
    compatible_form: bool
    shared_index: bool
    tick_ms: int | None
    delay_levels: TopicDelayLevels | None
    levels: DelayLevels


def settings_of(environment: Environment, policy: TopicPolicy, table: TopicDelayLevels | None = None) -> TopicSettings:
    """Return the settings of a topic with this policy and these delay levels; None means the daemon's."""
    set_here = {name: value for name, value in _fields(policy).items() if value is not None}
    effective = _defaults(environment.config) | set_here
    # A default yields to a set value: the least number of rows of a bucket is not above the most.
    rows_min, rows_max = effective["min_index_count_per_bucket"], effective["bucket_rows_max"]
    effective["min_index_count_per_bucket"] = min(rows_min, rows_max)
    segment_limits = storage_settings.segment_limits(environment.config.bucket, policy)
    effective["min_indexes_per_bucket_snapshot_segment"] = segment_limits.rows_min
    return TopicSettings(
        policy=policy,
        effective=TopicPolicy(**effective),
        seal_limits=SealLimits(
            rows_min=effective["min_index_count_per_bucket"],
            rows_max=min(rows_max, MUTABLE_ROWS_MAX),
            size_max_bytes=effective["bucket_bytes_max"],
            age_max_ms=effective["bucket_age_max_ms"],
        ),
        segment_limits=segment_limits,
        request_limits=dataclasses.replace(environment.request_limits, delay_max_ms=effective["delay_max_ms"]),
        quota_limits=QuotaLimits(**{field.name: effective[field.name] for field in dataclasses.fields(QuotaLimits)}),
        max_num_buckets=effective["max_num_buckets"],
        merge_buckets_max=effective["merge_buckets_max"],
        merge_rows_max=effective["merge_rows_max"],
        compatible_form=effective["compatible_form"],
        shared_index=effective["shared_index"],
        tick_ms=environment.config.delivery.tick_ms if policy.tick_ms is None else policy.tick_ms,
        delay_levels=table,
        # A limit that was set later refuses rows, not the table.
        levels=levels_of(environment, table, delay_max_ms=TIME_MAX_MS),
    )


def levels_of(environment: Environment, given: TopicDelayLevels | None, *, delay_max_ms: int) -> DelayLevels:
    """Return the delay levels of a topic; None means the daemon's. Raises InvalidArgument for an invalid table."""
    if given is None:
        return environment.delay_levels
    return delay_levels.parse(given.table, clamp=given.clamp, delay_max_ms=delay_max_ms)


def _defaults(config: Config) -> dict[str, Any]:
    """Return the values for a topic whose policy sets nothing."""
    bucket, limits = config.bucket, config.limits
    return {
        "delay_max_ms": limits.delay_max_ms,
        "min_index_count_per_bucket": bucket.min_index_count_per_bucket,
        "bucket_rows_max": bucket.rows_max,
        "bucket_bytes_max": bucket.bytes_max,
        "bucket_age_max_ms": int(bucket.age_max_s * 1000),
        "max_time_step_per_bucket_snapshot_segment_seconds": bucket.max_time_step_per_bucket_snapshot_segment_seconds,
        "max_indexes_per_bucket_snapshot_segment": bucket.max_indexes_per_bucket_snapshot_segment,
        "min_indexes_per_bucket_snapshot_segment": bucket.min_indexes_per_bucket_snapshot_segment,
        "compatible_form": bucket.form == "compatible",
        "shared_index": True,
        "max_num_buckets": bucket.max_num_buckets,
        "merge_buckets_max": bucket.merge_buckets_max,
        "merge_rows_max": bucket.merge_rows_max,
        "tick_ms": due_loop.STEPS_MS[0] if config.delivery.tick_ms is None else config.delivery.tick_ms,
        "pending_rows_max": limits.pending_rows_per_topic_max,
        "due_rows_per_second_max": limits.due_rows_per_second_max,
        "client_rows_per_second_max": limits.client_rows_per_second_max,
        "client_bytes_per_second_max": limits.client_bytes_per_second_max,
        "two_phase_deletion_enabled": config.deletion.two_phase_deletion_enabled,
    }


def check_topic_policy(policy: TopicPolicy) -> None:
    """Raise InvalidArgument for a value outside its limits, and for values that contradict each other."""
    values = _fields(policy)
    for name, (least, most) in _TOPIC_LIMITS.items():
        _check_number(name, values[name], least, most)
    for name, allowed in _NOT_ZERO.items():
        if values[name] == 0:
            raise InvalidArgument(f"{name} is 0; it must be {allowed}")
    _check_not_above(values, "min_index_count_per_bucket", "bucket_rows_max")
    if (policy.max_indexes_per_bucket_snapshot_segment or 0) > 0:
        _check_not_above(values, "min_indexes_per_bucket_snapshot_segment", "max_indexes_per_bucket_snapshot_segment")


def check_subscription_policy(policy: SubscriptionPolicy, *, delay_max_ms: int) -> None:
    """Raise InvalidArgument for a value outside its limits, and for values that contradict each other.

    `delay_max_ms` is the topic's limit on delays.
    """
    _check_number("in_flight_rows_max", policy.in_flight_rows_max, 1, ROWS_MAX)
    _check_number("lease_ms", policy.lease_ms, 1, LEASE_MAX_MS)
    _check_number("max_redeliver_count", policy.max_redeliver_count, 0, ROWS_MAX)
    _check_number("ack_timeout_ms", policy.ack_timeout_ms, ACK_TIMEOUT_LEAST_MS, ACK_TIMEOUT_MAX_MS)
    _check_number("nack_precision_bits", policy.nack_precision_bits, 0, PRECISION_BITS_MAX)
    if policy.redelivery is not None:
        redelivery_policy.check(policy.redelivery, delay_max_ms)
    if policy.key_shared is not None:
        _check_key_shared(policy.key_shared)


def check_properties(properties: NamedValues) -> None:
    """Raise InvalidArgument for too many properties, and for one whose name or value is too long."""
    if len(properties) > PROPERTIES_MAX:
        raise InvalidArgument(f"properties has {len(properties)} entries; it must have at most {PROPERTIES_MAX}")
    for name, value in properties:
        _check_text("a name", name, 1, PROPERTY_NAME_MAX_BYTES)
        _check_text(f"the value of {name!r}", value, 0, PROPERTY_VALUE_MAX_BYTES)


def check_topic_properties(topic: str, size_bytes: int, *, stored_bytes: int) -> None:
    """Check the size of the object with a topic's properties. Raise QuotaExceeded if it is too large.

    `stored_bytes` is the size of the object that it replaces: one of an earlier version may be larger than the limit,
    and may shrink.
    """
    if size_bytes > max(TOPIC_PROPERTIES_MAX_BYTES, stored_bytes):
        raise QuotaExceeded(
            f"topic {topic}: the properties of its subscriptions would take {size_bytes} bytes; they may take "
            f"{TOPIC_PROPERTIES_MAX_BYTES} together, and take {stored_bytes} now. Shorten or remove properties of this "
            "subscription or of others",
            retry_after_ms=None,
        )


def check_replaced_properties(topic: str, delete_after_ms: Sequence[int], *, now_ms: int) -> None:
    """Raise QuotaExceeded if too many former objects with a topic's properties wait for their deletion.

    `delete_after_ms` are the times from which they may be deleted (Unix ms).
    """
    replaced = len(delete_after_ms)
    if replaced >= REPLACED_PROPERTIES_MAX:
        raise QuotaExceeded(
            f"topic {topic}: the properties of its subscriptions were changed {replaced} times within "
            f"collection.grace_s; they may be changed {REPLACED_PROPERTIES_MAX} times. Change them less often",
            retry_after_ms=max(REPLACED_RETRY_LEAST_MS, min(delete_after_ms) - now_ms),
        )


def _check_key_shared(policy: KeySharedPolicy) -> None:
    _check_number("key_shared.points_per_consumer", policy.points_per_consumer, 1, POINTS_PER_CONSUMER_MAX)
    _check_number("key_shared.nack_block_max_ms", policy.nack_block_max_ms, 1, NACK_BLOCK_MAX_MS)
    if policy.allow_out_of_order_delivery and policy.nack_order is NackOrder.BLOCK_KEY:
        raise InvalidArgument(
            "key_shared.allow_out_of_order_delivery is true and key_shared.nack_order is BLOCK_KEY: the first gives up "
            "key order, the second keeps it; set at most one"
        )


def _fields(policy: TopicPolicy) -> dict[str, Any]:
    return {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}


def _check_number(name: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise InvalidArgument(f"{name} is {value}; it must be {least} to {most}")


def _check_not_above(values: dict[str, Any], name: str, limit_name: str) -> None:
    value, limit = values[name], values[limit_name]
    if value is not None and limit is not None and value > limit:
        raise InvalidArgument(f"{name} is {value}; it must be at most {limit_name}, which is {limit}")


def _check_text(what: str, text: str, least: int, most: int) -> None:
    size_bytes = len(text.encode())
    if not least <= size_bytes <= most:
        raise InvalidArgument(f"properties: {what} has {size_bytes} bytes in UTF-8; it must have {least} to {most}")
