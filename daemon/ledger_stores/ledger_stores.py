"""Which store a record belongs to, and the whole of an attempt: in use, choice, deletion.

Owns: the choice, the question whether a ledger is in use, and that every attempt ends with an answer or
`DeletionFailed`.
Does not own: when an attempt is made (`daemon.ledger_deletion`), and what a store does.

Only the configuration says where a ledger can be: a record that names a bucket, a driver or a topic of which it knows
nothing fails with that reason, and is a dead letter in the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

from daemon import config, errors, settings
from daemon.ledger_stores.ledger_store import Answer, DeletionFailed, Guard, InUseAnswer, LedgerStore, Step
from daemon.ledger_stores.offloaded_ledgers import BUCKET, OffloadedLedgers
from storage_backends.formats.deletion_format import DeletionOutcome, LedgerType, OffloadContext, PendingDelete
from storage_backends.object_store import ObjectStore, StoreError

if TYPE_CHECKING:
    from daemon.ledger_stores.ledger_owner import Owner


log = logging.getLogger(__name__)


def no_step(name: str) -> None:
    """Nobody wants to know how far an attempt is."""


class LedgerStores:
    """All that are configured; without arguments none is. Synchronous; any number of threads may call it."""

    def __init__(self, *, object_stores: Sequence[OffloadedLedgers] = (), owners: Sequence[Owner] = ()) -> None:
        self._object_stores: Final = tuple(object_stores)
        self._owners: Final = tuple(owners)

    @classmethod
    def from_settings(cls, configuration: config.Config) -> Self:
        """Opens nothing: `open_ahead`, or the first record that needs a store does."""
        deletion = configuration.deletion
        object_stores = [OffloadedLedgers(entry) for entry in deletion.object_stores]
        if not deletion.owners:
            return cls(object_stores=object_stores)
        # A daemon that starts is waited for: the HTTP client only where it is needed.
        from daemon.ledger_stores.ledger_owner import Owner

        return cls(object_stores=object_stores, owners=[Owner(entry) for entry in deletion.owners])

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step = no_step) -> Answer:
        """One attempt. Raises `DeletionFailed`, and what is no `Exception`."""
        guarded = False

        def passed() -> None:
            nonlocal guarded
            guard()
            guarded = True

        try:
            return self._delete(topic, delete, passed, step)
        except DeletionFailed:
            raise
        except Exception as error:
            raise DeletionFailed(f"{type(error).__name__}: {error}", maybe_deleted=guarded) from error

    def ask_in_use(self, topic: str, delete: PendingDelete) -> InUseAnswer | None:
        """What the topic's owner says; None where there is nobody to ask. Raises `DeletionFailed`."""
        owner = self._owner(topic, lambda entry: entry.in_use_url is not None)
        return None if owner is None else owner.ask_in_use(topic, delete)

    def answers_in_use(self, topic: str) -> bool:
        """Whether there is somebody to ask."""
        return self._owner(topic, lambda entry: entry.in_use_url is not None) is not None

    def open_ahead(self) -> None:
        """Opens what can be opened now; what fails is opened for the record that needs it first.

        The AWS SDK reads its tables for as long as half a second then, and keeps the interpreter to itself for many
        milliseconds: before anybody waits for a hand-out.
        """
        for store in self._object_stores:
            try:
                store.store()
            except StoreError as error:
                log.warning("object store %s cannot be opened yet: %s", store.entry.name, error)
            except Exception:
                log.exception("object store %s cannot be opened", store.entry.name)

    def object_store(self, name: str) -> ObjectStore:
        """The object store of this name, opened. Raises `errors.NotFound`, and `StoreError` where it cannot be."""
        return self._named(name).store()

    def driver_of(self, name: str) -> OffloadContext:
        """The context of a ledger that is found in this object store, without its UUID. Raises `errors.NotFound`."""
        return self._named(name).context

    def close(self) -> None:
        """May be repeated."""
        for store in (*self._object_stores, *self._owners):
            store.close()

    def _delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step) -> Answer:
        if delete.ledger_type is LedgerType.LEDGER:
            owner = self._owner(topic, lambda entry: entry.delete_url is not None)
            if owner is None:
                raise DeletionFailed(f"unknown owner: no owner of topic {topic!r} is configured", maybe_deleted=False)
            return owner.delete(topic, delete, guard, step)
        if delete.offload_context is None:
            return Answer(DeletionOutcome.MALFORMED, "offload_context is absent")
        store = self._store_of(delete.offload_context)
        # Another owner of offloaded ledgers knows itself whether one is in use.
        if isinstance(store, OffloadedLedgers) and self.ask_in_use(topic, delete) is InUseAnswer.IN_USE:
            return Answer(DeletionOutcome.IN_USE, "its owner uses it")
        return store.delete(topic, delete, guard, step)

    def _store_of(self, context: OffloadContext) -> LedgerStore:
        """Who deletes an offloaded ledger. Raises `DeletionFailed`, also where several could: the configuration may be
        mended before the record is given up.
        """
        driver, bucket = context.driver_name, dict(context.driver_metadata).get(BUCKET)
        of_driver = [store for store in self._object_stores if driver in store.entry.drivers]
        fitting = [store for store in of_driver if bucket is None or store.bucket == bucket]
        if len(fitting) > 1:
            several = f"driver_metadata names no bucket, and {len(fitting)} object stores have driver {driver!r}"
            raise DeletionFailed(several, maybe_deleted=False)
        owners = [owner for owner in self._owners if driver in owner.entry.drivers]
        for store in (*fitting, *owners):
            return store
        of_bucket = f" with bucket {bucket!r}" if of_driver else ""
        raise DeletionFailed(f"unknown driver: {driver!r}{of_bucket} is not configured", maybe_deleted=False)

    def _owner(self, topic: str, wanted: Callable[[settings.DeletionOwner], bool]) -> Owner | None:
        """The owner with the longest prefix of the topic's name among those that are wanted; None when none fits."""
        fitting = [
            (len(prefix), index)
            for index, owner in enumerate(self._owners)
            if wanted(owner.entry)
            for prefix in owner.entry.topic_prefixes
            if topic.startswith(prefix)
        ]
        return self._owners[max(fitting)[1]] if fitting else None

    def _named(self, name: str) -> OffloadedLedgers:
        for store in self._object_stores:
            if store.entry.name == name:
                return store
        raise errors.NotFound(f"object store {name!r} is not configured: deletion.object_stores")
