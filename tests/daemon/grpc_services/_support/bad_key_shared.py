"""Bad requests of KEY_SHARED streams and of the list of consumers, and KEY_SHARED requests to SHARED streams."""

from __future__ import annotations

import base64
from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import dispatch_pb2, inspect_pb2, policy_pb2
from tests.daemon.grpc_services._support.bad_calls import (
    SUBSCRIPTION_NAME,
    TOPIC_NAME,
    U32_MAX,
    Says,
    cases,
    changed,
    names,
)
from tests.daemon.grpc_services._support.bad_requests import SUBSCRIBE, SUBSCRIPTION, TOPIC, Case, opening, text

LIST_CONSUMERS = "Inspect/ListConsumers"
KEY_SHARED = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_KEY_SHARED
HELD = {"held_ledger_id": [1], "held_entry_id": [1], "held_deliver_at_ms": [5]}

_list = inspect_pb2.ListConsumersRequest(topic=TOPIC, subscription=SUBSCRIPTION)


def consumer(**changed: Any) -> dispatch_pb2.Consumer:
    return dispatch_pb2.Consumer(**{"consumer_id": 1, "name": "one", **changed})


def open_by_key(*consumers: dispatch_pb2.Consumer, **changed: Any) -> dispatch_pb2.SubscribeRequest:
    return opening(type=KEY_SHARED, consumers=consumers, **changed)


def _streaming(**request: Any) -> dispatch_pb2.SubscribeRequest:
    return dispatch_pb2.SubscribeRequest(**request)


def _token(kind: int, place_bytes: int) -> str:
    return base64.urlsafe_b64encode(bytes([kind]) + bytes(place_bytes)).decode()


BAD_CONSUMER_LISTS = [
    *names(LIST_CONSUMERS, _list, TOPIC_NAME, SUBSCRIPTION_NAME),
    *cases(
        LIST_CONSUMERS,
        _list,
        [
            ("page_size too large", {"page_size": 1_001}, ("page_size", "1001", "1000")),
            ("page_size at its maximum", {"page_size": U32_MAX}, ("page_size", str(U32_MAX), "1000")),
            ("page_token not base64", {"page_token": "é!"}, ("page_token", "é!")),
            ("page_token of another list", {"page_token": _token(6, 16)}, ("page_token", _token(6, 16))),
            ("page_token cut short", {"page_token": _token(7, 15)}, ("page_token", _token(7, 15))),
            ("page_token of another request", {"page_token": _token(7, 16)}, ("page_token", "request")),
        ],
    ),
    Case(
        f"{LIST_CONSUMERS} page_token not UTF-8",
        LIST_CONSUMERS,
        _list.SerializeToString() + text(4, b"\xff"),
        ("page_token", "UTF-8"),
    ),
]

# Of SHARED streams.
BAD_SHARED_OPENS = [
    Case("open: SHARED with consumers", SUBSCRIBE, opening(consumers=[consumer()]), ("consumers", "1", "SHARED")),
    Case(
        "open: SHARED with held consumers",
        SUBSCRIBE,
        opening(**HELD, held_consumer_id=[1]),
        ("held_consumer_id", "1", "SHARED"),
    ),
    Case(
        "open: SHARED with held hashes", SUBSCRIBE, opening(**HELD, held_key_hash=[1]), ("held_key_hash", "1", "SHARED")
    ),
]

# On a SHARED stream; answered by `Done`, and the stream goes on.
REFUSED_ON_SHARED = [
    Case(f"{kind} on a SHARED stream", SUBSCRIBE, request, (kind, "SHARED"))
    for kind, request in (
        ("add_consumer", _streaming(add_consumer=dispatch_pb2.AddConsumer(request_id=9, consumer=consumer()))),
        ("remove_consumer", _streaming(remove_consumer=dispatch_pb2.RemoveConsumer(request_id=9, consumer_id=1))),
        ("plan_dispatch", _streaming(plan_dispatch=dispatch_pb2.PlanDispatch(request_id=9))),
        ("mark_delete", _streaming(mark_delete=dispatch_pb2.MarkDelete(request_id=9))),
    )
] + [
    Case(
        "permits for a consumer of a SHARED stream",
        SUBSCRIBE,
        _streaming(flow=dispatch_pb2.Flow(permits=1, consumer_id=3)),
        ("flow.consumer_id", "3", "SHARED"),
    )
]

_BAD_CONSUMERS: list[tuple[str, dict[str, Any], Says]] = [
    ("no consumer_id", {"consumer_id": 0}, ("consumer_id", "0", "1")),
    ("no name", {"name": ""}, ("name of consumer 1", "0", "255")),
    ("a long name", {"name": "é" * 128}, ("name of consumer 1", "256", "255")),
    ("a long address", {"address": "é" * 128}, ("address of consumer 1", "256", "255")),
    (
        "hash_ranges that are not asked for",
        {"hash_ranges": [policy_pb2.HashRange(first=1, last=2)]},
        ("hash_ranges",),
    ),
    (
        "a range backwards",
        {"hash_ranges": [policy_pb2.HashRange(first=2, last=1)]},
        ("hash_ranges of consumer 1", "2", "1", "65535"),
    ),
    (
        "a range beyond the last hash",
        {"hash_ranges": [policy_pb2.HashRange(first=1, last=65_536)]},
        ("hash_ranges of consumer 1", "65536", "65535"),
    ),
]

