"""Measures thousands of small topics: loading them, a clean stop, sealing all of them together, and idle cost.

    python -m benchmarks topics                     with the usual sizes, among the other measurements
    python -m benchmarks.topics --topics 3000 --store slow --daemon ../before

The root is made while the store takes no time. Then the daemon is killed, and started again on a store that takes its
time for each request. Single rows are added at a steady rate to some topics that are served, while all others are being
loaded. Then the daemon is stopped cleanly, with rows of every topic in memory. It is started once more, and all topics
get a row each within seconds: single rows are added while these reach the age of a seal. Then it is idle.

Every added row must exist at the end. `many_topics` has the topics, `single_adds` the single rows, `slow_store` the
store.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import alone, load, machine, many_topics, report, single_adds, slow_store, workbench
from examples import processes

NAME = "topics"
TOPICS = (1_000, 3_000, 10_000)
# Topics to which single rows are added
SERVED_TOPICS = 16
ROWS_A_TOPIC = 3
ADDS_PER_S = 20.0
# Longer than it takes to add a row to every topic
SEAL_AGE_S = 30
IDLE_S = 60
# The longest wait (seconds)
PATIENCE_S = 3_600.0
START_S = 120.0
DRAIN_S = 30.0
GOALS = {
    "adds while loading, p99": report.Goal(most=500),
    "health lost while loading": report.Goal(most=0),
    "requests when idle": report.Goal(most=10),
    "adds while all are sealed, p99": report.Goal(most=500),
    "health lost while all are sealed": report.Goal(most=0),
    "stop": report.Goal(most=DRAIN_S),
    "shards not given up": report.Goal(most=0),
}
_LOADED = "the topics are loaded topics="
_SECOND_ADDS_FROM = 1_000_000_000
_STILL = 6


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes. `checkout` is that of the daemon."""

    topics: Sequence[int]
    served_topics: int
    adds_per_s: float
    idle_s: float
    seal_age_s: int
    rest_s: float
    store: str
    delay_ms: float
    checkout: Path = processes.REPOSITORY


def run(bench: workbench.Workbench) -> report.Result:
    plan = Plan(
        topics=(40,) if bench.quick else TOPICS,
        served_topics=bench.size(SERVED_TOPICS, 4),
        adds_per_s=ADDS_PER_S,
        idle_s=bench.size(IDLE_S, 1),
        seal_age_s=bench.size(SEAL_AGE_S, 1),
        rest_s=bench.rest_s,
        store=alone.SLOW,
        delay_ms=bench.size(slow_store.DELAY_MS, 5),
    )
    return measure(bench, plan)


def measure(bench: workbench.Workbench, plan: Plan) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    turns = {_name(topics): functools.partial(_turn, bench, rounds, plan, topics) for topics in plan.topics}
    rounds.run(turns)
    parameters: dict[str, report.Value] = {
        "rows_a_topic": ROWS_A_TOPIC,
        "served_topics": plan.served_topics,
        "adds_per_s": plan.adds_per_s,
        "idle_s": plan.idle_s,
        "seal_age_s": plan.seal_age_s,
        "store": plan.store if plan.store == alone.LOCAL else f"{plan.delay_ms:g} ms a request",
    }
    figures = [_figure(rounds, name) for name in rounds.names]
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _name(topics: int) -> str:
    return f"{topics:,} topics"


