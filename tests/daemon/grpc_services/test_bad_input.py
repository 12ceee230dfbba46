"""Every field of every call with a stream, given wrongly: the status, the field by name in the message, and nothing
changed. Of calls with one request: `test_bad_unary_calls`; that the tables have every field is said here.

An acknowledgement of what is not in the backlog is no error (`test_dispatch.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from types import ModuleType

import grpc
import pytest
import pytest_asyncio
from google.protobuf import message

from daemon import config
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests._support import real_engine
from tests.daemon.grpc_services import conftest
from tests.daemon.grpc_services._support import refusals
from tests.daemon.grpc_services._support.bad_calls import (
    COVERED,
)
from tests.daemon.grpc_services._support.bad_dead_letters import DEAD_LETTERS_COVERED
from tests.daemon.grpc_services._support.bad_key_shared import (
    BAD_SHARED_OPENS,
    KEY_SHARED_COVERED,
    REFUSED_ON_SHARED,
    UNNUMBERED,
)
from tests.daemon.grpc_services._support.bad_key_shared_policies import KEY_SHARED_POLICIES_COVERED
from tests.daemon.grpc_services._support.bad_levels import LEVELS_COVERED
from tests.daemon.grpc_services._support.bad_redelivery import (
    BAD_HELD_PARTS,
    REDELIVERIES_REFUSED_IN_BAND,
    REDELIVERY_COVERED,
)
from tests.daemon.grpc_services._support.bad_requests import (
    ADD,
    ADDS,
    BAD_OPENS,
    FATAL,
    INVALID,
    REFUSED_IN_BAND,
    STREAM_ADD,
    SUBSCRIBE,
    TOO_LATE,
    Case,
    acknowledge,
    add,
    opening,
)
from tests.daemon.grpc_services._support.bad_views import VIEWS_COVERED
from tests.daemon.grpc_services._support.bad_withdrawals import WITHDRAWALS_COVERED

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


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def populated(settings: config.Config) -> AsyncIterator[refusals.Populated]:
    """One topic for all tests, since none changes it."""
    async with real_engine.serving(settings) as engine, conftest.serving(engine, settings) as edge:
        yield await refusals.populate(edge)


@in_one_loop
@pytest.mark.parametrize(
    "case",
    [
        Case(name, STREAM_ADD, request, says, code)
        for table, code in ((ADDS, INVALID), (TOO_LATE, grpc.StatusCode.OUT_OF_RANGE))
        for name, request, says in table
    ],
    ids=str,
)
async def test_a_bad_add_on_a_stream_is_refused_in_band_and_the_stream_goes_on(
    populated: refusals.Populated, case: Case
) -> None:
    body = case.request if isinstance(case.request, bytes) else case.request.SerializeToString()
    framed = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=41).SerializeToString() + _nested(2, body)
    stream = populated.edge.caller.stream(STREAM_ADD)
    await stream.send(framed)
    answer = await stream.receive()
    assert answer.request_id == 41
    says = (
        tuple(part for part in case.says if part not in ("AddMessagesRequest", "3"))
        if "message" in case.says
        else case.says
    )
    refusals.assert_says(dataclasses.replace(case, says=says), answer.error.code, answer.error.message)
    await populated.assert_unchanged()

    again = delayed_delivery_pb2.StreamAddMessagesRequest(request_id=42, add=add(ledger_id=[77]))
    await stream.send(again)
    assert (await stream.receive()).added.duplicates == 3
    await stream.end()


@in_one_loop
async def test_an_add_stream_ends_when_a_message_has_not_even_an_id(populated: refusals.Populated) -> None:
    stream = populated.edge.caller.stream(STREAM_ADD)
    await stream.send(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert refused.value.code() is INVALID
    assert "StreamAddMessagesRequest" in (refused.value.details() or "")
    await populated.assert_unchanged()


@in_one_loop
@pytest.mark.parametrize("case", [*BAD_OPENS, *BAD_HELD_PARTS, *BAD_SHARED_OPENS], ids=str)
async def test_a_bad_open_ends_the_stream(populated: refusals.Populated, case: Case) -> None:
    stream = populated.edge.caller.stream(SUBSCRIBE)
    await stream.send(case.request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    refusals.assert_says(case, refused.value.code(), refused.value.details())
    await populated.assert_unchanged()


@in_one_loop
async def test_a_stream_that_ends_before_open_is_refused(populated: refusals.Populated) -> None:
    stream = populated.edge.caller.stream(SUBSCRIBE)
    await stream.done_sending()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    assert refused.value.code() is INVALID
    assert "open" in (refused.value.details() or "")


@in_one_loop
@pytest.mark.parametrize("case", [*REFUSED_IN_BAND, *REDELIVERIES_REFUSED_IN_BAND, *REFUSED_ON_SHARED], ids=str)
async def test_a_bad_request_on_an_open_stream_is_answered_by_done_and_the_stream_goes_on(
    populated: refusals.Populated, case: Case
) -> None:
    stream = populated.edge.caller.stream(SUBSCRIBE)
    await stream.send(opening())
    assert (await stream.receive()).HasField("opened")
    opened = await refusals.state(populated.edge)
    await stream.send(case.request)
    done = (await stream.receive()).done
    assert done.request_id == (0 if case.name in ("zero permits", "an empty request", *UNNUMBERED) else 9)
    refusals.assert_says(case, done.error.code, done.error.message)
    assert await refusals.state(populated.edge) == opened

    await stream.send(acknowledge(request_id=10))
    done = (await stream.receive()).done
    assert (done.request_id, done.ignored, done.HasField("error")) == (10, 2, False)
    await stream.end()


@in_one_loop
@pytest.mark.parametrize("case", FATAL, ids=str)
async def test_what_is_no_request_of_an_open_stream_ends_it(populated: refusals.Populated, case: Case) -> None:
    stream = populated.edge.caller.stream(SUBSCRIBE)
    await stream.send(opening())
    assert (await stream.receive()).HasField("opened")
    await stream.send(case.request)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stream.receive()
    refusals.assert_says(case, refused.value.code(), refused.value.details())
    await populated.assert_unchanged()


@in_one_loop
async def test_a_message_far_over_the_limit_is_refused_by_grpc_itself(populated: refusals.Populated) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await populated.edge.caller.unary(ADD, add(key_hash=[1] * 600_000))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await populated.assert_unchanged()


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
