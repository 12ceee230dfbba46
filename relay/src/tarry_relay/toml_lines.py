"""Finds the lines of keys in a TOML file, which Python's parser does not report."""

from __future__ import annotations

import bisect
import contextlib
import tomllib
from collections.abc import Sequence
from typing import Any

# Endings that complete an array, alone or in an inline table, that continues after the line
_ENDS = ("", "\n]", "\n]}")


def line_of(text: str, keys: Sequence[str | int]) -> int | None:
    """Return the line, from 1, on which these keys of a valid file first lead to something, or None."""
    lines = text.split("\n")

    def is_there(number: int) -> bool:
        """Return whether the keys are in the file that ends with this line, or where its value is complete."""
        for last in range(number, len(lines) + 1):
            for end in _ENDS:
                with contextlib.suppress(tomllib.TOMLDecodeError):
                    return _leads(tomllib.loads("\n".join(lines[:last]) + end), keys)
        return False

    before = bisect.bisect_left(range(1, len(lines) + 1), True, key=is_there)
    return before + 1 if before < len(lines) else None


def _leads(value: Any, keys: Sequence[str | int]) -> bool:
    """Return whether the keys lead from a table to something."""
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