def _figure(rounds: workbench.Rounds, name: str) -> report.Figure:
    """Return the figure of a sample, whose name is `topics: what, unit`."""
    short, _, unit = name.rpartition(", ")
    what = short.partition(": ")[2]
    return dataclasses.replace(rounds.figure(name, unit, GOALS.get(what)), name=short)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A root, and the daemons that serve it one after the other."""

    bench: workbench.Workbench
    plan: Plan
    folder: Path

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def requests(self, from_s: float, until_s: float) -> list[slow_store.Request]:
        return slow_store.read_requests(self.folder / "requests", from_s=from_s, until_s=until_s)

    @contextlib.contextmanager
    def daemon(
        self, name: str, *, delay_ms: float, settings: Mapping[str, object] | None = None
    ) -> Iterator[processes.DaemonProcess]:
        """Make a daemon that is not started yet. All have one id: none waits for the one before."""
        slow = self.plan.store == alone.SLOW
        store = slow_store.settings() if slow else processes.local_store(self.root)
        program = slow_store.program(self.root, delay_ms, self.folder / "requests") if slow else processes.TARRYD
        given = {**store, "daemon.drain_s": DRAIN_S, **(settings or {}), **self.bench.settings}
        with processes.DaemonProcess(
            name, self.folder, given, daemon_id="tarryd", program=program, checkout=self.plan.checkout
        ) as daemon:
            yield daemon

    def start(self, daemon: processes.DaemonProcess) -> float:
        """Start a daemon; return, when its ports are bound, the time when it was begun (seconds)."""
        began_s = slow_store.clock_s()
        with machine.on_core(self.bench.cores.server):
            daemon.start(START_S)
        return began_s


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan, count: int) -> Mapping[str, float]:
    with bench.folder() as folder:
        place = _Place(bench, plan, folder)
        topics, served = many_topics.named("small", count), many_topics.named("served", plan.served_topics)
        making, empty_bytes = _made(place, [*topics, *served])
        loading, while_loading = _loaded_and_stopped(place, count, served)
        sealing, while_sealing, rows = _sealed_and_idle(place, topics, served, empty_bytes)
        _check(rounds, _name(count), rows, topics, [while_loading, while_sealing])
    return {f"{_name(count)}: {name}": value for name, value in {**making, **loading, **sealing}.items()}


def _made(place: _Place, topics: Sequence[str]) -> tuple[dict[str, float], int]:
    """Make the topics; return the time it took, and the bytes of a daemon without topics."""
    with place.daemon("making", delay_ms=0) as daemon:
        place.start(daemon)
        daemon.wait_for_health(serving=True, timeout_s=START_S)
        empty_bytes = daemon.usage().resident_bytes
        began_s = slow_store.clock_s()
        many_topics.make(daemon.address, topics, rows=ROWS_A_TOPIC)
        return {"made without delay, s": slow_store.clock_s() - began_s}, empty_bytes


def _loaded_and_stopped(place: _Place, count: int, served: Sequence[str]) -> tuple[dict[str, float], single_adds.Seen]:
    """Load the topics after a kill, with rows of every topic in the log, and stop."""
    plan = place.plan
    with place.daemon("loading", delay_ms=plan.delay_ms) as daemon:
        with single_adds.SingleAdds(daemon.address, served, per_second=plan.adds_per_s) as adding:
            began_s = place.start(daemon)
            daemon.wait_for_log(_LOADED, PATIENCE_S)
            loaded_s, cpu_s = slow_store.clock_s(), daemon.usage().cpu_s
            seen = adding.end()
        figures = {"SIGKILL to all loaded, s": loaded_s - began_s, "CPU a topic loaded, ms": 1000 * cpu_s / count}
        if plan.store == alone.SLOW:
            figures["requests a topic loaded, 1"] = len(place.requests(began_s, loaded_s)) / count
        figures |= _figures_of(seen, seen.first_served_s, loaded_s, "while loading")
        time.sleep(plan.rest_s)
        stopping_s = slow_store.clock_s()
        status = daemon.terminate(PATIENCE_S)
        figures["stop, s"] = slow_store.clock_s() - stopping_s
    figures["stop's exit status, 1"] = status
    figures["shards not given up, shards"] = len(many_topics.owned_shards(place.root))
    return figures, seen


def _sealed_and_idle(
    place: _Place, topics: Sequence[str], served: Sequence[str], empty_bytes: int
) -> tuple[dict[str, float], single_adds.Seen, dict[str, int]]:
    """Seal all topics after the stop, then be idle; return the rows that all topics have in the end, too."""
    plan = place.plan
    with place.daemon("sealing", delay_ms=plan.delay_ms, settings={"bucket.age_max_s": plan.seal_age_s}) as daemon:
        began_s = place.start(daemon)
        daemon.wait_for_log(_LOADED, PATIENCE_S)
        figures = {"stop to all loaded, s": slow_store.clock_s() - began_s}
        sealing, seen = _sealed(place, daemon, topics, served)
        figures |= sealing
        _wait_for_rest(place)
        figures |= _idle(place, daemon, len(topics), empty_bytes)
        return figures, seen, many_topics.pending(daemon.address, [*topics, *served])


def _sealed(
    place: _Place, daemon: processes.DaemonProcess, topics: Sequence[str], served: Sequence[str]
) -> tuple[dict[str, float], single_adds.Seen]:
    # All rows that were added before must be sealed first.
    _wait_until_sealed(place, topics, from_ms=0)
    with single_adds.SingleAdds(
        daemon.address, served, per_second=place.plan.adds_per_s, first_entry=_SECOND_ADDS_FROM
    ) as adding:
        from_ms = load.now_ms()
        many_topics.add(daemon.address, topics, ledger_id=1, rows=1)
        added_ms = load.now_ms()
        first_ms, last_ms = _wait_until_sealed(place, topics, from_ms=from_ms)
        seen = adding.end()
    behind_ms = load.now_ms() - slow_store.clock_s() * 1000
    figures = {
        "a row for each topic, s": (added_ms - from_ms) / 1000,
        "first to last sealed, s": (last_ms - first_ms) / 1000,
        **_figures_of(seen, (first_ms - behind_ms) / 1000, (last_ms - behind_ms) / 1000, "while all are sealed"),
    }
    return figures, seen


def _wait_for_rest(place: _Place) -> None:
    """Wait until the last rows are sealed, and the slots deleted that checkpoints have covered."""
    time.sleep(place.plan.seal_age_s)
    while True:
        began_s = slow_store.clock_s()
        # Slots of a former owner may be deleted some time after the rest.
        time.sleep(_STILL * place.plan.rest_s)
        if place.plan.store == alone.LOCAL:
            return
        requests = place.requests(began_s, slow_store.clock_s())
        if not any(map(_is_of_work, requests)):
            return


def _is_of_work(request: slow_store.Request) -> bool:
    """Return whether it seals, or deletes covered slots; slots of former owners are read before their deletion."""
    return request.operation in ("head", "delete") or (request.operation == "put" and "/topics/" in request.key)


def _idle(place: _Place, daemon: processes.DaemonProcess, count: int, empty_bytes: int) -> dict[str, float]:
    resident_bytes = daemon.usage().resident_bytes
    began_s, cpu_s = slow_store.clock_s(), daemon.usage().cpu_s
    time.sleep(place.plan.idle_s)
    ended_s, cpu_s = slow_store.clock_s(), daemon.usage().cpu_s - cpu_s
    figures = {
        "memory, MB": resident_bytes / 1e6,
        "memory a topic, kB": (resident_bytes - empty_bytes) / count / 1e3,
        "CPU when idle, %": 100 * cpu_s / (ended_s - began_s),
    }
    if place.plan.store == alone.SLOW:
        asked = [request.operation for request in place.requests(began_s, ended_s)]
        figures["requests when idle, 1/s"] = len(asked) / (ended_s - began_s)
        for operation in slow_store.OPERATIONS:
            figures[f"{operation} when idle, 1/s"] = asked.count(operation) / (ended_s - began_s)
    return figures


def _wait_until_sealed(place: _Place, topics: Sequence[str], *, from_ms: int) -> tuple[int, int]:
    """Return when the first and the last of them was sealed, since `from_ms`."""
    deadline_s = time.monotonic() + PATIENCE_S
    while len(sealed := many_topics.sealed_at_ms(place.root, topics, from_ms=from_ms)) < len(topics):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(sealed)} of {len(topics)} topics were sealed within {PATIENCE_S:g} s")
        time.sleep(place.plan.rest_s / 5)
    return min(sealed.values()), max(sealed.values())


def _figures_of(seen: single_adds.Seen, from_s: float, until_s: float, when: str) -> dict[str, float]:
    """Return the figures of the calls within that time.

    Times of adds are missing if no add was sent in it to a topic that was served. Lookups show the machine's part of
    these times: they need no store.
    """
    adds, lookups = seen.served_adds(from_s, until_s), seen.lookups_within(from_s, until_s)
    return {
        **{f"adds {when}, {quantile}, ms": value for quantile, value in single_adds.quantiles(adds).items()},
        **{f"lookups {when}, {quantile}, ms": value for quantile, value in single_adds.quantiles(lookups).items()},
        f"adds refused {when}, adds": sum(not add.ok for add in adds),
        f"health lost {when}, times": seen.health_lost(from_s, until_s),
    }


def _check(
    rounds: workbench.Rounds,
    who: str,
    rows: Mapping[str, int],
    topics: Sequence[str],
    seen: Sequence[single_adds.Seen],
) -> None:
    """Check that each topic has the rows that were added; `rows` are those it has."""
    wrong = sum(rows[topic] != ROWS_A_TOPIC + 1 for topic in topics)
    rounds.check(who, f"{wrong:,} topics have not the rows that were added" if wrong else None)
    answered, unknown = [each.answered() for each in seen], [each.unknown() for each in seen]
    for topic in rows.keys() - set(topics):
        least = ROWS_A_TOPIC + sum(each.get(topic, 0) for each in answered)
        most = least + sum(each.get(topic, 0) for each in unknown)
        fits = least <= rows[topic] <= most
        rounds.check(who, None if fits else f"{topic} has {rows[topic]:,} rows, not {least:,} to {most:,}")


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure with other sizes, another store, or the daemon of another checkout."""
    options = _parse(arguments)
    plan = Plan(
        topics=options.topics,
        served_topics=SERVED_TOPICS,
        adds_per_s=options.rate,
        idle_s=options.idle_s,
        seal_age_s=options.seal_age_s,
        rest_s=5.0,
        store=options.store,
        delay_ms=options.delay_ms,
        checkout=options.daemon.resolve(),
    )
    measured = functools.partial(measure, plan=plan)
    return alone.run(options, measured, batch_rows=1, in_flight=many_topics.AT_ONCE, seed=0)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = alone.parser(NAME, __doc__, store=alone.SLOW)
    add = parser.add_argument
    add("--topics", type=int, nargs="+", default=TOPICS, help="one measurement each; default: %(default)s")
    add("--rate", type=float, default=ADDS_PER_S, help="single rows a second; default: %(default)s")
    add("--idle-s", type=float, default=IDLE_S, help="default: %(default)s")
    add("--seal-age-s", type=int, default=SEAL_AGE_S, help="default: %(default)s")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
