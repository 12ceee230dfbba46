"""R1 to R9 of the storage protocol, each broken."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest

from daemon.core.ignored import Ignored
from daemon.core.subscription_state import SubscriptionState
from daemon.owner import takeover
from daemon.shard import slot_put, slot_sender
from daemon.shard.confirmation import ProbedConfirmation
from daemon.shard.journal_truncation import JournalTruncation
from daemon.shard.journal_writer import JournalWriter, WrittenSlot
from daemon.shard.shard import ServedShard
from daemon.shard.shard_staging import ShardStaging
from daemon.shard.slot_sender import Section, SlotSender
from daemon.subscription.acknowledging import Acknowledging
from daemon.surroundings import backoff
from storage_backends import object_store, topic_manifest
from storage_backends.formats import manifest, names, slot_format
from storage_backends.formats.shard_slot import ShardSlot, next_after
from tests._support.fault_places import JOURNAL
from tests._support.fault_store import Fault
from tests.planted.bug import Bug
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed


def slots_are_put_without_a_condition(patch: pytest.MonkeyPatch) -> None:
    def try_once(store: object_store.ObjectStore, slot: slot_put.FrozenSlot) -> slot_put.Outcome:
        try:
            store.put(slot.key, slot.body, metadata=slot.metadata)
        except object_store.StoreError:
            return slot_put.judge(store, slot)
        return slot_put.Outcome.CREATED

    patch.setattr(slot_put, "try_once", try_once)


def a_slot_is_made_anew_at_each_try(patch: pytest.MonkeyPatch) -> None:
    tried = JournalWriter._try

    def again(self: JournalWriter, slot: slot_put.FrozenSlot, *, again: bool) -> Any:
        return tried(self, dataclasses.replace(slot, commit_id=self._new_id()), again=again)

    patch.setattr(JournalWriter, "_try", again)


def a_slot_that_head_does_not_see_has_failed(patch: pytest.MonkeyPatch) -> None:
    """The next decisions take its number; whoever waited is told that it is durable, or nothing."""
    tried = JournalWriter._try

    def once(self: JournalWriter, slot: slot_put.FrozenSlot, *, again: bool) -> Any:
        result = tried(self, slot, again=again)
        if result.outcome is slot_put.Outcome.ABSENT:
            self._next_slot = ShardSlot(self._next_slot - 1)
            return dataclasses.replace(result, outcome=slot_put.Outcome.FOUND)
        return result

    patch.setattr(JournalWriter, "_try", once)


def the_journal_is_read_before_the_claim(patch: pytest.MonkeyPatch) -> None:
    claim = takeover._claim
    finish = takeover._Takeover._read_from
    read: dict[int, Any] = {}

    def early(shard_log: Any, number: int, claimant: takeover.Claimant) -> Any:
        before = shard_log.read_tip()
        if before is not None:
            early_takeover = takeover._Takeover(shard_log.store, shard_log, before, claimant)
            object.__setattr__(early_takeover, "_epoch", before.manifest.epoch + 1)
            read[number] = finish(early_takeover, before.manifest.replay_from + 1)
        return claim(shard_log, number, claimant)

    def read_from(self: takeover._Takeover, slot: int) -> Any:
        known = read.pop(self._shard, None)
        return finish(self, slot) if known is None else known

    def put_fence(self: takeover._Takeover, fence_slot: ShardSlot) -> None:
        while True:
            try:
                put(self, fence_slot)
                return
            except slot_put.Occupied:
                fence_slot = next_after(fence_slot)

    put = takeover._Takeover._put_fence
    patch.setattr(takeover, "_claim", early)
    patch.setattr(takeover._Takeover, "_read_from", read_from)
    patch.setattr(takeover._Takeover, "_put_fence", put_fence)


def there_is_no_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(takeover._Takeover, "_put_fence", lambda self, fence_slot: None)


def the_shard_manifest_is_not_read_again_after_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(takeover._Takeover, "_still_owner", lambda self: None)


def topics_are_read_and_not_claimed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(topic_manifest.Seal, "precondition", lambda self, tip: None)
    patch.setattr(topic_manifest.Claim, "precondition", lambda self, tip: None)
    patch.setattr(topic_manifest.Claim, "apply", lambda self, tip: tip)


def fences_are_deleted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JournalTruncation, "_is_data", lambda self, slot: True)


def slots_are_deleted_that_no_checkpoint_covers(patch: pytest.MonkeyPatch) -> None:
    truncate = JournalTruncation.truncate

    def further(self: JournalTruncation, newest: manifest.ShardManifest, **limits: int) -> int:
        reference = newest.checkpoint
        if reference is None:
            return truncate(self, newest, **limits)
        beyond = dataclasses.replace(reference, replay_from=ShardSlot(reference.replay_from + 3))
        newest = dataclasses.replace(newest, previous_checkpoint=beyond, replay_from=beyond.replay_from)
        return truncate(self, newest, **limits)

    patch.setattr(JournalTruncation, "truncate", further)


def the_next_slot_does_not_wait_for_the_last(patch: pytest.MonkeyPatch) -> None:
    async def write(
        self: JournalWriter,
        records: Sequence[slot_format.Record],
        deletions: Sequence[slot_format.DeletionRecord],
    ) -> ShardSlot:
        number, self._next_slot = self._next_slot, next_after(self._next_slot)
        count = len(records) + len(deletions)
        header = slot_format.SlotHeader(self._shard, self._epoch, number, slot_format.SlotKind.DATA, count)
        body = slot_format.encode_slot(header, tuple(records), tuple(deletions))
        slot = slot_put.FrozenSlot(header, body, self._new_id())
        delays_s = backoff.delays_s(self._jitter)
        result = await self._run(lambda: self._try(slot, again=False))
        while result.outcome is slot_put.Outcome.ABSENT:
            await self._sleep(next(delays_s))
            result = await self._run(lambda: self._try(slot, again=True))
        self._written(WrittenSlot(number, result.sent_at_s, len(slot.body), 0.0, 1))
        return number

    async def run(self: SlotSender) -> None:
        writing: list[asyncio.Task[None]] = []
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._line:
                writing.append(asyncio.ensure_future(self._send_one()))
                await self._sleep(0.001)
            await asyncio.gather(*(each for each in writing if each.done()))

    take, landed = ShardStaging.take, ShardStaging.landed
    on_their_way: dict[Section, Any] = {}

    def take_more(self: ShardStaging) -> Section:
        section = take(self)
        on_their_way[section] = self._on_its_way
        return section

    def one_landed(self: ShardStaging, section: Section, slot: ShardSlot) -> None:
        self._on_its_way = on_their_way.pop(section)
        landed(self, section, slot)

    patch.setattr(ShardStaging, "take", take_more)
    patch.setattr(ShardStaging, "landed", one_landed)
    patch.setattr(JournalWriter, "write", write)
    patch.setattr(SlotSender, "run", run)


def answers_do_not_wait_for_their_slot(patch: pytest.MonkeyPatch) -> None:
    append = ShardStaging._append

    def answered(self: ShardStaging, records: Sequence[slot_format.Record]) -> Any:
        slot = append(self, records)
        if not slot.certain.done():
            slot.certain.set_result(0)
        return slot

    patch.setattr(ShardStaging, "_append", answered)


def duplicates_do_not_wait_for_the_slot_that_they_saw(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: ShardStaging) -> None:
        return

    patch.setattr(ShardStaging, "confirmed", at_once)


def the_epoch_counts_as_confirmed_when_the_answer_comes(patch: pytest.MonkeyPatch) -> None:
    confirmed = ProbedConfirmation.confirmed
    patch.setattr(ProbedConfirmation, "confirmed", lambda self, sent_at_s: confirmed(self, self._clock()))


def hand_outs_go_on_without_a_confirmation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ServedShard, "may_hand_out", property(lambda self: not self._releasing))


def slots_are_answered_however_old_the_confirmation(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(slot_sender, "ANSWER_UNCONFIRMED_S", math.inf)
    # Else whoever waits so long is told that the outcome is unknown.
    patch.setattr(ShardStaging, "answer_stalled", lambda self: None)


def acknowledgements_are_answered_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    async def at_once(self: Acknowledging, ignored: Ignored) -> None:
        if ignored:
            await self._topic.shard.commits.confirmed()

    patch.setattr(Acknowledging, "answerable", at_once)


def rows_go_out_by_key_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "is_by_key", False)


def slots_are_deleted_because_a_listing_shows_later_ones(patch: pytest.MonkeyPatch) -> None:
    truncate = JournalTruncation.truncate

    def by_listing(self: JournalTruncation, newest: manifest.ShardManifest, **limits: int) -> int:
        listed = self._store.list(names.journal_prefix(self._shard))
        last = max((names.number_of(entry.key) for entry in listed), default=0)
        reference = newest.checkpoint
        if reference is None:
            return truncate(self, newest, **limits)
        beyond = dataclasses.replace(reference, replay_from=ShardSlot(max(reference.replay_from, last - 1)))
        newest = dataclasses.replace(newest, previous_checkpoint=beyond, replay_from=beyond.replay_from)
        return truncate(self, newest, **limits)

    patch.setattr(JournalTruncation, "truncate", by_listing)


LOSES_ANSWERS = Directed(weights={Fault.FAIL_AFTER: 0.15, Fault.DELIVER_LATE: 0.05})
QUICK = ("ownership.heartbeat_interval_s=0.5", "journal.checkpoint_slots=2")


def paused(seconds: float, operation: str, key_part: str, *, before: bool) -> Directed:
    """Two daemons, and who owns the shards is suspended now and then, at such a call."""
    troubles = tuple(Trouble("suspend", operation, key_part, nth, before, seconds) for nth in (9, 30, 60))
    return Directed(troubles, settings=QUICK, daemons=2, chaos_s=seconds + 30.0)


def two_claimants() -> Directed:
    """The owner is killed, and the next ones are suspended in the middle of their takeovers."""
    killed = [Trouble("kill", "put_if_absent", JOURNAL, nth, True, 30.0) for nth in (9, 40)]
    suspended = [Trouble("suspend", "crash_point", "takeover.after_claim", nth, True, 6.0) for nth in (1, 3, 5)]
    return Directed((*killed, *suspended), settings=QUICK, daemons=3)


def overlapping_owners() -> Directed:
    """The owner loses the store for a while, and writes again while its successor is suspended before its claim."""
    away = [Trouble("cut off", "put_if_absent", JOURNAL, nth, True, 5.0) for nth in (9, 50)]
    suspended = [Trouble("suspend", "put_if_absent", "00/manifest/", nth, True, 8.0) for nth in (1, 2, 3)]
    return Directed((*away, *suspended), settings=("ownership.heartbeat_interval_s=0.5",), daemons=2, chaos_s=40.0)


BEFORE_A_SLOT = paused(8.0, "put_if_absent", JOURNAL, before=True)

BUGS = (
    Bug("R1", slots_are_put_without_a_condition, BEFORE_A_SLOT, seed=17),
    Bug("R1", a_slot_is_made_anew_at_each_try, LOSES_ANSWERS, seed=22),
    Bug("R2", a_slot_that_head_does_not_see_has_failed, LOSES_ANSWERS, seed=22),
    Bug("R5", the_journal_is_read_before_the_claim, overlapping_owners(), seed=1),
    Bug("R5", there_is_no_fence, seed=1),
    Bug("R5", the_shard_manifest_is_not_read_again_after_the_fence, two_claimants(), seed=3),
    Bug("R5", topics_are_read_and_not_claimed, seed=3),
    Bug("R6", fences_are_deleted, paused(25.0, "put_if_absent", JOURNAL, before=True), seed=4),
    Bug("R6", slots_are_deleted_that_no_checkpoint_covers, seed=3),
    Bug("R7", the_next_slot_does_not_wait_for_the_last, seed=3),
    Bug("R8", answers_do_not_wait_for_their_slot, seed=3),
    Bug("R8", duplicates_do_not_wait_for_the_slot_that_they_saw, BEFORE_A_SLOT, seed=8),
    Bug("R8", hand_outs_go_on_without_a_confirmation, paused(20.0, "put_if_absent", JOURNAL, before=True), seed=2),
    Bug(
        "R8",
        the_epoch_counts_as_confirmed_when_the_answer_comes,
        paused(20.0, "put_if_absent", JOURNAL, before=False),
        seed=2,
    ),
    Bug(
        "R8",
        slots_are_answered_however_old_the_confirmation,
        paused(40.0, "put_if_absent", JOURNAL, before=False),
        seed=1,
    ),
    Bug(
        "R8",
        acknowledgements_are_answered_at_once_after_a_takeover,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=15,
    ),
    Bug(
        "R8",
        rows_go_out_by_key_at_once_after_a_takeover,
        paused(13.0, "put_if_absent", JOURNAL, before=False),
        seed=14,
    ),
    Bug("R9", slots_are_deleted_because_a_listing_shows_later_ones, seed=3),
)
