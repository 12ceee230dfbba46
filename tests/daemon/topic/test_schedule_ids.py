"""Rows with schedule ids in whole daemons: what stores them requires readers that know them; hand-outs have them."""

from __future__ import annotations

import pytest

from storage_backends.formats import manifest, names
from tests._support.engine_fixture import EngineFixture

IDS = [b"order-0", b"", b"order-2"]
DELAY_MS = 60_000


async def test_the_shard_and_then_the_topic_require_ids_before_the_first_row_has_one(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(3), DELAY_MS)
    assert (machines.topic_tip().requires, machines.shard_tip().requires) == ((), ())
    await one.add("t", 2, range(3), DELAY_MS, schedule_ids=IDS)
    assert (machines.topic_tip().requires, machines.shard_tip().requires) == (("schedule_ids",), ("schedule_ids",))
    number = machines.topic_tip().head.number
    await one.add("t", 3, range(3), DELAY_MS, schedule_ids=IDS)
    await one.add("u", 1, range(3), DELAY_MS)
    assert machines.topic_tip().head.number == number
    assert machines.topic_tip("u").requires == ()
    # What came before is version 1, byte for byte.
    first, *_ = machines.keys(names.topic_manifest_prefix(0, names.topic_id("t")))
    assert manifest.decode_topic_manifest(machines.store.get(first)).requires == ()


async def test_a_row_with_an_id_waits_until_what_it_requires_is_committed(machines: EngineFixture) -> None:
    one = await machines.served_by("one")
    await one.add("t", 1, range(3), DELAY_MS)
    one.kill()
    two = await machines.served_by("two")
    held = two.pause("put_if_absent", names.shard_manifest_prefix(0))
    adding = two.add("t", 2, range(3), DELAY_MS, schedule_ids=IDS)
    await held.reached()
    assert not adding.done()
    assert machines.topic_tip().requires == ()
    held.release()
    assert (await adding).accepted == 3
    assert machines.topic_tip().requires == ("schedule_ids",)


@pytest.mark.parametrize("sealed", [False, True])
async def test_ids_come_with_rows_after_seals_crashes_and_nacks(machines: EngineFixture, sealed: bool) -> None:
    one = await machines.served_by("one")
    receiver = await one.receiver("t")
    await one.add("t", 1, range(3), DELAY_MS, schedule_ids=IDS)
    if sealed:
        await one.call(one.engine.requests.seal("t"))
    one.kill()
    two = await machines.served_by("one")
    again = await two.receiver("t")
    await again.received(3)
    assert again.ids == IDS
    await two.stop()
    three = await machines.served_by("one")
    last = await three.receiver("t")
    await last.received(3)
    assert last.ids == IDS
    assert receiver.early == again.early == []
