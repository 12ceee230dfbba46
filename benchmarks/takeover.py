"""Measures a takeover on S3 after SIGKILL, on a failing store: seconds to the standby's first delivery.

    python -m benchmarks takeover                    among the other measurements
    python -m benchmarks.takeover --rounds 10        alone

The store is a real S3 server on loopback; both daemons reach it by a proxy, which cuts bodies, answers 503, and loses
answers of requests that were carried out. Faults begin with the service, and go on until all rows have arrived. Rows
are added and acknowledged until the daemon is killed, and again at the standby as soon as that serves. For a takeover
without faults the requests are counted, from the search for the end of the killed daemon's log to the last claim of a
shard.

Answered rows must arrive, and none early. `failing_store` draws the faults; `tests.wire._support.traffic` and
`tests._support.delivery_history` have the callers and their rules.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import functools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import alone, failing_store, machine, report, workbench
from benchmarks.failing_store import Faults
from examples import processes
from storage_backends.formats import names
from tests._support import lost_answer_proxy
from tests._support.delivery_history import DeliveryHistory
from tests.wire._support import traffic

NAME = "takeover"
BACK_S = 60.0
PATIENCE_S = 300.0
START_S = 300.0
# Time for which both daemons go on after the first delivery (seconds)
AFTER_S = 3.0
DUE_WITHIN_MS = 6_000
ROWS_A_CALL = 5
# The longest time between two calls of a topic's sender (seconds)
CALL_EVERY_S = 1.0
# A busy machine answers late: a call that times out is made again.
CALL_S = 60.0
LOST = 0.01
# Characters shown of the log of a standby that did not serve in time
LOG_CHARACTERS = 4_000
NO_FAULTS = "no faults"
CASES: Mapping[str, Faults] = {
    NO_FAULTS: Faults(),
    "5 % of bodies cut": Faults(cut=0.05, lost=LOST),
    "30 % answered 503": Faults(unavailable=0.3, lost=LOST),
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes. `seconds` is the time of service before SIGKILL; `settings` are those of both daemons."""

    seconds: float
    topics: int
    seed: int
    cases: Sequence[str] = tuple(CASES)
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    checkout: Path = processes.REPOSITORY


def run(bench: workbench.Workbench) -> report.Result:
    settings = {"ownership.heartbeat_interval_s": 0.5, "daemon.shards": 2} if bench.quick else {}
    return measure(bench, Plan(bench.size(20, 1), bench.size(20, 2), bench.seed, settings=settings))


def measure(bench: workbench.Workbench, plan: Plan) -> report.Result:
    rounds = workbench.Rounds(bench, NAME)
    seeds = random.Random(plan.seed)
    rounds.run({case: functools.partial(_turn, bench, rounds, plan, case, seeds) for case in plan.cases})
    # Each sample's name ends with its unit.
    named = ((name, *name.rpartition(", ")[::2]) for name in rounds.names)
    goals = {name: report.Goal(most=BACK_S) for name in rounds.names if name.startswith("first hand-out")}
    figures = [
        dataclasses.replace(rounds.figure(name, unit, goals.get(name)), name=short) for name, short, unit in named
    ]
    sizes: dict[str, report.Value] = {"seconds": plan.seconds, "topics": plan.topics, "answers_lost": LOST}
    return report.Result(NAME, sizes | bench.parameters, figures, rounds.problems)


def _turn(
    bench: workbench.Workbench, rounds: workbench.Rounds, plan: Plan, case: str, seeds: random.Random
) -> Mapping[str, float]:
    faults, seed = CASES[case], seeds.randrange(1 << 32)
    with bench.folder() as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(processes.S3ServerProcess("s3", folder))
        server.start(START_S)
        store = failing_store.FailingStore(server.BUCKET, seed)
        proxy = stack.enter_context(lost_answer_proxy.lost_answer_proxy(f"http://127.0.0.1:{server.port}", store))
        given = {**server.settings(), "store.s3.endpoint_url": proxy.endpoint_url, **plan.settings, **bench.settings}
        owner, standby = (
            stack.enter_context(processes.DaemonProcess(name, folder, given, checkout=plan.checkout))
            for name in ("owner", "standby")
        )
        bench.start(owner)
        with machine.on_core(bench.cores.server):
            standby.start(START_S)
        standby.wait_for_log("waiting for daemon")
        history = DeliveryHistory()
        for topic in range(plan.topics):
            traffic.create_subscription(owner.address, _name(topic))
        store.faults = faults
        with _callers(owner.address, plan, history, seed):
            time.sleep(plan.seconds)
            owner.kill()
            killed_s, killed_ms = time.monotonic(), traffic.now_ms()
        seconds, problems = _take_over(plan, standby, history, seed, killed_ms)
        for problem in problems:
            rounds.check(case, problem)
        if problems:
            bench.say(f"{NAME}: the end of the standby's log:\n{standby.log_text()[-LOG_CHARACTERS:]}")
        times = phases(standby.log_text(), killed_ms)
        # The standby's probe goes on beside the takeover, a race each second.
        asked = [each for each in store.requests if each.arrived_s > killed_s and not each.key.startswith("probe/")]
        failed = sum(each.fault is not None for each in asked)
        if case != NO_FAULTS and not failed:
            rounds.check(case, "no request has failed: it shows nothing")
    figures: dict[str, float] = {f"{phase}, {case}, s": value for phase, value in times.items()}
    slots = {each.key for each in asked if each.kind == "get" and each.key.startswith(names.LOGS_PREFIX)}
    figures |= {
        f"first hand-out, {case}, s": seconds,
        f"slots read, {case}, slots": len(slots),
    }
    if case == NO_FAULTS:
        return figures | {f"{kind} of a takeover, requests": number for kind, number in of_takeover(asked).items()}
    return figures | {f"failed of {case}, requests": failed}


