"""The adapter of NATS, where its server need not be there for what is shown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nkeys
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


def settings_of(broker: relay_settings.Nats) -> relay_settings.Settings:
    return relay_settings.Settings(
        relay=relay_settings.Relay(topic="orders"), source=relay_settings.Source(name="orders"), broker=broker
    )


async def open_and_fail(broker: relay_settings.Nats) -> None:
    async with nats_broker.opened(settings_of(broker), broker):
        pass


async def test_a_server_that_cannot_be_connected_to_is_told_with_the_reason() -> None:
    broker = relay_settings.Nats(url="nats://127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(
        port.Unreachable, match=r"^nats://127\.0\.0\.1:1 cannot be used within 1 s: .*Connect call failed"
    ):
        await open_and_fail(broker)


async def test_connecting_ends_in_time_though_its_cancellation_is_lost_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    monkeypatch.setattr(nats, "connect", connect)
    with pytest.raises(port.Unreachable, match=r"cannot be used within 0\.1 s: no answer"):
        await open_and_fail(relay_settings.Nats(timeout_s=0.1))


async def test_a_file_of_credentials_is_one_that_the_client_can_sign_with(tmp_path: Path) -> None:
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
    written = tmp_path / "relay.creds"
    written.write_text(f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n")
    broker = relay_settings.Nats(url="nats://127.0.0.1:1", timeout_s=0.5, credentials_file=str(written))
    with pytest.raises(port.Unreachable, match="Connect call failed"):
        await open_and_fail(broker)


async def test_a_file_of_credentials_that_is_not_there_is_told_by_its_setting() -> None:
    with pytest.raises(relay_settings.SettingsError, match=r"^broker\.credentials_file is '/nowhere'"):
        await open_and_fail(relay_settings.Nats(credentials_file="/nowhere"))
