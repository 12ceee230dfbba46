"""A daemon on a slow store with a control beside it: requests that wait for nobody.

    python -m tests.wire._support.daemon_with_control --control FILE [--bug BUG] [what `benchmarks.slow_store` is given]

The control is asked for on the daemon's own event loop, at a steady rate, and each of its requests has a thread of its
own: what the machine, the loop, the interpreter and the disk make an add wait for, they make the control wait for. The
file has the requests as `benchmarks.slow_store` notes them, from the time at which each should have begun.

Owns: the control, and the bugs that a test must find. Does not own: the store, and the log of the daemon's requests.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import slow_store
from daemon import process
from daemon.runtime import pools
from daemon.runtime.environment import Environment
from storage_backends.object_store import ObjectStore

PER_S = 20
KEY = "control"
# A request that is noted is over: as many are under way where each takes a minute.
THREADS = 60 * PER_S


class _Control:
    def __init__(self, store: ObjectStore, noted: Callable[[slow_store.Request], None]) -> None:
        self._store = store
        self._noted = noted
        self._threads = concurrent.futures.ThreadPoolExecutor(THREADS)
        self._under_way: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        began_s = slow_store.clock_s()
        for number in itertools.count():
            at_s = began_s + number / PER_S
            await asyncio.sleep(max(0.0, at_s - slow_store.clock_s()))
            task = asyncio.create_task(self._ask(at_s))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _ask(self, at_s: float) -> None:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._store.put, KEY, b"")
        self._noted(slow_store.Request(at_s, slow_store.clock_s(), "put", KEY))


def _beside(noted: Callable[[slow_store.Request], None]) -> None:
    """Whoever serves from here on has a control beside it."""
    serve = process.serve

    async def with_control(settings: Any, store: ObjectStore, *rest: Any, **named: Any) -> None:
        control = asyncio.create_task(_Control(store, noted).run())
        try:
            await serve(settings, store, *rest, **named)
        finally:
            control.cancel()

    process.serve = with_control


def one_line() -> None:
    """Everything that waits for the store waits in one line, the journals too, and there is no end to what is in it."""
    opened = pools.opened

    @contextlib.contextmanager
    def of_one(*args: Any, **kwargs: Any) -> Iterator[pools.Pools]:
        with opened(*args, **kwargs) as made:
            yield dataclasses.replace(pools.Pools.of_one(made.calls), deletions=made.deletions)

    def no_bound(_: Environment) -> asyncio.Semaphore:
        return asyncio.Semaphore(sys.maxsize)

    pools.opened = of_one
    for name in ("loading_turns", "sealing_turns"):
        setattr(Environment, name, property(no_bound))


BUGS = {bug.__name__: bug for bug in (one_line,)}


def program(root: Path, delay_ms: float, *, requests: Path, control: Path, bug: str = "") -> tuple[str, ...]:
    """The command that takes the place of `tarryd`, on a store as `slow_store.settings` say."""
    planted = ("--bug", bug) if bug else ()
    own = ("--control", str(control), *planted)
    return (sys.executable, "-m", __spec__.name, *own, *slow_store.own_options(root, delay_ms, requests))


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--control", type=Path, required=True)
    parser.add_argument("--bug", choices=BUGS)
    options, rest = parser.parse_known_args()
    if options.bug is not None:
        BUGS[options.bug]()
    with slow_store.noting(options.control) as noted:
        _beside(noted)
        return slow_store.main(rest)


if __name__ == "__main__":
    sys.exit(main())
