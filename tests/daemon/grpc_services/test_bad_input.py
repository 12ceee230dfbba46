"""Every field of every call, given wrongly: the status, the field by name in the message, and nothing changed.

An acknowledgement of what is not in the backlog is no error (`test_dispatch.py`).
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from types import ModuleType
from typing import Any

import grpc
import pytest
from google.protobuf import message

from daemon import config
from daemon.engine.engine import Engine
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests.daemon.grpc_services.bad_calls import (
    BAD_CALLS,
    COVERED,
    CREATE,
    LIST_BUCKETS,
    LIST_TOPICS,
    TOPIC_STATS,
)
from tests.daemon.grpc_services.bad_dead_letters import BAD_DEAD_LETTERS, DEAD_LETTERS_COVERED
from tests.daemon.grpc_services.bad_key_shared import (
    BAD_CONSUMER_LISTS,
    BAD_SHARED_OPENS,
    KEY_SHARED_COVERED,
    REFUSED_ON_SHARED,
    UNNUMBERED,
)
from tests.daemon.grpc_services.bad_key_shared_policies import BAD_KEY_SHARED_POLICIES, KEY_SHARED_POLICIES_COVERED
from tests.daemon.grpc_services.bad_levels import BAD_LEVELS, LEVELS_COVERED
from tests.daemon.grpc_services.bad_redelivery import (
    BAD_HELD_PARTS,
    BAD_REDELIVERIES,
    REDELIVERIES_REFUSED_IN_BAND,
    REDELIVERY_COVERED,
)
from tests.daemon.grpc_services.bad_requests import (
    ADD,
    ADDS,
    BAD_OPENS,
    FATAL,
    INVALID,
    REFUSED_IN_BAND,
    STREAM_ADD,
    SUBSCRIBE,
    SUBSCRIPTION,
    TOO_LATE,
    TOPIC,
    Case,
    acknowledge,
    add,
    opening,
)
from tests.daemon.grpc_services.bad_views import BAD_VIEWS, VIEWS_COVERED
from tests.daemon.grpc_services.bad_withdrawals import BAD_WITHDRAWALS, WITHDRAWALS_COVERED
from tests.daemon.grpc_services.conftest import Edge
from tests.support import either_engine
from tests.support.fake_engine import FakeEngine

ALL_COVERED = (
    COVERED
    | WITHDRAWALS_COVERED
    | VIEWS_COVERED
    | LEVELS_COVERED
    | DEAD_LETTERS_COVERED
    | REDELIVERY_COVERED
    | KEY_SHARED_POLICIES_COVERED
    | KEY_SHARED_COVERED
)


@pytest.fixture(params=either_engine.ENGINES)
async def engine(request: pytest.FixtureRequest, settings: config.Config) -> AsyncIterator[FakeEngine | Engine]:
    """The table holds for the real engine, and for the one that stands in for it elsewhere."""
    async with either_engine.serving(request.param, settings) as engine:
        yield engine


@pytest.fixture
async def populated(edge: Edge) -> Edge:
    """A topic with three subscriptions, as many as it may have, rows that are pending and one that is due."""
    for subscription in (SUBSCRIPTION, "second", "third"):
        request = dispatch_pb2.CreateSubscriptionRequest(topic=TOPIC, subscription=subscription)
        await edge.caller.unary(CREATE, request)
    await edge.caller.unary(ADD, add(ledger_id=[77]))
    await edge.caller.unary(ADD, add(ledger_id=[78], entry_id=[1], deliver_at_ms=[1]))
    async with asyncio.timeout(10):
        while (await state(edge))[0].pending != 3:
            pass
    return edge


async def state(edge: Edge) -> list[Any]:
    """Everything that inspection shows, but the time of asking."""
    answers = [
        await edge.caller.unary(TOPIC_STATS, inspect_pb2.GetTopicStatsRequest(topic=TOPIC)),
        await edge.caller.unary(LIST_TOPICS, inspect_pb2.ListTopicsRequest()),
        await edge.caller.unary(LIST_BUCKETS, inspect_pb2.ListBucketsRequest(topic=TOPIC)),
    ]
    for answer in answers:
        answer.ClearField("as_of_ms")
    return answers


def assert_says(case: Case, code: int | grpc.StatusCode, said: str | None) -> None:
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    assert number == case.code.value[0], said
    missing = [part for part in case.says if part not in (said or "")]
    assert not missing, f"{missing} not in {said!r}"


@pytest.mark.parametrize(
    "case",
    [
        *BAD_CALLS,
        *BAD_WITHDRAWALS,
        *BAD_VIEWS,
        *BAD_LEVELS,
        *BAD_DEAD_LETTERS,
        *BAD_REDELIVERIES,
        *BAD_KEY_SHARED_POLICIES,
        *BAD_CONSUMER_LISTS,
    ],
    ids=str,
)
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


@pytest.mark.parametrize("case", [*BAD_OPENS, *BAD_HELD_PARTS, *BAD_SHARED_OPENS], ids=str)
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


@pytest.mark.parametrize("case", [*REFUSED_IN_BAND, *REDELIVERIES_REFUSED_IN_BAND, *REFUSED_ON_SHARED], ids=str)
async def test_a_bad_request_on_an_open_stream_is_answered_by_done_and_the_stream_goes_on(
    populated: Edge, case: Case
) -> None:
    stream = populated.caller.stream(SUBSCRIBE)
    await stream.send(opening())
    assert (await stream.receive()).HasField("opened")
    before = await state(populated)
    await stream.send(case.request)
    done = (await stream.receive()).done
    assert done.request_id == (0 if case.name in ("zero permits", "an empty request", *UNNUMBERED) else 9)
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


@pytest.mark.parametrize("request_type", ALL_COVERED, ids=lambda each: each.DESCRIPTOR.name)
def test_the_tables_have_every_field(request_type: type[message.Message]) -> None:
    # Any number is a request_id.
    fields = {field.name for field in request_type.DESCRIPTOR.fields} - {"request_id"}
    assert fields == ALL_COVERED[request_type]


@pytest.mark.parametrize(
    "module", [admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2], ids=lambda each: each.__name__
)
def test_the_tables_have_every_call(module: ModuleType) -> None:
    (service,) = module.DESCRIPTOR.services_by_name.values()
    unary = {
        method.input_type.name for method in service.methods if not (method.client_streaming or method.server_streaming)
    }
    assert unary <= {request_type.DESCRIPTOR.name for request_type in ALL_COVERED}
