"""The account of rows that are cancelled and rescheduled while others come due: what breaks a promise is told."""

from __future__ import annotations

import numpy as np

from benchmarks import load
from benchmarks.life_rows import Account, Load, Plan

BEGIN_MS, END_MS = 1_000_000, 1_008_000
ROWS = 1_000
PLAN = Plan(waiting=20_000, due=10_000, begin_ms=BEGIN_MS, end_ms=END_MS, seed=1)


def test_rows_of_a_plan_come_due_within_its_time_or_long_after() -> None:
    due = Load(PLAN).rows.deliver_at_ms
    soon = (due >= BEGIN_MS) & (due < END_MS)
    assert np.count_nonzero(soon) == PLAN.due
    assert due[~soon].min() > END_MS + 60_000


def test_both_processes_derive_the_same_rows() -> None:
    one, other = Load(PLAN), Load(PLAN)
    assert np.array_equal(one.rows.deliver_at_ms, other.rows.deliver_at_ms)
    assert np.array_equal(one.new_deliver_at_ms, other.new_deliver_at_ms)
    assert np.array_equal(one.chosen(1, ROWS), other.chosen(1, ROWS))


def test_no_row_is_chosen_twice_and_some_come_due_meanwhile() -> None:
    of = Load(PLAN)
    chosen = np.concatenate([of.chosen(part, ROWS) for part in range(3)])
    assert len(np.unique(chosen)) == len(chosen) == 3 * ROWS
    assert 0 < np.count_nonzero(of.rows.deliver_at_ms[chosen] < END_MS) < ROWS
    sooner = of.new_deliver_at_ms[chosen] < END_MS
    assert 0 < np.count_nonzero(sooner) < ROWS
    assert of.new_deliver_at_ms[chosen][sooner].min() >= (BEGIN_MS + END_MS) // 2


def withdrawn() -> tuple[Account, Load]:
    of = Load(PLAN)
    account = Account(of)
    account.note_cancelled(of.chosen(0, ROWS))
    rescheduled = of.chosen(1, ROWS)
    account.note_rescheduled(rescheduled, np.full(len(rescheduled), BEGIN_MS))
    return account, of


def problems(account: Account, came: load.Rows, *, late_ms: int = 5) -> list[str]:
    received_at_ms = came.deliver_at_ms.astype(np.int64) + late_ms
    return list(account.problems(came, received_at_ms, until_ms=END_MS))


def joined(rows: load.Rows, of: Load, number: int) -> load.Rows:
    """The rows and one more, with the time that it was added with."""
    columns = zip(
        (rows.ledger_id, rows.entry_id, rows.deliver_at_ms),
        (of.rows.ledger_id, of.rows.entry_id, of.rows.deliver_at_ms),
        strict=True,
    )
    return load.Rows(*(np.append(mine, theirs[number]) for mine, theirs in columns))


def test_every_row_is_owed_or_pending_unless_it_was_cancelled() -> None:
    account, of = withdrawn()
    owed, pending = account.owed(until_ms=END_MS), account.pending(from_ms=END_MS)
    assert len(owed) + len(pending) == len(of.rows) - ROWS
    assert owed.deliver_at_ms.max() < END_MS <= pending.deliver_at_ms.min()
    assert problems(account, owed) == []


def test_a_cancelled_row_that_comes_is_told() -> None:
    account, of = withdrawn()
    came = joined(account.owed(until_ms=END_MS), of, int(of.chosen(0, ROWS)[0]))
    assert problems(account, came)[0] == "1 rows came that were cancelled"


def test_a_row_that_comes_early_twice_not_at_all_or_with_its_old_time_is_told() -> None:
    account, of = withdrawn()
    owed = account.owed(until_ms=END_MS)
    assert problems(account, owed, late_ms=-1) == [f"{len(owed):,} rows came early"]
    missing = load.Rows(owed.ledger_id[1:], owed.entry_id[1:], owed.deliver_at_ms[1:])
    assert problems(account, missing) == [
        f"{len(owed) - 1:,} rows came, {len(owed) - 1:,} of the {len(owed):,} that are owed"
    ]
    twice = joined(owed, of, int(np.flatnonzero(of.rows.joined() == owed.joined()[0])[0]))
    assert problems(account, twice)[-1].startswith(f"{len(owed) + 1:,} rows came, {len(owed):,} of the ")
    rescheduled = of.chosen(1, ROWS)
    old = owed.deliver_at_ms.copy()
    moved = np.flatnonzero(np.isin(owed.joined(), of.rows.joined()[rescheduled]))[0]
    old[moved] += np.uint64(1)
    changed = load.Rows(owed.ledger_id, owed.entry_id, old)
    assert problems(account, changed) == ["1 rows came with another due time"]


def test_a_row_whose_new_time_had_come_when_it_was_answered_is_late_by_itself() -> None:
    of = Load(PLAN)
    account = Account(of)
    numbers = of.chosen(0, ROWS)
    numbers = numbers[of.new_deliver_at_ms[numbers] < END_MS]
    answered_at_ms = of.new_deliver_at_ms[numbers].astype(np.int64)
    answered_at_ms[0] -= 1
    account.note_rescheduled(numbers, answered_at_ms)
    rows = load.Rows(of.rows.ledger_id[numbers], of.rows.entry_id[numbers], of.new_deliver_at_ms[numbers])
    assert np.flatnonzero(account.in_time(rows)).tolist() == [0]
