"""Work on Spark: a task of Spark for each piece of work, and what is said when one fails. In a real session."""

from __future__ import annotations

import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from py4j import protocol as proto
from py4j.java_gateway import GatewayClient, GatewayParameters
from pyspark.sql import SparkSession

from batch.engine import engine_port, spark_engine, spark_session
from tests._support import spark as spark_support


@dataclass(frozen=True)
class Piece:
    number: int
    folder: str = ""


def squared(piece: Piece) -> tuple[int, int]:
    return piece.number**2, os.getpid()


def refused_for_two(piece: Piece) -> int:
    if piece.number == 2:
        raise ValueError(f"piece {piece.number} is not to be had")
    return piece.number


def marked_and_endless(piece: Piece) -> int:
    Path(piece.folder, str(piece.number)).touch()
    time.sleep(3_600)
    return piece.number


def ended_by_itself(piece: Piece) -> int:
    if piece.number == 2:
        os._exit(9)
    return piece.number


class Stopped(Exception):
    """What a caller raises to end a run."""


def not_told(_: int) -> None:
    return


@pytest.fixture
def workers(spark: SparkSession) -> Iterator[spark_engine.SparkEngine]:
    with spark_engine.SparkEngine.of_session(spark) as opened:
        yield opened


def test_each_piece_is_one_task_of_one_stage_and_its_result_comes_back_with_its_place(
    spark: SparkSession, workers: spark_engine.SparkEngine
) -> None:
    told: list[int] = []
    before = set(stages(spark))
    results = dict(workers.run(squared, [Piece(number) for number in range(7)], told.append))
    assert {place: square for place, (square, _) in results.items()} == {place: place**2 for place in range(7)}
    ran = {stage: tasks for stage, tasks in stages(spark).items() if stage not in before}
    assert list(ran.values()) == [7], "a second action would do the work twice"
    assert os.getpid() not in {process for _, process in results.values()}
    assert told == sorted(told)
    assert told[-1] == 7


def test_as_many_tasks_run_at_once_as_the_session_has_cores(workers: spark_engine.SparkEngine, tmp_path: Path) -> None:
    assert workers.parallelism == 2

    def stop_when_both_run(_: int) -> None:
        if len(list(tmp_path.iterdir())) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        list(workers.run(marked_and_endless, [Piece(number, str(tmp_path)) for number in range(4)], stop_when_both_run))


def test_a_run_that_its_caller_leaves_is_cancelled_and_the_next_one_has_the_cores(
    spark: SparkSession, workers: spark_engine.SparkEngine, tmp_path: Path
) -> None:
    def stop_when_one_runs(_: int) -> None:
        if any(tmp_path.iterdir()):
            raise Stopped

    with pytest.raises(Stopped):
        list(workers.run(marked_and_endless, [Piece(number, str(tmp_path)) for number in range(2)], stop_when_one_runs))
    assert not spark.sparkContext.statusTracker().getActiveJobsIds()
    assert [place for place, _ in workers.run(squared, [Piece(3)], not_told)] == [0]


def test_no_pieces_are_no_action(spark: SparkSession, workers: spark_engine.SparkEngine) -> None:
    before = stages(spark)
    assert list(workers.run(squared, [], not_told)) == []
    assert stages(spark) == before


