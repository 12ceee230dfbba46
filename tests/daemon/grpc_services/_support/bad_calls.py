"""Bad requests of the calls with one request and one answer: each field missing, zero, over its limit, of another
length, not UTF-8, too often.

`COVERED` says for which fields there are cases; the tests compare it with the contract.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2, policy_pb2
from tests.daemon.grpc_services._support.bad_requests import (
    ADD,
    ADDS,
    SUBSCRIPTION,
    TOO_LATE,
    TOPIC,
    Case,
    text,
)

CONTAINS = "DelayedDelivery/ContainsMessages"
TRIM = "DelayedDelivery/TrimMessages"
CLEAR = "DelayedDelivery/ClearMessages"
CREATE = "Dispatch/CreateSubscription"
UPDATE = "Dispatch/UpdateSubscription"
DELETE = "Dispatch/DeleteSubscription"
GET = "Dispatch/GetScheduledMessages"
ACKNOWLEDGE = "Dispatch/Acknowledge"
EXTEND = "Dispatch/ExtendLease"
LIST_TOPICS = "Inspect/ListTopics"
TOPIC_STATS = "Inspect/GetTopicStats"
LIST_BUCKETS = "Inspect/ListBuckets"
LIST_SUBSCRIPTIONS = "Inspect/ListSubscriptions"
SET_POLICY = "Admin/SetTopicPolicy"
GET_POLICY = "Admin/GetTopicPolicy"
SEAL = "Admin/SealBucket"
MERGE = "Admin/MergeBuckets"
DELETE_TOPIC = "Admin/DeleteTopic"
LOOKUP = "Cluster/LookupTopic"

NOT_FOUND = grpc.StatusCode.NOT_FOUND
U64_MAX = (1 << 64) - 1
U32_MAX = (1 << 32) - 1
HALF_DAY_MS = 12 * 3_600_000

Says = tuple[str, ...]
# Field number, name, and the limit in bytes.
TOPIC_NAME = (1, "topic", 1024)
SUBSCRIPTION_NAME = (2, "subscription", 255)


def names(
    method: str, good: message.Message, *fields: tuple[int, str, int], may_be_empty: bool = False, exists: bool = True
) -> list[Case]:
    """The ways in which each name of a request can be bad, and those of what does not exist."""
    cases = []
    for number, field, limit in fields:
        others = changed(good, **{field: ""})
        long = changed(good, **{field: "é" * (limit // 2 + 1)})
        cases += [
            Case(f"{method} {field} too long", method, long, (field, str(limit // 2 * 2 + 2), str(limit))),
            Case(
                f"{method} {field} not UTF-8",
                method,
                others.SerializeToString() + text(number, b"or\xffders"),
                (field, "UTF-8", "2"),
            ),
        ]
        if field == "topic" or not may_be_empty:
            cases.append(Case(f"{method} {field} empty", method, others, (field, "0", str(limit))))
        if exists:
            unknown = changed(good, **{field: "nowhere"})
            cases.append(Case(f"{method} {field} unknown", method, unknown, ("nowhere",), NOT_FOUND))
    return cases


def changed(good: message.Message, **fields: Any) -> message.Message:
    """The request with other fields; None clears one."""
    request = type(good)()
    request.CopyFrom(good)
    for name in fields:
        request.ClearField(name)
    request.MergeFrom(type(good)(**{name: value for name, value in fields.items() if value is not None}))
    return request


def cases(method: str, good: message.Message, table: list[tuple[str, dict[str, Any], Says]]) -> list[Case]:
    return [Case(f"{method} {name}", method, changed(good, **fields), says) for name, fields, says in table]


def handed_out(method: str, good: message.Message) -> list[Case]:
    """Columns of positions with their times."""
    return cases(
        method,
        good,
        [
            ("ledger_id missing", {"ledger_id": None}, ("ledger_id", "0", "2")),
            ("ledger_id of another length", {"ledger_id": [1] * 3}, ("ledger_id", "3", "2")),
            ("entry_id: no rows", {"entry_id": None}, ("entry_id", "0", "1")),
            ("entry_id: too many rows", {"entry_id": range(1001)}, ("entry_id", "1001", "1000")),
            ("deliver_at_ms missing", {"deliver_at_ms": None}, ("deliver_at_ms", "0", "2")),
            ("deliver_at_ms of another length", {"deliver_at_ms": [1] * 3}, ("deliver_at_ms", "3", "2")),
        ],
    )


def pages(method: str, good: message.Message, token_field: int) -> list[Case]:
    not_utf8 = good.SerializeToString() + text(token_field, b"\xff")
    return [
        *cases(
            method,
            good,
            [
                ("page_size too large", {"page_size": 1001}, ("page_size", "1001", "1000")),
                ("page_size at its maximum", {"page_size": U32_MAX}, ("page_size", str(U32_MAX), "1000")),
                ("page_token not base64", {"page_token": "é!"}, ("page_token", "é!")),
                ("page_token of another kind", {"page_token": "AAAA"}, ("page_token", "AAAA")),
                # Of a list that does not exist, so that it is not this one's.
                ("page_token of another list", {"page_token": "f2E="}, ("page_token", "f2E=")),
                ("page_token without a name", {"page_token": "AQ=="}, ("page_token", "AQ==")),
            ],
        ),
        Case(f"{method} page_token not UTF-8", method, not_utf8, ("page_token", "UTF-8")),
    ]


def subscription_policies(method: str, good: message.Message) -> list[Case]:
    def policy(**fields: Any) -> dict[str, Any]:
        return {"policy": policy_pb2.SubscriptionPolicy(**fields)}

    key_not_utf8 = text(3, text(3, text(1, b"k\xff")))
    value_not_utf8 = text(3, text(3, text(2, b"v\xff")))
    many = {f"name-{number}": "" for number in range(65)}
    return [
        *cases(
            method,
            good,
            [
                ("in_flight_rows_max zero", policy(in_flight_rows_max=0), ("in_flight_rows_max", "0", "1")),
                ("lease_ms zero", policy(lease_ms=0), ("lease_ms", "0", "1", str(HALF_DAY_MS))),
                (
                    "lease_ms over the limit",
                    policy(lease_ms=HALF_DAY_MS + 1),
                    ("lease_ms", str(HALF_DAY_MS + 1), str(HALF_DAY_MS)),
                ),
                ("lease_ms at its maximum", policy(lease_ms=U64_MAX), ("lease_ms", str(U64_MAX), str(HALF_DAY_MS))),
                ("too many properties", policy(properties=many), ("properties", "65", "64")),
                ("a property without a name", policy(properties={"": "x"}), ("properties", "0", "128")),
                ("a name too long", policy(properties={"é" * 65: ""}), ("properties", "130", "128")),
                ("a value too long", policy(properties={"key": "é" * 513}), ("properties", "key", "1026", "1024")),
            ],
        ),
        Case(
            f"{method} a name not UTF-8",
            method,
            changed(good, policy=None).SerializeToString() + key_not_utf8,
            ("properties", "key", "UTF-8", "1"),
        ),
        Case(
            f"{method} a value not UTF-8",
            method,
            changed(good, policy=None).SerializeToString() + value_not_utf8,
            ("properties", "value", "UTF-8", "1"),
        ),
    ]


def topic_policies() -> list[Case]:
    def policy(**fields: Any) -> dict[str, Any]:
        return {"policy": policy_pb2.TopicPolicy(**fields)}

    good = admin_pb2.SetTopicPolicyRequest(topic=TOPIC, policy=policy_pb2.TopicPolicy(bucket_rows_max=10))
    least_one = (
        "delay_max_ms",
        "min_index_count_per_bucket",
        "bucket_rows_max",
        "bucket_bytes_max",
        "bucket_age_max_ms",
        "max_time_step_per_bucket_snapshot_segment_seconds",
        "max_indexes_per_bucket_snapshot_segment",
        "max_num_buckets",
        "merge_buckets_max",
        "merge_rows_max",
        "tick_ms",
    )
    large = (
        "delay_max_ms",
        "bucket_bytes_max",
        "bucket_age_max_ms",
        "merge_rows_max",
        "pending_rows_max",
        "due_rows_per_second_max",
        "client_rows_per_second_max",
        "client_bytes_per_second_max",
    )
    limit = str(1 << 53)
    below = {"max_indexes_per_bucket_snapshot_segment": -2}
    return [
        *names(SET_POLICY, good, TOPIC_NAME, exists=False),
        *cases(SET_POLICY, good, [(f"{name} zero", policy(**{name: 0}), (name, "0")) for name in least_one]),
        *cases(
            SET_POLICY,
            good,
            [(f"{name} at its maximum", policy(**{name: U64_MAX}), (name, str(U64_MAX), limit)) for name in large],
        ),
        *cases(
            SET_POLICY,
            good,
            [
                ("policy missing", {"policy": None}, ("policy", "none")),
                (
                    "max_indexes below -1",
                    policy(**below),
                    ("max_indexes_per_bucket_snapshot_segment", "-2", "-1"),
                ),
                (
                    "min_index_count above bucket_rows_max",
                    policy(min_index_count_per_bucket=11, bucket_rows_max=10),
                    ("min_index_count_per_bucket", "11", "bucket_rows_max", "10"),
                ),
                (
                    "min_indexes above max_indexes",
                    policy(min_indexes_per_bucket_snapshot_segment=11, max_indexes_per_bucket_snapshot_segment=10),
                    ("min_indexes_per_bucket_snapshot_segment", "11", "10"),
                ),
                ("bucket_form unknown", policy(bucket_form=3), ("bucket_form", "3", "BUCKET_FORM_COLUMNAR")),
                ("max_num_buckets below -1", policy(max_num_buckets=-2), ("max_num_buckets", "-2", "-1")),
                ("merge_buckets_max of one", policy(merge_buckets_max=1), ("merge_buckets_max", "1", "2")),
                ("tick_ms above its maximum", policy(tick_ms=501), ("tick_ms", "501", "500")),
            ],
        ),
    ]


_POLICY = policy_pb2.SubscriptionPolicy(lease_ms=5)
_PAIR: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
_POSITIONS: dict[str, Any] = {"ledger_id": [1], "entry_id": [1, 2], "deliver_at_ms": [5]}

_contains = delayed_delivery_pb2.ContainsMessagesRequest(
    topic=TOPIC, ledger_id=[77], entry_id=[1, 3], last_entry_id=[1, 3]
)
_trim = delayed_delivery_pb2.TrimMessagesRequest(topic=TOPIC, ledger_id=[77, 78], entry_id=[1, 3])
_clear = delayed_delivery_pb2.ClearMessagesRequest(topic=TOPIC)
_create = dispatch_pb2.CreateSubscriptionRequest(**_PAIR)
_update = dispatch_pb2.UpdateSubscriptionRequest(**_PAIR, policy=_POLICY)
_get = dispatch_pb2.GetScheduledMessagesRequest(**_PAIR, max_rows=10)
_acknowledge = dispatch_pb2.AcknowledgeRequest(**_PAIR, **_POSITIONS)
_extend = dispatch_pb2.ExtendLeaseRequest(**_PAIR, **_POSITIONS, lease_ms=1000)
_buckets = inspect_pb2.ListBucketsRequest(topic=TOPIC)
_subscriptions = inspect_pb2.ListSubscriptionsRequest(topic=TOPIC)
_delete_topic = admin_pb2.DeleteTopicRequest(topic=TOPIC)

BAD_CALLS = [
    *(Case(f"{ADD} {name}", ADD, request, says) for name, request, says in ADDS),
    *(Case(f"{ADD} {name}", ADD, request, says, grpc.StatusCode.OUT_OF_RANGE) for name, request, says in TOO_LATE),
    # A topic that does not exist contains nothing.
    *names(CONTAINS, _contains, TOPIC_NAME, exists=False),
    *names(CONTAINS, _contains, (5, "subscription", 255), may_be_empty=True),
    *cases(
        CONTAINS,
        _contains,
        [
            ("ledger_id missing", {"ledger_id": None}, ("ledger_id", "0", "2")),
            ("ledger_id of another length", {"ledger_id": [1] * 3}, ("ledger_id", "3", "2")),
            ("entry_id: no ranges", {"entry_id": None}, ("entry_id", "0", "1")),
            (
                "entry_id: too many ranges",
                {"entry_id": range(1001), "last_entry_id": range(1001)},
                ("entry_id", "1001", "1000"),
            ),
            (
                "entry_id: too many positions",
                {"entry_id": range(1001), "last_entry_id": None},
                ("entry_id", "1001", "1000"),
            ),
            ("last_entry_id of another length", {"last_entry_id": [9]}, ("last_entry_id", "1", "2")),
            ("a range that ends before it begins", {"last_entry_id": [1, 2]}, ("last_entry_id[1]", "2", "3")),
        ],
    ),
    *names(TRIM, _trim, TOPIC_NAME, SUBSCRIPTION_NAME, may_be_empty=True),
    *cases(
        TRIM,
        _trim,
        [
            ("ledger_id: no ledgers", {"ledger_id": None}, ("ledger_id", "0", "1")),
            ("ledger_id twice", {"ledger_id": [77, 77]}, ("ledger_id", "77")),
            ("entry_id missing", {"entry_id": None}, ("entry_id", "0", "2")),
            ("entry_id of another length", {"entry_id": [5]}, ("entry_id", "1", "2")),
            ("too many ledgers", {"ledger_id": range(1001), "entry_id": range(1001)}, ("ledger_id", "1001", "1000")),
            ("all_lower_ledgers with two ledgers", {"all_lower_ledgers": True}, ("all_lower_ledgers", "2", "1")),
            ("dead_letter of no subscription", {"dead_letter": True}, ("dead_letter", "subscription")),
        ],
    ),
    *names(CLEAR, _clear, TOPIC_NAME, SUBSCRIPTION_NAME, may_be_empty=True),
    *names(CREATE, _create, TOPIC_NAME, SUBSCRIPTION_NAME, exists=False),
    *subscription_policies(CREATE, _create),
    Case(
        "too many subscriptions",
        CREATE,
        changed(_create, subscription="fourth"),
        ("subscription", "3"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    Case(
        "another policy",
        CREATE,
        changed(_create, policy=_POLICY),
        (SUBSCRIPTION, "policy"),
        grpc.StatusCode.ALREADY_EXISTS,
    ),
    *names(UPDATE, _update, TOPIC_NAME, SUBSCRIPTION_NAME),
    *subscription_policies(UPDATE, _update),
    *cases(UPDATE, _update, [("policy missing", {"policy": None}, ("policy", "none"))]),
    *names(DELETE, dispatch_pb2.DeleteSubscriptionRequest(**_PAIR), TOPIC_NAME, SUBSCRIPTION_NAME),
    *names(GET, _get, TOPIC_NAME, SUBSCRIPTION_NAME),
    *cases(
        GET,
        _get,
        [
            ("max_rows zero", {"max_rows": 0}, ("max_rows", "0", "1", "10000")),
            ("max_rows over the limit", {"max_rows": 10_001}, ("max_rows", "10001", "10000")),
            ("max_rows at its maximum", {"max_rows": U32_MAX}, ("max_rows", str(U32_MAX), "10000")),
            (
                "lease_ms over the limit",
                {"lease_ms": HALF_DAY_MS + 1},
                ("lease_ms", str(HALF_DAY_MS + 1), str(HALF_DAY_MS)),
            ),
            ("lease_ms at its maximum", {"lease_ms": U64_MAX}, ("lease_ms", str(U64_MAX), str(HALF_DAY_MS))),
            ("wait_ms over the limit", {"wait_ms": 60_001}, ("wait_ms", "60001", "60000")),
            ("wait_ms at its maximum", {"wait_ms": U32_MAX}, ("wait_ms", str(U32_MAX), "60000")),
        ],
    ),
    *names(ACKNOWLEDGE, _acknowledge, TOPIC_NAME, SUBSCRIPTION_NAME),
    *handed_out(ACKNOWLEDGE, _acknowledge),
    *names(EXTEND, _extend, TOPIC_NAME, SUBSCRIPTION_NAME),
    *handed_out(EXTEND, _extend),
    *cases(
        EXTEND,
        _extend,
        [
            (
                "lease_ms over the limit",
                {"lease_ms": HALF_DAY_MS + 1},
                ("lease_ms", str(HALF_DAY_MS + 1), str(HALF_DAY_MS)),
            ),
            ("lease_ms at its maximum", {"lease_ms": U64_MAX}, ("lease_ms", str(U64_MAX), str(HALF_DAY_MS))),
        ],
    ),
    *pages(LIST_TOPICS, inspect_pb2.ListTopicsRequest(), 2),
    *names(TOPIC_STATS, inspect_pb2.GetTopicStatsRequest(topic=TOPIC), TOPIC_NAME),
    *names(LIST_BUCKETS, _buckets, TOPIC_NAME),
    *pages(LIST_BUCKETS, _buckets, 3),
    *names(LIST_SUBSCRIPTIONS, _subscriptions, TOPIC_NAME),
    *pages(LIST_SUBSCRIPTIONS, _subscriptions, 3),
    *topic_policies(),
    *names(GET_POLICY, admin_pb2.GetTopicPolicyRequest(topic=TOPIC), TOPIC_NAME),
    *names(SEAL, admin_pb2.SealBucketRequest(topic=TOPIC), TOPIC_NAME),
    *names(MERGE, admin_pb2.MergeBucketsRequest(topic=TOPIC), TOPIC_NAME),
    *names(DELETE_TOPIC, _delete_topic, TOPIC_NAME),
    *names(LOOKUP, cluster_pb2.LookupTopicRequest(topic=TOPIC), TOPIC_NAME, exists=False),
]

_TOPIC_AND_SUBSCRIPTION = {"topic", "subscription"}
_HANDED_OUT = {"ledger_id", "entry_id", "deliver_at_ms", "batch_index"}
_PAGE = {"page_size", "page_token"}

# The fields for which there are cases, by message; every field of the contract's requests is here.
COVERED: dict[type[message.Message], set[str]] = {
    delayed_delivery_pb2.AddMessagesRequest: {
        "topic",
        "ledger_id",
        "entry_id",
        "deliver_at_ms",
        "delay_ms",
        "delay_level",
        "key_hash",
        "already_due",
        "on_invalid",
        "subscription",
    },
    delayed_delivery_pb2.ContainsMessagesRequest: _TOPIC_AND_SUBSCRIPTION | {"ledger_id", "entry_id", "last_entry_id"},
    delayed_delivery_pb2.TrimMessagesRequest: _TOPIC_AND_SUBSCRIPTION
    | {"ledger_id", "entry_id", "all_lower_ledgers", "dead_letter"},
    delayed_delivery_pb2.ClearMessagesRequest: _TOPIC_AND_SUBSCRIPTION,
    dispatch_pb2.Open: _TOPIC_AND_SUBSCRIPTION
    | {"type", "held_ledger_id", "held_entry_id", "held_deliver_at_ms", "held_batch_index"}
    | {"consumers", "held_consumer_id", "held_key_hash", "held_redelivery_count"}
    # `test_dispatch_service` shows what may not follow one.
    | {"more_held"},
    dispatch_pb2.Flow: {"permits", "consumer_id"},
    dispatch_pb2.Acknowledge: _HANDED_OUT | {"redelivery_count"},
    dispatch_pb2.CreateSubscriptionRequest: _TOPIC_AND_SUBSCRIPTION | {"policy"},
    dispatch_pb2.UpdateSubscriptionRequest: _TOPIC_AND_SUBSCRIPTION | {"policy"},
    dispatch_pb2.DeleteSubscriptionRequest: _TOPIC_AND_SUBSCRIPTION,
    dispatch_pb2.GetScheduledMessagesRequest: _TOPIC_AND_SUBSCRIPTION | {"max_rows", "lease_ms", "wait_ms"},
    dispatch_pb2.AcknowledgeRequest: _TOPIC_AND_SUBSCRIPTION | _HANDED_OUT | {"redelivery_count"},
    dispatch_pb2.ExtendLeaseRequest: _TOPIC_AND_SUBSCRIPTION | _HANDED_OUT | {"lease_ms"},
    inspect_pb2.ListTopicsRequest: _PAGE,
    inspect_pb2.GetTopicStatsRequest: {"topic"},
    inspect_pb2.ListBucketsRequest: _PAGE | {"topic"},
    inspect_pb2.ListSubscriptionsRequest: _PAGE | {"topic"},
    admin_pb2.SetTopicPolicyRequest: {"topic", "policy"},
    admin_pb2.GetTopicPolicyRequest: {"topic"},
    admin_pb2.SealBucketRequest: {"topic"},
    # Any number of buckets is right.
    admin_pb2.MergeBucketsRequest: {"topic", "buckets_max"},
    admin_pb2.DeleteTopicRequest: {"topic"},
    cluster_pb2.LookupTopicRequest: {"topic"},
    cluster_pb2.GetVersionRequest: set(),
    policy_pb2.TopicPolicy: {
        "delay_max_ms",
        "min_index_count_per_bucket",
        "bucket_rows_max",
        "bucket_bytes_max",
        "bucket_age_max_ms",
        "max_time_step_per_bucket_snapshot_segment_seconds",
        "max_indexes_per_bucket_snapshot_segment",
        "min_indexes_per_bucket_snapshot_segment",
        "bucket_form",
        # Either value is right.
        "shared_index",
        "max_num_buckets",
        "merge_buckets_max",
        "merge_rows_max",
        "tick_ms",
        "pending_rows_max",
        "due_rows_per_second_max",
        "client_rows_per_second_max",
        "client_bytes_per_second_max",
        # Either value is right.
        "two_phase_deletion_enabled",
    },
    policy_pb2.SubscriptionPolicy: {
        "in_flight_rows_max",
        "lease_ms",
        "properties",
        "redelivery",
        # Any number is right.
        "max_redeliver_count",
        "ack_timeout_ms",
        "nack_precision_bits",
        "key_shared",
    },
}
