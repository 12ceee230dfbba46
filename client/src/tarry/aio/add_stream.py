"""Adds batches one after the other without waiting for the answers.

Callers wait here and the session settles their futures. `tarry.add_requests` tracks the requests.
"""

from __future__ import annotations

import functools
from asyncio import Future
from collections.abc import Iterable

from tarry import add_requests, attempts, calls, columns, errors, on_event_loop, reasons, results, streams
from tarry.aio import connections, futures, session
from tarry.v1 import delayed_delivery_pb2


class AddStream(futures.FlushedWhenLeft):
    """A stream of batches, made by `Client.add_stream`.

    A context manager: leaving it waits for every answer, and raises as `flush` does. A stream is opened with the first
    batch, and again when there is one to send.
    Used by one event loop.
    Example: `async with client.add_stream("flights") as stream: answer = await stream.add(1, 7, delay_ms=5_000)`
    """

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        subscription: str | None,
        *,
        in_flight: int,
        timeout_s: float | None,
    ) -> None:
        self._timeout_s = known.timeout_s if timeout_s is None else timeout_s
        # Guards the requests, and is not held while a future is settled. Only the session settles futures and removes
        # requests.
        self._changed = on_event_loop.Condition()
        self._requests: add_requests.AddRequests[Future[results.AddResult]] = add_requests.AddRequests(
            topic,
            subscription,
            in_flight=in_flight,
            rows_max=known.rows_max,
            bytes_max=lambda: known.bytes_max,
            policy=known.policy,
        )
        name = f"the add stream of topic {topic!r}"
        self._lifetime = streams.Lifetime(known.daemons, known.policy, topic, name, timeout_s=self._timeout_s)
        opens = functools.partial(shared.open, to=add_requests.METHOD)
        self._session = session.Session(shared, self._lifetime, opens, self)

    async def add(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None = None,
        delay_ms: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        already_due: results.AlreadyDue = results.AlreadyDue.DELIVER,
        on_invalid: reasons.OnInvalid = reasons.OnInvalid.REFUSE,
        timeout_s: float | None = None,
    ) -> Future[results.AddResult]:
        """Send a batch; the future has its AddResult when every accepted row is durable.

        The arguments are those of `Client.add`. Waits while `in_flight` requests are unanswered. `timeout_s` (seconds)
        bounds this wait and how long a request is sent again after failures.
        An answer that never arrives is bounded by the caller's `asyncio.timeout`.
        Cancelling the future does not take back the batch, which is on its way.
        Raises InvalidArgument, DeadlineExceeded, Closed, or the failure that ended the stream. Raises Unsupported, also
        from the future, if the daemon does not support `on_invalid`.
        Example: `answer = await stream.add(7, np.arange(1_000), deliver_at_ms=due); print((await answer).accepted)`
        """
        deadline = attempts.Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        needs = attempts.needs_of(on_invalid)
        firsts: list[int] = []
        parts: list[Future[results.AddResult]] = []
        for first, add in self._requests.encode(
            ledger_id,
            entry_id,
            deliver_at_ms=deliver_at_ms,
            delay_ms=delay_ms,
            key_hash=key_hash,
            delay_level=delay_level,
            already_due=already_due,
            on_invalid=on_invalid,
        ):
            firsts.append(first)
            parts.append(await self._send(add, deadline, needs))
        return futures.whole(parts, lambda answers: results.AddResult.merge(list(zip(firsts, answers, strict=True))))

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every request is answered.

        Raises the first failure since the last flush, if any, or DeadlineExceeded after `timeout_s` (seconds).
        """
        with self._changed:
            if not await self._changed.wait_for(lambda: not self._requests, timeout_s):
                raise self._requests.unanswered(timeout_s)
            self._requests.raise_first_failure()

    async def close(self) -> None:
        """End the stream at once: unanswered futures fail with Closed. Idempotent."""
        with self._changed:
            self._requests.close()
            self._changed.notify_all()
        await self._session.close()

    async def _send(
        self, add: bytes, deadline: attempts.Deadline, needs: attempts.Need | None
    ) -> Future[results.AddResult]:
        answer: Future[results.AddResult] = on_event_loop.promise()
        with self._changed:
            if not await self._changed.wait_for(lambda: self._requests.may_begin, deadline.remaining_s()):
                raise self._requests.too_many(deadline.timeout_s)
            self._requests.begin(add, answer, deadline, needs=needs)
            if self._requests.wants_stream:
                self._changed.notify_all()
        return answer

    # Callbacks of the session

    async def wait_until_wanted(self) -> bool:
        with self._changed:
            await self._changed.wait_for(lambda: self._requests.wants_stream or self._requests.ended is not None)
            return self._requests.ended is None

    def opened(self, sending: streams.Sending) -> None:
        with self._changed:
            refused = self._requests.opened(sending, self._lifetime.features or frozenset())
        self._settle(refused)

    def received(self, response: delayed_delivery_pb2.StreamAddMessagesResponse) -> bool:
        with self._changed:
            settled = self._requests.received(response)
        if settled is None:
            return False
        self._settle((settled,))
        return settled.error is None

    def interrupted(self, error: errors.TarryError) -> None:
        with self._changed:
            late = self._requests.interrupted(error)
        self._settle(late)

    def failed(self, error: errors.TarryError) -> None:
        with self._changed:
            left = self._requests.failed(error)
            self._changed.notify_all()
        self._settle(left)

    def _settle(self, settled: Iterable[add_requests.Settled[Future[results.AddResult]]]) -> None:
        for each in settled:
            futures.settle(each)
            with self._changed:
                self._requests.remove(each.request_id)
                self._changed.notify_all()
