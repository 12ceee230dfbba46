"""Defines manifests as values, with their bytes: of the root (FORMAT), of a shard and of a topic.

A topic manifest points to buckets, and to progress and properties, which are values here, too; so are a dead object and
a pass of the probe. All are frozen mirrors of the messages of manifest.proto. Each decoder raises FormatError on damage
and UnsupportedVersion on an unknown version. `commit` and the operations decide what may follow what; `names` has the
keys.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import itertools
from collections.abc import Sequence
from typing import TypeVar

from google.protobuf import message as protobuf

from storage_backends.formats import format_errors, framing, log_slot_format, mirror, names, requirements
from storage_backends.formats.generated import manifest_pb2
from storage_backends.formats.log_slot_format import Head, ShardSlot
from storage_backends.formats.position_bitmap import PositionBitmap

FORMAT_VERSION = 2
# The frame version of FORMAT is that of the root. Of the others only manifests and progress have a second one.
_ONE = (1,)
_MANIFESTS = (1, 2)
LINEAGE_MAX = 256
# Limits of stored policies; a daemon accepts less
POINTS_PER_CONSUMER_MAX = 1 << 16
NACK_PRECISION_BITS_MAX = 63
ROOT_MAGIC = b"TyRF"
SHARD_MAGIC = b"TySM"
TOPIC_MAGIC = b"TyTM"
PROGRESS_MAGIC = b"TyPG"
PROPERTIES_MAGIC = b"TyPR"
DEAD_OBJECT_MAGIC = b"TyDO"
PROBE_PASS_MAGIC = b"TyPP"


class LogForm(enum.IntEnum):
    """The form of the logs of daemons: an object for each slot, or files that are appended to."""

    OBJECTS = 1
    FILES = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RootFormat:
    """FORMAT: the values that hold for the whole root. `root_id` is unique for each root."""

    format_version: int
    shards: int
    created_ms: int
    root_id: str
    log_form: LogForm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManifestHead:
    """The beginning of every manifest.

    `lineage` holds the newest commit ids, oldest first, its own included, at most 256. `previous_sha256` is that of the
    manifest before it, empty for the first. Objects with a base below `orphan_floor` may be collected if no manifest
    names them.
    """

    number: int
    previous_sha256: bytes
    commit_id: str
    writer: str
    created_ms: int
    lineage: tuple[str, ...] = ()
    orphan_floor: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ObjectReference:
    """An object by its key. `base` is the number of the manifest it was started from."""

    name: str
    base: int
    size_bytes: int
    sha256: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """An object that left in manifest `removed_in` and may be deleted after `delete_after_ms`."""

    object: ObjectReference
    removed_in: int
    delete_after_ms: int
    attempts: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogRange:
    """The range of a log that holds sections of `epoch`.

    They are the sections with `first_slot` <= section number <= `last_slot`, in the slots of the log with `after` <
    number <= `through`. `through` and `last_slot` are None while the range is open, which lasts as long as the epoch.
    Raises ValueError if only one of the two is None.
    """

    log_id: str
    epoch: int
    after: int
    through: int | None
    first_slot: int
    last_slot: int | None

    def __post_init__(self) -> None:
        if (self.through is None) != (self.last_slot is None):
            raise ValueError(f"the range of epoch {self.epoch} goes through {self.through} to slot {self.last_slot}")

    def covers(self, log_id: str, number: int, head: Head) -> bool:
        """Return whether a section of epoch and number `head`, in that slot of that log, belongs to this range."""
        return (
            (self.log_id, self.epoch) == (log_id, head.epoch)
            and self.after < number
            and (self.through is None or number <= self.through)
            and self.first_slot <= head.last_slot
            and (self.last_slot is None or head.last_slot <= self.last_slot)
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCut:
    """The checkpoint of section number `slot`.

    `at` is the last slot of the log `log_id` that was applied when it was cut.
    """

    object: ObjectReference
    slot: int
    log_id: str
    at: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShardManifest:
    """The owner of a shard, and the `ranges` of its sections, oldest first; the last is open while it is owned.

    Replay begins at `checkpoint`, at `previous_checkpoint` if that is damaged, or at section number 0 without one.
    `owner` is empty if the shard was released or given back. Owners of epochs below `settled_epoch` deliver nothing any
    longer. `requires` is what a reader must know (`requirements`); it only grows. Raises ValueError for an open range
    that is not the last.
    """

    head: ManifestHead
    shard: int
    epoch: int
    owner: str = ""
    address: str = ""
    settled_epoch: int = 0
    ranges: tuple[LogRange, ...] = ()
    checkpoint: CheckpointCut | None = None
    previous_checkpoint: CheckpointCut | None = None
    tombstones: tuple[Tombstone, ...] = ()
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_requires(self.requires)
        for each in self.ranges[:-1]:
            if each.through is None:
                raise ValueError(f"the range of epoch {each.epoch} is open, and not the last")

    @property
    def open_range(self) -> LogRange | None:
        """The range of the owner, or None if no daemon owns the shard."""
        return self.ranges[-1] if self.ranges and self.ranges[-1].through is None else None

    @property
    def checkpoint_slot(self) -> int:
        return slot_of(self.checkpoint)

    @property
    def previous_slot(self) -> int:
        return slot_of(self.previous_checkpoint)

    @property
    def last_closed_slot(self) -> int:
        """The last section number before an open range: of the last range, else of the checkpoint, else 0."""
        before = [each.last_slot for each in self.ranges if each.last_slot is not None]
        return before[-1] if before else self.checkpoint_slot

    def lowest_after(self, log_id: str) -> int | None:
        """Return the log's number behind which this shard needs it, or None if no range names the log."""
        return min((each.after for each in self.ranges if each.log_id == log_id), default=None)

    def certain_in(self, log_id: str) -> list[int]:
        """Return numbers of the log that this manifest proves certain; 0 stands for none.

        A closed range ends before a FENCE or CLOSE, or at a slot of a log that its own daemon continues.
        """
        ranges = (each.after if each.through is None else each.through for each in self.ranges if each.log_id == log_id)
        cuts = (self.checkpoint, self.previous_checkpoint)
        return [0, *ranges, *(cut.at for cut in cuts if cut is not None and cut.log_id == log_id)]


