"""Measures how long a client is without answers when the owner is killed or stopped next to a standby.

    python -m benchmarks gaps --rounds 10

The client is given both addresses, that of the owner first. One thread adds rows one by one, another receives them.
The gap is the longest time between two answers, or two deliveries, around the fault. What is beyond the takeover, by
the standby's log, is the client's own. Logs are files for SIGKILL and objects for SIGSTOP, because files are not taken
over while their process lives. Every answered row must arrive.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import tarry
from benchmarks import machine, report, takeover, workbench
from examples import processes
from tests._support.patience import wait_until

NAME = "gaps"
TOPIC, SUBSCRIPTION = "gaps", "dispatcher"
START_S = 300.0
PATIENCE_S = 300.0
# Time of service before the fault, and after the first answer behind it (seconds)
BEFORE_S = 2.0
AFTER_S = 3.0
PAUSE_S = 0.01
# Seconds beyond the takeover
BEYOND_S = 1.0
FAULTS: Mapping[str, tuple[str, Callable[[processes.DaemonProcess], None]]] = {
    "SIGKILL": ("files", processes.DaemonProcess.kill),
    "SIGSTOP": ("objects", processes.DaemonProcess.stop),
}


def run(bench: workbench.Workbench) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({fault: functools.partial(_turn, bench, rounds, fault) for fault in FAULTS})
    goals = {name: report.Goal(most=BEYOND_S) for name in rounds.names if name == "SIGKILL, adds beyond the takeover"}
    return report.Result(NAME, bench.parameters, rounds.figures("s", goals), rounds.problems)


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, fault: str) -> Mapping[str, float]:
    log_form, end = FAULTS[fault]
    settings = {"ownership.heartbeat_interval_s": 0.5} if bench.quick else {}
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        given = {**processes.local_store(folder / "root"), "store.log_form": log_form, **settings, **bench.settings}
        owner, standby = (
            stack.enter_context(processes.DaemonProcess(name, folder, given)) for name in ("owner", "standby")
        )
        bench.start(owner)
        with machine.on_core(bench.cores.server):
            standby.start(START_S)
        standby.wait_for_log("waiting for daemon")
        client = stack.enter_context(tarry.Client([owner.address, standby.address]))
        with _traffic(client) as traffic:
            time.sleep(BEFORE_S)
            end(owner)
            ended_s, ended_ms = time.monotonic(), time.time_ns() // 1_000_000
            wait_until(lambda: traffic.answered_s[-1] > ended_s + AFTER_S, "the adds go on", timeout_s=PATIENCE_S)
        rounds.check_count(fault, len(traffic.received), len(traffic.received | traffic.added))
        served_s = takeover.phases(standby.log_text(), ended_ms)["serves"]
        adds_s, deliveries_s = _longest(traffic.answered_s), _longest(traffic.received_s)
        return {
            f"{fault}, takeover": served_s,
            f"{fault}, longest gap of adds": adds_s,
            f"{fault}, longest gap of deliveries": deliveries_s,
            f"{fault}, adds beyond the takeover": adds_s - served_s,
            f"{fault}, deliveries beyond the takeover": deliveries_s - served_s,
        }


def _longest(at_s: list[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise(at_s))


class _Traffic:
    """What was answered, and what has come: the entries, and the times (monotonic seconds)."""

    def __init__(self) -> None:
        self.added: set[int] = set()
        self.received: set[int] = set()
        self.answered_s: list[float] = []
        self.received_s: list[float] = []


@contextlib.contextmanager
def _traffic(client: tarry.Client) -> Iterator[_Traffic]:
    """Add and receive inside the block; at its end, wait for the rows that were answered."""
    traffic = _Traffic()
    stopping = threading.Event()

    def add() -> None:
        for entry in itertools.count():
            if stopping.wait(PAUSE_S):
                return
            client.add(TOPIC, 1, entry, delay_ms=0, timeout_s=PATIENCE_S)
            traffic.answered_s.append(time.monotonic())
            traffic.added.add(entry)

    def receive(subscription: tarry.Subscription) -> None:
        for batch in subscription:
            traffic.received_s.append(time.monotonic())
            traffic.received.update(batch.entry_id.tolist())
            subscription.ack(batch)

    subscription = client.subscribe(TOPIC, SUBSCRIPTION, create=True)
    adding = threading.Thread(target=add, name="adding")
    receiving = threading.Thread(target=receive, args=(subscription,), name="receiving")
    adding.start()
    receiving.start()
    try:
        yield traffic
    finally:
        stopping.set()
        adding.join()
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: traffic.added <= traffic.received, "every row comes", timeout_s=PATIENCE_S)
        subscription.close()
        receiving.join()
