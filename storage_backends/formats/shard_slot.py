"""The number of a slot of a shard: the clock of everything that the shard stores.

Owns: the type, and what follows a number. Does not own: slots.

Numbers are dense over all epochs of the shard. What is computed from one is a plain int, which is accepted as a slot
nowhere.
"""

from __future__ import annotations

from typing import Final, NewType

ShardSlot = NewType("ShardSlot", int)

BEFORE_THE_FIRST: Final = ShardSlot(0)


def next_after(slot: ShardSlot) -> ShardSlot:
    """The number of the slot behind this one."""
    return ShardSlot(slot + 1)
