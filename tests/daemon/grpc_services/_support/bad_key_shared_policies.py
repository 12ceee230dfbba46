"""Bad policies of key order."""

from __future__ import annotations

from typing import Any

from google.protobuf import message

from tarry.v1 import dispatch_pb2, policy_pb2
from tests.daemon.grpc_services._support.bad_calls import CREATE, HALF_DAY_MS, U64_MAX, UPDATE, Says, cases
from tests.daemon.grpc_services._support.bad_requests import SUBSCRIPTION, TOPIC

_PAIR: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
_STICKY = policy_pb2.HASH_SELECTOR_STICKY
_BLOCK_KEY = policy_pb2.NACK_ORDER_BLOCK_KEY


def _key_shared(**fields: Any) -> dict[str, Any]:
    return {"policy": policy_pb2.SubscriptionPolicy(key_shared=policy_pb2.KeySharedPolicy(**fields))}


_REFUSED: list[tuple[str, dict[str, Any], Says]] = [
    ("selector of a later version", _key_shared(selector=4), ("key_shared.selector", "4", "3 = HASH_SELECTOR_STICKY")),
    ("order of a later version", _key_shared(order=3), ("key_shared.order", "3", "2 = KEY_ORDER_LAST_SENT_POSITION")),
    ("nack_order negative", _key_shared(nack_order=-1), ("key_shared.nack_order", "-1", "2 = NACK_ORDER_BLOCK_KEY")),
    ("no points", _key_shared(points_per_consumer=0), ("key_shared.points_per_consumer", "0", "1", "1000")),
    (
        "points over the limit",
        _key_shared(points_per_consumer=1001),
        ("key_shared.points_per_consumer", "1001", "1000"),
    ),
    (
        "points of sticky ranges",
        _key_shared(selector=_STICKY, points_per_consumer=100),
        ("key_shared.points_per_consumer", "100", "key_shared.selector", "STICKY", "CONSISTENT_HASHING"),
    ),
    (
        "points of automatic ranges",
        _key_shared(selector=policy_pb2.HASH_SELECTOR_AUTO_SPLIT, points_per_consumer=5),
        ("key_shared.points_per_consumer", "5", "key_shared.selector", "AUTO_SPLIT", "CONSISTENT_HASHING"),
    ),
    (
        "a time to block of nothing",
        _key_shared(nack_order=_BLOCK_KEY, nack_block_max_ms=0),
        ("key_shared.nack_block_max_ms", "0", "1", str(HALF_DAY_MS)),
    ),
    (
        "a time to block over the limit",
        _key_shared(nack_order=_BLOCK_KEY, nack_block_max_ms=HALF_DAY_MS + 1),
        ("key_shared.nack_block_max_ms", str(HALF_DAY_MS + 1), str(HALF_DAY_MS)),
    ),
    (
        "a time to block at its maximum",
        _key_shared(nack_order=_BLOCK_KEY, nack_block_max_ms=U64_MAX),
        ("key_shared.nack_block_max_ms", str(U64_MAX), str(HALF_DAY_MS)),
    ),
    (
        "a time to block where nothing blocks",
        _key_shared(nack_block_max_ms=7),
        ("key_shared.nack_block_max_ms", "7", "key_shared.nack_order", "SKIP", "BLOCK_KEY"),
    ),
    (
        "out of order and blocked",
        _key_shared(allow_out_of_order_delivery=True, nack_order=_BLOCK_KEY),
        ("key_shared.allow_out_of_order_delivery", "true", "key_shared.nack_order", "BLOCK_KEY"),
    ),
]

BAD_KEY_SHARED_POLICIES = [
    *cases(CREATE, dispatch_pb2.CreateSubscriptionRequest(**_PAIR), _REFUSED),
    *cases(UPDATE, dispatch_pb2.UpdateSubscriptionRequest(**_PAIR), _REFUSED),
]

KEY_SHARED_POLICIES_COVERED: dict[type[message.Message], set[str]] = {
    policy_pb2.KeySharedPolicy: {
        "selector",
        "points_per_consumer",
        "order",
        "allow_out_of_order_delivery",
        "nack_order",
        "nack_block_max_ms",
    },
}
