"""The account of a consumer names what was lost, what came twice, early, or though nobody asked for it."""

from __future__ import annotations

from benchmarks.carrying import RETRY_MS, Account, Delivery, Message

DUE_MS = 1_000


def account_of_two() -> Account:
    """Message 0 fails twice; message 1 does not."""
    account = Account(2, fails_every=10)
    account.publish([Message(0, DUE_MS), Message(1, DUE_MS)])
    return account


def delivery(number: int, attempt: int, at_ms: int, place: str = "") -> Delivery:
    return Delivery(number, attempt, place or f"{number}-{attempt}", at_ms)


def test_what_fails_is_wanted_again_and_what_is_read_again_is_no_double() -> None:
    account = account_of_two()
    first = delivery(0, 0, DUE_MS)
    assert account.take([first, delivery(1, 0, DUE_MS + 7)]) == [first]
    assert account.take([first]) == [first]
    assert not account.is_complete
    account.take([delivery(0, 1, DUE_MS + RETRY_MS), delivery(0, 2, DUE_MS + 2 * RETRY_MS)])
    assert account.is_complete
    assert (account.problems(), account.doubles) == ([], [])
    assert account.lateness_ms() == [7]


def test_what_is_lost_early_unasked_or_double_is_named() -> None:
    account = account_of_two()
    account.take([delivery(1, 0, DUE_MS - 1), delivery(1, 1, DUE_MS)])
    account.take([delivery(0, 0, DUE_MS), delivery(0, 1, DUE_MS + RETRY_MS - 1), delivery(1, 0, DUE_MS, "elsewhere")])
    assert account.problems() == [
        "1 never arrived, as [(0, 2)]",
        "1 arrived though nobody asked, as [(1, 1)]",
        "2 arrived early, as [(0, 1), (1, 0)]",
    ]
    assert account.doubles == [(1, 0)]


def test_how_long_the_first_deliveries_took_counts_neither_the_first_message_nor_what_came_again() -> None:
    account = account_of_two()
    account.take([delivery(0, 0, DUE_MS - 500), delivery(1, 0, DUE_MS + 250), delivery(0, 1, DUE_MS + 900)])
    assert account.first_deliveries_s == 0.25
