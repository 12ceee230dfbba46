"""Bad requests of `LedgerDeletion`, in the form of `bad_calls`; and bad records, which are refused one by one.

`DELETIONS_COVERED` says for which fields there are cases; the tests compare it with the contract.
"""

from __future__ import annotations

import base64
from typing import Any

from google.protobuf import message

from tarry.v1 import ledger_deletion_pb2 as pb
from tests.daemon.grpc_services._support.bad_calls import (
    NOT_FOUND,
    TOPIC_NAME,
    U32_MAX,
    U64_MAX,
    Says,
    cases,
    changed,
    names,
)
from tests.daemon.grpc_services._support.bad_requests import TOPIC, Case, text

RECORD = "LedgerDeletion/RecordPendingDeletes"
IN_USE = "LedgerDeletion/RecordInUse"
FORGET = "LedgerDeletion/ForgetInUse"
LIST_PENDING = "LedgerDeletion/ListPendingDeletes"
LIST_DEAD = "LedgerDeletion/ListDeadDeletes"
LIST_ENDED = "LedgerDeletion/ListEndedDeletes"
RETRY = "LedgerDeletion/RetryDeadDeletes"
PURGE = "LedgerDeletion/PurgeDeadDeletes"
STATS = "LedgerDeletion/GetDeletionStats"
SWEEP = "LedgerDeletion/SweepOrphans"

LEDGER = pb.PendingDelete(component=pb.LEDGER_COMPONENT_MANAGED_LEDGER, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=7)
OFFLOADED = pb.PendingDelete(
    component=pb.LEDGER_COMPONENT_MANAGED_LEDGER,
    ledger_type=pb.LEDGER_TYPE_OFFLOADED_LEDGER,
    ledger_id=7,
    offload_context=pb.OffloadContext(
        uuid_msb=1, uuid_lsb=2, driver_name="aws-s3", driver_metadata={"bucket": "offloaded"}
    ),
)
CURSOR = changed(LEDGER, component=pb.LEDGER_COMPONENT_MANAGED_CURSOR, cursor_name="workers")
SCHEMA = changed(LEDGER, component=pb.LEDGER_COMPONENT_SCHEMA_STORAGE, schema_id="t/n/orders")

# A topic that is called as a ledger of Pulsar's: it would have two names.
_TWO_NAMES = "t/n/persistent/orders"


def _context(**fields: Any) -> dict[str, Any]:
    context = pb.OffloadContext()
    context.CopyFrom(OFFLOADED.offload_context)
    for name in fields:
        context.ClearField(name)  # type: ignore[arg-type]
    context.MergeFrom(pb.OffloadContext(**fields))
    return {"offload_context": context}