def test_what_a_piece_raises_ends_the_run_with_one_line_and_is_not_tried_again(
    workers: spark_engine.SparkEngine, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(engine_port.WorkFailed) as raised:
        list(workers.run(refused_for_two, [Piece(number) for number in range(4)], not_told))
    assert str(raised.value) == "task 2: ValueError: piece 2 is not to be had"
    assert "in refused_for_two" in caplog.text, "the worker's own trace is in the log"


def test_the_loss_of_a_worker_is_said_in_one_line(workers: spark_engine.SparkEngine) -> None:
    with pytest.raises(engine_port.WorkFailed) as raised:
        list(workers.run(ended_by_itself, [Piece(number) for number in range(4)], not_told))
    message = str(raised.value)
    assert "Python worker exited unexpectedly" in message
    assert "\n" not in message
    assert "\tat " not in message


def test_a_run_may_be_made_in_another_thread(workers: spark_engine.SparkEngine) -> None:
    results: list[tuple[int, tuple[int, int]]] = []
    thread = threading.Thread(target=lambda: results.extend(workers.run(squared, [Piece(4), Piece(5)], not_told)))
    thread.start()
    thread.join(60)
    assert sorted((place, square) for place, (square, _) in results) == [(0, 16), (1, 25)]


def test_the_session_has_what_the_jobs_depend_on_and_keeps_to_this_machine(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    assert {key: conf.get(key) for key in spark_session.REQUIRED} == spark_session.REQUIRED
    assert {key: conf.get(key) for key in spark_session.LOCAL_DEFAULTS} == spark_session.LOCAL_DEFAULTS
    assert conf.get("spark.eventLog.enabled") == "true", "what the operator configured counts"
    assert spark.sparkContext.uiWebUrl is None


@pytest.mark.parametrize("master", ["local", "local[4]", "local[*]", "local-cluster[2,1,1024]"])
def test_these_masters_are_this_machine(master: str) -> None:
    assert spark_session.is_local(master)


@pytest.mark.parametrize("master", ["spark://local:7077", "yarn", "k8s://https://local", ""])
def test_these_masters_are_others(master: str) -> None:
    assert not spark_session.is_local(master)


def test_a_parallelism_beside_a_master_is_refused() -> None:
    refused = spark_engine.SparkEngine("tests", master="spark://cluster:7077", parallelism=3)
    with pytest.raises(engine_port.EngineUnusable, match="--parallelism 3 applies to this machine alone"), refused:
        pass


def test_a_connection_that_java_resets_is_told_by_the_error_alone(caplog: pytest.LogCaptureFixture) -> None:
    """As if Java died between a call and its answer: the server has read a part of the call when it resets."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            accepted, _ = server.accept()
            accepted.recv(1)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            accepted.close()

        dying = threading.Thread(target=reset, daemon=True)
        dying.start()
        client = GatewayClient(gateway_parameters=GatewayParameters(port=server.getsockname()[1]))
        with spark_session.losses_without_traces():
            assert client.send_command("c\n", retry=False) == proto.ERROR
            logging.getLogger().warning("another message")
        dying.join()
    assert [record.getMessage() for record in caplog.records] == ["another message"]


LOSING_JAVA = """\
import os, signal
from pyspark import SparkContext
from batch.engine import engine_port, spark_engine
from tests.batch.engine import test_spark_engine as pieces

def kill_java_when_both_run(ended):
    if len(os.listdir(".")) == 2:
        os.kill(SparkContext._gateway.proc.pid, signal.SIGKILL)

with spark_engine.SparkEngine("loses Java", parallelism=2) as workers:
    cores = workers.parallelism
    for _ in range(2):
        try:
            tasks = [pieces.Piece(number, os.getcwd()) for number in range(2)]
            list(workers.run(pieces.marked_and_endless, tasks, kill_java_when_both_run))
        except engine_port.WorkFailed as failure:
            print(failure)
    print(workers.parallelism == cores)
"""


@pytest.mark.long
def test_the_loss_of_java_is_said_in_one_line_and_the_job_goes_on_to_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "pieces"
    folder.mkdir()
    environment = {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path(__file__).resolve().parents[3]),
        **spark_support.environment(tmp_path / "spark"),
    }
    run = subprocess.run(
        [sys.executable, "-c", LOSING_JAVA],
        env=environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    during, afterwards, same_cores = run.stdout.splitlines()
    assert during.startswith(("Spark gave up: ", "Spark's Java process died: "))
    assert afterwards.startswith("Spark's Java process died: ")
    assert same_cores == "True"
    assert "Traceback" not in run.stderr


def stages(spark: SparkSession) -> dict[int, int]:
    """By id, the number of tasks of each stage that this session has had and still knows."""
    # Spark has no Python for it.
    gateway: Any = spark.sparkContext._gateway
    store = spark.sparkContext._jsc.sc().statusStore()
    listed = store.stageList(None, False, False, gateway.new_array(gateway.jvm.double, 0), None)
    found = gateway.jvm.scala.jdk.javaapi.CollectionConverters.asJava(listed)
    return {stage.stageId(): stage.numTasks() for stage in found}
