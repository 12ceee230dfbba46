"""Serves `tarry.v1.LedgerDeletion`: two-phase deletion of ledgers and offloaded objects (PIP-186).

It converts the values of `ledger_deletion.proto` to and from those of the daemon. `daemon.core.deletions` checks the
fields of a deletion.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import contextlib
import enum
import re
import struct
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Final, Protocol, TypeAlias, TypeVar

import numpy as np
from google.protobuf import descriptor

from daemon import config, errors
from daemon.core import limits
from daemon.core.deletions import deletion_checks
from daemon.core.deletions.ledger_deletions import ListedState
from daemon.grpc_services import page_tokens, parsing, row_requests, unary, value_messages
from daemon.grpc_services.admission import Context
from daemon.ledger_deletion import deletion_values
from daemon.owner.engine import Engine
from storage_backends.formats import deletion_format as stored
from tarry.v1 import ledger_deletion_pb2 as pb

E = TypeVar("E", bound=enum.IntEnum)

FILTER_IDS_MAX = 1_000

_U32_MAX = (1 << 32) - 1
_U64_MAX = (1 << 64) - 1
_DELETION_ID = re.compile(r"(0|[1-9][0-9]{0,9})\.([1-9][0-9]{0,19})")
_COMPONENT: Final = pb.LedgerComponent.DESCRIPTOR
_LEDGER_TYPE: Final = pb.LedgerType.DESCRIPTOR
_REASONS: Final = {
    deletion_values.Refusal.MALFORMED: pb.RefusedDelete.REASON_MALFORMED,
    deletion_values.Refusal.DISABLED: pb.RefusedDelete.REASON_DISABLED,
}


class Ledgers(Protocol):
    """Ledgers of one type in a request."""

    @property
    def ledger_type(self) -> pb.LedgerType.ValueType: ...
    @property
    def ledger_id(self) -> Sequence[int]: ...
    @property
    def uuid_msb(self) -> Sequence[int]: ...
    @property
    def uuid_lsb(self) -> Sequence[int]: ...


# Requests


def pending_deletes(given: Sequence[pb.PendingDelete]) -> tuple[list[stored.PendingDelete], dict[int, str]]:
    """Read deletions. Returns the readable ones in their order, and index -> fault of each other."""
    deletes, problems = [], {}
    for index, each in enumerate(given):
        try:
            deletes.append(_pending_delete(each))
        except errors.InvalidArgument as error:
            problems[index] = str(error)
    return deletes, problems


def _pending_delete(given: pb.PendingDelete) -> stored.PendingDelete:
    return stored.PendingDelete(
        component=_required("component", given.component, _COMPONENT, stored.LedgerComponent),
        ledger_type=_required("ledger_type", given.ledger_type, _LEDGER_TYPE, stored.LedgerType),
        ledger_id=given.ledger_id,
        cursor_name=given.cursor_name or None,
        schema_id=given.schema_id or None,
        offload_context=_offload_context(given.offload_context) if given.HasField("offload_context") else None,
    )


def _offload_context(given: pb.OffloadContext) -> stored.OffloadContext:
    return stored.OffloadContext(
        uuid_msb=given.uuid_msb,
        uuid_lsb=given.uuid_lsb,
        driver_name=given.driver_name,
        driver_metadata=tuple(sorted(given.driver_metadata.items())),
    )


def ledgers(given: Ledgers) -> stored.InUseLedgers:
    """Read ledgers that are reported to be in use. Raises `InvalidArgument`."""
    ledger_type = _required("ledger_type", given.ledger_type, _LEDGER_TYPE, stored.LedgerType)
    rows = len(given.ledger_id)
    if bool(given.uuid_msb) != bool(given.uuid_lsb):
        msb_rows, lsb_rows = len(given.uuid_msb), len(given.uuid_lsb)
        raise errors.InvalidArgument(f"uuid_msb has {msb_rows} rows, uuid_lsb {lsb_rows}; give both or neither")
    halves = {
        name: row_requests.row_column(name, column, rows, np.uint64, rows_of="ledger_id")
        if column
        else np.zeros(rows, np.uint64)
        for name, column in (("uuid_msb", given.uuid_msb), ("uuid_lsb", given.uuid_lsb))
    }
    if ledger_type is stored.LedgerType.LEDGER:
        for name, half in halves.items():
            if half.any():
                row = int(half.argmax())
                raise errors.InvalidArgument(f"{name}[{row}] is {half[row]}, and ledger_type LEDGER; it has no UUID")
    return stored.InUseLedgers(ledger_type, np.array(given.ledger_id, np.uint64), **halves)


def deletion_query(given: pb.DeletionFilter) -> deletion_values.DeletionFilter:
    """Read the filter of a request. Raises `InvalidArgument`."""
    if len(given.deletion_id) > FILTER_IDS_MAX:
        raise errors.InvalidArgument(f"deletion_id has {len(given.deletion_id)} ids; it may have {FILTER_IDS_MAX}")
    named = frozenset(_place(row, deletion_id) for row, deletion_id in enumerate(given.deletion_id))
    return deletion_values.DeletionFilter(
        topic=given.topic,
        component=_optional("component", given.component, _COMPONENT, stored.LedgerComponent),
        ledger_type=_optional("ledger_type", given.ledger_type, _LEDGER_TYPE, stored.LedgerType),
        ledger_id=given.ledger_id if given.HasField("ledger_id") else None,
        deletions=named or None,
    )


def _place(row: int, deletion_id: str) -> deletion_values.DeletionPlace:
    """Read a deletion's id, `<shard>.<number>`. Raises `InvalidArgument`."""
    if (found := _DELETION_ID.fullmatch(deletion_id)) is not None:
        place = deletion_values.DeletionPlace(*map(int, found.groups()))
        if place.shard <= _U32_MAX and place.deletion_id <= _U64_MAX:
            return place
    raise errors.InvalidArgument(
        f"deletion_id[{row}]: {deletion_id[:64]!r} names no deletion; it is <shard>.<number> as lists show it, "
        "such as 3.17"
    )


