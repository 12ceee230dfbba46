"""Deletes offloaded ledgers in an object store: two objects each, data and index.

It is an implementation of the port `LedgerStore`. `daemon.core.deletions` has the names and metadata of the objects.

The index goes first: without it the data are never read, and data without an index still name their owner. One missing
object of the two is what an earlier attempt leaves; the other one is verified and deleted alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from daemon import settings
from daemon.core.deletions import ledger_metadata
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, Guard, LedgerStore, Step
from storage_backends import store_opening
from storage_backends.formats.deletion_format import DeletionOutcome, OffloadContext, PendingDelete
from storage_backends.local_directory import TEMPORARY_FOLDER
from storage_backends.object_store import NotFound, ObjectInfo, ObjectStore, StoreError, StoreUnavailable

BUCKET: Final = "bucket"
"""The property of driver metadata that names the bucket"""


class OffloadedLedgers(LedgerStore):
    """The ledgers in one object store, which `opening` opens when it is first needed."""

    def __init__(
        self,
        entry: settings.DeletionObjectStore,
        opening: Callable[[settings.DeletionObjectStore], ObjectStore] | None = None,
    ) -> None:
        self.entry: Final = entry
        self._opening = opening or open_existing
        self._lock = threading.Lock()
        self._store: ObjectStore | None = None

    @property
    def bucket(self) -> str | None:
        """The bucket, or None if the store has none."""
        return self.entry.s3.bucket if self.entry.kind == "s3" else None

    @property
    def context(self) -> OffloadContext:
        """The context of an offloaded ledger that is found here, without its UUID."""
        bucket = self.bucket
        return OffloadContext(0, 0, self.entry.drivers[0], () if bucket is None else ((BUCKET, bucket),))

    def store(self) -> ObjectStore:
        """Return the opened store. Raise `StoreError` on failure."""
        with self._lock:
            if self._store is None:
                self._store = self._opening(self.entry)
            return self._store

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step) -> Answer:
        name = _name_of(delete)
        if isinstance(name, Answer):
            return name
        step("deletion.before_verify")
        try:
            store = self.store()
            found = _found(store, name)
        except StoreError as error:
            raise DeletionFailed(f"{self._place}: {error}", maybe_deleted=False) from error
        if not found:
            return Answer(DeletionOutcome.ALREADY_GONE)
        for each in found:
            difference = ledger_metadata.mismatch(topic, delete, each.metadata)
            if difference is not None:
                return Answer(DeletionOutcome.METADATA_MISMATCH, f"{self._place}: {each.key}: {difference}")
        step("deletion.after_verify")
        guard()
        self._delete(store, name, step)
        return Answer(DeletionOutcome.DELETED)

    def close(self) -> None:
        # Without the lock: its holder may be opening a store that hangs, and the end must not wait for that.
        if self._store is not None:
            self._store.close()

    @property
    def _place(self) -> str:
        return f"object store {self.entry.name}"

    def _delete(self, store: ObjectStore, name: ledger_metadata.OffloadedName, step: Step) -> None:
        try:
            store.delete(name.index)
            step("deletion.after_index_delete")
            store.delete(name.data)
            step("deletion.after_delete")
        except StoreError as error:
            raise DeletionFailed(f"{self._place}: {error}", maybe_deleted=True) from error


def open_existing(entry: settings.DeletionObjectStore) -> ObjectStore:
    """Open the store with durable deletions, since no record of a deletion is left.

    Raises `StoreUnavailable` if a directory is not a store yet: an unmounted disk would look like a store in which
    every ledger is gone.
    """
    if entry.kind == "local" and not (Path(entry.path) / TEMPORARY_FOLDER).is_dir():
        raise StoreUnavailable(entry.path, "there is no store in this directory")
    return store_opening.open_store(entry, deletions_survive=True)


def _name_of(delete: PendingDelete) -> ledger_metadata.OffloadedName | Answer:
    context = delete.offload_context
    if context is None:
        return Answer(DeletionOutcome.MALFORMED, "offload_context is absent")
    try:
        return ledger_metadata.offloaded_name(context.uuid_msb, context.uuid_lsb, delete.ledger_id)
    except ValueError as error:
        return Answer(DeletionOutcome.MALFORMED, str(error))


def _found(store: ObjectStore, name: ledger_metadata.OffloadedName) -> Sequence[ObjectInfo]:
    """Return the objects of the two that exist. Raise `StoreError` on failure."""
    found = [info for info in (_head(store, key) for key in (name.index, name.data)) if info is not None]
    if not found:
        # Without a bucket or a disk HEAD finds nothing either, but a listing fails. It lists below the name, so that no
        # directory is read for that.
        next(store.list(f"{name.data}/"), None)
    return found


def _head(store: ObjectStore, key: str) -> ObjectInfo | None:
    try:
        return store.head(key)
    except NotFound:
        return None
