"""Two-phase deletion, each rule of it broken: what is durable, in use, verified, and when it is tried again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from daemon.core.deletions import ledger_deletions, ledger_metadata
from daemon.core.deletions.kept_deletions import DeletionsByLedger
from daemon.core.deletions.ledger_deletions import DeletionCut, LedgerDeletions, Recorded, RetryQueue
from daemon.core.deletions.ledgers_in_use import InUse
from daemon.ledger_deletion.shard_deletions import Attempt, ShardDeletions
from daemon.ledger_stores import offloaded_ledgers
from storage_backends.formats import slot_format
from storage_backends.formats.deletion_format import (
    AnswerDeletes,
    BeginDeletes,
    ChangeInUse,
    Deletion,
    DeletionAnswer,
    DeletionState,
    PendingDelete,
    RecordDeletes,
)
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed

# ---- what is durable


def a_deletion_is_answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    async def record(self: ShardDeletions, record: RecordDeletes, effects: object) -> Recorded:
        _unheard(asyncio.ensure_future(decided(self, record, Recorded, cost=len(record.deletes))))
        return Recorded(tuple(range(len(record.deletes))), ())

    decided = ShardDeletions._decided
    patch.setattr(ShardDeletions, "record", record)


def what_is_in_use_is_answered_before_it_is_durable(patch: pytest.MonkeyPatch) -> None:
    async def change(self: ShardDeletions, record: ChangeInUse) -> ledger_deletions.InUseChanged:
        _unheard(asyncio.ensure_future(durably(self, record)))
        return ledger_deletions.InUseChanged(len(record.ledgers), (), 0)

    durably = ShardDeletions.change_in_use
    patch.setattr(ShardDeletions, "change_in_use", change)


def an_attempt_does_not_wait_for_its_begin(patch: pytest.MonkeyPatch) -> None:
    async def begin(self: ShardDeletions, deletion_ids: Sequence[int]) -> list[Attempt]:
        record = BeginDeletes(self._environment.clock.now_ms(), tuple(deletion_ids))
        _unheard(asyncio.ensure_future(self._decided(record, ledger_deletions.Begun, patient=True)))
        return [Attempt(self, self.state[deletion_id]) for deletion_id in deletion_ids]

    patch.setattr(ShardDeletions, "begin", begin)


def _unheard(task: asyncio.Task[Any]) -> None:
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


def answers_of_attempts_are_not_journaled(patch: pytest.MonkeyPatch) -> None:
    encode_slot = slot_format.encode_slot

    def without(header: slot_format.SlotHeader, records: Any, decided: Any = ()) -> bytes:
        kept = [record for record in decided if not isinstance(record, AnswerDeletes)]
        return encode_slot(dataclasses.replace(header, records=len(records) + len(kept)), records, kept)

    patch.setattr(slot_format, "encode_slot", without)


def a_checkpoint_forgets_that_attempts_have_begun(patch: pytest.MonkeyPatch) -> None:
    _stored(patch, lambda deletion: dataclasses.replace(deletion, begun=False))


def a_checkpoint_forgets_that_something_may_be_deleted(patch: pytest.MonkeyPatch) -> None:
    _stored(patch, lambda deletion: dataclasses.replace(deletion, maybe_deleted=False))


def a_checkpoint_forgets_how_often_attempts_failed(patch: pytest.MonkeyPatch) -> None:
    _stored(patch, lambda deletion: dataclasses.replace(deletion, failures=0))


def _stored(patch: pytest.MonkeyPatch, stored: Any) -> None:
    def state(self: DeletionCut) -> DeletionState:
        made = whole(self)
        return dataclasses.replace(made, deletions=tuple(map(stored, made.deletions)))

    whole = DeletionCut.state
    patch.setattr(DeletionCut, "state", state)


def a_checkpoint_forgets_what_is_in_use(patch: pytest.MonkeyPatch) -> None:
    whole = DeletionCut.state
    patch.setattr(DeletionCut, "state", lambda self: dataclasses.replace(whole(self), in_use=()))


# ---- what is in use


def whether_it_is_in_use_is_asked_before_the_begin(patch: pytest.MonkeyPatch) -> None:
    """What an owner says between that and the slot of the begin counts for nothing."""

    used: set[tuple[str, PendingDelete]] = set()

    def due(self: LedgerDeletions, *asked: int) -> list[int]:
        found = at_any_time(self, *asked)
        for each in (self[number] for number in found):
            known = each.topic, each.pending_delete
            (used.add if self.in_use.is_in_use(*known) else used.discard)(known)
        return found

    def begin(self: LedgerDeletions, record: BeginDeletes) -> Any:
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr(InUse, "is_in_use", lambda self, *known: known in used)
            return at_the_begin(self, record)

    at_the_begin, at_any_time = LedgerDeletions._begin, LedgerDeletions.due
    patch.setattr(LedgerDeletions, "_begin", begin)
    patch.setattr(LedgerDeletions, "due", due)


def what_is_being_deleted_may_be_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeletionsByLedger, "mask", lambda self, topic, ledgers: np.zeros(len(ledgers), np.bool_))


def an_attempt_that_failed_half_way_has_deleted_nothing(patch: pytest.MonkeyPatch) -> None:
    def answer(deletion: Deletion, **how: Any) -> DeletionAnswer:
        return answer_of_failure(deletion, **{**how, "maybe_deleted": False})

    answer_of_failure: Callable[..., DeletionAnswer] = ledger_deletions.answer_of_failure
    patch.setattr(ledger_deletions, "answer_of_failure", answer)


def a_second_begin_knows_what_became_of_the_first(patch: pytest.MonkeyPatch) -> None:
    """A former owner's request may be on its way still."""
    begun = ledger_deletions.after_begin

    def known(deletion: Deletion) -> Deletion:
        return dataclasses.replace(begun(deletion), maybe_deleted=deletion.maybe_deleted)

    patch.setattr(ledger_deletions, "after_begin", known)


