"""An ordinary service: rows of many topics come due at random moments, each is received and acknowledged. Then SIGKILL.

    python -m benchmarks service                     with what is usual, beside the other measurements
    python -m benchmarks.service --seconds 600 --store slow --daemon ../before --standby

Nothing comes in large batches here: a row that comes due by itself is received by itself, and its acknowledgement is a
journal slot of its own. What is measured: lateness, CPU a row and a message of the daemon, slots, checkpoints, files,
memory, and the requests to a store that is slow; then the time from SIGKILL to the first hand-out of the daemon that is
started again, or of one that stood by, and how many slots it had to read.

Owns: the service, the kill, and the account: what was added comes, and what was acknowledged does not come again.
Does not own: the daemon process (`workbench`), a store that is slow (`slow_store`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import tarry
import tarry.aio
from benchmarks import alone, load, machine, report, shard_tips, side_process, slow_store, workbench
from examples import processes
from storage_backends import local_directory
from storage_backends.formats import names

NAME = "service"
STEP_MS = 10
START_S = 120.0
PATIENCE_S = 120.0
# Over this the rows of the last seconds are not all received when the daemon is killed.
DELAYS_MS, DELAYS_QUICK_MS = (1_000, 20_000), (200, 2_000)
ROWS_PER_LEDGER = 50_000
PERMITS = 10_000
# Rows that came while subscriptions were opened.
OPENING_S = 2
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
_NEVER = np.iinfo(np.int64).max
_OPENED = "ready"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load as numbers. Row n is of topic n modulo `topics`. `checkout`: whose daemon."""

    seconds: int
    topics: int
    subscriptions: int
    rows_per_s: int
    delays_ms: tuple[int, int]
    seed: int
    store: str = alone.LOCAL
    delay_ms: float = slow_store.DELAY_MS
    standby: bool = False
    checkout: Path = processes.REPOSITORY

    @property
    def rows(self) -> int:
        return self.rows_per_s * self.seconds

    @property
    def rows_per_step(self) -> int:
        return max(1, self.rows_per_s * STEP_MS // 1000)

    def delays(self) -> NDArray[np.int64]:
        return np.random.default_rng(self.seed).integers(*self.delays_ms, self.rows, endpoint=True)

    def names(self) -> list[tuple[str, str]]:
        """Topic and subscription."""
        return [
            (f"{NAME}-{topic}", f"dispatcher-{number}")
            for topic in range(self.topics)
            for number in range(self.subscriptions)
        ]


def run(bench: workbench.Workbench) -> report.Result:
    plan = Plan(
        seconds=bench.size(60, 3),
        topics=bench.size(20, 4),
        subscriptions=1,
        rows_per_s=bench.size(1_000, 300),
        delays_ms=DELAYS_QUICK_MS if bench.quick else DELAYS_MS,
        seed=bench.seed,
    )
    return measure(bench, plan)


def measure(bench: workbench.Workbench, plan: Plan) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({plan.store: functools.partial(_turn, bench, rounds, plan)})
    # Each sample's name ends with its unit.
    named = ((name, *name.rpartition(", ")[::2]) for name in rounds.names)
    figures = [dataclasses.replace(rounds.figure(name, unit), name=short) for name, short, unit in named]
    parameters: dict[str, report.Value] = {
        "seconds": plan.seconds,
        "topics": plan.topics,
        "subscriptions": plan.subscriptions,
        "rows_per_s": plan.rows_per_s,
        "delays_ms": " to ".join(map(str, plan.delays_ms)),
        "store": plan.store if plan.store == alone.LOCAL else f"{plan.delay_ms:g} ms a request",
        "after_sigkill": "takeover by a standby" if plan.standby else "restart",
    }
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


@dataclasses.dataclass(frozen=True, eq=False)
class Received:
    """What one process received: by row and subscription, how often; lateness in ms; which acknowledgements were
    answered. `messages`: hand-outs that it came in.
    """

    came: NDArray[np.int64]
    acknowledged: NDArray[np.bool_]
    lateness_ms: NDArray[np.int64]
    due_ms: NDArray[np.int64]
    messages: int


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan) -> Mapping[str, float]:
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        root = folder / "root"
        daemon = stack.enter_context(_daemon(bench, plan, folder, root, "tarryd"))
        bench.start(daemon)
        empty_bytes = daemon.usage().resident_bytes
        with (
            side_process.SideProcess(_receive, daemon.address, plan) as receiving,
            side_process.SideProcess(_add, daemon.address, plan) as adding,
        ):
            began_s, cpu_s, requests_from_s = time.perf_counter(), daemon.usage().cpu_s, slow_store.clock_s()
            adding.send("begin")
            answered: NDArray[np.bool_] = adding.result()
            seconds, cpu_s = time.perf_counter() - began_s, daemon.usage().cpu_s - cpu_s
            counts = {name: daemon.metric(metric, **labels) for name, (metric, labels) in _COUNTS.items()}
            if plan.store == alone.SLOW:
                asked = [
                    each.operation for each in slow_store.read_requests(folder / _REQUESTS, from_s=requests_from_s)
                ]
                counts |= {name: asked.count(name) for name in slow_store.OPERATIONS}
            journal_bytes = daemon.metric("tarry_journal_slot_bytes_sum")
            resident_bytes = daemon.usage().resident_bytes
            successor = daemon
            if plan.standby:
                successor = stack.enter_context(_daemon(bench, plan, folder, root, "standby"))
                with machine.on_core(bench.cores.server):
                    successor.start(START_S)
                successor.wait_for_log("waiting for daemon")
            daemon.kill()
            killed_s = time.perf_counter()
            receiving.send("end")
            before: Received = receiving.result()
        slots, files = _slots_to_read(plan, root), sum(1 for each in root.rglob("*") if each.is_file())
        if not plan.standby:
            killed_s = time.perf_counter()
            with machine.on_core(bench.cores.server):
                daemon.start(START_S)
        after, first_s = asyncio.run(_receive_rest(successor.address, plan, answered, before))
        _check(rounds, plan, answered, before, after)
    steady = before.due_ms > before.due_ms.min() + 1000 * OPENING_S if plan.seconds > OPENING_S * 2 else slice(None)
    lateness = np.percentile(before.lateness_ms[steady], list(QUANTILES.values()))
    rows = int(before.came.sum())
    return {
        **{f"lateness {quantile}, ms": float(value) for quantile, value in zip(QUANTILES, lateness, strict=True)},
        "CPU, %": 100 * cpu_s / seconds,
        "CPU a row received, us": 1e6 * cpu_s / rows,
        "CPU a message, us": 1e6 * cpu_s / before.messages,
        "rows a message, rows": rows / before.messages,
        **{f"{name} a second, 1/s": count / seconds for name, count in counts.items()},
        "journal a row received, B": journal_bytes / rows,
        "memory when empty, MB": empty_bytes / 1e6,
        "memory, MB": resident_bytes / 1e6,
        "files at the end, files": files,
        "slots to read, slots": slots,
        "SIGKILL to first hand-out, s" if plan.standby else "start to first hand-out, s": first_s - killed_s,
    }


