"""Unary calls: what is sent, what comes back, and which failures are tried again, where, and how long."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import grpc
import numpy as np
import pytest

import tarry
import tarry.aio
from tarry.v1 import delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests._support.patience import awaited_within_some_time
from tests.client import conftest
from tests.client._support import fake_daemon
from tests.client._support.fake_daemon import FakeDaemon, accept, accept_all, answer, refuse
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = grpc.StatusCode


async def test_an_add_sends_its_columns_and_tells_what_became_of_them(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script(
        "AddMessages",
        answer(
            delayed_delivery_pb2.AddMessagesResponse(
                accepted=2,
                duplicates=1,
                late_on_arrival=1,
                returned_index=[3],
                raised_index=[0],
                raised_deliver_at_ms=[99],
            )
        ),
    )
    result = await client.add(
        "topic", 7, [1, 2, 3, 4], deliver_at_ms=50, key_hash=[1, 2, 3, 4], already_due=tarry.AlreadyDue.RETURN
    )
    (request,) = daemon.requests("AddMessages")
    assert request == delayed_delivery_pb2.AddMessagesRequest(
        topic="topic",
        ledger_id=[7],
        entry_id=[1, 2, 3, 4],
        deliver_at_ms=[50],
        key_hash=[1, 2, 3, 4],
        already_due=delayed_delivery_pb2.ALREADY_DUE_RETURN,
    )
    assert (result.accepted, result.duplicates, result.late_on_arrival) == (2, 1, 1)
    assert result.returned_index.tolist() == [3]
    assert result.raised_index.tolist() == [0]
    assert result.raised_deliver_at_ms.tolist() == [99]


async def test_a_long_batch_is_several_requests_and_one_result(daemon: FakeDaemon, connect: Connect) -> None:
    returned = delayed_delivery_pb2.AddMessagesResponse(accepted=1, returned_index=[1])
    daemon.script("AddMessages", answer(returned))
    result = await connect(daemon.address, rows_per_request=2).add("topic", 7, range(5), delay_ms=10)
    assert [list(request.entry_id) for request in daemon.requests("AddMessages")] == [[0, 1], [2, 3], [4]]
    assert result.accepted == 3
    assert result.returned_index.tolist() == [1, 3, 5]


@pytest.mark.parametrize("code", [CODE.UNAVAILABLE, CODE.ABORTED, CODE.UNKNOWN, CODE.FAILED_PRECONDITION])
async def test_a_passing_failure_is_tried_again(
    daemon: FakeDaemon, client: tarry.aio.Client, code: grpc.StatusCode
) -> None:
    daemon.script("AddMessages", refuse(code), refuse(code), accept)
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1
    assert daemon.count("AddMessages") == 3


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.INVALID_ARGUMENT, tarry.InvalidArgument),
        (CODE.NOT_FOUND, tarry.NotFound),
        (CODE.OUT_OF_RANGE, tarry.OutOfRange),
        (CODE.RESOURCE_EXHAUSTED, tarry.ResourceExhausted),
        (CODE.INTERNAL, tarry.Internal),
        (CODE.UNIMPLEMENTED, tarry.TarryError),
    ],
)
async def test_a_lasting_failure_is_raised_at_once(
    daemon: FakeDaemon, client: tarry.aio.Client, code: grpc.StatusCode, kind: type[tarry.TarryError]
) -> None:
    daemon.script("AddMessages", refuse(code, "delay_ms is 7; the limit is 6"))
    with pytest.raises(kind, match="delay_ms is 7; the limit is 6") as raised:
        await client.add("topic", 1, 1, delay_ms=7)
    assert daemon.count("AddMessages") == raised.value.attempts == 1


async def test_a_quota_is_tried_again_when_the_daemon_says(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("AddMessages", refuse(CODE.RESOURCE_EXHAUSTED, retry_after_ms="1"), accept)
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1


async def test_a_call_comes_back_no_sooner_than_the_daemon_says(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    came_s: list[float] = []

    def refuse_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        came_s.append(time.monotonic())
        hint = refuse(CODE.RESOURCE_EXHAUSTED, "client_rows_per_second_max is 5", retry_after_ms="250")
        return hint(request, context) if len(came_s) == 1 else accept(request, context)

    daemon.script("AddMessages", refuse_the_first)
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1
    assert came_s[1] - came_s[0] >= 0.25


async def test_a_quota_without_a_hint_is_raised_at_once_since_waiting_does_not_help(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("AddMessages", refuse(CODE.RESOURCE_EXHAUSTED, "pending_rows_max is 5"))
    with pytest.raises(tarry.ResourceExhausted, match="pending_rows_max is 5"):
        await client.add("topic", 1, 1, delay_ms=1)
    assert daemon.count("AddMessages") == 1


async def test_every_call_and_stream_says_who_the_client_is(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script("AddMessages", accept)
    daemon.script("StreamAddMessages", accept_all)
    for client_id in (None, "gate-7"):
        daemon.client_ids.clear()
        client = connect(daemon.address, client_id=client_id)
        await client.add("topic", 1, 1, delay_ms=1)
        async with client.add_stream("topic") as stream:
            await (await stream.add(1, 1, delay_ms=1))
        asked = ("AddMessages", "GetVersion", "StreamAddMessages")
        assert daemon.client_ids == [(name, client_id) for name in asked]


@pytest.mark.parametrize("client_id", ["", "a b", "ä", "x" * 129, "a\n"])
async def test_a_client_id_that_cannot_be_sent_is_refused_by_name(
    daemon: FakeDaemon, connect: Connect, client_id: str
) -> None:
    with pytest.raises(tarry.InvalidArgument, match=r"client_id is .* 1 to 128"):
        connect(daemon.address, client_id=client_id)


async def test_a_quota_beyond_the_deadline_is_not_waited_for(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("AddMessages", refuse(CODE.RESOURCE_EXHAUSTED, "too many rows", retry_after_ms="3600000"))
    with pytest.raises(tarry.DeadlineExceeded, match="too many rows") as raised:
        await client.add("topic", 1, 1, delay_ms=1)
    assert isinstance(raised.value.last, tarry.ResourceExhausted)
    assert daemon.count("AddMessages") == 1


async def test_the_deadline_ends_the_retries_with_the_last_failure(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("AddMessages", refuse(CODE.UNAVAILABLE, "the store is gone"))

    async def story(seconds: float) -> None:
        before = daemon.count("AddMessages")
        with pytest.raises(tarry.DeadlineExceeded, match=rf"within {seconds:g} s.*the store is gone"):
            await client.add("topic", 1, 1, delay_ms=1, timeout_s=seconds)
        assert daemon.count("AddMessages") > before + 1

    await awaited_within_some_time(story)


async def test_an_answer_that_does_not_come_is_bounded_by_the_deadline(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    release = threading.Event()
    daemon.script("AddMessages", lambda request, context: release.wait(fake_daemon.WAIT_S) and accept(request, context))
    with pytest.raises(tarry.DeadlineExceeded, match=r"no answer within 0\.1 s"):
        await client.add("topic", 1, 1, delay_ms=1, timeout_s=0.1)
    release.set()


async def test_the_owner_that_a_daemon_names_is_asked_now_and_later(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("AddMessages", refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address))
    other_daemon.script("AddMessages", accept)
    for _ in range(2):
        assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1
    assert (daemon.count("AddMessages"), other_daemon.count("AddMessages")) == (1, 2)


async def test_an_owner_that_is_gone_is_forgotten(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    other_daemon.stop()
    daemon.script("AddMessages", refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address), accept)
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1
    assert daemon.count("AddMessages") == 2


async def test_a_closed_client_says_so(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("AddMessages", accept)
    await client.close()
    await client.close()
    with pytest.raises(tarry.Closed):
        await client.add("topic", 1, 1, delay_ms=1)


async def test_closing_ends_a_call_that_is_being_retried(daemon: FakeDaemon, connect: Connect) -> None:
    client = connect(daemon.address, retry_policy=tarry.RetryPolicy(uniform=lambda low, high: 3600.0))
    refused = fake_daemon.Gate()

    def step(request: object, context: grpc.ServicerContext) -> None:
        refused.open()
        context.abort(CODE.UNAVAILABLE, "starting")

    daemon.script("AddMessages", step)
    adding = asyncio.create_task(client.add("topic", 1, 1, delay_ms=1, timeout_s=10_000))
    await refused.passed()
    await client.close()
    with pytest.raises(tarry.Closed):
        await adding


async def test_closing_ends_a_call_that_waits_for_its_answer(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    arrived, go_on = fake_daemon.Gate(), fake_daemon.Gate()

    def silent(request: object, context: grpc.ServicerContext) -> None:
        arrived.open()
        go_on.wait()
        context.abort(CODE.CANCELLED, "too late")

    daemon.script("AddMessages", silent)
    adding = asyncio.create_task(client.add("topic", 1, 1, delay_ms=1))
    await arrived.passed()
    await client.close()
    with pytest.raises(tarry.Closed, match="the client is closed"):
        await adding
    go_on.open()


async def test_a_call_that_a_daemon_drops_as_it_ends_is_made_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("AddMessages", fake_daemon.refuse(CODE.CANCELLED, "the server ends"), fake_daemon.accept)
    assert (await client.add("topic", 1, 1, delay_ms=1)).accepted == 1


async def test_a_subscription_is_created(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script(
        "CreateSubscription",
        answer(dispatch_pb2.CreateSubscriptionResponse(subscription_id=3, since_ms=5, created=True)),
    )
    assert await client.create_subscription("topic", "sub") == tarry.SubscriptionCreated(3, 5, True)
    assert daemon.requests("CreateSubscription") == [
        dispatch_pb2.CreateSubscriptionRequest(topic="topic", subscription="sub")
    ]


async def test_deleting_what_does_not_exist_is_told(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("DeleteSubscription", refuse(CODE.NOT_FOUND))
    with pytest.raises(tarry.NotFound):
        await client.delete_subscription("topic", "sub")


async def test_a_delete_whose_answer_was_lost_is_done(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("DeleteSubscription", refuse(CODE.UNAVAILABLE), refuse(CODE.NOT_FOUND))
    await client.delete_subscription("topic", "sub")
    assert daemon.count("DeleteSubscription") == 2


async def test_topics_are_read_page_by_page(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    first = inspect_pb2.TopicSummary(topic="a", shard=1, pending=2, buckets=3, subscriptions=4, next_due_ms=5)
    daemon.script(
        "ListTopics",
        answer(inspect_pb2.ListTopicsResponse(topics=[first], next_page_token="a")),
        answer(inspect_pb2.ListTopicsResponse(topics=[inspect_pb2.TopicSummary(topic="b")])),
    )
    assert [topic async for topic in client.topics()] == [
        tarry.TopicSummary("a", 1, 2, 3, 4, 5),
        tarry.TopicSummary("b", 0, 0, 0, 0, None),
    ]
    assert [request.page_token for request in daemon.requests("ListTopics")] == ["", "a"]


async def test_stats_mirror_the_message(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    message = inspect_pb2.GetTopicStatsResponse(topic="t", topic_id="id", pending=9, next_due_ms=0, as_of_ms=8)
    message.subscriptions.add(subscription="sub", subscription_id=1, backlog=4, in_flight=3, dispatchers=2, permits=6)
    daemon.script("GetTopicStats", answer(message))
    stats = await client.stats("t")
    assert (stats.topic, stats.topic_id, stats.pending, stats.next_due_ms, stats.as_of_ms) == ("t", "id", 9, None, 8)
    assert stats.subscriptions == (tarry.SubscriptionStats("sub", 1, 0, 4, 3, 2, 6),)


async def test_a_daemon_that_comes_back_is_found_again(connect: Connect) -> None:
    serving = fake_daemon.FakeDaemon()
    serving.script("AddMessages", accept)
    address = serving.address
    client = connect(address, retry_policy=conftest.AT_ONCE, timeout_s=fake_daemon.WAIT_S)
    await client.add("topic", 1, 1, delay_ms=1)
    await asyncio.to_thread(serving.stop)
    with pytest.raises(tarry.DeadlineExceeded):
        await client.add("topic", 1, 2, delay_ms=1, timeout_s=0.05)
    again = fake_daemon.FakeDaemon(address)
    again.script("AddMessages", accept)
    assert (await client.add("topic", 1, np.array([2]), delay_ms=1)).accepted == 1
    again.stop()
