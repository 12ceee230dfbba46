"""Delay levels on the wire: setting a table, showing it, adding by it."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from daemon.core.index.delay_levels import DEFAULT_TABLE
from tarry.v1 import admin_pb2 as pb
from tarry.v1 import delayed_delivery_pb2, inspect_pb2, policy_pb2
from tests.daemon.grpc_services.conftest import Edge

SET, GET = "Admin/SetDelayLevels", "Admin/GetDelayLevels"
STATS = "Inspect/GetTopicStats"
STREAM_ADD = "DelayedDelivery/StreamAddMessages"


async def get(edge: Edge, topic: str = "t") -> pb.GetDelayLevelsResponse:
    found: pb.GetDelayLevelsResponse = await edge.caller.unary(GET, pb.GetDelayLevelsRequest(topic=topic))
    return found


async def test_the_daemons_levels_are_rocketmqs_and_clamp(edge: Edge) -> None:
    found = await get(edge, "")

    assert found.levels == pb.DelayLevels(table=DEFAULT_TABLE, clamp=True)
    assert (len(found.delay_ms), found.delay_ms[4], found.of_topic) == (18, 60_000, False)
    assert not found.pending


@pytest.mark.parametrize("clamp", [None, True, False])
async def test_a_table_is_shown_as_it_was_set_with_what_may_be_a_mistake(edge: Edge, clamp: bool | None) -> None:
    given = pb.DelayLevels(table="5s\n1s", clamp=clamp)
    answer = await edge.caller.unary(SET, pb.SetDelayLevelsRequest(topic="t", levels=given))

    assert answer.levels == pb.DelayLevels(table="5s\n1s", clamp=clamp is not False)
    assert list(answer.warnings) == ["level 2 is 1000 ms, shorter than level 1, which is 5000 ms"]
    found = await get(edge)
    assert (found.levels, list(found.delay_ms), found.of_topic) == (answer.levels, [5_000, 1_000], True)

    answer = await edge.caller.unary(SET, pb.SetDelayLevelsRequest(topic="t"))
    assert (answer.levels.table, list(answer.warnings)) == (DEFAULT_TABLE, [])
    assert not (await get(edge)).of_topic


async def test_rows_are_added_by_level_by_a_call_and_on_a_stream(edge: Edge) -> None:
    levels = pb.DelayLevels(table="1h 2h", clamp=False)
    await edge.caller.unary(SET, pb.SetDelayLevelsRequest(topic="t", levels=levels))
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1, 2], delay_level=[1])
    assert (await edge.caller.unary("DelayedDelivery/AddMessages", add)).accepted == 2
    stream = edge.caller.stream(STREAM_ADD)
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[3, 4], delay_level=[2, 0])
    await stream.send(delayed_delivery_pb2.StreamAddMessagesRequest(request_id=1, add=add))
    added = (await stream.receive()).added
    assert (added.accepted, added.late_on_arrival) == (2, 1)

    async with asyncio.timeout(300):
        # The row without a delay is passed in a moment.
        while (await edge.caller.unary(STATS, inspect_pb2.GetTopicStatsRequest(topic="t"))).pending != 3:
            pass
    add.delay_level[:] = [1, 3]
    with pytest.raises(grpc.aio.AioRpcError, match=r"delay_level\[1\] is 3; the highest level of the table is 2"):
        await edge.caller.unary("DelayedDelivery/AddMessages", add)


async def test_a_table_beyond_the_limit_on_delays_is_refused_and_the_old_one_stays(edge: Edge) -> None:
    await edge.caller.unary(SET, pb.SetDelayLevelsRequest(topic="t", levels=pb.DelayLevels(table="1s 3650d")))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await edge.caller.unary(SET, pb.SetDelayLevelsRequest(topic="t", levels=pb.DelayLevels(table="1s 3651d")))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (await get(edge)).levels.table == "1s 3650d"


async def test_a_level_beyond_the_limit_on_delays_is_out_of_range(edge: Edge) -> None:
    policy = policy_pb2.TopicPolicy(delay_max_ms=60_000)
    await edge.caller.unary("Admin/SetTopicPolicy", pb.SetTopicPolicyRequest(topic="t", policy=policy))
    add = delayed_delivery_pb2.AddMessagesRequest(topic="t", ledger_id=[1], entry_id=[1, 2], delay_level=[5, 6])
    with pytest.raises(
        grpc.aio.AioRpcError, match=r"delay_level\[1\] is 120000; the largest delay is 60000"
    ) as refused:
        await edge.caller.unary("DelayedDelivery/AddMessages", add)
    assert refused.value.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_pending_rows_are_shown_by_level(edge: Edge) -> None:
    add = delayed_delivery_pb2.AddMessagesRequest(
        topic="t", ledger_id=[1], entry_id=range(5), delay_level=[18, 17, 18, 99, 0]
    )
    await edge.caller.unary("DelayedDelivery/AddMessages", add)
    assert list((await get(edge)).pending) == [0] * 16 + [1, 3]


async def test_a_topic_that_there_is_not_has_no_levels(edge: Edge) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await get(edge, "nowhere")
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
