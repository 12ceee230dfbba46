"""Objects that no manifest names, and whether their rows are anywhere else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from batch.audit.findings import Finding, Kind, Report, Severity
from storage_backends import commit, manifest_collection, topic_manifest
from storage_backends.formats import bucket_format, names
from storage_backends.formats.manifest import TopicManifest
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.segment import SegmentLimits
from storage_backends.memory_store import MemoryStore
from tests._support.engine_fixture import EPOCH_MS, EngineFixture
from tests.batch.audit._support.audits import (
    HOUR_MS,
    LIMITS,
    LOGS,
    SMALL,
    TOPIC_ID,
    audited,
    copy_of,
    findings,
    in_virtual_time,
    keys,
    sealed,
    sections_of,
    shard_tip,
    sound_root,
    topic_tip,
    without_sections,
)
from tests.daemon._support.calling import acknowledge, cancel, delete_topic

NOW_MS = EPOCH_MS + 10 * HOUR_MS
LATER_MS = NOW_MS + HOUR_MS


@pytest.fixture(scope="module")
def written() -> MemoryStore:
    return sound_root()


@pytest.fixture
def store(written: MemoryStore) -> MemoryStore:
    """A sound root of the test's own."""
    return copy_of(written)


def put_bucket(
    store: MemoryStore,
    ledger_id: int,
    entries: Sequence[int],
    *,
    index_id: int = 0,
    base: int | None = None,
    deliver_at_ms: int = LATER_MS,
    topic: str = "t",
) -> str:
    """A bucket that no manifest names; its key."""
    count = len(entries)
    rows = Rows(
        np.full(count, deliver_at_ms, np.uint64),
        np.full(count, ledger_id, np.uint64),
        np.array(entries, np.uint64),
    )
    encoded = bucket_format.encode_bucket(
        rows, topic=topic, subscription_id=index_id, limits=SegmentLimits(), compatible=False
    )
    tip = topic_tip(store, names.topic_id(topic))
    base = tip.head.number if base is None else base
    key = names.bucket_key(0, names.topic_id(topic), base, f"forged-{ledger_id}")
    store.put(key, encoded.body)
    return key


def of(report: Report, key: str) -> list[tuple[Kind, Severity]]:
    return [(found.kind, found.severity) for found in report.in_order() if found.object == key]


def unaccounted(report: Report) -> list[Finding]:
    return [found for found in report.in_order() if found.kind is Kind.ROWS_UNACCOUNTED]


def move_floor(store: MemoryStore, floor: int) -> None:
    log = topic_manifest.topic_log(
        store,
        0,
        TOPIC_ID,
        monotonic=lambda: 0.0,
        sleep=lambda _: None,
        jitter=lambda: 0.5,
        new_id=lambda: f"floor-{floor}",
    )
    operation: manifest_collection.SetFloor[TopicManifest] = manifest_collection.SetFloor(floor=floor)
    commit.commit(log, operation, writer="test", created_ms=NOW_MS, deadline_s=1.0)


# ---- orphans


def test_below_the_floor_it_is_an_orphan_above_it_on_its_way(store: MemoryStore) -> None:
    below = put_bucket(store, 20, range(5), base=3)
    above = put_bucket(store, 21, range(5), base=9)
    move_floor(store, 9)
    report = audited(store)
    assert of(report, below) == [(Kind.ORPHAN, Severity.INFO)]
    assert of(report, above) == [(Kind.UNNAMED, Severity.INFO)]
    assert findings(report) == []


def test_what_should_have_been_collected_long_ago_is_a_warning(store: MemoryStore) -> None:
    key = put_bucket(store, 20, range(5))
    limits = dataclasses.replace(LIMITS, overdue_ms=1 << 50)
    assert of(audited(store, now_ms=EPOCH_MS + 47 * HOUR_MS, limits=limits), key) == [(Kind.UNNAMED, Severity.INFO)]
    assert of(audited(store, now_ms=EPOCH_MS + 49 * HOUR_MS, limits=limits), key) == [(Kind.UNNAMED, Severity.WARNING)]


def test_a_checkpoint_that_no_manifest_names_is_told_too(store: MemoryStore) -> None:
    tip = shard_tip(store)
    assert tip.checkpoint is not None
    key = names.checkpoint_key(0, tip.head.number, "forged")
    store.put(key, store.get(tip.checkpoint.object.name))
    assert of(audited(store), key) == [(Kind.UNNAMED, Severity.INFO)]


# ---- rows that no manifest accounts for


def test_rows_that_are_nowhere_else_are_counted_with_examples(store: MemoryStore) -> None:
    key = put_bucket(store, 777, range(5))
    report = audited(store)
    assert of(report, key) == [(Kind.ROWS_UNACCOUNTED, Severity.WARNING), (Kind.UNNAMED, Severity.INFO)]
    (found,) = unaccounted(report)
    assert "5 of its 5 rows of index 0" in found.detail
    assert "gone since (delivered, cancelled, trimmed), or lost; 5 of them are not due yet" in found.detail
    assert "ledger 777 entry 0, ledger 777 entry 1, ledger 777 entry 2" in found.detail
    assert found.topic == "t"
    assert report.errors == 0


def test_rows_that_are_due_and_nowhere_else_have_most_likely_been_delivered(store: MemoryStore) -> None:
    key = put_bucket(store, 777, range(5), deliver_at_ms=NOW_MS - 1)
    assert (Kind.ROWS_UNACCOUNTED, Severity.INFO) in of(audited(store), key)


def test_rows_of_live_buckets_are_accounted_for(store: MemoryStore) -> None:
    put_bucket(store, topic_tip(store).live[-1].first_ledger_id, range(3, 6))
    assert unaccounted(audited(store)) == []


