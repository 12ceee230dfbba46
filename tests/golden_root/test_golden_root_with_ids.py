"""The golden root with schedule ids is served as it was promised when it was written: each row comes with its id."""

from __future__ import annotations

import asyncio
import json

import numpy as np

from daemon.core.backlog.dead_letter_rows import ALL
from storage_backends.formats import bucket_format, checkpoint_format, log_slot_format, manifest, names, slot_format
from storage_backends.formats.index_ids import NO_BATCH_INDEX
from storage_backends.formats.log_slot_format import LogSlotKind
from tests._support.engine_fixture import no_positions
from tests._support.virtual_loop import VirtualLoop
from tests.golden_root import make_with_ids
from tests.golden_root.make_with_ids import SETTINGS, SUBSCRIPTION, TOPIC, Expected

TOLD = json.loads(make_with_ids.EXPECTED.read_text())
HANDED_OUT, DEAD_LETTERS = ([tuple(each) for each in TOLD[name]] for name in ("handed_out", "dead_letters"))


async def served() -> tuple[Expected, Expected]:
    """What a daemon hands out and lists, sorted."""
    with make_with_ids.machines_of(make_with_ids.unpack(), first_id=1_000_000) as machines:
        daemon = await machines.served_by("one", *SETTINGS)
        requests = daemon.engine.requests
        page = await daemon.call(requests.list_dead_letters(TOPIC, SUBSCRIPTION, ALL, 1_000, 0))
        dead = page.rows
        assert dead.schedule_ids is not None
        columns = (dead.ledger_id.tolist(), dead.entry_id.tolist(), dead.batch_index.tolist())
        listed = zip(*columns, [each.decode() for each in dead.schedule_ids.tolist()], strict=True)
        stream = await daemon.call(requests.open_dispatch(TOPIC, SUBSCRIPTION, no_positions()))
        stream.grant(10_000)
        handed_out: Expected = []
        while len(handed_out) < len(HANDED_OUT):
            came = await daemon.call(stream.next_messages())
            whole = np.full(len(came.rows), NO_BATCH_INDEX, np.uint32)
            batch_index = whole if came.batch_index is None else came.batch_index
            columns = (came.rows.ledger_id.tolist(), came.rows.entry_id.tolist(), batch_index.tolist())
            ids = [each.decode() for each in came.rows.listed_ids()]
            handed_out += zip(*columns, ids, strict=True)
        await machines.close()
        return sorted(handed_out), sorted(listed)


def test_every_row_comes_with_its_id() -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        handed_out, dead_letters = runner.run(served())
    assert handed_out == HANDED_OUT
    assert dead_letters == DEAD_LETTERS


def test_the_root_has_ids_in_each_place_that_may_have_one() -> None:
    store = make_with_ids.unpack()
    keys = [entry.key for entry in store.list("")]
    prefix = names.topic_manifest_prefix(0, names.topic_id(TOPIC))
    tips = [manifest.decode_topic_manifest(store.get(key)) for key in keys if key.startswith(prefix)]
    tip = max(tips, key=lambda each: each.head.number)
    assert tip.requires == ("schedule_ids",)
    assert {bool(live.level) for live in tip.live if live.id_rows} == {False, True}
    for live in tip.live:
        bucket_format.decode_bucket(store.get(live.object.name))
    parts = [
        part
        for key in keys
        if key.startswith("shards/") and "/checkpoint/" in key
        for part in checkpoint_format.decode_checkpoint(store.get(key)).topics
    ]
    assert any(part.mutable_rows.has_ids for part in parts)
    assert any(own.rows.has_ids for part in parts for own in part.own_rows)
    redeliveries = [each for part in parts for each in part.progress.redeliveries]
    assert any(nacked.schedule_ids is not None for each in redeliveries for nacked in each.nacked)
    assert any(each.dead_letters is not None and each.dead_letters.schedule_ids is not None for each in redeliveries)
    kinds = set()
    for key in keys:
        if key.startswith("logs/"):
            slot = log_slot_format.decode_log_slot(store.get(key))
            if slot.header.kind is LogSlotKind.DATA and 0 in slot.header.heads:
                _, records = slot_format.decode_slot(slot.section(0))
                kinds |= {type(record) for record in records if record.holds_ids}
    assert kinds == {
        slot_format.AddRecord,
        slot_format.RescheduleRecord,
        slot_format.NackRecord,
        slot_format.DeadLetterRecord,
        slot_format.ReplayRecord,
    }
