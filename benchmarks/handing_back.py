"""A consumer that hands back to Tarry itself what a relay has passed on to it, and that failed.

Owns: whether that was before the relay's acknowledgement. Does not own: what fails, what goes back through the relay.
"""

from __future__ import annotations

import tarry
from benchmarks.carrying import RETRY_MS, Delivery

# What comes back does so at that time, and not at the next multiple of a power of 2.
POLICY = tarry.SubscriptionPolicy(redelivery=tarry.ConstantDelay(RETRY_MS), nack_precision_bits=0)


class HandingBack:
    """`before_acks`: how much was handed back while the relay had not acknowledged it."""

    failures = (tarry.TarryError,)

    def __init__(self, client: tarry.aio.Client, topic: str, subscription: str) -> None:
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self.before_acks = 0

    async def create_subscription(self) -> None:
        await self._client.create_subscription(self._topic, self._subscription, POLICY)

    def takes(self, failed: Delivery) -> bool:
        """Some; the others go through the relay."""
        return failed.number % 4 == 0

    async def hand_back(self, failed: Delivery) -> None:
        """Returns when it is durable. A request that is not `forwarded` tells whether the row was still owed."""
        positions = tarry.DeliveryId.parse(failed.handle).positions
        named = (self._topic, self._subscription, positions)
        if not (await self._client.nack(*named, delay_ms=RETRY_MS)).ignored:
            self.before_acks += 1
            return
        await self._client.nack(*named, delay_ms=RETRY_MS, forwarded=True)
