"""What a relay says before it runs: whether the source keeps messages for long enough, and whether clocks agree."""

from __future__ import annotations

from typing import Any

import pytest

import tarry
from tarry_relay import port, relay_settings, retention_guard
from tarry_relay.port import Grade

DAY_MS = 86_400_000


class Kept:
    """A source that keeps messages for so long, and a daemon whose topic takes delays of so many ms; None: no topic."""

    tells_limits = True

    def __init__(self, kept_ms: int | None, delay_max_ms: int | None) -> None:
        self._kept_ms = kept_ms
        self._delay_max_ms = delay_max_ms

    async def kept_ms(self) -> int | None:
        return self._kept_ms

    async def retention(self, topic: str) -> dict[int, int]:
        return {1: 5}

    async def first_entries(self, ledgers: list[int]) -> dict[int, int]:
        return dict.fromkeys(ledgers, 5)

    async def policy(self, topic: str) -> tarry.TopicPolicies:
        if self._delay_max_ms is None:
            raise tarry.NotFound(f"topic {topic}")
        return tarry.TopicPolicies(tarry.TopicPolicy(), tarry.TopicPolicy(delay_max_ms=self._delay_max_ms))


@pytest.mark.parametrize(
    ("kept_ms", "delay_max", "policy_ms", "grade", "told"),
    [
        (None, None, 365 * DAY_MS, Grade.OK, "no message goes by its age"),
        (7 * DAY_MS, None, 6 * DAY_MS, Grade.OK, "for 7d, and delay_max_ms of the topic orders@1 is 518400000, 6d"),
        (7 * DAY_MS, None, 7 * DAY_MS, Grade.WARNING, "604800000, 7d: what waits for longer ends as a dead letter"),
        (7 * DAY_MS, "5d", 365 * DAY_MS, Grade.OK, "for 7d, and source.delay_max is 5d"),
        (7 * DAY_MS, "8d", 365 * DAY_MS, Grade.WRONG, "source.delay_max is 8d: what waits for longer"),
        (7 * DAY_MS, "8d", 6 * DAY_MS, Grade.OK, "is 518400000, 6d"),
        (7 * DAY_MS, None, None, Grade.WARNING, "source.delay_max is not set, and the topic is not there yet"),
        (7 * DAY_MS, "1d", None, Grade.OK, "source.delay_max is 1d"),
    ],
)
async def test_a_source_must_keep_messages_for_longer_than_they_may_wait(
    kept_ms: int | None, delay_max: str | None, policy_ms: int | None, grade: Grade, told: str
) -> None:
    settings = relay_settings.Settings(
        relay=relay_settings.Relay(topic="orders"),
        source=relay_settings.Source(name="orders", delay_max=delay_max),
        broker=relay_settings.Nats(),
    )
    both: Any = Kept(kept_ms, policy_ms)
    (found,) = await retention_guard.findings_of_waiting(settings, both, both, "orders@1")
    assert (found.grade, told in found.text) == (grade, True), found.text


def test_a_clock_agrees_that_shows_a_time_between_the_question_and_the_answer() -> None:
    asked_ms = port.now_ms() - 5_000
    for told_ms in (asked_ms - 900, asked_ms, asked_ms + 2_000, asked_ms + 5_000):
        assert port.finding_of_clock("Tarry", told_ms, asked_ms).grade is Grade.OK
    behind = port.finding_of_clock("Tarry", asked_ms - 3_000, asked_ms)
    assert (behind.grade, behind.text) == (
        Grade.WARNING,
        "Tarry is -3000 ms from this machine, so messages come that much too early or late; synchronize both clocks",
    )
    assert port.finding_of_clock("Tarry", asked_ms + 600_000, asked_ms).grade is Grade.WARNING
