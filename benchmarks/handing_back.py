"""Hands failed deliveries back to Tarry directly, in place of the relay that passed them on.

It also counts those handed back before the relay's acknowledgement.
"""

from __future__ import annotations

import tarry
from benchmarks.carrying import RETRY_MS, Delivery

# Redelivery is at the exact time, and not at the next multiple of a power of 2.
POLICY = tarry.SubscriptionPolicy(redelivery=tarry.ConstantDelay(RETRY_MS), nack_precision_bits=0)


class HandingBack:
    """A consumer's connection to Tarry.

    `before_acks` counts deliveries handed back before the relay had acknowledged them.
    """

    failures = (tarry.TarryError,)

    def __init__(self, client: tarry.aio.Client, topic: str, subscription: str) -> None:
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self.before_acks = 0

    async def create_subscription(self) -> None:
        await self._client.create_subscription(self._topic, self._subscription, POLICY)

    def takes(self, failed: Delivery) -> bool:
        """Return whether the delivery is handed back here; the others go through the relay."""
        return failed.number % 4 == 0

    async def hand_back(self, failed: Delivery) -> None:
        """Hand a delivery back; return when that is durable.

        The answer to a request that is not `forwarded` shows whether the row was still owed.
        """
        positions = tarry.DeliveryId.parse(failed.handle).positions
        named = (self._topic, self._subscription, positions)
        if not (await self._client.nack(*named, delay_ms=RETRY_MS)).ignored:
            self.before_acks += 1
            return
        await self._client.nack(*named, delay_ms=RETRY_MS, forwarded=True)
