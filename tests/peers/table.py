"""Every test that Apache Pulsar has for its delayed delivery trackers and for Key_Shared, what PIP-186 says, and the
tests of this repository that say it.

Owns: the table, and finding the tests that it names. Does not own: the tests.

A name that stands in quotation marks is a test of Pulsar that is known by what it tests. Names of Pulsar's tests are
all that is taken from it.
"""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Iterable, Iterator

from tests.peers.entries import Peer, Section, Standing, differs, here, measured
from tests.peers.table_of_deletions import PIP_186
from tests.peers.table_of_keys import DISPATCHER, DRAINING_HASHES, PIP_282, SUBSCRIPTIONS

TIMERS = "tests.peers.test_pulsar_timers:"
COLLECTION = "tests.daemon.owner.test_collection:"
TRACKERS = "tests.peers.test_pulsar_trackers:"
DEPARTURES = "tests.peers.test_pulsar_departures:"
MERGES = "tests.peers.test_pulsar_merges:"
ORDER = "tests.peers.test_pulsar_order:"
TOPICS = "tests.peers.test_pulsar_topics:"
CLIENTS = "tests.peers.test_many_clients:"
DECISIONS = "tests.daemon.core.decisions."
INDEX = "tests.daemon.core.index."
TOPIC = "tests.daemon.topic."
SHARD = "tests.daemon.shard."
FORMATS = "tests.storage_backends.formats."

TICK = (
    "Rule 1: never early. Tarry has no lax mode, which refuses what is due within a tick and so sends it early: a tick "
    "batches hand-outs, and only ever later."
)
DUPLICATES_FIRST = (
    "Rule 3: whether a position is there is asked first, and reads rows that are not gone. Pulsar answers false, and "
    "its dispatcher sends at once; Tarry answers that it is a duplicate and hands it out itself, once."
)
OVERLAPS = (
    "Buckets, merge: ranges of ledgers may overlap. Buckets are listed by the manifest, which changes in one write; no "
    "bucket is told from another by its range, so that there is nothing to clean up."
)
NOT_WAITING = (
    "A clear waits for nothing: it is one decision in the journal (rule 13), and rows that a read brings afterwards "
    "are gone. A bucket leaves the manifest when every row is gone (Buckets, delete)."
)

ABSTRACT = Section(
    "9.1 AbstractDeliveryTrackerTest",
    (
        here("test", TIMERS + "test_rows_added_in_any_order_are_due_in_order_at_their_times_until_none_is_left"),
        here(
            "testWithTimer",
            TIMERS + "test_a_topic_has_one_wake_up_that_only_an_earlier_row_moves_and_each_comes_once",
            TIMERS + "test_a_wake_up_whose_rows_have_left_does_nothing",
        ),
        differs(
            "testAddWithinTickTime",
            TIMERS + "test_a_row_that_is_due_within_a_tick_from_now_is_stored_and_handed_out_at_its_time",
            rule=TICK,
        ),
        here(
            "testAddMessageWithStrictDelay",
            TIMERS + "test_a_row_that_is_due_now_is_refused_on_request_and_one_that_is_due_in_a_millisecond_is_stored",
            DECISIONS + "test_topic:test_rows_that_are_already_due_are_counted_as_late_whether_stored_or_returned",
        ),
        differs(
            "testAddMessageWithDeliverAtTimeAfterNowBeforeTickTimeFrequencyWithStrict",
            TIMERS + "test_rows_that_are_due_within_a_tick_are_handed_out_together_at_its_end_and_never_early",
            rule="Ticks are multiples of tick_ms on the clock; Pulsar's begin at the last one that fired.",
        ),
        differs(
            "testAddMessageWithDeliverAtTimeAfterNowAfterTickTimeFrequencyWithStrict",
            TIMERS + "test_rows_that_are_due_within_a_tick_are_handed_out_together_at_its_end_and_never_early",
            rule="As above: a row waits for the end of its tick, however long nothing was due; at most tick_ms.",
        ),
        here(
            "testAddMessageWithDeliverAtTimeAfterFullTickTimeWithStrict",
            TIMERS + "test_a_row_that_is_due_within_a_tick_from_now_is_stored_and_handed_out_at_its_time",
            TIMERS + "test_a_topic_has_one_wake_up_that_only_an_earlier_row_moves_and_each_comes_once",
        ),
    ),
)

