"""What `seal`, `merge` and `gc` send, show while they work, and print."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from tarry.cli import output, upkeep
from tarry.v1 import admin_pb2, inspect_pb2
from tests._support.patience import within_some_time
from tests.client._support.fake_daemon import WAIT_S, FakeDaemon, answer, refuse
from tests.client.cli.conftest import Run


def test_a_seal_tells_the_bucket(daemon: FakeDaemon, run: Run) -> None:
    sealed = admin_pb2.SealBucketResponse(rows=2000, bucket="shards/00/b")
    daemon.script("SealBucket", answer(sealed), answer(sealed), answer(admin_pb2.SealBucketResponse()))
    assert run("seal", "t").stdout == "sealed 2,000 rows of t into shards/00/b\n"
    assert json.loads(run("seal", "t", "--json").stdout) == {"topic": "t", "rows": 2000, "bucket": "shards/00/b"}
    assert run("seal", "t").stdout == "t has nothing to seal\n"


def test_a_merge_tells_how_many_buckets_there_are_now(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetTopicStats", answer(inspect_pb2.GetTopicStatsResponse(topic="t", buckets=2000)))
    done = admin_pb2.MergeBucketsResponse(merges=1, merged_buckets=3, buckets=5)
    daemon.script("MergeBuckets", answer(done), answer(done), answer(admin_pb2.MergeBucketsResponse(buckets=1)))
    assert run("merge", "t", "--buckets", "5").stdout == "merged t: 5 buckets now, 2,000 before\n"
    assert json.loads(run("merge", "t", "--json").stdout) == {
        "topic": "t", "buckets_before": 2000, "merges": 1, "merged_buckets": 3, "buckets": 5
    }  # fmt: skip
    assert run("merge", "t").stdout == "t has nothing to merge: 1 bucket\n"
    assert [request.buckets_max for request in daemon.requests("MergeBuckets")] == [5, 0, 0]


def test_a_merge_that_takes_long_is_asked_for_again_and_looked_at_meanwhile(
    daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "_LOOK_EVERY_S", 0.01)
    looked = threading.Event()

    def look(request: Any, context: grpc.ServicerContext) -> Any:
        if daemon.count("GetTopicStats") > 2:
            looked.set()
        return inspect_pb2.GetTopicStatsResponse(topic="t", buckets=9, merges=1)

    def merged(request: Any, context: grpc.ServicerContext) -> Any:
        assert looked.wait(WAIT_S)
        return admin_pb2.MergeBucketsResponse(buckets=5)

    daemon.script("GetTopicStats", look)
    daemon.script(
        "MergeBuckets", refuse(grpc.StatusCode.UNKNOWN, "merging has taken 60 s; the merge continues"), merged
    )
    result = run("merge", "t")
    assert (result.exit_code, result.stdout) == (0, "merged t: 5 buckets now, 9 before\n")
    assert daemon.count("MergeBuckets") == 2


def test_a_merge_ends_when_the_daemon_is_gone(daemon: FakeDaemon, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "_LOOK_EVERY_S", 0.01)
    counts = answer(inspect_pb2.GetTopicStatsResponse(topic="t"))
    daemon.script("GetTopicStats", counts, refuse(grpc.StatusCode.UNAVAILABLE, "stopping"))
    daemon.script("MergeBuckets", refuse(grpc.StatusCode.UNAVAILABLE, "stopping"))

    def story(seconds: float) -> None:
        result = run("merge", "t", "--timeout", str(seconds))
        assert result.exit_code == output.EXIT_UNREACHABLE
        assert "stopping" in result.stderr

    within_some_time(story)


def test_a_merge_of_no_topic_is_refused(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("GetTopicStats", refuse(grpc.StatusCode.NOT_FOUND, "there is no topic 't'"))
    assert run("merge", "t").exit_code == output.EXIT_REFUSED
    assert daemon.count("MergeBuckets") == 0


def step(*, done: bool = False, **counts: int) -> admin_pb2.CollectGarbageResponse:
    """Each kind with as many objects, of 10 bytes each."""
    summary = admin_pb2.GarbageSummary(
        **{kind: admin_pb2.GarbageCount(objects=objects, size_bytes=10 * objects) for kind, objects in counts.items()}
    )
    return admin_pb2.CollectGarbageResponse(
        shards_done=2 if done else 1, shards=2, topics_done=1, topics=1, summary=summary, done=done
    )


def steps(*answers: admin_pb2.CollectGarbageResponse) -> Any:
    return lambda request, context: iter(answers)


def test_a_collection_ends_with_a_table(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CollectGarbage", steps(step(), step(tombstones=2, journal_slots=3, waiting=100, done=True)))
    result = run("gc")
    assert result.exit_code == 0, result.output
    names, *lines = (line.split("\t") for line in result.stdout.splitlines())
    assert names == ["what", "objects", "bytes", "why"]
    assert [line[:3] for line in lines] == [
        ["tombstones", "2", "20"],
        ["orphans", "0", "0"],
        ["manifests", "0", "0"],
        ["journal slots", "3", "30"],
        ["waiting", "100", "1000"],
        ["failed", "0", "0"],
        ["given up", "0", "0"],
        ["refused", "0", "0"],
    ]
    assert lines[0][3].startswith("deleted: ")
    assert result.stderr == "tarry: 5 objects with 50 B are deleted, in 2 shards\n"
    assert daemon.requests("CollectGarbage") == [admin_pb2.CollectGarbageRequest()]


def test_a_dry_run_says_what_would_go_and_has_status_0(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CollectGarbage", steps(step(orphans=200, refused=1, given_up=1, done=True)))
    result = run("gc", "--dry-run", "--force", "--retry-dead")
    assert result.exit_code == 0
    assert "would go: no manifest ever named them" in result.stdout
    assert "200 objects with 2.0 kB would be deleted" in result.stderr
    assert daemon.requests("CollectGarbage") == [
        admin_pb2.CollectGarbageRequest(dry_run=True, force=True, retry_dead_objects=True)
    ]


@pytest.mark.parametrize(
    ("kind", "says"), [("refused", "`tarry gc --force`"), ("given_up", "`tarry gc --retry-dead`"), ("failed", "")]
)
def test_what_could_not_be_deleted_has_a_status_of_its_own(daemon: FakeDaemon, run: Run, kind: str, says: str) -> None:
    daemon.script("CollectGarbage", steps(step(done=True, **{kind: 1})))
    result = run("gc")
    assert result.exit_code == output.EXIT_NOT_ALL
    assert says in result.stderr


def test_each_step_is_a_line_of_json(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CollectGarbage", steps(step(tombstones=1), step(tombstones=2, done=True)))
    parsed = [json.loads(line) for line in run("gc", "--json").stdout.splitlines()]
    assert [(each["shards_done"], each["done"]) for each in parsed] == [(1, False), (2, True)]
    assert parsed[1]["tombstones"] == {"objects": 2, "size_bytes": 20}


def test_a_collection_that_fails_on_the_way_is_told(daemon: FakeDaemon, run: Run) -> None:
    def failing(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
        yield step()
        context.abort(grpc.StatusCode.UNAVAILABLE, "the store is gone")

    daemon.script("CollectGarbage", failing)
    result = run("gc")
    assert result.exit_code == output.EXIT_UNREACHABLE
    assert "the store is gone" in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("hints", "says"),
    [({"owner_address": "127.0.0.1:1"}, "not here: ask it with --address 127.0.0.1:1\n"), ({}, "not here\n")],
)
def test_a_daemon_that_may_not_collect_says_who_may(
    daemon: FakeDaemon, run: Run, hints: dict[str, str], says: str
) -> None:
    daemon.script("CollectGarbage", refuse(grpc.StatusCode.FAILED_PRECONDITION, "not here", **hints))
    result = run("gc", "--retry-dead")
    assert (result.exit_code, result.stderr) == (output.EXIT_REFUSED, f"tarry: {says}")


def test_an_end_without_the_last_step_is_no_success(daemon: FakeDaemon, run: Run) -> None:
    daemon.script("CollectGarbage", steps(step(tombstones=1)))
    result = run("gc")
    assert result.exit_code == output.EXIT_UNREACHABLE
    assert "run the command again" in result.stderr
