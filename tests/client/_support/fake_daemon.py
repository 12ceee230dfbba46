"""A daemon that does what the test says: real gRPC on a free port of loopback, behaviour scripted call by call.

Owns: serving, recording what came, answering from the script. Fault model: a call may be refused with any status and
metadata, a stream may be dropped after any answer, a request may be left unanswered, and epochs may go back.
Does not own: any rule of the product; it stores nothing.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor, message_factory
from google.rpc import error_details_pb2, status_pb2

import tarry
from tarry import attempts
from tarry.v1 import (
    admin_pb2,
    cluster_pb2,
    delayed_delivery_pb2,
    dispatch_pb2,
    inspect_pb2,
    ledger_deletion_pb2,
)
from tests.client._support import fake_lanes

WAIT_S = 300.0
OF_TODAY = cluster_pb2.GetVersionResponse(
    version="1",
    api=1,
    feature=[attempts.HANDOUT_NAMES, attempts.ON_INVALID, attempts.RETENTION, attempts.SUBSCRIBE_MANY],
)
"""What a daemon says that can do everything."""
OF_LATELY = cluster_pb2.GetVersionResponse(
    version="1", api=1, feature=[attempts.HANDOUT_NAMES, attempts.ON_INVALID, attempts.RETENTION]
)
"""What a daemon says that wants a stream for each subscription."""
OF_YESTERDAY = cluster_pb2.GetVersionResponse(version="1", api=1, feature=[attempts.HANDOUT_NAMES])
"""What a daemon says that knows the names of hand-outs alone."""
LISTENED_TO = inspect_pb2.ListSubscriptionsResponse(subscriptions=[inspect_pb2.SubscriptionStats(subscription="s")])
"""What a topic has in a test that is not about it."""
_FILES = (admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2, ledger_deletion_pb2)

Unary: TypeAlias = Callable[[Any, grpc.ServicerContext], Any]
"""(request, context) -> response"""
Streaming: TypeAlias = Callable[["Requests", grpc.ServicerContext], Iterator[Any]]
"""(requests, context) -> responses; returning drops the stream"""


class Requests:
    """What comes on one stream."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.taken: list[Any] = []

    def take(self) -> Any:
        """The next request; StopIteration when the client has closed."""
        request = next(self._iterator)
        self.taken.append(request)
        return request

    def __iter__(self) -> Iterator[Any]:
        for request in self._iterator:
            self.taken.append(request)
            yield request


