from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from daemon.core.deletions import ledger_deletions
from daemon.core.deletions.ledger_deletions import RetryPolicy, answer_of_failure
from storage_backends.formats.deletion_format import (
    Deletion,
    DeletionAnswer,
    DeletionOutcome,
    LedgerComponent,
    LedgerType,
    PendingDelete,
)

U64_MAX = (1 << 64) - 1
# PIP-186's own.
POLICY = RetryPolicy(reconsume_later_ms=600_000, max_retry_delete_count=10, jitter=0.1)
DELETION = Deletion(7, "orders", PendingDelete(LedgerComponent.MANAGED_LEDGER, LedgerType.LEDGER, 1), 1_000, begun=True)


def failed(
    deletion: Deletion = DELETION,
    *,
    now_ms: int = 5_000,
    policy: RetryPolicy = POLICY,
    random: float = 0.5,
    text: str = "no",
    maybe_deleted: bool = False,
) -> DeletionAnswer:
    return answer_of_failure(
        deletion, now_ms=now_ms, policy=policy, random=random, text=text, maybe_deleted=maybe_deleted
    )


def attempts_until_given_up(policy: RetryPolicy) -> int:
    deletion, attempts = DELETION, 0
    while deletion.outcome is DeletionOutcome.PENDING:
        attempts += 1
        deletion = ledger_deletions.after_answer(
            ledger_deletions.after_begin(deletion), failed(deletion, policy=policy)
        )
    assert deletion.failures == attempts
    return attempts


def test_the_first_attempt_and_ten_retries_may_fail() -> None:
    assert attempts_until_given_up(POLICY) == 11


def test_without_retries_the_first_failure_is_the_last() -> None:
    assert attempts_until_given_up(RetryPolicy(600_000, 0, 0.1)) == 1


def test_an_answer_says_what_came_of_the_attempt() -> None:
    assert failed(maybe_deleted=True) == DeletionAnswer(7, DeletionOutcome.FAILED, 5_000, 605_000, True, "no")
    last = Deletion(7, "orders", DELETION.pending_delete, 1_000, begun=True, failures=10)
    assert failed(last, maybe_deleted=True) == DeletionAnswer(7, DeletionOutcome.GIVEN_UP, 5_000, 0, True, "no")


def test_a_retry_is_due_after_the_time_of_the_policy_give_or_take_its_jitter() -> None:
    assert failed(random=0.0).retry_at_ms == 5_000 + 540_000
    assert failed(random=0.5).retry_at_ms == 5_000 + 600_000
    assert failed(random=0.75).retry_at_ms == 5_000 + 630_000


def test_a_retry_is_never_due_before_half_of_the_time() -> None:
    assert failed(policy=RetryPolicy(600_000, 10, 1.0), random=0.0).retry_at_ms == 5_000 + 300_000


def test_times_are_rounded_up() -> None:
    assert failed(policy=RetryPolicy(1, 10, 1.0), random=0.0, now_ms=0).retry_at_ms == 1
    assert failed(policy=RetryPolicy(1_001, 10, 0.5), random=0.1, now_ms=0).retry_at_ms == 601


@given(
    st.integers(0, U64_MAX),
    st.integers(1, 1 << 40),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_a_retry_is_due_within_its_bounds_whatever_is_drawn(
    now_ms: int, reconsume_later_ms: int, jitter: float, random: float
) -> None:
    policy = RetryPolicy(reconsume_later_ms, 10, jitter)
    at_ms = failed(policy=policy, now_ms=now_ms, random=random).retry_at_ms
    assert min(now_ms + reconsume_later_ms // 2, U64_MAX) <= at_ms <= min(now_ms + 2 * reconsume_later_ms + 1, U64_MAX)


def test_a_long_text_is_shortened() -> None:
    text = failed(text="x" * 1_000).text
    assert len(text) == ledger_deletions.TEXT_CHARACTERS_MAX
    assert text.endswith("x…")
    assert failed(text="x" * ledger_deletions.TEXT_CHARACTERS_MAX).text == "x" * ledger_deletions.TEXT_CHARACTERS_MAX
