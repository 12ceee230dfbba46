"""Every call once, with the engine and a store in memory behind it."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from daemon import config
from daemon.grpc_services import ledger_deletion_service
from daemon.owner.engine import Engine
from storage_backends.formats.deletion_format import LedgerComponent
from storage_backends.memory_store import MemoryStore
from tarry.v1 import (
    admin_pb2,
    cluster_pb2,
    delayed_delivery_pb2,
    dispatch_pb2,
    inspect_pb2,
    ledger_deletion_pb2,
    policy_pb2,
)
from tests._support import owned_ledgers, real_engine
from tests._support.owned_ledgers import OwnedLedger
from tests.daemon.grpc_services._support.lanes import by_lane
from tests.daemon.grpc_services.conftest import ANSWERS, Edge

FAR_MS = 2_000_000_000_000


@pytest.fixture
def offloaded() -> MemoryStore:
    """Where ledgers of others are."""
    return MemoryStore()


@pytest.fixture
async def engine(settings: config.Config, offloaded: MemoryStore) -> AsyncIterator[Engine]:
    async with real_engine.serving(settings, ledger_stores=owned_ledgers.offloaded_in(offloaded)) as engine:
        yield engine


class Calls:
    """The unary calls on topic t, and which of them were made."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.made: set[str] = set()

    async def call(self, method: str, request_type: Any, **fields: Any) -> Any:
        self.made.add(method)
        return await self.edge.caller.unary(method, request_type(topic="t", **fields))


async def test_every_call_does_what_it_says(edge: Edge, offloaded: MemoryStore) -> None:
    calls = Calls(edge)
    await of_positions(calls)
    await of_policies(calls)
    await of_withdrawals(calls)
    await of_views(calls)
    await of_leases(calls)
    await of_dead_letters(calls)
    await of_streams(calls)
    await of_lanes(calls)
    await of_consumers(calls)
    await of_topics(calls)
    await of_garbage(calls)
    await of_deletions(calls, offloaded)
    assert calls.made == set(ANSWERS)


async def of_positions(calls: Calls) -> None:
    log = delayed_delivery_pb2
    rows = {"ledger_id": [5], "entry_id": range(1, 9), "deliver_at_ms": [FAR_MS]}
    added = await calls.call("DelayedDelivery/AddMessages", log.AddMessagesRequest, **rows)
    assert added.accepted == 8
    asked = {"ledger_id": [5], "entry_id": [0], "last_entry_id": [9]}
    found = await calls.call("DelayedDelivery/ContainsMessages", log.ContainsMessagesRequest, **asked)
    assert (list(found.pending.first_entry_id), list(found.pending.last_entry_id)) == ([1], [8])
    trimmed = await calls.call("DelayedDelivery/TrimMessages", log.TrimMessagesRequest, ledger_id=[5], entry_id=[2])
    assert trimmed.trimmed == 2
    cleared = await calls.call("DelayedDelivery/ClearMessages", log.ClearMessagesRequest)
    assert cleared.cleared == 6
    calls.made.add("DelayedDelivery/StreamAddMessages")
    stream = calls.edge.caller.stream("DelayedDelivery/StreamAddMessages")
    request = log.AddMessagesRequest(topic="t", ledger_id=[6], entry_id=[1, 2, 3], deliver_at_ms=[FAR_MS, FAR_MS, 1])
    await stream.send(log.StreamAddMessagesRequest(request_id=3, add=request))
    answer = await stream.receive()
    assert (answer.request_id, answer.added.accepted, answer.added.late_on_arrival) == (3, 3, 1)


