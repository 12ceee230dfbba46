"""A scripted daemon, clients of it that lose no time between attempts, and a CA."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tarry
from tests.client._support import fake_daemon
from tests.client._support.authority import Authority, replaced

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


@pytest.fixture
def authority() -> Authority:
    return Authority()


@pytest.fixture
def ca_file(tmp_path: Path, authority: Authority) -> Path:
    return replaced(tmp_path / "ca.pem", authority.certificate)
