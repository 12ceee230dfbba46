"""Writes the audit log: who changed what, from where, and who was refused, as one JSON object a line.

`proto/tarry/v1/access.proto` says which calls are logged.
"""

from __future__ import annotations

import logging
import logging.handlers
import os
import time
from io import TextIOWrapper
from typing import Final

from daemon import errors, logs
from daemon.settings import AccessSettings

# Limit on names in a request, which may have any length if the request is refused (characters)
TEXT_MAX: Final = 1024
# A caller that is refused again and again must not fill the disk.
REFUSALS_PER_SECOND_MAX: Final = 100

log = logging.getLogger(__name__)


class AuditLog:
    """A log in the configured file, or in the daemon's log. It never fails a call."""

    def __init__(self, access: AccessSettings) -> None:
        """Open the file. Raise `InvalidArgument` if that fails."""
        self._is_kept = access.audit_file is not None or access.identities_file is not None
        self._file: _File | None = None
        self._second, self._refusals, self._left_out = 0, 0, 0
        if access.audit_file is not None:
            try:
                self._file = _File(access.audit_file)
            except OSError as error:
                raise errors.InvalidArgument(
                    f"access.audit_file {access.audit_file} cannot be opened: {error.strerror}"
                ) from error

    def tell(self, event: str, **fields: str | int) -> None:
        """Append a line."""
        if not self._is_kept:
            return
        shown = {name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in fields.items()}
        if self._file is None:
            log.info("%s", event, extra=shown)
            return
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, event, (), None, extra=shown)
        try:
            self._file.handle(record)
        except OSError as error:
            log.error("access.audit_file cannot be written: %s", error, extra=shown)

    def tell_refusal(self, **fields: str | int) -> None:
        """Append a line unless this second has too many; the next line says how many were left out."""
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._refusals = second, 0
        self._refusals += 1
        if self._refusals > REFUSALS_PER_SECOND_MAX:
            self._left_out += 1
            return
        left_out, self._left_out = self._left_out, 0
        self.tell("refused", **fields, **({"left_out": left_out} if left_out else {}))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


class _File(logging.handlers.WatchedFileHandler):
    """A file of this user alone, never reached through a link, and opened again after a rename."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logs.JsonForm())

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """Raise the error being handled, so that a line which cannot be written is not lost silently."""
        raise
