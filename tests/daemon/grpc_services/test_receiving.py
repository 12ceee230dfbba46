"""Bytes that are received and not decided are bounded over all calls."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import types
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from daemon import config, errors
from daemon.audit_log import AuditLog
from daemon.auth import Door
from daemon.grpc_services import admission, parsing, receiving, unary
from daemon.grpc_services.receiving import Receiving
from daemon.owner.engine import Engine
from tarry.packed_fields import nested, tag_bytes
from tarry.v1 import delayed_delivery_pb2 as pb
from tarry.v1 import dispatch_pb2
from tests._support.virtual_loop import VirtualLoop
from tests.daemon.grpc_services.conftest import Edge, serving

ADD = pb.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1], delay_ms=[60_000])
ARRIVAL_S = 30.0
OVERRIDES = ("grpc.listen=127.0.0.1:0", "grpc.drain_s=0")
# Half of it is for two messages of 1 MiB and their room
FREE_BYTES = 4 << 20
TWO_TURNS = ("grpc.received_bytes_max=8388608", "limits.message_bytes_max=1048576")


@dataclasses.dataclass(eq=False)
class Call:
    """A call whose message comes when the test says so."""

    caller: str
    ended: errors.TarryError | None = None
    task: asyncio.Task[object] | None = None

    def __post_init__(self) -> None:
        self.is_awaited = False
        self.message: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    @property
    def is_ending(self) -> bool:
        return self.ended is not None

    def end(self, why: errors.TarryError) -> None:
        self.ended = why
        assert self.task is not None
        self.task.cancel()

    async def read(self) -> object:
        self.is_awaited = True
        return await self.message


@dataclasses.dataclass
class Turns:
    receiving: Receiving

    async def begun(self, *callers: str, needs_room: bool = True) -> list[Call]:
        """Calls whose message is to be received, in this order."""
        calls = [Call(caller) for caller in callers]
        for call in calls:
            call.task = asyncio.create_task(self.receiving.in_turn(call, call.read, needs_room=needs_room))
        await self.settled()
        return calls

    async def settled(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)


def awaited(calls: list[Call]) -> list[bool]:
    return [call.is_awaited for call in calls]


def in_virtual_time(story: Callable[[Turns], Coroutine[Any, Any, None]]) -> None:
    loop = VirtualLoop()
    try:
        turns = Turns(Receiving(config.load(environment={}, overrides=list(TWO_TURNS))))
        loop.run_until_complete(story(turns))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
    finally:
        loop.close()


def test_a_call_that_finds_no_turn_is_not_read_until_a_message_is_whole() -> None:
    async def story(turns: Turns) -> None:
        calls = await turns.begun("a", "a", "b", "b")
        assert awaited(calls) == [True, True, False, False]
        calls[1].message.set_result(b"")
        await turns.settled()
        assert awaited(calls) == [True, True, True, False]

    in_virtual_time(story)


def test_the_next_turn_goes_to_the_caller_with_the_fewest() -> None:
    async def story(turns: Turns) -> None:
        calls = await turns.begun("greedy", "greedy", "greedy", "greedy", "modest")
        calls[0].message.set_result(b"")
        await turns.settled()
        assert awaited(calls) == [True, True, False, False, True]

    in_virtual_time(story)


def test_a_call_that_left_while_it_waited_takes_no_turn() -> None:
    async def story(turns: Turns) -> None:
        calls = await turns.begun("a", "a", "b", "c")
        assert calls[2].task is not None
        calls[2].task.cancel()
        await turns.settled()
        calls[0].message.set_result(b"")
        await turns.settled()
        assert awaited(calls) == [True, True, False, True]

    in_virtual_time(story)


def test_a_message_that_stalls_ends_its_call_after_its_time() -> None:
    async def story(turns: Turns) -> None:
        (call,) = await turns.begun("a")
        await asyncio.sleep(ARRIVAL_S - 1)
        assert call.ended is None
        await asyncio.sleep(2)
        assert isinstance(call.ended, errors.Unavailable)
        assert str(call.ended) == "no whole message arrived within 30 s; nothing was changed"

    in_virtual_time(story)


def test_while_others_wait_stalled_messages_of_the_caller_with_the_most_turns_end_first() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving = Receiving(
            config.load(environment={}, overrides=["grpc.received_bytes_max=12582912", TWO_TURNS[1]])
        )
        held = await turns.begun("modest", "greedy", "greedy")
        await asyncio.sleep(5)
        assert not any(call.is_ending for call in held)
        (late,) = await turns.begun("modest")
        assert not late.is_awaited
        await asyncio.sleep(2 * receiving.SWEEP_S)
        assert late.is_awaited
        assert [call.is_ending for call in held] == [False, True, False]
        refused = held[1].ended
        assert isinstance(refused, errors.QuotaExceeded)
        assert refused.retry_after_ms == receiving.RETRY_MS
        assert "grpc.received_bytes_max" in str(refused)

    in_virtual_time(story)


def test_too_many_waiting_calls_are_refused() -> None:
    async def story(turns: Turns) -> None:
        *_, last, refused = await turns.begun(*["a"] * (2 + 64 + 1))
        assert last.task is not None
        assert not last.task.done()
        assert refused.task is not None
        with pytest.raises(errors.QuotaExceeded, match=r"grpc\.received_bytes_max limits them"):
            await refused.task

    in_virtual_time(story)


def test_nothing_is_received_while_half_the_budget_is_not_decided() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving.received(4 << 20)
        (call,) = await turns.begun("a")
        room = asyncio.create_task(turns.receiving.room())
        await turns.settled()
        assert not call.is_awaited
        assert not room.done()
        turns.receiving.decided(1)
        await turns.settled()
        assert call.is_awaited
        assert room.done()

    in_virtual_time(story)


def test_calls_that_wait_take_no_turn_while_there_is_no_room() -> None:
    async def story(turns: Turns) -> None:
        calls = await turns.begun(*["a"] * 6)
        for call in calls[:2]:
            call.message.set_result(bytes(2 << 20))
        await turns.settled()
        # The first was not too much yet.
        assert awaited(calls) == [True, True, True, False, False, False]
        calls[2].message.set_result(bytes(1 << 20))
        await turns.settled()
        assert awaited(calls)[3:] == [False, False, False]
        turns.receiving.decided(2 << 20)
        await turns.settled()
        assert awaited(calls)[3:] == [True, True, False]

    in_virtual_time(story)


def test_what_needs_no_room_goes_first_while_there_is_none() -> None:
    async def story(turns: Turns) -> None:
        held = await turns.begun("a", "a")
        waiting = await turns.begun("a", "b")
        (health,) = await turns.begun("c", needs_room=False)
        turns.receiving.received(4 << 20)
        held[0].message.set_result(b"")
        await turns.settled()
        assert awaited([*waiting, health]) == [False, False, True]
        held[1].message.set_result(b"")
        health.message.set_result(b"")
        (health,) = await turns.begun("c", needs_room=False)
        assert awaited([*waiting, health]) == [False, False, True]

    in_virtual_time(story)


def test_a_call_that_finds_no_room_in_its_time_is_refused() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving.received(4 << 20)
        (call,) = await turns.begun("a")
        assert call.task is not None
        await asyncio.sleep(ARRIVAL_S - 1)
        assert not call.task.done()
        await asyncio.sleep(2)
        with pytest.raises(
            errors.QuotaExceeded, match=r"was not received within 30 s: .* grpc\.received_bytes_max"
        ) as refused:
            await call.task
        assert refused.value.retry_after_ms == receiving.RETRY_MS
        assert not call.is_awaited
        turns.receiving.decided(4 << 20)
        (call,) = await turns.begun("a")
        assert call.is_awaited

    in_virtual_time(story)


def test_too_many_calls_that_wait_for_room_are_refused() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving.received(4 << 20)
        *waiting, refused = await turns.begun(*["a"] * (64 + 1))
        assert not any(call.task is None or call.task.done() for call in waiting)
        assert refused.task is not None
        with pytest.raises(errors.QuotaExceeded, match=r"^64 requests wait .* grpc\.received_bytes_max limits them"):
            await refused.task
        (health,) = await turns.begun("a", needs_room=False)
        assert health.is_awaited

    in_virtual_time(story)


def test_slow_messages_do_not_end_for_calls_that_wait_for_room() -> None:
    async def story(turns: Turns) -> None:
        held = await turns.begun("a", "a")
        turns.receiving.received(4 << 20)
        await turns.begun("b")
        await asyncio.sleep(4 * receiving.SWEEP_S)
        assert not any(call.is_ending for call in held)
        turns.receiving.decided(4 << 20)
        await asyncio.sleep(receiving.SWEEP_S)
        assert [call.is_ending for call in held] == [True, False]

    in_virtual_time(story)


def test_requests_that_wait_for_their_lane_never_keep_the_others_out() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving.queued(64 << 20)
        assert turns.receiving.queues_are_full
        (call,) = await turns.begun("a")
        assert call.is_awaited
        turns.receiving.received(2 << 20)
        (late,) = await turns.begun("a")
        assert not late.is_awaited
        turns.receiving.dequeued(64 << 20)
        await turns.settled()
        assert late.is_awaited

    in_virtual_time(story)


def test_what_is_decided_at_once_needs_no_room() -> None:
    async def story(turns: Turns) -> None:
        turns.receiving.received(4 << 20)
        call = Call("a")
        call.task = asyncio.create_task(turns.receiving.in_turn(call, call.read, needs_room=False))
        await turns.settled()
        assert call.is_awaited

    in_virtual_time(story)


class Leaving(Call):
    """A call that has left: gRPC must not be asked for its caller."""

    def __getattribute__(self, name: str) -> Any:
        if name == "caller" and super().__getattribute__("is_ending"):
            raise AssertionError("a call that is over was asked for its caller")
        return super().__getattribute__(name)


def test_a_call_is_asked_for_its_caller_only_while_it_is_open() -> None:
    async def story(turns: Turns) -> None:
        calls = [Leaving(caller) for caller in ("a", "a", "b", "c")]
        for call in calls:
            call.task = asyncio.create_task(turns.receiving.in_turn(call, call.read))
        await turns.settled()
        for call in calls[1:3]:
            call.ended = errors.Unavailable("gone")
        calls[0].message.set_result(b"")
        await asyncio.sleep(2 * receiving.SWEEP_S)
        assert all(call.task is not None and (call is calls[0] or not call.task.done()) for call in calls)
        assert awaited(list(calls)) == [True, True, True, False]

    in_virtual_time(story)


def test_many_waiting_calls_cost_each_turn_little() -> None:
    """Each is asked once for its caller, not at each turn of others."""
    asked = 0

    class Counted(Call):
        def __getattribute__(self, name: str) -> Any:
            nonlocal asked
            asked += name == "caller"
            return super().__getattribute__(name)

    async def story(turns: Turns) -> None:
        calls = [Counted("a") for _ in range(2 + 64)]
        for call in calls:
            call.message.set_result(b"")
        await asyncio.gather(*(turns.receiving.in_turn(call, call.read) for call in calls))
        assert asked == len(calls)

    in_virtual_time(story)


@pytest.mark.parametrize("is_whole", [True, False])
def test_memory_is_given_back_when_large_messages_were_received_or_broke_off(is_whole: bool) -> None:
    given_back: list[float] = []

    async def story(turns: Turns) -> None:
        loop = asyncio.get_running_loop()
        turns.receiving = Receiving(
            config.load(environment={}, overrides=list(TWO_TURNS)), lambda: given_back.append(loop.time())
        )
        for _ in range(receiving.GIVE_BACK_BYTES // receiving.LARGE_BYTES):
            (call,) = await turns.begun("a")
            if is_whole:
                call.message.set_result(b"")
                turns.receiving.received(receiving.LARGE_BYTES)
                turns.receiving.decided(receiving.LARGE_BYTES)
            else:
                call.end(errors.Unavailable("gone"))
            await turns.settled()
        assert given_back == []
        await asyncio.sleep(1)
        assert len(given_back) == 1

    in_virtual_time(story)


def test_a_request_of_several_messages_is_one_of_its_kind_and_has_to_come_in_time() -> None:
    async def story(turns: Turns) -> None:
        begun: list[str] = []

        async def long(name: str) -> None:
            async with turns.receiving.long_request("open"):
                begun.append(name)
                await asyncio.Event().wait()

        first, second = asyncio.create_task(long("first")), asyncio.create_task(long("second"))
        await asyncio.sleep(ARRIVAL_S - 1)
        assert begun == ["first"]
        await asyncio.sleep(2)
        assert begun == ["first", "second"]
        with pytest.raises(errors.Unavailable, match="open was not whole within 30 s"):
            await first
        second.cancel()

    in_virtual_time(story)


class Whole:
    """gRPC's context of a call whose request is there."""

    auth_context = time_remaining = None

    def __init__(self, request: object) -> None:
        self._request = request

    async def read(self) -> object:
        return self._request

    async def write(self, _: bytes) -> None:
        """It is read at once."""

    async def abort(self, *_: object) -> None:
        raise grpc.aio.AbortError

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


