"""Fixtures of tests with real brokers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.relay.brokers._support import two_brokers


@pytest.fixture(params=["redis", "nats", pytest.param("kafka", marks=pytest.mark.long)])
async def broker(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[two_brokers.AnyBroker]:
    """A broker that serves, with its streams, ended with the test."""
    directory = tmp_path / "broker"
    directory.mkdir()
    made = two_brokers.made(request.param, directory)
    with made.server:
        made.server.start()
        made.server.wait_until_loaded()
        await made.set_up()
        yield made
        await made.close()
