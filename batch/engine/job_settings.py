"""The settings of the jobs: those sections of the daemon's own file that say where everything is and how buckets are
written.

Owns: which sections count here. Does not own: the settings in them (`storage_backends.storage_settings`), how they
are read (`storage_backends.settings_file`), nor the options of a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from storage_backends import settings_file
from storage_backends import storage_settings as sections
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
