"""Loads the settings of the jobs from the daemon's own file, and opens the store they name once in a process.

Only the sections that say where everything is and how buckets are written count; `storage_settings` declares them.
Workers do many tasks, and keep the store open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from storage_backends import settings_file, store_opening
from storage_backends import storage_settings as sections
from storage_backends.object_store import NotFound, ObjectStore
from storage_backends.storage_settings import Bucket, Collection, SettingsError, Store


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings of a job and its tasks, which travel to them as a value."""

    store: Store = Store()
    bucket: Bucket = Bucket()
    collection: Collection = Collection()


def load(
    config: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    store: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Read the daemon's file, `TARRY_SECTION__KEY` variables, overrides, and `store`; the later wins.

    If `environment` is None, the process's is read. `overrides` read `section.key=value`; `store` is a place. Other
    sections are the daemon's, and ignored. A local path becomes absolute, because tasks run in other directories.
    Raises SettingsError.
    """
    place = () if store is None else _place(store)
    found = settings_file.load(Settings, config, environment=environment, overrides=(*overrides, *place), others=True)
    sections.check_store(found.store)
    sections.check_bucket(found.bucket)
    path = str(Path(found.store.path).expanduser().absolute())
    return msgspec.structs.replace(found, store=msgspec.structs.replace(found.store, path=path))


def _place(store: str) -> tuple[str, ...]:
    """Return the overrides for `PATH` or `s3://bucket/prefix`."""
    parts = urlsplit(store)
    if parts.scheme == "s3":
        if not parts.netloc or parts.query or parts.fragment:
            raise SettingsError(f"--store is {store}; it must be a local path or s3://bucket/prefix")
        return "store.kind=s3", f"store.s3.bucket={parts.netloc}", f"store.s3.prefix={parts.path.strip('/')}"
    if "://" in store:
        raise SettingsError(f"--store is {store}; it must be a local path or s3://bucket/prefix")
    if not store:
        raise SettingsError("--store is empty; it must be a local path or s3://bucket/prefix")
    return "store.kind=local", f"store.path={store}"


_lock = threading.Lock()
# A forked process needs a lock file and connections of its own.
_opened: dict[tuple[int, Store], ObjectStore] = {}


def store_of(settings: Settings) -> ObjectStore:
    """Return the store that the settings name, which stays open as long as the process lives.

    Raises NotFound for a local directory that does not exist, because a job never creates a root, and the store's
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
