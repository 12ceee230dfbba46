"""Measures, side by side with Redis, on servers of its own: `python -m benchmarks [MEASUREMENT ...]`.

Each measurement is a module. The exit status is 0 if every row was accounted for.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import (
    add,
    compaction,
    cost,
    drain,
    gaps,
    lateness,
    machine,
    memory,
    nack_memory,
    positions,
    relays,
    report,
    restart,
    selectors,
    service,
    stored,
    takeover,
    tls_cost,
    topics,
    workbench,
)
from examples import processes
from tests.brokers import redis_server

MEASUREMENTS: dict[str, Callable[[workbench.Workbench], report.Result]] = {
    module.NAME: module.run
    for module in (
        add,
        drain,
        lateness,
        tls_cost,
        memory,
        nack_memory,
        stored,
        positions,
        relays,
        restart,
        takeover,
        gaps,
        cost,
        service,
        topics,
        selectors,
        compaction,
    )
}
ALL = "all"
# The width if no terminal reports one
WIDTH = 140


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # End by an exception, so that the servers are ended and their directories removed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    progress = Console(stderr=True, highlight=False, style="dim", width=None if sys.stderr.isatty() else WIDTH)
    cores = machine.Cores.of_this_machine()
    redis = None if options.without_redis else redis_server.find()
    with (
        machine.on_core(cores.client),
        tempfile.TemporaryDirectory(prefix="tarry-benchmark-", dir=options.directory) as directory,
    ):
        bench = workbench.Workbench(
            directory=Path(directory),
            cores=cores,
            redis=redis,
            rounds=options.rounds,
            quick=options.quick,
            batch_rows=options.batch_rows,
            in_flight=options.in_flight,
            seed=options.seed,
            why_without_redis=workbench.LEFT_OUT if options.without_redis else workbench.MISSING,
            settings=dict(each.split("=", 1) for each in options.set),
            say=progress.print,
        )
        taken_on = machine.describe(bench.directory, cores, redis)
        report.show_machine(console, taken_on)
        results, failed = _measure(bench, options.measurements, console)
    if options.json is not None:
        report.write_json(options.json, taken_on, results)
    return 1 if failed or any(result.problems for result in results) else 0


def _measure(
    bench: workbench.Workbench, names: Sequence[str], console: Console
) -> tuple[list[report.Result], list[str]]:
    """Return the results, and the names of measurements that failed; these do not stop the others."""
    results, failed = [], []
    for name in MEASUREMENTS if ALL in names or not names else dict.fromkeys(names):
        try:
            result = MEASUREMENTS[name](bench)
        except (processes.ProcessFailed, TimeoutError) as error:
            failed.append(name)
            console.print(f"{name}: {error}", style="bold red", highlight=False, markup=False)
            continue
        results.append(result)
        result.show(console)
    return results, failed


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures, side by side with Redis, on servers of its own. No figure fails; a missing row does.",
    )
    names = [*MEASUREMENTS, ALL]
    parser.add_argument("measurements", nargs="*", metavar="MEASUREMENT", help=f"{', '.join(names)}; default: {ALL}")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="small sizes: shows that it works, measures nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything here as JSON")
    parser.add_argument("--batch-rows", type=int, default=1_000, help="rows of one request; default: %(default)s")
    parser.add_argument("--in-flight", type=int, default=16, help="requests unanswered; default: %(default)s")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a setting of the daemon; repeatable"
    )
    parser.add_argument("--directory", type=Path, help="where the servers' directories are made; the disk measured")
    parser.add_argument("--without-redis", action="store_true", help="Tarry's figures alone")
    parser.add_argument("--seed", type=int, default=195, help="default: %(default)s")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.measurements if name not in names]:
        parser.error(f"{', '.join(unknown)}: no such measurement; there are {', '.join(names)}")
    for name in ("rounds", "batch_rows", "in_flight"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if wrong := [each for each in options.set if "=" not in each]:
        parser.error(f"--set {wrong[0]} is not section.key=value")
    return options


if __name__ == "__main__":
    sys.exit(main())
