"""What a shard checkpoint says of a topic.

Owns: turning a topic's state as of a slot into its part of the checkpoint.
Does not own: the object (`checkpoint_store`), when one is taken (the engine) and reading it back (`recovery`).
"""

from __future__ import annotations

import dataclasses
import operator

from daemon.core.decisions.redelivery_cut import RedeliveryCut
from daemon.core.index.index import BucketBits, IndexCut
from daemon.topic import stored_progress
from daemon.topic.sealing import SealCut
from storage_backends.formats import checkpoint_format


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicCut:
    """A topic as of the checkpoint's slot. `indexes`: by id, the first one is 0, the shared index. `sealing`: cuts
    whose seal is not known to be committed.
    """

    topic_id: str
    topic: str
    incarnation: int
    indexes: tuple[tuple[int, IndexCut], ...]
    sealing: tuple[SealCut, ...]
    redelivery: RedeliveryCut


def part_of(cut: TopicCut) -> checkpoint_format.TopicPart:
    """The topic's part of the checkpoint. O(n): runs in an executor."""
    (_, shared), *own = cut.indexes
    bits = [each for _, index in cut.indexes for each in index.bits]
    bits.append(BucketBits("", (), shared.mutable.acknowledged))
    own_rows = ((number, index.mutable.kept().rows) for number, index in sorted(own, key=operator.itemgetter(0)))
    return checkpoint_format.TopicPart(
        topic_id=cut.topic_id,
        topic=cut.topic,
        incarnation=cut.incarnation,
        mutable_rows=shared.mutable.kept().rows,
        sealing=tuple(map(_sealing_part, cut.sealing)),
        progress=stored_progress.of_topic(shared.mutable.pages, bits, cut.redelivery),
        own_rows=tuple(checkpoint_format.OwnRows(number, rows) for number, rows in own_rows if len(rows)),
    )


def _sealing_part(cut: SealCut) -> checkpoint_format.SealingPart:
    return checkpoint_format.SealingPart(
        bucket=cut.key, slot=cut.slot, rows=cut.rows.kept().rows, subscription_id=cut.index_id
    )