# Each is refused with REASON_MALFORMED and a text that says so much.
BAD_RECORDS: list[tuple[str, message.Message, Says]] = [
    ("nothing at all", pb.PendingDelete(), ("component", "none", "MANAGED_LEDGER")),
    ("component missing", changed(LEDGER, component=None), ("component", "none", "MANAGED_LEDGER")),
    ("component unknown", changed(LEDGER, component=9), ("component", "9", "MANAGED_CURSOR")),
    ("component negative", changed(LEDGER, component=-1), ("component", "-1", "MANAGED_CURSOR")),
    ("cursor_name missing", changed(CURSOR, cursor_name=None), ("cursor_name",)),
    ("cursor_name too long", changed(CURSOR, cursor_name="é" * 128), ("cursor_name", "256", "255")),
    ("cursor_name of a topic's ledger", changed(LEDGER, cursor_name="workers"), ("cursor_name", "MANAGED_LEDGER")),
    ("cursor_name of a schema", changed(SCHEMA, cursor_name="workers"), ("cursor_name", "workers", "SCHEMA_STORAGE")),
    ("schema_id missing", changed(SCHEMA, schema_id=None), ("schema_id",)),
    ("schema_id too long", changed(SCHEMA, schema_id="é" * 513), ("schema_id", "1026", "1024")),
    ("schema_id of a topic's ledger", changed(LEDGER, schema_id="s"), ("schema_id", "MANAGED_LEDGER")),
    ("schema_id of a cursor", changed(CURSOR, schema_id="s"), ("schema_id", "MANAGED_CURSOR")),
    ("ledger_type missing", changed(LEDGER, ledger_type=None), ("ledger_type", "none", "OFFLOADED_LEDGER")),
    ("ledger_type unknown", changed(LEDGER, ledger_type=3), ("ledger_type", "3", "OFFLOADED_LEDGER")),
    ("offload_context missing", changed(OFFLOADED, offload_context=None), ("offload_context",)),
    (
        "offload_context of a LEDGER",
        changed(LEDGER, offload_context=OFFLOADED.offload_context),
        ("offload_context", "LEDGER must have none"),
    ),
    (
        "an empty offload_context of a LEDGER",
        changed(LEDGER, offload_context=pb.OffloadContext()),
        ("offload_context",),
    ),
    ("no UUID", changed(OFFLOADED, **_context(uuid_msb=0, uuid_lsb=0)), ("uuid",)),
    ("driver_name missing", changed(OFFLOADED, **_context(driver_name="")), ("driver_name", "0", "255")),
    ("driver_name too long", changed(OFFLOADED, **_context(driver_name="é" * 128)), ("driver_name", "256", "255")),
    (
        "driver_metadata of too many",
        changed(OFFLOADED, **_context(driver_metadata={f"name-{number}": "" for number in range(65)})),
        ("driver_metadata", "65", "64"),
    ),
    (
        "a name of driver_metadata empty",
        changed(OFFLOADED, **_context(driver_metadata={"": "x"})),
        ("driver_metadata", "0", "128"),
    ),
    (
        "a name of driver_metadata too long",
        changed(OFFLOADED, **_context(driver_metadata={"é" * 65: ""})),
        ("driver_metadata", "130", "128"),
    ),
    (
        "a value of driver_metadata too long",
        changed(OFFLOADED, **_context(driver_metadata={"bucket": "é" * 513})),
        ("driver_metadata", "bucket", "1026", "1024"),
    ),
]

_record = pb.RecordPendingDeletesRequest(topic=TOPIC, deletes=[LEDGER])
_in_use: dict[str, Any] = {"topic": TOPIC, "ledger_type": pb.LEDGER_TYPE_OFFLOADED_LEDGER, "ledger_id": [7, 8]}
_retry = pb.RetryDeadDeletesRequest(filter=pb.DeletionFilter(topic=TOPIC))
_purge = pb.PurgeDeadDeletesRequest(filter=pb.DeletionFilter(topic=TOPIC))
_sweep = pb.SweepOrphansRequest(store="offloaded")


def _topics(method: str, good: message.Message) -> list[Case]:
    return [
        *names(method, good, TOPIC_NAME, exists=False),
        *cases(method, good, [("a topic of two names", {"topic": _TWO_NAMES}, ("topic", _TWO_NAMES, "persistent://"))]),
    ]


def _not_utf8() -> list[Case]:
    """Texts within a record: they end the whole request."""
    context = {
        "driver_name": text(3, b"aws\xff"),
        "driver_metadata key": text(4, text(1, b"k\xff")),
        "driver_metadata value": text(4, text(2, b"v\xff")),
    }
    nested = {
        "cursor_name": text(2, b"or\xffders"),
        "schema_id": text(3, b"or\xffders"),
        **{name: text(6, data) for name, data in context.items()},
    }
    head = pb.RecordPendingDeletesRequest(topic=TOPIC).SerializeToString()
    return [
        Case(f"{RECORD} {name} not UTF-8", RECORD, head + text(2, data), (*name.split(), "UTF-8"))
        for name, data in nested.items()
    ]


