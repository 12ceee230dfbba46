"""The life of buckets: rows are cancelled and rescheduled and buckets merged, while others come due.

A topic has a million rows in two hundred buckets. Some of them, in all buckets, come due at a steady rate and are
received and acknowledged by a process of its own. Meanwhile another process cancels random rows and gives others new
times, as fast as it can with several calls in flight on one connection; then the buckets are merged. The receiver goes
before it on the core of the clients, so that two clients on one core do not count as the daemon's lateness.
How fast rows are cancelled and rescheduled is measured on another daemon as well, where nothing comes due.

Every row is followed by identity: what was answered as cancelled never comes, everything else comes once and at its
time, or is listed as pending with it.

Owns: the phases, the clients' processes, the statistics. Does not own: the rows and their account (`life_rows`), the
daemon (`workbench`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from multiprocessing.connection import Connection

import numpy as np

import tarry
import tarry.aio
from benchmarks import load, report, seal_pause, side_process, tarry_load, workbench
from benchmarks.life_rows import Account, Load, Numbers, Plan
from examples import processes

NAME = "life"
SUBSCRIPTION = "dispatcher"
ALONE, CANCELLING, RESCHEDULING, MERGING = "nothing else", "cancelling", "rescheduling", "merging"
PHASES = (ALONE, CANCELLING, RESCHEDULING, MERGING)
OVERALL = "all the time"
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
LATENESS, PAUSE = "lateness", "longest pause of the loop, at most"
GOAL = report.Goal(most=25)
CANCEL_GOAL = report.Goal(least=300_000)
BEST, MEDIAN = "best", "median"
# Buckets are sealed by request while the topic is filled, so that there are as many as there should be.
FILLING = tarry.TopicPolicy(
    max_num_buckets=-1,
    min_index_count_per_bucket=1_000_000_000,
    bucket_rows_max=1_000_000_000,
    bucket_bytes_max=1_000_000_000_000,
    bucket_age_max_ms=load.DAY_MS,
)
FILLED = tarry.TopicPolicy(max_num_buckets=-1)
# Left out: the first rows that come due.
OPENING_MS = 1_000
# Between two phases. What comes due in the first of it belongs to the phase before, which may have made it late.
PAUSE_S, AFTER_MS = 1.0, 200
PATIENCE_S = 300.0
MERGE_S = 600.0
PAGE_ROWS = 10_000


@dataclasses.dataclass(frozen=True)
class Size:
    """`withdrawn`: rows that are cancelled, and as many that are rescheduled. `alone_s`: how long nothing else is done.
    `quiet_rounds`: how often rows are withdrawn where nothing comes due. `lead_ms`: for filling. `niceness`: of the
    client that withdraws rows, beside the one that looks at the clock: none where a busy machine would keep it from its
    work.
    """

    waiting: int
    buckets: int
    buckets_max: int
    withdrawn: int
    due_per_s: int
    seconds: int
    alone_s: int
    quiet_rounds: int
    lead_ms: int
    niceness: int


FULL = Size(1_000_000, 200, 50, 100_000, 5_000, 40, 5, 3, 40_000, 10)
QUICK = Size(40_000, 20, 5, 4_000, 5_000, 8, 1, 2, 9_000, 0)


def run(bench: workbench.Workbench) -> report.Result:
    size = QUICK if bench.quick else FULL
    rounds = workbench.Rounds(bench, NAME)
    turns = {"nothing comes due": _quiet, "rows come due": _busy}
    rounds.run({name: functools.partial(turn, bench, rounds, size) for name, turn in turns.items()})
    figures = [
        rounds.figure(f"{phase}: {LATENESS} {quantile}", "ms", GOAL if quantile == "p99" else None)
        for phase in (OVERALL, *PHASES)
        for quantile in QUANTILES
    ]
    figures += [rounds.figure(f"{phase}: {PAUSE}", "ms") for phase in PHASES]
    for phase in (CANCELLING, RESCHEDULING):
        for which in (BEST, MEDIAN):
            goal = CANCEL_GOAL if (phase, which) == (CANCELLING, BEST) else None
            figures.append(rounds.figure(_quiet_name(phase, which), "rows/s", goal))
        figures.append(rounds.figure(_quiet_name(phase, "daemon's CPU"), "us/row"))
        figures.append(rounds.figure(f"{phase}: rate while rows come due", "rows/s"))
    units = {"duration": "s", "buckets before": "", "buckets after": "", "written per byte stored": "B"}
    figures += [rounds.figure(f"{MERGING}: {name}", unit) for name, unit in units.items()]
    return report.Result(NAME, dataclasses.asdict(size) | bench.parameters, figures, rounds.problems)


def _quiet_name(phase: str, which: str) -> str:
    return f"{phase}: rate where nothing comes due, {which}" if which in (BEST, MEDIAN) else f"{phase}: {which}"


# ---- where nothing comes due


def _quiet(bench: workbench.Workbench, rounds: workbench.Rounds, size: Size) -> Mapping[str, float]:
    from_ms = load.now_ms()
    of = Load(Plan(size.waiting, 0, from_ms, from_ms + 1000 * size.seconds, bench.seed))
    account = Account(of)
    figures: dict[str, float] = {}
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        _fill(client, rounds, of.rows, size)
        time.sleep(bench.rest_s)
        rates: dict[str, list[float]] = {CANCELLING: [], RESCHEDULING: []}
        cpu_s = dict.fromkeys(rates, 0.0)
        for part in range(2 * size.quiet_rounds):
            phase = RESCHEDULING if part % 2 else CANCELLING
            before = daemon.usage().cpu_s
            done = asyncio.run(_withdraw_once(bench, daemon.address, of, phase, part, size.withdrawn))
            cpu_s[phase] += daemon.usage().cpu_s - before
            rates[phase].append(size.withdrawn / done.seconds)
            rounds.check_count(f"{phase}, where nothing comes due", len(done.numbers), size.withdrawn)
            _note(account, phase, done)
        _check_pending(client, rounds, account, from_ms=0)
    for phase, values in rates.items():
        figures[_quiet_name(phase, BEST)] = max(values)
        figures[_quiet_name(phase, MEDIAN)] = float(np.median(values))
        figures[_quiet_name(phase, "daemon's CPU")] = 1e6 * cpu_s[phase] / size.withdrawn / size.quiet_rounds
    return figures


async def _withdraw_once(
    bench: workbench.Workbench, address: str, of: Load, phase: str, part: int, rows: int
) -> _Withdrawn:
    async with tarry.aio.Client(address) as client:
        await client.stats(NAME)
        return await _withdraw(client, of, phase, of.chosen(part, rows), bench.batch_rows, bench.in_flight)


# ---- where rows come due


def _busy(bench: workbench.Workbench, rounds: workbench.Rounds, size: Size) -> Mapping[str, float]:
    def once(factor: int) -> Mapping[str, float]:
        longer = dataclasses.replace(size, lead_ms=factor * size.lead_ms, seconds=factor * size.seconds)
        return _busy_once(bench, rounds, longer)

    return bench.with_time(NAME, once)


def _busy_once(bench: workbench.Workbench, rounds: workbench.Rounds, size: Size) -> Mapping[str, float]:
    """Raises TimeTooShort where the topic is not filled before the first row comes due, or none does in some phase."""
    begin_ms = load.now_ms() + size.lead_ms
    due = size.due_per_s * size.seconds
    plan = Plan(size.waiting, due, begin_ms, begin_ms + 1000 * size.seconds, bench.seed)
    with bench.daemon() as daemon, tarry.Client(daemon.address) as client:
        client.create_subscription(NAME, SUBSCRIPTION)
        withdrawn = (size.withdrawn, bench.batch_rows, bench.in_flight, size.niceness)
        with (
            side_process.SideProcess(_receive, daemon.address, plan) as receiver,
            side_process.SideProcess(_withdraw_when_told, daemon.address, plan, *withdrawn) as withdrawing,
        ):
            of = Load(plan)
            _fill(client, rounds, of.rows, size)
            if load.now_ms() > begin_ms:
                raise workbench.TimeTooShort(f"{size.buckets} buckets were not filled within {size.lead_ms / 1000:g} s")
            return _measure(rounds, size, _Served(daemon, client, plan, of), receiver, withdrawing)


@dataclasses.dataclass(frozen=True)
class _Served:
    """A topic that is filled."""

    daemon: processes.DaemonProcess
    client: tarry.Client
    plan: Plan
    of: Load


def _measure(
    rounds: workbench.Rounds,
    size: Size,
    served: _Served,
    receiver: side_process.SideProcess,
    withdrawing: side_process.SideProcess,
) -> Mapping[str, float]:
    plan, account, phases = served.plan, Account(served.of), _Phases(served.daemon)
    figures: dict[str, float] = {}
    _sleep_until(plan.begin_ms + OPENING_MS)
    with phases.during(ALONE):
        _sleep_until(plan.begin_ms + OPENING_MS + 1000 * size.alone_s)
    for phase in (CANCELLING, RESCHEDULING):
        time.sleep(PAUSE_S)
        with phases.during(phase):
            withdrawing.send(phase)
            done: _Withdrawn = withdrawing.result()
        rounds.check(phase, "an answer was lost" if done.may_have_landed else None)
        _note(account, phase, done)
        figures[f"{phase}: rate while rows come due"] = size.withdrawn / done.seconds
    time.sleep(PAUSE_S)
    figures |= _merge(rounds, size, served, phases)
    receiver.send(len(account.owed(until_ms=plan.end_ms)))
    came, received_at_ms, ignored = receiver.result()
    for problem in account.problems(came, received_at_ms, until_ms=plan.end_ms):
        rounds.check("received", problem)
    rounds.check_count("acknowledgements ignored", ignored, 0)
    _check_pending(served.client, rounds, account, from_ms=plan.end_ms)
    lateness_ms = received_at_ms - came.deliver_at_ms.astype(np.int64)
    in_time = account.in_time(came)
    return figures | phases.figures(came.deliver_at_ms[in_time].astype(np.int64), lateness_ms[in_time], plan)


def _merge(rounds: workbench.Rounds, size: Size, served: _Served, phases: _Phases) -> dict[str, float]:
    before = served.client.stats(NAME)
    written = served.daemon.metric("tarry_merge_bytes_total", direction="written")
    began_s = time.perf_counter()
    with phases.during(MERGING):
        merged = served.client.merge(NAME, size.buckets_max, timeout_s=MERGE_S)
        seconds = time.perf_counter() - began_s
    written = served.daemon.metric("tarry_merge_bytes_total", direction="written") - written
    too_many = merged.buckets > size.buckets_max
    rounds.check(MERGING, f"{merged.buckets} buckets are left of {before.buckets}" if too_many else None)
    return {
        f"{MERGING}: duration": seconds,
        f"{MERGING}: buckets before": before.buckets,
        f"{MERGING}: buckets after": merged.buckets,
        f"{MERGING}: written per byte stored": written / before.bucket_bytes,
    }


class _Phases:
    """When each phase was, and the heartbeat of the daemon's loop meanwhile."""

    def __init__(self, daemon: processes.DaemonProcess) -> None:
        self._daemon = daemon
        self._times_ms: dict[str, tuple[int, int]] = {}
        self._pauses_ms: dict[str, float] = {}

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        before = seal_pause.beats(self._daemon)
        began_ms = load.now_ms()
        yield
        self._times_ms[phase] = (began_ms, load.now_ms() + AFTER_MS)
        self._pauses_ms[phase] = 1000 * seal_pause.longest_s(before, seal_pause.beats(self._daemon))

    def figures(self, deliver_at_ms: Numbers, lateness_ms: Numbers, plan: Plan) -> dict[str, float]:
        """Of rows that came. Raises TimeTooShort."""
        times_ms = {OVERALL: (plan.begin_ms + OPENING_MS, self._times_ms[MERGING][1])} | self._times_ms
        figures: dict[str, float] = {}
        for phase, (from_ms, until_ms) in times_ms.items():
            of_phase = lateness_ms[(deliver_at_ms >= from_ms) & (deliver_at_ms < until_ms)]
            if not len(of_phase):
                raise workbench.TimeTooShort(f"no row came due in the phase {phase!r}")
            values = np.percentile(of_phase, list(QUANTILES.values()))
            figures |= {
                f"{phase}: {LATENESS} {quantile}": float(value)
                for quantile, value in zip(QUANTILES, values, strict=True)
            }
        return figures | {f"{phase}: {PAUSE}": pause_ms for phase, pause_ms in self._pauses_ms.items()}


