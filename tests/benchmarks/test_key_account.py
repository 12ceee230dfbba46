"""The account of rows with keys: what breaks the order of a key, or loses a row, is told."""

from __future__ import annotations

import dataclasses

import numpy as np

from benchmarks import key_account
from benchmarks.key_account import Account
from benchmarks.key_dispatcher import NEVER_NS, Seen
from benchmarks.key_load import Load, Plan

START_MS = 1_000_000
MS = 1_000_000


def plan(*, in_order: bool = True, nacked_share: float = 0.0) -> Plan:
    return Plan(
        start_ms=START_MS,
        seconds=1,
        rows_per_s=1_000,
        keys=50,
        delay_from_ms=500,
        delay_until_ms=900,
        in_order=in_order,
        nacked_share=nacked_share,
        nack_delay_ms=100,
        seed=1,
    )


def all_right(of: Load) -> Seen:
    """Every row comes 2 ms late, is held for 1 ms by the consumer of its slot and acknowledged."""
    number = np.lexsort((np.arange(len(of)), of.rows.deliver_at_ms))
    came_ns = of.rows.deliver_at_ms[number].astype(np.int64) * MS + 2 * MS + np.arange(len(of))
    done_ns = came_ns + MS
    return Seen(
        received_number=number,
        received_at_ns=came_ns,
        received_count=np.zeros(len(of), np.int64),
        held_number=number,
        held_consumer=of.slot[number].astype(np.int64) % 3 + 1,
        held_from_ns=came_ns,
        held_until_ns=done_ns,
        settled_number=number,
        settled_at_ns=done_ns,
        settled_answered_ns=done_ns + MS,
        settled_is_nack=np.zeros(len(of), bool),
        left_ns=np.empty((0, 2), np.int64),
        ignored=0,
        taken_back=0,
        other_rows=0,
        joins=0,
    )


def broken(of: Load, seen: Seen) -> dict[str, int]:
    answered_at_ms = np.full(len(of), START_MS)
    return {what: count for what, count in Account(of, seen, answered_at_ms).breaches().items() if count}


def neighbours(of: Load) -> tuple[int, int]:
    """Two rows of one slot with different times, the earlier one first."""
    order = np.lexsort((of.rows.deliver_at_ms, of.slot))
    pairs = zip(order[:-1].tolist(), order[1:].tolist(), strict=True)
    due = of.rows.deliver_at_ms
    return next((one, other) for one, other in pairs if of.slot[one] == of.slot[other] and due[one] + 5 < due[other])


def swapped(of: Load, column: np.ndarray, number: np.ndarray) -> np.ndarray:
    one, other = (int(np.flatnonzero(number == each)[0]) for each in neighbours(of))
    changed = column.copy()
    changed[[one, other]] = column[[other, one]]
    return changed


def test_what_is_as_promised_breaks_nothing() -> None:
    for in_order in (True, False):
        of = Load(plan(in_order=in_order))
        account = Account(of, all_right(of), np.full(len(of), START_MS))
        assert not any(account.breaches().values())
        assert np.allclose(account.lateness_ms(), 2, atol=0.01)


def test_both_processes_derive_the_same_rows_and_keys_of_a_plan_in_order_are_due_in_the_order_of_positions() -> None:
    one, other = Load(plan()), Load(plan())
    assert np.array_equal(one.rows.deliver_at_ms, other.rows.deliver_at_ms)
    assert np.array_equal(one.key_hash, other.key_hash)
    for slot in np.unique(one.slot):
        assert (np.diff(one.rows.deliver_at_ms[one.slot == slot].astype(np.int64)) >= 0).all()


def test_a_row_that_comes_before_an_earlier_one_of_its_key_is_an_inversion_unless_it_was_late_on_arrival() -> None:
    of = Load(plan(in_order=False))
    seen = all_right(of)
    one, other = neighbours(of)
    first = seen.received_at_ns.copy()
    first[seen.received_number == one] = first[seen.received_number == other] + 1
    wrong = dataclasses.replace(seen, received_at_ns=first)
    assert broken(of, wrong)[key_account.FIRST_DELIVERY] == 1
    answered_at_ms = np.full(len(of), START_MS)
    answered_at_ms[one] = of.rows.deliver_at_ms[one]
    assert not Account(of, wrong, answered_at_ms).breaches()[key_account.FIRST_DELIVERY]


