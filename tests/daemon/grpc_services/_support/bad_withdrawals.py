"""Bad requests of the calls that take rows out before they are due, and of adds to a subscription's own index.

Their form is that of `bad_calls`.
"""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import delayed_delivery_pb2
from tests.daemon.grpc_services._support.bad_calls import NOT_FOUND, TOPIC_NAME, U64_MAX, Says, cases, names
from tests.daemon.grpc_services._support.bad_requests import ADD, FAR_MS, TOPIC, Case, add, text

CANCEL = "DelayedDelivery/CancelMessages"
RESCHEDULE = "DelayedDelivery/RescheduleMessages"
OUT_OF_RANGE = grpc.StatusCode.OUT_OF_RANGE

# Of rows that are there, so that a refusal which changes something is noticed.
_THERE: dict[str, Any] = {"topic": TOPIC, "ledger_id": [77], "entry_id": [1, 2]}
_cancel = delayed_delivery_pb2.CancelMessagesRequest(**_THERE)
_reschedule = delayed_delivery_pb2.RescheduleMessagesRequest(**_THERE, deliver_at_ms=[FAR_MS + 1])

_POSITIONS: list[tuple[str, dict[str, Any], Says]] = [
    ("ledger_id missing", {"ledger_id": None}, ("ledger_id", "0", "2")),
    ("ledger_id of another length", {"ledger_id": [77] * 3}, ("ledger_id", "3", "2")),
    ("entry_id: no positions", {"entry_id": None}, ("entry_id", "0", "1")),
    ("entry_id: too many positions", {"entry_id": range(1001)}, ("entry_id", "1001", "1000")),
    ("a position twice", {"entry_id": [1, 2, 1]}, ("entry_id[2]", "(77, 1)", "entry_id[0]")),
    (
        "an unknown position twice",
        {"ledger_id": [9, 77, 9], "entry_id": [U64_MAX, 1, U64_MAX]},
        ("entry_id[2]", f"(9, {U64_MAX})", "entry_id[0]"),
    ),
]

BAD_WITHDRAWALS = [
    Case("an add for an unknown subscription", ADD, add(subscription="nobody"), ("nobody",), NOT_FOUND),
    *names(CANCEL, _cancel, TOPIC_NAME, (4, "subscription", 255), may_be_empty=True),
    *cases(CANCEL, _cancel, _POSITIONS),
    Case(
        f"{CANCEL} message too large",
        CANCEL,
        _cancel.SerializeToString() + text(15, b"x" * 100) * 10_500,
        ("message", "1048576"),
    ),
    *names(RESCHEDULE, _reschedule, TOPIC_NAME, (7, "subscription", 255), may_be_empty=True),
    *cases(RESCHEDULE, _reschedule, _POSITIONS),
    *cases(
        RESCHEDULE,
        _reschedule,
        [
            ("deliver_at_ms of another length", {"deliver_at_ms": [FAR_MS] * 3}, ("deliver_at_ms", "3", "2")),
            (
                "delay_ms of another length",
                {"deliver_at_ms": None, "delay_ms": [1, 2, 3]},
                ("delay_ms", "3", "2"),
            ),
            ("no time column", {"deliver_at_ms": None}, ("deliver_at_ms", "delay_ms", "none")),
            ("both time columns", {"delay_ms": [1, 2]}, ("deliver_at_ms", "delay_ms", "both", "1", "2")),
            ("key_hash of another length", {"key_hash": [1, 2, 3]}, ("key_hash", "3", "2")),
        ],
    ),
    *(
        Case(f"{RESCHEDULE} {case.name}", RESCHEDULE, case.request, case.says, OUT_OF_RANGE)
        for case in cases(
            "",
            _reschedule,
            [
                ("deliver_at_ms over the limit", {"deliver_at_ms": [5, U64_MAX]}, ("deliver_at_ms[1]", str(U64_MAX))),
                (
                    "delay_ms over the limit",
                    {"deliver_at_ms": None, "delay_ms": [1 << 50]},
                    ("delay_ms[0]", str(1 << 50), "315360000000"),
                ),
            ],
        )
    ),
]

WITHDRAWALS_COVERED: dict[type[message.Message], set[str]] = {
    delayed_delivery_pb2.CancelMessagesRequest: {"topic", "subscription", "ledger_id", "entry_id"},
    delayed_delivery_pb2.RescheduleMessagesRequest: {
        "topic",
        "subscription",
        "ledger_id",
        "entry_id",
        "deliver_at_ms",
        "delay_ms",
        "key_hash",
    },
}
