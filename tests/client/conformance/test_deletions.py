"""Two-phase deletion: what is recorded in several requests, what must stay, what a sweep tells."""

from __future__ import annotations

import uuid
from typing import Any

import grpc
import pytest

import tarry
import tarry.aio
from tarry.v1 import ledger_deletion_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.conformance._support.deletion_calls import (
    CURSOR_RESULT,
    ENDED,
    ENDED_RESULT,
    OFFLOADED,
    OFFLOADED_RESULT,
    UUID,
    WAITING,
    WAITING_RESULT,
)
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = grpc.StatusCode
MALFORMED = ledger_deletion_pb2.RefusedDelete.REASON_MALFORMED
DISABLED = ledger_deletion_pb2.RefusedDelete.REASON_DISABLED


def record_all(
    request: ledger_deletion_pb2.RecordPendingDeletesRequest, context: grpc.ServicerContext
) -> ledger_deletion_pb2.RecordPendingDeletesResponse:
    return ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=len(request.deletes))


async def items(iterated: Any) -> list[Any]:
    return [item async for item in iterated]


# Recording.


async def test_many_deletions_are_several_requests_and_one_result(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    refused = ledger_deletion_pb2.RefusedDelete(index=3, reason=DISABLED, text="off")
    daemon.script(
        "RecordPendingDeletes",
        record_all,
        answer(ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=999, already_recorded=[0], refused=[refused])),
        record_all,
    )
    deletes = [tarry.PendingDelete(ledger_id) for ledger_id in range(2_001)]
    became = await client.record_pending_deletes("t", deletes)
    assert [len(request.deletes) for request in daemon.requests("RecordPendingDeletes")] == [1_000, 1_000, 1]
    assert [each.ledger_id for each in became.recorded] == [each for each in range(2_001) if each != 1_003]
    assert [each.ledger_id for each in became.already_recorded] == [1_000]
    assert became.refused == (tarry.RefusedDelete(deletes[1_003], tarry.RefusalReason.DISABLED, "off"),)


async def test_a_request_has_no_more_bytes_than_the_daemon_takes(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script("RecordPendingDeletes", record_all)
    context = tarry.OffloadContext(UUID, "aws-s3", {"bucket": "b" * 1_000})
    offloaded = [
        tarry.PendingDelete(each, ledger_type=tarry.LedgerType.OFFLOADED_LEDGER, offload_context=context)
        for each in range(10)
    ]
    client = connect(daemon.address, request_bytes=8_192)
    assert (await client.record_pending_deletes("t", offloaded)).recorded == tuple(offloaded)
    requests = daemon.requests("RecordPendingDeletes")
    assert len(requests) > 2
    assert all(request.ByteSize() <= 8_192 for request in requests)
    assert [each.ledger_id for request in requests for each in request.deletes] == list(range(10))
    huge = tarry.PendingDelete(1, tarry.LedgerComponent.SCHEMA_STORAGE, schema_id="s" * 9_000)
    # It is the daemon that refuses it.
    assert (await client.record_pending_deletes("t", [huge])).recorded == (huge,)


async def test_nothing_to_delete_takes_no_request(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    became = await client.record_pending_deletes("t", [])
    assert (became, became.remaining([1])) == (tarry.RecordedDeletes((), (), ()), [1])
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"ledger_id": -1}, "ledger_id of deletion 1 is -1"),
        ({"ledger_id": 2**64}, "ledger_id of deletion 1 is 18446744073709551616"),
        ({"component": 9}, "deletion 1 is .*9 is not a valid LedgerComponent"),
        ({"ledger_type": 0}, "deletion 1 is .*0 is not a valid LedgerType"),
        ({"cursor_name": 5}, "deletion 1 is"),
        ({"schema_id": "\udcff"}, "deletion 1 is"),
        ({"offload_context": tarry.OffloadContext("7", "s3")}, "deletion 1 is"),  # type: ignore[arg-type]
        ({"offload_context": tarry.OffloadContext(UUID, "s3", {"bucket": 5})}, "deletion 1 is"),  # type: ignore[dict-item]
    ],
)
async def test_what_no_field_can_hold_is_told_with_its_place_before_anything_is_sent(
    daemon: FakeDaemon, client: tarry.aio.Client, wrong: dict[str, Any], says: str
) -> None:
    bad = tarry.PendingDelete(**({"ledger_id": 1} | wrong))
    with pytest.raises(tarry.InvalidArgument, match=says):
        await client.record_pending_deletes("t", [tarry.PendingDelete(1), bad])
    assert daemon.calls == []


