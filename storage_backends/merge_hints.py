"""Hints that topics were merged: what a process that owns nothing leaves for the owner after its commits.

Owns: the order in which hints are written, and reading and clearing them.
Does not own: the names (`formats.names`), when they are looked at (the daemon), and what was merged: that is in the
topic's manifest, and a hint proves nothing. It may be lost, late, or about a topic that is no more.

    merger:  commit ... commit, PUT each hint, PUT a new value of the one key that owners watch
    owner:   GET that key; where its value is another one: LIST the hints, and for each DELETE it, then read the tip

A hint that is deleted was written before its deletion, after a commit: the tip that is read then holds that commit. One
that is written after the deletion stays, and its merger changes the value after it: the owner comes again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from storage_backends.formats import format_errors, names
from storage_backends.object_store import NotFound, ObjectStore

WRITERS = 16
"""Hints that are written at once."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class MergeHint:
    """A topic that may have been merged."""

    shard: int
    topic_id: str

    @property
    def key(self) -> str:
        return names.merge_hint_key(self.shard, self.topic_id)


def leave(store: ObjectStore, hints: Collection[MergeHint], *, value: str) -> None:
    """Call after the commits. `value`: one that was never written before. Raises the store's errors: the hints may be
    there or not, and may be left again.
    """
    with ThreadPoolExecutor(min(WRITERS, max(1, len(hints))), thread_name_prefix="hint") as writers:
        for _ in writers.map(lambda hint: store.put(hint.key, b""), hints):
            pass
    store.put(names.MERGE_HINTS_CHANGED_KEY, value.encode())


def value(store: ObjectStore) -> bytes | None:
    """Another one than before: hints were left since. None: none ever was. Raises the store's errors."""
    try:
        return store.get(names.MERGE_HINTS_CHANGED_KEY)
    except NotFound:
        return None


def listed(store: ObjectStore) -> tuple[list[MergeHint], list[str]]:
    """(the hints that are there, keys among them that are none). Raises the store's errors."""
    hints: list[MergeHint] = []
    foreign: list[str] = []
    for entry in store.list(names.MERGE_HINTS_PREFIX):
        try:
            hints.append(MergeHint(*names.merge_hint_of(entry.key)))
        except format_errors.FormatError:
            foreign.append(entry.key)
    return hints, foreign


def clear(store: ObjectStore, hint: MergeHint) -> None:
    """The tip that is read from now on holds what the hint was left for. May be repeated; raises the store's errors."""
    store.delete(hint.key)
