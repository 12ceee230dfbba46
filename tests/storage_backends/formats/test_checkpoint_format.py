from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import checkpoint_format, format_errors, manifest, record_columns, slot_format
from storage_backends.formats.checkpoint_format import CarriedSlot, Checkpoint, OwnRows, SealingPart, TopicPart
from storage_backends.formats.generated import journal_pb2
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.position_bitmap import PositionBitmap
from storage_backends.formats.row_columns import Rows
from tests.storage_backends.formats._support import examples

bitmap = PositionBitmap(7, 0, b"bits")
progress = manifest.Progress(
    buckets=(
        manifest.BucketProgress(bucket="a", gone=(bitmap,)),
        manifest.BucketProgress(
            bucket="", acknowledged=(manifest.SubscriptionProgress(subscription_id=1, positions=(bitmap,)),)
        ),
    )
)
sealing_parts = st.builds(
    SealingPart, st.sampled_from(["a", "b"]), examples.u64, examples.rows(max_size=8), st.integers(0, 2)
)
own_rows = st.dictionaries(st.integers(1, examples.U64_MAX), examples.rows(max_size=8), max_size=3).map(
    lambda by_id: tuple(OwnRows(number, by_id[number]) for number in sorted(by_id))
)
topic_parts = st.builds(
    TopicPart,
    topic_id=st.just("id"),
    topic=st.sampled_from(["orders", "\N{SNOWMAN}"]),
    incarnation=examples.u64,
    mutable_rows=examples.rows(max_size=30),
    sealing=st.lists(sealing_parts, max_size=2).map(tuple),
    progress=st.sampled_from(
        [manifest.Progress(), progress, examples.redelivery_progress(examples.random_delays(5, keyed=True))]
    ),
    own_rows=own_rows,
)
carried_records = st.one_of(
    st.builds(slot_format.AddRecord, st.just("id"), examples.u64, examples.u64, examples.rows(max_size=4)),
    st.builds(
        slot_format.GoneRecord,
        st.just("id"),
        examples.u64,
        examples.u64,
        st.sampled_from(slot_format.GoneReason),
        st.just(()),
    ),
    st.sampled_from(examples.redelivery_records(examples.random_delays(5))),
)


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    """Some parts are carried over, with records of some slots since."""
    parts = draw(st.lists(topic_parts, max_size=3))
    slots = sorted(draw(st.sets(examples.u64, min_size=4, max_size=4)))
    for number, part in enumerate(parts):
        if draw(st.booleans()):
            carried = tuple(
                CarriedSlot(ShardSlot(slot), tuple(draw(st.lists(carried_records, max_size=2))))
                for slot in slots[1:]
                if draw(st.booleans())
            )
            parts[number] = dataclasses.replace(part, slot=ShardSlot(slots[0]), carried=carried)
    return Checkpoint(draw(st.integers(0, 15)), draw(examples.u64), ShardSlot(slots[-1]), tuple(parts))


def plain(value: Checkpoint) -> object:
    return (value.shard, value.epoch, value.slot, [plain_part(part) for part in value.topics])


def plain_part(part: TopicPart) -> object:
    sealing = [
        (sealing.bucket, sealing.slot, sealing.subscription_id, examples.tuples(sealing.rows))
        for sealing in part.sealing
    ]
    own = [(each.subscription_id, examples.tuples(each.rows)) for each in part.own_rows]
    rows = examples.tuples(part.mutable_rows)
    carried = [(carried.slot, [plain_record(record) for record in carried.records]) for carried in part.carried]
    return (part.topic_id, part.topic, part.incarnation, rows, own, sealing, part.progress, part.slot, carried)


def plain_record(record: slot_format.AnyRecord) -> object:
    if isinstance(record, slot_format.StoredRecord):
        record = record.decoded()
    return examples.plain(record)


