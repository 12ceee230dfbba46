"""Deletes the journal slots that no recovery can need any more.

A data slot goes when the checkpoint *before* the newest one covers it, so that a damaged checkpoint can fall back to
its predecessor. A fence is never deleted (R6): it stands in the way of an owner that was paused.

Owns: which slots go, and the low mark below which nothing is left to do.
Does not own: when a checkpoint is taken; manifests and other objects.
"""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
import logging
from collections.abc import Mapping

from daemon.durability import slot_put
from daemon.errors import Corruption, InvariantViolated
from storage_backends import object_store
from storage_backends.formats import journal, manifest, names

log = logging.getLogger(__name__)

# So many slots go in one call: the executor's threads have other work.
BATCH_SLOTS = 500


class JournalTruncation:
    """The truncation of one shard by the owner whose own fence is `fence_slot`. Used by one thread at a time.

    Everything above its fence up to a checkpoint of its own is its data; what lies below is listed once, and each slot
    shows its kind before it goes. `known_kinds`: of slots that the takeover has read. `executor` deletes in parallel
    and must not be the one that runs `truncate`.
    """

    def __init__(
        self,
        store: object_store.ObjectStore,
        *,
        shard: int,
        epoch: int,
        fence_slot: int,
        known_kinds: Mapping[int, journal.SlotKind],
        executor: concurrent.futures.Executor,
    ) -> None:
        self._store = store
        self._shard = shard
        self._epoch = epoch
        self._fence_slot = fence_slot
        self._known_kinds = dict(known_kinds)
        self._executor = executor
        self._next_own_slot = fence_slot + 1
        # What earlier owners left, lowest first; None until it was listed.
        self._left_behind: collections.deque[int] | None = None

    def truncate(self, newest: manifest.ShardManifest, *, slots_max: int = BATCH_SLOTS) -> int:
        """Deletes up to `slots_max` slots that `newest`, a committed manifest of this epoch, allows to go.

        Returns how many it looked at; 0 means that nothing is left to do for this manifest. Errors of the store are
        raised; call again later.
        """
        if newest.epoch != self._epoch:
            raise InvariantViolated(f"shard {self._shard}: epoch {self._epoch} truncates by one of {newest.epoch}")
        previous = newest.previous_checkpoint
        limit = 0 if previous is None else previous.replay_from
        if limit > newest.replay_from:
            raise InvariantViolated(
                f"shard {self._shard}: the checkpoint before covers slot {limit}, the newest only {newest.replay_from}"
            )
        if self._left_behind is None:
            self._left_behind = self._list_left_behind()
        left_behind = [slot for slot in itertools.islice(self._left_behind, slots_max) if slot <= limit]
        own_end = min(limit + 1, self._next_own_slot + slots_max - len(left_behind))
        own = range(self._next_own_slot, max(own_end, self._next_own_slot))
        keys = [names.journal_slot_key(self._shard, slot) for slot in (*filter(self._is_data, left_behind), *own)]
        collections.deque(self._executor.map(self._store.delete, keys), maxlen=0)
        for _ in left_behind:
            self._left_behind.popleft()
        self._next_own_slot = own.stop
        return len(left_behind) + len(own)

    def _list_left_behind(self) -> collections.deque[int]:
        listed = self._store.list(names.journal_prefix(self._shard))
        numbers = sorted(names.number_of(entry.key) for entry in listed)
        return collections.deque(slot for slot in numbers if slot < self._fence_slot)

    def _is_data(self, slot: int) -> bool:
        """Whether a slot below the owner's fence may go; one that does not say what it is stays."""
        kind = self._known_kinds.get(slot)
        if kind is None:
            try:
                holder = slot_put.holder_of(self._store, self._shard, slot)
            except Corruption as error:
                log.error("shard %d: a covered slot is not deleted: %s", self._shard, error)
                return False
            kind = None if holder is None else holder.kind
        return kind is journal.SlotKind.DATA
