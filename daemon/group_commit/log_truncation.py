"""Up to which number this daemon's log may be deleted, from its own memory alone (L7).

Owns: what each shard needs of the log, and the bound.
Does not own: deleting (`slot_log`), operations on manifests (`range_operations`).

A manifest of another epoch says nothing here: its owner has fenced the log, and its ranges, which no memory of this
daemon holds, may be the only ones that need the slots.
"""

from __future__ import annotations

from daemon.errors import InvariantViolated
from storage_backends.formats.manifest import ShardManifest


class LogTruncation:
    """What is needed of the log `log_id`: of each shard that was ever claimed for it and has not certainly been
    released or given back, and of each claim that is under way.
    """

    def __init__(self, log_id: str) -> None:
        self._log_id = log_id
        # The number up to which the log is not needed for a shard.
        self._claims: dict[int, int] = {}
        self._needs: dict[int, int] = {}
        self._epochs: dict[int, int] = {}

    def claims(self, shard: int, *, after: int) -> None:
        """A claim was frozen with an open range from there on: from now on it may land."""
        if shard in self._claims:
            raise InvariantViolated(f"shard {shard}: two claims of it are under way")
        self._claims[shard] = after

    def claim_failed(self, shard: int) -> None:
        """The claim under way certainly has not landed, and never will."""
        del self._claims[shard]

    def claimed(self, manifest: ShardManifest) -> None:
        """The claim under way has landed, with this manifest."""
        shard = manifest.shard
        del self._claims[shard]
        self._epochs[shard] = manifest.epoch
        self._needs.pop(shard, None)
        self.learned(manifest)

    def learned(self, manifest: ShardManifest) -> None:
        """A manifest of a shard that was claimed, at least as new as any before."""
        shard = manifest.shard
        if self._epochs.get(shard) != manifest.epoch:
            return
        lowest = manifest.lowest_after(self._log_id)
        # Without one a release of this daemon has landed, and it is going to hear of it.
        if lowest is not None:
            self._needs[shard] = max(lowest, self._needs.get(shard, 0))

    def left(self, shard: int) -> None:
        """The shard was released or given back, for certain."""
        del self._needs[shard], self._epochs[shard]

    def bound(self, last_certain: int) -> int:
        """The number up to which the log may be deleted; 0 when nothing may. It never falls."""
        return max(0, min((last_certain - 1, *self._needs.values(), *self._claims.values())))
