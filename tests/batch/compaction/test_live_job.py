"""The real job beside a real daemon whose clients never rest: its 200 small buckets become few, no row is lost, doubled
or early, and Spark's own figures say that executors did the reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from examples import processes
from tests._support import jobs as jobs_support
from tests._support.jobs import Action, Job, Jobs
from tests._support.processes import Daemons
from tests.batch.compaction._support import live_topic, stored
from tests.batch.compaction._support.live_topic import LiveTopic, Shape

SHAPES = {
    # A seal puts a bucket between those that a run merges: not so often that a run never finds a gap.
    "flights": Shape(buckets=200, rows=100, seal_every=30, moves_filled=True),
    "trains": Shape(buckets=12, rows=100, seal_every=5, own=True),
}
SEED = 2026
# A run merges so many of those that were there, on average.
BUCKETS_PER_RUN_MIN = 4


@pytest.mark.long
@pytest.mark.parametrize("engine", ["spark", "local"])
def test_a_job_merges_what_a_daemon_serves_and_no_row_is_lost_doubled_or_early(
    engine: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    daemon = daemons.make("tarryd", {"daemon.shards": 2, **processes.local_store(root)})
    daemon.start_serving()
    with live_topic.filled(daemon.address, SHAPES, SEED) as topics:
        filled = {topic.name: topic.bucket_names() for topic in topics}
        for topic in topics:
            topic.begin()
        # However fast the job is, every topic changes between a plan and its commit, and two processes work.
        job = jobs.compact(engine, "--attempts", "10", action=Action("compaction.before_put", "stop"))
        job.wait_until_stopped()
        for topic in topics:
            topic.wait_for_turns(4)
        topics[0].wait_until(lambda: len(job.reads().keys() - {job.pid}) >= 2, "a second process works")
        job.resume()
        summary = job.expect(0)
        check_workers_did_the_reading(job, summary, filled)
        if engine == "spark":
            check_by_the_figures_of_spark(job, summary)

        for topic in topics:
            serve_what_was_merged(topic, summary, filled[topic.name])
        for topic in topics:
            topic.check_settled()

        # The same from what is stored alone.
        daemon.kill()
        daemon.start_serving()
        for topic in topics:
            topic.begin()
            topic.wait_for_turns(5)
            topic.check_settled()
    assert not stored.look(root).lost


def check_workers_did_the_reading(job: Job, summary: Mapping[str, Any], filled: Mapping[str, set[str]]) -> None:
    """Each bucket was read by the worker that the summary names, and none by the driver."""
    reads = job.reads()
    merged: set[str] = set()
    for run in committed(summary):
        sources = set(jobs_support.names_of(run["sources"]))
        assert not merged & sources, "a bucket was merged twice"
        merged |= sources
        assert sources <= reads[run["worker"]["pid"]], f"worker {run['worker']} did not read the sources of {run}"
    assert set().union(*filled.values()) <= merged, "some of the small buckets were not merged"
    assert not reads.get(job.pid, frozenset()) & merged, "the driver read what its executors are for"


def check_by_the_figures_of_spark(job: Job, summary: Mapping[str, Any]) -> None:
    """Exactly one task for each run, two at once."""
    every_task = job.spark_tasks()
    # Before the waves the engine may have had its workers started.
    stages = sorted({task.stage for task in every_task})[-summary["waves"] :]
    tasks = [task for task in every_task if task.stage in stages]
    done = [run for run in summary["run_results"] if run["worker"] is not None]
    assert all(task.succeeded and task.attempt == 0 for task in tasks), tasks
    assert len(tasks) == len(done), "a run is one task, and a task is one run"
    assert all(task.run_ms > 0 for task in tasks)
    assert jobs_support.most_at_once(tasks) >= 2, tasks


def serve_what_was_merged(topic: LiveTopic, summary: Mapping[str, Any], filled: set[str]) -> None:
    """The daemon serves the new buckets in place of the old ones; what is due in them is handed out."""
    runs = [run for run in committed(summary) if run["topic"] == topic.name]
    made = {stored.last_part(run["bucket"]) for run in runs}
    topic.seal()
    topic.wait_until(lambda: made <= topic.bucket_names(), "the daemon serves what was merged")
    assert not filled & topic.bucket_names()
    into = [run for run in runs if filled.intersection(jobs_support.names_of(run["sources"]))]
    assert len(into) * BUCKETS_PER_RUN_MIN <= len(filled)
    soon = topic.next_of_filled_buckets(4)
    topic.account.wait_until_owed_came(max(row[2] for row in soon) + 1)
    assert topic.account.came_of(soon), "no row of a merged bucket came: the test shows nothing"


def committed(summary: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [run for run in summary["run_results"] if run["outcome"] == "committed"]