def test_rows_that_were_under_way_while_a_consumer_left_are_out_of_the_order_where_positions_say_another_one() -> None:
    of = Load(plan(in_order=False))
    seen = all_right(of)
    one, other = neighbours(of)
    first = seen.received_at_ns.copy()
    first[seen.received_number == one] = first[seen.received_number == other] + 1
    asked_ns = int(of.rows.deliver_at_ms[one]) * MS
    left = np.array([[asked_ns, asked_ns + MS]])
    wrong = dataclasses.replace(seen, received_at_ns=first, left_ns=left)
    assert key_account.FIRST_DELIVERY not in broken(of, wrong)


def test_a_row_that_is_acknowledged_before_an_earlier_one_of_its_key_is_an_inversion() -> None:
    of = Load(plan())
    seen = all_right(of)
    wrong = dataclasses.replace(seen, settled_at_ns=swapped(of, seen.settled_at_ns, seen.settled_number))
    assert broken(of, wrong) == {key_account.ACKNOWLEDGEMENT: 1}


def test_a_key_that_two_consumers_have_at_one_time_is_told() -> None:
    of = Load(plan())
    seen = all_right(of)
    one, other = neighbours(of)
    until = seen.held_until_ns.copy()
    until[seen.held_number == one] = NEVER_NS
    consumer = seen.held_consumer.copy()
    consumer[seen.held_number == other] = 9
    assert key_account.AT_TWO not in broken(of, dataclasses.replace(seen, held_consumer=consumer))
    wrong = dataclasses.replace(seen, held_consumer=consumer, held_until_ns=until)
    assert broken(of, wrong) == {key_account.AT_TWO: 1}


def test_a_row_that_never_comes_comes_early_or_again_or_is_not_acknowledged_is_told() -> None:
    of = Load(plan())
    seen = all_right(of)
    fewer = dataclasses.replace(
        seen,
        received_number=seen.received_number[:-1],
        received_at_ns=seen.received_at_ns[:-1],
        received_count=seen.received_count[:-1],
    )
    assert broken(of, fewer) == {key_account.MISSING: 1}
    early = seen.received_at_ns.copy()
    early[0] -= 3 * MS
    assert broken(of, dataclasses.replace(seen, received_at_ns=early)) == {key_account.EARLY: 1}
    again = dataclasses.replace(
        seen,
        received_number=np.append(seen.received_number, seen.received_number[0]),
        received_at_ns=np.append(seen.received_at_ns, seen.settled_answered_ns[0] + 1),
        received_count=np.append(seen.received_count, 0),
    )
    assert broken(of, again) == {key_account.AFTER_ACKNOWLEDGEMENT: 1}
    nack = seen.settled_is_nack.copy()
    nack[0] = True
    assert key_account.UNACKNOWLEDGED in broken(of, dataclasses.replace(seen, settled_is_nack=nack))


def test_a_nacked_row_comes_again_when_its_delay_is_over_and_the_rows_behind_it_are_not_free() -> None:
    of = Load(plan())
    seen = all_right(of)
    one, other = neighbours(of)
    place = int(np.flatnonzero(seen.settled_number == one)[0])
    nacked_ns = int(seen.settled_at_ns[place])
    is_nack = np.append(seen.settled_is_nack, False)
    is_nack[place] = True

    def after(delay_ms: int) -> Seen:
        return dataclasses.replace(
            seen,
            received_number=np.append(seen.received_number, one),
            received_at_ns=np.append(seen.received_at_ns, nacked_ns + delay_ms * MS),
            received_count=np.append(seen.received_count, 1),
            settled_number=np.append(seen.settled_number, one),
            settled_at_ns=np.append(seen.settled_at_ns, nacked_ns + 10_000 * MS),
            settled_answered_ns=np.append(seen.settled_answered_ns, nacked_ns + 10_001 * MS),
            settled_is_nack=is_nack,
        )

    assert key_account.EARLY not in broken(of, after(100))
    assert broken(of, after(99))[key_account.EARLY] == 1
    account = Account(of, after(100), np.full(len(of), START_MS))
    behind = (of.slot == of.slot[other]) & (of.rows.deliver_at_ms >= of.rows.deliver_at_ms[one])
    assert len(account.lateness_ms()) - len(account.free_lateness_ms()) == np.count_nonzero(behind) - 1
