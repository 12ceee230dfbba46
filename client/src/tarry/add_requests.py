"""Tracks the requests of an add stream, without I/O, threads or waiting.

Keeps their order, sends again what a broken stream left unanswered or the daemon refused for now, and gives up at the
deadline. Adds are idempotent: a request that was already durable is answered with duplicates.
The driver (`tarry.aio.add_stream`) settles what a method returns and only then calls `remove`. A caller that waits
until nothing is in flight therefore finds every answer settled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Generic, TypeAlias, TypeVar

from tarry import attempts, columns, errors, reasons, results, streams, wire
from tarry.v1 import delayed_delivery_pb2

METHOD = streams.StreamMethod(
    "/tarry.v1.DelayedDelivery/StreamAddMessages", delayed_delivery_pb2.StreamAddMessagesResponse.FromString
)

Answer = TypeVar("Answer")
Settled: TypeAlias = streams.Settled[Answer, results.AddResult]


@dataclasses.dataclass(slots=True)
class _InFlight(Generic[Answer]):
    message: bytes
    answer: Answer
    deadline: attempts.Deadline
    needs: attempts.Need | None = None
    attempt: int = 1


class AddRequests(Generic[Answer]):
    """The requests of one add stream.

    `Answer` is the future type of the driver, which makes the futures and settles them.
    """

    def __init__(
        self,
        topic: str,
        subscription: str | None,
        *,
        in_flight: int,
        rows_max: int,
        bytes_max: Callable[[], int],
        policy: attempts.RetryPolicy,
    ) -> None:
        """Allow up to `in_flight` unanswered requests. `bytes_max` is asked for each batch. Raises InvalidArgument."""
        if in_flight < 1:
            raise errors.InvalidArgument(f"in_flight is {in_flight}; it must be at least 1")
        self._topic = wire.utf8("topic", topic)
        self._subscription = wire.utf8("subscription", subscription or "")
        self._in_flight_max = in_flight
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._policy = policy
        self._in_flight: dict[int, _InFlight[Answer]] = {}
        self._last_request_id = 0
        self._sending: streams.Sending | None = None
        self._features: frozenset[str] | None = None
        """The features of the stream's daemon; None without a stream."""
        self._first_failure: errors.TarryError | None = None
        self.ended: errors.TarryError | None = None

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._in_flight)

    @property
    def may_begin(self) -> bool:
        """True if another request may be sent, or if `begin` would raise what ended the stream."""
        return self.ended is not None or len(self._in_flight) < self._in_flight_max

    @property
    def wants_stream(self) -> bool:
        """True if there is something to send and no stream."""
        return self._sending is None and bool(self._in_flight)

    def encode(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None,
        delay_ms: columns.Column | None,
        key_hash: columns.Column | None,
        delay_level: columns.Column | None,
        already_due: results.AlreadyDue,
        on_invalid: reasons.OnInvalid,
    ) -> Iterator[tuple[int, bytes]]:
        """Yield a batch as requests, each with the index of its first row. Raises InvalidArgument before the first."""
        rows = columns.add_columns(
            ledger_id,
            entry_id,
            deliver_at_ms=deliver_at_ms,
            delay_ms=delay_ms,
            key_hash=key_hash,
            delay_level=delay_level,
        )
        returned = on_invalid if attempts.needs_of(on_invalid) else 0
        for first, part in rows.requests(self._rows_max, self._bytes_max()):
            yield first, wire.encode_add(self._topic, part, already_due, self._subscription, returned)

    def begin(
        self, add: bytes, answer: Answer, deadline: attempts.Deadline, *, needs: attempts.Need | None = None
    ) -> None:
        """Send a request, which may need a feature of the daemon.

        Raises Unsupported if the daemon lacks the feature, or the error that ended the stream.
        """
        if self.ended is not None:
            raise self.ended
        if (unmet := self._unmet(needs)) is not None:
            raise unmet
        self._last_request_id += 1
        message = wire.encode_stream_add(self._last_request_id, add)
        self._in_flight[self._last_request_id] = _InFlight(message, answer, deadline, needs)
        if self._sending is not None:
            self._sending.put(message)

    def too_many(self, timeout_s: float) -> errors.DeadlineExceeded:
        """Return the error to raise if `may_begin` stays False for this time (seconds)."""
        return errors.DeadlineExceeded(
            f"{self._in_flight_max} requests are in flight, and none was answered within {timeout_s:g} s"
        )

    def unanswered(self, timeout_s: float | None) -> errors.DeadlineExceeded:
        """Return the error to raise if requests stay in flight for this time (seconds)."""
        return errors.DeadlineExceeded(f"{len(self._in_flight)} requests are unanswered after {timeout_s or 0:g} s")

    def raise_first_failure(self) -> None:
        """Raise the first failure since the last call, if any."""
        failure, self._first_failure = self._first_failure, None
        if failure is not None:
            raise failure

    # Events of the stream

    def opened(self, sending: streams.Sending, features: frozenset[str]) -> list[Settled[Answer]]:
        """Send every request in flight, in order, on a new stream whose daemon has these features.

        Returns, as failed, the requests that need a feature which the daemon lacks; they are not sent.
        """
        self._sending, self._features = sending, features
        unmet: list[Settled[Answer]] = []
        for number, request in self._in_flight.items():
            error = self._unmet(request.needs)
            if error is None:
                sending.put(request.message)
            else:
                unmet.append(self._failed(number, request, error))
        return unmet

    def received(self, response: delayed_delivery_pb2.StreamAddMessagesResponse) -> Settled[Answer] | None:
        """Return the request that this response settles, if any. Raises NotOwner if the stream is of no further use."""
        request_id = response.request_id
        request = self._in_flight.get(request_id)
        if response.WhichOneof("result") == "error":
            return self._refused(request_id, request, errors.from_status(response.error))
        if request is None:
            return None
        return streams.Settled(request_id, request.answer, results.AddResult.from_message(response.added), None)

    def interrupted(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """Note that the stream broke and will be opened again; return the requests whose deadline has passed."""
        self._sending = self._features = None
        return [
            self._given_up(number, request, error)
            for number, request in self._in_flight.items()
            if not request.deadline.remaining_s()
        ]

    def close(self) -> None:
        """Refuse further requests."""
        if self.ended is None:
            self.ended = errors.Closed("the add stream is closed")

    def failed(self, error: errors.TarryError) -> list[Settled[Answer]]:
        """Note that no other stream will be opened; return everything in flight as failed."""
        self._sending = self._features = None
        if self.ended is None:
            self.ended = error
        return [self._failed(number, request, error) for number, request in self._in_flight.items()]

    def remove(self, request_id: int) -> None:
        """Forget a request whose answer is settled."""
        del self._in_flight[request_id]

    def _unmet(self, needs: attempts.Need | None) -> errors.Unsupported | None:
        """Return the failure of a request that needs a feature the daemon lacks, or None."""
        return None if needs is None else needs.unmet(self._features, f"the daemon of topic {self._topic.decode()!r}")

    def _refused(
        self, request_id: int, request: _InFlight[Answer] | None, error: errors.TarryError
    ) -> Settled[Answer] | None:
        if isinstance(error, errors.NotOwner):
            raise error
        if request is None:
            return None
        error.attempts = request.attempt
        if not errors.is_retryable(error):
            return self._failed(request_id, request, error)
        delay_s = self._policy.delay_s(error, request.attempt)
        if self._sending is None or delay_s >= request.deadline.remaining_s():
            return self._given_up(request_id, request, error)
        request.attempt += 1
        message = request.message
        self._sending.put_after(delay_s, lambda: message)
        return None

    def _given_up(self, request_id: int, request: _InFlight[Answer], last: errors.TarryError) -> Settled[Answer]:
        return self._failed(request_id, request, request.deadline.exceeded(last, attempts=request.attempt))

    def _failed(self, request_id: int, request: _InFlight[Answer], error: errors.TarryError) -> Settled[Answer]:
        if self._first_failure is None:
            self._first_failure = error
        return streams.Settled(request_id, request.answer, None, error)
