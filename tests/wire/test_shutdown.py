"""SIGTERM: an orderly end, and a start that waits for nothing and replays nothing; or an end that is cut short."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from daemon.command import EXIT_NOT_DRAINED
from examples import processes
from tests._support.delivery_history import DeliveryHistory
from tests._support.processes import Daemons
from tests._support.tcp_proxy import TcpProxy
from tests.wire._support import traffic

# Nothing is cut short, however busy the machine is.
UNHURRIED = {"daemon.drain_s": 3_600, "grpc.drain_s": 1}


def test_sigterm_under_load_ends_with_status_0_and_another_daemon_serves_at_once(
    daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    # No heartbeat is missed for minutes: who serves at once was given the shards, not left them.
    settings = processes.local_store(tmp_path / "root") | UNHURRIED | {"ownership.heartbeat_interval_s": 60}
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
    history.wait_for(lambda: history.received_rows > 200, 600, "rows are handed out under load")

    assert first.terminate() == 0
    sender.stop()
    receiver.stop()
    second = daemons.make("second", settings)
    second.start_serving()
    assert "waiting for daemon" not in second.log_text()
    second.wait_for_log("the topics are loaded topics=1 damaged=0 rows_replayed=0")
    assert second.metric("tarry_recovery_rows_replayed_total") == 0

    last_receiver = traffic.Receiver(second.address, "topic", history, rng=random.Random(3))
    request.addfinalizer(last_receiver.stop)
    last_receiver.__enter__()
    last_receiver.finish()
    history.wait_for(lambda: history.missing == 0, 600, "every answered row comes")
    traffic.wait_until_nothing_is_left(second.address, "topic")
    assert history.breaches() == []


Ending = Callable[[processes.DaemonProcess], int]


def end_by_a_second_signal(daemon: processes.DaemonProcess) -> int:
    os.kill(daemon.pid, signal.SIGTERM)
    daemon.wait_for_log("stopping")
    return daemon.terminate()


def end_by_the_deadline(daemon: processes.DaemonProcess) -> int:
    return daemon.terminate()


@pytest.mark.parametrize(
    ("end", "drain_s"),
    [(end_by_a_second_signal, 3_600), (end_by_the_deadline, 2)],
    ids=["a second signal", "the deadline"],
)
def test_an_end_that_the_store_holds_up_is_cut_short_with_status_3_and_says_what_was_left(
    daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest, end: Ending, drain_s: int
) -> None:
    server = processes.S3ServerProcess("s3", tmp_path)
    request.addfinalizer(server.kill)
    server.start()
    proxy = TcpProxy(server.port)
    proxy.open()
    request.addfinalizer(proxy.shut)
    settings = server.settings(port=proxy.port) | {"daemon.shards": 2, "daemon.drain_s": drain_s}
    daemon = daemons.make("tarryd", settings)
    daemon.start_serving()
    due_ms = traffic.now_ms() + 600_000
    traffic.add(daemon.address, "topic", traffic.AddBatch(((1, 0), (1, 1)), (due_ms, due_ms)))

    proxy.shut()
    waiting = threading.Thread(target=_add_in_vain, args=(daemon.address, due_ms))
    waiting.start()
    daemon.wait_for_log("is uncertain: every shard waits for it")
    assert end(daemon) == EXIT_NOT_DRAINED
    waiting.join(300)
    assert not waiting.is_alive()
    last = daemon.log_text().rpartition("tarryd: not finished: ")[2]
    assert "shard 1 has not ended, 1 of its rows are staged" in last
    assert "is not closed, the next owner fences it" in last

    proxy.open()
    daemon.start_serving()
    assert traffic.stats(daemon.address, "topic").pending in (2, 3)


def _add_in_vain(address: str, due_ms: int) -> None:
    with pytest.raises(grpc.RpcError):
        traffic.add(address, "topic", traffic.AddBatch(((2, 0),), (due_ms,)), timeout_s=traffic.PATIENCE_S)


def test_a_signal_while_it_stands_by_ends_it_at_once(daemons: Daemons, tmp_path: Path) -> None:
    settings = processes.local_store(tmp_path / "root") | UNHURRIED
    owner = daemons.make("owner", settings)
    owner.start_serving()
    standby = daemons.make("standby", settings)
    standby.start()
    standby.wait_for_log("waiting for daemon")
    assert standby.terminate() == 0
    assert owner.is_serving()
