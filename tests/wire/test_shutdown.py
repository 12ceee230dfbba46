"""SIGTERM: an orderly end, and a start that waits for nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples import processes
from tests.support.delivery_history import DeliveryHistory
from tests.support.processes import Daemons
from tests.wire import traffic


@pytest.mark.timeout(120)
def test_sigterm_under_load_ends_with_status_0_and_another_daemon_serves_at_once(
    daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # No heartbeat is missed for minutes: who serves at once was given the shards, not left them.
    settings = processes.local_store(tmp_path / "root") | {"ownership.heartbeat_interval_s": 60}
    history = DeliveryHistory()
    first = daemons.make("first", settings)
    first.start_serving()
    traffic.create_subscription(first.address, "topic")

    def due(rng: random.Random, base_ms: int) -> int:
        return base_ms + rng.randint(0, 6_000)

    sender = traffic.Sender(first.address, "topic", history, rng=random.Random(1), due=due)
    receiver = traffic.Receiver(first.address, "topic", history, rng=random.Random(2))
    for caller in (sender, receiver):
        caller.__enter__()
        request.addfinalizer(caller.stop)
    history.wait_for(lambda: history.received_rows > 200, 30, "rows are handed out under load")

    assert first.terminate() == 0
    sender.stop()
    receiver.stop()
    second = daemons.make("second", settings)
    second.start_serving()
    assert "waiting for daemon" not in second.log_text()

    last_receiver = traffic.Receiver(second.address, "topic", history, rng=random.Random(3))
    request.addfinalizer(last_receiver.stop)
    last_receiver.__enter__()
    last_receiver.finish()
    history.wait_for(lambda: history.missing == 0, 60, "every answered row comes")
    traffic.wait_until_nothing_is_left(second.address, "topic")
    assert history.breaches() == []
