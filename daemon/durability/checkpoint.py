"""What a shard checkpoint says of a topic.

Owns: turning a topic's state as of a slot into its part of the checkpoint.
Does not own: the object (`checkpoint_store`), when one is taken (the engine) and reading it back (`recovery`).
"""

from __future__ import annotations

import dataclasses

from daemon.core.index import BucketBits, IndexCut
from daemon.durability import progress
from daemon.durability.sealing import SealCut
from storage_backends.formats import checkpoint


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicCut:
    """A topic as of the checkpoint's slot. `sealing`: cuts whose seal is not known to be committed."""

    topic_id: str
    topic: str
    incarnation: int
    index: IndexCut
    sealing: tuple[SealCut, ...]


def part_of(cut: TopicCut) -> checkpoint.TopicPart:
    """The topic's part of the checkpoint. O(n): runs in an executor."""
    mutable = cut.index.mutable
    mutable_bits = BucketBits("", (), mutable.acknowledged)
    return checkpoint.TopicPart(
        topic_id=cut.topic_id,
        topic=cut.topic,
        incarnation=cut.incarnation,
        mutable_rows=mutable.kept().rows,
        sealing=tuple(
            checkpoint.SealingPart(bucket=seal.key, slot=seal.slot, rows=seal.rows.kept().rows) for seal in cut.sealing
        ),
        progress=progress.to_stored(mutable.pages, (*cut.index.bits, mutable_bits)),
    )
