"""Writes and reads hints that topics were merged, which a process without shards leaves for the owner.

    merger:  commit ... commit, PUT each hint, PUT a new value of the one key that owners watch
    owner:   GET that key; where its value is another one: LIST the hints, and for each DELETE it, then read the tip

A hint proves nothing: it may be lost, late, or about a topic that no longer exists; the merge itself is in the topic's
manifest. A hint that is deleted was written before its deletion, after a commit, so the tip that is read then holds
that commit. One that is written after the deletion stays, and its merger changes the value after it: the owner comes
again. `formats.names` names the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from storage_backends.formats import format_errors, names
from storage_backends.object_store import NotFound, ObjectStore

WRITERS = 16
"""Hints written at once"""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class MergeHint:
    """A topic that may have been merged."""

    shard: int
    topic_id: str

    @property
    def key(self) -> str:
        return names.merge_hint_key(self.shard, self.topic_id)


def leave(store: ObjectStore, hints: Collection[MergeHint], *, value: str) -> None:
    """Write the hints, after the commits.

    `value` must never have been written before. Raises the store's errors: the hints may then exist or not, and may be
    left again.
    """
    with ThreadPoolExecutor(min(WRITERS, max(1, len(hints))), thread_name_prefix="hint") as writers:
        for _ in writers.map(lambda hint: store.put(hint.key, b""), hints):
            pass
    store.put(names.MERGE_HINTS_CHANGED_KEY, value.encode())


def value(store: ObjectStore) -> bytes | None:
    """Return the value of the last `leave`, or None if no hint was ever left.

    It differs from the value read before if hints were left since. Raises the store's errors.
    """
    try:
        return store.get(names.MERGE_HINTS_CHANGED_KEY)
    except NotFound:
        return None


def listed(store: ObjectStore) -> tuple[list[MergeHint], list[str]]:
    """Return the hints that exist, and the keys among them that name no hint. Raises the store's errors."""
    hints: list[MergeHint] = []
    foreign: list[str] = []
    for entry in store.list(names.MERGE_HINTS_PREFIX):
        try:
            hints.append(MergeHint(*names.merge_hint_of(entry.key)))
        except format_errors.FormatError:
            foreign.append(entry.key)
    return hints, foreign


def clear(store: ObjectStore, hint: MergeHint) -> None:
    """Delete a hint: a tip read from now on holds the merge that it was left for.

    May be repeated; raises the store's errors.
    """
    store.delete(hint.key)
