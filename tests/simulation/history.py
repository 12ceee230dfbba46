"""What happened in one run: a hash of every step, the last lines for people, and the breaches of a rule.

Owns: the record. Does not own: the rules (`oracle`, `promises`) and what is recorded.
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Callable

# Lines that are kept for people when they are not all asked for.
LAST_LINES = 400
# Several times what the longest runs take. A run of more does not come to rest: daemons chase each other, say.
STEPS_MAX = 30_000


class History:
    """`now_s`: virtual time. `everything`: whether every line is kept."""

    def __init__(self, now_s: Callable[[], float], *, everything: bool = False) -> None:
        self.breaches: list[str] = []
        self.steps = 0
        self.on_breach: Callable[[], None] = lambda: None
        self._now_s = now_s
        self._hash = hashlib.blake2b(digest_size=16)
        self._lines: collections.deque[str] = collections.deque(maxlen=None if everything else LAST_LINES)

    def note(self, line: str) -> None:
        """Something happened that must happen again when the seed is run again."""
        line = f"{self._now_s():.6f} {line}"
        self.steps += 1
        self._hash.update(line.encode())
        self._lines.append(line)
        if self.steps == STEPS_MAX:
            self.breach(f"the run does not come to rest within {STEPS_MAX} steps")

    def remark(self, line: str) -> None:
        """For people only."""
        self._lines.append(f"{self._now_s():.6f}   {line}")

    def breach(self, text: str) -> None:
        """A rule was broken."""
        self.note(f"BREACH {text}")
        self.breaches.append(text)
        self.on_breach()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines)
