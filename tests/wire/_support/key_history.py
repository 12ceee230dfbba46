"""What consumers of keys were told, and whether the daemons kept to it: an oracle of one thread.

Owns: the rows, who has which hash under which epoch, and the rules. Does not own: the traffic (`key_traffic`).

Rules. A row comes with the time it was added with, and not before; not before its delay is over when it was nacked; not
again after its acknowledgement was answered, and with a count after its negative one was. Of what is acknowledged
nothing is known any more: a plan that is read afterwards, because it was on its way while another stream acknowledged
what it names, brings that anew, with a count of 0. Under one epoch a hash is unacknowledged at one consumer only. Of
each key the rows that were added in time come for the first time in their order, and so do those that were planned; in
that order they are acknowledged for the first time, because the later ones wait for one that is nacked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tests.wire._support.traffic import now_ms

Position = tuple[int, int]
# Of a row whose time is not known before it is added.
NOT_ADDED_MS = 1 << 62
# (dispatcher, its consumer).
Consumer = tuple[str, int]


@dataclasses.dataclass(eq=False, slots=True)
class Row:
    """`deliver_at_ms`: 0 of a planned one. `number`: its place among those of its key that are of its kind.
    `is_asked_for`: a plan that names it may be read after an acknowledgement that was sent later, on another stream.
    `is_planned_anew`: it was, and nothing was known any more of what had become of it before.
    `added_again`: how often it was sent once more to be added. Each of these adds may be decided late, behind the
    acknowledgement of the row: then it comes again.
    """

    position: Position
    deliver_at_ms: int
    key_hash: int
    number: int
    is_to_be_nacked: bool
    in_time: bool = False
    is_asked_for: bool = False
    is_planned_anew: bool = False
    added_again: int = 0
    came: bool = False
    is_acknowledged: bool = False
    acknowledgement_answered: bool = False
    nack_answered: bool = False
    again_not_before_ms: int | None = None

    @property
    def slot(self) -> int:
        return self.key_hash & 0xFFFF

    @property
    def is_planned(self) -> bool:
        return self.deliver_at_ms == 0


@dataclasses.dataclass(slots=True)
class _Holder:
    epoch: int
    consumer: Consumer
    rows: set[Position]


class KeyHistory:
    """`rows`: all that there will be."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {row.position: row for row in rows}
        self.breaches: list[str] = []
        self.epoch = 0
        self.acknowledged = 0
        self.came_again = 0
        self.taken_back = 0
        self.moved_slots = 0
        self._holders: dict[int, _Holder] = {}
        self._last_consumers: dict[int, Consumer] = {}
        # Of each key and kind, the highest number that came, and that was acknowledged.
        self._came: dict[tuple[int, bool], int] = {}
        self._acknowledged: dict[tuple[int, bool], int] = {}

    @property
    def all_acknowledged(self) -> bool:
        return self.acknowledged == len(self.rows)

    def breach(self, text: str) -> None:
        self.breaches.append(text)

    # ---- what came

    def came(self, epoch: int, consumer: Consumer, position: Position, deliver_at_ms: int, count: int) -> Row | None:
        """A row came for a consumer; None where it must be dropped, or was never sent."""
        at_ms = now_ms()
        what = f"{position} of {deliver_at_ms} came for {consumer} with count {count} at {at_ms} under epoch {epoch}"
        row = self.rows.get(position)
        if row is None or row.deliver_at_ms != deliver_at_ms:
            self.breach(f"{what}: it is {row}")
            return None
        if epoch < self.epoch:
            return None
        self.epoch = epoch
        if at_ms < deliver_at_ms or (count and (row.again_not_before_ms is None or at_ms < row.again_not_before_ms)):
            self.breach(f"{what}: early: {row}")
        if not count:
            row.is_planned_anew |= row.is_asked_for and row.is_acknowledged
            row.is_asked_for = False
        if row.acknowledgement_answered and not row.is_planned_anew:
            if not row.added_again:
                self.breach(f"{what}: it is acknowledged: {row}")
            row.added_again = max(0, row.added_again - 1)
        if row.nack_answered and not count and not row.is_planned_anew:
            self.breach(f"{what}: it is negatively acknowledged: {row}")
        if not row.came and self._is_behind(self._came, row):
            self.breach(f"{what}: later ones of its key came before: {row}")
        self.came_again += row.came
        row.came = True
        return row

    def _is_behind(self, highest: dict[tuple[int, bool], int], row: Row) -> bool:
        """Whether it is before another one of its key that was there earlier."""
        kind = row.key_hash, row.is_planned
        before = highest.get(kind, -1)
        highest[kind] = max(before, row.number)
        return row.number < before and row.in_time

    # ---- who holds what

    def holds(self, epoch: int, consumer: Consumer, row: Row) -> None:
        """A consumer received a row, or is said to hold it still."""
        if epoch < self.epoch:
            return
        self.epoch = epoch
        holder = self._holders.get(row.slot)
        if holder is None or holder.epoch < epoch or not holder.rows:
            holder = self._holders[row.slot] = _Holder(epoch, consumer, set())
            self.moved_slots += self._last_consumers.get(row.slot, consumer) != consumer
            self._last_consumers[row.slot] = consumer
        if holder.consumer != consumer:
            self.breach(f"{row} is at {consumer}, and {holder.consumer} holds {holder.rows}, under epoch {epoch}")
        holder.rows.add(row.position)

    def lets_go(self, consumer: Consumer, row: Row) -> None:
        """It is about to say so, or was told so."""
        holder = self._holders.get(row.slot)
        if holder is not None and holder.consumer == consumer:
            holder.rows.discard(row.position)

    # ---- what is done with it

    def acknowledging(self, consumer: Consumer, row: Row) -> None:
        """It is about to be acknowledged."""
        self.lets_go(consumer, row)
        if row.is_acknowledged:
            return
        row.is_acknowledged = True
        self.acknowledged += 1
        if self._is_behind(self._acknowledged, row):
            self.breach(f"{row} is acknowledged at {consumer} after later ones of its key")

    def nacking(self, consumer: Consumer, row: Row, delay_ms: int) -> None:
        """It is about to be negatively acknowledged."""
        self.lets_go(consumer, row)
        due_ms = now_ms() + delay_ms
        row.again_not_before_ms = min(due_ms, row.again_not_before_ms or due_ms)

    def left(self) -> str:
        """What is not acknowledged, in short."""
        left = [row for row in self.rows.values() if not row.is_acknowledged]
        return f"{len(left)} rows: {left[:5]}"
