"""Named places between two durable steps, where a test may stop, crash or interleave a daemon.

Owns: the hook. In production it does nothing.
Does not own: the names; each is a literal at the place it marks (`takeover.after_claim`, `journal.before_put`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _pass(name: str) -> None:
    """Go on."""


_hook: Callable[[str], None] = _pass


def crash_point(name: str) -> None:
    """Marks that everything before this place is done and nothing after it has begun."""
    _hook(name)


@contextmanager
def intercepted(hook: Callable[[str], None]) -> Iterator[None]:
    """Calls `hook(name)` at every crash point, from whichever thread reaches it.

    What the hook raises is raised at the crash point: a crash. A hook that blocks is a pause.
    """
    global _hook
    previous = _hook
    _hook = hook
    try:
        yield
    finally:
        _hook = previous