class FakeDaemon:
    """Each call takes the next step of its method's script; the last step is repeated. `credentials`: of TLS."""

    def __init__(self, address: str = "127.0.0.1:0", credentials: grpc.ServerCredentials | None = None) -> None:
        self._scripts: dict[str, list[Callable[..., Any]]] = {
            "GetVersion": [answer(OF_TODAY)],
            "ListSubscriptions": [answer(LISTENED_TO)],
        }
        self._lock = threading.Lock()
        self.calls: list[tuple[str, Any]] = []
        self.client_ids: list[tuple[str, str | None]] = []
        """Method and `tarry-client-id` of each call."""
        self.shown: list[tuple[str, str | None, str | None]] = []
        """Method, `authorization` and the name in the client's certificate of each call."""
        self.shared_streams = 0
        """How many streams of lanes there were."""
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=16), options=[("grpc.so_reuseport", 0)])
        for file in _FILES:
            for service in file.DESCRIPTOR.services_by_name.values():
                handlers = {method.name: self._handler(method) for method in service.methods}
                self._server.add_registered_method_handlers(service.full_name, handlers)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.address = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self._server.start()

    def script(self, method: str, *steps: Callable[..., Any]) -> None:
        self._scripts[method] = list(steps)

    def count(self, method: str) -> int:
        return sum(name == method for name, _ in self.calls)

    def requests(self, method: str) -> list[Any]:
        """Requests of unary calls, `Requests` of streams."""
        return [request for name, request in self.calls if name == method]

    def stop(self) -> None:
        self._server.stop(0).wait(WAIT_S)

    def _step(self, method: str, request: Any) -> Callable[..., Any]:
        with self._lock:
            self.calls.append((method, request))
            steps = self._scripts[method]
            return steps.pop(0) if len(steps) > 1 else steps[0]

    def _handler(self, method: descriptor.MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
        read = message_factory.GetMessageClass(method.input_type).FromString
        write = message_factory.GetMessageClass(method.output_type).SerializeToString
        if method.name == "SubscribeMany":
            return grpc.stream_stream_rpc_method_handler(self._lanes, read, write)
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(functools.partial(self._stream, method.name), read, write)
        if method.server_streaming:
            return grpc.unary_stream_rpc_method_handler(functools.partial(self._unary, method.name), read, write)
        return grpc.unary_unary_rpc_method_handler(functools.partial(self._unary, method.name), read, write)

    def _unary(self, method: str, request: Any, context: grpc.ServicerContext) -> Any:
        self._note_client(method, context)
        return self._step(method, request)(request, context)

    def _stream(self, method: str, iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        requests = Requests(iterator)
        self._note_client(method, context)
        yield from _until_gone(self._step(method, requests), requests, context)

    def _lanes(self, iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        """Each lane is a call of `Subscribe`, and takes the next step of its script. Each step of `SubscribeMany` is a
        stream that does something else.
        """
        self.shared_streams += 1
        if steps := self._scripts.get("SubscribeMany"):
            yield from steps.pop(0)(Requests(iterator), context)
        else:
            yield from fake_lanes.served(iterator, context, self._lane)

    def _lane(self, iterator: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        yield from self._stream("Subscribe", iterator, context)

    def _note_client(self, method: str, context: grpc.ServicerContext) -> None:
        metadata = {str(key): str(value) for key, value in context.invocation_metadata()}
        self.client_ids.append((method, metadata.get("tarry-client-id")))
        names: Sequence[bytes] = context.auth_context().get("x509_common_name", ())  # type: ignore[assignment]
        self.shown.append((method, metadata.get("authorization"), names[0].decode() if names else None))


def _until_gone(step: Streaming, requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    try:
        yield from step(requests, context)
    except (StopIteration, RuntimeError) as ended:
        # The client is gone: `take` has nothing more to give.
        if isinstance(ended, RuntimeError) and not isinstance(ended.__cause__, StopIteration):
            raise
    except grpc.RpcError:
        # The request iterator of a cancelled call.
        return


def refuse(
    code: grpc.StatusCode, message: str = "refused by the script", **hints: str
) -> Callable[[Any, grpc.ServicerContext], NoReturn]:
    """A step that ends the call; hints become trailing metadata, `retry_after_ms` as `retry-after-ms`."""

    def step(_: Any, context: grpc.ServicerContext) -> NoReturn:
        context.set_trailing_metadata(tuple((key.replace("_", "-"), value) for key, value in hints.items()))
        context.abort(code, message)
        raise AssertionError("abort raises")

    return step


def answer(response: Any) -> Unary:
    """A step that answers."""
    return lambda request, context: response


def accept(request: Any, context: grpc.ServicerContext) -> delayed_delivery_pb2.AddMessagesResponse:
    """Every row is accepted."""
    return delayed_delivery_pb2.AddMessagesResponse(accepted=len(request.entry_id))


def added(request: Any) -> delayed_delivery_pb2.StreamAddMessagesResponse:
    response = delayed_delivery_pb2.AddMessagesResponse(accepted=len(request.add.entry_id))
    return delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, added=response)


def refused(request: Any, refusal: status_pb2.Status) -> delayed_delivery_pb2.StreamAddMessagesResponse:
    return delayed_delivery_pb2.StreamAddMessagesResponse(request_id=request.request_id, error=refusal)


def accept_all(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
    """Every request of the stream is accepted."""
    for request in requests:
        yield added(request)


def status(code: int, message: str = "refused by the script", **hints: str) -> status_pb2.Status:
    """A refusal in band, its hints in an ErrorInfo."""
    refusal = status_pb2.Status(code=code, message=message)
    refusal.details.add().Pack(error_details_pb2.ErrorInfo(reason="SCRIPT", domain="tarry.v1", metadata=hints))
    return refusal


def opened(epoch: int = 1, held: int = 0, not_held: list[int] | None = None) -> dispatch_pb2.SubscribeResponse:
    return dispatch_pb2.SubscribeResponse(opened=dispatch_pb2.Opened(epoch=epoch, held=held, not_held=not_held))


def messages(
    entries: range | list[int],
    *,
    epoch: int = 1,
    ledger: int = 7,
    redelivery_count: list[int] | None = None,
    batch_index: list[int] | None = None,
    consumer_id: list[int] | None = None,
    key_hash: list[int] | None = None,
) -> dispatch_pb2.SubscribeResponse:
    """Positions of one ledger; entry n is due at 1000 + n."""
    return dispatch_pb2.SubscribeResponse(
        messages=dispatch_pb2.Messages(
            epoch=epoch,
            ledger_id=[ledger] * len(entries),
            entry_id=list(entries),
            deliver_at_ms=[1000 + entry for entry in entries],
            redelivery_count=redelivery_count,
            batch_index=batch_index,
            consumer_id=consumer_id,
            key_hash=key_hash,
        )
    )


def planned(request: Any, consumer_id: list[int], *, epoch: int = 1) -> dispatch_pb2.SubscribeResponse:
    """The answer to a plan."""
    answer = dispatch_pb2.Planned(request_id=request.plan_dispatch.request_id, epoch=epoch, consumer_id=consumer_id)
    return dispatch_pb2.SubscribeResponse(planned=answer)


def taken_back(entries: list[int], consumer_id: list[int], *, epoch: int = 1) -> dispatch_pb2.SubscribeResponse:
    """Positions as `messages` sends them."""
    answer = dispatch_pb2.TakenBack(
        epoch=epoch,
        ledger_id=[7] * len(entries),
        entry_id=entries,
        deliver_at_ms=[1000 + entry for entry in entries],
        consumer_id=consumer_id,
    )
    return dispatch_pb2.SubscribeResponse(taken_back=answer)


TO_BE_CONFIRMED = ("acknowledge", "negative_acknowledge", "extend")


def done(request: Any, *, epoch: int = 1, ignored: int = 0, dead_lettered: int = 0) -> dispatch_pb2.SubscribeResponse:
    """The answer to any request that has an id."""
    request_id = getattr(request, request.WhichOneof("request")).request_id
    answer = dispatch_pb2.Done(request_id=request_id, epoch=epoch, ignored=ignored, dead_lettered=dead_lettered)
    return dispatch_pb2.SubscribeResponse(done=answer)


def moved(owner_address: str) -> dispatch_pb2.SubscribeResponse:
    return dispatch_pb2.SubscribeResponse(moved=dispatch_pb2.Moved(owner_address=owner_address))


def take(requests: Requests, kind: str) -> Any:
    """The next request of a kind, by its field; others before it are skipped."""
    while True:
        request = requests.take()
        if request.WhichOneof("request") == kind:
            return request


async def receive(subscription: tarry.aio.Subscription, **named: Any) -> tarry.Batch:
    """The next batch; `named`: of `Subscription.receive`."""
    received = await subscription.receive(WAIT_S, **named)
    assert received is not None
    return received


def held_of(request: Any) -> list[tuple[int, ...]]:
    """Held positions; with batch indexes where they were sent."""
    opening = request.open
    columns = [opening.held_ledger_id, opening.held_entry_id, opening.held_deliver_at_ms]
    if opening.held_batch_index:
        columns.append(opening.held_batch_index)
    return list(zip(*columns, strict=True))


def confirm_all(requests: Requests, *, epoch: int = 1) -> Iterator[Any]:
    for request in requests:
        kind = request.WhichOneof("request")
        if kind in TO_BE_CONFIRMED and getattr(request, kind).request_id:
            yield done(request, epoch=epoch)


def one_batch(entries: range, *, epoch: int = 1, break_with: grpc.StatusCode | None = None) -> Streaming:
    """Opens, sends the entries when permits come; confirms every acknowledgement, or breaks at the first one."""

    def step(requests: Requests, context: grpc.ServicerContext) -> Iterator[Any]:
        take(requests, "open")
        yield opened(epoch)
        sent = False
        for request in requests:
            if request.HasField("flow") and not sent:
                yield messages(entries, epoch=epoch)
                sent = True
            if request.HasField("acknowledge"):
                if break_with is not None:
                    context.abort(break_with, "going down")
                yield done(request, epoch=epoch)

    return step


def hold(requests: Requests) -> None:
    """Leaves the stream open, and every request unanswered, until the client closes."""
    for _ in requests:
        pass


class Gate:
    """Lets a test and a step wait for each other; a wait that lasts too long fails the test."""

    def __init__(self) -> None:
        self._passed: queue.Queue[Any] = queue.Queue()

    def open(self, value: Any = None) -> None:
        self._passed.put(value)

    def wait(self) -> Any:
        return self._passed.get(timeout=WAIT_S)

    async def passed(self) -> Any:
        """`wait`, for a coroutine."""
        return await asyncio.to_thread(self.wait)
