"""Decisions that are merged before they are replayed lead to the same state, and there are few of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.core.decisions.topic_state import TopicState
from daemon.core.index.segments import SegmentCache
from daemon.shard import recovery
from daemon.shard.recovery import Decided
from daemon.topic import bucket_lifecycle
from storage_backends.formats import checkpoint_format, manifest, position_bitmap
from storage_backends.formats.log_slot_format import ShardSlot
from storage_backends.formats.row_columns import Rows
from storage_backends.formats.slot_format import AcknowledgeRecord, AddRecord, GoneReason, GoneRecord

NOW_MS = 1_000_000
# The second one is created while rows come: it is owed those of later slots alone.
CREATED_SLOTS = (0, 20)


def topic() -> TopicState:
    subscriptions = [
        manifest.Subscription(subscription_id=number, name=f"s{number}", since_ms=0, created_slot=ShardSlot(slot))
        for number, slot in enumerate(CREATED_SLOTS, 1)
    ]
    return TopicState("t", "id", 1, subscriptions, now_ms=NOW_MS, cache=SegmentCache(1 << 20), ready_rows_max=100)


def rows_of(entries: Iterable[int]) -> Rows:
    entry_id = np.array(list(entries), np.uint64)
    return Rows(entry_id % np.uint64(3) + np.uint64(NOW_MS), entry_id // np.uint64(4), entry_id)


def add(*entries: int, level: int = 0) -> AddRecord:
    return AddRecord("id", 1, 0, rows_of(entries), level)


def acknowledge(subscription_id: int, *entries: int) -> AcknowledgeRecord:
    return AcknowledgeRecord("id", 1, subscription_id, rows_of(entries))


def gone(*entries: int) -> GoneRecord:
    rows = rows_of(entries)
    positions = position_bitmap.position_bitmaps(rows.ledger_id, rows.entry_id)
    return GoneRecord("id", 1, 0, GoneReason.CANCELLED, positions)


def history(seed: int, steps: int) -> list[Decided]:
    """What a daemon may have decided: only what has no row is added, and what has one leaves."""
    draw, there, decided = random.Random(seed), dict[int, set[int]](), list[Decided]()
    for slot in range(1, steps):
        entry = draw.randrange(12)
        if entry not in there:
            entitled = {number for number, created in enumerate(CREATED_SLOTS, 1) if created < slot}
            there[entry] = entitled
            decided.append((slot, add(entry, level=draw.choice((0, 0, 1)))))
        elif draw.random() < 0.1:
            del there[entry]
            decided.append((slot, gone(entry)))
        else:
            leaving = draw.choice(sorted(there[entry]))
            decided.append((slot, acknowledge(leaving, entry)))
            there[entry].discard(leaving)
            if not there[entry]:
                del there[entry]
    return decided


def state_after(decided: Iterable[Decided]) -> tuple[bytes, list[int]]:
    """What a checkpoint would say of the topic, and what is owed."""
    core = topic()
    for slot, record in decided:
        core.apply(record, slot, elapsed_ms=0)
    part = bucket_lifecycle.checkpoint_part(
        bucket_lifecycle.TopicCut("id", "t", 1, core.indexes.cut(), sealing=(), redelivery=core.redelivery_cut())
    )
    rows = part.mutable_rows
    order = np.lexsort((rows.entry_id, rows.ledger_id, rows.deliver_at_ms))
    body = checkpoint_format.Checkpoint(0, 1, ShardSlot(1_000), (part,))
    encoded = checkpoint_format.encode_checkpoint(body)
    columns = np.concatenate([column[order] for column in (rows.deliver_at_ms, rows.ledger_id, rows.entry_id)])
    progress = repr(checkpoint_format.decode_checkpoint(encoded).topics[0].progress)
    owed = [core.subscriptions[number].backlog for number in sorted(core.subscriptions)]
    return columns.tobytes() + progress.encode(), owed


def merged(decided: Sequence[Decided]) -> list[Decided]:
    return list(recovery.merged_runs(decided, created_slots=CREATED_SLOTS))


def agree(seed: int, steps: int = 60) -> bool:
    decided = history(seed, steps)
    return state_after(merged(decided)) == state_after(decided)


@given(st.integers(0, 1 << 30))
def test_merged_decisions_lead_to_the_same_state(seed: int) -> None:
    assert agree(seed)


def test_an_ordinary_tail_becomes_a_few_decisions() -> None:
    decided: list[Decided] = []
    for number in range(3_000):
        decided.append((100 + 2 * number, add(number)))
        decided.append((101 + 2 * number, acknowledge(1, number)))
    few = merged(decided)
    assert len(few) <= 4
    assert sum(record.row_count for _, record in few) == 6_000
    assert [slot for slot, _ in few] == sorted(slot for slot, _ in few)


def test_what_is_added_again_after_its_acknowledgement_stays_added() -> None:
    few = merged([(1, add(1)), (2, acknowledge(1, 1)), (3, add(1)), (4, add(2))])
    assert [type(record) for _, record in few] == [AddRecord, AcknowledgeRecord, AddRecord]


def test_nothing_is_moved_across_another_kind_of_decision() -> None:
    few = merged([(1, add(1)), (2, gone(1)), (3, add(1))])
    assert [type(record) for _, record in few] == [AddRecord, GoneRecord, AddRecord]


def test_decisions_before_and_after_a_subscription_was_created_stay_apart() -> None:
    few = merged([(19, add(1)), (20, add(2)), (21, add(3)), (22, add(4))])
    assert [(slot, record.row_count) for slot, record in few] == [(20, 2), (22, 2)]


# Planted bugs


def nothing_is_added_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "_first_added_again", len)


def whom_a_slot_is_about_is_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "bisect_left", lambda borders, slot: 0)


def acknowledgements_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    as_few = recovery._as_few
    monkeypatch.setattr(recovery, "_as_few", lambda run: reversed(list(as_few(run))))


@pytest.mark.parametrize(
    "plant", [nothing_is_added_again, whom_a_slot_is_about_is_overlooked, acknowledgements_come_first]
)
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    assert not all(agree(seed) for seed in range(50))
