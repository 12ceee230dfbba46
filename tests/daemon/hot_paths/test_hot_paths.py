"""No hot path of a daemon costs more than it did: in calls, tasks and requests to the store, which no clock changes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import pytest

from daemon.owner.requests import Requests
from tests._support.engine_fixture import EngineFixture
from tests.daemon.hot_paths._support import paths

MINOR = (3, 11)
pytestmark = pytest.mark.skipif(
    sys.version_info[:2] != MINOR, reason=f"the limits were counted with Python {MINOR[0]}.{MINOR[1]}"
)


@pytest.mark.parametrize("path", paths.PATHS)
async def test_a_hot_path_costs_no_more_than_its_limit(machines: EngineFixture, path: str) -> None:
    counts = await paths.counts_of(machines, path)
    assert counts.beyond(paths.LIMITS[path]) == {}, f"{path}: {counts}; CONTRIBUTING.md, Hot paths, says what to do"


async def test_one_more_task_for_each_request_is_beyond_the_limits(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    add: Any = Requests.add_at_once

    async def wait(answer: Any) -> Any:
        return await answer

    def slower(*arguments: Any) -> Any:
        answer = add(*arguments)
        return None if answer is None else asyncio.create_task(wait(answer))

    monkeypatch.setattr(Requests, "add_at_once", slower)
    counts = await paths.counts_of(machines, "batches_added")
    assert "tasks" in counts.beyond(paths.LIMITS["batches_added"])
