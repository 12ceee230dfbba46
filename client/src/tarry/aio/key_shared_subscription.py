"""Receiving in the order of keys for several consumers, and planning what is not delayed.

Owns: what a KEY_SHARED subscription has beside any other.
Does not own: who receives what, permits, plans (`tarry.key_shared_receiving`); waiting and settling
(`tarry.aio.subscription`).
"""

from __future__ import annotations

from asyncio import Future
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarry import ack_pace, calls, columns, key_shared, key_shared_receiving, on_event_loop
from tarry.aio import futures, shared_streams, subscription


class KeySharedSubscription(subscription.Receiver[key_shared.Event]):
    """Made by `Client.subscribe_key_shared`. A context manager, and an iterator of what comes until it is closed.

    What comes: a `ConsumerBatch` for one consumer, `TakenBack`, `PlanAgain`, for each consumer in the order in which
    the daemon decided it: batches of a consumer are joined past those of others, and past nothing else. The rest is as
    `Subscription`; permits are those of each `Consumer`.

    Example: `async for event in subscription: match event: case tarry.ConsumerBatch(): send(event.consumer, event)`
    """

    _receiving: key_shared_receiving.KeySharedReceiving[Future[Any]]

    def __init__(
        self,
        shared: shared_streams.SharedStreams,
        known: calls.Calls,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
        ack_linger: ack_pace.AckLinger,
    ) -> None:
        state: key_shared_receiving.KeySharedReceiving[Future[Any]] = key_shared_receiving.KeySharedReceiving(
            topic,
            subscription,
            consumers,
            rows_max=known.rows_max,
            policy=known.policy,
            ack_linger=ack_linger,
        )
        super().__init__(shared, known, topic, subscription, state)

    @property
    def consumers(self) -> tuple[key_shared.Consumer, ...]:
        """The consumers that were not removed, in the order in which they were added."""
        with self._changed:
            return self._receiving.consumers

    def add_consumer(self, consumer: key_shared.Consumer) -> Future[None]:
        """A consumer joins: keys move to it from the others.

        The future is settled when it has joined. Raises InvalidArgument, also from the future: STICKY ranges that
        another one has.

        Example: `await subscription.add_consumer(tarry.Consumer("gate-3"))`
        """
        with self._changed:
            return self._receiving.add_consumer(consumer, on_event_loop.promise)

    def remove_consumer(self, consumer: key_shared.Consumer) -> Future[None]:
        """A consumer leaves: what it holds comes again, for others, in the order of positions.

        Nothing more comes for it from now on. What it has done may still be acknowledged. Raises InvalidArgument: it is
        not here.

        Example: `await subscription.remove_consumer(gate_1)`
        """
        with self._changed:
            return self._receiving.remove_consumer(consumer, on_event_loop.promise)

    def plan(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        key_hash: columns.Column | None = None,
        *,
        anew: bool = False,
    ) -> Future[NDArray[np.uint32]]:
        """Asks who receives messages that are not delayed, in the order in which they stand in the log.

        The future has for each position the `consumer_id` that receives it now, or HELD. All of them come by `receive`,
        the HELD ones when they are free, and are acknowledged like anything that is received. What consumers hold
        already does not come again. Calls are answered one after the other.
        `anew`: it is the first of the plans from the mark-delete position on, after `PlanAgain` has come.
        Raises InvalidArgument, PlanLost, also from the future: the stream has ended, and its plans with it.

        Example: `(await subscription.plan(1, range(100), tarry.key_hash(keys)) == tarry.HELD).sum()`
        """
        with self._changed:
            parts = self._receiving.plan(ledger_id, entry_id, key_hash, on_event_loop.promise, anew=anew)
        return futures.whole(parts, np.concatenate)

    def mark_delete(self, ledger_id: int, entry_id: int) -> Future[None]:
        """Tells that everything that was planned up to and including this position is acknowledged.

        With LAST_SENT_POSITION it is what consumers that joined wait for, where not each position is acknowledged here
        by itself. What this subscription holds of it is to be acknowledged all the same.

        Example: `await subscription.mark_delete(7, 1_999)`
        """
        with self._changed:
            return self._receiving.mark_delete(ledger_id, entry_id, on_event_loop.promise)
