"""Every unary call of two-phase deletion, as `every_call` has the others.

Owns: that list. Does not own: what is tested with it (`test_every_call`, `test_deletions`).
"""

from __future__ import annotations

import uuid

import numpy as np

import tarry
from tarry.v1 import ledger_deletion_pb2
from tests.client.conformance._support.every_call import Call

UUID = uuid.UUID(int=2**127 + 5)
LEDGER = ledger_deletion_pb2.PendingDelete(
    component=ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_LEDGER,
    ledger_type=ledger_deletion_pb2.LEDGER_TYPE_LEDGER,
    ledger_id=2**64 - 1,
)
LEDGER_RESULT = tarry.PendingDelete(2**64 - 1)
CURSOR = ledger_deletion_pb2.PendingDelete(
    component=ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_CURSOR,
    cursor_name="departures",
    ledger_type=ledger_deletion_pb2.LEDGER_TYPE_LEDGER,
    ledger_id=7,
)
CURSOR_RESULT = tarry.PendingDelete(7, tarry.LedgerComponent.MANAGED_CURSOR, cursor_name="departures")
OFFLOADED = ledger_deletion_pb2.PendingDelete(
    component=ledger_deletion_pb2.LEDGER_COMPONENT_SCHEMA_STORAGE,
    schema_id="3",
    ledger_type=ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER,
    ledger_id=8,
    offload_context=ledger_deletion_pb2.OffloadContext(
        uuid_msb=2**63, uuid_lsb=5, driver_name="aws-s3", driver_metadata={"region": "r", "bucket": "b"}
    ),
)
OFFLOADED_RESULT = tarry.PendingDelete(
    8,
    tarry.LedgerComponent.SCHEMA_STORAGE,
    tarry.LedgerType.OFFLOADED_LEDGER,
    schema_id="3",
    offload_context=tarry.OffloadContext(UUID, "aws-s3", {"bucket": "b", "region": "r"}),
)
FILTER = ledger_deletion_pb2.DeletionFilter(
    topic="t",
    component=ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_CURSOR,
    ledger_type=ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER,
    ledger_id=0,
    deletion_id=["1.9", "1.3"],
)
FILTER_RESULT = tarry.DeletionFilter(
    topic="t",
    component=tarry.LedgerComponent.MANAGED_CURSOR,
    ledger_type=tarry.LedgerType.OFFLOADED_LEDGER,
    ledger_id=0,
    deletion_ids=["1.9", "1.3", "1.9"],
)
WAITING = ledger_deletion_pb2.Deletion(
    deletion_id="1.9",
    topic="t",
    pending_delete=OFFLOADED,
    recorded_at_ms=10,
    by_sweeper=True,
    state=ledger_deletion_pb2.Deletion.STATE_WAITING,
    failures=2,
    next_attempt_at_ms=20,
    maybe_deleted=True,
    text="slow down",
)
WAITING_RESULT = tarry.Deletion(
    "1.9", "t", OFFLOADED_RESULT, 10, True, tarry.DeletionState.WAITING, None, 2, 20, True, None, "slow down"
)
ENDED = ledger_deletion_pb2.Deletion(
    deletion_id="1.3",
    topic="t",
    pending_delete=CURSOR,
    recorded_at_ms=10,
    state=ledger_deletion_pb2.Deletion.STATE_ENDED,
    outcome=ledger_deletion_pb2.Deletion.OUTCOME_METADATA_MISMATCH,
    ended_at_ms=30,
)
ENDED_RESULT = tarry.Deletion(
    "1.3", "t", CURSOR_RESULT, 10, False, tarry.DeletionState.ENDED, tarry.DeletionOutcome.METADATA_MISMATCH, 0, None,
    False, 30, "",
)  # fmt: skip

