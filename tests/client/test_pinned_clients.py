"""Client libraries of before, as they were, on the daemon of today."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples import processes
from tests._support.processes import Daemons, run_child

PINNED = sorted((Path(__file__).parent / "pinned").glob("*.zip"))

# What a dispatcher does that holds a stream, and one that leases.
PROGRAM = """
import json, sys, time
import tarry

told = {"library": tarry.__file__}
with tarry.Client(sys.argv[1], timeout_s=300) as client:
    client.create_subscription("t", "s", tarry.SubscriptionPolicy(nack_precision_bits=0))
    client.add("t", 1, range(10), deliver_at_ms=time.time_ns() // 1_000_000)
    counts = []
    with client.subscribe("t", "s") as stream:
        while len(counts) < 12:
            batch = stream.receive(300)
            counts += batch.redelivery_count.tolist()
            failing = (batch.redelivery_count == 0) & (batch.entry_id < 2)
            if failing.any():
                told["nacked"] = stream.nack(batch.take(failing), delay_ms=50).result().ignored
            told["acknowledged"] = stream.ack(batch.take(~failing)).result()
    told["counts"] = sorted(counts)
    client.add("t", 2, range(4), deliver_at_ms=time.time_ns() // 1_000_000)
    leased = client.get("t", "s", wait_ms=60_000)
    told["extended"] = client.extend_lease("t", "s", leased, 60_000)
    told["leases"] = client.ack("t", "s", leased), client.ack("t", "s", leased)
    told["never added"] = client.nack("t", "s", (9, range(3), 0), delay_ms=0).ignored
    told["ends any hand-out"] = client.ack("t", "s", (9, range(3), 0))
    (stats,) = client.stats("t").subscriptions
    told["left"] = stats.backlog
print(json.dumps(told))
"""


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    made = Daemons(tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("archive", PINNED, ids=lambda path: path.stem)
def test_it_receives_hands_back_and_acknowledges_as_it_did(daemons: Daemons, tmp_path: Path, archive: Path) -> None:
    daemon = daemons.make("tarryd", processes.local_store(tmp_path / "root"))
    daemon.start_serving()
    environment = {**os.environ, "PYTHONPATH": str(archive)}
    ended = run_child([sys.executable, "-c", PROGRAM, daemon.address], env=environment, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    assert told.pop("library").startswith(str(archive))
    assert told == {
        "nacked": 0,
        "acknowledged": 0,
        "counts": [0] * 10 + [1] * 2,
        "extended": 0,
        "leases": [0, 4],
        "never added": 0,
        "ends any hand-out": 0,
        "left": 0,
    }


def test_there_is_one() -> None:
    assert PINNED
