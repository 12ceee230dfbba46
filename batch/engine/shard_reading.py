"""Reads the checkpoints of shards and the sections above them while owners may be writing them.

Owns: the order of these reads, and beginning again when what was still to be read may be gone or elsewhere.
Does not own: the topics' manifests, which are read in between (`topic_reading`), how a log is read (`log_tails`), and
what the sections say.

    the shard's manifest, the checkpoint that it names, the sections above it
    the manifests of topics
    the sections that were written since
    the shard's manifest again

In this order nothing is missed: what a manifest of a topic has is as new as the checkpoint or newer, and every section
that was written before it is read. If another owner has come meanwhile, or slots behind those that were read may have
been deleted, all of it is read again.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, TypeVar

from batch.engine import log_tails
from batch.engine.log_tails import ShardTail
from batch.engine.root import Root
from storage_backends import checkpoints, log_reading, topic_tails
from storage_backends.checkpoints import LoadedCheckpoint
from storage_backends.formats import names
from storage_backends.formats.manifest import ShardManifest
from storage_backends.formats.shard_slot import BEFORE_THE_FIRST
from storage_backends.log_reading import Verdict
from storage_backends.object_store import Damaged, NotFound, StoreError, StoreUnavailable
from storage_backends.slot_log import SlotLogs
from storage_backends.topic_tails import TopicTail

log = logging.getLogger(__name__)

T = TypeVar("T")

ATTEMPTS_MAX: Final = 5
"""How often a shard is read whose owner writes checkpoints faster than that."""


class _OvertakenError(Exception):
    """What was to be read may be deleted, or written by another owner in another log."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Beginning:
    """A shard as of its newest manifest: what its checkpoint has, and the sections above it."""

    tip: ShardManifest
    loaded: LoadedCheckpoint
    tail: ShardTail


def begin_together(root: Root, shards: Iterable[int], executor: concurrent.futures.Executor) -> dict[int, Beginning]:
    """The shards, by number, each log read once for all of them. A shard that cannot be read now is left out: who reads
    it alone is told why. `executor`: as `ShardReading` has it.
    """

    def loaded_of(shard: int) -> tuple[ShardManifest, LoadedCheckpoint] | None:
        try:
            tip = root.shard_tip(shard)
            return None if tip is None else (tip.manifest, _checkpoint_of(root, tip.manifest))
        except StoreError:
            return None

    loaded = {tip.shard: (tip, found) for tip, found in filter(None, executor.map(loaded_of, shards))}
    try:
        tails = log_tails.read_tails(root.logs(executor), ((tip, found.slot) for tip, found in loaded.values()))
    except StoreError as error:
        log.info("reading shards one by one: %s", error)
        return {}
    return {shard: Beginning(*loaded[shard], tail) for shard, tail in tails.items() if isinstance(tail, ShardTail)}


class ShardReading:
    """One shard. `only`: the topics that are asked for. `executor` reads slots; it must not be the one that runs this.
    `begun`: what was read of the shard before, if it was.
    """

    def __init__(
        self,
        root: Root,
        shard: int,
        executor: concurrent.futures.Executor,
        *,
        only: Container[str],
        begun: Beginning | None = None,
    ) -> None:
        self.root = root
        self.executor = executor
        self._shard = shard
        self._only = only
        self._begun = begun
        # What was written since.
        self._more: list[ShardTail] = []

    @property
    def checkpoint_key(self) -> str:
        """The checkpoint that was read; empty when there is none."""
        return "" if self._begun is None else self._begun.loaded.key

    @property
    def last_slot(self) -> int:
        """The last shard slot that was read; 0 before the first."""
        tails = self._tails()
        return tails[-1].last_slot if tails else BEFORE_THE_FIRST

    def slot_key(self, slot: int) -> str:
        """The log slot in which a shard slot was found; the checkpoint for one that it carries over."""
        for tail in self._tails():
            if tail.sections and tail.sections[0].slot <= slot <= tail.last_slot:
                return tail.keys[slot - tail.sections[0].slot]
        return self.checkpoint_key

    def around(self, read: Callable[[], T]) -> tuple[T, Mapping[str, TopicTail]]:
        """What `read` gives, which reads manifests of topics, and what checkpoint and sections hold of the topics asked
        for, by topic id: no manifest is older than the checkpoint, no section is missing that was written before it.

        `read` may be called again. Raises Damaged naming the object, and the store's errors.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if self._begun is None:
                    self._begin()
                found = read()
                self._read_on()
                return found, self._by_topic()
            except _OvertakenError:
                log.info("shard %d changed while it was read (reading %d)", self._shard, attempt)
                self._begun, self._more = None, []
        raise StoreUnavailable(
            names.shard_prefix(self._shard),
            f"new checkpoints replaced the sections during each of {ATTEMPTS_MAX} readings; run it again",
        )

    def _tails(self) -> list[ShardTail]:
        return [] if self._begun is None else [self._begun.tail, *self._more]

    def _by_topic(self) -> Mapping[str, TopicTail]:
        loaded = None if self._begun is None else self._begun.loaded.checkpoint
        slots = ((each.slot, each.records) for tail in self._tails() for each in tail.sections)
        return topic_tails.tails_of(loaded, slots, only=self._only)

    def _begin(self) -> None:
        tip = self._tip()
        if tip is None:
            # There was no owner yet.
            return
        try:
            loaded = _checkpoint_of(self.root, tip)
            tail = log_tails.read_tail(self._logs, tip, loaded.slot)
        except (Damaged, NotFound):
            newer = self._tip()
            if newer is None or newer.checkpoint != tip.checkpoint or _says_other_than(tip, newer):
                raise _OvertakenError from None
            raise
        self._begun = Beginning(tip, loaded, tail)

    def _read_on(self) -> None:
        """Reads the sections behind the last one that was read."""
        begun = self._begun
        if begun is not None and begun.tip.open_range is not None:
            end, last_slot = self._tails()[-1].end, self.last_slot
            rest = dataclasses.replace(begun.tip.open_range, after=end, first_slot=last_slot + 1)
            try:
                more = log_tails.read_tail(self._logs, dataclasses.replace(begun.tip, ranges=(rest,)), last_slot)
            except Damaged:
                if self._is_overtaken():
                    raise _OvertakenError from None
                raise
            self._more.append(more)
        if self._is_overtaken():
            raise _OvertakenError

    def _is_overtaken(self) -> bool:
        """Whether somebody else may have written since, or a slot behind those that were read may be deleted."""
        now = self._tip()
        if self._begun is None or now is None:
            return now is not None
        before = self._begun.tip
        if now.epoch != before.epoch or (now.open_range is None) != (before.open_range is None):
            return True
        return now.open_range is not None and now.open_range.after > self._tails()[-1].end

    @functools.cached_property
    def _logs(self) -> SlotLogs:
        return self.root.logs(self.executor)

    def _tip(self) -> ShardManifest | None:
        tip = self.root.shard_tip(self._shard)
        return None if tip is None else tip.manifest


def _checkpoint_of(root: Root, tip: ShardManifest) -> LoadedCheckpoint:
    return checkpoints.read_newest(root.store, tip, damaged=_ignored)


def _says_other_than(read_by: ShardManifest, now: ShardManifest) -> bool:
    return log_reading.judged(read_by, now) is not Verdict.STANDS


def _ignored(key: str) -> None:
    """That a checkpoint is damaged is logged where it is read."""
