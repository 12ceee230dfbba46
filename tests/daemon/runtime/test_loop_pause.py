"""The heartbeat of the event loop, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from daemon.runtime import clocks
from tests._support.virtual_loop import VirtualLoop


async def test_a_pause_is_told_from_the_beat_that_it_delayed() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    told: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(clocks.watch_pauses(told.put_nowait))
    assert await told.get() == pytest.approx(0.0, abs=1e-6)
    loop.call_later(clocks.BEAT_INTERVAL_S / 2, loop.pass_time, 0.05)
    assert await told.get() == pytest.approx(0.05 - clocks.BEAT_INTERVAL_S / 2, abs=1e-6)
    assert await told.get() == pytest.approx(0.0, abs=1e-6)
    watching.cancel()
