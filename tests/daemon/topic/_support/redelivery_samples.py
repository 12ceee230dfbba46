"""A topic with redeliveries of every kind, and what is stored of it.

Owns: the decisions, what is known of a topic when they are applied, and storing it: journal, seal, checkpoint.
Does not own: what must survive (the tests).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.position_keys import keys_of
from daemon.topic import bucket_lifecycle
from storage_backends import checkpoints, topic_manifest
from storage_backends.formats import checkpoint_format, index_ids, manifest, slot_format
from storage_backends.formats.index_ids import batch_parts_of
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import U32, U64
from storage_backends.formats.slot_format import DeadLetterReason, SlotHeader
from tests.daemon.shard.test_recovery import LEDGER, LIMITS, Entries, Store, restored, rows_of, tip_of

PARTS = batch_parts_of(1)


# ---- what is known of a topic


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """Of one subscription, by (index, entry): when what is nacked is due and comes back; counts. Of dead letters (id,
    entry, batch index, count, reason, text).
    """

    nacked: dict[tuple[int, int], tuple[int, int]]
    counts: dict[tuple[int, int], int]
    dead_letters: list[tuple[int, int, int, int, int, str]]
    last_dead_letter_id: int


NOTHING = Known({}, {}, [], 0)


def named(topic: TopicState, keys: U64) -> list[tuple[int, int]]:
    owners = topic.indexes.places.owners(keys).tolist()
    return list(zip(owners, topic.indexes.places.positions(keys)[1].tolist(), strict=True))


def known(topic: TopicState, subscription_id: int = 1) -> Known:
    state = topic.subscriptions[subscription_id]
    rows, times = state.nacks.freeze().rows()
    times_of = zip(rows.rows.deliver_at_ms.tolist(), times.tolist(), strict=True)
    counts: dict[tuple[int, int], int] = {}
    for bit, plane in enumerate(state.counts.planes()):
        for at in named(topic, keys_of(plane)):
            counts[at] = counts.get(at, 0) + (1 << bit)
    dead = state.dead_letters.freeze().rows()
    columns = (dead.dead_letter_id, dead.entry_id, dead.batch_index, dead.redelivery_count, dead.reason)
    texts = [dead.texts[number] for number in dead.text_index.tolist()]
    return Known(
        dict(zip(named(topic, rows.keys), times_of, strict=True)),
        counts,
        list(zip(*(column.tolist() for column in columns), texts, strict=True)),
        state.last_dead_letter_id,
    )


def levels_of(topic: TopicState) -> dict[tuple[int, int], list[int]]:
    """By (index, level), the entries."""
    found: dict[tuple[int, int], list[int]] = {}
    for number, index in topic.indexes.items():
        for level, keys in index.levels.freeze():
            found.setdefault((number, level), []).extend(entry for _, entry in named(topic, keys_of(keys)))
    return {at: sorted(entries) for at, entries in found.items() if entries}


# ---- what was decided


def u32(values: Iterable[int]) -> U32:
    return np.array(list(values), np.uint32)


def nack(
    entries: Entries, *, counts: Iterable[int], index_id: int = 0, added: bool = False, subscription_id: int = 1
) -> slot_format.NackRecord:
    """They come back in the order opposite to their entries."""
    rows = rows_of(entries)
    times = np.uint64(1_000_000) - rows.entry_id
    return slot_format.NackRecord("id", 1, subscription_id, index_id, rows, times, u32(counts), added)


def as_parts(entries: Entries, batch_index: int) -> list[int]:
    ids = np.array(list(entries), np.uint64)
    numbers: list[int] = index_ids.part_entry_id(ids, np.full(len(ids), batch_index, np.uint32)).tolist()
    return numbers


def dead(
    entries: Entries, ids: Iterable[int], text: str = "", *, index_id: int = 0, subscription_id: int = 1
) -> slot_format.DeadLetterRecord:
    rows = rows_of(entries)
    dead_letter_id = np.array(list(ids), np.uint64)
    reason = DeadLetterReason.REJECTED if text else DeadLetterReason.TOO_OFTEN
    counts = u32(range(5, 5 + len(rows)))
    return slot_format.DeadLetterRecord(
        "id", 1, subscription_id, index_id, rows, counts, dead_letter_id, dead_letter_id, reason, text
    )


EVERYTHING: tuple[slot_format.Record, ...] = (
    slot_format.AddRecord("id", 1, 0, rows_of(range(20)), 3),
    slot_format.AddRecord("id", 1, 0, rows_of(range(20, 30))),
    slot_format.AddRecord("id", 1, 2, rows_of(range(4)), 18),
    nack(range(5), counts=[1, 2, 3, 4, 1_000]),
    nack(as_parts([7, 8], 2), counts=[5, 6], index_id=PARTS, added=True),
    nack([100], counts=[1], index_id=1, added=True),
    nack([2, 3], counts=[7, 8], subscription_id=2),
    nack([1], counts=[9], index_id=2, subscription_id=2),
    dead([10, 11], [1, 2]),
    dead([12], [3], "no such order"),
    dead(as_parts([8], 2), [4], "half of it", index_id=PARTS),
    slot_format.ReplayRecord("id", 1, 1, 1, rows_of([11]), np.array([2], np.uint64)),
    dead([13], [5]),
    slot_format.PurgeRecord("id", 1, 1, np.array([5], np.uint64)),
    dead([3], [40], index_id=2, subscription_id=2),
)
ENTRY = index_ids.NO_BATCH_INDEX
OF_FIRST = Known(
    nacked={
        **{(0, entry): (1_000 + entry, 1_000_000 - entry) for entry in range(5)},
        (PARTS, as_parts([7], 2)[0]): (1_000 + as_parts([7], 2)[0], 1_000_000 - as_parts([7], 2)[0]),
        (1, 100): (1_100, 999_900),
    },
    counts={
        **{(0, entry): count for entry, count in enumerate((1, 2, 3, 4, 1_000))},
        (PARTS, as_parts([7], 2)[0]): 5,
        (1, 100): 1,
    },
    dead_letters=[
        (1, 10, ENTRY, 5, DeadLetterReason.TOO_OFTEN, ""),
        (3, 12, ENTRY, 5, DeadLetterReason.REJECTED, "no such order"),
        (4, 8, 2, 5, DeadLetterReason.REJECTED, "half of it"),
    ],
    last_dead_letter_id=5,
)
OF_OTHER = Known(
    nacked={(0, 2): (1_002, 999_998), (0, 3): (1_003, 999_997), (2, 1): (1_001, 999_999)},
    counts={(0, 2): 7, (0, 3): 8, (2, 1): 9},
    dead_letters=[(40, 3, ENTRY, 5, DeadLetterReason.TOO_OFTEN, "")],
    last_dead_letter_id=40,
)
LEVELS = {(0, 3): list(range(20)), (2, 18): [0, 1, 2]}


def holds_everything(topic: TopicState) -> None:
    assert known(topic, 1) == OF_FIRST
    assert known(topic, 2) == OF_OTHER
    assert levels_of(topic) == LEVELS


# ---- what is stored


class Stored:
    """A topic whose decisions are applied, and what is stored of it. `slots`: the journal."""

    def __init__(self, *records: slot_format.Record) -> None:
        self.store = Store()
        self.tip = tip_of(applied=0)
        self.topic = restored(self.store, self.tip)
        # Keys are not those that the topic has when it is recovered.
        self.topic.index.pages.intern(np.array([LEDGER + 1], np.uint64), np.array([1 << 40], np.uint64))
        self.slots: list[bytes] = []
        for record in records:
            self.decide(record)

    def decide(self, *records: slot_format.Record) -> None:
        builder = slot_format.SlotBuilder()
        for record in records:
            builder.append(record)
        merged = builder.freeze()
        header = SlotHeader(1, 1, ShardSlot(len(self.slots) + 1), len(merged))
        self.slots.append(slot_format.encode_slot(header, merged))
        for record in merged:
            self.topic.apply(record, header.slot, elapsed_ms=0)

    def seal(self, *, as_object: bool = False) -> None:
        """The manifest has all that was decided; the topic in memory serves its rows from where they were."""
        slot = len(self.slots)
        cuts = tuple(
            bucket_lifecycle.SealCut(
                topic="t", key=f"b{slot}-{number}", base=1, slot=ShardSlot(slot), rows=cut.mutable, index_id=number
            )
            for number, cut in self.topic.indexes.cut()
        )
        written = [
            bucket_lifecycle.write_bucket(self.store.store, cut, limits=LIMITS, compatible=False) for cut in cuts
        ]
        progress = bucket_lifecycle.progress_of(cuts, (), self.topic.redelivery_cut())
        reference = None
        if as_object:
            body = manifest.encode_progress(progress)
            self.store.store.put("progress", body)
            reference = topic_manifest.reference_to("progress", 1, body)
        self.tip = dataclasses.replace(
            self.tip,
            applied=ShardSlot(slot),
            live=tuple(each.live for each in written if each is not None),
            progress=None if as_object else progress,
            progress_object=reference,
        )

    def checkpoint(self) -> bytes:
        cut = bucket_lifecycle.TopicCut(
            topic_id="id",
            topic="t",
            incarnation=1,
            indexes=self.topic.indexes.cut(),
            sealing=(),
            redelivery=self.topic.redelivery_cut(),
        )
        value = checkpoint_format.Checkpoint(1, 1, ShardSlot(len(self.slots)), (bucket_lifecycle.checkpoint_part(cut),))
        return checkpoint_format.encode_checkpoint(value)

    def recovered(self, written: bytes | None = None, *, truncated_to: int = 0) -> TopicState:
        """From the manifest, a checkpoint and the slots above `truncated_to`."""
        loaded = None if written is None else checkpoint_format.decode_checkpoint(written)
        slots = map(slot_format.decode_slot, self.slots[truncated_to:])
        tails = checkpoints.tails_of(loaded, ((header.slot, records) for header, records in slots))
        tip = manifest.decode_topic_manifest(manifest.encode_topic_manifest(self.tip))
        return restored(self.store, tip, tails.get("id", checkpoints.NOTHING))
