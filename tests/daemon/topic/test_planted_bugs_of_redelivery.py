"""The tests of redelivery in a daemon can fail: each of these bugs, planted, is found by its story."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from daemon.core.backlog.in_flight import InFlight
from daemon.core.decisions import nack_decisions
from daemon.core.decisions.claims import Ignored
from daemon.core.decisions.nack_decisions import NackDecisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.index import indexes as batch_parts
from daemon.errors import TarryError
from daemon.topic.served_subscription import ServedSubscription
from daemon.topic.served_topic import ServedTopic
from daemon.topic.topic_acks import AckRequests, NackRequests
from tests._support.engine_fixture import EngineFixture
from tests.daemon.topic import test_ack_timeouts as timeouts
from tests.daemon.topic import test_nack_races as races
from tests.daemon.topic import test_nacked_positions as positions
from tests.daemon.topic import test_nacks as nacks
from tests.daemon.topic import test_redelivery_policies as policies

Plant = Callable[[pytest.MonkeyPatch], None]
Story = Callable[[EngineFixture], Awaitable[None]]


def nobody_waits_for_what_is_staged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackDecisions, "is_staged", lambda self, state, named, **_: False)


def the_wait_for_a_slot_has_no_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("daemon.topic.topic_acks.STALL_ANSWER_S", 10_000.0)


def times_are_rounded_down(patch: pytest.MonkeyPatch) -> None:
    """As PIP-393 does."""
    patch.setattr(nack_decisions, "rounded_up", lambda times_ms, bits: times_ms >> np.uint64(bits) << np.uint64(bits))


def the_daemon_does_not_wake_for_a_shorter_nack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedTopic, "rows_added", lambda self: None)


def what_found_no_room_is_not_taken_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedSubscription, "_redeliver_on", lambda self: None)


def what_is_nacked_counts_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nack_decisions, "contained", lambda keys, among: np.zeros(len(keys), np.bool_))


def an_acknowledgement_leaves_the_tracker_as_it_is(patch: pytest.MonkeyPatch) -> None:
    def forget(self: SubscriptionState, keys: Any) -> None:
        self.acknowledging -= keys
        self.nacking -= keys
        self.counts.drop(keys)

    patch.setattr(SubscriptionState, "forget", forget)


def messages_of_batches_are_shown_as_they_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_parts, "unpacked", lambda keyed, indexes, number: (keyed.rows, None))


def the_policy_is_asked_for_once(patch: pytest.MonkeyPatch) -> None:
    terms, known = NackRequests.terms, dict[int, Any]()

    def first(self: NackRequests, state: SubscriptionState) -> Any:
        now = terms(self, state)
        return dataclasses.replace(known.setdefault(state.subscription_id, now), now_ms=now.now_ms)

    patch.setattr(NackRequests, "terms", first)


def an_extension_moves_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InFlight, "touch", lambda _self, keys, *_, **__: np.ones(len(keys), np.bool_))


def time_outs_are_looked_for_everywhere(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        "daemon.topic.topic_acks._timeout_ms",
        lambda state: state.stored.policy.ack_timeout_ms or 1 << 40,
    )
    patch.setattr(NackRequests, "watch", lambda self, state: self._arm())


def there_is_one_look_for_what_is_overdue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackRequests, "_looked", lambda self, task: task.cancelled() or task.exception())


def what_was_ignored_is_said_without_asking_the_store(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: AckRequests, ignored: Ignored) -> None:
        return

    patch.setattr(AckRequests, "answerable", at_once)


PLANTED: tuple[tuple[Plant, Story], ...] = (
    (
        nobody_waits_for_what_is_staged,
        races.test_what_a_staged_nack_names_is_handed_to_nobody_and_whoever_names_it_waits,
    ),
    (
        nobody_waits_for_what_is_staged,
        races.test_negative_acknowledgements_at_once_of_the_same_positions_count_once_and_the_last_time_holds,
    ),
    (
        the_wait_for_a_slot_has_no_end,
        races.test_who_waits_for_a_staged_nack_that_is_not_durable_is_told_in_time,
    ),
    (times_are_rounded_down, nacks.test_a_redelivery_time_is_rounded_up_to_the_precision_of_the_subscription),
    (
        the_daemon_does_not_wake_for_a_shorter_nack,
        nacks.test_a_shorter_nack_wakes_the_daemon_sooner_and_a_longer_one_waits_on,
    ),
    (what_found_no_room_is_not_taken_up, nacks.test_when_ready_is_full_they_wait_until_there_is_room),
    (what_found_no_room_is_not_taken_up, nacks.test_what_found_no_room_comes_to_who_opens_next),
    (
        what_is_nacked_counts_again,
        nacks.test_to_nack_what_is_nacked_gives_it_the_new_time_and_does_not_count_again,
    ),
    (
        an_acknowledgement_leaves_the_tracker_as_it_is,
        lambda machines: nacks.test_an_acknowledgement_of_a_nacked_position_ends_it(machines, ()),
    ),
    (
        messages_of_batches_are_shown_as_they_are_kept,
        positions.test_messages_of_one_batch_come_back_each_by_itself_beside_the_entry,
    ),
    (the_policy_is_asked_for_once, policies.test_another_policy_of_the_subscription_is_in_force_at_once),
    (an_extension_moves_nothing, timeouts.test_a_time_out_begins_anew_with_an_extension),
    (
        time_outs_are_looked_for_everywhere,
        timeouts.test_where_no_subscription_has_a_time_out_nothing_is_looked_for,
    ),
    (there_is_one_look_for_what_is_overdue, timeouts.test_a_store_that_fails_delays_time_outs_and_loses_none),
    (what_was_ignored_is_said_without_asking_the_store, races.test_an_owner_that_lost_the_shard_answers_no_nack),
    (
        what_was_ignored_is_said_without_asking_the_store,
        races.test_a_nack_is_answered_when_no_former_owner_can_hand_the_position_out,
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
