"""Reading the progress of a topic manifest, wherever that has it.

Owns: that what is read is whole, and keeping it for manifests that follow each other and have the same.
Does not own: its form (`formats.manifest`), and what it says of a bucket that was merged since (`formats.merge`).
"""

from __future__ import annotations

import threading

from storage_backends import object_store
from storage_backends.formats import format_errors, manifest
from storage_backends.formats.manifest import ObjectReference, Progress, TopicManifest


def progress_of(store: object_store.ObjectStore, tip: TopicManifest) -> Progress:
    """The progress as of the manifest's `applied`, inline or from its object.

    Raises Damaged, NotFound when a newer manifest has taken its place or the object is lost, and the store's errors.
    """
    if tip.progress_object is None:
        return tip.progress or Progress()
    key = tip.progress_object.name
    body = store.get(key)
    try:
        manifest.check_bytes(tip.progress_object, body, "progress")
        return manifest.decode_progress(body)
    except format_errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error


class LastProgress:
    """Reads the progress of manifests one after the other: most of them have that of the one before, in the same
    object, which is kept. Thread-safe.
    """

    def __init__(self, store: object_store.ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._last: tuple[ObjectReference, Progress] | None = None

    def of(self, tip: TopicManifest) -> Progress:
        """Returns the progress as of the manifest's `applied`; an object that the manifest before named is not read
        again. Raises as `progress_of`.
        """
        reference = tip.progress_object
        if reference is None:
            return progress_of(self._store, tip)
        with self._lock:
            if self._last is None or self._last[0] != reference:
                self._last = reference, progress_of(self._store, tip)
            return self._last[1]
