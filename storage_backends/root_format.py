"""The object FORMAT: created once, it fixes what holds for the whole root.

Owns: creating it, and refusing a root that this version cannot serve.
Does not own: its bytes (`formats.manifest`).
"""

from __future__ import annotations

from storage_backends.formats import errors, manifest, names
from storage_backends.formats.manifest import RootFormat
from storage_backends.object_store import AlreadyExists, Damaged, NotFound, ObjectStore, OutcomeUnknown


def read_or_create(store: ObjectStore, *, shards: int, root_id: str, created_ms: int) -> RootFormat:
    """The root's FORMAT; a new root gets one with `shards` shards. An existing root keeps its own number.

    Raises Damaged, naming the object and the place, when it cannot be read, also for a version that is not known here;
    and the store's errors.
    """
    found = _read(store)
    if found is not None:
        return found
    made = RootFormat(
        format_version=manifest.FORMAT_VERSION, shards=shards, created_ms=created_ms, root_id=root_id
    )
    try:
        store.put_if_absent(names.FORMAT_KEY, manifest.encode_root_format(made), metadata={"commitid": root_id.lower()})
    except AlreadyExists:
        pass
    except OutcomeUnknown:
        if _read(store) is None:
            raise
    found = _read(store)
    if found is None:
        raise Damaged(names.FORMAT_KEY, "it was created and is not there")
    return found


def _read(store: ObjectStore) -> RootFormat | None:
    try:
        body = store.get(names.FORMAT_KEY)
    except NotFound:
        return None
    try:
        found = manifest.decode_root_format(body)
    except errors.FormatError as error:
        raise Damaged(names.FORMAT_KEY, str(error)) from error
    if found.format_version != manifest.FORMAT_VERSION:
        raise Damaged(
            names.FORMAT_KEY,
            f"the root has format version {found.format_version}, this daemon knows {manifest.FORMAT_VERSION}",
        )
    return found