async def test_of_ledgers_1_to_5_of_which_1_is_recorded_and_2_is_not_2_to_5_remain(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """The example of PIP-186; its own rule gives [2, 3, 4, 5], and not the [1, 3, 4, 5] that it prints."""
    refused = ledger_deletion_pb2.RefusedDelete(index=1, reason=MALFORMED, text="why")
    daemon.script(
        "RecordPendingDeletes",
        answer(ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=1, refused=[refused])),
    )
    became = await client.record_pending_deletes("t", [tarry.PendingDelete(1), tarry.PendingDelete(2)])
    assert became.remaining([1, 2, 3, 4, 5]) == [2, 3, 4, 5]


async def test_a_ledger_stays_until_each_of_its_deletions_is_recorded(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    refused = ledger_deletion_pb2.RefusedDelete(index=1, reason=MALFORMED, text="why")
    daemon.script(
        "RecordPendingDeletes",
        answer(ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=1, refused=[refused])),
        record_all,
    )
    both = [tarry.PendingDelete(8), OFFLOADED_RESULT]
    assert (await client.record_pending_deletes("t", both)).remaining([8, 9]) == [8, 9]
    assert (await client.record_pending_deletes("t", both)).remaining([8, 9]) == [9]


async def test_a_daemon_that_miscounts_records_makes_no_ledger_leave(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("RecordPendingDeletes", answer(ledger_deletion_pb2.RecordPendingDeletesResponse(recorded=1)))
    with pytest.raises(tarry.Internal, match="of 2 deletions 1 are recorded, 0 refused"):
        await client.record_pending_deletes("t", [tarry.PendingDelete(1), tarry.PendingDelete(2)])


async def test_deletions_that_are_equal_are_one_whatever_the_order_of_their_driver_s_metadata() -> None:
    def offloaded(**metadata: str) -> tarry.PendingDelete:
        return tarry.PendingDelete(1, offload_context=tarry.OffloadContext(UUID, "s3", metadata))

    assert len({offloaded(bucket="b", region="r"), offloaded(region="r", bucket="b"), offloaded(bucket="c")}) == 2


# In use.


async def test_many_ledgers_in_use_are_several_requests_and_one_result(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect(daemon.address, rows_per_request=2)
    daemon.script("RecordInUse", answer(ledger_deletion_pb2.RecordInUseResponse(recorded=1, being_deleted=[0])))
    daemon.script("ForgetInUse", answer(ledger_deletion_pb2.ForgetInUseResponse(forgotten=1)))
    other = uuid.UUID(int=9)
    became = await client.record_in_use("t", range(5), uuid=[UUID, None, None, None, other])
    assert (became.recorded, became.being_deleted_index.tolist()) == (3, [0, 2, 4])
    sent = daemon.requests("RecordInUse")
    assert [list(request.ledger_id) for request in sent] == [[0, 1], [2, 3], [4]]
    assert [list(request.uuid_lsb) for request in sent] == [[5, 0], [0, 0], [9]]
    assert await client.forget_in_use("t", range(3), uuid=UUID) == 2
    assert [(list(each.ledger_id), list(each.uuid_lsb)) for each in daemon.requests("ForgetInUse")] == [
        ([0, 1], [5]),
        ([2], [5]),
    ]


async def test_what_is_in_use_is_replaced_in_one_request_or_not_at_all(daemon: FakeDaemon, connect: Connect) -> None:
    """Between two requests the ledgers of the second would count as in use no longer."""
    client = connect(daemon.address, rows_per_request=2)
    with pytest.raises(tarry.InvalidArgument, match=r"ledger_id has 3 ledgers; with replace .* it may have 2"):
        await client.record_in_use("t", range(3), replace=True)
    assert daemon.calls == []


async def test_that_nothing_is_in_use_can_be_said(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("RecordInUse", answer(ledger_deletion_pb2.RecordInUseResponse()))
    became = await client.record_in_use("t", [], replace=True)
    assert (became.recorded, len(became.being_deleted_index)) == (0, 0)
    (request,) = daemon.requests("RecordInUse")
    assert (request.replace, list(request.ledger_id), list(request.uuid_msb)) == (True, [], [])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([UUID], "uuid has 1 rows; it must have 2"),
        ([UUID, "7"], "uuid must be one uuid.UUID"),
        (5, "uuid must be one uuid.UUID"),
    ],
)
async def test_uuids_that_do_not_fit_are_refused(client: tarry.aio.Client, wrong: Any, says: str) -> None:
    with pytest.raises(tarry.InvalidArgument, match=says):
        await client.record_in_use("t", [1, 2], uuid=wrong)


# Lists, and what was given up.


async def test_deletions_are_read_page_by_page_and_a_page_may_be_empty(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    for method, response, listed in (
        ("ListPendingDeletes", ledger_deletion_pb2.ListPendingDeletesResponse, client.pending_deletes),
        ("ListDeadDeletes", ledger_deletion_pb2.ListDeadDeletesResponse, client.dead_deletes),
        ("ListEndedDeletes", ledger_deletion_pb2.ListEndedDeletesResponse, client.ended_deletes),
    ):
        daemon.script(
            method,
            answer(response(deletions=[WAITING], next_page_token="a")),
            answer(response(next_page_token="b")),
            answer(response(deletions=[ENDED])),
        )
        assert await items(listed(tarry.DeletionFilter(topic="t"))) == [WAITING_RESULT, ENDED_RESULT]
        assert [request.page_token for request in daemon.requests(method)] == ["", "a", "b"]
        assert {(request.filter.topic, request.page_size) for request in daemon.requests(method)} == {("t", 1_000)}


async def test_more_deletions_than_a_request_may_name_are_several_requests(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("RetryDeadDeletes", answer(ledger_deletion_pb2.RetryDeadDeletesResponse(retried=5)))
    daemon.script("PurgeDeadDeletes", answer(ledger_deletion_pb2.PurgeDeadDeletesResponse(purged=7)))
    which = tarry.DeletionFilter(deletion_ids=[f"1.{number}" for number in range(1_001)])
    assert await client.retry_dead_deletes(which) == 10
    assert await client.purge_dead_deletes(which) == 14
    assert [len(each.filter.deletion_id) for each in daemon.requests("RetryDeadDeletes")] == [1_000, 1]
    assert [(len(each.filter.deletion_id), each.all) for each in daemon.requests("PurgeDeadDeletes")] == [
        (1_000, False),
        (1, False),
    ]


@pytest.mark.parametrize("wrong", [[], "1.7", [7]])
async def test_no_ids_are_not_all_deletions(client: tarry.aio.Client, wrong: Any) -> None:
    with pytest.raises(tarry.InvalidArgument, match="deletion_ids"):
        await client.purge_dead_deletes(tarry.DeletionFilter(deletion_ids=wrong))


async def test_a_state_that_a_later_daemon_has_is_told(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    later = ledger_deletion_pb2.Deletion(pending_delete=WAITING.pending_delete, state=77)  # type: ignore[arg-type]
    daemon.script("ListDeadDeletes", answer(ledger_deletion_pb2.ListDeadDeletesResponse(deletions=[later])))
    with pytest.raises(tarry.Internal, match="DeletionState is 77; this version of the client does not know it"):
        await client.dead_deletes_page()


async def test_the_stats_of_all_topics_are_asked_of_any_daemon(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetDeletionStats", answer(ledger_deletion_pb2.GetDeletionStatsResponse(as_of_ms=8)))
    assert await client.deletion_stats() == tarry.DeletionStats(0, 0, None, 0, 0, 0, (), 8)
    assert daemon.requests("GetDeletionStats") == [ledger_deletion_pb2.GetDeletionStatsRequest()]


# Sweeps.


def swept(number: int, *, done: bool = False, refused: str = "") -> ledger_deletion_pb2.SweepOrphansResponse:
    orphan = ledger_deletion_pb2.OrphanedLedger(
        topic="t", pending_delete=OFFLOADED, size_bytes=number, modified_ms=9, unknown_topic=True
    )
    counts = {
        name: ledger_deletion_pb2.SweptObjects(objects=number, size_bytes=number * place)
        for place, name in enumerate(ledger_deletion_pb2.SweepCounts.DESCRIPTOR.fields_by_name)
        if not name.startswith("ledgers_")
    }
    return ledger_deletion_pb2.SweepOrphansResponse(
        orphans=[orphan] * number,
        counts=ledger_deletion_pb2.SweepCounts(**counts, ledgers_recorded=number, ledgers_left=1),
        done=done,
        refused=refused,
    )


async def test_a_sweep_tells_how_far_it_is(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("SweepOrphans", lambda request, context: iter([swept(0), swept(2, done=True, refused="too many")]))
    steps = await items(
        client.sweep_orphans("archive", prefix="p/", grace_ms=0, delete=True, unknown_topics=True, force=True)
    )
    assert [(step.done, step.refused, len(step.orphans)) for step in steps] == [(False, "", 0), (True, "too many", 2)]
    assert steps[1].orphans[0] == tarry.OrphanedLedger("t", OFFLOADED_RESULT, 2, 9, True)
    counts = steps[1].counts
    assert (counts.listed, counts.unidentified) == (tarry.SweptObjects(2, 0), tarry.SweptObjects(2, 14))
    assert (counts.unanswered, counts.ledgers_recorded, counts.ledgers_left) == (tarry.SweptObjects(2, 18), 2, 1)
    assert daemon.requests("SweepOrphans") == [
        ledger_deletion_pb2.SweepOrphansRequest(
            store="archive", prefix="p/", grace_ms=0, delete=True, unknown_topics=True, force=True
        )
    ]


async def test_a_sweep_deletes_nothing_unless_it_is_told_to_and_has_the_daemon_s_grace(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("SweepOrphans", lambda request, context: iter([swept(0, done=True)]))
    await items(client.sweep_orphans("archive"))
    (request,) = daemon.requests("SweepOrphans")
    assert request == ledger_deletion_pb2.SweepOrphansRequest(store="archive")
    assert not request.HasField("grace_ms")


@pytest.mark.parametrize(("code", "kind"), [(CODE.NOT_FOUND, tarry.NotFound), (CODE.UNAVAILABLE, tarry.Unavailable)])
async def test_a_sweep_that_fails_is_not_begun_anew(
    daemon: FakeDaemon, client: tarry.aio.Client, code: grpc.StatusCode, kind: type[tarry.TarryError]
) -> None:
    daemon.script("SweepOrphans", refuse(code))
    with pytest.raises(kind):
        await items(client.sweep_orphans("archive"))
    assert daemon.count("SweepOrphans") == 1


async def test_a_number_that_no_grace_can_be_is_refused(client: tarry.aio.Client) -> None:
    with pytest.raises(tarry.InvalidArgument, match="grace_ms is -1"):
        await items(client.sweep_orphans("archive", grace_ms=-1))


async def test_only_a_cursor_s_ledger_has_a_cursor() -> None:
    """What goes without saying of a record is what most ledgers are: one of messages, with its owner."""
    plain = tarry.PendingDelete(1)
    assert (plain.component, plain.ledger_type) == (tarry.LedgerComponent.MANAGED_LEDGER, tarry.LedgerType.LEDGER)
    assert CURSOR_RESULT.component == tarry.LedgerComponent.MANAGED_CURSOR