BUCKETS = Section(
    "9.3 BucketDelayedDeliveryTrackerTest",
    (
        here(
            "testContainsMessage",
            TRACKERS + "test_a_position_is_contained_and_a_duplicate_from_its_add_until_it_is_acknowledged",
            TOPIC + "test_contains:test_of_entries_0_to_9_with_1_to_8_delayed_a_cursor_reads_0_and_9",
        ),
        *(
            differs(
                name,
                TRACKERS + "test_a_row_that_is_added_again_after_its_time_is_a_duplicate_and_is_handed_out_once",
                rule=DUPLICATES_FIRST,
            )
            for name in (
                "testExpiredTrackedMessageReturnsFalse",
                "testRecoverThenExpireAddMessage",
                "testExpiredTrackedMessageDecrementsCount",
            )
        ),
        here(
            "testMergePreservesAllSnapshotSegments",
            MERGES + "test_every_segment_of_merged_buckets_is_there_after_a_restart",
            note="The mutable bucket is kept, too: 56 rows of 56.",
        ),
        differs(
            "testRecoverSnapshot",
            TRACKERS + "test_what_is_left_after_a_restart_comes_in_order_and_each_row_once",
            rule="Rule 2: durable before answered. The mutable bucket is kept, too; Pulsar reads its rows again.",
        ),
        here(
            "testRoaringBitmapSerialize",
            FORMATS + "test_position_bitmap:test_the_bytes_are_the_portable_serialization_after_run_optimize",
            FORMATS + "test_position_bitmap:test_bitmaps_hold_exactly_the_positions_ascending",
            INDEX + "test_positions:test_a_set_of_any_containers_is_stored_page_by_page_as_the_format_says",
        ),
        here(
            "testMergeSnapshot",
            MERGES + "test_110_rows_in_at_most_10_buckets_are_110_after_a_restart_and_after_they_are_added_again",
        ),
        here(
            "testWithBkException",
            TRACKERS + "test_one_failure_each_of_bucket_manifest_metadata_segment_and_drop_is_retried_away",
            TRACKERS + "test_while_a_segment_cannot_be_read_nothing_of_it_comes_and_later_everything",
        ),
        here(
            "testWithCreateFailDowngrade",
            TRACKERS + "test_rows_whose_bucket_cannot_be_written_are_served_from_memory_and_outlive_a_crash",
            note="They stay durable in the journal meanwhile, and the bucket is tried on.",
        ),
        here(
            "testMaxIndexesPerSegment",
            TRACKERS + "test_101_rows_sealed_at_20_and_cut_at_5_make_5_buckets_of_4_segments",
            FORMATS + "test_segment:test_the_cut_is_the_one_of_the_rule_applied_row_by_row",
        ),
        here(
            "testClear",
            DEPARTURES + "test_after_a_clear_the_same_rows_may_be_added_again",
            TOPIC + "test_trims:test_a_clear_drops_everything_and_later_adds_are_not_affected",
        ),
        here(
            "testMergeSupportsSmallMaxNumBuckets",
            MERGES + "test_limits_of_one_two_and_three_buckets_are_kept_and_each_row_comes_once",
            TOPIC + "test_merging:test_buckets_of_one_row_a_year_away_end_at_the_limit",
        ),
        here(
            "testTrimRemovesOrphanedBuckets",
            DEPARTURES + "test_buckets_all_of_whose_rows_were_trimmed_leave_the_manifest",
        ),
        here(
            "testTrimWaitsForInFlightSnapshotCreation",
            DEPARTURES + "test_what_leaves_while_its_bucket_is_being_written_is_gone_from_it",
            DEPARTURES + "test_what_left_in_part_while_its_bucket_was_being_written_stays_away_after_a_restart",
            DECISIONS + "test_trimming:test_a_trim_while_a_bucket_is_being_sealed_is_in_the_sealed_bucket",
        ),
        here(
            "testTrimDoesNotDeleteBucketOverlappingFirstActiveLedger",
            DEPARTURES + "test_a_bucket_that_a_trim_cuts_through_stays_with_the_rows_that_are_left",
        ),
        differs(
            "testTrimHandlesDeleteFailure",
            DEPARTURES + "test_a_bucket_whose_drop_fails_is_counted_until_the_drop_is_committed",
            rule="Buckets, delete: a bucket leaves the manifest first, storage later; it is tried on, no chain stops.",
        ),
        here(
            "testTrimWithNoOrphanedBuckets",
            DEPARTURES + "test_a_trim_of_ledgers_that_have_no_rows_leaves_every_bucket",
        ),
        here(
            "testClearRunsAfterInFlightTrimFailure",
            DEPARTURES + "test_a_clear_beside_a_trim_that_is_in_trouble_leaves_nothing",
            DEPARTURES + "test_a_clear_that_the_store_does_not_take_is_undone_and_may_be_repeated",
            TOPIC + "test_trims:test_trims_at_the_same_time_come_one_after_the_other",
        ),
        differs(
            "testClearWaitsForInFlightSegmentLoad",
            DEPARTURES + "test_a_clear_while_a_segment_is_being_read_leaves_nothing",
            rule=NOT_WAITING,
        ),
        differs(
            "testClearWaitsForInFlightTerminalSegmentLoadDelete",
            DEPARTURES + "test_a_clear_while_a_bucket_leaves_that_has_been_handed_out_leaves_nothing",
            rule=NOT_WAITING,
        ),
        *(
            differs(name, MERGES + "test_a_clear_while_buckets_are_merged_leaves_nothing", rule=NOT_WAITING)
            for name in (
                "testClearWaitsForInFlightMergeSourceBucketDelete",
                "testClearWaitsForInFlightMergeSegmentLoad",
                "testClearWaitsForInFlightMergeSnapshotCreation",
            )
        ),
        differs(
            "testClearStillWaitsForPendingDeletesWhenLoadFails",
            DEPARTURES + "test_a_clear_while_a_segment_is_being_read_leaves_nothing",
            rule=NOT_WAITING,
        ),
        here(
            "testClearCompletesWhenTerminalSegmentLoadDeleteFails",
            DEPARTURES + "test_a_clear_while_a_bucket_leaves_that_has_been_handed_out_leaves_nothing",
        ),
        here(
            "testClearCompletesWhenMergeSourceBucketDeleteFails",
            MERGES + "test_a_clear_beside_a_merge_whose_sources_cannot_leave_leaves_nothing",
        ),
        here(
            "testSelectMergedBucketsSupportsTwoBuckets",
            INDEX + "test_merging:test_of_buckets_with_5_3_2_4_3_rows_the_second_and_third_are_merged",
            INDEX + "test_merging:test_of_runs_with_as_many_rows_the_first_is_merged",
        ),
        differs(
            "testSelectMergedBucketsHandlesOneUnloadedSegment",
            MERGES + "test_buckets_all_of_whose_segments_are_in_memory_are_merged_like_others",
            rule="A merge reads its sources whole, and the head goes on in the merged bucket: what is in memory "
            "makes no difference.",
        ),
        differs(
            "testSelectMergedBucketsUsesNextUnloadedSegmentTimestamp",
            INDEX + "test_merging:test_rows_that_are_about_to_be_handed_out_are_not_copied_where_there_is_a_choice",
            INDEX + "test_merging:test_rows_that_are_about_to_be_handed_out_are_copied_rather_than_many_more",
            rule="Of runs with as many rows Pulsar takes the one that is due first; what is due soon will leave by "
            "itself, so Tarry takes another.",
        ),
        here(
            "testMergeEarlyReturnWhenWithinLimit",
            MERGES + "test_within_the_limit_nothing_is_merged_or_read",
            INDEX + "test_merging:test_nothing_is_merged_while_there_are_not_more_buckets_than_allowed",
        ),
        here(
            "testGetScheduledMessagesWhenAllOrphaned",
            DEPARTURES + "test_when_everything_was_trimmed_a_pull_is_empty_and_nothing_is_due_next",
        ),
        differs(
            "testOverlappingBucketsCleanupDuringRecovery",
            TRACKERS + "test_buckets_whose_ledgers_overlap_are_all_kept_and_each_row_comes_once",
            rule=OVERLAPS,
        ),
        differs(
            "testPutAndCleanOverlapRangeWithTruncatedKeys",
            TRACKERS + "test_buckets_whose_ledgers_overlap_are_all_kept_and_each_row_comes_once",
            rule=OVERLAPS,
        ),
        here(
            "testLateSnapshotLengthUpdateAfterClearDoesNotInflateCounter",
            DEPARTURES + "test_what_leaves_while_its_bucket_is_being_written_is_gone_from_it",
        ),
        here(
            "testLateSnapshotLengthUpdateAfterTrimDoesNotInflateCounter",
            DEPARTURES + "test_what_leaves_while_its_bucket_is_being_written_is_gone_from_it",
        ),
    ),
)

