"""Adds, one at a time and pipelined."""

from __future__ import annotations

import asyncio
import contextlib

import grpc
import pytest

from daemon import config, errors
from tarry.v1 import delayed_delivery_pb2 as pb
from tests.daemon.grpc_services._support.shown_rows import scheduled
from tests.daemon.grpc_services._support.watched_calls import until
from tests.daemon.grpc_services.conftest import Edge, Stream

ADD = "DelayedDelivery/AddMessages"
STREAM_ADD = "DelayedDelivery/StreamAddMessages"
FAR_MS = 2_000_000_000_000


def rows(*entry_ids: int, **changed: object) -> pb.AddMessagesRequest:
    return pb.AddMessagesRequest(
        **{"topic": "t", "ledger_id": [1], "entry_id": entry_ids, "deliver_at_ms": [FAR_MS], **changed}  # type: ignore[arg-type]
    )


def numbered(request_id: int, request: pb.AddMessagesRequest) -> pb.StreamAddMessagesRequest:
    return pb.StreamAddMessagesRequest(request_id=request_id, add=request)


async def begun(edge: Edge, calls: int) -> None:
    """Waits until the engine has been called as often."""
    await until(lambda: edge.calls.begun >= calls)


async def test_columns_of_length_one_apply_to_all_rows(edge: Edge) -> None:
    answer = await edge.caller.unary(ADD, rows(5, 6, 7, ledger_id=[9], key_hash=[4]))
    assert (answer.accepted, answer.duplicates) == (3, 0)
    assert await scheduled(edge) == {(9, entry): (FAR_MS, 4) for entry in (5, 6, 7)}


async def test_columns_of_full_length_apply_row_by_row(edge: Edge) -> None:
    await edge.caller.unary(
        ADD, rows(0, (1 << 64) - 1, ledger_id=[2, 3], deliver_at_ms=[FAR_MS, FAR_MS + 1], key_hash=[0, (1 << 32) - 1])
    )
    assert await scheduled(edge) == {(2, 0): (FAR_MS, 0), (3, (1 << 64) - 1): (FAR_MS + 1, (1 << 32) - 1)}


async def test_what_was_there_is_counted_as_duplicate_and_what_is_returned_is_named(edge: Edge) -> None:
    await edge.caller.unary(ADD, rows(1))
    returned = pb.AlreadyDue.ALREADY_DUE_RETURN
    answer = await edge.caller.unary(ADD, rows(1, 2, 3, deliver_at_ms=[FAR_MS, 1, FAR_MS], already_due=returned))
    assert (answer.accepted, answer.duplicates, list(answer.returned_index), answer.late_on_arrival) == (1, 1, [1], 1)


@pytest.mark.parametrize("pipelined", [False, True])
async def test_invalid_rows_are_named_with_one_reason_where_all_agree_and_the_others_are_stored(
    edge: Edge, pipelined: bool
) -> None:
    stream = edge.caller.stream(STREAM_ADD)

    async def asked(*entry_ids: int, **changed: object) -> pb.AddMessagesResponse:
        request = rows(*entry_ids, **{"deliver_at_ms": [], "on_invalid": pb.ON_INVALID_RETURN, **changed})
        answer: pb.AddMessagesResponse
        if pipelined:
            await stream.send(numbered(1, request))
            answer = (await stream.receive()).added
        else:
            answer = await edge.caller.unary(ADD, request)
        return answer

    long, seconds, level = pb.RefusedReason.values()[1:]
    times = [FAR_MS, 10**9, (1 << 64) - 1, 1]
    answer = await asked(1, 2, 3, 4, deliver_at_ms=times, already_due=pb.ALREADY_DUE_RETURN)
    assert (answer.accepted, list(answer.returned_index)) == (1, [3])
    assert (list(answer.refused_index), list(answer.refused_reason)) == ([1, 2], [seconds, long])
    assert (await scheduled(edge)).keys() == {(1, 1)}

    answer = await asked(5, 6, 7, delay_level=[-1, 1, -5])
    assert (answer.accepted, list(answer.refused_index), list(answer.refused_reason)) == (1, [0, 2], [level])
    answer = await asked(8, 9, delay_ms=[1 << 60])
    assert (answer.accepted, list(answer.refused_index), list(answer.refused_reason)) == (0, [0, 1], [long])
    assert (await scheduled(edge)).keys() == {(1, 1), (1, 6)}
    answer = await asked(8, delay_ms=[1 << 40 >> 3])
    assert (answer.accepted, list(answer.refused_index), list(answer.refused_reason)) == (1, [], [])


async def test_invalid_rows_refuse_the_whole_request_by_default(edge: Edge) -> None:
    for on_invalid in (pb.ON_INVALID_UNSPECIFIED, pb.ON_INVALID_REFUSE):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await edge.caller.unary(ADD, rows(1, 2, deliver_at_ms=[FAR_MS, (1 << 64) - 1], on_invalid=on_invalid))
        assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "t" not in edge.topics


