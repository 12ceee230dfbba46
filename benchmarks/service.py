"""Measures an ordinary service: rows of many topics come due at random moments, then SIGKILL.

    python -m benchmarks service                     with the usual sizes, among the other measurements
    python -m benchmarks.service --mode plain --topics 100 --rate 6000 --layers --stacks service.folded
    python -m benchmarks.service --seconds 600 --store slow --daemon ../before --standby

Rows come due a few at a time, and each is received and acknowledged. The daemon has a core, its clients have the
others. The figures are lateness; CPU a row and a message of the daemon, by layer on request; the longest pause of its
loop; slots, checkpoints, files, memory; and the requests to a slow store. Then the daemon is killed: the time from
SIGKILL to the first delivery of the daemon that is started again, or of a standby, and how many slots it had to read.

Every added row must arrive, and none again after its acknowledgement. `service_load` has the rows, `service_clients`
the clients, `cpu_layers` the layers, `slow_store` the slow store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks import (
    alone,
    cpu_layers,
    machine,
    report,
    sampled_program,
    service_clients,
    shard_tips,
    side_process,
    slow_store,
    workbench,
)
from benchmarks.service_clients import Added, Received
from benchmarks.service_load import NAME, Load, Mode
from examples import processes
from storage_backends import local_directory

START_S = 120.0
PATIENCE_S = 300.0
# With longer delays the rows of the last seconds are not all received when the daemon is killed.
DELAYS_MS, DELAYS_QUICK_MS = (1_000, 20_000), (200, 3_000)
# Rows received while subscriptions were opened (seconds)
OPENING_S = 2
# The time until every process has begun (seconds)
LEAD_S = 0.2
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
_REQUESTS, _SAMPLES = "requests", "samples"


@dataclasses.dataclass(frozen=True)
class Plan:
    """The load, and the daemon under it.

    `checkout` is that of the daemon. With `layers` the daemon is sampled; `stacks` is the file for its stacks.
    """

    load: Load
    store: str = alone.LOCAL
    delay_ms: float = slow_store.DELAY_MS
    standby: bool = False
    checkout: Path = processes.REPOSITORY
    layers: bool = False
    stacks: Path | None = None


def run(bench: workbench.Workbench) -> report.Result:
    load = Load(
        seconds=bench.size(60, 3),
        topics=bench.size(20, 4),
        subscriptions=1,
        rows_per_s=bench.size(1_000, 100),
        delays_ms=DELAYS_QUICK_MS if bench.quick else DELAYS_MS,
        seed=bench.seed,
        # A quick run has the features that a full one leaves to the options.
        mode=Mode.PLAIN if bench.quick else Mode.DEFAULT,
        one_by_one=bench.quick,
        clients=bench.size(2, 1),
    )
    return measure(bench, Plan(load, layers=bench.quick))


def measure(bench: workbench.Workbench, plan: Plan) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({plan.store: functools.partial(_turn, bench, rounds, plan)})
    # Each sample's name ends with its unit.
    named = ((name, *name.rpartition(", ")[::2]) for name in rounds.names)
    figures = [dataclasses.replace(rounds.figure(name, unit), name=short) for name, short, unit in named]
    load = plan.load
    parameters: dict[str, report.Value] = {
        "mode": load.mode.value,
        "seconds": load.seconds,
        "topics": load.topics,
        "subscriptions": load.subscriptions,
        "rows_per_s": load.rows_per_s,
        "added": "one by one" if load.one_by_one else f"{load.rows_a_request} at a time",
        "beside": "one topic at full speed" if load.bulk else "nothing",
        "delays_ms": " to ".join(map(str, load.delays_ms)),
        "client_processes": load.clients * 2,
        "store": plan.store if plan.store == alone.LOCAL else f"{plan.delay_ms:g} ms a request",
        "after_sigkill": "takeover by a standby" if plan.standby else "restart",
    }
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The work of a daemon while rows were added.

    `counted` are counts by name, each with the unit of the count divided by the seconds. `layers` are CPU times
    (seconds), empty unless requested. `longest_pause_s` is an upper bound for its event loop.
    """

    seconds: float
    cpu_s: float
    clients_cpu_s: float
    longest_pause_s: float
    counted: Mapping[str, float]
    layers: Mapping[str, float]


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan) -> Mapping[str, float]:
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        root = folder / "root"
        daemon = stack.enter_context(_daemon(bench, plan, folder, root, "tarryd"))
        bench.start(daemon)
        empty_bytes = daemon.usage().resident_bytes
        clients = stack.enter_context(_Clients(bench, daemon.address, plan.load))
        added, served = _serve(plan, daemon, clients, folder)
        if added.refusals:
            bench.say(f"{NAME}: rows were not added: {', '.join(sorted(added.refusals))}")
        resident_bytes = daemon.usage().resident_bytes
        successor = daemon
        if plan.standby:
            successor = stack.enter_context(_daemon(bench, plan, folder, root, "standby"))
            with machine.on_core(bench.cores.server):
                successor.start(START_S)
            successor.wait_for_log("waiting for daemon")
        daemon.kill()
        killed_s = time.perf_counter()
        before = clients.end()
        slots, files = _slots_to_read(root), [each for each in root.rglob("*") if each.is_file()]
        disk_bytes = sum(each.stat().st_blocks * 512 for each in files)
        if not plan.standby:
            killed_s = time.perf_counter()
            with machine.on_core(bench.cores.server):
                daemon.start(START_S)
        after, first_s = asyncio.run(_receive_rest(successor.address, plan.load, added.answered, before))
        _check(rounds, plan.store, added.answered, before, after)
    began = "SIGKILL" if plan.standby else "start"
    return {
        **_as_received(plan.load, added, before),
        **_as_served(served, before),
        "memory when empty, MB": empty_bytes / 1e6,
        "memory, MB": resident_bytes / 1e6,
        "files at the end, files": len(files),
        "disk at the end, MB": disk_bytes / 1e6,
        "slots to read, slots": slots,
        **({f"{began} to first hand-out, s": first_s - killed_s} if first_s else {}),
    }


