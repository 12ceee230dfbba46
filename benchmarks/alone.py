"""Runs one measurement alone: with sizes of its own, another store, or the daemon of another checkout.

It defines the options that all such commands share, and shows the figures on the terminal and in a file. `cost`,
`service`, `topics` and `takeover` add options of their own.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from benchmarks import machine, report, slow_store, workbench
from examples import processes

LOCAL, SLOW = "local", "slow"
# The width if no terminal reports one
WIDTH = 140


def parser(measurement: str, description: str | None, *, store: str) -> argparse.ArgumentParser:
    """Return a parser with the shared options; `store` is the default store."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{measurement}", description=description)
    made.formatter_class = argparse.RawDescriptionHelpFormatter
    add = made.add_argument
    add("--rounds", type=int, default=1, help="default: %(default)s")
    add("--store", choices=(LOCAL, SLOW), default=store, help="default: %(default)s")
    add("--delay-ms", type=float, default=slow_store.DELAY_MS, help="of each request to a slow store")
    add("--daemon", type=Path, default=processes.REPOSITORY, help="the checkout whose daemon runs")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="a daemon's setting")
    add("--directory", type=Path, help="where the servers' directories are made; the disk measured")
    add("--json", type=Path, metavar="FILE", help="write everything here as JSON")
    return made


def run(
    options: argparse.Namespace,
    measure: Callable[[workbench.Workbench], report.Result],
    *,
    batch_rows: int,
    in_flight: int,
    seed: int,
) -> int:
    """Measure and show; return the exit status. `options` are those that `parser` parsed."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    progress = Console(stderr=True, highlight=False, style="dim")
    cores = machine.Cores.of_this_machine()
    with (
        machine.on_core(cores.client),
        tempfile.TemporaryDirectory(prefix="tarry-benchmark-", dir=options.directory) as directory,
    ):
        bench = workbench.Workbench(
            directory=Path(directory),
            cores=cores,
            redis=None,
            rounds=options.rounds,
            quick=False,
            batch_rows=batch_rows,
            in_flight=in_flight,
            seed=seed,
            why_without_redis="",
            settings=dict(each.split("=", 1) for each in options.set),
            say=progress.print,
        )
        result = measure(bench)
        taken_on = machine.describe(bench.directory, cores, None)
    result.show(console)
    if options.json is not None:
        report.write_json(options.json, taken_on, [result])
    return 1 if result.problems else 0
