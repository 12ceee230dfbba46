"""`tarry.v1.LedgerDeletion`: two-phase deletion of ledgers and offloaded objects of other systems (PIP-186).

Owns: the calls' requests and answers.
Does not own: their values on the wire (`deletion_messages`), page tokens (`page_tokens`), and what the calls do
(engine).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from daemon import config, errors
from daemon.core import limits
from daemon.core.deletions import checking
from daemon.core.deletions.listing import ListedState
from daemon.grpc_services import deletion_messages, page_tokens, records, unary
from daemon.grpc_services.admission import Context
from daemon.ledger_deletion import deletion_values
from tarry.v1 import ledger_deletion_pb2 as pb

if TYPE_CHECKING:
    from daemon.owner.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["LedgerDeletion"]

PAGE_SIZE_DEFAULT = 100
# A deletion takes 10 us to encode, on the loop.
PAGE_SIZE_MAX = 1_000
STORE_BYTES_MAX = 255
# As long as a key of S3.
PREFIX_BYTES_MAX = 1_024
# A deletion's shard and number.
_PLACE = struct.Struct("<QQ")

_ListRequest: TypeAlias = pb.ListPendingDeletesRequest | pb.ListDeadDeletesRequest | pb.ListEndedDeletesRequest
A = TypeVar("A", pb.ListPendingDeletesResponse, pb.ListDeadDeletesResponse, pb.ListEndedDeletesResponse)


class LedgerDeletion:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._requests = engine.deletion_requests
        self._frame = unary.Frame(settings)

    def handlers(self) -> dict[str, unary.Handler]:
        handler, cancelled_handler = self._frame.handler, self._frame.cancelled_handler
        return {
            "RecordPendingDeletes": handler(pb.RecordPendingDeletesRequest, self._record_pending_deletes),
            "RecordInUse": handler(pb.RecordInUseRequest, self._record_in_use),
            "ForgetInUse": handler(pb.ForgetInUseRequest, self._forget_in_use),
            "ListPendingDeletes": cancelled_handler(pb.ListPendingDeletesRequest, self._list_pending_deletes),
            "ListDeadDeletes": cancelled_handler(pb.ListDeadDeletesRequest, self._list_dead_deletes),
            "ListEndedDeletes": cancelled_handler(pb.ListEndedDeletesRequest, self._list_ended_deletes),
            "RetryDeadDeletes": handler(pb.RetryDeadDeletesRequest, self._retry_dead_deletes),
            "PurgeDeadDeletes": handler(pb.PurgeDeadDeletesRequest, self._purge_dead_deletes),
            "GetDeletionStats": cancelled_handler(pb.GetDeletionStatsRequest, self._deletion_stats),
            "SweepOrphans": self._frame.streaming_handler(pb.SweepOrphansRequest, self._sweep_orphans),
        }

    async def _record_pending_deletes(self, request: pb.RecordPendingDeletesRequest) -> pb.RecordPendingDeletesResponse:
        given = len(request.deletes)
        # Reading one takes 8 us, on the loop.
        if given > checking.DELETES_MAX:
            most = checking.DELETES_MAX
            raise errors.InvalidArgument(f"deletes has {given} records; a request must have 1 to {most}")
        deletes, problems = deletion_messages.pending_deletes(request.deletes)
        recorded = await self._requests.record_pending_deletes(request.topic, deletes, problems=problems)
        return records.as_message(
            pb.RecordPendingDeletesResponse, recorded, refused=map(deletion_messages.refused, recorded.refused)
        )

    async def _record_in_use(self, request: pb.RecordInUseRequest) -> pb.RecordInUseResponse:
        recorded = await self._requests.record_in_use(
            request.topic, deletion_messages.ledgers(request), replace=request.replace
        )
        return records.as_message(pb.RecordInUseResponse, recorded)

    async def _forget_in_use(self, request: pb.ForgetInUseRequest) -> pb.ForgetInUseResponse:
        forgotten = await self._requests.forget_in_use(request.topic, deletion_messages.ledgers(request))
        return pb.ForgetInUseResponse(forgotten=forgotten)

    async def _list_pending_deletes(
        self, request: pb.ListPendingDeletesRequest, _: Context
    ) -> pb.ListPendingDeletesResponse:
        of = page_tokens.List.PENDING_DELETES
        return await self._page(request, ListedState.PENDING, of, pb.ListPendingDeletesResponse)

    async def _list_dead_deletes(self, request: pb.ListDeadDeletesRequest, _: Context) -> pb.ListDeadDeletesResponse:
        return await self._page(request, ListedState.DEAD, page_tokens.List.DEAD_DELETES, pb.ListDeadDeletesResponse)

    async def _list_ended_deletes(self, request: pb.ListEndedDeletesRequest, _: Context) -> pb.ListEndedDeletesResponse:
        of = page_tokens.List.ENDED_DELETES
        return await self._page(request, ListedState.ENDED, of, pb.ListEndedDeletesResponse)

    async def _page(self, request: _ListRequest, state: ListedState, of: page_tokens.List, answer_type: type[A]) -> A:
        size = page_tokens.page_size(request, default=PAGE_SIZE_DEFAULT, most=PAGE_SIZE_MAX)
        place = page_tokens.place_in(request, request.page_token, of, _PLACE)
        after = deletion_values.DeletionPlace(*place) if place else None
        page = await self._requests.list_deletes(state, deletion_messages.filter_of(request.filter), size, after)
        return answer_type(
            deletions=map(deletion_messages.deletion_message, page.deletions),
            next_page_token=page_tokens.of_place(page.next_after, request, of, _PLACE),
            as_of_ms=page.as_of_ms,
        )

    async def _retry_dead_deletes(self, request: pb.RetryDeadDeletesRequest) -> pb.RetryDeadDeletesResponse:
        retried = await self._requests.retry_dead(deletion_messages.filter_of(request.filter), all=request.all)
        return pb.RetryDeadDeletesResponse(retried=retried)

    async def _purge_dead_deletes(self, request: pb.PurgeDeadDeletesRequest) -> pb.PurgeDeadDeletesResponse:
        purged = await self._requests.purge_dead(deletion_messages.filter_of(request.filter), all=request.all)
        return pb.PurgeDeadDeletesResponse(purged=purged)

    async def _deletion_stats(self, request: pb.GetDeletionStatsRequest, _: Context) -> pb.GetDeletionStatsResponse:
        stats = await self._requests.stats(request.topic)
        counts = [records.as_message(pb.DeletionCount, each) for each in stats.counts]
        return records.as_message(pb.GetDeletionStatsResponse, stats, counts=counts)

    async def _sweep_orphans(self, request: pb.SweepOrphansRequest) -> AsyncGenerator[pb.SweepOrphansResponse]:
        limits.check_name("store", request.store, STORE_BYTES_MAX)
        if request.prefix:
            limits.check_name("prefix", request.prefix, PREFIX_BYTES_MAX)
        wish = deletion_values.SweepWish(
            store=request.store,
            prefix=request.prefix,
            grace_ms=request.grace_ms if request.HasField("grace_ms") else None,
            delete=request.delete,
            unknown_topics=request.unknown_topics,
            force=request.force,
        )
        async with contextlib.aclosing(self._requests.sweep(wish)) as steps:
            async for progress in steps:
                yield _progress(progress)


def _progress(progress: deletion_values.SweepProgress) -> pb.SweepOrphansResponse:
    counts = {
        field.name: records.as_message(pb.SweptObjects, getattr(progress.counts, field.name))
        for field in pb.SweepCounts.DESCRIPTOR.fields
        if field.message_type is not None
    }
    return pb.SweepOrphansResponse(
        orphans=[
            records.as_message(
                pb.OrphanedLedger, each, pending_delete=deletion_messages.pending_delete_message(each.pending_delete)
            )
            for each in progress.orphans
        ],
        counts=records.as_message(pb.SweepCounts, progress.counts, **counts),
        done=progress.done,
        refused=progress.refused,
    )
