"""What stands in files that may change while the daemon runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
# Of each file when it was changed, which file it is and how large, or None where there is none.
_State: TypeAlias = tuple[tuple[int, int, int] | None, ...]


class WatchedFiles(Generic[T]):
    """What was last read from files and found in order.

    A change is read when two looks in a row have seen it: the files may be several, which change one after the other.
    """

    def __init__(self, paths: Sequence[str], read: Callable[[], T]) -> None:
        """Reads them. Raises what `read` raises."""
        self._paths = tuple(map(Path, paths))
        self._read = read
        self._read_at = self._seen = self._state()
        self.value = read()

    def look(self) -> bool | None:
        """Reads the files if they have changed; whether the value is another one then. None: nothing was read.

        Raises what `read` raises, once for each change; the value stays as it was.
        """
        state = self._state()
        settled = state == self._seen
        self._seen = state
        if state == self._read_at or not settled:
            return None
        self._read_at = state
        former, self.value = self.value, self._read()
        return self.value != former

    def _state(self) -> _State:
        return tuple(map(_state_of, self._paths))


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
