"""Bad requests to the streams and to `AddMessages`, and what the bad requests of every call are made of.

Owns: the form of a case, and what its tables share.
Does not own: the other calls' tables (`bad_calls`) and the tests (`test_bad_input.py`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
from google.protobuf import message

from tarry.v1 import delayed_delivery_pb2, dispatch_pb2

TOPIC = "persistent://public/default/orders"
SUBSCRIPTION = "workers"
FAR_MS = 2_000_000_000_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT

ADD = "DelayedDelivery/AddMessages"
STREAM_ADD = "DelayedDelivery/StreamAddMessages"
SUBSCRIBE = "Dispatch/Subscribe"


def text(field_number: int, data: bytes) -> bytes:
    """A field of up to 127 bytes as it is on the wire, UTF-8 or not."""
    return bytes((field_number << 3 | 2, len(data))) + data


def add(**changed: Any) -> delayed_delivery_pb2.AddMessagesRequest:
    good = {"topic": TOPIC, "ledger_id": [1], "entry_id": [1, 2, 3], "deliver_at_ms": [FAR_MS]}
    return delayed_delivery_pb2.AddMessagesRequest(**{**good, **changed})


def opening(**changed: Any) -> dispatch_pb2.SubscribeRequest:
    good = {"topic": TOPIC, "subscription": SUBSCRIPTION, "type": 1}
    return dispatch_pb2.SubscribeRequest(open=dispatch_pb2.Open(**{**good, **changed}))


def acknowledge(**changed: Any) -> dispatch_pb2.SubscribeRequest:
    good = {"request_id": 9, "ledger_id": [1], "entry_id": [1, 2], "deliver_at_ms": [5]}
    return dispatch_pb2.SubscribeRequest(acknowledge=dispatch_pb2.Acknowledge(**{**good, **changed}))


@dataclasses.dataclass(frozen=True)
class Case:
    """`says`: parts of the status message: field, value, limit."""

    name: str
    method: str
    request: message.Message | bytes
    says: tuple[str, ...]
    code: grpc.StatusCode = INVALID

    def __str__(self) -> str:
        return self.name


ADDS: list[tuple[str, message.Message | bytes, tuple[str, ...]]] = [
    ("ledger_id missing", add(ledger_id=[]), ("ledger_id", "0", "3")),
    ("ledger_id of another length", add(ledger_id=[1, 2]), ("ledger_id", "2", "3")),
    ("entry_id: no rows", add(entry_id=[]), ("entry_id", "0")),
    ("entry_id: too many rows", add(entry_id=range(1001)), ("entry_id", "1001", "1000")),
    ("deliver_at_ms of another length", add(deliver_at_ms=[FAR_MS] * 4), ("deliver_at_ms", "4", "3")),
    ("delay_ms of another length", add(deliver_at_ms=[], delay_ms=[1, 2]), ("delay_ms", "2", "3")),
    ("no time column", add(deliver_at_ms=[]), ("deliver_at_ms", "delay_ms", "none")),
    ("both time columns", add(delay_ms=[1, 2, 3]), ("deliver_at_ms", "delay_ms", "both", "1", "3")),
    ("delay_level of another length", add(deliver_at_ms=[], delay_level=[1, 2]), ("delay_level", "2", "3")),
    ("delay_level negative", add(deliver_at_ms=[], delay_level=[1, 0, -1]), ("delay_level[2]", "-1", "0", "18")),
    ("delay_level and deliver_at_ms", add(delay_level=[1, 2, 3]), ("deliver_at_ms", "delay_level", "both", "1", "3")),
    ("delay_level and delay_ms", add(deliver_at_ms=[], delay_ms=[1], delay_level=[1]), ("delay_ms", "delay_level")),
    ("all three time columns", add(delay_ms=[1], delay_level=[1]), ("deliver_at_ms", "delay_ms", "delay_level", "all")),
    ("key_hash of another length", add(key_hash=[1, 2]), ("key_hash", "2", "3")),
    ("already_due unknown", add(already_due=7), ("already_due", "7")),
    ("on_invalid unknown", add(on_invalid=3), ("on_invalid", "3", "ON_INVALID_RETURN")),
    ("subscription too long", add(subscription="é" * 128), ("subscription", "256", "255")),
    ("subscription not UTF-8", add().SerializeToString() + text(8, b"w\xff"), ("subscription", "UTF-8", "1")),
    ("topic empty", add(topic=""), ("topic", "0", "1024")),
    ("topic too long", add(topic="é" * 513), ("topic", "1026", "1024")),
    ("topic not UTF-8", text(1, b"or\xffders") + add(topic="").SerializeToString(), ("topic", "UTF-8", "2")),
    ("no message at all", b"\xff\xff\xff", ("message", "3", "AddMessagesRequest")),
    ("message too large", add(key_hash=[1] * 270_000), ("message", "1048576")),
]
TOO_LATE: list[tuple[str, message.Message | bytes, tuple[str, ...]]] = [
    (
        "delay_ms over the limit",
        add(deliver_at_ms=[], delay_ms=[1, 1 << 50, 1]),
        ("delay_ms", str(1 << 50), "315360000000"),
    ),
    (
        "deliver_at_ms over the limit",
        add(deliver_at_ms=[(1 << 64) - 1]),
        ("deliver_at_ms", str((1 << 64) - 1), "315360000000"),
    ),
]

BAD_OPENS = [
    Case("open: empty topic", SUBSCRIBE, opening(topic=""), ("topic", "0", "1024")),
    Case("open: topic too long", SUBSCRIBE, opening(topic="x" * 1025), ("topic", "1025", "1024")),
    Case("open: topic not UTF-8", SUBSCRIBE, text(1, text(1, b"\xff")), ("topic", "UTF-8")),
    Case("open: empty subscription", SUBSCRIBE, opening(subscription=""), ("subscription", "0", "255")),
    Case("open: subscription too long", SUBSCRIBE, opening(subscription="x" * 256), ("subscription", "256", "255")),
    Case("open: subscription not UTF-8", SUBSCRIBE, text(1, text(2, b"\xff")), ("subscription", "UTF-8")),
    Case("open: no type", SUBSCRIBE, opening(type=0), ("type", "UNSPECIFIED", "SHARED")),
    Case("open: unknown type", SUBSCRIBE, opening(type=9), ("type", "9")),
    Case(
        "open: held ledgers missing",
        SUBSCRIBE,
        opening(held_entry_id=[1], held_deliver_at_ms=[1]),
        ("held_ledger_id", "0"),
    ),
    Case(
        "open: held entries of another length",
        SUBSCRIBE,
        opening(held_ledger_id=[1], held_entry_id=[1, 2], held_deliver_at_ms=[1]),
        ("held_entry_id", "2"),
    ),
    Case(
        "open: held times missing",
        SUBSCRIBE,
        opening(held_ledger_id=[1], held_entry_id=[1]),
        ("held_deliver_at_ms", "0"),
    ),
    Case("open: unknown topic", SUBSCRIBE, opening(topic="nowhere"), ("nowhere",), grpc.StatusCode.NOT_FOUND),
    Case(
        "open: unknown subscription", SUBSCRIBE, opening(subscription="nobody"), ("nobody",), grpc.StatusCode.NOT_FOUND
    ),
    Case(
        "flow before open",
        SUBSCRIBE,
        dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=1)),
        ("open", "flow"),
    ),
    Case("acknowledge before open", SUBSCRIBE, acknowledge(), ("open", "acknowledge")),
    Case("an empty first message", SUBSCRIBE, dispatch_pb2.SubscribeRequest(), ("open", "empty")),
    Case("a first message that is none", SUBSCRIBE, b"\xff\xff", ("message", "2", "SubscribeRequest")),
]

# On an open stream; answered by `Done`, and the stream goes on.
REFUSED_IN_BAND = [
    Case("acknowledge: ledgers missing", SUBSCRIBE, acknowledge(ledger_id=[]), ("ledger_id", "0", "2")),
    Case("acknowledge: ledgers of another length", SUBSCRIBE, acknowledge(ledger_id=[1] * 3), ("ledger_id", "3", "2")),
    Case("acknowledge: no rows", SUBSCRIBE, acknowledge(entry_id=[]), ("entry_id", "0")),
    Case("acknowledge: too many rows", SUBSCRIBE, acknowledge(entry_id=range(1001)), ("1001", "1000")),
    Case("acknowledge: times missing", SUBSCRIBE, acknowledge(deliver_at_ms=[]), ("deliver_at_ms", "0", "2")),
    Case(
        "acknowledge: times of another length",
        SUBSCRIBE,
        acknowledge(deliver_at_ms=[1] * 3),
        ("deliver_at_ms", "3", "2"),
    ),
    Case("zero permits", SUBSCRIBE, dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow()), ("permits", "0", "1")),
    Case("an empty request", SUBSCRIBE, dispatch_pb2.SubscribeRequest(), ("request", "empty")),
]

# On an open stream; end it.
FATAL = [
    Case("a second open", SUBSCRIBE, opening(), ("open",)),
    Case("no message at all", SUBSCRIBE, b"\xff\xff", ("message", "2", "SubscribeRequest")),
    Case("message too large", SUBSCRIBE, acknowledge(deliver_at_ms=[1] * 140_000), ("message", "1048576")),
]
