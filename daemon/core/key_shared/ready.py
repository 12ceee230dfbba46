"""Where rows come from that are shared by key.

Owns: what sharing asks of the rows of a subscription.
Does not own: READY and IN_FLIGHT, which are the subscription's (`daemon.core.decisions.subscription_state`).
"""

from __future__ import annotations

from typing import Protocol

from pyroaring import BitMap64

from daemon.core.backlog.in_flight import InFlight
from daemon.core.index.positions import KeyedRows


class Ready(Protocol):
    """The READY rows of a subscription, and where they go."""

    in_flight: InFlight

    @property
    def ready_rows(self) -> int: ...

    @property
    def in_flight_room(self) -> int:
        """How many more rows may be IN_FLIGHT by the subscription's policy."""
        ...

    def take_ready(self, limit: int) -> KeyedRows:
        """At most so many, at least one, in order."""
        ...

    def take_redelivered(self) -> KeyedRows:
        """Takes the READY rows that were delivered before."""
        ...

    def append_ready(self, rows: KeyedRows) -> None: ...

    def put_first(self, rows: KeyedRows) -> None:
        """What was taken last is READY still."""
        ...

    def withdraw(self, keys: BitMap64) -> None:
        """Takes rows out of READY, of what waits, and of IN_FLIGHT."""
        ...