def _check_requires(required: tuple[str, ...]) -> None:
    if list(required) != sorted(set(required)):
        raise ValueError(f"it requires {', '.join(required)}: they are not in the order of their names")


def slot_of(checkpoint: CheckpointCut | None) -> int:
    """Return the section number of a checkpoint, or 0 without one."""
    return 0 if checkpoint is None else checkpoint.slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveBucket:
    """A bucket that holds rows of the index `subscription_id` (`index_ids`).

    `hash_low` and `hash_high` are those of `row_hash`. `level` 0 was sealed from a mutable bucket. A quarantined bucket
    is not read and not deleted; `damage` says why it was quarantined. `id_rows` rows have a schedule id, `id_hash_low`
    and `id_hash_high` are those of `id_hash`.
    """

    object: ObjectReference
    rows: int
    first_ledger_id: int
    last_ledger_id: int
    min_deliver_at_ms: int
    max_deliver_at_ms: int
    hash_low: int
    hash_high: int
    level: int = 0
    subscription_id: int = 0
    quarantined: bool = False
    compatible_form: bool = False
    segments: int = 0
    damage: str = ""
    quarantined_slot: ShardSlot = log_slot_format.BEFORE_THE_FIRST
    id_rows: int = 0
    id_hash_low: int = 0
    id_hash_high: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopicPolicy:
    """The settings of a topic. A field that is None has the daemon's default."""

    delay_max_ms: int | None = None
    min_index_count_per_bucket: int | None = None
    bucket_rows_max: int | None = None
    bucket_bytes_max: int | None = None
    bucket_age_max_ms: int | None = None
    max_time_step_per_bucket_snapshot_segment_seconds: int | None = None
    max_indexes_per_bucket_snapshot_segment: int | None = None
    min_indexes_per_bucket_snapshot_segment: int | None = None
    compatible_form: bool | None = None
    shared_index: bool | None = None
    max_num_buckets: int | None = None
    merge_buckets_max: int | None = None
    merge_rows_max: int | None = None
    tick_ms: int | None = None
    pending_rows_max: int | None = None
    due_rows_per_second_max: int | None = None
    client_rows_per_second_max: int | None = None
    client_bytes_per_second_max: int | None = None
    two_phase_deletion_enabled: bool | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopicDelayLevels:
    """A topic's table of delays as it was set. With `clamp`, a level above the last one is the last one."""

    table: str
    clamp: bool = True


