"""The tests of topics can fail: each of these bugs, planted, is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import hypothesis
import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from pyroaring import BitMap, BitMap64

from daemon.core.backlog.backlog_reader import BacklogReader
from daemon.core.backlog.in_flight import InFlight
from daemon.core.decisions.ack_decisions import AckDecisions
from daemon.core.decisions.subscription_state import SubscriptionState
from daemon.core.decisions.topic_state import RedeliveryCut, TopicState
from daemon.core.index import entitlement
from daemon.core.index.bucket import Bucket, GoneSet
from daemon.core.index.index import BucketBits, Index
from daemon.core.index.mutable_bucket import MutableBucket
from daemon.core.index.position_keys import KeyedRows, Mask, PageTable, bitmap_of
from daemon.core.index.runs import SortedRun
from daemon.core.index.segments import SegmentCursor
from daemon.errors import InvariantViolated
from daemon.shard import recovery
from daemon.topic import bucket_lifecycle
from storage_backends import checkpoints
from storage_backends.formats import checkpoint_format, manifest
from storage_backends.formats.merge import NotConserved
from storage_backends.formats.row_columns import U64
from storage_backends.formats.slot_format import AcknowledgeRecord, Record
from tests.daemon.core._support.topic_machine import TopicMachine
from tests.daemon.core.decisions import test_topic
from tests.planted import registry

Plant = Callable[[pytest.MonkeyPatch], None]
# Short searches, one after the other, more than any bug needs: a long one stays where it began.
SEARCHES = 160
RUNS = 16
STEPS = 60


def what_is_not_waiting_is_passed_again(patch: pytest.MonkeyPatch) -> None:
    def pass_rows(self: Bucket, due: KeyedRows) -> KeyedRows:
        keys = bitmap_of(due.keys)
        self.passed |= keys & self.present
        self.passed_rows = len(self.passed)
        return due

    patch.setattr(Bucket, "pass_rows", pass_rows)


def rows_are_due_a_tick_early(patch: pytest.MonkeyPatch) -> None:
    due_end = SortedRun.due_end
    patch.setattr(SortedRun, "due_end", lambda self, now_ms: due_end(self, min(now_ms + 5, (1 << 64) - 1)))


def acknowledgements_do_not_look_at_the_time(patch: pytest.MonkeyPatch) -> None:
    take = InFlight.take

    def take_any(self: InFlight, keys: U64, deliver_at_ms: U64) -> Mask | None:
        held = {
            key: time
            for run in self._runs
            for key, time in zip(run.rows.keys.tolist(), run.rows.rows.deliver_at_ms.tolist(), strict=True)
        }
        times = np.array([held.get(key, 0) for key in keys.tolist()], np.uint64)
        return take(self, keys, times)

    patch.setattr(InFlight, "take", take_any)


def acknowledged_bits_survive_in_the_mutable_bucket(patch: pytest.MonkeyPatch) -> None:
    remove = Bucket.remove

    def keep_bits(self: Bucket, keys: BitMap64) -> tuple[BitMap64, int]:
        bits = {number: each.copy() for number, each in self.acknowledged.items()}
        result = remove(self, keys)
        if self.gone is None:
            self.acknowledged = bits
        return result

    patch.setattr(Bucket, "remove", keep_bits)


def a_seal_forgets_acknowledgements(patch: pytest.MonkeyPatch) -> None:
    progress_of = bucket_lifecycle.progress_of

    def without(
        cuts: Sequence[bucket_lifecycle.SealCut], bits: Iterable[BucketBits], redelivery: RedeliveryCut
    ) -> manifest.Progress:
        rows = [dataclasses.replace(cut.rows, acknowledged={}) for cut in cuts]
        cuts = [dataclasses.replace(cut, rows=each) for cut, each in zip(cuts, rows, strict=True)]
        return progress_of(cuts, bits, redelivery)

    patch.setattr(bucket_lifecycle, "progress_of", without)


def what_is_gone_while_a_bucket_is_sealed_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MutableBucket, "gone_since_cut", lambda self: GoneSet())


def a_checkpoint_counts_when_the_manifest_is_as_new(patch: pytest.MonkeyPatch) -> None:
    def counting_part(tip: manifest.TopicManifest, tail: checkpoints.TopicTail) -> checkpoint_format.TopicPart | None:
        return None if tip.applied > tail.part_slot else tail.part

    patch.setattr(checkpoints, "counting_part", counting_part)


def a_checkpoint_counts_always(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(checkpoints, "counting_part", lambda tip, tail: tail.part)


def rows_of_a_seal_in_a_checkpoint_are_always_mutable(patch: pytest.MonkeyPatch) -> None:
    restore = recovery.restore

    def restored(topic, tip, objects, part, *, elapsed_ms):  # type: ignore[no-untyped-def]
        restore(topic, tip, objects, part, elapsed_ms=elapsed_ms)
        for seal in part.sealing if part else ():
            if tip.applied >= seal.slot:
                bits = {each.bucket: each for each in part.progress.buckets}.get(seal.bucket)
                recovery._restore_rows(topic, seal.subscription_id, seal.rows, bits, elapsed_ms)

    patch.setattr(recovery, "restore", restored)


def rows_of_a_seal_in_a_checkpoint_are_left_out(patch: pytest.MonkeyPatch) -> None:
    restore = recovery.restore

    def restored(topic, tip, objects, part, *, elapsed_ms):  # type: ignore[no-untyped-def]
        part = part and dataclasses.replace(part, sealing=())
        restore(topic, tip, objects, part, elapsed_ms=elapsed_ms)

    patch.setattr(recovery, "restore", restored)


def catching_up_ignores_what_is_being_acknowledged(patch: pytest.MonkeyPatch) -> None:
    in_hand = SubscriptionState.in_hand
    patch.setattr(SubscriptionState, "in_hand", lambda self: in_hand(self) - self.acknowledging)
    patch.setattr(SubscriptionState, "in_hand_among", lambda self, keys: self.in_hand() & keys)


def gone_positions_are_gone_from_later_buckets(patch: pytest.MonkeyPatch) -> None:
    """A row that was added again after it was gone is taken for the old one."""
    find = Index.present_among

    def present(self: Index, asked: BitMap64) -> BitMap64:
        gone = [part for bucket in self.buckets if bucket.gone is not None for part in bucket.gone.freeze()]
        return find(self, asked) | (asked & BitMap64.union(BitMap64(), *gone))

    patch.setattr(Index, "present_among", present)


def a_row_that_came_back_is_taken_for_the_one_that_left(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MutableBucket, "_current", lambda self, rows: rows)


def late_rows_are_left_behind_the_head(patch: pytest.MonkeyPatch) -> None:
    place = Index._place_of_head
    patch.setattr(
        Index,
        "_place_of_head",
        staticmethod(lambda memory, rows: (place(memory, rows)[0], SortedRun(KeyedRows.empty()))),
    )


def the_head_of_a_sealed_bucket_stands_before_rows_that_are_passed(patch: pytest.MonkeyPatch) -> None:
    def place(memory: MutableBucket, rows: KeyedRows) -> tuple[int, SortedRun]:
        due_ms = memory.next_due_ms() if memory.waiting_rows else None
        times = rows.rows.deliver_at_ms
        start = len(rows) if due_ms is None else int(np.searchsorted(times, np.uint64(due_ms)))
        return start, SortedRun(KeyedRows.empty())

    patch.setattr(Index, "_place_of_head", staticmethod(place))


def pages_of_staged_rows_leave_with_their_bucket(patch: pytest.MonkeyPatch) -> None:
    stage_add = TopicState.stage_add

    def staged(self, batch, **arguments):  # type: ignore[no-untyped-def]
        result = stage_add(self, batch, **arguments)
        self.index.pages.places.let_go(self.index.staged._held)
        self.index.staged._held = BitMap()
        return result

    patch.setattr(TopicState, "stage_add", staged)


def acknowledgements_of_a_deleted_subscription_are_not_replayed(patch: pytest.MonkeyPatch) -> None:
    apply = TopicState.apply

    def applied(self: TopicState, record: Record, slot: int, *, elapsed_ms: int) -> None:
        if not isinstance(record, AcknowledgeRecord) or record.subscription_id in self.subscriptions:
            apply(self, record, slot, elapsed_ms=elapsed_ms)

    patch.setattr(TopicState, "apply", applied)


def who_came_later_is_asked_for_its_acknowledgement_too(patch: pytest.MonkeyPatch) -> None:
    """Entitlement at replay is that of today, not that of the slot."""
    acknowledged = AckDecisions.acknowledged
    patch.setattr(AckDecisions, "acknowledged", lambda self, records, slot: acknowledged(self, records, 1 << 60))


def a_subscription_is_created_before_what_has_been_passed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        TopicState,
        "since_for_new_subscription",
        lambda self, now_ms: max(0, now_ms - 2_000) if self.subscriptions else 0,
    )


def a_subscription_is_created_after_what_has_been_passed(patch: pytest.MonkeyPatch) -> None:
    """Also after what was passed while the clock was ahead: whatever is added is raised to that time."""
    patch.setattr(
        TopicState,
        "since_for_new_subscription",
        lambda self, now_ms: max(now_ms, self.indexes.passed_until_ms) if self.subscriptions else 0,
    )


def what_was_passed_ahead_of_a_subscription_is_not_durable(patch: pytest.MonkeyPatch) -> None:
    passed_before = TopicState.passed_before
    patch.setattr(
        TopicState,
        "passed_before",
        lambda self, state: dataclasses.replace(passed_before(self, state), waived=BitMap64()),
    )


def claims_of_a_deleted_subscription_stay(patch: pytest.MonkeyPatch) -> None:
    gone_with = TopicState.gone_with_subscription
    patch.setattr(
        TopicState,
        "gone_with_subscription",
        lambda self, number: gone_with(self, number) if len(self.subscriptions) == 1 else [],
    )


def a_reader_goes_on_at_the_head_of_a_sealed_bucket(patch: pytest.MonkeyPatch) -> None:
    def sealed(self: BacklogReader, memory: MutableBucket, bucket: object) -> None:
        self._places.pop(id(memory), None)
        self._start(bucket, at_head=True)  # type: ignore[arg-type]

    patch.setattr(BacklogReader, "sealed", sealed)


def the_last_segment_of_a_bucket_is_not_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentCursor, "at_end", property(lambda self: self.number >= max(1, len(self._table) - 1)))


def what_comes_back_is_lost_with_its_dispatcher(patch: pytest.MonkeyPatch) -> None:
    close = SubscriptionState.close

    def closed(self: SubscriptionState, dispatcher: int) -> None:
        self.in_flight.take_dispatcher(dispatcher)
        close(self, dispatcher)

    patch.setattr(SubscriptionState, "close", closed)


def one_acknowledgement_is_enough_for_all(patch: pytest.MonkeyPatch) -> None:
    def none_else(bucket: Bucket, hit: BitMap64, rows: KeyedRows, by: int, entitled: entitlement.Entitled) -> BitMap64:
        return hit

    patch.setattr(entitlement, "_no_longer_owed", none_else)


def who_is_not_owed_a_row_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(entitlement.Entitled, "last_since_ms", -1)


def a_page_is_only_its_ledger(patch: pytest.MonkeyPatch) -> None:
    keys = PageTable._keys
    patch.setattr(
        PageTable,
        "_keys",
        lambda self, ledger, entry, *of: keys(self, ledger, entry & np.uint64((1 << 32) - 1), *of),
    )


BY_ANY_ORDER: tuple[Plant, ...] = (
    what_is_not_waiting_is_passed_again,
    rows_are_due_a_tick_early,
    acknowledgements_do_not_look_at_the_time,
    acknowledged_bits_survive_in_the_mutable_bucket,
    catching_up_ignores_what_is_being_acknowledged,
    gone_positions_are_gone_from_later_buckets,
    pages_of_staged_rows_leave_with_their_bucket,
    a_subscription_is_created_before_what_has_been_passed,
    a_subscription_is_created_after_what_has_been_passed,
    what_was_passed_ahead_of_a_subscription_is_not_durable,
    claims_of_a_deleted_subscription_stay,
    the_last_segment_of_a_bucket_is_not_read,
    one_acknowledgement_is_enough_for_all,
    a_page_is_only_its_ledger,
)
# What takes a rare order of events.
BY_A_STORY: tuple[tuple[Plant, Callable[[], None]], ...] = (
    (
        rows_of_a_seal_in_a_checkpoint_are_left_out,
        test_topic.test_rows_are_in_the_checkpoint_while_their_seal_is_not_committed_and_in_the_bucket_afterwards,
    ),
    (
        a_row_that_came_back_is_taken_for_the_one_that_left,
        test_topic.test_a_row_that_came_back_is_not_handed_out_at_the_time_of_the_one_that_left,
    ),
    (
        a_checkpoint_counts_always,
        test_topic.test_a_checkpoint_of_the_slot_that_a_manifest_has_reached_does_not_count,
    ),
    (
        what_comes_back_is_lost_with_its_dispatcher,
        test_topic.test_what_came_back_is_handed_out_first_in_position_order,
    ),
    (
        a_checkpoint_counts_when_the_manifest_is_as_new,
        test_topic.test_a_checkpoint_of_the_slot_that_a_manifest_has_reached_does_not_count,
    ),
    (
        rows_of_a_seal_in_a_checkpoint_are_always_mutable,
        test_topic.test_rows_are_in_the_checkpoint_while_their_seal_is_not_committed_and_in_the_bucket_afterwards,
    ),
    (
        acknowledgements_of_a_deleted_subscription_are_not_replayed,
        test_topic.test_an_acknowledgement_of_a_subscription_that_was_deleted_since_counts_at_replay,
    ),
    (
        who_came_later_is_asked_for_its_acknowledgement_too,
        test_topic.test_who_is_entitled_at_replay_is_who_was_at_the_slot,
    ),
    (
        who_is_not_owed_a_row_is_waited_for,
        test_topic.test_a_row_that_a_later_subscription_is_not_owed_is_gone_at_replay_when_the_first_one_has_acknowledged_it,
    ),
    (
        a_reader_goes_on_at_the_head_of_a_sealed_bucket,
        test_topic.test_a_backlog_that_is_read_in_part_when_its_bucket_is_sealed_is_read_to_its_end,
    ),
    (
        the_head_of_a_sealed_bucket_stands_before_rows_that_are_passed,
        test_topic.test_rows_that_were_passed_before_a_late_one_are_read_again_after_a_seal,
    ),
    (late_rows_are_left_behind_the_head, test_topic.test_a_late_row_that_is_sealed_before_it_is_passed_is_handed_out),
    (
        what_is_gone_while_a_bucket_is_sealed_is_forgotten,
        test_topic.test_what_goes_while_a_bucket_is_being_sealed_is_gone_from_the_sealed_one,
    ),
    (a_seal_forgets_acknowledgements, test_topic.test_acknowledgements_are_in_the_progress_of_a_seal),
)


def found_by_the_state_machine(machine: type[RuleBasedStateMachine] = TopicMachine) -> None:
    """Fails when no search breaks a rule. The product's own checks find bugs, too."""
    for seed in range(SEARCHES):
        try:
            search(machine, seed)
        except (AssertionError, KeyError, InvariantViolated, NotConserved, pytest.fail.Exception):
            return
    pytest.fail(f"{SEARCHES} searches of {RUNS} runs have found nothing")


def search(machine: type[RuleBasedStateMachine], seed: int) -> None:
    """Raises what the first run that breaks a rule raises."""
    settings = hypothesis.settings(
        max_examples=RUNS,
        stateful_step_count=STEPS,
        phases=(hypothesis.Phase.generate,),
        suppress_health_check=list(hypothesis.HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    run_state_machine_as_test(hypothesis.seed(seed)(type(machine.__name__, (machine,), {})), settings=settings)


@pytest.mark.rotating
@pytest.mark.parametrize("plant", BY_ANY_ORDER, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_found_by_the_state_machine(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    found_by_the_state_machine()


@pytest.mark.parametrize(("plant", "story"), BY_A_STORY, ids=lambda each: each.__name__)
def test_a_planted_bug_is_found_by_a_story(
    plant: Plant, story: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, KeyError)):
        story()


@pytest.mark.rotating
@pytest.mark.parametrize("seed", range(2))
def test_a_search_finds_nothing_where_no_bug_is_planted(seed: int) -> None:
    search(TopicMachine, seed)


registry.register("state machine of a topic", BY_ANY_ORDER)
registry.register("stories of a topic", (plant for plant, _ in BY_A_STORY))
