"""Bad requests of the calls that look at rows: what is scheduled, how many come due when, a backlog, and retention."""

from __future__ import annotations

import base64

from google.protobuf import message

from tarry.v1 import inspect_pb2
from tests.daemon.grpc_services._support.bad_calls import TOPIC_NAME, U32_MAX, U64_MAX, cases, names
from tests.daemon.grpc_services._support.bad_requests import SUBSCRIPTION, TOPIC, Case, text

LIST_SCHEDULED = "Inspect/ListScheduled"
GET_HISTOGRAM = "Inspect/GetHistogram"
LIST_BACKLOG = "Inspect/ListBacklog"
GET_RETENTION = "Inspect/GetRetention"

_FROM_MS = 1_000_000
_BACKWARDS = inspect_pb2.LedgerRange(first_ledger_id=7, last_ledger_id=6)

_scheduled = inspect_pb2.ListScheduledRequest(topic=TOPIC)
_histogram = inspect_pb2.GetHistogramRequest(topic=TOPIC)
_retention = inspect_pb2.GetRetentionRequest(topic=TOPIC)
_backlog = inspect_pb2.ListBacklogRequest(topic=TOPIC, subscription=SUBSCRIPTION)


def row_pages(
    method: str, good: message.Message, token_field: int, kind: int, *, other_kind: int, place_bytes: int = 32
) -> list[Case]:
    """`kind`: the first byte of a token of this list; `other_kind`: of another one. `place_bytes`: of what follows the
    digest of a request.
    """

    def token(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode()

    size = 8 + place_bytes
    of_another = token(bytes([kind]) + bytes(size))
    short = token(bytes([kind]) + bytes(size - 1))
    other_list = token(bytes([other_kind]) + bytes(size))
    return [
        *cases(
            method,
            good,
            [
                ("page_size too large", {"page_size": 10_001}, ("page_size", "10001", "10000")),
                ("page_size at its maximum", {"page_size": U32_MAX}, ("page_size", str(U32_MAX), "10000")),
                ("page_token not base64", {"page_token": "é!"}, ("page_token", "é!")),
                ("page_token of a list of names", {"page_token": "AmE="}, ("page_token", "AmE=")),
                ("page_token of another list", {"page_token": other_list}, ("page_token", other_list)),
                ("page_token cut short", {"page_token": short}, ("page_token", short)),
                ("page_token of another request", {"page_token": of_another}, ("page_token", of_another, "request")),
            ],
        ),
        Case(
            f"{method} page_token not UTF-8",
            method,
            good.SerializeToString() + text(token_field, b"\xff"),
            ("page_token", "UTF-8"),
        ),
    ]


def ledger_ranges(method: str, good: message.Message) -> list[Case]:
    return cases(
        method,
        good,
        [("ledgers backwards", {"ledgers": _BACKWARDS}, ("last_ledger_id", "6", "first_ledger_id", "7"))],
    )


BAD_VIEWS = [
    *names(LIST_SCHEDULED, _scheduled, TOPIC_NAME, (5, "subscription", 255), may_be_empty=True),
    *row_pages(LIST_SCHEDULED, _scheduled, 7, 4, other_kind=5),
    *ledger_ranges(LIST_SCHEDULED, _scheduled),
    *cases(
        LIST_SCHEDULED,
        _scheduled,
        [
            (
                "a range that ends before it begins",
                {"from_ms": _FROM_MS, "until_ms": _FROM_MS - 1},
                ("until_ms", str(_FROM_MS - 1), "from_ms", str(_FROM_MS)),
            ),
            (
                "a range at its maximum that ends before it begins",
                {"from_ms": U64_MAX, "until_ms": U64_MAX - 1},
                ("until_ms", str(U64_MAX - 1), "from_ms", str(U64_MAX)),
            ),
        ],
    ),
    *names(GET_HISTOGRAM, _histogram, TOPIC_NAME, (6, "subscription", 255), may_be_empty=True),
    *ledger_ranges(GET_HISTOGRAM, _histogram),
    *cases(
        GET_HISTOGRAM,
        _histogram,
        [
            (
                "a range that ends before it begins",
                {"from_ms": _FROM_MS, "until_ms": _FROM_MS - 1},
                ("until_ms", str(_FROM_MS - 1), "from_ms", str(_FROM_MS)),
            ),
            ("a range that ends before now", {"until_ms": 5}, ("until_ms", "5", "from_ms")),
            (
                "too many bars",
                {"from_ms": 1, "until_ms": 10_002, "width_ms": 1},
                ("width_ms", "1", "10001", "10000"),
            ),
            (
                "a range at its maximum with bars at their least",
                {"from_ms": 1, "until_ms": U64_MAX, "width_ms": 1},
                ("width_ms", "1", str(U64_MAX - 1), "10000"),
            ),
        ],
    ),
    *names(LIST_BACKLOG, _backlog, TOPIC_NAME, (2, "subscription", 255)),
    *row_pages(LIST_BACKLOG, _backlog, 5, 5, other_kind=4),
    *ledger_ranges(LIST_BACKLOG, _backlog),
    *names(GET_RETENTION, _retention, TOPIC_NAME),
    *row_pages(GET_RETENTION, _retention, 4, 11, other_kind=6, place_bytes=8),
    *cases(
        GET_RETENTION,
        _retention,
        [
            ("ledger_id twice", {"ledger_id": [7, 8, 7]}, ("ledger_id", "7", "twice")),
            ("too many ledgers", {"ledger_id": range(1001)}, ("ledger_id", "1001", "1000")),
        ],
    ),
]

VIEWS_COVERED: dict[type[message.Message], set[str]] = {
    inspect_pb2.ListScheduledRequest: {
        "topic",
        "from_ms",
        "until_ms",
        "ledgers",
        "subscription",
        "page_size",
        "page_token",
    },
    inspect_pb2.GetHistogramRequest: {"topic", "from_ms", "until_ms", "width_ms", "ledgers", "subscription"},
    inspect_pb2.ListBacklogRequest: {"topic", "subscription", "ledgers", "page_size", "page_token"},
    inspect_pb2.GetRetentionRequest: {"topic", "ledger_id", "page_size", "page_token"},
    inspect_pb2.LedgerRange: {"first_ledger_id", "last_ledger_id"},
}
