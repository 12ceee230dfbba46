"""The decisions of one topic on their way into the slots of its shard.

Owns: that a topic that has ended stages nothing more. Does not own: slots (`shard_staging`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from storage_backends.formats.slot_format import Record

# After so long without an answer of the store a call is told that its outcome is not known, or to try again.
STALL_ANSWER_S = 10.0


class Commits(Protocol):
    """The shard's slots, as its topics see them."""

    def check_accepting(self) -> None:
        """Raises what a request is answered with when nothing can be staged now."""
        ...

    def stage(self, *records: Record, awaited: bool = True, may_wait: bool = False) -> asyncio.Future[int]:
        """The future ends with the number of the decisions' slot, once that is durable and applied. Never cancel it.

        Nobody waits for what is not `awaited`: it rides with the next slot, or goes within a second. `may_wait`: for
        company, while the loop has much to do; nothing is held up meanwhile but the answer.
        """
        ...

    def stage_together(self, records: Sequence[Record]) -> asyncio.Future[int]:
        """Stages decisions that stand in one slot. Never cancel the future: it ends when the slot is applied, however
        long that takes.
        """
        ...

    async def confirmed(self) -> None:
        """Returns when everything that a request may have seen is durable and the epoch was confirmed after this call.

        Raises Unavailable when the store does not answer.
        """
        ...

    async def settled(self) -> None:
        """Returns when everything that is staged now is durable and applied, however long that takes."""
        ...


class TopicStaging(Commits):
    """`Commits` for one topic, until the topic ends.

    What still runs for a topic that was let go must decide nothing: it has seen what counts no longer.
    """

    def __init__(self, commits: Commits) -> None:
        self._commits = commits
        self._ended: Exception | None = None

    def end(self, error: Exception) -> None:
        """Nothing more is staged; whoever tries gets the error. What is staged goes its way."""
        if self._ended is None:
            self._ended = error

    @property
    def ended(self) -> bool:
        return self._ended is not None

    def _check(self) -> None:
        if self._ended is not None:
            raise self._ended

    def check_accepting(self) -> None:
        self._check()
        self._commits.check_accepting()

    def stage(self, *records: Record, awaited: bool = True, may_wait: bool = False) -> asyncio.Future[int]:
        self._check()
        return self._commits.stage(*records, awaited=awaited, may_wait=may_wait)

    def stage_together(self, records: Sequence[Record]) -> asyncio.Future[int]:
        self._check()
        return self._commits.stage_together(records)

    async def confirmed(self) -> None:
        self._check()
        await self._commits.confirmed()

    async def settled(self) -> None:
        self._check()
        await self._commits.settled()
