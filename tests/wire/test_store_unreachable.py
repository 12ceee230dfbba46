"""The daemon reaches its clients and not its store."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import grpc
import pytest

from examples import processes
from tests._support.delivery_history import DeliveryHistory
from tests._support.processes import Daemons
from tests._support.tcp_proxy import TcpProxy
from tests.wire._support import traffic

UNCONFIRMED_MAX_MS = 15_000
# Longer than that, and than it takes to see that nothing comes any more.
SPAN_MS = 30_000
SEEN_MS = 5_000
STEP_MS = 100


def test_without_the_store_nothing_is_answered_as_durable_nothing_is_handed_out_on_doubtful_ground_and_it_recovers(
    daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    server = processes.S3ServerProcess("s3", tmp_path)
    request.addfinalizer(server.kill)
    server.start()
    proxy = TcpProxy(server.port)
    proxy.open()
    request.addfinalizer(proxy.shut)
    short = {"store.s3.connect_timeout_s": 1, "store.s3.read_timeout_s": 2}
    daemon = daemons.make("tarryd", server.settings(port=proxy.port) | short | {"daemon.shards": 2})
    daemon.start_serving()
    history = DeliveryHistory()
    traffic.create_subscription(daemon.address, "topic")
    receiver = traffic.Receiver(daemon.address, "topic", history, rng=random.Random(1))
    request.addfinalizer(receiver.stop)
    receiver.__enter__()
    _add_rows_that_come_due_one_by_one(daemon, history)
    history.wait_for(lambda: history.received_rows > 10, 600, "rows are handed out")

    proxy.shut()
    shut_ms = traffic.now_ms()
    lost = traffic.AddBatch(((2, 0),), (shut_ms + SPAN_MS,))
    history.sending(lost.positions, lost.deliver_at_ms, exact=True)
    with pytest.raises(grpc.RpcError) as refused:
        traffic.add(daemon.address, "topic", lost, timeout_s=5)
    assert traffic.code_of(refused.value) in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    daemon.wait_for_health(serving=False)
    # To see nothing come takes time.
    threading.Event().wait(max(0, shut_ms + UNCONFIRMED_MAX_MS + SEEN_MS - traffic.now_ms()) / 1000)
    # When a row came says less than when it was due: it was not handed out before, and may have been on its way.
    assert [due_ms for _, due_ms in receiver.received if due_ms > shut_ms + UNCONFIRMED_MAX_MS] == []
    assert [due_ms for due_ms in receiver.durable_due_ms if due_ms > shut_ms] == []

    proxy.open()
    daemon.wait_for_health(serving=True)
    history.sending(lost.positions, lost.deliver_at_ms, exact=True)
    traffic.add(daemon.address, "topic", lost)
    history.answered(lost.positions)
    receiver.finish()
    history.wait_for(lambda: history.missing == 0, 600, "every answered row comes")
    traffic.wait_until_nothing_is_left(daemon.address, "topic")
    assert history.breaches() == []


def _add_rows_that_come_due_one_by_one(daemon: processes.DaemonProcess, history: DeliveryHistory) -> None:
    now_ms = traffic.now_ms()
    due = tuple(now_ms + delay for delay in range(0, SPAN_MS, STEP_MS))
    rows = traffic.AddBatch(tuple((1, entry) for entry in range(len(due))), due)
    history.sending(rows.positions, rows.deliver_at_ms, exact=True)
    traffic.add(daemon.address, "topic", rows)
    history.answered(rows.positions)