def _ledgers(method: str, good: message.Message) -> list[Case]:
    of_ledgers = {"ledger_type": pb.LEDGER_TYPE_LEDGER}
    return [
        *_topics(method, good),
        *cases(
            method,
            good,
            [
                ("ledger_type missing", {"ledger_type": None}, ("ledger_type", "none", "OFFLOADED_LEDGER")),
                ("ledger_type unknown", {"ledger_type": 3}, ("ledger_type", "3", "OFFLOADED_LEDGER")),
                ("ledger_id: no ledgers", {"ledger_id": None}, ("ledger_id", "0", "1")),
                ("ledger_id: too many", {"ledger_id": range(1001)}, ("ledger_id", "1001", "1000")),
                ("uuid_msb of another length", {"uuid_msb": [1] * 3, "uuid_lsb": [1]}, ("uuid_msb", "3", "2")),
                ("uuid_lsb of another length", {"uuid_msb": [1], "uuid_lsb": [1] * 3}, ("uuid_lsb", "3", "2")),
                ("uuid_msb missing", {"uuid_lsb": [1]}, ("uuid_msb", "0", "uuid_lsb", "1")),
                ("uuid_lsb missing", {"uuid_msb": [1, 2]}, ("uuid_lsb", "0", "uuid_msb", "2")),
                (
                    "the first half of a LEDGER's UUID",
                    {**of_ledgers, "uuid_msb": [0, 5], "uuid_lsb": [0]},
                    ("uuid_msb[1]", "5", "LEDGER"),
                ),
                (
                    "the second half of a LEDGER's UUID",
                    {**of_ledgers, "uuid_msb": [0], "uuid_lsb": [U64_MAX]},
                    ("uuid_lsb[0]", str(U64_MAX), "LEDGER"),
                ),
            ],
        ),
    ]


def _filters(method: str, good: message.Message) -> list[Case]:
    def narrowed(**fields: Any) -> dict[str, Any]:
        return {"filter": pb.DeletionFilter(**fields)}

    ids = ["", "3", "3.", ".3", "a.b", "3.0", "03.1", "3.01", "-1.2", "3.1 ", "٣.1"]
    ids += [f"{U32_MAX + 1}.1", f"1.{U64_MAX + 1}"]
    rest = changed(good, filter=None).SerializeToString()
    return [
        *cases(
            method,
            good,
            [
                ("filter topic too long", narrowed(topic="é" * 513), ("topic", "1026", "1024")),
                ("filter component unknown", narrowed(component=9), ("component", "9", "SCHEMA_STORAGE")),
                ("filter ledger_type unknown", narrowed(ledger_type=9), ("ledger_type", "9", "OFFLOADED_LEDGER")),
                (
                    "filter deletion_id of too many",
                    narrowed(deletion_id=["1.1"] * 1001),
                    ("deletion_id", "1001", "1000"),
                ),
                *(
                    (
                        f"filter deletion_id {deletion_id!r}",
                        narrowed(deletion_id=["1.1", deletion_id]),
                        ("deletion_id[1]", repr(deletion_id), "<shard>.<number>"),
                    )
                    for deletion_id in ids
                ),
            ],
        ),
        Case(f"{method} filter topic not UTF-8", method, rest + text(1, text(1, b"\xff")), ("topic", "UTF-8")),
        Case(f"{method} deletion_id not UTF-8", method, rest + text(1, text(5, b"\xff")), ("deletion_id", "UTF-8")),
    ]


