"""What was negatively acknowledged of a topic, its dead letters and its levels, as of one moment.

Owns: the frozen values, and taking them.
Does not own: the stored form (`daemon.topic.stored_redeliveries`), and putting them back (`nack_decisions`,
`level_rows`).
"""

from __future__ import annotations

import dataclasses

from pyroaring import BitMap64

from daemon.core.backlog.dead_letter_rows import FrozenDeadLetters
from daemon.core.backlog.nack_tracker import FrozenNacks
from daemon.core.decisions.subscription_state import SubscriptionState


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SubscriptionCut:
    """What was negatively acknowledged of one subscription, and its dead letters. `planes`: of counts, bit by bit."""

    subscription_id: int
    nacked: FrozenNacks
    planes: tuple[BitMap64, ...]
    dead_letters: FrozenDeadLetters
    last_dead_letter_id: int


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class RedeliveryCut:
    """What was negatively acknowledged of a topic's subscriptions that have any.

    `levels`: (index, delay level, rows that were added by it).
    """

    subscriptions: tuple[SubscriptionCut, ...]
    levels: tuple[tuple[int, int, BitMap64], ...]


def cut_of(state: SubscriptionState) -> SubscriptionCut | None:
    """None where there is nothing. As much work as there are runs, and as bitmaps are large."""
    planes = state.counts.planes()
    if not (len(state.nacks) or planes or state.last_dead_letter_id):
        return None
    return SubscriptionCut(
        state.subscription_id, state.nacks.freeze(), planes, state.dead_letters.freeze(), state.last_dead_letter_id
    )
