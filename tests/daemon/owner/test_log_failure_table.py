"""The failure table of logs: which tests hold each row.

Owns: that every row of the table has some, and that the table is that of the design note.
Does not own: the tests, and the seeds of the simulation, which meet the rows in every order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.contract import test_slot_log
from tests.daemon.group_commit import (
    test_daemon_log,
    test_log_cursor,
    test_log_truncation,
    test_log_walks,
    test_log_writer,
    test_slot_outcome,
)
from tests.daemon.owner import (
    test_candidate,
    test_fences,
    test_log_collection,
    test_log_mending,
    test_lost_folders,
    test_standby,
    test_takeover,
)
from tests.daemon.shard import test_failure_scopes, test_range_operations
from tests.storage_backends import test_log_fence

NOTE = Path(__file__).parents[3] / "docs" / "design" / "0011-one-log-per-daemon.md"
IN_ANY_ORDER = test_log_walks.test_what_was_answered_is_found_in_any_order_of_steps
TABLE: dict[str, tuple[Callable[..., Any], ...]] = {
    "crash after OPEN, before a claim; after a claim, before a section": (
        test_range_operations.test_an_open_range_without_a_section_is_dropped,
        test_takeover.test_an_owner_that_wrote_nothing_leaves_no_range,
        test_log_collection.test_a_log_without_an_end_may_have_an_owner,
    ),
    "owner's slot and the fence race for *n*": (
        test_log_fence.test_a_slot_that_lands_between_list_and_fence_is_before_the_fence,
        test_log_writer.test_the_owner_meets_a_fence_in_the_place_of_its_slot,
        test_daemon_log.test_a_fence_is_found_by_a_slot_and_told_once,
    ),
    "PUT of *n* timed out, lands an hour later": (
        test_log_fence.test_a_slot_that_lands_between_list_and_fence_is_before_the_fence,
        test_log_writer.test_a_copy_that_lands_behind_the_list_of_a_fencer_is_before_its_fence_and_after_the_fence_never,
    ),
    "*n* landed unknown to its owner, fence at *n* + 1, *n* collected, the owner's retry creates it again": (
        test_log_writer.test_a_slot_that_landed_unseen_before_a_fence_and_was_collected_is_lost_when_it_is_created_again,
        test_slot_outcome.test_a_slot_with_a_fence_in_its_place_or_behind_it_is_lost,
    ),
    "fencer dies after the fence": (
        test_log_writer.test_a_probe_confirms_and_a_fence_ends_it,
        test_slot_log.test_a_log_that_is_fenced_twice_has_one_fence,
        test_daemon_log.test_a_fence_is_found_by_a_probe_of_an_idle_log_and_told_once,
        test_standby.test_after_a_missed_beat_a_log_with_an_end_is_claimed_at_once,
    ),
    "claimant dies after 3 of 16 claims": (
        test_candidate.test_a_log_that_is_lost_while_shards_are_claimed_for_it_is_of_no_use,
        test_failure_scopes.test_a_shard_that_was_taken_into_a_log_that_was_closed_is_taken_again_at_once,
        IN_ANY_ORDER,
    ),
    "fencer slept between list and create, the log lived on": (
        test_range_operations.test_a_claim_is_refused,
        test_range_operations.test_a_fence_proves_nothing_where_an_older_range_still_needs_less_of_the_log,
        test_takeover.test_a_fence_that_may_stop_nobody_allows_no_claim_and_the_next_attempt_finds_the_true_one,
        test_log_collection.test_a_false_fence_in_an_emptied_number_is_no_end,
        IN_ANY_ORDER,
    ),
    "owner paused after planning a truncation, then fenced": (
        test_log_truncation.test_a_manifest_of_another_epoch_lets_nothing_go,
        IN_ANY_ORDER,
    ),
    "two candidates": (
        test_log_fence.test_two_candidates_have_one_fence,
        test_takeover.test_of_two_claimants_with_one_fence_one_wins_and_the_other_is_told_whose_the_shard_is,
        test_takeover.test_who_looked_before_another_had_claimed_never_fences_the_winner,
        test_candidate.test_a_candidate_that_did_not_get_the_first_shard_closes_its_log_and_waits,
    ),
    "claim lands after the claimant's own log was fenced and collected": (
        test_range_operations.test_an_open_range_without_a_section_is_dropped,
        IN_ANY_ORDER,
    ),
    "checkpoint, release or reclaim of the fenced owner lands before the claim": (
        test_range_operations.test_a_checkpoint_is_refused,
        test_range_operations.test_a_release_is_refused,
        test_takeover.test_a_claimant_overtaken_before_it_knows_of_its_claim_does_not_take_the_other_ones_epoch_for_its_own,
        IN_ANY_ORDER,
    ),
    "one slot uncertain for minutes": (
        test_log_cursor.test_while_a_slot_is_under_way_this_is_refused,
        test_log_writer.test_no_probe_counts_while_a_slot_is_uncertain,
        test_daemon_log.test_while_a_slot_is_uncertain_nothing_confirms_and_nobody_asks,
    ),
    "header of a slot damaged, sections whole": (
        test_log_mending.test_a_wrong_byte_before_the_sections_of_the_newest_slot_costs_nothing,
    ),
    "newest slot damaged, sections named by its metadata": (
        test_log_fence.test_a_newest_slot_that_is_cut_leaves_the_end_of_the_log_known_by_its_note,
        test_log_mending.test_a_newest_slot_that_is_cut_before_its_sections_costs_the_shards_with_a_section_in_it,
    ),
    "newest slot damaged before the fence": (
        test_log_fence.test_where_the_newest_slot_is_damaged_nobody_can_fence,
        test_fences.test_a_log_whose_newest_slot_is_damaged_has_no_fence,
        test_candidate.test_a_log_whose_end_nobody_can_know_costs_its_shards,
        test_log_mending.test_what_is_given_up_of_the_newest_slot_costs_that_slot_and_nothing_that_comes_later,
    ),
    "slots lost that the daemon's heartbeat has reported": (
        test_log_fence.test_a_log_that_is_shorter_than_its_owner_has_told_is_damaged_and_not_fenced,
        test_candidate.test_a_log_that_is_shorter_than_its_daemon_has_told_is_not_taken_over,
        test_log_mending.test_every_lost_slot_may_have_had_a_section_of_each_shard,
    ),
    "slots lost that the manifest of a shard names": (
        test_lost_folders.test_the_end_of_a_log_that_only_a_manifest_knows_can_be_given_up,
    ),
    "a log cannot be read after the claims": (
        test_candidate.test_a_log_that_the_store_does_not_give_costs_the_shards_that_need_it,
    ),
}


def test_every_row_of_the_table_has_its_tests() -> None:
    table = NOTE.read_text(encoding="utf-8").partition("### Failure by failure")[2].partition("\n## ")[0]
    rows = [row[1] for row in re.finditer(r"^\| (.*?) \| .* \|$", table, re.MULTILINE)]
    assert rows[1:] == list(TABLE)
    assert all(TABLE.values())
