"""The logs of a root, in the form that its FORMAT says.

Owns: which implementation a form has, which form a new root gets, and refusing files on a file system that is not of
one machine alone.
Does not own: the forms (`object_log`, `file_log`), and FORMAT (`root_format`).
"""

from __future__ import annotations

import concurrent.futures
import logging
from pathlib import Path
from typing import Literal

from storage_backends import file_systems
from storage_backends.file_log import FileLogs
from storage_backends.formats.manifest import LogForm
from storage_backends.object_log import ObjectLogs
from storage_backends.object_store import ObjectStore, StoreRefused
from storage_backends.slot_log import SlotLogs

log = logging.getLogger(__name__)

Wanted = Literal["auto", "objects", "files"]


def form_of_new_root(store: ObjectStore, wanted: Wanted) -> LogForm:
    """The form of the logs of a root that is made in this store. Raises StoreRefused for files where none can be."""
    if wanted == "objects" or (wanted == "auto" and store.folder is None):
        return LogForm.OBJECTS
    if store.folder is None:
        raise StoreRefused("store.log_form", "it is 'files', and the store is no local directory: use 'objects'")
    shared = _shared(store.folder)
    if shared is None:
        return LogForm.FILES
    if wanted == "files":
        raise StoreRefused("store.log_form", f"it is 'files', and {shared}: use 'objects'")
    log.warning("%s: the logs of this root are objects; let daemons of one machine alone use it", shared)
    return LogForm.OBJECTS


def open_logs(form: LogForm, store: ObjectStore, executor: concurrent.futures.Executor) -> SlotLogs:
    """The logs of the root in this store, whose FORMAT says `form`. `executor`: see `ObjectLogs`.

    Raises StoreRefused for files that are elsewhere, or on a file system that other machines may share.
    """
    if form is LogForm.OBJECTS:
        return ObjectLogs(store, executor)
    if store.folder is None:
        raise StoreRefused("FORMAT", "the logs of this root are files of a local directory, and the store is none")
    shared = _shared(store.folder)
    if shared is not None:
        raise StoreRefused("FORMAT", f"the logs of this root are files, and {shared}, where no lock holds")
    return FileLogs(store.folder)


def _shared(folder: str) -> str | None:
    other = file_systems.not_of_one_machine(Path(folder))
    return None if other is None else f"{folder} is on a file system of type {other}, which machines may share"
