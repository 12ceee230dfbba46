"""The adapter of NATS, where its server need not be there for what is shown."""

from __future__ import annotations

import dataclasses
from typing import Any

import nats.errors
import pytest
from nats.aio.msg import Msg

from tarry_relay import nats_broker, port, relay_settings


@dataclasses.dataclass
class Connection:
    """Takes what is published, but for one time."""

    fails_at: int
    published: list[str] = dataclasses.field(default_factory=list)

    async def publish(self, subject: str) -> None:
        self.fails_at -= 1
        if self.fails_at == 0:
            raise nats.errors.OutboundBufferLimitError
        self.published.append(subject)


async def test_a_commit_that_failed_half_way_is_made_again_from_there() -> None:
    connection: Any = Connection(fails_at=3)
    broker = relay_settings.Nats()
    log = nats_broker.NatsLog(None, "orders", broker)
    reader = nats_broker.NatsReader(None, log, relay_settings.Relay(topic="orders"), broker)
    replies = [f"$JS.ACK.orders.relay.1.{number}.{number}.1.0" for number in range(1, 5)]
    read = [
        port.Read(1, number, None, "orders", 0, Msg(connection, "orders", reply))
        for number, reply in enumerate(replies)
    ]
    with pytest.raises(port.Unreachable):
        await reader.commit(read)
    await reader.commit(read)
    assert connection.published == replies


async def test_a_server_that_cannot_be_connected_to_is_told_with_the_reason() -> None:
    broker = relay_settings.Nats(url="nats://127.0.0.1:1", timeout_s=1.0)
    settings = relay_settings.Settings(
        relay=relay_settings.Relay(topic="orders"),
        source=relay_settings.Source(name="orders"),
        broker=broker,
    )
    with pytest.raises(
        port.Unreachable, match=r"^nats://127\.0\.0\.1:1 cannot be used within 1 s: .*Connect call failed"
    ):
        async with nats_broker.opened(settings, broker):
            pass
