"""Messages of a real broker are cancelled and rescheduled by the positions that it answered with; each result is told,
and what was delivered is as the results say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests._support.patience import wait_until
from tests.relay.brokers._support.relay_process import RelayProcess
from tests.relay.brokers._support.two_brokers import DEAD, DUE, RESULTS, SOURCE, AnyBroker, Published
from tests.relay.brokers.test_kills import LIMIT_S, processes

HOUR_MS = 3_600_000
TOLD = f'results = "{RESULTS}"'


async def published(broker: AnyBroker, messages: Sequence[tuple[Mapping[str, str], str]]) -> list[str]:
    """What the broker calls their positions."""
    found: list[str] = []
    for first in range(0, len(messages), 1_000):
        found += await broker.publish(SOURCE, messages[first : first + 1_000])
    return found


async def arrived(broker: AnyBroker, stream: str, rows: int) -> list[Published]:
    """What stands in a stream, as soon as it is so much."""
    found: list[Published] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < rows:
            found += await broker.read(stream, len(found))
            await asyncio.sleep(0.01)
    return found


async def nothing_waits(relay: RelayProcess) -> None:
    def is_idle() -> bool:
        told = relay.told("status")
        return not any(told[name] for name in ("pending", "due", "in flight"))

    await asyncio.to_thread(wait_until, is_idle, "something is left in Tarry", timeout_s=LIMIT_S)


async def story(broker: AnyBroker, directory: Path, *, rows: int) -> None:
    """So many are cancelled, so many rescheduled, and some are withdrawn in every other way."""
    with processes(broker, directory, TOLD) as (_, relay, _):
        few = min(rows, 20)
        now_ms = time.time_ns() // 1_000_000
        far = {"deliver-at": str(now_ms + HOUR_MS)}
        cancelled = await published(broker, [(far, f"cancelled {row}") for row in range(rows)])
        moved = await published(broker, [(far, f"moved {row}") for row in range(rows)])
        both = await published(broker, [(far, f"both {row}") for row in range(few)])
        direct = await published(broker, [({}, f"direct {row}") for row in range(few)])
        due_ms = time.time_ns() // 1_000_000 + 2_000

        def asking(
            header: str, positions: Sequence[str], what: str, **more: str
        ) -> list[tuple[Mapping[str, str], str]]:
            rest = {name.replace("_", "-"): text for name, text in more.items()}
            return [
                ({header: position, "correlation-id": f"{what} {row}", **rest}, "")
                for row, position in enumerate(positions)
            ]

        cancels = asking("cancel-of", cancelled, "CANCELLED")
        # What names one position stands in the first portion: a portion lies in one partition of Kafka, which alone has
        # an order.
        asked = [
            *cancels[:few],
            *asking("cancel-of", cancelled[:few], "NOT_FOUND again"),
            *asking("reschedule-of", both, "RESCHEDULED both", deliver_at=str(now_ms + 2 * HOUR_MS)),
            *asking("cancel-of", both, "CANCELLED both"),
            *asking("cancel-of", direct, "NOT_FOUND direct"),
            *cancels[few:],
            *asking("reschedule-of", moved, "RESCHEDULED", deliver_at=str(due_ms)),
        ]
        await published(broker, asked)
        await published(broker, asking("cancel-of", ["none", "-1"], "bad"))
        results = await arrived(broker, RESULTS, len(asked))
        told = {each.headers["correlation-id"]: each.headers["tarry-result"] for each in results}
        assert {name: f"{result} {name}" for name, result in told.items() if not name.startswith(result)} == {}
        assert len(results) == len(told) == len(asked)
        stored_ms = [int(each.headers["tarry-deliver-at"]) for each in results if "tarry-deliver-at" in each.headers]
        assert len(stored_ms) == rows + few
        assert min(stored_ms) >= due_ms
        # On a busy machine a broker may take a relay for gone and give what it has read a second time.
        unsure = {each.headers["tarry-result"] for each in results if "tarry-may-have-landed" in each.headers}
        assert unsure <= {"NOT_FOUND"}
        record = await arrived(broker, DUE, rows + few)
        await nothing_waits(relay)
        record += await broker.read(DUE, len(record))
        expected = {f"moved {row}" for row in range(rows)} | {f"direct {row}" for row in range(few)}
        assert sorted(each.body for each in record) == sorted(expected)
        assert [each for each in record if each.body.startswith("moved") and each.at_ms < due_ms] == []
        dead = await arrived(broker, DEAD, 2)
        assert [each.headers["correlation-id"] for each in dead] == ["bad 0", "bad 1"]
        assert relay.metric("tarry_relay_withdrawals_total") >= len(asked)
        assert relay.terminate() == 0


async def test_each_cancel_and_reschedule_has_its_exact_result(broker: AnyBroker, tmp_path: Path) -> None:
    await story(broker, tmp_path, rows=100)


@pytest.mark.long
async def test_a_thousand_cancels_and_a_thousand_reschedules_have_their_exact_results(
    broker: AnyBroker, tmp_path: Path
) -> None:
    await story(broker, tmp_path, rows=1_000)


async def test_what_is_cancelled_never_comes_through_kills_and_no_result_is_missing(
    broker: AnyBroker, tmp_path: Path
) -> None:
    """Of a withdrawal whose result was known and not told when its relay ended it is said that it may have landed."""
    rows = 400
    with processes(broker, tmp_path, TOLD) as (daemon, one, two):
        far = {"deliver-at": str(time.time_ns() // 1_000_000 + HOUR_MS)}
        positions = await published(broker, [(far, str(row)) for row in range(rows)])
        asked = [({"cancel-of": each, "correlation-id": str(row)}, "") for row, each in enumerate(positions)]
        await published(broker, asked)
        await arrived(broker, RESULTS, rows // 10)
        one.kill()
        two.start()
        await arrived(broker, RESULTS, rows // 4)
        daemon.kill()
        daemon.start_serving()
        results = await arrived(broker, RESULTS, rows)
        async with asyncio.timeout(LIMIT_S):
            while len(told := {int(each.headers["correlation-id"]) for each in results}) < rows:
                await asyncio.sleep(0.1)
                results = await broker.read(RESULTS)
        assert told == set(range(rows))
        # Kafka drops nothing by its id.
        assert broker.kind == "kafka" or len(results) == rows
        unsure = [each for each in results if each.headers["tarry-result"] != "CANCELLED"]
        allowed = {("NOT_FOUND", "true")}
        assert {(each.headers["tarry-result"], each.headers.get("tarry-may-have-landed")) for each in unsure} <= allowed
        await nothing_waits(two)
        assert await broker.read(DUE) == []
        assert two.terminate() == 0
