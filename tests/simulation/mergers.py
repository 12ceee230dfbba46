"""Processes beside the daemons that merge buckets of topics that they do not own, as offline jobs do.

Owns: when one plans and from what, how long it takes, and that it may commit what it planned long ago.
Does not own: the merge of the rows and its commit (`daemon.durability.merging`), and what must be true when one lands
(`objects`).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

from daemon.durability import merging
from daemon.errors import Corruption
from storage_backends import commit, topic_manifest, topic_merge
from storage_backends.formats import names
from storage_backends.formats.manifest import LiveBucket, TopicManifest
from storage_backends.formats.segment import SegmentLimits
from storage_backends.object_store import ObjectStore
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
        self._store = store
        self._shard = shard
        self._topic_id = names.topic_id(topic)
        self._what = f"{name} of {topic}"
        self._history = history
        self._now_ms = now_ms
        numbers = itertools.count()
        self._new_id = lambda: f"{name}-{next(numbers):04}"
        self._log = topic_manifest.topic_log(
            store,
            shard,
            self._topic_id,
            monotonic=lambda: 0.0,
            sleep=lambda _: None,
            jitter=lambda: 0.5,
            new_id=self._new_id,
        )

    async def run(self, draw: random.Random, ended: Callable[[], bool]) -> None:
        pause_s = draw.choice(PAUSES_S)
        while not ended():
            await asyncio.sleep(draw.random() * 2 * pause_s)
            written = self._plan(draw)
            if written is not None:
                await asyncio.sleep(draw.random() * 2 * draw.choice(TAKES_S))
                self._commit(written)

    def _plan(self, draw: random.Random) -> merging.WrittenMerge | None:
        """Everything but the commit; None when there is nothing to merge, or a source is damaged."""
        tip = self._log.read_tip()
        runs = [] if tip is None else _runs(tip.manifest, draw.choice((2, 2, 3, 5)))
        if tip is None or not runs:
            return None
        run = draw.choice(runs)
        key = names.bucket_key(self._shard, self._topic_id, tip.manifest.head.number, self._new_id())
        plan = merging.MergePlan(tip.manifest, tuple(run), key)
        try:
            sources = [merging.read_source(self._store, live) for live in run]
        except Corruption:
            return None
        made = merging.merged(self._store, plan, sources, limits=LIMITS, compatible=False)
        return merging.write(self._store, plan, sources, made, delete_after_ms=self._now_ms())

    def _commit(self, written: merging.WrittenMerge) -> None:
        try:
            commit.commit(
                self._log, written.operation, writer=self._what, created_ms=self._now_ms(), warm=None, deadline_s=10.0
            )
        except commit.Refused as refused:
            self._history.note(f"{self._what} is refused: {refused.reason}")
        else:
            self._history.note(f"{self._what} merges {len(written.operation.sources)} buckets")


def _runs(tip: TopicManifest, length: int) -> list[Sequence[LiveBucket]]:
    """Neighbours of one index."""
    order = topic_merge.adjacent_order(tip.live)
    runs = [order[start : start + length] for start in range(len(order) - length + 1)]
    return [run for run in runs if len({live.subscription_id for live in run}) == 1]
