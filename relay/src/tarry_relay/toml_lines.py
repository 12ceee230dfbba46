"""Finds the lines of a TOML file on which its keys stand, which Python's parser does not report."""

from __future__ import annotations

import bisect
import contextlib
import tomllib
from collections.abc import Sequence
from typing import Any

# An array, alone or in an inline table, may go on after the line: these end it.
_ENDS = ("", "\n]", "\n]}")


def line_of(text: str, keys: Sequence[str | int]) -> int | None:
    """Return the line, from 1, on which these keys of a valid file first lead to something; None if they do not."""
    lines = text.split("\n")

    def is_there(number: int) -> bool:
        """Say whether the keys are in the file that ends with this line, or with the one that completes its value."""
        for last in range(number, len(lines) + 1):
            for end in _ENDS:
                with contextlib.suppress(tomllib.TOMLDecodeError):
                    return _leads(tomllib.loads("\n".join(lines[:last]) + end), keys)
        return False

    before = bisect.bisect_left(range(1, len(lines) + 1), True, key=is_there)
    return before + 1 if before < len(lines) else None


def _leads(value: Any, keys: Sequence[str | int]) -> bool:
    """Say whether the keys lead from a table to something."""
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return False
    return True
