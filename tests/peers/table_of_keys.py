"""The part of the table that is about Key_Shared: PIP-282, draining hashes, the dispatcher, and subscriptions.

Owns: these entries. Does not own: the others, and finding the tests (`table`).
"""

from __future__ import annotations

from tests.peers.entries import Section, differs, here, measured

STORIES = "tests.daemon.core.key_shared.test_pip_282:"
HASHES = "tests.daemon.core.key_shared.test_draining_hashes:"
LAST_SENT = "tests.daemon.core.key_shared.test_last_sent_position:"
SELECTORS = "tests.daemon.core.key_shared.test_selectors:"
ORACLE = "tests.daemon.core.key_shared.test_order:"

TOLD_ONCE = (
    "Nothing is called back while acknowledgements are dealt with: a hand-out asks once what came to be free since the "
    "last one."
)

PIP_282 = Section(
    "4.1 PIP-282 (its examples, with its own numbers)",
    (
        here(
            "'the ranges [(3:4,3:5],(3:7,3:10]] and what becomes of them'",
            STORIES + "test_the_last_sent_position_and_the_individually_sent_ones_are_those_of_the_pip",
            LAST_SENT + "test_the_last_sent_position_of_the_pip_goes_on_as_gaps_are_filled",
        ),
        here(
            "'issue 1'",
            STORIES + "test_issue_1_a_consumer_that_joins_before_everything_read_was_dispatched_does_not_overtake",
            LAST_SENT + "test_issue_1_of_the_pip_a_consumer_joins_while_what_was_read_is_not_dispatched",
            note="In both orders: draining hashes solve it, too.",
        ),
        here(
            "'issue 2'",
            STORIES + "test_issue_2_what_was_put_back_without_a_consumer_having_had_it_does_not_overtake",
            LAST_SENT + "test_issue_2_of_the_pip_a_consumer_joins_while_a_position_waits_that_nobody_refused",
            note="In both orders: draining hashes solve it, too.",
        ),
    ),
)

DRAINING_HASHES = Section(
    "4.5a DrainingHashesTrackerTest",
    (
        here("'a new entry'", HASHES + "test_what_a_consumer_receives_is_counted_by_hash"),
        differs(
            "'the hash 0 throws'",
            STORIES + "test_positions_without_a_key_are_one_key",
            rule="0 is the hash of positions without a key: they are one key, and keep its order.",
        ),
        here(
            "'the last reference removes the entry'",
            HASHES + "test_a_hash_is_free_when_its_last_position_is_settled",
        ),
        here("'a reference of another consumer throws'", HASHES + "test_another_consumer_cannot_settle_what_one_holds"),
        here("'the same consumer is not blocked'", HASHES + "test_the_holder_itself_is_not_kept_back"),
        here("'another consumer is blocked'", HASHES + "test_another_consumer_is_kept_back"),
        here("'an unknown hash is not blocked'", HASHES + "test_a_hash_that_nobody_holds_keeps_nobody_back"),
        differs(
            "'batches nest'",
            HASHES + "test_a_hash_that_is_unblocked_twice_between_two_looks_is_told_once",
            rule=TOLD_ONCE,
        ),
        differs(
            "'unblocking waits for the end of the batch, one call'",
            HASHES + "test_what_was_unblocked_is_told_in_one_piece_and_once",
            rule=TOLD_ONCE,
        ),
        here("'clear'", HASHES + "test_when_all_is_settled_nothing_is_left"),
        here(
            "'who is told of unblocking only if something was blocked'",
            HASHES + "test_a_hash_that_kept_nothing_back_is_not_told",
        ),
    ),
)

DISPATCHER = Section(
    "4.5b PersistentStickyKeyDispatcherMultipleConsumersTest",
    (
        here(
            "'entries that are markers are not counted'",
            STORIES + "test_what_is_not_offered_leaves_no_gap_across_entries_and_ledgers",
            note="The dispatcher does not plan markers; what is not planned leaves no gap.",
        ),
        here("'ranges of STICKY'", STORIES + "test_each_consumer_of_a_range_is_sent_what_is_in_its_range"),
        here(
            "testSkipRedeliverTemporally",
            STORIES + "test_what_comes_again_for_a_slow_consumer_waits_for_its_permits_and_others_go_on",
        ),
        here(
            "testMessageRedelivery",
            STORIES + "test_permits_that_come_back_keep_the_order_of_keys_over_what_comes_again_and_what_is_new",
        ),
        here(
            "'recently joined consumers are sorted by position'",
            STORIES + "test_consumers_with_one_name_are_told_apart_by_instance_and_address_and_listed_by_position",
            LAST_SENT + "test_a_mark_delete_releases_who_joined_up_to_it_in_the_order_of_positions",
        ),
    ),
)

SUBSCRIPTIONS = Section(
    "4.5c KeySharedSubscriptionTest",
    (
        measured(
            "'keys are distributed evenly, by each selector'",
            "benchmarks.selectors:run",
            SELECTORS + "test_each_slot_has_the_owner_that_the_model_says_whatever_joins_and_leaves",
            note="Max and mean over 1,000 consumers, and the share of keys that a join moves.",
        ),
        here(
            "'a consumer crashes'",
            STORIES + "test_what_a_consumer_that_crashed_had_comes_to_others_in_the_order_of_positions",
        ),
        here("'messages without a key'", STORIES + "test_positions_without_a_key_are_one_key"),
        here(
            "'the ordering key'",
            "tests.client.test_hashing:test_the_ordering_key_comes_before_the_key_also_when_it_is_empty",
        ),
        here(
            "'order while consumers are added'",
            STORIES + "test_keys_stay_in_order_while_consumers_are_added",
            ORACLE + "test_keys_keep_their_order_and_wait_for_a_reason_whatever_happens",
        ),
        here(
            "'reading ahead while consumers are added'",
            STORIES + "test_issue_1_a_consumer_that_joins_before_everything_read_was_dispatched_does_not_overtake",
            STORIES + "test_keys_stay_in_order_while_consumers_are_added",
        ),
        here(
            "'the first consumer is removed'",
            STORIES + "test_when_the_first_consumer_leaves_the_others_receive_everything",
        ),
        here(
            "'delayed messages keep dispatching'",
            STORIES + "test_a_key_whose_position_is_delayed_keeps_being_dispatched",
            STORIES
            + "test_a_consumer_that_joined_receives_delayed_positions_up_to_where_it_joined_and_later_ones_afterwards",
        ),
        here(
            "'order through a storm of reconnects'",
            STORIES + "test_keys_are_in_order_and_at_one_consumer_through_a_storm_of_reconnects",
            ORACLE + "test_keys_keep_their_order_and_wait_for_a_reason_whatever_happens",
        ),
    ),
)
