"""What comes by a KEY_SHARED subscription when nothing but rows comes."""

from __future__ import annotations

import tarry
import tarry.aio

PATIENCE_S = 600.0


async def batches(subscription: tarry.aio.KeySharedSubscription, rows: int) -> list[tarry.ConsumerBatch]:
    """So many rows; nothing else comes between them."""
    received: list[tarry.ConsumerBatch] = []
    while (missing := rows - sum(map(len, received))) > 0:
        event = await subscription.receive(PATIENCE_S)
        assert isinstance(event, tarry.ConsumerBatch), f"{missing} rows are missing, and {event} came"
        received.append(event)
    return received