DELETION_CALLS = [
    Call(
        "RecordPendingDeletes",
        lambda client: client.record_pending_deletes("t", iter([LEDGER_RESULT, CURSOR_RESULT, OFFLOADED_RESULT])),
        ledger_deletion_pb2.RecordPendingDeletesRequest(topic="t", deletes=[LEDGER, CURSOR, OFFLOADED]),
        ledger_deletion_pb2.RecordPendingDeletesResponse(
            recorded=2,
            already_recorded=[2],
            refused=[
                ledger_deletion_pb2.RefusedDelete(
                    index=1, reason=ledger_deletion_pb2.RefusedDelete.REASON_MALFORMED, text="why"
                )
            ],
        ),
        tarry.RecordedDeletes(
            (LEDGER_RESULT, OFFLOADED_RESULT),
            (OFFLOADED_RESULT,),
            (tarry.RefusedDelete(CURSOR_RESULT, tarry.RefusalReason.MALFORMED, "why"),),
        ),
    ),
    Call(
        "RecordInUse",
        lambda client: client.record_in_use(
            "t", [7, 8, 9], ledger_type=tarry.LedgerType.OFFLOADED_LEDGER, uuid=[UUID, None, UUID], replace=True
        ),
        ledger_deletion_pb2.RecordInUseRequest(
            topic="t",
            ledger_type=ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER,
            ledger_id=[7, 8, 9],
            uuid_msb=[2**63, 0, 2**63],
            uuid_lsb=[5, 0, 5],
            replace=True,
        ),
        ledger_deletion_pb2.RecordInUseResponse(recorded=2, being_deleted=[1]),
        tarry.InUseRecorded(2, np.array([1])),
    ),
    Call(
        "ForgetInUse",
        lambda client: client.forget_in_use("t", 7, uuid=UUID),
        ledger_deletion_pb2.ForgetInUseRequest(
            topic="t",
            ledger_type=ledger_deletion_pb2.LEDGER_TYPE_LEDGER,
            ledger_id=[7],
            uuid_msb=[2**63],
            uuid_lsb=[5],
        ),
        ledger_deletion_pb2.ForgetInUseResponse(forgotten=1),
        1,
    ),
    Call(
        "ListPendingDeletes",
        lambda client: client.pending_deletes_page(FILTER_RESULT, "from", page_size=5),
        ledger_deletion_pb2.ListPendingDeletesRequest(filter=FILTER, page_size=5, page_token="from"),
        ledger_deletion_pb2.ListPendingDeletesResponse(deletions=[WAITING], next_page_token="n", as_of_ms=8),
        tarry.DeletionPage((WAITING_RESULT,), "n", 8),
    ),
    Call(
        "ListDeadDeletes",
        lambda client: client.dead_deletes_page(),
        ledger_deletion_pb2.ListDeadDeletesRequest(filter=ledger_deletion_pb2.DeletionFilter()),
        ledger_deletion_pb2.ListDeadDeletesResponse(as_of_ms=8),
        tarry.DeletionPage((), "", 8),
    ),
    Call(
        "ListEndedDeletes",
        lambda client: client.ended_deletes_page(FILTER_RESULT, "from", page_size=5),
        ledger_deletion_pb2.ListEndedDeletesRequest(filter=FILTER, page_size=5, page_token="from"),
        ledger_deletion_pb2.ListEndedDeletesResponse(deletions=[ENDED], next_page_token="n", as_of_ms=8),
        tarry.DeletionPage((ENDED_RESULT,), "n", 8),
    ),
    Call(
        "RetryDeadDeletes",
        lambda client: client.retry_dead_deletes(FILTER_RESULT),
        ledger_deletion_pb2.RetryDeadDeletesRequest(filter=FILTER),
        ledger_deletion_pb2.RetryDeadDeletesResponse(retried=2),
        2,
    ),
    Call(
        "RetryDeadDeletes",
        lambda client: client.retry_dead_deletes(),
        ledger_deletion_pb2.RetryDeadDeletesRequest(filter=ledger_deletion_pb2.DeletionFilter(), all=True),
        ledger_deletion_pb2.RetryDeadDeletesResponse(retried=2),
        2,
    ),
    Call(
        "PurgeDeadDeletes",
        lambda client: client.purge_dead_deletes(FILTER_RESULT),
        ledger_deletion_pb2.PurgeDeadDeletesRequest(filter=FILTER),
        ledger_deletion_pb2.PurgeDeadDeletesResponse(purged=2),
        2,
    ),
    Call(
        "PurgeDeadDeletes",
        lambda client: client.purge_dead_deletes(),
        ledger_deletion_pb2.PurgeDeadDeletesRequest(filter=ledger_deletion_pb2.DeletionFilter(), all=True),
        ledger_deletion_pb2.PurgeDeadDeletesResponse(purged=2),
        2,
    ),
    Call(
        "GetDeletionStats",
        lambda client: client.deletion_stats("t"),
        ledger_deletion_pb2.GetDeletionStatsRequest(topic="t"),
        ledger_deletion_pb2.GetDeletionStatsResponse(
            in_flight=5,
            begun=4,
            oldest_ms=3,
            given_up=2,
            in_use=9,
            counts=[
                ledger_deletion_pb2.DeletionCount(
                    component=ledger_deletion_pb2.LEDGER_COMPONENT_MANAGED_CURSOR,
                    ledger_type=ledger_deletion_pb2.LEDGER_TYPE_OFFLOADED_LEDGER,
                    in_flight=5,
                    oldest_ms=3,
                    given_up=2,
                    held=7,
                )
            ],
            as_of_ms=8,
            held=7,
        ),
        tarry.DeletionStats(
            in_flight=5,
            begun=4,
            oldest_ms=3,
            given_up=2,
            held=7,
            in_use=9,
            counts=(
                tarry.DeletionCount(
                    tarry.LedgerComponent.MANAGED_CURSOR, tarry.LedgerType.OFFLOADED_LEDGER, 5, 3, 2, 7
                ),
            ),
            as_of_ms=8,
        ),
    ),
]
