"""What `policy` and `delete` send and print."""

from __future__ import annotations

import json

import grpc
import pytest

from tarry.cli import output, whole_topics
from tarry.v1 import admin_pb2, policy_pb2
from tests.client._support.fake_daemon import FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run

EFFECTIVE = policy_pb2.TopicPolicy(
    delay_max_ms=5_400_000, min_index_count_per_bucket=6, bucket_rows_max=7, bucket_bytes_max=8, bucket_age_max_ms=9,
    max_time_step_per_bucket_snapshot_segment_seconds=10, max_indexes_per_bucket_snapshot_segment=-1,
    min_indexes_per_bucket_snapshot_segment=11, bucket_form=policy_pb2.BUCKET_FORM_COLUMNAR,
    shared_index=True, max_num_buckets=50, merge_buckets_max=10, merge_rows_max=12, tick_ms=13, pending_rows_max=14,
    due_rows_per_second_max=15, client_rows_per_second_max=16, client_bytes_per_second_max=0,
    two_phase_deletion_enabled=True,
)  # fmt: skip
STORED = policy_pb2.TopicPolicy(bucket_rows_max=7, delay_max_ms=5)


@pytest.fixture
def with_policy(daemon: FakeDaemon) -> FakeDaemon:
    """Topic t has a policy: `STORED`."""
    daemon.script("GetTopicPolicy", answer(admin_pb2.GetTopicPolicyResponse(policy=STORED, effective=EFFECTIVE)))
    daemon.script("SetTopicPolicy", answer(admin_pb2.SetTopicPolicyResponse(effective=EFFECTIVE)))
    return daemon


def test_a_policy_is_shown_as_it_was_set_and_as_it_is_in_force(with_policy: FakeDaemon, run: Run) -> None:
    lines = run("policy", "t").stdout.splitlines()
    assert lines[:3] == ["field\tset\tin force", "delay_max_ms\t5ms\t1h30m", "min_index_count_per_bucket\t-\t6"]
    assert {"bucket_form\t-\tcolumnar", "shared_index\t-\ttrue"} <= set(lines)
    assert lines[-2:] == ["client_bytes_per_second_max\t-\t0", "two_phase_deletion_enabled\t-\ttrue"]
    parsed = json.loads(run("policy", "t", "--json").stdout)
    assert set(parsed["policy"]) == set(parsed["effective"]) == set(whole_topics.FIELDS)
    assert (parsed["policy"]["bucket_form"], parsed["effective"]["bucket_form"]) == (None, "columnar")
    assert with_policy.count("SetTopicPolicy") == 0


def test_what_is_set_and_unset_changes_nothing_else(with_policy: FakeDaemon, run: Run) -> None:
    result = run(
        "policy", "t", "--set", "bucket_age_max_ms=1h30m", "--set", "bucket_form=Compatible",
        "--set", "max_indexes_per_bucket_snapshot_segment=-1", "--unset", "delay_max_ms",
        "--set", "shared_index=false", "--set", "tick_ms=1s", "--set", "pending_rows_max=0",
        "--set", "two_phase_deletion_enabled=false",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    (asked,) = with_policy.requests("SetTopicPolicy")
    assert asked.policy == policy_pb2.TopicPolicy(
        bucket_rows_max=7, bucket_age_max_ms=5_400_000, bucket_form=policy_pb2.BUCKET_FORM_COMPATIBLE,
        max_indexes_per_bucket_snapshot_segment=-1, shared_index=False, tick_ms=1000, pending_rows_max=0,
        two_phase_deletion_enabled=False,
    )  # fmt: skip
    assert "bucket_form\tcompatible\tcolumnar" in result.stdout.splitlines()


def test_setting_a_field_makes_a_new_topic_and_unsetting_one_does_not(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetTopicPolicy", refuse(grpc.StatusCode.NOT_FOUND, "there is no topic 't'"))
    daemon.script("SetTopicPolicy", answer(admin_pb2.SetTopicPolicyResponse(effective=EFFECTIVE)))
    unset = run("policy", "t", "--unset", "delay_max_ms")
    assert unset.exit_code == output.EXIT_REFUSED
    assert "there is no topic 't'" in unset.stderr
    assert daemon.count("SetTopicPolicy") == 0
    assert run("policy", "t", "--set", "delay_max_ms=1").exit_code == 0
    (asked,) = daemon.requests("SetTopicPolicy")
    assert asked.policy == policy_pb2.TopicPolicy(delay_max_ms=1)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "bucket_rows_max"), "write NAME=VALUE"),
        (("--set", "bucket_rows_max="), "bucket_rows_max is an integer"),
        (("--set", "bucket_rows_max=1h"), "bucket_rows_max is an integer"),
        (("--set", "bucket_rows_max=1", "--set", "bucket_rows_max=2"), "bucket_rows_max is given twice"),
        (("--set", "bucket_rows_max=1", "--unset", "bucket_rows_max"), "it is set by the same command"),
        (("--set", "delay_max_ms=soon"), "--set delay_max_ms=soon: 'soon' is not a duration"),
        (("--set", "bucket_form=round"), "bucket_form is columnar or compatible"),
        (("--set", "bucket_form=unspecified"), "bucket_form is columnar or compatible"),
        (("--set", "two_phase_deletion_enabled=1"), "two_phase_deletion_enabled is true or false"),
        (("--set", "colour=red"), "there is no field 'colour'; there are delay_max_ms, "),
        (("--unset", "colour"), "'colour' is not one of"),
    ],
)
def test_a_wrong_change_is_told_and_nothing_is_sent(
    daemon: FakeDaemon, run: Run, arguments: tuple[str, ...], says: str
) -> None:
    result = run("policy", "t", *arguments)
    assert result.exit_code == output.EXIT_INPUT
    assert says in result.stderr
    assert daemon.calls == []


def test_a_value_that_the_field_cannot_hold_is_told(with_policy: FakeDaemon, run: Run) -> None:
    result = run("policy", "t", "--set", "bucket_rows_max=-1")
    assert result.exit_code == output.EXIT_INPUT
    assert "bucket_rows_max is -1" in result.stderr
    assert with_policy.count("SetTopicPolicy") == 0


def test_a_deletion_tells_what_left(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("DeleteTopic", answer(admin_pb2.DeleteTopicResponse(rows=2000, incarnation=3)))
    assert run("delete", "t", "--yes").stdout == "t is deleted with 2,000 rows\n"
    assert json.loads(run("delete", "t", "--yes", "--json").stdout) == {"topic": "t", "rows": 2000, "incarnation": 3}


def test_a_deletion_whose_answer_was_lost_is_done(daemon: FakeDaemon, run: Run) -> None:
    lost, gone = refuse(grpc.StatusCode.UNAVAILABLE), refuse(grpc.StatusCode.NOT_FOUND)
    daemon.script("DeleteTopic", lost, gone)
    assert run("delete", "t", "--yes").stdout == "t is deleted with its rows\n"