def _as_received(load: Load, added: Added, received: Received) -> dict[str, float]:
    """Return the clients' figures, or none for a service without rows."""
    if not load.rows:
        return {}
    steady = received.due_ms > received.due_ms.min() + 1000 * OPENING_S if load.seconds > OPENING_S * 2 else slice(None)
    lateness = np.percentile(received.lateness_ms[steady], list(QUANTILES.values()))
    took = np.percentile(added.took_ms, list(QUANTILES.values())) if len(added.took_ms) else ()
    return {
        **{f"lateness {quantile}, ms": float(value) for quantile, value in zip(QUANTILES, lateness, strict=True)},
        **{
            f"adds answered within {quantile}, ms": float(value)
            for quantile, value in zip(QUANTILES, took, strict=False)
        },
        "requests sent late p99, ms": float(np.percentile(added.sent_late_ms, 99)),
        "rows that were not added, rows": int(np.count_nonzero(~added.answered)),
    }


def _as_served(served: Served, received: Received) -> dict[str, float]:
    """Return the figures of cost."""
    rows, messages = int(received.came.sum()), received.messages
    counted = {name: value / served.seconds for name, value in served.counted.items()}
    counted["longest pause of the loop at most, ms"] = 1000 * served.longest_pause_s
    if not rows:
        return {"CPU, %": 100 * served.cpu_s / served.seconds, **counted}
    return {
        "CPU, %": 100 * served.cpu_s / served.seconds,
        "CPU a row received, us": 1e6 * served.cpu_s / rows,
        "CPU a message, us": 1e6 * served.cpu_s / messages,
        **{f"CPU of {layer} a row, us": 1e6 * used_s / rows for layer, used_s in served.layers.items()},
        **{f"CPU of {layer} a message, us": 1e6 * used_s / messages for layer, used_s in served.layers.items()},
        "clients' CPU, %": 100 * served.clients_cpu_s / served.seconds,
        "rows a message, rows": rows / messages,
        "rows received a second, 1/s": rows / served.seconds,
        **counted,
        "log a row received, B": served.counted["log a second, B"] / rows,
    }


class _Clients:
    """The clients; a context manager, inside which every subscription is open.

    Clients have every core but the daemon's.
    """

    def __init__(self, bench: workbench.Workbench, address: str, load: Load) -> None:
        parts = range(load.clients)
        self._cores = bench.cores
        self._receiving = [side_process.SideProcess(service_clients.receive, address, load, part) for part in parts]
        self._adding = [side_process.SideProcess(service_clients.add, address, load, part) for part in parts]
        self._bulk = [side_process.SideProcess(service_clients.add_bulk, address)] if load.bulk else []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> _Clients:
        with machine.beside_server(self._cores), contextlib.ExitStack() as stack:
            for process in (*self._receiving, *self._adding, *self._bulk):
                stack.enter_context(process)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def receiving_cpu_s(self) -> float:
        """The CPU time of the receiving processes (seconds)."""
        return sum(process.cpu_s for process in self._receiving)

    def add(self) -> tuple[Added, float]:
        """Add all rows; return when all were answered, and how many a second were added at full speed meanwhile."""
        began_s = time.time() + LEAD_S
        for process in (*self._adding, *self._bulk):
            process.send(began_s)
        added = Added.joined([process.result() for process in self._adding])
        for process in self._bulk:
            process.send("end")
        return added, sum(process.result() for process in self._bulk)

    def end(self) -> Received:
        """End receiving."""
        for process in self._receiving:
            process.send("end")
        return Received.joined([process.result() for process in self._receiving])


