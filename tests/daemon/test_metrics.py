"""Series, their labels and the endpoint."""

from __future__ import annotations

import math
import re
import urllib.request
from pathlib import Path

import numpy as np
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from daemon import errors, metrics, metrics_endpoint
from storage_backends.formats.slot_format import DeadLetterReason

REPOSITORY = Path(metrics.__file__).resolve().parent.parent


def numbers(topic: str, *, pending: int = 1, oldest_due_age_s: float = 0.0) -> metrics.TopicNumbers:
    return metrics.TopicNumbers(
        topic=topic,
        pending=pending,
        mutable_rows=2,
        loaded_rows=3,
        buckets=4,
        bucket_bytes=5,
        backlog=6,
        in_flight=7,
        leased=8,
        nacked=10,
        dead_letters=11,
        dead_letters_full=1,
        rebuild_needed=9,
        key_shared_consumers=13,
        key_shared_waiting=14,
        draining_hashes=15,
        nack_blocked_hashes=16,
        oldest_due_age_s=oldest_due_age_s,
        pending_by_level={5: 12},
        ledgers=17,
        lowest=(18, 19),
    )


def used() -> metrics.Metrics:
    """Metrics with every series in use."""
    everything = metrics.Metrics()
    everything.collect_topics_from(lambda: [numbers("t")])
    everything.added("t", accepted=5, duplicates=1, returned=2, late_on_arrival=3, refused=4)
    everything.added_in_order("t", in_due_order=4, others=1)
    everything.level_handed_out("t", 5, np.array([3, 4, 90]))
    everything.acknowledged("t", acknowledged=4, ignored=1)
    everything.handed_out("t", np.array([8, 9, 10], np.uint64), np.array([0, 1, 0], np.uint32), now_ms=10)
    everything.nacked("t", nacked=6, dead_lettered=2, ignored=1)
    everything.ack_timed_out("t", rows=5)
    everything.redelivered(np.array([3, 70]))
    everything.trimmed("t", rows=2, of_subscription=True)
    everything.withdrawn("t", "cancelled", rows=5, not_found=1, already_due=2, in_flight=3)
    everything.withdrawn("t", "rescheduled", rows=4, not_found=0, already_due=1, in_flight=0)
    everything.planned("t", sent=4, held=2)
    everything.key_blocked("t", rows=7)
    everything.taken_back("t", rows=2)
    everything.lease_over("t", rows=3)
    everything.dead_lettered("t", DeadLetterReason.TOO_OFTEN, rows=4)
    everything.dead_lettered("t", DeadLetterReason.REJECTED, rows=2)
    everything.dead_lettered("t", DeadLetterReason.TRIMMED, rows=1)
    everything.dead_letters_left("t", "replayed", rows=3)
    everything.dead_letters_left("t", "purged", rows=1)
    everything.topic_deleted()
    everything.set_files_refused("certificates", True)
    everything.collect_expiry_from(lambda setting: math.nan)
    everything.caller_refused(errors.PermissionDenied("no"))
    everything.slot_written(size_bytes=1000, seconds=0.003)
    everything.commit("seal", "committed", conflicts=2)
    everything.collect_store_requests_from(lambda: {"GET": 7, "LIST": 2})
    everything.store_error("put", "StoreUnavailable")
    everything.damage_found("bucket")
    everything.topic_failed()
    everything.shard_lost("failed")
    everything.set_topics(loaded=3, loading=2, damaged=1)
    everything.set_shards_damaged(1)
    everything.bucket_operation("create", "succeed", seconds=0.05)
    everything.merge_ended("merged", seconds=0.5)
    everything.merged(buckets=3, rows=10, read_bytes=100, written_bytes=70)
    everything.set_epoch(3, 7)
    everything.set_serving(True)
    everything.event_loop_paused(0.004)
    everything.clock_stepped("back")
    everything.quota_refused("t", "pending")
    everything.dead_letters_full("t", rows=3)
    everything.set_store_clock_skew(-0.5)
    everything.collect_store_probe_from(lambda: True)
    everything.recovered(seconds=0.2, rows_replayed=100)
    everything.collected("orphan", objects=2, size_bytes=700)
    everything.collection_failed(failed=2, given_up=1)
    everything.set_orphans_refused(3, 900)
    everything.deletions.set_orphans("archive", 4)
    return everything


