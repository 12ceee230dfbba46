"""A forwarder, as a process of its own that may be killed at any time: it receives what is due, passes it on to a file,
and acknowledges it a moment later.

Each line of the file is one write: a delivery id, when it was received, and what became of it. A kill leaves what was
written.

    python -m tests.wire._support.forwarder <address> <topic> <subscription> <file>
"""

from __future__ import annotations

import os
import sys
import time

import tarry

PASSED_ON, ACKNOWLEDGED = "passed-on", "acknowledged"
# Consumers have so long before the forwarder acknowledges.
BEHIND_S = 0.05


def main(address: str, topic: str, subscription: str, path: str) -> None:
    output = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with tarry.Client(address) as client, client.subscribe(topic, subscription, permits=500) as stream:
        for batch in stream:
            named = [batch.delivery_id(row) for row in range(len(batch))]
            _write(output, [f"{PASSED_ON} {batch.received_at_ms} {each}" for each in named])
            time.sleep(BEHIND_S)
            stream.ack(batch).result()
            _write(output, [f"{ACKNOWLEDGED} {time.time_ns() // 1_000_000} {each}" for each in named])


def _write(output: int, lines: list[str]) -> None:
    os.write(output, "".join(f"{line}\n" for line in lines).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
