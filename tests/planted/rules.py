"""The rules of the storage protocol, R1 to R9 and L1 to L12, each broken in a whole daemon."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from daemon.core.decisions.claims import Ignored
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.group_commit import slot_sender
from daemon.group_commit.confirmation import ProbedConfirmation
from daemon.group_commit.daemon_log import Certain, CertainSlot, FrozenSlot, LogTruncation, LogWriter, SlotOutcome
from daemon.group_commit.request_effects import RequestEffects
from daemon.group_commit.shard_slots import ShardSlots
from daemon.shard.shard import ServedShard
from daemon.topic import topic_acks
from daemon.topic.topic_acks import AckRequests
from storage_backends import log_fence, object_store, topic_manifest
from storage_backends.formats import log_slot_format, slot_format
from storage_backends.formats.log_slot_format import LogSlotKind
from storage_backends.object_log import ObjectLog
from storage_backends.slot_log import SlotLogs
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed


def slots_are_put_without_a_condition(patch: pytest.MonkeyPatch) -> None:
    class Overwriting:
        def __init__(self, store: object_store.ObjectStore) -> None:
            self._store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
            self._store.put(key, body, metadata=metadata)

    create = ObjectLog.create

    def overwrite(self: ObjectLog, number: int, slot: bytes) -> None:
        store, self._store = self._store, Overwriting(self._store)  # type: ignore[assignment]
        try:
            create(self, number, slot)
        finally:
            self._store = store

    patch.setattr(ObjectLog, "create", overwrite)


def a_slot_is_made_anew_at_each_try(patch: pytest.MonkeyPatch) -> None:
    """Its shard slots are those of the first try, and its place is the next number."""
    send = LogWriter._send
    tries: dict[int, int] = {}

    def again(self: LogWriter, slot: FrozenSlot) -> Any:
        tried = tries[id(slot)] = tries.get(id(slot), -1) + 1
        if tried:
            header = dataclasses.replace(slot.header, number=slot.number + 1)
            stored = log_slot_format.decode_log_slot(slot.body)
            bodies = {shard: stored.section(shard) for shard in stored.shards}
            made = FrozenSlot(header, log_slot_format.encode_log_slot(header, bodies), slot.section_bytes)
            return send(self, made)
        return send(self, slot)

    patch.setattr(LogWriter, "_send", again)


def a_slot_that_head_does_not_see_has_failed(patch: pytest.MonkeyPatch) -> None:
    """Whoever waited is told that it is durable."""
    asked = SlotOutcome.asked

    def once(self: SlotOutcome, found: Any) -> Any:
        return Certain(self._sent_at_s[0]) if found is None else asked(self, found)

    patch.setattr(SlotOutcome, "asked", once)


def the_heads_are_read_before_the_fence_is_tried(patch: pytest.MonkeyPatch) -> None:
    """Where the owner writes on meanwhile, its last sections are not replayed."""
    fencing_from = log_fence._fencing_from

    def with_old_heads(log_id: str, number: int, *by: Any) -> Any:
        fence = yield from fencing_from(log_id, number, *by)
        if fence is not None:
            slot = yield log_fence.ReadOne(number)
            if slot is not None:
                object.__setattr__(fence, "heads", slot.header.heads)
        return fence

    patch.setattr(log_fence, "_fencing_from", with_old_heads)


def there_is_no_fence(patch: pytest.MonkeyPatch) -> None:
    def unfenced(log_id: str, number: int, *by: Any) -> Any:
        slot = yield log_fence.ReadOne(number)
        if slot is None:
            return None
        kind = LogSlotKind.FENCE
        return log_fence.Fence(log_id, number + 1, kind, slot.header.heads, proof=log_fence._PROOF)

    patch.setattr(log_fence, "_fencing_from", unfenced)


def topics_are_read_and_not_claimed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest.Seal, "precondition", lambda self, tip: None)
    patch.setattr(topic_manifest.ClaimTopic, "precondition", lambda self, tip: None)
    patch.setattr(topic_manifest.ClaimTopic, "apply", lambda self, tip: tip)


def ends_of_logs_are_deleted(patch: pytest.MonkeyPatch) -> None:
    ended_at = log_fence.ended_at

    def behind(logs: SlotLogs, log_id: str) -> int | None:
        end = ended_at(logs, log_id)
        return None if end is None else end + 1

    def delete_through(self: ObjectLog, number: int) -> None:
        self._delete(each for each in sorted(self._listed()) if each <= number)

    patch.setattr(log_fence, "ended_at", behind)
    patch.setattr(ObjectLog, "delete_through", delete_through)


def slots_are_deleted_that_no_checkpoint_covers(patch: pytest.MonkeyPatch) -> None:
    bound = LogTruncation.bound
    patch.setattr(LogTruncation, "bound", lambda self, last: max(0, min(last - 1, bound(self, last) + 3)))


def the_next_slot_does_not_wait_for_the_last(patch: pytest.MonkeyPatch) -> None:
    """What is uncertain is tried beside those that follow."""
    until_certain = LogWriter._until_certain
    beside: list[asyncio.Task[Any]] = []

    async def at_once(self: LogWriter, slot: FrozenSlot, first: Any) -> CertainSlot:
        if slot.number == 1:
            return await until_certain(self, slot, first)
        beside.append(asyncio.ensure_future(until_certain(self, slot, first)))
        return CertainSlot(slot, first[0], 1, 0.0)

    patch.setattr(LogWriter, "_until_certain", at_once)


def answers_do_not_wait_for_their_slot(patch: pytest.MonkeyPatch) -> None:
    append = ShardSlots._append

    def answered(self: ShardSlots, records: Sequence[slot_format.Record], effects: Any) -> Any:
        slot = append(self, records, effects)
        if not slot.certain.done():
            slot.certain.set_result(0)
        return slot

    patch.setattr(ShardSlots, "_append", answered)


def decided_requests_are_refused_when_what_they_wait_for_fails(patch: pytest.MonkeyPatch) -> None:
    """Such as the end of a former owner, behind their slot."""
    patch.setattr(RequestEffects, "__exit__", lambda self, kind, error, trace: None)


def acknowledgements_and_nacks_are_refused_when_what_they_wait_for_fails(patch: pytest.MonkeyPatch) -> None:
    class Refusing(RequestEffects):
        def __exit__(self, *_: object) -> None:
            return

    patch.setattr(topic_acks, "RequestEffects", Refusing)


def staged_requests_are_refused_with_their_shard(patch: pytest.MonkeyPatch) -> None:
    """Their slot may be in flight, or durable."""
    end = ShardSlots.end

    def refused(self: ShardSlots, error: Exception) -> None:
        for slot in self._all:
            for future in (slot.certain, slot.applied):
                if not future.done():
                    future.set_exception(error)
        end(self, error)

    patch.setattr(ShardSlots, "end", refused)


def duplicates_do_not_wait_for_the_slot_that_they_saw(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: ShardSlots) -> None:
        return

    patch.setattr(ShardSlots, "confirmed", at_once)


def the_epoch_counts_as_confirmed_when_the_answer_comes(patch: pytest.MonkeyPatch) -> None:
    confirmed = ProbedConfirmation.confirmed
    patch.setattr(ProbedConfirmation, "confirmed", lambda self, sent_at_s: confirmed(self, self._clock()))


def hand_outs_go_on_without_a_confirmation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedShard, "may_hand_out", property(lambda self: not self._releasing))


def slots_are_answered_however_old_the_confirmation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slot_sender, "ANSWER_UNCONFIRMED_S", math.inf)
    # Else whoever waits so long is told that the outcome is unknown.
    patch.setattr(ShardSlots, "answer_stalled", lambda self: None)


def acknowledgements_are_answered_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: AckRequests, ignored: Ignored) -> None:
        if ignored:
            await self._topic.slots.confirmed()

    patch.setattr(AckRequests, "answerable", at_once)


def rows_go_out_by_key_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "is_by_key", False)


def slots_are_deleted_because_later_ones_are_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LogTruncation, "bound", lambda self, last_certain: max(0, last_certain - 1))


LOSES_ANSWERS = Directed(weights={Fault.FAIL_AFTER: 0.15, Fault.DELIVER_LATE: 0.05})
QUICK = ("ownership.heartbeat_interval_s=0.5", "journal.checkpoint_slots=2")


def paused(seconds: float, operation: str, key_part: str, *, before: bool) -> Directed:
    """Two daemons, and who owns the shards is suspended now and then, at such a call."""
    troubles = tuple(Trouble("suspend", operation, key_part, nth, before, seconds) for nth in (9, 30, 60))
    return Directed(troubles, settings=QUICK, daemons=2, chaos_s=seconds + 30.0)


def overlapping_owners() -> Directed:
    """The owner loses the store for a while, and writes again while its successor is suspended before its claim."""
    away = [Trouble("cut off", "put_if_absent", JOURNAL, nth, True, 5.0) for nth in (9, 50)]
    suspended = [Trouble("suspend", "put_if_absent", "00/manifest/", nth, True, 8.0) for nth in (1, 2, 3)]
    return Directed((*away, *suspended), settings=("ownership.heartbeat_interval_s=0.5",), daemons=2, chaos_s=40.0)


BEFORE_A_SLOT = paused(8.0, "put_if_absent", JOURNAL, before=True)

BUGS = (
    Bug("R1", slots_are_put_without_a_condition, BEFORE_A_SLOT, seed=17),
    Bug("L1", a_slot_is_made_anew_at_each_try, LOSES_ANSWERS, seed=22),
    Bug("R2", a_slot_that_head_does_not_see_has_failed, LOSES_ANSWERS, seed=22),
    Bug("L1", the_next_slot_does_not_wait_for_the_last, LOSES_ANSWERS, seed=3),
    Bug("L3", ends_of_logs_are_deleted, paused(25.0, "put_if_absent", JOURNAL, before=True), seed=4),
    Bug("L4", there_is_no_fence, seed=1),
    Bug("L4", the_heads_are_read_before_the_fence_is_tried, overlapping_owners(), seed=2),
    Bug("L5", topics_are_read_and_not_claimed, seed=3),
    Bug("L7", slots_are_deleted_that_no_checkpoint_covers, seed=3),
    Bug("L10", answers_do_not_wait_for_their_slot, seed=3),
    Bug("L10", duplicates_do_not_wait_for_the_slot_that_they_saw, BEFORE_A_SLOT, seed=7),
    Bug("L10", hand_outs_go_on_without_a_confirmation, paused(20.0, "put_if_absent", JOURNAL, before=True), seed=4),
    Bug(
        "L10",
        the_epoch_counts_as_confirmed_when_the_answer_comes,
        paused(20.0, "put_if_absent", JOURNAL, before=False),
        seed=4,
    ),
    Bug(
        "L10",
        slots_are_answered_however_old_the_confirmation,
        paused(40.0, "put_if_absent", JOURNAL, before=False),
        seed=2,
    ),
    Bug(
        "L10",
        acknowledgements_are_answered_at_once_after_a_takeover,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=15,
    ),
    Bug(
        "L10",
        rows_go_out_by_key_at_once_after_a_takeover,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=14,
    ),
    Bug(
        "refusals",
        decided_requests_are_refused_when_what_they_wait_for_fails,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=3,
    ),
    Bug(
        "refusals",
        acknowledgements_and_nacks_are_refused_when_what_they_wait_for_fails,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=15,
    ),
    Bug(
        "refusals",
        staged_requests_are_refused_with_their_shard,
        dataclasses.replace(
            paused(5.0, "put_if_absent", JOURNAL, before=False), slow_kind=JOURNAL, weights={Fault.FAIL_AFTER: 0.15}
        ),
        seed=8,
    ),
    Bug("R9", slots_are_deleted_because_later_ones_are_there, seed=3),
)