async def of_policies(calls: Calls) -> None:
    policy = policy_pb2.SubscriptionPolicy(lease_ms=3_600_000)
    created = await calls.call("Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest, subscription="s")
    assert created.created
    updated = await calls.call(
        "Dispatch/UpdateSubscription", dispatch_pb2.UpdateSubscriptionRequest, subscription="s", policy=policy
    )
    assert updated.policy == policy
    set_policy = await calls.call(
        "Admin/SetTopicPolicy",
        admin_pb2.SetTopicPolicyRequest,
        policy=policy_pb2.TopicPolicy(bucket_form=policy_pb2.BUCKET_FORM_COMPATIBLE),
    )
    found = await calls.call("Admin/GetTopicPolicy", admin_pb2.GetTopicPolicyRequest)
    assert found.policy == policy_pb2.TopicPolicy(bucket_form=policy_pb2.BUCKET_FORM_COMPATIBLE)
    assert found.effective == set_policy.effective
    assert len(found.effective.ListFields()) == len(found.effective.DESCRIPTOR.fields)
    levels = admin_pb2.DelayLevels(table="1s 1m")
    await calls.call("Admin/SetDelayLevels", admin_pb2.SetDelayLevelsRequest, levels=levels)
    levels_in_force = await calls.call("Admin/GetDelayLevels", admin_pb2.GetDelayLevelsRequest)
    assert (list(levels_in_force.delay_ms), levels_in_force.of_topic) == ([1_000, 60_000], True)


async def of_withdrawals(calls: Calls) -> None:
    log = delayed_delivery_pb2
    chosen = {"ledger_id": [6], "entry_id": [2, 99]}
    times = {"deliver_at_ms": [FAR_MS + 5]}
    moved = await calls.call("DelayedDelivery/RescheduleMessages", log.RescheduleMessagesRequest, **chosen, **times)
    assert (moved.rescheduled, list(moved.not_found_index)) == (1, [1])
    unknown = {"ledger_id": [6], "entry_id": [3, 99]}
    cancelled = await calls.call("DelayedDelivery/CancelMessages", log.CancelMessagesRequest, **unknown)
    assert (cancelled.cancelled, list(cancelled.already_due_index), list(cancelled.not_found_index)) == (0, [0], [1])


async def of_views(calls: Calls) -> None:
    scheduled = await calls.call("Inspect/ListScheduled", inspect_pb2.ListScheduledRequest)
    assert (list(scheduled.entry_id), list(scheduled.deliver_at_ms)) == ([1, 2], [FAR_MS, FAR_MS + 5])
    counted = await calls.call("Inspect/GetHistogram", inspect_pb2.GetHistogramRequest)
    assert (sum(counted.rows), counted.rows_before, counted.rows_after) == (2, 0, 0)
    due = await calls.call("Inspect/ListBacklog", inspect_pb2.ListBacklogRequest, subscription="s")
    assert (list(due.entry_id), list(due.state)) == ([3], [inspect_pb2.BACKLOG_STATE_READY])
    retained = await calls.call("Inspect/GetRetention", inspect_pb2.GetRetentionRequest)
    assert (list(retained.ledger_id), list(retained.lowest_entry_id)) == ([6], [1])


async def of_leases(calls: Calls) -> None:
    leased = await calls.call(
        "Dispatch/GetScheduledMessages",
        dispatch_pb2.GetScheduledMessagesRequest,
        subscription="s",
        max_rows=10,
        wait_ms=10_000,
    )
    assert (list(leased.messages.entry_id), leased.lease_ms) == ([3], 3_600_000)
    columns = {"ledger_id": [6], "entry_id": [3], "deliver_at_ms": leased.messages.deliver_at_ms}
    extended = await calls.call(
        "Dispatch/ExtendLease", dispatch_pb2.ExtendLeaseRequest, subscription="s", lease_ms=60_000, **columns
    )
    assert extended.ignored == 0
    listed = await calls.call("Inspect/ListSubscriptions", inspect_pb2.ListSubscriptionsRequest)
    assert [(each.subscription, each.leased) for each in listed.subscriptions] == [("s", 1)]
    nacked = await calls.call(
        "Dispatch/NegativeAcknowledge",
        dispatch_pb2.NegativeAcknowledgeRequest,
        subscription="s",
        delay_ms=[3_600_000],
        **columns,
    )
    assert (nacked.ignored, nacked.dead_lettered) == (0, 0)
    done = await calls.call("Dispatch/Acknowledge", dispatch_pb2.AcknowledgeRequest, subscription="s", **columns)
    assert done.ignored == 0


async def of_dead_letters(calls: Calls) -> None:
    pair = {"subscription": "s", "ledger_id": [8], "entry_id": [1, 2, 3], "reject": True, "reason": "broken"}
    nacked = await calls.call("Dispatch/NegativeAcknowledge", dispatch_pb2.NegativeAcknowledgeRequest, **pair)
    assert (nacked.ignored, nacked.dead_lettered) == (0, 3)
    listed = await calls.call("Inspect/ListDeadLetters", inspect_pb2.ListDeadLettersRequest, subscription="s")
    assert (list(listed.entry_id), list(listed.texts)) == ([1, 2, 3], ["", "broken"])
    first, second = (
        inspect_pb2.DeadLetterFilter(dead_letter_id=[dead_letter_id]) for dead_letter_id in listed.dead_letter_id[:2]
    )
    replayed = await calls.call(
        "Admin/ReplayDeadLetters", admin_pb2.ReplayDeadLettersRequest, subscription="s", filter=first
    )
    assert (replayed.replayed, replayed.skipped) == (1, 0)
    purged = await calls.call(
        "Admin/PurgeDeadLetters", admin_pb2.PurgeDeadLettersRequest, subscription="s", filter=second
    )
    assert purged.purged == 1
    leased = await calls.call(
        "Dispatch/GetScheduledMessages",
        dispatch_pb2.GetScheduledMessagesRequest,
        subscription="s",
        max_rows=10,
        wait_ms=10_000,
    )
    assert (list(leased.messages.ledger_id), list(leased.messages.entry_id)) == ([8], [1])


async def of_streams(calls: Calls) -> None:
    calls.made.add("Dispatch/Subscribe")
    stream = calls.edge.caller.stream("Dispatch/Subscribe")
    shared = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
    await stream.send(dispatch_pb2.SubscribeRequest(open=dispatch_pb2.Open(topic="t", subscription="s", type=shared)))
    assert (await stream.receive()).opened.epoch > 0
    await stream.send(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=5)))
    await calls.call(
        "DelayedDelivery/AddMessages",
        delayed_delivery_pb2.AddMessagesRequest,
        ledger_id=[7],
        entry_id=[1],
        deliver_at_ms=[1],
    )
    assert list((await stream.receive()).messages.ledger_id) == [7]
    deleted = await calls.call("Dispatch/DeleteSubscription", dispatch_pb2.DeleteSubscriptionRequest, subscription="s")
    assert deleted.dead_letters == 1
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await stream.receive()
    assert ended.value.code() is grpc.StatusCode.NOT_FOUND


