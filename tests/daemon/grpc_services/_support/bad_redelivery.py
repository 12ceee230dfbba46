"""Bad negative acknowledgements, on their own and on a stream, bad batch indexes, and bad policies of redelivery."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import dispatch_pb2, policy_pb2
from tests.daemon.grpc_services._support.bad_calls import (
    ACKNOWLEDGE,
    CREATE,
    EXTEND,
    HALF_DAY_MS,
    SUBSCRIPTION_NAME,
    TOPIC_NAME,
    U32_MAX,
    U64_MAX,
    UPDATE,
    Says,
    cases,
    changed,
    names,
)
from tests.daemon.grpc_services._support.bad_requests import (
    INVALID,
    SUBSCRIBE,
    SUBSCRIPTION,
    TOPIC,
    Case,
    acknowledge,
    opening,
    text,
)

NACK = "Dispatch/NegativeAcknowledge"
OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE
DELAY_MAX = "315360000000"
BEYOND = 1 << 48

_PAIR: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
_ROWS: dict[str, Any] = {"ledger_id": [1], "entry_id": [1, 2], "deliver_at_ms": [5]}
_nack = dispatch_pb2.NegativeAcknowledgeRequest(**_PAIR, **_ROWS)

_TOO_LARGE_INDEX: tuple[str, dict[str, Any], Says] = (
    "batch_index too large",
    {"batch_index": [U32_MAX, 65_536]},
    ("batch_index[1]", "65536", "65535"),
)
_TOO_LARGE_ENTRY: tuple[str, dict[str, Any], Says] = (
    "batch_index of an entry that is too large",
    {"entry_id": [BEYOND, BEYOND + 1], "batch_index": [U32_MAX, 3]},
    ("entry_id[1]", str(BEYOND + 1), "batch_index[1]", "3", str(BEYOND - 1)),
)
_COUNTS: list[tuple[str, dict[str, Any], Says]] = [
    ("redelivery_count of another length", {"redelivery_count": [1] * 3}, ("redelivery_count", "3", "2")),
    ("redelivery_count that there is not", {"redelivery_count": [0, U32_MAX]}, ("redelivery_count[1]", str(U32_MAX))),
    ("redelivery_count that there is not, for all", {"redelivery_count": [U32_MAX]}, ("redelivery_count[0]",)),
]
_BATCH_INDEXES: list[tuple[str, dict[str, Any], Says]] = [
    ("batch_index of another length", {"batch_index": [1] * 3}, ("batch_index", "3", "2")),
    _TOO_LARGE_INDEX,
    _TOO_LARGE_ENTRY,
]
_REFUSED: list[tuple[str, dict[str, Any], Says]] = [
    ("ledger_id missing", {"ledger_id": None}, ("ledger_id", "0", "2")),
    ("ledger_id of another length", {"ledger_id": [1] * 3}, ("ledger_id", "3", "2")),
    ("entry_id: no rows", {"entry_id": None}, ("entry_id", "0", "1")),
    ("entry_id: too many rows", {"entry_id": range(1001)}, ("entry_id", "1001", "1000")),
    ("entry_id twice", {"entry_id": [7, 7]}, ("entry_id[1]", "(1, 7)", "entry_id[0]")),
    ("a message twice", {"entry_id": [7, 7], "batch_index": [3, 3]}, ("entry_id[1]", "(1, 7, 3)")),
    ("deliver_at_ms of another length", {"deliver_at_ms": [1] * 3}, ("deliver_at_ms", "3", "2")),
    *_COUNTS,
    ("delay_ms of another length", {"delay_ms": [1] * 3}, ("delay_ms", "3", "2")),
    ("delay_level of another length", {"delay_level": [1] * 3}, ("delay_level", "3", "2")),
    ("delay_level negative", {"delay_level": [1, -1]}, ("delay_level[1]", "-1", "0")),
    ("delay and level", {"delay_ms": [1], "delay_level": [1]}, ("delay_ms and delay_level", "at most one")),
    ("delay and reject", {"delay_ms": [1], "reject": True}, ("delay_ms and reject", "at most one")),
    ("level and reject", {"delay_level": [0], "reject": True}, ("delay_level and reject", "at most one")),
    ("reason too long", {"reject": True, "reason": "é" * 513}, ("reason", "1026", "1024")),
    ("key_hash of another length", {"key_hash": [1] * 3}, ("key_hash", "3", "2")),
    *_BATCH_INDEXES,
]
_TOO_LATE: list[tuple[str, dict[str, Any], Says]] = [
    ("delay_ms over the limit", {"delay_ms": [1, 1 << 50]}, ("delay_ms[1]", str(1 << 50), DELAY_MAX)),
    ("delay_ms at its maximum", {"delay_ms": [U64_MAX]}, ("delay_ms[0]", str(U64_MAX), DELAY_MAX)),
]


def _policy(**fields: Any) -> dict[str, Any]:
    return {"policy": policy_pb2.SubscriptionPolicy(**fields)}


def _redelivery(**fields: Any) -> dict[str, Any]:
    return _policy(redelivery=policy_pb2.RedeliveryPolicy(**fields))


def _policies(method: str, good: message.Message) -> list[Case]:
    beyond = {"delay_ms": 1 << 50}
    linear, exponential = policy_pb2.LinearDelay, policy_pb2.ExponentialDelay
    tables: list[tuple[str, dict[str, Any], Says]] = [
        ("ack_timeout_ms too short", _policy(ack_timeout_ms=99), ("ack_timeout_ms", "99", "100", str(HALF_DAY_MS))),
        (
            "ack_timeout_ms over the limit",
            _policy(ack_timeout_ms=HALF_DAY_MS + 1),
            ("ack_timeout_ms", str(HALF_DAY_MS + 1), str(HALF_DAY_MS)),
        ),
        ("nack_precision_bits over the limit", _policy(nack_precision_bits=21), ("nack_precision_bits", "21", "20")),
        ("redelivery of no kind", _redelivery(), ("redelivery.delay", "none", "constant", "ladder")),
        (
            "constant over the limit",
            _redelivery(constant=policy_pb2.ConstantDelay(**beyond)),
            ("redelivery.constant.delay_ms", str(1 << 50), DELAY_MAX),
        ),
        (
            "linear above its most",
            _redelivery(linear=linear(initial_ms=9, max_ms=8)),
            ("redelivery.linear.initial_ms", "9", "8"),
        ),
        (
            "linear: a step over the limit",
            _redelivery(linear=linear(step_ms=1 << 50)),
            ("redelivery.linear.step_ms", str(1 << 50), DELAY_MAX),
        ),
        (
            "linear: a most over the limit",
            _redelivery(linear=linear(max_ms=1 << 50)),
            ("redelivery.linear.max_ms", str(1 << 50), DELAY_MAX),
        ),
        (
            "exponential from nothing",
            _redelivery(exponential=exponential(initial_ms=0)),
            ("redelivery.exponential.initial_ms", "0", "1"),
        ),
        (
            "exponential above its most",
            _redelivery(exponential=exponential(initial_ms=9, max_ms=8)),
            ("redelivery.exponential.initial_ms", "9", "8"),
        ),
        (
            "exponential that shrinks",
            _redelivery(exponential=exponential(initial_ms=1, multiplier=0.5)),
            ("redelivery.exponential.multiplier", "0.5", "1", "100"),
        ),
        (
            "exponential that is no number",
            _redelivery(exponential=exponential(initial_ms=1, multiplier=float("nan"))),
            ("redelivery.exponential.multiplier", "nan"),
        ),
        (
            "exponential with too much jitter",
            _redelivery(exponential=exponential(initial_ms=1, jitter=1.5)),
            ("redelivery.exponential.jitter", "1.5", "1"),
        ),
        ("list of none", _redelivery(list=policy_pb2.DelayList()), ("redelivery.list.delay_ms", "0", "100")),
        (
            "list of too many",
            _redelivery(list=policy_pb2.DelayList(delay_ms=range(101))),
            ("redelivery.list.delay_ms", "101", "100"),
        ),
        (
            "list with one over the limit",
            _redelivery(list=policy_pb2.DelayList(delay_ms=[1, 1 << 50])),
            ("redelivery.list.delay_ms[1]", str(1 << 50), DELAY_MAX),
        ),
    ]
    return cases(method, good, tables)


BAD_REDELIVERIES = [
    *names(NACK, _nack, TOPIC_NAME, SUBSCRIPTION_NAME),
    *cases(NACK, _nack, _REFUSED),
    *(Case(f"{NACK} {name}", NACK, changed(_nack, **fields), says, OUT_OF_RANGE) for name, fields, says in _TOO_LATE),
    Case(f"{NACK} reason not UTF-8", NACK, _nack.SerializeToString() + text(10, b"b\xff"), ("reason", "UTF-8", "1")),
    *cases(ACKNOWLEDGE, dispatch_pb2.AcknowledgeRequest(**_PAIR, **_ROWS), [*_BATCH_INDEXES, *_COUNTS]),
    *cases(EXTEND, dispatch_pb2.ExtendLeaseRequest(**_PAIR, **_ROWS, lease_ms=1000), _BATCH_INDEXES),
    *_policies(CREATE, dispatch_pb2.CreateSubscriptionRequest(**_PAIR)),
    *_policies(UPDATE, dispatch_pb2.UpdateSubscriptionRequest(**_PAIR)),
]

BAD_HELD_PARTS = [
    Case(
        f"open: held {name}",
        SUBSCRIBE,
        opening(
            held_ledger_id=[1, 1],
            held_entry_id=fields.get("entry_id", [1, 2]),
            held_deliver_at_ms=[5, 5],
            held_batch_index=fields.get("batch_index"),
            held_redelivery_count=fields.get("redelivery_count"),
        ),
        says,
    )
    for name, fields, says in (
        ("batch_index of another length", {"batch_index": [1] * 3}, ("held_batch_index", "3", "2")),
        ("redelivery_count of another length", {"redelivery_count": [1]}, ("held_redelivery_count", "1", "2")),
        ("redelivery_count that there is not", {"redelivery_count": [0, U32_MAX]}, ("held_redelivery_count[1]",)),
        _TOO_LARGE_INDEX,
        _TOO_LARGE_ENTRY,
    )
]

_streamed = dispatch_pb2.NegativeAcknowledge(request_id=9, **_ROWS)
_extend = dispatch_pb2.Extend(request_id=9, **_ROWS)
_HANDED_OUT = [
    each for each in _REFUSED if each[0].startswith(("ledger_id", "entry_id:", "deliver_at_ms", "batch_index"))
]


def _streaming(**request: Any) -> dispatch_pb2.SubscribeRequest:
    return dispatch_pb2.SubscribeRequest(**request)


# On an open stream; answered by `Done`, and the stream goes on.
REDELIVERIES_REFUSED_IN_BAND = [
    *(
        Case(
            f"negative acknowledge: {name}",
            SUBSCRIBE,
            _streaming(negative_acknowledge=changed(_streamed, **fields)),
            says,
            code,
        )
        for table, code in ((_REFUSED, INVALID), (_TOO_LATE, OUT_OF_RANGE))
        for name, fields, says in table
    ),
    *(
        Case(f"extend: {name}", SUBSCRIBE, _streaming(extend=changed(_extend, **fields)), says)
        for name, fields, says in [
            *_HANDED_OUT,
            ("deliver_at_ms missing", {"deliver_at_ms": None}, ("deliver_at_ms", "0", "2")),
        ]
    ),
    *(
        Case(f"acknowledge: {name}", SUBSCRIBE, acknowledge(**fields), says)
        for name, fields, says in [*_BATCH_INDEXES, *_COUNTS]
    ),
]

_POSITIONS = {"ledger_id", "entry_id", "deliver_at_ms", "batch_index"}
# Both values of forwarded are right.
_NACK = _POSITIONS | {"redelivery_count", "forwarded", "delay_ms", "delay_level", "reject", "reason", "key_hash"}

REDELIVERY_COVERED: dict[type[message.Message], set[str]] = {
    dispatch_pb2.NegativeAcknowledge: _NACK,
    dispatch_pb2.NegativeAcknowledgeRequest: _NACK | {"topic", "subscription"},
    dispatch_pb2.Extend: _POSITIONS,
    policy_pb2.RedeliveryPolicy: {"constant", "linear", "exponential", "list", "ladder"},
    policy_pb2.ConstantDelay: {"delay_ms"},
    policy_pb2.LinearDelay: {"initial_ms", "step_ms", "max_ms"},
    policy_pb2.ExponentialDelay: {"initial_ms", "multiplier", "max_ms", "jitter"},
    policy_pb2.DelayList: {"delay_ms"},
}
