"""Reads the checkpoints of shards and the sections above them while owners may be writing them, in this order.

    the shard's manifest, the checkpoint that it names, the sections above it
    the manifests of topics
    the sections that were written since
    the shard's manifest again

In this order nothing is missed: a topic's manifest is as new as the checkpoint or newer, and every section that was
written before it is read. If another owner has claimed the shard meanwhile, or slots behind those that were read may
have been deleted, all of it is read again. Each log is read once for all shards.

Damage may have no other cause than that the manifest is old: an owner has deleted slots that are no longer needed.
Therefore a caller that finds damage reads the manifest again before it believes it (`log_reading.judged`).
`topic_reading` reads the manifests of topics.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final, TypeVar

from batch.engine.root import Root
from storage_backends import checkpoints, log_fence, log_reading, object_store
from storage_backends.checkpoints import DecodedSection, LoadedCheckpoint, TopicTail
from storage_backends.formats import names
from storage_backends.formats.log_slot_format import BEFORE_THE_FIRST
from storage_backends.formats.manifest import ShardManifest
from storage_backends.log_reading import LogEnd, ShardSections, Verdict, read_logs
from storage_backends.object_store import Damaged, NotFound, StoreError, StoreUnavailable
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

NO_NUMBER: Final = 0
"""The end of the log of an open range, if no range is open"""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class ShardTail:
    """The sections of a shard above a slot, by one manifest.

    `keys` name the log slot of each. `last_slot` is the last section number, or the one above which was read. `end` is
    how far the log of the open range was read.
    """

    sections: tuple[DecodedSection, ...]
    keys: tuple[str, ...]
    last_slot: int
    end: int


def end_of(logs: SlotLogs, log_id: str) -> LogEnd:
    """Return how far a log goes that a manifest names.

    Raises Damaged if its highest slot is missing or cannot be read.
    """
    slots = logs.log(log_id)
    try:
        number = slots.highest()
        if number is None:
            raise object_store.Damaged(names.log_prefix(log_id), "a manifest names the log, but the log has no slot")
        slot = log_fence.read_one(slots, number)
        if slot is None:
            raise object_store.Damaged(names.log_slot_key(log_id, number), "the highest slot of the log is missing")
        return LogEnd(number, slot.header.heads)
    finally:
        slots.close()


def read_tails(
    logs: SlotLogs, wanted: Iterable[tuple[ShardManifest, int]]
) -> dict[int, ShardTail | object_store.Damaged]:
    """Read the tails of shards, each by its manifest and above a section number.

    Returns by shard the tail, or the error if it is not complete. Raises the store's errors.
    """
    tips = {tip.shard: (tip, from_slot) for tip, from_slot in wanted}
    ends: dict[str, LogEnd | object_store.Damaged] = {}
    for tip, _ in tips.values():
        owned = tip.open_range
        if owned is not None and owned.log_id not in ends:
            try:
                ends[owned.log_id] = end_of(logs, owned.log_id)
            except object_store.Damaged as error:
                ends[owned.log_id] = error
    known = {log_id: end for log_id, end in ends.items() if isinstance(end, LogEnd)}
    readable = {
        shard: ShardSections(tip, from_slot)
        for shard, (tip, from_slot) in tips.items()
        if tip.open_range is None or tip.open_range.log_id in known
    }
    read_logs(logs, readable.values(), known)
    found: dict[int, ShardTail | object_store.Damaged] = {}
    for shard, (tip, from_slot) in tips.items():
        owned = tip.open_range
        end = None if owned is None else ends[owned.log_id]
        if isinstance(end, object_store.Damaged):
            found[shard] = end
            continue
        try:
            found[shard] = _tail(readable[shard], from_slot, known, NO_NUMBER if end is None else end.number)
        except object_store.Damaged as error:
            found[shard] = error
    return found


def _tail(read: ShardSections, from_slot: int, known: dict[str, LogEnd], end: int) -> ShardTail:
    complete = read.complete(known)
    return ShardTail(
        sections=tuple(checkpoints.decoded_section(read.shard, complete)),
        keys=tuple(names.log_slot_key(each.log_id, each.number) for each in complete),
        last_slot=complete[-1].slot if complete else from_slot,
        end=end,
    )


def read_tail(logs: SlotLogs, tip: ShardManifest, from_slot: int) -> ShardTail:
    """Read the tail of one shard. Raises Damaged if it is not complete, and the store's errors."""
    found = read_tails(logs, [(tip, from_slot)])[tip.shard]
    if isinstance(found, object_store.Damaged):
        raise found
    return found


T = TypeVar("T")

ATTEMPTS_MAX: Final = 5
"""Most readings of a shard whose owner writes checkpoints faster than that."""


