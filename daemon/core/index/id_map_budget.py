"""Bounds the id maps of a daemon: `delivery.id_map_bytes`, for all together.

Counted are entries, what merges write until they end, and the rows that a map will have once it is loaded. If there is
no room, maps that were unused for a minute are closed, the longest unused first; their topics load them again when they
are needed. If that is not enough, a map is not loaded, a merge waits, and a map that outgrows the budget is closed.
"""

from __future__ import annotations

from typing import Final

from daemon.core.index.id_map import ENTRY_BYTES, IdMap
from daemon.errors import QuotaExceeded

UNUSED_MS: Final = 60_000
"""The time after its last use from which on a map makes room for others (ms)."""


class IdMapBudget:
    """The open id maps of a daemon, which take at most `bytes_max` together.

    Times are of a clock that never steps (ms).
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._size_bytes = 0
        # Map -> (when it was last used, its bytes), the longest unused first
        self._maps: dict[IdMap, tuple[int, int]] = {}

    @property
    def size_bytes(self) -> int:
        """The size of all maps (bytes)."""
        return self._size_bytes

    def __len__(self) -> int:
        """Return the number of open maps."""
        return len(self._maps)

    def open(self, opened: IdMap, rows: int, elapsed_ms: int) -> None:
        """Make room for a map of so many rows that will be loaded. Raise QuotaExceeded if there is none."""
        needed = ENTRY_BYTES * rows
        if not self._make_room(needed, elapsed_ms):
            raise QuotaExceeded(
                f"the schedule ids of this topic need {needed} bytes of memory, and {self._room} of "
                f"delivery.id_map_bytes = {self._bytes_max} are free: raise delivery.id_map_bytes, or name positions",
                retry_after_ms=None,
            )
        self._set(opened, elapsed_ms, needed)

    def use(self, used: IdMap, elapsed_ms: int) -> None:
        """Note that a call needs an open map now."""
        _, size_bytes = self._maps.pop(used)
        self._maps[used] = elapsed_ms, size_bytes

    def count(self, changed: IdMap, elapsed_ms: int) -> None:
        """Count an open map again after rows came or a step was taken. If all are too large, close it or others."""
        used_ms, counted = self._maps[changed]
        size_bytes = changed.nbytes if changed.is_loaded else max(counted, changed.nbytes)
        self._size_bytes += size_bytes - counted
        # Assigning keeps its place in the order.
        self._maps[changed] = used_ms, size_bytes
        if self._size_bytes > self._bytes_max and not self._make_room(0, elapsed_ms, spared=changed):
            self.close(changed)

    def may_take(self, merging: IdMap, size_bytes: int, elapsed_ms: int) -> bool:
        """Return whether a merge of an open map may take so many bytes for a time; make room for it."""
        return self._make_room(size_bytes, elapsed_ms, spared=merging)

    def close(self, closed: IdMap) -> None:
        """Close an open map, as that of a topic that is no longer served."""
        _, size_bytes = self._maps.pop(closed)
        self._size_bytes -= size_bytes
        closed.close()

    @property
    def _room(self) -> int:
        return max(0, self._bytes_max - self._size_bytes)

    def _set(self, opened: IdMap, used_ms: int, size_bytes: int) -> None:
        self._maps[opened] = used_ms, size_bytes
        self._size_bytes += size_bytes

    def _make_room(self, size_bytes: int, elapsed_ms: int, *, spared: IdMap | None = None) -> bool:
        """Close unused maps until there is room; close none, and return False, if that would not be enough."""
        excess = self._size_bytes + size_bytes - self._bytes_max
        if excess <= 0:
            return True
        chosen = []
        for each, (used_ms, counted) in self._maps.items():
            if excess <= 0 or elapsed_ms - used_ms < UNUSED_MS:
                break
            if each is not spared:
                chosen.append(each)
                excess -= counted
        if excess > 0:
            return False
        for each in chosen:
            self.close(each)
        return True
