"""What the store does not answer is asked again, later each time."""

from __future__ import annotations

import dataclasses

import pytest

from daemon.runtime import backoff
from storage_backends.object_store import StoreUnavailable


@dataclasses.dataclass
class Waited:
    """Notes each wait."""

    waits_s: list[float] = dataclasses.field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.waits_s.append(seconds)

    def jitter(self) -> float:
        return 0.5


async def ask(answers: list[int | Exception], told: list[Exception], waited: Waited) -> int:
    async def next_answer() -> int:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return await backoff.until_answered(next_answer, failed=told.append, waiting=waited)


async def test_a_question_is_asked_again_after_each_error_of_the_store_and_each_is_told() -> None:
    away = [StoreUnavailable("key", f"try {number}") for number in range(9)]
    told: list[Exception] = []
    waited = Waited()
    assert await ask([*away, 7], told, waited) == 7
    assert told == away
    assert waited.waits_s == pytest.approx([0.75 * min(0.05 * 2**n, 2.0) for n in range(9)])


async def test_another_error_ends_it_and_nobody_waits() -> None:
    waited = Waited()
    with pytest.raises(KeyError):
        await ask([KeyError("no")], [], waited)
    assert waited.waits_s == []
