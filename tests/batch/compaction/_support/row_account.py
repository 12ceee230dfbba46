"""What clients were told of every row of a topic, and what must come of it: an account with one dict.

Owns: the record of what was asked, answered and received, row by row, and the rules it is checked by.
Does not own: the calls (`live_topic`).

A row is a position under one time: rescheduled or added again, a position is another row, and no position is given one
time twice. Rules: what comes was added; it does not come before its time; it comes once, and once more for each
negative acknowledgement, counted, not before that one's time; what was answered as cancelled or rescheduled never
comes; nothing comes after it was acknowledged; what is due came; everything else is listed as waiting, and nothing
besides. They are exact: the daemon lives, so every call is answered.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Iterable, Sequence

Row = tuple[int, int, int]
"""Ledger, entry, deliver_at_ms."""
Position = tuple[int, int]

# So much later than its time a row may come at the end, when nothing else is asked of the daemon.
PATIENCE_S = 600.0
_SHOWN_MAX = 10
_LATELY = 300


@dataclasses.dataclass(slots=True)
class Fate:
    """`is_asked`: the call that makes it is not answered. `is_withdrawn`: cancelled, or under another time now.

    `came`: how often. `nacks`: negative acknowledgements. `is_held`: it came, and neither is answered nor sent.
    """

    is_asked: bool = True
    is_withdrawn: bool = False
    came: int = 0
    nacks: int = 0
    not_before_ms: int = 0
    is_held: bool = False
    is_acknowledged: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_withdrawn or self.is_acknowledged


class RowAccount:
    """Thread-safe. `breaches`: what broke a rule so far."""

    def __init__(self) -> None:
        self.breaches: list[str] = []
        self.came = 0
        self._fates: dict[Row, Fate] = {}
        self._rows: list[Row] = []
        self._changed = threading.Condition()

    # ---- what is asked and answered

    def asking(self, rows: Iterable[Row]) -> None:
        """These rows are about to be made."""
        with self._changed:
            for row in rows:
                if row in self._fates:
                    raise ValueError(f"{row} is given twice")
                self._fates[row] = Fate()
                self._rows.append(row)

    def made(self, rows: Iterable[Row], *, refused: Iterable[Row] = ()) -> None:
        """The daemon has these, and has not those."""
        with self._changed:
            for row in rows:
                self._fates[row].is_asked = False
            for row in refused:
                if self._fates.pop(row).came:
                    self._breach(f"{row} came, and the daemon said that it was not made")
            self._changed.notify_all()

    def withdrawn(self, rows: Iterable[Row]) -> None:
        """The daemon said that they will never come."""
        with self._changed:
            for row in rows:
                fate = self._fates[row]
                if fate.came:
                    self._breach(f"{row} was withdrawn, and had come")
                fate.is_withdrawn = True
            self._changed.notify_all()

    def knows(self, row: Row) -> bool:
        with self._changed:
            return row in self._fates

    def waiting(self, *, from_ms: int) -> list[Row]:
        """Rows that are due then or later, and neither withdrawn nor asked for."""
        with self._changed:
            return [row for row in self._fates if self._waits(row, from_ms)]

    def some_waiting(self, rng: random.Random, count: int, *, from_ms: int) -> list[Row]:
        """Random ones of these; half of them were made lately."""
        with self._changed:
            some = rng.choices(self._rows, k=count) + rng.choices(self._rows[-_LATELY:], k=count)
            return [row for row in some if self._waits(row, from_ms)]

    def _waits(self, row: Row, from_ms: int) -> bool:
        fate = self._fates.get(row)
        return fate is not None and row[2] >= from_ms and not (fate.is_over or fate.is_asked or fate.came)

    # ---- what comes

    def received(self, rows: Iterable[tuple[Row, int]], *, at_ms: int) -> None:
        """Rows with their counts of redeliveries."""
        with self._changed:
            for row, count in rows:
                self._receive(row, count, at_ms)
            self._changed.notify_all()

    def nacking(self, rows: Iterable[Row], *, not_before_ms: int) -> None:
        """They are about to be negatively acknowledged."""
        with self._changed:
            for row in rows:
                fate = self._fates[row]
                fate.nacks, fate.is_held, fate.not_before_ms = fate.nacks + 1, False, not_before_ms

    def acknowledging(self, rows: Iterable[Row]) -> None:
        """They are about to be acknowledged."""
        with self._changed:
            for row in rows:
                fate = self._fates[row]
                fate.is_held, fate.is_acknowledged = False, True
            self._changed.notify_all()

    def _receive(self, row: Row, count: int, at_ms: int) -> None:
        fate = self._fates.get(row)
        self.came += 1
        if fate is None:
            self._breach(f"{row} came, and there is no such row")
            return
        if at_ms < max(row[2], fate.not_before_ms):
            self._breach(f"{row} came early, at {at_ms}: {fate}")
        if fate.is_over or fate.is_held or count != fate.nacks:
            self._breach(f"{row} came with count {count} at {at_ms}: {fate}")
        fate.came += 1
        fate.is_held = True

    # ---- what must be true

    def wait_until_owed_came(self, until_ms: int, timeout_s: float = PATIENCE_S) -> None:
        """Waits until everything that is due before came, as often as it was negatively acknowledged and once more.

        Raises AssertionError.
        """
        with self._changed:
            missing = [row for row in self._fates if row[2] < until_ms]

            def all_came() -> bool:
                missing[:] = [row for row in missing if self._is_owed(row)]
                return not missing or bool(self.breaches)

            if not self._changed.wait_for(all_came, timeout_s):
                shown = [f"{row}: {self._fates[row]}" for row in missing]
                raise AssertionError(_shown(f"{len(missing)} rows did not come within {timeout_s:g} s", shown))
        self.check_so_far()

    def came_of(self, rows: Sequence[Row]) -> int:
        """How many of them came."""
        with self._changed:
            return sum(self._fates[row].came > 0 for row in rows)

    def check_so_far(self) -> None:
        """Nothing broke a rule. Raises AssertionError."""
        with self._changed:
            if self.breaches:
                raise AssertionError(_shown("rules were broken", self.breaches))

    def check(self, before: Sequence[Row], listed: Sequence[Row]) -> None:
        """Nothing broke a rule, and of the rows that waited `before` each was listed, or came since; nothing else was
        listed. Raises AssertionError.
        """
        self.check_so_far()
        waited, found = set(before), set(listed)
        with self._changed:
            lost = [row for row in waited - found if not self._fates[row].came]
        problems = [f"{row} waits, and is not listed" for row in lost]
        problems += [f"{row} is listed, and does not wait: {self._fates.get(row)}" for row in found - waited]
        if len(found) < len(listed):
            problems.append(f"{len(listed) - len(found)} rows are listed twice")
        if problems:
            raise AssertionError(_shown(f"{len(waited)} rows wait, {len(listed)} are listed", problems))

    def _is_owed(self, row: Row) -> bool:
        fate = self._fates.get(row)
        return fate is not None and not fate.is_withdrawn and not fate.is_asked and fate.came <= fate.nacks

    def _breach(self, text: str) -> None:
        self.breaches.append(text)
        self._changed.notify_all()


def _shown(what: str, problems: Sequence[str]) -> str:
    more = f"\n... and {len(problems) - _SHOWN_MAX} more" if len(problems) > _SHOWN_MAX else ""
    return "\n".join((what, *problems[:_SHOWN_MAX])) + more