@pytest.mark.parametrize("end", ["answered", "streamed", "refused", "left", "left, and it continues", "missing"])
def test_each_end_of_a_call_gives_back_what_it_took(end: str) -> None:
    work: list[asyncio.Future[bytes]] = []

    async def serve(_: bytes, call: Any) -> bytes:
        assert free() == -(4 << 20)
        if end == "refused":
            raise errors.InvalidArgument("so")
        if end == "streamed":
            await call.write(b"")
            assert free() == 0
        elif end == "left":
            await asyncio.Event().wait()
        elif end == "left, and it continues":
            work.append(asyncio.get_running_loop().create_future())
            return await unary.unbroken(work[0], call)
        return b""

    received: list[Receiving] = []

    def free() -> int:
        return received[0].free_bytes - FREE_BYTES

    async def story(turns: Turns) -> None:
        received.append(turns.receiving)
        settings = config.load(environment={}, overrides=[])
        gate = admission.Admission(
            Door(settings.tls, settings.access), AuditLog(settings.access), lambda _: None, turns.receiving
        )
        add = pb.DESCRIPTOR.services_by_name["DelayedDelivery"].methods_by_name["AddMessages"]
        guarded = gate.guarded(add, grpc.unary_unary_rpc_method_handler(serve))
        request = grpc.aio.EOF if end == "missing" else bytes(4 << 20)
        served = asyncio.ensure_future(guarded.stream_unary(None, Whole(request)))
        await turns.settled()
        if "left" in end:
            served.cancel()
        await asyncio.wait([served])
        if work:
            assert free() == -(4 << 20)
            work[0].set_result(b"")
            await turns.settled()
        assert free() == 0
        (call,) = await turns.begun("a")
        assert call.is_awaited

    in_virtual_time(story)


