"""The client of the daemons of one root.

Defines the calls that a program makes, their arguments, defaults and meaning. `tarry.calls` builds the requests;
`tarry.attempts` retries them and follows owners.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from tarry import (
    attempts,
    batch,
    calls,
    columns,
    credentials,
    daemons,
    errors,
    key_shared,
    on_event_loop,
    policies,
    reasons,
    results,
    stream_requests,
)
from tarry.aio import add_stream, connections, deleting, inspecting, operating, producer, shared_streams
from tarry.aio.subscription import KeySharedSubscription, Receiver, Subscription


class Client(inspecting.Inspecting, operating.Operating, deleting.Deleting):
    """A client of the daemons of one root.

    For one event loop; an asynchronous context manager. Nothing is sent before the first call.
    - `target` is the host:port of a daemon (without a port, 7461), or any gRPC target; several of them are a list, or
      text with commas between them. A name may have several addresses. The client follows the owner that a daemon
      names, also for calls without a topic, such as `topics`. If a daemon cannot be reached, or does not even report
      its version for a few seconds, the client goes on at another one. A URL, an empty address or an invalid port
      raises InvalidArgument.
    - `timeout_s` (seconds) bounds a call including its retries, unless the call has its own. Every request is
      idempotent. UNAVAILABLE, ABORTED and UNKNOWN are retried with jittered back-off, RESOURCE_EXHAUSTED after the time
      that the daemon names, and a call to a daemon that is not the owner goes to the owner. After the timeout,
      DeadlineExceeded is raised with the last failure in it; every other failure is raised at once (`tarry.errors`).
    - `retry_policy` sets the back-off.
    - `rows_per_request` is the daemon's limit; longer batches are sent as several requests. So are those of more than
      `request_bytes`, and of more than a daemon takes, as far as it has said so. None means only the latter, and 4 MiB
      as long as no daemon has.
    - `tls` encrypts connections to every daemon, except over Unix sockets. None means no encryption.
    - `token`, or `token_file`, which is read again when it changes, identifies the caller to daemons that require it.
      Tokens are sent only over TLS, loopback and Unix sockets, also to an owner that a daemon names; otherwise
      InvalidArgument is raised and nothing is sent.
    - `client_id` identifies the caller where a topic limits the adds per second of one client (`tarry.TopicPolicy`): 1
      to 128 printable ASCII characters. Programs with the same id share a limit. None means that all programs of this
      host are one client.
    - `waiting` is called with the reason, in words, if a call waits because a daemon has taken over a topic from one
      that may still deliver rows. That time, at most 15 s, does not count towards `timeout_s`.
    Example: `async with tarry.aio.Client() as client: await client.add("flights", 1, range(1_000), delay_ms=5_000)`
    """

    def __init__(
        self,
        target: str | Sequence[str] = credentials.DEFAULT_TARGET,
        *,
        timeout_s: float = credentials.DEFAULT_TIMEOUT_S,
        retry_policy: attempts.RetryPolicy | None = None,
        rows_per_request: int = columns.ROWS_PER_REQUEST_MAX,
        request_bytes: int | None = None,
        client_id: str | None = None,
        tls: credentials.Tls | None = None,
        token: str | None = None,
        token_file: credentials.File | None = None,
        waiting: Callable[[str], None] = credentials.unsaid,
    ) -> None:
        shows = credentials.Credentials(tls, token=token, token_file=token_file)
        addresses = credentials.addresses_of(target)
        for address in addresses:
            shows.shown_to(address)
        known = daemons.Daemons(addresses)
        self._connections = connections.Connections(shows, known, client_id=client_id, waiting=waiting)
        self._ack_pace = stream_requests.AckPace()
        self._shared_streams = shared_streams.SharedStreams(self._connections)
        self._calls = calls.Calls(
            known,
            retry_policy or attempts.RetryPolicy(),
            timeout_s=timeout_s,
            rows_max=rows_per_request,
            bytes_max=request_bytes,
        )
        self._streams: weakref.WeakSet[add_stream.AddStream | producer.Producer | Receiver[Any]] = weakref.WeakSet()

    # The publish path

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
        on_invalid: reasons.OnInvalid = reasons.OnInvalid.REFUSE,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.AddResult:
        """Add positions and return when every accepted row is durable.

        Columns are arrays, lists or single numbers; one of length 1 applies to the whole batch. Give exactly one of
        `deliver_at_ms` (Unix time in ms), `delay_ms` and `delay_level` (of the topic's table of delays; 0 means none).
        `key_hash` comes from `tarry.key_hash`.
        With the default `on_invalid`, one row with too long a delay, a time in seconds or an unknown level fails the
        batch with OutOfRange or InvalidArgument. With RETURN such rows are in `refused` of the result, with the reason,
        and the others are stored. Raises Unsupported if the daemon cannot do that.
        With `subscription`, the rows are for that subscription alone. Raises NotFound if it does not exist.
        A batch over the limits is sent as several requests: if one fails, those before it are durable.
        Example: `await client.add("flights", 1, np.arange(1_000), delay_ms=5_000, key_hash=tarry.key_hash("N14228"))`
        """
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
                on_invalid=on_invalid,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    def add_stream(
        self, topic: str, *, in_flight: int = 16, subscription: str | None = None, timeout_s: float | None = None
    ) -> add_stream.AddStream:
        """Return a stream of batches with up to `in_flight` requests unanswered: the fast way to add many rows.

        With `subscription`, the rows are for that subscription alone.
        Example: `async with client.add_stream("flights") as stream: await stream.add(1, range(1_000), delay_ms=5_000)`
        """
        stream = add_stream.AddStream(
            self._connections, self._calls, topic, subscription, in_flight=in_flight, timeout_s=timeout_s
        )
        self._streams.add(stream)
        return stream

    def producer(
        self,
        topic: str,
        *,
        linger_ms: float = 5,
        batch_rows: int = 1_000,
        max_outstanding: int = 10_000,
        already_due: results.AlreadyDue = results.AlreadyDue.DELIVER,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> producer.Producer:
        """Return a producer of single rows, which are sent together.

        A batch is sent after `linger_ms` or at `batch_rows` rows. Each row has a future of its own, and a row that
        cannot be stored fails no other.
        At most `max_outstanding` rows may be unanswered; `add` waits for room, at most `timeout_s` (seconds). If that
        many wait and none is in flight, they are sent at once. `timeout_s` also bounds how long a batch is sent again
        after failures. `already_due` and `subscription` apply to every row, as in `add`. Raises InvalidArgument.
        Example: `async with client.producer("flights") as producer: await producer.add(1, 7, delay_ms=5_000)`
        """
        made = producer.Producer(
            self._connections,
            self._calls,
            topic,
            subscription,
            linger_ms=linger_ms,
            batch_rows=batch_rows,
            max_outstanding=max_outstanding,
            already_due=already_due,
            timeout_s=timeout_s,
        )
        self._streams.add(made)
        return made

    async def cancel(
        self,
        topic: str,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        *,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.Cancelled:
        """Remove positions from the index before they are due; a position counted as cancelled is never delivered.

        Cancels in every index of the topic or in none; with `subscription`, only in that subscription's index. The
        result lists the positions left unchanged, and why. No position may be named twice. Raises NotFound.
        Example: `(await client.cancel("flights", 1, [17, 18])).in_flight_index`
        """
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
        """Give positions that are not due yet another time, earlier or later, in one step.

        Give exactly one of `deliver_at_ms` and `delay_ms`. Give `key_hash` again, because the row is a new one. The
        result is that of `cancel`. Raises NotFound, or OutOfRange if a delay is over the limit.
        Example: `(await client.reschedule("flights", 1, 17, delay_ms=60_000)).rescheduled`
        """
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
        """Return, as ranges, which of the positions are in the index: a cursor that reads a log skips them.

        With `last_entry_id` each row names a range of entries, both ends included. With `subscription`, only rows that
        it is owed and has not acknowledged count. The answer is complete at any length; a long one takes several
        requests, and changes between them may or may not show.
        A topic that does not exist contains nothing. Raises NotFound if the subscription does not exist.
        Example: `for ledger, first, last in (await client.contains("flights", 1, 0, last_entry_id=9)).pending: ...`
        """
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
        dead_letter: bool = False,
        subscription: str | None = None,
        timeout_s: float | None = None,
    ) -> results.Trimmed:
        """Drop the rows of each ledger at or before its entry, for the topic or for one subscription.

        `all_lower_ledgers` also drops every row of ledgers with a lower id; it allows only one ledger. `dead_letter`
        turns those that the subscription is owed into dead letters; it requires `subscription`.
        Returns how many rows were dropped, or how many the subscription is no longer owed. After a lost answer the
        request is sent again and counts only what was left (`may_have_landed`). A large trim is done in portions: a
        failure may leave a part of it done. Rows added later are not affected. Raises NotFound, or Unsupported if the
        daemon does not support `dead_letter`.
        Example: `await client.trim("flights", ledger_id=7, entry_id=1_999, all_lower_ledgers=True)`
        """
        return await self._connections.run(
            self._calls.trim(
                topic,
                ledger_id,
                entry_id,
                all_lower_ledgers=all_lower_ledgers,
                dead_letter=dead_letter,
                subscription=subscription,
                timeout_s=timeout_s,
            )
        )

    async def clear(self, topic: str, *, subscription: str | None = None, timeout_s: float | None = None) -> int:
        """Drop every row of a topic, or of one subscription; return how many, counted as in `trim`. Raises NotFound.

        Example: `await client.clear("flights", subscription="departures")`
        """
        return await self._connections.run(self._calls.clear(topic, subscription=subscription, timeout_s=timeout_s))

    # Dispatchers

    @on_event_loop.opening
    async def subscribe(
        self,
        topic: str,
        subscription: str,
        *,
        permits: int = 10_000,
        create: bool = False,
        ack_linger_ms: int = 5,
        ack_linger_max_ms: int = 50,
        timeout_s: float | None = None,
    ) -> Subscription:
        """Open a subscription and return when its stream is open: `await` it, or enter it with `async with`.

        - `permits` is how many positions may be received and neither acknowledged nor released.
        - `create` creates the subscription, and the topic, if they do not exist; an existing subscription keeps its
          policy.
        - `ack_linger_ms` is how long an acknowledgement waits to be joined with others in one request; 0 means not at
          all. The time grows to `ack_linger_max_ms` as this client's rate rises from 100 to 1,000 acknowledgements a
          second, unless the caller waits for each. Acknowledgements become durable that much later; deliveries are not
          delayed.
        Raises NotFound. Later failures are raised from the iteration; broken streams are opened again.
        Example: `async with client.subscribe("flights", "departures") as due: [due.ack(batch) async for batch in due]`
        """
        deadline = self._calls.deadline(timeout_s)
        ack_linger = stream_requests.AckLinger(ack_linger_ms, ack_linger_max_ms, self._ack_pace)
        if create:
            await self._create_missing(topic, subscription, timeout_s)
        opened = Subscription(
            self._shared_streams,
            self._calls,
            topic,
            subscription,
            permits=permits,
            ack_linger=ack_linger,
        )
        await self._wait_until_open(opened, deadline)
        return opened

    @on_event_loop.opening
    async def subscribe_key_shared(
        self,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
        create: bool = False,
        ack_linger_ms: int = 5,
        ack_linger_max_ms: int = 50,
        timeout_s: float | None = None,
    ) -> KeySharedSubscription:
        """Open a subscription for consumers that share its keys in order; return when its stream is open.

        - `consumers` are the initial ones, each with its permits; others may join and leave.
        - `create` creates the subscription, and the topic, if they do not exist, with the daemon's default key-sharing
          policy (`tarry.KeySharedPolicy`).
        Either all open streams of a subscription are KEY_SHARED or none: raises DeadlineExceeded if a stream of the
        other kind, or a lease, stays open. Everything else is as in `subscribe`.
        Example: `gates = await client.subscribe_key_shared("flights", "gates", consumers=[tarry.Consumer("a")])`
        """
        deadline = self._calls.deadline(timeout_s)
        ack_linger = stream_requests.AckLinger(ack_linger_ms, ack_linger_max_ms, self._ack_pace)
        if create:
            await self._create_missing(topic, subscription, timeout_s)
        opened = KeySharedSubscription(
            self._shared_streams,
            self._calls,
            topic,
            subscription,
            consumers=consumers,
            ack_linger=ack_linger,
        )
        await self._wait_until_open(opened, deadline)
        return opened

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
        """Lease due positions without a stream; they are in flight until they are acknowledged or the lease ends.

        `max_rows` is 1 to 10,000. `lease_ms` is at most 12 hours; None takes the subscription's. `wait_ms`, at most 60
        s, is how long to wait for the first row if nothing is due; it adds to `timeout_s` (seconds). The batch is empty
        if nothing came due in time.
        After a lost answer the request is sent again and leases other rows; those of the lost answer are redelivered
        when their lease ends. Raises NotFound, or ResourceExhausted if there are too many leases.
        Example: `batch = await client.get("flights", "departures", max_rows=100, lease_ms=60_000, wait_ms=10_000)`
        """
        return await self._connections.run(
            self._calls.get(
                topic, subscription, max_rows=max_rows, lease_ms=lease_ms, wait_ms=wait_ms, timeout_s=timeout_s
            )
        )

    async def ack(
        self, topic: str, subscription: str, given: batch.HandedOut, *, timeout_s: float | None = None
    ) -> results.Ignored:
        """Acknowledge a batch, a part of one, or columns (`tarry.HandedOut`); durable on return.

        A batch names its deliveries: a position that was redelivered since, after a negative acknowledgement, is not
        acknowledged by it. Returns how many positions were ignored, which, and why. After a lost answer the request is
        sent again, and positions that the first try acknowledged are ignored. Raises NotFound.
        Example: `await client.ack("flights", "departures", batch.take(slice(0, 10)))`
        """
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
        forwarded: bool = False,
        timeout_s: float | None = None,
    ) -> results.Nacked:
        """Negatively acknowledge a batch, a part of one, or columns: Tarry redelivers them later; durable on return.

        The positions are redelivered after `delay_ms`, or after the delay of the topic's `delay_level` (0 means at
        once); without either, as the subscription's policy says. Give one for all or one for each. A position that was
        negatively acknowledged more often than the policy's `max_redeliver_count` becomes a dead letter instead.
        `batch_index` names single messages of entries that hold a batch, one for each row or one for all; each is
        redelivered separately, and the entry as a whole stays unchanged.
        Positions that Tarry never delivered are allowed: columns with 0 as `deliver_at_ms`, and their `key_hash`.
        With `forwarded`, positions that were acknowledged when they were passed on, and failed downstream, are
        redelivered too, under the next redelivery count; name the delivery (`tarry.DeliveryId`). Without it such a
        position is ignored.
        After a lost answer the request is sent again: positions that already wait for redelivery get the time again and
        are not counted again. Raises NotFound, OutOfRange if a delay is over the limit, or Unsupported if the daemon
        does not support `forwarded`.
        Example: `(await client.nack("flights", "departures", batch.take([0]), delay_ms=10_000)).dead_lettered`
        """
        return await self._connections.run(
            self._calls.nack(
                topic,
                subscription,
                given,
                delay_ms=delay_ms,
                delay_level=delay_level,
                batch_index=batch_index,
                key_hash=key_hash,
                forwarded=forwarded,
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
        forwarded: bool = False,
        timeout_s: float | None = None,
    ) -> results.Nacked:
        """Turn positions into dead letters now, durably; everything else is as in `nack`.

        `reason` is kept with them, at most 1,024 bytes in UTF-8. After a lost answer the request is sent again and
        counts as ignored the positions that the first try rejected; a position that Tarry never delivered may then be a
        dead letter twice. Raises NotFound.
        Example: `await client.reject("flights", "departures", batch.take([0]), "no such gate")`
        """
        return await self._connections.run(
            self._calls.nack(
                topic,
                subscription,
                given,
                reject=True,
                reason=reason,
                batch_index=batch_index,
                key_hash=key_hash,
                forwarded=forwarded,
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
    ) -> results.Ignored:
        """Move the end of leases to `lease_ms` from now, at most 12 hours; 0 ends the lease.

        Returns how many positions, and which, were ignored because they are not leased with that time. Raises NotFound.
        Example: `await client.extend_lease("flights", "departures", batch, 60_000)`
        """
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
        """Create a subscription, and the topic if it is new; succeed if it exists with this policy.

        The first subscription of a topic is owed everything in its index, a later one what comes due after its
        creation. Raises AlreadyExists if it exists with another policy, or ResourceExhausted if there are too many
        subscriptions.
        Example: `await client.create_subscription("flights", "departures", tarry.SubscriptionPolicy(lease_ms=60_000))`
        """
        return await self._connections.run(
            self._calls.create_subscription(topic, subscription, policy, timeout_s=timeout_s)
        )

    async def update_subscription(
        self, topic: str, subscription: str, policy: policies.SubscriptionPolicy, *, timeout_s: float | None = None
    ) -> policies.SubscriptionPolicy:
        """Replace a subscription's whole policy; it applies from the answer on. Raises NotFound.

        Example: `await client.update_subscription("flights", "departures", tarry.SubscriptionPolicy(lease_ms=60_000))`
        """
        return await self._connections.run(
            self._calls.update_subscription(topic, subscription, policy, timeout_s=timeout_s)
        )

    async def delete_subscription(
        self, topic: str, subscription: str, *, timeout_s: float | None = None
    ) -> results.SubscriptionDeleted:
        """Delete a subscription with its dead letters; deleting the last one drops what is due. Raises NotFound.

        Example: `(await client.delete_subscription("flights", "departures")).dead_letters`
        """
        return await self._connections.run(self._calls.delete_subscription(topic, subscription, timeout_s=timeout_s))

    async def close(self) -> None:
        """Close every stream and connection. Idempotent."""
        for stream in list(self._streams):
            await stream.close()
        await self._shared_streams.close()
        await self._connections.close()

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _create_missing(self, topic: str, subscription: str, timeout_s: float | None) -> None:
        try:
            await self.create_subscription(topic, subscription, timeout_s=timeout_s)
        except errors.AlreadyExists:
            # It exists with another policy, which stays.
            return

    async def _wait_until_open(self, opened: Receiver[Any], deadline: attempts.Deadline) -> None:
        self._streams.add(opened)
        try:
            await opened.wait_until_open(deadline)
        except BaseException:
            await opened.close()
            raise