def test_events_are_counted() -> None:
    sample = used().registry.get_sample_value
    assert sample("tarry_add_rows_total", {"topic": "t", "result": "accepted"}) == 5
    assert sample("tarry_add_rows_total", {"topic": "t", "result": "duplicate"}) == 1
    assert sample("tarry_add_rows_total", {"topic": "t", "result": "returned"}) == 2
    assert sample("tarry_add_rows_total", {"topic": "t", "result": "refused"}) == 4
    assert sample("tarry_add_late_on_arrival_rows_total", {"topic": "t"}) == 3
    assert sample("tarry_add_in_due_order_rows_total", {"topic": "t"}) == 4
    assert sample("tarry_add_sorted_rows_total", {"topic": "t"}) == 1
    assert sample("tarry_level_pending_rows", {"topic": "t", "level": "5"}) == 12
    assert sample("tarry_level_lateness_seconds_bucket", {"topic": "t", "level": "5", "le": "0.005"}) == 2
    assert sample("tarry_acknowledge_rows_total", {"topic": "t", "result": "ignored"}) == 1
    for result, rows in (("nacked", 6), ("dead_lettered", 2), ("ignored", 1)):
        assert sample("tarry_nack_rows_total", {"topic": "t", "result": result}) == rows
    assert sample("tarry_ack_timeout_rows_total", {"topic": "t"}) == 5
    assert sample("tarry_redelivery_lateness_seconds_bucket", {"le": "0.005"}) == 1
    assert sample("tarry_handed_out_rows_total", {"topic": "t"}) == 3
    for result, rows in (("cancelled", 5), ("not_found", 1), ("already_due", 2), ("in_flight", 3)):
        assert sample("tarry_cancel_rows_total", {"topic": "t", "result": result}) == rows
    for result, count in (("rescheduled", 4), ("not_found", None), ("already_due", 1), ("in_flight", None)):
        assert sample("tarry_reschedule_rows_total", {"topic": "t", "result": result}) == count
    assert sample("tarry_dead_lettered_rows_total", {"topic": "t", "reason": "too_often"}) == 4
    assert sample("tarry_dead_lettered_rows_total", {"topic": "t", "reason": "rejected"}) == 2
    assert sample("tarry_dead_lettered_rows_total", {"topic": "t", "reason": "trimmed"}) == 1
    assert sample("tarry_dead_letters_full_rows_total", {"topic": "t"}) == 3
    assert sample("tarry_dead_letters_full", {"topic": "t"}) == 1
    assert sample("tarry_dead_letter_replayed_rows_total", {"topic": "t"}) == 3
    assert sample("tarry_dead_letter_purged_rows_total", {"topic": "t"}) == 1
    for outcome, rows in (("sent", 4), ("held", 2)):
        assert sample("tarry_key_shared_planned_rows_total", {"topic": "t", "outcome": outcome}) == rows
    assert sample("tarry_key_shared_blocked_rows_total", {"topic": "t"}) == 7
    assert sample("tarry_key_shared_taken_back_rows_total", {"topic": "t"}) == 2
    assert sample("tarry_commits_total", {"operation": "seal", "outcome": "committed"}) == 1
    assert sample("tarry_commit_conflicts_total", {"operation": "seal"}) == 2
    assert sample("tarry_store_requests_total", {"kind": "GET"}) == 7
    assert sample("tarry_store_requests_total", {"kind": "LIST"}) == 2
    assert sample("tarry_store_errors_total", {"operation": "put", "kind": "StoreUnavailable"}) == 1
    assert sample("tarry_damage_found_total", {"kind": "bucket"}) == 1
    assert sample("tarry_quota_refused_requests_total", {"topic": "t", "quota": "pending"}) == 1
    assert sample("tarry_clock_step_total", {"direction": "back"}) == 1
    assert sample("tarry_store_clock_skew_seconds") == -0.5
    assert sample("tarry_store_probed") == 1
    assert sample("tarry_topics", {"state": "loading"}) == 2
    assert sample("tarry_shards_damaged", {}) == 1
    assert sample("tarry_epoch", {"shard": "3"}) == 7
    assert sample("tarry_serving") == 1
    assert sample("tarry_recovery_rows_replayed_total") == 100
    assert sample("tarry_event_loop_pause_seconds_bucket", {"le": "0.003"}) == 0
    assert sample("tarry_event_loop_pause_seconds_bucket", {"le": "0.005"}) == 1
    assert sample("tarry_journal_slot_bytes_count") == 1


