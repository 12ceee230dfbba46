"""Bad requests of the calls on delay levels."""

from __future__ import annotations

from typing import Any

from google.protobuf import message

from tarry.v1 import admin_pb2
from tests.daemon.grpc_services._support.bad_calls import TOPIC_NAME, cases, names
from tests.daemon.grpc_services._support.bad_requests import TOPIC, Case, text

SET_DELAY_LEVELS = "Admin/SetDelayLevels"
GET_DELAY_LEVELS = "Admin/GetDelayLevels"


def _table(table: str) -> dict[str, Any]:
    return {"levels": admin_pb2.DelayLevels(table=table)}


_set = admin_pb2.SetDelayLevelsRequest(topic=TOPIC, **_table("1s 5s"))
_get = admin_pb2.GetDelayLevelsRequest(topic=TOPIC)

BAD_LEVELS: list[Case] = [
    *names(SET_DELAY_LEVELS, _set, TOPIC_NAME, exists=False),
    # An empty name asks for the daemon's own.
    *(case for case in names(GET_DELAY_LEVELS, _get, TOPIC_NAME) if case.name != f"{GET_DELAY_LEVELS} topic empty"),
    *cases(
        SET_DELAY_LEVELS,
        _set,
        [
            ("no level", _table(" "), ("delay levels", "1 to 256")),
            ("an unknown unit", _table("1s 5x"), ("'5x'", "character 4", "s, m, h and d")),
            ("a fraction", _table("1.5s"), ("'1.5s'", "character 1", "whole")),
            ("zero", _table("0s"), ("'0s'", "character 1", "positive")),
            ("a negative delay", _table("1s  -1s"), ("'-1s'", "character 5", "positive")),
            ("a lone unit", _table("1s s"), ("'s'", "character 4", "number")),
            ("too many levels", _table("1s " * 257), ("'1s'", "character 769", "256")),
            ("a delay over the limit", _table("1s 3651d"), ("'3651d'", "character 4", "315360000000")),
        ],
    ),
    Case(
        f"{SET_DELAY_LEVELS} table not UTF-8",
        SET_DELAY_LEVELS,
        text(1, TOPIC.encode()) + text(2, text(1, b"1s\xff")),
        ("table", "UTF-8"),
    ),
]

LEVELS_COVERED: dict[type[message.Message], set[str]] = {
    admin_pb2.SetDelayLevelsRequest: {"topic", "levels"},
    admin_pb2.GetDelayLevelsRequest: {"topic"},
    # Either is right.
    admin_pb2.DelayLevels: {"table", "clamp"},
}
