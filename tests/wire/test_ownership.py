"""Two daemons on one root: who serves, who stands by, and what becomes of an owner that was away."""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

import tarry
from examples import processes
from tests._support.delivery_history import DeliveryHistory
from tests._support.processes import Daemons, run_program
from tests.wire._support import traffic

# An owner stops handing out when its ownership has not been confirmed for as long.
HAND_OUT_WITHOUT_CONFIRMATION_MS = 15_000
# So long that nothing in these tests is claimed because a heartbeat was missed.
PATIENT: dict[str, object] = {"daemon.shards": 4, "ownership.heartbeat_interval_s": 60}
# Of who stands by for a daemon that is away already: however busy the machine is, it misses nobody else.
IMPATIENT: dict[str, object] = {"daemon.shards": 4, "ownership.heartbeat_interval_s": 0.5}
SOON_MS = 1_000


def batch(ledger: int, *, rows: int = 10, due_ms: int | None = None) -> traffic.AddBatch:
    due = traffic.now_ms() + SOON_MS if due_ms is None else due_ms
    return traffic.AddBatch(tuple((ledger, entry) for entry in range(rows)), (due,) * rows)


def health_of(address: str) -> tuple[int, str]:
    """What `tarryd health` ends with, and what it prints."""
    ended = run_program([sys.executable, "-m", "daemon.main", "health", "--set", f"grpc.listen={address}"])
    return ended.returncode, ended.stdout


def receive_rows(address: str, topic: str, rows: int) -> set[tuple[int, int]]:
    """Receives through the client library until as many positions came."""
    got: set[tuple[int, int]] = set()
    with (
        tarry.Client(address, timeout_s=traffic.PATIENCE_S) as client,
        client.subscribe(topic, "subscription") as subscription,
    ):
        while len(got) < rows:
            received = subscription.receive(timeout_s=600)
            assert received is not None, f"only {len(got)} of {rows} rows came"
            got |= set(zip(received.ledger_id.tolist(), received.entry_id.tolist(), strict=True))
            subscription.ack(received).result(600)
    return got


def test_a_second_daemon_stands_by_says_for_whom_and_claims_when_the_owners_process_has_ended(
    daemons: Daemons, tmp_path: Path
) -> None:
    settings = PATIENT | processes.local_store(tmp_path / "root")
    owner = daemons.make("owner", settings)
    standby = daemons.make("standby", settings)
    owner.start_serving()
    traffic.create_subscription(owner.address, "topic")
    added = batch(1)
    traffic.add(owner.address, "topic", added)

    standby.start()
    standby.wait_for_health(serving=False)
    standby.wait_for_log(f"waiting for daemon owner at {owner.address}")
    with pytest.raises(grpc.RpcError) as refused:
        traffic.add(standby.address, "topic", batch(2))
    assert traffic.code_of(refused.value) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    assert not standby.is_serving()
    assert owner.is_serving()
    status, told = health_of(standby.address)
    assert status == 4
    assert told.startswith(f"not serving, standing by: waiting for daemon owner at {owner.address} (")
    assert health_of(owner.address) == (0, "serving\n")
    with tarry.Client(standby.address, timeout_s=600) as client:
        assert [each.topic for each in client.topics()] == ["topic"], "what is of no topic goes to the owner, too"
        assert client.deletion_stats().in_flight == 0
        assert [step.done for step in client.collect_garbage(dry_run=True)][-1]

    owner.kill()
    # No heartbeat is missed for minutes: it is the lock of the ended process that lets it claim.
    standby.wait_for_health(serving=True)
    assert receive_rows(standby.address, "topic", 10) == set(added.positions)


def test_a_daemon_that_starts_again_under_its_own_id_serves_without_waiting(daemons: Daemons, tmp_path: Path) -> None:
    owner = daemons.make("owner", PATIENT | processes.local_store(tmp_path / "root"))
    owner.start_serving()
    traffic.create_subscription(owner.address, "topic")
    added = batch(1)
    traffic.add(owner.address, "topic", added)
    epoch = traffic.stats(owner.address, "topic").epoch

    owner.kill()
    owner.start_serving()

    assert traffic.stats(owner.address, "topic").epoch > epoch
    assert receive_rows(owner.address, "topic", 10) == set(added.positions)


def test_on_s3_the_same_id_serves_at_once_and_another_one_when_the_heartbeat_is_missed(
    daemons: Daemons, tmp_path: Path
) -> None:
    with processes.S3ServerProcess("s3", tmp_path) as server:
        server.start()
        owner = daemons.make("owner", PATIENT | server.settings())
        owner.start_serving()
        traffic.create_subscription(owner.address, "topic")
        added = [batch(1), batch(2)]
        traffic.add(owner.address, "topic", added[0])

        owner.kill()
        owner.start_serving()
        traffic.add(owner.address, "topic", added[1])

        owner.kill()
        other = daemons.make("other", IMPATIENT | server.settings())
        other.start_serving()
        expected = {position for each in added for position in each.positions}
        assert receive_rows(other.address, "topic", 20) == expected


