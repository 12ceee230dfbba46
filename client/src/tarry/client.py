"""The client of one Tarry daemon, or of the daemons behind one gRPC target.

Owns: the calls that a program makes, their arguments and defaults.
Does not own: retries and owners (`tarry.connections`), streams (`tarry.add_stream`, `tarry.subscription`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import TracebackType

import grpc

from tarry import add_stream, columns, connections, errors, results, retry, wire
from tarry.subscription import Subscription
from tarry.v1 import (
    delayed_delivery_pb2,
    dispatch_pb2,
    dispatch_pb2_grpc,
    inspect_pb2,
    inspect_pb2_grpc,
)

DEFAULT_TARGET = "127.0.0.1:7461"
DEFAULT_TIMEOUT_S = 30.0


class Client:
    """Thread-safe; a context manager. Nothing is sent before the first call.

    `target`: host:port of a daemon, or any gRPC target; the owner that a daemon names is followed.
    `timeout_s`: how long a call is tried, retries included, unless the call says otherwise. Every request is
    idempotent: UNAVAILABLE, ABORTED and UNKNOWN are repeated with jittered back-off, RESOURCE_EXHAUSTED after the time
    that the daemon names, and a daemon that is not the owner sends the client to the one that is. When the time is over
    DeadlineExceeded is raised with the last failure in it; every other failure is raised at once (`tarry.errors`).
    `retry_policy`: the back-off.
    `rows_per_request`, `request_bytes`: the daemon's limits; longer batches are sent as several requests.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        retry_policy: retry.RetryPolicy | None = None,
        rows_per_request: int = columns.ROWS_PER_REQUEST_MAX,
        request_bytes: int = columns.REQUEST_BYTES_MAX,
    ) -> None:
        self._shared = connections.Connections(target, retry_policy or retry.RetryPolicy())
        self._timeout_s = timeout_s
        self._rows_max = rows_per_request
        self._bytes_max = request_bytes
        self._streams: weakref.WeakSet[add_stream.AddStream | Subscription] = weakref.WeakSet()

    def add(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None = None,
        delay_ms: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        already_due: results.AlreadyDue = results.AlreadyDue.DELIVER,
        timeout_s: float | None = None,
    ) -> results.AddResult:
        """Adds positions and returns when every accepted row is durable.

        Columns are arrays, lists or single numbers; one of length 1 applies to the whole batch. Exactly one of
        `deliver_at_ms` (Unix time in ms) and `delay_ms` is given. `key_hash` comes from `tarry.key_hash`.
        A batch over the limits is sent as several requests: when one fails, those before it are durable.
        """
        rows = columns.add_columns(
            ledger_id, entry_id, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms, key_hash=key_hash
        )
        deadline = self._deadline(timeout_s)
        parts = []
        for first, part in rows.requests(self._rows_max, self._bytes_max):
            message = self._shared.call(
                _add_messages,
                wire.encode_add(topic.encode(), part, already_due),
                topic=topic,
                deadline=deadline,
            )
            parts.append((first, results.AddResult.from_message(message)))
        return results.AddResult.merge(parts)

    def add_stream(self, topic: str, *, in_flight: int = 16, timeout_s: float | None = None) -> add_stream.AddStream:
        """A stream of batches with up to `in_flight` requests unanswered: the fast way to add much."""
        stream = add_stream.AddStream(
            self._shared,
            topic,
            in_flight=in_flight,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            rows_max=self._rows_max,
            bytes_max=self._bytes_max,
        )
        self._streams.add(stream)
        return stream

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        permits: int = 10_000,
        create: bool = False,
        timeout_s: float | None = None,
    ) -> Subscription:
        """Opens a subscription and returns when its stream is open.

        `permits`: how many positions may be received and neither acknowledged nor released.
        `create`: create the subscription, and the topic, if they do not exist.
        Raises NotFound; later failures are raised from the iteration, broken streams are opened again.
        """
        deadline = self._deadline(timeout_s)
        if create:
            self.create_subscription(topic, subscription, timeout_s=timeout_s)
        opened = Subscription(
            self._shared,
            topic,
            subscription,
            permits=permits,
            rows_max=self._rows_max,
            timeout_s=self._timeout_s,
        )
        self._streams.add(opened)
        try:
            opened.wait_until_open(deadline)
        except BaseException:
            opened.close()
            raise
        return opened

    def create_subscription(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> results.SubscriptionCreated:
        """Creates a subscription, and the topic if it is new. It is OK when it exists."""
        message = self._shared.call(
            lambda channel: dispatch_pb2_grpc.DispatchStub(channel).CreateSubscription,
            dispatch_pb2.CreateSubscriptionRequest(topic=topic, subscription=subscription),
            topic=topic,
            deadline=self._deadline(timeout_s),
        )
        return results.SubscriptionCreated.from_message(message)

    def delete_subscription(self, topic: str, subscription: str, *, timeout_s: float | None = None) -> None:
        """Deletes a subscription; deleting the last one drops what is due. Raises NotFound."""
        try:
            self._shared.call(
                lambda channel: dispatch_pb2_grpc.DispatchStub(channel).DeleteSubscription,
                dispatch_pb2.DeleteSubscriptionRequest(topic=topic, subscription=subscription),
                topic=topic,
                deadline=self._deadline(timeout_s),
            )
        except errors.NotFound as error:
            # It is missing because an earlier attempt, whose answer was lost, deleted it.
            if not error.may_have_landed:
                raise

    def topics(self, *, timeout_s: float | None = None) -> Iterator[results.TopicSummary]:
        """The topics of the daemon, in the order of their names, fetched page by page."""
        token = ""
        while True:
            page = self._shared.call(
                lambda channel: inspect_pb2_grpc.InspectStub(channel).ListTopics,
                inspect_pb2.ListTopicsRequest(page_token=token),
                topic=None,
                deadline=self._deadline(timeout_s),
            )
            for summary in page.topics:
                yield results.TopicSummary.from_message(summary)
            token = page.next_page_token
            if not token:
                return

    def stats(self, topic: str, *, timeout_s: float | None = None) -> results.TopicStats:
        """Counts of one topic. Raises NotFound."""
        message = self._shared.call(
            lambda channel: inspect_pb2_grpc.InspectStub(channel).GetTopicStats,
            inspect_pb2.GetTopicStatsRequest(topic=topic),
            topic=topic,
            deadline=self._deadline(timeout_s),
        )
        return results.TopicStats.from_message(message)

    def close(self) -> None:
        """Closes every stream and connection; idempotent."""
        for stream in list(self._streams):
            stream.close()
        self._shared.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _deadline(self, timeout_s: float | None) -> retry.Deadline:
        return retry.Deadline.after(self._timeout_s if timeout_s is None else timeout_s)


def _add_messages(
    channel: grpc.Channel,
) -> grpc.UnaryUnaryMultiCallable[bytes, delayed_delivery_pb2.AddMessagesResponse]:
    return channel.unary_unary(
        "/tarry.v1.DelayedDelivery/AddMessages",
        request_serializer=None,
        response_deserializer=delayed_delivery_pb2.AddMessagesResponse.FromString,
    )