# The bytes before they are parsed.


class Unparsed:
    """A message that must not be parsed."""

    DESCRIPTOR = pb.CancelMessagesRequest.DESCRIPTOR

    @staticmethod
    def FromString(data: bytes) -> object:
        raise AssertionError(f"{len(data)} bytes were parsed")


@pytest.mark.parametrize("column", ["entry_id", "ledger_id"])
def test_too_many_rows_are_refused_before_they_are_parsed(column: str) -> None:
    rows: Any = {column: range(11)}
    data = pb.CancelMessagesRequest(topic="t", **rows).SerializeToString()
    unparsed: Any = Unparsed
    with pytest.raises(errors.InvalidArgument, match=f"^{column} has 11 rows; a request must have 1 to 10$"):
        parsing.parse(unparsed, data, parsing.Bounds(1_000, 10))
    with pytest.raises(AssertionError):
        parsing.parse(unparsed, data, parsing.Bounds(1_000, 11))


def test_what_is_too_large_is_refused_with_the_setting_to_raise() -> None:
    with pytest.raises(errors.InvalidArgument, match=r"11 bytes, the limit is 10; .* limits\.message_bytes_max"):
        parsing.parse(pb.CancelMessagesRequest, bytes(11), parsing.Bounds(10, 10))


# The edge: calls whose message does not come. gRPC cannot tell them from calls with a stream of requests.


