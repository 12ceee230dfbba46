"""The store of a process, opened once: workers do many tasks.

Owns: one open store for each place and process. Does not own: opening (`storage_backends.store_opening`).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from batch.engine.job_settings import Settings
from storage_backends import store_opening
from storage_backends.object_store import NotFound, ObjectStore
from storage_backends.storage_settings import Store

_lock = threading.Lock()
# A process that was forked has a lock file and connections of its own.
_opened: dict[tuple[int, Store], ObjectStore] = {}


def store_of(settings: Settings) -> ObjectStore:
    """The store that the settings name, open as long as the process lives.

    Raises NotFound when a local directory is not there: a job finds a root, it never makes one; else the store's
    errors.
    """
    place = settings.store
    with _lock:
        found = _opened.get((os.getpid(), place))
        if found is None:
            if place.kind == "local" and not Path(place.path).is_dir():
                raise NotFound(place.path, "the directory does not exist; set --store or store.path to the daemon's")
            found = _opened[os.getpid(), place] = store_opening.open_store(place)
        return found
