"""Every unary call: what it sends, what the daemon may answer, and what the caller gets.

Owns: that list. Does not own: what is tested with it (`test_every_call`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

import tarry
import tarry.aio
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2, policy_pb2
from tests._support.outcomes import nack_result

HANDED_OUT = ([7, 7], [1, 2], [10, 11])


@dataclasses.dataclass(frozen=True)
class Call:
    """`make` with a client sends `request` to `method`; answered with `response` it returns `result`."""

    method: str
    make: Callable[[tarry.aio.Client], Awaitable[Any]]
    request: Any
    response: Any
    result: Any


def plain(result: Any) -> Any:
    """A result whose columns can be compared: arrays are lists."""
    if isinstance(result, np.ndarray):
        return result.tolist()
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return type(result), {field.name: plain(getattr(result, field.name)) for field in dataclasses.fields(result)}
    return result


LOST = inspect_pb2.RebuildNeeded(
    first_ledger_id=1, last_ledger_id=2, rows=3, bucket="b", damage="crc", positions_known=True
)
LOST_RESULT = tarry.RebuildNeeded(1, 2, 3, "b", "crc", True)
STATS = inspect_pb2.SubscriptionStats(
    subscription="s", subscription_id=1, backlog=4, in_flight=3, dispatchers=2, permits=6, leased=5,
    nacked=7, next_redelivery_ms=8, dead_letters=9, consumers=10, waiting=11,
)  # fmt: skip
STATS_RESULT = tarry.SubscriptionStats("s", 1, 0, 4, 3, 2, 6, 5, tarry.SubscriptionPolicy(), 0, 7, 8, 9, 10, 11)
TOPIC_POLICY = policy_pb2.TopicPolicy(bucket_rows_max=9, bucket_form=policy_pb2.BUCKET_FORM_COMPATIBLE)
TOPIC_POLICY_RESULT = tarry.TopicPolicy(bucket_rows_max=9, bucket_form=tarry.BucketForm.COMPATIBLE)
POLICY = policy_pb2.SubscriptionPolicy(
    in_flight_rows_max=5, lease_ms=9, properties={"team": "relay"}, max_redeliver_count=0, ack_timeout_ms=100,
    redelivery=policy_pb2.RedeliveryPolicy(linear=policy_pb2.LinearDelay(initial_ms=1, step_ms=2, max_ms=3)),
    key_shared=policy_pb2.KeySharedPolicy(
        selector=policy_pb2.HASH_SELECTOR_STICKY,
        order=policy_pb2.KEY_ORDER_LAST_SENT_POSITION,
        nack_order=policy_pb2.NACK_ORDER_BLOCK_KEY,
        nack_block_max_ms=5,
    ),
)  # fmt: skip
POLICY_RESULT = tarry.SubscriptionPolicy(
    in_flight_rows_max=5, lease_ms=9, properties={"team": "relay"}, max_redeliver_count=0, ack_timeout_ms=100,
    redelivery=tarry.LinearDelay(1, 2, 3),
    key_shared=tarry.KeySharedPolicy(
        selector=tarry.HashSelector.STICKY, order=tarry.KeyOrder.LAST_SENT_POSITION,
        nack_order=tarry.NackOrder.BLOCK_KEY, nack_block_max_ms=5,
    ),
)  # fmt: skip
CONSUMER = inspect_pb2.ConsumerStats(
    name="c", instance_id=1, address="h:1", consumer_id=2, stream=3, permits=4, unacked=5, slots=6,
    hash_ranges=[policy_pb2.HashRange(first=0, last=2), policy_pb2.HashRange(first=9, last=11)],
    last_sent_position_when_joining=inspect_pb2.Position(ledger_id=3, entry_id=4),
    draining_hashes_count=7, draining_hashes_unacked=8,
    draining_hashes=[inspect_pb2.DrainingHash(hash=9, unacked=8, blocked_attempts=2**40)],
)  # fmt: skip
CONSUMER_RESULT = tarry.ConsumerStats(
    "c", 1, "h:1", 2, 3, 4, 5, 6, (tarry.HashRange(0, 2), tarry.HashRange(9, 11)), tarry.Position(3, 4), 7, 8,
    (tarry.DrainingHash(9, 8, 2**40),),
)  # fmt: skip
KEY_SHARED = inspect_pb2.KeySharedStats(
    policy=POLICY.key_shared, consumers=2, waiting=3, draining_hashes=4, draining_hashes_cleared=5,
    draining_hashes_unacked=6, nack_blocked_hashes=7,
    last_sent_position=inspect_pb2.Position(ledger_id=3, entry_id=0),
    individually_sent_positions=[
        inspect_pb2.PositionRange(
            after=inspect_pb2.Position(ledger_id=3, entry_id=4), up_to=inspect_pb2.Position(ledger_id=3, entry_id=5)
        )
    ],
    consumers_after_mark_delete_position=[
        inspect_pb2.ConsumerAfterMarkDelete(
            name="c", instance_id=1, address="h:1",
            last_sent_position_when_joining=inspect_pb2.Position(ledger_id=3, entry_id=4),
        )
    ],
    slots_without_consumer=8,
)  # fmt: skip
KEY_SHARED_RESULT = tarry.KeySharedStats(
    POLICY_RESULT.key_shared or tarry.KeySharedPolicy(), 2, 3, 4, 5, 6, 7, tarry.Position(3, 0),
    (tarry.PositionRange(tarry.Position(3, 4), tarry.Position(3, 5)),),
    (tarry.ConsumerAfterMarkDelete("c", 1, "h:1", tarry.Position(3, 4)),), 8,
)  # fmt: skip
TRIM = delayed_delivery_pb2.TrimMessagesRequest(
    topic="t", subscription="s", ledger_id=[7], entry_id=[3], all_lower_ledgers=True
)
LEDGERS = inspect_pb2.LedgerRange(first_ledger_id=3, last_ledger_id=4)
NONE = np.empty(0, np.int64)
COLUMNS = (np.array([7, 8]), np.array([1, 2]), np.array([10, 11]), np.array([0, 9]))
FILTER = inspect_pb2.DeadLetterFilter(
    dead_letter_id=[3, 9], ledgers=LEDGERS, reason=inspect_pb2.DEAD_LETTER_REASON_REJECTED, from_ms=1, until_ms=2
)
FILTER_RESULT = tarry.DeadLetterFilter(
    ids=[9, 3, 9], ledgers=(3, 4), reason=tarry.DeadLetterReason.REJECTED, from_ms=1, until_ms=2
)
BUCKET = inspect_pb2.BucketSummary(bucket="b", size_bytes=9, rows=8, pending=7, due=1, last_ledger_id=5, segments=2)

CALLS = [
    Call(
        "TrimMessages",
        lambda client: client.trim("t", 7, 3, all_lower_ledgers=True, subscription="s"),
        TRIM,
        delayed_delivery_pb2.TrimMessagesResponse(trimmed=4),
        4,
    ),
    Call(
        "ClearMessages",
        lambda client: client.clear("t", subscription="s"),
        delayed_delivery_pb2.ClearMessagesRequest(topic="t", subscription="s"),
        delayed_delivery_pb2.ClearMessagesResponse(cleared=5),
        5,
    ),
    Call(
        "Acknowledge",
        lambda client: client.ack("t", "s", HANDED_OUT),
        dispatch_pb2.AcknowledgeRequest(
            topic="t", subscription="s", ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 11]
        ),
        dispatch_pb2.AcknowledgeResponse(ignored=1),
        1,
    ),
    Call(
        "ExtendLease",
        lambda client: client.extend_lease("t", "s", HANDED_OUT, 60_000),
        dispatch_pb2.ExtendLeaseRequest(
            topic="t", subscription="s", ledger_id=[7, 7], entry_id=[1, 2], deliver_at_ms=[10, 11], lease_ms=60_000
        ),
        dispatch_pb2.ExtendLeaseResponse(ignored=2),
        2,
    ),
    Call(
        "CreateSubscription",
        lambda client: client.create_subscription("t", "s", POLICY_RESULT),
        dispatch_pb2.CreateSubscriptionRequest(topic="t", subscription="s", policy=POLICY),
        dispatch_pb2.CreateSubscriptionResponse(subscription_id=3, since_ms=5, created=True),
        tarry.SubscriptionCreated(3, 5, True),
    ),
    Call(
        "UpdateSubscription",
        lambda client: client.update_subscription("t", "s", POLICY_RESULT),
        dispatch_pb2.UpdateSubscriptionRequest(topic="t", subscription="s", policy=POLICY),
        dispatch_pb2.UpdateSubscriptionResponse(policy=POLICY),
        POLICY_RESULT,
    ),
    Call(
        "DeleteSubscription",
        lambda client: client.delete_subscription("t", "s"),
        dispatch_pb2.DeleteSubscriptionRequest(topic="t", subscription="s"),
        dispatch_pb2.DeleteSubscriptionResponse(dead_letters=4),
        tarry.SubscriptionDeleted(4),
    ),
    Call(
        "ListTopics",
        lambda client: client.topics_page("from", page_size=2),
        inspect_pb2.ListTopicsRequest(page_token="from", page_size=2),
        inspect_pb2.ListTopicsResponse(next_page_token="n", as_of_ms=8, topics_loading=2, topics_damaged=1),
        tarry.TopicPage((), "n", 8, 2, 1),
    ),
    Call(
        "ListBuckets",
        lambda client: client.buckets_page("t"),
        inspect_pb2.ListBucketsRequest(topic="t"),
        inspect_pb2.ListBucketsResponse(buckets=[BUCKET], as_of_ms=8, mutable_rows=6),
        tarry.BucketPage(
            (tarry.BucketSummary("b", 9, 8, 7, 1, 0, 5, 0, 0, 2, 0, 0, False, False, "", ""),),
            "",
            8,
            6,
        ),
    ),
    Call(
        "ListSubscriptions",
        lambda client: client.subscriptions_page("t", "from"),
        inspect_pb2.ListSubscriptionsRequest(topic="t", page_token="from"),
        inspect_pb2.ListSubscriptionsResponse(subscriptions=[STATS], as_of_ms=8),
        tarry.SubscriptionPage((STATS_RESULT,), "", 8),
    ),
    Call(
        "ListConsumers",
        lambda client: client.consumers_page("t", "s", "from", page_size=2),
        inspect_pb2.ListConsumersRequest(topic="t", subscription="s", page_token="from", page_size=2),
        inspect_pb2.ListConsumersResponse(consumers=[CONSUMER], next_page_token="n", as_of_ms=8, key_shared=KEY_SHARED),
        tarry.ConsumerPage((CONSUMER_RESULT,), "n", 8, KEY_SHARED_RESULT),
    ),
    Call(
        "ListConsumers",
        lambda client: client.key_shared_stats("t", "s"),
        inspect_pb2.ListConsumersRequest(topic="t", subscription="s", page_size=1),
        inspect_pb2.ListConsumersResponse(consumers=[CONSUMER], next_page_token="n", key_shared=KEY_SHARED),
        KEY_SHARED_RESULT,
    ),
    Call(
        "ListConsumers",
        lambda client: client.key_shared_stats("t", "s"),
        inspect_pb2.ListConsumersRequest(topic="t", subscription="s", page_size=1),
        inspect_pb2.ListConsumersResponse(),
        None,
    ),
    Call(
        "GetTopicStats",
        lambda client: client.stats("t"),
        inspect_pb2.GetTopicStatsRequest(topic="t"),
        inspect_pb2.GetTopicStatsResponse(
            topic="t", topic_id="i", pending=9, subscriptions=[STATS], rebuild_needed=[LOST]
        ),
        tarry.TopicStats("t", "i", 0, 0, 0, 9, 0, 0, 0, 0, None, None, 0, (STATS_RESULT,), 0, (LOST_RESULT,)),
    ),
    Call(
        "SetTopicPolicy",
        lambda client: client.set_policy("t", TOPIC_POLICY_RESULT),
        admin_pb2.SetTopicPolicyRequest(topic="t", policy=TOPIC_POLICY),
        admin_pb2.SetTopicPolicyResponse(effective=TOPIC_POLICY),
        TOPIC_POLICY_RESULT,
    ),
    Call(
        "GetTopicPolicy",
        lambda client: client.policy("t"),
        admin_pb2.GetTopicPolicyRequest(topic="t"),
        admin_pb2.GetTopicPolicyResponse(effective=TOPIC_POLICY),
        tarry.TopicPolicies(tarry.TopicPolicy(), TOPIC_POLICY_RESULT),
    ),
    Call(
        "SealBucket",
        lambda client: client.seal("t"),
        admin_pb2.SealBucketRequest(topic="t"),
        admin_pb2.SealBucketResponse(rows=4, bucket="b"),
        tarry.Sealed(4, "b"),
    ),
    Call(
        "DeleteTopic",
        lambda client: client.delete_topic("t"),
        admin_pb2.DeleteTopicRequest(topic="t"),
        admin_pb2.DeleteTopicResponse(rows=4, incarnation=2),
        tarry.TopicDeleted(4, 2),
    ),
    Call(
        "LookupTopic",
        lambda client: client.lookup("t"),
        cluster_pb2.LookupTopicRequest(topic="t"),
        cluster_pb2.LookupTopicResponse(shard=3, owner_address="h:1", owner="d", epoch=9, served_here=True),
        tarry.TopicLocation(3, "h:1", "d", 9, True),
    ),
    Call(
        "CancelMessages",
        lambda client: client.cancel("t", 7, [1, 2, 3, 4], subscription="s"),
        delayed_delivery_pb2.CancelMessagesRequest(
            topic="t", subscription="s", ledger_id=[7] * 4, entry_id=[1, 2, 3, 4]
        ),
        delayed_delivery_pb2.CancelMessagesResponse(
            cancelled=1, not_found_index=[0], already_due_index=[1], in_flight_index=[3]
        ),
        tarry.Cancelled(np.array([0]), np.array([1]), np.array([3]), False, 1),
    ),
    Call(
        "RescheduleMessages",
        lambda client: client.reschedule("t", 7, [1, 2], deliver_at_ms=9, key_hash=[5, 6], subscription="s"),
        delayed_delivery_pb2.RescheduleMessagesRequest(
            topic="t", subscription="s", ledger_id=[7], entry_id=[1, 2], deliver_at_ms=[9], key_hash=[5, 6]
        ),
        delayed_delivery_pb2.RescheduleMessagesResponse(
            rescheduled=1, in_flight_index=[0], raised_index=[1], raised_deliver_at_ms=[10]
        ),
        tarry.Rescheduled(NONE, NONE, np.array([0]), False, 1, np.array([1]), np.array([10])),
    ),
    Call(
        "ListScheduled",
        lambda client: client.scheduled_page(
            "t", "from", from_ms=1, until_ms=2, ledgers=(3, 4), subscription="s", page_size=5
        ),
        inspect_pb2.ListScheduledRequest(
            topic="t", from_ms=1, until_ms=2, ledgers=LEDGERS, subscription="s", page_size=5, page_token="from"
        ),
        inspect_pb2.ListScheduledResponse(
            ledger_id=[7, 8],
            entry_id=[1, 2],
            deliver_at_ms=[10, 11],
            key_hash=[0, 9],
            subscription_index=[0, 1],
            subscriptions=["", "s"],
            next_page_token="n",
            as_of_ms=8,
        ),
        tarry.ScheduledPage(*COLUMNS, "n", 8, np.array([0, 1]), ("", "s")),
    ),
    Call(
        "ListBacklog",
        lambda client: client.backlog_page("t", "s", "from", ledgers=(3, 4), page_size=5),
        inspect_pb2.ListBacklogRequest(topic="t", subscription="s", ledgers=LEDGERS, page_size=5, page_token="from"),
        inspect_pb2.ListBacklogResponse(
            ledger_id=[7, 8],
            entry_id=[1, 2],
            deliver_at_ms=[10, 11],
            key_hash=[0, 9],
            state=[inspect_pb2.BACKLOG_STATE_READY, inspect_pb2.BACKLOG_STATE_NACKED],
            redelivery_count=[0, 2],
            batch_index=[tarry.NO_BATCH_INDEX, 3],
            redeliver_at_ms=[0, 99],
            as_of_ms=8,
        ),
        tarry.BacklogPage(
            *COLUMNS,
            "",
            8,
            np.array([tarry.BacklogState.READY, tarry.BacklogState.NACKED]),
            np.array([0, 2]),
            np.array([tarry.NO_BATCH_INDEX, 3]),
            np.array([0, 99]),
        ),
    ),
    Call(
        "GetHistogram",
        lambda client: client.histogram("t", from_ms=1, until_ms=7, width_ms=2, ledgers=(3, 4), subscription="s"),
        inspect_pb2.GetHistogramRequest(
            topic="t", from_ms=1, until_ms=7, width_ms=2, ledgers=LEDGERS, subscription="s"
        ),
        inspect_pb2.GetHistogramResponse(
            from_ms=1,
            until_ms=7,
            width_ms=2,
            rows=[5, 0, 2**40],
            rows_before=3,
            rows_after=4,
            segments_counted=6,
            segments_read=8,
            as_of_ms=9,
        ),
        tarry.Histogram(1, 7, 2, np.array([5, 0, 2**40]), 3, 4, 6, 8, 9),
    ),
    Call(
        "MergeBuckets",
        lambda client: client.merge("t", 5),
        admin_pb2.MergeBucketsRequest(topic="t", buckets_max=5),
        admin_pb2.MergeBucketsResponse(merges=1, merged_buckets=3, buckets=5),
        tarry.Merged(1, 3, 5),
    ),
    Call(
        "NegativeAcknowledge",
        lambda client: client.nack("t", "s", HANDED_OUT, delay_level=[0, 3], batch_index=[4, 5], key_hash=6),
        dispatch_pb2.NegativeAcknowledgeRequest(
            topic="t",
            subscription="s",
            ledger_id=[7, 7],
            entry_id=[1, 2],
            deliver_at_ms=[10, 11],
            batch_index=[4, 5],
            delay_level=[0, 3],
            key_hash=[6],
        ),
        dispatch_pb2.NegativeAcknowledgeResponse(ignored=1, dead_lettered=2),
        nack_result(1, 2),
    ),
    Call(
        "NegativeAcknowledge",
        lambda client: client.reject("t", "s", HANDED_OUT, "why"),
        dispatch_pb2.NegativeAcknowledgeRequest(
            topic="t",
            subscription="s",
            ledger_id=[7, 7],
            entry_id=[1, 2],
            deliver_at_ms=[10, 11],
            reject=True,
            reason="why",
        ),
        dispatch_pb2.NegativeAcknowledgeResponse(dead_lettered=2),
        nack_result(0, 2),
    ),
    Call(
        "ListDeadLetters",
        lambda client: client.dead_letters_page("t", "s", FILTER_RESULT, "from", page_size=5),
        inspect_pb2.ListDeadLettersRequest(topic="t", subscription="s", filter=FILTER, page_size=5, page_token="from"),
        inspect_pb2.ListDeadLettersResponse(
            dead_letter_id=[3, 9],
            ledger_id=[7, 8],
            entry_id=[1, 2],
            batch_index=[tarry.NO_BATCH_INDEX, 3],
            deliver_at_ms=[10, 11],
            key_hash=[0, 9],
            redelivery_count=[4, 0],
            dead_at_ms=[20, 21],
            reason=[inspect_pb2.DEAD_LETTER_REASON_TOO_OFTEN, inspect_pb2.DEAD_LETTER_REASON_REJECTED],
            text_index=[0, 1],
            texts=["", "why"],
            next_page_token="n",
            as_of_ms=8,
        ),
        tarry.DeadLetterPage(
            *COLUMNS,
            "n",
            8,
            np.array([3, 9]),
            np.array([tarry.NO_BATCH_INDEX, 3]),
            np.array([4, 0]),
            np.array([20, 21]),
            np.array([tarry.DeadLetterReason.TOO_OFTEN, tarry.DeadLetterReason.REJECTED]),
            np.array([0, 1]),
            ("", "why"),
        ),
    ),
    Call(
        "ReplayDeadLetters",
        lambda client: client.replay_dead_letters("t", "s", FILTER_RESULT, delay_ms=7),
        admin_pb2.ReplayDeadLettersRequest(topic="t", subscription="s", filter=FILTER, delay_ms=7),
        admin_pb2.ReplayDeadLettersResponse(replayed=3, skipped=1),
        tarry.Replayed(3, 1),
    ),
    Call(
        "PurgeDeadLetters",
        lambda client: client.purge_dead_letters("t", "s"),
        admin_pb2.PurgeDeadLettersRequest(topic="t", subscription="s", filter=inspect_pb2.DeadLetterFilter()),
        admin_pb2.PurgeDeadLettersResponse(purged=3),
        3,
    ),
    Call(
        "GetDelayLevels",
        lambda client: client.delay_levels("t"),
        admin_pb2.GetDelayLevelsRequest(topic="t"),
        admin_pb2.GetDelayLevelsResponse(
            levels=admin_pb2.DelayLevels(table="1s 1m", clamp=False),
            delay_ms=[1_000, 60_000],
            of_topic=True,
            pending=[0, 5, 6],
        ),
        tarry.DelayLevelsInForce(tarry.DelayLevels("1s 1m", clamp=False), (1_000, 60_000), True, (0, 5, 6)),
    ),
    Call(
        "SetDelayLevels",
        lambda client: client.set_delay_levels("t", tarry.DelayLevels("1s 1s")),
        admin_pb2.SetDelayLevelsRequest(topic="t", levels=admin_pb2.DelayLevels(table="1s 1s", clamp=True)),
        admin_pb2.SetDelayLevelsResponse(levels=admin_pb2.DelayLevels(table="1s 1s"), warnings=["as long as 1"]),
        tarry.DelayLevelsSet(tarry.DelayLevels("1s 1s"), ("as long as 1",)),
    ),
]
