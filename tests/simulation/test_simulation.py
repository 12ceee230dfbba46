"""Some seeds, every run; and a seed is a run: the same one each time, in every process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import AsyncGenerator

import pytest

from tests._support.engine_fixture import EngineFixture
from tests.simulation.faults import ALL_PLACES, Trouble
from tests.simulation.fired import Fired, at, confirmed_by, missing
from tests.simulation.run import Directed, run
from tests.simulation.scheduler import CONFIRMS

SEEDS = 32
AT_ONCE = 2
LONG_SEEDS = 2_000
TWICE = (2, 5, 11, 17)
# Runs in which much happens: owners of ledgers, merges, seals.
MANIFOLD = (17, 19)


def check(seeds: range) -> None:
    for seed in seeds:
        result = run(seed)
        assert not result.breaches, "\n".join((f"seed {seed}", *result.breaches, *result.lines[-40:]))
        assert not result.unmet, f"seed {seed}"


@pytest.mark.rotating
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_no_rule_is_broken_whatever_the_order_of_steps_and_whatever_fails(first: int) -> None:
    check(range(first, first + AT_ONCE))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_no_rule_is_broken_in_many_more_runs() -> None:
    check(range(100_000, 100_000 + LONG_SEEDS))


@pytest.mark.rotating
@pytest.mark.parametrize("seed", TWICE)
def test_a_seed_that_is_run_again_leaves_the_same_trace(seed: int) -> None:
    assert run(seed).digest == run(seed).digest


def test_a_seed_leaves_the_same_trace_in_processes_whose_hashes_differ() -> None:
    program = f"from tests.simulation.run import run; print([run(seed).digest for seed in {TWICE[:1]}])"
    traces = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(traces) == 1


def test_some_runs_meet_every_place_where_something_may_go_wrong() -> None:
    met = Fired()
    for seed in MANIFOLD:
        met += run(seed).fired
    assert not missing(met, map(at, ALL_PLACES))
    assert not missing(met, map(confirmed_by, CONFIRMS))


def test_a_run_that_does_not_meet_the_place_of_its_trouble_says_so() -> None:
    elsewhere = Trouble("kill", "put_if_absent", "/nowhere/", 3, True, 1.0)
    assert run(0, directed=Directed((elsewhere,), chaos_s=5.0)).unmet == (at(elsewhere.place),)


def test_another_seed_is_another_run() -> None:
    assert run(TWICE[0]).digest != run(TWICE[1]).digest


async def test_nothing_of_a_killed_daemon_runs_though_its_tasks_do_not_end(machines: EngineFixture) -> None:
    loop = asyncio.get_running_loop()
    after_the_end: list[str] = []
    unexpected: list[str] = []
    loop.set_exception_handler(lambda _, context: unexpected.append(context["message"]))

    async def values() -> AsyncGenerator[int]:
        try:
            yield 1
            with contextlib.suppress(asyncio.CancelledError):
                await loop.create_future()
            await loop.create_future()
        finally:
            after_the_end.append("what waits for a value")

    async def all_values() -> None:
        async for _ in values():
            pass

    async def one_value() -> None:
        async for _ in values():
            with contextlib.suppress(asyncio.CancelledError):
                await loop.create_future()
            await loop.create_future()

    one = machines.daemon("one")
    calls = [one.call(work()) for work in (all_values, one_value)]
    await asyncio.sleep(1)
    one.kill()
    await asyncio.sleep(1)
    del calls
    gc.collect()
    await asyncio.sleep(1)
    await loop.shutdown_asyncgens()
    assert (after_the_end, unexpected) == ([], [])