def test_bucket_operations_have_the_labels_and_bounds_of_pip_195() -> None:
    sample = used().registry.get_sample_value
    name = "tarry_delayed_message_index_bucket_op"
    assert sample(f"{name}_count_total", {"state": "succeed", "type": "create"}) == 1
    for bound in ("0.05", "0.1", "0.5", "1.0", "5.0", "30.0", "60.0", "+Inf"):
        assert sample(f"{name}_latency_seconds_bucket", {"type": "create", "le": bound}) == 1


def test_gauges_of_topics_are_read_when_prometheus_asks() -> None:
    current = [numbers("t", pending=1)]
    gauges = metrics.Metrics()
    gauges.collect_topics_from(lambda: current)
    sample = gauges.registry.get_sample_value
    assert sample("tarry_pending_rows", {"topic": "t"}) == 1
    current[:] = [numbers("t", pending=9)]
    assert sample("tarry_pending_rows", {"topic": "t"}) == 9
    assert sample("tarry_delayed_message_index_bucket_total", {"topic": "t"}) == 4
    assert sample("tarry_delayed_message_index_loaded", {"topic": "t"}) == 3
    assert sample("tarry_delayed_message_index_bucket_snapshot_size_bytes", {"topic": "t"}) == 5
    assert sample("tarry_retained_ledgers", {"topic": "t"}) == 17
    assert sample("tarry_retained_lowest_ledger", {"topic": "t"}) == 18
    assert sample("tarry_retained_lowest_entry", {"topic": "t"}) == 19


def test_the_engine_is_not_asked_when_its_gauges_are_registered() -> None:
    def refuse() -> list[metrics.TopicNumbers]:
        raise AssertionError("asked")

    metrics.Metrics().collect_topics_from(refuse)


def test_topics_over_the_cap_share_one_label() -> None:
    capped = metrics.Metrics(per_topic_max=2)
    capped.collect_topics_from(
        lambda: [
            numbers(name, pending=10, oldest_due_age_s=age) for name, age in (("a", 1), ("b", 2), ("c", 5), ("d", 4))
        ]
    )
    for topic in ("a", "b", "c", "d", "a"):
        capped.acknowledged(topic, acknowledged=1, ignored=0)
    sample = capped.registry.get_sample_value
    label = {"result": "acknowledged"}
    assert sample("tarry_acknowledge_rows_total", label | {"topic": "a"}) == 2
    assert sample("tarry_acknowledge_rows_total", label | {"topic": "_other"}) == 2
    assert sample("tarry_acknowledge_rows_total", label | {"topic": "c"}) is None
    assert sample("tarry_pending_rows", {"topic": "_other"}) == 20
    assert sample("tarry_oldest_due_seconds", {"topic": "_other"}) == 5


def test_series_of_topics_can_be_switched_off() -> None:
    off = metrics.Metrics(per_topic=False)
    off.collect_topics_from(lambda: [numbers("a"), numbers("b")])
    off.handed_out("a", np.zeros(4, np.uint64), None, now_ms=10)
    sample = off.registry.get_sample_value
    assert sample("tarry_handed_out_rows_total", {"topic": "_all"}) == 4
    assert sample("tarry_pending_rows", {"topic": "_all"}) == 2
    assert sample("tarry_pending_rows", {"topic": "a"}) is None


