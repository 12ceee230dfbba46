"""Deleting slots of logs that no shard needs (L7, L12): of the own log, and of logs that have an end.

Owns: which logs nothing names, which of those get an end, and what of the own log went in a pass.
Does not own: up to which slot the own log goes (`log_truncation`), deleting (`slot_log`), fencing (`fences`), when
there is a pass (`garbage_collection`).

    the logs that have an end are found        a FENCE or CLOSE is their highest slot
    the manifests of all shards are read       after that: a claim that names such a log later proves that it is empty
    what no manifest names goes                all below that end; the end stays for ever
    what no manifest names and has no end      is fenced when no daemon has told of it for `SILENT_S`: a crash left it
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from daemon.core.object_count import NOTHING, ObjectCount
from daemon.owner import heartbeat
from daemon.owner.fences import Fences
from daemon.owner.heartbeat import Heartbeat
from daemon.owner.living_log import LivingLog
from daemon.runtime.environment import Environment
from storage_backends import commit, log_fence, object_store
from storage_backends.formats.manifest import ShardManifest
from storage_backends.slot_log import LogHeld, SlotLogs

log = logging.getLogger(__name__)

# A log that nothing names is fenced when its daemon has shown no heartbeat for so long.
SILENT_S = 3600.0


class _Told(NamedTuple):
    """The heartbeat that tells of a log, None without one, and since when it has been the same, monotonic seconds."""

    heartbeat: Heartbeat | None
    since_s: float


class LogCollection:
    """`manifests`: of every shard of the root. `living`: the own log; None while there is none."""

    def __init__(
        self,
        logs: SlotLogs,
        manifests: Sequence[commit.ManifestLog[ShardManifest]],
        living: Callable[[], LivingLog | None],
        environment: Environment,
    ) -> None:
        self._logs = logs
        self._manifests = manifests
        self._living = living
        self._environment = environment
        # Of logs that have no end and that nothing names.
        self._told: dict[str, _Told] = {}

    async def own(self, *, dry_run: bool) -> ObjectCount:
        """Deletes what no shard needs of the own log; what has gone, or in a dry run would."""
        living = self._living()
        if living is None:
            return NOTHING
        if dry_run:
            return living.unneeded()
        before = living.deleted
        await living.truncated()
        living.truncate()
        await living.truncated()
        return living.deleted - before

    async def dead(self) -> None:
        """Deletes what lies below the end of each log that no manifest names; fences those that have no end, and whose
        daemons are silent.

        A manifest that is damaged may name any log, and a damaged log has no end: then nothing goes. Raises the store's
        errors when it cannot be reached.
        """
        living = self._living()
        own = None if living is None else living.log_id
        try:
            silent = await self._environment.pools.collection.run(lambda: self._delete_dead(own))
        except object_store.Damaged as damage:
            log.warning("no log of a former owner is deleted: %s", damage)
            return
        fences = Fences(self._logs, self._environment)
        for log_id in silent:
            try:
                await fences.of(log_id)
            except (LogHeld, object_store.Damaged) as error:
                log.warning("log %s, which no shard names, has no end and gets none: %s", log_id, error)

    def _delete_dead(self, own: str | None) -> list[str]:
        """Deletes; gives the logs without an end that are to be fenced."""
        ends = {log_id: log_fence.ended_at(self._logs, log_id) for log_id in sorted(self._logs.log_ids() - {own})}
        if not ends:
            return []
        named: set[str] = set()
        for manifests in self._manifests:
            tip = manifests.read_tip()
            if tip is not None:
                named.update(each.log_id for each in tip.manifest.ranges)
        unnamed = sorted(ends.keys() - named)
        for log_id in unnamed:
            end = ends[log_id]
            if end is not None and end > 1:
                slots = self._logs.log(log_id)
                try:
                    slots.delete_through(end - 1)
                finally:
                    slots.close()
        return self._silent([log_id for log_id in unnamed if ends[log_id] is None])

    def _silent(self, logs: Sequence[str]) -> list[str]:
        """Those of the logs of which the same heartbeat has told, or none, for `SILENT_S`."""
        now_s = self._environment.clock.elapsed_s()
        beats = self._heartbeats() if logs else {}
        before, self._told = self._told, {}
        for log_id in logs:
            now = _Told(beats.get(log_id), now_s)
            told = before.get(log_id, now)
            self._told[log_id] = told if told.heartbeat == now.heartbeat else now
        return [log_id for log_id, each in self._told.items() if now_s - each.since_s >= SILENT_S]

    def _heartbeats(self) -> dict[str, Heartbeat]:
        """By log, the newest heartbeat of the daemon that writes it."""
        beats = heartbeat.read_heartbeats(self._environment.store)
        return {beat.log_id: beat for beat in beats if not beat.log_ended}
