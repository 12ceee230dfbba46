"""What is in use of a topic as of one moment, and what is beside the ledgers that a long statement names."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions.ledgers_in_use import InUse
from storage_backends.formats.deletion_format import InUseChange, InUseLedgers, LedgerType

Ledger = tuple[int, int, int]
OFFLOADED, LEDGER = LedgerType.OFFLOADED_LEDGER, LedgerType.LEDGER
ledgers_of_few = st.sets(st.tuples(st.integers(0, 5), st.sampled_from([0, 1 << 63]), st.sampled_from([0, 256])))


def ledgers(named: Iterable[Ledger], ledger_type: LedgerType = OFFLOADED) -> InUseLedgers:
    rows = np.array(sorted(named), np.uint64).reshape(-1, 3)
    return InUseLedgers(ledger_type, *(np.ascontiguousarray(rows[:, number]) for number in range(3)))


def named_by(columns: InUseLedgers) -> set[Ledger]:
    rows = zip(columns.ledger_id.tolist(), columns.uuid_msb.tolist(), columns.uuid_lsb.tolist(), strict=True)
    return set(rows)


@given(before=ledgers_of_few, stated=ledgers_of_few, portion=st.integers(1, 4))
def test_a_long_statement_in_portions_comes_to_what_one_replace_does(
    before: set[Ledger], stated: set[Ledger], portion: int
) -> None:
    whole, by_portions = InUse(), InUse()
    for in_use in (whole, by_portions):
        in_use.change("other", InUseChange.RECORD, ledgers(before))
        in_use.change("t", InUseChange.RECORD, ledgers(before, LEDGER))
        in_use.change("t", InUseChange.RECORD, ledgers(before))
    whole.change("t", InUseChange.REPLACE, ledgers(stated))

    others = sorted(named_by(by_portions.of("t", OFFLOADED).beside(ledgers(stated))))
    for change, rows in ((InUseChange.RECORD, sorted(stated)), (InUseChange.FORGET, others)):
        for start in range(0, len(rows), portion):
            by_portions.change("t", change, ledgers(rows[start : start + portion]))
    assert not by_portions.knows("t")
    by_portions.change("t", InUseChange.COMPLETE, ledgers([]))

    assert by_portions.knows("t")
    assert not by_portions.knows("other")
    states = [
        [(each.topic, each.complete, [(part.ledger_type, named_by(part)) for part in each.ledgers]) for each in state]
        for state in (whole.freeze().state(), by_portions.freeze().state())
    ]
    assert states[0] == states[1]


def test_what_is_in_use_at_one_moment_does_not_change_afterwards() -> None:
    in_use = InUse()
    in_use.change("t", InUseChange.RECORD, ledgers([(1, 0, 0), (2, 7, 7)]))
    then = in_use.of("t", OFFLOADED)
    in_use.change("t", InUseChange.REPLACE, ledgers([(3, 0, 0)]))

    assert len(then) == 2
    assert named_by(then.beside(ledgers([(2, 7, 7)]))) == {(1, 0, 0)}


def test_nothing_is_in_use_of_a_topic_of_which_nothing_was_said() -> None:
    in_use = InUse()

    assert len(in_use.of("t", OFFLOADED)) == 0
    assert len(in_use.of("t", OFFLOADED).beside(ledgers([(1, 0, 0)]))) == 0
    assert in_use.ledgers_of("t") == 0
    assert in_use.topics == 0


@pytest.mark.parametrize("change", [InUseChange.RECORD, InUseChange.FORGET])
def test_a_topic_is_not_known_by_some_of_its_ledgers(change: InUseChange) -> None:
    in_use = InUse()
    in_use.change("t", change, ledgers([(1, 7, 7)]))
    in_use.change("t", InUseChange.REPLACE, ledgers([(1, 0, 0)], LEDGER))

    assert not in_use.knows("t")


@pytest.mark.parametrize("stated", [[], [(1, 7, 7)]], ids=["nothing", "something"])
def test_a_topic_that_is_known_is_known_after_a_restart_and_whatever_is_said_later(stated: list[Ledger]) -> None:
    in_use = InUse()
    in_use.change("t", InUseChange.REPLACE, ledgers(stated))
    in_use.change("t", InUseChange.FORGET, ledgers([(1, 7, 7)]))

    assert in_use.knows("t")
    assert InUse.restored(in_use.freeze().state()).knows("t")


def test_forgetting_is_of_what_was_said_so() -> None:
    in_use = InUse()
    in_use.change("t", InUseChange.RECORD, ledgers([(1, 0, 0), (1, 7, 7)]))

    assert in_use.change("t", InUseChange.FORGET, ledgers([(1, 0, 0)])) == 1
    assert in_use.holds(7, 7, 1)
    assert not in_use.holds(8, 8, 1)
    assert in_use.change("t", InUseChange.FORGET, ledgers([(1, 8, 8)])) == 0
    assert in_use.change("t", InUseChange.FORGET, ledgers([(1, 7, 7)])) == 1
    assert in_use.ledgers == 0


def test_forgetting_of_a_topic_of_which_nothing_was_said_keeps_nothing_of_it() -> None:
    in_use = InUse()
    assert in_use.change("t", InUseChange.FORGET, ledgers([(1, 0, 0)])) == 0
    assert (in_use.topics, in_use.freeze().state()) == (0, ())


def test_ledgers_of_a_topic_are_counted_over_many_chunks() -> None:
    in_use = InUse()
    in_use.change("before", InUseChange.RECORD, ledgers((number, 1, number) for number in range(5_000)))
    in_use.change("t", InUseChange.RECORD, ledgers((number, 1, number) for number in range(7_000)))
    in_use.change("t", InUseChange.RECORD, ledgers(((number, 0, 0) for number in range(3_000)), LEDGER))
    in_use.change("after", InUseChange.RECORD, ledgers([(0xFFFF_FFFF_FFFF_FFFF, 0, 0)]))

    assert in_use.ledgers_of("t", OFFLOADED) == 7_000
    assert in_use.ledgers_of("t", LEDGER) == 3_000
    assert in_use.ledgers_of("t") == 10_000
    assert in_use.ledgers_of("after") == 1
