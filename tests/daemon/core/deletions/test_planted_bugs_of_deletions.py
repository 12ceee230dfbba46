"""The comparison of deletions with a plain list can fail: each rule, broken once, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from daemon.core.deletions import kept_deletions, ledger_deletions
from daemon.core.deletions.kept_deletions import DeletionKind, DeletionsByLedger, KeptDeletions, RecordedLedgers
from daemon.core.deletions.ledger_deletions import DeletionCut, LedgerDeletions, RetryQueue, State
from daemon.core.deletions.ledgers_in_use import InUse
from daemon.core.deletions.sorted_keys import Mask
from daemon.errors import InvariantViolated
from storage_backends.formats.deletion_format import (
    BeginDeletes,
    Deletion,
    DeletionAnswer,
    DeletionOutcome,
    DeletionState,
    InUseChange,
    InUseLedgers,
    LedgerComponent,
    LedgerType,
    PendingDelete,
    PurgeDeletes,
)
from tests.daemon.core.deletions._support.machine import small
from tests.daemon.core.deletions._support.wandering import wander
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]
# More than any of them needs.
SEEDS = 400
STEPS = 120


# ---- what a decision comes to follows from the state and the decision alone


def only_what_was_handed_out_here_begins(patch: pytest.MonkeyPatch) -> None:
    begin = LedgerDeletions._begin

    def begin_handed_out(self: LedgerDeletions, record: BeginDeletes) -> object:
        known = tuple(each for each in record.deletion_id if each in self._waiting._handed_out or each in self._begun)
        return begin(self, dataclasses.replace(record, deletion_id=known))

    patch.setattr(LedgerDeletions, "_begin", begin_handed_out)


def ids_go_on_from_the_highest_that_is_there(patch: pytest.MonkeyPatch) -> None:
    restored = LedgerDeletions.restored.__func__  # type: ignore[attr-defined]

    def restored_by_highest(cls: type[LedgerDeletions], state: DeletionState | None) -> LedgerDeletions:
        made: LedgerDeletions = restored(cls, state)
        made._last_id = max((each.deletion_id for each in state.deletions), default=0) if state else 0
        return made

    patch.setattr(LedgerDeletions, "restored", classmethod(restored_by_highest))


def a_cut_sees_what_comes_after_it(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeptDeletions, "freeze", lambda self: kept_deletions.FrozenDeletions(self._rows, self._kinds.kinds))


def what_was_handed_out_is_not_due_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    handed_out: dict[int, int] = {}
    made = RetryQueue.__init__

    def remember(self: RetryQueue) -> None:
        made(self)
        self._handed_out = handed_out

    patch.setattr(RetryQueue, "__init__", remember)


# ---- the life of a deletion


def one_of_another_state_is_begun(patch: pytest.MonkeyPatch) -> None:
    _in_state_too(patch, {State.WAITING, State.BEGUN}, State.DEAD)


def what_has_not_begun_is_answered(patch: pytest.MonkeyPatch) -> None:
    _in_state_too(patch, {State.BEGUN}, State.WAITING)


def what_is_pending_is_purged(patch: pytest.MonkeyPatch) -> None:
    _in_state_too(patch, {State.DEAD}, State.WAITING)


def what_is_held_is_purged(patch: pytest.MonkeyPatch) -> None:
    _in_state_too(patch, {State.DEAD}, State.HELD)


def _in_state_too(patch: pytest.MonkeyPatch, states: set[State], other: State) -> None:
    in_state = LedgerDeletions._in_state

    def too(self: LedgerDeletions, ids: Iterable[int], *wanted: State) -> Iterable[Deletion]:
        return in_state(self, ids, *wanted, *([other] if set(wanted) == states else []))

    patch.setattr(LedgerDeletions, "_in_state", too)


def one_whose_attempt_was_never_answered_gets_no_other(patch: pytest.MonkeyPatch) -> None:
    in_state = LedgerDeletions._in_state

    def without_begun(self: LedgerDeletions, ids: Iterable[int], *wanted: State) -> Iterable[Deletion]:
        return in_state(self, ids, *(state for state in wanted if len(wanted) == 1 or state is not State.BEGUN))

    patch.setattr(LedgerDeletions, "_in_state", without_begun)


def an_attempt_is_forgotten_with_the_daemon(patch: pytest.MonkeyPatch) -> None:
    _change_state(patch, lambda deletion: dataclasses.replace(deletion, begun=False))


def a_failure_is_not_counted(patch: pytest.MonkeyPatch) -> None:
    _change_answer(patch, lambda before, after: dataclasses.replace(after, failures=before.failures))


def a_retry_is_due_at_once(patch: pytest.MonkeyPatch) -> None:
    _change_answer(
        patch, lambda _, after: dataclasses.replace(after, next_attempt_at_ms=min(after.next_attempt_at_ms, 1))
    )


def what_a_failed_attempt_says_last_counts(patch: pytest.MonkeyPatch) -> None:
    answered = ledger_deletions.after_answer

    def last(deletion: Deletion, answer: DeletionAnswer) -> Deletion:
        after = answered(deletion, answer)
        failed = answer.outcome in (DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP)
        return dataclasses.replace(after, maybe_deleted=answer.maybe_deleted) if failed else after

    patch.setattr(ledger_deletions, "after_answer", last)


def a_dead_letter_that_is_retried_keeps_its_failures(patch: pytest.MonkeyPatch) -> None:
    retried = ledger_deletions.after_retry
    patch.setattr(
        ledger_deletions,
        "after_retry",
        lambda deletion, at_ms: dataclasses.replace(retried(deletion, at_ms), failures=deletion.failures),
    )


def a_dead_letter_that_is_retried_is_as_new(patch: pytest.MonkeyPatch) -> None:
    retried = ledger_deletions.after_retry
    patch.setattr(
        ledger_deletions,
        "after_retry",
        lambda deletion, at_ms: dataclasses.replace(retried(deletion, at_ms), maybe_deleted=False),
    )


def a_dead_letter_that_is_purged_keeps_its_ledger(patch: pytest.MonkeyPatch) -> None:
    purge, remove = LedgerDeletions._purge, RecordedLedgers.remove

    def purge_and_keep(self: LedgerDeletions, record: PurgeDeletes) -> object:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RecordedLedgers, "remove", lambda self, delete, kind: None)
            return purge(self, record)

    assert remove is RecordedLedgers.remove
    patch.setattr(LedgerDeletions, "_purge", purge_and_keep)


def _change_state(patch: pytest.MonkeyPatch, change: Callable[[Deletion], Deletion]) -> None:
    state = DeletionCut.state

    def changed(self: DeletionCut) -> DeletionState:
        whole = state(self)
        return dataclasses.replace(whole, deletions=tuple(map(change, whole.deletions)))

    patch.setattr(DeletionCut, "state", changed)


def _change_answer(patch: pytest.MonkeyPatch, change: Callable[[Deletion, Deletion], Deletion]) -> None:
    answered = ledger_deletions.after_answer
    patch.setattr(
        ledger_deletions, "after_answer", lambda deletion, answer: change(deletion, answered(deletion, answer))
    )


# ---- what is in use, and what comes too late


def a_ledger_whose_attempt_has_begun_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ledger_deletions, "too_late_to_use", lambda deletion: _is_recorded(deletion) and deletion.maybe_deleted
    )


def a_ledger_that_may_be_deleted_in_part_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_deletions, "too_late_to_use", lambda deletion: _is_recorded(deletion) and deletion.begun)


def a_dead_letter_that_may_be_deleted_in_part_is_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ledger_deletions,
        "too_late_to_use",
        lambda deletion: deletion.outcome is DeletionOutcome.PENDING and (deletion.begun or deletion.maybe_deleted),
    )


def a_ledger_is_not_used_after_any_failure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ledger_deletions,
        "too_late_to_use",
        lambda deletion: _is_recorded(deletion) and bool(deletion.begun or deletion.maybe_deleted or deletion.failures),
    )


def an_attempt_that_was_never_answered_has_deleted_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ledger_deletions,
        "after_begin",
        lambda deletion: dataclasses.replace(deletion, begun=True, next_attempt_at_ms=0),
    )


def _is_recorded(deletion: Deletion) -> bool:
    return deletion.outcome in (DeletionOutcome.PENDING, DeletionOutcome.GIVEN_UP)


def replacing_does_not_ask_what_is_being_deleted(patch: pytest.MonkeyPatch) -> None:
    def record_only(self: LedgerDeletions, record: object) -> object:
        if record.change is InUseChange.REPLACE:  # type: ignore[attr-defined]
            with pytest.MonkeyPatch.context() as inner:
                inner.setattr(DeletionsByLedger, "mask", lambda self, topic, ledgers: np.zeros(len(ledgers), np.bool_))
                return change(self, record)  # type: ignore[arg-type]
        return change(self, record)  # type: ignore[arg-type]

    change = LedgerDeletions._change_in_use
    patch.setattr(LedgerDeletions, "_change_in_use", record_only)


def replacing_adds(patch: pytest.MonkeyPatch) -> None:
    change = InUse.change
    patch.setattr(
        InUse,
        "change",
        lambda self, topic, kind, ledgers: change(
            self, topic, InUseChange.RECORD if kind is InUseChange.REPLACE else kind, ledgers
        ),
    )


def replacing_is_of_every_type(patch: pytest.MonkeyPatch) -> None:
    change = InUse.change

    def replace(self: InUse, topic: str, kind: InUseChange, ledgers: InUseLedgers) -> int:
        changed = 0
        if kind is InUseChange.REPLACE:
            other = next(each for each in LedgerType if each is not ledgers.ledger_type)
            none = np.empty(0, np.uint64)
            changed = change(self, topic, kind, InUseLedgers(other, none, none, none))
        return changed + change(self, topic, kind, ledgers)

    patch.setattr(InUse, "change", replace)


def a_topic_is_forgotten_with_its_last_ledger(patch: pytest.MonkeyPatch) -> None:
    knows = InUse.knows
    patch.setattr(InUse, "knows", lambda self, topic: knows(self, topic) and self.ledgers_of(topic) > 0)


def a_topic_is_known_by_any_word(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InUse, "knows", lambda self, topic: topic in self._topics)


# ---- which ledger is meant


def the_component_matters(patch: pytest.MonkeyPatch) -> None:
    is_in_use = InUse.is_in_use
    patch.setattr(
        InUse,
        "is_in_use",
        lambda self, topic, delete: (
            delete.component is LedgerComponent.MANAGED_LEDGER and is_in_use(self, topic, delete)
        ),
    )


def the_uuid_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    is_in_use = InUse.is_in_use
    patch.setattr(
        InUse,
        "is_in_use",
        lambda self, topic, delete: is_in_use(self, topic, dataclasses.replace(delete, offload_context=None)),
    )


def a_ledger_without_a_uuid_is_another_one(patch: pytest.MonkeyPatch) -> None:
    is_in_use = InUse.is_in_use

    def exactly(self: InUse, topic: str, delete: PendingDelete) -> bool:
        context = delete.offload_context
        return is_in_use(self, topic, delete) and (
            context is None or self.holds_exactly(context.uuid_msb, context.uuid_lsb, delete.ledger_id)
        )

    patch.setattr(InUse, "is_in_use", exactly)


def the_topic_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    is_in_use = InUse.is_in_use
    patch.setattr(
        InUse, "is_in_use", lambda self, topic, delete: any(is_in_use(self, each, delete) for each in self._topics)
    )


def the_type_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    is_in_use = InUse.is_in_use
    patch.setattr(
        InUse,
        "is_in_use",
        lambda self, topic, delete: any(
            is_in_use(self, topic, dataclasses.replace(delete, ledger_type=each)) for each in LedgerType
        ),
    )


def what_is_too_late_is_so_under_whatever_uuid(patch: pytest.MonkeyPatch) -> None:
    mask = DeletionsByLedger.mask

    def without_uuid(self: DeletionsByLedger, topic: str, ledgers: InUseLedgers) -> Mask:
        none = np.zeros(len(ledgers), np.uint64)
        return mask(self, topic, InUseLedgers(ledgers.ledger_type, ledgers.ledger_id, none, none))

    patch.setattr(DeletionsByLedger, "mask", without_uuid)


# ---- what is recorded already


def a_dead_letter_is_recorded_again(patch: pytest.MonkeyPatch) -> None:
    _find_only(patch, State.WAITING, State.BEGUN, State.HELD)


def what_is_held_is_recorded_again(patch: pytest.MonkeyPatch) -> None:
    _find_only(patch, State.WAITING, State.BEGUN, State.DEAD)


def _find_only(patch: pytest.MonkeyPatch, *states: State) -> None:
    record = LedgerDeletions._record

    def find_some(self: LedgerDeletions, delete: object) -> object:
        def find(of: RecordedLedgers, each: PendingDelete, kind: int) -> int | None:
            found = found_by(of, each, kind)
            return found if found is not None and ledger_deletions.state_of(self[found]) in states else None

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(RecordedLedgers, "find", find)
            return record(self, delete)  # type: ignore[arg-type]

    found_by = RecordedLedgers.find
    patch.setattr(LedgerDeletions, "_record", find_some)


def what_ended_is_not_recorded_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedLedgers, "remove", lambda self, delete, kind: None)


def the_driver_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    kind_of = kept_deletions.kind_of

    def without_driver(topic: str, delete: PendingDelete) -> DeletionKind:
        kind = kind_of(topic, delete)
        return kind if kind.driver is None else kind._replace(driver=(kind.driver[0], ()))

    patch.setattr(kept_deletions, "kind_of", without_driver)
    patch.setattr(ledger_deletions, "kind_of", without_driver)


# ---- what ended, and what is held


def every_end_is_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_deletions, "ENDED_KEPT_MAX", 1_000)


def what_is_held_is_forgotten_as_what_ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        ledger_deletions,
        "after_found_in_use",
        lambda deletion, at_ms: ledger_deletions._ended(
            deletion, DeletionOutcome.IN_USE, at_ms, ledger_deletions.IN_USE_TEXT
        ),
    )


def what_is_held_comes_back_while_another_statement_holds_it(patch: pytest.MonkeyPatch) -> None:
    def revive(self: LedgerDeletions, held: Iterable[Deletion]) -> int:
        found = list(held)
        for deletion in found:
            self._become(deletion, ledger_deletions.after_revival(deletion))
        return len(found)

    patch.setattr(LedgerDeletions, "_revive", revive)


def what_is_held_comes_back_by_forgetting_alone(patch: pytest.MonkeyPatch) -> None:
    taken_back = LedgerDeletions._taken_back
    none = np.empty(0, np.uint64)
    patch.setattr(
        LedgerDeletions,
        "_taken_back",
        lambda self, topic, change, ledgers: (
            taken_back(self, topic, change, ledgers) if change is InUseChange.FORGET else none
        ),
    )


def the_checkpoint_does_not_say_what_is_held(patch: pytest.MonkeyPatch) -> None:
    _change_state(patch, lambda deletion: dataclasses.replace(deletion, held=False))


def the_checkpoint_has_nothing_that_ended(patch: pytest.MonkeyPatch) -> None:
    state = DeletionCut.state

    def shorter(self: DeletionCut) -> DeletionState:
        whole = state(self)
        left = tuple(each for each in whole.deletions if ledger_deletions.state_of(each) is not State.ENDED)
        return dataclasses.replace(whole, deletions=left)

    patch.setattr(DeletionCut, "state", shorter)


BY_ANY_ORDER: tuple[Plant, ...] = (
    only_what_was_handed_out_here_begins,
    ids_go_on_from_the_highest_that_is_there,
    a_cut_sees_what_comes_after_it,
    what_was_handed_out_is_not_due_after_a_restart,
    one_of_another_state_is_begun,
    what_has_not_begun_is_answered,
    what_is_pending_is_purged,
    what_is_held_is_purged,
    one_whose_attempt_was_never_answered_gets_no_other,
    an_attempt_is_forgotten_with_the_daemon,
    a_failure_is_not_counted,
    a_retry_is_due_at_once,
    what_a_failed_attempt_says_last_counts,
    a_dead_letter_that_is_retried_keeps_its_failures,
    a_dead_letter_that_is_retried_is_as_new,
    a_dead_letter_that_is_purged_keeps_its_ledger,
    a_ledger_whose_attempt_has_begun_is_used,
    a_ledger_that_may_be_deleted_in_part_is_used,
    a_dead_letter_that_may_be_deleted_in_part_is_used,
    a_ledger_is_not_used_after_any_failure,
    an_attempt_that_was_never_answered_has_deleted_nothing,
    replacing_does_not_ask_what_is_being_deleted,
    replacing_adds,
    replacing_is_of_every_type,
    a_topic_is_forgotten_with_its_last_ledger,
    a_topic_is_known_by_any_word,
    the_component_matters,
    the_uuid_does_not_matter,
    a_ledger_without_a_uuid_is_another_one,
    the_topic_does_not_matter,
    the_type_does_not_matter,
    what_is_too_late_is_so_under_whatever_uuid,
    a_dead_letter_is_recorded_again,
    what_is_held_is_recorded_again,
    what_ended_is_not_recorded_again,
    the_driver_is_not_compared,
    every_end_is_kept,
    what_is_held_is_forgotten_as_what_ended,
    what_is_held_comes_back_while_another_statement_holds_it,
    what_is_held_comes_back_by_forgetting_alone,
    the_checkpoint_does_not_say_what_is_held,
    the_checkpoint_has_nothing_that_ended,
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_deletions_is_found(plant: Plant) -> None:
    # Undone before what it is planted into is: it may be one of the small numbers.
    with small(), pytest.MonkeyPatch.context() as patch:
        plant(patch)
        # The product's own checks find it, too.
        with pytest.raises((AssertionError, KeyError, ValueError, InvariantViolated)):
            _wander(SEEDS)


@pytest.mark.rotating
def test_nothing_is_found_where_no_bug_is_planted() -> None:
    with small():
        _wander(20)


def _wander(seeds: int) -> None:
    for seed in range(seeds):
        wander(seed, STEPS)


registry.register("deletions of a shard", BY_ANY_ORDER)
