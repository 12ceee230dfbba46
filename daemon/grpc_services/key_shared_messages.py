"""Requests and answers that only KEY_SHARED streams have.

Owns: consumers as the contract writes them, and which call of the engine each of these requests is.
Does not own: streams (`subscribe`), the form of columns (`wire_columns`), and what the requests do (engine).
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import TYPE_CHECKING

from daemon import call_values, errors
from daemon.grpc_services import wire_columns
from tarry.v1 import dispatch_pb2 as pb

if TYPE_CHECKING:
    from daemon.topic.key_shared_stream import KeySharedStream, Outgoing


def require_none(request: pb.Open) -> None:
    """A SHARED stream has no consumers. Raises `InvalidArgument`."""
    for name in ("consumers", "held_consumer_id", "held_key_hash"):
        if given := len(getattr(request, name)):
            raise errors.InvalidArgument(f"{name}: {given} values; a SHARED stream has none")


def consumer(given: pb.Consumer) -> call_values.Consumer:
    return call_values.Consumer(
        consumer_id=given.consumer_id,
        name=given.name,
        address=given.address,
        permits=given.permits,
        hash_ranges=tuple(call_values.HashRange(each.first, each.last) for each in given.hash_ranges),
    )


def plan(stream: KeySharedStream, request: pb.PlanDispatch) -> Awaitable[None]:
    """Answered by `Planned`, in order with what else goes out. Raises `InvalidArgument`."""
    if not request.request_id:
        raise errors.InvalidArgument("request_id: 0; it must be at least 1, since Planned answers by it")
    return stream.plan(request.request_id, *wire_columns.planned(request))


def change(stream: KeySharedStream, request: pb.SubscribeRequest) -> Awaitable[call_values.Ignored]:
    """The others, answered by `Done`. Raises `InvalidArgument`.

    A consumer has joined, or left, when this returns: what the caller sent next finds it so.
    """
    match request.WhichOneof("request"):
        case "add_consumer":
            if not request.add_consumer.HasField("consumer"):
                raise errors.InvalidArgument("consumer: it is missing; say who joins")
            stream.add_consumer(consumer(request.add_consumer.consumer))
        case "remove_consumer":
            return _none_ignored(stream.remove_consumer(request.remove_consumer.consumer_id))
        case "mark_delete":
            mark = request.mark_delete
            return _none_ignored(stream.mark_delete(mark.ledger_id, mark.entry_id))
    return _none_ignored()


async def _none_ignored(done: Awaitable[None] | None = None) -> call_values.Ignored:
    if done is not None:
        await done
    return call_values.Ignored.nothing()


def responses(outgoing: Outgoing) -> Iterator[bytes]:
    """What goes out next, encoded."""
    match outgoing:
        case call_values.HandedOut():
            yield from wire_columns.subscribe_responses(outgoing)
        case call_values.Planned():
            yield wire_columns.planned_response(outgoing)
        case call_values.TakenBack():
            yield from wire_columns.taken_back_responses(outgoing)