# ---- what is verified


def a_ledger_s_metadata_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger_metadata, "mismatch", lambda topic, delete, found: None)


def a_cursor_s_key_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    _not_compared(patch, ledger_metadata.CURSOR_KEY)


def a_topic_s_name_is_not_compared(patch: pytest.MonkeyPatch) -> None:
    _not_compared(patch, ledger_metadata.MANAGED_LEDGER_KEY)


def _not_compared(patch: pytest.MonkeyPatch, key: str) -> None:
    def without(topic: str, delete: PendingDelete) -> dict[str, str | None]:
        return {each: value for each, value in table(topic, delete).items() if each != key}

    table = ledger_metadata.table
    patch.setattr(ledger_metadata, "table", without)


def the_index_of_a_ledger_stays(patch: pytest.MonkeyPatch) -> None:
    def deleted(self: offloaded_ledgers.OffloadedLedgers, store: Any, name: Any, step: Any) -> None:
        store.delete(name.data)

    patch.setattr(offloaded_ledgers.OffloadedLedgers, "_delete", deleted)


# ---- when it is tried again


def a_deletion_is_given_up_one_retry_early(patch: pytest.MonkeyPatch) -> None:
    def answer(deletion: Deletion, **how: Any) -> DeletionAnswer:
        policy = how["policy"]
        early = dataclasses.replace(policy, max_retry_delete_count=policy.max_retry_delete_count - 1)
        return answer_of_failure(deletion, **{**how, "policy": early})

    answer_of_failure: Callable[..., DeletionAnswer] = ledger_deletions.answer_of_failure
    patch.setattr(ledger_deletions, "answer_of_failure", answer)


def nobody_waits_for_the_time_of_a_retry(patch: pytest.MonkeyPatch) -> None:
    add, remove = RetryQueue.add, RetryQueue.remove
    patch.setattr(RetryQueue, "add", lambda self, due_ms, number: add(self, 0, number))
    patch.setattr(RetryQueue, "remove", lambda self, due_ms, number: remove(self, 0, number))


# Ledgers have owners, and the daemon is killed again and again while it deletes.
KILLED = Directed(
    tuple(Trouble("kill", "put_if_absent", JOURNAL, nth, False, 0.3) for nth in (20, 40, 60))
    + tuple(Trouble("kill", "delete", "-ledger-", nth, before, 0.3) for nth, before in ((2, False), (9, True))),
    settings=("journal.checkpoint_slots=2",),
    chaos_s=25.0,
    owners=True,
)
# Slots are slow, so that much is asked before they land.
SLOW = Directed(
    slow_kind=JOURNAL, settings=("journal.commit_linger_ms=50",), daemons=1, weights={}, chaos_s=40.0, owners=True
)
# Attempts fail, and the daemon is killed now and then.
FAILING = Directed(
    tuple(Trouble("kill", "put_if_absent", JOURNAL, nth, False, 0.3) for nth in (12, 30)),
    weights={},
    weights_of_ledgers={Fault.FAIL_BEFORE: 0.1, Fault.FAIL_AFTER: 0.2},
    settings=("journal.checkpoint_slots=2", "deletion.max_retry_delete_count=2"),
    chaos_s=30.0,
    owners=True,
)
# Nothing is wrong but what forgers record.
FORGED = Directed(daemons=1, chaos_s=30.0, weights={}, weights_of_ledgers={}, owners=True)
# Ledgers have owners, whatever else happens.
OWNED = Directed(owners=True)

BUGS = (
    Bug("pending deletes", a_deletion_is_answered_before_it_is_durable, SLOW, seed=2),
    Bug("pending deletes", an_attempt_does_not_wait_for_its_begin, SLOW),
    Bug("pending deletes", answers_of_attempts_are_not_journaled, OWNED, seed=0),
    Bug("pending deletes", a_checkpoint_forgets_that_attempts_have_begun, KILLED, seed=15),
    Bug("pending deletes", a_checkpoint_forgets_that_something_may_be_deleted, KILLED, seed=14),
    Bug("pending deletes", a_checkpoint_forgets_how_often_attempts_failed, FAILING, seed=1),
    Bug("pending deletes", a_ledger_s_metadata_is_not_compared, FORGED, seed=2),
    Bug("pending deletes", a_cursor_s_key_is_not_compared, FORGED, seed=2),
    Bug("pending deletes", a_topic_s_name_is_not_compared, FORGED, seed=18),
    Bug("pending deletes", the_index_of_a_ledger_stays, OWNED, seed=1),
    Bug("pending deletes", a_deletion_is_given_up_one_retry_early, FAILING, seed=1),
    Bug("pending deletes", nobody_waits_for_the_time_of_a_retry, FAILING, seed=1),
    Bug("in-use records", what_is_in_use_is_answered_before_it_is_durable, SLOW, seed=2),
    Bug("in-use records", a_checkpoint_forgets_what_is_in_use, KILLED, seed=14),
    Bug("in-use records", whether_it_is_in_use_is_asked_before_the_begin, SLOW, seed=49),
    Bug("in-use records", what_is_being_deleted_may_be_used, FAILING, seed=10),
    Bug("in-use records", an_attempt_that_failed_half_way_has_deleted_nothing, FAILING, seed=10),
    Bug("in-use records", a_second_begin_knows_what_became_of_the_first, KILLED, seed=14),
)
