"""Which deletions wait for their next attempt, and when it is due.

Owns: the order of due times, and which were handed out for an attempt that has not begun yet.
Does not own: the deletions.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from sortedcontainers import SortedList

_ID_BITS = 64
_ID_MASK = (1 << _ID_BITS) - 1


class Waiting:
    """Deletions that wait. Those handed out are known to nobody else: after a restart they are due again."""

    def __init__(self) -> None:
        # Due time and id in one number, which takes half of what a pair does.
        self._due: SortedList[int] = SortedList()
        self._handed_out: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._due) + len(self._handed_out)

    @property
    def next_due_ms(self) -> int | None:
        """When the first of those that were not handed out is due."""
        return self._due[0] >> _ID_BITS if self._due else None

    def add(self, due_ms: int, deletion_id: int) -> None:
        self._due.add((due_ms << _ID_BITS) | deletion_id)

    def remove(self, due_ms: int, deletion_id: int) -> None:
        """One that waits for that time, handed out or not. Raises ValueError when it is not there."""
        if self._handed_out.pop(deletion_id, None) is None:
            self._due.remove((due_ms << _ID_BITS) | deletion_id)

    def hand_out(self, now_ms: int, limit: int, latest_ms: int) -> list[int]:
        """Ids that are due, the longest due first, then such as wait for what is after `latest_ms`; each once."""
        last, latest = (now_ms << _ID_BITS) | _ID_MASK, (latest_ms << _ID_BITS) | _ID_MASK
        in_time, misdated = self._due.irange(maximum=last), self._due.irange(minimum=latest, inclusive=(False, True))
        chosen = list(islice(chain(in_time, misdated), max(0, limit)))
        for due in chosen:
            self._due.remove(due)
            self._handed_out[due & _ID_MASK] = due
        return [due & _ID_MASK for due in chosen]

    def take_back(self, ids: Iterable[int]) -> None:
        """Takes back ids that were handed out, and of which no attempt begins for now: they are due as before."""
        self._due.update([due for each in ids if (due := self._handed_out.pop(each, None)) is not None])
