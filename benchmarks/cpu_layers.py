"""Divides a daemon's CPU among layers: samples of its loop's stack, and the times of its other threads.

The kernel counts the CPU of each thread. The division of the loop's CPU is an estimate: a layer's share is that of the
samples in which the innermost function that belongs to any layer belongs to it. The rest is the event loop's: that of
asyncio, and of gRPC's compiled code that runs there. It also writes stacks for flame graphs. `service` alone uses this
module, which knows nothing of its load; `sampled_program` takes the samples.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

WIRE, JOURNAL, METRICS, ENGINE, LOOP = "wire", "journal", "metrics", "engine", "event loop"
EXECUTORS, GRPC_THREADS = "executor threads", "threads of gRPC"
LAYERS = (WIRE, ENGINE, JOURNAL, METRICS, LOOP, EXECUTORS, GRPC_THREADS)
# Beginning of a module's name -> layer; the first that matches counts
_MODULES: Mapping[str, str] = {
    "daemon.metrics": METRICS,
    "daemon.column_histogram": METRICS,
    "prometheus_client": METRICS,
    "daemon.group_commit": JOURNAL,
    "daemon.shard": JOURNAL,
    "storage_backends": JOURNAL,
    "daemon.grpc_services": WIRE,
    "daemon.auth": WIRE,
    "tarry.": WIRE,
    "google.protobuf": WIRE,
    "grpc": WIRE,
    "daemon": ENGINE,
}
_LOOP_RUNS = "asyncio.base_events:BaseEventLoop.run_forever"


@dataclasses.dataclass(frozen=True)
class Threads:
    """The CPU times of a process's threads (seconds).

    They are those of the main thread, of its other threads, and of gRPC's, which have names of their own.
    """

    main_s: float
    executors_s: float
    grpc_s: float

    def since(self, before: Threads) -> Threads:
        return Threads(self.main_s - before.main_s, self.executors_s - before.executors_s, self.grpc_s - before.grpc_s)


def read_threads(pid: int) -> Threads:
    """Read the times from /proc. Raises `OSError` if the process is gone."""
    used_s = dict.fromkeys((LOOP, EXECUTORS, GRPC_THREADS), 0.0)
    process_name = Path(f"/proc/{pid}/comm").read_text()
    for thread in Path(f"/proc/{pid}/task").iterdir():
        try:
            cpu_s = int((thread / "schedstat").read_text().split()[0]) / 1e9
            name = (thread / "comm").read_text()
        except FileNotFoundError:
            # The thread has ended meanwhile.
            continue
        kind = LOOP if thread.name == str(pid) else EXECUTORS if name == process_name else GRPC_THREADS
        used_s[kind] += cpu_s
    return Threads(used_s[LOOP], used_s[EXECUTORS], used_s[GRPC_THREADS])


def within_loop(stack: Sequence[str]) -> Sequence[str]:
    """Drop the functions that started the event loop.

    `stack` holds functions as `module:function`, the innermost last.
    """
    return stack[stack.index(_LOOP_RUNS) + 1 :] if _LOOP_RUNS in stack else stack


def layer_of(stack: Sequence[str]) -> str:
    for function in reversed(within_loop(stack)):
        for module, layer in _MODULES.items():
            if function.startswith(module):
                return layer
    return LOOP


def by_layer(stacks: Sequence[tuple[str, ...]], used: Threads) -> dict[str, float]:
    """Return the CPU time of each layer (seconds). `stacks` were sampled during `used`."""
    seen = collections.Counter(map(layer_of, stacks))
    on_loop = {layer: used.main_s * count / len(stacks) for layer, count in seen.items()}
    cpu_s = {**on_loop, EXECUTORS: used.executors_s, GRPC_THREADS: used.grpc_s}
    return {layer: cpu_s.get(layer, 0.0) for layer in LAYERS}


def folded(stacks: Sequence[tuple[str, ...]], used: Threads) -> str:
    """Return a line for each stack with the number of its samples, as programs that draw flame graphs read it.

    Each kind of other thread has one line, with as many samples as the loop would have had for their CPU. There must be
    at least one of `stacks`.
    """
    counts = collections.Counter(";".join((LOOP, *within_loop(stack))) for stack in stacks)
    samples_a_second = len(stacks) / used.main_s
    counts[EXECUTORS] = round(used.executors_s * samples_a_second)
    counts[GRPC_THREADS] = round(used.grpc_s * samples_a_second)
    return "".join(f"{stack} {count}\n" for stack, count in sorted(counts.items()) if count)
