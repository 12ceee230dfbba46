"""The check by identity finds each way in which a run can go wrong."""

from __future__ import annotations

import numpy as np
import pytest

from examples import verdict

LEDGERS = np.array([5, 5, 5, 9, 9], dtype=np.uint64)
ENTRIES = np.array([0, 1, 2, 0, 1], dtype=np.uint64)
DUE_MS = np.array([100, 200, 300, 400, 500], dtype=np.uint64)
KEYS = np.array([1, 2, 3, 4, 5], dtype=np.uint32)
ALL = slice(0, 5)


def receive(
    account: verdict.Account, rows: slice | list[int], *, epoch: int = 1, at_ms: int = 1_000, **changes: object
) -> None:
    columns = {"ledger_id": LEDGERS[rows], "entry_id": ENTRIES[rows], "deliver_at_ms": DUE_MS[rows]}
    account.note_received(**{**columns, "key_hash": KEYS[rows], **changes}, epoch=epoch, at_ms=at_ms)  # type: ignore[arg-type]


@pytest.fixture
def account() -> verdict.Account:
    """Five rows, all answered."""
    made = verdict.Account(LEDGERS, ENTRIES, DUE_MS, KEYS)
    made.note_answered(ALL, 50)
    return made


def broken(account: verdict.Account) -> dict[str, int]:
    """What is broken but for acknowledgements that are still to come."""
    rules = {rule.name: rule.broken for rule in account.verdict().rules if rule.broken}
    rules.pop("every acknowledgement is durable", None)
    return rules


def test_a_run_without_faults_is_kept_and_counted(account: verdict.Account) -> None:
    receive(account, ALL)
    account.note_durable(np.arange(5), 1_100)
    assert account.verdict().kept
    assert (account.answered, account.received, account.durable) == (5, 5, 5)


def test_a_row_that_never_came_is_lost(account: verdict.Account) -> None:
    receive(account, [0, 1, 3, 4])
    assert broken(account) == {"none is lost": 1}


def test_a_row_that_was_never_answered_is_reported_and_not_lost() -> None:
    account = verdict.Account(LEDGERS, ENTRIES, DUE_MS, KEYS)
    account.note_answered(slice(0, 4), 50)
    receive(account, [0, 1, 2, 3])
    assert broken(account) == {"every row was added": 1}


def test_a_row_before_its_time_is_early(account: verdict.Account) -> None:
    receive(account, ALL, at_ms=499)
    assert broken(account)["none is early"] > 0


def test_a_wrong_due_time_is_found_even_when_it_hides_that_the_row_is_early(account: verdict.Account) -> None:
    receive(account, [0, 1, 2, 3])
    receive(account, [4], at_ms=450, deliver_at_ms=np.array([450], dtype=np.uint64))
    assert broken(account) == {"none is early": 1, "due times are right": 1}


def test_a_wrong_key_hash_is_found(account: verdict.Account) -> None:
    receive(account, ALL, key_hash=KEYS + np.uint32(1))
    assert broken(account) == {"key hashes are right": 5}


@pytest.mark.parametrize(("ledger", "entry"), [(4, 0), (5, 3), (7, 0), (9, 2), (10, 0), (5, 2**63)])
def test_a_position_that_nobody_added_is_found(account: verdict.Account, ledger: int, entry: int) -> None:
    receive(account, ALL)
    receive(account, [0], ledger_id=np.array([ledger], np.uint64), entry_id=np.array([entry], np.uint64))
    assert broken(account) == {"nothing comes that was not added": 1}


def test_a_repeat_under_the_same_epoch_is_a_breach_and_one_under_a_higher_epoch_is_owed(
    account: verdict.Account,
) -> None:
    receive(account, ALL)
    receive(account, [0], epoch=2, at_ms=1_100)
    assert broken(account) == {}
    assert account.verdict().handed_out_again == 1
    receive(account, [0], epoch=2, at_ms=1_200)
    assert broken(account) == {"no repeat but after a kill": 1}


def test_a_row_twice_in_one_message_is_a_breach(account: verdict.Account) -> None:
    receive(account, [0, 1, 2, 3, 4, 4])
    assert broken(account) == {"no repeat but after a kill": 1}
    assert account.received == 5


def test_a_repeat_after_the_acknowledgement_was_durable_is_a_breach(account: verdict.Account) -> None:
    receive(account, ALL)
    account.note_durable(np.array([3]), 1_050)
    receive(account, [3], epoch=2, at_ms=1_100)
    assert broken(account) == {"no repeat of what was acknowledged": 1}


def test_a_row_that_was_acknowledged_before_its_repeated_add_was_answered_may_come_again() -> None:
    account = verdict.Account(LEDGERS, ENTRIES, DUE_MS, KEYS)
    account.note_sent_again(slice(0, 1))
    receive(account, ALL)
    account.note_durable(np.array([0]), 1_050)
    account.note_answered(ALL, 1_075)
    receive(account, [0], epoch=2, at_ms=1_100)
    assert broken(account) == {}
    assert account.verdict().added_again == 1
