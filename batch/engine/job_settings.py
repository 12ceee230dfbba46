"""The settings of the jobs: those sections of the daemon's own file that say where everything is and how buckets are
written.

Owns: which sections count here. Does not own: the settings in them (`storage_backends.storage_settings`), how they
are read (`storage_backends.settings_file`), nor the options of a command.

The store of a process, opened once: workers do many tasks.

Owns: one open store for each place and process. Does not own: opening (`storage_backends.store_opening`).
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
    """What a job and its tasks must know; travels to them as a value."""

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
    """Reads the daemon's file, `TARRY_SECTION__KEY` of the environment (None: the process's), `section.key=value`
    overrides and the place `store`; the later wins. Other sections are the daemon's, and passed over.

    A local path is absolute afterwards: tasks run in other directories. Raises SettingsError.
    """
    place = () if store is None else _place(store)
    found = settings_file.load(Settings, config, environment=environment, overrides=(*overrides, *place), others=True)
    sections.check_store(found.store)
    sections.check_bucket(found.bucket)
    path = str(Path(found.store.path).expanduser().absolute())
    return msgspec.structs.replace(found, store=msgspec.structs.replace(found.store, path=path))


def _place(store: str) -> tuple[str, ...]:
    """The overrides that `PATH` or `s3://bucket/prefix` stands for."""
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
