"""A job that is overtaken: by another job, by the owner's own merges, by what happens to its sources, or by the floor
below which nothing that was begun may be named. It is refused or plans again, deletes nothing, and harms nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tarry
from tests._support.jobs import Action, Job, Jobs
from tests._support.processes import Daemons
from tests.batch.compaction._support import beside_a_daemon
from tests.batch.compaction._support.beside_a_daemon import Scene

RUNS = len(beside_a_daemon.SHAPES)
DONE, CONFLICTS = 0, 75
BEFORE_COMMIT = Action("compaction.before_commit", "stop")
ENGINES = ["local", "spark"]


@pytest.mark.long
def test_a_job_that_is_overtaken_in_each_way_is_refused_and_harms_nothing(
    daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=4) as scene:
        job = jobs.compact("local", action=Action("compaction.after_plan", "stop"))
        job.wait_until_stopped()
        jobs.compact("local", "--topic", "flights").expect(DONE)
        merge_by_owner(scene, "trains")
        # Of the topic that is left the floor alone changes. It rises since there is something to collect.
        scene.collect(scene.plant_orphans())
        job.resume()
        refused = check_refused(job, RUNS)
        assert {run["topic"] for run in refused} == set(beside_a_daemon.SHAPES)
        assert all("floor" in run["reason"] for run in refused if run["topic"] == "ferries"), refused
        left = scene.left_by_a_job()
        assert left.orphans, "a refused job deleted what it wrote"
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_of_two_jobs_one_merges_and_the_other_finds_its_sources_gone(
    engine: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=5) as scene:
        slow = jobs.compact(engine, action=BEFORE_COMMIT)
        slow.wait_until_stopped()
        fast = jobs.compact("local").expect(DONE)
        assert fast["runs"]["committed"] >= RUNS
        slow.resume()
        check_refused(slow, RUNS)
        left = scene.left_by_a_job()
        assert len(left.committed) >= RUNS
        assert len(left.orphans) >= RUNS, "a refused job deleted what it wrote"
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("engine", ENGINES)
def test_two_jobs_that_begin_together_merge_each_bucket_once(
    engine: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=6) as scene:
        both = [jobs.compact(engine) for _ in range(2)]
        for job in both:
            assert job.wait() in (DONE, CONFLICTS), job.log_text()
        merged = [
            source
            for job in both
            for run in job.summary()["run_results"]
            if run["outcome"] == "committed"
            for source in run["sources"]
        ]
        assert len(merged) == len(set(merged)), "a bucket was merged twice"
        left = scene.left_by_a_job()
        assert len(left.committed) >= 1
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
def test_a_job_that_the_owner_overtakes_with_merges_of_its_own_is_refused(
    daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=7) as scene:
        job = jobs.compact("local", action=BEFORE_COMMIT)
        job.wait_until_stopped()
        for topic in scene.topics:
            merge_by_owner(scene, topic.name)
        job.resume()
        check_refused(job, RUNS)
        left = scene.left_by_a_job()
        assert left.orphans, "a refused job deleted what it wrote"
        scene.collect(left.orphans)
        scene.go_on()
        scene.check_settled()


@pytest.mark.long
def test_a_job_that_is_slower_than_the_floor_is_refused_and_deletes_nothing(
    daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=8) as scene:
        # It has planned, and writes what it has planned when the floor is above it.
        job = jobs.compact("local", action=Action("compaction.after_plan", "stop"))
        job.wait_until_stopped()
        # Something is there to collect: the floor rises, and would not otherwise.
        scene.collect(scene.plant_orphans())
        job.resume()
        check_refused(job, RUNS, reason="floor")
        left = scene.left_by_a_job()
        assert len(left.orphans) >= RUNS, "a refused job deleted what it wrote"
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
def test_a_job_whose_object_was_collected_before_its_commit_is_refused(
    daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=9) as scene:
        job = jobs.compact("local", action=Action("compaction.after_wave", "stop"))
        job.wait_until_stopped()
        left = scene.left_by_a_job()
        assert len(left.orphans) == RUNS
        scene.collect(left.orphans)
        job.resume()
        check_refused(job, RUNS)
        scene.collect(scene.left_by_a_job().orphans)
        scene.finish()


@pytest.mark.long
def test_a_job_whose_topic_was_deleted_and_is_there_again_harms_neither(
    daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=10) as scene:
        job = jobs.compact("local", action=BEFORE_COMMIT)
        job.wait_until_stopped()
        born_again(scene)
        job.resume()
        assert job.wait() in (DONE, CONFLICTS), job.log_text()
        assert [run for run in job.summary()["run_results"] if run["outcome"] != "committed"], "nothing was refused"
        scene.go_on()
        scene.check_settled()


def born_again(scene: Scene) -> None:
    """One topic is deleted, and filled anew."""
    topic = scene.topics[0]
    topic.check_settled()
    scene.client.delete_topic(topic.name)
    scene.topics[0] = scene.open.enter_context(topic.born_again(scene.daemon.address))
    scene.topics[0].fill()
    scene.topics[0].begin()


def merge_by_owner(scene: Scene, topic: str) -> None:
    before = scene.client.stats(topic).buckets
    scene.client.set_policy(topic, tarry.TopicPolicy(max_num_buckets=2, merge_buckets_max=3))
    # By itself, or since it is asked to, whichever is first.
    left = scene.client.merge(topic, timeout_s=600).buckets
    assert left < before, "the owner merged nothing: the test shows nothing"
    scene.client.set_policy(topic, tarry.TopicPolicy(max_num_buckets=-1))


def check_refused(job: Job, runs: int, *, reason: str = "") -> list[dict[str, Any]]:
    """So many runs were refused, for that reason: these. The job says so, also where it planned the topic again."""
    status = job.wait()
    assert status in (DONE, CONFLICTS), job.log_text()
    refused = [run for run in job.summary()["run_results"] if run["outcome"] in ("refused", "replanned")]
    assert len(refused) >= runs, job.summary()
    assert all(reason in run["reason"] for run in refused), refused
    return refused
