"""Checkpoint objects of a shard: written once under a unique name, read at recovery.

Owns: the object and its bytes' integrity; falling back to the checkpoint before a damaged one.
Does not own: what is in a checkpoint and when one is taken (`checkpoint`, the engine), the commit that makes it count
(`shard_manifest`), the slots kept for the one before (`journal_truncation`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable

from daemon.errors import Corruption
from storage_backends import object_store
from storage_backends.crash_points import crash_point
from storage_backends.formats import checkpoint as checkpoint_format
from storage_backends.formats import errors, manifest, names

log = logging.getLogger(__name__)


class CheckpointDamaged(Corruption):
    """A checkpoint object cannot be read. `key`: its name."""

    def __init__(self, key: str, detail: str) -> None:
        super().__init__(f"checkpoint {key} is damaged: {detail}")
        self.key = key


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The newest checkpoint that can be read, and the slot above which the journal is to be replayed with it.

    `checkpoint` is None before the first one.
    """

    checkpoint: checkpoint_format.Checkpoint | None
    replay_from: int


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


def read_checkpoint(
    store: object_store.ObjectStore, shard: int, reference: manifest.CheckpointReference
) -> checkpoint_format.Checkpoint:
    """Raises CheckpointDamaged, also when it is missing, and what the store raises when it cannot be reached."""
    key = reference.object.name
    try:
        body = store.get(key)
    except object_store.NotFound:
        raise CheckpointDamaged(key, "the object is missing") from None
    except object_store.Damaged as error:
        raise CheckpointDamaged(key, error.reason) from error
    try:
        manifest.check_bytes(reference.object, body, "checkpoint")
        checkpoint = checkpoint_format.decode_checkpoint(body)
    except errors.FormatError as error:
        raise CheckpointDamaged(key, str(error)) from error
    if (checkpoint.shard, checkpoint.slot) != (shard, reference.slot):
        raise CheckpointDamaged(key, f"it is of slot {checkpoint.slot} of shard {checkpoint.shard}")
    return checkpoint


def read_newest(
    store: object_store.ObjectStore, tip: manifest.ShardManifest, *, damaged: Callable[[str], None]
) -> LoadedCheckpoint:
    """The checkpoint that `tip` names, or the one before when it is damaged: then `damaged` hears of its key.

    Before the second checkpoint no slot was deleted, so that the whole journal stands in for a damaged first one.
    Raises CheckpointDamaged when the predecessor is damaged as well.
    """
    if tip.checkpoint is None:
        return LoadedCheckpoint(None, tip.replay_from)
    try:
        return LoadedCheckpoint(read_checkpoint(store, tip.shard, tip.checkpoint), tip.replay_from)
    except CheckpointDamaged as error:
        damaged(error.key)
        log.error("shard %d falls back to the checkpoint before: %s", tip.shard, error)
    previous = tip.previous_checkpoint
    if previous is None:
        return LoadedCheckpoint(None, 0)
    return LoadedCheckpoint(read_checkpoint(store, tip.shard, previous), previous.replay_from)
