"""Adding single rows, which go out together.

Owns: waiting in the caller, sending a batch when it is due, and settling the future of each row.
Does not own: which rows go together and what became of each (`tarry.producer_batches`), the stream of batches
(`tarry.aio.add_stream`).
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

# Batches that are small, since they were sent after lingering, are many.
_IN_FLIGHT = 16


class Producer(futures.FlushedWhenLeft):
    """Made by `Client.producer`. A context manager: leaving it waits for every answer, and raises as `flush` does.

    Used by one event loop.
    A callback of a future runs where answers are read: it must not wait, as `add` does where there is no room.

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
        """Rows that were added and are not answered."""
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
        """Adds one row; the future has its `Added` when the row is durable, or the row's own failure.

        Exactly one of `deliver_at_ms` (Unix time in ms), `delay_ms` and `delay_level` is given. `delay_ms` counts from
        the moment at which the daemon has the row: lingering makes it later than asked for, never early. `key_hash`
        comes from `tarry.key_hash`. Rows of one of the three go out in the order in which they were added; what has to
        be sent again may come after others.
        Waits while `max_outstanding` rows are unanswered. Cancelling the future takes nothing back.
        Raises InvalidArgument: a value is not a whole number of its column; DeadlineExceeded: no room within the
        producer's `timeout_s`; Closed. From the future: OutOfRange, InvalidArgument for a row that cannot be stored,
        which fails no other; what the request of the row has failed with.

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
        """Sends what lingers, and waits until every row that was added before is answered.

        Raises the first failure of a row since the last flush, if any; DeadlineExceeded.

        Example: `await producer.flush(timeout_s=10)`
        """
        with self._changed:
            last = self._batches.flush()
            self._changed.notify_all()
            if not await self._changed.wait_for(lambda: self._batches.is_answered(last), timeout_s):
                raise self._batches.unanswered(timeout_s)
            self._batches.raise_first_failure()

    async def close(self) -> None:
        """Ends the producer at once: futures of rows that are not answered fail with Closed. Idempotent."""
        with self._changed:
            self._batches.end(self._ending)
            self._changed.notify_all()
        await self._stream.close()
        await self._sending.join()
        self._fail_what_is_left()

    # What sends.

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
            # Nobody else will: there is nothing any more that sends.
            self._fail_what_is_left()

    async def _next_batch(self) -> producer_batches.Batch[Future[producer_batches.Added]] | None:
        """Waits until one is due; None: the producer has ended."""
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
