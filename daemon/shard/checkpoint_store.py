"""Checkpoint objects of a shard: written once under a unique name, read at recovery.

Owns: writing the object, and that damage is Corruption.
Does not own: reading it (`storage_backends.checkpoints`), what is in a checkpoint and when one is taken
(`checkpoint_parts`, the engine), the commit that makes it count (`range_operations`), the sections kept for the one
before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from daemon.errors import Corruption
from daemon.runtime.environment import Environment
from storage_backends import checkpoints, object_store
from storage_backends.checkpoints import LoadedCheckpoint as LoadedCheckpoint
from storage_backends.crash_points import crash_point
from storage_backends.formats import checkpoint_format, manifest, names


class CheckpointDamaged(Corruption):
    """A checkpoint object cannot be read. `key`: its name."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"checkpoint {key} is damaged: {detail}")
        self.key = key


def write_checkpoint(
    store: object_store.ObjectStore, checkpoint: checkpoint_format.Checkpoint, *, base: int, unique: str
) -> manifest.ObjectReference:
    """Puts the object; it counts once a shard manifest names it. `base`: the number of the shard manifest that it was
    started from. `unique`: makes its name its own. May be repeated after an error with another `unique`.
    """
    body = checkpoint_format.encode_checkpoint(checkpoint)
    key = names.checkpoint_key(checkpoint.shard, base, unique)
    crash_point("checkpoint.before_put")
    store.put(key, body)
    crash_point("checkpoint.after_put")
    return manifest.ObjectReference(name=key, base=base, size_bytes=len(body), sha256=hashlib.sha256(body).digest())


def read_newest(
    store: object_store.ObjectStore, tip: manifest.ShardManifest, *, damaged: Callable[[str], None]
) -> LoadedCheckpoint:
    """Reads the checkpoint that `tip` names, or the one before when it is damaged or missing: then `damaged` hears of
    its key. Raises CheckpointDamaged when the one before is damaged too, and the store's errors.
    """
    try:
        return checkpoints.read_newest(store, tip, damaged=damaged)
    except object_store.NotFound as error:
        raise CheckpointDamaged(error.key, "the object is missing") from error
    except object_store.Damaged as error:
        raise CheckpointDamaged(error.key, error.reason) from error


def newest_of(environment: Environment, tip: manifest.ShardManifest) -> LoadedCheckpoint:
    """Reads the newest checkpoint that can be read, by `read_newest`; metrics of this daemon tell of damage."""
    return read_newest(environment.store, tip, damaged=lambda key: environment.metrics.damage_found("checkpoint"))
