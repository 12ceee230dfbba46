"""Two-phase deletion over the wire: what is recorded, in use, listed, retried and purged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf import message

from daemon import config
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed
from daemon.owner.engine import Engine
from storage_backends.formats.deletion_format import DeletionOutcome
from tarry.v1 import admin_pb2, policy_pb2
from tarry.v1 import ledger_deletion_pb2 as pb
from tests._support import real_engine
from tests.daemon.grpc_services._support import bad_deletions as bad
from tests.daemon.grpc_services._support.bad_calls import U64_MAX, changed
from tests.daemon.grpc_services._support.deletion_requests import (
    OTHER,
    TOPIC,
    Stores,
    faults,
    ledgers,
    listed,
    record,
    state,
    stats,
    until,
)
from tests.daemon.grpc_services.conftest import Edge

MALFORMED = pb.RefusedDelete.REASON_MALFORMED
DISABLED = pb.RefusedDelete.REASON_DISABLED


@pytest.fixture
def settings() -> config.Config:
    return config.load(
        environment={},
        overrides=[
            "grpc.listen=127.0.0.1:0",
            "grpc.drain_s=0",
            "limits.rows_per_request_max=1000",
            "limits.message_bytes_max=1048576",
            "deletion.max_retry_delete_count=0",
        ],
    )


@pytest.fixture
def stores() -> Stores:
    return Stores()


@pytest.fixture
async def engine(settings: config.Config, stores: Stores) -> AsyncIterator[Engine]:
    async with real_engine.serving(settings, ledger_stores=stores) as engine:
        try:
            yield engine
        finally:
            stores.go.set()


class TestRecording:
    async def test_every_field_of_a_record_is_shown_as_it_was_recorded(self, edge: Edge) -> None:
        uuid = changed(bad.OFFLOADED, ledger_id=U64_MAX)
        deletes = [bad.LEDGER, bad.CURSOR, bad.SCHEMA, bad.OFFLOADED, uuid]
        recorded = await record(edge, deletes)
        assert (recorded.recorded, list(recorded.already_recorded), list(recorded.refused)) == (5, [], [])
        shown = await until(edge, bad.LIST_PENDING, 5)
        assert [each.pending_delete for each in shown] == deletes
        assert {each.topic for each in shown} == {TOPIC}
        shard = shown[0].deletion_id.split(".")[0]
        assert [each.deletion_id for each in shown] == [f"{shard}.{number}" for number in range(1, 6)]
        assert all(each.recorded_at_ms and not each.by_sweeper for each in shown)

    async def test_a_malformed_record_is_refused_by_its_place_and_the_others_are_recorded(self, edge: Edge) -> None:
        deletes = [bad.LEDGER, *(each for _, each, _ in bad.BAD_RECORDS), bad.OFFLOADED]
        recorded = await record(edge, deletes)
        assert recorded.recorded == 2
        assert [each.index for each in recorded.refused] == list(range(1, len(deletes) - 1))
        assert {each.reason for each in recorded.refused} == {MALFORMED}
        wrong = [
            (name, part, refused.text)
            for (name, _, says), refused in zip(bad.BAD_RECORDS, recorded.refused, strict=True)
            for part in says
            if part not in refused.text
        ]
        assert wrong == []
        shown = await until(edge, bad.LIST_PENDING, 2)
        assert [each.pending_delete for each in shown] == [bad.LEDGER, bad.OFFLOADED]

    async def test_what_is_recorded_already_is_named_by_its_place_in_the_request(self, edge: Edge) -> None:
        await record(edge, ledgers([1, 2]))
        again = await record(edge, [pb.PendingDelete(), *ledgers([2, 3, 1, 3])])
        assert (again.recorded, list(again.already_recorded)) == (4, [1, 3, 4])
        assert [each.index for each in again.refused] == [0]
        assert len(await until(edge, bad.LIST_PENDING, 3)) == 3

    async def test_a_request_of_which_nothing_is_right_records_nothing(self, edge: Edge) -> None:
        recorded = await record(edge, [pb.PendingDelete()] * 3)
        assert (recorded.recorded, [each.index for each in recorded.refused]) == (0, [0, 1, 2])
        assert (await stats(edge)).in_flight == 0

    async def test_a_topic_whose_policy_is_off_records_nothing_more(self, edge: Edge) -> None:
        await record(edge, ledgers([1]))
        off = policy_pb2.TopicPolicy(two_phase_deletion_enabled=False)
        await edge.caller.unary("Admin/SetTopicPolicy", admin_pb2.SetTopicPolicyRequest(topic=TOPIC, policy=off))
        refused = await record(edge, [*ledgers([1, 2]), pb.PendingDelete()])
        assert (refused.recorded, list(refused.already_recorded)) == (0, [])
        assert [(each.index, each.reason) for each in refused.refused] == [(0, DISABLED), (1, DISABLED), (2, MALFORMED)]
        assert "two_phase_deletion_enabled" in refused.refused[0].text
        assert (await record(edge, ledgers([1]), OTHER)).recorded == 1, "another topic has the daemon's default"
        assert (await stats(edge)).in_flight == 2, "what was recorded goes on"

    async def test_of_the_pips_example_what_was_recorded_leaves_the_list(self, edge: Edge) -> None:
        owned = [1, 2, 3, 4, 5]
        deletes = ledgers([1, 2])
        deletes[1].cursor_name = "not of a topic's ledger"
        answer = await record(edge, deletes)
        refused = {deletes[each.index].ledger_id for each in answer.refused}
        recorded = {each.ledger_id for each in deletes} - refused
        assert [each for each in owned if each not in recorded] == [2, 3, 4, 5]


class TestLists:
    async def test_states_and_outcomes_are_told(self, edge: Edge, stores: Stores) -> None:
        stores.answers = {
            1: Answer(DeletionOutcome.DELETED),
            2: Answer(DeletionOutcome.ALREADY_GONE),
            3: Answer(DeletionOutcome.IN_USE, "used by a reader"),
            4: Answer(DeletionOutcome.METADATA_MISMATCH, "component is schema"),
            5: Answer(DeletionOutcome.MALFORMED, "no bucket"),
            6: DeletionFailed("the store is away", maybe_deleted=True),
        }
        await record(edge, ledgers(range(1, 8)))
        ended = await until(edge, bad.LIST_ENDED, 5)
        assert {each.state for each in ended} == {pb.Deletion.STATE_ENDED}
        assert [(each.pending_delete.ledger_id, each.outcome, each.text) for each in ended] == [
            (1, pb.Deletion.OUTCOME_DELETED, ""),
            (2, pb.Deletion.OUTCOME_ALREADY_GONE, ""),
            (3, pb.Deletion.OUTCOME_IN_USE, "used by a reader"),
            (4, pb.Deletion.OUTCOME_METADATA_MISMATCH, "component is schema"),
            (5, pb.Deletion.OUTCOME_MALFORMED, "no bucket"),
        ]
        assert all(each.ended_at_ms >= each.recorded_at_ms for each in ended)
        (dead,) = await until(edge, bad.LIST_DEAD, 1)
        assert (dead.state, dead.outcome, dead.failures) == (pb.Deletion.STATE_GIVEN_UP, 0, 1)
        assert (dead.maybe_deleted, dead.text, dead.ended_at_ms > 0) == (True, "the store is away", True)
        (begun,) = await until(edge, bad.LIST_PENDING, 1)
        assert (begun.state, begun.outcome, begun.next_attempt_at_ms) == (pb.Deletion.STATE_BEGUN, 0, 0)

    async def test_pages_follow_each_other_over_all_shards(self, edge: Edge) -> None:
        topics = [f"topic-{number}" for number in range(6)]
        for topic in topics:
            await record(edge, ledgers([1, 2]), topic)
        whole = await until(edge, bad.LIST_PENDING, 12)
        assert len({each.deletion_id.split(".")[0] for each in whole}) > 1, "of several shards"
        places = [tuple(map(int, each.deletion_id.split("."))) for each in whole]
        assert places == sorted(places)
        paged: list[str] = []
        token = ""
        for _ in range(100):
            page = await listed(edge, bad.LIST_PENDING, page_size=5, page_token=token)
            assert len(page.deletions) <= 5
            paged += [each.deletion_id for each in page.deletions]
            token = page.next_page_token
            if not token:
                break
        assert paged == [each.deletion_id for each in whole]

    async def test_a_token_is_of_its_request(self, edge: Edge) -> None:
        await record(edge, ledgers(range(1, 9)))
        await until(edge, bad.LIST_PENDING, 8)
        token = (await listed(edge, bad.LIST_PENDING, page_size=3)).next_page_token
        assert token
        for method, fields in (
            (bad.LIST_PENDING, {"filter": pb.DeletionFilter(topic=TOPIC)}),
            (bad.LIST_DEAD, {}),
            (bad.LIST_ENDED, {}),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="page_token") as refused:
                await listed(edge, method, page_token=token, **fields)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert len((await listed(edge, bad.LIST_PENDING, page_token=token, page_size=1000)).deletions) == 5

    async def test_each_part_of_a_filter_narrows(self, edge: Edge) -> None:
        await record(edge, [bad.LEDGER, bad.CURSOR, bad.OFFLOADED, *ledgers([0])])
        await record(edge, [bad.LEDGER], OTHER)
        whole = await until(edge, bad.LIST_PENDING, 5)
        mine = [each for each in whole if each.topic == TOPIC]

        async def found(**fields: Any) -> list[str]:
            page = await listed(edge, bad.LIST_PENDING, filter=pb.DeletionFilter(**fields))
            return sorted(each.deletion_id for each in page.deletions)

        assert await found(topic=TOPIC) == [each.deletion_id for each in mine]
        assert await found(component=pb.LEDGER_COMPONENT_MANAGED_CURSOR) == [mine[1].deletion_id]
        assert await found(ledger_type=pb.LEDGER_TYPE_OFFLOADED_LEDGER) == [mine[2].deletion_id]
        assert await found(ledger_id=0) == [mine[3].deletion_id], "0 is a ledger"
        named = [mine[0].deletion_id, mine[3].deletion_id]
        assert await found(deletion_id=[*named, named[0], "4294967295.7", "0.18446744073709551615"]) == named
        assert await found(deletion_id=named, ledger_id=7) == named[:1]
        assert await found(topic="nowhere") == []


class TestDeadLetters:
    async def test_they_are_retried_and_purged_by_filter_or_all_of_them(self, edge: Edge, stores: Stores) -> None:
        away = DeletionFailed("away", maybe_deleted=False)
        stores.answers = dict.fromkeys(range(1, 5), away)
        await record(edge, ledgers(range(1, 5)))
        dead = await until(edge, bad.LIST_DEAD, 4)
        chosen = pb.DeletionFilter(deletion_id=[dead[0].deletion_id, dead[1].deletion_id])
        purged = await edge.caller.unary(bad.PURGE, pb.PurgeDeadDeletesRequest(filter=chosen))
        assert purged.purged == 2
        stores.answers = {}
        retried = await edge.caller.unary(
            bad.RETRY, pb.RetryDeadDeletesRequest(all=True, filter=pb.DeletionFilter(ledger_id=3))
        )
        assert retried.retried == 1
        (begun,) = await until(edge, bad.LIST_PENDING, 1)
        assert (begun.pending_delete.ledger_id, begun.failures, begun.ended_at_ms) == (3, 0, 0)
        assert (await edge.caller.unary(bad.RETRY, pb.RetryDeadDeletesRequest(all=True))).retried == 1
        stores.go.set()
        ended = await until(edge, bad.LIST_ENDED, 2)
        assert {each.outcome for each in ended} == {pb.Deletion.OUTCOME_DELETED}
        assert (await edge.caller.unary(bad.PURGE, pb.PurgeDeadDeletesRequest(all=True))).purged == 0
        assert await until(edge, bad.LIST_DEAD, 0) == []


class TestInUse:
    async def test_a_ledger_in_use_is_not_deleted_until_that_is_taken_back(self, edge: Edge, stores: Stores) -> None:
        stores.go.set()
        stated: dict[str, Any] = {"topic": TOPIC, "ledger_type": pb.LEDGER_TYPE_OFFLOADED_LEDGER, "ledger_id": [7, 8]}
        uuids: dict[str, Any] = {"uuid_msb": [1], "uuid_lsb": [2]}
        answer = await edge.caller.unary(bad.IN_USE, pb.RecordInUseRequest(**stated, **uuids))
        assert (answer.recorded, list(answer.being_deleted)) == (2, [])
        assert (await stats(edge, TOPIC)).in_use == (await stats(edge)).in_use == 2
        assert (await stats(edge, OTHER)).in_use == 0
        await record(edge, ledgers([7, 9], bad.OFFLOADED))
        held, deleted = await until(edge, bad.LIST_ENDED, 2)
        assert (held.outcome, deleted.outcome) == (pb.Deletion.OUTCOME_IN_USE, pb.Deletion.OUTCOME_DELETED)
        counted = await stats(edge)
        assert (counted.in_flight, counted.held, [each.held for each in counted.counts]) == (0, 1, [1])
        assert (await edge.caller.unary(bad.FORGET, pb.ForgetInUseRequest(**stated, **uuids))).forgotten == 2
        await until(edge, bad.LIST_PENDING, 0)
        assert [each.outcome for each in await until(edge, bad.LIST_ENDED, 2)] == [pb.Deletion.OUTCOME_DELETED] * 2
        assert (await stats(edge)).held == 0
        assert (await edge.caller.unary(bad.FORGET, pb.ForgetInUseRequest(**stated, **uuids))).forgotten == 0

    async def test_what_has_begun_is_named_by_its_row(self, edge: Edge) -> None:
        await record(edge, ledgers([5]))
        async with asyncio.timeout(300):
            while (await stats(edge)).begun != 1:
                pass
        request = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=[4, 5, 6])
        answer = await edge.caller.unary(bad.IN_USE, request)
        assert (answer.recorded, list(answer.being_deleted)) == (2, [1])

    async def test_a_replacement_without_ledgers_says_that_none_is_in_use(self, edge: Edge) -> None:
        request = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=[4, 5, 6])
        await edge.caller.unary(bad.IN_USE, request)
        request = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=[6, 7], replace=True)
        assert (await edge.caller.unary(bad.IN_USE, request)).recorded == 2
        assert (await stats(edge)).in_use == 2
        none = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, replace=True)
        assert (await edge.caller.unary(bad.IN_USE, none)).recorded == 0
        assert (await stats(edge)).in_use == 0


async def test_stats_count_by_component_and_type(edge: Edge, stores: Stores) -> None:
    stores.answers = {1: DeletionFailed("away", maybe_deleted=False)}
    await record(edge, [*ledgers([1]), bad.CURSOR, *ledgers([8, 9], bad.CURSOR), bad.OFFLOADED])
    await record(edge, [bad.LEDGER], OTHER)
    await until(edge, bad.LIST_DEAD, 1)
    counted = await stats(edge)
    assert (counted.in_flight, counted.given_up, counted.in_use) == (5, 1, 0)
    assert 0 < counted.oldest_ms <= min(each.recorded_at_ms for each in await until(edge, bad.LIST_PENDING, 5))
    counts = {(each.component, each.ledger_type): (each.in_flight, each.given_up) for each in counted.counts}
    topic, cursor = pb.LEDGER_COMPONENT_MANAGED_LEDGER, pb.LEDGER_COMPONENT_MANAGED_CURSOR
    ledger, offloaded = pb.LEDGER_TYPE_LEDGER, pb.LEDGER_TYPE_OFFLOADED_LEDGER
    assert counts == {(topic, ledger): (1, 1), (cursor, ledger): (3, 0), (topic, offloaded): (1, 0)}
    assert all((each.oldest_ms > 0) == (each.in_flight > 0) for each in counted.counts)
    assert [(each.in_flight, each.given_up) for each in (await stats(edge, OTHER)).counts] == [(1, 0)]


class TestBadRequests:
    @pytest.mark.parametrize("method", sorted({case.method for case in bad.BAD_DELETIONS}))
    async def test_each_is_refused_by_field_value_and_limit_and_changes_nothing(
        self, edge: Edge, stores: Stores, method: str
    ) -> None:
        stores.answers = {1: DeletionFailed("away", maybe_deleted=False), 2: Answer(DeletionOutcome.DELETED)}
        await record(edge, ledgers([1, 2, 3]))
        request = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=[4])
        await edge.caller.unary(bad.IN_USE, request)
        await until(edge, bad.LIST_DEAD, 1)
        await until(edge, bad.LIST_ENDED, 1)
        async with asyncio.timeout(300):
            while (await stats(edge)).begun != 1:
                pass
        before = await state(edge)
        wrong: list[str] = []
        for case in bad.BAD_DELETIONS:
            if case.method == method:
                wrong += await faults(edge, case)
        assert wrong == []
        assert await state(edge) == before


class TestQuotas:
    @pytest.fixture
    def settings(self, settings: config.Config) -> config.Config:
        deletion = msgspec.structs.replace(settings.deletion, pending_max=3, in_use_max=2)
        return msgspec.structs.replace(settings, deletion=deletion)

    async def test_more_records_than_may_be_pending_are_refused_until_there_is_room(
        self, edge: Edge, stores: Stores
    ) -> None:
        await record(edge, ledgers([1, 2]))
        with pytest.raises(grpc.aio.AioRpcError, match=r"deletion\.pending_max is 3") as refused:
            await record(edge, ledgers([3, 4]))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "retry-after-ms" in dict(refused.value.trailing_metadata() or ())
        assert (await record(edge, ledgers([3]))).recorded == 1
        stores.go.set()
        await until(edge, bad.LIST_ENDED, 3)
        assert (await record(edge, ledgers([3, 4]))).recorded == 2

    async def test_more_ledgers_than_may_be_in_use_are_refused(self, edge: Edge) -> None:
        request = pb.RecordInUseRequest(topic=TOPIC, ledger_type=pb.LEDGER_TYPE_LEDGER, ledger_id=[1, 2, 3])
        with pytest.raises(grpc.aio.AioRpcError, match=r"deletion\.in_use_max is 2") as refused:
            await edge.caller.unary(bad.IN_USE, request)
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stats(edge)).in_use == 0


@pytest.mark.parametrize("request_type", bad.DELETIONS_COVERED, ids=lambda each: each.DESCRIPTOR.name)
def test_the_table_has_every_field(request_type: type[message.Message]) -> None:
    assert {field.name for field in request_type.DESCRIPTOR.fields} == bad.DELETIONS_COVERED[request_type]


def test_the_table_has_every_call() -> None:
    (service,) = pb.DESCRIPTOR.services_by_name.values()
    assert {method.input_type.name for method in service.methods} <= {
        request_type.DESCRIPTOR.name for request_type in bad.DELETIONS_COVERED
    }
