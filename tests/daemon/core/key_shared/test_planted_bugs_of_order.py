"""The oracle of key order can fail: each of these bugs, planted, is found by runs of the driver."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap64

from daemon.core.index.position_keys import KeyedRows, Mask
from daemon.core.key_shared import key_share as key_shared_module
from daemon.core.key_shared.draining_hashes import DrainingHashes, HashHolds
from daemon.core.key_shared.hash_slots import U16
from daemon.core.key_shared.key_consumers import I64, Consumers
from daemon.core.key_shared.key_planning import Planning
from daemon.core.key_shared.key_share import KeyShared, PlannedPositions
from daemon.core.key_shared.last_sent_position import LastSentPosition
from daemon.core.key_shared.nack_blocks import BlockingNacks
from daemon.core.key_shared.waiting_rows import WaitingRows
from daemon.errors import InvariantViolated
from storage_backends.formats.manifest import KeyOrder, NackOrder
from storage_backends.formats.row_columns import U32
from tests.daemon.core.key_shared._support.order_driver import OrderDriver, Profile

Plant = Callable[[pytest.MonkeyPatch], None]

DRAINING = Profile()
BLOCKING = Profile(nack_order=NackOrder.BLOCK_KEY)
LAST_SENT = Profile(order=KeyOrder.LAST_SENT_POSITION)
FEW_READY = Profile(ready_rows_max=20)
OPERATIONS = 2_500
SEEDS = range(1, 7)


def _all(columns: Sequence[Any] | np.ndarray[Any, Any], value: bool) -> Mask:
    return np.full(len(columns), value, np.bool_)


# ---- one consumer at a time


def two_consumers_hold_one_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DrainingHashes, "may_receive", lambda self, slots, consumers: _all(slots, True))
    patch.setattr(DrainingHashes, "received", lambda self, slots, consumers: None)
    patch.setattr(DrainingHashes, "settled", lambda self, slots, consumers: None)


def a_hash_is_free_before_its_acknowledgement_is_durable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HashHolds, "claimed", HashHolds.returned)


def a_hash_is_free_before_its_consumer_is_told(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HashHolds, "taken_back", HashHolds.returned)


def what_others_have_received_since_is_held_too(patch: pytest.MonkeyPatch) -> None:
    """After a takeover: a hash, by who declares to hold it."""
    hold = KeyShared.hold

    def blindly(self: KeyShared, rows: KeyedRows, numbers: U32, *, elapsed_ms: int) -> Mask:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(DrainingHashes, "may_receive", lambda self, slots, consumers: _all(slots, True))
            return hold(self, rows, numbers, elapsed_ms=elapsed_ms)

    patch.setattr(KeyShared, "hold", blindly)


# ---- the order of what waits


def later_rows_of_a_key_pass_those_that_wait(patch: pytest.MonkeyPatch) -> None:
    send_or_keep = KeyShared.send_or_keep

    def past(self: KeyShared, rows: KeyedRows, permits: I64, room: int) -> Any:
        by_slot, self.waiting.by_slot = self.waiting.by_slot, np.zeros_like(self.waiting.by_slot)
        try:
            return send_or_keep(self, rows, permits, room)
        finally:
            by_slot += self.waiting.by_slot
            self.waiting.by_slot = by_slot

    patch.setattr(KeyShared, "send_or_keep", past)


def what_comes_back_is_behind_what_is_new(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WaitingRows, "add_back", WaitingRows.add_fresh)


def what_comes_back_is_in_no_order(patch: pytest.MonkeyPatch) -> None:
    lexsort = np.lexsort

    def backwards(self: WaitingRows, rows: KeyedRows) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(np, "lexsort", lambda keys: lexsort(keys)[::-1])
            add_back(self, rows)

    add_back = WaitingRows.add_back
    patch.setattr(WaitingRows, "add_back", backwards)


def what_a_consumer_held_that_left_is_lost(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyShared, "leave", lambda self, numbers: self._dismiss(numbers) and None)


def keys_of_one_hash_do_not_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    """As if the high bits were the hash."""
    patch.setattr(key_shared_module, "slots_of", lambda key_hash: (key_hash >> np.uint32(16)).astype(np.uint16))


# ---- permits


def one_without_permits_holds_up_the_others(patch: pytest.MonkeyPatch) -> None:
    choose = Planning.choose

    def together(self: Planning, rows: KeyedRows, places: Any, slots: U16, permits: I64, *rest: Any) -> U16:
        chosen = choose(self, rows, places, slots, permits, *rest)
        stuck = np.flatnonzero(permits[self.selector.owners[slots]] <= 0)
        if len(stuck):
            chosen[stuck[0] :] = 0
        return chosen

    patch.setattr(Planning, "choose", together)


def nobody_hears_of_permits(patch: pytest.MonkeyPatch) -> None:
    grant = Consumers.grant
    patch.setattr(Consumers, "grant", lambda self, number, permits, most: grant(self, number, permits, most) and False)


# ---- negative acknowledgements


def nothing_is_taken_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockingNacks, "take_behind", lambda self, rows: (KeyedRows.empty(), np.empty(0, np.uint32)))


def a_new_owner_knows_of_no_nacks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KeyShared, "learn_nacked", lambda self, rows: None)


# ---- plans


def a_plan_is_forgotten_when_another_stream_ends(patch: pytest.MonkeyPatch) -> None:
    close = PlannedPositions.close

    def all_of_them(self: PlannedPositions, stream: int) -> BitMap64:
        return close(self, stream) | self.keys

    patch.setattr(PlannedPositions, "close", all_of_them)


# ---- the last sent position


def who_joined_receives_what_is_behind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LastSentPosition, "may_receive", lambda self, ledger_id, entry_id, consumers: _all(consumers, True))


def delayed_rows_are_among_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    def offered(self: KeyShared, rows: KeyedRows, consumers: U16) -> Any:
        self.last_sent.offer(rows.rows.ledger_id, rows.rows.entry_id)
        self.last_sent.sent(rows.rows.ledger_id, rows.rows.entry_id)
        return sent(self, rows, consumers)

    sent = KeyShared._sent
    patch.setattr(KeyShared, "_sent", offered)


PLANTS: tuple[tuple[Plant, Profile], ...] = (
    (two_consumers_hold_one_key, DRAINING),
    (a_hash_is_free_before_its_acknowledgement_is_durable, DRAINING),
    (what_others_have_received_since_is_held_too, DRAINING),
    (later_rows_of_a_key_pass_those_that_wait, DRAINING),
    (what_comes_back_is_behind_what_is_new, DRAINING),
    (what_comes_back_is_in_no_order, DRAINING),
    (what_a_consumer_held_that_left_is_lost, DRAINING),
    (keys_of_one_hash_do_not_wait_for_each_other, DRAINING),
    (one_without_permits_holds_up_the_others, DRAINING),
    (nobody_hears_of_permits, DRAINING),
    (nothing_is_taken_back, BLOCKING),
    (a_hash_is_free_before_its_consumer_is_told, BLOCKING),
    (a_new_owner_knows_of_no_nacks, BLOCKING),
    (a_plan_is_forgotten_when_another_stream_ends, DRAINING),
    (who_joined_receives_what_is_behind, LAST_SENT),
    (delayed_rows_are_among_what_was_sent, LAST_SENT),
)


@pytest.mark.rotating
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("plant", "profile"), PLANTS, ids=lambda each: getattr(each, "__name__", ""))
def test_a_planted_bug_is_found_by_the_oracle(plant: Plant, profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    # The product's own checks find it, too.
    with pytest.raises((AssertionError, InvariantViolated)):
        _run(profile)


def _run(profile: Profile) -> None:
    for seed in SEEDS:
        OrderDriver(profile, seed).run(OPERATIONS)
