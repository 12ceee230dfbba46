"""The line of those who wait for rows of one subscription: streams with permits, and pullers.

Owns: whose turn it is.
Does not own: what there is to take (`daemon.core.decisions.subscription_state`) and whether it may be handed out now
(`served_topic`).

Whoever is first takes, leaves, and the next one is woken: of a trickle everybody gets a share, and a row wakes one.
"""

from __future__ import annotations

from typing import Protocol


class Waiter(Protocol):
    """Somebody in a line."""

    def notify(self) -> None:
        """There may be something to take, or it may be its turn."""
        ...


class WaitingLine:
    """The line of those who wait, in the order in which they began to."""

    def __init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}

    def is_turn_of(self, waiter: Waiter) -> bool:
        """Whether the waiter is the first one; it keeps its place, or has the last one now."""
        self._waiters.setdefault(waiter)
        return next(iter(self._waiters)) is waiter

    @property
    def only(self) -> Waiter | None:
        """Who waits, where nobody else does."""
        return next(iter(self._waiters)) if len(self._waiters) == 1 else None

    def leave(self, waiter: Waiter) -> None:
        """The waiter has taken, or waits no longer: the next one has its turn. May be called more than once."""
        if waiter in self._waiters:
            del self._waiters[waiter]
            self.notify()

    def notify(self) -> None:
        """There may be something to take."""
        for waiter in self._waiters:
            waiter.notify()
            return
