"""Adding batches one after the other without waiting for the answers.

Owns: which requests are in flight, their order, and sending again what a broken stream left unanswered. Adds are
idempotent, so a request that was durable already is answered with duplicates.
Does not own: opening and reopening the stream (`tarry.session`); cutting and encoding batches (`tarry.columns`,
`tarry.wire`).
"""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from types import TracebackType

import grpc

from tarry import calls, columns, connections, errors, futures, outbox, results, retry, session, wire
from tarry.v1 import delayed_delivery_pb2

METHOD = "/tarry.v1.DelayedDelivery/StreamAddMessages"


@dataclasses.dataclass(slots=True)
class _InFlight:
    message: bytes
    answer: Future[results.AddResult]
    deadline: retry.Deadline
    attempt: int = 1


class AddStream:
    """Made by `Client.add_stream`. A context manager: leaving it waits for every answer, and raises as `flush` does.

    Safe to use from several threads. A stream is opened with the first batch, and again when there is one to send.
    """

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        *,
        in_flight: int,
        timeout_s: float | None,
    ) -> None:
        if in_flight < 1:
            raise errors.InvalidArgument(f"in_flight is {in_flight}; it must be at least 1")
        self._topic = topic.encode()
        self._in_flight_max = in_flight
        self._timeout_s = known.timeout_s if timeout_s is None else timeout_s
        self._rows_max = known.rows_max
        self._bytes_max = known.bytes_max
        self._policy = known.policy
        # Guards everything below, and is not held while a future is settled. Only the session's thread settles futures
        # and removes requests.
        self._changed = threading.Condition()
        self._in_flight: dict[int, _InFlight] = {}
        self._last_request_id = 0
        self._sending: outbox.Outbox | None = None
        self._first_failure: errors.TarryError | None = None
        self._ended: errors.TarryError | None = None
        self._session: session.Session[delayed_delivery_pb2.StreamAddMessagesResponse] = session.Session(
            shared, known, topic, _open, self, name=f"the add stream of topic {topic!r}"
        )
        self._session.start()

    def add(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None = None,
        delay_ms: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        already_due: results.AlreadyDue = results.AlreadyDue.DELIVER,
        timeout_s: float | None = None,
    ) -> Future[results.AddResult]:
        """Sends a batch; the future has its AddResult when every accepted row is durable. Arguments as of `Client.add`.

        Blocks while `in_flight` requests are unanswered. `timeout_s` bounds this wait, and how long a request is sent
        again after failures; an answer that simply does not come is bounded by the caller's `future.result(timeout)`.
        Raises InvalidArgument, DeadlineExceeded, Closed, or the failure that ended the stream.
        """
        rows = columns.add_columns(
            ledger_id, entry_id, deliver_at_ms=deliver_at_ms, delay_ms=delay_ms, key_hash=key_hash
        )
        deadline = retry.Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        firsts: list[int] = []
        parts: list[Future[results.AddResult]] = []
        for first, part in rows.requests(self._rows_max, self._bytes_max):
            firsts.append(first)
            parts.append(self._send(wire.encode_add(self._topic, part, already_due), deadline))
        if len(parts) == 1:
            return parts[0]
        return futures.join(parts, lambda answers: results.AddResult.merge(list(zip(firsts, answers, strict=True))))

    def flush(self, timeout_s: float | None = None) -> None:
        """Waits until every request is answered.

        Raises the first failure since the last flush, if any; DeadlineExceeded.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._in_flight, timeout_s):
                raise errors.DeadlineExceeded(f"{len(self._in_flight)} requests are unanswered after {timeout_s:g} s")
            failure, self._first_failure = self._first_failure, None
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Ends the stream at once: unanswered futures fail with Closed. Idempotent."""
        with self._changed:
            if self._ended is None:
                self._ended = errors.Closed("the add stream is closed")
            self._changed.notify_all()
        self._session.close()

    def __enter__(self) -> AddStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # By then every request is answered or given up.
                self.flush(self._timeout_s)
        finally:
            self.close()

    def _send(self, add: bytes, deadline: retry.Deadline) -> Future[results.AddResult]:
        with self._changed:
            while self._ended is None and len(self._in_flight) >= self._in_flight_max:
                if not self._changed.wait(deadline.remaining_s()):
                    raise errors.DeadlineExceeded(
                        f"{self._in_flight_max} requests are in flight, and none was answered within "
                        f"{deadline.timeout_s:g} s"
                    )
            if self._ended is not None:
                raise self._ended
            self._last_request_id += 1
            request_id = self._last_request_id
            request = _InFlight(wire.encode_stream_add(request_id, add), futures.promise(), deadline)
            self._in_flight[request_id] = request
            if self._sending is not None:
                self._sending.put(request.message)
            elif len(self._in_flight) == 1:
                self._changed.notify_all()
        return request.answer

    # The session's handler.

    def wait_until_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight or self._ended is not None)
            return self._ended is None

    def opened(self, sending: outbox.Outbox) -> None:
        with self._changed:
            for request in self._in_flight.values():
                sending.put(request.message)
            self._sending = sending

    def received(self, response: delayed_delivery_pb2.StreamAddMessagesResponse) -> bool:
        if response.WhichOneof("result") == "error":
            self._refused(response.request_id, errors.from_status(response.error))
            return False
        request = self._in_flight.get(response.request_id)
        if request is not None:
            request.answer.set_result(results.AddResult.from_message(response.added))
            self._remove(response.request_id)
        return True

    def interrupted(self, error: errors.TarryError) -> None:
        with self._changed:
            self._sending = None
            late = [number for number, request in self._in_flight.items() if not request.deadline.remaining_s()]
        for number in late:
            self._give_up(number, error)

    def failed(self, error: errors.TarryError) -> None:
        with self._changed:
            self._sending = None
            if self._ended is None:
                self._ended = error
            left = list(self._in_flight)
            self._changed.notify_all()
        for number in left:
            self._fail(number, error)

    def _refused(self, request_id: int, error: errors.TarryError) -> None:
        """Sends the request again when that may help; another owner ends the stream."""
        if isinstance(error, errors.NotOwner):
            raise error
        with self._changed:
            request = self._in_flight.get(request_id)
            if request is None:
                return
            error.attempts = request.attempt
            if errors.is_retryable(error) and self._sending is not None:
                delay_s = self._policy.delay_s(error, request.attempt)
                if delay_s < request.deadline.remaining_s():
                    request.attempt += 1
                    self._sending.put_after(delay_s, request.message)
                    return
        if errors.is_retryable(error):
            self._give_up(request_id, error)
        else:
            self._fail(request_id, error)

    def _give_up(self, request_id: int, last: errors.TarryError) -> None:
        request = self._in_flight[request_id]
        self._fail(request_id, request.deadline.exceeded(last, attempts=request.attempt))

    def _fail(self, request_id: int, error: errors.TarryError) -> None:
        with self._changed:
            if self._first_failure is None:
                self._first_failure = error
        self._in_flight[request_id].answer.set_exception(error)
        self._remove(request_id)

    def _remove(self, request_id: int) -> None:
        """Takes a request out after its future is settled: who waits for all answers finds every future settled."""
        with self._changed:
            del self._in_flight[request_id]
            self._changed.notify_all()


def _open(
    channel: grpc.Channel,
) -> grpc.StreamStreamMultiCallable[bytes, delayed_delivery_pb2.StreamAddMessagesResponse]:
    return channel.stream_stream(
        METHOD,
        request_serializer=None,
        response_deserializer=delayed_delivery_pb2.StreamAddMessagesResponse.FromString,
    )
