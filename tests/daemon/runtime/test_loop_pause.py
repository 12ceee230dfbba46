"""The heartbeat of the event loop, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from daemon.runtime import loop_pause
from tests._support.virtual_loop import VirtualLoop


async def test_a_pause_is_told_from_the_beat_that_it_delayed() -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    told: asyncio.Queue[float] = asyncio.Queue()
    watching = asyncio.create_task(loop_pause.watch(told.put_nowait))
    assert await told.get() == pytest.approx(0.0, abs=1e-6)
    loop.call_later(loop_pause.INTERVAL_S / 2, loop.pass_time, 0.05)
    assert await told.get() == pytest.approx(0.05 - loop_pause.INTERVAL_S / 2, abs=1e-6)
    assert await told.get() == pytest.approx(0.0, abs=1e-6)
    watching.cancel()