async def test_fields_that_are_not_packed_are_read_too(edge: Edge) -> None:
    entry_ids = b"".join(b"\x19" + entry.to_bytes(8, "little") for entry in (5, 6))
    answer = await edge.caller.unary(ADD, rows(4).SerializeToString() + entry_ids)
    assert answer.accepted == 3


async def test_a_quota_says_when_to_try_again(edge: Edge) -> None:
    edge.calls.fail_with = errors.QuotaExceeded("pending: 10, the limit is 10", retry_after_ms=250)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(ADD, rows(1))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(refused.value.trailing_metadata() or ())["retry-after-ms"] == "250"


async def test_a_caller_that_goes_away_does_not_stop_the_engine_halfway(edge: Edge) -> None:
    edge.calls.hold = asyncio.Event()
    call = asyncio.create_task(edge.caller.unary(ADD, rows(1)))
    await begun(edge, 1)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    edge.calls.hold.set()
    edge.calls.hold = None
    assert (await edge.caller.unary(ADD, rows(1))).duplicates == 1


async def test_requests_of_a_stream_are_answered_by_id_in_any_order(edge: Edge) -> None:
    edge.calls.hold = first = asyncio.Event()
    stream = edge.caller.stream(STREAM_ADD)
    await stream.send(numbered(1, rows(1)))
    await begun(edge, 1)
    edge.calls.hold = None
    await stream.send(numbered(2, rows(2, 3)))
    second_answer = await stream.receive()
    first.set()
    first_answer = await stream.receive()
    assert (second_answer.request_id, second_answer.added.accepted) == (2, 2)
    assert (first_answer.request_id, first_answer.added.accepted) == (1, 1)


async def test_all_requests_are_answered_before_a_stream_ends(edge: Edge) -> None:
    edge.calls.hold = asyncio.Event()
    stream = edge.caller.stream(STREAM_ADD)
    for request_id in range(50):
        await stream.send(numbered(request_id, rows(request_id)))
    await stream.done_sending()
    await begun(edge, 50)
    edge.calls.hold.set()
    assert {(await stream.receive()).request_id for _ in range(50)} == set(range(50))
    with pytest.raises(EOFError):
        await stream.receive()


async def test_an_error_that_is_not_of_the_stream_is_answered_in_band(edge: Edge) -> None:
    stream = edge.caller.stream(STREAM_ADD)
    for request_id, error, code in (
        (1, errors.Unavailable("the store does not answer"), grpc.StatusCode.UNAVAILABLE),
        (2, errors.OutcomeUnknown("slot 7: no answer"), grpc.StatusCode.UNKNOWN),
        (3, ValueError("a bug"), grpc.StatusCode.INTERNAL),
    ):
        edge.calls.fail_with = error
        await stream.send(numbered(request_id, rows(1)))
        answer = await stream.receive()
        assert (answer.request_id, answer.error.code) == (request_id, code.value[0])
        assert "a bug" not in answer.error.message


async def test_lost_ownership_ends_the_stream_and_names_the_owner(edge: Edge) -> None:
    edge.calls.fail_with = errors.NotOwner("shard 3 moved", owner_address="10.0.0.2:7461")
    stream = edge.caller.stream(STREAM_ADD)
    await stream.send(numbered(1, rows(1)))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert dict(ended.value.trailing_metadata() or ())["owner-address"] == "10.0.0.2:7461"


class TestBackPressure:
    """A stream is not read further while too much of it is unanswered."""

    @pytest.fixture
    def settings(self, settings: config.Config, bound: str) -> config.Config:
        return config.load(environment={}, overrides=["grpc.listen=127.0.0.1:0", "grpc.drain_s=0", bound])

    @staticmethod
    async def filled(edge: Edge, stream: Stream, requests: int) -> None:
        for request_id in range(requests):
            await stream.send(numbered(request_id, rows(request_id)))

    @pytest.mark.parametrize(
        ("bound", "read"),
        [
            ("grpc.stream_requests_in_flight_max=4", 4),
            # A request has 39 bytes: the third one reaches the bound.
            ("grpc.stream_bytes_in_flight_max=100", 3),
            # A request larger than the bound still goes, alone.
            ("grpc.stream_bytes_in_flight_max=1", 1),
        ],
    )
    async def test_reading_stops_at_the_bound_and_goes_on_with_the_answers(self, edge: Edge, read: int) -> None:
        edge.calls.hold = asyncio.Event()
        stream = edge.caller.stream(STREAM_ADD)
        await self.filled(edge, stream, 10)
        await begun(edge, read)
        # Another call on the same connection is answered after what was sent before it has arrived.
        await edge.caller.unary("Inspect/ListTopics", b"")
        assert edge.calls.begun == read
        edge.calls.hold.set()
        assert {(await stream.receive()).request_id for _ in range(10)} == set(range(10))


async def test_a_stream_that_the_caller_cancels_leaves_the_server_well(edge: Edge) -> None:
    edge.calls.hold = asyncio.Event()
    stream = edge.caller.stream(STREAM_ADD)
    await stream.send(numbered(1, rows(1)))
    await begun(edge, 1)
    stream.call.cancel()
    edge.calls.hold.set()
    edge.calls.hold = None
    assert (await edge.caller.unary(ADD, rows(1))).duplicates == 1
