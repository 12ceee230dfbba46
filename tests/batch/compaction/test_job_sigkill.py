"""A job is killed at each named point of its driver and of its tasks, and so are its workers and its Java: what it
leaves is orphans, the daemon serves on, collection removes them, and a later job does the rest.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests._support.jobs import Action, Jobs
from tests._support.processes import Daemons
from tests.batch.compaction._support import beside_a_daemon
from tests.batch.compaction._support.beside_a_daemon import Left

RUNS = len(beside_a_daemon.SHAPES)
ENGINES = ("spark", "local")
_, AFTER_PUT = TASK_POINTS = ("compaction.before_put", "compaction.after_put")
# What the job has written when its driver dies there, and what of it is committed, at least and at most.
DRIVER_POINTS = {
    "compaction.after_plan": ((0, 0), (0, 0)),
    "compaction.after_wave": ((RUNS, RUNS), (0, 0)),
    "compaction.before_commit": ((1, RUNS), (0, 0)),
    "compaction.after_commit": ((1, RUNS), (1, 1)),
    # What was sealed meanwhile may have had a topic planned again.
    "compaction.before_summary": ((RUNS, 3 * RUNS), (RUNS, 3 * RUNS)),
}
SHORT = ("spark", "compaction.before_commit")
CASES = [
    pytest.param(engine, point, marks=() if (engine, point) == SHORT else pytest.mark.long, id=f"{engine}-{point}")
    for engine in ENGINES
    for point in (*DRIVER_POINTS, *TASK_POINTS)
]
KILLED = -signal.SIGKILL


@pytest.mark.parametrize(("engine", "point"), CASES)
def test_a_driver_that_is_killed_leaves_orphans_alone_and_a_later_job_does_the_rest(
    engine: str, point: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=1) as scene:
        job = jobs.compact(engine, action=Action(point, "kill" if point in DRIVER_POINTS else "kill-driver"))
        assert job.wait() == KILLED
        job.wait_until_nothing_is_left()
        assert not job.output_text(), "a job that was killed says nothing"

        left = scene.left_by_a_job()
        check_written(point, left)
        scene.collect(left.orphans)
        scene.go_on()
        scene.finish()


def check_written(point: str, left: Left) -> None:
    """Each run has at most one object, since each task ran once."""
    if point in DRIVER_POINTS:
        written, committed = DRIVER_POINTS[point]
    else:
        # The worker that dies with the driver is at its first task; the other one goes on for a moment.
        written, committed = (int(point == AFTER_PUT), RUNS), (0, 0)
    assert written[0] <= len(left.orphans | left.committed) <= written[1], left
    assert committed[0] <= len(left.committed) <= committed[1], left


@pytest.mark.long
@pytest.mark.parametrize("point", TASK_POINTS)
def test_the_task_of_a_spark_worker_that_is_killed_is_done_again_and_its_first_object_is_an_orphan(
    point: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=2) as scene:
        # A task may fail three times.
        job = jobs.compact("spark", action=Action(point, "kill"), master="local[2,4]")
        summary = job.expect(0)
        job.wait_until_nothing_is_left()

        tasks = job.spark_tasks()
        assert sum(task.succeeded for task in tasks) >= RUNS
        assert any(not task.succeeded for task in tasks), "no task failed: the test shows nothing"
        left = scene.left_by_a_job()
        assert len(left.committed) >= RUNS
        assert summary["runs"]["committed"] == len(left.committed)
        if point == AFTER_PUT:
            assert left.orphans, "the object of the attempt that died is not there"
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_job_whose_local_worker_is_killed_says_so_and_harms_nothing(
    point: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=3) as scene:
        job = jobs.compact("local", action=Action(point, "kill"))
        assert job.wait() == 1
        job.wait_until_nothing_is_left()
        assert "worker process died" in job.log_text()

        left = scene.left_by_a_job()
        scene.collect(left.orphans)
        scene.finish()


@pytest.mark.long
@pytest.mark.parametrize("point", TASK_POINTS)
def test_a_job_whose_java_is_killed_says_so_and_harms_nothing(
    point: str, daemons: Daemons, jobs: Jobs, root: Path
) -> None:
    with beside_a_daemon.scene(daemons, jobs, root, seed=4) as scene:
        job = jobs.compact("spark", action=Action(point, "stop"))
        worker = job.wait_until_stopped()
        for pid in [pid for pid, command in job.processes().items() if "org.apache.spark" in command]:
            os.kill(pid, signal.SIGKILL)
        os.kill(worker, signal.SIGCONT)
        assert job.wait() == 1
        job.wait_until_nothing_is_left()

        left = scene.left_by_a_job()
        assert not left.committed
        scene.collect(left.orphans)
        scene.finish()