def _pages(method: str, good: message.Message, kind: int) -> list[Case]:
    """`kind`: the first byte of a token of this list."""

    def token(data: bytes) -> str:
        return base64.urlsafe_b64encode(data).decode()

    of_another = token(bytes([kind]) + bytes(24))
    short = token(bytes([kind]) + bytes(23))
    other_list = token(bytes([kind % 3 + 8]) + bytes(24))
    return [
        *_filters(method, good),
        *cases(
            method,
            good,
            [
                ("page_size too large", {"page_size": 1_001}, ("page_size", "1001", "1000")),
                ("page_size at its maximum", {"page_size": U32_MAX}, ("page_size", str(U32_MAX), "1000")),
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
            good.SerializeToString() + text(3, b"\xff"),
            ("page_token", "UTF-8"),
        ),
    ]


def _chosen(method: str, good: message.Message) -> list[Case]:
    """Of calls that change what a filter says."""
    return [
        *_filters(method, good),
        *cases(
            method,
            good,
            [
                ("nothing chosen", {"filter": None}, ("filter", "all")),
                ("an empty filter", {"filter": pb.DeletionFilter()}, ("filter", "all")),
            ],
        ),
    ]


BAD_DELETIONS = [
    *_topics(RECORD, _record),
    *cases(
        RECORD,
        _record,
        [
            ("deletes: no record", {"deletes": None}, ("deletes", "0", "1")),
            ("deletes: too many records", {"deletes": [LEDGER] * 1_001}, ("deletes", "1001", "1000")),
        ],
    ),
    *_not_utf8(),
    Case(
        f"{RECORD} message too large",
        RECORD,
        _record.SerializeToString() + text(15, b"x" * 100) * 10_500,
        ("message", "1048576"),
    ),
    Case(f"{RECORD} no message at all", RECORD, b"\xff\xff\xff", ("message", "3", "RecordPendingDeletesRequest")),
    *_ledgers(IN_USE, pb.RecordInUseRequest(**_in_use)),
    *cases(
        IN_USE,
        pb.RecordInUseRequest(**_in_use, replace=True),
        [
            ("replace with too many", {"ledger_id": range(1001)}, ("ledger_id", "1001", "1000")),
            ("replace without a type", {"ledger_type": None, "ledger_id": None}, ("ledger_type", "none")),
        ],
    ),
    *_ledgers(FORGET, pb.ForgetInUseRequest(**_in_use)),
    *_pages(LIST_PENDING, pb.ListPendingDeletesRequest(), 8),
    *_pages(LIST_DEAD, pb.ListDeadDeletesRequest(), 9),
    *_pages(LIST_ENDED, pb.ListEndedDeletesRequest(), 10),
    *_chosen(RETRY, _retry),
    *_chosen(PURGE, _purge),
    *cases(STATS, pb.GetDeletionStatsRequest(), [("topic too long", {"topic": "é" * 513}, ("topic", "1026", "1024"))]),
    Case(f"{STATS} topic not UTF-8", STATS, text(1, b"\xff"), ("topic", "UTF-8")),
]

# Of the one call with a stream of answers.
BAD_SWEEPS = [
    *names(SWEEP, _sweep, (1, "store", 255), exists=False),
    Case(f"{SWEEP} store unknown", SWEEP, changed(_sweep, store="nowhere"), ("nowhere",), NOT_FOUND),
    *cases(
        SWEEP,
        _sweep,
        [
            ("prefix too long", {"prefix": "é" * 513}, ("prefix", "1026", "1024")),
            ("a prefix that no key has", {"prefix": "a//b"}, ("prefix", "a//b")),
            ("a prefix that leaves the store", {"prefix": "../a"}, ("prefix", "../a")),
        ],
    ),
    Case(f"{SWEEP} prefix not UTF-8", SWEEP, _sweep.SerializeToString() + text(2, b"\xff"), ("prefix", "UTF-8")),
]

_PAGE_FIELDS = {"filter", "page_size", "page_token"}
_LEDGER_FIELDS = {"topic", "ledger_type", "ledger_id", "uuid_msb", "uuid_lsb"}
DELETIONS_COVERED: dict[type[message.Message], set[str]] = {
    pb.RecordPendingDeletesRequest: {"topic", "deletes"},
    # Any number is a ledger.
    pb.PendingDelete: {"component", "cursor_name", "schema_id", "ledger_type", "ledger_id", "offload_context"},
    pb.OffloadContext: {"uuid_msb", "uuid_lsb", "driver_name", "driver_metadata"},
    pb.RecordInUseRequest: {*_LEDGER_FIELDS, "replace"},
    pb.ForgetInUseRequest: _LEDGER_FIELDS,
    pb.DeletionFilter: {"topic", "component", "ledger_type", "ledger_id", "deletion_id"},
    pb.ListPendingDeletesRequest: _PAGE_FIELDS,
    pb.ListDeadDeletesRequest: _PAGE_FIELDS,
    pb.ListEndedDeletesRequest: _PAGE_FIELDS,
    pb.RetryDeadDeletesRequest: {"filter", "all"},
    pb.PurgeDeadDeletesRequest: {"filter", "all"},
    pb.GetDeletionStatsRequest: {"topic"},
    # Either value of the last three is right, and any grace.
    pb.SweepOrphansRequest: {"store", "prefix", "grace_ms", "delete", "unknown_topics", "force"},
}