async def never() -> Any:
    await asyncio.Event().wait()
    yield b""


async def outcome(edge: Edge, call: str, **named: Any) -> grpc.StatusCode:
    method: Any = edge.caller.channel.stream_unary(f"/{call}")
    try:
        await method(never(), timeout=60, **named)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("call", ["tarry.v1.DelayedDelivery/AddMessages", "grpc.health.v1.Health/Check"])
async def test_a_request_that_does_not_come_ends_its_call(engine: Engine, call: str) -> None:
    soon = config.load(environment={}, overrides=[*OVERRIDES, "grpc.request_arrival_s=1"])
    async with serving(engine, soon) as edge:
        assert await outcome(edge, call) is grpc.StatusCode.UNAVAILABLE


async def test_a_caller_that_watches_health_takes_no_part_of_the_budget(engine: Engine) -> None:
    small = config.load(environment={}, overrides=[*OVERRIDES, "grpc.received_bytes_max=1048576"])
    async with serving(engine, small) as edge:
        watch: Any = edge.caller.channel.unary_stream("/grpc.health.v1.Health/Watch")
        service = health_pb2.HealthCheckRequest(service="x" * 4_000).SerializeToString()
        watches = []
        for _ in range((512 << 10) // 4_000 + 1):
            watches.append(watch(service))
            # One after the other: few may wait for their turn.
            await watches[-1].read()
        await edge.caller.unary("DelayedDelivery/AddMessages", ADD, timeout_s=5)
        for each in watches:
            each.cancel()


async def test_a_lease_that_waits_takes_no_part_of_the_budget(engine: Engine) -> None:
    small = config.load(environment={}, overrides=[*OVERRIDES, "grpc.received_bytes_max=1048576"])
    async with serving(engine, small) as edge:
        await edge.caller.unary(
            "Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription="s")
        )
        lease = dispatch_pb2.GetScheduledMessagesRequest(topic="t", subscription="s", max_rows=1, wait_ms=60_000)
        # A field that nobody knows
        padded = lease.SerializeToString() + nested(b"\xfa\x7f", bytes(16_000))
        padded_too_much = padded + nested(b"\xfa\x7f", bytes(1_000))
        with pytest.raises(grpc.aio.AioRpcError, match=r"message: 17\d\d\d bytes, the limit of this call is 16384"):
            await edge.caller.unary("Dispatch/GetScheduledMessages", padded_too_much)
        waiting = [asyncio.ensure_future(edge.caller.unary("Dispatch/GetScheduledMessages", padded)) for _ in range(33)]
        await asyncio.sleep(0.2)
        await edge.caller.unary("DelayedDelivery/AddMessages", ADD, timeout_s=5)
        for each in waiting:
            each.cancel()


async def test_a_stream_of_who_may_use_every_topic_may_be_silent(engine: Engine) -> None:
    soon = config.load(environment={}, overrides=[*OVERRIDES, "grpc.request_arrival_s=1"])
    async with serving(engine, soon) as edge:
        stream = edge.caller.stream("DelayedDelivery/StreamAddMessages")
        await asyncio.sleep(1.5)
        add = pb.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1], delay_ms=[60_000])
        await stream.send(pb.StreamAddMessagesRequest(request_id=7, add=add))
        assert (await stream.receive()).request_id == 7


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("refused_for", ["rows", "name", "text"])
async def test_a_refused_request_is_kept_by_nobody(
    engine: Engine, settings: config.Config, kind: str, refused_for: str
) -> None:
    """Not even until the next collection of cycles, which large requests do not bring nearer."""
    add = pb.AddMessagesRequest(
        topic="x" * 1025 if refused_for == "name" else "t",
        ledger_id=[1],
        entry_id=range(1001 if refused_for == "rows" else 1000),
        delay_ms=[60_000],
    ).SerializeToString()
    if refused_for == "text":
        add += nested(tag_bytes(pb.AddMessagesRequest)["topic"], b"\xff")
    streamed = pb.StreamAddMessagesRequest(request_id=1).SerializeToString()
    streamed += nested(tag_bytes(pb.StreamAddMessagesRequest)["add"], add)
    async with serving(engine, settings) as edge:
        gc.collect()
        gc.disable()
        try:
            if kind == "unary":
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await edge.caller.unary("DelayedDelivery/AddMessages", add)
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            else:
                stream = edge.caller.stream("DelayedDelivery/StreamAddMessages")
                await stream.send(streamed)
                assert (await stream.receive()).error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
                await stream.end()
            await asyncio.sleep(0.05)
            frames = [each for each in gc.get_objects() if isinstance(each, types.FrameType)]
            held = [frame.f_code.co_qualname for frame in frames if _has_large_bytes(frame)]
        finally:
            gc.enable()
    assert held == []


def _has_large_bytes(frame: types.FrameType) -> bool:
    """A frame of the daemon that has a request of these tests."""
    if "/daemon/grpc_services/" not in frame.f_code.co_filename or "/tests/" in frame.f_code.co_filename:
        return False
    return any(isinstance(value, bytes) and len(value) > 7_000 for value in frame.f_locals.values())
