"""Interprets NATS's answers to a publish.

Contents: the failures of a request, `read_answer` for the data of an answer, the table `KNOWN`, and `produced`, which
turns a failure into the port's result. The codes of JetStream are those of the server's `errors.json`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from tarry_relay import port
from tarry_relay.port import Cause, Meaning, Meant

BAD_SUBJECT: Final = "bad subject"
DENIED: Final = "permissions violation"
LOST: Final = "connection lost"
MAX_PAYLOAD: Final = "max_payload"
NO_RESPONDERS: Final = "no responders"
NO_STREAM: Final = "no stream"
NOT_CONNECTED: Final = "not connected"
NOT_SENT: Final = "not sent"
NOT_JETSTREAM: Final = "no answer of the stream"
TIMEOUT: Final = "timeout"

_STORE_FAILED = 10_077
"""JetStream's code for any error of its store, which is in the description"""
_LIMIT = Meant(Meaning.NOT_NOW, Cause.LIMIT)
_NOT_NOW = Meant(Meaning.NOT_NOW)
_REFUSED = Meant(Meaning.REFUSED)
_UNKNOWN = Meant(Meaning.UNKNOWN)

KNOWN: Final = {
    # Too large, or of a kind that the stream never takes
    MAX_PAYLOAD: _REFUSED,
    BAD_SUBJECT: _REFUSED,
    "10054": _REFUSED,  # message size exceeds maximum allowed
    "10097": _REFUSED,  # header size exceeds maximum allowed of 64k
    "10077 message too large": _REFUSED,
    "10169": _REFUSED,  # message counter increment is missing: the stream takes nothing but increments
    # Space, quotas, permissions
    DENIED: _LIMIT,
    "10002": _LIMIT,  # resource limits exceeded for account
    "10023": _LIMIT,  # insufficient resources
    "10120": _LIMIT,  # no JetStream default or applicable tiered limit present
    "10167": _LIMIT,  # too many requests
    "10077 maximum bytes exceeded": _LIMIT,
    "10077 maximum messages exceeded": _LIMIT,
    "10077 maximum messages per subject exceeded": _LIMIT,
    "10077 no space left on device": _LIMIT,  # newer servers do not answer then
    # No stream has the subject.
    NO_STREAM: Meant(Meaning.NOT_NOW, Cause.MISSING),
    # A stream without a leader, or a server that starts or stops.
    NO_RESPONDERS: _NOT_NOW,
    NOT_CONNECTED: _NOT_NOW,
    NOT_SENT: _NOT_NOW,  # earlier ones in the same call have failed
    "10077 store is closed": _NOT_NOW,
    "10077 snapshot in progress": _NOT_NOW,
    "10109": _NOT_NOW,  # invalid operation on sealed stream: another stream may get the subject
    # Possibly published
    LOST: _UNKNOWN,
    NOT_JETSTREAM: _UNKNOWN,
    TIMEOUT: _UNKNOWN,
    "10158": _UNKNOWN,  # duplicate message id is in process
}
"""Code -> meaning. Any other code is unknown."""


class Failed(port.Unreachable):
    """A request to NATS without an answer of the stream or service asked. `code` is a key of `KNOWN`."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class ApiError(Exception):
    """An error answer of JetStream."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} (JetStream's error {err_code})")
        self.code = code
        self.err_code = err_code
        self.description = description


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """An answer to a publish in JetStream's form: that of a stream, which took the message if `error` is None."""

    stream: str
    error: ApiError | None = None


def read_answer(data: bytes) -> Answer | None:
    """Parse an answer to a publish. Returns None if it has another form: any service may answer on a subject."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict) or not isinstance(stream := told.get("stream"), str) or not stream:
        return None
    if "error" in told:
        error = api_error(told["error"])
        return None if error is None else Answer(stream, error)
    sequence = told.get("seq")
    return Answer(stream) if type(sequence) is int and sequence > 0 else None


def api_error(told: object) -> ApiError | None:
    """Parse the `error` of an answer of JetStream. Returns None if it has another form."""
    if not isinstance(told, dict):
        return None
    code, err_code, description = told.get("code"), told.get("err_code", 0), told.get("description", "")
    if isinstance(code, int) and isinstance(err_code, int) and isinstance(description, str):
        return ApiError(code, err_code, description)
    return None


def code_of(error: BaseException) -> str:
    """Return the key of an error in `KNOWN`, or a name for it that does not depend on the message."""
    if isinstance(error, Failed):
        return error.code
    if not isinstance(error, ApiError):
        return type(error).__name__
    if error.err_code == _STORE_FAILED:
        # The operating system's errors begin with a path.
        said = f"{_STORE_FAILED} {error.description.rpartition(': ')[2]}"
        return said if said in KNOWN else str(_STORE_FAILED)
    return str(error.err_code or error.code)


def produced(target: str, error: BaseException, *, meant: Meant | None = None) -> port.Produced:
    """Return what a failure means for the message that was published to `target`; `meant` overrides the table."""
    code = code_of(error)
    text = f"{target}: {str(error) or type(error).__name__}"
    return port.Produced(meant or KNOWN.get(code, _UNKNOWN), code, text)


def produced_nothing(target: str, error: BaseException) -> port.Produced:
    """Return what a failure means for a message that was not sent: it is refused for now, whatever failed."""
    meant = KNOWN.get(code_of(error), _NOT_NOW)
    return produced(target, error, meant=meant if meant.meaning is Meaning.NOT_NOW else _NOT_NOW)