MANY_CLIENTS = (
    CLIENTS + "test_counts_of_16_producers_are_exact_and_20_readers_see_all_that_was_answered",
    CLIENTS + "test_a_planted_bug_is_found_by_them",
)

THREADS = Section(
    "9.4 BucketDelayedDeliveryTrackerThreadSafetyTest (the daemon is one loop: its threads are its clients)",
    (
        here("'contains beside writers, 16 threads of 1,000'", *MANY_CLIENTS),
        here("'the next delivery time, 20 threads'", *MANY_CLIENTS),
        here(
            "'mixed operations end, 32 threads'",
            TOPIC + "test_calls_together:test_calls_at_the_same_time_hand_out_what_they_must_and_nothing_else",
            "tests.wire.test_sigkill:test_what_was_answered_comes_and_nothing_early_through_kills_at_random_moments",
        ),
        here("'counts are consistent, 8 writers and 16 readers'", *MANY_CLIENTS),
    ),
)

QUEUES = Section(
    "9.5 DelayedIndexQueueTest",
    (
        here(
            "'the comparator: time, ledger, entry'",
            FORMATS + "test_row_columns:test_sorted_by_due_orders_by_deliver_at_then_ledger_then_entry",
            FORMATS + "test_row_columns:test_sorting_many_rows_gives_what_lexsort_gives",
        ),
        here(
            "'the merge of 3 lists of segments, one empty: 58 items in order'",
            ORDER + "test_the_merge_of_three_lists_of_segments_one_of_them_empty_has_all_58_rows_in_order",
            ORDER + "test_three_buckets_one_of_them_with_a_segment_that_was_trimmed_away_give_58_rows_in_order",
            INDEX + "test_runs:test_nothing_overtakes_what_follows_a_run_that_continues",
        ),
        here(
            "'the heap of the mutable bucket gives its rows in order'",
            INDEX + "test_buckets:test_rows_come_due_in_order_wherever_the_horizon_is",
            INDEX + "test_runs:test_tiered_runs_hold_every_row_in_few_runs_each_in_order",
        ),
    ),
)

