"""What has come of the faults that a run was to have, by name and number.

Owns: the counts, and what must not be missing from them. Does not own: the faults (`faults`), slowness and
confirmations (`scheduler`).

A fault at a place that no call meets never comes, and the run shows nothing; so does an oracle that looks for the keys
of former times. Whoever matches calls by name counts what it has matched.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable

Place = tuple[str, str]
"""An operation, or `crash_point`, and a part of the key, or of the point's name; an empty one stands for any."""

Fired = collections.Counter[str]


def at(place: Place) -> str:
    """How often calls have met the place."""
    operation, key_part = place
    return f"{operation or 'any call'} of {key_part or 'any key'}"


def trouble(kind: str, place: Place) -> str:
    """How often it befell a daemon there."""
    return f"trouble: {kind} at {at(place)}"


def fault(kind: str) -> str:
    """How often a single call had it."""
    return f"fault: {kind}"


def slow(key_part: str) -> str:
    """How often a call was slow for what it was about."""
    return f"slow: {key_part}"


def confirmed_by(operation: str) -> str:
    """How often such a call has told a daemon that it was the owner still."""
    return f"confirmed by {operation}"


def missing(fired: Fired, wanted: Iterable[str]) -> list[str]:
    """What of the wanted never happened."""
    return sorted({name for name in wanted if not fired[name]})
