"""Bad requests of the calls on dead letters: listing, replaying, purging."""

from __future__ import annotations

import base64
from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import admin_pb2, inspect_pb2
from tests.daemon.grpc_services._support.bad_calls import (
    SUBSCRIPTION_NAME,
    TOPIC_NAME,
    U32_MAX,
    U64_MAX,
    cases,
    changed,
    names,
)
from tests.daemon.grpc_services._support.bad_requests import SUBSCRIPTION, TOPIC, Case, text

LIST_DEAD_LETTERS = "Inspect/ListDeadLetters"
REPLAY_DEAD_LETTERS = "Admin/ReplayDeadLetters"
PURGE_DEAD_LETTERS = "Admin/PurgeDeadLetters"

_PAIR: dict[str, Any] = {"topic": TOPIC, "subscription": SUBSCRIPTION}
_list = inspect_pb2.ListDeadLettersRequest(**_PAIR)
_replay = admin_pb2.ReplayDeadLettersRequest(**_PAIR)
_purge = admin_pb2.PurgeDeadLettersRequest(**_PAIR)

_DELAY_MAX_MS = 315_360_000_000
_BACKWARDS = inspect_pb2.LedgerRange(first_ledger_id=7, last_ledger_id=6)


def _filters(method: str, good: message.Message) -> list[Case]:
    def filtered(**fields: Any) -> dict[str, Any]:
        return {"filter": inspect_pb2.DeadLetterFilter(**fields)}

    return cases(
        method,
        good,
        [
            ("an id twice", filtered(dead_letter_id=[4, 5, 5]), ("dead_letter_id[2]", "5")),
            ("ids that do not ascend", filtered(dead_letter_id=[7, 3]), ("dead_letter_id[1]", "3", "7")),
            ("too many ids", filtered(dead_letter_id=range(1, 1002)), ("dead_letter_id", "1001", "1000")),
            ("ledgers backwards", filtered(ledgers=_BACKWARDS), ("last_ledger_id", "6", "first_ledger_id", "7")),
            ("reason unknown", filtered(reason=4), ("reason", "4", "DEAD_LETTER_REASON_TRIMMED")),
            (
                "a range that ends before it begins",
                filtered(from_ms=1_000, until_ms=999),
                ("until_ms", "999", "from_ms", "1000"),
            ),
            (
                "a range at its maximum that ends before it begins",
                filtered(from_ms=U64_MAX, until_ms=U64_MAX - 1),
                ("until_ms", str(U64_MAX - 1), "from_ms", str(U64_MAX)),
            ),
        ],
    )


def _token(kind: int, place_bytes: int) -> str:
    return base64.urlsafe_b64encode(bytes([kind]) + bytes(place_bytes)).decode()


def _pages() -> list[Case]:
    of_another, short, longer, other_list = _token(6, 16), _token(6, 15), _token(6, 40), _token(5, 16)
    return [
        *cases(
            LIST_DEAD_LETTERS,
            _list,
            [
                ("page_size too large", {"page_size": 10_001}, ("page_size", "10001", "10000")),
                ("page_size at its maximum", {"page_size": U32_MAX}, ("page_size", str(U32_MAX), "10000")),
                ("page_token not base64", {"page_token": "é!"}, ("page_token", "é!")),
                ("page_token of a list of names", {"page_token": "AmE="}, ("page_token", "AmE=")),
                ("page_token of another list", {"page_token": other_list}, ("page_token", other_list)),
                ("page_token cut short", {"page_token": short}, ("page_token", short)),
                ("page_token of a list of rows", {"page_token": longer}, ("page_token", longer)),
                ("page_token of another request", {"page_token": of_another}, ("page_token", of_another, "request")),
            ],
        ),
        Case(
            f"{LIST_DEAD_LETTERS} page_token not UTF-8",
            LIST_DEAD_LETTERS,
            _list.SerializeToString() + text(5, b"\xff"),
            ("page_token", "UTF-8"),
        ),
    ]


def _delays() -> list[Case]:
    return [
        Case(
            f"{REPLAY_DEAD_LETTERS} delay_ms {name}",
            REPLAY_DEAD_LETTERS,
            changed(_replay, delay_ms=delay_ms),
            ("delay_ms", str(delay_ms), str(_DELAY_MAX_MS)),
            grpc.StatusCode.OUT_OF_RANGE,
        )
        for name, delay_ms in (("over the limit", _DELAY_MAX_MS + 1), ("at its maximum", U64_MAX))
    ]


BAD_DEAD_LETTERS = [
    *names(LIST_DEAD_LETTERS, _list, TOPIC_NAME, SUBSCRIPTION_NAME),
    *_filters(LIST_DEAD_LETTERS, _list),
    *_pages(),
    *names(REPLAY_DEAD_LETTERS, _replay, TOPIC_NAME, SUBSCRIPTION_NAME),
    *_filters(REPLAY_DEAD_LETTERS, _replay),
    *_delays(),
    *names(PURGE_DEAD_LETTERS, _purge, TOPIC_NAME, SUBSCRIPTION_NAME),
    *_filters(PURGE_DEAD_LETTERS, _purge),
]

_FILTERED = {"topic", "subscription", "filter"}

DEAD_LETTERS_COVERED: dict[type[message.Message], set[str]] = {
    inspect_pb2.ListDeadLettersRequest: _FILTERED | {"page_size", "page_token"},
    admin_pb2.ReplayDeadLettersRequest: _FILTERED | {"delay_ms"},
    admin_pb2.PurgeDeadLettersRequest: _FILTERED,
    inspect_pb2.DeadLetterFilter: {"dead_letter_id", "ledgers", "reason", "from_ms", "until_ms"},
}
