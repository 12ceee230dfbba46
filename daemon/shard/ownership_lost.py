"""What an owner is told when its shard has become another's.

Owns: what the tip of its manifest says then; that its log was fenced says `log_writer`.
Does not own: what follows; the engine drops the shard's state and answers with the new owner's address.
"""

from __future__ import annotations

from daemon.errors import NotOwner


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
