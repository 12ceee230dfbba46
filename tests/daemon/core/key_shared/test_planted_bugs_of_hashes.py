"""The tests of draining hashes, of the last sent position and of blocked hashes can fail: each of these bugs, planted,
is found by any order of events.
"""

from __future__ import annotations

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.backlog.in_flight import Places
from daemon.core.index.position_keys import KeyRange, Mask, PageTable
from daemon.core.key_shared.draining_hashes import DrainingHashes
from daemon.core.key_shared.hash_slots import U16
from daemon.core.key_shared.last_sent_position import LastSentPosition
from daemon.core.key_shared.nack_blocks import NackBlocks
from storage_backends.formats.row_columns import U64
from tests.daemon.core.decisions.test_planted_bugs import Plant, found_by_the_state_machine
from tests.daemon.core.key_shared import test_nack_blocks
from tests.daemon.core.key_shared._support import last_sent_machine
from tests.daemon.core.key_shared._support.last_sent_machine import LastSentMachine
from tests.daemon.core.key_shared.test_draining_hashes import DrainingHashesMachine
from tests.daemon.core.key_shared.test_nack_blocks import NackBlocksMachine

# ---- draining hashes


def others_receive_what_one_holds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DrainingHashes, "may_receive", lambda self, slots, consumers: np.ones(len(slots), np.bool_))
    patch.setattr(DrainingHashes, "received", _received_by_anybody)


def _received_by_anybody(self: DrainingHashes, slots: U16, consumers: U16) -> None:
    self.holders[slots] = consumers
    np.add.at(self.unacked, slots, np.uint32(1))


def a_hash_that_is_named_twice_counts_once(patch: pytest.MonkeyPatch) -> None:
    received = DrainingHashes.received

    def once(self: DrainingHashes, slots: U16, consumers: U16) -> None:
        received(self, *[column[np.unique(slots, return_index=True)[1]] for column in (slots, consumers)])

    patch.setattr(DrainingHashes, "received", once)


def anybody_settles(patch: pytest.MonkeyPatch) -> None:
    settled = DrainingHashes.settled
    patch.setattr(DrainingHashes, "settled", lambda self, slots, consumers: settled(self, slots, self.holders[slots]))


def a_hash_that_kept_nothing_back_is_told(patch: pytest.MonkeyPatch) -> None:
    free = DrainingHashes._free

    def told(self: DrainingHashes, slots: U16) -> None:
        free(self, slots)
        self._is_unblocked[slots] = True
        self.has_unblocked |= bool(len(slots))

    patch.setattr(DrainingHashes, "_free", told)


def what_was_kept_back_counts_for_the_next_holder(patch: pytest.MonkeyPatch) -> None:
    free = DrainingHashes._free

    def kept(self: DrainingHashes, slots: U16) -> None:
        attempts = self._attempts.copy()
        free(self, slots)
        self._attempts = attempts

    patch.setattr(DrainingHashes, "_free", kept)


def what_is_unblocked_is_forgotten_when_it_is_held_again(patch: pytest.MonkeyPatch) -> None:
    received = DrainingHashes.received

    def forgotten(self: DrainingHashes, slots: U16, consumers: U16) -> None:
        received(self, slots, consumers)
        self._is_unblocked[slots] = False

    patch.setattr(DrainingHashes, "received", forgotten)


# ---- the last sent position


def a_recent_consumer_receives_what_was_never_sent(patch: pytest.MonkeyPatch) -> None:
    """As before PIP-282."""
    there = LastSentPosition._keys_there

    def sent_alone(self: LastSentPosition, keys: U64, *, are_sent: bool) -> U64:
        return there(self, keys, are_sent=True) if are_sent else np.empty(0, np.uint64)

    patch.setattr(LastSentPosition, "_keys_there", sent_alone)


def a_recent_consumer_is_bound_by_the_last_sent_position_where_ledgers_come_down(patch: pytest.MonkeyPatch) -> None:
    joined = LastSentPosition.joined

    def bound(self: LastSentPosition, consumer: int) -> None:
        highest = self._highest_sent
        self._highest_sent = self.last_sent or highest
        joined(self, consumer)
        self._highest_sent = highest

    patch.setattr(LastSentPosition, "joined", bound)


def any_mark_delete_releases(patch: pytest.MonkeyPatch) -> None:
    release = LastSentPosition._release

    def at_once(self: LastSentPosition) -> None:
        self._recent = dict.fromkeys(self._recent, 0)
        release(self)

    patch.setattr(LastSentPosition, "_release", at_once)


def what_was_pruned_does_not_count(patch: pytest.MonkeyPatch) -> None:
    prune = LastSentPosition._prune

    def pruned(self: LastSentPosition) -> None:
        prune(self)
        self._pruned = 0

    patch.setattr(LastSentPosition, "_prune", pruned)


def what_is_forgotten_counts_as_acknowledged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LastSentPosition, "forget", LastSentPosition.acknowledged)


