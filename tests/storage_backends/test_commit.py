"""A commit is applied exactly once, whatever answers are lost, and is never reported otherwise."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Callable, Mapping

import pytest

from storage_backends import commit
from storage_backends.formats.manifest import LINEAGE_MAX
from storage_backends.memory_store import MemoryStore
from storage_backends.object_store import Damaged, ObjectStore, StoreRefused, StoreUnavailable
from tests._support.fault_store import Fault, FaultStore, Script
from tests._support.virtual_clock import VirtualClock
from tests.storage_backends._support.small_manifest import (
    DAY_S,
    PREFIX,
    Append,
    AppendOnce,
    Words,
    at,
    decode,
    emptied_up_to_the_tip,
    encode,
    filled,
    key,
    log_of,
    newest,
    operations,
    put,
    stored,
)


class Counts:
    def __init__(self) -> None:
        self.heard: list[tuple[str, str, int]] = []

    def committed(self, operation: str, *, conflicts: int) -> None:
        self.heard.append(("committed", operation, conflicts))

    def refused(self, operation: str, *, conflicts: int) -> None:
        self.heard.append(("refused", operation, conflicts))

    def unknown(self, operation: str, *, conflicts: int) -> None:
        self.heard.append(("unknown", operation, conflicts))


# ---- what a commit writes


def test_the_first_manifest_has_number_one_and_no_predecessor() -> None:
    store = MemoryStore()
    tip = put(log_of(store), Append("a"))
    head = stored(store, 1).head
    assert (tip.number, tip.manifest) == (1, stored(store, 1))
    assert (head.number, head.previous_sha256, head.commit_id, head.lineage) == (1, b"", "id-0", ("id-0",))
    assert (head.writer, head.created_ms, head.orphan_floor) == ("test", 5, 0)
    assert store.head(key(1)).metadata == {"commitid": "id-0"}


def test_a_manifest_carries_the_hash_of_its_predecessor_and_the_newest_commit_ids() -> None:
    store = MemoryStore()
    log = log_of(store)
    first = put(log, Append("a"))
    second = put(log, Append("b"), warm=first)
    assert second.manifest.head.previous_sha256 == first.sha256
    assert second.manifest.head.lineage == ("id-0", "id-1")
    assert log.read_tip() == dataclasses.replace(second, read_at=log.monotonic())


def test_the_lineage_keeps_the_newest_256_commit_ids() -> None:
    lineage = newest(filled(LINEAGE_MAX + 3)).head.lineage
    assert len(lineage) == LINEAGE_MAX
    assert (lineage[0], lineage[-1]) == ("before-3", f"before-{LINEAGE_MAX + 2}")


def test_the_orphan_floor_is_the_operations() -> None:
    class Floor(Append):
        def apply(self, tip: Words | None) -> Words:
            made = Append.apply(self, tip)
            return dataclasses.replace(made, head=dataclasses.replace(made.head, orphan_floor=7))

    store = filled(1)
    put(log_of(store), Floor("a"))
    assert put(log_of(store, name="next"), Append("b")).manifest.head.orphan_floor == 7


def test_a_refused_commit_tells_the_reason_and_the_tip_and_touches_nothing() -> None:
    store = FaultStore(filled(2))
    with pytest.raises(commit.Refused, match="before-1 is there") as refused:
        put(log_of(store), AppendOnce("a", after_not="before-1"))
    assert refused.value.tip is not None
    assert refused.value.tip.number == 2
    assert operations(store) == ["list", "get_with_metadata"]


def test_an_operation_whose_object_is_in_the_tip_is_committed_already() -> None:
    store = filled(2)
    assert put(log_of(store), AppendOnce("before-0", after_not="before-1")).number == 2


# ---- lost answers

PUT_FAULTS = [Fault.FAIL_BEFORE, Fault.FAIL_AFTER, Fault.DELIVER_LATE, Fault.ANSWER_EXISTS]


@pytest.mark.parametrize("again", [None, *PUT_FAULTS])
@pytest.mark.parametrize("heads", [0, 1, 3])
@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_a_lost_answer_changes_nothing(fault: Fault, again: Fault | None, heads: int) -> None:
    script = Script()
    script.plan("put_if_absent", fault)
    script.plan("head", Fault.FAIL_BEFORE, times=heads)
    if again is not None:
        script.plan("put_if_absent", again)
    store = FaultStore(filled(1), script)
    tip = put(log_of(store), Append("a"))
    assert (tip.number, tip.manifest) == (2, newest(store.inner))
    store.deliver_late()
    assert newest(store.inner).words == ("before-0", "a")


@pytest.mark.parametrize("operation", ["list", "get_with_metadata"])
def test_reads_that_verify_are_repeated(operation: str) -> None:
    store = FaultStore(filled(1))
    tip = log_of(store).read_tip()
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    script.plan(operation, Fault.FAIL_BEFORE, times=2)
    # The warm read needs one GET, which is to succeed.
    store = FaultStore(store.inner, lambda call: script(call) if call.number else Fault.NONE)
    assert put(log_of(store), Append("a"), warm=tip).manifest.words == ("before-0", "a")
    assert script.unmet() == 0


def test_a_commit_without_trouble_is_not_verified() -> None:
    store = FaultStore(filled(1))
    log = log_of(store)
    put(log, Append("b"), warm=put(log, Append("a")))
    assert operations(store) == ["list", "get_with_metadata", "put_if_absent", "get_with_metadata", "put_if_absent"]


def test_the_bytes_of_a_number_never_change_after_the_first_try() -> None:
    sent: list[bytes] = []
    attempts = itertools.count()

    class Recording(MemoryStore):
        def put_if_absent(self, key: str, body: bytes, *, metadata: Mapping[str, str]) -> None:
            sent.append(body)
            if len(sent) < 4:
                raise StoreUnavailable(key, "not now")
            super().put_if_absent(key, body, metadata=metadata)

    class Restless(Append):
        def apply(self, tip: Words | None) -> Words:
            return Append(f"{self.word}{next(attempts)}").apply(tip)

    assert put(log_of(Recording()), Restless("a")).manifest.words == ("a0",)
    assert len(sent) == 4
    assert len(set(sent)) == 1


def test_a_number_that_another_took_is_left_to_it_and_the_operation_is_made_anew() -> None:
    inner = filled(1)
    counts = Counts()
    store = FaultStore(inner, at("put_if_absent", lambda: filled(2, inner, name="other")))
    tip = put(log_of(store, observer=counts), Append("a"))
    assert tip.manifest.words == ("before-0", "other-0", "other-1", "a")
    assert tip.number == 4
    assert counts.heard == [("committed", "Append", 1)]


def test_a_precondition_is_asked_again_on_the_tip_that_came_between() -> None:
    inner = filled(1)
    counts = Counts()
    store = FaultStore(inner, at("put_if_absent", lambda: filled(1, inner, name="other")))
    with pytest.raises(commit.Refused, match="other-0 is there"):
        put(log_of(store, observer=counts), AppendOnce("a", after_not="other-0"))
    assert newest(inner).words == ("before-0", "other-0")
    assert counts.heard == [("refused", "AppendOnce", 1)]


def test_an_old_put_that_arrives_after_another_commit_changes_nothing() -> None:
    inner = filled(1)
    store = FaultStore(inner, at("put_if_absent", lambda: None, fault=Fault.DELIVER_LATE))
    store_head = FaultStore(store, at("head", lambda: filled(1, inner, name="other")))
    tip = put(log_of(store_head), Append("a"))
    assert store.deliver_late() == 0
    assert newest(inner) == tip.manifest
    assert newest(inner).words == ("before-0", "other-0", "a")


def test_pauses_double_up_to_their_limit_and_are_drawn_from_their_upper_half() -> None:
    clock = VirtualClock()
    script = Script()
    script.plan("put_if_absent", Fault.FAIL_BEFORE, times=8)
    put(log_of(FaultStore(MemoryStore(), script), clock, jitter=lambda: 0.0), Append("a"), deadline_s=60)
    assert clock.slept_s == [0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


# ---- the deadline


def test_without_head_the_outcome_is_unknown_at_the_deadline_and_never_failed() -> None:
    clock, counts, script = VirtualClock(), Counts(), Script()
    script.plan("put_if_absent", Fault.FAIL_AFTER)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    store = FaultStore(filled(1), script)
    with pytest.raises(commit.CommitOutcomeUnknown, match=f"whether AppendOnce is committed under {PREFIX}"):
        put(log_of(store, clock, observer=counts), AppendOnce("a"), deadline_s=10.0)
    assert 8.0 < sum(clock.slept_s) <= 10.0
    assert counts.heard == [("unknown", "AppendOnce", 0)]
    again = put(log_of(store.inner, name="again"), AppendOnce("a"))
    assert again.manifest.words == ("before-0", "a")
    assert again.number == 2


@pytest.mark.parametrize("fault", PUT_FAULTS)
def test_the_same_operation_tried_again_after_an_unknown_outcome_is_applied_once(fault: Fault) -> None:
    script = Script()
    script.plan("put_if_absent", fault)
    script.plan("head", Fault.FAIL_BEFORE, times=1000)
    store = FaultStore(filled(1), script)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(store), AppendOnce("a"))
    tip = put(log_of(store.inner, name="again"), AppendOnce("a"))
    store.deliver_late()
    assert newest(store.inner) == tip.manifest
    assert tip.manifest.words == ("before-0", "a")


def test_a_store_that_is_away_before_anything_was_tried_is_its_own_error() -> None:
    store = FaultStore(filled(1))
    store.go_down()
    with pytest.raises(StoreUnavailable):
        put(log_of(store), Append("a"))


def test_a_put_that_the_store_refuses_is_its_own_error_only_while_nothing_else_was_tried() -> None:
    script = Script()
    script.plan("put_if_absent", Fault.REFUSE)
    with pytest.raises(StoreRefused):
        put(log_of(FaultStore(filled(1), script)), Append("a"))
    script.plan("put_if_absent", Fault.DELIVER_LATE)
    script.plan("put_if_absent", Fault.REFUSE, times=1000)
    with pytest.raises(commit.CommitOutcomeUnknown):
        put(log_of(FaultStore(filled(1), script)), Append("a"))


# ---- R3: numbers that garbage collection has emptied


@pytest.mark.parametrize("first", [Fault.NONE, Fault.FAIL_AFTER, Fault.FAIL_BEFORE])
def test_a_number_that_was_emptied_and_created_again_is_no_history(first: Fault) -> None:
    inner, clock = filled(1), VirtualClock()

    def a_day_passes() -> None:
        clock.now_s += DAY_S
        emptied_up_to_the_tip(inner)

    store = FaultStore(inner, at("put_if_absent", a_day_passes, fault=first))
    tip = put(log_of(store, clock), Append("a"), deadline_s=2 * DAY_S)
    assert tip.number == 7
    assert newest(inner) == tip.manifest
    assert tip.manifest.words[-2:] == ("later-4", "a")
    assert stored(inner, 2).words == ("before-0", "a"), "the number was created again, and nobody reads it"


def test_a_commit_that_landed_and_was_collected_is_found_in_the_lineage() -> None:
    inner, clock = filled(1), VirtualClock()

    def a_day_passes() -> None:
        clock.now_s += DAY_S
        emptied_up_to_the_tip(inner)

    lost = FaultStore(inner, at("put_if_absent", lambda: None, fault=Fault.FAIL_AFTER))
    tip = put(log_of(FaultStore(lost, at("head", a_day_passes)), clock), Append("a"), deadline_s=2 * DAY_S)
    assert tip.number == 7
    assert newest(inner) == tip.manifest
    assert tip.manifest.words.count("a") == 1


# ---- more than 256 commits in between


def lost_put_then(inner: ObjectStore, action: Callable[[], object], *, fault: Fault) -> FaultStore:
    lost = FaultStore(inner, at("put_if_absent", lambda: None, fault=fault))
    return FaultStore(lost, at("head", action))


def test_beyond_the_ring_the_lineage_is_walked_back() -> None:
    inner = filled(1)
    others = LINEAGE_MAX + 40
    store = lost_put_then(inner, lambda: filled(others, inner, name="other"), fault=Fault.FAIL_AFTER)
    tip = put(log_of(store), Append("a"))
    assert tip.number == 2 + others
    assert "id-0" not in tip.manifest.head.lineage
    assert newest(inner).words.count("a") == 1


def test_beyond_the_ring_a_commit_that_never_landed_is_made_behind_the_tip() -> None:
    inner = filled(1)
    others = LINEAGE_MAX + 40
    store = lost_put_then(inner, lambda: filled(others, inner, name="other"), fault=Fault.FAIL_BEFORE)
    tip = put(log_of(store), Append("a"))
    assert tip.number == 2 + others
    assert tip.manifest.words.index("a") == 1 + others


def test_an_ancestor_that_was_collected_leaves_the_outcome_unknown() -> None:
    inner, counts = filled(1), Counts()

    def others_commit_and_the_oldest_are_collected() -> None:
        filled(LINEAGE_MAX + 40, inner, name="other")
        for number in range(1, 291):
            inner.delete(key(number))

    store = lost_put_then(inner, others_commit_and_the_oldest_are_collected, fault=Fault.FAIL_AFTER)
    with pytest.raises(commit.CommitOutcomeUnknown, match="was deleted as garbage"):
        put(log_of(store, observer=counts), Append("a"))
    assert counts.heard == [("unknown", "Append", 0)]
    assert newest(inner).words.count("a") == 1


def test_a_broken_chain_is_damage() -> None:
    inner = filled(1)

    def others_commit_and_one_is_altered() -> None:
        filled(LINEAGE_MAX + 40, inner, name="other")
        altered = decode(inner.get(key(290)))
        inner.put(key(290), encode(dataclasses.replace(altered, words=())))

    store = lost_put_then(inner, others_commit_and_one_is_altered, fault=Fault.FAIL_AFTER)
    with pytest.raises(Damaged, match=f"{key(291)}: it follows a manifest with SHA-256") as damaged:
        put(log_of(store), Append("a"))
    assert not isinstance(damaged.value, commit.DamagedBefore), "it may be committed"


def test_damage_that_is_found_before_anything_is_written_is_told_apart() -> None:
    inner = filled(1)
    inner.put(key(2), b"not a manifest")
    with pytest.raises(commit.DamagedBefore, match=key(2)):
        put(log_of(inner), Append("a"))


# ---- threads


def test_committers_in_threads_lose_nothing_and_double_nothing() -> None:
    store = MemoryStore()

    def commits(name: str) -> list[int]:
        log, tip, numbers = log_of(store, name=name), None, []
        for number in range(25):
            tip = put(log, Append(f"{name}-{number}"), warm=tip)
            numbers.append(tip.number)
        return numbers

    names = ["a", "b", "c", "d"]
    with concurrent.futures.ThreadPoolExecutor(len(names)) as threads:
        numbers = list(threads.map(commits, names))
    assert sorted(itertools.chain(*numbers)) == list(range(1, 101))
    words = newest(store).words
    assert sorted(words) == sorted(f"{name}-{number}" for name in names for number in range(25))
    assert words == tuple(commit_id for commit_id in newest(store).head.lineage)