class _OvertakenError(Exception):
    """The error if unread sections may be deleted, or written by another owner in another log."""


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Beginning:
    """A shard as of its newest manifest: its checkpoint, and the sections above it."""

    tip: ShardManifest
    loaded: LoadedCheckpoint
    tail: ShardTail


def begin_together(root: Root, shards: Iterable[int], executor: concurrent.futures.Executor) -> dict[int, Beginning]:
    """Read the shards, by number, each log once for all of them.

    A shard that cannot be read now is left out; reading it alone raises the reason. `executor` is that of
    `ShardReading`.
    """

    def loaded_of(shard: int) -> tuple[ShardManifest, LoadedCheckpoint] | None:
        try:
            tip = root.shard_tip(shard)
            return None if tip is None else (tip.manifest, _checkpoint_of(root, tip.manifest))
        except StoreError:
            return None

    loaded = {tip.shard: (tip, found) for tip, found in filter(None, executor.map(loaded_of, shards))}
    try:
        tails = read_tails(root.logs(executor), ((tip, found.slot) for tip, found in loaded.values()))
    except StoreError as error:
        log.info("reading shards one by one: %s", error)
        return {}
    return {shard: Beginning(*loaded[shard], tail) for shard, tail in tails.items() if isinstance(tail, ShardTail)}


class ShardReading:
    """The reading of one shard.

    `only` are the topics asked for. `executor` reads slots; it must not be the one that runs this. `begun` is what was
    already read of the shard, if any.
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
        # Sections written since
        self._more: list[ShardTail] = []

    @property
    def checkpoint_key(self) -> str:
        """The key of the checkpoint that was read, or empty without one."""
        return "" if self._begun is None else self._begun.loaded.key

    @property
    def last_slot(self) -> int:
        """The last section number that was read, or 0 before the first."""
        tails = self._tails()
        return tails[-1].last_slot if tails else BEFORE_THE_FIRST

    def slot_key(self, slot: int) -> str:
        """Return the key of the log slot with a section, or of the checkpoint for one that it carries over."""
        for tail in self._tails():
            if tail.sections and tail.sections[0].slot <= slot <= tail.last_slot:
                return tail.keys[slot - tail.sections[0].slot]
        return self.checkpoint_key

    def around(self, read: Callable[[], T]) -> tuple[T, Mapping[str, TopicTail]]:
        """Call `read`, which reads manifests of topics; return its result, and the tails of the topics asked for.

        No manifest is older than the checkpoint, and no section is missing that was written before it. `read` may be
        called again. Raises Damaged naming the object, and the store's errors.
        """
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                if self._begun is None:
                    self._begin()
                found = read()
                self._read_on()
                loaded = None if self._begun is None else self._begun.loaded.checkpoint
                slots = ((each.slot, each.records) for tail in self._tails() for each in tail.sections)
                return found, checkpoints.tails_of(loaded, slots, only=self._only)
            except _OvertakenError:
                log.info("shard %d changed while it was read (reading %d)", self._shard, attempt)
                self._begun, self._more = None, []
        raise StoreUnavailable(
            names.shard_prefix(self._shard),
            f"new checkpoints replaced the sections during each of {ATTEMPTS_MAX} readings; run it again",
        )

    def _tails(self) -> list[ShardTail]:
        return [] if self._begun is None else [self._begun.tail, *self._more]

    def _begin(self) -> None:
        tip = self._tip()
        if tip is None:
            # There was no owner yet.
            return
        try:
            loaded = _checkpoint_of(self.root, tip)
            tail = read_tail(self._logs, tip, loaded.slot)
        except (Damaged, NotFound):
            newer = self._tip()
            if (
                newer is None
                or newer.checkpoint != tip.checkpoint
                or log_reading.judged(tip, newer) is not Verdict.STANDS
            ):
                raise _OvertakenError from None
            raise
        self._begun = Beginning(tip, loaded, tail)

    def _read_on(self) -> None:
        """Read the sections behind the last one that was read."""
        begun = self._begun
        if begun is not None and begun.tip.open_range is not None:
            end, last_slot = self._tails()[-1].end, self.last_slot
            rest = dataclasses.replace(begun.tip.open_range, after=end, first_slot=last_slot + 1)
            try:
                more = read_tail(self._logs, dataclasses.replace(begun.tip, ranges=(rest,)), last_slot)
            except Damaged:
                if self._is_overtaken():
                    raise _OvertakenError from None
                raise
            self._more.append(more)
        if self._is_overtaken():
            raise _OvertakenError

    def _is_overtaken(self) -> bool:
        """Return whether another owner may have written since, or a slot behind those that were read may be deleted."""
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


def _ignored(key: str) -> None:
    """Do nothing: a damaged checkpoint is logged where it is read."""
