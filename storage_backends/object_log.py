"""Stores a log as objects of a store: `logs/<log id>/<number>`, numbers of 20 digits.

It reads and deletes many slots at once. The promises of `slot_log` rest on those of `object_store`. `store_opening`
alone opens such logs; they stand apart as one of two implementations of `slot_log`.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import re
from collections.abc import Iterable, Mapping

from storage_backends import object_store
from storage_backends.formats import log_slot_format, names
from storage_backends.formats.log_slot_format import Head, LogSlotKind, SlotIdentity, SlotNote
from storage_backends.slot_log import ReadSlot, SlotLog

_KIND = "kind"
_FINGERPRINT = "fingerprint"
_SECTIONS = "sections"
# Longest note of the sections of a slot (characters), which S3's limit of metadata leaves room for
_SECTIONS_MAX = 1_800
_SECTION = re.compile(r"([0-9]{1,10}):([0-9]{1,19}):([0-9]{1,19})")
# Slots read by one call if a read is no request: passing each to a thread would take longer.
PORTION_SLOTS = 64


class ObjectLogs:
    """The logs of a store.

    `executor` reads and deletes in parallel and must not be the one that calls a log.
    """

    def __init__(self, store: object_store.ObjectStore, executor: concurrent.futures.Executor) -> None:
        self._store = store
        self._executor = executor

    def log(self, log_id: str) -> ObjectLog:
        return ObjectLog(self._store, log_id, self._executor)

    def log_ids(self) -> frozenset[str]:
        listed = (entry.key.removeprefix(names.LOGS_PREFIX) for entry in self._store.list(names.LOGS_PREFIX))
        found = {name.partition("/")[0] for name in listed}
        return frozenset(filter(log_slot_format.is_log_id, found))

    def foreign(self) -> list[str]:
        return [entry.key for entry in self._store.list(names.LOGS_PREFIX) if not _is_slot(entry.key)]


def _is_slot(key: str) -> bool:
    log_id = key.removeprefix(names.LOGS_PREFIX).partition("/")[0]
    return log_slot_format.is_log_id(log_id) and names.number_in(names.log_prefix(log_id), key) is not None


def _metadata_of(slot: bytes) -> dict[str, str]:
    """Return the metadata of a slot: its identity, and the heads of the shards with a section in it, if they fit."""
    kind, fingerprint = log_slot_format.identity_of(slot)
    metadata = {_KIND: kind.name.lower(), _FINGERPRINT: f"{fingerprint:08x}"}
    if kind is LogSlotKind.DATA:
        read = log_slot_format.decode_log_slot(slot)
        heads = ((shard, read.header.heads[shard]) for shard in read.shards)
        sections = " ".join(f"{shard}:{head.epoch}:{head.last_slot}" for shard, head in heads)
        if len(sections) <= _SECTIONS_MAX:
            metadata[_SECTIONS] = sections
    return metadata


def _note(metadata: Mapping[str, str]) -> SlotNote | None:
    """Return what the metadata of an object says of a slot, or None if it is not that of a slot."""
    try:
        identity = SlotIdentity(LogSlotKind[metadata[_KIND].upper()], int(metadata[_FINGERPRINT], 16))
    except (KeyError, ValueError):
        return None
    found = [_SECTION.fullmatch(each) for each in metadata.get(_SECTIONS, "").split()]
    sections = {int(each[1]): Head(int(each[2]), int(each[3])) for each in found if each is not None}
    return SlotNote(identity, sections if len(sections) == len(found) > 0 else None)


class ObjectLog(SlotLog):
    """One log, whose owner is the object that created its first slot.

    The owner deletes its own numbers, each once. Any other object checks a slot's kind before it deletes it.
    """

    def __init__(self, store: object_store.ObjectStore, log_id: str, executor: concurrent.futures.Executor) -> None:
        super().__init__(log_id)
        self._store = store
        self._executor = executor
        self._prefix = names.log_prefix(log_id)
        # The lowest number that the owner has not deleted; None for any other object
        self._low: int | None = None
        self._top = 0
        # The owner's numbers below this may hold a slot of another process, because a deletion has failed.
        self._doubtful_below = 0

    def create(self, number: int, slot: bytes) -> None:
        metadata = _metadata_of(slot)
        if log_slot_format.identity_of(slot).kind is LogSlotKind.OPEN:
            self._low = number
        self._top = max(self._top, number)
        self._store.put_if_absent(self._key(number), slot, metadata=metadata)

    def head(self, number: int) -> SlotIdentity | None:
        key = self._key(number)
        try:
            metadata = self._store.head(key).metadata
        except object_store.NotFound:
            return None
        note = _note(metadata)
        if note is None:
            raise object_store.Damaged(key, f"its metadata {dict(metadata)} is not that of a log slot")
        return note.identity

    def noted(self, number: int) -> SlotNote | None:
        try:
            return _note(self._store.head(self._key(number)).metadata)
        except (object_store.NotFound, object_store.Damaged):
            return None

    def read(self, after: int, through: int) -> list[ReadSlot]:
        portion = 1 if self._store.reads_are_requests else PORTION_SLOTS
        begins = range(after + 1, through + 1, portion)
        portions = [range(begin, min(begin + portion, through + 1)) for begin in begins]
        return list(itertools.chain.from_iterable(self._executor.map(self._read_run, portions)))

    def highest(self) -> int | None:
        return max(self._listed(), default=None)

    def numbers(self) -> list[int]:
        return sorted(self._listed())

    def replace(self, number: int, slot: bytes) -> None:
        self._store.put(self._key(number), slot, metadata=_metadata_of(slot))

    def delete_through(self, number: int) -> None:
        if self._low is None:
            numbers = sorted(self._listed())
            if numbers and number >= numbers[-1]:
                raise ValueError(f"slot {numbers[-1]} of log {self.log_id} is its highest, which must stay")
            self._delete(each for each in numbers if each <= number and self._may_go(each))
            return
        if number >= self._top:
            raise ValueError(f"slot {number} of log {self.log_id} may be its highest, which must stay")
        low = self._low
        doubtful = range(low, min(self._doubtful_below, number + 1))
        self._doubtful_below = max(self._doubtful_below, number + 1)
        self._delete(each for each in doubtful if self._may_go(each))
        self._delete(range(max(low, doubtful.stop), number + 1))
        self._low, self._doubtful_below = max(low, number + 1), 0

    def close(self) -> None:
        """Do nothing, since there is nothing to release."""

    def _key(self, number: int) -> str:
        return names.log_slot_key(self.log_id, number)

    def _listed(self) -> list[int]:
        listed = (names.number_in(self._prefix, entry.key) for entry in self._store.list(self._prefix))
        # A foreign object among the slots is none of the log, and the audit names it.
        return [number for number in listed if number is not None]

    def _read_run(self, numbers: range) -> list[ReadSlot]:
        """Read the slots of these numbers that exist. Most often all do, and are whole."""
        try:
            bodies = self._store.get_run([self._key(number) for number in numbers])
        except object_store.Damaged:
            bodies = []
        found = [ReadSlot(number, body) for number, body in zip(numbers, bodies, strict=False)]
        one_by_one = (self._read_one(number) for number in numbers[len(found) :])
        return found + [slot for slot in one_by_one if slot is not None]

    def _read_one(self, number: int) -> ReadSlot | None:
        key = self._key(number)
        try:
            return ReadSlot(number, self._store.get(key))
        except object_store.NotFound:
            return None
        except object_store.Damaged as error:
            damage = str(error)
        # Read a range although the checksum of the whole is wrong: the slot shows which section is damaged.
        try:
            size_bytes = self._store.head(key).size_bytes
            return ReadSlot(number, self._store.get_range(key, 0, size_bytes), damage)
        except (object_store.Damaged, object_store.NotFound, ValueError):
            return ReadSlot(number, None, damage)

    def _may_go(self, number: int) -> bool:
        """Return whether the slot is OPEN or DATA. A slot of unknown kind stays."""
        try:
            found = self.head(number)
        except object_store.Damaged:
            return False
        return found is not None and not found.kind.ends

    def _delete(self, numbers: Iterable[int]) -> None:
        for _ in self._executor.map(self._store.delete, [self._key(number) for number in numbers]):
            pass
