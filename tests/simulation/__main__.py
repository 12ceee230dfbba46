"""Runs seeds: `python -m tests.simulation --help`."""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import sys
import time
from collections.abc import Iterable, Iterator

from tests.simulation.faults import ALL_PLACES
from tests.simulation.fired import Fired, at
from tests.simulation.run import Result, run

PROGRESS_S = 5.0


def main() -> int:
    """0 when no rule was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--seed", type=int, help="this seed alone, with its whole story")
    parser.add_argument("--keep-going", action="store_true", help="go on after a seed that breaks a rule")
    arguments = parser.parse_args()
    if arguments.seed is not None:
        result = run(arguments.seed, everything=True)
        say(*result.lines, verdict(result))
        return 1 if result.breaches else 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return simulate(seeds, jobs=arguments.jobs, keep_going=arguments.keep_going)


def simulate(seeds: range, *, jobs: int, keep_going: bool) -> int:
    started_s = said_s = time.monotonic()
    done = steps = broken = 0
    fired = Fired()
    for result in results(seeds, jobs):
        done += 1
        steps += result.steps
        fired += result.fired
        now_s = time.monotonic()
        if result.breaches:
            broken += 1
            say(verdict(result))
            if not keep_going:
                say(*result.lines[-60:], f"its whole story: python -m tests.simulation --seed {result.seed}")
                break
        elif now_s - said_s > PROGRESS_S:
            said_s = now_s
            say(f"{done} of {len(seeds)} seeds, {done / (now_s - started_s):.1f} seeds/s")
    seconds = time.monotonic() - started_s
    say(
        f"{done} seeds from {seeds.start} on, {steps} steps, {broken} violations, {done / seconds:.1f} seeds/s "
        f"in {jobs} processes"
    )
    say(*(f"{fired[name]:>9} {name}" for name in sorted(fired | {at(place): 0 for place in ALL_PLACES})))
    return 1 if broken else 0


def results(seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """In the order of the seeds."""
    if jobs == 1:
        yield from map(run, seeds)
        return
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as executor:
        try:
            yield from executor.map(run, seeds, chunksize=4)
        finally:
            executor.shutdown(cancel_futures=True)


def verdict(result: Result) -> str:
    if not result.breaches:
        return f"seed {result.seed}: {result.steps} steps, trace {result.digest}, no violation"
    return "\n".join((f"seed {result.seed} breaks a rule:", *(f"  {breach}" for breach in result.breaches)))


def say(*lines: str) -> None:
    sys.stdout.write("\n".join((*lines, "")))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
