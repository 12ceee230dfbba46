"""The stories of deletions of ledgers can fail: each of these bugs, planted, is found by one of them.

Those that the simulation finds are in `tests.planted.deletions`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from daemon.core.deletions import ledger_deletions
from daemon.core.deletions.ledger_deletions import RetryQueue
from daemon.errors import TarryError
from daemon.ledger_deletion.deletion_workers import DeletionWorkers
from daemon.ledger_deletion.shard_deletions import Attempt, ShardDeletions
from daemon.ledger_stores.ledger_store import DeletionFailed
from storage_backends.formats.deletion_format import DeletionAnswer, LedgerComponent
from storage_backends.memory_store import MemoryStore
from tests._support.engine_fixture import EngineFixture
from tests.daemon.ledger_deletion import test_ledger_deletion_crashes as crashes
from tests.daemon.ledger_deletion import test_ledger_deletion_faults as faults
from tests.daemon.ledger_deletion._support.deletion_stories import InObjects
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]
Story = Callable[[EngineFixture], Awaitable[None]]


def a_daemon_does_not_ask_whether_it_may_delete_still(patch: pytest.MonkeyPatch) -> None:
    def guard(self: Attempt) -> None:
        self.may_delete = True

    patch.setattr(Attempt, "guard", guard)


def attempts_of_a_former_owner_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    due = ShardDeletions.due

    def due_alone(self: ShardDeletions, limit: int) -> list[int]:
        self._begun_before.clear()
        return due(self, limit)

    patch.setattr(ShardDeletions, "due", due_alone)


def the_answer_of_an_attempt_is_lost_with_its_slot(patch: pytest.MonkeyPatch) -> None:
    def end(self: ShardDeletions, attempt: Attempt, answer: DeletionAnswer) -> None:
        self._under_way.discard(attempt)

    patch.setattr(ShardDeletions, "_end", end)


def a_dead_letter_comes_one_retry_early(patch: pytest.MonkeyPatch) -> None:
    _policy(patch, lambda policy: {"max_retry_delete_count": policy.max_retry_delete_count - 1})


def a_dead_letter_comes_one_retry_late(patch: pytest.MonkeyPatch) -> None:
    _policy(patch, lambda policy: {"max_retry_delete_count": policy.max_retry_delete_count + 1})


def jitter_is_twice_what_it_should_be(patch: pytest.MonkeyPatch) -> None:
    _policy(patch, lambda policy: {"jitter": 2 * policy.jitter})


def there_is_no_jitter(patch: pytest.MonkeyPatch) -> None:
    _policy(patch, lambda policy: {"jitter": 0.0})


def _policy(patch: pytest.MonkeyPatch, changes: Callable[[ledger_deletions.RetryPolicy], dict[str, Any]]) -> None:
    def answer(deletion: Any, **how: Any) -> DeletionAnswer:
        policy = dataclasses.replace(how["policy"], **changes(how["policy"]))
        return answer_of_failure(deletion, **{**how, "policy": policy})

    answer_of_failure: Callable[..., DeletionAnswer] = ledger_deletions.answer_of_failure
    patch.setattr(ledger_deletions, "answer_of_failure", answer)


def a_retry_is_made_a_second_early(patch: pytest.MonkeyPatch) -> None:
    add, remove = RetryQueue.add, RetryQueue.remove
    patch.setattr(RetryQueue, "add", lambda self, due_ms, number: add(self, max(0, due_ms - 1_000), number))
    patch.setattr(RetryQueue, "remove", lambda self, due_ms, number: remove(self, max(0, due_ms - 1_000), number))


def nobody_wakes_the_workers_for_a_retry(patch: pytest.MonkeyPatch) -> None:
    """They look once a second."""
    sleep = DeletionWorkers._sleep

    async def asleep(self: DeletionWorkers) -> None:
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr(ShardDeletions, "next_due_ms", property(lambda self: None))
            await sleep(self)

    patch.setattr(DeletionWorkers, "_sleep", asleep)


def a_crash_counts_as_a_failure(patch: pytest.MonkeyPatch) -> None:
    begun = ledger_deletions.after_begin

    def counted(deletion: Any) -> Any:
        return dataclasses.replace(begun(deletion), failures=deletion.failures + deletion.begun)

    patch.setattr(ledger_deletions, "after_begin", counted)


def dead_letters_do_not_say_why(patch: pytest.MonkeyPatch) -> None:
    failed = ShardDeletions.failed

    def silent(self: ShardDeletions, attempt: Attempt, failure: DeletionFailed) -> None:
        failed(self, attempt, DeletionFailed("it failed", maybe_deleted=failure.maybe_deleted))

    patch.setattr(ShardDeletions, "failed", silent)


def crashed_at(point: str, nth: int) -> Story:
    def story(machines: EngineFixture) -> Awaitable[None]:
        place = InObjects(MemoryStore())
        return crashes.test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else(
            machines, point, nth, place, LedgerComponent.MANAGED_CURSOR
        )

    return story


def paused_at(point: str, nth: int) -> Story:
    def story(machines: EngineFixture) -> Awaitable[None]:
        place = InObjects(MemoryStore())
        return crashes.test_a_daemon_that_pauses_is_superseded_and_does_no_harm_when_it_goes_on(
            machines, point, nth, place, LedgerComponent.MANAGED_LEDGER
        )

    return story


def until_the_last_retry(trouble: str) -> Story:
    def story(machines: EngineFixture) -> Awaitable[None]:
        return faults.test_trouble_until_the_last_retry_ends_with_dead_letters_that_say_why_and_a_retry_succeeds(
            machines, faults.Troubled(trouble, machines)
        )

    return story


def taken_over_in(trouble: str) -> Story:
    return lambda machines: faults.test_a_takeover_in_the_middle_counts_and_loses_no_attempt(machines, trouble, "crash")


PLANTED: tuple[tuple[Plant, Story], ...] = (
    (a_daemon_does_not_ask_whether_it_may_delete_still, paused_at("deletion.after_verify", 3)),
    (attempts_of_a_former_owner_are_forgotten, crashed_at("deletion.after_begin", 1)),
    (attempts_of_a_former_owner_are_forgotten, crashed_at("deletion.after_index_delete", 1)),
    (the_answer_of_an_attempt_is_lost_with_its_slot, crashed_at("deletion.after_record", 1)),
    (a_dead_letter_comes_one_retry_early, until_the_last_retry("errors")),
    (a_dead_letter_comes_one_retry_late, until_the_last_retry("errors")),
    (jitter_is_twice_what_it_should_be, faults.test_jitter_spreads_the_retries_within_its_bounds),
    (there_is_no_jitter, faults.test_jitter_spreads_the_retries_within_its_bounds),
    (a_retry_is_made_a_second_early, until_the_last_retry("errors")),
    (nobody_wakes_the_workers_for_a_retry, faults.test_jitter_spreads_the_retries_within_its_bounds),
    (a_crash_counts_as_a_failure, taken_over_in("time-outs")),
    (dead_letters_do_not_say_why, until_the_last_retry("throttling")),
)


@pytest.mark.rotating
@pytest.mark.parametrize(("plant", "story"), PLANTED, ids=lambda each: each.__name__)
async def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Story, machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    machines.faults_may_miss = True
    with pytest.raises((AssertionError, TimeoutError, TarryError, pytest.fail.Exception)):
        await story(machines)


registry.register("attempts to delete ledgers", (plant for plant, _ in PLANTED))
