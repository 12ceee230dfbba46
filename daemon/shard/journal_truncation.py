"""Deletes the journal slots that no recovery can need any more.

A data slot goes when the checkpoint *before* the newest one covers it, so that a damaged checkpoint can fall back to
its predecessor. A fence is never deleted (R6): it stands in the way of an owner that was paused.

Owns: which slots go, the low mark below which nothing is left to do, and the count of what went.
Does not own: when a checkpoint is taken; manifests and other objects.
"""

from __future__ import annotations

import array
import collections
import concurrent.futures
import itertools
import logging
from collections.abc import Mapping
from typing import NamedTuple

from daemon.core.object_count import NOTHING, ObjectCount
from daemon.errors import Corruption, InvariantViolated
from daemon.shard import slot_put
from storage_backends import object_store
from storage_backends.formats import format_errors, manifest, names, slot_format

log = logging.getLogger(__name__)

# So many slots go in one call: the executor's threads have other work.
BATCH_SLOTS = 500


class _Slot(NamedTuple):
    number: int
    size_bytes: int


class JournalTruncation:
    """The truncation of one shard by the owner whose own fence is `fence_slot`. Used by one thread at a time, but for
    `written`. `deleted`: what went so far.

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
        known_kinds: Mapping[int, slot_format.SlotKind],
        executor: concurrent.futures.Executor,
    ) -> None:
        self._store = store
        self._shard = shard
        self._epoch = epoch
        self._fence_slot = fence_slot
        self._known_kinds = dict(known_kinds)
        self._executor = executor
        self.deleted = NOTHING
        self._next_own_slot = fence_slot + 1
        # Sizes of the own slots from the next one on.
        self._own_bytes = array.array("I")
        # What earlier owners left, lowest first; None until it was listed.
        self._left_behind: collections.deque[_Slot] | None = None

    def written(self, size_bytes: int) -> None:
        """The next own slot is certain and has so many bytes. Called in any thread."""
        self._own_bytes.append(size_bytes)

    def truncate(self, newest: manifest.ShardManifest, *, slots_max: int = BATCH_SLOTS) -> int:
        """Deletes up to `slots_max` slots that `newest`, a committed manifest of this epoch, allows to go.

        Returns how many it looked at; 0 means that nothing is left to do for this manifest. Errors of the store are
        raised; call again later.
        """
        left_behind, own = self._next(self._limit(newest), slots_max)
        going = self._data_of(left_behind)
        keys = [names.journal_slot_key(self._shard, slot) for slot in (*(slot.number for slot in going), *own)]
        collections.deque(self._executor.map(self._store.delete, keys), maxlen=0)
        self.deleted += ObjectCount(
            len(keys), sum(slot.size_bytes for slot in going) + sum(self._own_bytes[: len(own)])
        )
        for _ in left_behind:
            self._listed().popleft()
        self._next_own_slot = own.stop
        del self._own_bytes[: len(own)]
        return len(left_behind) + len(own)

    def covered(self, newest: manifest.ShardManifest) -> ObjectCount:
        """What `truncate` would delete by this manifest in all. Errors of the store are raised."""
        limit = self._limit(newest)
        left_behind, own = self._next(limit, limit)
        going = self._data_of(left_behind)
        size_bytes = sum(slot.size_bytes for slot in going) + sum(self._own_bytes[: len(own)])
        return ObjectCount(len(going) + len(own), size_bytes)

    def _limit(self, newest: manifest.ShardManifest) -> int:
        """The last slot that may go."""
        if newest.epoch != self._epoch:
            raise InvariantViolated(f"shard {self._shard}: epoch {self._epoch} truncates by one of {newest.epoch}")
        previous = newest.previous_checkpoint
        limit = 0 if previous is None else previous.replay_from
        if limit > newest.replay_from:
            raise InvariantViolated(
                f"shard {self._shard}: the checkpoint before covers slot {limit}, the newest only {newest.replay_from}"
            )
        return limit

    def _next(self, limit: int, slots_max: int) -> tuple[list[_Slot], range]:
        """The next slots up to `limit`: of earlier owners, fences among them, and own ones."""
        left_behind = [slot for slot in itertools.islice(self._listed(), slots_max) if slot.number <= limit]
        own_end = min(limit + 1, self._next_own_slot + slots_max - len(left_behind))
        return left_behind, range(self._next_own_slot, max(own_end, self._next_own_slot))

    def _listed(self) -> collections.deque[_Slot]:
        if self._left_behind is None:
            slots = []
            for entry in self._store.list(names.journal_prefix(self._shard)):
                try:
                    slots.append(_Slot(names.number_of(entry.key), entry.size_bytes))
                except format_errors.FormatError as error:
                    log.warning("shard %d: what is no slot is left alone: %s", self._shard, error)
            self._left_behind = collections.deque(slot for slot in sorted(slots) if slot.number < self._fence_slot)
        return self._left_behind

    def _data_of(self, slots: list[_Slot]) -> list[_Slot]:
        """Those that may go. Each that nobody has read is looked at, which is a request."""
        are_data = self._executor.map(self._is_data, [slot.number for slot in slots])
        return [slot for slot, is_data in zip(slots, are_data, strict=True) if is_data]

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
        return kind is slot_format.SlotKind.DATA
