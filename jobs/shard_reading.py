"""Reads the checkpoint and the journal of a shard while an owner may be writing them.

Owns: the order of these reads, and beginning again when slots were deleted before they were read.
Does not own: the topics' manifests, which are read in between (`topic_reading`), and what the slots say.

    the shard's manifest, the checkpoint that it names, the journal from there on
    the manifests of topics
    the journal up to its end

In this order nothing is missed: what a manifest has is as new as the checkpoint or newer, and every slot that was
written before the manifest is read. An owner deletes slots that the checkpoint before its newest one covers; if it has
come so far that a slot which is still to be read could be gone, all of it is read again.
"""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Container, Mapping
from typing import Final, TypeVar

from jobs.root import Root
from storage_backends import checkpoints, journal_slots, topic_tails
from storage_backends.checkpoints import LoadedCheckpoint
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import BEFORE_THE_FIRST
from storage_backends.journal_slots import Slot
from storage_backends.object_store import Damaged, NotFound, StoreUnavailable
from storage_backends.topic_tails import TopicTail

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS_MAX: Final = 5
"""How often a shard is read whose owner writes checkpoints faster than that."""

_NOTHING: Final = LoadedCheckpoint(None, BEFORE_THE_FIRST)


class _OvertakenError(Exception):
    """Slots that were to be read may be deleted."""


class ShardReading:
    """One shard. `only`: the topics that are asked for. `executor` reads slots; it must not be the one that runs this.

    `last_slot`: the last slot that was read; 0 before the first.
    """

    def __init__(self, root: Root, shard: int, executor: concurrent.futures.Executor, *, only: Container[str]) -> None:
        self.root = root
        self.executor = executor
        self._shard = shard
        self._only = only
        self._loaded: LoadedCheckpoint | None = None
        self._slots: list[Slot] = []
        self.last_slot = 0

    @property
    def checkpoint_key(self) -> str:
        """The checkpoint that was read; empty when there is none."""
        return "" if self._loaded is None else self._loaded.key

    def slot_key(self, slot: int) -> str:
        return names.journal_slot_key(self._shard, slot)

    def around(self, read: Callable[[], T]) -> tuple[T, Mapping[str, TopicTail]]:
        """What `read` gives, which reads manifests of topics, and what checkpoint and journal hold of the topics asked
        for, by topic id: no manifest is older than the checkpoint, and no slot is missing that was written before it.

        `read` may be called again. Raises Damaged naming the object, and the store's errors.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if self._loaded is None or self._is_overtaken():
                    self._begin()
                found = read()
                self._read_on()
                return found, self._tails()
            except _OvertakenError:
                log.info("shard %d: its owner has written checkpoints meanwhile (reading %d)", self._shard, attempt)
                self._loaded = None
        raise StoreUnavailable(
            names.shard_prefix(self._shard),
            f"checkpoints are written faster than the journal can be read: tried {ATTEMPTS_MAX} times",
        )

    def _tails(self) -> Mapping[str, TopicTail]:
        loaded = None if self._loaded is None else self._loaded.checkpoint
        slots = ((slot.header, slot.records) for slot in self._slots)
        return topic_tails.tails_of(loaded, slots, only=self._only)

    def _begin(self) -> None:
        tip = self._tip()
        try:
            # Without a manifest there was no owner yet.
            self._loaded = _NOTHING if tip is None else checkpoints.read_newest(self.root.store, tip, damaged=_ignored)
        except (Damaged, NotFound):
            newer = self._tip()
            if tip is not None and newer is not None and newer.checkpoint != tip.checkpoint:
                raise _OvertakenError from None
            raise
        self._slots, self.last_slot = [], self._loaded.replay_from
        self._read_on()

    def _read_on(self) -> None:
        """Reads the slots behind the last one that was read."""
        try:
            more = journal_slots.read_tail(self.root.store, self._shard, self.last_slot + 1, executor=self.executor)
        except Damaged:
            if self._is_overtaken():
                raise _OvertakenError from None
            raise
        if self._slots and more:
            journal_slots.check_epochs(self._slots[-1].header, more[0].header)
        self._slots += more
        self.last_slot += len(more)
        if self._is_overtaken():
            raise _OvertakenError

    def _is_overtaken(self) -> bool:
        """Whether a slot behind the last one that was read may be deleted."""
        tip = self._tip()
        deleted_to = 0 if tip is None or tip.previous_checkpoint is None else tip.previous_checkpoint.replay_from
        return deleted_to > self.last_slot

    def _tip(self) -> ShardManifest | None:
        tip = self.root.shard_tip(self._shard)
        return None if tip is None else tip.manifest


def _ignored(key: str) -> None:
    """That a checkpoint is damaged is logged where it is read."""
