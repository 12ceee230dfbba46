"""The dispatcher of keys loses no message and no order, also when the daemon is killed under it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import tarry
from examples import key_dispatcher, processes
from tests._support.processes import Daemons


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[processes.DaemonProcess]:
    daemons = Daemons(tmp_path)
    try:
        made = daemons.make("tarryd", {"daemon.shards": 1, **processes.local_store(tmp_path / "root")})
        made.start_serving()
        yield made
    finally:
        daemons.end()


@pytest.mark.parametrize("kills", [0, 2])
def test_messages_of_a_key_are_delivered_in_order_whatever_is_killed(
    daemon: processes.DaemonProcess, kills: int
) -> None:
    """By key: what is not delayed in the order of the log, what is by its delay, the same for all."""
    dice = random.Random(kills)
    log = [key_dispatcher.Message(f"key-{dice.randrange(30)}", delay_ms=dice.choice((0, 0, 300))) for _ in range(1_500)]
    kill_at = {500, 1_000} if kills else set()
    first: dict[tuple[str, bool], list[int]] = {}
    seen: set[int] = set()

    def deliver(consumer: tarry.Consumer, entry: int, message: key_dispatcher.Message) -> None:
        if entry not in seen:
            seen.add(entry)
            first.setdefault((message.key, bool(message.delay_ms)), []).append(entry)
        if len(seen) in kill_at:
            kill_at.discard(len(seen))
            daemon.kill()
            daemon.start_serving()

    with tarry.Client(daemon.address) as client:
        consumers = [tarry.Consumer(name, permits=40) for name in "abc"]
        with client.subscribe_key_shared("t", "s", consumers=consumers, create=True) as subscription:
            key_dispatcher.publish(client, "t", log)
            key_dispatcher.Dispatcher(subscription, log, deliver).run()
            assert subscription.streams_opened == 1 + kills
    assert seen == set(range(1_500))
    assert not kill_at
    assert all(entries == sorted(entries) for entries in first.values())


def test_it_runs_as_a_program(daemon: processes.DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
    key_dispatcher.main(["--address", daemon.address])
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines] == ["a", "b", "c"]
    assert sum(int(line.split()[1].replace(",", "")) for line in lines) >= 2_000
