"""`tarry.v1.Inspect`: what people and dashboards ask.

Owns: page sizes and page tokens. Does not own: the counts and rows, and what follows what in a list (engine).

A page of rows goes on from a place, and so only for the request that it is of: a token says which that is.
"""

from __future__ import annotations

import base64
import binascii
import enum
import hashlib
import struct
from typing import TYPE_CHECKING, Protocol, TypeAlias

from google.protobuf import message

from daemon import config, errors
from daemon.engine import calls
from daemon.grpc_services import columns, consumers, dead_letters, records, unary
from daemon.grpc_services.pipeline import Context
from tarry.v1 import inspect_pb2 as pb

if TYPE_CHECKING:
    from daemon.engine.engine import Engine

DESCRIPTOR = pb.DESCRIPTOR.services_by_name["Inspect"]

PAGE_SIZE_MAX = 1000

_DIGEST_BYTES = 8
# A row's deliver_at_ms, ledger, entry and index.
_ROW = struct.Struct("<QQQQ")
_DEAD_LETTER_ID = struct.Struct("<Q")
# The number of a consumer.
_CONSUMER = struct.Struct("<Q")


class _List(enum.Enum):
    """Whose pages a token turns: its first byte."""

    TOPICS = b"\x01"
    BUCKETS = b"\x02"
    SUBSCRIPTIONS = b"\x03"
    SCHEDULED = b"\x04"
    BACKLOG = b"\x05"
    DEAD_LETTERS = b"\x06"
    CONSUMERS = b"\x07"


