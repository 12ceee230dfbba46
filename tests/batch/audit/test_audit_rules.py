"""Manifests that are whole and say what may not be: each is found where it came in."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

import pytest

from batch.audit.findings import Kind, Severity
from storage_backends import bucket_reading
from storage_backends.commit import COMMIT_ID
from storage_backends.formats import bucket_format, manifest, names, position_bitmap, requirements
from storage_backends.formats.manifest import LiveBucket, LogRange, ShardManifest, TopicManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore
from storage_backends.topic_manifest import CODEC
from tests.batch.audit._support.audits import (
    MANIFESTS,
    SHARD_MANIFESTS,
    TOPIC_ID,
    audited,
    copy_of,
    findings,
    keys,
    kinds,
    shard_tip,
    sound_root,
    topic_tip,
)
from tests.storage_backends._support.log_slots import OTHER_LOG_ID

ChangeTopic = Callable[[TopicManifest], TopicManifest]
ChangeShard = Callable[[ShardManifest], ShardManifest]
replace = dataclasses.replace


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    return sound_root()


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A sound root of the test's own."""
    return copy_of(written)


def follow(store: MemoryStore, changed: ChangeTopic, *, commit_id: str = "forged") -> str:
    """One more manifest of the topic, in its place in the chain; its key."""
    last = keys(store, MANIFESTS)[-1]
    before = topic_tip(store)
    head = replace(
        before.head,
        number=before.head.number + 1,
        previous_sha256=hashlib.sha256(store.get(last)).digest(),
        commit_id=commit_id,
        lineage=(*before.head.lineage, commit_id),
    )
    key = names.topic_manifest_key(0, TOPIC_ID, head.number)
    body = CODEC.encode(changed(replace(before, head=head)))
    store.put(key, body, metadata={COMMIT_ID: commit_id})
    return key


def follow_shard(store: MemoryStore, changed: ChangeShard) -> str:
    last = keys(store, SHARD_MANIFESTS)[-1]
    before = shard_tip(store)
    head = replace(
        before.head,
        number=before.head.number + 1,
        previous_sha256=hashlib.sha256(store.get(last)).digest(),
        commit_id="forged",
        lineage=(*before.head.lineage, "forged"),
    )
    key = names.shard_manifest_key(0, head.number)
    store.put(key, manifest.encode_shard_manifest(changed(replace(before, head=head))), metadata={COMMIT_ID: "forged"})
    return key


def head_of(tip: TopicManifest, **changed: object) -> TopicManifest:
    return replace(tip, head=replace(tip.head, **changed))


def without_first(tip: TopicManifest) -> TopicManifest:
    return replace(tip, live=tip.live[1:])


def came_back(tip: TopicManifest) -> TopicManifest:
    """A bucket that left is live again."""
    back = next(each for each in tip.tombstones if "/buckets/" in each.object.name)
    again = replace(tip.live[0], object=back.object)
    return replace(tip, live=(*tip.live, again), tombstones=tuple(each for each in tip.tombstones if each != back))


def twice_named(tip: TopicManifest) -> TopicManifest:
    return replace(tip, live=(*tip.live, tip.live[0]))


def other_level(tip: TopicManifest) -> TopicManifest:
    return replace(tip, live=(replace(tip.live[0], level=7), *tip.live[1:]))


def shorter_grace(tip: TopicManifest) -> TopicManifest:
    first = tip.tombstones[0]
    return replace(tip, tombstones=(replace(first, delete_after_ms=first.delete_after_ms - 1), *tip.tombstones[1:]))


def later_tombstone(tip: TopicManifest) -> TopicManifest:
    first = tip.tombstones[0]
    return replace(tip, tombstones=(replace(first, removed_in=first.removed_in + 1), *tip.tombstones[1:]))


