"""What is said of a store that does not take what is tried again and again."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daemon.runtime.environment import SAY_AGAIN_S, Outages
from storage_backends.formats.log_slot_format import ShardSlot
from tests._support.engine_fixture import EngineFixture

SETTINGS = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20", "journal.checkpoint_slots=5")
OUTAGE_S = 600


def test_one_line_of_a_kind_of_work_says_how_many_others_failed(caplog: pytest.LogCaptureFixture) -> None:
    outages, error = Outages(), OSError("away")
    for second in range(40):
        outages.tell("seals cannot be written", f"topic {second}", error, now_s=float(second))
    outages.tell("manifests cannot be read", "topic a", error, now_s=40.0)
    assert caplog.messages == [
        "seals cannot be written, trying again: topic 0: away",
        "seals cannot be written, trying again: topic 30: away; 29 failures since this was said last",
        "manifests cannot be read, trying again: topic a: away",
    ]


async def test_seals_that_wait_for_the_store_say_so_now_and_then(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    one = await machines.served_by("one", *SETTINGS)
    for topic in range(10):
        await one.add(f"t{topic}", 1, range(15), delay_ms=OUTAGE_S * 2_000)
    one.store.go_down()
    with caplog.at_level(logging.INFO):
        for topic in range(10):
            one.engine.shard_of(f"t{topic}").topics[f"t{topic}"].buckets.seal(ShardSlot(1))
        await asyncio.sleep(OUTAGE_S)
    waiting = [line for line in caplog.messages if "trying again" in line]
    assert any("seals cannot be written" in line for line in waiting)
    assert len(waiting) < 3 * OUTAGE_S / SAY_AGAIN_S
