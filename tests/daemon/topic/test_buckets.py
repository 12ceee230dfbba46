"""When a mutable bucket is sealed, what is served meanwhile, and what is left when every row is gone."""

from __future__ import annotations

import asyncio
import logging

import pytest

from daemon.errors import QuotaExceeded
from daemon.topic import bucket_lifecycle
from daemon.topic.served_topic import SEALING_MAX
from storage_backends.formats import checkpoint_format, names
from storage_backends.formats.manifest import decode_topic_manifest
from tests._support.engine_fixture import Daemon, EngineFixture
from tests._support.fault_store import Fault

BUCKETS = "/buckets/"
SMALL = ("bucket.min_index_count_per_bucket=20", "bucket.rows_max=20")


def buckets(daemon: Daemon, topic: str = "t") -> int:
    return len(daemon.topic(topic).core.index.sealed)


# ---- triggers


async def test_a_bucket_with_enough_rows_is_sealed_when_a_higher_ledger_arrives(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "bucket.min_index_count_per_bucket=10", "bucket.rows_max=1000")
    await one.add("t", 5, range(15))
    await one.add("t", 4, range(15))
    await asyncio.sleep(2)
    assert buckets(one) == 0
    await one.add("t", 6, range(3))
    await one.until(lambda: buckets(one) == 1)
    (live,) = machines.topic_tip().live
    assert (live.rows, live.first_ledger_id, live.last_ledger_id) == (30, 4, 5)
    assert one.topic("t").core.index.mutable.present_rows == 3


async def test_a_bucket_with_few_rows_is_not_sealed_by_a_higher_ledger(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "bucket.min_index_count_per_bucket=10", "bucket.rows_max=1000")
    await one.add("t", 5, range(9))
    await one.add("t", 6, range(1))
    await asyncio.sleep(5)
    assert not machines.keys(BUCKETS)


@pytest.mark.parametrize(
    ("setting", "rows"), [("bucket.rows_max=50000", 50_000), ("bucket.bytes_max=1024", 43)], ids=["rows", "bytes"]
)
async def test_a_bucket_is_sealed_by_its_size_whatever_the_ledger(
    machines: EngineFixture, setting: str, rows: int
) -> None:
    one = await machines.served_by("one", setting)
    await one.add("t", 1, range(rows - 1), delay_ms=50_000)
    await asyncio.sleep(2)
    assert not machines.keys(BUCKETS)
    await one.add("t", 1, [rows], delay_ms=50_000)
    await one.until(lambda: buckets(one) == 1)
    assert machines.topic_tip().live[0].rows == rows


async def test_a_bucket_is_sealed_by_age_without_any_traffic(machines: EngineFixture) -> None:
    one = await machines.served_by("one", "bucket.age_max_s=60")
    await one.add("t", 1, range(5), delay_ms=500_000)
    await asyncio.sleep(60 * (1 - bucket_lifecycle.AGE_SPREAD) - 2)
    assert not machines.keys(BUCKETS)
    await asyncio.sleep(60 * bucket_lifecycle.AGE_SPREAD + 5)
    assert machines.topic_tip().live[0].rows == 5


async def test_the_orderly_end_leaves_the_rows_of_mutable_buckets_in_the_checkpoint(machines: EngineFixture) -> None:
    one = await machines.served_by()
    await one.add("t", 1, range(5), delay_ms=500_000)
    await one.stop()
    assert not machines.topic_tip().live
    newest = machines.shard_tip().checkpoint
    assert newest is not None
    (part,) = checkpoint_format.decode_checkpoint(machines.store.get(newest.object.name)).topics
    assert len(part.mutable_rows) == 5
    two = await machines.served_by("two")
    assert two.topic("t").core.index.pending_rows == 5


@pytest.mark.parametrize(("form", "compatible"), [("columnar", False), ("compatible", True)])
async def test_the_form_of_a_bucket_is_that_of_the_configuration_and_both_are_served(
    machines: EngineFixture, form: str, compatible: bool
) -> None:
    one = await machines.served_by("one", *SMALL, f"bucket.form={form}")
    await one.add("t", 1, range(20), delay_ms=5_000)
    await one.until(lambda: buckets(one) == 1)
    assert machines.topic_tip().live[0].compatible_form is compatible
    one.kill()
    two = await machines.served_by("one")
    await (await two.receiver("t")).received(20)


# ---- meanwhile


