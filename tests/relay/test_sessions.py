"""What ends a relay, and what ends a session alone."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import tarry
from tarry_relay import port, running, sessions
from tarry_relay.health import Health
from tarry_relay.port import Finding, Grade
from tarry_relay.relay_metrics import RelayMetrics
from tarry_relay.relay_settings import SettingsError
from tests.relay._support.listed import LIMIT_S, Daemon, Listed, settings

STARTED = Finding("source", Grade.OK, "stream orders: is there")
WRONG = Finding("retention", Grade.WRONG, "stream orders: work queue")


@dataclasses.dataclass
class World:
    """What each session finds: an exception while it opens, or findings; and what its relay then ends with."""

    each_session: list[Any]
    metrics: RelayMetrics = dataclasses.field(default_factory=lambda: RelayMetrics(Health()))
    opened: int = 0
    relayed: list[list[Finding]] = dataclasses.field(default_factory=list)

    @contextlib.asynccontextmanager
    async def open(self, _: object) -> AsyncIterator[sessions.Ends]:
        self.opened += 1
        self.found = self.each_session.pop(0) if self.each_session else [STARTED]
        if isinstance(self.found, BaseException):
            raise self.found
        client: Any = Daemon()
        yield sessions.Ends(Listed(), client)

    async def judge(self, *_: object) -> AsyncIterator[Finding]:
        for each in self.found:
            if isinstance(each, Finding):
                yield each


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    def made(*each: Any) -> World:
        world = World(list(each))

        class Relay:
            def __init__(self, *_: object, findings: list[Finding], **__: object) -> None:
                world.relayed.append(findings)
                self._ends = [each for each in world.found if isinstance(each, BaseException)]

            async def run(self, ending: asyncio.Event) -> None:
                for each in self._ends:
                    raise each
                ending.set()

        monkeypatch.setattr(sessions, "opened", world.open)
        monkeypatch.setattr(sessions, "judged", world.judge)
        monkeypatch.setattr(sessions, "Relay", Relay)
        monkeypatch.setattr(sessions, "_BACK_OFF_S", (0.001,))
        return world

    return made


async def run(world: World) -> None:
    async with asyncio.timeout(LIMIT_S):
        await sessions.Sessions(settings(), world.metrics).run(asyncio.Event())


@pytest.mark.parametrize("error", [SettingsError("broker.password_file"), None])
async def test_what_is_wrong_at_start_ends_the_process(error: Exception | None, world: Callable[..., World]) -> None:
    with pytest.raises((SettingsError, sessions.WrongEnds), match=r"password_file|work queue"):
        await run(world(error or [STARTED, WRONG]))


async def test_what_is_wrong_later_ends_no_process(world: Callable[..., World]) -> None:
    found = world([STARTED, port.NotThere("made anew")], SettingsError("broker.password_file"), [STARTED, WRONG])
    await run(found)
    assert found.opened == 3
    assert WRONG in found.relayed[-1]


@pytest.mark.parametrize(
    "error",
    [
        ValueError("the library cannot do that"),
        AssertionError(),
        KeyError("x"),
        RecursionError("deep"),
        tarry.NotFound("subscription relay"),
        tarry.Internal("a bug"),
        port.SessionOver("connection closed"),
        port.Unreachable("away"),
        ExceptionGroup("several", [ValueError("one")]),
        OSError("no descriptors"),
        asyncio.CancelledError("nobody cancelled"),
    ],
)
@pytest.mark.parametrize("is_open", [False, True])
async def test_no_other_exception_ends_the_process(
    error: BaseException, is_open: bool, world: Callable[..., World]
) -> None:
    found = world(*([[STARTED, error]] * 3 if is_open else [error] * 3))
    await run(found)
    assert found.opened == 4
    assert found.metrics.health.body()[0] is True


async def test_a_bad_message_ends_the_process_where_it_is_to(world: Callable[..., World]) -> None:
    with pytest.raises(running.BadMessage):
        await run(world([STARTED, running.BadMessage("message 1-2")]))


@pytest.mark.parametrize("name", ["source", "retry"])
async def test_a_log_that_does_not_exist_is_waited_for(name: str, world: Callable[..., World]) -> None:
    missing = Finding(name, Grade.MISSING, f"stream {name}: is not there")
    found = world([missing], [missing])
    await run(found)
    assert (found.opened, len(found.relayed)) == (3, 1)


async def test_a_target_that_does_not_exist_keeps_no_relay_from_starting(world: Callable[..., World]) -> None:
    found = world([STARTED, Finding("target", Grade.MISSING, "subject due: no stream has it")])
    await run(found)
    assert (found.opened, len(found.relayed)) == (1, 1)


async def test_the_end_of_a_session_is_told_once_while_it_goes_on_for_one_reason(
    world: Callable[..., World], caplog: pytest.LogCaptureFixture
) -> None:
    await run(world(*[[STARTED, ValueError("odd")]] * 20))
    told = [each for each in caplog.records if "unexpected" in each.message]
    assert len(told) == 1
    assert told[0].exc_info


async def test_an_unhealthy_session_says_why(world: Callable[..., World]) -> None:
    found = world([STARTED, ValueError("odd")])
    seen: list[str] = []
    explain = found.metrics.health.explain

    def explained(what: str, reason: str) -> None:
        explain(what, reason)
        seen.append(str(found.metrics.health.body()))

    found.metrics.health.explain = explained  # type: ignore[method-assign]
    await run(found)
    assert "is being opened" in seen[0]
    assert "ValueError: odd" in seen[1]