class RedeliveryKind(enum.IntEnum):
    """The way in which the delay of a redelivery follows from the number of redeliveries."""

    CONSTANT = 1
    LINEAR = 2
    EXPONENTIAL = 3
    LIST = 4
    LADDER = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RedeliveryPolicy:
    """The delay of a redelivery by how often the position was negatively acknowledged.

    A field that its kind does not use is 0. A constant delay is `initial_ms`. `max_ms` 0 means the limit on delays,
    `multiplier` 0 means 2.
    """

    kind: RedeliveryKind
    initial_ms: int = 0
    step_ms: int = 0
    max_ms: int = 0
    multiplier: float = 0.0
    jitter: float = 0.0
    delays_ms: tuple[int, ...] = ()


class HashSelector(enum.IntEnum):
    """The rule that assigns hash slots to consumers."""

    AUTO_SPLIT = 1
    CONSISTENT_HASHING = 2
    STICKY = 3


class KeyOrder(enum.IntEnum):
    """The rule that keeps the order of keys when hash slots move from one consumer to another."""

    DRAINING_HASHES = 1
    LAST_SENT_POSITION = 2


class NackOrder(enum.IntEnum):
    """The treatment of a key's later positions when one is negatively acknowledged."""

    SKIP = 1
    BLOCK_KEY = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeySharedPolicy:
    """The way in which KEY_SHARED streams share keys.

    `points_per_consumer` applies to CONSISTENT_HASHING, `nack_block_max_ms` to BLOCK_KEY.
    """

    selector: HashSelector = HashSelector.CONSISTENT_HASHING
    points_per_consumer: int = 100
    order: KeyOrder = KeyOrder.DRAINING_HASHES
    allow_out_of_order_delivery: bool = False
    nack_order: NackOrder = NackOrder.SKIP
    nack_block_max_ms: int = 600_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionPolicy:
    """The settings of a subscription.

    A field that is None has the daemon's default; for `max_redeliver_count` and `ack_timeout_ms` that is no limit.
    """

    in_flight_rows_max: int | None = None
    lease_ms: int | None = None
    redelivery: RedeliveryPolicy | None = None
    max_redeliver_count: int | None = None
    ack_timeout_ms: int | None = None
    nack_precision_bits: int | None = None
    key_shared: KeySharedPolicy | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subscription:
    """A subscription in the manifest of its topic.

    It is owed the rows of the shared index with `deliver_at_ms` above `since_ms`. A row that others acknowledged in
    slots up to `created_slot` may be gone: no other subscription waited for it then. Raises ValueError for a policy
    that takes more memory than any that a daemon accepts.
    """

    subscription_id: int
    name: str
    since_ms: int
    created_slot: ShardSlot
    policy: SubscriptionPolicy = SubscriptionPolicy()

    def __post_init__(self) -> None:
        key_shared, precision_bits = self.policy.key_shared, self.policy.nack_precision_bits or 0
        points = 0 if key_shared is None else key_shared.points_per_consumer
        if points > POINTS_PER_CONSUMER_MAX or precision_bits > NACK_PRECISION_BITS_MAX:
            raise ValueError(
                f"subscription {self.name!r} has {points} points per consumer and {precision_bits} nack precision bits;"
                f" they may be {POINTS_PER_CONSUMER_MAX} and {NACK_PRECISION_BITS_MAX} at most"
            )


