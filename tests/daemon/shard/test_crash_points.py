"""Every named place between two durable steps, with what may happen to a daemon there.

After each: what was answered OK is handed out, nothing is early, nothing that was acknowledged comes again, a retry
makes no second row, and a daemon that was superseded answers nothing.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import daemon
import storage_backends
from daemon.shard.shard import HAND_OUT_UNCONFIRMED_S
from tests._support.clients import Client
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault

SETTINGS = (
    "bucket.min_index_count_per_bucket=20",
    "bucket.rows_max=45",
    "bucket.max_num_buckets=1",
    "journal.checkpoint_slots=7",
)

WRITING = (
    "log.before_put",
    "log.after_put",
    "seal.before_bucket_put",
    "seal.after_bucket_put",
    "checkpoint.before_put",
    "checkpoint.after_put",
    "merge.before_bucket_put",
    "merge.after_bucket_put",
)
TAKING_OVER = ("takeover.after_fence", "takeover.after_claim")
WRITES = ("put", "put_if_absent")


def test_every_crash_point_of_the_daemon_is_tried_here() -> None:
    folders = [Path(package.__path__[0]) for package in (daemon, storage_backends)]
    sources = [source for folder in folders for source in folder.rglob("*.py")]
    found = {name for source in sources for name in re.findall(r'crash_point\("([^"]+)"\)', source.read_text())}
    # Those of deletions and of properties have tests of their own.
    assert {name for name in found if not name.startswith(("deletion.", "properties."))} == {*WRITING, *TAKING_OVER}


class At:
    """Counts how often a daemon comes to a place, and holds it there at its nth time."""

    def __init__(self, process: Daemon, name: str, nth: int) -> None:
        self.reached = False
        self._process = process
        self._gate = process.gate()
        self._name = name
        self._left = nth
        process.at_crash_point = self._at

    def _at(self, name: str) -> None:
        if name != self._name:
            return
        self._left -= 1
        if self._left == 0:
            self.reached = True
            self._process.stop_here(self._gate)

    def go_on(self) -> None:
        self._gate.set()


def lose_an_answer(process: Daemon, name: str, nth: int) -> Callable[[], bool]:
    """The first write to the store after the nth time at the place takes effect and its answer is lost."""
    left = nth
    lost = False

    def at(reached: str) -> None:
        nonlocal left, lost
        left -= reached == name
        if left == 0 and reached == name:
            lost = True
            for operation in WRITES:
                process.script.plan(operation, Fault.FAIL_AFTER)

    process.at_crash_point = at
    return lambda: lost


async def settle_and_check(client: Client, successor: Daemon) -> None:
    await client.retry(successor)
    await client.work(successor, 3)
    await client.retry(successor)
    await client.receive_the_rest(successor)
    client.check()


@pytest.mark.parametrize("successor_id", ["one", "two"])
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=pytest.mark.rotating)])
@pytest.mark.parametrize("name", WRITING)
async def test_a_crash_between_two_durable_steps_loses_nothing_that_was_answered(
    machines: EngineFixture, name: str, nth: int, successor_id: str
) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    place = At(first, name, nth)
    work = asyncio.ensure_future(client.work(first, 30))
    await first.until(lambda: place.reached)
    first.kill()
    await work
    await settle_and_check(client, await machines.served_by(successor_id, *SETTINGS))


@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.rotating)])
@pytest.mark.parametrize("name", WRITING)
async def test_a_daemon_that_pauses_is_superseded_and_answers_nothing_when_it_goes_on(
    machines: EngineFixture, name: str, nth: int
) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    place = At(first, name, nth)
    work = asyncio.ensure_future(client.work(first, 30))
    await first.until(lambda: place.reached)
    late = [first.add("t", 99, range(5))]
    first.freeze()
    second = await machines.served_by("two", *SETTINGS)
    await client.retry(second)
    late.append(first.add("t", 99, range(5, 10)))
    # As long as that a former owner hands out what it had.
    await asyncio.sleep(HAND_OUT_UNCONFIRMED_S)
    handed_out = [len(receiver.rows) for receiver in client.receivers]
    first.thaw()
    place.go_on()
    await first.until(lambda: not first.engine.health.serving)
    await work
    answers = await asyncio.gather(*late, return_exceptions=True)
    assert all(isinstance(answer, BaseException) for answer in answers), "it answered what it may not"
    assert handed_out == [len(receiver.rows) for receiver in client.receivers[: len(handed_out)]]
    await settle_and_check(client, second)
    assert second.engine.health.serving


@pytest.mark.parametrize("nth", [1, pytest.param(2, marks=pytest.mark.rotating)])
@pytest.mark.parametrize("name", WRITING)
async def test_a_lost_answer_changes_nothing_for_those_who_are_served(
    machines: EngineFixture, name: str, nth: int
) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    met = lose_an_answer(first, name, nth)
    await client.work(first, 30)
    assert met()
    assert not client.unanswered
    assert first.engine.health.serving
    await settle_and_check(client, first)
    first.kill()
    await settle_and_check(client, await machines.served_by("one", *SETTINGS))


@pytest.mark.parametrize("name", TAKING_OVER)
async def test_a_crash_while_taking_over_leaves_everything_to_the_next_claimant(
    machines: EngineFixture, name: str
) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    await client.work(first, 12)
    first.kill()
    second = machines.daemon("one", *SETTINGS)
    place = At(second, name, 1)
    await second.start()
    await second.until(lambda: place.reached)
    second.kill()
    await settle_and_check(client, await machines.served_by("one", *SETTINGS))


@pytest.mark.parametrize("name", TAKING_OVER)
async def test_a_claimant_that_pauses_while_another_takes_over_stands_by(machines: EngineFixture, name: str) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    await client.work(first, 12)
    first.kill()
    second = machines.daemon("two", *SETTINGS)
    place = At(second, name, 1)
    await second.start()
    await second.until(lambda: place.reached)
    second.freeze()
    third = await machines.served_by("three", *SETTINGS)
    await client.work(third, 3)
    second.thaw()
    place.go_on()
    await asyncio.sleep(30)
    assert not second.engine.health.serving
    assert third.engine.health.serving
    await settle_and_check(client, third)


@pytest.mark.parametrize("name", TAKING_OVER)
async def test_a_lost_answer_while_taking_over_is_found_out(machines: EngineFixture, name: str) -> None:
    first = await machines.served_by("one", *SETTINGS)
    client = Client(machines)
    await client.work(first, 12)
    first.kill()
    second = machines.daemon("one", *SETTINGS)
    met = lose_an_answer(second, name, 1)
    await (await second.start()).serving()
    assert met()
    await settle_and_check(client, second)
