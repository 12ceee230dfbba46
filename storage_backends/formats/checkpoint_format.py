"""Encodes and decodes a shard checkpoint: the state of every topic that its manifest does not hold yet.

The state is that as of one slot; the part of a topic that has applied later slots no longer counts. The object is the
protobuf message Checkpoint in the frame of `framing`, magic "TyCP"; its columns are dense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import zstandard

from storage_backends.formats import (
    deletion_format,
    format_errors,
    framing,
    mirror,
    names,
    record_columns,
    requirements,
    segment,
    slot_format,
)
from storage_backends.formats.deletion_format import DeletionState
from storage_backends.formats.generated import checkpoint_pb2, journal_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.manifest import Progress, progress_holds_ids
from storage_backends.formats.row_columns import Rows

MAGIC = b"TyCP"
_WHAT = "checkpoint"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealingPart:
    """A bucket whose seal was cut at `slot` and is not known to be committed.

    It belongs to the index `subscription_id` (`index_ids`), and `bucket` is the key it is written under. If the topic
    has applied `slot`, the rows come from the bucket; else these are rows of the mutable bucket.
    """

    bucket: str
    slot: ShardSlot
    rows: Rows
    subscription_id: int = 0


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class OwnRows:
    """The rows of the mutable bucket of the index `subscription_id`, which is not the shared one."""

    subscription_id: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CarriedSlot:
    """The records of one slot that name one topic, in the order in which they are applied.

    Records that were read are not decoded: damage inside their columns is damage of their topic.
    """

    slot: ShardSlot
    records: tuple[slot_format.AnyRecord, ...]


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicPart:
    """A topic as of `slot`, or as of the checkpoint's slot if that is None.

    `mutable_rows` are those of the shared index, `own_rows` those of the indexes of subscriptions, ascending by index.
    `progress` covers live and sealing buckets by key, the shared index's mutable bucket under the empty name, and
    redeliveries. The part of a topic that was not loaded is carried over from the checkpoint before, with its `slot`,
    or with 0 if only the manifest has state. `carried` are the decisions on the topic in later slots, ascending.
    """

    topic_id: str
    topic: str
    incarnation: int
    mutable_rows: Rows
    sealing: tuple[SealingPart, ...] = ()
    progress: Progress = dataclasses.field(default_factory=Progress)
    slot: ShardSlot | None = None
    carried: tuple[CarriedSlot, ...] = ()
    own_rows: tuple[OwnRows, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """A shard as of `slot`, written by the owner of `epoch`. `deletions` is None if there are none.

    `known` has every topic that existed, by id, with the number of a manifest that it had, 0 if that is unknown. Older
    releases know none.
    """

    shard: int
    epoch: int
    slot: ShardSlot
    topics: tuple[TopicPart, ...] = ()
    deletions: DeletionState | None = None
    known: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for part in self.topics:
            _check_slots(part, self.slot)
            _check_own_rows(part)


def _check_slots(part: TopicPart, slot: ShardSlot) -> None:
    """Raise ValueError if the part, or its carried slots, cannot belong to a checkpoint of `slot`."""
    reached = slot if part.slot is None else part.slot
    if reached > slot:
        raise ValueError(f"topic {part.topic!r} is as of slot {reached}, the checkpoint as of slot {slot}")
    for carried in part.carried:
        if not reached < carried.slot <= slot:
            raise ValueError(
                f"topic {part.topic!r} carries slot {carried.slot} after slot {reached}, up to slot {slot}"
            )
        reached = carried.slot
        if any(record.topic_id != part.topic_id for record in carried.records):
            raise ValueError(f"topic {part.topic!r} carries a record of another topic in slot {carried.slot}")


def _check_own_rows(part: TopicPart) -> None:
    """Raise ValueError if the rows of own indexes do not ascend by index, or name the shared one."""
    reached = 0
    for own in part.own_rows:
        if own.subscription_id <= reached:
            raise ValueError(
                f"topic {part.topic!r} has own rows of index {own.subscription_id} after those of {reached}"
            )
        reached = own.subscription_id


def _holds_ids(part: TopicPart) -> bool:
    """Return whether a row, a dead letter or a record of the part has a schedule id."""
    return (
        any(each.has_ids for each in (part.mutable_rows, *(own.rows for own in part.own_rows)))
        or any(sealing.rows.has_ids for sealing in part.sealing)
        or any(record.holds_ids for carried in part.carried for record in carried.records)
        or progress_holds_ids(part.progress)
    )


def encode_checkpoint(value: Checkpoint) -> bytes:
    zstd = segment.compressor()
    message = checkpoint_pb2.Checkpoint(shard=value.shard, epoch=value.epoch, slot=value.slot)
    for part in value.topics:
        state = message.topics.add(topic_id=part.topic_id, topic=part.topic, incarnation=part.incarnation)
        if len(part.mutable_rows):
            _fill_rows(state.mutable_rows, part.mutable_rows, zstd)
        for own in part.own_rows:
            _fill_rows(state.own_rows.add(subscription_id=own.subscription_id).mutable_rows, own.rows, zstd)
        for sealing in part.sealing:
            added = state.sealing.add(bucket=sealing.bucket, slot=sealing.slot)
            _fill_rows(added.mutable_rows, sealing.rows, zstd)
            if sealing.subscription_id:
                added.subscription_id = sealing.subscription_id
        if part.progress != Progress():
            mirror.fill(state.progress, part.progress)
        if part.slot is not None:
            state.slot = part.slot
        for carried in part.carried:
            carrier = state.carried.add(slot=carried.slot)
            for record in carried.records:
                slot_format.fill_record(carrier.records.add(), record)
    for topic_id, number in value.known.items():
        message.known.add(topic_id=topic_id, manifest=number)
    parts = [message.SerializeToString(deterministic=True)]
    for portion in deletion_format.portions(value.deletions) if value.deletions is not None else ():
        # The concatenated bytes of messages are those of a message with the fields of all.
        partial = checkpoint_pb2.Checkpoint()
        deletion_format.fill_state(partial.deletions, portion)
        parts.append(partial.SerializePartialToString(deterministic=True))
    version = requirements.version_of(holds_ids=any(map(_holds_ids, value.topics)))
    return framing.frame(MAGIC, version, b"".join(parts))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Decode a checkpoint. Raises FormatError on damage and UnsupportedVersion on an unknown version."""
    payload = framing.unframe(data, MAGIC, requirements.versions_read(), _WHAT)
    message = framing.parse(checkpoint_pb2.Checkpoint, payload, _WHAT, framing.HEADER_BYTES)
    with format_errors.reading(_WHAT, framing.HEADER_BYTES):
        topics = tuple(_topic_part(state) for state in message.topics)
        stored = None
        if message.HasField("deletions"):
            stored = deletion_format.state_of(message.deletions, f"{_WHAT} deletions", framing.HEADER_BYTES)
        known = {each.topic_id: each.manifest for each in message.known}
        if wrong := [each for each in known if not names.is_topic_id(each)]:
            raise ValueError(f"it knows topic {wrong[0]!r}, which is not a topic id")
        return Checkpoint(message.shard, message.epoch, ShardSlot(message.slot), topics, stored, known)


