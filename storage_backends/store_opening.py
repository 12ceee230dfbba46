"""The object stores that settings name.

Owns: the translation of settings into those of a store.
Does not own: the settings (`storage_settings`), the stores, and when one is opened and closed.
"""

from __future__ import annotations

from typing import Literal, Protocol

from storage_backends import local_directory, object_store
from storage_backends.storage_settings import S3


class Place(Protocol):
    """Settings that say where a store is: `path` of kind `local`, `s3` of kind `s3`."""

    @property
    def kind(self) -> Literal["local", "s3"]: ...

    @property
    def path(self) -> str: ...

    @property
    def s3(self) -> S3: ...


def open_store(place: Place, *, deletions_survive: bool = False) -> object_store.ObjectStore:
    """The store of this place.

    `deletions_survive`: a power failure, too, which costs a local directory a synchronisation each.

    Raises `StoreError`.
    """
    if place.kind == "local":
        return local_directory.LocalDirectory(place.path, deletions_survive=deletions_survive)
    # The AWS SDK takes a third of the time in which a daemon starts: only where it is needed.
    from storage_backends import s3

    given = place.s3
    return s3.S3Store(
        s3.S3Settings(
            bucket=given.bucket,
            prefix=given.prefix,
            endpoint_url=given.endpoint_url,
            region=given.region,
            addressing_style=given.addressing,
            checksums=given.checksums,
            connect_timeout_s=given.connect_timeout_s,
            read_timeout_s=given.read_timeout_s,
            attempts=given.attempts,
            connections_max=given.connections_max,
        )
    )