TOPIC_RULES: dict[str, tuple[ChangeTopic, str]] = {
    "the owner's epoch falls": (lambda tip: replace(tip, owner_epoch=1), "owner_epoch fell from 2 to 1"),
    "applied falls": (lambda tip: replace(tip, applied=tip.applied - 1), "applied fell"),
    "the last subscription id falls": (lambda tip: replace(tip, last_subscription_id=0), "above the last id 0"),
    "the incarnation rises": (lambda tip: replace(tip, incarnation=2), "incarnation 1 became 2"),
    "a bucket vanishes": (without_first, "left without a tombstone"),
    "properties vanish": (lambda tip: replace(tip, properties_object=None), "left without a tombstone"),
    "properties of nobody": (lambda tip: replace(tip, subscriptions=()), "properties of subscriptions, but no sub"),
    "a bucket comes back": (came_back, "had left, but returned"),
    "an object is named twice": (twice_named, "is named 2 times"),
    "a live bucket changes": (other_level, "changed while it was live"),
    "a tombstone changes": (shorter_grace, "the tombstone of object"),
    "a tombstone is of another manifest": (later_tombstone, "the tombstone of object"),
    "a floor above the number": (lambda tip: head_of(tip, orphan_floor=1 << 40), "is above its number"),
    "a deleted topic has buckets": (
        lambda tip: replace(tip, deleted=True, incarnation=tip.incarnation + 1),
        "the topic is deleted, but has buckets",
    ),
}


@pytest.mark.parametrize("rule", list(TOPIC_RULES))
def test_a_topic_manifest_that_breaks_a_rule_is_found(store: MemoryStore, rule: str) -> None:
    changed, detail = TOPIC_RULES[rule]
    key = follow(store, changed)
    found = [each for each in findings(audited(store)) if each.object == key]
    assert {each.kind for each in found} == {Kind.CHAIN_RULE}
    assert any(detail in each.detail for each in found), found


def test_a_floor_that_falls_is_found(store: MemoryStore) -> None:
    follow(store, lambda tip: head_of(tip, orphan_floor=5))
    key = follow(store, lambda tip: head_of(tip, orphan_floor=4), commit_id="again")
    (found,) = findings(audited(store))
    assert (found.kind, found.object, found.detail) == (Kind.CHAIN_RULE, key, "orphan_floor fell from 5 to 4")


def test_a_sound_manifest_that_follows_has_no_finding(store: MemoryStore) -> None:
    follow(store, lambda tip: replace(tip, owner_epoch=2))
    assert findings(audited(store)) == []


def of_range(tip: ShardManifest, **changed: object) -> ShardManifest:
    """The last range says something else."""
    return replace(tip, ranges=(*tip.ranges[:-1], replace(tip.ranges[-1], **changed)))


def closed_before(tip: ShardManifest) -> LogRange:
    """A range that ends two shard slots before the last one begins."""
    first = tip.ranges[-1].first_slot
    return LogRange(log_id=OTHER_LOG_ID, epoch=1, after=1, through=2, first_slot=first - 3, last_slot=first - 2)


SHARD_RULES: dict[str, tuple[ChangeShard, str]] = {
    "the epoch falls": (
        lambda tip: replace(of_range(tip, epoch=1), epoch=1, settled_epoch=1),
        "epoch fell from 2 to 1",
    ),
    "an epoch is left out": (lambda tip: replace(of_range(tip, epoch=4), epoch=4), "epoch rose from 2 to 4"),
    "nobody owns an open range": (lambda tip: replace(tip, owner=""), "its owner is '', but its last range is open"),
    "a log is needed from further back": (lambda tip: of_range(tip, after=tip.ranges[-1].after - 1), ": after fell"),
    "a range begins elsewhere": (
        lambda tip: of_range(tip, first_slot=tip.ranges[-1].first_slot + 1),
        "but now begins at",
    ),
    "a range is closed without a claim": (
        lambda tip: of_range(tip, through=99, last_slot=99),
        "ended at slot None, but now ends at 99",
    ),
    "a range has nothing": (lambda tip: of_range(tip, through=0, last_slot=99), "is empty"),
    "a range vanishes": (lambda tip: replace(tip, ranges=()), "left before a checkpoint covered its sections"),
    "a range comes in without a claim": (
        lambda tip: replace(tip, ranges=(replace(tip.ranges[-1], log_id=OTHER_LOG_ID),)),
        "was added without a claim",
    ),
    "ranges do not meet": (
        lambda tip: replace(tip, ranges=(closed_before(tip), *tip.ranges)),
        "the one before it ends at",
    ),
    "epochs of ranges fall": (
        lambda tip: replace(tip, ranges=(replace(closed_before(tip), epoch=7), *tip.ranges)),
        "follows one of epoch 7",
    ),
    "no range has what is needed": (
        lambda tip: of_range(tip, first_slot=tip.previous_slot + 2),
        "no range has sections",
    ),
    "the checkpoint before is another one": (
        lambda tip: replace(tip, previous_checkpoint=tip.checkpoint),
        "is not the former newest one",
    ),
    "the checkpoint vanishes": (
        lambda tip: replace(tip, checkpoint=None, previous_checkpoint=None),
        "its checkpoint disappeared",
    ),
}


