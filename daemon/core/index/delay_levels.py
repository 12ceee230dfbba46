"""Reads tables of delay levels and tracks the rows of an index by level (RocketMQ).

A table is `1s 5s 10s 30s 1m`: level 1 is its first delay, level 0 is no delay. Rows may be added and redelivered by
level. `limits` bounds a row's delay; `daemon.settings` and `daemon.topic.topic_settings` set tables.

    add -> pending -(passed)-> due -(delivered)-> delivered        from each: gone

The buckets of the index report what is passed and gone. Rows without a level are not tracked: if no row has one,
nothing is done.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from pyroaring import BitMap64

from daemon.core.index.position_keys import bitmap_of, contained
from daemon.errors import InvalidArgument
from storage_backends.formats.row_columns import U32, U64

# The defaults of RocketMQ
DEFAULT_TABLE = "1s 5s 10s 30s 1m 2m 3m 4m 5m 6m 7m 8m 9m 10m 20m 30m 1h 2h"
DEFAULT_MAX_MS = 2 * 3_600_000
LEVELS_MAX = 256
# The level of a first redelivery by the ladder; RocketMQ uses 3 + n after n redeliveries.
LADDER_FIRST = 3

_UNITS_MS = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_TOKEN = re.compile(r"\S+")
_DELAY = re.compile(r"([0-9]+)([smhd])")
_WHY = (
    (re.compile(r"[smhd]"), "a unit needs a number before it"),
    (re.compile(r"[0-9]+"), "a number needs a unit after it: s, m, h or d"),
    (re.compile(r"-[0-9].*"), "a delay is positive"),
    (re.compile(r"[0-9]*[.,][0-9]*[smhd]"), "a delay is a whole number"),
    (re.compile(r".*[,;].*"), "delays are separated by white space"),
    (re.compile(r"[0-9]+\D+"), "the units are s, m, h and d"),
)
# Characters of a refused token that are shown
_SHOWN_CHARACTERS = 32
# A delay with more digits exceeds every possible limit.
_DIGITS_MAX = 18

Levels = npt.NDArray[np.integer[Any]]


@dataclasses.dataclass(frozen=True)
class DelayLevels:
    """A table of delays (ms), level 1 first.

    With `clamp`, a level above the last one means the last one; otherwise it is refused.
    """

    table: str
    delays_ms: tuple[int, ...]
    clamp: bool

    @property
    def top(self) -> int:
        """The highest level."""
        return len(self.delays_ms)

    def effective(self, levels: Levels, field: str = "delay_level") -> npt.NDArray[np.int64]:
        """Return the levels in effect for requested ones, from 0 to the highest.

        Raises InvalidArgument with `field` and the row for a negative level, or one above the highest without `clamp`.
        """
        wanted = levels.astype(np.int64)
        if self.unknown(wanted) is None:
            return np.minimum(wanted, self.top)
        row = int(wanted.argmin())
        if wanted[row] < 0:
            raise InvalidArgument(f"{field}[{row}] is {wanted[row]}; a level is 0, which is no delay, to {self.top}")
        row = int(wanted.argmax())
        raise InvalidArgument(f"{field}[{row}] is {wanted[row]}; the highest level of the table is {self.top}")

    def unknown(self, levels: Levels) -> npt.NDArray[np.bool_] | None:
        """Return the mask of levels that `effective` refuses, or None if there is none."""
        is_above = not self.clamp and int(levels.max(initial=0)) > self.top
        if not is_above and int(levels.min(initial=0)) >= 0:
            return None
        return (levels < 0) | (levels > self.top) if is_above else levels < 0

    def delays_of(self, levels: Levels, field: str = "delay_level") -> U64:
        """Return the delays of levels, u64[n] (ms). Raise InvalidArgument as `effective` does."""
        delays_ms: U64 = self._delays_ms[self.effective(levels, field)]
        return delays_ms

    def ladder(self, counts: U32) -> U64:
        """Return the delays of redeliveries, u64[n] (ms), by the redelivery count, including this time.

        The first time is the third level, then comes the next one, and the highest is kept, even without `clamp`.
        """
        levels = np.minimum(counts.astype(np.int64) + (LADDER_FIRST - 1), self.top)
        delays_ms: U64 = self._delays_ms[levels]
        return delays_ms

    @functools.cached_property
    def _delays_ms(self) -> U64:
        """The delay of each level, from 0 on (ms)."""
        return np.array((0, *self.delays_ms), np.uint64)


def parse(table: str, *, clamp: bool, delay_max_ms: int) -> DelayLevels:
    """Parse a table: positive whole numbers, each with its unit, separated by white space.

    An error anywhere refuses the whole table: raises InvalidArgument with the token and the place of its first
    character, from 1.
    """
    delays_ms: list[int] = []
    for token in _TOKEN.finditer(table):
        if len(delays_ms) == LEVELS_MAX:
            raise _refused(token, f"it is level {LEVELS_MAX + 1}; a table has at most {LEVELS_MAX}")
        delays_ms.append(_delay_ms(token, delay_max_ms))
    if not delays_ms:
        raise InvalidArgument(f"delay levels: the table has none; it has 1 to {LEVELS_MAX}, such as '1s 5s 10s'")
    return DelayLevels(table, tuple(delays_ms), clamp)


def _delay_ms(token: re.Match[str], delay_max_ms: int) -> int:
    read = _DELAY.fullmatch(token[0])
    if read is None:
        why = next((why for form, why in _WHY if form.fullmatch(token[0])), "it is no number with its unit")
        raise _refused(token, why)
    digits = read[1].lstrip("0")
    if not digits:
        raise _refused(token, "a delay is positive; level 0 is no delay")
    too_long = len(digits) > _DIGITS_MAX
    delay_ms = 0 if too_long else int(digits) * _UNITS_MS[read[2]]
    if too_long or delay_ms > delay_max_ms:
        raise _refused(token, f"the largest delay is {delay_max_ms} ms")
    return delay_ms


def _refused(token: re.Match[str], why: str) -> InvalidArgument:
    text = token[0]
    shown = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
    return InvalidArgument(f"delay levels: {shown!r} at character {token.start() + 1}: {why}; the table is refused")


def warnings(levels: DelayLevels) -> tuple[str, ...]:
    """Return warnings of what is legal in a table and may be a mistake."""
    found: list[str] = []
    first_level: dict[int, int] = {}
    for level, delay_ms in enumerate(levels.delays_ms, start=1):
        if delay_ms in first_level:
            found.append(f"level {level} is {delay_ms} ms, as level {first_level[delay_ms]} is")
        elif level > 1 and delay_ms < levels.delays_ms[level - 2]:
            before_ms = levels.delays_ms[level - 2]
            found.append(f"level {level} is {delay_ms} ms, shorter than level {level - 1}, which is {before_ms} ms")
        first_level.setdefault(delay_ms, level)
    return tuple(found)


DEFAULT = parse(DEFAULT_TABLE, clamp=True, delay_max_ms=DEFAULT_MAX_MS)


class LevelRows:
    """The rows of each delay level of one index, pending, due and delivered.

    `present_among` returns the keys that have rows in the index which are not gone. `has_rows` is true if any row has a
    level.
    """

    def __init__(self, present_among: Callable[[BitMap64], BitMap64]) -> None:
        self._present_among = present_among
        self._pending: dict[int, _Keys] = {}
        self._due: dict[int, _Keys] = {}
        self._handed_out: dict[int, _Keys] = {}
        self._pending_rows: dict[int, int] = {}
        self.has_rows = False

    def __bool__(self) -> bool:
        return self.has_rows

    @property
    def pending_rows(self) -> Mapping[int, int]:
        """The number of pending rows by level, without levels that have none."""
        return self._pending_rows

    def add(self, level: int, keys: BitMap64) -> None:
        """Add new rows of a level."""
        self._pending.setdefault(level, _Keys()).add(keys)
        self._pending_rows[level] = self._pending_rows.get(level, 0) + len(keys)
        self.has_rows = True

    def restore(self, level: int, keys: BitMap64) -> None:
        """Restore stored rows of a level before any is passed, without positions that have no row."""
        present = self._present_among(keys)
        if present:
            self.add(level, present)

    def passed(self, keys: BitMap64) -> None:
        """Mark rows as due."""
        for level in list(self._pending):
            moved = self._take(self._pending, level, keys)
            if moved:
                self._no_longer_pending(level, len(moved))
                self._due.setdefault(level, _Keys()).add(moved)

    def handed_out(self, keys: U64) -> Iterator[tuple[int, npt.NDArray[np.bool_]]]:
        """Mark rows as delivered; yield (level, mask of rows of that level that were never delivered before)."""
        if not self._due:
            return
        named = bitmap_of(keys)
        for level in list(self._due):
            moved = self._take(self._due, level, named)
            if moved:
                self._handed_out.setdefault(level, _Keys()).add(moved)
                yield level, contained(keys, moved)

    def remove(self, keys: BitMap64) -> None:
        """Remove rows that are gone."""
        for level in list(self._pending):
            left = self._take(self._pending, level, keys)
            if left:
                self._no_longer_pending(level, len(left))
        for sets in (self._due, self._handed_out):
            for level in list(sets):
                self._take(sets, level, keys)
        self.has_rows = bool(self._pending or self._due or self._handed_out)

    def freeze(self) -> tuple[tuple[int, BitMap64], ...]:
        """Return (level, positions of rows that are not gone), in sets that never change again. O(levels).

        A level may occur several times, with different positions.
        """
        return tuple(
            (level, kept.freeze())
            for sets in (self._pending, self._due, self._handed_out)
            for level, kept in sets.items()
        )

    def _take(self, sets: dict[int, _Keys], level: int, keys: BitMap64) -> BitMap64:
        """Take positions out of the set of a level; return those that were in it."""
        kept = sets[level]
        hit = kept.keys & keys
        if hit:
            kept.remove(hit)
            if not kept.keys:
                del sets[level]
        return hit

    def _no_longer_pending(self, level: int, rows: int) -> None:
        self._pending_rows[level] -= rows
        if not self._pending_rows[level]:
            del self._pending_rows[level]


def pending_rows(parts: Iterable[LevelRows]) -> dict[int, int]:
    """Return the pending rows of several indexes by level, without levels that have none."""
    found: dict[int, int] = {}
    for part in parts:
        for level, rows in part.pending_rows.items():
            found[level] = found.get(level, 0) + rows
    return found


class _Keys:
    """A set that can be frozen in O(1): the next change copies it."""

    __slots__ = ("_frozen", "keys")

    def __init__(self) -> None:
        self.keys = BitMap64()
        self._frozen = False

    def add(self, keys: BitMap64) -> None:
        if self._frozen:
            self.keys, self._frozen = self.keys | keys, False
        else:
            self.keys |= keys

    def remove(self, keys: BitMap64) -> None:
        if self._frozen:
            self.keys, self._frozen = self.keys - keys, False
        else:
            self.keys -= keys

    def freeze(self) -> BitMap64:
        self._frozen = True
        return self.keys
