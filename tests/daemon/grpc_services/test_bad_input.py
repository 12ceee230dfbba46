"""Every field of every call, given wrongly: the status, the field by name in the message, and nothing changed.

An acknowledgement of what is not in the backlog is no error (`test_dispatch.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.protobuf import message

from daemon import config
from daemon.engine.engine import Engine
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services.conftest import Edge
from tests.support import real_engine
from tests.support.fake_engine import FakeEngine

TOPIC = "persistent://public/default/orders"
SUBSCRIPTION = "workers"
FAR_MS = 2_000_000_000_000
INVALID = grpc.StatusCode.INVALID_ARGUMENT

ADD = "DelayedDelivery/AddMessages"
STREAM_ADD = "DelayedDelivery/StreamAddMessages"
SUBSCRIBE = "Dispatch/Subscribe"
CREATE = "Dispatch/CreateSubscription"
DELETE = "Dispatch/DeleteSubscription"
LIST_TOPICS = "Inspect/ListTopics"
TOPIC_STATS = "Inspect/GetTopicStats"


def text(field_number: int, data: bytes) -> bytes:
    """A field of up to 127 bytes as it is on the wire, UTF-8 or not."""
    return bytes((field_number << 3 | 2, len(data))) + data


def add(**changed: Any) -> delayed_delivery_pb2.AddMessagesRequest:
    good = {"topic": TOPIC, "ledger_id": [1], "entry_id": [1, 2, 3], "deliver_at_ms": [FAR_MS]}
    return delayed_delivery_pb2.AddMessagesRequest(**{**good, **changed})


def pair(request_type: type[message.Message], **changed: str) -> message.Message:
    return request_type(**{"topic": TOPIC, "subscription": SUBSCRIPTION, **changed})


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


def names(method: str, request_type: type[message.Message], fields: dict[str, int]) -> list[Case]:
    """The ways in which each name of a request can be bad. `fields`: names and limits in bytes."""
    cases = []
    for number, (field, limit) in enumerate(fields.items(), start=1):
        good = {name: "x" for name in fields if name != field}
        others = request_type(**good).SerializeToString()
        cases += [
            Case(f"{method} {field} empty", method, request_type(**good), (field, "0", str(limit))),
            Case(
                f"{method} {field} too long",
                method,
                request_type(**good, **{field: "é" * (limit // 2 + 1)}),
                (field, str(limit // 2 * 2 + 2), str(limit)),
            ),
            Case(f"{method} {field} not UTF-8", method, others + text(number, b"or\xffders"), (field, "UTF-8", "2")),
        ]
    return cases


ADDS: list[tuple[str, message.Message | bytes, tuple[str, ...]]] = [
    ("ledger_id missing", add(ledger_id=[]), ("ledger_id", "0", "3")),
    ("ledger_id of another length", add(ledger_id=[1, 2]), ("ledger_id", "2", "3")),
    ("entry_id: no rows", add(entry_id=[]), ("entry_id", "0")),
    ("entry_id: too many rows", add(entry_id=range(1001)), ("entry_id", "1001", "1000")),
    ("deliver_at_ms of another length", add(deliver_at_ms=[FAR_MS] * 4), ("deliver_at_ms", "4", "3")),
    ("delay_ms of another length", add(deliver_at_ms=[], delay_ms=[1, 2]), ("delay_ms", "2", "3")),
    ("no time column", add(deliver_at_ms=[]), ("deliver_at_ms", "delay_ms", "none")),
    ("both time columns", add(delay_ms=[1, 2, 3]), ("deliver_at_ms", "delay_ms", "both", "1", "3")),
    ("key_hash of another length", add(key_hash=[1, 2]), ("key_hash", "2", "3")),
    ("already_due unknown", add(already_due=7), ("already_due", "7")),
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

UNARY = [
    *(Case(f"{ADD} {name}", ADD, request, says) for name, request, says in ADDS),
    *(Case(f"{ADD} {name}", ADD, request, says, grpc.StatusCode.OUT_OF_RANGE) for name, request, says in TOO_LATE),
    *names(CREATE, dispatch_pb2.CreateSubscriptionRequest, {"topic": 1024, "subscription": 255}),
    *names(DELETE, dispatch_pb2.DeleteSubscriptionRequest, {"topic": 1024, "subscription": 255}),
    *names(TOPIC_STATS, inspect_pb2.GetTopicStatsRequest, {"topic": 1024}),
    Case(
        "too many subscriptions",
        CREATE,
        pair(dispatch_pb2.CreateSubscriptionRequest, subscription="fourth"),
        ("subscription", "3"),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ),
    Case(
        "delete: unknown topic",
        DELETE,
        pair(dispatch_pb2.DeleteSubscriptionRequest, topic="nowhere"),
        ("nowhere",),
        grpc.StatusCode.NOT_FOUND,
    ),
    Case(
        "delete: unknown subscription",
        DELETE,
        pair(dispatch_pb2.DeleteSubscriptionRequest, subscription="nobody"),
        ("nobody",),
        grpc.StatusCode.NOT_FOUND,
    ),
    Case(
        "stats: unknown topic",
        TOPIC_STATS,
        inspect_pb2.GetTopicStatsRequest(topic="nowhere"),
        ("nowhere",),
        grpc.StatusCode.NOT_FOUND,
    ),
    Case(
        "page_size too large", LIST_TOPICS, inspect_pb2.ListTopicsRequest(page_size=1001), ("page_size", "1001", "1000")
    ),
    Case("page_token not base64", LIST_TOPICS, inspect_pb2.ListTopicsRequest(page_token="é!"), ("page_token", "é!")),
    Case(
        "page_token of another kind",
        LIST_TOPICS,
        inspect_pb2.ListTopicsRequest(page_token="AAAA"),
        ("page_token", "AAAA"),
    ),
    Case(
        "page_token without a name",
        LIST_TOPICS,
        inspect_pb2.ListTopicsRequest(page_token="AQ=="),
        ("page_token", "AQ=="),
    ),
    Case("page_token not UTF-8", LIST_TOPICS, text(2, b"\xff"), ("page_token", "UTF-8")),
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


@pytest.fixture(params=["engine in memory", "real engine"])
async def engine(request: pytest.FixtureRequest, settings: config.Config) -> AsyncIterator[FakeEngine | Engine]:
    """The table holds for the real engine, and for the one that stands in for it elsewhere."""
    if request.param == "real engine":
        async with real_engine.serving(settings) as real:
            yield real
    else:
        yield FakeEngine(settings)


@pytest.fixture
async def populated(edge: Edge) -> Edge:
    """A topic with three subscriptions, as many as it may have, rows that are pending and one that is due."""
    for subscription in (SUBSCRIPTION, "second", "third"):
        await edge.caller.unary(CREATE, pair(dispatch_pb2.CreateSubscriptionRequest, subscription=subscription))
    await edge.caller.unary(ADD, add(ledger_id=[77]))
    await edge.caller.unary(ADD, add(ledger_id=[78], entry_id=[1], deliver_at_ms=[1]))
    async with asyncio.timeout(10):
        while (await state(edge))[0].pending != 3:
            pass
    return edge


async def state(edge: Edge) -> tuple[Any, Any]:
    """Everything that inspection shows, but the time of asking."""
    stats = await edge.caller.unary(TOPIC_STATS, inspect_pb2.GetTopicStatsRequest(topic=TOPIC))
    topics = await edge.caller.unary(LIST_TOPICS, inspect_pb2.ListTopicsRequest())
    stats.ClearField("as_of_ms")
    topics.ClearField("as_of_ms")
    return stats, topics


def assert_says(case: Case, code: int | grpc.StatusCode, said: str | None) -> None:
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    assert number == case.code.value[0], said
    missing = [part for part in case.says if part not in (said or "")]
    assert not missing, f"{missing} not in {said!r}"


@pytest.mark.parametrize("case", UNARY, ids=str)
async def test_a_bad_request_is_refused_by_field_value_and_limit_and_changes_nothing(
    populated: Edge, case: Case
) -> None:
    before = await state(populated)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await populated.caller.unary(case.method, case.request)
    assert_says(case, refused.value.code(), refused.value.details())
    assert await state(populated) == before


@pytest.mark.parametrize(
    "case",
    [
        Case(name, STREAM_ADD, request, says, code)
        for table, code in ((ADDS, INVALID), (TOO_LATE, grpc.StatusCode.OUT_OF_RANGE))
        for name, request, says in table
    ],
    ids=str,
)
async def test_a_bad_add_on_a_stream_is_refused_in_band_and_the_stream_goes_on(populated: Edge, case: Case) -> None:
    before = await state(populated)
    body = case.request if isinstance(case.request, bytes) else case.request.SerializeToString()
    framed = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=41).SerializeToString() + _nested(2, body)
    stream = populated.caller.stream(STREAM_ADD)
    await stream.send(framed)
    answer = await stream.receive()
    assert answer.request_id == 41
    says = (
        tuple(part for part in case.says if part not in ("AddMessagesRequest", "3"))
        if "message" in case.says
        else case.says
    )
    assert_says(dataclasses.replace(case, says=says), answer.error.code, answer.error.message)
    assert await state(populated) == before

    again = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=42, add=add(ledger_id=[77]))
    await stream.send(again)
    assert (await stream.receive()).added.duplicates == 3


async def test_an_add_stream_ends_when_a_message_has_not_even_an_id(populated: Edge) -> None:
    before = await state(populated)
    stream = populated.caller.stream(STREAM_ADD)
    await stream.send(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert refused.value.code() is INVALID
    assert "StreamAddMessagesRequest" in (refused.value.details() or "")
    assert await state(populated) == before


@pytest.mark.parametrize("case", BAD_OPENS, ids=str)
async def test_a_bad_open_ends_the_stream(populated: Edge, case: Case) -> None:
    before = await state(populated)
    stream = populated.caller.stream(SUBSCRIBE)
    await stream.send(case.request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert_says(case, refused.value.code(), refused.value.details())
    assert await state(populated) == before


async def test_a_stream_that_ends_before_open_is_refused(populated: Edge) -> None:
    stream = populated.caller.stream(SUBSCRIBE)
    await stream.done_sending()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert refused.value.code() is INVALID
    assert "open" in (refused.value.details() or "")


@pytest.mark.parametrize("case", REFUSED_IN_BAND, ids=str)
async def test_a_bad_request_on_an_open_stream_is_answered_by_done_and_the_stream_goes_on(
    populated: Edge, case: Case
) -> None:
    stream = populated.caller.stream(SUBSCRIBE)
    await stream.send(opening())
    assert (await stream.receive()).HasField("opened")
    before = await state(populated)
    await stream.send(case.request)
    done = (await stream.receive()).done
    assert done.request_id == (9 if "acknowledge" in case.name else 0)
    assert_says(case, done.error.code, done.error.message)
    assert await state(populated) == before

    await stream.send(acknowledge(request_id=10))
    done = (await stream.receive()).done
    assert (done.request_id, done.ignored, done.HasField("error")) == (10, 2, False)


@pytest.mark.parametrize("case", FATAL, ids=str)
async def test_what_is_no_request_of_an_open_stream_ends_it(populated: Edge, case: Case) -> None:
    before = await state(populated)
    stream = populated.caller.stream(SUBSCRIBE)
    await stream.send(opening())
    assert (await stream.receive()).HasField("opened")
    await stream.send(case.request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert_says(case, refused.value.code(), refused.value.details())
    assert await state(populated) == before


async def test_a_message_far_over_the_limit_is_refused_by_grpc_itself(populated: Edge) -> None:
    before = await state(populated)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await populated.caller.unary(ADD, add(key_hash=[1] * 600_000))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await state(populated) == before


def _nested(field_number: int, body: bytes) -> bytes:
    length, size = bytearray(), len(body)
    while size > 0x7F:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((field_number << 3 | 2, *length, size)) + body


# The fields for which a table above has cases, by message; every field of the contract's requests is here.
COVERED = {
    delayed_delivery_pb2.AddMessagesRequest: {
        "topic",
        "ledger_id",
        "entry_id",
        "deliver_at_ms",
        "delay_ms",
        "key_hash",
        "already_due",
    },
    dispatch_pb2.Open: {
        "topic",
        "subscription",
        "type",
        "held_ledger_id",
        "held_entry_id",
        "held_deliver_at_ms",
    },
    dispatch_pb2.Flow: {"permits"},
    dispatch_pb2.Acknowledge: {"ledger_id", "entry_id", "deliver_at_ms"},
    dispatch_pb2.CreateSubscriptionRequest: {"topic", "subscription"},
    dispatch_pb2.DeleteSubscriptionRequest: {"topic", "subscription"},
    inspect_pb2.ListTopicsRequest: {"page_size", "page_token"},
    inspect_pb2.GetTopicStatsRequest: {"topic"},
}


@pytest.mark.parametrize("request_type", COVERED, ids=lambda each: each.DESCRIPTOR.name)
def test_the_tables_have_every_field(request_type: type[message.Message]) -> None:
    # Any number is a request_id.
    fields = {field.name for field in request_type.DESCRIPTOR.fields} - {"request_id"}
    assert fields == COVERED[request_type]