_REQUESTS = "requests"
_COUNTS: dict[str, tuple[str, dict[str, str]]] = {
    "journal slots": ("tarry_journal_slot_seconds_count", {}),
    "checkpoints": ("tarry_commits_total", {"operation": "WriteCheckpoint", "outcome": "committed"}),
    "seals": ("tarry_commits_total", {"operation": "Seal", "outcome": "committed"}),
    "slots deleted": ("tarry_collected_objects_total", {"kind": "journal_slot"}),
}


@contextlib.contextmanager
def _daemon(
    bench: workbench.Workbench, plan: Plan, folder: Path, root: Path, name: str
) -> Iterator[processes.DaemonProcess]:
    slow = plan.store == alone.SLOW
    given = {**(slow_store.settings() if slow else processes.local_store(root)), **bench.settings}
    program = slow_store.program(root, plan.delay_ms, folder / _REQUESTS) if slow else processes.TARRYD
    with processes.DaemonProcess(name, folder, given, program=program, checkout=plan.checkout) as daemon:
        yield daemon


def _slots_to_read(plan: Plan, root: Path) -> int:
    """How many slots lie above what the newest checkpoints cover."""
    slots = 0
    with contextlib.closing(local_directory.LocalDirectory(root)) as store:
        for folder in sorted((root / "shards").iterdir()):
            shard = int(folder.name)
            newest = shard_tips.newest(store, shard)
            covered = 0 if newest is None else newest.replay_from
            listed = store.list(names.journal_prefix(shard))
            slots += sum(names.number_of(each.key) > covered for each in listed)
    return slots


