"""The audit log: who changed what, from where, and who was refused, as one JSON object a line.

Owns: the file and its form. Does not own: which calls are told (`proto/tarry/v1/access.proto`).
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

# Of the names that a request has, which may have any length where it is refused.
TEXT_MAX: Final = 1024
# Whoever is refused again and again does not fill the disk.
REFUSALS_PER_SECOND_MAX: Final = 100

log = logging.getLogger(__name__)


class AuditLog:
    """Appends lines to the file of the settings, or to the daemon's log. It never fails a call."""

    def __init__(self, access: AccessSettings) -> None:
        """Opens the file. Raises `InvalidArgument` when that does not work."""
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
        """Appends a line."""
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
        """Appends a line, unless there are too many in this second: the next one says how many were left out."""
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
    """Appends to a file of this user alone, through no link; opens it anew when it was moved away."""

    def __init__(self, path: str) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logs.JsonForm())

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self.baseFilename, flags, 0o600), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        """A line that cannot be written is not passed over. Raises what is being handled."""
        raise
