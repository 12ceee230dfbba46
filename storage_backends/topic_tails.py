"""What the checkpoint and the sections of a shard hold of each topic beside its manifest, and which of it counts.

Owns: parting the checkpoint and the slots above it by topic, and when a part of the checkpoint counts.
Does not own: reading either (`checkpoints`, `sections`), and what the decisions do when they are applied.

    state as of max(applied, p)  =  manifest, and where `applied` < p and the checkpoint has a part for the topic,
                                    that part in place of the manifest's progress
    state now                    =  that, and the decisions of the slots above: those that the part carries, then those
                                    of the sections above the checkpoint's slot

`p` is the part's slot: the checkpoint's, or, of a part that was carried over, that of the checkpoint it was written
for; 0 where there is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence

from storage_backends.formats import checkpoint_format, manifest, shard_slot, slot_format
from storage_backends.formats.checkpoint_format import CarriedSlot, SealingPart
from storage_backends.formats.shard_slot import ShardSlot


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicTail:
    """What checkpoint and sections hold of a topic beside its manifest.

    `part`: its part of the checkpoint, which always says its slot; None when there is none. `slots`: the decisions
    above it, ascending. Most are never decoded: a later seal holds the rows.
    """

    part: checkpoint_format.TopicPart | None = None
    slots: tuple[CarriedSlot, ...] = ()

    @property
    def part_slot(self) -> ShardSlot:
        if self.part is None or self.part.slot is None:
            return shard_slot.BEFORE_THE_FIRST
        return self.part.slot

    def slots_above(self, tip: manifest.TopicManifest) -> Iterator[CarriedSlot]:
        """The decisions that are in neither the manifest nor the part."""
        state_slot = max(tip.applied, self.part_slot)
        return (slot for slot in self.slots if slot.slot > state_slot)


NOTHING = TopicTail()


def tails_of(
    loaded: checkpoint_format.Checkpoint | None,
    slots: Iterable[tuple[ShardSlot, Sequence[slot_format.AnyRecord]]],
    *,
    only: Container[str] | None = None,
) -> dict[str, TopicTail]:
    """By topic id, all topics that the checkpoint or the slots name; `only`: those among these. `slots`: the records of
    each, ascending.
    """
    parts: dict[str, checkpoint_format.TopicPart] = {}
    above: dict[str, list[CarriedSlot]] = {}
    covered = shard_slot.BEFORE_THE_FIRST if loaded is None else loaded.slot
    for part in () if loaded is None else loaded.topics:
        if only is not None and part.topic_id not in only:
            continue
        above[part.topic_id] = list(part.carried)
        of = covered if part.slot is None else part.slot
        parts[part.topic_id] = dataclasses.replace(part, slot=of, carried=())
    for slot, records in slots:
        if slot <= covered:
            continue
        named: dict[str, list[slot_format.AnyRecord]] = {}
        for record in records:
            if only is None or record.topic_id in only:
                named.setdefault(record.topic_id, []).append(record)
        for topic_id, own in named.items():
            above.setdefault(topic_id, []).append(CarriedSlot(slot, tuple(own)))
    return {topic_id: TopicTail(parts.get(topic_id), tuple(own)) for topic_id, own in above.items()}


def counting_part(tip: manifest.TopicManifest, tail: TopicTail) -> checkpoint_format.TopicPart | None:
    """The topic's part of the checkpoint, if it is newer than the manifest."""
    part = tail.part
    if part is None or tip.applied >= tail.part_slot or part.incarnation != tip.incarnation:
        return None
    return part


def still_sealing(tip: manifest.TopicManifest, part: checkpoint_format.TopicPart) -> Iterator[SealingPart]:
    """The buckets of the part whose seal the manifest does not have: their rows are rows of the mutable bucket. Of the
    others the rows come from the bucket, and only the bits of the part's progress count.
    """
    return (sealing for sealing in part.sealing if tip.applied < sealing.slot)
