"""When a failed attempt is followed by another one, and when by none.

Owns: the answer that is recorded of a failure: decided once, and then durable, so that a change of the policy changes
nothing of what was decided.
Does not own: what is a failure (the ledger stores), what the answer comes to (`life`), and randomness, which is passed
in.
"""

from __future__ import annotations

import dataclasses
import math

from storage_backends.formats.deletion_format import Deletion, DeletionAnswer, DeletionOutcome

# Of what a store says; it is kept in memory and in every checkpoint.
TEXT_CHARACTERS_MAX = 300
_U64_MAX = (1 << 64) - 1
# A day: what waits for longer was decided by a clock that was ahead, unless the policy says more.
_MISDATED_MS = 86_400_000


@dataclasses.dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`reconsume_later_ms` after a failure, give or take the part `jitter` (0 to 1) of it, another attempt may begin;
    `max_retry_delete_count` times (PIP-186).
    """

    reconsume_later_ms: int
    max_retry_delete_count: int
    jitter: float

    def latest_ms(self, now_ms: int) -> int:
        """Nobody means to wait for longer than until then. Former policies may have waited longer than this one."""
        return now_ms + max(math.ceil(self.reconsume_later_ms * (1 + self.jitter)), _MISDATED_MS)


def answer_of_failure(
    deletion: Deletion,
    *,
    now_ms: int,
    policy: RetryPolicy,
    random: float,
    text: str,
    maybe_deleted: bool,
) -> DeletionAnswer:
    """The answer of a failed attempt: the first one and its retries may fail, the failure of the last retry is
    GIVEN_UP. `random`: from [0, 1).
    """
    text = shortened(text)
    if deletion.failures >= policy.max_retry_delete_count:
        return DeletionAnswer(
            deletion.deletion_id, DeletionOutcome.GIVEN_UP, now_ms, maybe_deleted=maybe_deleted, text=text
        )
    return DeletionAnswer(
        deletion.deletion_id,
        DeletionOutcome.FAILED,
        now_ms,
        min(now_ms + _delay_ms(policy, random), _U64_MAX),
        maybe_deleted,
        text,
    )


def _delay_ms(policy: RetryPolicy, random: float) -> int:
    delay_ms = policy.reconsume_later_ms * (1 + policy.jitter * (2 * random - 1))
    return math.ceil(max(delay_ms, policy.reconsume_later_ms / 2))


def shortened(text: str) -> str:
    """The text, or its beginning; what is no Unicode in it, as JSON and names of files may have it, is `?`."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= TEXT_CHARACTERS_MAX else text[: TEXT_CHARACTERS_MAX - 1] + "…"