def _take_over(
    plan: Plan, standby: processes.DaemonProcess, history: DeliveryHistory, seed: int, killed_ms: int
) -> tuple[float, list[str]]:
    """Return the seconds from SIGKILL to the first delivery, and the problems of the account."""
    with _callers(standby.address, plan, history, seed + 1) as (senders, receivers):
        try:
            history.wait_for(lambda: any(each.received for each in receivers), PATIENCE_S, "the first hand-out")
            first_ms = min(each.received[0][0] for each in receivers if each.received)
            time.sleep(AFTER_S)
            for sender in senders:
                sender.finish(PATIENCE_S)
            for receiver in receivers:
                receiver.finish()
            history.wait_for(lambda: history.missing == 0, PATIENCE_S, "every answered row comes")
        except AssertionError as error:
            return PATIENCE_S, [str(error), *history.breaches()[:5]]
    seconds = (first_ms - killed_ms) / 1000
    late = [f"it was not back within {BACK_S:g} s: {seconds:.1f} s"] if seconds > BACK_S else []
    return seconds, [*late, *history.breaches()[:5]]


def phases(log: str, killed_ms: int) -> Mapping[str, float]:
    """Return when the standby first took over and last began to serve, by its log (seconds since SIGKILL)."""
    taking, serving = (
        [
            datetime.datetime.fromisoformat(line.split(" ", 1)[0]).timestamp() - killed_ms / 1000
            for line in log.splitlines()
            if part in line
        ]
        for part in (": taking over: ", ": serving shards=")
    )
    return {"takes over": taking[0], "serves": serving[-1]} if taking and serving else {}


def of_takeover(requests: list[failing_store.Request]) -> Mapping[str, int]:
    """Count the requests of the takeover by kind.

    It lasts from the listing of the killed daemon's log, before its fence, to the last claim. Returns nothing without a
    takeover.
    """
    created = [(number, each.key) for number, each in enumerate(requests) if each.kind == "conditional put"]
    fences = [(number, key) for number, key in created if key.startswith(names.LOGS_PREFIX)]
    claims: dict[str, int] = {}
    for number, key in created:
        folder = key.rpartition("/")[0]
        if folder.startswith("shards/") and "/topics/" not in folder:
            # A commit to a shard behind its claim is a checkpoint or the like.
            claims.setdefault(folder, number)
    if not fences or not claims:
        return {}
    fence, key = fences[0]
    log = key.rpartition("/")[0]
    begin = max(number for number, each in enumerate(requests[:fence]) if each.key == f"{log}/")
    return Counter(each.kind for each in requests[begin : max(claims.values()) + 1])


# ---- the callers


class _Sender(traffic.Sender):
    # A standby that takes over has more important work than to refuse calls.
    PAUSE_S = 0.25


class _Receiver(traffic.Receiver):
    PAUSE_S = 0.25


@contextlib.contextmanager
def _callers(
    address: str, plan: Plan, history: DeliveryHistory, seed: int
) -> Iterator[tuple[list[_Sender], list[_Receiver]]]:
    """Run a sender and a receiver for each topic, until the block ends."""
    seeds = random.Random(seed)
    with contextlib.ExitStack() as stack:
        receivers = [
            stack.enter_context(_Receiver(address, _name(topic), history, rng=random.Random(seeds.random())))
            for topic in range(plan.topics)
        ]
        senders = [
            stack.enter_context(
                _Sender(
                    address,
                    _name(topic),
                    history,
                    rng=random.Random(seeds.random()),
                    due=_due,
                    ledgers_from=(seed & 0xFFFF) * 1_000_000_000 + topic * 1_000_000,
                    rows_max=ROWS_A_CALL,
                    pause_s=CALL_EVERY_S,
                    timeout_s=CALL_S,
                )
            )
            for topic in range(plan.topics)
        ]
        yield senders, receivers


def _due(rng: random.Random, base_ms: int) -> int:
    return base_ms + rng.randint(0, DUE_WITHIN_MS)


def _name(topic: int) -> str:
    return f"{NAME}-{topic}"


# ---- the command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure with other sizes, or the daemon of another checkout."""
    options = _parse(arguments)
    plan = Plan(
        options.seconds, options.topics, options.seed, options.case or tuple(CASES), checkout=options.daemon.resolve()
    )
    return alone.run(options, functools.partial(measure, plan=plan), batch_rows=1, in_flight=1, seed=options.seed)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = alone.parser(NAME, __doc__, store=alone.SLOW)
    parser.add_argument("--seconds", type=float, default=20, help="of service before SIGKILL; default: %(default)s")
    parser.add_argument("--topics", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=195, help="default: %(default)s")
    parser.add_argument("--case", action="append", choices=CASES, help="repeatable; default: all")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
