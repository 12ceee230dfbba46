"""Formats log lines as a lower-case sentence and fields: text for a terminal, JSON for a collector.

Callers use the standard library and pass fields as `extra`:

    log.warning("store does not answer", extra={"operation": "put", "retry_in_s": 0.4})
"""

from __future__ import annotations

import datetime
import logging
import sys
from collections.abc import Mapping
from typing import Any, Literal, TextIO

import msgspec

_STANDARD = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime", "taskName"}


def configure(*, level: str = "info", form: Literal["text", "json"] = "text", stream: TextIO | None = None) -> None:
    """Send the log of the whole process to `stream`, or to standard error if it is None, replacing earlier handlers."""
    destination = logging.StreamHandler(stream if stream is not None else sys.stderr)
    destination.setFormatter(JsonForm() if form == "json" else TextForm())
    root = logging.getLogger()
    root.handlers[:] = [destination]
    root.setLevel(level.upper())
    # At debug level boto3 logs every request, retries included: that hides our lines, and may show signed headers.
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        logging.getLogger(name).setLevel(logging.WARNING)


class TextForm(logging.Formatter):
    """`2026-01-31T12:00:00.123Z info  daemon.owner.engine: serving shards=16`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = "".join(f" {name}={_quoted(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():7} {record.name}: {record.getMessage()}{fields}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
        return msgspec.json.encode(entry, enc_hook=str).decode()


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
        else msgspec.json.encode(text).decode()
    )
