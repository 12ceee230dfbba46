"""A relay between a broker and a daemon that answer anything: it lives, it delivers, and it is healthy again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from tarry_relay import pacing, port, publishing, relay_settings, running, sessions
from tests.relay._support import odd_answers
from tests.relay._support.odd_answers import Mutation
from tests.relay._support.odd_world import AROUND, PASSAGE, Script

AT_ONCE = 20
LONG_RUNS = 200


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Rests that take no time, and nothing in the log: thousands of tracebacks."""
    for module, name, value in (
        (pacing, "REST_S", 0.01),
        (pacing, "REST_MAX_S", 0.02),
        (port, "_CANCEL_AGAIN_S", 0.05),
        (publishing, "_MESSAGE_REST_S", 0.001),
        (publishing, "_MESSAGE_REST_MAX_S", 0.01),
        (publishing, "_WATCH_S", 0.02),
        (publishing, "_WAIT_S", 0.02),
        (publishing, "_BACK_OFF_S", (0.005,)),
        (publishing, "TRIALS_S", 0.05),
        (publishing, "OVERDUE_S", 0.1),
        (running, "_WATCH_S", 0.05),
        (running, "_LAST_S", 0.2),
        (running, "_NOT_DUE_S", 0.005),
        (running, "_LOOK_S", (0.01,)),
        (sessions, "_BACK_OFF_S", (0.005,)),
    ):
        monkeypatch.setattr(module, name, value)
    caplog.set_level(logging.CRITICAL + 1, "tarry_relay")


async def run_all(mutations: Sequence[Mutation], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run relays, some at a time, each between the ends of its world."""
    worlds = {each.world.settings.relay.id: each.world for each in mutations}

    @contextlib.asynccontextmanager
    async def opened(settings: relay_settings.Settings) -> AsyncIterator[sessions.Ends]:
        async with worlds[settings.relay.id].opened() as ends:
            yield ends

    monkeypatch.setattr(sessions, "opened", opened)
    at_once = asyncio.Semaphore(AT_ONCE)

    async def run(each: Mutation) -> None:
        async with at_once:
            await odd_answers.run(each)

    await asyncio.gather(*map(run, mutations))


def judge(mutations: Sequence[Mutation], record_property: Callable[[str, object], None]) -> None:
    """Show what was done, and fail with all that is wrong."""
    for each in mutations:
        record_property("odd answers", json.dumps(each.row()))
    sys.stdout.write(odd_answers.table(mutations) + "\n")
    wrong = [f"{fault}\n    {each.row()}" for each in mutations for fault in odd_answers.faults_of(each)]
    assert not wrong, f"{len(wrong)} faults\n" + "\n".join(wrong)


@pytest.mark.parametrize("in_order", [False, True])
async def test_without_odd_answers_each_message_arrives_once(in_order: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation = odd_answers.of_script("", 0, Script(), in_order=in_order)
    await run_all([mutation], monkeypatch)
    assert odd_answers.faults_of(mutation) == ["no odd answer was given"]
    assert set(mutation.copies.values()) == {1}
    assert mutation.sessions == 1
    missing = {*PASSAGE, *AROUND} - set(mutation.script.calls) - {"trim", "hold"}
    assert missing == set()


@pytest.mark.parametrize("step", [*PASSAGE, *AROUND])
async def test_a_relay_lives_through_odd_answers(
    step: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    chosen = [odd_answers.mutation(step, seed, is_real=is_real) for seed in range(4) for is_real in (True, False)]
    await run_all(chosen, monkeypatch)
    judge(chosen, record_property)


@pytest.mark.long
@pytest.mark.parametrize("step", [*PASSAGE, *AROUND])
async def test_a_relay_lives_through_many_odd_answers(
    step: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    mutations = [odd_answers.mutation(step, seed) for seed in range(LONG_RUNS)]
    await run_all(mutations, monkeypatch)
    judge(mutations, record_property)