# Properties of a subscription: (name, value) in the order of their names, no name twice
NamedValues = tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionProperties:
    """The properties of a subscription that has any."""

    subscription_id: int
    properties: NamedValues

    def __post_init__(self) -> None:
        for (first, _), (second, _) in itertools.pairwise(self.properties):
            if first >= second:
                raise ValueError(f"property {second!r} comes after {first!r}: they are not in the order of their names")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Properties:
    """The properties of a topic's subscriptions, by subscription id."""

    subscriptions: tuple[SubscriptionProperties, ...]

    def __post_init__(self) -> None:
        for first, second in itertools.pairwise(each.subscription_id for each in self.subscriptions):
            if first >= second:
                raise ValueError(f"subscription {second} comes after {first}: they are not in the order of their ids")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionProgress:
    """The positions that a subscription acknowledged in one bucket."""

    subscription_id: int
    positions: tuple[PositionBitmap, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketProgress:
    """The positions gone from a bucket, and those that its subscriptions acknowledged.

    `bucket` is its key, empty for the mutable bucket. If it has been merged since, this counts for those of its rows
    that were kept (`merge.bits_of`).
    """

    bucket: str
    gone: tuple[PositionBitmap, ...] = ()
    acknowledged: tuple[SubscriptionProgress, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredIds:
    """The column of schedule ids: the column of their lengths, and their bytes (`column_format`)."""

    lengths: bytes
    ids: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NackedRows:
    """Positions of the index `index_id` that wait for redelivery; columns of `rows` rows (`redelivery_columns`)."""

    index_id: int
    rows: int
    deliver_at_ms: bytes
    ledger_id: bytes
    entry_id: bytes
    key_hash: bytes | None = None
    redeliver_at_ms: bytes
    schedule_ids: StoredIds | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CountPlane:
    """The positions of the index `index_id` whose redelivery count, a u32, has the bit; 0 is the lowest bit."""

    index_id: int
    bit: int
    positions: tuple[PositionBitmap, ...] = ()

    def __post_init__(self) -> None:
        if self.bit >= 32:
            raise ValueError(f"a count has bit {self.bit}, and counts have 32 bits")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetters:
    """Dead letters by ascending id; columns of `rows` rows (`redelivery_columns`).

    `text_index` is an index of `texts`.
    """

    rows: int
    dead_letter_id: bytes
    ledger_id: bytes
    entry_id: bytes
    batch_index: bytes
    deliver_at_ms: bytes
    key_hash: bytes
    redelivery_count: bytes
    dead_at_ms: bytes
    reason: bytes
    text_index: bytes
    texts: tuple[str, ...] = ()
    schedule_ids: StoredIds | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Redeliveries:
    """The negatively acknowledged rows of a subscription, and its dead letters.

    `last_dead_letter_id` is the highest ever given.
    """

    subscription_id: int
    nacked: tuple[NackedRows, ...] = ()
    counts: tuple[CountPlane, ...] = ()
    dead_letters: DeadLetters | None = None
    last_dead_letter_id: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LevelRows:
    """Positions of the index `index_id` that were added by a delay level and are not gone."""

    index_id: int
    delay_level: int
    positions: tuple[PositionBitmap, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a topic apart from its rows, as of a slot.

    It holds what is gone and acknowledged; for the rest, which rows are redelivered when, how often that happened, and
    by which delay levels they were added; and dead letters.
    """

    buckets: tuple[BucketProgress, ...] = ()
    redeliveries: tuple[Redeliveries, ...] = ()
    levels: tuple[LevelRows, ...] = ()


def progress_holds_ids(progress: Progress | None) -> bool:
    """Return whether a nacked row or a dead letter has a schedule id."""
    return progress is not None and any(
        any(nacked.schedule_ids is not None for nacked in each.nacked)
        or (each.dead_letters is not None and each.dead_letters.schedule_ids is not None)
        for each in progress.redeliveries
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TopicManifest:
    """The state of a topic as of slot `applied`: its live buckets and, inline or as an object, its progress.

    `deleted` means that the topic does not exist; the manifest stays, so that neither an incarnation nor a
    subscription's id is used again. `delay_levels` None means the daemon's. `properties_object` None means that no
    subscription has any. `requires` is what a reader must know (`requirements`); it only grows. Raises ValueError for
    schedule ids that it does not require.
    """

    head: ManifestHead
    topic: str
    topic_id: str
    incarnation: int
    owner_epoch: int
    applied: ShardSlot
    live: tuple[LiveBucket, ...] = ()
    tombstones: tuple[Tombstone, ...] = ()
    subscriptions: tuple[Subscription, ...] = ()
    last_subscription_id: int = 0
    progress: Progress | None = None
    progress_object: ObjectReference | None = None
    deleted: bool = False
    policy: TopicPolicy = TopicPolicy()
    delay_levels: TopicDelayLevels | None = None
    properties_object: ObjectReference | None = None
    requires: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_requires(self.requires)
        if requirements.SCHEDULE_IDS in self.requires:
            return
        if progress_holds_ids(self.progress) or any(each.id_rows for each in self.live):
            raise ValueError(f"it has rows with schedule ids, and does not require {requirements.SCHEDULE_IDS}")

    @property
    def beside_buckets(self) -> tuple[ObjectReference, ...]:
        """The objects that it needs apart from its live buckets."""
        return tuple(each for each in (self.progress_object, self.properties_object) if each is not None)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadObject:
    """An object, by its key, whose deletion failed `attempts` times and was given up.

    `error` is the store's last message.
    """

    object: str
    size_bytes: int
    attempts: int
    error: str
    given_up_ms: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProbePass:
    """A bucket of a server that passed the long probe of this version at `passed_ms`.

    `endpoint` is the URL of the server, without user, password and query.
    """

    endpoint: str
    bucket: str
    probe_version: int
    passed_ms: int


_M = TypeVar("_M", bound=protobuf.Message)
_MM = TypeVar("_MM", manifest_pb2.ShardManifest, manifest_pb2.TopicManifest)
_Part = TypeVar("_Part", LiveBucket, Tombstone)
_Mirror = TypeVar("_Mirror", RootFormat, ShardManifest, TopicManifest, Progress, Properties, DeadObject, ProbePass)


def encode_root_format(value: RootFormat) -> bytes:
    return _encode(ROOT_MAGIC, manifest_pb2.RootFormat(), value, FORMAT_VERSION)


def decode_root_format(data: bytes) -> RootFormat:
    """Decode FORMAT. Raises UnsupportedVersion for a root of another version, whatever else it says."""
    return _decode(RootFormat, ROOT_MAGIC, manifest_pb2.RootFormat, "FORMAT", data, (FORMAT_VERSION,))


def encode_shard_manifest(value: ShardManifest) -> bytes:
    return _encode(SHARD_MAGIC, manifest_pb2.ShardManifest(), value, _version_of(value.requires))


def decode_shard_manifest(data: bytes) -> ShardManifest:
    """Decode a shard manifest. Raises UnknownRequirement if it requires what this release does not know."""
    what = "shard manifest"
    return _made(ShardManifest, _parse_manifest(SHARD_MAGIC, manifest_pb2.ShardManifest, what, data), what)


def encode_topic_manifest(value: TopicManifest) -> bytes:
    return _encode(TOPIC_MAGIC, manifest_pb2.TopicManifest(), value, _version_of(value.requires))


def decode_topic_manifest(data: bytes) -> TopicManifest:
    """Decode a topic manifest. Raises UnknownRequirement if it requires what this release does not know."""
    what = "topic manifest"
    return _made(TopicManifest, _parse_manifest(TOPIC_MAGIC, manifest_pb2.TopicManifest, what, data), what)


def _version_of(requires: Sequence[str]) -> int:
    return _MANIFESTS[1] if requires else _MANIFESTS[0]


class TopicManifestDecoder:
    """A decoder of manifests of one topic, most of which name the same objects: each object is made once.

    It remembers every part that it has decoded. Apart from that it works as `decode_topic_manifest`.
    """

    def __init__(self) -> None:
        self._live: dict[bytes, LiveBucket] = {}
        self._tombstones: dict[bytes, Tombstone] = {}

    def decode(self, data: bytes) -> TopicManifest:
        what = "topic manifest"
        message = _parse_manifest(TOPIC_MAGIC, manifest_pb2.TopicManifest, what, data)
        with format_errors.reading(what, framing.HEADER_BYTES):
            live = tuple(_made_once(LiveBucket, self._live, part) for part in message.live)
            tombstones = tuple(_made_once(Tombstone, self._tombstones, part) for part in message.tombstones)
            message.ClearField("live")
            message.ClearField("tombstones")
            made = mirror.made_from(TopicManifest, message)
            return dataclasses.replace(made, live=live, tombstones=tombstones)


def _made_once(cls: type[_Part], known: dict[bytes, _Part], message: protobuf.Message) -> _Part:
    key = message.SerializeToString()
    found = known.get(key)
    if found is None:
        found = known[key] = mirror.made_from(cls, message)
    return found


def encode_progress(value: Progress) -> bytes:
    """Encode the progress object of a topic whose progress is too large to be inline."""
    version = requirements.version_of(holds_ids=progress_holds_ids(value))
    return _encode(PROGRESS_MAGIC, manifest_pb2.Progress(), value, version)


def decode_progress(data: bytes) -> Progress:
    return _decode(Progress, PROGRESS_MAGIC, manifest_pb2.Progress, "progress", data, requirements.versions_read())


def encode_properties(value: Properties) -> bytes:
    return _encode(PROPERTIES_MAGIC, manifest_pb2.Properties(), value)


def decode_properties(data: bytes) -> Properties:
    return _decode(Properties, PROPERTIES_MAGIC, manifest_pb2.Properties, "properties", data)


def encode_dead_object(value: DeadObject) -> bytes:
    return _encode(DEAD_OBJECT_MAGIC, manifest_pb2.DeadObject(), value)


def decode_dead_object(data: bytes) -> DeadObject:
    return _decode(DeadObject, DEAD_OBJECT_MAGIC, manifest_pb2.DeadObject, "dead object", data)


def encode_probe_pass(value: ProbePass) -> bytes:
    return _encode(PROBE_PASS_MAGIC, manifest_pb2.ProbePass(), value)


def decode_probe_pass(data: bytes) -> ProbePass:
    return _decode(ProbePass, PROBE_PASS_MAGIC, manifest_pb2.ProbePass, "pass of the probe", data)


def check_shard(value: ShardManifest, shard: int) -> ShardManifest:
    """Return the manifest if it is of this shard, its numbers have a next one, and what it names can exist.

    A key, an owner or a log id becomes the name of an object or folder that is read, written or deleted. Raises
    FormatError.
    """
    with format_errors.reading("shard manifest", framing.HEADER_BYTES):
        if value.shard != shard:
            raise ValueError(f"it is of shard {value.shard}")
        cuts = [each for each in (value.checkpoint, value.previous_checkpoint) if each is not None]
        _check_numbers("epoch", value.epoch, value.settled_epoch)
        for each in value.ranges:
            _check_log_id(each.log_id)
            numbers = (each.epoch, each.after, each.first_slot, each.through or 0, each.last_slot or 0)
            _check_numbers(f"range of log {each.log_id}", *numbers)
        for cut in cuts:
            _check_log_id(cut.log_id)
            _check_numbers(f"checkpoint {cut.object.name}", cut.slot, cut.at)
        if value.settled_epoch > value.epoch:
            raise ValueError(f"epoch {value.settled_epoch} is settled, above the epoch {value.epoch}")
        if value.previous_slot > value.checkpoint_slot:
            raise ValueError(
                f"the checkpoint before is of slot {value.previous_slot}, the newest of {value.checkpoint_slot}"
            )
        owned = value.open_range
        if value.owner and not names.is_daemon_id(value.owner):
            raise ValueError(f"owner is {value.owner!r}; it must be the id of a daemon")
        if owned is not None and owned.epoch != value.epoch:
            raise ValueError(f"the open range has epoch {owned.epoch}; it must be {value.epoch}")
        prefix = names.checkpoint_prefix(shard)
        _check_named(value.head, [cut.object for cut in cuts], value.tombstones, prefix)
    return value


def check_topic(value: TopicManifest, shard: int, topic_id: str) -> TopicManifest:
    """Return the manifest if it is of this topic, its numbers have a next one, and what it names can exist.

    Raises FormatError.
    """
    with format_errors.reading("topic manifest", framing.HEADER_BYTES):
        if value.topic_id != topic_id or names.topic_id(value.topic) != topic_id:
            raise ValueError(f"it is of topic {value.topic!r}")
        _check_numbers("incarnation", value.incarnation)
        _check_numbers("owner_epoch", value.owner_epoch)
        _check_numbers("applied", value.applied, *(each.quarantined_slot for each in value.live))
        _check_numbers("subscription", value.last_subscription_id)
        for each in value.subscriptions:
            _check_numbers(f"subscription {each.name!r}", each.subscription_id, each.created_slot)
        buckets = names.buckets_prefix(shard, topic_id)
        beside = names.progress_prefix(shard, topic_id), names.properties_prefix(shard, topic_id)
        _check_named(value.head, [each.object for each in value.live], (), buckets)
        _check_named(value.head, value.beside_buckets, value.tombstones, buckets, *beside)
    return value


def _check_named(
    head: ManifestHead, live: Sequence[ObjectReference], tombstones: Sequence[Tombstone], *prefixes: str
) -> None:
    _check_numbers("number", head.number, head.orphan_floor)
    for each in (*live, *(tombstone.object for tombstone in tombstones)):
        if not names.is_object(each.name, each.base, prefixes):
            raise ValueError(f"object {each.name!r} has base {each.base}, and is none of {' or '.join(prefixes)}")


def _check_log_id(log_id: str) -> None:
    if not log_slot_format.is_log_id(log_id):
        raise ValueError(f"log id is {log_id!r}; it must be a ULID")


def _check_numbers(what: str, *numbers: int) -> None:
    if max(numbers) > names.NUMBER_MAX:
        raise ValueError(f"{what} has number {max(numbers)}; it must be {names.NUMBER_MAX} at most")


def check_bytes(reference: ObjectReference, body: bytes, what: str) -> None:
    """Check bytes that were read whole against the reference. Raises FormatError if they differ."""
    if len(body) != reference.size_bytes:
        detail = f"it has {len(body)} bytes, the manifest says {reference.size_bytes}"
        raise format_errors.FormatError(what, min(len(body), reference.size_bytes), detail)
    found = hashlib.sha256(body).digest()
    if found != reference.sha256:
        detail = f"SHA-256 is {found.hex()}, the manifest says {reference.sha256.hex()}"
        raise format_errors.FormatError(what, 0, detail)


def _encode(magic: bytes, message: protobuf.Message, value: object, version: int = _ONE[0]) -> bytes:
    mirror.fill(message, value)
    return framing.frame(magic, version, message.SerializeToString(deterministic=True))


def _decode(
    cls: type[_Mirror],
    magic: bytes,
    message_class: type[protobuf.Message],
    what: str,
    data: bytes,
    versions: Sequence[int] = _ONE,
) -> _Mirror:
    return _made(cls, _parse(magic, message_class, what, data, versions), what)


def _parse_manifest(magic: bytes, message_class: type[_MM], what: str, data: bytes) -> _MM:
    """Parse a manifest, unless it requires what this release does not know."""
    message = _parse(magic, message_class, what, data, _MANIFESTS)
    requirements.check(message.requires, what, framing.HEADER_BYTES)
    return message


def _parse(magic: bytes, message_class: type[_M], what: str, data: bytes, versions: Sequence[int]) -> _M:
    payload = framing.unframe(data, magic, versions, what)
    return framing.parse(message_class, payload, what, framing.HEADER_BYTES)


def _made(cls: type[_Mirror], message: protobuf.Message, what: str) -> _Mirror:
    with format_errors.reading(what, framing.HEADER_BYTES):
        return mirror.made_from(cls, message)
