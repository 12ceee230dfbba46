"""Reading the checkpoints of a shard.

Owns: that what is read is whole, and falling back to the checkpoint before a damaged one.
Does not own: writing one, the form of its bytes (`formats.checkpoint_format`), and the sections kept for the one
before.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from storage_backends import object_store
from storage_backends.formats import checkpoint_format, format_errors, manifest, names, shard_slot
from storage_backends.formats.shard_slot import ShardSlot

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """The newest checkpoint that can be read, and the shard slot above which sections continue it.

    `checkpoint` is None before the first one. `key`: of the object that it was read from.
    """

    checkpoint: checkpoint_format.Checkpoint | None
    slot: ShardSlot
    key: str = ""


def read_checkpoint(
    store: object_store.ObjectStore, shard: int, reference: manifest.CheckpointCut
) -> checkpoint_format.Checkpoint:
    """Raises Damaged, NotFound when it is missing, and what the store raises when it cannot be reached."""
    key = reference.object.name
    body = store.get(key)
    try:
        manifest.check_bytes(reference.object, body, "checkpoint")
        checkpoint = checkpoint_format.decode_checkpoint(body)
    except format_errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error
    if (checkpoint.shard, checkpoint.slot) != (shard, reference.slot):
        raise object_store.Damaged(key, f"it is of slot {checkpoint.slot} of shard {checkpoint.shard}")
    for part in checkpoint.topics:
        if not names.is_topic_id(part.topic_id):
            raise object_store.Damaged(key, f"a part is of topic id {part.topic_id!r}, which is none")
    return checkpoint


def read_newest(
    store: object_store.ObjectStore, tip: manifest.ShardManifest, *, damaged: Callable[[str], None]
) -> LoadedCheckpoint:
    """The checkpoint that `tip` names, or the one before when it is damaged or missing: then `damaged` hears of its
    key.

    Before the second checkpoint no section was let go, so that all of them stand in for a damaged first one.
    Raises Damaged or NotFound when the predecessor cannot be read either, and the store's errors.
    """
    if tip.checkpoint is None:
        return LoadedCheckpoint(None, shard_slot.BEFORE_THE_FIRST)
    try:
        return _loaded(store, tip.shard, tip.checkpoint)
    except (object_store.Damaged, object_store.NotFound) as error:
        damaged(error.key)
        log.error("shard %d falls back to the checkpoint before: %s", tip.shard, error)
    previous = tip.previous_checkpoint
    if previous is None:
        return LoadedCheckpoint(None, shard_slot.BEFORE_THE_FIRST)
    return _loaded(store, tip.shard, previous)


def _loaded(store: object_store.ObjectStore, shard: int, reference: manifest.CheckpointCut) -> LoadedCheckpoint:
    checkpoint = read_checkpoint(store, shard, reference)
    return LoadedCheckpoint(checkpoint, checkpoint.slot, reference.object.name)
