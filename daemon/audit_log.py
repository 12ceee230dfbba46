"""Writes the audit log: who changed what, from where, and who was refused, as one JSON object a line.

`proto/tarry/v1/access.proto` says which calls are logged. A call that may have changed something always has its line.
Lines of other calls, refusals among them, are limited for each identity, and for all callers without one together.
Strangers thus fill no disk, and hide nothing of an identity.
"""

from __future__ import annotations

import dataclasses
import logging
import logging.handlers
import os
import time
from collections.abc import Mapping
from io import TextIOWrapper
from typing import Any, Final

from daemon import errors, logs
from daemon.settings import AccessSettings

# Limit on names in a request, which may have any length if the request is refused (characters)
TEXT_MAX: Final = 1024
# Lines in a second of calls that changed nothing: of one identity, and of all callers without one
IDENTITY_LINES_MAX: Final = 100
UNKNOWN_LINES_MAX: Final = 10
UNKNOWN: Final = ""
"""Identity of callers without one"""

log = logging.getLogger(__name__)


class AuditLog:
    """A log in the configured file, or in the daemon's log. It never fails a call."""

    def __init__(self, access: AccessSettings) -> None:
        """Open the file. Raise `InvalidArgument` if that fails."""
        self._is_kept = access.audit_file is not None or access.identities_file is not None
        self._file: _File | None = None
        self._limits: dict[str, _Limit] = {}
        if access.audit_file is not None:
            try:
                self._file = _File(access.audit_file)
            except OSError as error:
                raise errors.InvalidArgument(
                    f"access.audit_file {access.audit_file} cannot be opened: {error.strerror}"
                ) from error

    def tell(self, event: str, identity: str, *, changed: bool, **fields: Any) -> None:
        """Append a line, unless the call `changed` nothing and its caller has too many such lines in this second.

        The caller's next line says how many were left out.
        """
        if not self._is_kept:
            return
        limit = self._limits.get(identity)
        if limit is None:
            limit = self._limits[identity] = _Limit(UNKNOWN_LINES_MAX if identity == UNKNOWN else IDENTITY_LINES_MAX)
        if changed or limit.allows(int(time.monotonic())):
            left_out, limit.left_out = limit.left_out, 0
            self._append(event, {"identity": identity, **fields, **({"left_out": left_out} if left_out else {})})

    def close(self) -> None:
        """Append the counts of lines that no later line has reported, and close the file."""
        for identity, limit in self._limits.items():
            if limit.left_out:
                self._append("left out", {"identity": identity, "left_out": limit.left_out})
        if self._file is not None:
            self._file.close()

    def _append(self, event: str, fields: Mapping[str, Any]) -> None:
        shown = {name: value[:TEXT_MAX] if isinstance(value, str) else value for name, value in fields.items()}
        if self._file is None:
            log.info("%s", event, extra=shown)
            return
        record = log.makeRecord(log.name, logging.INFO, __file__, 0, event, (), None, extra=shown)
        try:
            self._file.handle(record)
        except OSError as error:
            log.error("access.audit_file cannot be written: %s", error, extra=shown)


@dataclasses.dataclass(slots=True)
class _Limit:
    """The lines of a caller in this second, and those that were left out since its last line."""

    lines_max: int
    second: int = 0
    lines: int = 0
    left_out: int = 0

    def allows(self, second: int) -> bool:
        if second != self.second:
            self.second, self.lines = second, 0
        self.lines += 1
        if self.lines > self.lines_max:
            self.left_out += 1
            return False
        return True


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
