"""The adapter of NATS, where its server need not be there for what is shown."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import nats.aio.client
import nkeys
import pytest

from tarry_relay import nats_broker, port, relay_settings


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

    monkeypatch.setattr(nats.aio.client.Client, "connect", connect)
    with pytest.raises(port.Unreachable, match=r"cannot be used within 0\.1 s: no answer"):
        await open_and_fail(relay_settings.Nats(timeout_s=0.1))


SEED = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER).decode()
JWT_PART = "-----BEGIN NATS USER JWT-----\neyJ0.eyJq.c2ln\n------END NATS USER JWT------\n"
SEED_PART = f"-----BEGIN USER NKEY SEED-----\n{SEED}\n------END USER NKEY SEED------\n"


async def test_a_file_of_credentials_is_one_that_the_client_can_sign_with(tmp_path: Path) -> None:
    written = tmp_path / "relay.creds"
    written.write_text(f"{JWT_PART}\n{SEED_PART}")
    broker = relay_settings.Nats(url="nats://127.0.0.1:1", timeout_s=0.5, credentials_file=str(written))
    with pytest.raises(port.Unreachable, match="Connect call failed"):
        await open_and_fail(broker)


@pytest.mark.parametrize(
    "text", ["", "x", JWT_PART, SEED_PART, JWT_PART + SEED_PART.replace(SEED, "SUx"), JWT_PART * 2]
)
async def test_a_file_without_credentials_is_refused_and_not_read_for_ever(tmp_path: Path, text: str) -> None:
    written = tmp_path / "relay.creds"
    written.write_text(text)
    with pytest.raises(
        relay_settings.SettingsError, match=r"^broker\.credentials_file is '.*'; it must have a user's JWT"
    ):
        await open_and_fail(relay_settings.Nats(url="nats://127.0.0.1:1", timeout_s=0.5, credentials_file=str(written)))


@pytest.mark.parametrize("url", ["nats://none", "nats://127.0.0.1:70000", "nats://[::1"])
async def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(relay_settings.SettingsError, match=r"^broker\.url is '"):
        await open_and_fail(relay_settings.Nats(url=url, timeout_s=0.5))


async def test_a_file_of_credentials_that_is_not_there_is_told_by_its_setting() -> None:
    with pytest.raises(relay_settings.SettingsError, match=r"^broker\.credentials_file is '/nowhere'"):
        await open_and_fail(relay_settings.Nats(credentials_file="/nowhere"))
