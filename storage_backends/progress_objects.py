"""Reading the progress of a topic manifest, wherever that has it.

Owns: that what is read is whole.
Does not own: its form (`formats.manifest`), and what it says of a bucket that was merged since (`formats.merge`).
"""

from __future__ import annotations

from storage_backends import object_store
from storage_backends.formats import errors, manifest
from storage_backends.formats.manifest import Progress, TopicManifest


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
    except errors.FormatError as error:
        raise object_store.Damaged(key, str(error)) from error
