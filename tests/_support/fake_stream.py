"""A dispatcher's stream of the engine that is all in memory.

What is handed out, and to whom, is `fake_topic`'s; when, `fake_engine`'s.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from daemon import call_values
from daemon.core.decisions.claims import HeldPositions, Ignored
from daemon.topic.open_streams import UNBOUNDED, Outlet
from tests._support.fake_topic import EPOCH, Subscription

if TYPE_CHECKING:
    from tests._support.fake_engine import FakeEngine


class FakeDispatchStream:
    """The facade of a dispatch stream."""

    def __init__(self, engine: FakeEngine, topic: str, name: str, subscription: Subscription) -> None:
        self.epoch = EPOCH
        self.held = 0
        self.not_held: npt.NDArray[np.intp] = np.empty(0, np.intp)
        self.rebuild_needed = engine.rebuild_needed
        self.permits = 0
        self.outlet: Outlet = UNBOUNDED
        self.closed = False
        self.changed = asyncio.Event()
        self.lost: Exception | None = None
        self._engine = engine
        self._topic = topic
        self._name = name
        self._subscription = subscription

    def grant(self, permits: int) -> None:
        self.permits += permits
        self.changed.set()

    def notify(self) -> None:
        self.changed.set()

    def lose(self, error: Exception) -> None:
        """The shard is lost: hand-outs end with the error."""
        self.lost = error
        self.changed.set()

    async def acknowledge(self, claims: HeldPositions, *, awaited: bool = True) -> Ignored:
        return await self._engine.acknowledge(self._topic, self._name, claims)

    async def negative_acknowledge(self, nack: call_values.Nack, *, awaited: bool = True) -> call_values.NackOutcome:
        return await self._engine.negative_acknowledge(self._topic, self._name, nack)

    async def extend(self, claims: HeldPositions) -> Ignored:
        return await self._engine.held_by(self._topic, self._name, self, claims)

    async def next_messages(self) -> call_values.HandedOut:
        while True:
            self.changed.clear()
            if self.lost is not None:
                raise self.lost
            permits = self.permits if self.outlet.takes(self) else 0
            rows = self._engine.take(self._topic, self._subscription, self, permits)
            if rows:
                self.permits -= len(rows)
                return self._engine.handed_out(self._topic, self._subscription, rows)
            await self._engine.changed_or_due(self._topic, self.changed)

    def close(self) -> None:
        self.closed = True
        if self in self._subscription.streams:
            self._subscription.streams.remove(self)
        if self._topic in self._engine.topics:
            self._subscription.release(self)
            self._subscription.wake()
        self._engine._happened.set()