@pytest.mark.parametrize("rule", list(SHARD_RULES))
def test_a_shard_manifest_that_breaks_a_rule_is_found(store: MemoryStore, rule: str) -> None:
    changed, detail = SHARD_RULES[rule]
    key = follow_shard(store, changed)
    found = [each for each in findings(audited(store)) if each.object == key and each.kind is Kind.CHAIN_RULE]
    assert any(detail in each.detail for each in found), findings(audited(store))


# ---- the chain itself


def test_a_manifest_that_was_replaced_is_found_by_the_one_behind_it(store: MemoryStore) -> None:
    key, following = keys(store, MANIFESTS)[4:6]
    tip = manifest.decode_topic_manifest(store.get(key))
    body, metadata = CODEC.encode(head_of(tip, writer="somebody else")), store.head(key).metadata
    store.put(key, body, metadata=metadata)
    assert kinds(audited(store)) == [(Kind.CHAIN_BROKEN, following)]


def test_two_manifests_that_were_swapped_are_found(store: MemoryStore) -> None:
    first, second = keys(store, MANIFESTS)[4:6]
    bodies = store.get_with_metadata(first), store.get_with_metadata(second)
    store.put(first, bodies[1][0], metadata=bodies[1][1])
    store.put(second, bodies[0][0], metadata=bodies[0][1])
    assert kinds(audited(store)) == [(Kind.CHAIN_BROKEN, first), (Kind.CHAIN_BROKEN, second)]


def test_a_lineage_that_does_not_continue_is_found(store: MemoryStore) -> None:
    key = follow(store, lambda tip: head_of(tip, lineage=("x", *tip.head.lineage[1:])))
    assert kinds(audited(store)) == [(Kind.CHAIN_BROKEN, key)]


def test_a_manifest_of_another_topic_is_damage(store: MemoryStore) -> None:
    key = keys(store, MANIFESTS)[-1]
    other = keys(store, names.topic_manifest_prefix(0, names.topic_id("other")))[-1]
    store.put(key, store.get(other), metadata=store.head(other).metadata)
    found = findings(audited(store))
    assert [(each.kind, each.object) for each in found] == [(Kind.DAMAGED, key)]
    assert "it is of topic 'other'" in found[0].detail


def test_a_topic_that_is_ahead_of_its_shard_is_found(store: MemoryStore) -> None:
    key = follow(store, lambda tip: replace(tip, applied=1_000_000))
    assert kinds(audited(store)) == [(Kind.BEYOND_LOG, key)]


def test_a_topic_whose_owner_the_shard_never_had_is_found(store: MemoryStore) -> None:
    key = follow(store, lambda tip: replace(tip, owner_epoch=9))
    assert kinds(audited(store)) == [(Kind.BEYOND_LOG, key)]


# ---- what a manifest says of a bucket


def forged_live(store: MemoryStore, **said: object) -> str:
    """The manifest says something else of its last bucket, from the first one on that names it; the bucket's key."""
    name = topic_tip(store).live[-1].object.name
    before = b""
    for key in keys(store, MANIFESTS):
        tip = manifest.decode_topic_manifest(store.get(key))
        live = tuple(replace(each, **said) if each.object.name == name else each for each in tip.live)
        body = CODEC.encode(replace(head_of(tip, previous_sha256=before), live=live))
        store.put(key, body, metadata=store.head(key).metadata)
        before = hashlib.sha256(body).digest()
    return name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rows", 19),
        ("hash_low", 1),
        ("hash_high", 2),
        ("first_ledger_id", 3),
        ("last_ledger_id", 99),
        ("min_deliver_at_ms", 5),
        ("max_deliver_at_ms", 1 << 50),
        ("segments", 2),
        ("subscription_id", 1),
    ],
)
def test_a_forged_number_with_right_checksums_is_found(store: MemoryStore, field: str, value: int) -> None:
    key = forged_live(store, **{field: value})
    found = findings(audited(store))
    assert [(each.kind, each.object) for each in found] == [(Kind.DISAGREES, key)]
    assert field in found[0].detail


