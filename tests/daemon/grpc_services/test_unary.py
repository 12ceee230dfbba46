"""Calls with one request whose caller goes away."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any, cast

import pytest

from daemon import errors
from daemon.grpc_services import unary


class _Counted:
    """A call whose request counts until it is decided."""

    def __init__(self) -> None:
        self.until: asyncio.Future[Any] | None = None

    def count_until(self, work: asyncio.Future[Any]) -> None:
        self.until = work


async def test_a_request_whose_caller_has_left_counts_until_its_work_ends() -> None:
    ends = asyncio.Event()
    counted = _Counted()
    handled = asyncio.ensure_future(unary.unbroken(ends.wait(), cast(Any, counted)))
    await asyncio.sleep(0)
    handled.cancel()
    await asyncio.wait([handled])
    assert counted.until is not None
    assert not counted.until.done()
    ends.set()
    await counted.until


@pytest.mark.parametrize(
    ("error", "level"),
    [(errors.Unavailable("the store is away"), logging.INFO), (ValueError("a bug"), logging.ERROR)],
)
async def test_what_becomes_of_a_call_that_its_caller_gave_up_is_told_once(
    error: Exception, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    away = asyncio.Event()

    async def call() -> bytes:
        await away.wait()
        raise error

    with caplog.at_level(logging.INFO):
        handled = asyncio.ensure_future(unary.unbroken(call(), cast(Any, _Counted())))
        await asyncio.sleep(0)
        handled.cancel()
        await asyncio.wait([handled])
        away.set()
        await asyncio.sleep(0.01)
        gc.collect()
    assert [(record.levelno, str(error) in record.getMessage()) for record in caplog.records] == [(level, True)]
