"""Receiving in the order of keys for several consumers, and planning what is not delayed, on the event loop.

Owns: what a KEY_SHARED subscription has beside any other.
Does not own: who receives what, permits, plans (`tarry.key_shared_receiving`); waiting and settling
(`tarry.aio.subscription`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tarry import calls, columns, key_shared, key_shared_receiving
from tarry.aio import connections, subscription


class KeySharedSubscription(subscription.Receiver[key_shared.Event]):
    """As `tarry.KeySharedSubscription`; made by `Client.subscribe_key_shared`.

    Example: `async for event in subscription: match event: case tarry.ConsumerBatch(): await send(event)`
    """

    _receiving: key_shared_receiving.KeySharedReceiving[asyncio.Future[Any]]

    def __init__(
        self,
        shared: connections.Connections,
        known: calls.Calls,
        topic: str,
        subscription: str,
        *,
        consumers: Sequence[key_shared.Consumer],
    ) -> None:
        state: key_shared_receiving.KeySharedReceiving[asyncio.Future[Any]] = key_shared_receiving.KeySharedReceiving(
            topic, subscription, consumers, rows_max=known.rows_max, policy=known.policy
        )
        super().__init__(shared, known, topic, subscription, state)

    @property
    def consumers(self) -> tuple[key_shared.Consumer, ...]:
        """As `tarry.KeySharedSubscription.consumers`."""
        return self._receiving.consumers

    def add_consumer(self, consumer: key_shared.Consumer) -> asyncio.Future[None]:
        """As `tarry.KeySharedSubscription.add_consumer`; sent and awaited as `ack`."""
        return self._receiving.add_consumer(consumer, subscription.promise)

    def remove_consumer(self, consumer: key_shared.Consumer) -> asyncio.Future[None]:
        """As `tarry.KeySharedSubscription.remove_consumer`; sent and awaited as `ack`."""
        return self._receiving.remove_consumer(consumer, subscription.promise)

    def plan(
        self,
        ledger_id: columns.Column,
        entry_id: columns.Column,
        key_hash: columns.Column | None = None,
        *,
        anew: bool = False,
    ) -> asyncio.Future[NDArray[np.uint32]]:
        """As `tarry.KeySharedSubscription.plan`; sent and awaited as `ack`."""
        parts = self._receiving.plan(ledger_id, entry_id, key_hash, subscription.promise, anew=anew)
        return subscription.whole(parts, np.concatenate)

    def mark_delete(self, ledger_id: int, entry_id: int) -> asyncio.Future[None]:
        """As `tarry.KeySharedSubscription.mark_delete`; sent and awaited as `ack`."""
        return self._receiving.mark_delete(ledger_id, entry_id, subscription.promise)
