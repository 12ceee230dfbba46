"""Measures a restart after SIGKILL at ten million pending: to the first delivery, and to all topics served.

Every round starts from the same root, as the killed daemon left it. A topic is served when it answers with its counts.
Redis loads its AOF, as it was written and rewritten, until it answers with the due members. `tarry_load` and
`redis_load` send the rows.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import tarry
from benchmarks import load, machine, redis_load, report, tarry_load, workbench
from examples import processes
from tests.brokers import redis_server

NAME = "restart"
SUBSCRIPTION = "dispatcher"
TOPICS = 16
DUE_ROWS = 1_000
DUE_TOPIC = "restart-0"
DUE_DELAY_MS = 1_000
FIRST, ALL = "tarry, first hand-out", "tarry, all topics served"
START_S = 60.0


def run(bench: workbench.Workbench) -> report.Result:
    count = bench.size(10_000_000, 64_000)
    rounds = workbench.Rounds(bench, NAME)
    with bench.folder() as folder, bench.daemon(folder / "root") as daemon:
        _fill(bench, rounds, daemon, count)
        daemon.kill()
        (folder / "root").rename(folder / "left")
        time.sleep(DUE_DELAY_MS / 1000)
        rounds.run({"tarry": functools.partial(_tarry, bench, rounds, daemon, folder, count)})
    if bench.redis is not None:
        _redis(bench, rounds, count)
    goals = {FIRST: report.Goal(most=1), ALL: report.Goal(most=2)}
    parameters = {"rows": count, "topics": TOPICS, "due_rows": DUE_ROWS} | bench.parameters
    return report.Result(NAME, parameters, rounds.figures("s", goals), rounds.problems, bench.notes)


def _topics(count: int) -> dict[str, int]:
    """Return the number of rows by topic."""
    return {f"{NAME}-{number}": count // TOPICS for number in range(TOPICS)}


def _fill(bench: workbench.Workbench, rounds: workbench.Rounds, daemon: processes.DaemonProcess, count: int) -> None:
    """Fill all topics, and last add some rows that are due when the daemon is started again."""
    bench.say(f"{NAME}: adding {count:,} rows")
    with tarry.Client(daemon.address) as client:
        client.create_subscription(DUE_TOPIC, SUBSCRIPTION)
        for number, (topic, rows) in enumerate(_topics(count).items()):
            added = tarry_load.add(
                client,
                topic,
                load.in_order(load.over_a_day(rows, seed=bench.seed + number)),
                batch_rows=bench.batch_rows,
                in_flight=bench.in_flight,
            )
            rounds.check_count(f"tarry, {topic}", added.accepted, rows)
        first_ledger = count // load.ROWS_PER_LEDGER
        client.add(DUE_TOPIC, first_ledger, list(range(DUE_ROWS)), delay_ms=DUE_DELAY_MS)


def _tarry(
    bench: workbench.Workbench, rounds: workbench.Rounds, daemon: processes.DaemonProcess, folder: Path, count: int
) -> Mapping[str, float]:
    daemon.kill()
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(folder / "left", root)
    # The daemon synchronises the files that it finds: it must not wait for the copy.
    os.sync()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        began_s = time.perf_counter()
        with machine.on_core(bench.cores.server):
            daemon.start(START_S)
        with tarry.Client(daemon.address, timeout_s=START_S) as client:
            first = threads.submit(_first_hand_out, rounds, client)
            served = threads.submit(_all_served, rounds, client, _topics(count))
            return {FIRST: first.result() - began_s, ALL: served.result() - began_s}


def _first_hand_out(rounds: workbench.Rounds, client: tarry.Client) -> float:
    """Return when the first rows arrived. All due rows must arrive."""
    drain = tarry_load.Drain(DUE_ROWS)
    with client.subscribe(DUE_TOPIC, SUBSCRIPTION, permits=tarry_load.PERMITS) as subscription:
        drain.run(subscription)
    return drain.first_received_s


def _all_served(rounds: workbench.Rounds, client: tarry.Client, topics: Mapping[str, int]) -> float:
    """Return when the last topic had answered."""
    for topic, rows in topics.items():
        stats = client.stats(topic)
        # Rows that are due may not have been delivered yet.
        missing = rows - stats.pending
        rounds.check(f"tarry, {topic}", f"{missing:,} rows are missing after a restart" if missing > 0 else None)
    return time.perf_counter()


def _redis(bench: workbench.Workbench, rounds: workbench.Rounds, count: int) -> None:
    bench.say(f"{NAME}: adding {count:,} rows to redis")
    rows = load.in_order(load.over_a_day(count, seed=bench.seed))
    requests = redis_load.variadic(rows, bench.batch_rows)
    with bench.rival("everysec") as server:
        added, _ = redis_load.fill(server.port, requests, in_flight=bench.in_flight)
        rounds.check_count("redis", added, count)
        due = {f"due-{number}": load.now_ms() for number in range(DUE_ROWS)}
        server.client.zadd(redis_load.KEY, due)
        # A kill of the process takes nothing from the page cache, but its own buffer is written once a second.
        time.sleep(2.0)
        rounds.run({"redis, AOF": functools.partial(_redis_turn, bench, rounds, server, count, "redis, AOF")})
        server.rewrite()
        name = "redis, AOF rewritten"
        rounds.run({name: functools.partial(_redis_turn, bench, rounds, server, count, name)})


def _redis_turn(
    bench: workbench.Workbench, rounds: workbench.Rounds, server: redis_server.RedisServer, count: int, name: str
) -> Mapping[str, float]:
    server.kill()
    began_s = time.perf_counter()
    bench.start_redis(server)
    server.wait_until_loaded()
    due: Sequence[object] = server.client.zrangebyscore(redis_load.KEY, "-inf", load.now_ms(), 0, DUE_ROWS)
    seconds = time.perf_counter() - began_s
    rounds.check_count(f"{name}, due", len(due), DUE_ROWS)
    rounds.check_count(f"{name}, held", int(server.client.zcard(redis_load.KEY)), count + DUE_ROWS)
    return {name: seconds}
