"""Each unary call: the request that it sends, what it makes of the answer, and that failures are treated alike."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import numpy as np
import pytest

import tarry
import tarry.aio
from tarry.v1 import admin_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2
from tests._support.outcomes import nack_result
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.conformance._support.deletion_calls import DELETION_CALLS
from tests.client.conformance._support.every_call import (
    BUCKET,
    CALLS,
    CONSUMER,
    CONSUMER_RESULT,
    HANDED_OUT,
    KEY_SHARED,
    LOST,
    LOST_RESULT,
    STATS,
    STATS_RESULT,
    Call,
    plain,
)

# gRPC's events of a loop that is closed already disturb those of the next: one loop for all.
pytestmark = pytest.mark.asyncio(loop_scope="session")

CODE = grpc.StatusCode


async def items(iterated: Any) -> list[Any]:
    return [item async for item in iterated]


EVERY_CALL = [*CALLS, *DELETION_CALLS]

every_call = pytest.mark.parametrize(
    "call", EVERY_CALL, ids=[f"{call.method}-{number}" for number, call in enumerate(EVERY_CALL)]
)


@every_call
async def test_the_request_is_sent_and_the_answer_understood(
    daemon: FakeDaemon, client: tarry.aio.Client, call: Call
) -> None:
    daemon.script(call.method, answer(call.response))
    assert plain(await call.make(client)) == plain(call.result)
    assert daemon.requests(call.method) == [call.request]


@every_call
async def test_a_passing_failure_is_tried_again(daemon: FakeDaemon, client: tarry.aio.Client, call: Call) -> None:
    passing = [refuse(code) for code in (CODE.UNAVAILABLE, CODE.ABORTED, CODE.UNKNOWN)]
    quota = refuse(CODE.RESOURCE_EXHAUSTED, retry_after_ms="1")
    daemon.script(call.method, *passing, quota, answer(call.response))
    expected = call.result
    if isinstance(expected, (tarry.Cancelled, tarry.Rescheduled)):
        expected = dataclasses.replace(expected, may_have_landed=True)
    assert plain(await call.make(client)) == plain(expected)
    assert daemon.requests(call.method) == [call.request] * 5


@every_call
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (CODE.INVALID_ARGUMENT, tarry.InvalidArgument),
        (CODE.NOT_FOUND, tarry.NotFound),
        (CODE.OUT_OF_RANGE, tarry.OutOfRange),
        (CODE.ALREADY_EXISTS, tarry.AlreadyExists),
        (CODE.RESOURCE_EXHAUSTED, tarry.ResourceExhausted),
        (CODE.DATA_LOSS, tarry.DataLoss),
        (CODE.INTERNAL, tarry.Internal),
        (CODE.UNAUTHENTICATED, tarry.Unauthenticated),
        (CODE.PERMISSION_DENIED, tarry.PermissionDenied),
        (CODE.UNIMPLEMENTED, tarry.TarryError),
    ],
)
async def test_a_lasting_failure_is_raised_at_once(
    daemon: FakeDaemon, client: tarry.aio.Client, call: Call, code: grpc.StatusCode, kind: type[tarry.TarryError]
) -> None:
    daemon.script(call.method, refuse(code, "as it is"))
    with pytest.raises(kind, match="as it is") as raised:
        await call.make(client)
    assert type(raised.value) is kind
    assert raised.value.code is code
    assert daemon.count(call.method) == raised.value.attempts == 1
    assert not raised.value.may_have_landed


@every_call
async def test_the_owner_that_a_daemon_names_is_followed_with_a_topic_and_without(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client, call: Call
) -> None:
    daemon.script(
        call.method,
        refuse(CODE.FAILED_PRECONDITION, owner_address=other_daemon.address),
        answer(call.response),
    )
    other_daemon.script(call.method, answer(call.response))
    assert plain(await call.make(client)) == plain(call.result)
    assert (daemon.count(call.method), other_daemon.count(call.method)) == (1, 1)


@pytest.mark.parametrize("method", ["DeleteSubscription", "DeleteTopic"])
async def test_what_is_missing_after_a_lost_answer_was_deleted(
    daemon: FakeDaemon, client: tarry.aio.Client, method: str
) -> None:
    daemon.script(method, refuse(CODE.UNAVAILABLE), refuse(CODE.NOT_FOUND))
    if method == "DeleteTopic":
        assert await client.delete_topic("t") == tarry.TopicDeleted(None, None)
    else:
        assert await client.delete_subscription("t", "s") == tarry.SubscriptionDeleted(None)
    assert daemon.count(method) == 2


@pytest.mark.parametrize("method", ["DeleteSubscription", "DeleteTopic"])
async def test_what_is_missing_at_the_owner_that_an_unknown_outcome_names_was_deleted(
    daemon: FakeDaemon, other_daemon: FakeDaemon, client: tarry.aio.Client, method: str
) -> None:
    daemon.script(method, refuse(CODE.UNKNOWN, owner_address=other_daemon.address))
    other_daemon.script(method, refuse(CODE.NOT_FOUND))
    if method == "DeleteTopic":
        assert await client.delete_topic("t") == tarry.TopicDeleted(None, None)
    else:
        assert await client.delete_subscription("t", "s") == tarry.SubscriptionDeleted(None)
    assert (daemon.count(method), other_daemon.count(method)) == (1, 1)


@pytest.mark.parametrize("method", ["DeleteSubscription", "DeleteTopic"])
async def test_what_is_missing_after_a_conflict_was_not_there(
    daemon: FakeDaemon, client: tarry.aio.Client, method: str
) -> None:
    daemon.script(method, refuse(CODE.ABORTED), refuse(CODE.NOT_FOUND))
    with pytest.raises(tarry.NotFound):
        await (client.delete_topic("t") if method == "DeleteTopic" else client.delete_subscription("t", "s"))


async def test_lists_are_read_page_by_page(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    pages = [inspect_pb2.ListBucketsResponse(buckets=[BUCKET], next_page_token="b"), inspect_pb2.ListBucketsResponse()]
    daemon.script("ListBuckets", *(answer(page) for page in pages))
    assert [bucket.bucket for bucket in await items(client.buckets("t"))] == ["b"]
    assert [request.page_token for request in daemon.requests("ListBuckets")] == ["", "b"]
    listed = inspect_pb2.ListSubscriptionsResponse(subscriptions=[STATS], next_page_token="s")
    daemon.script("ListSubscriptions", answer(listed), answer(inspect_pb2.ListSubscriptionsResponse()))
    assert await items(client.subscriptions("t")) == [STATS_RESULT]
    assert [request.page_token for request in daemon.requests("ListSubscriptions")] == ["", "s"]
    seen = inspect_pb2.ListConsumersResponse(consumers=[CONSUMER], next_page_token="c", key_shared=KEY_SHARED)
    daemon.script("ListConsumers", answer(seen), answer(inspect_pb2.ListConsumersResponse(consumers=[CONSUMER])))
    assert await items(client.consumers("t", "s")) == [CONSUMER_RESULT] * 2
    assert [request.page_token for request in daemon.requests("ListConsumers")] == ["", "c"]


async def test_long_columns_are_several_requests_and_one_count(daemon: FakeDaemon, connect: Any) -> None:
    client = connect(daemon.address, rows_per_request=2)
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse(ignored=1)))
    daemon.script("ExtendLease", answer(dispatch_pb2.ExtendLeaseResponse(ignored=2)))
    daemon.script("TrimMessages", answer(delayed_delivery_pb2.TrimMessagesResponse(trimmed=10)))
    assert await client.ack("t", "s", (7, range(5), 1000)) == 3
    assert await client.extend_lease("t", "s", (7, range(5), 1000), 0) == 6
    assert await client.trim("t", range(3), 9) == 20
    assert [list(request.entry_id) for request in daemon.requests("Acknowledge")] == [[0, 1], [2, 3], [4]]
    assert [list(request.deliver_at_ms) for request in daemon.requests("ExtendLease")] == [
        [1000] * 2,
        [1000] * 2,
        [1000],
    ]
    assert [list(request.ledger_id) for request in daemon.requests("TrimMessages")] == [[0, 1], [2]]
    daemon.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse(ignored=1, dead_lettered=2)))
    assert await client.nack("t", "s", (7, range(5), 0), delay_ms=[1, 2, 3, 4, 5]) == nack_result(3, 6)
    assert [list(request.delay_ms) for request in daemon.requests("NegativeAcknowledge")] == [[1, 2], [3, 4], [5]]


async def test_what_a_topic_needs_of_its_log_is_one_answer(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    pages = [
        inspect_pb2.GetRetentionResponse(ledger_id=[7, 9], lowest_entry_id=[4, 0], next_page_token="p", as_of_ms=5),
        inspect_pb2.GetRetentionResponse(ledger_id=[20], lowest_entry_id=[1]),
        inspect_pb2.GetRetentionResponse(),
        inspect_pb2.GetRetentionResponse(ledger_id=[2000], lowest_entry_id=[8]),
    ]
    daemon.script("GetRetention", *(answer(page) for page in pages))
    needed = await client.retention("t", range(2_000, -1, -1))
    assert list(needed) == [(7, 4), (9, 0), (20, 1), (2000, 8)]
    assert (needed.lowest_position, needed.as_of_ms, needed.uncertain) == ((7, 4), 5, ())
    asked = daemon.requests("GetRetention")
    assert [each.page_token for each in asked] == ["", "p", "", ""]
    assert [(each.ledger_id[0], len(each.ledger_id)) for each in asked] == [(0, 1_000)] * 2 + [(1000, 1000), (2000, 1)]
    with pytest.raises(tarry.InvalidArgument, match="names no ledger"):
        await client.retention("t", [])


# Redelivery.


async def test_what_was_redelivered_tells_how_often_and_which_message_and_goes_back_as_it_came(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    messages = dispatch_pb2.Messages(
        ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 0], redelivery_count=[0, 3],
        batch_index=[tarry.NO_BATCH_INDEX, 5],
    )  # fmt: skip
    daemon.script("GetScheduledMessages", answer(dispatch_pb2.GetScheduledMessagesResponse(messages=messages)))
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse()))
    daemon.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse()))
    daemon.script("ExtendLease", answer(dispatch_pb2.ExtendLeaseResponse()))
    leased = await client.get("t", "s")
    assert leased.redelivery_count.tolist() == [0, 3]
    assert leased.batch_index is not None
    assert leased.batch_index.tolist() == [tarry.NO_BATCH_INDEX, 5]
    await client.ack("t", "s", leased.take([1]))
    await client.ack("t", "s", leased.positions)
    await client.nack("t", "s", leased)
    await client.extend_lease("t", "s", leased, 9)
    named = [list(request.batch_index) for method, request in daemon.calls if method != "GetScheduledMessages"]
    assert named == [[5], *([[tarry.NO_BATCH_INDEX, 5]] * 3)]


async def test_what_was_never_redelivered_has_counts_of_0(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    messages = dispatch_pb2.Messages(ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 11])
    daemon.script("GetScheduledMessages", answer(dispatch_pb2.GetScheduledMessagesResponse(messages=messages)))
    leased = await client.get("t", "s")
    assert (leased.redelivery_count.tolist(), leased.batch_index) == ([0, 0], None)


async def test_positions_that_tarry_never_handed_out_are_sent_with_no_time(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("NegativeAcknowledge", answer(dispatch_pb2.NegativeAcknowledgeResponse()))
    await client.nack("t", "s", (7, range(3), 0), delay_ms=5, key_hash=[1, 2, 3])
    (asked,) = daemon.requests("NegativeAcknowledge")
    assert (list(asked.deliver_at_ms), list(asked.delay_ms), list(asked.key_hash)) == ([0] * 3, [5], [1, 2, 3])


async def test_delay_levels_are_sent_with_the_rows(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("AddMessages", answer(delayed_delivery_pb2.AddMessagesResponse(accepted=2)))
    await client.add("t", 7, [1, 2], delay_level=[-1, 300])
    (asked,) = daemon.requests("AddMessages")
    assert (list(asked.delay_level), list(asked.delay_ms), list(asked.deliver_at_ms)) == ([-1, 300], [], [])


async def test_dead_letters_are_read_page_by_page_and_a_page_may_be_empty(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    first = inspect_pb2.ListDeadLettersResponse(
        dead_letter_id=[4], ledger_id=[7], entry_id=[1], deliver_at_ms=[0], next_page_token="a",
        reason=[inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN],
    )  # fmt: skip
    empty = inspect_pb2.ListDeadLettersResponse(next_page_token="b")
    daemon.script("ListDeadLetters", answer(first), answer(empty), answer(inspect_pb2.ListDeadLettersResponse()))
    (page,) = await items(client.dead_letters("t", "s"))
    assert (page.dead_letter_id.tolist(), page.redelivery_count.tolist(), page.batch_index) == ([4], [0], None)
    assert (page.text_index.tolist(), page.texts) == ([0], ("",))
    assert [request.page_token for request in daemon.requests("ListDeadLetters")] == ["", "a", "b"]


async def test_more_dead_letters_than_a_request_may_name_are_several_requests(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("ReplayDeadLetters", answer(admin_pb2.ReplayDeadLettersResponse(replayed=5, skipped=1)))
    which = tarry.DeadLetterFilter(ids=np.arange(150_000)[::-1])
    assert await client.replay_dead_letters("t", "s", which) == tarry.Replayed(10, 2)
    asked = [np.array(request.filter.dead_letter_id) for request in daemon.requests("ReplayDeadLetters")]
    assert [(len(ids), int(ids[0]), int(ids[-1])) for ids in asked] == [
        (100_000, 0, 99_999),
        (50_000, 100_000, 149_999),
    ]


async def test_no_ids_are_not_all_dead_letters(client: tarry.aio.Client) -> None:
    with pytest.raises(tarry.InvalidArgument, match="ids names no dead letter"):
        await client.purge_dead_letters("t", "s", tarry.DeadLetterFilter(ids=[]))


async def test_the_daemon_s_own_levels_are_asked_of_any_daemon_and_reset_by_none(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    levels = admin_pb2.DelayLevels(table="1s")
    daemon.script("GetDelayLevels", answer(admin_pb2.GetDelayLevelsResponse(levels=levels, delay_ms=[1_000])))
    daemon.script("SetDelayLevels", answer(admin_pb2.SetDelayLevelsResponse(levels=levels)))
    assert await client.delay_levels() == tarry.DelayLevelsInForce(tarry.DelayLevels("1s"), (1_000,), False, ())
    assert (await client.set_delay_levels("t", None)).levels == tarry.DelayLevels("1s")
    assert not daemon.requests("SetDelayLevels")[0].HasField("levels")


# Leases.


async def test_what_is_due_is_leased_as_a_batch(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    messages = dispatch_pb2.Messages(
        epoch=4, ledger_id=[7, 7, 7], entry_id=[1, 2, 3], deliver_at_ms=[10, 11, 12], key_hash=[0, 5, 0]
    )
    response = dispatch_pb2.GetScheduledMessagesResponse(messages=messages, lease_ms=30_000, rebuild_needed=[LOST])
    daemon.script("GetScheduledMessages", answer(response))
    leased = await client.get("t", "s", max_rows=5, lease_ms=9, wait_ms=10_000)
    (asked,) = daemon.requests("GetScheduledMessages")
    # What is left of the wait when the call begins.
    assert 0 < asked.wait_ms <= 10_000
    asked.wait_ms = 0
    assert asked == dispatch_pb2.GetScheduledMessagesRequest(topic="t", subscription="s", max_rows=5, lease_ms=9)
    assert isinstance(leased, tarry.Batch)
    assert (leased.epoch, leased.lease_ms, leased.rebuild_needed) == (4, 30_000, (LOST_RESULT,))
    assert [column.tolist() for column in leased.positions[:3]] == [[7, 7, 7], [1, 2, 3], [10, 11, 12]]
    assert leased.key_hash is not None
    assert leased.key_hash.tolist() == [0, 5, 0]
    daemon.script("Acknowledge", answer(dispatch_pb2.AcknowledgeResponse()))
    part = leased.take([0, 2])
    assert (type(part), part.lease_ms) == (tarry.Leased, 30_000)
    assert await client.ack("t", "s", part) == 0
    assert list(daemon.requests("Acknowledge")[0].entry_id) == [1, 3]


async def test_when_nothing_came_due_the_batch_is_empty_and_needs_no_acknowledgement(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    daemon.script("GetScheduledMessages", answer(dispatch_pb2.GetScheduledMessagesResponse()))
    leased = await client.get("t", "s")
    assert len(leased) == 0
    assert daemon.requests("GetScheduledMessages") == [
        dispatch_pb2.GetScheduledMessagesRequest(topic="t", subscription="s", max_rows=1_000)
    ]
    assert await client.ack("t", "s", leased) == 0
    assert await client.extend_lease("t", "s", leased, 5) == 0


async def test_a_retry_waits_for_what_is_left_of_the_time(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("GetScheduledMessages", refuse(CODE.UNAVAILABLE), answer(dispatch_pb2.GetScheduledMessagesResponse()))
    await client.get("t", "s", wait_ms=500_000, timeout_s=300)
    first, second = daemon.requests("GetScheduledMessages")
    assert 200_000 < second.wait_ms < first.wait_ms <= 500_000


@pytest.mark.parametrize("wrong", [{"max_rows": -1}, {"max_rows": 2**32}, {"lease_ms": -1}, {"wait_ms": 2**32}])
async def test_a_number_that_the_field_cannot_hold_is_refused_by_name(
    client: tarry.aio.Client, wrong: dict[str, int]
) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(tarry.InvalidArgument, match=f"{name} is {value}; it must be a whole number from 0 to"):
        await client.get("t", "s", **wrong)


async def test_policies_that_the_message_cannot_hold_are_refused_by_name(client: tarry.aio.Client) -> None:
    with pytest.raises(tarry.InvalidArgument, match="bucket_rows_max is -1"):
        await client.set_policy("t", tarry.TopicPolicy(bucket_rows_max=-1))
    with pytest.raises(tarry.InvalidArgument, match=r"properties holds 'team'"):
        await client.update_subscription("t", "s", tarry.SubscriptionPolicy(properties={"team": 5}))  # type: ignore[dict-item]


async def test_a_name_without_utf8_form_is_refused(client: tarry.aio.Client) -> None:
    for call in (client.add("\udcff", 1, 1, delay_ms=1), client.stats("\udcff"), client.ack("t", "\udcff", HANDED_OUT)):
        with pytest.raises(tarry.InvalidArgument, match="must be UTF-8 text"):
            await call


# What is contained.


def ranges(*rows: tuple[int, int, int]) -> delayed_delivery_pb2.EntryRanges:
    ledger_id, first, last = zip(*rows, strict=True) if rows else ((), (), ())
    return delayed_delivery_pb2.EntryRanges(ledger_id=ledger_id, first_entry_id=first, last_entry_id=last)


def contained(
    *pending: tuple[int, int, int], due: tuple[tuple[int, int, int], ...] = (), continues: tuple[int, int] | None = None
) -> delayed_delivery_pb2.ContainsMessagesResponse:
    continuation = None
    if continues is not None:
        continuation = delayed_delivery_pb2.ContainsContinuation(index=continues[0], entry_id=continues[1])
    return delayed_delivery_pb2.ContainsMessagesResponse(
        pending=ranges(*pending), due=ranges(*due), continuation=continuation
    )


async def test_a_cursor_learns_what_to_skip(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    """Of entries 0 to 9 with 1 to 8 delayed it reads 0 and 9 (PIP-195)."""
    daemon.script("ContainsMessages", answer(contained((7, 1, 6), due=((7, 7, 8),))))
    found = await client.contains("t", 7, 0, last_entry_id=9, subscription="s")
    assert daemon.requests("ContainsMessages") == [
        delayed_delivery_pb2.ContainsMessagesRequest(
            topic="t", ledger_id=[7], entry_id=[0], last_entry_id=[9], subscription="s"
        )
    ]
    assert list(found.pending) == [(7, 1, 6)]
    assert list(found.due) == [(7, 7, 8)]
    assert (found.pending.rows, found.due.rows, len(found.due)) == (6, 2, 1)


async def test_positions_are_asked_one_by_one(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("ContainsMessages", answer(contained()))
    found = await client.contains("t", 7, np.array([3, 5]))
    assert (list(found.pending), list(found.due)) == ([], [])
    (request,) = daemon.requests("ContainsMessages")
    assert (list(request.ledger_id), list(request.entry_id), list(request.last_entry_id)) == ([7, 7], [3, 5], [])
    assert request.subscription == ""


async def test_a_long_answer_is_asked_for_to_its_end_and_its_ranges_are_whole(
    daemon: FakeDaemon, client: tarry.aio.Client
) -> None:
    """Ranges (1, 0-9), (2, 0-99), (3, 5-6): cut in the second at 50 and again at 80, then before the third."""
    daemon.script(
        "ContainsMessages",
        answer(contained((1, 2, 3), (2, 10, 49), continues=(1, 50))),
        answer(contained((2, 50, 79), due=((2, 80, 80),), continues=(0, 80))),
        answer(contained((2, 81, 90), continues=(1, 5))),
        answer(contained((3, 5, 6))),
    )
    found = await client.contains("t", [1, 2, 3], [0, 0, 5], last_entry_id=[9, 99, 6])
    assert list(found.pending) == [(1, 2, 3), (2, 10, 79), (2, 81, 90), (3, 5, 6)]
    assert list(found.due) == [(2, 80, 80)]
    asked = [
        list(zip(request.ledger_id, request.entry_id, request.last_entry_id, strict=True))
        for request in daemon.requests("ContainsMessages")
    ]
    assert asked == [
        [(1, 0, 9), (2, 0, 99), (3, 5, 6)],
        [(2, 50, 99), (3, 5, 6)],
        [(2, 80, 99), (3, 5, 6)],
        [(3, 5, 6)],
    ]


async def test_neighbours_of_two_ranges_of_the_request_stay_apart(daemon: FakeDaemon, client: tarry.aio.Client) -> None:
    daemon.script("ContainsMessages", answer(contained((1, 2, 3), continues=(1, 4))), answer(contained((1, 4, 4))))
    found = await client.contains("t", 1, [0, 4], last_entry_id=[3, 9])
    assert list(found.pending) == [(1, 2, 3), (1, 4, 4)]


@pytest.mark.parametrize("place", [(0, 0), (1, 0)])
async def test_an_answer_that_goes_nowhere_is_a_bug_and_not_a_loop(
    daemon: FakeDaemon, client: tarry.aio.Client, place: tuple[int, int]
) -> None:
    daemon.script("ContainsMessages", answer(contained(continues=place)))
    with pytest.raises(tarry.Internal, match="no progress"):
        await client.contains("t", 1, 0, last_entry_id=9)


async def test_many_ranges_are_several_requests(daemon: FakeDaemon, connect: Any) -> None:
    daemon.script("ContainsMessages", answer(contained((1, 0, 0))), answer(contained((1, 4, 4))))
    found = await connect(daemon.address, rows_per_request=2).contains("t", 1, [0, 2, 4])
    assert list(found.pending) == [(1, 0, 0), (1, 4, 4)]
    assert [list(request.entry_id) for request in daemon.requests("ContainsMessages")] == [[0, 2], [4]]


async def test_columns_of_different_lengths_are_refused(client: tarry.aio.Client) -> None:
    with pytest.raises(tarry.InvalidArgument, match="entry_id has 2 rows; it must have 1 or 3"):
        await client.contains("t", 1, [0, 1], last_entry_id=[1, 2, 3])
    with pytest.raises(tarry.InvalidArgument, match="entry_id has no rows"):
        await client.trim("t", 1, [])
