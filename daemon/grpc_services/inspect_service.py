"""`tarry.v1.Inspect`: what people and dashboards ask.

Owns: page sizes and page tokens. Does not own: the counts, and what follows what in a list (engine).
"""

from __future__ import annotations

import base64
import binascii
import enum
from typing import TYPE_CHECKING, Protocol

from daemon import config, errors
from daemon.grpc_services import records, unary
from tarry.v1 import inspect_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Inspect"]

PAGE_SIZE_MAX = 1000


class _List(enum.Enum):
    """Whose pages a token turns: its first byte."""

    TOPICS = b"\x01"
    BUCKETS = b"\x02"
    SUBSCRIPTIONS = b"\x03"


class _Paged(Protocol):
    """A request for a page."""

    @property
    def page_size(self) -> int: ...
    @property
    def page_token(self) -> str: ...


class Inspect:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._requests = engine.requests
        self._handler = unary.Frame(settings).handler

    def handlers(self) -> dict[str, unary.Handler]:
        return {
            "ListTopics": self._handler(pb.ListTopicsRequest, self._list_topics),
            "GetTopicStats": self._handler(pb.GetTopicStatsRequest, self._topic_stats),
            "ListBuckets": self._handler(pb.ListBucketsRequest, self._list_buckets),
            "ListSubscriptions": self._handler(pb.ListSubscriptionsRequest, self._list_subscriptions),
        }

    async def _list_topics(self, request: pb.ListTopicsRequest) -> pb.ListTopicsResponse:
        page = await self._requests.list_topics(*_place(request, _List.TOPICS))
        return records.as_message(
            pb.ListTopicsResponse,
            page,
            topics=[records.as_message(pb.TopicSummary, topic) for topic in page.topics],
            next_page_token=_token(page.next_after, _List.TOPICS),
        )

    async def _topic_stats(self, request: pb.GetTopicStatsRequest) -> pb.GetTopicStatsResponse:
        stats = await self._requests.topic_stats(request.topic)
        return records.as_message(
            pb.GetTopicStatsResponse,
            stats,
            subscriptions=records.subscription_stats(stats.subscriptions),
            rebuild_needed=records.rebuild_needed(stats.rebuild_needed),
        )

    async def _list_buckets(self, request: pb.ListBucketsRequest) -> pb.ListBucketsResponse:
        page = await self._requests.list_buckets(request.topic, *_place(request, _List.BUCKETS))
        return records.as_message(
            pb.ListBucketsResponse,
            page,
            buckets=[records.as_message(pb.BucketSummary, bucket) for bucket in page.buckets],
            next_page_token=_token(page.next_after, _List.BUCKETS),
        )

    async def _list_subscriptions(self, request: pb.ListSubscriptionsRequest) -> pb.ListSubscriptionsResponse:
        page = await self._requests.list_subscriptions(request.topic, *_place(request, _List.SUBSCRIPTIONS))
        return records.as_message(
            pb.ListSubscriptionsResponse,
            page,
            subscriptions=records.subscription_stats(page.subscriptions),
            next_page_token=_token(page.next_after, _List.SUBSCRIPTIONS),
        )


def _place(request: _Paged, of: _List) -> tuple[int, str]:
    """The page's size, and after what it starts. Raises `InvalidArgument`."""
    if request.page_size > PAGE_SIZE_MAX:
        raise errors.InvalidArgument(f"page_size: {request.page_size}, the limit is {PAGE_SIZE_MAX}")
    return request.page_size or PAGE_SIZE_MAX, _after(request.page_token, of)


def _token(after: str | None, of: _List) -> str:
    return base64.urlsafe_b64encode(of.value + after.encode()).decode() if after else ""


def _after(token: str, of: _List) -> str:
    if not token:
        return ""
    try:
        data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if data[:1] == of.value and len(data) > 1:
            return data[1:].decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise _bad_token(token, of) from error
    raise _bad_token(token, of)


def _bad_token(token: str, of: _List) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f"page_token: {token[:64]!r} is not a next_page_token of this daemon for {of.name.lower()}"
    )