def _required(field: str, number: int, declared: descriptor.EnumDescriptor, kind: type[E]) -> E:
    """Read the value of an enum that must be given. Raises `InvalidArgument`."""
    found = _optional(field, number, declared, kind)
    if found is None:
        raise errors.InvalidArgument(f"{field}: none is given; give one of {', '.join(each.name for each in kind)}")
    return found


def _optional(field: str, number: int, declared: descriptor.EnumDescriptor, kind: type[E]) -> E | None:
    """Read the value of an enum; return None for 0. Raises `InvalidArgument`.

    The numbers are the same on the wire and in the store.
    """
    if not number:
        return None
    parsing.require_known(field, number, declared)
    return kind(number)


# Answers


def refused(each: deletion_values.RefusedDelete) -> pb.RefusedDelete:
    return pb.RefusedDelete(index=each.index, reason=_REASONS[each.reason], text=each.text)


def pending_delete_message(delete: stored.PendingDelete) -> pb.PendingDelete:
    fields: dict[str, Any] = {}
    if delete.offload_context is not None:
        context = delete.offload_context
        fields["offload_context"] = pb.OffloadContext(
            uuid_msb=context.uuid_msb,
            uuid_lsb=context.uuid_lsb,
            driver_name=context.driver_name,
            driver_metadata=dict(context.driver_metadata),
        )
    return pb.PendingDelete(
        component=pb.LedgerComponent.ValueType(delete.component),
        cursor_name=delete.cursor_name or "",
        schema_id=delete.schema_id or "",
        ledger_type=pb.LedgerType.ValueType(delete.ledger_type),
        ledger_id=delete.ledger_id,
        **fields,
    )


def deletion_message(listed: deletion_values.ListedDeletion) -> pb.Deletion:
    deletion = listed.deletion
    state = _state(deletion)
    ended = state == pb.Deletion.STATE_ENDED
    return pb.Deletion(
        deletion_id=f"{listed.shard}.{deletion.deletion_id}",
        topic=deletion.topic,
        pending_delete=pending_delete_message(deletion.pending_delete),
        recorded_at_ms=deletion.recorded_at_ms,
        by_sweeper=deletion.by_sweeper,
        state=state,
        outcome=pb.Deletion.Outcome.ValueType(deletion.outcome) if ended else pb.Deletion.OUTCOME_UNSPECIFIED,
        failures=deletion.failures,
        next_attempt_at_ms=deletion.next_attempt_at_ms if state == pb.Deletion.STATE_WAITING else 0,
        maybe_deleted=deletion.maybe_deleted,
        ended_at_ms=deletion.ended_at_ms,
        text=deletion.text,
    )


