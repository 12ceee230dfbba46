"""The two ends of a relay, opened as its settings say.

Owns: which adapter is for which broker.
Does not own: the adapters, the client library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import AsyncIterator

import tarry.aio
from tarry_relay import port, relay_settings

_ADAPTERS = {
    relay_settings.Kafka: ("kafka", "confluent_kafka"),
    relay_settings.Nats: ("nats", "nats"),
    relay_settings.Redis: ("redis", "redis"),
}
"""Kind and library of each broker."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a relay stands between."""

    broker: port.Broker
    client: tarry.aio.Client


@contextlib.asynccontextmanager
async def opened(settings: relay_settings.Settings) -> AsyncIterator[Ends]:
    """Connects to the broker; Tarry is asked with the first call. Raises SettingsError, Unreachable."""
    kind, library = _ADAPTERS[type(settings.broker)]
    try:
        adapter = importlib.import_module(f"tarry_relay.{kind}_broker")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != library:
            raise
        raise relay_settings.SettingsError(
            f"broker.kind is {kind!r}, whose library is not there: install tarry-relay[{kind}]"
        ) from error
    async with adapter.opened(settings, settings.broker) as broker, relay_settings.client_of(settings.daemon) as client:
        yield Ends(broker, client)
