"""Adding batches one after the other without waiting for the answers, on the event loop.

Owns: waiting, and settling futures.
Does not own: the requests (`tarry.add_requests`), the stream (`tarry.aio.session`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType

from tarry import add_requests, calls, columns, errors, futures, results, retry, streams
from tarry.aio import changes, connections, session
from tarry.v1 import delayed_delivery_pb2


class AddStream:
    """As `tarry.AddStream`; made by `Client.add_stream`.

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
        self._changes = changes.Changes()
        self._requests: add_requests.AddRequests[asyncio.Future[results.AddResult]] = add_requests.AddRequests(
            topic,
            subscription,
            in_flight=in_flight,
            rows_max=known.rows_max,
            bytes_max=known.bytes_max,
            policy=known.policy,
        )
        lifetime = streams.Lifetime(known.owners, known.policy, topic, f"the add stream of topic {topic!r}")
        self._session = session.Session(shared, lifetime, add_requests.METHOD, self)

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
        timeout_s: float | None = None,
    ) -> asyncio.Future[results.AddResult]:
        """As `tarry.AddStream.add`: waits while too many requests are unanswered, and returns the future of the answer.

        Cancelling the future takes nothing back: the batch is on its way.

        Example: `answer = await stream.add(7, np.arange(1_000), deliver_at_ms=due); print((await answer).accepted)`
        """
        deadline = retry.Deadline.after(self._timeout_s if timeout_s is None else timeout_s)
        firsts: list[int] = []
        parts: list[asyncio.Future[results.AddResult]] = []
        for first, add in self._requests.encode(
            ledger_id,
            entry_id,
            deliver_at_ms=deliver_at_ms,
            delay_ms=delay_ms,
            key_hash=key_hash,
            delay_level=delay_level,
            already_due=already_due,
        ):
            firsts.append(first)
            parts.append(await self._send(add, deadline))
        if len(parts) == 1:
            return parts[0]
        whole: asyncio.Future[results.AddResult] = asyncio.get_running_loop().create_future()
        futures.join(parts, lambda answers: results.AddResult.merge(list(zip(firsts, answers, strict=True))), whole)
        return whole

    async def flush(self, timeout_s: float | None = None) -> None:
        """As `tarry.AddStream.flush`."""
        if not await self._changes.wait_for(lambda: not self._requests, timeout_s):
            raise self._requests.unanswered(timeout_s)
        self._requests.raise_first_failure()

    async def close(self) -> None:
        """As `tarry.AddStream.close`."""
        self._requests.close()
        self._changes.notify()
        await self._session.close()

    async def __aenter__(self) -> AddStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                # By then every request is answered or given up.
                await self.flush(self._timeout_s)
        finally:
            await self.close()

    async def _send(self, add: bytes, deadline: retry.Deadline) -> asyncio.Future[results.AddResult]:
        if not await self._changes.wait_for(lambda: self._requests.may_begin, deadline.remaining_s()):
            raise self._requests.too_many(deadline.timeout_s)
        answer: asyncio.Future[results.AddResult] = asyncio.get_running_loop().create_future()
        self._requests.begin(add, answer, deadline)
        if self._requests.wants_stream:
            self._changes.notify()
        return answer

    # The session's handler.

    async def wait_until_wanted(self) -> bool:
        await self._changes.wait_for(lambda: self._requests.wants_stream or self._requests.ended is not None)
        return self._requests.ended is None

    def opened(self, sending: streams.Sending) -> None:
        self._requests.opened(sending)

    def received(self, response: delayed_delivery_pb2.StreamAddMessagesResponse) -> bool:
        settled = self._requests.received(response)
        if settled is None:
            return False
        self._settle((settled,))
        return settled.error is None

    def interrupted(self, error: errors.TarryError) -> None:
        self._settle(self._requests.interrupted(error))

    def failed(self, error: errors.TarryError) -> None:
        self._settle(self._requests.failed(error))
        self._changes.notify()

    def _settle(self, settled: Iterable[add_requests.Settled[asyncio.Future[results.AddResult]]]) -> None:
        for each in settled:
            futures.settle(each)
            self._requests.remove(each.request_id)
            self._changes.notify()
