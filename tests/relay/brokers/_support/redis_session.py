"""A Redis of a test's own, and sessions of the adapter with it, without a daemon."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from tarry_relay import redis_broker, relay_settings
from tests.brokers import redis_server

SOURCE, DUE, FAILED = "orders", "due", "failed"


class RedisOfTest:
    """A server that serves, and the files of relays that use it."""

    def __init__(self, server: redis_server.RedisServer, directory: Path) -> None:
        self.server = server
        self._directory = directory

    @property
    def client(self) -> Any:
        return self.server.client

    def settings(
        self, identity: str = "one", topic: str = "orders", memory_bytes: int = 256 * 2**20, **broker: Any
    ) -> relay_settings.Settings:
        """Return the settings of a relay. `broker`: more of its table, numbers and text."""
        shown: Mapping[str, object] = {"kind": "redis", "url": self.server.url, "timeout_s": 60, **broker}
        table = ", ".join(f"{name} = {value!r}" for name, value in shown.items())
        file = self._directory / f"{identity}-{topic}.toml"
        file.write_text(
            f'relay = {{ topic = "{topic}", id = "{identity}", memory_bytes = {memory_bytes} }}\n'
            f"broker = {{ {table} }}\n"
            f'source = {{ name = "{SOURCE}", target = "{DUE}", dead_letters = "dead" }}\n'
            f'retry = {{ name = "{FAILED}" }}\ntargets = [{{ name = "{DUE}" }}, {{ pattern = "out.*" }}]\n'
        )
        return relay_settings.load(file)

    @contextlib.asynccontextmanager
    async def opened(
        self, identity: str = "one", topic: str = "orders", memory_bytes: int = 256 * 2**20, **broker: Any
    ) -> AsyncIterator[redis_broker.RedisBroker]:
        """Open a session of a relay of its own."""
        settings = self.settings(identity, topic, memory_bytes, **broker)
        assert isinstance(settings.broker, relay_settings.Redis)
        async with redis_broker.opened(settings, settings.broker) as session:
            yield session


@contextlib.contextmanager
def serving(directory: Path, *more: str) -> Iterator[RedisOfTest]:
    """Start a server with settings of its own."""
    if (program := redis_server.find()) is None:
        pytest.skip(redis_server.MISSING)
    home = directory / "redis"
    home.mkdir()
    with redis_server.RedisServer(program, home, more=more) as server:
        server.start()
        server.wait_until_loaded()
        yield RedisOfTest(server, directory)


@contextlib.contextmanager
def raw(redis: RedisOfTest) -> Iterator[Any]:
    """Yield a client that reads answers as they are: the usual one makes dicts of fields."""
    with redis_client.Redis(port=redis.server.port, protocol=2, socket_timeout=300) as client:
        client.response_callbacks.clear()
        yield client
