"""Every object and every part that is read by itself: truncated anywhere, bits flipped anywhere, empty, of another
version, or other bytes than those that were named, it is refused by name and offset and never taken for something else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import (
    bucket_format,
    checkpoint_format,
    format_errors,
    framing,
    manifest,
    position_bitmap,
    slot_format,
)
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from tests.storage_backends.formats._support import deletion_examples, examples

ROWS = examples.random_delays(40, span_ms=30_000, keyed=True)
POSITIONS = position_bitmap.position_bitmaps(ROWS.ledger_id, ROWS.entry_id)
HEAD = manifest.ManifestHead(number=1, previous_sha256=b"", commit_id="c", writer="w", created_ms=5, lineage=("c",))
LIMITS = SegmentLimits(time_step_ms=1_000, rows_max=15, rows_min=5)


OTHER_ROWS = examples.random_delays(40, span_ms=30_000, keyed=True, seed=2)


def encoded_bucket(rows: Rows = ROWS, *, compatible: bool = False) -> bucket_format.EncodedBucket:
    return bucket_format.encode_bucket(
        rows.sorted_by_due(), topic="orders", subscription_id=0, limits=LIMITS, compatible=compatible
    )


def a_bucket(*, compatible: bool) -> bytes:
    return encoded_bucket(compatible=compatible).body


def a_slot() -> bytes:
    records: tuple[slot_format.Record, ...] = (
        slot_format.AddRecord("id", 1, 0, ROWS),
        slot_format.AcknowledgeRecord("id", 1, 2, ROWS.take(slice(0, 4))),
        slot_format.GoneRecord("id", 1, 0, slot_format.GoneReason.TRIMMED, POSITIONS),
        slot_format.WaiveRecord("id", 1, 2, POSITIONS),
        slot_format.RescheduleRecord("id", 1, 2, ROWS),
        *examples.redelivery_records(ROWS),
    )
    decided = deletion_examples.one_of_each_record()
    header = slot_format.SlotHeader(1, 2, ShardSlot(3), len(records) + len(decided))
    return slot_format.encode_slot(header, records, decided)


def a_topic_manifest() -> bytes:
    subscription = manifest.Subscription(
        subscription_id=1,
        name="s",
        since_ms=2,
        created_slot=ShardSlot(3),
        policy=manifest.SubscriptionPolicy(
            lease_ms=4,
            redelivery=manifest.RedeliveryPolicy(kind=manifest.RedeliveryKind.EXPONENTIAL, multiplier=2.5),
            key_shared=manifest.KeySharedPolicy(selector=manifest.HashSelector.STICKY, nack_block_max_ms=9),
        ),
    )
    return manifest.encode_topic_manifest(
        manifest.TopicManifest(
            head=HEAD,
            topic="orders",
            topic_id="id",
            incarnation=1,
            owner_epoch=1,
            applied=ShardSlot(9),
            subscriptions=(subscription,),
            policy=manifest.TopicPolicy(delay_max_ms=5),
            delay_levels=manifest.TopicDelayLevels(table="1s 5s"),
        )
    )


def some_properties() -> bytes:
    of_subscription = manifest.SubscriptionProperties(subscription_id=1, properties=(("a", "b"), ("team", "money")))
    return manifest.encode_properties(manifest.Properties(subscriptions=(of_subscription,)))


def a_progress(rows: Rows = ROWS) -> bytes:
    positions = position_bitmap.position_bitmaps(rows.ledger_id[:9], rows.entry_id[:9])
    return manifest.encode_progress(
        dataclasses.replace(
            examples.redelivery_progress(rows), buckets=(manifest.BucketProgress(bucket="b", gone=positions),)
        )
    )


def a_checkpoint(rows: Rows = ROWS) -> bytes:
    carried = checkpoint_format.CarriedSlot(ShardSlot(3), (slot_format.AddRecord("id", 1, 0, rows),))
    parts = (
        checkpoint_format.TopicPart(
            "id",
            "t",
            1,
            rows,
            (checkpoint_format.SealingPart("b", ShardSlot(4), rows),),
            own_rows=(checkpoint_format.OwnRows(2, rows),),
        ),
        checkpoint_format.TopicPart("id", "t", 1, Rows.empty(), slot=ShardSlot(2), carried=(carried,)),
    )
    return checkpoint_format.encode_checkpoint(
        checkpoint_format.Checkpoint(1, 2, ShardSlot(3), parts, deletion_examples.a_state())
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """What is read at once. `named`: what FormatError says is damaged, or what that begins with. `offset`: where its
    bytes begin in their object. `has_version`: whether it says of which version it is.
    """

    data: bytes
    decode: Callable[[bytes], object]
    named: str
    offset: int = 0
    has_version: bool = True


BUCKET = encoded_bucket()
TAIL = bucket_format.tail_range(len(BUCKET.body), len(BUCKET.segments))[0]
ENTRY_0, SEGMENT = BUCKET.table.metadata, BUCKET.segments[1]


def part_of(encoded: bucket_format.EncodedBucket, info: bucket_format.SegmentInfo) -> bytes:
    return encoded.body[info.offset : info.offset + info.length]


OBJECTS: dict[str, Stored] = {
    "columnar bucket": Stored(BUCKET.body, bucket_format.decode_bucket, "bucket"),
    "compatible bucket": Stored(a_bucket(compatible=True), bucket_format.decode_bucket, "bucket"),
    "bucket tail": Stored(
        BUCKET.body[TAIL:],
        lambda data: bucket_format.decode_tail(data, len(BUCKET.body)),
        "bucket",
        offset=TAIL,
        has_version=False,
    ),
    "bucket head": Stored(
        part_of(BUCKET, ENTRY_0),
        lambda data: bucket_format.decode_metadata(data, ENTRY_0),
        "bucket metadata",
        offset=ENTRY_0.offset,
        has_version=False,
    ),
    "bucket segment": Stored(
        part_of(BUCKET, SEGMENT),
        lambda data: bucket_format.decode_segment(data, SEGMENT),
        "bucket segment 2",
        offset=SEGMENT.offset,
        has_version=False,
    ),
    "journal slot": Stored(a_slot(), slot_format.decode_slot, "journal slot"),
    "FORMAT": Stored(
        manifest.encode_root_format(
            manifest.RootFormat(
                format_version=2, shards=16, created_ms=5, root_id="r", log_form=manifest.LogForm.OBJECTS
            )
        ),
        manifest.decode_root_format,
        "FORMAT",
    ),
    "shard manifest": Stored(
        manifest.encode_shard_manifest(manifest.ShardManifest(head=HEAD, shard=1, epoch=2, owner="o")),
        manifest.decode_shard_manifest,
        "shard manifest",
    ),
    "topic manifest": Stored(a_topic_manifest(), manifest.decode_topic_manifest, "topic manifest"),
    "progress": Stored(a_progress(), manifest.decode_progress, "progress"),
    "properties": Stored(some_properties(), manifest.decode_properties, "properties"),
    "dead object": Stored(
        manifest.encode_dead_object(
            manifest.DeadObject(object="b", size_bytes=4, attempts=10, error="denied", given_up_ms=7)
        ),
        manifest.decode_dead_object,
        "dead object",
    ),
    "pass of the probe": Stored(
        manifest.encode_probe_pass(
            manifest.ProbePass(endpoint="http://s3", bucket="orders", probe_version=1, passed_ms=7)
        ),
        manifest.decode_probe_pass,
        "pass of the probe",
    ),
    "checkpoint": Stored(a_checkpoint(), checkpoint_format.decode_checkpoint, "checkpoint"),
}
every_object = pytest.mark.parametrize("name", OBJECTS)


def check_refused(stored: Stored, data: bytes) -> format_errors.FormatError:
    """Refused by its name, with a place where there are, or should be, bytes of it."""
    with pytest.raises(format_errors.FormatError) as refused:
        stored.decode(data)
    assert refused.value.what.startswith(stored.named)
    assert stored.offset <= refused.value.offset <= stored.offset + max(len(stored.data), len(data))
    assert str(refused.value).startswith(f"{refused.value.what} is damaged at byte {refused.value.offset}: ")
    return refused.value


@every_object
def test_an_object_that_is_whole_is_read(name: str) -> None:
    OBJECTS[name].decode(OBJECTS[name].data)


@every_object
def test_an_object_truncated_at_any_byte_or_empty_is_refused(name: str) -> None:
    stored = OBJECTS[name]
    for kept in range(len(stored.data)):
        check_refused(stored, stored.data[:kept])


@every_object
def test_an_object_with_a_byte_after_it_is_refused(name: str) -> None:
    check_refused(OBJECTS[name], OBJECTS[name].data + b"\0")


@every_object
def test_an_object_with_any_byte_altered_is_refused(name: str) -> None:
    stored = OBJECTS[name]
    for place in range(len(stored.data)):
        altered = bytearray(stored.data)
        altered[place] ^= 1 << place % 8
        check_refused(stored, bytes(altered))


@given(st.sampled_from(sorted(OBJECTS)), st.data())
def test_an_object_with_any_bits_flipped_is_refused(name: str, drawing: st.DataObject) -> None:
    stored = OBJECTS[name]
    altered = bytearray(stored.data)
    for bit in drawing.draw(st.sets(st.integers(0, 8 * len(altered) - 1), min_size=1, max_size=4)):
        altered[bit // 8] ^= 1 << bit % 8
    check_refused(stored, bytes(altered))


@every_object
@pytest.mark.parametrize("filling", [b"\0", b"\xff"])
def test_an_object_whose_bytes_were_wiped_is_refused(name: str, filling: bytes) -> None:
    stored = OBJECTS[name]
    check_refused(stored, filling * len(stored.data))


@given(st.sampled_from(sorted(OBJECTS)), st.binary(max_size=300))
def test_bytes_of_any_kind_are_refused(name: str, data: bytes) -> None:
    check_refused(OBJECTS[name], data)


@given(st.sampled_from(sorted(OBJECTS)), st.data())
def test_an_object_with_any_run_of_bytes_overwritten_is_refused(name: str, drawing: st.DataObject) -> None:
    stored = OBJECTS[name]
    data = stored.data
    place = drawing.draw(st.integers(0, len(data) - 1))
    run = drawing.draw(st.binary(min_size=1, max_size=min(64, len(data) - place)))
    altered = data[:place] + run + data[place + len(run) :]
    if altered != data:
        check_refused(stored, altered)


@every_object
def test_an_object_taken_for_one_of_another_kind_is_refused(name: str) -> None:
    for other, stored in OBJECTS.items():
        if other != name and not {other, name} <= {"columnar bucket", "compatible bucket"}:
            check_refused(OBJECTS[name], stored.data)


KNOWN_VERSIONS = {
    "FORMAT": "version 2",
    "properties": "version 1",
    "dead object": "version 1",
    "pass of the probe": "version 1",
}


@pytest.mark.parametrize("name", [name for name, stored in OBJECTS.items() if stored.has_version])
def test_a_version_that_is_not_known_is_its_own_error(name: str) -> None:
    with pytest.raises(format_errors.UnsupportedVersion) as refused:
        OBJECTS[name].decode(of_version(name, 3))
    what, known = refused.value.what, KNOWN_VERSIONS.get(name, "versions 1 and 2")
    assert what.startswith(OBJECTS[name].named)
    assert str(refused.value) == (
        f"{what} cannot be read by this release: format version 3 is not known, this release reads {known}; "
        "use a release that knows it"
    )


@pytest.mark.parametrize("name", [name for name, stored in OBJECTS.items() if stored.has_version])
@pytest.mark.parametrize("bit", range(16))
def test_a_version_with_a_flipped_bit_is_damage_and_no_other_version(name: str, bit: int) -> None:
    places = [4, len(BUCKET.body) - 12] if name == "columnar bucket" else [4]
    for place in places:
        altered = bytearray(OBJECTS[name].data)
        altered[place + bit // 8] ^= 1 << bit % 8
        check_refused(OBJECTS[name], bytes(altered))


def of_version(name: str, version: int) -> bytes:
    """The object with another version, its checksums right."""
    data = bytearray(OBJECTS[name].data)
    if name == "journal slot":
        struct.pack_into("<H", data, 4, version)
        struct.pack_into("<I", data, SLOT_HEAD.size, framing.crc32c(bytes(data[: SLOT_HEAD.size]), payload_of(name)))
        return bytes(data)
    if name.endswith("bucket"):
        footer = len(data) - 32
        struct.pack_into("<I", data, 4, version)
        struct.pack_into("<I", data, footer + 20, version)
        struct.pack_into("<I", data, footer + 24, framing.crc32c(bytes(data[footer : footer + 24])))
        return bytes(data)
    return framing.frame(bytes(data[:4]), version, payload_of(name))


# ---- bytes with the right checksum that say what makes no sense: what a mistake in a writer would look like

FRAMED = ("FORMAT", "shard manifest", "topic manifest", "progress", "dead object", "pass of the probe", "checkpoint")
SLOT_HEAD = struct.Struct("<4sHBBIQQIQ")


def payload_of(name: str) -> bytes:
    data = OBJECTS[name].data
    return data[slot_format.HEADER_BYTES :] if name == "journal slot" else data[framing.HEADER_BYTES : -4]


def with_payload(name: str, payload: bytes) -> bytes:
    """The object with another payload, its lengths and checksums right."""
    data = OBJECTS[name].data
    if name != "journal slot":
        return framing.frame(data[:4], int.from_bytes(data[4:8], "little"), payload)
    head = SLOT_HEAD.pack(*SLOT_HEAD.unpack_from(data)[:-1], len(payload))
    return head + struct.pack("<I", framing.crc32c(head, payload)) + payload


def is_refused(name: str, payload: bytes) -> bool:
    """Whether it is refused as damage; any other error fails the test."""
    try:
        OBJECTS[name].decode(with_payload(name, payload))
    except format_errors.FormatError:
        return True
    return False


@pytest.mark.parametrize("name", [*FRAMED, "journal slot"])
def test_an_object_that_says_something_else_with_the_right_checksum_is_read_or_is_damage(name: str) -> None:
    payload = payload_of(name)
    places = range(0, len(payload), max(1, len(payload) // 300))
    refused = 0
    for place in places:
        altered = bytearray(payload)
        altered[place] ^= 1 << place % 8
        refused += is_refused(name, bytes(altered))
    assert refused >= 2


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("topic manifest", b"orders", "topic"),
        ("topic manifest", b"1s 5s", "delay_levels.table"),
        ("shard manifest", b"o", "owner"),
        ("FORMAT", b"r", "root_id"),
        ("dead object", b"denied", "error"),
        ("checkpoint", b"\x0a\x02id", "topics.carried.records.topic_id"),
        ("journal slot", b"\x0a\x02id", "records.topic_id"),
    ],
)
def test_text_that_is_not_utf_8_is_damage_that_names_its_field(name: str, text: bytes, field: str) -> None:
    payload = payload_of(name)
    place = payload.rindex(text) + len(text) - 1
    with pytest.raises(format_errors.FormatError, match=rf"{field} is not UTF-8"):
        OBJECTS[name].decode(with_payload(name, payload[:place] + b"\xff" + payload[place + 1 :]))


# ---- whole objects of the right kind, and others than those that were named


@pytest.mark.parametrize(
    ("what", "named", "found"),
    [
        ("bucket", BUCKET.body, encoded_bucket(OTHER_ROWS).body),
        ("progress", a_progress(), a_progress(ROWS.take(slice(3, 20)))),
        ("checkpoint", a_checkpoint(), a_checkpoint(OTHER_ROWS)),
    ],
)
def test_another_object_of_the_kind_is_refused_by_size_and_hash(what: str, named: bytes, found: bytes) -> None:
    reference = manifest.ObjectReference(
        name="key", base=1, size_bytes=len(named), sha256=hashlib.sha256(named).digest()
    )
    manifest.check_bytes(reference, named, what)
    with pytest.raises(format_errors.FormatError, match=rf"{what} is damaged at byte \d+: .* the manifest says"):
        manifest.check_bytes(reference, found, what)
    same_size = dataclasses.replace(reference, size_bytes=len(found))
    with pytest.raises(format_errors.FormatError, match=f"{what} is damaged at byte 0: SHA-256 is"):
        manifest.check_bytes(same_size, found, what)


def test_another_bucket_of_the_same_layout_is_refused_by_its_head_and_each_of_its_segments() -> None:
    """What a reader of ranges sees when the object of another bucket is under the name."""
    rows = Rows(ROWS.deliver_at_ms, ROWS.ledger_id + np.uint64(1), ROWS.entry_id, ROWS.key_hash)
    other = encoded_bucket(rows)
    assert [info.length for info in other.segments] == [info.length for info in BUCKET.segments]
    table = bucket_format.decode_tail(other.body[TAIL:], len(BUCKET.body))
    metadata = bucket_format.decode_metadata(part_of(other, table.metadata), table.metadata)
    bucket_format.check_head(metadata, table, other.live_bucket("key", base=1))
    with pytest.raises(
        format_errors.FormatError, match="bucket metadata is damaged at byte 16: subscription, rows and hash"
    ):
        bucket_format.check_head(metadata, table, BUCKET.live_bucket("key", base=1))
    for info in BUCKET.segments:
        with pytest.raises(
            format_errors.FormatError, match=f"bucket segment {info.number} is damaged at byte {info.offset}"
        ):
            bucket_format.decode_segment(part_of(other, info), info)


def test_damage_in_a_slot_is_named_with_its_offset() -> None:
    altered = bytearray(OBJECTS["journal slot"].data)
    altered[100] ^= 4
    with pytest.raises(format_errors.FormatError, match="journal slot is damaged at byte 40: CRC32C is 0x"):
        slot_format.decode_slot(bytes(altered))


def test_rows_that_do_not_add_up_to_the_hash_are_refused_though_every_crc_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a mistake in a writer would look like."""
    with monkeypatch.context() as patch:
        patch.setattr(bucket_format, "row_hash", lambda rows: (1, 2))
        data = a_bucket(compatible=False)
    with pytest.raises(format_errors.FormatError, match="hash of its rows"):
        bucket_format.decode_bucket(data)
