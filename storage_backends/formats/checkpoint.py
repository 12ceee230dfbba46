"""A shard checkpoint: the state of every topic that its manifest does not hold yet, as of a slot.

Owns: its values and its bytes.
Does not own: when one is written, and which part of it still counts: a part whose topic has applied later slots does
not.

The object is the protobuf message Checkpoint in the frame of `framing`, magic "TyCP"; its columns are dense.
"""

from __future__ import annotations

import dataclasses

import zstandard

from storage_backends.formats import framing, journal, mirror, segment
from storage_backends.formats.generated import checkpoint_pb2
from storage_backends.formats.manifest import Progress
from storage_backends.formats.rows import Rows

FORMAT_VERSION = 1
MAGIC = b"TyCP"
_WHAT = "checkpoint"


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class SealingPart:
    """A bucket whose seal was cut at `slot` and is not known to be committed. `bucket`: the key it is written under.

    When the topic has applied `slot`, the rows come from the bucket; else these are rows of the mutable bucket.
    """

    bucket: str
    slot: int
    rows: Rows


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class TopicPart:
    """A topic as of the checkpoint's slot. `progress`: of live and sealing buckets by key, and of the mutable bucket
    under the empty name.
    """

    topic_id: str
    topic: str
    incarnation: int
    mutable_rows: Rows
    sealing: tuple[SealingPart, ...] = ()
    progress: Progress = dataclasses.field(default_factory=Progress)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """The shard as of `slot`, written by the owner of `epoch`."""

    shard: int
    epoch: int
    slot: int
    topics: tuple[TopicPart, ...] = ()


def encode_checkpoint(value: Checkpoint) -> bytes:
    zstd = segment.compressor()
    message = checkpoint_pb2.Checkpoint(shard=value.shard, epoch=value.epoch, slot=value.slot)
    for part in value.topics:
        state = message.topics.add(topic_id=part.topic_id, topic=part.topic, incarnation=part.incarnation)
        if len(part.mutable_rows):
            _fill_rows(state.mutable_rows, part.mutable_rows, zstd)
        for sealing in part.sealing:
            added = state.sealing.add(bucket=sealing.bucket, slot=sealing.slot)
            _fill_rows(added.mutable_rows, sealing.rows, zstd)
        if part.progress.buckets:
            mirror.fill(state.progress, part.progress)
    return framing.frame(MAGIC, FORMAT_VERSION, message.SerializeToString(deterministic=True))


def decode_checkpoint(data: bytes) -> Checkpoint:
    """Raises FormatError on damage and UnsupportedVersion on a version that is not known here."""
    payload = framing.unframe(data, MAGIC, FORMAT_VERSION, _WHAT)
    message = framing.parse(checkpoint_pb2.Checkpoint, payload, _WHAT, framing.HEADER_BYTES)
    return Checkpoint(message.shard, message.epoch, message.slot, tuple(_topic_part(state) for state in message.topics))


def _topic_part(state: checkpoint_pb2.TopicState) -> TopicPart:
    what = f"{_WHAT} of topic {state.topic!r}"
    sealing = tuple(
        SealingPart(part.bucket, part.slot, _rows(part.mutable_rows, f"{what} sealing {part.bucket}"))
        for part in state.sealing
    )
    rows = _rows(state.mutable_rows, what) if state.HasField("mutable_rows") else Rows.empty()
    progress = mirror.made_from(Progress, state.progress)
    return TopicPart(state.topic_id, state.topic, state.incarnation, rows, sealing, progress)


def _fill_rows(message: checkpoint_pb2.MutableRows, rows: Rows, zstd: zstandard.ZstdCompressor) -> None:
    message.rows = len(rows)
    journal.fill_add(message.columns, rows, zstd)


def _rows(message: checkpoint_pb2.MutableRows, what: str) -> Rows:
    return journal.rows_of_add(message.columns, message.rows, what, framing.HEADER_BYTES)
