"""Formats log lines as a lower-case sentence and fields: text for a terminal, JSON for a collector.

Callers use the standard library and pass fields as `extra`:

    log.warning("store does not answer", extra={"operation": "put", "retry_in_s": 0.4})
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Mapping
from typing import Any, Final, Literal, TextIO

import msgspec

# Lines of gRPC in a minute, at most: strangers may cause them.
GRPC_LINES_MAX: Final = 10
# Exceptions that gRPC logs with a traceback: for a header that is no UTF-8, a message that does not parse, and a
# response that its caller does not wait for
_OF_CALLERS: Final = frozenset({"UnicodeDecodeError", "DecodeError", "ExecuteBatchError"})
_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def configure(*, level: str = "info", form: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Send the log of the whole process to `stream`, or to standard error if it is None, replacing earlier handlers."""
    destination = logging.StreamHandler(stream if stream is not None else sys.stderr)
    destination.setFormatter(JsonForm() if form == "json" else TextForm())
    destination.addFilter(Spoken())
    root = logging.getLogger()
    root.handlers[:] = [destination]
    root.setLevel(level.upper())
    # At debug level boto3 logs every request, retries included: that hides our lines, and may show signed headers.
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


class Spoken(logging.Filter):
    """Leaves out what gRPC logs of single callers, who need no token for it, and bounds the rest of gRPC's lines.

    Such a line may be as long as a call's headers, and contains the token of a header that is no UTF-8.
    """

    def __init__(self) -> None:
        super().__init__()
        self._minute = self._lines = self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name.partition(".")[0] != "grpc":
            return True
        if record.exc_info and record.exc_info[0] is not None and record.exc_info[0].__name__ in _OF_CALLERS:
            return False
        minute = int(record.created // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines > GRPC_LINES_MAX:
            self._left_out += 1
            return False
        if self._left_out:
            record.left_out, self._left_out = self._left_out, 0
        return True


class TextForm(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info  daemon.owner.engine: serving shards=16`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        text = escaped(record.getMessage())
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {text}{fields}"
        return f"{line}\n{escaped(self.formatException(record.exc_info), but=chr(10))}" if record.exc_info else line


class JsonForm(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the fields, and `exception` if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return escaped(msgspec.json.encode(entry, enc_hook=str).decode())


def escaped(text: str, *, but: str = "") -> str:
    """Escape what does not print, except `but`, as JSON does: control characters and marks that turn the writing.

    Names come from anyone, and a line is shown on terminals. JSON stays JSON.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in but else json.dumps(each)[1:-1] for each in text)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD}


def _time(record: logging.LogRecord) -> str:
    moment = datetime.datetime.fromtimestamp(record.created, tz=datetime.UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _quoted(value: Any) -> str:
    text = str(value)
    return (
        text
        if text.isprintable() and text and not any(c in text for c in ' "=')
        else escaped(msgspec.json.encode(text).decode())
    )