@given(checkpoints())
def test_a_checkpoint_comes_back_as_it_was(value: Checkpoint) -> None:
    assert plain(checkpoint_format.decode_checkpoint(checkpoint_format.encode_checkpoint(value))) == plain(value)


def carrying(slot: int | None, *carried: int, topic_id: str = "id") -> TopicPart:
    record = slot_format.GoneRecord(topic_id, 1, 0, slot_format.GoneReason.TRIMMED, ())
    return TopicPart(
        "id",
        "orders",
        1,
        Rows.empty(),
        slot=None if slot is None else ShardSlot(slot),
        carried=tuple(CarriedSlot(ShardSlot(each), (record,)) for each in carried),
    )


def owning(*subscription_ids: int) -> TopicPart:
    rows = examples.random_delays(2)
    return TopicPart("id", "orders", 1, rows, own_rows=tuple(OwnRows(each, rows) for each in subscription_ids))


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        (owning(0), "own rows of index 0 after those of 0"),
        (owning(3, 2), "own rows of index 2 after those of 3"),
        (owning(2, 2), "own rows of index 2 after those of 2"),
        (carrying(10), "as of slot 10, the checkpoint as of slot 9"),
        (carrying(None, 9), "carries slot 9 after slot 9, up to slot 9"),
        (carrying(5, 5), "carries slot 5 after slot 5, up to slot 9"),
        (carrying(5, 7, 6), "carries slot 6 after slot 7, up to slot 9"),
        (carrying(5, 10), "carries slot 10 after slot 5, up to slot 9"),
        (carrying(5, 6, topic_id="other"), "carries a record of another topic in slot 6"),
    ],
)
def test_a_part_that_cannot_be_one_of_this_checkpoint_is_refused_at_encode_and_at_decode(
    part: TopicPart, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=reason):
        Checkpoint(0, 1, ShardSlot(9), (part,))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_format, "_check_slots", lambda part, slot: None)
        patch.setattr(checkpoint_format, "_check_own_rows", lambda part: None)
        data = checkpoint_format.encode_checkpoint(Checkpoint(0, 1, ShardSlot(9), (part,)))
    with pytest.raises(format_errors.FormatError, match=f"checkpoint is damaged at byte 16: topic 'orders' .*{reason}"):
        checkpoint_format.decode_checkpoint(data)


def test_the_rows_of_a_checkpoint_are_small() -> None:
    part = TopicPart("id", "orders", 1, examples.random_delays(100_000))
    data = checkpoint_format.encode_checkpoint(Checkpoint(0, 1, ShardSlot(2), (part,)))
    assert len(data) / 100_000 < 3.6


def test_what_is_wrong_inside_a_carried_record_is_its_topics_damage_and_stays_as_it_is() -> None:
    message = journal_pb2.Record(topic_id="id", incarnation=1, rows=3)
    record_columns.fill_rows(message.add, examples.fixed_delay(2, gap_ms=1))
    damaged = CarriedSlot(ShardSlot(3), (slot_format.StoredRecord(message, "journal slot record 0", 0),))
    part = TopicPart("id", "t", 1, Rows.empty(), slot=ShardSlot(2), carried=(damaged,))
    body = checkpoint_format.encode_checkpoint(Checkpoint(1, 2, ShardSlot(3), (part,)))
    value = checkpoint_format.decode_checkpoint(body)
    assert checkpoint_format.encode_checkpoint(value) == body
    (record,) = value.topics[0].carried[0].records
    assert isinstance(record, slot_format.StoredRecord)
    with pytest.raises(format_errors.FormatError, match="carried slot 3 record 0"):
        record.decoded()


def test_a_topic_that_a_checkpoint_knows_has_the_id_of_one() -> None:
    data = checkpoint_format.encode_checkpoint(Checkpoint(0, 1, ShardSlot(9), known={"../x": 1}))
    with pytest.raises(format_errors.FormatError, match=r"it knows topic '../x', which is not a topic id"):
        checkpoint_format.decode_checkpoint(data)
