"""Reads and creates the object FORMAT, which fixes what holds for the whole root.

It is created once. A root that this release cannot serve is refused. `formats.manifest` defines its bytes.
"""

from __future__ import annotations

from storage_backends import commit
from storage_backends.formats import format_errors, manifest, names
from storage_backends.formats.manifest import LogForm, RootFormat
from storage_backends.object_store import (
    AlreadyExists,
    Damaged,
    NotFound,
    ObjectStore,
    OutcomeUnknown,
    StoreUnavailable,
)

_SHARDS_PREFIX = "shards/"
SHARDS_MAX = 1 << 16
"""The most shards of a root that is read; a daemon makes fewer."""


def read_or_create(store: ObjectStore, *, shards: int, log_form: LogForm, root_id: str, created_ms: int) -> RootFormat:
    """Return FORMAT of the root, creating it if the root is new.

    May be repeated after an error. A new root has `shards` shards and logs of `log_form`; an existing root keeps its
    own. `root_id` must be unique for each call; it stays with the root if this call creates it. Raises the store's
    errors, and Damaged if FORMAT cannot be read, is of another version, or is missing from a root that has shards.
    """
    found = read(store)
    if found is not None:
        return found
    if next(store.list(_SHARDS_PREFIX), None) is not None:
        return _created_meanwhile(store, "it is missing, although the root has shards: their number is unknown")
    made = RootFormat(
        format_version=manifest.FORMAT_VERSION,
        shards=shards,
        created_ms=created_ms,
        root_id=root_id,
        log_form=log_form,
    )
    try:
        store.put_if_absent(names.FORMAT_KEY, manifest.encode_root_format(made), metadata={commit.COMMIT_ID: root_id})
    except AlreadyExists as error:
        found = read(store)
        if found is None:
            # The store answers 409 also while no writer has won: a later try may win.
            raise StoreUnavailable(names.FORMAT_KEY, f"{error.reason}, but it does not exist yet") from error
        return found
    except OutcomeUnknown:
        found = read(store)
        if found is None:
            raise
        return found
    return _created_meanwhile(store, "it was created, but it cannot be found")


def _created_meanwhile(store: ObjectStore, otherwise: str) -> RootFormat:
    """Return the FORMAT that this or another daemon has created.

    Raises Damaged with the reason `otherwise` if it is not there.
    """
    found = read(store)
    if found is None:
        raise Damaged(names.FORMAT_KEY, otherwise)
    return found


def read(store: ObjectStore) -> RootFormat | None:
    """Read the FORMAT of a root.

    Returns None if there is none; nothing is created. Raises the store's errors, and Damaged if it cannot be read or is
    of another version.
    """
    try:
        body = store.get(names.FORMAT_KEY)
    except NotFound:
        return None
    try:
        found = manifest.decode_root_format(body)
    except format_errors.UnsupportedVersion as error:
        raise Damaged(names.FORMAT_KEY, _other_version(error.found)) from error
    except format_errors.FormatError as error:
        raise Damaged(names.FORMAT_KEY, str(error)) from error
    if found.format_version != manifest.FORMAT_VERSION:
        raise Damaged(names.FORMAT_KEY, _other_version(found.format_version))
    if not 1 <= found.shards <= SHARDS_MAX:
        raise Damaged(names.FORMAT_KEY, f"it says that the root has {found.shards} shards")
    return found


def _other_version(found: int) -> str:
    return (
        f"the root has format version {found}; this release serves {manifest.FORMAT_VERSION}. Use the "
        "release that made the root, or start with an empty root"
    )