def _topic_part(state: checkpoint_pb2.TopicState) -> TopicPart:
    what = f"{_WHAT} of topic {state.topic!r}"
    sealing = tuple(
        SealingPart(
            part.bucket,
            ShardSlot(part.slot),
            _rows(part.mutable_rows, f"{what} sealing {part.bucket}"),
            part.subscription_id,
        )
        for part in state.sealing
    )
    own_rows = tuple(
        OwnRows(own.subscription_id, _rows(own.mutable_rows, f"{what} index {own.subscription_id}"))
        for own in state.own_rows
    )
    rows = _rows(state.mutable_rows, what) if state.HasField("mutable_rows") else Rows.empty()
    progress = mirror.made_from(Progress, state.progress)
    return TopicPart(
        state.topic_id,
        state.topic,
        state.incarnation,
        rows,
        sealing,
        progress,
        ShardSlot(state.slot) if state.HasField("slot") else None,
        tuple(_carried(slot, what) for slot in state.carried),
        own_rows,
    )


def _carried(message: checkpoint_pb2.CarriedSlot, what: str) -> CarriedSlot:
    named = f"{what} carried slot {message.slot}"
    records = []
    for number, record in enumerate(message.records):
        # A part of a message keeps the whole of it in memory, and this part may stay for long.
        own = journal_pb2.Record()
        own.CopyFrom(record)
        records.append(slot_format.StoredRecord(own, f"{named} record {number}", framing.HEADER_BYTES))
    return CarriedSlot(ShardSlot(message.slot), tuple(records))


def _fill_rows(message: checkpoint_pb2.MutableRows, rows: Rows, zstd: zstandard.ZstdCompressor) -> None:
    message.rows = len(rows)
    record_columns.fill_rows(message.columns, rows, zstd)


def _rows(message: checkpoint_pb2.MutableRows, what: str) -> Rows:
    return record_columns.rows_of(message.columns, message.rows, what, framing.HEADER_BYTES)