# Requests for a page that goes on from a place.
_Placed: TypeAlias = (
    pb.ListScheduledRequest | pb.ListBacklogRequest | pb.ListDeadLettersRequest | pb.ListConsumersRequest
)


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
        # Whoever has gone is not counted for.
        self._cancelled_handler = unary.Frame(settings).cancelled_handler

    def handlers(self) -> dict[str, unary.Handler]:
        return {
            "ListTopics": self._handler(pb.ListTopicsRequest, self._list_topics),
            "GetTopicStats": self._handler(pb.GetTopicStatsRequest, self._topic_stats),
            "ListBuckets": self._handler(pb.ListBucketsRequest, self._list_buckets),
            "ListSubscriptions": self._handler(pb.ListSubscriptionsRequest, self._list_subscriptions),
            "ListScheduled": self._cancelled_handler(pb.ListScheduledRequest, self._list_scheduled),
            "GetHistogram": self._cancelled_handler(pb.GetHistogramRequest, self._histogram),
            "ListBacklog": self._cancelled_handler(pb.ListBacklogRequest, self._list_backlog),
            "ListConsumers": self._cancelled_handler(pb.ListConsumersRequest, self._list_consumers),
            "ListDeadLetters": self._cancelled_handler(pb.ListDeadLettersRequest, self._list_dead_letters),
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

    async def _list_scheduled(self, request: pb.ListScheduledRequest, _: Context) -> bytes:
        after = _row_after(request, _List.SCHEDULED)
        page = await self._requests.list_scheduled(request.topic, _view(request), request.page_size, after)
        token = _row_token(page.next_after, request, _List.SCHEDULED)
        return columns.scheduled_response(page, pb.ListScheduledResponse(next_page_token=token, as_of_ms=page.as_of_ms))

    async def _histogram(self, request: pb.GetHistogramRequest, _: Context) -> pb.GetHistogramResponse:
        found = await self._requests.histogram(request.topic, _view(request), request.width_ms)
        return records.as_message(pb.GetHistogramResponse, found, rows=found.rows.tolist())

    async def _list_backlog(self, request: pb.ListBacklogRequest, _: Context) -> bytes:
        after = _row_after(request, _List.BACKLOG)
        page = await self._requests.list_backlog(
            request.topic, request.subscription, _ledgers(request), request.page_size, after
        )
        token = _row_token(page.next_after, request, _List.BACKLOG)
        return columns.backlog_response(page, pb.ListBacklogResponse(next_page_token=token, as_of_ms=page.as_of_ms))

    async def _list_consumers(self, request: pb.ListConsumersRequest, _: Context) -> pb.ListConsumersResponse:
        place = _place_in(request, _List.CONSUMERS, _CONSUMER)
        page = await self._requests.list_consumers(
            request.topic, request.subscription, _page_size(request), place[0] if place else 0
        )
        after = None if page.next_after is None else (page.next_after,)
        return consumers.response(page, _token_of(after, request, _List.CONSUMERS, _CONSUMER))

    async def _list_dead_letters(self, request: pb.ListDeadLettersRequest, _: Context) -> bytes:
        place = _place_in(request, _List.DEAD_LETTERS, _DEAD_LETTER_ID)
        page = await self._requests.list_dead_letters(
            request.topic,
            request.subscription,
            dead_letters.filter_of(request.filter),
            request.page_size,
            place[0] if place else 0,
        )
        after = None if page.next_after is None else (page.next_after,)
        token = _token_of(after, request, _List.DEAD_LETTERS, _DEAD_LETTER_ID)
        rest = pb.ListDeadLettersResponse(next_page_token=token, as_of_ms=page.as_of_ms)
        return dead_letters.page_response(page, rest)


def _view(request: pb.ListScheduledRequest | pb.GetHistogramRequest) -> calls.View:
    return calls.View(request.from_ms, request.until_ms, _ledgers(request), request.subscription or None)


def _ledgers(
    request: pb.ListScheduledRequest | pb.GetHistogramRequest | pb.ListBacklogRequest,
) -> tuple[int, int] | None:
    if not request.HasField("ledgers"):
        return None
    return request.ledgers.first_ledger_id, request.ledgers.last_ledger_id


def _place(request: _Paged, of: _List) -> tuple[int, str]:
    """The page's size, and after what it starts. Raises `InvalidArgument`."""
    return _page_size(request), _after(request.page_token, of)


def _page_size(request: _Paged) -> int:
    if request.page_size > PAGE_SIZE_MAX:
        raise errors.InvalidArgument(f"page_size: {request.page_size}, the limit is {PAGE_SIZE_MAX}")
    return request.page_size or PAGE_SIZE_MAX


def _token(after: str | None, of: _List) -> str:
    return _encoded(of, after.encode()) if after else ""


def _after(token: str, of: _List) -> str:
    if not token:
        return ""
    try:
        return _decoded(token, of).decode()
    except UnicodeDecodeError as error:
        raise _bad_token(token, of) from error


def _row_token(after: calls.Place | None, request: _Placed, of: _List) -> str:
    return _token_of(after, request, of, _ROW)


def _row_after(request: _Placed, of: _List) -> calls.Place | None:
    """Raises `InvalidArgument`, also for a token of another request."""
    place = _place_in(request, of, _ROW)
    return calls.Place(*place) if place else None


def _token_of(after: tuple[int, ...] | None, request: _Placed, of: _List, form: struct.Struct) -> str:
    """A token that turns the pages of one request."""
    return "" if after is None else _encoded(of, _digest(request) + form.pack(*after))


def _place_in(request: _Placed, of: _List, form: struct.Struct) -> tuple[int, ...]:
    """After which place the page begins; empty for the first. Raises `InvalidArgument`."""
    token = request.page_token
    if not token:
        return ()
    data = _decoded(token, of)
    if len(data) != _DIGEST_BYTES + form.size:
        raise _bad_token(token, of)
    if data[:_DIGEST_BYTES] != _digest(request):
        raise errors.InvalidArgument(
            f"page_token: {token[:64]!r} is of another request; only page_size may change from page to page"
        )
    return form.unpack(data[_DIGEST_BYTES:])


def _digest(request: message.Message) -> bytes:
    """Of what is asked for, whatever the page."""
    asked = type(request)()
    asked.CopyFrom(request)
    for name in ("page_size", "page_token"):
        asked.ClearField(name)
    return hashlib.blake2b(asked.SerializeToString(deterministic=True), digest_size=_DIGEST_BYTES).digest()


def _encoded(of: _List, place: bytes) -> str:
    return base64.urlsafe_b64encode(of.value + place).decode()


def _decoded(token: str, of: _List) -> bytes:
    try:
        data = base64.b64decode(token.encode(), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise _bad_token(token, of) from error
    if data[:1] != of.value or len(data) == 1:
        raise _bad_token(token, of)
    return data[1:]


def _bad_token(token: str, of: _List) -> errors.InvalidArgument:
    return errors.InvalidArgument(
        f"page_token: {token[:64]!r} is not a next_page_token of this daemon for {of.name.lower()}"
    )