def forged_bucket(store: MemoryStore, rows: Rows, **encoding: object) -> str:
    """One more live bucket with these rows; its key."""
    tip = topic_tip(store)
    encoded = bucket_format.encode_bucket(
        rows,
        **{"topic": "t", "subscription_id": 0, "limits": SegmentLimits(), "compatible": False, **encoding},  # type: ignore[arg-type]
    )
    key = names.bucket_key(0, TOPIC_ID, tip.head.number, "forged")
    store.put(key, encoded.body)
    live: LiveBucket = encoded.live_bucket(key, base=tip.head.number)
    follow(store, lambda tip: replace(tip, live=(*tip.live, live)))
    return key


def rows_of(store: MemoryStore, place: int) -> Rows:
    return bucket_format.decode_bucket(store.get(topic_tip(store).live[place].object.name))[1]


def moved(rows: Rows, by: int) -> Rows:
    """The rows, in ledgers that nobody else has."""
    return replace(rows, ledger_id=rows.ledger_id + by)


def test_positions_that_are_not_those_of_the_rows_are_found(store: MemoryStore) -> None:
    rows = moved(rows_of(store, -1), 1000)
    wrong = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id + 1)
    key = forged_bucket(store, rows, positions=wrong)
    found = findings(audited(store))
    assert [(each.kind, each.object) for each in found] == [(Kind.DISAGREES, key)]
    assert "its rows have 1 positions that its metadata has not" in found[0].detail


def test_a_bucket_of_another_topic_is_found(store: MemoryStore) -> None:
    key = forged_bucket(store, moved(rows_of(store, -1), 1000), topic="u")
    assert kinds(audited(store)) == [(Kind.DISAGREES, key)]


def test_a_position_twice_in_a_bucket_is_found(store: MemoryStore) -> None:
    rows = moved(rows_of(store, -1), 1000)
    key = forged_bucket(store, Rows.concat([rows, rows]).sorted_by_due())
    found = findings(audited(store))
    assert {(each.kind, each.object) for each in found} == {(Kind.DISAGREES, key)}
    assert "20 of its positions occur twice" in found[0].detail


def test_kept_rows_that_are_not_those_of_the_bucket_are_found(store: MemoryStore) -> None:
    rows = moved(rows_of(store, -1), 1000)
    other = position_bitmap.position_bitmaps(rows.ledger_id + 1, rows.entry_id)
    key = forged_bucket(store, rows, kept=[bucket_format.KeptRows(source="x", positions=other)])
    details = [each.detail for each in findings(audited(store)) if each.object == key]
    assert any("positions kept from x are missing" in detail for detail in details)
    assert any("are kept from no source" in detail for detail in details)


def test_a_row_in_two_live_buckets_is_found(store: MemoryStore) -> None:
    other = topic_tip(store).live[-1].object.name
    key = forged_bucket(store, rows_of(store, -1))
    (found,) = findings(audited(store))
    assert (found.kind, found.severity) == (Kind.POSITION_TWICE, Severity.ERROR)
    assert {found.object} | {name for name in (key, other) if name in found.detail} == {key, other}
    assert "20 rows of index 0" in found.detail
    assert " entry 0, ledger " in found.detail


def test_a_merge_that_makes_more_rows_than_there_were_is_found(store: MemoryStore) -> None:
    tip = topic_tip(store)
    rows = Rows.concat([rows_of(store, -1), moved(rows_of(store, -1), 1000)]).sorted_by_due()
    source = tip.live[-1]
    encoded = bucket_format.encode_bucket(
        rows,
        topic="t",
        subscription_id=0,
        limits=SegmentLimits(),
        compatible=False,
        kept=[
            bucket_format.KeptRows(
                source=source.object.name,
                positions=position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id),
            )
        ],
    )
    key = names.bucket_key(0, TOPIC_ID, tip.head.number, "merged")
    store.put(key, encoded.body)
    live = encoded.live_bucket(key, base=tip.head.number, level=source.level + 1)
    left = manifest.Tombstone(object=source.object, removed_in=tip.head.number + 1, delete_after_ms=1 << 42)
    committed = follow(store, lambda tip: replace(tip, live=(*tip.live[:-1], live), tombstones=(*tip.tombstones, left)))
    found = findings(audited(store))
    assert {(each.kind, each.object) for each in found} == {(Kind.CHAIN_RULE, committed)}
    assert any("has 40 rows, but its sources had 20" in each.detail for each in found)


