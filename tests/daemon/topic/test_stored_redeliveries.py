"""What is nacked, how often, what is a dead letter, and what was added by which delay level: all of it survives seals,
checkpoints, a journal that was truncated, and merges of the buckets that have the rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from daemon.core.decisions.topic_state import TopicState
from daemon.errors import Corruption
from daemon.shard import recovery
from daemon.topic import bucket_lifecycle, stored_topic
from storage_backends import checkpoints
from storage_backends.formats import checkpoint_format, manifest, slot_format
from storage_backends.formats.log_slot_format import ShardSlot
from tests.daemon.shard.test_recovery import FIRST, OTHER, Store, bits, part_of, restored, rows_of, tip_of
from tests.daemon.topic._support.redelivery_samples import (
    EVERYTHING,
    LEVELS,
    NOTHING,
    OF_FIRST,
    OF_OTHER,
    Stored,
    dead,
    holds_everything,
    known,
    levels_of,
    nack,
)


def from_the_journal(stored: Stored) -> TopicState:
    return stored.recovered()


def from_a_seal(stored: Stored) -> TopicState:
    stored.seal()
    return stored.recovered(truncated_to=len(stored.slots))


def from_a_seal_with_an_object(stored: Stored) -> TopicState:
    stored.seal(as_object=True)
    return stored.recovered(truncated_to=len(stored.slots))


def from_a_checkpoint(stored: Stored) -> TopicState:
    return stored.recovered(stored.checkpoint(), truncated_to=len(stored.slots))


def from_a_checkpoint_above_a_seal(stored: Stored) -> TopicState:
    half = Stored(*EVERYTHING[:6])
    half.seal()
    for record in EVERYTHING[6:]:
        half.decide(record)
    return half.recovered(half.checkpoint(), truncated_to=len(half.slots))


def from_a_seal_above_a_checkpoint(stored: Stored) -> TopicState:
    early = Stored(*EVERYTHING[:6]).checkpoint()
    stored.seal()
    return stored.recovered(early, truncated_to=6)


def from_a_checkpoint_and_the_journal_above(stored: Stored) -> TopicState:
    return stored.recovered(Stored(*EVERYTHING[:6]).checkpoint(), truncated_to=6)


def from_a_checkpoint_of_a_topic_that_was_not_loaded(stored: Stored) -> TopicState:
    """Two checkpoints carry it over, and what the journal says of it."""
    loaded = checkpoint_format.decode_checkpoint(Stored(*EVERYTHING[:4]).checkpoint())
    for slot in (9, len(stored.slots)):
        slots = map(slot_format.read_slot, stored.slots[loaded.slot : slot])
        tails = checkpoints.tails_of(loaded, ((each.header.slot, each.records) for each in slots))
        carried = recovery.carried_part("id", tails["id"])
        encoded = checkpoint_format.encode_checkpoint(checkpoint_format.Checkpoint(1, 1, ShardSlot(slot), (carried,)))
        loaded = checkpoint_format.decode_checkpoint(encoded)
    return stored.recovered(checkpoint_format.encode_checkpoint(loaded), truncated_to=len(stored.slots))


def from_a_merge(stored: Stored) -> TopicState:
    """The rows of the shared index are in a merged bucket that the last seal did not know."""
    stored.seal()
    merged = stored.store.merged("m", [stored.store.sealed("m1", range(10)), stored.store.sealed("m2", range(10, 30))])
    own = tuple(live for live in stored.tip.live if live.subscription_id)
    stored.tip = dataclasses.replace(stored.tip, live=(*own, merged))
    return stored.recovered(truncated_to=len(stored.slots))


def from_a_recovery_of_a_recovery(stored: Stored) -> TopicState:
    stored.topic = from_a_checkpoint(stored)
    return from_a_seal(stored)


WAYS = [
    from_the_journal,
    from_a_seal,
    from_a_seal_with_an_object,
    from_a_checkpoint,
    from_a_checkpoint_above_a_seal,
    from_a_seal_above_a_checkpoint,
    from_a_checkpoint_and_the_journal_above,
    from_a_checkpoint_of_a_topic_that_was_not_loaded,
    from_a_merge,
    from_a_recovery_of_a_recovery,
]


def test_what_was_decided_is_known() -> None:
    holds_everything(Stored(*EVERYTHING).topic)


@pytest.mark.parametrize("recovered", WAYS, ids=lambda way: way.__name__)
def test_everything_of_a_topic_survives(recovered: Callable[[Stored], TopicState]) -> None:
    holds_everything(recovered(Stored(*EVERYTHING)))


def test_a_cut_does_not_know_what_is_decided_after_it() -> None:
    stored = Stored(*EVERYTHING)
    cut = stored.topic.redelivery_cut()
    stored.decide(nack([6, 7], counts=[1, 1]), nack([0], counts=[2]))
    stored.decide(dead([14], [6]))
    stored.decide(slot_format.PurgeRecord("id", 1, 1, np.array([1], np.uint64)))
    stored.decide(slot_format.AddRecord("id", 1, 0, rows_of([50]), 3))
    stored.decide(slot_format.AcknowledgeRecord("id", 1, 1, rows_of([1])))
    written = stored_topic.redeliveries_to_stored(stored.topic.index.pages, cut)
    untouched = Stored(*EVERYTHING).topic
    assert written == stored_topic.redeliveries_to_stored(untouched.index.pages, untouched.redelivery_cut())
    assert known(stored.topic) != OF_FIRST


def progress_of(*records: slot_format.Record) -> manifest.Progress:
    stored = Stored(*records)
    stored.seal()
    assert stored.tip.progress is not None
    return stored.tip.progress


def test_a_topic_without_redeliveries_has_nothing_of_them_in_its_progress() -> None:
    assert progress_of(slot_format.AddRecord("id", 1, 0, rows_of(range(3)))) == manifest.Progress()


def test_the_highest_id_of_a_dead_letter_is_kept_when_the_last_one_has_left() -> None:
    purge = slot_format.PurgeRecord("id", 1, 1, np.array([7], np.uint64))
    stored = Stored(slot_format.AddRecord("id", 1, 0, rows_of(range(3))), dead([0], [7]), purge)
    stored.seal()
    assert known(stored.recovered(truncated_to=len(stored.slots))) == dataclasses.replace(
        NOTHING, last_dead_letter_id=7
    )


def test_progress_of_before_there_were_redeliveries_has_none() -> None:
    store = Store()
    topic = restored(store, tip_of(store.sealed("a", range(5)), progress=manifest.Progress(buckets=(bits("a", [1]),))))
    assert (known(topic, 1), known(topic, 2), levels_of(topic)) == (NOTHING, NOTHING, {})


# ---- what is left out


def test_what_a_subscription_had_that_is_no_more_is_left_out() -> None:
    stored = Stored(*EVERYTHING)
    written = stored.checkpoint()
    stored.tip = dataclasses.replace(stored.tip, subscriptions=(OTHER,))
    topics = [stored.recovered(written), stored.recovered()]
    stored.tip = dataclasses.replace(stored.tip, subscriptions=(FIRST, OTHER))
    stored.seal()
    # Its buckets leave the manifest with it; one of its batch parts may have been sealed as it left.
    stored.tip = dataclasses.replace(stored.tip, subscriptions=(OTHER,))
    topics.append(stored.recovered(truncated_to=len(stored.slots)))
    for topic in topics:
        assert set(topic.indexes) == {0, 2}
        assert known(topic, 2) == OF_OTHER
        assert levels_of(topic) == LEVELS


def test_positions_that_have_no_row_are_left_out() -> None:
    store, progress = Store(), progress_of(*EVERYTHING)
    # The own index and that of batch parts have no bucket any more, the shared one has rows 2 to 29.
    gone = dataclasses.replace(progress, buckets=(bits("a", gone=[4]),))
    topic = restored(store, tip_of(store.sealed("a", range(2, 30)), progress=gone))
    found = known(topic)
    assert found == dataclasses.replace(
        OF_FIRST,
        nacked={at: times for at, times in OF_FIRST.nacked.items() if at in ((0, 2), (0, 3))},
        counts={(0, 2): 3, (0, 3): 4},
    )
    assert levels_of(topic) == {(0, 3): [2, 3, *range(5, 20)]}


def test_what_a_subscription_acknowledged_is_nacked_no_more() -> None:
    store, progress = Store(), progress_of(*EVERYTHING)
    acknowledged = dataclasses.replace(progress, buckets=(bits("a", s1=[0, 1, 2]),))
    topic = restored(store, tip_of(store.sealed("a", range(30)), progress=acknowledged))
    assert known(topic).counts == {(0, 3): 4, (0, 4): 1_000}
    assert set(known(topic).nacked) == {(0, 3), (0, 4)}
    assert known(topic, 2).counts == {(0, 2): 7, (0, 3): 8}


def test_positions_of_a_damaged_bucket_are_left_out() -> None:
    store, progress = Store(), progress_of(*EVERYTHING)
    lost = dataclasses.replace(
        store.sealed("a", range(3)), quarantined=True, damage="bad", quarantined_slot=ShardSlot(9)
    )
    topic = restored(store, tip_of(lost, store.sealed("b", range(3, 30)), progress=progress))
    assert known(topic).counts == {(0, 3): 4, (0, 4): 1_000}
    assert set(known(topic).nacked) == {(0, 3), (0, 4)}
    assert levels_of(topic) == {(0, 3): list(range(3, 20))}


def test_a_damaged_bucket_that_cannot_be_opened_takes_what_was_nacked_with_it() -> None:
    stored = Stored(*EVERYTHING)
    stored.seal()
    live = tuple(dataclasses.replace(each, quarantined=True, damage="missing") for each in stored.tip.live)
    for each in live:
        stored.store.store.delete(each.object.name)
    stored.tip = dataclasses.replace(stored.tip, live=live)
    topic = stored.recovered(truncated_to=len(stored.slots))
    assert known(topic) == dataclasses.replace(OF_FIRST, nacked={}, counts={})
    assert levels_of(topic) == {}


def test_an_index_that_does_not_serve_the_subscription_is_left_out() -> None:
    stored = Stored(*EVERYTHING)
    stored.seal()
    assert stored.tip.progress is not None
    of_first, of_other = stored.tip.progress.redeliveries
    foreign = dataclasses.replace(of_other, nacked=of_first.nacked, counts=of_first.counts)
    progress = dataclasses.replace(stored.tip.progress, redeliveries=(foreign,))
    stored.tip = dataclasses.replace(stored.tip, progress=progress)
    found = known(stored.recovered(truncated_to=len(stored.slots)), 2)
    assert {index_id for index_id, _ in (*found.nacked, *found.counts)} == {0}
    assert found.counts == {at: count for at, count in OF_FIRST.counts.items() if at[0] == 0}


# ---- damage


@pytest.mark.parametrize("as_part", [False, True])
@pytest.mark.parametrize("what", ["nacked rows redeliver_at_ms", "dead letters reason"])
def test_a_damaged_column_is_damage_of_the_topic_and_named(what: str, as_part: bool) -> None:
    stored = Stored(*EVERYTHING)
    stored.seal()
    assert stored.tip.progress is not None
    first, other = stored.tip.progress.redeliveries
    assert first.dead_letters is not None
    damaged = (
        dataclasses.replace(first, dead_letters=dataclasses.replace(first.dead_letters, reason=b"x"))
        if what.startswith("dead")
        else dataclasses.replace(first, nacked=(dataclasses.replace(first.nacked[0], redeliver_at_ms=b"x"),))
    )
    progress = dataclasses.replace(stored.tip.progress, redeliveries=(damaged, other))
    slot = len(stored.slots)
    tail = part_of(slot + 1, progress) if as_part else checkpoints.NOTHING
    tip = dataclasses.replace(stored.tip, progress=stored.tip.progress if as_part else progress)
    with pytest.raises(Corruption, match=f"progress of subscription 1: {what} is damaged"):
        restored(stored.store, tip, tail)


# ---- planted bugs: each must break one of the ways


def a_seal_forgets_redeliveries(patch: pytest.MonkeyPatch) -> None:
    progress_of = bucket_lifecycle.progress_of
    patch.setattr(
        bucket_lifecycle,
        "progress_of",
        lambda cuts, bits, cut: dataclasses.replace(progress_of(cuts, bits, cut), redeliveries=()),
    )


def a_checkpoint_forgets_redeliveries(patch: pytest.MonkeyPatch) -> None:
    part_of = bucket_lifecycle.checkpoint_part

    def forgetting(cut: bucket_lifecycle.TopicCut) -> checkpoint_format.TopicPart:
        part = part_of(cut)
        return dataclasses.replace(part, progress=dataclasses.replace(part.progress, redeliveries=()))

    patch.setattr(bucket_lifecycle, "checkpoint_part", forgetting)


def levels_are_not_restored(patch: pytest.MonkeyPatch) -> None:
    restore = stored_topic.restore_redeliveries
    patch.setattr(
        stored_topic,
        "restore_redeliveries",
        lambda topic, progress: restore(topic, dataclasses.replace(progress, levels=())),
    )


def keys_are_all_taken_for_those_of_the_shared_index(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stored_topic, "_by_index", lambda pages, keys: [(0, keys)])


def a_plane_takes_the_place_of_that_of_another_index(patch: pytest.MonkeyPatch) -> None:
    planes_of = stored_topic._planes_of

    def last_ones(topic: TopicState, stored: manifest.Redeliveries) -> object:
        by_bit = {each.bit: each for each in stored.counts}
        return planes_of(topic, dataclasses.replace(stored, counts=tuple(by_bit.values())))

    patch.setattr(stored_topic, "_planes_of", last_ones)


def what_progress_says_counts_also_where_the_checkpoint_is_newer(patch: pytest.MonkeyPatch) -> None:
    read = recovery.TopicReads.objects

    def older(
        reads: recovery.TopicReads, tip: manifest.TopicManifest, part: checkpoint_format.TopicPart | None
    ) -> recovery.TopicObjects:
        found = read(reads, tip, part)
        if part is None or tip.progress is None:
            return found
        stale = dataclasses.replace(found.progress, redeliveries=tip.progress.redeliveries)
        return dataclasses.replace(found, progress=stale)

    patch.setattr(recovery.TopicReads, "objects", older)


BUGS = [
    (a_seal_forgets_redeliveries, from_a_seal),
    (a_checkpoint_forgets_redeliveries, from_a_checkpoint),
    (levels_are_not_restored, from_a_seal),
    (keys_are_all_taken_for_those_of_the_shared_index, from_a_checkpoint),
    (a_plane_takes_the_place_of_that_of_another_index, from_a_seal),
    (what_progress_says_counts_also_where_the_checkpoint_is_newer, from_a_checkpoint_above_a_seal),
]


@pytest.mark.parametrize(("bug", "way"), BUGS, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found(
    bug: Callable[[pytest.MonkeyPatch], None], way: Callable[[Stored], TopicState], monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        holds_everything(way(Stored(*EVERYTHING)))
