from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from storage_backends.formats import checkpoint, manifest
from storage_backends.formats.checkpoint import Checkpoint, SealingPart, TopicPart
from storage_backends.formats.position_bitmap import PositionBitmap
from tests.storage_backends.formats import examples

bitmap = PositionBitmap(7, 0, b"bits")
progress = manifest.Progress(
    buckets=(
        manifest.BucketProgress(bucket="a", gone=(bitmap,)),
        manifest.BucketProgress(
            bucket="", acknowledged=(manifest.SubscriptionProgress(subscription_id=1, positions=(bitmap,)),)
        ),
    )
)
sealing_parts = st.builds(SealingPart, st.sampled_from(["a", "b"]), examples.u64, examples.rows(max_size=8))
topic_parts = st.builds(
    TopicPart,
    topic_id=st.just("id"),
    topic=st.sampled_from(["orders", "\N{SNOWMAN}"]),
    incarnation=examples.u64,
    mutable_rows=examples.rows(max_size=30),
    sealing=st.lists(sealing_parts, max_size=2).map(tuple),
    progress=st.sampled_from([manifest.Progress(), progress]),
)
checkpoints = st.builds(
    Checkpoint,
    shard=st.integers(0, 15),
    epoch=examples.u64,
    slot=examples.u64,
    topics=st.lists(topic_parts, max_size=3).map(tuple),
)


def plain(value: Checkpoint) -> object:
    return (value.shard, value.epoch, value.slot, [plain_part(part) for part in value.topics])


def plain_part(part: TopicPart) -> object:
    sealing = [(sealing.bucket, sealing.slot, examples.tuples(sealing.rows)) for sealing in part.sealing]
    rows = examples.tuples(part.mutable_rows)
    return (part.topic_id, part.topic, part.incarnation, rows, sealing, part.progress)


@given(checkpoints)
def test_a_checkpoint_comes_back_as_it_was(value: Checkpoint) -> None:
    assert plain(checkpoint.decode_checkpoint(checkpoint.encode_checkpoint(value))) == plain(value)


def test_the_rows_of_a_checkpoint_are_small() -> None:
    part = TopicPart("id", "orders", 1, examples.random_delays(100_000))
    data = checkpoint.encode_checkpoint(Checkpoint(0, 1, 2, (part,)))
    assert len(data) / 100_000 < 3.6