def _serve(plan: Plan, daemon: processes.DaemonProcess, clients: _Clients, folder: Path) -> tuple[Added, Served]:
    from_s, clients_s, cpu_s = slow_store.clock_s(), clients.receiving_cpu_s, daemon.usage().cpu_s
    threads, before, beats = cpu_layers.read_threads(daemon.pid), _counts(daemon), _beats(daemon)
    added, bulk_rows_per_s = clients.add()
    until_s, cpu_s = slow_store.clock_s(), daemon.usage().cpu_s - cpu_s
    clients_s = added.cpu_s + clients.receiving_cpu_s - clients_s
    used = cpu_layers.read_threads(daemon.pid).since(threads)
    counted = {name: count - before[name] for name, count in _counts(daemon).items()}
    pause_s = longest_pause_s(beats, _beats(daemon))
    if plan.load.bulk:
        counted["rows added at full speed, 1/s"] = bulk_rows_per_s * (until_s - from_s)
    if plan.store == alone.SLOW:
        requests = slow_store.read_requests(folder / _REQUESTS, from_s=from_s, until_s=until_s)
        asked = [each.operation for each in requests]
        counted |= {f"{name} a second, 1/s": asked.count(name) for name in slow_store.OPERATIONS}
    layers: Mapping[str, float] = {}
    if plan.layers:
        stacks = list(sampled_program.read_stacks(folder / _SAMPLES, from_s, until_s))
        layers = cpu_layers.by_layer(stacks, used)
        if plan.stacks is not None:
            plan.stacks.write_text(cpu_layers.folded(stacks, used))
    return added, Served(until_s - from_s, cpu_s, clients_s, pause_s, counted, layers)


def _counts(daemon: processes.DaemonProcess) -> dict[str, float]:
    """Return the daemon's counts so far, as in `Served.counted`."""
    return {name: daemon.metric(metric, **labels) for name, (metric, labels) in _COUNTS.items()}


def _beats(daemon: processes.DaemonProcess) -> dict[float, float]:
    """Return the number of beats of the event loop that were at most so late, by the bound (seconds)."""
    return {float(labels["le"]): count for labels, count in daemon.samples("tarry_event_loop_pause_seconds_bucket")}


def longest_pause_s(before: Mapping[float, float], after: Mapping[float, float]) -> float:
    """Return the lowest bound that every beat between two readings kept (seconds)."""
    meanwhile = {bound_s: count - before.get(bound_s, 0.0) for bound_s, count in after.items()}
    return min(bound_s for bound_s, count in meanwhile.items() if count == meanwhile[float("inf")])


_COUNTS: dict[str, tuple[str, dict[str, str]]] = {
    "log slots a second, 1/s": ("tarry_journal_slot_seconds_count", {}),
    "log a second, B": ("tarry_journal_slot_bytes_sum", {}),
    "checkpoints a second, 1/s": ("tarry_commits_total", {"operation": "WriteCheckpoint", "outcome": "committed"}),
    "seals a second, 1/s": ("tarry_commits_total", {"operation": "Seal", "outcome": "committed"}),
    "slots deleted a second, 1/s": ("tarry_collected_objects_total", {"kind": "journal_slot"}),
}


@contextlib.contextmanager
def _daemon(
    bench: workbench.Workbench, plan: Plan, folder: Path, root: Path, name: str
) -> Iterator[processes.DaemonProcess]:
    slow = plan.store == alone.SLOW
    given = {**(slow_store.settings() if slow else processes.local_store(root)), **bench.settings}
    program = slow_store.program(root, plan.delay_ms, folder / _REQUESTS) if slow else processes.TARRYD
    if plan.layers:
        program = sampled_program.program(folder / _SAMPLES, program)
    with processes.DaemonProcess(name, folder, given, program=program, checkout=plan.checkout) as daemon:
        yield daemon


