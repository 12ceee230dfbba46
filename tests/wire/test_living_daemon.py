"""A client of two daemons on one root, of which the owner is killed or stopped: it goes on at the one that serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tarry
from examples import processes
from tests._support.name_server import name_server
from tests._support.processes import Daemons
from tests.client._support.authority import Authority, replaced

# The machine may be busy.
PATIENCE_S = 600.0
# A standby takes over after a few of these.
SETTINGS: dict[str, object] = {"daemon.shards": 2, "ownership.heartbeat_interval_s": 0.5}
TOPIC, SUBSCRIPTION = "flights", "departures"
# How the owner ends. Logs as files are not taken over while their process lives.
FAULTS = {
    "SIGKILL": ("files", processes.DaemonProcess.kill),
    "SIGSTOP": ("objects", processes.DaemonProcess.stop),
}

Pair = tuple[processes.DaemonProcess, processes.DaemonProcess]


@pytest.fixture(params=FAULTS)
def fault(request: pytest.FixtureRequest) -> tuple[str, Callable[[processes.DaemonProcess], None]]:
    return FAULTS[request.param]


def started(daemons: Daemons, root: Path, log_form: str) -> Pair:
    """The owner, and a standby that waits for it."""
    settings = SETTINGS | processes.local_store(root) | {"store.log_form": log_form}
    owner, standby = (daemons.make(name, settings) for name in ("owner", "standby"))
    return start(owner, standby)


def start(owner: processes.DaemonProcess, standby: processes.DaemonProcess) -> Pair:
    owner.start_serving()
    standby.start()
    standby.wait_for_log("waiting for daemon owner")
    return owner, standby


def check_goes_on(client: tarry.Client, owner: processes.DaemonProcess, end: Callable[[Any], None]) -> None:
    """What was added before and after the end of the owner comes, on one subscription, and is acknowledged."""
    with client.subscribe(TOPIC, SUBSCRIPTION, create=True) as subscription:
        for entry in range(2):
            assert client.add(TOPIC, 1, entry, delay_ms=0).accepted == 1
            while (batch := subscription.receive()) is not None and entry not in batch.entry_id:
                subscription.ack(batch)
            assert batch is not None
            subscription.ack(batch).result(PATIENCE_S)
            if entry == 0:
                end(owner)
        assert subscription.streams_opened > 1
    assert [each.topic for each in client.topics()] == [TOPIC]


@pytest.mark.parametrize("first", ["the owner", "the standby"])
def test_it_goes_on_at_the_standby_whichever_address_was_given_first(
    first: str, fault: tuple[str, Callable[[Any], None]], daemons: Daemons, tmp_path: Path
) -> None:
    log_form, end = fault
    owner, standby = started(daemons, tmp_path / "root", log_form)
    addresses = [owner.address, standby.address]
    if first == "the standby":
        addresses.reverse()
    with tarry.Client(",".join(addresses), timeout_s=PATIENCE_S) as client:
        check_goes_on(client, owner, end)


def test_a_client_of_the_standby_alone_returns_to_it_from_the_owner_that_it_named(
    fault: tuple[str, Callable[[Any], None]], daemons: Daemons, tmp_path: Path
) -> None:
    log_form, end = fault
    owner, standby = started(daemons, tmp_path / "root", log_form)
    with tarry.Client(standby.address, timeout_s=PATIENCE_S) as client:
        check_goes_on(client, owner, end)


@pytest.mark.parametrize("with_tls", [False, True], ids=["plain", "TLS"])
def test_it_goes_on_where_a_name_has_the_addresses_of_both(
    with_tls: bool, fault: tuple[str, Callable[[Any], None]], daemons: Daemons, tmp_path: Path
) -> None:
    log_form, end = fault
    hosts, port = ("127.0.0.1", "127.0.0.2"), processes.free_port()
    settings = SETTINGS | processes.local_store(tmp_path / "root") | {"store.log_form": log_form}
    tls = None
    if with_tls:
        authority = Authority()
        issued = authority.issue(*hosts, "tarry.test")
        tls = tarry.Tls(replaced(tmp_path / "ca.pem", authority.certificate))
        settings |= {
            "tls.cert_file": replaced(tmp_path / "tls.crt", issued.chain),
            "tls.key_file": replaced(tmp_path / "tls.key", issued.key),
        }
    pair = []
    for name, host in zip(("owner", "standby"), hosts, strict=True):
        made = daemons.make(name, settings | {"grpc.listen": f"{host}:{port}"}, tls=tls)
        made.address = f"{host}:{port}"
        pair.append(made)
    owner, _ = start(*pair)
    with (
        name_server(hosts) as server,
        tarry.Client(f"dns://{server}/tarry.test:{port}", timeout_s=PATIENCE_S, tls=tls) as client,
    ):
        check_goes_on(client, owner, end)
