"""The Python in a document.

Owns: finding its blocks, and what stands below each as its output.
Does not own: what they run against.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

_BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n^```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


class Snippet(NamedTuple):
    """A block, and the block without a language right below it; None when there is none."""

    code: str
    output: str | None


def of(document: Path) -> list[Snippet]:
    """The blocks of a document, in their order."""
    found = _BLOCK.finditer(document.read_text(encoding="utf-8"))
    return [Snippet(each[1], each[2]) for each in found]