def test_a_quarantined_bucket_is_told_with_what_is_the_matter(store: MemoryStore) -> None:
    name = topic_tip(store).live[0].object.name
    follow(
        store,
        lambda tip: replace(
            tip, live=(replace(tip.live[0], quarantined=True, damage="hash differs", quarantined_slot=3), *tip.live[1:])
        ),
    )
    (found,) = findings(audited(store))
    assert (found.kind, found.object) == (Kind.QUARANTINED, name)
    assert "hash differs" in found.detail
    assert "it is readable" in found.detail
    store.delete(name)
    (found,) = findings(audited(store))
    assert "the object now: it does not exist" in found.detail


def merged_without(store: MemoryStore, rows_left: int) -> str:
    """The last bucket is merged by itself, and so many of its rows are copied; the key of that manifest."""
    tip = topic_tip(store)
    source = tip.live[-1]
    rows = rows_of(store, -1).take(slice(0, rows_left))
    positions = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)
    encoded = bucket_format.encode_bucket(
        rows,
        topic="t",
        subscription_id=0,
        limits=SegmentLimits(),
        compatible=False,
        kept=[bucket_format.KeptRows(source=source.object.name, positions=positions)],
    )
    key = names.bucket_key(0, TOPIC_ID, tip.head.number, "merged")
    store.put(key, encoded.body)
    live = encoded.live_bucket(key, base=tip.head.number, level=source.level + 1)
    left = manifest.Tombstone(object=source.object, removed_in=tip.head.number + 1, delete_after_ms=1 << 42)
    return follow(store, lambda tip: replace(tip, live=(*tip.live[:-1], live), tombstones=(*tip.tombstones, left)))


def test_a_merge_that_drops_rows_that_are_not_gone_is_found(store: MemoryStore) -> None:
    key = merged_without(store, 12)
    (found,) = findings(audited(store))
    assert (found.kind, found.object) == (Kind.CHAIN_RULE, key)
    assert "a merge did not copy 8 rows of its sources, but at most 0 were gone" in found.detail


def test_a_merge_may_drop_rows_that_are_gone(store: MemoryStore) -> None:
    rows = rows_of(store, -1).take(slice(12, 20))
    gone = manifest.BucketProgress(
        bucket=topic_tip(store).live[-1].object.name,
        gone=position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id),
    )
    follow(store, lambda tip: with_gone(store, tip, gone), commit_id="sealed")
    merged_without(store, 12)
    assert findings(audited(store)) == []


def with_gone(store: MemoryStore, tip: TopicManifest, gone: manifest.BucketProgress) -> TopicManifest:
    """Progress that is inline takes the place of the object."""
    assert tip.progress_object is not None
    left = manifest.Tombstone(object=tip.progress_object, removed_in=tip.head.number, delete_after_ms=1 << 42)
    before = bucket_reading.progress_of(store, tip)
    progress = replace(before, buckets=(*before.buckets, gone))
    return replace(tip, progress_object=None, progress=progress, tombstones=(*tip.tombstones, left))


def test_a_manifest_that_forgets_what_it_required_is_found(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "KNOWN", frozenset({"later"}))
    follow(store, lambda tip: replace(tip, requires=("later",)), commit_id="requires")
    assert findings(audited(store)) == []
    key = follow(store, lambda tip: replace(tip, requires=()), commit_id="forgets")
    (found,) = findings(audited(store))
    assert (found.kind, found.object) == (Kind.CHAIN_RULE, key)
    assert found.detail == "it no longer requires later"


def test_a_manifest_that_requires_what_is_not_known_is_no_damage(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(requirements, "KNOWN", frozenset({"later"}))
        key = follow(store, lambda tip: replace(tip, requires=("later",)), commit_id="requires")
    found = {(each.kind, each.severity, each.object) for each in findings(audited(store))}
    assert (Kind.NEWER, Severity.ERROR, key) in found
    assert not any(kind is Kind.DAMAGED for kind, _, _ in found)
