"""The tests of cancelling and rescheduling can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from pyroaring import BitMap64

from daemon.core.decisions import add_decisions, withdrawal_decisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.withdrawal_decisions import WithdrawalDecisions
from daemon.core.index import entitlement
from daemon.core.index.bucket import Bucket
from daemon.core.index.index import Index
from daemon.core.index.indexes import Indexes
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, bitmap_of
from storage_backends.formats.index_ids import SHARED
from storage_backends.formats.row_columns import U64, Rows
from tests.daemon.core.decisions import test_withdrawal_decisions
from tests.daemon.core.decisions.test_planted_bugs import Plant, found_by_the_state_machine
from tests.planted import registry


def a_reschedule_leaves_the_old_row_where_it_is(patch: pytest.MonkeyPatch) -> None:
    def rescheduled(self: WithdrawalDecisions, index: Index, rows: Rows, *, elapsed_ms: int) -> None:
        keyed = KeyedRows(rows, index.pages.intern(rows.ledger_id, rows.entry_id))
        keys = bitmap_of(keyed.keys)
        self._indexes.leaving -= keys
        index.mutable.add(keyed, keys, elapsed_ms=elapsed_ms)

    patch.setattr(WithdrawalDecisions, "rescheduled", rescheduled)


def a_reschedule_of_a_row_in_memory_keeps_its_time(patch: pytest.MonkeyPatch) -> None:
    rescheduled = WithdrawalDecisions.rescheduled

    def only_sealed(self: WithdrawalDecisions, index: Index, rows: Rows, *, elapsed_ms: int) -> None:
        if index.sealed:
            rescheduled(self, index, rows, elapsed_ms=elapsed_ms)

    patch.setattr(WithdrawalDecisions, "rescheduled", only_sealed)


def what_is_leaving_is_passed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Indexes, "_staying", lambda self, due: due)


def what_is_due_is_cancelled_like_what_waits(patch: pytest.MonkeyPatch) -> None:
    states_of = withdrawal_decisions._states_of

    def all_wait(part: withdrawal_decisions._Part) -> tuple[BitMap64, BitMap64]:
        waiting, due = states_of(part)
        return waiting | due, BitMap64()

    patch.setattr(withdrawal_decisions, "_states_of", all_wait)


def what_is_being_acknowledged_counts_as_ready(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "held_among", lambda self, keys: self.in_flight.among(keys))


def what_one_subscription_holds_is_seen_of_the_first_only(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WithdrawalDecisions,
        "_held_among",
        lambda self, passed: (
            next(iter(self._subscriptions.values())).held_among(passed) if self._subscriptions else BitMap64()
        ),
    )


def a_position_leaves_where_it_waits_though_it_is_due_elsewhere(patch: pytest.MonkeyPatch) -> None:
    decide = WithdrawalDecisions._decide

    def each_index_alone(
        self: WithdrawalDecisions, asked: withdrawal_decisions.WithdrawalTarget, rows_max: int | None
    ) -> withdrawal_decisions._Decision:
        decisions = [decide(self, dataclasses.replace(asked, parts=(part,)), rows_max) for part in asked.parts]
        whole = decide(self, asked, rows_max)
        return dataclasses.replace(whole, leaves=tuple(leave for each in decisions for leave in each.leaves))

    patch.setattr(WithdrawalDecisions, "_decide", each_index_alone)


def only_the_shared_index_is_asked(patch: pytest.MonkeyPatch) -> None:
    asked = WithdrawalDecisions.asked

    def of_all(
        self: WithdrawalDecisions, ledger_id: U64, entry_id: U64, subscription_id: int | None
    ) -> withdrawal_decisions.WithdrawalTarget:
        found = asked(self, ledger_id, entry_id, subscription_id)
        if subscription_id is not None:
            return found
        return dataclasses.replace(found, parts=found.parts[:1])

    patch.setattr(WithdrawalDecisions, "asked", of_all)


def a_subscription_takes_rows_out_of_the_shared_index_too(patch: pytest.MonkeyPatch) -> None:
    asked = WithdrawalDecisions.asked
    patch.setattr(
        WithdrawalDecisions, "asked", lambda self, ledger_id, entry_id, _: asked(self, ledger_id, entry_id, None)
    )


def a_claim_that_was_trimmed_is_owed_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(entitlement, "acknowledged_among", lambda index, keys: {})


def a_rescheduled_row_may_lie_before_a_subscription_was_created(patch: pytest.MonkeyPatch) -> None:
    stage = WithdrawalDecisions.stage_reschedule
    patch.setattr(
        WithdrawalDecisions,
        "stage_reschedule",
        lambda self, asked, rows, *, floor_ms: stage(self, asked, rows, floor_ms=0),
    )


def own_rows_are_raised_too(patch: pytest.MonkeyPatch) -> None:
    def all_raised(self, asked, rows, *, floor_ms):  # type: ignore[no-untyped-def]
        return stage(self, asked, add_decisions.raised(rows, floor_ms)[0], floor_ms=floor_ms)

    stage = WithdrawalDecisions.stage_reschedule
    patch.setattr(WithdrawalDecisions, "stage_reschedule", all_raised)


def only_adds_are_staged_for_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        WithdrawalDecisions,
        "is_staged",
        lambda self, asked: any(part.index.staged.keys.intersect(part.named) for part in asked.parts),
    )


def a_row_that_came_back_twice_is_the_first_that_did(patch: pytest.MonkeyPatch) -> None:
    add = MutableBucket.add

    def added(self: MutableBucket, rows: KeyedRows, keys: BitMap64, *, elapsed_ms: int) -> int:
        known = self._came_back.copy()
        left = self._left
        self._left = left - known
        in_order_rows = add(self, rows, keys, elapsed_ms=elapsed_ms)
        self._left = left
        return in_order_rows

    patch.setattr(MutableBucket, "add", added)


def what_is_gone_of_a_sealed_bucket_is_not_kept(patch: pytest.MonkeyPatch) -> None:
    remove = Bucket.remove

    def removed(self: Bucket, keys: BitMap64) -> tuple[BitMap64, int]:
        gone, self.gone = self.gone, None
        result = remove(self, keys)
        self.gone = gone
        return result

    patch.setattr(Bucket, "remove", removed)


def rows_of_damaged_buckets_are_found(patch: pytest.MonkeyPatch) -> None:
    states_of = withdrawal_decisions._states_of

    def with_missing(part: withdrawal_decisions._Part) -> tuple[BitMap64, BitMap64]:
        waiting, due = states_of(part)
        for damaged in part.index.quarantined.values():
            waiting |= damaged.missing(part.named - waiting - due)
        return waiting, due

    patch.setattr(withdrawal_decisions, "_states_of", with_missing)


def withdrawals_of_an_own_index_are_applied_to_the_shared_one(patch: pytest.MonkeyPatch) -> None:
    cancelled = WithdrawalDecisions.cancelled
    patch.setattr(
        WithdrawalDecisions,
        "cancelled",
        lambda self, index, keys: cancelled(self, self._indexes[SHARED] if index.index_id else index, keys),
    )


BY_ANY_ORDER: tuple[Plant, ...] = (
    a_reschedule_leaves_the_old_row_where_it_is,
    a_reschedule_of_a_row_in_memory_keeps_its_time,
    what_is_leaving_is_passed,
    what_is_due_is_cancelled_like_what_waits,
    what_is_being_acknowledged_counts_as_ready,
    what_one_subscription_holds_is_seen_of_the_first_only,
    a_position_leaves_where_it_waits_though_it_is_due_elsewhere,
    only_the_shared_index_is_asked,
    a_subscription_takes_rows_out_of_the_shared_index_too,
    own_rows_are_raised_too,
    what_is_gone_of_a_sealed_bucket_is_not_kept,
    rows_of_damaged_buckets_are_found,
    withdrawals_of_an_own_index_are_applied_to_the_shared_one,
)
# What takes a rare order of events.
BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        a_rescheduled_row_may_lie_before_a_subscription_was_created,
        test_withdrawal_decisions.test_a_time_at_or_below_the_creation_of_a_subscription_is_raised_above_it,
    ),
    (
        a_claim_that_was_trimmed_is_owed_again,
        lambda: test_withdrawal_decisions.test_a_claim_that_was_trimmed_is_not_owed_again_by_a_reschedule(
            test_withdrawal_decisions.in_the_mutable_bucket, test_withdrawal_decisions.nothing
        ),
    ),
    (
        only_adds_are_staged_for_others,
        test_withdrawal_decisions.test_a_position_is_staged_by_an_add_a_cancellation_or_a_reschedule_until_that_is_applied,
    ),
    (
        a_row_that_came_back_twice_is_the_first_that_did,
        lambda: test_withdrawal_decisions.test_a_row_may_be_rescheduled_again_and_again_and_then_cancelled(
            test_withdrawal_decisions.in_the_mutable_bucket, test_withdrawal_decisions.nothing
        ),
    ),
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine()


@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        story()


registry.register("state machine of a topic", BY_ANY_ORDER)
registry.register("stories of a topic", (plant for plant, _ in BY_A_STORY))