@given(columns=st.lists(st.lists(st.integers(0, 5_000_000), max_size=30), max_size=5))
def test_a_column_is_counted_like_its_values_one_by_one(columns: list[list[int]]) -> None:
    ours = metrics.Metrics()
    registry = prometheus_client.CollectorRegistry()
    now_ms = 10_000_000
    theirs = prometheus_client.Histogram("h", "h", registry=registry, buckets=metrics.LATENESS_BOUNDS_S)
    for column in columns:
        ours.handed_out("t", now_ms - np.array(column, np.uint64), None, now_ms=now_ms)
        for value in column:
            theirs.observe(value / 1000)
    for bound in [*map(str, metrics.LATENESS_BOUNDS_S), "+Inf"]:
        assert ours.registry.get_sample_value("tarry_lateness_seconds_bucket", {"le": bound}) == (
            registry.get_sample_value("h_bucket", {"le": bound})
        )
    assert ours.registry.get_sample_value("tarry_lateness_seconds_count") == registry.get_sample_value("h_count")
    assert ours.registry.get_sample_value("tarry_lateness_seconds_sum") == pytest.approx(
        registry.get_sample_value("h_sum")
    )


def test_the_endpoint_serves_what_prometheus_reads() -> None:
    endpoint = metrics_endpoint.Endpoint(used().registry, host="127.0.0.1", port=0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=600) as answer:
            families = {family.name: family.type for family in text_string_to_metric_families(answer.read().decode())}
    finally:
        endpoint.close()
    assert families["tarry_lateness_seconds"] == "histogram"
    assert families["tarry_delayed_message_index_bucket_total"] == "gauge"


# Series of the job that compacts, in a file of its own.
OF_JOBS = "tarry_compaction_"


def test_an_alarm_is_raised_by_series_that_are_exported() -> None:
    rules = (REPOSITORY / "deploy" / "alerts.yml").read_text(encoding="utf-8")
    exported = {sample.name for family in used().registry.collect() for sample in family.samples}
    assert {name for name in re.findall(r"tarry_\w+", rules) if not name.startswith(OF_JOBS)} <= exported


def test_the_document_lists_every_series_with_its_type_and_labels() -> None:
    document = (REPOSITORY / "docs" / "METRICS.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(tarry_\w+)` \| (counter|gauge|histogram) \| ([\w, ]*)\|", document, re.MULTILINE)
    listed = {
        name: (kind, {label.strip() for label in labels.split(",") if label.strip()})
        for name, kind, labels in rows
        if not name.startswith(OF_JOBS)
    }
    exported = {}
    for family in used().registry.collect():
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        suffix = "_total" if family.type == "counter" else ""
        exported[f"{family.name}{suffix}"] = (family.type, labels)
    assert listed == exported


# What leans on the series before: a HELP text is shown beside its own name alone.
LEANING = re.compile(r"(their|these|those|they|it|of (that|these|those|the)|the (same|others?)|as)\b", re.IGNORECASE)


def test_every_meaning_stands_alone() -> None:
    meanings = {family.name: family.documentation for family in used().registry.collect()}
    assert {name: meaning for name, meaning in meanings.items() if LEANING.match(meaning)} == {}
    document = (REPOSITORY / "docs" / "METRICS.md").read_text(encoding="utf-8")
    described = re.findall(r"^\| `(tarry_\w+)` \| \w+ \|[\w, ]*\| (.+) \|$", document, re.MULTILINE)
    assert described
    assert [(name, meaning) for name, meaning in described if LEANING.match(meaning)] == []


@pytest.mark.parametrize("meaning", ["Their bytes.", "of these, rows at a dispatcher", "The others.", "It failed."])
def test_a_meaning_that_leans_on_another_is_found(meaning: str) -> None:
    assert LEANING.match(meaning)
