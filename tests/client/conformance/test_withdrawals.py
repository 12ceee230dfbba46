"""Cancelling, rescheduling, adding for one subscription, and collecting garbage: what is told of lost answers and
failures in the middle.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import tarry
import tarry.aio
from tarry.v1 import admin_pb2, delayed_delivery_pb2, inspect_pb2
from tests._support.patience import awaited_within_some_time
from tests.client._support.fake_daemon import FakeDaemon, accept, accept_all, answer, refuse
from tests.client.conformance.conftest import Connect

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = grpc.StatusCode
GONE = {
    "CancelMessages": delayed_delivery_pb2.CancelMessagesResponse(not_found_index=[0]),
    "RescheduleMessages": delayed_delivery_pb2.RescheduleMessagesResponse(not_found_index=[0]),
}


def cancel(client: tarry.aio.Client, entries: Any) -> Awaitable[tarry.Cancelled]:
    return client.cancel("t", 7, entries)


def reschedule(client: tarry.aio.Client, entries: Any) -> Awaitable[tarry.Rescheduled]:
    return client.reschedule("t", 7, entries, delay_ms=5)


Withdraw = Callable[[tarry.aio.Client, Any], Awaitable[Any]]
both = pytest.mark.parametrize(
    ("method", "withdraw"),
    [("CancelMessages", cancel), ("RescheduleMessages", reschedule)],
    ids=["cancel", "reschedule"],
)


@both
@pytest.mark.parametrize("lost", [CODE.UNAVAILABLE, CODE.UNKNOWN])
async def test_what_is_not_found_after_a_lost_answer_may_have_been_withdrawn_by_it(
    daemon: FakeDaemon, client: tarry.aio.Client, method: str, withdraw: Withdraw, lost: grpc.StatusCode
) -> None:
    daemon.script(method, refuse(lost), answer(GONE[method]))
    result = await withdraw(client, 1)
    assert result.not_found_index.tolist() == [0]
    assert result.may_have_landed


@both
async def test_what_is_not_found_after_a_conflict_or_a_quota_was_not_there(
    daemon: FakeDaemon, client: tarry.aio.Client, method: str, withdraw: Withdraw
) -> None:
    quota = refuse(CODE.RESOURCE_EXHAUSTED, retry_after_ms="1")
    daemon.script(method, refuse(CODE.ABORTED), quota, refuse(CODE.FAILED_PRECONDITION), answer(GONE[method]))
    assert not (await withdraw(client, 1)).may_have_landed
    assert daemon.count(method) == 4


@both
async def test_a_withdrawal_comes_back_no_sooner_than_the_daemon_says(
    daemon: FakeDaemon, client: tarry.aio.Client, method: str, withdraw: Withdraw
) -> None:
    came_s: list[float] = []

    def refuse_the_first(request: Any, context: grpc.ServicerContext) -> Any:
        came_s.append(time.monotonic())
        step = refuse(CODE.RESOURCE_EXHAUSTED, retry_after_ms="150") if len(came_s) == 1 else answer(GONE[method])
        return step(request, context)

    daemon.script(method, refuse_the_first)
    await withdraw(client, 1)
    assert came_s[1] - came_s[0] >= 0.15


@both
async def test_long_columns_are_several_requests_and_indexes_are_those_of_the_batch(
    daemon: FakeDaemon, connect: Connect, method: str, withdraw: Withdraw
) -> None:
    kind = type(GONE[method])
    first = kind(not_found_index=[1], already_due_index=[0])
    daemon.script(method, answer(first), refuse(CODE.UNAVAILABLE), answer(kind(in_flight_index=[1])), answer(kind()))
    retry_policy = tarry.RetryPolicy(initial_s=0.001, max_s=0.001)
    result = await withdraw(connect(daemon.address, rows_per_request=2, retry_policy=retry_policy), range(5))
    assert [list(request.entry_id) for request in daemon.requests(method)] == [[0, 1], [2, 3], [2, 3], [4]]
    lists = (result.not_found_index, result.already_due_index, result.in_flight_index)
    assert [index.tolist() for index in lists] == [[1], [0], [3]]
    assert result.may_have_landed, "one of its requests was sent twice"


async def test_counts_and_raised_rows_of_several_requests_are_added_up(daemon: FakeDaemon, connect: Connect) -> None:
    daemon.script("CancelMessages", answer(delayed_delivery_pb2.CancelMessagesResponse(cancelled=2)))
    part = delayed_delivery_pb2.RescheduleMessagesResponse(rescheduled=2, raised_index=[1], raised_deliver_at_ms=[9])
    daemon.script("RescheduleMessages", answer(part))
    client = connect(daemon.address, rows_per_request=2)
    assert (await client.cancel("t", 7, range(4))).cancelled == 4
    result = await client.reschedule("t", 7, range(4), deliver_at_ms=np.arange(4), key_hash=5)
    assert (result.rescheduled, result.raised_index.tolist()) == (4, [1, 3])
    assert result.raised_deliver_at_ms.tolist() == [9, 9]
    sent = [(list(each.deliver_at_ms), list(each.key_hash)) for each in daemon.requests("RescheduleMessages")]
    assert sent == [([0, 1], [5]), ([2, 3], [5])]


async def test_bad_arguments_are_refused_by_name_and_nothing_is_sent(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    wrong: list[tuple[Callable[[], Awaitable[Any]], str]] = [
        (lambda: client.cancel("t", 7, []), "entry_id has no rows"),
        (lambda: client.cancel("t", [1, 2], [1, 2, 3]), "ledger_id has 2 rows; it must have 1 or 3"),
        (lambda: client.cancel("t", 7, -1), "entry_id holds -1"),
        (lambda: client.cancel("t", 7, 1, subscription="\udc80"), "subscription is .*UTF-8"),
        (lambda: client.reschedule("t", 7, 1), "deliver_at_ms"),
        (lambda: client.reschedule("t", 7, 1, deliver_at_ms=1, delay_ms=1), "deliver_at_ms"),
        (lambda: client.reschedule("t", 7, 1, delay_ms=1, key_hash=2**32), "key_hash holds 4294967296"),
        (lambda: client.merge("t", -1), "buckets_max is -1"),
        (lambda: client.scheduled_page("t", from_ms=-1), "from_ms is -1"),
        (lambda: client.scheduled_page("t", ledgers=(0, 2**64)), "last_ledger_id is 18446744073709551616"),
        (lambda: client.histogram("t", width_ms=-5), "width_ms is -5"),
        (lambda: client.backlog_page("t", "s", page_size=2**32), "page_size is 4294967296"),
    ]
    for call, says in wrong:
        with pytest.raises(tarry.InvalidArgument, match=says):
            await call()
    assert daemon.calls == []


async def test_rows_for_one_subscription_name_it_on_both_ways(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("AddMessages", accept)
    daemon.script("StreamAddMessages", accept_all)
    await client.add("t", 7, 1, delay_ms=1, subscription="s")
    async with client.add_stream("t", subscription="s") as stream:
        await (await stream.add(7, 1, delay_ms=1))
    (unary,) = daemon.requests("AddMessages")
    (requests,) = daemon.requests("StreamAddMessages")
    assert unary == requests.taken[0].add
    assert unary.subscription == "s"


async def test_rows_are_read_page_by_page_and_empty_pages_are_no_end(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    columns: dict[str, Any] = {"ledger_id": [7], "deliver_at_ms": [9], "key_hash": [0]}
    for method, kind in (
        ("ListScheduled", inspect_pb2.ListScheduledResponse),
        ("ListBacklog", inspect_pb2.ListBacklogResponse),
    ):
        daemon.script(
            method,
            answer(kind(entry_id=[1], next_page_token="a", **columns)),
            answer(kind(next_page_token="b")),
            answer(kind(entry_id=[2], **columns)),
        )
    scheduled = [page async for page in client.scheduled("t", from_ms=3)]
    assert [page.entry_id.tolist() for page in scheduled] == [[1], [2]]
    assert (scheduled[0].subscription_index.tolist(), scheduled[0].subscriptions) == ([0], ("",))
    assert [page.entry_id.tolist() async for page in client.backlog("t", "s")] == [[1], [2]]
    for method in ("ListScheduled", "ListBacklog"):
        assert [request.page_token for request in daemon.requests(method)] == ["", "a", "b"]
    assert [request.from_ms for request in daemon.requests("ListScheduled")] == [3, 3, 3]


# Collecting garbage: many answers to one request.


def progress(shards_done: int, objects: int, *, done: bool = False) -> admin_pb2.CollectGarbageResponse:
    counts = admin_pb2.GarbageCount(objects=objects, size_bytes=10 * objects)
    summary = admin_pb2.GarbageSummary(tombstones=counts)
    return admin_pb2.CollectGarbageResponse(
        shards_done=shards_done, shards=2, topics_done=1, topics=3, summary=summary, done=done
    )


async def test_each_step_of_a_collection_tells_how_far_it_is(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    steps = [progress(1, 4), progress(2, 5, done=True)]
    daemon.script("CollectGarbage", lambda request, context: iter(steps))
    seen = [step async for step in client.collect_garbage(dry_run=True, retry_dead_objects=True)]
    assert [(step.shards_done, step.shards, step.topics_done, step.topics) for step in seen] == [
        (1, 2, 1, 3),
        (2, 2, 1, 3),
    ]
    assert [step.tombstones for step in seen] == [tarry.GarbageCount(4, 40), tarry.GarbageCount(5, 50)]
    assert seen[0].refused == tarry.GarbageCount(0, 0)
    assert [step.done for step in seen] == [False, True]
    assert daemon.requests("CollectGarbage") == [admin_pb2.CollectGarbageRequest(dry_run=True, retry_dead_objects=True)]


async def test_a_failure_in_the_middle_of_a_collection_is_raised_and_nothing_is_tried_again(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    def step(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield progress(1, 4)
        context.abort(CODE.UNAVAILABLE, "the store is gone")

    daemon.script("CollectGarbage", step)
    collecting = aiter(client.collect_garbage())
    assert (await anext(collecting)).shards_done == 1
    with pytest.raises(tarry.Unavailable, match="the store is gone"):
        await anext(collecting)
    assert daemon.count("CollectGarbage") == 1


async def test_a_collection_that_a_standby_is_asked_for_is_its_owner_s(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("CollectGarbage", refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address))
    other_daemon.script("CollectGarbage", lambda request, context: iter([progress(2, 5, done=True)]))
    assert [step.done async for step in client.collect_garbage()] == [True]
    assert (daemon.count("CollectGarbage"), other_daemon.count("CollectGarbage")) == (1, 1)


async def test_a_collection_whose_owner_cannot_be_reached_says_who_that_is(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    other_daemon.stop()
    daemon.script("CollectGarbage", refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address))
    with pytest.raises(tarry.NotOwner) as refused:
        await anext(aiter(client.collect_garbage()))
    assert refused.value.owner_address == other_daemon.address


async def test_daemons_that_name_each_other_are_not_asked_in_turns(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("CollectGarbage", refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address))
    other_daemon.script("CollectGarbage", refuse(CODE.FAILED_PRECONDITION, owner_address=daemon.address))
    with pytest.raises(tarry.NotOwner):
        await anext(aiter(client.collect_garbage()))
    assert (daemon.count("CollectGarbage"), other_daemon.count("CollectGarbage")) == (1, 1)


async def test_a_collection_that_is_too_slow_for_its_time_ends(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    def step(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield progress(1, 4)
        while context.is_active():
            time.sleep(0.01)

    daemon.script("CollectGarbage", step)

    async def story(seconds: float) -> None:
        done: list[int] = []

        async def collect() -> None:
            async for step in client.collect_garbage(timeout_s=seconds):
                done.append(step.shards_done)

        with pytest.raises(tarry.DeadlineExceeded):
            await collect()
        assert done == [1]

    await awaited_within_some_time(story)