def _check(
    rounds: workbench.Rounds, plan: Plan, answered: NDArray[np.bool_], before: Received, after: NDArray[np.int64]
) -> None:
    """`after`: how often each row came from the successor, by row and subscription."""
    lost = np.count_nonzero((before.came + after == 0) & answered[:, None])
    rounds.check(plan.store, f"{lost:,} rows that were added never came" if lost else None)
    again = np.count_nonzero(before.acknowledged & (after > 0))
    rounds.check(plan.store, f"{again:,} rows came again after their acknowledgement" if again else None)
    twice = np.count_nonzero((before.came > 1) | (after > 1))
    rounds.check(plan.store, f"{twice:,} rows came twice from one owner" if twice else None)
    early = np.count_nonzero(before.lateness_ms < 0)
    rounds.check(plan.store, f"{early:,} rows came early" if early else None)


# ---- the clients


def _position(rows: NDArray[np.int64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    return (rows // ROWS_PER_LEDGER).astype(np.uint64), (rows % ROWS_PER_LEDGER).astype(np.uint64)


def _rows_of(batch: tarry.Batch) -> NDArray[np.int64]:
    rows: NDArray[np.int64] = (batch.ledger_id * np.uint64(ROWS_PER_LEDGER) + batch.entry_id).astype(np.int64)
    return rows


def _add(address: str, plan: Plan, parent: Connection) -> None:
    """Is told when to begin; sends which rows were answered, once all were sent and nearly all answered."""
    answered = np.zeros(plan.rows, dtype=np.bool_)
    delays = plan.delays()
    clock = threading.Event()

    def note(rows: NDArray[np.int64], answer: Future[tarry.AddResult]) -> None:
        if answer.exception() is None:
            answered[rows] = True

    with tarry.Client(address) as client, contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(client.add_stream(f"{NAME}-{topic}", in_flight=10_000)) for topic in range(plan.topics)
        ]
        parent.send(_OPENED)
        parent.recv()
        began_s, step_rows = time.time(), plan.rows_per_step
        for step, first in enumerate(range(0, plan.rows, step_rows * plan.topics)):
            for topic, stream in enumerate(streams):
                # Each topic in its turn: no two of them have their requests at the same moment.
                at_s = began_s + (step * plan.topics + topic) * step_rows / plan.rows_per_s
                if (remaining_s := at_s - time.time()) > 0:
                    clock.wait(remaining_s)
                rows = np.arange(first + topic, min(first + step_rows * plan.topics, plan.rows), plan.topics)
                if len(rows):
                    due_ms = (load.now_ms() + delays[rows]).astype(np.uint64)
                    answer = stream.add(*_position(rows), deliver_at_ms=due_ms)
                    answer.add_done_callback(functools.partial(note, rows))
        for stream in streams:
            stream.flush()
        parent.send(answered)


class _Receiver:
    """All subscriptions, each row received and acknowledged at once, in one process."""

    def __init__(self, address: str, plan: Plan) -> None:
        shape = (plan.rows, plan.subscriptions)
        self.came = np.zeros(shape, dtype=np.int64)
        self.acknowledged = np.zeros(shape, dtype=np.bool_)
        self.lateness_ms: list[NDArray[np.int64]] = []
        self.due_ms: list[NDArray[np.int64]] = []
        self.messages = 0
        self.first_s = 0.0
        self._address = address
        self._plan = plan
        self._opened = 0

    async def run(self, end: asyncio.Event, opened: asyncio.Event) -> None:
        async with tarry.aio.Client(self._address) as client:
            tasks = [
                asyncio.create_task(self._serve(client, topic, name, end, opened)) for topic, name in self._plan.names()
            ]
            await asyncio.gather(*tasks)

    async def _serve(
        self, client: tarry.aio.Client, topic: str, name: str, end: asyncio.Event, opened: asyncio.Event
    ) -> None:
        number = int(name.rpartition("-")[2])
        async with client.subscribe(topic, name, create=True, permits=PERMITS) as subscription:
            self._opened += 1
            if self._opened == len(self._plan.names()):
                opened.set()
            ending = asyncio.ensure_future(end.wait())
            while not end.is_set():
                receiving = asyncio.ensure_future(subscription.receive(None))
                await asyncio.wait((receiving, ending), return_when=asyncio.FIRST_COMPLETED)
                if not receiving.done():
                    receiving.cancel()
                elif (batch := receiving.result()) is not None:
                    self._take(batch, number, subscription)

    def _take(self, batch: tarry.Batch, number: int, subscription: tarry.aio.Subscription) -> None:
        self.first_s = self.first_s or time.perf_counter()
        rows = _rows_of(batch)
        self.messages += 1
        np.add.at(self.came[:, number], rows, 1)
        self.due_ms.append(batch.deliver_at_ms.astype(np.int64))
        self.lateness_ms.append(batch.lateness_ms)
        subscription.ack(batch).add_done_callback(functools.partial(self._note, rows, number))

    def _note(self, rows: NDArray[np.int64], number: int, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            self.acknowledged[rows, number] = True


def _receive(address: str, plan: Plan, parent: Connection) -> None:
    """Sends that every subscription is open; is told to end, and sends what came."""
    asyncio.run(_receive_until_told(address, plan, parent))


async def _receive_until_told(address: str, plan: Plan, parent: Connection) -> None:
    receiver, end, opened = _Receiver(address, plan), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(receiver.run(end, opened))
    await asyncio.wait((running, asyncio.create_task(opened.wait())), return_when=asyncio.FIRST_COMPLETED)
    parent.send(_OPENED)
    asyncio.get_running_loop().add_reader(parent.fileno(), end.set)
    await end.wait()
    asyncio.get_running_loop().remove_reader(parent.fileno())
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    parent.send(
        Received(
            receiver.came,
            receiver.acknowledged,
            np.concatenate(receiver.lateness_ms),
            np.concatenate(receiver.due_ms),
            receiver.messages,
        )
    )


async def _receive_rest(
    address: str, plan: Plan, answered: NDArray[np.bool_], before: Received
) -> tuple[NDArray[np.int64], float]:
    """Receives until every row has come that is owed; how often each came, and when the first did."""
    receiver, end, opened = _Receiver(address, plan), asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(receiver.run(end, opened))
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not running.done():
        if not np.any((before.came + receiver.came == 0) & answered[:, None]):
            break
        await asyncio.sleep(0.1)
    # What is handed out again although it was acknowledged comes with the others.
    end.set()
    await running
    return receiver.came, receiver.first_s


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """The measurement with other sizes, another store, or the daemon of another checkout."""
    options = _parse(arguments)
    plan = Plan(
        seconds=options.seconds,
        topics=options.topics,
        subscriptions=options.subscriptions,
        rows_per_s=options.rate,
        delays_ms=(options.delays_ms[0], options.delays_ms[1]),
        seed=options.seed,
        store=options.store,
        delay_ms=options.delay_ms,
        standby=options.standby,
        checkout=options.daemon.resolve(),
    )
    measured = functools.partial(measure, plan=plan)
    return alone.run(options, measured, batch_rows=plan.rows_per_step, in_flight=1, seed=options.seed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = alone.parser(NAME, __doc__, store=alone.LOCAL)
    add = functools.partial(parser.add_argument, type=int)
    add("--seconds", default=60, help="of service before SIGKILL; default: %(default)s")
    add("--topics", default=20, help="default: %(default)s")
    add("--subscriptions", default=1, help="of each topic; default: %(default)s")
    add("--rate", default=1_000, help="rows a second over all topics; default: %(default)s")
    add("--delays-ms", nargs=2, default=DELAYS_MS, metavar=("LEAST", "MOST"), help="default: %(default)s")
    add("--seed", default=195, help="default: %(default)s")
    parser.add_argument("--standby", action="store_true", help="a daemon that stands by takes over")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
