"""`tarry.v1.Inspect`: what people and dashboards ask.

Owns: page tokens. Does not own: the counts (engine).
"""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING

from daemon import config, errors
from daemon.grpc_services import unary
from tarry.v1 import inspect_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Inspect"]

PAGE_SIZE_MAX = 1000
_TOKEN_FORM = b"\x01"


class Inspect:
    """The service's handlers."""

    def __init__(self, engine: Engine, settings: config.Config) -> None:
        self._engine = engine
        self._settings = settings

    def handlers(self) -> dict[str, unary.Handler]:
        size_bytes_max = self._settings.limits.message_bytes_max
        return {
            "ListTopics": unary.handler(pb.ListTopicsRequest, self._list_topics, size_bytes_max=size_bytes_max),
            "GetTopicStats": unary.handler(pb.GetTopicStatsRequest, self._topic_stats, size_bytes_max=size_bytes_max),
        }

    async def _list_topics(self, request: pb.ListTopicsRequest) -> pb.ListTopicsResponse:
        if request.page_size > PAGE_SIZE_MAX:
            raise errors.InvalidArgument(f"page_size: {request.page_size}, the limit is {PAGE_SIZE_MAX}")
        page = await self._engine.requests.list_topics(request.page_size or PAGE_SIZE_MAX, _after(request.page_token))
        summaries = [
            pb.TopicSummary(**{name: getattr(topic, name) for name in _names(pb.TopicSummary)}) for topic in page.topics
        ]
        return pb.ListTopicsResponse(topics=summaries, next_page_token=_token(page.next_after), as_of_ms=page.as_of_ms)

    async def _topic_stats(self, request: pb.GetTopicStatsRequest) -> pb.GetTopicStatsResponse:
        stats = await self._engine.requests.topic_stats(request.topic)
        subscriptions = [
            pb.SubscriptionStats(**{name: getattr(each, name) for name in _names(pb.SubscriptionStats)})
            for each in stats.subscriptions
        ]
        counts = {name: getattr(stats, name) for name in _names(pb.GetTopicStatsResponse) if name != "subscriptions"}
        return pb.GetTopicStatsResponse(subscriptions=subscriptions, **counts)


def _names(
    message_type: type[pb.TopicSummary] | type[pb.SubscriptionStats] | type[pb.GetTopicStatsResponse],
) -> list[str]:
    """The engine's records have the fields of these messages, under the same names."""
    return [field.name for field in message_type.DESCRIPTOR.fields]


def _token(after: str | None) -> str:
    return base64.urlsafe_b64encode(_TOKEN_FORM + after.encode()).decode() if after else ""


def _after(token: str) -> str:
    """The name after which the page starts. Raises `InvalidArgument`."""
    if not token:
        return ""
    try:
        data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
        if data[:1] == _TOKEN_FORM and len(data) > 1:
            return data[1:].decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise _bad_token(token) from error
    raise _bad_token(token)


def _bad_token(token: str) -> errors.InvalidArgument:
    return errors.InvalidArgument(f"page_token: {token[:64]!r} is not a next_page_token of this daemon")
