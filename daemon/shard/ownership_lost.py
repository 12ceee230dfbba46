"""What an owner is told when its shard has become another's.

Owns: the two ways to learn it.
Does not own: what follows; the engine drops the shard's state and answers with the new owner's address.
"""

from __future__ import annotations

from daemon.errors import NotOwner
from storage_backends.formats.shard_slot import ShardSlot


class Superseded(NotOwner):
    """The shard manifest carries another epoch than the one this daemon claimed.

    `shard`; `epoch`: ours; `owner_epoch`, `owner` (a daemon id) and `owner_address` (host:port): the tip's. The
    owner is empty when the shard was given up.
    """

    def __init__(self, *, shard: int, epoch: int, owner_epoch: int, owner: str, owner_address: str) -> None:
        super().__init__(
            f"shard {shard}: epoch {epoch} is over, epoch {owner_epoch} belongs to "
            f"{owner or 'nobody'} at {owner_address or 'no address'}",
            owner_address=owner_address,
        )
        self.shard = shard
        self.epoch = epoch
        self.owner_epoch = owner_epoch
        self.owner = owner


class Fenced(NotOwner):
    """The journal slot that this daemon meant to write holds what a later owner wrote.

    `shard`, `slot`; `epoch`: ours; `holder_epoch`: of who holds the slot. Who that is stands in the shard manifest.
    """

    def __init__(self, *, shard: int, slot: ShardSlot, epoch: int, holder_epoch: int) -> None:
        super().__init__(f"shard {shard}: slot {slot} is held by epoch {holder_epoch}, not by epoch {epoch}")
        self.shard = shard
        self.slot = slot
        self.epoch = epoch
        self.holder_epoch = holder_epoch
