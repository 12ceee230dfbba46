"""Rows a second that are added one by one through a producer, and become durable in batches, each with its own future.

One client process on its core: one thread, eight threads, an event loop. Whoever adds has at most `OUTSTANDING` rows
unanswered, and reads the result of every row: of the oldest one before it adds another.

Owns: the contenders. Does not own: the producer (`tarry.Producer`).
"""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import tarry
import tarry.aio
from benchmarks import load, report, workbench

NAME = "producer"
OUTSTANDING = 10_000
THREADS = 8
ONE_THREAD, MANY_THREADS, EVENT_LOOP = "one thread", f"{THREADS} threads", "event loop"
GOALS = {ONE_THREAD: report.Goal(least=150e3)}


def run(bench: workbench.Workbench) -> report.Result:
    rows = bench.size(1_000_000, 20_000)
    rounds = workbench.Rounds(bench, NAME)
    contenders: dict[str, Callable[[str, int, int], int]] = {
        ONE_THREAD: functools.partial(_in_threads, 1),
        MANY_THREADS: functools.partial(_in_threads, THREADS),
        EVENT_LOOP: _on_loop,
    }
    rounds.run({name: functools.partial(_turn, bench, rounds, rows, name, add) for name, add in contenders.items()})
    figures = []
    for name in contenders:
        figures += [rounds.figure(name, "rows/s", GOALS.get(name)), rounds.figure(_cpu(name), "us/row")]
        figures.append(rounds.figure(_server_cpu(name), "us/row"))
    return report.Result(NAME, {"rows": rows, "outstanding": OUTSTANDING} | bench.parameters, figures, rounds.problems)


def _cpu(name: str) -> str:
    return f"{name}: client's CPU"


def _server_cpu(name: str) -> str:
    return f"{name}: server's CPU"


def _turn(
    bench: workbench.Workbench, rounds: workbench.Rounds, rows: int, name: str, add: Callable[[str, int, int], int]
) -> Mapping[str, float]:
    with bench.daemon() as daemon:
        before, began_s, began_cpu_s = daemon.usage(), time.perf_counter(), time.process_time()
        added = add(daemon.address, rows, bench.batch_rows)
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        server_cpu_s = daemon.usage().cpu_s - before.cpu_s
        with tarry.Client(daemon.address) as client:
            pending = client.stats(NAME).pending
    rounds.check_count(f"{name}, added", added, rows)
    rounds.check_count(f"{name}, pending", pending, rows)
    return {name: rows / seconds, _cpu(name): cpu_s / rows * 1e6, _server_cpu(name): server_cpu_s / rows * 1e6}


def _in_threads(threads: int, address: str, rows: int, batch_rows: int) -> int:
    """How many rows were stored."""
    added = [0] * threads
    due_ms = load.now_ms() + load.DAY_MS

    def add(producer: tarry.Producer, ledger: int) -> None:
        waiting: collections.deque[Future[tarry.Added]] = collections.deque()
        stored = 0
        for entry in range(rows // threads):
            if len(waiting) == OUTSTANDING // threads:
                stored += not waiting.popleft().result().returned
            waiting.append(producer.add(ledger, entry, deliver_at_ms=due_ms))
        added[ledger] = stored + sum(not answer.result().returned for answer in waiting)

    with (
        tarry.Client(address) as client,
        client.producer(NAME, batch_rows=batch_rows, max_outstanding=OUTSTANDING) as producer,
    ):
        adding = [threading.Thread(target=add, args=(producer, ledger)) for ledger in range(threads)]
        for each in adding:
            each.start()
        for each in adding:
            each.join()
    return sum(added)


def _on_loop(address: str, rows: int, batch_rows: int) -> int:
    """As `_in_threads`, from one task."""

    async def add() -> int:
        due_ms = load.now_ms() + load.DAY_MS
        waiting: collections.deque[asyncio.Future[tarry.Added]] = collections.deque()
        stored = 0
        async with (
            tarry.aio.Client(address) as client,
            client.producer(NAME, batch_rows=batch_rows, max_outstanding=OUTSTANDING) as producer,
        ):
            for entry in range(rows):
                if len(waiting) == OUTSTANDING:
                    stored += not (await waiting.popleft()).returned
                waiting.append(await producer.add(0, entry, deliver_at_ms=due_ms))
            for answer in waiting:
                stored += not (await answer).returned
        return stored

    return asyncio.run(add())