def what_is_acknowledged_before_it_was_sent_is_a_gap(patch: pytest.MonkeyPatch) -> None:
    def flagged(self: LastSentPosition, places: Places) -> None:
        self._is_acknowledged[places] = True
        self._advance()

    patch.setattr(LastSentPosition, "_acknowledge", flagged)


def what_is_offered_again_stays_acknowledged(patch: pytest.MonkeyPatch) -> None:
    offer = LastSentPosition.offer

    def offered(self: LastSentPosition, ledger_id: U64, entry_id: U64) -> None:
        before = self._is_acknowledged[: self._end].copy()
        offer(self, ledger_id, entry_id)
        self._is_acknowledged[: len(before)] = before

    patch.setattr(LastSentPosition, "offer", offered)


def a_mark_delete_takes_higher_entries_along(patch: pytest.MonkeyPatch) -> None:
    key_ranges = PageTable.key_ranges

    def from_the_first(self: PageTable, ledger_id: int, first_entry_id: int, last_entry_id: int) -> list[KeyRange]:
        return [] if first_entry_id else key_ranges(self, ledger_id, first_entry_id, last_entry_id)

    patch.setattr(PageTable, "key_ranges", from_the_first)


# ---- blocked hashes


def one_that_is_nacked_again_counts_twice(patch: pytest.MonkeyPatch) -> None:
    nacked = NackBlocks.nacked

    def twice(self: NackBlocks, keys: U64, slots: U16, *, elapsed_ms: int) -> None:
        before, self._nacked = self._nacked, BitMap64()
        nacked(self, keys, slots, elapsed_ms=elapsed_ms)
        self._nacked |= before

    patch.setattr(NackBlocks, "nacked", twice)


def what_is_redelivered_is_not_outstanding(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NackBlocks, "redelivered", NackBlocks.left)


def a_hash_over_the_bound_never_blocks_again(patch: pytest.MonkeyPatch) -> None:
    end = NackBlocks._end

    def for_good(self: NackBlocks, nacked: BitMap64, outstanding: BitMap64) -> None:
        before: Mask = self._is_bounded_out.copy()
        end(self, nacked, outstanding)
        self._is_bounded_out |= before

    patch.setattr(NackBlocks, "_end", for_good)


def the_bound_counts_from_the_last_nack(patch: pytest.MonkeyPatch) -> None:
    nacked = NackBlocks.nacked

    def from_now(self: NackBlocks, keys: U64, slots: U16, *, elapsed_ms: int) -> None:
        nacked(self, keys, slots, elapsed_ms=elapsed_ms)
        self._since_ms[slots] = elapsed_ms

    patch.setattr(NackBlocks, "nacked", from_now)


def the_bound_is_a_look_late(patch: pytest.MonkeyPatch) -> None:
    expire = NackBlocks.expire
    patch.setattr(NackBlocks, "expire", lambda self, *, elapsed_ms: expire(self, elapsed_ms=max(elapsed_ms - 1, 0)))


def packing_mixes_up_slots(patch: pytest.MonkeyPatch) -> None:
    pack = NackBlocks._pack

    def mixed_up(self: NackBlocks) -> None:
        pack(self)
        self._slots = self._slots[::-1].copy()

    patch.setattr(NackBlocks, "_pack", mixed_up)


OF_DRAINING_HASHES: tuple[Plant, ...] = (
    others_receive_what_one_holds,
    a_hash_that_is_named_twice_counts_once,
    anybody_settles,
    a_hash_that_kept_nothing_back_is_told,
    what_was_kept_back_counts_for_the_next_holder,
    what_is_unblocked_is_forgotten_when_it_is_held_again,
)

OF_THE_LAST_SENT_POSITION: tuple[Plant, ...] = (
    a_recent_consumer_receives_what_was_never_sent,
    a_recent_consumer_is_bound_by_the_last_sent_position_where_ledgers_come_down,
    any_mark_delete_releases,
    what_was_pruned_does_not_count,
    what_is_forgotten_counts_as_acknowledged,
    what_is_acknowledged_before_it_was_sent_is_a_gap,
    what_is_offered_again_stays_acknowledged,
    a_mark_delete_takes_higher_entries_along,
)

OF_BLOCKED_HASHES: tuple[Plant, ...] = (
    one_that_is_nacked_again_counts_twice,
    what_is_redelivered_is_not_outstanding,
    a_hash_over_the_bound_never_blocks_again,
    the_bound_counts_from_the_last_nack,
    the_bound_is_a_look_late,
    packing_mixes_up_slots,
)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", OF_DRAINING_HASHES, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_draining_hashes_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine(DrainingHashesMachine)


@pytest.mark.rotating
@pytest.mark.timeout(0)
@pytest.mark.parametrize("plant", OF_THE_LAST_SENT_POSITION, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_the_last_sent_position_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with last_sent_machine.small():
        found_by_the_state_machine(LastSentMachine)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", OF_BLOCKED_HASHES, ids=lambda plant: plant.__name__)
def test_a_planted_bug_of_blocked_hashes_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with test_nack_blocks.small():
        found_by_the_state_machine(NackBlocksMachine)
