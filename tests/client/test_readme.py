"""The examples of the client's README run as they stand, against a real daemon."""

from __future__ import annotations

import contextlib
import inspect
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

import tarry
import tarry.aio
from examples import processes
from tests._support import snippets
from tests._support.processes import Daemons
from tests.client._support.authority import Authority, replaced
from tests.client._support.fake_daemon import FakeDaemon, accept, refuse

README = Path(__file__).resolve().parents[2] / "client" / "README.md"
EXAMPLES = snippets.of(README)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[processes.DaemonProcess]:
    directory = tmp_path_factory.mktemp("daemon")
    daemons = Daemons(directory)
    try:
        made = daemons.make("tarryd", processes.local_store(directory / "root"))
        made.start_serving()
        yield made
    finally:
        daemons.end()


@pytest.fixture
def guarded_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """One with TLS, and in the working directory the files that its clients need."""
    authority = Authority()
    issued = authority.issue("gate")
    for name, content in {
        "ca.pem": authority.certificate,
        "cert.pem": issued.chain,
        "key.pem": issued.key,
        "token": b"5ecret",
    }.items():
        replaced(tmp_path / name, content)
    monkeypatch.chdir(tmp_path)
    serving = FakeDaemon(credentials=authority.of_daemon())
    serving.script("AddMessages", accept)
    serving.script("DeleteTopic", refuse(grpc.StatusCode.PERMISSION_DENIED, "this needs the scope admin"))
    yield serving
    serving.stop()


@pytest.fixture
def one_batch_a_subscription(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples receive as long as they run: here a subscription ends after its first batch."""
    received: set[int] = set()

    def is_second(subscription: object) -> bool:
        if id(subscription) in received:
            return True
        received.add(id(subscription))
        return False

    threads, loop = tarry.Subscription.receive, tarry.aio.Subscription.receive

    def receive(self: tarry.Subscription, timeout_s: float | None = None, **named: int) -> tarry.Batch | None:
        return None if is_second(self) else threads(self, timeout_s, **named)

    async def receive_on_loop(
        self: tarry.aio.Subscription, timeout_s: float | None = None, **named: int
    ) -> tarry.Batch | None:
        return None if is_second(self) else await loop(self, timeout_s, **named)

    monkeypatch.setattr(tarry.Subscription, "receive", receive)
    monkeypatch.setattr(tarry.aio.Subscription, "receive", receive_on_loop)


@pytest.mark.usefixtures("one_batch_a_subscription")
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[str(number + 1) for number in range(len(EXAMPLES))])
def test_it_runs(
    daemon: processes.DaemonProcess, guarded_daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    example = EXAMPLES[number].code.replace("127.0.0.1:7461", daemon.address)
    example = example.replace("tarry.example:7461", guarded_daemon.address)
    for client in (tarry.Client, tarry.aio.Client):
        # The target is the one argument that may be given by place.
        monkeypatch.setattr(client.__init__, "__defaults__", (daemon.address,))
    with tarry.Client(daemon.address) as client_before:
        # What another example left there would come first.
        with contextlib.suppress(tarry.NotFound):
            client_before.delete_topic("flights")
        client_before.create_subscription("flights", "departures")
        client_before.add("flights", 2_000, range(10), deliver_at_ms=time.time_ns() // 1_000_000)
    exec(compile(example, f"example {number + 1} of {README.name}", "exec"), {"__name__": "example"})


def test_the_calls_that_are_iterators_on_an_event_loop_are_named() -> None:
    methods = inspect.getmembers(tarry.aio.Client, inspect.isfunction)
    iterators = {name for name, each in methods if str(each.__annotations__.get("return")).startswith("AsyncIterator")}
    item = r"^- ((?:(?!^- ).)*) are asynchronous iterators"
    (listed,) = re.findall(item, README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([a-z_]+)`", listed)) == iterators
