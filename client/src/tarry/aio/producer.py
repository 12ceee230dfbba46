"""Adds single rows, which are sent together.

Callers wait here; a task sends each batch when it is due and settles the future of each row. `tarry.producer_batches`
decides which rows are sent together and what became of each.
"""

from __future__ import annotations

import functools
import time
from asyncio import Future
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from tarry import calls, errors, on_event_loop, producer_batches, results
from tarry.aio import add_stream, connections, futures

# Batches sent after lingering are small, so many are in flight at once.
_IN_FLIGHT = 16


class Producer(futures.FlushedWhenLeft):
    """A producer of single rows, made by `Client.producer`.

    Used by one event loop.
    A context manager: leaving it waits for every answer, and raises as `flush` does. The callback of a future runs
    where answers are read: it must not wait, as `add` does if there is no room.
    Example: `async with client.producer("flights") as producer: answer = await producer.add(1, 7, delay_ms=5_000)`
    """

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        subscription: str | None,
        *,
        linger_ms: float,
        batch_rows: int,
        max_outstanding: int,
        already_due: results.AlreadyDue,
        timeout_s: float | None,
    ) -> None:
        self._timeout_s = known.timeout_s if timeout_s is None else timeout_s
        self._already_due = already_due
        # Guards the batches, and is not held while a future is settled.
        self._changed = on_event_loop.Condition()
        self._batches: producer_batches.Batches[Future[producer_batches.Added]] = producer_batches.Batches(
            linger_ms=linger_ms, rows_max=min(batch_rows, known.rows_max), outstanding_max=max_outstanding
        )
        self._stream = add_stream.AddStream(
            shared, known, topic, subscription, in_flight=_IN_FLIGHT, timeout_s=self._timeout_s
        )
        self._ending: errors.TarryError = errors.Closed(f"the producer of topic {topic!r} is closed")
        self._sending = on_event_loop.Running(self._send_batches, self._ended, name=f"the producer of topic {topic!r}")

    @property
    def outstanding(self) -> int:
        """The number of rows that were added and are not answered."""
        return self._batches.outstanding

    async def add(
        self,
        ledger_id: SupportsIndex,
        entry_id: SupportsIndex,
        *,
        deliver_at_ms: SupportsIndex | None = None,
        delay_ms: SupportsIndex | None = None,
        delay_level: SupportsIndex | None = None,
        key_hash: SupportsIndex | NDArray[np.uint32] | None = None,
    ) -> Future[producer_batches.Added]:
        """Add one row; the future has its `Added` when the row is durable, or the row's own failure.

        Give exactly one of `deliver_at_ms` (Unix time in ms), `delay_ms` and `delay_level`. `delay_ms` counts from the
        moment when the daemon receives the row: lingering may make the row late, but never early. `key_hash` comes from
        `tarry.key_hash`. Rows with the same one of the three are sent in the order in which they were added; rows that
        are sent again may follow later ones.
        Waits while `max_outstanding` rows are unanswered. Cancelling the future does not take back the row.
        Raises InvalidArgument if a value is not a whole number of its column, DeadlineExceeded if there is no room
        within the producer's `timeout_s` (seconds), or Closed. The future raises OutOfRange or InvalidArgument for a
        row that cannot be stored, which fails no other, or the failure of the row's request.
        Example: `answer = await producer.add(7, 1_000, deliver_at_ms=due); print((await answer).raised_deliver_at_ms)`
        """
        answer: Future[producer_batches.Added] = on_event_loop.promise()
        with self._changed:
            batches = self._batches
            if not batches.may_put and not await self._changed.wait_for(lambda: batches.may_put, self._timeout_s):
                raise batches.too_many(self._timeout_s)
            is_news = batches.put(
                answer,
                ledger_id,
                entry_id,
                deliver_at_ms=deliver_at_ms,
                delay_ms=delay_ms,
                delay_level=delay_level,
                key_hash=key_hash,
                now_s=time.monotonic(),
            )
            if is_news:
                self._changed.notify_all()
        return answer

    async def flush(self, timeout_s: float | None = None) -> None:
        """Send what lingers, and wait until every row added before is answered.

        Raises the first failure of a row since the last flush, if any, or DeadlineExceeded after `timeout_s` (seconds).
        Example: `await producer.flush(timeout_s=10)`
        """
        with self._changed:
            last = self._batches.flush()
            self._changed.notify_all()
            if not await self._changed.wait_for(lambda: self._batches.is_answered(last), timeout_s):
                raise self._batches.unanswered(timeout_s)
            self._batches.raise_first_failure()

    async def close(self) -> None:
        """End the producer at once: futures of unanswered rows fail with Closed. Idempotent."""
        with self._changed:
            self._batches.end(self._ending)
            self._changed.notify_all()
        await self._stream.close()
        await self._sending.join()
        self._fail_what_is_left()

    # Sending

    async def _send_batches(self) -> None:
        try:
            while (batch := await self._next_batch()) is not None:
                await self._send(batch)
        except Exception as bug:
            self._ending = errors.Internal(f"the producer ended by a bug of the client: {bug!r}")
            raise

    def _ended(self) -> None:
        with self._changed:
            is_closed = self._batches.ended is not None
            self._batches.end(self._ending)
            self._changed.notify_all()
        if not is_closed:
            # The sender has ended, so no one else settles these futures.
            self._fail_what_is_left()

    async def _next_batch(self) -> producer_batches.Batch[Future[producer_batches.Added]] | None:
        """Wait until a batch is due and return it, or None if the producer has ended."""
        batches = self._batches
        with self._changed:
            while batches.ended is None:
                if (batch := batches.take(time.monotonic())) is not None:
                    return batch
                await self._changed.wait_for(lambda: batches.is_waiting or batches.ended)
                await self._changed.wait_for(
                    lambda: batches.ended is not None or not batches.due_in_s(time.monotonic()),
                    batches.due_in_s(time.monotonic()),
                )
        return None

    async def _send(self, batch: producer_batches.Batch[Future[producer_batches.Added]]) -> None:
        given: dict[str, Any] = batch.columns()
        try:
            answered = await self._stream.add(**given, already_due=self._already_due, on_invalid=batch.on_invalid)
        except errors.TarryError as error:
            self._settle(batch, None, error)
        else:
            answered.add_done_callback(functools.partial(self._answered, batch))

    def _answered(
        self, batch: producer_batches.Batch[Future[producer_batches.Added]], answered: Future[results.AddResult]
    ) -> None:
        error = answered.exception()
        if error is None:
            self._settle(batch, answered.result(), None)
            return
        if not isinstance(error, errors.TarryError):
            error = errors.Internal(f"a batch was not added: {error!r}")
        self._settle(batch, None, error)

    def _settle(
        self,
        batch: producer_batches.Batch[Future[producer_batches.Added]],
        result: results.AddResult | None,
        error: errors.TarryError | None,
    ) -> None:
        with self._changed:
            outcomes = self._batches.outcomes(batch, result, error)
            if outcomes is None:
                self._changed.notify_all()
                return
        futures.settle_each(batch.answers, outcomes)
        with self._changed:
            self._batches.remove(batch)
            self._changed.notify_all()

    def _fail_what_is_left(self) -> None:
        with self._changed:
            left = self._batches.left()
        for batch in left:
            self._settle(batch, None, self._ending)
