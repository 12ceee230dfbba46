"""Shows names on terminals as they are, and without effect: they may come from anyone."""

from __future__ import annotations


def printable(text: str) -> str:
    """Escape characters that would move the cursor, turn the writing, begin a column or end a line."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