async def of_lanes(calls: Calls) -> None:
    await calls.call("Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest, subscription="lane")
    row = {"subscription": "lane", "ledger_id": [5], "entry_id": [1], "deliver_at_ms": [1]}
    await calls.call("DelayedDelivery/AddMessages", delayed_delivery_pb2.AddMessagesRequest, **row)
    calls.made.add("Dispatch/SubscribeMany")
    lane = by_lane(calls.edge.caller)
    shared = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_SHARED
    opening = dispatch_pb2.Open(topic="t", subscription="lane", type=shared)
    await lane.send(dispatch_pb2.SubscribeRequest(open=opening))
    epoch = (await lane.receive()).opened.epoch
    await lane.send(dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=1)))
    messages = (await lane.receive()).messages
    assert (messages.epoch, list(messages.ledger_id)) == (epoch, [5])
    acknowledge = dispatch_pb2.Acknowledge(request_id=1, ledger_id=[5], entry_id=[1], deliver_at_ms=[1])
    await lane.send(dispatch_pb2.SubscribeRequest(acknowledge=acknowledge))
    done = (await lane.receive()).done
    assert (done.epoch, done.ignored) == (epoch, 0)
    await calls.call("Dispatch/DeleteSubscription", dispatch_pb2.DeleteSubscriptionRequest, subscription="lane")
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await lane.receive()
    assert ended.value.code() is grpc.StatusCode.NOT_FOUND


