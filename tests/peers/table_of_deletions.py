"""The part of the table that is about two-phase deletion: the examples and the rules of PIP-186.

Owns: these entries. Does not own: the others, and finding the tests (`table`).

Pulsar has never had it, and so no tests of it: each entry is a sentence of the proposal, by what it says.
"""

from __future__ import annotations

from tests.peers.entries import Section, differs, here

EXAMPLES = "tests.daemon.ledger_deletion.test_pip_186:"
CRASHES = "tests.daemon.ledger_deletion.test_ledger_deletion_crashes:"
FAULTS = "tests.daemon.ledger_deletion.test_ledger_deletion_faults:"
ENGINE = "tests.daemon.ledger_deletion.test_ledger_deletions:"
IN_USE = "tests.daemon.ledger_deletion.test_ledgers_in_use:"
METADATA = "tests.daemon.core.deletions.test_metadata:"
STORES = "tests.daemon.ledger_stores.test_ledger_stores:"
OFFLOADED = "tests.daemon.ledger_stores.test_offloaded_ledgers:"
OWNER = "tests.daemon.ledger_stores.test_ledger_owner:"

PIP_186 = Section(
    "5 PIP-186 (its examples and its rules)",
    (
        here(
            "'everything up to ledger 2 is consumed: ledger 1 is deleted'",
            EXAMPLES + "test_when_everything_up_to_ledger_2_is_consumed_ledger_1_leaves_and_is_deleted",
        ),
        differs(
            "'ledger 1 is sent, ledger 2 is not: [1,3,4,5] remains'",
            EXAMPLES + "test_of_ledgers_1_and_2_the_one_that_was_recorded_leaves_and_the_other_one_stays",
            rule="By its own rule (all ledgers without those that were sent) it is [2,3,4,5].",
        ),
        here(
            "'sent, and the change of the metadata failed: it is still in use'",
            EXAMPLES + "test_a_ledger_that_was_recorded_and_never_left_the_metadata_is_in_use_and_is_not_deleted",
        ),
        differs(
            "'still in use: acknowledged, and never looked at again'",
            IN_USE + "test_what_ended_in_use_is_attempted_when_it_is_in_use_no_longer",
            CRASHES + "test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else",
            rule="An attempt between the record and the change of the metadata would leave an orphan: what ended "
            "because its owner says that it is in use comes back when the owner takes that back.",
        ),
        here(
            "'a ledger that is offloaded too has two messages'",
            EXAMPLES + "test_a_ledger_that_is_offloaded_too_has_two_records_and_each_ends_by_itself",
        ),
        here(
            "'the broker of the topic is asked whether it is in use'",
            STORES + "test_the_owner_is_asked_before_an_object_store_is_touched",
            IN_USE + "test_the_order_of_slots_decides_between_in_use_and_an_attempt",
        ),
        here(
            "'the topic does not exist: it is deleted without the question'",
            STORES + "test_a_topic_that_is_gone_does_not_save_the_metadata_from_being_compared",
        ),
        here(
            "'the metadata of a managed ledger, a cursor and a schema'",
            METADATA + "test_each_component_matches_its_own_table_and_no_other",
            METADATA + "test_every_key_of_the_tables_counts_and_no_other_does",
            OFFLOADED + "test_a_record_deletes_what_its_component_says_and_nothing_else",
            note="Keys of the other tables must be absent: nothing else tells a cursor's ledger from its topic's.",
        ),
        here(
            "'a message that a hacker sends deletes nothing'",
            OFFLOADED + "test_a_forged_record_of_another_topic_deletes_nothing",
            IN_USE + "test_a_record_under_a_wrong_topic_deletes_nothing_that_another_one_uses_by_its_uuid",
            CRASHES + "test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else",
        ),
        differs(
            "'what is in belivedLedgerIdSet, or comes with skipAuth, is not compared'",
            OFFLOADED + "test_both_objects_are_verified_and_then_deleted_the_index_first",
            rule="Every deletion verifies: a memory that is not durable is no proof.",
        ),
        differs(
            "'the offloader of the message's own context is built, and deletes'",
            STORES + "test_a_bucket_that_is_not_configured_is_not_reached",
            OFFLOADED + "test_one_object_that_does_not_match_saves_both",
            rule="A record reaches nothing that is not configured, and offloaded objects are verified as ledgers are.",
        ),
        here(
            "'a deletion that fails comes again after reconsumeLaterSeconds, 10 times, and is a dead letter then'",
            FAULTS + "test_trouble_until_the_last_retry_ends_with_dead_letters_that_say_why_and_a_retry_succeeds",
            FAULTS + "test_jitter_spreads_the_retries_within_its_bounds",
            FAULTS + "test_a_takeover_in_the_middle_counts_and_loses_no_attempt",
        ),
        here(
            "'not matching, not there and malformed count as success'",
            CRASHES + "test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else",
            OFFLOADED + "test_an_id_that_makes_no_name_is_malformed",
            OWNER + "test_each_answer_is_an_outcome",
        ),
        here(
            "'deleted, and not acknowledged before a restart: the second deletion finds nothing'",
            CRASHES + "test_a_crash_leaves_nothing_deletable_without_a_record_and_deletes_nothing_else",
            OFFLOADED + "test_what_is_not_there_is_gone_and_so_it_is_the_second_time",
            FAULTS + "test_what_was_deleted_though_nobody_was_told_is_found_to_be_gone",
        ),
        here(
            "'getEstimatedInflightDeletionLedgerCount'",
            EXAMPLES + "test_the_stats_say_how_many_deletions_are_in_flight",
            ENGINE + "test_counts_tell_what_is_in_flight_of_what_and_since_when",
            note="Exact, and dead letters are told apart.",
        ),
        here("'metrics'", ENGINE + "test_each_of_the_proposal_s_metrics_counts_what_it_says"),
        here("'the settings and their defaults'", EXAMPLES + "test_the_settings_have_the_values_of_the_pip"),
    ),
)
