"""The files that say who may come in: they are read at the start, and again when they change.

Owns: what is in force, and looking for changes. A file that is wrong when it is read again changes nothing.
Does not own: what stands in the files (`certificates`, `identities`), and what is done with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias

from daemon import errors
from daemon.auth import certificates, identities
from daemon.auth.certificates import Certificates
from daemon.auth.identities import Identities
from daemon.auth.watched_files import WatchedFiles
from daemon.settings import Access, Tls

LOOK_EVERY_S: Final = 1.0

Kind: TypeAlias = Literal["certificates", "identities"]

log = logging.getLogger(__name__)


class Door:
    """What is in force of the files. Any thread may ask."""

    def __init__(self, tls: Tls, access: Access) -> None:
        """Reads the files. Raises `InvalidArgument`."""
        self._certificates: WatchedFiles[Certificates] | None = None
        self._identities: WatchedFiles[Identities] | None = None
        if tls.cert_file is not None:
            self._certificates = WatchedFiles(certificates.files_of(tls), lambda: certificates.read(tls))
        if (path := access.identities_file) is not None:
            self._identities = WatchedFiles([path], lambda: identities.read(path))

    @property
    def certificates(self) -> Certificates | None:
        """None: there is no TLS."""
        return None if self._certificates is None else self._certificates.value

    @property
    def identities(self) -> Identities | None:
        """None: whoever reaches the port may do everything."""
        return None if self._identities is None else self._identities.value

    async def watch(self, *, changed: Callable[[], None], refused: Callable[[Kind, bool], None]) -> None:
        """Looks at the files until it is cancelled.

        `changed` is called when the identities are others; `refused` when files were read, with whether they are wrong.
        """
        watched: list[tuple[Kind, WatchedFiles[Any] | None]] = [
            ("certificates", self._certificates),
            ("identities", self._identities),
        ]
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            for kind, files in watched:
                if files is not None and await _look(kind, files, refused) and kind == "identities":
                    changed()


async def _look(kind: Kind, files: WatchedFiles[Any], refused: Callable[[Kind, bool], None]) -> bool:
    """Whether the files were read, and hold something else than before."""
    try:
        another = await asyncio.to_thread(files.look)
    except errors.InvalidArgument as error:
        log.error("the %s in force stay as they were: %s", kind, error)
        refused(kind, True)
        return False
    except Exception:
        # Whoever is revoked later must still be.
        log.exception("the %s in force stay as they were", kind)
        refused(kind, True)
        return False
    if another is not None:
        log.info("%s were read again", kind, extra={"changed": another})
        refused(kind, False)
    return bool(another)