async def of_consumers(calls: Calls) -> None:
    await calls.call("Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionRequest, subscription="keys")
    stream = calls.edge.caller.stream("Dispatch/Subscribe")
    consumer = dispatch_pb2.Consumer(consumer_id=1, name="one", permits=5)
    key_shared = dispatch_pb2.SubscriptionType.SUBSCRIPTION_TYPE_KEY_SHARED
    by_key = dispatch_pb2.Open(topic="t", subscription="keys", type=key_shared, consumers=[consumer])
    await stream.send(dispatch_pb2.SubscribeRequest(open=by_key))
    assert (await stream.receive()).opened.epoch > 0
    listed = await calls.call("Inspect/ListConsumers", inspect_pb2.ListConsumersRequest, subscription="keys")
    assert [(each.name, each.permits) for each in listed.consumers] == [("one", 5)]
    await calls.call("Dispatch/DeleteSubscription", dispatch_pb2.DeleteSubscriptionRequest, subscription="keys")


async def of_topics(calls: Calls) -> None:
    sealed = await calls.call("Admin/SealBucket", admin_pb2.SealBucketRequest)
    assert (sealed.rows, bool(sealed.bucket)) == (2, True)
    listed = await calls.call("Inspect/ListBuckets", inspect_pb2.ListBucketsRequest)
    (bucket,) = listed.buckets
    assert (bucket.bucket, bucket.rows, bucket.first_ledger_id) == (sealed.bucket, 2, 6)
    assert (bucket.compatible_form, bucket.quarantined, listed.mutable_rows) == (True, False, 0)
    stats = await calls.call("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest)
    assert (stats.pending, stats.buckets, stats.incarnation) == (2, 1, 1)
    assert (stats.lowest_position.ledger_id, stats.lowest_position.entry_id, stats.ledgers) == (6, 1, 1)
    merged = await calls.call("Admin/MergeBuckets", admin_pb2.MergeBucketsRequest, buckets_max=1)
    assert (merged.merges, merged.buckets) == (0, 1)
    calls.made.add("Inspect/ListTopics")
    topics = await calls.edge.caller.unary("Inspect/ListTopics", inspect_pb2.ListTopicsRequest())
    assert [topic.topic for topic in topics.topics] == ["t"]
    place = await calls.call("Cluster/LookupTopic", cluster_pb2.LookupTopicRequest)
    assert (place.shard, place.epoch > 0, place.served_here) == (topics.topics[0].shard, True, True)
    calls.made.add("Cluster/GetVersion")
    version = await calls.edge.caller.unary("Cluster/GetVersion", cluster_pb2.GetVersionRequest())
    assert (version.version, version.api) == (importlib.metadata.version("tarryd"), 1)
    assert list(version.feature) == ["handout_names", "on_invalid", "retention", "subscribe_many", "held_more"]
    deleted = await calls.call("Admin/DeleteTopic", admin_pb2.DeleteTopicRequest)
    assert (deleted.rows, deleted.incarnation) == (2, 1)
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await calls.call("Inspect/GetTopicStats", inspect_pb2.GetTopicStatsRequest)
    assert missing.value.code() is grpc.StatusCode.NOT_FOUND


async def of_garbage(calls: Calls) -> None:
    calls.made.add("Admin/CollectGarbage")
    answers = await calls.edge.caller.answers("Admin/CollectGarbage", admin_pb2.CollectGarbageRequest())
    assert [answer.done for answer in answers] == [False] * (len(answers) - 1) + [True]
    assert answers[-1].summary.waiting.objects == 1, "the bucket of the topic that was deleted"


async def of_deletions(calls: Calls, offloaded: MemoryStore) -> None:
    pb = ledger_deletion_pb2
    going, used, orphan = (OwnedLedger("t", LedgerComponent.MANAGED_LEDGER, (ledger, 1, 2)) for ledger in (1, 2, 3))
    for each in (going, used, orphan):
        each.write(offloaded)
    stated: dict[str, Any] = {"ledger_type": pb.LEDGER_TYPE_OFFLOADED_LEDGER, "uuid_msb": [1], "uuid_lsb": [2]}
    everything = {"ledger_id": [1, 2], "replace": True}
    in_use = await calls.call("LedgerDeletion/RecordInUse", pb.RecordInUseRequest, **everything, **stated)
    assert (in_use.recorded, list(in_use.being_deleted)) == (2, [])
    deletes = [deletion_of(going), deletion_of(OwnedLedger("t", LedgerComponent.MANAGED_LEDGER, (4, 0, 0)))]
    recorded = await calls.call("LedgerDeletion/RecordPendingDeletes", pb.RecordPendingDeletesRequest, deletes=deletes)
    assert (recorded.recorded, len(recorded.refused)) == (2, 0)
    forgotten = await calls.call("LedgerDeletion/ForgetInUse", pb.ForgetInUseRequest, ledger_id=[1], **stated)
    assert forgotten.forgotten == 1
    await until_ended(calls, 1)
    (waiting,) = (await call(calls, "LedgerDeletion/ListPendingDeletes", pb.ListPendingDeletesRequest())).deletions
    assert (waiting.pending_delete.ledger_id, waiting.failures) == (4, 1)
    assert "unknown owner" in waiting.text
    counted = await calls.call("LedgerDeletion/GetDeletionStats", pb.GetDeletionStatsRequest)
    assert (counted.in_flight, counted.given_up, counted.in_use) == (1, 0, 1)
    dead = await call(calls, "LedgerDeletion/ListDeadDeletes", pb.ListDeadDeletesRequest())
    assert len(dead.deletions) == 0
    assert (await call(calls, "LedgerDeletion/RetryDeadDeletes", pb.RetryDeadDeletesRequest(all=True))).retried == 0
    assert (await call(calls, "LedgerDeletion/PurgeDeadDeletes", pb.PurgeDeadDeletesRequest(all=True))).purged == 0
    calls.made.add("LedgerDeletion/SweepOrphans")
    sweep = pb.SweepOrphansRequest(store="offloaded", grace_ms=0, delete=True)
    answers = await calls.edge.caller.answers("LedgerDeletion/SweepOrphans", sweep)
    assert answers[-1].counts.ledgers_recorded == 1
    await until_ended(calls, 2)
    assert {listed.key for listed in offloaded.list("")} == set(used.keys)


def deletion_of(ledger: OwnedLedger) -> ledger_deletion_pb2.PendingDelete:
    return ledger_deletion_service.pending_delete_message(ledger.pending_delete())


async def call(calls: Calls, method: str, request: Any) -> Any:
    """One that is not about a topic."""
    calls.made.add(method)
    return await calls.edge.caller.unary(method, request)


async def until_ended(calls: Calls, count: int) -> None:
    pb = ledger_deletion_pb2
    async with asyncio.timeout(300):
        while True:
            ended = await call(calls, "LedgerDeletion/ListEndedDeletes", pb.ListEndedDeletesRequest())
            if [each.outcome for each in ended.deletions] == [pb.Deletion.OUTCOME_DELETED] * count:
                return
