"""A target of a real broker that is away holds up no other, and has everything when it is there again."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from examples.processes import DaemonProcess, local_store
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DUE, RESULTS, SOURCE, AnyBroker, configuration
from tests.relay.brokers.test_kills import LIMIT_S

OTHER = RESULTS
FEW = "permits = 100\nrows = 50\n"


async def bodies(broker: AnyBroker, stream: str, rows: int) -> list[str]:
    """What stands in a stream, as soon as it is so much."""
    async with asyncio.timeout(LIMIT_S):
        while len(found := await broker.read(stream)) < rows:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return sorted(each.body for each in found)


@pytest.mark.long
async def test_a_target_that_is_away_holds_up_no_other_through_an_end_of_the_daemon(
    broker: AnyBroker, tmp_path: Path
) -> None:
    rows = 600
    with DaemonProcess("daemon", tmp_path, local_store(tmp_path / "root")) as daemon:
        daemon.start_serving()
        settings = configuration(broker, daemon.address)
        two_targets = settings.replace(f'{{ name = "{DUE}" }}', f'{{ name = "{DUE}" }}, {{ name = "{OTHER}" }}')
        with RelayProcess("relay", tmp_path, two_targets, FEW) as relay:
            relay.start()
            await asyncio.to_thread(relay.wait_for_log, '"message":"relays"')
            await broker.take_away(DUE)
            due_ms = time.time_ns() // 1_000_000
            await broker.publish(SOURCE, [({"deliver-at": str(due_ms)}, f"{row}") for row in range(rows)])
            later = {"deliver-at": str(due_ms + 1), "target": OTHER}
            await broker.publish(SOURCE, [(later, f"other {row}") for row in range(50)])
            assert len(await bodies(broker, OTHER, 50)) == 50
            daemon.kill()
            daemon.start_serving()
            await broker.publish(SOURCE, [({**later}, f"again {row}") for row in range(50)])
            assert len(await bodies(broker, OTHER, 100)) == 100
            await broker.bring_back(DUE)
            assert await bodies(broker, DUE, rows) == sorted(str(row) for row in range(rows))
            assert relay.terminate() == 0
