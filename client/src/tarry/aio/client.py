"""The client of one Tarry daemon, or of the daemons behind one gRPC target, on the event loop.

Owns: the calls, with the names, arguments, defaults and meaning of `tarry.Client`'s.
Does not own: requests and answers (`tarry.calls`), retries and owners (`tarry.attempts`), streams
(`tarry.aio.add_stream`, `tarry.aio.subscription`, `tarry.aio.key_shared_subscription`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tarry import batch, calls, client, columns, key_shared, policies, results, retry
from tarry.aio import add_stream, connections, deleting, inspecting, operating
from tarry.aio.key_shared_subscription import KeySharedSubscription
from tarry.aio.subscription import Opening, Receiver, Subscription
from tarry.connections import unsaid


class Client(inspecting.Inspecting, operating.Operating, deleting.Deleting):
    """As `tarry.Client`: the same arguments; an asynchronous context manager. Nothing is sent before the first call.

    Example: `async with tarry.aio.Client() as client: await client.add("flights", 1, range(1_000), delay_ms=5_000)`
    """

    def __init__(
        self,
        target: str = client.DEFAULT_TARGET,
        *,
        timeout_s: float = client.DEFAULT_TIMEOUT_S,
        retry_policy: retry.RetryPolicy | None = None,
        rows_per_request: int = columns.ROWS_PER_REQUEST_MAX,
        request_bytes: int = columns.REQUEST_BYTES_MAX,
        client_id: str | None = None,
        waiting: Callable[[str], None] = unsaid,
    ) -> None:
        self._connections = connections.Connections(client_id=client_id, waiting=waiting)
        self._calls = calls.Calls(
            target,
            retry_policy or retry.RetryPolicy(),
            timeout_s=timeout_s,
            rows_max=rows_per_request,
            bytes_max=request_bytes,
        )
        self._streams: weakref.WeakSet[add_stream.AddStream | Receiver[Any]] = weakref.WeakSet()

    # The publish path.

    async def add(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None = None,
        delay_ms: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        already_due: results.AlreadyDue = results.AlreadyDue.DELIVER,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.AddResult:
        """As `tarry.Client.add`."""
        return await self._connections.run(
            self._calls.add(
                topic,
                ledger_id,
                entry_id,
                deliver_at_ms=deliver_at_ms,
                delay_ms=delay_ms,
                key_hash=key_hash,
                delay_level=delay_level,
                already_due=already_due,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    def add_stream(
        self, topic: str, *, in_flight: int = 16, subscription: str | None = None, timeout_s: float | None = None
    ) -> add_stream.AddStream:
        """As `tarry.Client.add_stream`.

        Example: `async with client.add_stream("flights") as stream: await stream.add(1, range(1_000), delay_ms=5_000)`
        """
        stream = add_stream.AddStream(
            self._connections, self._calls, topic, subscription, in_flight=in_flight, timeout_s=timeout_s
        )
        self._streams.add(stream)
        return stream

    async def cancel(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.Cancelled:
        """As `tarry.Client.cancel`."""
        return await self._connections.run(
            self._calls.cancel(topic, ledger_id, entry_id, subscription=subscription, timeout_s=timeout_s)
        )

    async def reschedule(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        deliver_at_ms: columns.Column | None = None,
        delay_ms: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.Rescheduled:
        """As `tarry.Client.reschedule`."""
        return await self._connections.run(
            self._calls.reschedule(
                topic,
                ledger_id,
                entry_id,
                deliver_at_ms=deliver_at_ms,
                delay_ms=delay_ms,
                key_hash=key_hash,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    async def contains(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        last_entry_id: columns.Column | None = None,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.Contained:
        """As `tarry.Client.contains`."""
        return await self._connections.run(
            self._calls.contains(
                topic,
                ledger_id,
                entry_id,
                last_entry_id=last_entry_id,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    async def trim(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        all_lower_ledgers: bool = False,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """As `tarry.Client.trim`."""
        return await self._connections.run(
            self._calls.trim(
                topic,
                ledger_id,
                entry_id,
                all_lower_ledgers=all_lower_ledgers,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    async def clear(self, topic: str, *, subscription: str | None = None, timeout_s: float | None = None) -> int:
        """As `tarry.Client.clear`."""
        return await self._connections.run(self._calls.clear(topic, subscription=subscription, timeout_s=timeout_s))

    # Dispatchers.

    def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        permits: int = 10_000,
        create: bool = False,
        timeout_s: float | None = None,
    ) -> Opening[Subscription]:
        """As `tarry.Client.subscribe`: `await` it, or enter it with `async with`.

        Example: `async with client.subscribe("flights", "departures") as due: await due.ack(await due.receive())`
        """
        return Opening(lambda: self._open(topic, subscription, permits=permits, create=create, timeout_s=timeout_s))

    def subscribe_key_shared(
        self,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
        create: bool = False,
        timeout_s: float | None = None,
    ) -> Opening[KeySharedSubscription]:
        """As `tarry.Client.subscribe_key_shared`: `await` it, or enter it with `async with`.

        Example: `gates = await client.subscribe_key_shared("flights", "gates", consumers=[tarry.Consumer("a")])`
        """
        return Opening(
            lambda: self._open_key_shared(topic, subscription, consumers=consumers, create=create, timeout_s=timeout_s)
        )

    async def get(
        self,
        topic: str,
        subscription: str,
        *,
        max_rows: int = 1_000,
        lease_ms: int | None = None,
        wait_ms: int = 0,
        timeout_s: float | None = None,
    ) -> batch.Leased:
        """As `tarry.Client.get`."""
        return await self._connections.run(
            self._calls.get(
                topic, subscription, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms, timeout_s=timeout_s
            )
        )

    async def ack(
        self, topic: str, subscription: str, given: batch.HandedOut, *, timeout_s: float | None = None
    ) -> int:
        """As `tarry.Client.ack`."""
        return await self._connections.run(self._calls.ack(topic, subscription, given, timeout_s=timeout_s))

    async def nack(
        self,
        topic: str,
        subscription: str,
        given: batch.HandedOut,
        *,
        delay_ms: columns.Column | None = None,
        delay_level: columns.Column | None = None,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        timeout_s: float | None = None,
    ) -> results.Nacked:
        """As `tarry.Client.nack`."""
        return await self._connections.run(
            self._calls.nack(
                topic,
                subscription,
                given,
                delay_ms=delay_ms,
                delay_level=delay_level,
                batch_index=batch_index,
                key_hash=key_hash,
                timeout_s=timeout_s,
            )
        )

    async def reject(
        self,
        topic: str,
        subscription: str,
        given: batch.HandedOut,
        reason: str = "",
        *,
        batch_index: columns.Column | None = None,
        key_hash: columns.Column | None = None,
        timeout_s: float | None = None,
    ) -> results.Nacked:
        """As `tarry.Client.reject`."""
        return await self._connections.run(
            self._calls.nack(
                topic,
                subscription,
                given,
                reject=True,
                reason=reason,
                batch_index=batch_index,
                key_hash=key_hash,
                timeout_s=timeout_s,
            )
        )

    async def extend_lease(
        self,
        topic: str,
        subscription: str,
        given: batch.HandedOut,
        lease_ms: int,
        *,
        timeout_s: float | None = None,
    ) -> int:
        """As `tarry.Client.extend_lease`."""
        return await self._connections.run(
            self._calls.extend_lease(topic, subscription, given, lease_ms, timeout_s=timeout_s)
        )

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        policy: policies.SubscriptionPolicy | None = None,
        *,
        timeout_s: float | None = None,
    ) -> results.SubscriptionCreated:
        """As `tarry.Client.create_subscription`."""
        return await self._connections.run(
            self._calls.create_subscription(topic, subscription, policy, timeout_s=timeout_s)
        )

    async def update_subscription(
        self, topic: str, subscription: str, policy: policies.SubscriptionPolicy, *, timeout_s: float | None = None
    ) -> policies.SubscriptionPolicy:
        """As `tarry.Client.update_subscription`."""
        return await self._connections.run(
            self._calls.update_subscription(topic, subscription, policy, timeout_s=timeout_s)
        )

    async def delete_subscription(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> results.SubscriptionDeleted:
        """As `tarry.Client.delete_subscription`."""
        return await self._connections.run(self._calls.delete_subscription(topic, subscription, timeout_s=timeout_s))

    async def close(self) -> None:
        """As `tarry.Client.close`."""
        for stream in list(self._streams):
            await stream.close()
        await self._connections.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _open(
        self, topic: str, subscription: str, *, permits: int, create: bool, timeout_s: float | None
    ) -> Subscription:
        deadline = self._calls.deadline(timeout_s)
        if create:
            await self.create_subscription(topic, subscription, timeout_s=timeout_s)
        opened = Subscription(self._connections, self._calls, topic, subscription, permits=permits)
        await self._wait_until_open(opened, deadline)
        return opened

    async def _open_key_shared(
        self,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
        create: bool,
        timeout_s: float | None,
    ) -> KeySharedSubscription:
        deadline = self._calls.deadline(timeout_s)
        if create:
            await self.create_subscription(topic, subscription, timeout_s=timeout_s)
        opened = KeySharedSubscription(self._connections, self._calls, topic, subscription, consumers=consumers)
        await self._wait_until_open(opened, deadline)
        return opened

    async def _wait_until_open(self, opened: Receiver[Any], deadline: retry.Deadline) -> None:
        self._streams.add(opened)
        try:
            await opened.wait_until_open(deadline)
        except BaseException:
            await opened.close()
            raise