# ---- clients


def _fill(client: tarry.Client, rounds: workbench.Rounds, rows: load.Rows, size: Size) -> None:
    """Returns when all buckets are sealed and no row is in memory alone."""
    client.set_policy(NAME, FILLING)
    accepted = 0
    for batch in rows.batches(-(-len(rows) // size.buckets)):
        accepted += client.add(NAME, batch.ledger_id, batch.entry_id, deliver_at_ms=batch.deliver_at_ms).accepted
        client.seal(NAME)
    client.set_policy(NAME, FILLED)
    rounds.check_count("added", accepted, len(rows))
    rounds.check_count("buckets", client.stats(NAME).buckets, size.buckets)


def _receive(address: str, plan: Plan, results: Connection) -> None:
    """Receives and acknowledges until as many rows came as it is told, and until no more should come."""
    came: list[tarry.Batch] = []
    answers = []
    received, wanted = 0, None
    with (
        tarry.Client(address) as client,
        client.subscribe(NAME, SUBSCRIPTION, permits=tarry_load.PERMITS) as subscription,
    ):
        results.send("ready")
        while wanted is None or load.now_ms() <= plan.end_ms + AFTER_MS or received < wanted:
            batch = subscription.receive(timeout_s=0.1)
            if batch is not None:
                received += len(batch)
                came.append(batch)
                answers.append(subscription.ack(batch))
            elif wanted is not None and load.now_ms() > plan.end_ms + 1000 * PATIENCE_S:
                break
            if wanted is None and results.poll():
                wanted = results.recv()
        subscription.flush(PATIENCE_S)
    received_at_ms = np.concatenate([batch.received_at_ms_by_row for batch in came])
    ignored = sum(answer.result() for answer in answers)
    results.send((tarry_load.rows_of(came), received_at_ms.astype(np.int64), ignored))


@dataclasses.dataclass(frozen=True, eq=False)
class _Withdrawn:
    """Rows that were, by their answers, and when these came; the others were due before."""

    numbers: Numbers
    answered_at_ms: Numbers
    seconds: float
    may_have_landed: bool


def _withdraw_when_told(
    address: str, plan: Plan, rows: int, batch_rows: int, in_flight: int, niceness: int, results: Connection
) -> None:
    os.nice(niceness)
    of = Load(plan)

    async def work() -> None:
        async with tarry.aio.Client(address) as client:
            await client.stats(NAME)
            results.send("ready")
            for part, phase in enumerate((CANCELLING, RESCHEDULING)):
                numbers = of.chosen(part, rows)
                if results.recv() != phase:
                    raise ValueError(f"told something else than {phase}")
                results.send(await _withdraw(client, of, phase, numbers, batch_rows, in_flight))

    asyncio.run(work())


async def _withdraw(
    client: tarry.aio.Client, of: Load, phase: str, numbers: Numbers, batch_rows: int, in_flight: int
) -> _Withdrawn:
    """Cancels or reschedules the rows, with so many calls unanswered."""
    ledger_id, entry_id = of.rows.ledger_id, of.rows.entry_id
    call: Callable[[Numbers], Awaitable[tarry.Cancelled | tarry.Rescheduled]]
    if phase == CANCELLING:

        async def call(part: Numbers) -> tarry.Cancelled | tarry.Rescheduled:
            return await client.cancel(NAME, ledger_id[part], entry_id[part])

    else:

        async def call(part: Numbers) -> tarry.Cancelled | tarry.Rescheduled:
            times = of.new_deliver_at_ms[part]
            return await client.reschedule(NAME, ledger_id[part], entry_id[part], deliver_at_ms=times)

    firsts = iter(range(0, len(numbers), batch_rows))
    answered: list[tuple[Numbers, Numbers, bool]] = []

    async def take_turns() -> None:
        for first in firsts:
            part = numbers[first : first + batch_rows]
            answer = await call(part)
            stayed = np.concatenate((answer.not_found_index, answer.already_due_index, answer.in_flight_index))
            left = np.delete(part, stayed)
            answered.append((left, np.full(len(left), load.now_ms()), answer.may_have_landed))

    began_s = time.perf_counter()
    await asyncio.gather(*(take_turns() for _ in range(in_flight)))
    seconds = time.perf_counter() - began_s
    return _Withdrawn(
        np.concatenate([left for left, _, _ in answered]),
        np.concatenate([at_ms for _, at_ms, _ in answered]),
        seconds,
        any(may_have_landed for _, _, may_have_landed in answered),
    )


def _note(account: Account, phase: str, done: _Withdrawn) -> None:
    if phase == CANCELLING:
        account.note_cancelled(done.numbers)
    else:
        account.note_rescheduled(done.numbers, done.answered_at_ms)


def _check_pending(client: tarry.Client, rounds: workbench.Rounds, account: Account, *, from_ms: int) -> None:
    """Everything else is pending with its time, and nothing is due: by the counts, and row by row."""
    pending = account.pending(from_ms=from_ms)
    stats = client.stats(NAME)
    rounds.check_count("pending", stats.pending, len(pending))
    rounds.check_count("backlog", stats.subscriptions[0].backlog, 0)
    pages = []
    token = ""
    while True:
        page = client.scheduled_page(NAME, token, page_size=PAGE_ROWS)
        pages.append(page)
        token = page.next_page_token
        if not token:
            break
    listed = load.Rows(
        np.concatenate([page.ledger_id for page in pages]),
        np.concatenate([page.entry_id for page in pages]),
        np.concatenate([page.deliver_at_ms for page in pages]),
    )
    rounds.check("listed as pending", tarry_load.difference(listed, pending))


def _sleep_until(at_ms: int) -> None:
    time.sleep(max(0.0, (at_ms - load.now_ms()) / 1000))
