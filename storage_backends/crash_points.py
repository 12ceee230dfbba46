"""Names places between two durable steps, where a test may stop, crash or interleave a daemon.

In production the hook does nothing. Each name is a literal at the place it marks (`takeover.after_claim`,
`journal.before_put`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _pass(name: str) -> None:
    """Do nothing."""


_hook: Callable[[str], None] = _pass


def crash_point(name: str) -> None:
    """Mark that everything before this place is done and nothing after it has begun."""
    _hook(name)


@contextmanager
def intercepted(hook: Callable[[str], None]) -> Iterator[None]:
    """Call `hook(name)` at every crash point, from whichever thread reaches it.

    An exception of the hook is raised at the crash point, like a crash. A hook that blocks is a pause.
    """
    global _hook
    previous = _hook
    _hook = hook
    try:
        yield
    finally:
        _hook = previous