def test_rows_of_a_bucket_that_has_just_left_are_accounted_for() -> None:
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)

    async def live(machines: EngineFixture) -> None:
        one = await machines.served_by("one", *SMALL)
        receiver = await one.receiver("t")
        await one.add("t", 1, range(20), delay_ms=2_000)
        await one.until(lambda: sealed(one) == 1)
        await acknowledge(one, await receiver.received(20))
        await one.until(lambda: sealed(one) == 0)
        one.kill()

    in_virtual_time(store, live)
    put_bucket(store, 1, range(20))
    without_sections(store)
    assert unaccounted(audited(store)) == []
    store.delete(topic_tip(store).tombstones[0].object.name)
    assert len(unaccounted(audited(store))) == 1


def test_rows_that_wait_in_sections_are_accounted_for(store: MemoryStore) -> None:
    put_bucket(store, 31, range(9))
    (found,) = unaccounted(audited(store))
    assert "2 of its 9 rows" in found.detail
    assert "ledger 31 entry 7, ledger 31 entry 8" in found.detail


def test_rows_that_wait_in_the_checkpoint_are_accounted_for(store: MemoryStore) -> None:
    covered = shard_tip(store).checkpoint
    assert covered is not None
    in_sections = {
        entry
        for section in sections_of(store)
        if section.header.slot > shard_tip(store).previous_slot
        for record in section.records
        if record.topic_id == names.topic_id("other")
        for entry in getattr(record.decoded(), "rows").entry_id.tolist()  # noqa: B009
    }
    assert not {0, 1, 2} <= in_sections
    put_bucket(store, 41, range(12), topic="other")
    assert unaccounted(audited(store)) == []
    put_bucket(store, 41, range(15), topic="other")
    (found,) = unaccounted(audited(store))
    assert "3 of its 15 rows" in found.detail


def test_rows_of_an_index_whose_subscription_is_no_more_are_nobodys(store: MemoryStore) -> None:
    put_bucket(store, 777, range(5), index_id=99)
    assert unaccounted(audited(store)) == []


def test_rows_of_another_index_account_for_nothing(store: MemoryStore) -> None:
    subscription_id = topic_tip(store).subscriptions[0].subscription_id
    ledger = topic_tip(store).live[-1].first_ledger_id
    put_bucket(store, ledger, range(5), index_id=subscription_id)
    (found,) = unaccounted(audited(store))
    assert f"5 of its 5 rows of index {subscription_id}" in found.detail


def test_nothing_is_said_of_rows_where_a_log_is_damaged(store: MemoryStore) -> None:
    put_bucket(store, 777, range(5))
    slot = keys(store, LOGS)[-1]
    store.put(slot, b"no slot")
    report = audited(store)
    assert [(found.kind, found.object) for found in findings(report)] == [(Kind.DAMAGED, slot)]


def test_nothing_is_said_of_rows_where_a_live_bucket_is_missing(store: MemoryStore) -> None:
    put_bucket(store, 777, range(5))
    name = topic_tip(store).live[2].object.name
    store.delete(name)
    report = audited(store)
    assert [(found.kind, found.object) for found in findings(report)] == [(Kind.MISSING, name)]


# ---- what left


def story_with(act: str) -> MemoryStore:
    """Rows of ledger 1 are in sections, and leave in the way that is named."""
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)

    async def live(machines: EngineFixture) -> None:
        one = await machines.served_by("one", *SMALL)
        receiver = await one.receiver("t")
        await one.add("t", 1, range(5), delay_ms=2_000)
        await one.add("t", 2, range(5), delay_ms=HOUR_MS)
        if act == "cancelled":
            await cancel(one, 1, range(5))
        else:
            rows = await receiver.received(5)
            if act == "acknowledged":
                await acknowledge(one, rows)
        if act == "deleted":
            await delete_topic(one)
            await one.add("t", 3, range(5), delay_ms=HOUR_MS)
        await asyncio.sleep(3)
        one.kill()

    in_virtual_time(store, live)
    return store


@pytest.mark.parametrize("act", ["cancelled", "acknowledged"])
def test_rows_of_which_sections_say_that_they_left_are_not_lost(act: str) -> None:
    store = story_with(act)
    put_bucket(store, 1, range(5), base=1)
    assert unaccounted(audited(store)) == []
    put_bucket(store, 1, range(6), base=1)
    (found,) = unaccounted(audited(store))
    assert "1 of its 6 rows" in found.detail


def test_rows_of_a_topic_that_was_deleted_since_are_nobodys() -> None:
    store = story_with("deleted")
    assert topic_tip(store).incarnation == 2
    put_bucket(store, 777, range(5), base=1)
    assert unaccounted(audited(store)) == []
    put_bucket(store, 777, range(5))
    assert len(unaccounted(audited(store))) == 1


def test_a_seal_that_never_was_committed_has_rows_that_are_still_in_sections() -> None:
    store = MemoryStore(wall_clock=lambda: EPOCH_MS / 1000)

    async def live(machines: EngineFixture) -> None:
        one = await machines.served_by("one", *SMALL)
        await one.add("t", 1, range(20), delay_ms=HOUR_MS)
        await one.until(lambda: sealed(one) == 1)
        held = one.pause("put_if_absent", names.topic_manifest_prefix(0, TOPIC_ID))
        await one.add("t", 2, range(20), delay_ms=HOUR_MS)
        await held.reached()
        one.kill()

    in_virtual_time(store, live)
    report = audited(store)
    assert [kind for kind, _ in report.tally.kinds] == [Kind.UNNAMED]
    assert unaccounted(report) == []
    without_sections(store)
    (found,) = unaccounted(audited(store))
    assert "20 of its 20 rows" in found.detail