def _state(deletion: stored.Deletion) -> pb.Deletion.State.ValueType:
    match deletion.outcome:
        case stored.DeletionOutcome.PENDING:
            return pb.Deletion.STATE_BEGUN if deletion.begun else pb.Deletion.STATE_WAITING
        case stored.DeletionOutcome.GIVEN_UP:
            return pb.Deletion.STATE_GIVEN_UP
        case _:
            return pb.Deletion.STATE_ENDED


DESCRIPTOR = pb.DESCRIPTOR.services_by_name["LedgerDeletion"]

PAGE_SIZE_DEFAULT = 100
# Encoding a deletion takes 10 us on the event loop.
PAGE_SIZE_MAX = 1_000
STORE_BYTES_MAX = 255
# The maximum length of an S3 key (bytes)
PREFIX_BYTES_MAX = 1_024
# A deletion's shard and number
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
        # Reading one takes 8 us on the event loop.
        if given > deletion_checks.DELETES_MAX:
            most = deletion_checks.DELETES_MAX
            raise errors.InvalidArgument(f"deletes has {given} records; a request must have 1 to {most}")
        deletes, problems = pending_deletes(request.deletes)
        recorded = await self._requests.record_pending_deletes(request.topic, deletes, problems=problems)
        return value_messages.as_message(
            pb.RecordPendingDeletesResponse, recorded, refused=map(refused, recorded.refused)
        )

    async def _record_in_use(self, request: pb.RecordInUseRequest) -> pb.RecordInUseResponse:
        recorded = await self._requests.record_in_use(request.topic, ledgers(request), replace=request.replace)
        return value_messages.as_message(pb.RecordInUseResponse, recorded)

    async def _forget_in_use(self, request: pb.ForgetInUseRequest) -> pb.ForgetInUseResponse:
        forgotten = await self._requests.forget_in_use(request.topic, ledgers(request))
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
        page = await self._requests.list_deletes(state, deletion_query(request.filter), size, after)
        return answer_type(
            deletions=map(deletion_message, page.deletions),
            next_page_token=page_tokens.of_place(page.next_after, request, of, _PLACE),
            as_of_ms=page.as_of_ms,
        )

    async def _retry_dead_deletes(self, request: pb.RetryDeadDeletesRequest) -> pb.RetryDeadDeletesResponse:
        retried = await self._requests.retry_dead(deletion_query(request.filter), all=request.all)
        return pb.RetryDeadDeletesResponse(retried=retried)

    async def _purge_dead_deletes(self, request: pb.PurgeDeadDeletesRequest) -> pb.PurgeDeadDeletesResponse:
        purged = await self._requests.purge_dead(deletion_query(request.filter), all=request.all)
        return pb.PurgeDeadDeletesResponse(purged=purged)

    async def _deletion_stats(self, request: pb.GetDeletionStatsRequest, _: Context) -> pb.GetDeletionStatsResponse:
        stats = await self._requests.stats(request.topic)
        counts = [value_messages.as_message(pb.DeletionCount, each) for each in stats.counts]
        return value_messages.as_message(pb.GetDeletionStatsResponse, stats, counts=counts)

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
        field.name: value_messages.as_message(pb.SweptObjects, getattr(progress.counts, field.name))
        for field in pb.SweepCounts.DESCRIPTOR.fields
        if field.message_type is not None
    }
    return pb.SweepOrphansResponse(
        orphans=[
            value_messages.as_message(
                pb.OrphanedLedger, each, pending_delete=pending_delete_message(each.pending_delete)
            )
            for each in progress.orphans
        ],
        counts=value_messages.as_message(pb.SweepCounts, progress.counts, **counts),
        done=progress.done,
        refused=progress.refused,
    )