def _slots_to_read(root: Path) -> int:
    """Return how many log slots a successor reads that the newest checkpoints do not cover."""
    shards = [int(folder.name) for folder in sorted((root / "shards").iterdir())]
    with contextlib.closing(local_directory.LocalDirectory(root)) as store:
        return shard_tips.slots_to_read(store, shards)


def _check(
    rounds: workbench.Rounds, who: str, answered: NDArray[np.bool_], before: Received, after: NDArray[np.int64]
) -> None:
    """Check the account.

    `after` counts how often each row came from the successor, by row and subscription.
    """
    lost = np.count_nonzero((before.came + after == 0) & answered[:, None])
    rounds.check(who, f"{lost:,} rows that were added never came" if lost else None)
    again = np.count_nonzero(before.acknowledged & (after > 0))
    rounds.check(who, f"{again:,} rows came again after their acknowledgement" if again else None)
    twice = np.count_nonzero((before.came > 1) | (after > 1))
    rounds.check(who, f"{twice:,} rows came twice from one owner" if twice else None)
    early = np.count_nonzero(before.lateness_ms < 0)
    rounds.check(who, f"{early:,} rows came early" if early else None)


async def _receive_rest(
    address: str, load: Load, answered: NDArray[np.bool_], before: Received
) -> tuple[NDArray[np.int64], float]:
    """Receive until every row has come that is owed.

    Returns how often each came, and when the first did, or 0 if none came.
    """
    receiver = service_clients.Receiver(address, load, part=0, parts=1)
    running = asyncio.create_task(receiver.run(Mode.DEFAULT))
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and not running.done():
        # A row that is delivered again although it was acknowledged comes with the others.
        if not np.any((before.came + receiver.came == 0) & answered[:, None]):
            break
        await asyncio.sleep(0.1)
    await service_clients.ended(running)
    return receiver.came, receiver.first_s


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure with other sizes, another store, or the daemon of another checkout."""
    options = _parse(arguments)
    load = Load(
        seconds=options.seconds,
        topics=options.topics,
        subscriptions=options.subscriptions,
        rows_per_s=options.rate,
        delays_ms=(options.delays_ms[0], options.delays_ms[1]),
        seed=options.seed,
        mode=Mode(options.mode),
        one_by_one=options.one_by_one,
        clients=options.clients,
        bulk=options.bulk,
    )
    plan = Plan(
        load,
        store=options.store,
        delay_ms=options.delay_ms,
        standby=options.standby,
        checkout=options.daemon.resolve(),
        layers=options.layers or options.stacks is not None,
        stacks=options.stacks,
    )
    measured = functools.partial(measure, plan=plan)
    return alone.run(options, measured, batch_rows=load.rows_a_request, in_flight=1, seed=options.seed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = alone.parser(NAME, __doc__, store=alone.LOCAL)
    add = functools.partial(parser.add_argument, type=int)
    add("--seconds", default=60, help="of service before SIGKILL; default: %(default)s")
    add("--topics", default=20, help="default: %(default)s")
    add("--subscriptions", default=1, help="of each topic; default: %(default)s")
    add("--rate", default=1_000, help="rows a second over all topics, 0 for none; default: %(default)s")
    add("--delays-ms", nargs=2, default=DELAYS_MS, metavar=("LEAST", "MOST"), help="default: %(default)s")
    add("--clients", default=2, help="processes that receive, and as many that add; default: %(default)s")
    add("--seed", default=195, help="default: %(default)s")
    more = parser.add_argument
    more("--mode", choices=[*Mode], default=Mode.DEFAULT, help="; ".join(f"{each}: {WHAT[each]}" for each in Mode))
    more("--one-by-one", action="store_true", help="a call for each row that is added; otherwise a request every 10 ms")
    more("--bulk", action="store_true", help="beside them rows are added to one topic more, as fast as it takes them")
    more("--standby", action="store_true", help="a daemon that stands by takes over")
    more("--layers", action="store_true", help="CPU by layer: the daemon's loop is sampled, which costs it a hundredth")
    more("--stacks", type=Path, metavar="FILE", help="the same, and what was seen of the last round, for a flame graph")
    return parser.parse_args(arguments)


WHAT = {
    Mode.DEFAULT: "what the client library does by itself",
    Mode.JOINED: "the same on the wire, by a client that makes no objects of what comes",
    Mode.PLAIN: "a stream for each subscription, an acknowledgement for each message",
}


if __name__ == "__main__":
    sys.exit(main())
