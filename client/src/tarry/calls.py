"""Makes a plan of each unary call: its requests, and the meaning of its answers.

Plans check arguments, split requests to the daemon's limits, combine the answers, and decide which failure of a retry
means that the call is done. `tarry.attempts` decides about attempts, `tarry.Client` documents the calls, and
`tarry.deletion_calls` has the plans of two-phase deletion.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tarry import (
    attempts,
    batch,
    columns,
    deletion_calls,
    errors,
    inspection,
    policies,
    reasons,
    redelivery,
    results,
    wire,
)
from tarry.v1 import admin_pb2, cluster_pb2, delayed_delivery_pb2, dispatch_pb2, inspect_pb2

NACK = attempts.Method("/tarry.v1.Dispatch/NegativeAcknowledge", dispatch_pb2.NegativeAcknowledgeResponse.FromString)
LIST_DEAD_LETTERS = attempts.Method("/tarry.v1.Inspect/ListDeadLetters", inspect_pb2.ListDeadLettersResponse.FromString)
REPLAY_DEAD_LETTERS = attempts.Method(
    "/tarry.v1.Admin/ReplayDeadLetters", admin_pb2.ReplayDeadLettersResponse.FromString
)
PURGE_DEAD_LETTERS = attempts.Method("/tarry.v1.Admin/PurgeDeadLetters", admin_pb2.PurgeDeadLettersResponse.FromString)
SET_DELAY_LEVELS = attempts.Method("/tarry.v1.Admin/SetDelayLevels", admin_pb2.SetDelayLevelsResponse.FromString)
GET_DELAY_LEVELS = attempts.Method("/tarry.v1.Admin/GetDelayLevels", admin_pb2.GetDelayLevelsResponse.FromString)

# The daemon's limit of ids in a request
DEAD_LETTER_IDS_MAX = 100_000


class RedeliveryCalls(attempts.Planning):
    """The redelivery calls of `tarry.calls.Calls`: negative acknowledgements, dead letters, delay levels."""

    def nack(
        self,
        topic: str,
        subscription: str,
        given: batch.HandedOut,
        *,
        batch_index: columns.Column | None,
        key_hash: columns.Column | None,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        reject: bool = False,
        reason: str = "",
        forwarded: bool = False,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Nacked]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription)
        rows = columns.nack_columns(
            batch.positions_of(given, batch_index),
            delay_ms=delay_ms,
            delay_level=delay_level,
            key_hash=batch.key_hash_of(given) if forwarded and key_hash is None else key_hash,
            reject=reject,
            reason=reason,
            forwarded=forwarded,
        )
        answers = []
        for part in rows.requests(self.positions_max):
            request = wire.encode_nack_request(*names, part)
            message = yield from asking.ask(NACK, request, topic=topic, needs=attempts.FORWARDED if forwarded else None)
            answers.append(results.Nacked.from_message(message, part.positions.rows))
        return results.Nacked.merge(answers)

    def dead_letters_page(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None,
        page_token: str,
        *,
        page_size: int,
        timeout_s: float | None,
    ) -> attempts.Plan[inspection.DeadLetterPage]:
        attempts.check_names(topic, subscription)
        columns.check_unsigned("page_size", page_size, bits=32)
        (wanted,) = _filters(which, ids_max=2**32)
        request = inspect_pb2.ListDeadLettersRequest(
            topic=topic, subscription=subscription, filter=wanted, page_size=page_size, page_token=page_token
        )
        asking = self.asking(timeout_s)
        message = yield from asking.ask(LIST_DEAD_LETTERS, request.SerializeToString(), topic=topic)
        return inspection.DeadLetterPage.from_message(message)

    def replay_dead_letters(
        self,
        topic: str,
        subscription: str,
        which: redelivery.DeadLetterFilter | None,
        *,
        delay_ms: int,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Replayed]:
        attempts.check_names(topic, subscription)
        columns.check_unsigned("delay_ms", delay_ms, bits=64)
        asking = self.asking(timeout_s)
        answers = []
        for wanted in _filters(which, DEAD_LETTER_IDS_MAX):
            request = admin_pb2.ReplayDeadLettersRequest(
                topic=topic, subscription=subscription, filter=wanted, delay_ms=delay_ms
            )
            message = yield from asking.ask(REPLAY_DEAD_LETTERS, request.SerializeToString(), topic=topic)
            answers.append(results.Replayed.from_message(message))
        return results.Replayed.merge(answers)

    def purge_dead_letters(
        self, topic: str, subscription: str, which: redelivery.DeadLetterFilter | None, *, timeout_s: float | None
    ) -> attempts.Plan[int]:
        attempts.check_names(topic, subscription)
        asking = self.asking(timeout_s)
        purged = 0
        for wanted in _filters(which, DEAD_LETTER_IDS_MAX):
            request = admin_pb2.PurgeDeadLettersRequest(topic=topic, subscription=subscription, filter=wanted)
            message = yield from asking.ask(PURGE_DEAD_LETTERS, request.SerializeToString(), topic=topic)
            purged += message.purged
        return purged

    def delay_levels(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.DelayLevelsInForce]:
        attempts.check_names(topic)
        request = admin_pb2.GetDelayLevelsRequest(topic=topic)
        asking = self.asking(timeout_s)
        message = yield from asking.ask(GET_DELAY_LEVELS, request.SerializeToString(), topic=topic or None)
        return results.DelayLevelsInForce.from_message(message)

    def set_delay_levels(
        self, topic: str, levels: policies.DelayLevels | None, *, timeout_s: float | None
    ) -> attempts.Plan[results.DelayLevelsSet]:
        attempts.check_names(topic)
        request = admin_pb2.SetDelayLevelsRequest(topic=topic, levels=None if levels is None else levels.to_message())
        asking = self.asking(timeout_s)
        message = yield from asking.ask(SET_DELAY_LEVELS, request.SerializeToString(), topic=topic)
        return results.DelayLevelsSet.from_message(message)


def _filters(which: redelivery.DeadLetterFilter | None, ids_max: int) -> list[inspect_pb2.DeadLetterFilter]:
    """Return filters with at most `ids_max` ids each; one filter if no ids are named. Raises InvalidArgument."""
    which = which or redelivery.DeadLetterFilter()
    others: dict[str, Any] = {
        "ledgers": attempts.ledger_range(which.ledgers),
        "reason": which.reason or 0,
        **attempts.time_range("from_ms", which.from_ms, "until_ms", which.until_ms),
    }
    if which.ids is None:
        return [inspect_pb2.DeadLetterFilter(**others)]
    ids = np.unique(columns.u64("ids", which.ids))
    if not len(ids):
        raise errors.InvalidArgument("ids names no dead letter; leave it out for all")
    return [
        inspect_pb2.DeadLetterFilter(dead_letter_id=ids[first : first + ids_max].tolist(), **others)
        for first in range(0, len(ids), ids_max)
    ]


ADD = attempts.Method("/tarry.v1.DelayedDelivery/AddMessages", delayed_delivery_pb2.AddMessagesResponse.FromString)
CANCEL = attempts.Method(
    "/tarry.v1.DelayedDelivery/CancelMessages", delayed_delivery_pb2.CancelMessagesResponse.FromString
)
RESCHEDULE = attempts.Method(
    "/tarry.v1.DelayedDelivery/RescheduleMessages", delayed_delivery_pb2.RescheduleMessagesResponse.FromString
)
CONTAINS = attempts.Method(
    "/tarry.v1.DelayedDelivery/ContainsMessages", delayed_delivery_pb2.ContainsMessagesResponse.FromString
)
TRIM = attempts.Method("/tarry.v1.DelayedDelivery/TrimMessages", delayed_delivery_pb2.TrimMessagesResponse.FromString)
CLEAR = attempts.Method(
    "/tarry.v1.DelayedDelivery/ClearMessages", delayed_delivery_pb2.ClearMessagesResponse.FromString
)
GET = attempts.Method("/tarry.v1.Dispatch/GetScheduledMessages", dispatch_pb2.GetScheduledMessagesResponse.FromString)
ACKNOWLEDGE = attempts.Method("/tarry.v1.Dispatch/Acknowledge", dispatch_pb2.AcknowledgeResponse.FromString)
EXTEND_LEASE = attempts.Method("/tarry.v1.Dispatch/ExtendLease", dispatch_pb2.ExtendLeaseResponse.FromString)
CREATE_SUBSCRIPTION = attempts.Method(
    "/tarry.v1.Dispatch/CreateSubscription", dispatch_pb2.CreateSubscriptionResponse.FromString
)
UPDATE_SUBSCRIPTION = attempts.Method(
    "/tarry.v1.Dispatch/UpdateSubscription", dispatch_pb2.UpdateSubscriptionResponse.FromString
)
DELETE_SUBSCRIPTION = attempts.Method(
    "/tarry.v1.Dispatch/DeleteSubscription", dispatch_pb2.DeleteSubscriptionResponse.FromString
)
LIST_TOPICS = attempts.Method("/tarry.v1.Inspect/ListTopics", inspect_pb2.ListTopicsResponse.FromString)
STATS = attempts.Method("/tarry.v1.Inspect/GetTopicStats", inspect_pb2.GetTopicStatsResponse.FromString)
LIST_BUCKETS = attempts.Method("/tarry.v1.Inspect/ListBuckets", inspect_pb2.ListBucketsResponse.FromString)
LIST_SUBSCRIPTIONS = attempts.Method(
    "/tarry.v1.Inspect/ListSubscriptions", inspect_pb2.ListSubscriptionsResponse.FromString
)
LIST_CONSUMERS = attempts.Method("/tarry.v1.Inspect/ListConsumers", inspect_pb2.ListConsumersResponse.FromString)
LIST_SCHEDULED = attempts.Method("/tarry.v1.Inspect/ListScheduled", inspect_pb2.ListScheduledResponse.FromString)
GET_HISTOGRAM = attempts.Method("/tarry.v1.Inspect/GetHistogram", inspect_pb2.GetHistogramResponse.FromString)
GET_RETENTION = attempts.Method("/tarry.v1.Inspect/GetRetention", inspect_pb2.GetRetentionResponse.FromString)
LIST_BACKLOG = attempts.Method("/tarry.v1.Inspect/ListBacklog", inspect_pb2.ListBacklogResponse.FromString)
SET_TOPIC_POLICY = attempts.Method("/tarry.v1.Admin/SetTopicPolicy", admin_pb2.SetTopicPolicyResponse.FromString)
GET_TOPIC_POLICY = attempts.Method("/tarry.v1.Admin/GetTopicPolicy", admin_pb2.GetTopicPolicyResponse.FromString)
SEAL = attempts.Method("/tarry.v1.Admin/SealBucket", admin_pb2.SealBucketResponse.FromString)
MERGE = attempts.Method("/tarry.v1.Admin/MergeBuckets", admin_pb2.MergeBucketsResponse.FromString)
COLLECT_GARBAGE = attempts.Method("/tarry.v1.Admin/CollectGarbage", admin_pb2.CollectGarbageResponse.FromString)
DELETE_TOPIC = attempts.Method("/tarry.v1.Admin/DeleteTopic", admin_pb2.DeleteTopicResponse.FromString)
LOOKUP = attempts.Method("/tarry.v1.Cluster/LookupTopic", cluster_pb2.LookupTopicResponse.FromString)

LEDGERS_PER_REQUEST_MAX = 1_000
RETENTION_PAGE = 10_000


class Calls(RedeliveryCalls, deletion_calls.DeletionCalls):
    """The calls of one client; each method returns the plan of one call and has the arguments of `tarry.Client`'s."""

    # The publish path

    def add(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None,
        delay_ms: columns.Column | None,
        key_hash: columns.Column | None,
        delay_level: columns.Column | None,
        already_due: results.AlreadyDue,
        on_invalid: reasons.OnInvalid,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[results.AddResult]:
        asking = self.asking(timeout_s)
        name, receiver = wire.utf8("topic", topic), wire.utf8("subscription", subscription or "")
        rows = columns.add_columns(
            ledger_id,
            entry_id,
            deliver_at_ms=deliver_at_ms,
            delay_ms=delay_ms,
            key_hash=key_hash,
            delay_level=delay_level,
        )
        needs = attempts.needs_of(on_invalid)
        parts = []
        for first, part in rows.requests(self.rows_max, self.bytes_max):
            request = wire.encode_add(name, part, already_due, receiver, on_invalid if needs else 0)
            message = yield from asking.ask(ADD, request, topic=topic, needs=needs)
            parts.append((first, results.AddResult.from_message(message)))
        return results.AddResult.merge(parts)

    def cancel(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Cancelled]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription or "")
        parts, first = [], 0
        for part in columns.entry_columns(ledger_id, entry_id).requests(self.rows_max, self.bytes_max):
            message, retried = yield from asking.ask_and_tell(CANCEL, wire.encode_cancel(*names, part), topic=topic)
            parts.append((first, results.Cancelled.from_message(message, may_have_landed=retried)))
            first += len(part)
        return results.Cancelled.merge(parts)

    def reschedule(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None,
        delay_ms: columns.Column | None,
        key_hash: columns.Column | None,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Rescheduled]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription or "")
        rows = columns.add_columns(
            ledger_id, entry_id, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms, key_hash=key_hash
        )
        parts = []
        for first, part in rows.requests(self.rows_max, self.bytes_max):
            request = wire.encode_reschedule(*names, part)
            message, retried = yield from asking.ask_and_tell(RESCHEDULE, request, topic=topic)
            parts.append((first, results.Rescheduled.from_message(message, may_have_landed=retried)))
        return results.Rescheduled.merge(parts)

    def contains(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        last_entry_id: columns.Column | None,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Contained]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription or "")
        rows = columns.entry_columns(ledger_id, entry_id, last_entry_id)
        pending, due = results.RangesInParts(), results.RangesInParts()
        for part in rows.requests(self.rows_max, self.bytes_max):
            rest, continues_at = part, None
            while True:
                message = yield from asking.ask(CONTAINS, wire.encode_contains(*names, rest), topic=topic)
                pending.append(message.pending, continues_at=continues_at)
                due.append(message.due, continues_at=continues_at)
                if not message.HasField("continuation"):
                    break
                rest, continues_at = _rest(rest, message.continuation)
        return results.Contained(pending.whole(), due.whole())

    def trim(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        all_lower_ledgers: bool,
        dead_letter: bool,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[results.Trimmed]:
        asking = self.asking(timeout_s)
        attempts.check_names(topic, subscription or "")
        needs = attempts.DEAD_LETTER if dead_letter else None
        answers = []
        for part in columns.entry_columns(ledger_id, entry_id).requests(self.rows_max, self.bytes_max):
            request = delayed_delivery_pb2.TrimMessagesRequest(
                topic=topic,
                subscription=subscription or "",
                ledger_id=part.ledger_id.tolist(),
                entry_id=part.entry_id.tolist(),
                all_lower_ledgers=all_lower_ledgers,
                dead_letter=dead_letter,
            ).SerializeToString()
            more = True
            while more:
                message, retried = yield from asking.ask_and_tell(TRIM, request, topic=topic, needs=needs)
                answers.append(results.Trimmed.from_message(message, may_have_landed=retried))
                more = message.more
        return results.Trimmed.merge(answers)

    def clear(self, topic: str, *, subscription: str | None, timeout_s: float | None) -> attempts.Plan[int]:
        attempts.check_names(topic, subscription or "")
        request = delayed_delivery_pb2.ClearMessagesRequest(topic=topic, subscription=subscription or "")
        message = yield from self.asking(timeout_s).ask(CLEAR, request.SerializeToString(), topic=topic)
        return message.cleared

    # Dispatchers

    def get(
        self,
        topic: str,
        subscription: str,
        *,
        max_rows: int,
        lease_ms: int | None,
        wait_ms: int,
        timeout_s: float | None,
    ) -> attempts.Plan[batch.Leased]:
        attempts.check_names(topic, subscription)
        columns.check_unsigned("max_rows", max_rows, bits=32)
        columns.check_unsigned("lease_ms", lease_ms or 0, bits=64)
        columns.check_unsigned("wait_ms", wait_ms, bits=32)
        waiting = attempts.Deadline.after(wait_ms / 1000)

        def request() -> bytes:
            return dispatch_pb2.GetScheduledMessagesRequest(
                topic=topic,
                subscription=subscription,
                max_rows=max_rows,
                lease_ms=lease_ms or 0,
                # A retry waits only for the rest of the time.
                wait_ms=math.ceil(waiting.remaining_s() * 1000),
            ).SerializeToString()

        asking = self.asking(timeout_s, longer_by_s=wait_ms / 1000)
        message = yield from asking.ask(GET, request, topic=topic)
        return batch.Leased.from_response(message)

    def ack(
        self, topic: str, subscription: str, given: batch.HandedOut, *, timeout_s: float | None
    ) -> attempts.Plan[results.Ignored]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription)
        answers = []
        for part in columns.parts(batch.positions_of(given), self.positions_max):
            message = yield from asking.ask(ACKNOWLEDGE, wire.encode_acknowledge_request(*names, part), topic=topic)
            answers.append(results.Ignored.from_message(message, part.rows))
        return results.Ignored.merge(answers)

    def extend_lease(
        self, topic: str, subscription: str, given: batch.HandedOut, lease_ms: int, *, timeout_s: float | None
    ) -> attempts.Plan[results.Ignored]:
        asking = self.asking(timeout_s)
        names = wire.utf8("topic", topic), wire.utf8("subscription", subscription)
        columns.check_unsigned("lease_ms", lease_ms, bits=64)
        answers = []
        for part in columns.parts(batch.positions_of(given), self.positions_max):
            request = wire.encode_extend_lease(*names, part, lease_ms)
            message = yield from asking.ask(EXTEND_LEASE, request, topic=topic)
            answers.append(results.Ignored.from_message(message, part.rows))
        return results.Ignored.merge(answers)

    def create_subscription(
        self, topic: str, subscription: str, policy: policies.SubscriptionPolicy | None, *, timeout_s: float | None
    ) -> attempts.Plan[results.SubscriptionCreated]:
        attempts.check_names(topic, subscription)
        request = dispatch_pb2.CreateSubscriptionRequest(
            topic=topic, subscription=subscription, policy=None if policy is None else policy.to_message()
        )
        message = yield from self.asking(timeout_s).ask(CREATE_SUBSCRIPTION, request.SerializeToString(), topic=topic)
        return results.SubscriptionCreated.from_message(message)

    def update_subscription(
        self, topic: str, subscription: str, policy: policies.SubscriptionPolicy, *, timeout_s: float | None
    ) -> attempts.Plan[policies.SubscriptionPolicy]:
        attempts.check_names(topic, subscription)
        request = dispatch_pb2.UpdateSubscriptionRequest(
            topic=topic, subscription=subscription, policy=policy.to_message()
        )
        message = yield from self.asking(timeout_s).ask(UPDATE_SUBSCRIPTION, request.SerializeToString(), topic=topic)
        return policies.SubscriptionPolicy.from_message(message.policy)

    def delete_subscription(
        self, topic: str, subscription: str, *, timeout_s: float | None
    ) -> attempts.Plan[results.SubscriptionDeleted]:
        attempts.check_names(topic, subscription)
        request = dispatch_pb2.DeleteSubscriptionRequest(topic=topic, subscription=subscription)
        try:
            asking = self.asking(timeout_s)
            message = yield from asking.ask(DELETE_SUBSCRIPTION, request.SerializeToString(), topic=topic)
        except errors.NotFound as error:
            # It is missing because an earlier attempt, whose answer was lost, deleted it.
            if not error.may_have_landed:
                raise
            return results.SubscriptionDeleted(dead_letters=None)
        return results.SubscriptionDeleted.from_message(message)

    # Inspection

    def topics_page(
        self, page_token: str, *, page_size: int, timeout_s: float | None
    ) -> attempts.Plan[inspection.TopicPage]:
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListTopicsRequest(page_token=page_token, page_size=page_size)
        message = yield from self.asking(timeout_s).ask(LIST_TOPICS, request.SerializeToString(), topic=None)
        return inspection.TopicPage.from_message(message)

    def stats(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[inspection.TopicStats]:
        attempts.check_names(topic)
        request = inspect_pb2.GetTopicStatsRequest(topic=topic)
        message = yield from self.asking(timeout_s).ask(STATS, request.SerializeToString(), topic=topic)
        return inspection.TopicStats.from_message(message)

    def buckets_page(
        self, topic: str, page_token: str, *, page_size: int, timeout_s: float | None
    ) -> attempts.Plan[inspection.BucketPage]:
        attempts.check_names(topic)
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListBucketsRequest(topic=topic, page_token=page_token, page_size=page_size)
        message = yield from self.asking(timeout_s).ask(LIST_BUCKETS, request.SerializeToString(), topic=topic)
        return inspection.BucketPage.from_message(message)

    def subscriptions_page(
        self, topic: str, page_token: str, *, page_size: int, timeout_s: float | None
    ) -> attempts.Plan[inspection.SubscriptionPage]:
        attempts.check_names(topic)
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListSubscriptionsRequest(topic=topic, page_token=page_token, page_size=page_size)
        message = yield from self.asking(timeout_s).ask(LIST_SUBSCRIPTIONS, request.SerializeToString(), topic=topic)
        return inspection.SubscriptionPage.from_message(message)

    def consumers_page(
        self, topic: str, subscription: str, page_token: str, *, page_size: int, timeout_s: float | None
    ) -> attempts.Plan[inspection.ConsumerPage]:
        attempts.check_names(topic, subscription)
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListConsumersRequest(
            topic=topic, subscription=subscription, page_token=page_token, page_size=page_size
        )
        message = yield from self.asking(timeout_s).ask(LIST_CONSUMERS, request.SerializeToString(), topic=topic)
        return inspection.ConsumerPage.from_message(message)

    def scheduled_page(
        self,
        topic: str,
        page_token: str,
        *,
        from_ms: int | None,
        until_ms: int | None,
        ledgers: tuple[int, int] | None,
        subscription: str | None,
        page_size: int,
        timeout_s: float | None,
    ) -> attempts.Plan[inspection.ScheduledPage]:
        attempts.check_names(topic, subscription or "")
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListScheduledRequest(
            topic=topic,
            **attempts.time_range("from_ms", from_ms, "until_ms", until_ms),
            ledgers=attempts.ledger_range(ledgers),
            subscription=subscription or "",
            page_size=page_size,
            page_token=page_token,
        )
        message = yield from self.asking(timeout_s).ask(LIST_SCHEDULED, request.SerializeToString(), topic=topic)
        return inspection.ScheduledPage.from_message(message)

    def histogram(
        self,
        topic: str,
        *,
        from_ms: int | None,
        until_ms: int | None,
        width_ms: int | None,
        ledgers: tuple[int, int] | None,
        subscription: str | None,
        timeout_s: float | None,
    ) -> attempts.Plan[inspection.Histogram]:
        attempts.check_names(topic, subscription or "")
        columns.check_unsigned("width_ms", width_ms or 0, bits=64)
        request = inspect_pb2.GetHistogramRequest(
            topic=topic,
            **attempts.time_range("from_ms", from_ms, "until_ms", until_ms),
            width_ms=width_ms or 0,
            ledgers=attempts.ledger_range(ledgers),
            subscription=subscription or "",
        )
        message = yield from self.asking(timeout_s).ask(GET_HISTOGRAM, request.SerializeToString(), topic=topic)
        return inspection.Histogram.from_message(message)

    def retention(
        self, topic: str, ledger_id: columns.Column | None, *, timeout_s: float | None
    ) -> attempts.Plan[inspection.Retention]:
        attempts.check_names(topic)
        asking = self.asking(timeout_s)
        asked = np.empty(0, np.uint64) if ledger_id is None else np.unique(columns.u64("ledger_id", ledger_id))
        if ledger_id is not None and not len(asked):
            raise errors.InvalidArgument("ledger_id names no ledger; give None for all of them")
        pages = []
        for first in range(0, max(1, len(asked)), LEDGERS_PER_REQUEST_MAX):
            ledgers = asked[first : first + LEDGERS_PER_REQUEST_MAX].tolist()
            request = inspect_pb2.GetRetentionRequest(topic=topic, ledger_id=ledgers, page_size=RETENTION_PAGE)
            while True:
                page = yield from asking.ask(
                    GET_RETENTION, request.SerializeToString(), topic=topic, needs=attempts.RETAINED
                )
                pages.append(page)
                request.page_token = page.next_page_token
                if not request.page_token:
                    break
        return inspection.Retention.from_messages(pages)

    def backlog_page(
        self,
        topic: str,
        subscription: str,
        page_token: str,
        *,
        ledgers: tuple[int, int] | None,
        page_size: int,
        timeout_s: float | None,
    ) -> attempts.Plan[inspection.BacklogPage]:
        attempts.check_names(topic, subscription)
        columns.check_unsigned("page_size", page_size, bits=32)
        request = inspect_pb2.ListBacklogRequest(
            topic=topic,
            subscription=subscription,
            ledgers=attempts.ledger_range(ledgers),
            page_size=page_size,
            page_token=page_token,
        )
        message = yield from self.asking(timeout_s).ask(LIST_BACKLOG, request.SerializeToString(), topic=topic)
        return inspection.BacklogPage.from_message(message)

    def lookup(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.TopicLocation]:
        attempts.check_names(topic)
        request = cluster_pb2.LookupTopicRequest(topic=topic)
        message = yield from self.asking(timeout_s).ask(LOOKUP, request.SerializeToString(), topic=None)
        return results.TopicLocation.from_message(message)

    # Operators

    def policy_of(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.TopicPolicies]:
        attempts.check_names(topic)
        request = admin_pb2.GetTopicPolicyRequest(topic=topic)
        message = yield from self.asking(timeout_s).ask(GET_TOPIC_POLICY, request.SerializeToString(), topic=topic)
        return results.TopicPolicies.from_message(message)

    def set_policy(
        self, topic: str, policy: policies.TopicPolicy, *, timeout_s: float | None
    ) -> attempts.Plan[policies.TopicPolicy]:
        attempts.check_names(topic)
        request = admin_pb2.SetTopicPolicyRequest(topic=topic, policy=policy.to_message())
        message = yield from self.asking(timeout_s).ask(SET_TOPIC_POLICY, request.SerializeToString(), topic=topic)
        return policies.TopicPolicy.from_message(message.effective)

    def seal(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.Sealed]:
        attempts.check_names(topic)
        request = admin_pb2.SealBucketRequest(topic=topic)
        message = yield from self.asking(timeout_s).ask(SEAL, request.SerializeToString(), topic=topic)
        return results.Sealed.from_message(message)

    def merge(self, topic: str, buckets_max: int | None, *, timeout_s: float | None) -> attempts.Plan[results.Merged]:
        attempts.check_names(topic)
        columns.check_unsigned("buckets_max", buckets_max or 0, bits=32)
        request = admin_pb2.MergeBucketsRequest(topic=topic, buckets_max=buckets_max or 0)
        message = yield from self.asking(timeout_s).ask(MERGE, request.SerializeToString(), topic=topic)
        return results.Merged.from_message(message)

    def collect_garbage(
        self, *, dry_run: bool, force: bool, retry_dead_objects: bool, timeout_s: float | None
    ) -> attempts.Plan[attempts.Send]:
        """Plan a call that has many answers and no second attempt."""
        request = admin_pb2.CollectGarbageRequest(dry_run=dry_run, force=force, retry_dead_objects=retry_dead_objects)
        return self.once(COLLECT_GARBAGE, request.SerializeToString(), timeout_s)

    def delete_topic(self, topic: str, *, timeout_s: float | None) -> attempts.Plan[results.TopicDeleted]:
        attempts.check_names(topic)
        request = admin_pb2.DeleteTopicRequest(topic=topic)
        try:
            message = yield from self.asking(timeout_s).ask(DELETE_TOPIC, request.SerializeToString(), topic=topic)
        except errors.NotFound as error:
            # An earlier attempt may have deleted it, as in `delete_subscription`.
            if not error.may_have_landed:
                raise
            return results.TopicDeleted(rows=None, incarnation=None)
        return results.TopicDeleted.from_message(message)


def _rest(
    asked: columns.EntryColumns, place: delayed_delivery_pb2.ContainsContinuation
) -> tuple[columns.EntryColumns, int | None]:
    """Return what is not answered yet, and the entry at which it begins within a range.

    Raises Internal if nothing was answered.
    """
    if place.index >= len(asked) or (place.index == 0 and place.entry_id <= asked.entry_id[0]):
        raise errors.Internal(
            f"the daemon continues {len(asked)} ranges at range {place.index}, entry {place.entry_id}: no progress"
        )
    within_range = place.entry_id > asked.entry_id[place.index]
    return asked.from_place(place.index, place.entry_id), place.entry_id if within_range else None
