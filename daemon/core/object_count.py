"""How many objects, and how large they are together.

Owns: the value and its arithmetic. Does not own: what is counted.
"""

from __future__ import annotations

import dataclasses
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectCount:
    """Objects and their bytes."""

    objects: int = 0
    size_bytes: int = 0

    def __add__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects + other.objects, self.size_bytes + other.size_bytes)

    def __sub__(self, other: ObjectCount) -> ObjectCount:
        return ObjectCount(self.objects - other.objects, self.size_bytes - other.size_bytes)


NOTHING: Final = ObjectCount()