async def test_rows_are_handed_out_while_several_seals_wait(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    held = one.pause("put", BUCKETS)
    for ledger_id in range(3):
        await one.add("t", ledger_id, range(20))
    await held.reached()
    assert len(one.topic("t").core.index.sealing) == 3
    rows = await receiver.received(60)
    assert await receiver.acknowledge(rows[:30]) == 0
    assert buckets(one) == 0
    held.release()
    await one.until(lambda: not one.topic("t").core.index.sealing)
    await asyncio.sleep(2)
    assert {position[0] for position in receiver.positions} == {0, 1, 2}
    one.kill()
    two = await machines.served_by("one", *SMALL)
    again = await two.receiver("t")
    await again.received(30)
    await asyncio.sleep(30)
    assert again.positions == {row[:2] for row in rows[30:]}


async def test_seals_are_committed_in_the_order_of_their_cuts(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for ledger_id in range(4):
        await one.add("t", ledger_id, range(20), delay_ms=50_000)
    await one.until(lambda: buckets(one) == 4)
    prefix = names.topic_manifest_prefix(0, names.topic_id("t"))
    manifests = [decode_topic_manifest(machines.store.get(key)) for key in machines.keys(prefix)]
    applied = [each.applied for each in manifests]
    assert applied == sorted(applied)
    assert [len(each.live) for each in manifests][-5:] == [0, 1, 2, 3, 4]


async def test_adds_are_refused_while_too_many_buckets_wait_for_their_seal(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    held = one.pause("put", BUCKETS)
    for ledger_id in range(SEALING_MAX):
        await one.add("t", ledger_id, range(20), delay_ms=50_000)
    with pytest.raises(QuotaExceeded):
        await one.add("t", 99, range(20), delay_ms=50_000)
    held.release()
    await one.until(lambda: buckets(one) == SEALING_MAX)
    assert (await one.add("t", 99, range(20), delay_ms=50_000)).accepted == 20


async def test_a_seal_is_tried_until_the_store_takes_it(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    for fault in (Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.REFUSE):
        one.script.plan("put", fault, key_part=BUCKETS)
    await one.add("t", 1, range(20), delay_ms=50_000)
    await one.until(lambda: buckets(one) == 1)
    assert not one.script.unmet()
    assert len(machines.keys(BUCKETS)) == 1, "a bucket is written again under its name"


async def test_a_position_that_was_sealed_is_a_duplicate(machines: EngineFixture) -> None:
    one = await machines.served_by("one", *SMALL)
    await one.add("t", 1, range(20), delay_ms=50_000)
    await one.until(lambda: buckets(one) == 1)
    assert (await one.add("t", 1, range(25), delay_ms=1_000)).duplicates == 20


async def test_progress_that_is_too_large_for_the_manifest_is_an_object(
    machines: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_lifecycle, "INLINE_PROGRESS_BYTES", 8)
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(20))
    await receiver.received(20)
    await receiver.acknowledge(receiver.rows[::2])
    await one.add("t", 2, range(20))
    await one.until(lambda: buckets(one) == 2)
    tip = machines.topic_tip()
    assert tip.progress is None
    assert tip.progress_object is not None
    left = {row[:2] for row in receiver.rows[1:20:2]} | {(2, entry) for entry in range(20)}
    one.kill()
    two = await machines.served_by("one", *SMALL)
    again = await two.receiver("t")
    await again.received(30)
    await asyncio.sleep(20)
    assert again.positions == left


# ---- the end of a bucket


async def test_a_bucket_leaves_the_manifest_when_every_row_is_acknowledged_and_its_object_stays(
    machines: EngineFixture,
) -> None:
    one = await machines.served_by("one", *SMALL)
    receiver = await one.receiver("t")
    await one.add("t", 1, range(20))
    await one.until(lambda: buckets(one) == 1)
    rows = await receiver.received(20)
    await receiver.acknowledge(rows[:19])
    await asyncio.sleep(5)
    assert buckets(one) == 1, "handing out is not enough"
    await receiver.acknowledge(rows[19:])
    await one.until(lambda: buckets(one) == 0)
    tip = machines.topic_tip()
    assert not tip.live
    assert [each.object.name for each in tip.tombstones] == machines.keys(BUCKETS)
    assert (await one.add("t", 1, range(20))).accepted == 20, "a position that is gone may be added again"


# ---- damage


def damage(machines: EngineFixture, key: str, place: int) -> None:
    body = bytearray(machines.store.get(key))
    body[place] ^= 0x40
    machines.store.put(key, bytes(body))


async def sealed_apart(machines: EngineFixture) -> list[str]:
    """Two buckets of one segment each, and rows in the mutable bucket."""
    one = await machines.served_by("one", *SMALL)
    for ledger_id in (1, 2):
        await one.add("t", ledger_id, range(20), delay_ms=60_000)
        await one.until(lambda expected=ledger_id: buckets(one) == expected)  # type: ignore[misc]
    await one.add("t", 3, range(5), delay_ms=60_000)
    one.kill()
    return machines.keys(BUCKETS)


async def test_a_damaged_segment_degrades_its_own_bucket_only_and_the_log_names_it_and_the_offset(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture
) -> None:
    keys = await sealed_apart(machines)
    damage(machines, keys[0], len(machines.store.get(keys[0])) // 2)
    two = await machines.served_by("one", *SMALL)
    receiver = await two.receiver("t")
    await receiver.received(25)
    await asyncio.sleep(60)
    assert {position[0] for position in receiver.positions} == {2, 3}
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert any(keys[0] in message and "at byte" in message for message in errors)
    assert two.engine.health.serving


@pytest.mark.parametrize("part", ["tail", "metadata", "object"])
async def test_a_bucket_that_cannot_be_opened_is_named_and_the_other_topics_are_served(
    machines: EngineFixture, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    (key, _) = await sealed_apart(machines)
    size = len(machines.store.get(key))
    if part == "object":
        machines.store.delete(key)
    else:
        damage(machines, key, {"tail": size - 6, "metadata": 24}[part])
    two = await machines.served_by("one", *SMALL)
    receiver = await two.receiver("u")
    await two.add("u", 1, range(5))
    await receiver.received(5)
    errors = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert any(key in message for message in errors)
    if part != "object":
        assert any(key in message and "at byte" in message for message in errors)


async def test_a_read_that_fails_is_tried_again(machines: EngineFixture) -> None:
    await sealed_apart(machines)
    two = await machines.served_by("one", *SMALL)
    for fault in (Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.FAIL_BEFORE):
        two.script.plan("get_range", fault, key_part=BUCKETS)
    receiver = await two.receiver("t")
    await receiver.received(45)
    assert not receiver.early
