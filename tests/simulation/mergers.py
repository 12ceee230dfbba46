"""Processes beside the daemons that merge buckets of topics that they do not own, as offline jobs do.

Owns: when one plans and from what, how long it takes, and that it may commit what it planned long ago.
Does not own: the steps of a merge (`tests._support.merging_process`), and what must be true when one lands (`objects`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

from storage_backends import bucket_merging, commit
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import Damaged, NotFound, ObjectStore
from tests._support.merging_process import MergingProcess
from tests.simulation.history import History

# How long it is from one merge to the next, and from the plan of one to its commit, virtual seconds.
PAUSES_S = (0.3, 3.0)
TAKES_S = (0.0, 0.0, 0.5, 6.0)
LIMITS = SegmentLimits(time_step_ms=5_000, rows_max=7, rows_min=0)


class Merger:
    """Merges the buckets of one topic. `now_ms`: the wall clock."""

    def __init__(
        self, store: ObjectStore, topic: str, shard: int, name: str, history: History, now_ms: Callable[[], int]
    ) -> None:
        self._what = f"{name} of {topic}"
        self._process = MergingProcess(store, topic, shard=shard, name=name, now_ms=now_ms, limits=LIMITS)
        self._history = history

    async def run(self, draw: random.Random, ended: Callable[[], bool]) -> None:
        pause_s = draw.choice(PAUSES_S)
        while not ended():
            await asyncio.sleep(draw.random() * 2 * pause_s)
            written = self._plan(draw)
            if written is not None:
                await asyncio.sleep(draw.random() * 2 * draw.choice(TAKES_S))
                self._commit(written)

    def _plan(self, draw: random.Random) -> bucket_merging.WrittenMerge | None:
        """Everything but the commit; None when there is nothing to merge, or a source is damaged."""
        runs = self._process.runs(draw.choice((2, 2, 3, 5))) if self._process.is_there else []
        if not runs:
            return None
        try:
            return self._process.write(draw.choice(runs))
        except (Damaged, NotFound):
            return None

    def _commit(self, written: bucket_merging.WrittenMerge) -> None:
        try:
            self._process.commit(written)
        except commit.Refused as refused:
            self._history.note(f"{self._what} is refused: {refused.reason}")
        else:
            self._history.note(f"{self._what} merges {len(written.operation.sources)} buckets")