DELIVERY = Section(
    "9.7 BucketDelayedDeliveryTest",
    (
        here(
            "'all consumers disconnect: 1000 delayed are kept, in the same buckets'",
            TOPICS + "test_when_all_dispatchers_have_gone_1000_rows_and_their_buckets_stay",
        ),
        differs(
            "'unsubscribe after a restart removes every snapshot'",
            TOPICS + "test_deleting_the_last_subscription_after_a_restart_buries_each_bucket_that_was_due_and_no_other",
            rule="Rule 10: the index is shared. Deleting the last subscription makes what was due gone; what is "
            "pending waits for the next one. Objects leave storage by their tombstones, when their grace is over.",
        ),
        here(
            "'deleting a topic removes every snapshot'",
            TOPICS + "test_deleting_a_topic_after_a_restart_buries_every_bucket",
            COLLECTION + "test_when_everything_is_delivered_and_collected_exactly_this_is_left",
            note="Every object has its tombstone, and leaves storage when its grace is over.",
        ),
        differs(
            "'metrics of subscriptions sum to topic and namespace: 101 messages, 3 buckets'",
            TOPICS + "test_series_of_topics_sum_to_what_is_stored_and_101_rows_make_3_buckets_a_topic",
            "tests.daemon.test_metrics:test_topics_over_the_cap_share_one_label",
            rule="The shared index (Nouns): buckets are a topic's, not a subscription's.",
        ),
        here(
            "'deleting a topic whose cursors have no properties, 4 types of subscription'",
            TOPICS + "test_a_topic_without_a_bucket_and_subscriptions_without_properties_are_deleted_too",
            note="A subscription has no type of its own: that is said when a stream is opened.",
        ),
    ),
)

