"""Watches for topics that other processes merged, by one request a minute for all topics, in a loop of its own.

Several daemons may share a root: each clears the hints of the shards that it serves. `storage_backends.merge_hints` has
the hints. The topics of a shard that is taken over are checked without one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from daemon.runtime.environment import Environment
from daemon.shard.shard import ServedShard
from storage_backends import merge_hints
from storage_backends.merge_hints import MergeHint
from storage_backends.object_store import StoreError

log = logging.getLogger(__name__)

LOOK_S = 60.0
# Hints that one thread clears one after the other before the topics are checked: that sets the pace.
PORTION_HINTS = 16

# The value of the hints, and the shards, for which they were last cleared
_Handled = tuple[bytes, frozenset["ServedShard"]]


class MergeWatch:
    """The watch for the shards of one daemon. `shards` returns those that are served now."""

    def __init__(self, environment: Environment, shards: Callable[[], Mapping[int, ServedShard]]) -> None:
        self._environment = environment
        self._shards = shards
        self._handled: _Handled | None = None

    async def run(self) -> None:
        """Check for hints until it is cancelled."""
        while True:
            await self._environment.sleep(LOOK_S)
            try:
                await self._look()
            except StoreError as error:
                log.info("cannot read merge hints, retrying: %s", error)

    async def _look(self) -> None:
        environment = self._environment
        value = await environment.run(lambda: merge_hints.value(environment.store))
        shards = frozenset(self._shards().values())
        if value is None or not shards or self._handled == (value, shards):
            return
        hints, foreign = await environment.run(lambda: merge_hints.listed(environment.store))
        if foreign:
            log.warning("%d keys among the hints of mergers are none, for instance %s", len(foreign), foreign[0])
        ours = [hint for hint in hints if hint.shard in self._shards()]
        ready = [hint for hint in ours if not self._may_come(hint)]
        for first in range(0, len(ready), PORTION_HINTS):
            await self._clear(ready[first : first + PORTION_HINTS])
        if ready:
            log.info("others merged: hints=%d topics_to_be_loaded=%d", len(ready), len(ours) - len(ready))
        if len(ready) == len(ours):
            self._handled = value, shards

    def _may_come(self, hint: MergeHint) -> bool:
        """Return whether the hint's topic is being loaded or will be, possibly from data older than the merge."""
        return self._shards()[hint.shard].may_load(hint.topic_id)

    async def _clear(self, hints: Sequence[MergeHint]) -> None:
        store = self._environment.store

        def clear_all() -> None:
            for hint in hints:
                merge_hints.clear(store, hint)

        try:
            await self._environment.run(clear_all)
        finally:
            # Also for hints that may not have been cleared
            for hint in hints:
                shard = self._shards().get(hint.shard)
                if shard is not None:
                    shard.look_for_merges(hint.topic_id)
