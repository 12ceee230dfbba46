"""The newest manifest of a shard, by which its owner learns that the shard has become another's.

Owns: reading it, and what it says of who owns the shard.
Does not own: when it is looked at (`takeover`, the shard), and what follows.
"""

from __future__ import annotations

from typing import Protocol

from daemon.errors import Corruption
from daemon.shard import ownership_lost
from storage_backends import commit
from storage_backends.formats.manifest import ShardManifest


class ShardLog(Protocol):
    """What is read of the shard manifest's log."""

    def read_tip(self, warm: commit.Tip[ShardManifest] | None = None) -> commit.Tip[ShardManifest] | None: ...


def existing_tip(shard_log: ShardLog, shard: int, warm: commit.Tip[ShardManifest] | None) -> commit.Tip[ShardManifest]:
    """The tip of a shard that was claimed before. Raises Corruption when there is none, and the store's errors."""
    tip = shard_log.read_tip(warm)
    if tip is None:
        raise Corruption(f"shard {shard}: its manifests have vanished")
    return tip


def check_owner(tip: commit.Tip[ShardManifest], *, epoch: int) -> None:
    """Raises Superseded unless the tip of the shard manifest carries `epoch`."""
    if tip.manifest.epoch != epoch:
        raise superseded_by(tip, epoch=epoch)


def superseded_by(tip: commit.Tip[ShardManifest], *, epoch: int) -> ownership_lost.Superseded:
    """What the owner, or would-be owner, of `epoch` is told when the shard belongs to whom `tip` names."""
    manifest = tip.manifest
    return ownership_lost.Superseded(
        shard=manifest.shard,
        epoch=epoch,
        owner_epoch=manifest.epoch,
        owner=manifest.owner,
        owner_address=manifest.address,
    )


class KnownTip:
    """The newest manifest of its own epoch that an owner knows: a warm start for the next commit, or the next look.
    Used on one event loop.

    Whoever has committed or read a manifest in this process says so by `saw`: nothing else may tell of it. `newest`
    begins with what the claim ended with.
    """

    def __init__(self, newest: commit.Tip[ShardManifest]) -> None:
        self.newest = newest

    def saw(self, tip: commit.Tip[ShardManifest]) -> None:
        """Takes it where it is newer, or was read later. One of another epoch is not the owner's to go on from."""
        known = self.newest
        if tip.manifest.epoch == known.manifest.epoch and (tip.number, tip.read_at) > (known.number, known.read_at):
            self.newest = tip
