"""Receiving what is due and acknowledging it, through broken streams and changes of owner.

Owns: the permits, what is held and declared when a stream is opened again, acknowledgements until they are durable, and
dropping what a former owner still sends.
Does not own: opening and reopening the stream (`tarry.session`); the account of held rows (`tarry.batch`).

Permits. `permits` is how many positions may be received and neither acknowledged nor released. They come back when a
batch is acknowledged (not only when that is durable) or released; they are granted again in portions, at least a
quarter of all unless the daemon has none left. When acknowledgements of eight times `permits` positions wait to become
durable, no more are granted until some are.

Reopening. `Open` declares every position that is held and every one whose acknowledgement is not known to be durable:
they stay in flight and are not sent again. After `Opened` these acknowledgements are sent again.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType

import grpc

from tarry import batch, calls, columns, connections, errors, futures, outbox, results, retry, session, wire
from tarry.v1 import dispatch_pb2

METHOD = "/tarry.v1.Dispatch/Subscribe"

PERMITS_MAX = 2**32 - 1
_UNCONFIRMED_PER_PERMIT = 8
_GRANTS_PER_WINDOW = 4


@dataclasses.dataclass(slots=True)
class _Unconfirmed:
    """An acknowledgement that is not known to be durable."""

    positions: columns.Positions
    message: bytes
    ignored: Future[int]
    attempt: int = 1


class Subscription:
    """Made by `Client.subscribe`. A context manager, and an iterator of batches that ends when it is closed.

    Leaving it waits until every acknowledgement is durable, for the client's `timeout_s` at most. Safe to use from
    several threads. A failure that no retry cures (the subscription was deleted, say) is raised from the iteration,
    after what was received before it.
    """

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        subscription: str,
        *,
        permits: int,
    ) -> None:
        if not 1 <= permits <= PERMITS_MAX:
            raise errors.InvalidArgument(f"permits is {permits}; it must be from 1 to {PERMITS_MAX}")
        self._topic = topic
        self._subscription = subscription
        self._permits = permits
        self._rows_max = known.rows_max
        self._timeout_s = known.timeout_s
        self._policy = known.policy
        # Guards everything below, and is not held while a future is settled. Only the session's thread settles futures
        # and removes acknowledgements.
        self._changed = threading.Condition()
        self._inbox: deque[batch.Batch] = deque()
        self._held = batch.HeldPositions()
        self._unconfirmed: dict[int, _Unconfirmed] = {}
        self._unconfirmed_rows = 0
        self._granted = 0
        self._epoch = 0
        self._last_request_id = 0
        self._last_batch = 0
        self._opening: outbox.Outbox | None = None
        self._sending: outbox.Outbox | None = None
        self._streams_opened = 0
        self._rebuild_needed: tuple[results.RebuildNeeded, ...] = ()
        self._last_error: errors.TarryError | None = None
        self._ended: errors.TarryError | None = None
        self._closed = False
        self._session: session.Session[dispatch_pb2.SubscribeResponse] = session.Session(
            shared, known, topic, _open, self, name=f"subscription {subscription!r} of topic {topic!r}"
        )
        self._session.start()

    @property
    def epoch(self) -> int:
        """The highest epoch seen; 0 before the first stream is open."""
        return self._epoch

    @property
    def streams_opened(self) -> int:
        """How often a stream was opened: more than 1 after a reconnect."""
        return self._streams_opened

    @property
    def rebuild_needed(self) -> tuple[results.RebuildNeeded, ...]:
        """Ranges to add again: rows of them were lost with a damaged bucket. As of the last stream that was opened."""
        return self._rebuild_needed

    @property
    def held(self) -> int:
        """Positions received, and neither acknowledged nor released."""
        return len(self._held)

    def wait_until_open(self, deadline: retry.Deadline) -> None:
        """Waits for the first stream. Raises what refused it, or DeadlineExceeded."""
        with self._changed:
            answered = self._changed.wait_for(
                lambda: self._streams_opened or self._ended is not None, deadline.remaining_s()
            )
            if not answered:
                raise deadline.exceeded(self._last_error, attempts=self._session.failures)
            if not self._streams_opened and self._ended is not None:
                raise self._ended

    def __iter__(self) -> Iterator[batch.Batch]:
        return self

    def __next__(self) -> batch.Batch:
        received = self.receive()
        if received is None:
            raise StopIteration
        return received

    def receive(self, timeout_s: float | None = None) -> batch.Batch | None:
        """The next batch; None when none came in time, or when the subscription was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._inbox or self._ended is not None or self._closed, timeout_s)
            if self._closed:
                return None
            if self._inbox:
                return self._inbox.popleft()
            if self._ended is not None:
                raise self._ended
            return None

    def ack(self, given: batch.Batch | tuple[columns.Column, columns.Column, columns.Column]) -> Future[int]:
        """Acknowledges a batch, a part of one, or columns (ledger_id, entry_id, deliver_at_ms).

        The future is settled when it is durable, with the number of positions that were ignored because they were not
        in the backlog with that time. After a reconnect it may count positions that the first try had acknowledged.
        Raises InvalidArgument, Closed, or the failure that ended the subscription.
        """
        positions = batch.positions_of(given)
        with self._changed:
            self._check_open()
            parts = [self._acknowledge(part) for part in columns.parts(positions, self._rows_max)]
            self._held.give_back(given if isinstance(given, batch.Batch) else positions)
            self._grant()
        return parts[0] if len(parts) == 1 else futures.join(parts, sum)

    def ack_unconfirmed(self, given: batch.Batch | tuple[columns.Column, columns.Column, columns.Column]) -> None:
        """Acknowledges without an answer: nothing is repeated, and what is lost on the way is handed out again."""
        positions = batch.positions_of(given)
        with self._changed:
            self._check_open()
            for part in columns.parts(positions, self._rows_max):
                if self._sending is not None:
                    self._sending.put(wire.encode_acknowledge(0, *part))
            self._held.give_back(given if isinstance(given, batch.Batch) else positions)
            self._grant()

    def release(self, given: batch.Batch) -> None:
        """Takes the permits back without acknowledging.

        The positions stay in flight while this stream lives, and may still be acknowledged; they are handed out again
        after the stream ends, also when it is this library that opens another.
        """
        with self._changed:
            self._check_open()
            self._held.give_back(given)
            self._grant()

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every acknowledgement is durable.

        Raises DeadlineExceeded, or the failure that ended the subscription.
        """
        with self._changed:
            settled = self._changed.wait_for(lambda: not self._unconfirmed or self._ended is not None, timeout_s)
            if not settled:
                raise errors.DeadlineExceeded(
                    f"{len(self._unconfirmed)} acknowledgements are not durable after {timeout_s:g} s",
                    last=self._last_error,
                )
            if self._ended is not None:
                raise self._ended

    def close(self) -> None:
        """Ends the stream at once; idempotent.

        What is not acknowledged is handed out again, and unsettled futures fail with Closed.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._session.close()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._closed:
                self.flush(self._timeout_s)
        finally:
            self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Closed("the subscription is closed")
        if self._ended is not None:
            raise self._ended

    def _acknowledge(self, positions: columns.Positions) -> Future[int]:
        self._last_request_id += 1
        message = wire.encode_acknowledge(self._last_request_id, *positions)
        request = _Unconfirmed(positions, message, futures.promise())
        self._unconfirmed[self._last_request_id] = request
        self._unconfirmed_rows += len(positions[1])
        if self._sending is not None:
            self._sending.put(message)
        return request.ignored

    def _grant(self) -> None:
        """Sends the permits that are free, when they are worth a message."""
        free = self._permits - len(self._held) - self._granted
        worth_it = self._granted == 0 or free * _GRANTS_PER_WINDOW >= self._permits
        bounded = self._unconfirmed_rows < _UNCONFIRMED_PER_PERMIT * self._permits
        if self._sending is None or free <= 0 or not worth_it or not bounded:
            return
        self._granted += free
        flow = dispatch_pb2.SubscribeRequest(flow=dispatch_pb2.Flow(permits=free))
        self._sending.put(flow.SerializeToString())

    # The session's handler.

    def wait_until_wanted(self) -> bool:
        return not self._closed

    def opened(self, sending: outbox.Outbox) -> None:
        with self._changed:
            declared = batch.concatenate(
                [self._held.positions(), *(request.positions for request in self._unconfirmed.values())]
            )
            self._opening = sending
        ledger_id, entry_id, deliver_at_ms = (column.tolist() for column in declared)
        request = dispatch_pb2.Open(
            topic=self._topic,
            subscription=self._subscription,
            type=dispatch_pb2.SUBSCRIPTION_TYPE_SHARED,
            held_ledger_id=ledger_id,
            held_entry_id=entry_id,
            held_deliver_at_ms=deliver_at_ms,
        )
        sending.put(dispatch_pb2.SubscribeRequest(open=request).SerializeToString())

    def received(self, response: dispatch_pb2.SubscribeResponse) -> bool:
        match response.WhichOneof("response"):
            case "opened":
                self._start(response.opened)
                return False
            case "messages":
                return self._take_in(response.messages)
            case "done":
                return self._settle(response.done)
            case "moved":
                owner = response.moved.owner_address
                raise errors.NotOwner(
                    f"topic {self._topic!r} moved to {owner or 'an unknown owner'}", owner_address=owner
                )
        # A kind of answer that this version does not know.
        return False

    def interrupted(self, error: errors.TarryError) -> None:
        with self._changed:
            self._opening = self._sending = None
            self._granted = 0
            self._last_error = error

    def failed(self, error: errors.TarryError) -> None:
        with self._changed:
            self._opening = self._sending = None
            self._ended = error
            left = list(self._unconfirmed.values())
            self._unconfirmed.clear()
            self._unconfirmed_rows = 0
            self._changed.notify_all()
        for request in left:
            request.ignored.set_exception(error)

    def _start(self, opened: dispatch_pb2.Opened) -> None:
        """The stream is open: acknowledgements go out again, and permits for all that is not held."""
        with self._changed:
            if opened.epoch < self._epoch:
                raise errors.Unavailable(f"a former owner answered, of epoch {opened.epoch}; {self._epoch} was seen")
            self._epoch = opened.epoch
            self._sending = self._opening
            self._granted = 0
            if self._sending is not None:
                for request in self._unconfirmed.values():
                    self._sending.put(request.message)
            self._grant()
            self._streams_opened += 1
            self._rebuild_needed = tuple(results.RebuildNeeded.from_message(each) for each in opened.rebuild_needed)
            self._changed.notify_all()

    def _take_in(self, messages: dispatch_pb2.Messages) -> bool:
        rows = len(messages.entry_id)
        with self._changed:
            self._granted = max(0, self._granted - rows)
            if messages.epoch < self._epoch:
                self._grant()
                return False
            self._epoch = messages.epoch
            self._last_batch += 1
            received = batch.Batch.from_message(messages, self._last_batch)
            self._held.add(received)
            self._inbox.append(received)
            self._changed.notify_all()
        return True

    def _settle(self, done: dispatch_pb2.Done) -> bool:
        with self._changed:
            if done.epoch < self._epoch:
                return False
            self._epoch = done.epoch
            request = self._unconfirmed.get(done.request_id)
            if request is None:
                return False
            error = errors.from_status(done.error) if done.HasField("error") else None
            if isinstance(error, errors.NotOwner):
                raise error
            if error is not None and errors.is_retryable(error) and self._sending is not None:
                self._sending.put_after(self._policy.delay_s(error, request.attempt), request.message)
                request.attempt += 1
                self._last_error = error
                return False
        if error is None:
            request.ignored.set_result(done.ignored)
        else:
            request.ignored.set_exception(error)
        with self._changed:
            del self._unconfirmed[done.request_id]
            self._unconfirmed_rows -= len(request.positions[1])
            self._grant()
            self._changed.notify_all()
        return error is None


def _open(
    channel: grpc.Channel,
) -> grpc.StreamStreamMultiCallable[bytes, dispatch_pb2.SubscribeResponse]:
    return channel.stream_stream(
        METHOD, request_serializer=None, response_deserializer=dispatch_pb2.SubscribeResponse.FromString
    )
