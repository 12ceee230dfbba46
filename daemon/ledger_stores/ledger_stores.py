"""Chooses the store of a recorded ledger and makes the whole attempt: in use, choice, deletion.

Every attempt ends with an answer or `DeletionFailed`. Only the configuration says where a ledger can be: a record with
an unknown bucket, driver or topic fails with that reason, and finally becomes a dead letter.
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
    """Ignore the progress of an attempt."""


class LedgerStores:
    """All configured stores, none by default. They are synchronous; any number of threads may call them."""

    def __init__(self, *, object_stores: Sequence[OffloadedLedgers] = (), owners: Sequence[Owner] = ()) -> None:
        self._object_stores: Final = tuple(object_stores)
        self._owners: Final = tuple(owners)

    @classmethod
    def from_settings(cls, configuration: config.Config) -> Self:
        """Create the stores without opening any: `open_ahead`, or the first record that needs a store, opens it."""
        deletion = configuration.deletion
        object_stores = [OffloadedLedgers(entry) for entry in deletion.object_stores]
        if not deletion.owners:
            return cls(object_stores=object_stores)
        # Import the HTTP client only if needed, since a starting daemon is waited for.
        from daemon.ledger_stores.ledger_owner import Owner

        return cls(object_stores=object_stores, owners=[Owner(entry) for entry in deletion.owners])

    def delete(self, topic: str, delete: PendingDelete, guard: Guard, step: Step = no_step) -> Answer:
        """Make one attempt. Raise `DeletionFailed` instead of any other `Exception`."""
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
        """Return the answer of the topic's owner, or None if there is none to ask.

        Raise `DeletionFailed` on failure.
        """
        owner = self._owner(topic, lambda entry: entry.in_use_url is not None)
        return None if owner is None else owner.ask_in_use(topic, delete)

    def answers_in_use(self, topic: str) -> bool:
        """Return whether there is an owner to ask."""
        return self._owner(topic, lambda entry: entry.in_use_url is not None) is not None

    def open_ahead(self) -> None:
        """Open the stores that can be opened now; the others are opened for the first record that needs them.

        The AWS SDK takes up to half a second to read its tables, and blocks the interpreter for many milliseconds at a
        time. So this is done before any delivery is waited for.
        """
        for store in self._object_stores:
            try:
                store.store()
            except StoreError as error:
                log.warning("object store %s cannot be opened yet: %s", store.entry.name, error)
            except Exception:
                log.exception("object store %s cannot be opened", store.entry.name)

    def object_store(self, name: str) -> ObjectStore:
        """Return the opened object store with this name.

        Raise `errors.NotFound`, or `StoreError` if it cannot be opened.
        """
        return self._named(name).store()

    def driver_of(self, name: str) -> OffloadContext:
        """Return the context, without a UUID, of ledgers found in this object store.

        Raise `errors.NotFound` if unknown.
        """
        return self._named(name).context

    def close(self) -> None:
        """Close all stores. May be repeated."""
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
        # Other owners of offloaded ledgers check for themselves whether one is in use.
        if isinstance(store, OffloadedLedgers) and self.ask_in_use(topic, delete) is InUseAnswer.IN_USE:
            return Answer(DeletionOutcome.IN_USE, "its owner uses it")
        return store.delete(topic, delete, guard, step)

    def _store_of(self, context: OffloadContext) -> LedgerStore:
        """Return the store that deletes an offloaded ledger. Raise `DeletionFailed` if none, or several, match.

        The failure can be repeated: the configuration may be fixed before the record is given up.
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
        """Return the wanted owner with the longest matching topic prefix, or None if none matches."""
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
