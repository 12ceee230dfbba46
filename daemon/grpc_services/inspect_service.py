"""Serves `tarry.v1.Inspect`: lists, counts and histograms for people and dashboards.

The gRPC server alone imports it: a module for each service of the contract.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

import numpy as np

from daemon import call_values, config
from daemon.core.index.scan import Place
from daemon.core.key_shared.key_shared_stats import ConsumerAfterMarkDelete, KeySharedStats
from daemon.grpc_services import page_tokens, row_answers, row_requests, unary, value_messages
from daemon.grpc_services.admission import Context
from daemon.owner.engine import Engine
from tarry.v1 import inspect_pb2 as pb
from tarry.v1 import policy_pb2


def consumer_response(page: call_values.ConsumerPage, next_page_token: str) -> pb.ListConsumersResponse:
    return pb.ListConsumersResponse(
        consumers=[_consumer(each) for each in page.consumers],
        next_page_token=next_page_token,
        as_of_ms=page.as_of_ms,
        key_shared=None if page.key_shared is None else _key_shared(page.key_shared),
    )


def _consumer(summary: call_values.ConsumerSummary) -> pb.ConsumerStats:
    stats = summary.stats
    return value_messages.as_message(
        pb.ConsumerStats,
        stats,
        instance_id=stats.number,
        consumer_id=summary.consumer_id,
        hash_ranges=[policy_pb2.HashRange(first=each.first, last=each.last) for each in stats.hash_ranges],
        last_sent_position_when_joining=_position(stats.last_sent_position_when_joining),
        draining_hashes=[value_messages.as_message(pb.DrainingHash, each) for each in stats.draining_hashes],
    )


def _key_shared(stats: KeySharedStats) -> pb.KeySharedStats:
    return value_messages.as_message(
        pb.KeySharedStats,
        stats,
        policy=value_messages.key_shared_message(stats.policy),
        last_sent_position=_position(stats.last_sent_position),
        individually_sent_positions=[
            pb.PositionRange(after=_position(after), up_to=_position(up_to))
            for after, up_to in stats.individually_sent_positions
        ],
        consumers_after_mark_delete_position=[_after(each) for each in stats.consumers_after_mark_delete_position],
    )


def _after(consumer: ConsumerAfterMarkDelete) -> pb.ConsumerAfterMarkDelete:
    return value_messages.as_message(
        pb.ConsumerAfterMarkDelete,
        consumer,
        instance_id=consumer.number,
        last_sent_position_when_joining=_position(consumer.last_sent_position_when_joining),
    )


def _position(position: tuple[int, int] | None) -> pb.Position | None:
    return None if position is None else pb.Position(ledger_id=position[0], entry_id=position[1])


DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Inspect"]

PAGE_SIZE_MAX = 1000

# A row's deliver_at_ms, ledger, entry and index
_ROW = struct.Struct("<QQQQ")
_DEAD_LETTER_ID = struct.Struct("<Q")
# The number of a consumer
_CONSUMER = struct.Struct("<Q")
_LEDGER = struct.Struct("<Q")


# Requests for a page that continues from a place
_Placed: TypeAlias = (
    pb.ListScheduledRequest | pb.ListBacklogRequest | pb.ListDeadLettersRequest | pb.ListConsumersRequest
)


class Inspect:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._requests = engine.requests
        self._handler = unary.Frame(settings).handler
        # Nothing is counted for a caller that has left.
        self._cancelled_handler = unary.Frame(settings).cancelled_handler

    def handlers(self) -> dict[str, unary.Handler]:
        return {
            "ListTopics": self._cancelled_handler(pb.ListTopicsRequest, self._list_topics),
            "GetTopicStats": self._handler(pb.GetTopicStatsRequest, self._topic_stats),
            "ListBuckets": self._handler(pb.ListBucketsRequest, self._list_buckets),
            "ListSubscriptions": self._handler(pb.ListSubscriptionsRequest, self._list_subscriptions),
            "ListScheduled": self._cancelled_handler(pb.ListScheduledRequest, self._list_scheduled),
            "GetHistogram": self._cancelled_handler(pb.GetHistogramRequest, self._histogram),
            "ListBacklog": self._cancelled_handler(pb.ListBacklogRequest, self._list_backlog),
            "ListConsumers": self._cancelled_handler(pb.ListConsumersRequest, self._list_consumers),
            "ListDeadLetters": self._cancelled_handler(pb.ListDeadLettersRequest, self._list_dead_letters),
            "GetRetention": self._cancelled_handler(pb.GetRetentionRequest, self._retention),
        }

    async def _list_topics(self, request: pb.ListTopicsRequest, context: Context) -> pb.ListTopicsResponse:
        place = _place(request, page_tokens.List.TOPICS)
        page = await self._requests.list_topics(*place, context.topic_prefixes)
        return value_messages.as_message(
            pb.ListTopicsResponse,
            page,
            topics=[value_messages.as_message(pb.TopicSummary, topic) for topic in page.topics],
            next_page_token=page_tokens.of_name(page.next_after, page_tokens.List.TOPICS),
        )

    async def _topic_stats(self, request: pb.GetTopicStatsRequest) -> pb.GetTopicStatsResponse:
        stats = await self._requests.topic_stats(request.topic)
        return value_messages.as_message(
            pb.GetTopicStatsResponse,
            stats,
            subscriptions=value_messages.subscription_stats(stats.subscriptions),
            rebuild_needed=value_messages.rebuild_needed(stats.rebuild_needed),
            lowest_position=_position(stats.survey.lowest),
            ledgers=stats.survey.ledgers,
        )

    async def _list_buckets(self, request: pb.ListBucketsRequest) -> pb.ListBucketsResponse:
        page = await self._requests.list_buckets(request.topic, *_place(request, page_tokens.List.BUCKETS))
        return value_messages.as_message(
            pb.ListBucketsResponse,
            page,
            buckets=[value_messages.as_message(pb.BucketSummary, bucket) for bucket in page.buckets],
            next_page_token=page_tokens.of_name(page.next_after, page_tokens.List.BUCKETS),
        )

    async def _list_subscriptions(self, request: pb.ListSubscriptionsRequest) -> pb.ListSubscriptionsResponse:
        page = await self._requests.list_subscriptions(request.topic, *_place(request, page_tokens.List.SUBSCRIPTIONS))
        return value_messages.as_message(
            pb.ListSubscriptionsResponse,
            page,
            subscriptions=value_messages.subscription_stats(page.subscriptions),
            next_page_token=page_tokens.of_name(page.next_after, page_tokens.List.SUBSCRIPTIONS),
        )

    async def _list_scheduled(self, request: pb.ListScheduledRequest, _: Context) -> bytes:
        after = _row_after(request, page_tokens.List.SCHEDULED)
        page = await self._requests.list_scheduled(request.topic, _view(request), request.page_size, after)
        token = _row_token(page.next_after, request, page_tokens.List.SCHEDULED)
        return row_answers.scheduled_response(
            page, pb.ListScheduledResponse(next_page_token=token, as_of_ms=page.as_of_ms)
        )

    async def _histogram(self, request: pb.GetHistogramRequest, _: Context) -> pb.GetHistogramResponse:
        found = await self._requests.histogram(request.topic, _view(request), request.width_ms)
        return value_messages.as_message(pb.GetHistogramResponse, found, rows=found.rows.tolist())

    async def _list_backlog(self, request: pb.ListBacklogRequest, _: Context) -> bytes:
        after = _row_after(request, page_tokens.List.BACKLOG)
        page = await self._requests.list_backlog(
            request.topic, request.subscription, _ledgers(request), request.page_size, after
        )
        token = _row_token(page.next_after, request, page_tokens.List.BACKLOG)
        return row_answers.backlog_response(page, pb.ListBacklogResponse(next_page_token=token, as_of_ms=page.as_of_ms))

    async def _list_consumers(self, request: pb.ListConsumersRequest, _: Context) -> pb.ListConsumersResponse:
        place = page_tokens.place_in(request, request.page_token, page_tokens.List.CONSUMERS, _CONSUMER)
        page = await self._requests.list_consumers(
            request.topic, request.subscription, _page_size(request), place[0] if place else 0
        )
        after = None if page.next_after is None else (page.next_after,)
        return consumer_response(page, page_tokens.of_place(after, request, page_tokens.List.CONSUMERS, _CONSUMER))

    async def _list_dead_letters(self, request: pb.ListDeadLettersRequest, _: Context) -> bytes:
        place = page_tokens.place_in(request, request.page_token, page_tokens.List.DEAD_LETTERS, _DEAD_LETTER_ID)
        page = await self._requests.list_dead_letters(
            request.topic,
            request.subscription,
            row_requests.dead_letter_filter(request.filter),
            request.page_size,
            place[0] if place else 0,
        )
        after = None if page.next_after is None else (page.next_after,)
        token = page_tokens.of_place(after, request, page_tokens.List.DEAD_LETTERS, _DEAD_LETTER_ID)
        rest = pb.ListDeadLettersResponse(next_page_token=token, as_of_ms=page.as_of_ms)
        return row_answers.dead_letter_page_response(page, rest)

    async def _retention(self, request: pb.GetRetentionRequest, _: Context) -> pb.GetRetentionResponse:
        after = page_tokens.place_in(request, request.page_token, page_tokens.List.RETENTION, _LEDGER)
        asked = np.array(request.ledger_id, np.uint64) if request.ledger_id else None
        page = await self._requests.retained(request.topic, asked, request.page_size, after[0] if after else None)
        next_after = None if page.next_after is None else (page.next_after,)
        return pb.GetRetentionResponse(
            ledger_id=page.ledger_id.tolist(),
            lowest_entry_id=page.lowest_entry_id.tolist(),
            uncertain=[pb.LedgerRange(first_ledger_id=first, last_ledger_id=last) for first, last in page.uncertain],
            next_page_token=page_tokens.of_place(next_after, request, page_tokens.List.RETENTION, _LEDGER),
            as_of_ms=page.as_of_ms,
        )


def _view(request: pb.ListScheduledRequest | pb.GetHistogramRequest) -> call_values.View:
    return call_values.View(request.from_ms, request.until_ms, _ledgers(request), request.subscription or None)


def _ledgers(
    request: pb.ListScheduledRequest | pb.GetHistogramRequest | pb.ListBacklogRequest,
) -> tuple[int, int] | None:
    if not request.HasField("ledgers"):
        return None
    return request.ledgers.first_ledger_id, request.ledgers.last_ledger_id


def _place(request: page_tokens.Paged, of: page_tokens.List) -> tuple[int, str]:
    """Return the page's size and the name after which it begins. Raises `InvalidArgument`."""
    return _page_size(request), page_tokens.name_in(request.page_token, of)


def _page_size(request: page_tokens.Paged) -> int:
    return page_tokens.page_size(request, default=PAGE_SIZE_MAX, most=PAGE_SIZE_MAX)


def _row_token(after: Place | None, request: _Placed, of: page_tokens.List) -> str:
    return page_tokens.of_place(after, request, of, _ROW)


def _row_after(request: _Placed, of: page_tokens.List) -> Place | None:
    """Return the place after which the page begins. Raises `InvalidArgument`, also for another request's token."""
    place = page_tokens.place_in(request, request.page_token, of, _ROW)
    return Place(*place) if place else None