BAD_KEY_SHARED_OPENS = [
    *(
        Case(f"open: a consumer with {name}", SUBSCRIBE, open_by_key(consumer(**fields)), says)
        for name, fields, says in _BAD_CONSUMERS
    ),
    Case(
        "open: a consumer twice",
        SUBSCRIBE,
        open_by_key(consumer(), consumer(name="two")),
        ("consumer_id is 1", "two consumers"),
    ),
    Case(
        "open: a name not UTF-8",
        SUBSCRIBE,
        text(1, opening(type=KEY_SHARED).open.SerializeToString() + text(8, text(2, b"\xff"))),
        ("name", "UTF-8"),
    ),
    Case(
        "open: too many consumers",
        SUBSCRIBE,
        open_by_key(*(consumer(consumer_id=number) for number in range(1, 6))),
        ("0 consumers and 5", "limit is 4"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    Case(
        "open: held consumers missing",
        SUBSCRIBE,
        open_by_key(consumer(), **HELD),
        ("held_consumer_id", "0", "held_entry_id has 1"),
    ),
    Case(
        "open: held hashes of another length",
        SUBSCRIBE,
        open_by_key(consumer(), **HELD, held_consumer_id=[1], held_key_hash=[1, 2]),
        ("held_key_hash has 2", "held_entry_id has 1"),
    ),
    Case(
        "open: held by nobody of these",
        SUBSCRIBE,
        open_by_key(consumer(), **HELD, held_consumer_id=[2]),
        ("held_consumer_id[0]", "2"),
    ),
]

_plan = dispatch_pb2.PlanDispatch(request_id=9, ledger_id=[1], entry_id=[1, 2])
_add = dispatch_pb2.AddConsumer(request_id=9, consumer=consumer(consumer_id=2))

# On a KEY_SHARED stream with consumer 5.
KEY_SHARED_REFUSED_IN_BAND = [
    *(
        Case(f"plan: {name}", SUBSCRIBE, _streaming(plan_dispatch=changed(_plan, **fields)), says)
        for name, fields, says in (
            ("no request_id", {"request_id": 0}, ("request_id", "0", "1")),
            ("no rows", {"entry_id": None}, ("entry_id", "0", "1")),
            ("too many rows", {"entry_id": range(1001)}, ("entry_id", "1001", "1000")),
            ("a position twice", {"entry_id": [7, 7]}, ("entry_id[1]", "(1, 7)")),
            ("ledger_id missing", {"ledger_id": None}, ("ledger_id", "0", "2")),
            ("ledger_id of another length", {"ledger_id": [1] * 3}, ("ledger_id", "3", "2")),
            ("key_hash of another length", {"key_hash": [1] * 3}, ("key_hash", "3", "2")),
        )
    ),
    *(
        Case(
            f"add_consumer: {name}",
            SUBSCRIBE,
            _streaming(add_consumer=changed(_add, consumer=consumer(**fields))),
            says,
        )
        for name, fields, says in _BAD_CONSUMERS
    ),
    Case("add_consumer: nobody", SUBSCRIBE, _streaming(add_consumer=changed(_add, consumer=None)), ("consumer",)),
    Case(
        "add_consumer: one that is there",
        SUBSCRIBE,
        _streaming(add_consumer=changed(_add, consumer=consumer(consumer_id=5))),
        ("consumer_id", "5", "unique"),
    ),
    Case(
        "remove_consumer: one that is not there",
        SUBSCRIBE,
        _streaming(remove_consumer=dispatch_pb2.RemoveConsumer(request_id=9, consumer_id=7)),
        ("consumer_id", "7"),
    ),
    Case(
        "permits for nobody",
        SUBSCRIBE,
        _streaming(flow=dispatch_pb2.Flow(permits=1)),
        ("flow.consumer_id", "0", "KEY_SHARED"),
    ),
    Case(
        "no permits for a consumer",
        SUBSCRIBE,
        _streaming(flow=dispatch_pb2.Flow(consumer_id=1)),
        ("flow.permits", "0", "1"),
    ),
]
# Who is answered with the number 0.
UNNUMBERED = ("permits for nobody", "no permits for a consumer", "plan: no request_id", REFUSED_ON_SHARED[-1].name)

KEY_SHARED_COVERED: dict[type[message.Message], set[str]] = {
    # Any number of permits is right.
    dispatch_pb2.Consumer: {"consumer_id", "name", "address", "permits", "hash_ranges"},
    dispatch_pb2.AddConsumer: {"consumer"},
    dispatch_pb2.RemoveConsumer: {"consumer_id"},
    dispatch_pb2.PlanDispatch: {"ledger_id", "entry_id", "key_hash"},
    # Any position is right.
    dispatch_pb2.MarkDelete: {"ledger_id", "entry_id"},
    policy_pb2.HashRange: {"first", "last"},
    inspect_pb2.ListConsumersRequest: {"topic", "subscription", "page_size", "page_token"},
}
