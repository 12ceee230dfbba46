"""Shows what each hot path costs, and its limit: `python -m tests.daemon.hot_paths._support.show_counts`."""

from __future__ import annotations

import asyncio
import dataclasses
import sys

from tests._support.engine_fixture import EngineFixture
from tests._support.virtual_loop import VirtualLoop
from tests.daemon.hot_paths._support import paths
from tests.daemon.hot_paths._support.counted_calls import Counts


async def _counts_of(path: str) -> Counts:
    machines = EngineFixture()
    try:
        return await paths.counts_of(machines, path)
    finally:
        await machines.close()


def main() -> None:
    for path in paths.PATHS:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            counts = dataclasses.asdict(runner.run(_counts_of(path)))
        limits = dataclasses.asdict(paths.LIMITS[path])
        said = ", ".join(f"{name} {count:g} of {limits[name]:g}" for name, count in counts.items())
        sys.stdout.write(f"{path}: {said}\n")


if __name__ == "__main__":
    main()
