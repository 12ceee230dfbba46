"""Calls of `LedgerDeletion`, for its tests: what is recorded, and what is to be seen of it.

Does not own: bad requests (`bad_deletions`) and the tests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import message

from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, Guard, Step
from daemon.ledger_stores.ledger_stores import LedgerStores, no_step
from storage_backends.formats.deletion_format import DeletionOutcome, PendingDelete
from tarry.v1 import ledger_deletion_pb2 as pb
from tests.daemon.grpc_services._support import bad_deletions as bad
from tests.daemon.grpc_services._support.bad_calls import changed
from tests.daemon.grpc_services._support.bad_requests import Case
from tests.daemon.grpc_services.conftest import Edge

TOPIC = "persistent://tenant/space/orders"
OTHER = "persistent://tenant/space/bills"


class Stores(LedgerStores):
    """Where ledgers are: `answers` by ledger; every other attempt lasts until `go` is set, and then has deleted."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[int, Answer | DeletionFailed] = {}
        self.go = threading.Event()

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step = no_step) -> Answer:
        answer = self.answers.get(delete.ledger_id)
        if isinstance(answer, DeletionFailed):
            raise answer
        if answer is None and not self.go.wait(300):
            raise TimeoutError
        return answer or Answer(DeletionOutcome.DELETED)


def ledgers(ids: Iterable[int], good: message.Message = bad.LEDGER) -> list[Any]:
    return [changed(good, ledger_id=ledger_id) for ledger_id in ids]


async def record(edge: Edge, deletes: Iterable[message.Message], topic: str = TOPIC) -> pb.RecordPendingDeletesResponse:
    request = pb.RecordPendingDeletesRequest(topic=topic)
    for each in deletes:
        request.deletes.add().MergeFrom(each)  # type: ignore[arg-type]
    answer: pb.RecordPendingDeletesResponse = await edge.caller.unary(bad.RECORD, request)
    return answer


async def listed(edge: Edge, method: str, **fields: Any) -> Any:
    requests: dict[str, Any] = {
        bad.LIST_PENDING: pb.ListPendingDeletesRequest,
        bad.LIST_DEAD: pb.ListDeadDeletesRequest,
        bad.LIST_ENDED: pb.ListEndedDeletesRequest,
    }
    return await edge.caller.unary(method, requests[method](**fields))


async def until(edge: Edge, method: str, count: int, **filtered: Any) -> list[pb.Deletion]:
    """The list, when it has so many."""
    async with asyncio.timeout(300):
        while True:
            answer = await listed(edge, method, filter=pb.DeletionFilter(**filtered))
            if len(answer.deletions) == count:
                return list(answer.deletions)


async def stats(edge: Edge, topic: str = "") -> pb.GetDeletionStatsResponse:
    answer: pb.GetDeletionStatsResponse = await edge.caller.unary(bad.STATS, pb.GetDeletionStatsRequest(topic=topic))
    answer.ClearField("as_of_ms")
    return answer


async def state(edge: Edge) -> list[Any]:
    """Everything that can be seen, but the time of asking."""
    lists = [await listed(edge, method) for method in (bad.LIST_PENDING, bad.LIST_DEAD, bad.LIST_ENDED)]
    for answer in lists:
        answer.ClearField("as_of_ms")
    return [*lists, await stats(edge)]


async def faults(edge: Edge, case: Case) -> list[str]:
    """What is wrong with the refusal."""
    call = edge.caller.answers if case.method == bad.SWEEP else edge.caller.unary
    try:
        await call(case.method, case.request)
    except grpc.aio.AioRpcError as refused:
        said = refused.details() or ""
        missing = [part for part in case.says if part not in said]
        if refused.code() is not case.code or missing:
            return [f"{case}: {refused.code()} {said!r} without {missing}"]
        return []
    return [f"{case}: it was accepted"]