def test_a_paused_owner_that_was_superseded_is_fenced_and_answers_nothing_as_durable(
    daemons: Daemons, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    store = processes.local_store(tmp_path / "root") | {"store.log_form": "objects"}
    owner = daemons.make("owner", PATIENT | store)
    standby = daemons.make("standby", IMPATIENT | store)
    owner.start_serving()
    history = DeliveryHistory()
    for topic in ("topic", "followed"):
        traffic.create_subscription(owner.address, topic)
    client = tarry.Client(owner.address, timeout_s=traffic.PATIENCE_S)
    request.addfinalizer(client.close)
    client_subscription = client.subscribe("followed", "subscription")

    def due(rng: random.Random, base_ms: int) -> int:
        return base_ms + rng.randint(0, 20_000)

    pace: dict[str, Any] = {"due": due, "rows_max": 10, "pause_s": 0.1, "timeout_s": traffic.PATIENCE_S}
    sender = traffic.Sender(owner.address, "topic", history, rng=random.Random(1), **pace)
    receiver = traffic.Receiver(owner.address, "topic", history, rng=random.Random(2), reopen=False)
    for caller in (sender, receiver):
        caller.__enter__()
        request.addfinalizer(caller.stop)
    history.wait_for(lambda: history.received_rows > 200, 600, "the owner hands out under load")

    owner.stop()
    stopped_ms = traffic.now_ms()
    standby.start_serving()
    new_sender = traffic.Sender(standby.address, "topic", history, rng=random.Random(3), ledgers_from=1_000_000, **pace)
    new_receiver = traffic.Receiver(standby.address, "topic", history, rng=random.Random(4))
    for caller in (new_sender, new_receiver):
        caller.__enter__()
        request.addfinalizer(caller.stop)
    # Past this, the old owner may not even hand out what it holds in memory.
    away_ms = HAND_OUT_WITHOUT_CONFIRMATION_MS + 1_000
    history.wait_for(
        lambda: any(due_ms > stopped_ms + away_ms for _, due_ms in new_receiver.received),
        traffic.PATIENCE_S,
        "the new owner hands out what came due long after the old one stopped",
    )
    answered_before = len(sender.answered_begun_at_s)
    received_before = len(receiver.received)

    owner.resume()
    assert receiver.ended.wait(600), "the stream of the old owner goes on"
    assert receiver.endings == [grpc.StatusCode.FAILED_PRECONDITION]
    assert receiver.moved_to == [standby.address]
    assert [row for row in receiver.received[received_before:] if row[1] > stopped_ms] == []
    _assert_refused_with_the_new_owner(owner, standby)
    history.wait_for(lambda: bool(sender.refusals), 600, "the add that the pause caught is answered")
    # What the pause caught may have become durable just before it; nothing after.
    assert len(sender.answered_begun_at_s) <= answered_before + 1
    assert not owner.is_serving()

    _assert_the_client_library_follows(client, client_subscription)
    sender.stop()
    new_sender.finish()
    new_receiver.finish()
    history.wait_for(lambda: history.missing == 0, 600, "every answered row comes")
    traffic.wait_until_nothing_is_left(standby.address, "topic")
    assert history.breaches() == []


def test_where_logs_are_files_a_standby_waits_for_a_paused_owner_names_its_process_and_claims_when_that_has_ended(
    daemons: Daemons, tmp_path: Path
) -> None:
    store = processes.local_store(tmp_path / "root") | {"store.log_form": "files"}
    owner = daemons.make("owner", PATIENT | store)
    standby = daemons.make("standby", IMPATIENT | store)
    owner.start_serving()
    traffic.create_subscription(owner.address, "topic")
    added = batch(1)
    traffic.add(owner.address, "topic", added)

    owner.stop()
    standby.start()
    standby.wait_for_log(f"waiting for process {owner.pid} since ")
    assert not standby.is_serving()
    with pytest.raises(grpc.RpcError, match=f"process {owner.pid} ") as refused:
        traffic.add(standby.address, "topic", batch(2))
    assert traffic.code_of(refused.value) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)

    owner.kill()
    standby.wait_for_health(serving=True)
    assert receive_rows(standby.address, "topic", 10) == set(added.positions)


def _assert_refused_with_the_new_owner(owner: processes.DaemonProcess, new_owner: processes.DaemonProcess) -> None:
    """It may say UNAVAILABLE, or UNKNOWN of what it has staged, until it has looked who serves now; it never takes the
    rows.
    """
    looking = threading.Event()
    deadline_s = time.monotonic() + traffic.PATIENCE_S
    while time.monotonic() < deadline_s:
        with pytest.raises(grpc.RpcError) as refused:
            traffic.add(owner.address, "topic", batch(9_000_000))
        if traffic.code_of(refused.value) is grpc.StatusCode.FAILED_PRECONDITION:
            assert isinstance(refused.value, grpc.Call)
            assert ("owner-address", new_owner.address) in [tuple(each) for each in refused.value.trailing_metadata()]
            return
        assert traffic.code_of(refused.value) in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN)
        looking.wait(0.1)
    raise AssertionError("the old owner never said who owns the topic now")


def _assert_the_client_library_follows(client: tarry.Client, subscription: tarry.Subscription) -> None:
    """It was told the address of the old owner only."""
    added = batch(1)
    ledger_id, entry_id = zip(*added.positions, strict=True)
    client.add("followed", ledger_id, entry_id, deliver_at_ms=list(added.deliver_at_ms))
    received = subscription.receive(timeout_s=600)
    assert received is not None
    assert set(received.entry_id.tolist()) <= set(entry_id)
    subscription.ack(received).result(600)
