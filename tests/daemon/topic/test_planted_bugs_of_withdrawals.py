"""The tests of cancelling and rescheduling in a daemon can fail: each of these bugs, planted, is found by its story."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from daemon.core.decisions.withdrawal_decisions import WithdrawalDecisions
from daemon.errors import TarryError
from daemon.group_commit.shard_slots import ShardSlots
from daemon.topic.served_topic import ServedTopic
from daemon.topic.topic_gate import TopicGate
from daemon.topic.topic_withdrawals import TopicWithdrawals
from tests._support.engine_fixture import EngineFixture
from tests.daemon.topic import test_withdrawal_races as races
from tests.daemon.topic import test_withdrawals as stories
from tests.daemon.topic.test_withdrawals import cancelled, rescheduled
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]
Story = Callable[[EngineFixture], Awaitable[None]]


def nobody_waits_for_what_is_staged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WithdrawalDecisions, "is_staged", lambda self, asked: False)


def adds_do_not_wait_for_what_is_leaving(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WithdrawalDecisions, "is_leaving", lambda self, asked: False)


def what_is_due_is_not_passed_first(patch: pytest.MonkeyPatch) -> None:
    async def settle_due(self: ServedTopic) -> None:
        return

    patch.setattr(ServedTopic, "settle_due", settle_due)


def segments_that_are_due_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def settle_due(self: ServedTopic) -> None:
        self.pass_due(self._environment.clock.now_ms())

    patch.setattr(ServedTopic, "settle_due", settle_due)


def what_was_settled_once_counts_for_later_rows(patch: pytest.MonkeyPatch) -> None:
    rows_added = ServedTopic.rows_added

    def added(self: ServedTopic) -> None:
        settled_until_ms = self._settled_until_ms
        rows_added(self)
        self._settled_until_ms = max(settled_until_ms, self._settled_until_ms)

    patch.setattr(ServedTopic, "rows_added", added)


def requests_pass_while_the_topic_is_trimmed(patch: pytest.MonkeyPatch) -> None:
    async def passed(self: TopicGate) -> None:
        return

    patch.setattr(TopicGate, "passed", passed)
    patch.setattr(TopicGate, "is_open", property(lambda self: True, lambda self, value: None), raising=False)


def the_answer_does_not_wait_for_its_slot(patch: pytest.MonkeyPatch) -> None:
    async def durable(self: TopicWithdrawals, records: Any, *staged: Any) -> None:
        if records:
            slot = self._topic.slots.stage(*records)
            for hears in staged:
                hears(slot)

    patch.setattr(TopicWithdrawals, "_durable", durable)


def that_there_is_nothing_is_said_without_asking_the_store(patch: pytest.MonkeyPatch) -> None:
    durable = TopicWithdrawals._durable

    async def at_once(self: TopicWithdrawals, records: Any, *staged: Any) -> None:
        if records:
            await durable(self, records, *staged)

    patch.setattr(TopicWithdrawals, "_durable", at_once)


def the_wait_for_a_slot_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("daemon.topic.topic_withdrawals.STALL_ANSWER_S", 10_000.0)
    patch.setattr(ShardSlots, "check_accepting", lambda self: None)


def the_daemon_does_not_wake_for_what_was_rescheduled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedTopic, "rows_added", lambda self: None)


def a_reschedule_is_two_slots(patch: pytest.MonkeyPatch) -> None:
    """The old rows are gone with the first; a crash between the two loses them."""

    async def reschedule(self: TopicWithdrawals, subscription: str | None, batch: Any) -> Any:
        await self.cancel(subscription, batch.ledger_id, batch.entry_id)
        return await at_once(self, subscription, batch)

    at_once = TopicWithdrawals.reschedule
    patch.setattr(TopicWithdrawals, "reschedule", reschedule)


PLANTED: tuple[tuple[Plant, Story], ...] = (
    (
        nobody_waits_for_what_is_staged,
        lambda machines: races.test_a_request_that_names_a_staged_add_is_decided_after_it(machines, cancelled),
    ),
    (nobody_waits_for_what_is_staged, races.test_of_two_cancellations_at_once_one_has_cancelled),
    (
        adds_do_not_wait_for_what_is_leaving,
        lambda machines: races.test_an_add_of_what_is_being_cancelled_is_decided_after_it(machines, None),
    ),
    (
        what_is_due_is_not_passed_first,
        lambda machines: races.test_a_race_with_the_due_moment_is_decided_once(machines, cancelled),
    ),
    (segments_that_are_due_are_not_waited_for, races.test_the_answer_waits_for_segments_that_are_due),
    (
        what_was_settled_once_counts_for_later_rows,
        lambda machines: races.test_a_race_with_the_due_moment_is_decided_once(machines, rescheduled),
    ),
    (
        requests_pass_while_the_topic_is_trimmed,
        lambda machines: races.test_a_trim_waits_for_what_is_leaving_and_later_requests_for_the_trim(
            machines, rescheduled
        ),
    ),
    (
        the_answer_does_not_wait_for_its_slot,
        lambda machines: stories.test_a_crash_around_the_slot_leaves_the_old_row_or_the_new_one(
            machines, cancelled, "log.before_put"
        ),
    ),
    (
        that_there_is_nothing_is_said_without_asking_the_store,
        lambda machines: stories.test_an_owner_that_lost_the_shard_answers_nothing(machines, cancelled),
    ),
    (
        the_wait_for_a_slot_has_no_end,
        lambda machines: races.test_who_waits_for_a_slot_that_is_not_durable_is_told_in_time_and_nothing_of_it_happens(
            machines, cancelled
        ),
    ),
    (
        the_daemon_does_not_wake_for_what_was_rescheduled,
        stories.test_a_reschedule_to_the_past_is_due_at_once,
    ),
    (
        a_reschedule_is_two_slots,
        lambda machines: stories.test_a_crash_around_the_slot_leaves_the_old_row_or_the_new_one(
            machines, rescheduled, "log.after_put"
        ),
    ),
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


registry.register("races of cancellations and reschedules", (plant for plant, _ in PLANTED))
