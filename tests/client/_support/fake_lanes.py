"""The daemon's side of `SubscribeMany`: each lane is served as a stream of its own, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeAlias, cast

import grpc
from google.rpc import error_details_pb2, status_pb2

from tarry.v1 import dispatch_pb2

Serve: TypeAlias = Callable[[Iterator[Any], grpc.ServicerContext], Iterator[Any]]
"""(requests, context) -> responses of one lane"""

_END = object()


class _Aborted(Exception):
    """A lane was ended with a status."""

    def __init__(self, status: status_pb2.Status) -> None:
        super().__init__(status.message)
        self.status = status


class _LaneContext:
    """What a step asks of its call."""

    def __init__(self, context: grpc.ServicerContext) -> None:
        self._context = context
        self._hints: dict[str, str] = {}

    def set_trailing_metadata(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._hints = {key.replace("-", "_"): value for key, value in metadata}

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        status = status_pb2.Status(code=code.value[0], message=details)
        status.details.add().Pack(error_details_pb2.ErrorInfo(reason="SCRIPT", domain="tarry.v1", metadata=self._hints))
        raise _Aborted(status)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def served(iterator: Iterator[Any], context: grpc.ServicerContext, serve: Serve) -> Iterator[Any]:
    """The answers of all lanes, until the client is gone and each lane has ended."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(iterator, context, serve, answers), daemon=True).start()
    while (answer := answers.get()) is not _END:
        yield dispatch_pb2.SubscribeManyResponse(responses=[answer])


def _read(
    iterator: Iterator[Any], context: grpc.ServicerContext, serve: Serve, answers: queue.SimpleQueue[Any]
) -> None:
    requests: dict[int, queue.SimpleQueue[Any]] = {}
    threads: list[threading.Thread] = []
    try:
        for message in iterator:
            for each in message.requests:
                if each.lane not in requests:
                    requests[each.lane] = queue.SimpleQueue()
                    of_lane = (each.lane, requests[each.lane], context, serve, answers)
                    threads.append(threading.Thread(target=_serve, args=of_lane, daemon=True))
                    threads[-1].start()
                if each.HasField("request"):
                    requests[each.lane].put(each.request)
                if each.close:
                    requests[each.lane].put(_END)
    except grpc.RpcError:
        # Of a call that was cancelled.
        pass
    for waiting in requests.values():
        waiting.put(_END)
    for thread in threads:
        thread.join()
    answers.put(_END)


def _serve(
    lane: int,
    requests: queue.SimpleQueue[Any],
    context: grpc.ServicerContext,
    serve: Serve,
    answers: queue.SimpleQueue[Any],
) -> None:
    status = status_pb2.Status()
    try:
        for response in serve(iter(requests.get, _END), cast(grpc.ServicerContext, _LaneContext(context))):
            answers.put(dispatch_pb2.LaneResponse(lane=lane, response=response))
    except _Aborted as aborted:
        status = aborted.status
    finally:
        answers.put(dispatch_pb2.LaneResponse(lane=lane, ended=status))
