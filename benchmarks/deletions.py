"""Two-phase deletion of ledgers: how fast they are recorded and deleted, and what that does to hand-outs.

Rows of a topic come due at a steady rate before, while and after ten thousand ledgers are recorded and deleted: what
is late while nothing is deleted and what is late meanwhile come from one run. The daemon writes as durably as ever.
`of what the place lets`: the same requests by as many threads of a process that does nothing else.

Owns: the phases, the account of the ledgers, the statistics. Does not own: the load (`steady_load`), the ledgers and
where they are (`ledger_places`), the daemon (`workbench`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

import tarry
from benchmarks import ledger_places, load, report, steady_load, workbench
from benchmarks.ledger_places import Ledger, Place

NAME = "deletions"
LOAD_TOPIC = "positions"
RATE, QUICK_RATE = 1_000, 100
DIRECTORY, ON_S3, AT_OWNER = "local directory", "S3", "owner by HTTP"
PLACES: Mapping[str, Callable[[workbench.Workbench], contextlib.AbstractContextManager[Place]]] = {
    DIRECTORY: ledger_places.directory,
    ON_S3: ledger_places.on_s3,
    AT_OWNER: ledger_places.at_owner,
}
RECORDS_OF_REQUEST = 1_000
# Between two spans; what comes due meanwhile belongs to none.
PAUSE_MS = 1_000
# How often the daemon is asked what is in flight, all the time, so that it is asked the same in each span.
POLL_S = 0.1
PATIENCE_S = 900.0
QUANTILES = {"p50": 50.0, "p99": 99.0, "max": 100.0}
WITHOUT, WITH = "lateness without", "lateness while deleting"
CPU = "daemon's CPU beside that of the load"
RATE_GOALS = {DIRECTORY: report.Goal(least=300)}
LATENESS_GOAL, TIMES_GOAL = report.Goal(most=15), report.Goal(most=2)


@dataclasses.dataclass(frozen=True)
class Size:
    """`ledgers`: that are recorded. `left`: that are not, and must stay. `probed`: deleted to see what the place lets.
    `alone_s`: how long nothing is deleted, before and after.
    """

    ledgers: int
    left: int
    probed: int
    alone_s: int


FULL, QUICK = Size(10_000, 100, 500, 15), Size(20, 5, 4, 1)


def run(bench: workbench.Workbench) -> report.Result:
    size = QUICK if bench.quick else FULL
    rounds = workbench.Rounds(bench, NAME)
    rounds.run({name: functools.partial(_turn, bench, rounds, size, name) for name in PLACES})
    figures = [figure for name in PLACES for figure in _figures(rounds, name)]
    parameters: dict[str, report.Value] = dataclasses.asdict(size)
    parameters |= {"rows_per_s": bench.size(RATE, QUICK_RATE), "records_of_a_request": RECORDS_OF_REQUEST}
    return report.Result(NAME, parameters | bench.parameters, figures, rounds.problems)


def _figures(rounds: workbench.Rounds, name: str) -> list[report.Figure]:
    without = [rounds.figure(f"{name}, {WITHOUT}, {quantile}", "ms") for quantile in QUANTILES]
    beside = [
        rounds.figure(f"{name}, {WITH}, {quantile}", "ms", LATENESS_GOAL if quantile == "p99" else None)
        for quantile in QUANTILES
    ]
    return [
        rounds.figure(f"{name}, deleted", "records/s", RATE_GOALS.get(name)),
        rounds.figure(f"{name}, of what the place lets", "x"),
        rounds.figure(f"{name}, recording, each request", "ms"),
        rounds.figure(f"{name}, recording, longest request", "ms"),
        rounds.figure(f"{name}, {CPU}", "ms/record"),
        *without,
        *beside,
        report.ratio(beside[1], without[1], TIMES_GOAL),
    ]


def _turn(bench: workbench.Workbench, rounds: workbench.Rounds, size: Size, name: str) -> Mapping[str, float]:
    return bench.with_time(name, functools.partial(_turn_once, bench, rounds, size, name))


def _turn_once(
    bench: workbench.Workbench, rounds: workbench.Rounds, size: Size, name: str, times: int
) -> Mapping[str, float]:
    """Raises TimeTooShort where no row that was added in time came due, alone or while ledgers were deleted."""
    alone_s = times * size.alone_s
    ledgers = ledger_places.some(size.ledgers + size.left + size.probed, bench.seed)
    recorded, left = ledgers[: size.ledgers], ledgers[size.ledgers : size.ledgers + size.left]
    with PLACES[name](bench) as place:
        most_per_s = ledger_places.most_per_s(bench, place, ledgers[size.ledgers + size.left :])
        place.fill([*recorded, *left])
        with (
            bench.daemon(configuration=place.configuration) as daemon,
            _steady_load(bench, daemon.address, times) as steady,
            tarry.Client(daemon.address) as client,
        ):
            watch = _Watch(client)
            watch.until(steady.first_due_ms + PAUSE_MS)
            cpu_s = [daemon.usage().cpu_s]
            before = watch.span(alone_s)
            cpu_s.append(daemon.usage().cpu_s)
            began_ms, began_s = load.now_ms(), time.perf_counter()
            took_ms = _record(client, rounds, name, [place.record(ledger) for ledger in recorded])
            watch.until_over()
            seconds, ended_ms = time.perf_counter() - began_s, load.now_ms()
            cpu_s.append(daemon.usage().cpu_s)
            watch.until(ended_ms + PAUSE_MS)
            after = watch.span(alone_s)
            came = steady.end()
            rounds.check(name, came.problem)
            deleted = daemon.metric("tarry_deletions_ended_total", outcome="deleted")
            rounds.check_count(f"{name}, deleted by the daemon's count", int(deleted), len(recorded))
            given_up = client.deletion_stats().given_up
            rounds.check(name, f"{given_up} deletions were given up" if given_up else None)
        rounds.check(name, _difference(place, left))
    return {
        f"{name}, {figure}": value
        for figure, value in {
            "deleted": len(recorded) / seconds,
            "of what the place lets": len(recorded) / seconds / most_per_s,
            "recording, each request": float(np.median(took_ms)),
            "recording, longest request": max(took_ms),
            CPU: 1000 * (cpu_s[2] - cpu_s[1] - (cpu_s[1] - cpu_s[0]) / alone_s * seconds) / len(recorded),
            **_quantiles(WITHOUT, came.lateness_of(before, after)),
            **_quantiles(WITH, came.lateness_of((began_ms, ended_ms))),
        }.items()
    }


def _steady_load(bench: workbench.Workbench, address: str, times: int) -> steady_load.SteadyLoad:
    rate = bench.size(RATE, QUICK_RATE)
    return steady_load.SteadyLoad(address, LOAD_TOPIC, rate, bench.seed, quick=bench.quick, times=times)


def _quantiles(name: str, lateness_ms: np.typing.NDArray[np.int64]) -> dict[str, float]:
    values = np.percentile(lateness_ms, list(QUANTILES.values()))
    return {f"{name}, {quantile}": float(value) for quantile, value in zip(QUANTILES, values, strict=True)}


def _record(
    client: tarry.Client, rounds: workbench.Rounds, name: str, deletes: Sequence[tarry.PendingDelete]
) -> list[float]:
    """How long each request took, ms."""
    took_ms, recorded = [], 0
    for first in range(0, len(deletes), RECORDS_OF_REQUEST):
        request = deletes[first : first + RECORDS_OF_REQUEST]
        began_s = time.perf_counter()
        recorded += len(client.record_pending_deletes(ledger_places.TOPIC, request).recorded)
        took_ms.append(1000 * (time.perf_counter() - began_s))
    rounds.check_count(f"{name}, recorded", recorded, len(deletes))
    return took_ms


def _difference(place: Place, left: Sequence[Ledger]) -> str | None:
    """Exactly what nobody recorded is there; None when it is so."""
    found, wanted = place.names(), {name for ledger in left for name in place.names_of(ledger)}
    if found == wanted:
        return None
    return f"{len(found - wanted):,} names were not deleted, {len(wanted - found):,} that nobody recorded were"


class _Watch:
    """Asks what is in flight, again and again."""

    def __init__(self, client: tarry.Client) -> None:
        self._client = client

    def until(self, at_ms: int) -> None:
        while load.now_ms() < at_ms:
            self._in_flight()

    def until_over(self) -> None:
        """Nothing is in flight. Raises TimeoutError."""
        deadline_s = time.monotonic() + PATIENCE_S
        while in_flight := self._in_flight():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{in_flight:,} deletions are in flight after {PATIENCE_S:g} s")

    def span(self, seconds: int) -> tuple[int, int]:
        """From now on so long; in ms."""
        from_ms = load.now_ms()
        until_ms = from_ms + 1000 * seconds
        self.until(until_ms)
        return from_ms, until_ms

    def _in_flight(self) -> int:
        in_flight = self._client.deletion_stats().in_flight
        time.sleep(POLL_S)
        return in_flight
