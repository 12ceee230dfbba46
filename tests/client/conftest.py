"""A scripted daemon, and clients of it that lose no time between attempts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import tarry
from tests.client._support import fake_daemon

# Back-off as short as it gets: what is tested is that another attempt comes, and where.
AT_ONCE = tarry.RetryPolicy(initial_s=0.001, max_s=0.001)


@pytest.fixture
def daemon() -> Iterator[fake_daemon.FakeDaemon]:
    serving = fake_daemon.FakeDaemon()
    yield serving
    serving.stop()


@pytest.fixture
def other_daemon() -> Iterator[fake_daemon.FakeDaemon]:
    serving = fake_daemon.FakeDaemon()
    yield serving
    serving.stop()


@pytest.fixture
def client(daemon: fake_daemon.FakeDaemon) -> Iterator[tarry.Client]:
    with tarry.Client(daemon.address, timeout_s=fake_daemon.WAIT_S, retry_policy=AT_ONCE) as connected:
        yield connected
