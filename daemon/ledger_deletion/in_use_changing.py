"""What owners say is in use, of the topics of one shard, in portions that the loop applies in a moment.

Owns: the portions, and that nobody says anything of a topic while all that it uses is being replaced.
Does not own: what a statement comes to (`daemon.core.deletions`), and how it becomes durable (`shard_deletions`).

A long REPLACE is written as what is in use, then as what is in use no longer, as of its beginning, and then that this
was all. What it names is never out of use meanwhile; what it does not name may be so until it is answered.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Protocol

from daemon.core.deletions.ledger_deletions import InUseChanged, LedgerDeletions
from daemon.runtime.environment import Environment
from storage_backends.formats.deletion_format import ChangeInUse, InUseChange, InUseLedgers

# As many cost the loop as much as a delete that is recorded.
LEDGERS_A_DELETE = 20
LEDGERS_A_DECISION = 4_000
# A deletion that comes back costs some 30 us: fewer are in use no longer at once while more than these might.
HELD_FEW = 100
FORGOTTEN_A_DECISION = 256


class Deciding(Protocol):
    """The deletions of the shard, as changes of what is in use see them."""

    @property
    def state(self) -> LedgerDeletions: ...

    async def change_in_room(self, record: ChangeInUse, *, cost: int) -> InUseChanged:
        """What a decision came to, in a slot that is applied in a moment. Raises what the request is answered with when
        nothing can be staged.
        """
        ...


class InUseChanging:
    """The requests that change what is in use in one shard. Used on one event loop."""

    def __init__(self, deletions: Deciding, environment: Environment) -> None:
        self._deletions = deletions
        self._environment = environment
        # Of requests that are under way.
        self._ledgers_to_come = 0
        # Topics of which a long REPLACE is under way; the future ends with it.
        self._replacing: dict[str, asyncio.Future[None]] = {}

    @property
    def ledgers(self) -> int:
        """Ledgers in use, those included that are being recorded."""
        return self._deletions.state.in_use.ledgers + self._ledgers_to_come

    async def change(self, record: ChangeInUse) -> InUseChanged:
        """What it came to, when that is durable. Raises as `ShardDeletions.record`."""
        while (replacing := self._replacing.get(record.topic)) is not None:
            await asyncio.wait([replacing])
        to_come = len(record.ledgers) if record.change is not InUseChange.FORGET else 0
        self._ledgers_to_come += to_come
        try:
            if record.change is InUseChange.REPLACE and self._is_long(record):
                return await self._replace(record)
            return await self._in_portions(record)
        finally:
            self._ledgers_to_come -= to_come

    def _is_long(self, record: ChangeInUse) -> bool:
        there = self._deletions.state.in_use.ledgers_of(record.topic, record.ledgers.ledger_type)
        return max(there, len(record.ledgers)) > self._portion_rows(record.change)

    def _portion_rows(self, change: InUseChange) -> int:
        none_or_few = change is InUseChange.RECORD or self._deletions.state.counts.held <= HELD_FEW
        return LEDGERS_A_DECISION if none_or_few else FORGOTTEN_A_DECISION

    async def _replace(self, record: ChangeInUse) -> InUseChanged:
        ledgers = record.ledgers
        over = self._replacing[record.topic] = asyncio.get_running_loop().create_future()
        try:
            before = self._deletions.state.in_use.of(record.topic, ledgers.ledger_type)
            others = await self._environment.run(lambda: before.beside(ledgers))
            recorded = await self._in_portions(dataclasses.replace(record, change=InUseChange.RECORD))
            forgotten = await self._in_portions(dataclasses.replace(record, change=InUseChange.FORGET, ledgers=others))
            nothing = rows_of(ledgers, slice(0))
            await self._in_portions(dataclasses.replace(record, change=InUseChange.COMPLETE, ledgers=nothing))
        finally:
            del self._replacing[record.topic]
            over.set_result(None)
        return InUseChanged(
            recorded.changed + forgotten.changed, recorded.being_deleted, recorded.revived + forgotten.revived
        )

    async def _in_portions(self, record: ChangeInUse) -> InUseChanged:
        changed = revived = 0
        being_deleted: tuple[int, ...] = ()
        rows = self._portion_rows(record.change)
        ledgers_a_delete = LEDGERS_A_DELETE if rows == LEDGERS_A_DECISION else 1
        for first in range(0, max(1, len(record.ledgers)), rows):
            portion = rows_of(record.ledgers, slice(first, first + rows))
            decided = await self._deletions.change_in_room(
                dataclasses.replace(record, ledgers=portion), cost=math.ceil(len(portion) / ledgers_a_delete)
            )
            changed, revived = changed + decided.changed, revived + decided.revived
            being_deleted += tuple(first + place for place in decided.being_deleted)
        return InUseChanged(changed, being_deleted, revived)


def rows_of(ledgers: InUseLedgers, rows: slice) -> InUseLedgers:
    """Some of them."""
    return InUseLedgers(ledgers.ledger_type, ledgers.ledger_id[rows], ledgers.uuid_msb[rows], ledgers.uuid_lsb[rows])
