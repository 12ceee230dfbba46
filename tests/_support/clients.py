"""A client that remembers what it was answered, and the rules that hold between that and what is handed out.

Owns: adding until it is answered, receiving, acknowledging some, and the verdict.
Does not own: the daemons and what happens to them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from daemon.core.decisions.add_decisions import AddOutcome
from daemon.errors import TarryError
from daemon.topic.open_streams import StreamClosed
from tests._support.engine_fixture import Daemon, EngineFixture, Receiver

T = TypeVar("T")

Position = tuple[int, int]

# A call that is not answered in this time is given up by its client, virtual seconds.
CALL_S = 30.0


class Client:
    """Adds batches of `BATCH` positions, one ledger after the other, on one topic."""

    BATCH = 10

    def __init__(self, fixture: EngineFixture, topic: str = "t") -> None:
        self.topic = topic
        self.added: set[Position] = set()
        self.unanswered: list[tuple[int, tuple[int, ...]]] = []
        self.asked: set[Position] = set()
        self.done: set[Position] = set()
        self.receivers: list[Receiver] = []
        self._fixture = fixture
        self._next = 0

    async def work(self, daemon: Daemon, batches: int) -> None:
        """Adds, receives and acknowledges the even entries of what has come; ends early when the daemon does."""
        receiver = await self._open(daemon)
        if receiver is None:
            return
        for _ in range(batches):
            self._next += 1
            ledger_id, entries = self._next // 3, tuple(range(self._next * self.BATCH, (self._next + 1) * self.BATCH))
            await self._add(daemon, ledger_id, entries, delay_ms=300 if self._next % 2 else 40_000)
            await asyncio.sleep(0.4)
            if daemon.dead:
                return
            await self.acknowledge(receiver, [row for row in receiver.rows if row[1] % 2 == 0])

    async def retry(self, daemon: Daemon) -> None:
        """Sends again what was not answered: each position is accepted or a duplicate, never two rows."""
        unanswered, self.unanswered = self.unanswered, []
        for ledger_id, entries in unanswered:
            outcome = await self._add(daemon, ledger_id, entries, delay_ms=2_000)
            assert outcome is not None, "a daemon that serves answers"
            assert outcome.accepted + outcome.duplicates == len(entries)

    async def acknowledge(self, receiver: Receiver, rows: Sequence[tuple[int, int, int]]) -> None:
        rows = [row for row in rows if row[:2] not in self.done]
        positions = {(ledger_id, entry_id) for ledger_id, entry_id, _ in rows}
        self.asked |= positions
        if rows and await _answer(receiver.acknowledge(rows)) == 0:
            self.done |= positions

    async def receive_the_rest(self, daemon: Daemon) -> Receiver:
        """Waits until everything that was added and not acknowledged has come, and a while longer."""
        done_before = frozenset(self.done)
        receiver = await self._open(daemon)
        assert receiver is not None
        # Whether an acknowledgement without an answer is durable, nobody knows.
        missing = self.added - done_before - self.asked
        # The set of all that came is made anew at each look.
        await daemon.until(lambda: len(receiver.rows) >= len(missing) and missing <= receiver.positions)
        await asyncio.sleep(60)
        assert not receiver.positions & done_before, "what was acknowledged does not come again"
        return receiver

    def check(self) -> None:
        """Nothing early, and under one epoch no position twice."""
        for receiver in self.receivers:
            assert not receiver.early
            assert len(receiver.rows) == len(receiver.positions), "a position has one row"
        handed_out = set().union(*(receiver.positions for receiver in self.receivers))
        assert self.added <= handed_out, "what was answered OK is handed out"

    async def _open(self, daemon: Daemon) -> Receiver | None:
        for former in self.receivers:
            former.stream.close()
        receiver = await _answer(daemon.call(daemon.receiver(self.topic)))
        if receiver is not None:
            self.receivers.append(receiver)
        return receiver

    async def _add(
        self, daemon: Daemon, ledger_id: int, entries: tuple[int, ...], *, delay_ms: int
    ) -> AddOutcome | None:
        outcome = await _answer(daemon.add(self.topic, ledger_id, entries, delay_ms))
        if outcome is None:
            self.unanswered.append((ledger_id, entries))
        else:
            self.added.update((ledger_id, entry_id) for entry_id in entries)
        return outcome


async def _answer(call: asyncio.Task[T]) -> T | None:
    """The answer; None when there was none, or an error."""
    await asyncio.wait([call], timeout=CALL_S)
    if not call.done():
        call.cancel()
        return None
    if call.cancelled():
        return None
    error = call.exception()
    if error is None:
        return call.result()
    if isinstance(error, TarryError | StreamClosed):
        return None
    raise error
