"""How many deletions there are, of what, and since when.

Owns: the counts, kept up to date so that asking costs nothing.
Does not own: the deletions, and counts of one topic, which nobody keeps (`LedgerDeletions.cut`, `count`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from sortedcontainers import SortedList

from daemon.core.deletions import life
from daemon.core.deletions.life import State
from storage_backends.formats.deletion_format import Deletion, LedgerComponent, LedgerType


@dataclasses.dataclass(frozen=True, slots=True)
class KindCount:
    """`oldest_ms`: when the first of those in flight was recorded, or retried; 0 when there is none. `dead`: those that
    were given up. `held`: those that ended as their owner says that the ledger is in use.
    """

    component: LedgerComponent
    ledger_type: LedgerType
    in_flight: int
    begun: int
    oldest_ms: int
    dead: int
    held: int


@dataclasses.dataclass(frozen=True, slots=True)
class DeletionCounts:
    """`kinds`: those that have any in flight, dead or held. In flight are those that wait or have begun."""

    kinds: tuple[KindCount, ...] = ()

    @property
    def in_flight(self) -> int:
        return sum(kind.in_flight for kind in self.kinds)

    @property
    def begun(self) -> int:
        return sum(kind.begun for kind in self.kinds)

    @property
    def dead(self) -> int:
        return sum(kind.dead for kind in self.kinds)

    @property
    def held(self) -> int:
        return sum(kind.held for kind in self.kinds)

    @property
    def oldest_ms(self) -> int:
        return min((kind.oldest_ms for kind in self.kinds if kind.in_flight), default=0)


class _Count:
    def __init__(self) -> None:
        # When those in flight were recorded; a time stands there once for each.
        self.recorded_ms: SortedList[int] = SortedList()
        self.begun = 0
        self.dead = 0
        self.held = 0


class Counting:
    def __init__(self) -> None:
        self._kinds = {(component, kind): _Count() for component in LedgerComponent for kind in LedgerType}

    def add(self, deletion: Deletion) -> None:
        count, state = self._count(deletion), life.state_of(deletion)
        if state in (State.WAITING, State.BEGUN):
            count.recorded_ms.add(deletion.recorded_at_ms)
        count.begun += state is State.BEGUN
        count.dead += state is State.DEAD
        count.held += state is State.HELD

    def remove(self, deletion: Deletion) -> None:
        count, state = self._count(deletion), life.state_of(deletion)
        if state in (State.WAITING, State.BEGUN):
            count.recorded_ms.remove(deletion.recorded_at_ms)
        count.begun -= state is State.BEGUN
        count.dead -= state is State.DEAD
        count.held -= state is State.HELD

    def counts(self) -> DeletionCounts:
        return DeletionCounts(
            tuple(
                KindCount(
                    component,
                    kind,
                    len(count.recorded_ms),
                    count.begun,
                    count.recorded_ms[0] if count.recorded_ms else 0,
                    count.dead,
                    count.held,
                )
                for (component, kind), count in self._kinds.items()
                if count.recorded_ms or count.dead or count.held
            )
        )

    def _count(self, deletion: Deletion) -> _Count:
        return self._kinds[deletion.pending_delete.component, deletion.pending_delete.ledger_type]


def count(deletions: Iterable[Deletion]) -> DeletionCounts:
    """Counts deletions by component and type."""
    counting = Counting()
    for deletion in deletions:
        counting.add(deletion)
    return counting.counts()
