"""What one topic needs of its log, for who cuts the log and for who watches the topic.

Owns: turns of the event loop between the steps of a look, pages of ledgers, and the last look at the topic as a whole.
Does not own: what is looked at (`daemon.core.index.retention`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

from daemon.call_values import RetentionPage, Survey
from daemon.core.decisions.topic import Topic
from daemon.core.index import retention
from daemon.runtime.environment import Environment
from daemon.runtime.taking_turns import TakingTurns
from storage_backends.formats.row_columns import U64

T = TypeVar("T")

# A look at the topic as a whole is shown so long, and longer while nothing changes.
SURVEY_MS = 60_000
# A look takes some microseconds a ledger: of more it is not made for who cannot wait.
GLANCE_PAGES_MAX = 20_000
_NOTHING = Survey(None, 0)


class TopicRetention:
    """What one topic needs of its log."""

    def __init__(self, core: Topic, environment: Environment) -> None:
        self._core = core
        self._environment = environment
        self._turn = asyncio.Lock()
        self._survey: Survey | None = None
        self._surveyed_ms = 0
        self._surveyed_state: tuple[int, int] | None = None

    async def page(self, ledger_ids: U64 | None, page_size: int, after: int | None) -> RetentionPage:
        """The ledgers that have rows, of the given ones or, None, of all, behind the ledger `after`."""
        indexes = self._core.indexes
        as_of_ms = self._environment.clock.now_ms()
        if ledger_ids is None:
            places, pages = indexes.places, len(indexes.places)
            ordered = (await self._environment.run(lambda: places.in_order(pages, after))).tolist()
        else:
            ordered = retention.pages_of_ledgers(
                indexes, (each for each in ledger_ids.tolist() if after is None or each > after)
            )
        found = await self._in_turns(retention.retained(indexes, ordered, page_size))
        return RetentionPage(
            ledger_id=found.ledger_id,
            lowest_entry_id=found.lowest_entry_id,
            uncertain=tuple(retention.uncertain(indexes)),
            next_after=None if found.is_complete else int(found.ledger_id[-1]),
            as_of_ms=as_of_ms,
        )

    async def glance(self, changed_slot: int) -> Survey:
        """Returns what `survey` does, without waiting long: of a topic of very many ledgers what was shown last."""
        if len(self._core.indexes.places) > GLANCE_PAGES_MAX:
            return self._survey or _NOTHING
        return await self.survey(changed_slot)

    async def survey(self, changed_slot: int) -> Survey:
        """The topic as a whole, as it was at most a minute ago. `changed_slot`: the last slot that changed it."""
        async with self._turn:
            now_ms = self._environment.elapsed_ms()
            state = (changed_slot, len(self._core.indexes.quarantined))
            is_fresh = now_ms - self._surveyed_ms < SURVEY_MS or state == self._surveyed_state
            if self._survey is None or not is_fresh:
                self._survey = await self._in_turns(retention.surveyed(self._core.indexes))
                self._surveyed_ms, self._surveyed_state = now_ms, state
            return self._survey

    async def _in_turns(self, look: Generator[None, None, T]) -> T:
        """What the look returns; others have their turn at each of its steps."""
        taking_turns = TakingTurns(self._environment.clock)
        while True:
            try:
                next(look)
            except StopIteration as done:
                result: T = done.value
                return result
            await taking_turns.give_way()