NOBODYS = Section(
    "9.8 What no test of Pulsar covers",
    (
        here(
            "a crash between each pair of writes, with a model check",
            SHARD + "test_crash_points:test_every_crash_point_of_the_daemon_is_tried_here",
            SHARD + "test_crash_points:test_a_crash_between_two_durable_steps_loses_nothing_that_was_answered",
            SHARD + "test_crash_points:test_a_crash_while_taking_over_leaves_everything_to_the_next_claimant",
            "tests.models.test_protocol_models:test_in_no_order_of_steps_an_invariant_is_broken",
            "tests.simulation.test_failure_table:test_every_row_of_the_table_has_its_case",
        ),
        here(
            "random sequences of operations against a brute-force oracle",
            DECISIONS + "test_topic_states:test_nothing_is_early_lost_or_handed_out_twice_whatever_happens",
            "tests.simulation.test_simulation:test_no_rule_is_broken_whatever_the_order_of_steps_and_whatever_fails",
            INDEX + "test_containment:test_the_answer_is_what_each_position_would_have_been_answered",
        ),
        measured(
            "the distribution of lateness under load",
            "benchmarks.lateness:run",
            "tests.benchmarks.test_benchmarks:test_a_measurement_accounts_for_every_row",
            note="`make bench`: receipt minus due time, every row checked by identity.",
        ),
        here(
            "a bound on memory",
            INDEX + "test_buckets:test_beyond_the_budget_the_least_recently_used_segment_is_dropped",
            DECISIONS + "test_topic:test_reading_comes_to_an_end_however_little_memory_there_is",
            "benchmarks.memory:run",
            note="Bytes a row at ten million pending are measured.",
        ),
        here(
            "sparse random delays",
            ORDER + "test_sparse_random_delays_come_each_at_its_time_whether_the_time_step_cuts_them_or_not",
            FORMATS + "test_segment:test_the_time_step_does_not_cut_a_segment_that_has_few_rows",
        ),
        here(
            "recovery with one corrupt bucket",
            TOPIC
            + "test_damage:test_a_bucket_with_a_damaged_head_is_quarantined_at_the_start_and_healed_by_adding_again",
            TOPIC + "test_damage:test_a_damaged_segment_is_quarantined_when_it_is_read_and_the_others_are_handed_out",
            TOPIC + "test_damage:test_a_bucket_whose_object_is_missing_is_quarantined_at_the_start",
        ),
        here(
            "jumps of the clock",
            TOPIC + "test_subscriptions:test_a_clock_that_steps_back_fires_nothing_early_and_nothing_twice",
            TOPIC + "test_leases:test_leases_end_on_the_monotonic_clock_whatever_the_wall_clock_does",
            TOPIC + "test_leases:test_leases_that_ended_while_the_machine_slept_are_over_when_it_wakes",
            DECISIONS
            + "test_topic:test_a_later_subscription_starts_with_what_is_pending_also_after_the_clock_stepped_back",
        ),
        measured(
            "the time of recovery with 10^8 rows",
            "benchmarks.restart:run",
            note="At 10^7: what is read at a start is the manifests, the heads of buckets and the journal's tail, so "
            "that the time follows the buckets and the tail, not the rows; merging bounds the buckets.",
        ),
        here(
            "orphans swept to zero",
            COLLECTION + "test_when_everything_is_delivered_and_collected_exactly_this_is_left",
            "tests.daemon.owner.test_orphans:test_what_no_manifest_named_for_a_day_is_an_orphan",
        ),
    ),
)

KEYS = (PIP_282, DRAINING_HASHES, DISPATCHER, SUBSCRIPTIONS)
SECTIONS = (*KEYS, PIP_186, ABSTRACT, BUCKETS, THREADS, QUEUES, DELIVERY, NOBODYS)


def peers() -> Iterator[Peer]:
    return (peer for section in SECTIONS for peer in section.peers)


def missing(tests: Iterable[str]) -> list[str]:
    """Those that are not there."""
    absent = []
    for test in tests:
        module, _, name = test.partition(":")
        try:
            found = callable(getattr(importlib.import_module(module), name, None))
        except ModuleNotFoundError:
            found = False
        if not found:
            absent.append(test)
    return absent


def lines() -> Iterator[str]:
    """The table for people."""
    for section in SECTIONS:
        yield f"{section.title}: {_counted(section.peers)}"
        for peer in section.peers:
            yield f"  {peer.name}: {peer.standing.value}"
            if peer.note:
                yield textwrap.fill(peer.note, 116, initial_indent="      ", subsequent_indent="      ")
            yield from (f"    = {test}" for test in peer.tests)
        yield ""
    yield f"all: {_counted(tuple(peers()))}"


def _counted(some: tuple[Peer, ...]) -> str:
    counts = {standing: sum(peer.standing is standing for peer in some) for standing in Standing}
    parts = [f"{count} {standing.name.lower()}" for standing, count in counts.items() if count]
    return f"{len(some)} ({', '.join(parts)})"
