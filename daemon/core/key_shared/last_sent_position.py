"""Tracks up to which position everything planned was sent, and which consumers joined after that (PIP-282).

Of the positions offered, in that order, it knows which were sent and acknowledged above the mark-delete position.

Positions stand in the order in which they were offered: contiguous, before and after mean this order, whatever ledgers
and entries are. A consumer is recent from when it joins until everything up to the last sent position of that moment is
acknowledged; meanwhile it receives nothing that was never sent.

Redelivered positions go in the order of (ledger, entry), and so do delayed rows, which were never offered. Both are
compared with the highest position that a consumer joined after. That is the last sent position, unless higher ledgers
were offered before lower ones. So no row waits for the acknowledgement of a row that it goes before.

Memory: 10 to 35 bytes for each position above the mark-delete position, and as much for those below it that were not
pruned yet, which are fewer or about a thousand.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from daemon.core.backlog.in_flight import Places
from daemon.core.index.position_keys import KeyIndex, Mask, PageTable, firsts
from daemon.core.key_shared.hash_slots import U16
from storage_backends.formats.row_columns import U64

Position = tuple[int, int]

_U64_MAX = (1 << 64) - 1
_NO_BOUND = _U64_MAX, _U64_MAX
# Columns are pruned when this many positions, and most of them, are below the mark-delete position.
PRUNED_MIN = 1024


class LastSentPosition:
    """Columns of positions, u64[n] each, without those that were never offered or are mark-deleted.

    `mark_deleted` is the last position up to which all are acknowledged, or None if none is.
    """

    def __init__(self) -> None:
        # Places below `_acknowledged_end` are mark-deleted; those below `_sent_end` were sent contiguously. An
        # acknowledged position counts as sent. `_pruned` is the number of places before the first one.
        self._pages = PageTable()
        self._order = KeyIndex()
        self._keys: U64 = np.empty(PRUNED_MIN, np.uint64)
        self._is_sent: Mask = np.zeros(PRUNED_MIN, np.bool_)
        self._is_acknowledged: Mask = np.zeros(PRUNED_MIN, np.bool_)
        self._end = 0
        self._pruned = 0
        self._sent_end = 0
        self._acknowledged_end = 0
        self.mark_deleted: Position | None = None
        # The highest (ledger, entry) sent contiguously since everything sent was last mark-deleted
        self._highest_sent: Position = (0, 0)
        # Recent consumer -> how many positions must be mark-deleted, in the order of joining
        self._recent: dict[int, int] = {}
        self._joined: dict[int, Position] = {}
        self._released: list[int] = []
        # The ledger and the entry up to which the consumer of each ordinal may receive; the last column stands for all
        # higher ordinals.
        self._bounds: npt.NDArray[np.uint64] = np.full((2, 16), _U64_MAX, np.uint64)

    # ---- positions

    def offer(self, ledger_id: U64, entry_id: U64) -> None:
        """Add positions in the order of the log.

        A known position keeps its place; if it was acknowledged, it no longer is: it will be delivered again.
        """
        keys = self._pages.intern(ledger_id, entry_id)
        if (keys[1:] <= keys[:-1]).any():
            keys = keys[firsts(keys)]
        known = self._places(keys)
        self._is_acknowledged[known] = False
        if len(known):
            keys = keys[~np.isin(keys, self._keys[known])]
        self._append(keys)

    def _append(self, keys: U64) -> None:
        end = self._end + len(keys)
        if end > len(self._keys):
            room = np.zeros(max(end - self._end, len(self._keys)), np.uint64)
            self._keys = np.concatenate([self._keys, room])
            self._is_sent = np.concatenate([self._is_sent, room != 0])
            self._is_acknowledged = np.concatenate([self._is_acknowledged, room != 0])
        self._keys[self._end : end] = keys
        self._is_sent[self._end : end] = False
        self._is_acknowledged[self._end : end] = False
        self._end = end

    def sent(self, ledger_id: U64, entry_id: U64) -> None:
        """Mark positions as scheduled to be sent to their consumers."""
        self._is_sent[self._find(ledger_id, entry_id)] = True
        self._advance()

    def acknowledged(self, ledger_id: U64, entry_id: U64) -> None:
        """Mark positions as acknowledged: they are never sent again."""
        self._acknowledge(self._find(ledger_id, entry_id))

    def _acknowledge(self, places: Places) -> None:
        self._is_sent[places] = True
        self._is_acknowledged[places] = True
        self._advance()

    def mark_delete(self, ledger_id: int, entry_id: int) -> tuple[U64, U64]:
        """Acknowledge everything offered up to a position; return the positions that were not yet, in that order.

        An unknown position stands for the one before it in its ledger. Higher entries of its ledger stay. They stand
        before it if a stream that planned them closed and what was never sent is offered again.
        """
        end = self._place_of(ledger_id, entry_id) + 1
        places = np.arange(self._acknowledged_end, max(end, self._acknowledged_end))
        places = places[~self._is_acknowledged[places]]
        if entry_id < _U64_MAX:
            for first, last in self._pages.key_ranges(ledger_id, entry_id + 1, _U64_MAX):
                places = places[~self._are_between(self._keys[places], first, last)]
        found = self._pages.positions(self._keys[places])
        self._acknowledge(places)
        if self.mark_deleted is None:
            self.mark_deleted = ledger_id, entry_id
        return found

    def _place_of(self, ledger_id: int, entry_id: int) -> int:
        """Return the place of a position, or of the highest lower entry of its ledger; -1 if there is none."""
        exact = self._find(np.array([ledger_id], np.uint64), np.array([entry_id], np.uint64))
        if len(exact):
            return int(exact[0])
        keys = self._keys[self._acknowledged_end : self._end]
        for first, last in reversed(self._pages.key_ranges(ledger_id, 0, entry_id)):
            below = np.flatnonzero(self._are_between(keys, first, last))
            if len(below):
                return self._acknowledged_end + int(below[keys[below].argmax()])
        return -1

    @staticmethod
    def _are_between(keys: U64, first: int, last: int) -> Mask:
        return np.greater_equal(keys, np.uint64(first)) & np.less_equal(keys, np.uint64(last))

    def forget(self, ledger_id: U64, entry_id: U64) -> None:
        """Forget positions that their stream will not send, unless they were sent. O(positions)."""
        places = self._find(ledger_id, entry_id)
        forgotten = places[~self._is_sent[places]]
        if len(forgotten):
            # All of them stand after what was sent contiguously: what recent consumers wait for keeps its place.
            stays = np.ones(self._end, np.bool_)
            stays[forgotten] = False
            self._keep(np.flatnonzero(stays))
            self._advance()

    def _find(self, ledger_id: U64, entry_id: U64) -> Places:
        """Return the places of the positions that are known, in no order."""
        if self._acknowledged_end == self._end:
            return np.empty(0, np.intp)
        return self._places(self._pages.find(ledger_id, entry_id))

    def _places(self, keys: U64) -> Places:
        if (keys[1:] <= keys[:-1]).any():
            keys = np.unique(keys)
        places = self._order.last_of(self._keys[: self._end], keys)
        return places[places >= self._acknowledged_end]

    def _advance(self) -> None:
        """Advance the ends after flags were set or positions left."""
        sent_end = _run_end(self._is_sent[: self._end], self._sent_end)
        if sent_end > self._sent_end:
            ledgers, entries = self._pages.positions(self._keys[self._sent_end : sent_end])
            highest = int(ledgers.max())
            self._highest_sent = max(self._highest_sent, (highest, int(entries[ledgers == highest].max())))
            self._sent_end = sent_end
        acknowledged_end = _run_end(self._is_acknowledged[:sent_end], self._acknowledged_end)
        if acknowledged_end > self._acknowledged_end:
            self.mark_deleted = self._position(acknowledged_end - 1)
            self._acknowledged_end = acknowledged_end
            if acknowledged_end == sent_end:
                self._highest_sent = (0, 0)
            self._release()
            if acknowledged_end >= max(PRUNED_MIN, self._end - acknowledged_end):
                self._prune()

    def _prune(self) -> None:
        """Drop mark-deleted positions from the columns, and their ledgers from the page table."""
        dropped = self._acknowledged_end
        ledgers, entries = self._pages.positions(self._keys[dropped : self._end])
        self._keep(np.arange(dropped, self._end))
        self._pages = PageTable()
        self._keys[: self._end] = self._pages.intern(ledgers, entries)
        self._pruned += dropped
        self._sent_end -= dropped
        self._acknowledged_end = 0

    def _keep(self, places: Places) -> None:
        keys, is_sent, is_acknowledged = self._keys[places], self._is_sent[places], self._is_acknowledged[places]
        self._end = 0
        self._keys = np.empty(PRUNED_MIN, np.uint64)
        self._is_sent = np.zeros(PRUNED_MIN, np.bool_)
        self._is_acknowledged = np.zeros(PRUNED_MIN, np.bool_)
        self._order = KeyIndex()
        self._append(keys)
        self._is_sent[: self._end] = is_sent
        self._is_acknowledged[: self._end] = is_acknowledged

    def _position(self, place: int) -> Position:
        ledgers, entries = self._pages.positions(self._keys[place : place + 1])
        return int(ledgers[0]), int(entries[0])

    @property
    def last_sent(self) -> Position | None:
        """The position up to which everything offered was sent, or None if nothing was."""
        if self._sent_end > self._acknowledged_end:
            return self._position(self._sent_end - 1)
        return self.mark_deleted

    def individually_sent(self, limit: int = 1000) -> list[tuple[Position, Position]]:
        """Return the last `limit` ranges (after, up to] sent behind the last sent position, in the order offered.

        O(positions).
        """
        edges = np.diff(self._is_sent[self._sent_end : self._end].view(np.int8), append=np.int8(0))
        afters = np.flatnonzero(edges == 1)[-limit:] + self._sent_end
        lasts = np.flatnonzero(edges == -1)[-limit:] + self._sent_end
        return list(zip(self._positions(afters), self._positions(lasts), strict=True))

    def _positions(self, places: Places) -> Iterator[Position]:
        ledgers, entries = self._pages.positions(self._keys[places])
        return zip(ledgers.tolist(), entries.tolist(), strict=True)

    # ---- consumers

    def joined(self, consumer: int) -> None:
        """Make a consumer recent unless everything up to the last sent position is acknowledged."""
        last_sent = self.last_sent
        if last_sent is None:
            return
        self._joined[consumer] = last_sent
        if self._sent_end > self._acknowledged_end:
            self._recent[consumer] = self._pruned + self._sent_end
            self._bound(consumer, self._highest_sent)

    def left(self, consumer: int) -> None:
        """Forget a consumer that has left; its ordinal may be reused."""
        self._joined.pop(consumer, None)
        self._released = [each for each in self._released if each != consumer]
        if self._recent.pop(consumer, None) is not None:
            self._bound(consumer, _NO_BOUND)

    def _bound(self, consumer: int, bound: Position) -> None:
        known = self._bounds.shape[1]
        if consumer + 1 >= known:
            room = np.full((2, max(known, consumer + 2 - known)), _U64_MAX, np.uint64)
            self._bounds = np.concatenate([self._bounds, room], axis=1)
        self._bounds[:, consumer] = bound

    def _release(self) -> None:
        """End the recency of consumers behind the mark-delete position; the first to join is the first in line."""
        mark_deleted = self._pruned + self._acknowledged_end
        free = list(itertools.takewhile(lambda each: self._recent[each] <= mark_deleted, self._recent))
        for consumer in free:
            del self._recent[consumer]
            self._bound(consumer, _NO_BOUND)
        self._released += free

    @property
    def has_recent(self) -> bool:
        """True if any consumer waits for what was sent before it joined."""
        return bool(self._recent)

    def take_released(self) -> list[int]:
        """Return present consumers that ceased to be recent since the last call."""
        released, self._released = self._released, []
        return released

    def may_receive(self, ledger_id: U64, entry_id: U64, consumers: U16) -> Mask:
        """Return the mask of positions that their consumers may receive.

        Recent consumers receive only what they joined after.
        """
        if not self._recent:
            return np.ones(len(consumers), np.bool_)
        ledgers, entries = self._bounds.take(consumers, axis=1, mode="clip")
        may: Mask = (ledger_id < ledgers) | ((ledger_id == ledgers) & (entry_id <= entries))
        asked = np.flatnonzero(may & (ledgers != _U64_MAX))
        keys = self._pages.find(ledger_id[asked], entry_id[asked])
        may[asked] = ~np.isin(keys, self._keys_there(keys, are_sent=False))
        return may

    def were_sent(self, ledger_id: U64, entry_id: U64) -> Mask:
        """Return the mask of known positions that were sent: planned again they go before unsent ones."""
        keys = self._pages.find(ledger_id, entry_id)
        return np.isin(keys, self._keys_there(keys, are_sent=True))

    def _keys_there(self, keys: U64, *, are_sent: bool) -> U64:
        places = self._places(keys)
        found: U64 = self._keys[places[self._is_sent[places] == are_sent]]
        return found

    def joined_position(self, consumer: int) -> Position | None:
        """Return the last sent position when a consumer joined, even if it is no longer recent; None without one."""
        return self._joined.get(consumer)

    def after_mark_delete(self) -> list[tuple[int, Position]]:
        """Return the recent consumers and the last sent positions when they joined, in the order of the positions."""
        return [(consumer, self._joined[consumer]) for consumer in self._recent]


def _run_end(flags: Mask, start: int) -> int:
    """Return the first place from `start` on without a flag; the end if all have one."""
    rest = flags[start:]
    if not len(rest):
        return start
    first = int(rest.argmin())
    return start + (len(rest) if rest[first] else first)
