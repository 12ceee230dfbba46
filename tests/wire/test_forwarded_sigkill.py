"""The shape of every relay: a forwarder acknowledges what it has passed on, and consumers fail behind it, mostly before
that acknowledgement. Real processes, killed; an output that remembers names of hand-outs for ever is the oracle.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tarry
from examples import processes
from tests._support.patience import wait_until
from tests._support.processes import Daemons, child
from tests.wire._support.forwarder import ACKNOWLEDGED, PASSED_ON
from tests.wire._support.listening import PATIENCE_S

TOPIC, SUBSCRIPTION = "flights", "departures"
LEDGER = 7
# Every so many fail once, and every so many of these twice.
FAILS_EVERY, TWICE_EVERY = 50, 4
SPREAD_MS = 6_000


class Output:
    """What came through the forwarder, each name once, and the consumers of it: some of them fail and say so at once.

    `nacks_before_acks`: negative acknowledgements that were answered before the acknowledgement was sent.
    """

    def __init__(self, path: Path, client: tarry.Client, due_ms: dict[int, int]) -> None:
        self._path = path
        self._client = client
        self._due_ms = due_ms
        self._read = 0
        self._acknowledged: set[str] = set()
        self.counts: dict[int, list[int]] = collections.defaultdict(list)
        self.names: set[str] = set()
        self.early: list[str] = []
        self.nacks_before_acks = 0
        self.ignored: list[str] = []

    def failures_of(self, entry_id: int) -> int:
        if entry_id % FAILS_EVERY:
            return 0
        return 2 if entry_id % (FAILS_EVERY * TWICE_EVERY) == 0 else 1

    @property
    def is_complete(self) -> bool:
        return all(len(self.counts[entry_id]) == self.failures_of(entry_id) + 1 for entry_id in self._due_ms)

    def has(self, names: int) -> bool:
        return len(self.names) >= names

    def consume(self) -> None:
        """Takes what has come since."""
        for line in self._lines():
            kind, at_ms, name = line.split(" ")
            if kind == ACKNOWLEDGED:
                self._acknowledged.add(name)
            elif kind == PASSED_ON and name not in self.names:
                self.names.add(name)
                self._deliver(tarry.DeliveryId.parse(name), int(at_ms))

    def _deliver(self, delivery: tarry.DeliveryId, at_ms: int) -> None:
        entry_id, count = delivery.entry_id, delivery.redelivery_count
        self.counts[entry_id].append(count)
        if at_ms < self._due_ms[entry_id]:
            self.early.append(str(delivery))
        if count < self.failures_of(entry_id):
            became = self._client.nack(
                TOPIC, SUBSCRIPTION, delivery.positions, delay_ms=200, forwarded=True, timeout_s=PATIENCE_S
            )
            self.ignored += [f"{delivery}: {reason}" for _, reason in became.ignored.items()]
            for line in self._lines(keep=True):
                if line.startswith(ACKNOWLEDGED):
                    self._acknowledged.add(line.split(" ")[2])
            self.nacks_before_acks += str(delivery) not in self._acknowledged

    def _lines(self, *, keep: bool = False) -> list[str]:
        """Whole lines that were not read yet; `keep`: they are read again."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as lines:
            lines.seek(self._read)
            whole, newline, _ = lines.read().rpartition(b"\n")
        if not keep:
            self._read += len(whole) + len(newline)
        return whole.decode().splitlines()


def consume_until(output: Output, done: Callable[[], bool]) -> None:
    def consumed() -> bool:
        output.consume()
        return done()

    wait_until(consumed, "not everything has come", timeout_s=PATIENCE_S)


@pytest.mark.parametrize("rows", [1_500, pytest.param(10_000, marks=pytest.mark.long)])
def test_what_fails_behind_a_forwarder_comes_again_by_its_next_name_whoever_is_killed(
    daemons: Daemons, tmp_path: Path, rows: int
) -> None:
    daemon = daemons.make("tarryd", processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    path = tmp_path / "output"
    forwarder = [sys.executable, "-m", "tests.wire._support.forwarder", daemon.address, TOPIC, SUBSCRIPTION, str(path)]
    with tarry.Client(daemon.address, timeout_s=PATIENCE_S) as client:
        client.create_subscription(TOPIC, SUBSCRIPTION, tarry.SubscriptionPolicy(nack_precision_bits=0))
        begin_ms = time.time_ns() // 1_000_000
        due_ms = {entry_id: begin_ms + entry_id * 7_919 % SPREAD_MS for entry_id in range(rows)}
        client.add(TOPIC, LEDGER, list(due_ms), deliver_at_ms=list(due_ms.values()))
        output = Output(path, client, due_ms)
        # Each part of what is to come meets a kill of the forwarder, or of the daemon.
        for part in range(1, 5):
            with child(forwarder):
                consume_until(output, functools.partial(output.has, part * rows // 5))
            if part % 2:
                daemon.kill()
                daemon.start_serving()
        with child(forwarder):
            consume_until(output, lambda: output.is_complete)
        assert output.early == []
        assert output.nacks_before_acks > 0
        # Of one name the forwarder may be told that it is not the latest; a consumer never is.
        assert output.ignored == []
        for entry_id in due_ms:
            assert output.counts[entry_id] == list(range(output.failures_of(entry_id) + 1)), entry_id
        with client.subscribe(TOPIC, SUBSCRIPTION) as rest:
            while (batch := rest.receive(1.0)) is not None:
                assert {batch.delivery_id(row) for row in range(len(batch))} <= output.names
                rest.ack(batch)
        (stats,) = client.stats(TOPIC).subscriptions
        assert (stats.backlog, stats.nacked) == (0, 0)
