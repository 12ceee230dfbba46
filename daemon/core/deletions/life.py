"""The life of one deletion: what state it is in, and what it becomes.

Owns: the transitions, each a new value of the deletion.
Does not own: which decisions there are and in what order (`ledger_deletions`), and when an attempt may begin.
"""

from __future__ import annotations

import dataclasses
import enum

from storage_backends.formats.deletion_format import Deletion, DeletionAnswer, DeletionOutcome, PendingDelete

IN_USE_TEXT = "recorded as in use"


class State(enum.Enum):
    WAITING = enum.auto()
    BEGUN = enum.auto()
    # Given up: a dead letter.
    DEAD = enum.auto()
    # In use, as its owner has said and may take back.
    HELD = enum.auto()
    ENDED = enum.auto()


def state_of(deletion: Deletion) -> State:
    if deletion.outcome is DeletionOutcome.PENDING:
        return State.BEGUN if deletion.begun else State.WAITING
    if deletion.outcome is DeletionOutcome.GIVEN_UP:
        return State.DEAD
    return State.HELD if deletion.held else State.ENDED


def recorded(deletion_id: int, topic: str, delete: PendingDelete, at_ms: int, *, by_sweeper: bool) -> Deletion:
    """A new one, due at once."""
    return Deletion(deletion_id, topic, delete, at_ms, by_sweeper, next_attempt_at_ms=at_ms)


def begun(deletion: Deletion) -> Deletion:
    """The next attempt has begun. An attempt before that was never answered may still delete at any moment: whoever
    made it may only have been stopped for a while.
    """
    maybe_deleted = deletion.maybe_deleted or deletion.begun
    return dataclasses.replace(deletion, begun=True, maybe_deleted=maybe_deleted, next_attempt_at_ms=0)


def found_in_use(deletion: Deletion, at_ms: int) -> Deletion:
    """The deletion ends before its attempt begins, as long as its owner says so."""
    return dataclasses.replace(_ended(deletion, DeletionOutcome.IN_USE, at_ms, IN_USE_TEXT), held=True)


def revived(deletion: Deletion) -> Deletion:
    """A held one whose ledger is in use no longer: pending again, due at once."""
    return dataclasses.replace(deletion, outcome=DeletionOutcome.PENDING, ended_at_ms=0, held=False)


def answered(deletion: Deletion, answer: DeletionAnswer) -> Deletion:
    """What comes of one whose attempt has begun, by any answer but PENDING."""
    if answer.outcome not in (DeletionOutcome.FAILED, DeletionOutcome.GIVEN_UP):
        return _ended(deletion, answer.outcome, answer.at_ms, answer.text)
    failed = dataclasses.replace(
        deletion,
        begun=False,
        failures=deletion.failures + 1,
        maybe_deleted=deletion.maybe_deleted or answer.maybe_deleted,
        text=answer.text,
    )
    if answer.outcome is DeletionOutcome.GIVEN_UP:
        return dataclasses.replace(failed, outcome=DeletionOutcome.GIVEN_UP, ended_at_ms=answer.at_ms)
    return dataclasses.replace(failed, next_attempt_at_ms=answer.retry_at_ms)


def retried(deletion: Deletion, at_ms: int) -> Deletion:
    """A dead letter that is pending again, as if it were recorded now; what may have been deleted stays so."""
    return dataclasses.replace(
        deletion,
        outcome=DeletionOutcome.PENDING,
        recorded_at_ms=at_ms,
        failures=0,
        next_attempt_at_ms=at_ms,
        ended_at_ms=0,
    )


def too_late_to_use(deletion: Deletion) -> bool:
    """Whether its ledger cannot be said to be in use any more: something of it is, or may have been, deleted."""
    return deletion.outcome in (DeletionOutcome.PENDING, DeletionOutcome.GIVEN_UP) and (
        deletion.begun or deletion.maybe_deleted
    )


def _ended(deletion: Deletion, outcome: DeletionOutcome, at_ms: int, text: str) -> Deletion:
    return dataclasses.replace(
        deletion, outcome=outcome, begun=False, next_attempt_at_ms=0, ended_at_ms=at_ms, text=text
    )
