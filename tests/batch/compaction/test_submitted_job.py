"""The job by spark-submit itself, its code shipped by `--py-files`: what the exit status says, what stands on standard
output, and that it ends when it is told to.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from scripts import build_spark_env
from storage_backends.local_directory import LocalDirectory
from tests._support.jobs import Action, Job, Jobs
from tests._support.merging_process import MergingProcess
from tests.batch.engine._support import roots
from tests.batch.engine._support.roots import StoredTopic

BUCKETS = 8
DONE, ERROR, WRONG_OPTION, CONFLICTS = 0, 1, 2, 75


@pytest.fixture
def topic(root: Path) -> StoredTopic:
    """Eight small buckets, one run."""
    store = LocalDirectory(root)
    roots.make_root(store)
    made = StoredTopic(store, "flights")
    made.add(range(BUCKETS))
    return made


def submitted(jobs: Jobs, tmp_path: Path, *options: str, action: Action | None = None) -> Job:
    code = build_spark_env.write_code(tmp_path)
    return jobs.submit(*jobs.arguments(*options), spark_options=("--py-files", str(code)), action=action)


# The only test of `make test` with a Java.
def test_a_job_that_is_done_ends_in_0_and_its_summary_stands_alone_on_standard_output(
    jobs: Jobs, tmp_path: Path, topic: StoredTopic
) -> None:
    before = topic.waiting()
    job = submitted(jobs, tmp_path)
    summary = job.expect(DONE)
    job.wait_until_nothing_is_left()
    assert (summary["status"], summary["engine"], summary["parallelism"]) == ("done", "spark", 2)
    assert (summary["buckets_before"], summary["buckets_after"]) == (BUCKETS, 1)
    assert topic.waiting() == before


@pytest.mark.long
def test_a_job_that_leaves_conflicts_ends_in_75(jobs: Jobs, tmp_path: Path, topic: StoredTopic) -> None:
    before = topic.waiting()
    job = submitted(jobs, tmp_path, "--attempts", "1", action=Action("compaction.before_commit", "stop"))
    job.wait_until_stopped()
    other = MergingProcess(topic.store, topic.name, shard=topic.shard, now_ms=lambda: roots.NOW_MS)
    other.merge_run(2)
    job.resume()
    summary = job.expect(CONFLICTS)
    job.wait_until_nothing_is_left()
    assert (summary["status"], summary["runs"]["refused"]) == ("conflicts", 1)
    assert topic.waiting() == before


@pytest.mark.long
def test_a_damaged_bucket_ends_in_1_and_is_named(jobs: Jobs, tmp_path: Path, topic: StoredTopic) -> None:
    damaged = topic.tip().live[3].object.name
    topic.store.put(damaged, b"not a bucket")
    job = submitted(jobs, tmp_path)
    summary = job.expect(ERROR)
    assert summary["status"] == "error"
    assert damaged in job.log_text()


@pytest.mark.long
def test_a_root_that_is_not_there_ends_in_1(jobs: Jobs, tmp_path: Path, root: Path) -> None:
    job = submitted(jobs, tmp_path)
    assert job.wait() == ERROR
    assert str(root) in job.log_text()
    assert not root.exists(), "a job made a root"


@pytest.mark.long
def test_a_wrong_option_ends_in_2(jobs: Jobs, tmp_path: Path, topic: StoredTopic) -> None:
    job = submitted(jobs, tmp_path, "--max-sources", "1")
    assert job.wait() == WRONG_OPTION
    assert "--max-sources" in job.log_text()


@pytest.mark.long
def test_a_job_that_is_terminated_leaves_no_process_and_harms_nothing(
    jobs: Jobs, tmp_path: Path, topic: StoredTopic
) -> None:
    before = topic.waiting()
    job = submitted(jobs, tmp_path, action=Action("compaction.before_put", "stop"))
    worker = job.wait_until_stopped()
    os.kill(job.pid, signal.SIGTERM)
    os.kill(worker, signal.SIGCONT)
    assert job.wait() == 128 + signal.SIGTERM
    job.wait_until_nothing_is_left()
    assert topic.waiting() == before
