"""Redelivery, each rule of it broken: when positions come back, their counts, dead letters, time-outs, delay levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.backlog.nack_tracker import NackTracker
from daemon.core.decisions import ack_decisions, nack_decisions
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.claims import Ignored
from daemon.core.decisions.dead_letter_decisions import DeadLetterDecisions
from daemon.core.decisions.subscription_state import RedeliveryCounts, SubscriptionState
from daemon.core.index.position_keys import KeyedRows
from daemon.topic import bucket_lifecycle, stored_topic
from daemon.topic import topic_acks as engine_acknowledging
from daemon.topic.topic_acks import NackRequests
from storage_backends.formats import manifest
from storage_backends.formats.row_columns import U64
from storage_backends.formats.slot_format import NackRecord, PurgeRecord, ReplayRecord
from tests._support.fault_places import JOURNAL
from tests.planted.buckets import OVERTAKEN
from tests.planted.bug import Bug
from tests.planted.state import SELDOM, not_journaled
from tests.simulation.faults import Trouble
from tests.simulation.run import Directed

# ---- what is durable


def nacks_are_not_journaled(patch: pytest.MonkeyPatch) -> None:
    not_journaled(patch, NackRecord)


def purges_are_not_journaled(patch: pytest.MonkeyPatch) -> None:
    not_journaled(patch, PurgeRecord)


def a_checkpoint_forgets_what_waits_for_its_redelivery(patch: pytest.MonkeyPatch) -> None:
    part_of = bucket_lifecycle.checkpoint_part

    def forgetting(cut: bucket_lifecycle.TopicCut) -> Any:
        part = part_of(cut)
        return dataclasses.replace(part, progress=_forgetting(part.progress, nacked=()))

    patch.setattr(bucket_lifecycle, "checkpoint_part", forgetting)


def a_seal_forgets_what_waits_for_its_redelivery(patch: pytest.MonkeyPatch) -> None:
    _sealed(patch, nacked=())


def a_seal_forgets_dead_letters(patch: pytest.MonkeyPatch) -> None:
    _sealed(patch, dead_letters=None)


def ids_of_dead_letters_are_given_again(patch: pytest.MonkeyPatch) -> None:
    to_stored = stored_topic._redeliveries

    def stored(*arguments: Any) -> manifest.Redeliveries | None:
        made = to_stored(*arguments)
        return None if made is None else dataclasses.replace(made, last_dead_letter_id=0)

    patch.setattr(stored_topic, "_redeliveries", stored)


def _sealed(patch: pytest.MonkeyPatch, **forgotten: Any) -> None:
    progress_of = bucket_lifecycle.progress_of
    patch.setattr(bucket_lifecycle, "progress_of", lambda *arguments: _forgetting(progress_of(*arguments), **forgotten))


def _forgetting(stored: manifest.Progress, **forgotten: Any) -> manifest.Progress:
    kept = tuple(dataclasses.replace(each, **forgotten) for each in stored.redeliveries)
    return dataclasses.replace(stored, redeliveries=kept)


def counts_are_lost_at_a_takeover(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RedeliveryCounts, "restore", lambda self, planes: None)


def delay_levels_are_lost_with_a_seal_or_checkpoint(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stored_topic, "_levels", lambda pages, levels: ())


# ---- when positions come back


def redelivery_times_are_rounded_down(patch: pytest.MonkeyPatch) -> None:
    """As PIP-393 has it."""

    def rounded(times_ms: U64, bits: int) -> U64:
        return times_ms & ~np.uint64((1 << bits) - 1)

    patch.setattr(nack_decisions, "rounded_up", rounded)


def what_waits_is_read_from_the_backlog(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "set_aside_among", lambda self, keys: BitMap64())


def what_waits_comes_back_early(patch: pytest.MonkeyPatch) -> None:
    take_due = NackTracker.take_due

    def taken(self: NackTracker, now_ms: int, limit: int) -> tuple[KeyedRows, U64]:
        return take_due(self, now_ms + 1_000, limit)

    patch.setattr(NackTracker, "take_due", taken)


def a_time_out_comes_early(patch: pytest.MonkeyPatch) -> None:
    take_since = InFlight.take_since

    def taken(self: InFlight, before_ms: int, limit: int, *, staying: BitMap64) -> KeyedRows:
        return take_since(self, before_ms + 200, limit, staying=staying)

    patch.setattr(InFlight, "take_since", taken)


def a_nack_is_answered_at_once_after_a_takeover(patch: pytest.MonkeyPatch) -> None:
    negative_acknowledge = NackRequests.negative_acknowledge

    async def at_once(self: NackRequests, *arguments: Any, **options: Any) -> Any:
        async def answerable(ignored: Ignored) -> None:
            if len(ignored):
                await self._topic.slots.confirmed()

        self._acks.answerable = answerable  # type: ignore[method-assign]
        try:
            return await negative_acknowledge(self, *arguments, **options)
        finally:
            del self._acks.answerable

    patch.setattr(NackRequests, "negative_acknowledge", at_once)


# ---- how often


def a_position_that_is_about_to_wait_is_decided_again(patch: pytest.MonkeyPatch) -> None:
    async def decidable(self: engine_acknowledging.AckRequests, state: SubscriptionState, named: Any, **_: Any) -> None:
        await self._topic.gate.passed()
        self._topic.check_there(state)

    patch.setattr(engine_acknowledging.AckRequests, "decidable", decidable)


def what_waits_is_counted_again(patch: pytest.MonkeyPatch) -> None:
    """A request that is repeated counts twice."""
    stage_found = nack_decisions.NackDecisions.stage_found

    def staged(self: nack_decisions.NackDecisions, state: SubscriptionState, *arguments: Any) -> Any:
        kept, state.nacks.keys = state.nacks.keys, BitMap64()
        try:
            return stage_found(self, state, *arguments)
        finally:
            state.nacks.keys = kept

    patch.setattr(nack_decisions.NackDecisions, "stage_found", staged)


def messages_of_a_batch_stay_when_their_entry_leaves(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: AckDecisions, *arguments: Any) -> Iterator[Any]:
        yield from ()

    patch.setattr(AckDecisions, "end_parts", nothing)


# ---- dead letters


def a_replay_leaves_its_dead_letter(patch: pytest.MonkeyPatch) -> None:
    """It is replayed again when the position has left."""
    _left: Callable[..., None] = DeadLetterDecisions._left_dead_letters

    def left(self: DeadLetterDecisions, record: ReplayRecord | PurgeRecord) -> None:
        if isinstance(record, ReplayRecord):
            self._subscriptions[record.subscription_id].dead_letters_leaving.clear()
            return
        _left(self, record)

    patch.setattr(DeadLetterDecisions, "_left_dead_letters", left)


# ---- which hand-out is meant


def an_acknowledgement_ends_any_hand_out(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "are_ended_by", lambda self, keys, counts: None)


def what_is_passed_on_is_over_once_it_is_acknowledged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nack_decisions.NackBatch, "may_get_rows", property(lambda self: self.positions.deliver_at_ms == 0))


def only_what_is_in_flight_is_handed_back(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: nack_decisions.NackDecisions, state: Any, index: Any, left: Any, found: Any, terms: Any) -> Any:
        return [], left

    patch.setattr(nack_decisions.NackDecisions, "_decide_found", nothing)


def an_entry_takes_along_what_was_handed_back_since(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ack_decisions, "_later", lambda state, parts, first_keys, counts: BitMap64())


def a_late_nack_hits_a_newer_hand_out(patch: pytest.MonkeyPatch) -> None:
    take = nack_decisions._take_in_flight

    def any_hand_out(state: SubscriptionState, index: Any, nack: nack_decisions.NackBatch) -> Any:
        positions = dataclasses.replace(nack.positions, redelivery_count=None)
        return take(state, index, dataclasses.replace(nack, positions=positions))

    patch.setattr(nack_decisions, "_take_in_flight", any_hand_out)


def dead_letters_have_no_limit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "dead_letter_room", property(lambda state: 1 << 62))


def staged_dead_letters_take_no_room(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SubscriptionState, "_dead_letter_rows", property(lambda state: len(state.dead_letters)))


def a_checkpoint_forgets_which_rows_no_add_has_brought(patch: pytest.MonkeyPatch) -> None:
    restore = nack_decisions.NackDecisions.restore

    def restored(self: nack_decisions.NackDecisions, subscription_id: int, *arguments: Any) -> None:
        restore(self, subscription_id, *arguments)
        state = self._subscriptions[subscription_id]
        state.drop_own_nacked(state._own_nacked.copy())

    patch.setattr(nack_decisions.NackDecisions, "restore", restored)


# Nothing is wrong, much comes back, and there is little room for what is given up.
FULL = Directed(
    daemons=1,
    weights={},
    chaos_s=20.0,
    nacks=0.9,
    settings=("limits.dead_letters_per_subscription_max=2", "limits.nacked_rows_per_subscription_max=6"),
)
FULL_AND_SLOW = dataclasses.replace(FULL, slow_kind=JOURNAL)
# The owner is killed again and again, soon after it decided; checkpoints are frequent.
KILLED = Directed(
    tuple(Trouble("kill", "put_if_absent", JOURNAL, nth, False, 0.3) for nth in (20, 40, 60)),
    settings=("journal.checkpoint_slots=2", "bucket.min_index_count_per_bucket=12", "bucket.rows_max=36"),
    chaos_s=20.0,
    nacks=0.6,
)

# Slots are slow, and nothing else is wrong: more is asked for before they land.
SLOW = Directed(
    slow_kind=JOURNAL,
    settings=("journal.commit_linger_ms=50",),
    daemons=1,
    weights={},
    chaos_s=25.0,
    nacks=0.9,
)
# Nothing is wrong, and much that was passed on fails behind that.
PASSED_ON = Directed(daemons=1, weights={}, chaos_s=30.0, nacks=0.2)
# Nothing is wrong, and much comes back.
OFTEN = Directed(daemons=1, chaos_s=12.0, nacks=0.6)

BUGS = (
    Bug("nacks", nacks_are_not_journaled, OFTEN, seed=4),
    Bug("nacks", a_checkpoint_forgets_what_waits_for_its_redelivery, KILLED, seed=15),
    Bug("nacks", a_seal_forgets_what_waits_for_its_redelivery, SELDOM, seed=2),
    Bug("nacks", redelivery_times_are_rounded_down, OFTEN, seed=4),
    Bug("nacks", what_waits_is_read_from_the_backlog, OFTEN, seed=4),
    Bug("nacks", what_waits_comes_back_early, OFTEN, seed=4),
    Bug("nacks", a_nack_is_answered_at_once_after_a_takeover, OVERTAKEN, seed=2),
    Bug("nacks", messages_of_a_batch_stay_when_their_entry_leaves, seed=16),
    Bug("redelivery counts", counts_are_lost_at_a_takeover, KILLED, seed=4),
    Bug("redelivery counts", a_position_that_is_about_to_wait_is_decided_again, SLOW, seed=4),
    Bug("redelivery counts", what_waits_is_counted_again, OFTEN, seed=15),
    Bug("hand-outs", an_acknowledgement_ends_any_hand_out, PASSED_ON, seed=1),
    Bug("hand-outs", what_is_passed_on_is_over_once_it_is_acknowledged, PASSED_ON, seed=1),
    Bug("hand-outs", only_what_is_in_flight_is_handed_back, PASSED_ON, seed=15),
    Bug("hand-outs", an_entry_takes_along_what_was_handed_back_since, PASSED_ON, seed=35),
    Bug("hand-outs", a_late_nack_hits_a_newer_hand_out, PASSED_ON, seed=2),
    Bug("ack time-outs", a_time_out_comes_early, seed=1),
    Bug("dead letters", purges_are_not_journaled, KILLED, seed=10),
    Bug("dead letters", a_seal_forgets_dead_letters, SELDOM, seed=1),
    Bug("dead letters", ids_of_dead_letters_are_given_again, KILLED, seed=4),
    Bug("dead letters", a_replay_leaves_its_dead_letter, OFTEN, seed=2),
    Bug("dead letters", dead_letters_have_no_limit, FULL, seed=2),
    Bug("dead letters", staged_dead_letters_take_no_room, FULL_AND_SLOW, seed=8),
    Bug("nacks", a_checkpoint_forgets_which_rows_no_add_has_brought, KILLED, seed=4),
    Bug("delay levels", delay_levels_are_lost_with_a_seal_or_checkpoint, KILLED, seed=9),
)
